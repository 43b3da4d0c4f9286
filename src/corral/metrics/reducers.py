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

from corral.metrics.reduction_settings import DEFAULT_EMA_COEFF, Reduction

NAN = float("nan")

Number = float | NDArray[Any]


def _total(values: Sequence[Any]) -> Number:
    """Return the sum of numbers or of arrays; 0 without values."""
    if len(values) and isinstance(values[0], np.ndarray):
        return np.sum(values, axis=0, dtype=np.float64)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the largest float
        return float(sum(values))


def _mean(values: Sequence[Any]) -> Number:
    return _total(values) / len(values)


def _extreme(pick: Callable[..., Any], values: Sequence[Any]) -> Number:
    """Return `np.min` or `np.max` over axis 0. Unlike Python's `min` and `max`, the result is NaN if a value is NaN."""
    best = pick(np.asarray(values, np.float64), axis=0)
    return best if best.ndim else float(best)


_min, _max = partial(_extreme, np.min), partial(_extreme, np.max)


def _percentiles(percents: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, percents) if len(values) else [NAN] * len(percents)
    return {f"p{percent:g}": float(value) for percent, value in zip(percents, found, strict=True)}


_SUMMARIES: dict[str, Callable[[Sequence[Any]], Number]] = {"mean": _mean, "min": _min, "max": _max, "sum": _total}


