"""The metrics logger: values under (nested) keys, reduced once an iteration, merged over workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from corral.errors import CorralError, nearest
from corral.metrics.reducers import DEFAULT_EMA_COEFF, REDUCTIONS, Reducer, Reduction, make_reducer

Key = str | tuple[str, ...]
Parts = dict[tuple[str, ...], tuple[Reduction, Any]]
"""What `MetricsLogger.take` hands out: plain data, fit to be pickled."""


class MetricsError(CorralError, ValueError):
    """A value was logged with settings that contradict each other, or that the key already has otherwise."""


class MetricsLogger:
    """Collects values under keys and reduces them.

    Without `reduce`, a key is an exponential moving average with coefficient 0.01, or with `window` the mean over the
    window. `mean`, `min`, `max` and `sum` without a window start anew after each `reduce()`; a window, a
    `lifetime_sum` and an `ema` go on.
    """

    def __init__(self) -> None:
        """Start without keys."""
        self._reducers: dict[tuple[str, ...], tuple[Reduction, Reducer]] = {}

    def log_value(
        self,
        key: Key,
        value: float,
        *,
        reduce: str | None = None,
        window: int | None = None,
        ema_coeff: float | None = None,
        clear_on_reduce: bool | None = None,
    ) -> None:
        """Log one number.

        Args:
            key: A name, or a tuple of names for a nested result.
            value: A number or 0-d array.
            reduce: One of `mean`, `min`, `max`, `sum`, `lifetime_sum`, `ema`; see the class.
            window: Number of latest values that count.
            ema_coeff: Weight of a new value in (0, 1], for `ema`.
            clear_on_reduce: Whether `reduce()` forgets the values; see the class for the defaults.

        Raises:
            MetricsError: The settings contradict each other, or those that the key was first logged with; or the key is
                a group of other keys, or lies below another key.
        """
        values = [float(value)]
        self.log_values(key, values, reduce=reduce, window=window, ema_coeff=ema_coeff, clear_on_reduce=clear_on_reduce)

    def log_values(
        self,
        key: Key,
        values: Sequence[float] | np.ndarray[Any, Any],
        *,
        reduce: str | None = None,
        window: int | None = None,
        ema_coeff: float | None = None,
        clear_on_reduce: bool | None = None,
    ) -> None:
        """Log many numbers under one key, oldest first; an empty sequence only makes the key known."""
        numbers: Sequence[float] = values.tolist() if isinstance(values, np.ndarray) else values
        path = (key,) if isinstance(key, str) else tuple(key)
        entry = self._reducers.get(path)
        if entry is None or (reduce, window, ema_coeff, clear_on_reduce) != (None, None, None, None):
            reduction = _reduction(path, reduce, window, ema_coeff, clear_on_reduce)
            entry = self._entry(path, reduction)
        entry[1].add(numbers)

    def log_dict(self, values: Mapping[str, Any], *, key: Key = (), **settings: Any) -> None:
        """Log a (nested) dict of numbers under `key`, all with the same settings as `log_value` takes."""
        prefix = (key,) if isinstance(key, str) else tuple(key)
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.log_dict(value, key=(*prefix, name), **settings)
            else:
                self.log_value((*prefix, name), value, **settings)

    @contextmanager
    def log_time(self, key: Key, **settings: Any) -> Iterator[None]:
        """Log the wall-clock seconds that a block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.log_value(key, time.perf_counter() - start, **settings)

    def peek(self, key: Key | None = None, default: float = float("nan")) -> Any:
        """Return the number under a key now (`default` if there is none), or without a key all as a nested dict."""
        if key is None:
            return _nested({path: reducer.peek() for path, (_, reducer) in self._reducers.items()})
        entry = self._reducers.get((key,) if isinstance(key, str) else tuple(key))
        return default if entry is None else entry[1].peek()

    def reduce(self) -> dict[str, Any]:
        """Return all numbers as a nested dict, and forget what does not outlive an iteration."""
        result: dict[str, Any] = self.peek()
        for reduction, reducer in self._reducers.values():
            if reduction.clear_on_reduce:
                reducer.clear()
        return result

    def take(self) -> Parts:
        """Return what was logged since the last `take`, for `merge` in another process.

        Windows, sums and averages stay for `peek`; `mean`, `min` and `max` start anew, as after `reduce`.
        """
        return {path: (reduction, reducer.take()) for path, (reduction, reducer) in self._reducers.items()}

    def merge(self, *workers: Parts, key: Key = ()) -> None:
        """Take in the parts of other loggers that logged at the same time, under `key`.

        Raises:
            MetricsError: A key that both have is reduced in different ways.
        """
        prefix = (key,) if isinstance(key, str) else tuple(key)
        for path in dict.fromkeys(path for parts in workers for path in parts):
            logged = [parts[path] for parts in workers if path in parts]
            reducers = [self._entry((*prefix, *path), reduction)[1] for reduction, _ in logged]
            reducers[0].merge(*(part for _, part in logged))

    def _entry(self, path: tuple[str, ...], reduction: Reduction) -> tuple[Reduction, Reducer]:
        """Return what is kept under a path, made if need be, if it is reduced this way."""
        entry = self._reducers.get(path)
        if entry is None:
            for other in self._reducers:
                if path == other[: len(path)] or other == path[: len(other)]:
                    raise MetricsError(
                        f"metric {'/'.join(path)!r}: {'/'.join(other)!r} is logged too, and a key is a number or a "
                        "group of numbers, not both."
                    )
            entry = self._reducers[path] = (reduction, make_reducer(reduction))
        elif entry[0] != reduction:
            raise MetricsError(f"metric {'/'.join(path)!r} was logged as {entry[0]}, and now as {reduction}.")
        return entry


def _reduction(
    path: tuple[str, ...], name: str | None, window: int | None, ema_coeff: float | None, clear: bool | None
) -> Reduction:
    """Fill in the defaults and refuse contradictions."""
    where = f"metric {'/'.join(path)!r}"
    if name is None:
        name = "mean" if window is not None else "ema"
    if name not in REDUCTIONS:
        raise MetricsError(f"{where}: unknown reduce {name!r}. {nearest(name, REDUCTIONS)}")
    if window is not None and ema_coeff is not None:
        raise MetricsError(f"{where}: window={window} and ema_coeff={ema_coeff} exclude each other.")
    if window is not None and (name in ("ema", "lifetime_sum") or window < 1):
        raise MetricsError(f"{where}: window={window} does not go with reduce={name!r}.")
    if ema_coeff is not None and name != "ema":
        raise MetricsError(f"{where}: ema_coeff={ema_coeff} does not go with reduce={name!r}.")
    if ema_coeff is not None and not 0 < ema_coeff <= 1:
        raise MetricsError(f"{where}: ema_coeff={ema_coeff} must lie in (0, 1].")
    if name == "ema":
        ema_coeff = DEFAULT_EMA_COEFF if ema_coeff is None else ema_coeff
    if clear and name == "lifetime_sum":
        raise MetricsError(f"{where}: clear_on_reduce=True contradicts reduce='lifetime_sum'; use 'sum'.")
    if clear is None:
        clear = window is None and name in ("mean", "min", "max", "sum")
    return Reduction(name, window, ema_coeff, clear)


def _nested(flat: Mapping[tuple[str, ...], float]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        node = nested
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return nested
