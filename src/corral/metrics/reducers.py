"""How the values logged under one key become one number.

Every reducer can hand out what it saw since it last did so (`take`), and take in what another one handed out
(`merge`). Merging n runners' parts gives what one reducer would have given that saw all their values in turn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

NAN = float("nan")
DEFAULT_EMA_COEFF = 0.01
REDUCTIONS = ("mean", "min", "max", "sum", "lifetime_sum", "ema")


class Reduction(NamedTuple):
    """The settings of one key.

    Attributes:
        name: One of `REDUCTIONS`.
        window: Number of latest values that count, or `None` for all since the last reduce.
        ema_coeff: Weight of a new value in an exponential moving average.
        clear_on_reduce: Whether a reduce forgets the values.
    """

    name: str
    window: int | None = None
    ema_coeff: float | None = None
    clear_on_reduce: bool = False


class Reducer(ABC):
    """Values in, one number out."""

    @abstractmethod
    def add(self, values: Sequence[float]) -> None:
        """Take in values, oldest first."""

    @abstractmethod
    def peek(self) -> float:
        """Return the number now; NaN if there is none yet."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the values."""

    @abstractmethod
    def take(self) -> Any:
        """Return what came in since the last `take`, for another reducer's `merge`."""

    @abstractmethod
    def merge(self, *parts: Any) -> None:
        """Take in the parts of other reducers that worked at the same time."""


class Window(Reducer):
    """Mean, min, max or sum of the latest values."""

    def __init__(self, name: str, window: int) -> None:
        """Keep at most `window` values."""
        self._name = name
        self._values: deque[float] = deque(maxlen=window)
        self._new: deque[float] = deque(maxlen=window)

    def add(self, values: Sequence[float]) -> None:
        self._values.extend(values)
        self._new.extend(values)

    def peek(self) -> float:
        if not self._values:
            return NAN
        if self._name == "mean":
            return math.fsum(self._values) / len(self._values)
        if self._name == "sum":
            return math.fsum(self._values)
        return min(self._values) if self._name == "min" else max(self._values)

    def clear(self) -> None:
        self._values.clear()
        self._new.clear()

    def take(self) -> list[float]:
        part = list(self._new)
        self._new.clear()
        return part

    def merge(self, *parts: list[float]) -> None:
        # Each part is spread evenly over the same time, so that no worker's values push out another's.
        timed = [((i + 1) / len(part), value) for part in parts for i, value in enumerate(part)]
        self.add([value for _, value in sorted(timed, key=lambda pair: pair[0])])


class Mean(Reducer):
    """Mean of all values since the last reduce."""

    def __init__(self) -> None:
        """Start empty."""
        self._total, self._count = 0.0, 0

    def add(self, values: Sequence[float]) -> None:
        self._total += math.fsum(values)
        self._count += len(values)

    def peek(self) -> float:
        return self._total / self._count if self._count else NAN

    def clear(self) -> None:
        self._total, self._count = 0.0, 0

    def take(self) -> tuple[float, int]:
        part = (self._total, self._count)
        self.clear()
        return part

    def merge(self, *parts: tuple[float, int]) -> None:
        self._total += math.fsum(total for total, _ in parts)
        self._count += sum(count for _, count in parts)


class Extreme(Reducer):
    """Smallest or largest value since the last reduce."""

    def __init__(self, name: str) -> None:
        """Take `"min"` or `"max"`."""
        self._pick = min if name == "min" else max
        self._value: float | None = None

    def add(self, values: Sequence[float]) -> None:
        if len(values):
            best = float(self._pick(values))
            self._value = best if self._value is None else self._pick(self._value, best)

    def peek(self) -> float:
        return NAN if self._value is None else self._value

    def clear(self) -> None:
        self._value = None

    def take(self) -> list[float]:
        part = [] if self._value is None else [self._value]
        self.clear()
        return part

    def merge(self, *parts: list[float]) -> None:
        self.add([value for part in parts for value in part])


class Sum(Reducer):
    """Sum since the last reduce, or over the lifetime."""

    def __init__(self) -> None:
        """Start at 0."""
        self._total, self._new = 0.0, 0.0

    def add(self, values: Sequence[float]) -> None:
        total = math.fsum(values)
        self._total += total
        self._new += total

    def peek(self) -> float:
        return self._total

    def clear(self) -> None:
        self._total, self._new = 0.0, 0.0

    def take(self) -> float:
        part, self._new = self._new, 0.0
        return part

    def merge(self, *parts: float) -> None:
        self.add(parts)


class Ema(Reducer):
    """Exponential moving average, started at the first value: e <- (1 - c) e + c v.

    A run of values maps e to `decay * e + shift`, so a part is those two numbers, and the first value for the case
    that nothing came before.
    """

    def __init__(self, coeff: float) -> None:
        """Take the weight c of a new value, in (0, 1]."""
        self._coeff = coeff
        self._value: float | None = None
        self._part: tuple[float, float, float] | None = None  # decay, shift, first value

    def add(self, values: Sequence[float]) -> None:
        for value in values:
            self._apply((1 - self._coeff, self._coeff * value, value))

    def _apply(self, part: tuple[float, float, float]) -> None:
        decay, shift, first = part
        # Started at the first value, its own decay and shift change nothing: (1 - c) v + c v = v.
        self._value = decay * (first if self._value is None else self._value) + shift
        if self._part is None:
            self._part = part
        else:
            self._part = (self._part[0] * decay, self._part[1] * decay + shift, self._part[2])

    def peek(self) -> float:
        return NAN if self._value is None else self._value

    def clear(self) -> None:
        self._value = self._part = None

    def take(self) -> tuple[float, float, float] | None:
        part, self._part = self._part, None
        return part

    def merge(self, *parts: tuple[float, float, float] | None) -> None:
        for part in parts:
            if part is not None:
                self._apply(part)


def make_reducer(reduction: Reduction) -> Reducer:
    """Return an empty reducer for the settings of a key."""
    if reduction.window is not None:
        return Window(reduction.name, reduction.window)
    if reduction.name == "mean":
        return Mean()
    if reduction.name in ("min", "max"):
        return Extreme(reduction.name)
    if reduction.name == "ema":
        return Ema(reduction.ema_coeff or DEFAULT_EMA_COEFF)
    return Sum()
