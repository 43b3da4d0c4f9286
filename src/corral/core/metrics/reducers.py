"""Reducers: they turn the values logged under one key into one result.

`take` returns what a reducer received since the last `take`, as a part for another reducer. `aggregate` adds the parts
of reducers that worked at the same time. Aggregating the parts of n workers, in one call or in several, gives the same
result as one reducer that received all their values. If the order of values matters, the parts of one call are ordered
as follows:

- in a window and in a series, the values of each worker are spread evenly over the same time and interleaved, so that
  the values of no worker push out the values of another; at equal times the workers keep their order;
- in a moving average and for an item, one worker comes after the other, in order.

The parts of a later call are later.

A value is a number, or an array `[...]` that always has the same shape and is reduced element by element in float64.
Series and items keep values of any shape as they are. No reducer changes an array in place, so parts and states can
share arrays.

NaN is the absence of a value: only series and items show it. Every other reduction skips it, element by element in
arrays, and is NaN only if there is nothing else (a sum is 0). In a window, a NaN keeps its place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from corral.core.metrics.reduction_settings import DEFAULT_EMA_COEFF, Reduction

NAN = float("nan")

Number = float | NDArray[Any]


def _total(values: Sequence[Any]) -> tuple[Number, Any]:
    """Return the sum of numbers or of arrays, and how many they are, without NaN."""
    if len(values) and isinstance(values[0], np.ndarray):
        known = ~np.isnan(values)
        return np.sum(values, axis=0, dtype=np.float64, where=known), known.sum(axis=0)
    values = [value for value in values if value == value]
    try:
        return math.fsum(values), len(values)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the largest float
        return float(sum(values)), len(values)


def _sum(values: Sequence[Any]) -> Number:
    return _total(values)[0]


def _mean(values: Sequence[Any]) -> Number:
    return _quotient(*_total(values))


def _quotient(total: Number, count: Any) -> Number:
    """Return a mean, which is NaN where nothing was counted."""
    if isinstance(count, np.ndarray):
        return np.divide(total, count, out=np.full(count.shape, NAN, np.float64), where=count > 0)
    return total / count if count else NAN


def _extreme(pick: np.ufunc, values: Sequence[Any]) -> Number:
    """Return the smallest or the largest value, for `np.fmin` or `np.fmax`, which skip NaN."""
    best = pick.reduce(np.asarray(values, np.float64), axis=0, initial=NAN)
    return best if isinstance(best, np.ndarray) else float(best)


def _latest(values: Sequence[Any]) -> Any:
    return values[-1] if values else NAN


def _percentiles(percents: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    values = [value for value in values if value == value]
    found = np.percentile(values, percents) if values else [NAN] * len(percents)
    return {f"p{percent:g}": float(value) for percent, value in zip(percents, found, strict=True)}


class Reducer(ABC):
    """Base class of reducers, which receive values and give one result.

    Attributes:
        STATE: Names of the attributes that make up the state: numbers, arrays, and lists or deques of these.
    """

    STATE: ClassVar[tuple[str, ...]]

    @abstractmethod
    def add(self, values: Sequence[Any]) -> None:
        """Add values, oldest first, at least one."""

    @abstractmethod
    def peek(self) -> Any:
        """Return the current result; NaN if there is none yet."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the values."""

    @abstractmethod
    def take(self) -> Any:
        """Return what was added since the last `take`, for `aggregate` of another reducer; `peek` stays the same."""

    @abstractmethod
    def aggregate(self, parts: Sequence[Any]) -> None:
        """Add the parts of other reducers that worked at the same time."""

    def get_state(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        values = {name: getattr(self, name) for name in self.STATE}
        return {
            name: list(value) if isinstance(value, (list, tuple, deque)) else value for name, value in values.items()
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `get_state` returned."""
        for name in self.STATE:
            old, value = getattr(self, name), state[name]
            if isinstance(old, deque):
                value = deque(value, maxlen=old.maxlen)
            setattr(self, name, type(old)(value) if isinstance(old, (list, tuple)) else value)


class Values(Reducer):
    """Keeps the latest values, or all values since the last reduce, and summarises them."""

    STATE = ("_values", "_new", "_num_new")

    def __init__(self, window: int | None, summary: Callable[[Sequence[Any]], Any]) -> None:
        """Keep at most `window` values, or all with `None`; `summary` turns a list of them into the result."""
        self._window, self._summary = window, summary
        self._values: deque[Any] = deque(maxlen=window)
        # The latest of the values added since the last take, and the number of all of them.
        self._new: deque[Any] = deque(maxlen=window)
        self._num_new = 0

    def add(self, values: Sequence[Any]) -> None:
        self._values.extend(values)
        self._new.extend(values)
        self._num_new += len(values)

    def peek(self) -> Any:
        return self._summary(list(self._values))

    @property
    def num_new(self) -> int:
        """Number of values that were added since the last `take`."""
        return self._num_new

    def peek_values(self) -> list[Any]:
        """Return the values that are summarised, the oldest first."""
        return list(self._values)

    def clear(self) -> None:
        self._values.clear()
        self.take()

    def take(self) -> tuple[int, list[Any]]:
        part = (self._num_new, list(self._new))
        self._new.clear()
        self._num_new = 0
        return part

    def aggregate(self, parts: Sequence[tuple[int, list[Any]]]) -> None:
        # The i-th of n values of a worker has the time i / n, even if only the latest of the n values are left.
        timed = [
            ((number - len(values) + i + 1) / number, value)
            for number, values in parts
            for i, value in enumerate(values)
        ]
        self.add([value for _, value in sorted(timed, key=lambda pair: pair[0])])
        self._num_new += sum(number for number, _ in parts) - len(timed)

    def set_state(self, state: dict[str, Any]) -> None:
        if "_item" in state:  # the latest value, as an older version saved it
            item, is_new = state["_item"], state["_is_new"]
            state = {"_values": item, "_new": item if is_new else [], "_num_new": int(is_new)}
        super().set_state(state)


class Total(Reducer):
    """Adds values up, to their sum or their mean."""

    STATE = ("_all", "_new")

    def __init__(self, *, is_mean: bool = False) -> None:
        """Start empty."""
        self._is_mean = is_mean
        self._all: tuple[Number, Any] = (0.0, 0)  # total and number of values
        self._new: tuple[Number, Any] = (0.0, 0)

    def add(self, values: Sequence[Any]) -> None:
        self.aggregate([_total(values)])

    def peek(self) -> Number:
        total, count = self._all
        return _quotient(total, count) if self._is_mean else total

    def clear(self) -> None:
        self._all = self._new = (0.0, 0)

    def take(self) -> tuple[Any, Any]:
        part, self._new = self._new, (0.0, 0)
        return part

    def aggregate(self, parts: Sequence[tuple[Any, Any]]) -> None:
        for total, count in parts:
            self._all = (self._all[0] + total, self._all[1] + count)
            self._new = (self._new[0] + total, self._new[1] + count)

    def set_state(self, state: dict[str, Any]) -> None:
        # A sum that an older version saved has no number of values.
        super().set_state({name: (*state[name], 0)[:2] for name in self.STATE})


class Extreme(Reducer):
    """Smallest or largest value."""

    STATE = ("_all", "_new")

    def __init__(self, pick: np.ufunc) -> None:
        """Start empty; `pick` is `np.fmin` or `np.fmax`."""
        self._pick = pick
        self._all: tuple[Number] = (NAN,)
        self._new: tuple[Number] = (NAN,)

    def add(self, values: Sequence[Any]) -> None:
        self.aggregate([(_extreme(self._pick, values),)])

    def peek(self) -> Number:
        return self._all[0]

    def clear(self) -> None:
        self._all = self._new = (NAN,)

    def take(self) -> tuple[Number]:
        part, self._new = self._new, (NAN,)
        return part

    def aggregate(self, parts: Sequence[tuple[Number]]) -> None:
        # Without values, a part is one NaN, also for arrays.
        for (best,) in parts:
            self._all, self._new = (self._picked(self._all[0], best),), (self._picked(self._new[0], best),)

    def _picked(self, one: Number, other: Number) -> Number:
        best: Any = self._pick(one, other)
        return best if isinstance(best, np.ndarray) else float(best)


def _choose(condition: Any, one: Any, other: Any) -> Any:
    """Return one number or the other, or element by element if the condition is an array."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other)
    return one if condition else other


class Ema(Reducer):
    """Exponential moving average, started at the first value: e <- (1 - c) e + c v.

    After the first value v, further values map e to `decay * e + shift`; a part is `[v, decay, shift]`. Without values,
    v and the average are NaN.
    """

    STATE = ("_value", "_part")

    def __init__(self, coeff: float) -> None:
        """Store the weight c of a new value, in (0, 1]."""
        self._coeff, self._keep = coeff, 1 - coeff
        self._value: Number = NAN
        self._part: list[Number] = [NAN, 1.0, 0.0]

    def add(self, values: Sequence[Any]) -> None:
        if isinstance(values[0], np.ndarray):  # some elements may be NaN
            for value in values:
                self._apply(value, 1.0, 0.0)
            return
        coeff, keep, shift = self._coeff, self._keep, 0.0
        if values := [value for value in values if value == value]:
            for value in values[1:]:
                shift = keep * shift + coeff * value
            self._apply(values[0], keep ** (len(values) - 1), shift)

    def _apply(self, first: Number, decay: Number, shift: Number) -> None:
        """Add values of which the first is `first`; where it is NaN, nothing changes."""
        start, old_decay, old_shift = self._part
        none, new = first != first, start != start
        step = _choose(self._value != self._value, first, self._step(self._value, first))
        self._value = _choose(none, self._value, decay * step + shift)
        joined_decay = _choose(none, old_decay, old_decay * self._keep * decay)
        joined_shift = _choose(none, old_shift, decay * self._step(old_shift, first) + shift)
        self._part = [
            _choose(new, first, start),
            _choose(new, decay, joined_decay),
            _choose(new, shift, joined_shift),
        ]

    def _step(self, old: Number, value: Number) -> Number:
        return self._keep * old + self._coeff * value

    def peek(self) -> Number:
        return self._value

    def clear(self) -> None:
        self._value, self._part = NAN, [NAN, 1.0, 0.0]

    def take(self) -> list[Number]:
        part, self._part = self._part, [NAN, 1.0, 0.0]
        return part

    def aggregate(self, parts: Sequence[list[Number]]) -> None:
        for part in parts:
            self._apply(*part)


def make_reducer(reduction: Reduction) -> Reducer:
    """Return an empty reducer for the settings of a key."""
    name, window = reduction.name, reduction.window
    if name == "percentiles":
        return Values(window, partial(_percentiles, reduction.percentiles or ()))
    if name == "item_series":
        return Values(window, list)
    if name == "item":
        return Values(1, _latest)
    if window is not None:
        return Values(window, _OF_WINDOWS[name])
    if name == "ema":
        return Ema(reduction.ema_coeff or DEFAULT_EMA_COEFF)
    if name in ("min", "max"):
        return Extreme(np.fmin if name == "min" else np.fmax)
    return Total(is_mean=name == "mean")


def reduction_of_updates(name: str) -> str:
    """Return how numbers of one name, which updates or learners report, are merged: extremes stay extremes."""
    return "min" if name.endswith("_min") else "max" if name.endswith("_max") else "mean"


_OF_WINDOWS: dict[str, Callable[[Sequence[Any]], Number]] = {
    "mean": _mean,
    "min": partial(_extreme, np.fmin),
    "max": partial(_extreme, np.fmax),
    "sum": _sum,
}


def saturated(value: Any) -> float:
    """Return a number as a float; a number beyond the largest float becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
