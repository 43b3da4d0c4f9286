"""The progress of a run as it is shown: a panel on a terminal and in a notebook, single lines elsewhere."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from corral.core.ids import ALL_MODULES
from corral.core.interrupts import name_of_interrupt
from corral.core.metrics.named_number import always_grows, find_value
from corral.core.metrics.result import (
    describe_faults,
    describe_return,
    evaluated_return,
    flat_result,
    without_early_means,
)
from corral.core.metrics.summary import show_number
from corral.core.metrics.time_left import WINDOW_S, seconds_left, show_duration
from corral.core.metrics.timers import PARTS
from corral.core.run_files import RESULTS_FILE
from corral.core.text import printable
from corral.envs.vector import env_name
from corral.errors import ConfigError, RunDirectoryError, nearest
from corral.runs.loggers.run_summary import latest_results

if TYPE_CHECKING:
    from corral.runners.config import RunnerConfig

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
LINE_INTERVAL_S = 2.0
PANEL_INTERVAL_S = 0.1
SPARKLINE_WIDTH = 60
WAIT_SHOWN_S = 3.0  # from when on the panel says for how long no result has come
BAR_WIDTH, MIN_BAR_WIDTH = 30, 10
MODULE_WIDTH = 36  # of an id of 24 characters and its mean return, at most

Mode = Literal["auto", "panel", "lines", "last"]
MODES = ("auto", "panel", "lines", "last")


def check_mode(mode: object) -> None:
    """Refuse a way to show progress that does not exist.

    Raises:
        ConfigError: It is neither False nor one of `MODES`.
    """
    if mode is not False and mode not in MODES:
        raise ConfigError(f"progress={mode!r}: use {', '.join(map(repr, MODES))} or False. {nearest(mode, MODES)}")


class Progress:
    """Shows the results of a run as they arrive, while that can be written: a closed pipe or terminal ends no run.

    It is a context manager: however the block ends, the last line says how, and where the run is stored.

    Attributes:
        path: Run directory, or `None` before there is one.
        result: Latest result, or `None`.
        reason: Why the run ended, for the last line.
    """

    def __init__(self, config: RunnerConfig, stop: Mapping[str, Any], mode: Mode = "auto") -> None:
        """Store what is shown.

        Args:
            config: Config of the algorithm.
            stop: Stop criteria by name, which are shown as progress; see `StopCriteria`.
            mode: `"panel"` updates a panel in place, on a terminal or in a notebook; `"lines"` prints a line every two
                seconds; `"last"` prints the last line only. `"auto"` is the panel where there is a terminal or a
                notebook, and lines elsewhere.
        """
        self._title = f"{config.algo_name} on {env_name(config.env)}"
        self._stop, self._samples = stop, config.samples
        self._unit = "env steps" if self._samples else "steps learned"
        self._console = Console()
        shows_panel = self._console.is_terminal or self._console.is_jupyter
        self._mode = ("panel" if shows_panel else "lines") if mode == "auto" else mode
        self._show: Callable[[Panel], Any] | None = None  # replaces the panel
        self._latest: tuple[RenderableType, ...] = ()  # what the panel shows of the latest result
        self._since_s: float | None = None  # when the latest result came; `None` before and after the run
        self._live: Live | None = None
        self._returns: list[float] = []
        self._growing = [name for name in stop if always_grows(name)]
        # Seconds of the run, and what it had reached then of each growing criterion, over the last minute.
        self._reached: deque[tuple[float, dict[str, float]]] = deque([(0.0, dict.fromkeys(self._growing, 0.0))])
        self._warning = _LastWarning()
        self._shown_s = float("-inf")
        self._is_mute = False
        self.path: Path | None = None
        self.result: dict[str, Any] | None = None
        self.reason: str | None = None

    def __enter__(self) -> Self:
        """Start the panel if there is one."""
        if self._mode == "panel":
            self._latest, self._since_s = tuple(self._contents()), time.monotonic()
            logging.getLogger("corral").addHandler(self._warning)
            with self._muted_if_it_fails():
                if self._console.is_jupyter:
                    self._show = _show_in_notebook(self._panel())
                else:
                    # Its thread draws the panel again also while no result arrives.
                    self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=8)
                    self._live.start()
                    self._show = self._live.update
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last panel on the screen, and print the last line."""
        self._since_s = None
        self._update_panel()
        logging.getLogger("corral").removeHandler(self._warning)
        if self._live is not None:
            with self._muted_if_it_fails():
                self._live.stop()
        how = "Done" if error is None else name_of_interrupt(error) or "Failed"
        self.end(how, is_stored=not isinstance(error, RunDirectoryError))

    def start(self, path: Path, result: dict[str, Any] | None = None) -> None:
        """Store the run directory; of a run that continues, also the latest numbers and the returns before."""
        self.path, self.result = path, result or None
        if result:
            self._reached.clear()
            self._note_reached(result)
            if self._mode == "panel":
                self._returns = [
                    self._return_of(found) for found in latest_results(path / RESULTS_FILE, SPARKLINE_WIDTH)
                ]

    def _return_of(self, result: Mapping[str, Any]) -> float:
        of = result if self._samples else result.get("evaluation", {})  # nothing is sampled for training
        mean = of.get("env_runners", {}).get("episode_return_mean")
        return math.nan if mean is None else float(mean)

    def update(self, result: dict[str, Any]) -> None:
        """Show a result, unless another one was shown a moment ago."""
        self.result = result
        if self._since_s is not None:
            self._since_s = time.monotonic()
        self._returns.append(self._return_of(result))
        interval_s = LINE_INTERVAL_S if self._mode == "lines" else PANEL_INTERVAL_S
        if (now_s := time.monotonic()) - self._shown_s <= interval_s:
            return
        self._shown_s = now_s
        if self._mode == "lines":
            self._say(f"{self._title}: {self.summary()}")
        else:
            self._note_reached(result)
            self._update_panel()

    def _note_reached(self, result: Mapping[str, Any]) -> None:
        """Note what a result has reached; one note that is a minute old stays."""
        flat = flat_result(result)
        reached = {name: float(find_value(flat, name) or 0.0) for name in self._growing}
        self._reached.append((float(result["time_total_s"]), reached))
        while len(self._reached) > 2 and self._reached[-1][0] - self._reached[1][0] > WINDOW_S:
            self._reached.popleft()

    def _update_panel(self) -> None:
        if self._mode == "panel":
            self._latest = tuple(self._contents())
        if self._show is not None:
            panel = self._panel()
            with self._muted_if_it_fails():
                self._show(panel)

    def end(self, how: str, *, is_stored: bool = True) -> None:
        """Print how the run ended and where it is stored, if it had started; or only the first, if it was removed."""
        if self.path is not None:
            why = "" if self.reason is None or how == "Failed" else f": {self.reason}"
            stored = f". The run is stored in {self.path}" if is_stored else "."
            self._say(f"{how} after {self.summary()}{why}{stored}")

    def _say(self, text: str) -> None:
        # In one write, and not by the console: an interrupt in the middle of its print can leave it mute.
        if sys.stdout is not None and not self._is_mute:
            with self._muted_if_it_fails():
                sys.stdout.write(f"{printable(text)}\n")
                sys.stdout.flush()

    @contextmanager
    def _muted_if_it_fails(self) -> Iterator[None]:
        """Show nothing any more after the standard output could not be written."""
        try:
            yield
        except (OSError, ValueError):  # such as a closed pipe, a closed file, or a character that cannot be encoded
            self._live, self._show, self._is_mute = None, None, True

    def summary(self) -> str:
        """Return the latest result as a short text."""
        if self.result is None:
            return "no iteration"
        result = self.result
        iterations, evaluated = result["training_iteration"], evaluated_return(result)
        num_steps = result["num_env_steps_sampled_lifetime"]
        mean = f", {found}" if (found := describe_return(result)) else ""
        return (
            f"{iterations} iteration{'s' * (iterations != 1)}, {num_steps:,} {self._unit}, "
            f"{result['time_total_s']:.1f} s{mean}{'' if evaluated is None else f', evaluated return {evaluated[0]}'}"
            f"{f', {faults}' if (faults := describe_faults(result)) else ''}"
        )

    def _panel(self) -> Panel:
        # A terminal writes ^C after the panel: it must find place there, for another line would shift the next panel.
        # The thread that draws it reads no result, for callbacks change results.
        width = self._console.width - len("^C")
        return _PrintablePanel(Group(*self._latest, *self._news()), title=self._title, width=width)

    def _news(self) -> Iterator[Text]:
        """Yield what there is to say while no result arrives."""
        if self._warning.text:
            yield _one_line(f"latest warning: {self._warning.text}", "yellow")
        if self._since_s is not None and (waited_s := time.monotonic() - self._since_s) >= WAIT_SHOWN_S:
            yield _one_line(f"no new result for {show_duration(waited_s)}")

    def _contents(self) -> Iterator[RenderableType]:
        """Yield what is to show of the latest result."""
        if self.result is None:
            yield Text("sampling the first batch ..." if self._samples else "learning from the first batches ...")
            return
        result, episodes = self.result, self.result["env_runners"]
        if self._samples:
            num_new = episodes["num_env_steps_sampled"]
        else:
            num_new = result["learners"][ALL_MODULES]["num_module_steps_trained"]
        num_steps, steps_per_s = result["num_env_steps_sampled_lifetime"], num_new / result["timers"]["iteration_s"]
        numbers = Table.grid(padding=(0, 2))
        numbers.add_row("iteration", f"{result['training_iteration']:,}", "time", f"{result['time_total_s']:.1f} s")
        rate = "env steps/s" if self._samples else "steps/s"
        numbers.add_row(self._unit, f"{num_steps:,}", rate, f"{steps_per_s:,.0f}")
        if describe_return(result).startswith("no episode"):
            numbers.add_row("mean return", "none yet", "", "no episode has ended")
        elif self._samples:
            numbers.add_row(
                "mean return",
                f"{episodes['episode_return_mean']:.1f}",
                "min .. max",
                f"{episodes['episode_return_min']:.1f} .. {episodes['episode_return_max']:.1f}",
            )
        if "evaluation" in result:
            mean, interval = evaluated_return(result) or ("no round yet", "")
            numbers.add_row("evaluated return", mean, "95% interval", interval)
        if "lag_mean" in (costs := result.get("runner_group", {})):
            numbers.add_row("mean lag", f"{costs['lag_mean']:.1f} updates", "largest", f"{costs['lag_max']:.0f}")
        faults = describe_faults(result)
        bottleneck = result["bottleneck"]
        shares = "  ".join(
            f"{part} {result['timers'][f'{part}_share']:.0%}"
            for part in PARTS
            if result["timers"][f"{part}_share"] >= 0.005
        )
        moved = f"{bottleneck['part']} takes {bottleneck['share']:.0%} of the time: see {bottleneck['setting']}"
        yield numbers
        yield from self._returns_by_module(episodes.get("module_episode_return_mean", {}))
        yield Text(sparkline(self._returns, ASCII_BARS if self._console.options.ascii_only else BARS), style="cyan")
        yield from self._progress()
        if faults:
            yield _one_line(f"{faults}; run.log says why", "yellow")
        yield _one_line(shares)
        yield _one_line(moved)
        yield _one_line(_end_of(str(self.path), self._width))

    @property
    def _width(self) -> int:
        """Characters in a line of the panel. A terminal writes ^C after it, and its borders take two on each side."""
        return self._console.width - len("^C") - 4

    def _returns_by_module(self, means: Mapping[str, float]) -> Iterator[Text]:
        """Yield the mean returns of several modules in two lines; of more than fit, the first ones."""
        if len(means) < 2:
            return
        text, space = "by module", 2 * self._width - len("  and 999 more") - MODULE_WIDTH
        for number, (module_id, mean) in enumerate(means.items()):
            if len(text) > space:
                text += f"  and {len(means) - number} more"
                break
            text += f"  {module_id:.24} {mean:.1f}"
        yield Text(text)

    def _progress(self) -> Iterator[Table | Text]:
        """Yield the lines of the stop criteria; a name that is too long for its line has one of its own."""
        assert self.result is not None
        flat = flat_result(without_early_means(self.result))
        values = {name: _number_of(flat, name) for name in self._stop}
        texts = {name: self._how_far(name, criterion, values[name]) for name, criterion in self._stop.items()}
        space = self._width - max(map(len, texts.values()), default=0) - 4
        name_width = max((len(name) for name in texts if len(name) <= space - MIN_BAR_WIDTH), default=0)
        bar_width = max(1, min(BAR_WIDTH, space - name_width))
        for name, criterion in self._stop.items():
            is_long = len(name) > name_width
            if is_long:
                yield Text(name, overflow="fold")  # the end of a name says which module it is about
            bar: ProgressBar | str = ""
            if isinstance(criterion, (int, float)):
                done = max(0.0, values[name] or 0.0)
                bar = ProgressBar(total=max(criterion, 1e-9), completed=done, width=bar_width)
            line = Table.grid(padding=(0, 2))
            line.add_column(width=name_width)
            line.add_column(width=bar_width)
            line.add_row("" if is_long else name, bar, texts[name])
            yield line

    def _how_far(self, name: str, criterion: Any, value: float | None) -> str:
        """Return how far a stop criterion is from being met, as text."""
        if callable(criterion):
            return "not yet"
        if value is None:
            return "no value yet"
        if not isinstance(criterion, (int, float)):  # Below
            return f"{show_number(value)}, ends {criterion}"
        left_s = None
        if name in self._growing:
            times_s, reached = zip(*self._reached, strict=True)
            left_s = seconds_left(criterion, times_s, [found[name] for found in reached])
        left = f", {show_duration(left_s)} left" if left_s else ""
        return f"{show_number(value)} of {show_number(criterion)}{left}"


