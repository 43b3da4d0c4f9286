"""`corral train --seeds`: one run for each seed, and their returns next to each other."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.stopping import Criterion, StopCriteria
from corral.core.run_files import EXPERIMENT_FILE, SET_ASIDE
from corral.envs.vector import env_name
from corral.errors import CheckpointError, ConfigError, RunDirectoryError
from corral.runs.checkpoint import find_checkpoint
from corral.runs.checkpoint.finding import CHECKPOINTS
from corral.runs.loggers.files import replaced
from corral.runs.loggers.run import CONFIG_FILE, check_run_dir, locked, plain, run_name
from corral.tools.cli.exit_status import EXIT_ERROR
from corral.tools.cli.experiment import load_experiment, overriding_arguments
from corral.tools.cli.pool import SeedRun, num_cores, run_all
from corral.tools.cli.seed_display import SeedDisplay
from corral.tools.cli.seed_set import SeedSet, parse_seeds, read_set


def train_seeds(options: argparse.Namespace) -> int:
    """Train with each seed that has not finished, each in a process of its own; print and write the returns.

    Returns:
        The exit status: 0 if all runs finished; the status of the runs that failed if it is the same for all of them,
        else 1; 128 plus the number of the signal that ended the runs.

    Raises:
        ConfigError: An option is wrong, or does not go with another one.
        FileExistsError: The directory holds runs already.
        RunDirectoryError: The directory cannot be written, holds no runs to continue, or another process runs them.
    """
    parallel, more = _parallel(options), [] if options.seeds is None else parse_seeds(options.seeds)
    if options.resume is None:
        config, stop = load_experiment(options)
        config.validate()
        found = SeedSet(_new_home(options, config), more)
    else:
        found = read_set(options.resume)
        found.seeds += [seed for seed in more if seed not in found.seeds]
        config, stop = load_experiment(_options_of_set(options))
        config.validate()
    with locked_home(found.home):
        _write_experiment(found, config, stop)
        changes = overriding_arguments(options) if options.resume is not None else []
        todo = [seed for seed in found.seeds if changes or found.statuses.get(seed) != 0]
        runs = [SeedRun(seed, found.run_dir(seed), _arguments(found, seed)) for seed in todo]
        for seed in todo:
            found.statuses.pop(seed, None)
        found.write()
        title = f"{config.algo_name} on {env_name(config.env)}, {len(found.seeds)} seeds"
        with SeedDisplay(found, runs, title, quiet=options.quiet) as display:
            interrupted = run_all(runs, parallel, display.update, display.say_ending)
    return status_of_set(found) if interrupted is None else interrupted


def status_of_set(found: SeedSet) -> int:
    """Return 0 if no run failed, the status of the runs that failed if it is the same for all of them, else 1."""
    failed = {status for status in found.statuses.values() if status != 0}
    return 0 if not failed else failed.pop() if len(failed) == 1 else EXIT_ERROR


def _parallel(options: argparse.Namespace) -> int:
    """Return how many runs to have at a time.

    Raises:
        ConfigError: The number is not positive, or a seed is given twice.
    """
    if options.seed is not None:
        raise ConfigError("--seed cannot be used with --seeds, or with --resume of runs with --seeds.")
    if options.parallel is None:
        return 1
    if options.parallel < 0:
        raise ConfigError(f"--parallel {options.parallel}: it must be a number of runs, or 0 for one on each core.")
    return options.parallel or num_cores()


def _options_of_set(options: argparse.Namespace) -> argparse.Namespace:
    """Return options with which the experiment of a set is read, with what overrides it.

    Raises:
        ConfigError: An option does not go with `--resume`.
    """
    for name in ("config", "tuned", "algo", "run_dir"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be used with --resume, which keeps this setting of the runs."
            )
    return argparse.Namespace(**{**vars(options), "config": options.resume / EXPERIMENT_FILE, "resume": None})


def _new_home(options: argparse.Namespace, config: AlgorithmConfig) -> Path:
    """Return the directory of a new set.

    Raises:
        FileExistsError: It holds runs already.
        RunDirectoryError: It cannot be written.
    """
    home = Path("runs") / f"{run_name(config)}-seeds" if options.run_dir is None else Path(options.run_dir)
    check_run_dir(home)
    return home


@contextlib.contextmanager
def locked_home(home: Path) -> Iterator[None]:
    """Hold the lock of the directory of a set, which is made if necessary.

    Raises:
        RunDirectoryError: The directory cannot be made, or another process holds its lock.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{home} cannot be written: {error.strerror}; choose another directory.") from error
    with locked(home):
        yield


def _write_experiment(found: SeedSet, config: AlgorithmConfig, stop: Mapping[str, Criterion]) -> None:
    """Write the settings of the runs and their stop criteria, as a file for `--config`.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    config.seed = None
    settings = plain(config.to_dict()) | {"stop": StopCriteria(stop).plain()}
    path = found.home / EXPERIMENT_FILE
    try:
        with replaced(path) as file:  # a part of it would be a set that can never continue
            yaml.safe_dump(settings, file, sort_keys=False)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror}; choose another directory.") from error


def _arguments(found: SeedSet, seed: int) -> list[str]:
    """Return the arguments with which the run of a seed begins, or continues where it has a checkpoint.

    Both take the settings of the set: what an earlier `--resume` changed may not have reached this run yet.
    """
    run_dir = found.run_dir(seed)
    experiment = ["--config", str(found.home / EXPERIMENT_FILE), "--seed", str(seed)]
    if (run_dir / CONFIG_FILE).exists():
        with contextlib.suppress(CheckpointError):
            find_checkpoint(run_dir / CHECKPOINTS)
            return [*experiment, "--resume-or-start", str(run_dir)]
        _set_aside(run_dir)
    return [*experiment, "--run-dir", str(run_dir)]


def _set_aside(run_dir: Path) -> None:
    """Move the directory of a run without a checkpoint, which cannot continue: the run begins again."""
    folder = run_dir.parent / SET_ASIDE
    folder.mkdir(exist_ok=True)
    with locked(run_dir):
        number = next(number for number in itertools.count(1) if not (folder / f"{run_dir.name}-{number}").exists())
        os.rename(run_dir, folder / f"{run_dir.name}-{number}")
