"""`corral search`: trials of a search, the best settings as a file, and what mattered."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from corral.algorithms.resources import resources_of_workers
from corral.core.run_files import EXPERIMENT_FILE, SEARCH_FILE
from corral.errors import ConfigError, RunDirectoryError
from corral.runs.loggers.run import check_run_dir, run_name
from corral.tools.cli.exit_status import EXIT_ERROR, print_error
from corral.tools.cli.experiment import experiment_of, read_experiment
from corral.tools.cli.pool import num_cores
from corral.tools.cli.search_loop import SearchLoop
from corral.tools.cli.seeds import locked_home
from corral.tools.search.files import BEST_FILE, TrialSummary, best_of, read_trials, write_experiment, write_state
from corral.tools.search.settings import Search, make_search
from corral.tools.search.study import importances, open_study, requeue_running, require_optuna

NOT_NAMED = {"algo": None, "seed": None, "checkpoint_every": None, "data": None, "record": None, "tensorboard": False}
NUM_SHOWN = 5


def run(options: argparse.Namespace) -> int:
    """Run `corral search`, and return the exit status: 1 if no trial was completed.

    Raises:
        ConfigError: An option, a setting or the space is wrong, or does not go with another one.
        FileExistsError: The directory holds a run already.
        RunDirectoryError: The directory cannot be written, holds no search to continue, or another process runs it.
        MissingPackageError: Optuna is not installed.
    """
    require_optuna()
    home = _home_to_continue(options)
    search = _load(options, options.config if home is None else home / EXPERIMENT_FILE)
    parallel = _parallel(options, search)
    if home is None:
        name = f"{run_name(search.config)}-search"
        home = Path("runs") / name if options.run_dir is None else Path(options.run_dir)
        check_run_dir(home)
    with locked_home(home), open_study(home, search) as study:
        write_experiment(home, search)
        num_again = requeue_running(study)
        write_state(home, study, search)
        display = _Display(search, home, quiet=options.quiet)
        display.begin(parallel, num_again)
        loop = SearchLoop(search, study, home, parallel, display.trial_ended)
        interrupted = loop.run(display.ending)
        if loop.has_failed:
            print_error("all of the first trials failed: the search ends. Remove the reason, and continue it.")
        if interrupted is not None:
            requeue_running(study)
            write_state(home, study, search)
        trials = read_trials(study, search)
        display.end(trials, importances(study))
    if interrupted is not None:
        return interrupted
    return 0 if best_of(trials, search) is not None else EXIT_ERROR


def _home_to_continue(options: argparse.Namespace) -> Path | None:
    """Return the directory of the search to continue, or `None` for a new one.

    Raises:
        ConfigError: Neither a file nor a directory is named, or an option does not go with `--resume`.
        RunDirectoryError: The directory holds no search.
    """
    if options.resume is None:
        if options.config is None:
            raise ConfigError("give --config FILE to begin a search, or --resume DIR to continue one.")
        return None
    given = {
        "--config": options.config is not None,
        "--run-dir": options.run_dir is not None,
        "--seeds-per-trial": options.seeds_per_trial is not None,
        "--env": options.env is not None,
        "--stop": bool(options.stop),
        "--set": bool(options.settings),
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(f"{name} cannot be used with --resume: all trials of a search have the same settings.")
    home: Path = options.resume
    if not (home / SEARCH_FILE).is_file():
        what = f"it has no {SEARCH_FILE}" if home.exists() else "it does not exist"
        raise RunDirectoryError(f"{home} is not the directory of a search: {what}.")
    return home


def _load(options: argparse.Namespace, path: Path) -> Search:
    """Return the search in a file; options override it.

    Raises:
        ConfigError: The file holds no search, or a wrong one.
    """
    settings = read_experiment(path)
    if "search" not in settings:
        raise ConfigError(
            f"{path} has no group 'search': name there what to search, as in search: {{space: {{lr: {{log: [1e-5, "
            "1e-2]}}}."
        )
    group = settings.pop("search")
    named = argparse.Namespace(**{**NOT_NAMED, **vars(options), "config": path, "resume": None, "loggers": []})
    named.tuned = None
    config, stop = experiment_of(settings, named)
    own = {"num_trials": options.trials, "num_seeds": options.seeds_per_trial}
    if isinstance(group, Mapping):
        group = {**group, **{name: value for name, value in own.items() if value is not None}}
    return make_search(config, stop, group)


def _parallel(options: argparse.Namespace, search: Search) -> int:
    """Return how many trials to have at a time: as many as the cores hold with all their workers, if 0 is given.

    Raises:
        ConfigError: The number is negative.
    """
    if options.parallel < 0:
        raise ConfigError(f"--parallel {options.parallel}: it must be a number of trials, or 0 for one on each core.")
    return options.parallel or max(1, num_cores() // max(1, len(resources_of_workers(search.config))))


class _Display:
    """Prints a line for each trial, and at the end the best trials and what mattered."""

    def __init__(self, search: Search, home: Path, *, quiet: bool) -> None:
        self._search, self._home, self._quiet = search, home, quiet
        self._console = Console(highlight=False)

    def begin(self, parallel: int, num_again: int) -> None:
        count, seeds = self._search.settings.num_trials, len(self._search.seeds)
        again = f"; {num_again} that were interrupted begin again" if num_again else ""
        self._say(
            f"{count} trials with {seeds} {'seed' if seeds == 1 else 'seeds'} each, {parallel} at a time, in "
            f"{self._home}{again}"
        )

    def trial_ended(self, number: int, trials: list[TrialSummary]) -> None:
        trial, best = trials[number], best_of(trials, self._search)
        text = f"trial {number}: {self._outcome(trial)}, {trial.time_s or 0.0:,.1f} s: {trial.shown_values}"
        self._say(text if best is None else f"{text}; best: trial {best.number}, {_number(best.value)}")
        if trial.state == "failed":
            print_error(f"trial {number} failed: {trial.reason}")

    def ending(self) -> None:
        self._say("ending the trials; Ctrl-C again kills them")

    def end(self, trials: list[TrialSummary], shares: dict[str, float]) -> None:
        counts = {state: sum(trial.state == state for trial in trials) for state in ("complete", "pruned", "failed")}
        best = best_of(trials, self._search)
        if not self._quiet and best is not None:
            with contextlib.suppress(OSError, ValueError):
                self._console.print(self._best_table(trials))
                if shares:
                    self._console.print(_importance_table(shares))
        done = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no trial ended"
        found = "" if best is None else f"; the best is trial {best.number}, {_number(best.value)}: {best.shown_values}"
        where = f" The search is stored in {self._home}"
        self._say(f"{done}{found}.{where}", always=True)
        home = shlex.quote(str(self._home))
        if best is not None:
            self._say(f"Train with the best settings: corral train --config {shlex.quote(str(self._home / BEST_FILE))}")
        if sum(counts.values()) < self._search.settings.num_trials:
            self._say(f"Continue the search: corral search --resume {home}")

    def _outcome(self, trial: TrialSummary) -> str:
        if trial.state == "complete":
            seeds = ", ".join(map(_number, trial.seed_values))
            return _number(trial.value) + (f" ({seeds})" if len(trial.seed_values) > 1 else "")
        if trial.state == "pruned":
            return f"pruned after round {trial.num_rounds} at {_number(trial.value)}"
        return trial.state

    def _best_table(self, trials: list[TrialSummary]) -> Table:
        table = Table(title=f"Best trials by {self._search.metric}", title_justify="left", title_style="bold")
        table.add_column("trial", justify="right")
        table.add_column("value", justify="right")
        table.add_column("settings")
        left = [trial for trial in trials if trial.state == "complete"]
        while left and table.row_count < NUM_SHOWN:
            best = best_of(left, self._search)
            assert best is not None
            left.remove(best)
            table.add_row(str(best.number), _number(best.value), Text(best.shown_values))
        return table

    def _say(self, text: str, *, always: bool = False) -> None:
        if always or not self._quiet:
            with contextlib.suppress(OSError, ValueError):
                self._console.print(Text(text), soft_wrap=True)
                sys.stdout.flush()


def _importance_table(shares: dict[str, float]) -> Table:
    table = Table(title="Share of each setting in what makes trials good", title_justify="left", title_style="bold")
    table.add_column("setting")
    table.add_column("share", justify="right")
    for path, share in shares.items():
        table.add_row(path, f"{share:.0%}")
    return table


def _number(value: Any) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.6g}"
