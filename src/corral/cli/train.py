"""`corral train`: a run with a live display."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from corral.algorithms.config import AlgorithmConfig
from corral.cli.display import Display
from corral.cli.main import EXIT_ERROR, EXIT_INTERRUPTED
from corral.errors import CorralError
from corral.loggers.run import default_run_dir


def train(
    config: AlgorithmConfig, stop: Mapping[str, float], *, run_dir: Path | None = None, quiet: bool = False
) -> int:
    """Train until a criterion is met, an error, or an interrupt; say how it ended and where the run lies.

    Returns:
        The exit status: 0, 1 after an error, 130 after an interrupt.
    """
    path = run_dir or default_run_dir(config)
    display = Display(config, stop, path, quiet=quiet)
    try:
        with config.build() as algorithm, display:
            algorithm.fit(stop=stop, run_dir=path, on_result=display.update)
    except KeyboardInterrupt:
        display.say(f"Interrupted after {display.summary()}. The run is kept in {path}", (path / "run.log").exists())
        return EXIT_INTERRUPTED
    except CorralError as error:
        print(f"corral: {error}", file=sys.stderr)
        display.say(f"Failed after {display.summary()}. The run is kept in {path}", (path / "run.log").exists())
        return EXIT_ERROR
    display.say(f"Done after {display.summary()}. The run lies in {path}")
    return 0
