"""The run directory: config, log, and the files of the loggers."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml

from corral.core.settings import path_of
from corral.errors import RunDirectoryError
from corral.loggers.base import Logger

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig

log = logging.getLogger("corral")
CONFIG_FILE = "config.yaml"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, or the size of one file
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Run:
    """A directory with the resolved config, the log, and the files of the loggers.

    It is a context manager: however the block ends, also by an interrupt, the log says how, and all files are closed.

    Attributes:
        path: The directory, available from the start of the block.
    """

    path: Path

    def __init__(self, config: AlgorithmConfig, run_dir: str | Path | None, loggers: Sequence[Logger]) -> None:
        """Store where to write.

        Args:
            config: The resolved config.
            run_dir: The directory; `None` is `runs/<algo>-<env>-<time>` in the working directory.
            loggers: Loggers, which are opened and closed with the run.
        """
        self._config = config
        self._loggers = loggers
        self._opened: list[Logger] = []
        self._failing: list[Logger] = []
        self._run_dir = run_dir

    def __enter__(self) -> Self:
        """Create the directory, write config.yaml, and open the log and the loggers.

        Raises:
            FileExistsError: The directory already holds a run; it is left unchanged.
            RunDirectoryError: The directory cannot be written.
        """
        check_run_dir(self._run_dir)
        self.path = _new_run_dir(self._config) if self._run_dir is None else Path(self._run_dir)
        text = yaml.safe_dump(plain(self._config.to_dict()), sort_keys=False)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / CONFIG_FILE).open("x", encoding="utf-8") as file:
                file.write(text)
            self._handler = _RunLog(self.path / "run.log", encoding="utf-8")
        except OSError as error:
            raise _not_writable(self.path, error) from error
        self._handler.setFormatter(logging.Formatter(LOG_FORMAT))
        self._level_before = log.level
        log.setLevel(self._config.log_level)
        log.addHandler(self._handler)
        try:
            for logger in self._loggers:
                logger.open(self.path)
                self._opened.append(logger)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        log.info("Run in %s, seed %s.", self.path, self._config.seed)
        return self

    def log_result(self, result: dict[str, Any]) -> None:
        """Give a result to every logger; a full disk does not end the run."""
        for logger in self._loggers:
            try:
                logger.log_result(result)
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                self._warn(logger, error)
        episodes = result["env_runners"]
        log.info(
            "Iteration %d: %d env steps, mean return %.2f.",
            result["training_iteration"],
            result["num_env_steps_sampled_lifetime"],
            episodes["episode_return_mean"],
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Log how the run ended, and close everything."""
        if error is None:
            log.info("Run finished.")
        elif isinstance(error, KeyboardInterrupt):
            log.warning("Run interrupted.")
        else:
            log.error("Run failed.", exc_info=error)
        for logger in self._opened:
            try:
                logger.close()
            except Exception as error:
                if isinstance(error, OSError) and error.errno in FULL_DISK:
                    self._warn(logger, error)
                else:
                    log.exception("A logger could not be closed: %r.", logger)
        log.removeHandler(self._handler)
        log.setLevel(self._level_before)
        with contextlib.suppress(OSError):  # what the full disk has no room for
            self._handler.close()

    def _warn(self, logger: Logger, error: OSError) -> None:
        """Warn that a logger cannot write, once for each logger."""
        if logger not in self._failing:
            self._failing.append(logger)
            message = (
                f"{type(logger).__name__} cannot write its results in {self.path}: {error.strerror or error}. The run "
                "continues; results may be missing."
            )
            log.warning("%s", message)
            if not logging.getLogger().hasHandlers() and sys.stderr is not None:  # run.log may be on the same disk
                with contextlib.suppress(OSError, ValueError):
                    print(message, file=sys.stderr)


class _RunLog(logging.FileHandler):
    """The file of the log. A full disk costs its lines, and prints no traceback for each of them."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a line that cannot be written."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def check_run_dir(run_dir: str | Path | None) -> None:
    """Refuse a directory in which no run can be written; nothing is left behind there.

    Args:
        run_dir: The directory, which need not exist; `None` is `runs` in the working directory.

    Raises:
        FileExistsError: The directory already holds a run.
        RunDirectoryError: The directory cannot be made, or no file can be written there.
    """
    path = Path("runs" if run_dir is None else run_dir)
    if (path / CONFIG_FILE).exists():
        raise FileExistsError(f"{path} already holds a run: choose another directory, or move it away.")
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(f"the run directory {path} cannot be written: {error.strerror}; choose another directory.")


def _new_run_dir(config: AlgorithmConfig) -> Path:
    """Create `runs/<algo>-<env>-<time>`, with a number at the end if another run has that name, and return its path."""
    base = run_name(config)
    for number in itertools.count(1):
        path = Path("runs") / (base if number == 1 else f"{base}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("the count does not end")


def run_name(config: AlgorithmConfig) -> str:
    """Return `<algo>-<env>-<time>` as a valid file name."""
    from corral.envs.vector import env_name  # here, so that importing a logger imports neither torch nor gymnasium

    safe_env = "".join(char if char.isalnum() or char in "-_." else "-" for char in env_name(config.env))
    return f"{config.algo_name}-{safe_env}-{time.strftime('%Y%m%d-%H%M%S')}"


def plain(value: Any) -> Any:
    """Return the values of a config in types that YAML has: classes and functions become their import paths."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "__qualname__"):
        return path_of(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)
