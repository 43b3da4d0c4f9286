"""What `corral train --seeds` shows: a table of the runs while they train, and their final returns."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.constrain import Constrain
from rich.live import Live
from rich.table import Table
from rich.text import Text

from corral.runs.loggers.run_summary import EVALUATED, RunsSummary
from corral.tools.cli.exit_status import print_error
from corral.tools.cli.pool import OUTPUT_FILE, SeedRun
from corral.tools.cli.seed_set import SeedSet

INTERRUPTED = (129, 130, 143)


class SeedDisplay:
    """Shows the runs of a set, and stores the exit status of each run that ends.

    It is a context manager: at its end it shows the final table.

    Args:
        found: The set.
        runs: The runs that this process has.
        title: What is trained.
        quiet: Whether to show only the last line.
    """

    def __init__(self, found: SeedSet, runs: Sequence[SeedRun], title: str, *, quiet: bool) -> None:
        self._set, self._runs, self._title, self._quiet = found, {run.seed: run for run in runs}, title, quiet
        self._console = Console(highlight=False)
        shows_table = self._console.is_terminal and not quiet and bool(runs)
        self._live = Live(console=self._console, transient=True, auto_refresh=False) if shows_table else None
        self._started: set[int] = set()

    def __enter__(self) -> Self:
        """Start the table if there is a terminal."""
        if self._live is not None:
            self._live.start()
        return self

    def update(self) -> None:
        """Store which runs have ended, and show the numbers of all runs."""
        for seed, run in self._runs.items():
            if run.process is not None and seed not in self._started:
                self._started.add(seed)
                self._say(f"seed {seed}: started in {run.home}")
            if seed not in self._set.statuses and (status := run.status) is not None:
                self._set.statuses[seed] = status
                self._set.write()
                self._say(f"seed {seed}: {self._state(seed)}")
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                # The terminal writes ^C behind the last row, which must not become a row more.
                self._live.update(Constrain(self._table(), self._console.width - len("^C")), refresh=True)

    def say_ending(self) -> None:
        """Say that the runs end."""
        self._say("ending the runs, which write checkpoints; Ctrl-C again kills them", on_terminals=True)

    def _say(self, text: str, *, on_terminals: bool = False) -> None:
        """Print a line where there is no table that shows the same."""
        if not self._quiet and (self._live is None or on_terminals):
            with contextlib.suppress(OSError, ValueError):
                self._console.print(Text(text), soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the set, and show the final table, what failed, the summary and what to do next."""
        self.update()
        with contextlib.suppress(OSError, ValueError):
            if self._live is not None:
                self._live.stop()
        self._set.write()
        with contextlib.suppress(OSError, ValueError):
            if not self._quiet:
                self._console.print(self._table())
            self._print_failures()
            self._console.print(Text(self._last_line()), soft_wrap=True)
            if not self._quiet and len(self._set.finished) < len(self._set.seeds):
                home = shlex.quote(str(self._set.home))
                self._console.print(Text(f"Continue the runs: corral train --resume {home}"), soft_wrap=True)

    def _state(self, seed: int) -> str:
        status, run = self._set.statuses.get(seed), self._runs.get(seed)
        if status is None:
            return "waiting" if run is None or run.process is None else "running"
        return "finished" if status == 0 else "interrupted" if status in INTERRUPTED else f"failed ({status})"

    def _table(self) -> Table:
        numbers = self._set.numbers()
        evaluated = any(not math.isnan(run.evaluated_return) for run in numbers.values())
        table = Table(title=self._title, title_justify="left", title_style="bold")
        table.add_column("seed", justify="right")
        table.add_column("run")
        names = ["iteration", "env steps", "time", "mean return", *(["evaluated"] if evaluated else [])]
        for name in names:
            table.add_column(name, justify="right")
        for seed, run in numbers.items():
            cells = [_text(run.training_iteration), _text(run.num_env_steps), _text(run.time_s, ",.1f", " s")]
            cells += [_text(run.trained_return, ",.1f"), _text(run.evaluated_return, ",.1f")]
            table.add_row(str(seed), self._state(seed), *cells[: len(names)])
        return table

    def _print_failures(self) -> None:
        for seed, numbers in self._set.numbers().items():
            if numbers.faults:
                print_error(f"seed {seed}: {numbers.faults}; {self._set.run_dir(seed) / 'run.log'} says why")
        for seed, run in self._runs.items():
            if self._state(seed).startswith("failed"):
                problem = run.error_line() or "see its output"
                print_error(f"seed {seed} failed: {problem} (output: {run.home / OUTPUT_FILE})")

    def _last_line(self) -> str:
        count, all_seeds = len(self._set.finished), len(self._set.seeds)
        which = f"{count} seeds" if count == all_seeds else f"{count} of {all_seeds} seeds"
        said = f"{which} finished"
        return f"{said}{describe_summary(self._set.summary())}. The runs are stored in {self._set.home}"


def describe_summary(summary: RunsSummary) -> str:
    """Return the means of a summary with their intervals as the end of a sentence; `""` without a mean."""
    if math.isnan(summary.mean):
        return ""
    what = "evaluated return" if summary.metric == EVALUATED else "mean return"
    text = f": {what} {summary.mean:,.1f}"
    if not math.isnan(summary.std):
        text += f", standard deviation {summary.std:,.1f}"
    if not math.isnan(summary.interval_low):
        text += f", 95% interval {summary.interval_low:,.1f} .. {summary.interval_high:,.1f}"
        if math.isnan(summary.iqm_low):
            return text
        return f"{text}; interquartile mean {summary.iqm:,.1f}, {summary.iqm_low:,.1f} .. {summary.iqm_high:,.1f}"
    return f"{text}, no 95% interval with fewer than 2 seeds"


def _text(number: float, form: str = ",.0f", unit: str = "") -> str:
    return "" if math.isnan(number) else f"{number:{form}}{unit}"
