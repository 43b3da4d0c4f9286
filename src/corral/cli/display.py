"""The live display of a run: a panel on a terminal, single lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from corral.algorithms.stopping import ALIASES
from corral.config.config import AlgorithmConfig
from corral.envs.vector import env_name
from corral.metrics.result import flat_result
from corral.metrics.timers import PARTS

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
LINE_INTERVAL_S = 2.0
SPARKLINE_WIDTH = 60


class Display:
    """Shows the results of a run as they arrive, while that can be written: a closed pipe or terminal ends no run.

    Attributes:
        path: Run directory, or `None` before there is one.
        result: Latest result, or `None`.
    """

    def __init__(self, config: AlgorithmConfig, stop: Mapping[str, float], *, quiet: bool = False) -> None:
        """Store the stop criteria, which are shown as progress."""
        self._title = f"{config.algo_name} on {env_name(config.env)}"
        self._stop, self._quiet = stop, quiet
        self._console = Console()
        self._live: Live | None = None
        self._returns: list[float] = []
        self._last_line_s = 0.0
        self._is_mute = False
        self.path: Path | None = None
        self.result: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        """Start the panel if this is a terminal."""
        if not self._quiet and self._console.is_terminal:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=8)
            with self._muted_if_it_fails():
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last panel on the screen."""
        if self._live is not None:
            with self._muted_if_it_fails():
                self._live.stop()

    def start(self, path: Path) -> None:
        """Store the run directory."""
        self.path = path

    def update(self, result: dict[str, Any]) -> None:
        """Show a result."""
        self.result = result
        self._returns.append(result["env_runners"]["episode_return_mean"])
        if self._live is not None:
            panel = self._panel()
            with self._muted_if_it_fails():
                self._live.update(panel)
        elif not self._quiet and time.monotonic() - self._last_line_s > LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            self._say(f"{self._title}: {self.summary()}")

    def end(self, how: str) -> None:
        """Print how the run ended and where it is stored, if it had started."""
        if self.path is not None:
            self._say(f"{how} after {self.summary()}. The run is stored in {self.path}")

    def _say(self, text: str) -> None:
        # In one write, and not by the console: an interrupt in the middle of its print can leave it mute.
        if sys.stdout is not None and not self._is_mute:
            with self._muted_if_it_fails():
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()

    @contextmanager
    def _muted_if_it_fails(self) -> Iterator[None]:
        """Show nothing any more after the standard output could not be written."""
        try:
            yield
        except (OSError, ValueError):  # such as a closed pipe, a closed file, or a character that cannot be encoded
            self._live, self._quiet, self._is_mute = None, True, True
            # Else Python writes the rest at exit, and fails.
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())

    def summary(self) -> str:
        """Return the latest result as a short text."""
        if self.result is None:
            return "no iteration"
        result = self.result
        iterations = result["training_iteration"]
        return (
            f"{iterations} iteration{'s' * (iterations != 1)}, {result['num_env_steps_sampled_lifetime']:,} env steps, "
            f"{result['time_total_s']:.1f} s, mean return {result['env_runners']['episode_return_mean']:.1f}"
        )

    def _panel(self) -> Panel:
        if self.result is None:
            return Panel(Text("sampling the first batch ..."), title=self._title)
        result, episodes = self.result, self.result["env_runners"]
        steps_per_s = episodes["num_env_steps_sampled"] / result["timers"]["iteration_s"]
        numbers = Table.grid(padding=(0, 2))
        numbers.add_row("iteration", f"{result['training_iteration']:,}", "time", f"{result['time_total_s']:.1f} s")
        numbers.add_row(
            "env steps", f"{result['num_env_steps_sampled_lifetime']:,}", "env steps/s", f"{steps_per_s:,.0f}"
        )
        numbers.add_row(
            "mean return",
            f"{episodes['episode_return_mean']:.1f}",
            "min .. max",
            f"{episodes['episode_return_min']:.1f} .. {episodes['episode_return_max']:.1f}",
        )
        bottleneck = result["bottleneck"]
        shares = "  ".join(
            f"{part} {result['timers'][f'{part}_share']:.0%}"
            for part in PARTS
            if result["timers"][f"{part}_share"] >= 0.005
        )
        moved = f"{bottleneck['part']} takes {bottleneck['share']:.0%} of the time; {bottleneck['setting']} moves it"
        return Panel(
            Group(
                numbers,
                Text(sparkline(self._returns, ASCII_BARS if self._console.options.ascii_only else BARS), style="cyan"),
                self._progress(),
                Text(shares, style="dim"),
                Text(moved, style="dim"),
                Text(str(self.path), style="dim"),
            ),
            title=self._title,
        )

    def _progress(self) -> Table:
        assert self.result is not None
        flat = flat_result(self.result)
        table = Table.grid(padding=(0, 2))
        for name, limit in self._stop.items():
            path = ALIASES.get(name, name)
            value = flat.get(path, flat.get(f"env_runners/{path}", 0))
            known = isinstance(value, (int, float)) and value == value
            bar = ProgressBar(total=max(limit, 1e-9), completed=max(0.0, float(value)) if known else 0.0, width=30)
            table.add_row(name, bar, f"{value:,.6g} of {limit:,.6g}" if known else "no value yet")
        return table


def sparkline(values: list[float], bars: str = BARS, width: int = SPARKLINE_WIDTH) -> str:
    """Return the latest values as a line of bars, scaled from the smallest to the largest; NaN is a blank."""
    shown = values[-width:]
    known = [value for value in shown if value == value]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value != value else bars[int((value - low) * scale)] for value in shown)
