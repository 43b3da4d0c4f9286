"""The run directory: config, log, and the files of the loggers."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml
from filelock import FileLock, Timeout

from corral.core.interrupts import interrupts_deferred, name_of_interrupt
from corral.core.metrics.result import describe_return, evaluated_return
from corral.core.metrics.result_html import Result
from corral.core.paths import resolve_path
from corral.core.run_files import PROGRESS_FILE, RESULTS_FILE, SEARCH_FILE, SEEDS_FILE
from corral.core.settings import path_of
from corral.core.text import LineFormatter, printable
from corral.errors import ConfigError, RunDirectoryError
from corral.runs.loggers.base import Logger
from corral.runs.loggers.files import CSVLogger, JSONLinesLogger, replaced
from corral.runs.loggers.images import ImageLogger
from corral.runs.loggers.tensorboard import TensorBoardLogger

if TYPE_CHECKING:
    from corral.runners.config import RunnerConfig

log = logging.getLogger("corral")
yaml.SafeDumper.add_representer(Result, yaml.SafeDumper.represent_dict)  # as other dicts
CONFIG_FILE, LOCK_FILE = "config.yaml", ".lock"
_FILE_LOGGERS = (CSVLogger, JSONLinesLogger, ImageLogger, TensorBoardLogger)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, or the size of one file
# After a service failed, it is left alone for this many times the duration of the failure, so that waiting for it takes
# at most 2% of the time.
REST_FACTOR = 50.0
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


_writes_to: dict[int, tuple[weakref.ref[Logger], Path]] = {}
"""Each open logger and the directory of its run, by the id of the logger, which another one has after its end."""


class Run:
    """A directory with the resolved config, the log, and the files of the loggers.

    It is a context manager: however the block ends, also by an interrupt, the log says how, and all files are closed.

    Attributes:
        path: The directory, available from the start of the block.
    """

    path: Path

    def __init__(
        self,
        config: RunnerConfig,
        run_dir: str | Path | None,
        loggers: Sequence[Logger],
        *,
        stop: Mapping[str, Any] | None = None,
        restore: Callable[[Path], tuple[int, int]] | None = None,
    ) -> None:
        """Store where to write.

        Args:
            config: The resolved config.
            run_dir: The directory; `None` is `runs/<algo>-<env>-<time>` in the working directory.
            loggers: Loggers, which are opened and closed with the run.
            stop: Stop criteria, in types that YAML has; config.yaml holds them too.
            restore: For a run that continues: called with the directory after it was locked and before its files are
                changed; restores the algorithm, and returns the iteration and the number of env steps from which the
                run continues.
        """
        self._settings = plain(config.to_dict()) | ({} if stop is None else {"stop": dict(stop)})
        self._config, self._run_dir, self._loggers, self._restore = config, run_dir, loggers, restore
        self._exit = contextlib.ExitStack()
        self._opened: list[Logger] = []
        self._failing: set[object] = set()
        self._logged: dict[int, int] = {}  # last iteration that a logger was given, by the logger's place
        self._rests_until_s: dict[int, float] = {}  # clock reading until which a service is left alone, by its place
        self._in_log = 0  # last iteration in run.log

    def __enter__(self) -> Self:
        """Create the directory or continue its run, write config.yaml, and open the log and the loggers.

        Raises:
            FileExistsError: A new run was asked for, and the directory already holds one; it is left unchanged.
            RunDirectoryError: The directory cannot be written, holds no run to continue, or another process writes it.
            ConfigError: A logger belongs to another run that has not ended.
        """
        if self._restore is None:
            check_run_dir(self._run_dir)
            self.path = (
                _new_run_dir(self._config)
                if self._run_dir is None
                else resolve_path(self._run_dir, "the run directory")
            )
        else:
            self.path = resolve_path(str(self._run_dir), "the run directory")
            check_run_to_resume(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._exit.enter_context(locked(self.path))
            start = None if self._restore is None else self._restore(self.path)
            self._write_config()
            self._open_log()
        except OSError as error:
            self._exit.close()
            if isinstance(error, RunDirectoryError):
                raise
            raise _not_writable(self.path, error) from error
        except BaseException:
            self._exit.close()
            raise
        try:
            for logger in self._loggers:
                self._open(logger, start)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        where = "" if start is None else f" continues from iteration {start[0]}"
        self._say(logging.INFO, "Run in %s%s, seed %s.", self.path, where, self._config.seed)
        return self

    def _open(self, logger: Logger, start: tuple[int, int] | None) -> None:
        known, path = _writes_to.get(id(logger), (None, None))
        if known is not None and known() is logger:
            raise ConfigError(
                f"{type(logger).__name__} already writes to {path}, and an instance writes one run at a time: "
                "give its name or class instead, so that each run makes its own instance."
            )
        try:
            if start is None:
                logger.open(self.path, self._settings)
            else:
                logger.resume(self.path, self._settings, *start)
        except Exception as error:
            if not _costs_a_warning(logger, error) or not logger.is_service:
                raise
            self._warn_of(logger, error)
        else:
            _writes_to[id(logger)] = weakref.ref(logger), self.path
            self._opened.append(logger)

    def _write_config(self) -> None:
        text, path = yaml.safe_dump(self._settings, sort_keys=False), self.path / CONFIG_FILE
        if self._restore is None and path.exists():  # another process was faster
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if self._restore is None or text != path.read_text(encoding="utf-8"):  # settings were overridden
            with replaced(path) as file:  # a part of it would be a run that can never continue
                file.write(text)

    def _open_log(self) -> None:
        self._log_file = handler = _RunLog(self.path / "run.log", encoding="utf-8")
        handler.setFormatter(LineFormatter(LOG_FORMAT))
        self._exit.callback(_close_quietly, handler)  # the full disk may have no room for the rest
        self._exit.callback(log.setLevel, log.level)
        self._exit.callback(log.removeHandler, handler)
        log.setLevel(self._config.log_level)
        log.addHandler(handler)

    def log_result(self, result: dict[str, Any], *, is_new: bool = False) -> None:
        """Give a result to every logger that was not given it yet; a full disk or a service does not end the run.

        Args:
            result: The result.
            is_new: Whether no logger was given it, though there may be one of this iteration from before a restore.
        """
        if is_new:
            self._logged, self._in_log = {}, 0
        iteration = result["training_iteration"]
        self._check_there()
        for place, logger in enumerate(self._opened):
            start_s = time.monotonic()
            if self._logged.get(place) == iteration or start_s < self._rests_until_s.get(place, start_s):
                continue
            # An interrupt waits until a file is written, but not for the service of a custom logger.
            with interrupts_deferred() if isinstance(logger, _FILE_LOGGERS) else contextlib.nullcontext():
                self._logged[place] = iteration
                try:
                    logger.log_result(result)
                except Exception as error:
                    if not _costs_a_warning(logger, error):
                        raise  # if the directory was removed, the end of the run says so
                    self._warn_of(logger, error)
                    if logger.is_service:
                        now_s = time.monotonic()
                        self._rests_until_s[place] = now_s + REST_FACTOR * (now_s - start_s)
        if self._in_log == iteration:
            return
        self._in_log = iteration
        found = f", {mean}" if (mean := describe_return(result)) else ""
        log.info("Iteration %d: %d env steps%s.", iteration, result["num_env_steps_sampled_lifetime"], found)
        if result.get("evaluation", {}).get("fresh") and (evaluated := evaluated_return(result)):
            log.info("Evaluation with iteration %d: mean return %s, 95%% interval %s.", iteration, *evaluated)

    def _say(self, level: int, text: str, *values: Any) -> None:
        """Log how the run begins or ends: in `run.log` at every `log_level`, since reports read it there."""
        if log.isEnabledFor(level):
            log.log(level, text, *values)
        else:
            self._log_file.handle(log.makeRecord(log.name, level, __file__, 0, text, values, None))

    def _check_there(self) -> None:
        """Refuse to continue if the directory was removed.

        Raises:
            RunDirectoryError: It was.
        """
        if not (self.path / CONFIG_FILE).exists():
            raise RunDirectoryError(
                f"the run directory {self.path} was removed, or its disk is gone, while the run wrote it: its results "
                "so far are lost. `fit` and `corral train` write the last state there again, if there is room: "
                "Algorithm.from_checkpoint continues from it."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Log how the run ended, and close everything."""
        if error is None:
            self._say(logging.INFO, "Run finished.")
        elif interrupted := name_of_interrupt(error):
            self._say(logging.WARNING, "Run %s.", interrupted[0].lower() + interrupted[1:])
        else:
            log.error("Run failed.", exc_info=error)
        with self._exit:
            for logger in self._opened:
                _writes_to.pop(id(logger), None)
                try:
                    logger.close()
                except Exception as error:
                    if _costs_a_warning(logger, error):
                        self._warn_of(logger, error)
                    else:
                        log.exception("A logger could not be closed: %r.", logger)

    def _warn_of(self, logger: Logger, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        where = "" if logger.is_service else f" in {self.path}"
        message = f"{type(logger).__name__} cannot write its results{where}: {reason:.500}. The run continues; "
        self.warn_once(logger, f"{message}results may be missing.")

    def warn_once(self, subject: object, message: str) -> None:
        """Warn in the log, and on standard error where no other handler shows the log, once for each subject."""
        if subject in self._failing:
            return
        self._failing.add(subject)
        log.warning("%s", message)
        if not logging.getLogger().hasHandlers() and sys.stderr is not None:  # run.log may be on the same disk
            with contextlib.suppress(OSError, ValueError):
                print(printable(message), file=sys.stderr)


def _costs_a_warning(logger: Logger, error: Exception) -> bool:
    """Return whether an exception of a logger does not end the run: of a full disk, or of a service."""
    if logger.is_service:
        return not isinstance(error, ConfigError)
    return isinstance(error, OSError) and error.errno in FULL_DISK


def _close_quietly(handler: logging.Handler) -> None:
    with contextlib.suppress(OSError):
        handler.close()


class _RunLog(logging.FileHandler):
    """The file of the log. A full disk costs its lines, and prints no traceback for each of them."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a line that cannot be written."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run directory, which the operating system releases however the process ends.

    Raises:
        RunDirectoryError: Another process, or another run of this process, writes into the directory, or no file can be
            written there.
    """
    lock = FileLock(path / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunDirectoryError(f"{path} belongs to a run that has not ended: wait for its end, or end it.") from None
    except OSError as error:
        raise _not_writable(path, error) from error
    try:
        yield
    finally:
        lock.release()


def check_run_to_resume(path: Path) -> None:
    """Refuse a directory without a run.

    Raises:
        RunDirectoryError: The directory has no config.yaml, or cannot be read.
    """
    try:
        found = (path / CONFIG_FILE).is_file()
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}.") from error
    if not found:
        what = f"it has no {CONFIG_FILE}" if path.exists() else "it does not exist"
        raise RunDirectoryError(f"{path} is not the directory of a run: {what}.")


def check_run_dir(run_dir: str | Path | None) -> None:
    """Refuse a directory in which no run can be written; nothing is left behind there.

    Args:
        run_dir: The directory, which need not exist; `None` is `runs` in the working directory.

    Raises:
        FileExistsError: The directory already holds a run, the runs of several seeds, or a search.
        RunDirectoryError: The directory cannot be made, or no file can be written there.
    """
    path = Path("runs") if run_dir is None else resolve_path(run_dir, "the run directory")
    try:
        holds_set, holds_search = (path / SEEDS_FILE).is_file(), (path / SEARCH_FILE).is_file()
        holds_run = any((path / name).is_file() for name in (CONFIG_FILE, RESULTS_FILE, PROGRESS_FILE))
        there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    except OSError as error:
        raise _not_writable(path, error) from error
    if holds_set:
        raise FileExistsError(
            f"{path} already holds runs with --seeds: continue them with --resume {path}, or choose another directory."
        )
    if holds_search:
        raise FileExistsError(
            f"{path} already holds a search: continue it with corral search --resume {path}, or choose another "
            "directory."
        )
    if holds_run:
        raise FileExistsError(f"{path} already holds a run or its results: choose another directory, or move it away.")
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(f"the run directory {path} cannot be written: {error.strerror}; choose another directory.")


def _new_run_dir(config: RunnerConfig) -> Path:
    """Create `runs/<algo>-<env>-<time>`, with a number at the end if another run has that name, and return its path."""
    base = run_name(config)
    for number in itertools.count(1):
        path = Path("runs") / (base if number == 1 else f"{base}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("the count does not end")


def run_name(config: RunnerConfig) -> str:
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
    from corral.core.space_descriptions import describe_space, is_described  # here: it imports gymnasium
    from corral.modules.transforms.settings import describe_transform
    from corral.modules.transforms.transform import Transform

    if isinstance(value, Transform):
        return describe_transform(value)
    if is_described(value):
        return describe_space(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)