def _number_of(flat: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a flat result that is known."""
    value = find_value(flat, name)
    return float(value) if isinstance(value, (int, float)) and value == value else None


class _PrintablePanel(Panel):
    """A panel that shows control characters, such as in names of files and modules, as escapes."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in super().__rich_console__(console, options):
            assert isinstance(segment, Segment)
            yield segment._replace(text=printable(segment.text, newline="\n"))


class _LastWarning(logging.Handler):
    """Keeps the text of the latest warning or error of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = printable(" ".join(record.getMessage().split()))


def _one_line(text: str, style: str = "dim") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _end_of(text: str, width: int) -> str:
    """Return the end of a text that is too long for a line: of a path, it says which run it is."""
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _show_in_notebook(panel: Panel) -> Callable[[Panel], Any]:
    """Show a panel in the output of a cell, and return what replaces it."""
    from IPython.display import display

    handle: Any = display(panel, display_id=True)
    update: Callable[[Panel], Any] = handle.update
    return update


def sparkline(values: list[float], bars: str = BARS, width: int = SPARKLINE_WIDTH) -> str:
    """Return the latest values as a line of bars, scaled from the smallest to the largest.

    NaN and infinities are blanks.
    """
    shown = values[-width:]
    known = [value for value in shown if math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    half = high / 2 - low / 2  # the whole difference may be infinite
    shares = [(value / 2 - low / 2) / half if half else 0.0 for value in known]
    places = iter(int(share * (len(bars) - 1)) for share in shares)
    return "".join(bars[next(places)] if math.isfinite(value) else " " for value in shown)
