"""`corral train`: a run with a live display."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from corral.cli import EXIT_ERROR, EXIT_INTERRUPTED, print_error
from corral.cli.display import Display
from corral.config.config import AlgorithmConfig
from corral.errors import CorralError
from corral.loggers import Logger
from corral.loggers.run import check_run_dir


def train(
    config: AlgorithmConfig,
    stop: Mapping[str, float],
    *,
    run_dir: Path | None = None,
    loggers: Sequence[Logger] | None = None,
    quiet: bool = False,
) -> int:
    """Train until a criterion is met, an error, or an interrupt; print how it ended and where the run is stored.

    Args:
        config: The config of the algorithm.
        stop: The criteria; see `Algorithm.fit`, which takes `run_dir` and `loggers` too.
        run_dir: Run directory.
        loggers: Loggers for the results.
        quiet: Whether to show only the last line.

    Returns:
        The exit status: 0, 1 after an error, 130 after an interrupt.

    Raises:
        FileExistsError: The run directory holds a run already.
        RunDirectoryError: The run directory cannot be written.
    """
    check_run_dir(run_dir)  # before the env and the workers are made
    display = Display(config, stop, quiet=quiet)
    try:
        with config.build() as algorithm, display:
            algorithm.fit(stop=stop, run_dir=run_dir, loggers=loggers, on_start=display.start, on_result=display.update)
    except KeyboardInterrupt:
        display.end("Interrupted")
        return EXIT_INTERRUPTED
    except CorralError as error:
        if display.path is None and error.__cause__ is not None:  # there is no run.log to hold the traceback
            traceback.print_exception(error.__cause__)
        print_error(error)
        display.end("Failed")
        return EXIT_ERROR
    display.end("Done")
    return 0
