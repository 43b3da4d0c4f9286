"""What the metrics logger keeps under one key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from corral.metrics.reducers import NAN, Reducer, Sum, make_reducer
from corral.metrics.reduction_settings import ELEMENTWISE, MetricsError, Path, Reduction, Settings
from corral.metrics.values import as_floats

FLUSH_AT = 256
"""Values that wait for their reducer at most: taking them in together is what makes logging one cheap."""

_NUMBERS = frozenset((float, int, bool))
_NUMBERS_FOR_FLOATS = frozenset((*_NUMBERS, *(np.dtype(code).type for code in "?bhilqBHILQefd")))


class Part(NamedTuple):
    """What was logged under one key since the last take, fit to be pickled.

    Attributes:
        reduction: The settings of the key.
        site: Where it was first logged, `file.py:line`.
        shape: Of its values, where they are reduced element by element and there was one.
        data: What its reducer took.
    """

    reduction: Reduction
    site: str
    shape: tuple[int, ...] | None
    data: Any


class Entry:
    """One key: its settings, its reducer, and the values that wait for it.

    Attributes:
        path: The key.
        reduction: Its settings.
        site: Where it was first logged, `file.py:line`.
        shape: Of its values, where they are reduced element by element and there was one.
        given: The settings as the latest call wrote them.
        plain: Types of values that can wait just as they are.
        pending: The values that wait.
        is_new: Whether the reducer was given something since the last mark.
    """

    __slots__ = ("given", "is_new", "path", "pending", "plain", "rate", "reducer", "reduction", "shape", "site")

    def __init__(self, path: Path, reduction: Reduction, site: str, given: Settings) -> None:
        """Start without values; a key that has just become known counts as new."""
        self.path, self.reduction, self.site, self.given = path, reduction, site, given
        self.reducer: Reducer = make_reducer(reduction)
        self.rate = Sum() if reduction.with_throughput else None
        self.shape: tuple[int, ...] | None = None
        self.plain: frozenset[type] = frozenset()
        if reduction.name not in ELEMENTWISE:
            self.plain = _NUMBERS_FOR_FLOATS if reduction.name == "percentiles" else _NUMBERS
        self.pending: list[Any] = []
        self.is_new = True

    @property
    def rate_path(self) -> Path:
        """The key of the throughput."""
        return (*self.path[:-1], f"{self.path[-1]}_throughput")

    def set_shape(self, shape: tuple[int, ...] | None) -> None:
        """Note the shape of the values.

        Raises:
            MetricsError: They had another one before.
        """
        if shape is None or shape == self.shape or self.reduction.name not in ELEMENTWISE:
            return
        if self.shape is not None:
            raise MetricsError(
                f"metric {'/'.join(self.path)!r}: its values, first logged at {self.site}, have the shape "
                f"{list(self.shape)}, and this one has {list(shape)}; reduce={self.reduction.name!r} works element "
                "by element."
            )
        self.shape = shape
        if not shape:
            self.plain = _NUMBERS_FOR_FLOATS

    def add(self, values: Sequence[Any]) -> None:
        """Take in values that fit, of this key's shape, oldest first."""
        if self.plain.issuperset(map(type, values)):
            self.pending += values
            if len(self.pending) >= FLUSH_AT:
                self.flush()
        else:
            self.flush()
            self._reduce(values)

    def has_news(self) -> bool:
        """Whether something came in since the last mark."""
        return self.is_new or bool(self.pending)

    def flush(self) -> None:
        """Give the reducer what waits for it."""
        if self.pending:
            values, self.pending = self.pending, []
            self._reduce(as_floats(values) if self.plain is _NUMBERS_FOR_FLOATS else values)

    def _reduce(self, values: Sequence[Any]) -> None:
        self.is_new = True
        self.reducer.add(values)
        if self.rate is not None:
            self.rate.add(values)

    def peek(self) -> Any:
        """Return the result now, of the shape of the values."""
        self.flush()
        return self._shaped(self.reducer.peek())

    def throughput(self, elapsed_s: float) -> Any:
        """Return how much was logged a second since the last reduce; NaN if no time has passed."""
        self.flush()
        assert self.rate is not None
        return self._shaped(self.rate.peek() / elapsed_s if elapsed_s > 0 else NAN)

    def _shaped(self, result: Any) -> Any:
        """Return a result that the user may change."""
        if isinstance(result, np.ndarray):
            return result.copy()
        if isinstance(result, list):
            return [value.copy() if isinstance(value, np.ndarray) else value for value in result]
        # The NaN or the 0 of no values at all.
        return np.full(self.shape, result) if self.shape else result

    def reduced(self) -> None:
        """Forget what does not outlive a reduce."""
        if self.reduction.clear_on_reduce:
            self.reducer.clear()
        if self.rate is not None:
            self.rate.clear()

    def take(self) -> Part:
        """Return what came in since the last take."""
        self.flush()
        return Part(self.reduction, self.site, self.shape, self.reducer.take())

    def aggregate(self, parts: Sequence[Part]) -> None:
        """Take in parts of this key, whose shapes fit, from loggers that worked at the same time."""
        self.flush()
        self.is_new = True
        data = [part.data for part in parts]
        self.reducer.aggregate(data)
        if self.rate is not None:
            self.rate.aggregate(data)

    def get_state(self) -> dict[str, Any]:
        """Return everything as plain data."""
        self.flush()
        reduction = {name: value for name, value in self.reduction._asdict().items() if value is not None}
        if "percentiles" in reduction:
            reduction["percentiles"] = list(reduction["percentiles"])
        state = {"path": list(self.path), "reduction": reduction, "site": self.site, "is_new": self.is_new}
        if self.shape is not None:
            state["shape"] = list(self.shape)
        if self.rate is not None:
            state["rate"] = self.rate.get_state()
        return {**state, "reducer": self.reducer.get_state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Entry:
        """Return an entry that goes on where the one of this state was."""
        reduction = Reduction(**state["reduction"])
        if reduction.percentiles is not None:
            reduction = reduction._replace(percentiles=tuple(reduction.percentiles))
        entry = cls(tuple(state["path"]), reduction, state["site"], Settings())
        entry.set_shape(tuple(state["shape"]) if "shape" in state else None)
        entry.reducer.set_state(state["reducer"])
        if entry.rate is not None:
            entry.rate.set_state(state["rate"])
        entry.is_new = state["is_new"]
        return entry