def _if_any(summary: Callable[[Sequence[Any]], Number], values: Sequence[Any]) -> Number:
    return summary(values) if values else NAN


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
        """Return what was added since the last `take`, for `aggregate` of another reducer."""

    @abstractmethod
    def aggregate(self, parts: Sequence[Any]) -> None:
        """Add the parts of other reducers that worked at the same time."""

    def get_state(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        values = {name: getattr(self, name) for name in self.STATE}
        return {name: list(value) if isinstance(value, (list, deque)) else value for name, value in values.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `get_state` returned."""
        for name in self.STATE:
            old, value = getattr(self, name), state[name]
            if isinstance(old, deque):
                value = deque(value, maxlen=old.maxlen)
            setattr(self, name, list(value) if isinstance(value, list) else value)


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

    def clear(self) -> None:
        self._values.clear()
        self._forget_new()

    def _forget_new(self) -> None:
        self._new.clear()
        self._num_new = 0

    def take(self) -> tuple[int, list[Any]]:
        part = (self._num_new, list(self._new))
        self._forget_new()
        if self._window is None:
            self._values.clear()  # a worker is never reduced, and would keep more and more values
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


class Mean(Reducer):
    """Mean of all values since the last reduce."""

    STATE = ("_total", "_count")

    def __init__(self) -> None:
        """Start empty."""
        self._total: Number = 0.0
        self._count = 0

    def add(self, values: Sequence[Any]) -> None:
        self._total = self._total + _total(values)
        self._count += len(values)

    def peek(self) -> Number:
        return self._total / self._count if self._count else NAN

    def clear(self) -> None:
        self._total, self._count = 0.0, 0

    def take(self) -> tuple[Number, int]:
        part = (self._total, self._count)
        self.clear()
        return part

    def aggregate(self, parts: Sequence[tuple[Number, int]]) -> None:
        for total, count in parts:
            self._total = self._total + total
            self._count += count


class Extreme(Reducer):
    """Smallest or largest value since the last reduce; NaN if a value was NaN."""

    STATE = ("_best",)

    def __init__(self, pick: Callable[[Sequence[Any]], Number]) -> None:
        """Store the function that returns the smallest or the largest of values."""
        self._pick = pick
        self._best: list[Number] = []  # none or one

    def add(self, values: Sequence[Any]) -> None:
        self._best = [self._pick([*self._best, *values])]

    def peek(self) -> Number:
        return self._best[0] if self._best else NAN

    def clear(self) -> None:
        self._best = []

    def take(self) -> list[Number]:
        part = self._best
        self.clear()
        return part

    def aggregate(self, parts: Sequence[list[Number]]) -> None:
        if best := [value for part in parts for value in part]:
            self.add(best)


class Sum(Reducer):
    """Sum since the last reduce, or over the lifetime."""

    STATE = ("_total", "_new")

    def __init__(self) -> None:
        """Start at 0."""
        self._total: Number = 0.0
        self._new: Number = 0.0

    def add(self, values: Sequence[Any]) -> None:
        total = _total(values)
        self._total = self._total + total
        self._new = self._new + total

    def peek(self) -> Number:
        return self._total

    def clear(self) -> None:
        self._total, self._new = 0.0, 0.0

    def take(self) -> Number:
        part, self._new = self._new, 0.0
        return part

    def aggregate(self, parts: Sequence[Number]) -> None:
        for part in parts:  # one by one: the part of a worker without values is 0, not an array
            self.add([part])


class Ema(Reducer):
    """Exponential moving average, started at the first value: e <- (1 - c) e + c v.

    After the first value v, further values map e to `decay * e + shift`; a part is `[v, decay, shift]`, or empty.
    """

    STATE = ("_value", "_part")

    def __init__(self, coeff: float) -> None:
        """Store the weight c of a new value, in (0, 1]."""
        self._coeff, self._keep = coeff, 1 - coeff
        self._value: list[Number] = []  # none or one
        self._part: list[Number] = []

    def add(self, values: Sequence[Any]) -> None:
        coeff, keep, shift = self._coeff, self._keep, 0.0
        for value in values[1:]:
            shift = keep * shift + coeff * value
        self._apply(values[0], keep ** (len(values) - 1), shift)

    def _apply(self, first: Number, decay: Number, shift: Number) -> None:
        self._value = [decay * (self._step(self._value[0], first) if self._value else first) + shift]
        if self._part:
            start, old_decay, old_shift = self._part
            self._part = [start, old_decay * self._keep * decay, decay * self._step(old_shift, first) + shift]
        else:
            self._part = [first, decay, shift]

    def _step(self, old: Number, value: Number) -> Number:
        return self._keep * old + self._coeff * value

    def peek(self) -> Number:
        return self._value[0] if self._value else NAN

    def clear(self) -> None:
        self._value, self._part = [], []

    def take(self) -> list[Number]:
        part, self._part = self._part, []
        return part

    def aggregate(self, parts: Sequence[list[Number]]) -> None:
        for part in parts:
            if part:
                self._apply(*part)


class Item(Reducer):
    """Latest value, of any kind."""

    STATE = ("_item", "_is_new")

    def __init__(self) -> None:
        """Start without a value."""
        self._item: list[Any] = []  # none or one
        self._is_new = False

    def add(self, values: Sequence[Any]) -> None:
        self._item, self._is_new = [values[-1]], True

    def peek(self) -> Any:
        return self._item[0] if self._item else NAN

    def clear(self) -> None:
        self._item, self._is_new = [], False

    def take(self) -> list[Any]:
        part = self._item if self._is_new else []
        self._is_new = False
        return part

    def aggregate(self, parts: Sequence[list[Any]]) -> None:
        if items := [item for part in parts for item in part]:
            self.add(items)


def make_reducer(reduction: Reduction) -> Reducer:
    """Return an empty reducer for the settings of a key."""
    name, window = reduction.name, reduction.window
    if name == "percentiles":
        return Values(window, partial(_percentiles, reduction.percentiles or ()))
    if name == "item_series":
        return Values(window, list)
    if name == "item":
        return Item()
    if window is not None:
        return Values(window, partial(_if_any, _SUMMARIES[name]))
    if name == "mean":
        return Mean()
    if name in ("min", "max"):
        return Extreme(_min if name == "min" else _max)
    if name == "ema":
        return Ema(reduction.ema_coeff or DEFAULT_EMA_COEFF)
    return Sum()
