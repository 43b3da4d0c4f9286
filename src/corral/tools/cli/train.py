"""`corral train`: a run with a live display."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.stopping import Criterion
from corral.core.interrupts import interruptible
from corral.core.text import printable
from corral.envs.vector import resolve_env
from corral.errors import ConfigError, CorralError
from corral.runs.checkpoint.finding import find_checkpoint
from corral.runs.loggers import Logger
from corral.runs.loggers.named import make_loggers
from corral.runs.loggers.run import CONFIG_FILE, check_run_dir
from corral.tools.cli.exit_status import interrupted_status, print_error, status_of
from corral.tools.cli.experiment import load_experiment
from corral.tools.cli.pool import end_with_input
from corral.tools.cli.seed_set import is_set

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm


@interruptible
def run(
    options: argparse.Namespace,
    *,
    prepare: Callable[[AlgorithmConfig], None] | None = None,
    built: Callable[[Algorithm], None] | None = None,
) -> int:
    """Run `corral train`: one run, or with `--seeds` one for each seed; return the exit status.

    Args:
        options: The options of the command line.
        prepare: Function that changes the config before anything is made of it.
        built: Function that is called with the algorithm before it trains.
    """
    continued = _choose_directory(options)
    if options.seeds is not None or (options.resume is not None and is_set(options.resume)):
        from corral.tools.cli.seeds import train_seeds

        return train_seeds(options)
    if options.end_with_input:
        end_with_input()
    if options.parallel is not None:
        raise ConfigError("--parallel needs --seeds. To use more cores for one run, set env_runners.num_env_runners.")
    config, stop = load_experiment(options)
    if continued is not None and config.seed is None:  # else another one is drawn, and written to config.yaml
        from corral.algorithms.fitting import read_config

        config.seed = (read_config(continued).get("debugging") or {}).get("seed")
    if prepare is not None:
        prepare(config)
    config.validate()  # a mistake is reported before anything is written
    loggers = None if config.loggers is None else make_loggers(config.loggers)  # before the env and workers are made
    resume = continued or options.resume
    where: dict[str, Any] = {"run_dir": options.run_dir, "resume": resume, "loggers": loggers, "quiet": options.quiet}
    return train(config, stop, **where, built=built)


def _choose_directory(options: argparse.Namespace) -> Path | None:
    """Turn `--resume-or-start` into `--run-dir` or `--resume`, or return the run that the options continue.

    A command that names an algorithm says all settings again, and has the same ones when its run continues.

    Raises:
        ConfigError: Another option names a directory too.
    """
    home: Path | None = options.resume_or_start
    if home is None:
        return None
    for name in ("run_dir", "resume"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be used with --resume-or-start, which names a directory."
            )
    is_named = any(getattr(options, name) is not None for name in ("config", "tuned", "algo"))
    if is_set(home):
        options.resume, options.config, options.tuned, options.algo = home, None, None, None
    elif not (home / CONFIG_FILE).is_file():
        options.run_dir = home
    elif is_named:
        return home
    else:
        options.resume = home
    return None


@interruptible
def train(
    config: AlgorithmConfig,
    stop: Mapping[str, Criterion],
    *,
    run_dir: Path | None = None,
    resume: Path | None = None,
    loggers: Sequence[Logger] | None = None,
    quiet: bool = False,
    built: Callable[[Algorithm], None] | None = None,
) -> int:
    """Train until a criterion, an error or a signal; print how the run ended, and return the exit status.

    Args:
        config: The config of the algorithm.
        stop: The criteria; see `Algorithm.fit`, which takes `run_dir`, `resume` and `loggers` too.
        run_dir: Run directory.
        resume: Directory of a run to continue.
        loggers: Loggers for the results.
        quiet: Whether to show only the last line.
        built: Function that is called with the algorithm before it trains.

    Returns:
        The exit status; see `EXIT_STATUSES`.

    Raises:
        FileExistsError: The run directory holds a run already.
        RunDirectoryError: The run directory cannot be written, or another process runs the run to continue.
    """
    if resume is None:
        check_run_dir(run_dir)  # before the env and the workers are made
    algorithm = None
    try:
        with config.build() as algorithm:
            if built is not None:
                built(algorithm)
            algorithm.fit(
                stop=stop, run_dir=run_dir, resume=resume, loggers=loggers, progress="last" if quiet else "auto"
            )
    except CorralError as error:
        if algorithm is None:  # there is no run.log to hold the traceback
            _print_origin(error)
        print_error(error)
        status = status_of(error)
    except KeyboardInterrupt as error:
        status = interrupted_status(error)
    else:
        status = 0
    if algorithm is not None and algorithm.run_dir is not None and not quiet:
        _say_what_next(algorithm, "train" if built is None else "serve", finished=status == 0)
    return status


def _print_origin(error: CorralError) -> None:
    """Print where an error came from: the traceback of its cause, or for a worker's error the traceback there."""
    if (notes := getattr(error, "__notes__", ())) and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(printable("\n".join(notes), newline="\n"), file=sys.stderr)
    elif error.__cause__ is not None:
        traceback.print_exception(error.__cause__)


def _say_what_next(algorithm: Algorithm, command: str, *, finished: bool) -> None:
    from corral.algorithms.fitting import check_resumable  # here, since it takes time to import

    assert algorithm.run_dir is not None
    run_dir = shlex.quote(str(algorithm.run_dir))
    env = algorithm.config.env
    if env is not None and getattr(resolve_env(env), "IS_EXTERNAL", False):
        env = algorithm.config.evaluation_config.get("env")  # in which the commands play
    played = f"{run_dir} --env ENV" if env is None else run_dir
    advice = [f"Watch the policy:   corral play {played}", f"Measure the policy: corral evaluate {played}"]
    try:
        if finished:
            find_checkpoint(algorithm.run_dir)
        else:
            check_resumable(algorithm.run_dir)
            advice = [f"Continue the run:   corral {command} --resume {run_dir}"]
    except CorralError:
        return  # there is no checkpoint for these commands
    with contextlib.suppress(OSError, ValueError):  # standard output may be closed
        print("\n".join(advice), flush=True)
