"""The settings of one key: the reduction, the values that it counts, and whether a reduce forgets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from corral.errors import CorralError, nearest

DEFAULT_EMA_COEFF = 0.01
DEFAULT_PERCENTILES = (0, 50, 75, 90, 95, 99, 100)
REDUCTIONS = ("mean", "min", "max", "sum", "lifetime_sum", "ema", "percentiles", "item", "item_series")
WITH_WINDOW = ("mean", "min", "max", "sum", "percentiles", "item_series")
ELEMENTWISE = ("mean", "min", "max", "sum", "lifetime_sum", "ema")

Path = tuple[str, ...]


class MetricsError(CorralError, ValueError):
    """A value cannot be logged, or its settings contradict each other or the settings of its key."""


class Settings(NamedTuple):
    """The settings as a call of `MetricsLogger.log_value` gives them, in the order of its arguments."""

    reduce: str | None = None
    window: int | None = None
    ema_coeff: float | None = None
    percentiles: Sequence[float] | None = None
    clear_on_reduce: bool | None = None
    with_throughput: bool = False


class Reduction(NamedTuple):
    """The settings of one key, with the defaults filled in.

    Attributes:
        name: Name of the reduction, one of `REDUCTIONS`.
        window: Number of latest values to reduce, or `None` for all values since the last reduce.
        ema_coeff: Weight of a new value in an exponential moving average.
        percentiles: Percentiles to compute, from 0 to 100.
        clear_on_reduce: Whether a reduce forgets the values.
        with_throughput: Whether another key reports the sum logged per second.
    """

    name: str
    window: int | None = None
    ema_coeff: float | None = None
    percentiles: tuple[float, ...] | None = None
    clear_on_reduce: bool = False
    with_throughput: bool = False

    def __str__(self) -> str:
        """Return the settings in words; different settings give different words."""
        words = self.name
        if self.percentiles is not None:
            words += " " + ", ".join(f"{percent:g}" for percent in self.percentiles)
        if self.window is not None:
            words += f" over a window of {self.window}"
        if self.ema_coeff is not None:
            words += f" with coefficient {self.ema_coeff:g}"
        if self.clear_on_reduce != _clears(self.name, self.window):
            words += " that a reduce clears" if self.clear_on_reduce else " that a reduce does not clear"
        return words + (" with throughput" if self.with_throughput else "")


def _clears(name: str, window: int | None) -> bool:
    return window is None and name in WITH_WINDOW


def make_reduction(path: Path, settings: Settings, default: str) -> Reduction:
    """Return the settings of a key with the defaults filled in.

    Args:
        path: The key, for the messages.
        settings: Settings that a call gave.
        default: Reduction of a value of this kind if neither `reduce` nor another setting says which.

    Raises:
        MetricsError: The settings contradict each other.
    """
    where = f"metric {'/'.join(path)!r}"
    name = settings.reduce
    if name is None:
        name = "mean" if settings.window is not None else "ema" if settings.ema_coeff is not None else default
    if name not in REDUCTIONS:
        raise MetricsError(f"{where}: unknown reduce {name!r}. {nearest(str(name), REDUCTIONS)}")
    if problem := _problem(name, settings):
        raise MetricsError(f"{where}: {problem}")
    ema_coeff, percentiles, clear = settings.ema_coeff, settings.percentiles, settings.clear_on_reduce
    if name == "ema" and ema_coeff is None:
        ema_coeff = DEFAULT_EMA_COEFF
    if name == "percentiles" and percentiles is None:
        percentiles = DEFAULT_PERCENTILES
    return Reduction(
        name,
        settings.window,
        ema_coeff,
        None if percentiles is None else tuple(percentiles),
        _clears(name, settings.window) if clear is None else bool(clear),
        bool(settings.with_throughput),
    )


def _problem(name: str, settings: Settings) -> str | None:
    """Return what is wrong with the settings of a reduction, or `None`."""
    return (
        _window_problem(name, settings)
        or _ema_problem(name, settings.ema_coeff)
        or _percentiles_problem(name, settings.percentiles)
        or _clear_problem(name, settings)
        or _throughput_problem(name, settings)
    )


def _window_problem(name: str, settings: Settings) -> str | None:
    window = settings.window
    if window is None:
        return None
    if settings.ema_coeff is not None:
        return f"window={window} and ema_coeff={settings.ema_coeff} exclude each other."
    if name not in WITH_WINDOW:
        return f"window={window} cannot be combined with reduce={name!r}."
    if not isinstance(window, int) or window < 1:
        return f"window={window} must be a whole number of at least 1."
    return None


def _ema_problem(name: str, ema_coeff: float | None) -> str | None:
    if ema_coeff is None:
        return None
    if name != "ema":
        return f"ema_coeff={ema_coeff} cannot be combined with reduce={name!r}."
    return None if 0 < ema_coeff <= 1 else f"ema_coeff={ema_coeff} must be in (0, 1]."


def _percentiles_problem(name: str, percentiles: Sequence[float] | None) -> str | None:
    if percentiles is None:
        return None
    if name != "percentiles":
        return f"percentiles={percentiles} cannot be combined with reduce={name!r}; use reduce='percentiles'."
    if not isinstance(percentiles, (list, tuple)) or not percentiles or not all(map(_is_percent, percentiles)):
        return f"percentiles={percentiles} must be a list of numbers from 0 to 100."
    return None


def _is_percent(percent: Any) -> bool:
    return isinstance(percent, (int, float)) and 0 <= percent <= 100


def _clear_problem(name: str, settings: Settings) -> str | None:
    if settings.clear_on_reduce and name == "lifetime_sum":
        return "clear_on_reduce=True contradicts reduce='lifetime_sum'; use 'sum'."
    if settings.clear_on_reduce is False and settings.window is None and name in ("percentiles", "item_series"):
        return f"clear_on_reduce=False would keep more and more values for reduce={name!r}; give a window."
    return None


def _throughput_problem(name: str, settings: Settings) -> str | None:
    if not settings.with_throughput:
        return None
    if name not in ("sum", "lifetime_sum"):
        return f"with_throughput=True cannot be combined with reduce={name!r}; use 'sum' or 'lifetime_sum'."
    # The part of a window holds the latest values of a worker, not the sum of all its values.
    if settings.window is not None:
        return f"with_throughput=True cannot be combined with window={settings.window}."
    return None
