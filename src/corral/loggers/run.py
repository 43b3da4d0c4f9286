"""The run directory: config, log, and the files of the loggers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml

from corral.core.settings import path_of
from corral.loggers.base import Logger

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig

log = logging.getLogger("corral")
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
        self._run_dir = run_dir

    def __enter__(self) -> Self:
        """Create the directory, write config.yaml, and open the log and the loggers.

        Raises:
            FileExistsError: The directory already holds a run; it is left unchanged.
        """
        self.path = _new_run_dir(self._config) if self._run_dir is None else Path(self._run_dir)
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(plain(self._config.to_dict()), sort_keys=False)
        try:
            with (self.path / "config.yaml").open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            message = f"{self.path} already holds a run: choose another directory, or move it away."
            raise FileExistsError(message) from None
        self._handler = logging.FileHandler(self.path / "run.log", encoding="utf-8")
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
        """Give a result to every logger."""
        for logger in self._loggers:
            logger.log_result(result)
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
            except Exception:
                log.exception("A logger could not be closed: %r.", logger)
        log.removeHandler(self._handler)
        log.setLevel(self._level_before)
        self._handler.close()


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
