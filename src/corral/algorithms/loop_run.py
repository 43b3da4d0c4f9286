"""The run directory of a loop of your own around `train()`, for a config that names loggers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from corral.core.metrics.result_html import Result
from corral.runs.loggers import Run
from corral.runs.loggers.named import make_loggers

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm


class LoopRun:
    """Writes the results of `train()` with the loggers of the config, from its first call until `close`.

    `fit` has a run of its own.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        """Store the algorithm; nothing is opened."""
        self._algorithm = algorithm
        self._run: Run | None = None
        self._first_iteration = 0
        self._paused = False

    def open(self) -> None:
        """Open a run directory and the loggers, unless they are open.

        Raises:
            RunDirectoryError: The directory cannot be written.
            ConfigError: A logger needs an extra that is missing.
        """
        config = self._algorithm.config
        if self._run is not None or self._paused:
            return
        assert config.loggers is not None
        self._run = Run(config, None, make_loggers(config.loggers, "reporting: loggers")).__enter__()
        self._algorithm.run_dir, self._first_iteration = self._run.path, self._algorithm.training_iteration

    def log_result(self, result: dict[str, Any]) -> None:
        """Give a result to the loggers."""
        if self._run is not None:
            self._run.log_result(result, is_new=True)

    def close(self, error: BaseException | None = None) -> None:
        """Close the loggers, after the result of an iteration that an exception of a callback ended."""
        run, self._run = self._run, None
        if run is not None:
            with run_ended(run, error):
                log_last_result(self._algorithm, run, self._first_iteration)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Write nothing within the block, in which `fit` writes; a run that is open is closed."""
        self.close()
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


@contextlib.contextmanager
def run_ended(run: Run, error: BaseException | None) -> Iterator[None]:
    """End a run after the block, with the exception that ended it."""
    try:
        yield
    finally:
        run.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def log_last_result(algorithm: Algorithm, run: Run, first_iteration: int) -> None:
    """Log the result of the last iteration where an interrupt or a callback kept the loggers from it."""
    latest = algorithm.report.latest
    if algorithm.training_iteration > first_iteration and isinstance(latest, Result):  # else from a state
        run.log_result(latest)
