"""One key of a metrics logger: its settings and its values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np

from corral.core.metrics.reducers import NAN, Reducer, Total, Values, make_reducer, saturated
from corral.core.metrics.reduction_settings import ELEMENTWISE, MetricsError, Path, Reduction, Settings

FLUSH_AT = 256
"""Number of values at which waiting values go to their reducer: reducing them together makes logging one cheap."""

_NUMBERS = frozenset((float, int, bool))
_NUMBERS_FOR_FLOATS = frozenset((*_NUMBERS, *(np.dtype(code).type for code in "?bhilqBHILQefd")))


class Part(NamedTuple):
    """The values logged under one key since the last `take`, as plain data that can be pickled.

    Attributes:
        reduction: Settings of the key.
        site: Place in the code where the key was first logged, `file.py:line`.
        shape: Shape of its values if they are reduced element by element; `None` otherwise and without values.
        data: What `take` of its reducer returned.
        is_reserved: Whether the key is one of the library's own.
    """

    reduction: Reduction
    site: str
    shape: tuple[int, ...] | None
    data: Any
    is_reserved: bool = False


class Entry:
    """One key: its settings, its reducer, and the values that wait to be reduced.

    Attributes:
        path: The key.
        reduction: Settings of the key.
        site: Place in the code where the key was first logged, `file.py:line`.
        shape: Shape of its values if they are reduced element by element; `None` otherwise and without values.
        given: Settings as the latest call gave them.
        plain: Types of values that need no conversion.
        pending: Values that wait to be reduced.
        is_new: Whether the reducer received values since the last `mark`.
        is_reserved: Whether the key is one of the library's own, which user code cannot log.
        is_restored: Whether a checkpoint brought the key, and nothing has logged it since.
    """

    __slots__ = (
        "given",
        "is_new",
        "is_reserved",
        "is_restored",
        "path",
        "pending",
        "plain",
        "rate",
        "reducer",
        "reduction",
        "shape",
        "site",
    )

    def __init__(
        self, path: Path, reduction: Reduction, site: str, given: Settings, *, is_reserved: bool = False
    ) -> None:
        """Start without values; a key that was just added counts as new."""
        self.path, self.reduction, self.site, self.given = path, reduction, site, given
        self.is_reserved, self.is_restored = is_reserved, False
        self.reducer: Reducer = make_reducer(reduction)
        self.rate = Total() if reduction.with_throughput else None
        self.shape: tuple[int, ...] | None = None
        self.plain: frozenset[type] = frozenset()
        if reduction.name not in ELEMENTWISE:
            self.plain = _NUMBERS_FOR_FLOATS if reduction.name == "percentiles" else _NUMBERS
        self.pending: list[Any] = []
        self.is_new = True

    @property
    def rate_path(self) -> Path:
        """Key of the throughput."""
        return (*self.path[:-1], f"{self.path[-1]}_throughput")

    @property
    def num_values(self) -> int:
        """Values that a key with a window has received, since `take_values` if it was called; 0 without a window."""
        self.flush()
        return self.reducer.num_new if isinstance(self.reducer, Values) else 0

    @property
    def may_be_of_episodes(self) -> bool:
        """Whether it is a statistic, and not a count, and may be one of training episodes."""
        group, (name, window) = self.path[0], self.reduction[:2]
        is_count = name in ("item", "item_series", "lifetime_sum") or (name == "sum" and window is None)
        return not is_count and (group == "env_runners" or not (self.is_reserved or group == "learners"))

    def flat_names(self) -> list[str]:
        """Return the names of its numbers in files, where a slash ends a group."""
        name, percentiles = "/".join(self.path), self.reduction.percentiles
        names = [name] if percentiles is None else [f"{name}/p{percent:g}" for percent in percentiles]
        return [*names, "/".join(self.rate_path)] if self.rate is not None else names

    def set_shape(self, shape: tuple[int, ...] | None) -> None:
        """Set the shape of the values.

        Raises:
            MetricsError: The values so far have another shape.
        """
        if shape is None or shape == self.shape or self.reduction.name not in ELEMENTWISE:
            return
        if self.shape is not None:
            raise MetricsError(
                f"metric {'/'.join(self.path)!r}: its values, first logged at {self.site}, have the shape "
                f"{list(self.shape)}, and this value has the shape {list(shape)}; reduce={self.reduction.name!r} needs "
                "values of one shape."
            )
        self.shape = shape
        if not shape:
            self.plain = _NUMBERS_FOR_FLOATS

    def add(self, values: Sequence[Any]) -> None:
        """Add values of the right kind and shape, oldest first."""
        self.pending += values
        if len(self.pending) >= FLUSH_AT or not self.plain.issuperset(map(type, values)):
            self.flush()

    def has_news(self) -> bool:
        """Return whether values were added since the last `mark`."""
        return self.is_new or bool(self.pending)

    def flush(self) -> None:
        """Reduce the values that wait."""
        if self.pending:
            values, self.pending = self.pending, []
            if self.plain is _NUMBERS_FOR_FLOATS:
                try:
                    values = list(map(float, values))
                except OverflowError:
                    values = list(map(saturated, values))
            self.is_new = True
            self.reducer.add(values)
            if self.rate is not None:
                self.rate.add(values)

    def peek(self) -> Any:
        """Return the current result, in the shape of the values."""
        if self.pending:
            self.flush()
        result = self.reducer.peek()
        return result if type(result) is float and not self.shape else self._shaped(result)

    def forget(self) -> None:
        """Begin again without values."""
        self.pending, self.reducer = [], make_reducer(self.reduction)

    def throughput(self, elapsed_s: float) -> Any:
        """Return the sum logged per second since the last reduce; NaN if no time has passed."""
        self.flush()
        assert self.rate is not None
        return self._shaped(self.rate.peek() / elapsed_s if elapsed_s > 0 else NAN)

    def _shaped(self, result: Any) -> Any:
        """Return a copy of a result, so that the user may change it, in the shape of the values."""
        if isinstance(result, np.ndarray):
            return result.copy()
        if isinstance(result, list):
            return [value.copy() if isinstance(value, np.ndarray) else value for value in result]
        # Without values, a result is one NaN or 0.
        return np.full(self.shape, result) if self.shape else result

    def take(self) -> Part:
        """Return the values added since the last `take`."""
        self.flush()
        return Part(self.reduction, self.site, self.shape, self.reducer.take(), self.is_reserved)

    def aggregate(self, parts: Sequence[Part]) -> None:
        """Add the parts of this key from loggers that worked at the same time; their shapes must fit."""
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
        # Of the library's own keys, a state does not tell where this library is installed.
        site = "/".join(FilePath(self.site).parts[-2:]) if self.is_reserved else self.site
        state = {"path": list(self.path), "reduction": reduction, "site": site, "is_new": self.is_new}
        if self.shape is not None:
            state["shape"] = list(self.shape)
        if self.rate is not None:
            state["rate"] = self.rate.get_state()
        if self.is_reserved:
            state["is_reserved"] = True
        return {**state, "reducer": self.reducer.get_state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Entry:
        """Return an entry with a state that `get_state` returned."""
        reduction = Reduction(**state["reduction"])
        if reduction.percentiles is not None:
            reduction = reduction._replace(percentiles=tuple(reduction.percentiles))
        is_reserved = state.get("is_reserved", False)
        entry = cls(tuple(state["path"]), reduction, state["site"], Settings(), is_reserved=is_reserved)
        entry.set_shape(tuple(state["shape"]) if "shape" in state else None)
        entry.reducer.set_state(state["reducer"])
        if entry.rate is not None:
            entry.rate.set_state(state["rate"])
        entry.is_new, entry.is_restored = state["is_new"], True
        return entry

    def with_reduction(self, reduction: Reduction, site: str) -> Entry:
        """Return an entry for the same key with other settings; in a window of another length it keeps its values."""
        entry = Entry(self.path, reduction, site, Settings(), is_reserved=self.is_reserved)
        if self.reduction._replace(window=reduction.window) == reduction and None not in (
            self.reduction.window,
            reduction.window,
        ):
            entry.set_shape(self.shape)
            entry.reducer.set_state(self.reducer.get_state())
        return entry
