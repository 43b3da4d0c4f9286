"""The metrics logger: values under (nested) keys, reduced once per iteration, aggregated over workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.metrics.entry import FLUSH_AT, Entry, Part
from corral.core.metrics.keys import Keys, reserved_error
from corral.core.metrics.reducers import Values, reduction_of_updates
from corral.core.metrics.reduction_settings import (
    MetricsError,
    Path,
    Settings,
    make_reduction,
)
from corral.core.metrics.values import Key, as_path, as_value, call_site, default_reduce, fit
from corral.core.views import Viewable

__all__ = ["Key", "MetricsError", "MetricsLogger", "Parts"]

Parts = dict[Path, Part]
"""What `MetricsLogger.take` returns, by key: plain data that can be pickled."""

_NOTHING_GIVEN = Settings()
_NUMBERS = frozenset((float, int, bool))
_MISSING = object()


class MetricsLogger(Viewable):
    """Collects values under keys and reduces them.

    A value is a number (also a bool, or a 0-d array or tensor), or an array or tensor of numbers of any shape. The
    loggers that write results treat a uint8 array `[H, W, 3]` as an image, a uint8 array `[T, H, W, 3]` as a video, and
    any other array as a histogram. Tensors may be on any device.

    Reductions:
        mean, min, max, sum: Statistic of the values since the last `reduce()`, or of the latest `window` values.
        lifetime_sum: Sum of all values.
        ema: Exponential moving average e <- (1 - c) e + c v, started at the first value; c is `ema_coeff`, 0.01.
        percentiles: Dict `{"p50": ...}` of percentiles, linearly interpolated, of the values since the last `reduce()`
            or of the latest `window` values. `percentiles` lists them; by default 0, 50, 75, 90, 95, 99 and 100.
        item: The latest value, which may be a string.
        item_series: List of the values since the last `reduce()`, or of the latest `window` values.

    Without `reduce`, a number is reduced as `ema` and an array as `item`; with `window`, both as `mean`. Arrays must
    have one shape and are reduced element by element in float64. `item` and `item_series` keep arrays as they are, and
    `percentiles` accepts no arrays. Without values a sum is 0, a series is empty, and every other result is NaN.

    `reduce()`, and `take()` in a worker, forgets the values of reductions that count since the last `reduce()`.
    Windows, items, lifetime sums and moving averages continue. `clear_on_reduce` overrides this.

    NaN is the absence of a value. `item` and `item_series` show it; the other reductions skip it, element by element in
    arrays. In a window it keeps its place.

    Attributes:
        reserved: Names that no key may begin with.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, reserved: Collection[str] = frozenset()) -> None:
        """Start without keys.

        Args:
            clock: Function that returns the time in seconds, for throughputs and `log_time`.
            reserved: Names that no key may begin with.
        """
        self._clock, self.reserved = clock, reserved
        self._log_into(Keys(reserved), ())
        self.reset()

    def _log_into(self, keys: Keys, group: Path) -> None:
        self._keys, self._group = keys, group
        self._by_key = keys.as_written()  # so that later calls need no parsing
        self._reserved_by_key = keys.as_written()  # of the library's own keys

    def view(self, group: str) -> MetricsLogger:
        """Return a view of a group of keys; see `become_view`."""
        view = MetricsLogger(self._clock)
        view.become_view(self, group)
        return view

    def become_view(self, logger: MetricsLogger, group: str) -> None:
        """Log into another logger from now on, under the keys of a group: what one of the two logs, both show at once.

        What this logger had not handed over is added there. From then on it has nothing to hand over, and no state:
        `take` and `get_state` return no keys, and `set_state` adds what the logger of the state had not handed over.
        """
        logger.aggregate([self.take()], key=group)
        self._clock = logger._clock
        self._log_into(logger._keys, (*logger._group, group))

    def reset(self) -> None:
        """Forget all keys, of views too, and restart the throughputs."""
        self._keys.clear()
        self._keys.period_start = self._clock()

    def delete(self, key: Key) -> bool:
        """Forget what was logged under a key; return whether there was something.

        Raises:
            MetricsError: The key is one of the library's own.
        """
        path = (*self._group, *as_path(key))
        entry = self._keys.entries.get(path)
        if entry is None:
            return False
        if entry.is_reserved:
            raise reserved_error(path, call_site())
        self._keys.remove(entry)
        return True

    # Logging.

    def log_value(
        self,
        key: Key,
        value: Any,
        *,
        reduce: str | None = None,
        window: int | None = None,
        ema_coeff: float | None = None,
        percentiles: Sequence[float] | None = None,
        clear_on_reduce: bool | None = None,
        with_throughput: bool = False,
    ) -> None:
        """Log one value. A key keeps the settings that it was first logged with; later calls may leave them out.

        Args:
            key: A name, or a (nested) tuple of names for a nested result.
            value: A number, or an array or tensor of numbers, which is copied; for `item` also a string.
            reduce: One of the reductions; see the class.
            window: Number of latest values to reduce, at least 1.
            ema_coeff: Weight of a new value in (0, 1], for `ema`.
            percentiles: List of numbers from 0 to 100, for `percentiles`.
            clear_on_reduce: Whether `reduce()` forgets the values; see the class for the defaults.
            with_throughput: Whether the result has another key `<name>_throughput`: the sum of the values since the
                last `reduce()`, per second. For `sum` and `lifetime_sum`, without a window.

        Raises:
            MetricsError: The settings contradict each other, or the settings that the key was first logged with; the
                value is of a kind or a shape that the settings do not allow; or the key is a group of other keys, is
                below another key, or is not a key.
        """
        given = (reduce, window, ema_coeff, percentiles, clear_on_reduce, with_throughput)
        entry = self._entry_of(key)
        if entry is None or type(value) not in entry.plain or (given != entry.given and given != _NOTHING_GIVEN):
            self._log(key, [value], Settings(*given))
            return
        # Nearly every call takes this path: nothing is checked twice, and the reducer gets many values at a time.
        entry.pending.append(value)
        if len(entry.pending) >= FLUSH_AT:
            entry.flush()

    def log_values(
        self,
        key: Key,
        values: Sequence[Any] | NDArray[Any],
        *,
        reduce: str | None = None,
        window: int | None = None,
        ema_coeff: float | None = None,
        percentiles: Sequence[float] | None = None,
        clear_on_reduce: bool | None = None,
        with_throughput: bool = False,
    ) -> None:
        """Log many values under one key, oldest first; an empty sequence only adds the key.

        Args:
            key: See `log_value`.
            values: A sequence of values, or an array `[n, ...]` of n values.
            reduce: See `log_value`.
            window: See `log_value`.
            ema_coeff: See `log_value`.
            percentiles: See `log_value`.
            clear_on_reduce: See `log_value`.
            with_throughput: See `log_value`.

        Raises:
            MetricsError: See `log_value`; none of the values is logged then.
        """
        settings = Settings(reduce, window, ema_coeff, percentiles, clear_on_reduce, with_throughput)
        many: Any = values.tolist() if isinstance(values, np.ndarray) and values.ndim == 1 else list(values)
        entry = self._entry_of(key)
        if entry is None or settings != entry.given or not entry.plain.issuperset(map(type, many)):
            self._log(key, many, settings)
        else:
            entry.add(many)

    def log_reserved(
        self, values: Mapping[Any, Sequence[float]], reduce: str = "mean", window: int | None = None
    ) -> None:
        """Log numbers under the library's own keys, which `log_value` then refuses, all with the same settings.

        Args:
            values: Numbers by key, oldest first; an empty sequence only adds the key.
            reduce: One of the reductions of numbers; see the class.
            window: Number of latest values to reduce.

        Raises:
            MetricsError: User code has logged a key, or a key has other settings.
        """
        for key, numbers in values.items():
            entry = self._reserved_by_key.get(key)
            if entry is None:
                path = (*self._group, *as_path(key))
                entry = self._reserved_by_key[key] = self._keys.reserve(path, Settings(reduce, window))
            elif (entry.reduction.name, entry.reduction.window) != (reduce, window):
                self._keys.fit_reduction(entry, make_reduction(entry.path, Settings(reduce, window), "ema"), None)
            entry.pending += numbers  # which `flush` makes floats
            if len(entry.pending) >= FLUSH_AT:
                entry.flush()

    def log_update(self, group: Path, results: Mapping[str, Any]) -> None:
        """Log what an update reports, under the library's own keys; its numbers wait, and are reduced together.

        Over the updates, a number has its mean, or its minimum or maximum if the name ends with `_min` or `_max`.

        Args:
            group: Group of the keys.
            results: Numbers by name. Arrays, which callbacks add, are logged under keys of the user.
        """
        numbers = dict(results)
        if not _NUMBERS.issuperset(map(type, numbers.values())):
            for name, value in results.items():
                if isinstance(value, (float, int)) or getattr(value, "ndim", None) == 0:
                    numbers[name] = float(value)
                else:
                    self.log_dict({name: numbers.pop(name)}, key=group, reduce="mean")
        self._keys.updates.append(((*self._group, *group), numbers))
        if len(self._keys.updates) >= FLUSH_AT:
            self._logged()

    def log_dict(self, values: Mapping[str, Any], *, key: Key = (), **settings: Any) -> None:
        """Log a (nested) dict of values under `key`, all with the same settings; see `log_value`."""
        prefix = as_path(key)
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.log_dict(value, key=(*prefix, name), **settings)
            else:
                self.log_value((*prefix, name), value, **settings)

    def log_time(self, key: Key, **settings: Any) -> Timed:
        """Return a context manager that logs the seconds that its block takes, even if the block raises."""
        return Timed(self, self._clock, key, settings)

    def _entry_of(self, key: Key) -> Entry | None:
        """Return the entry of a key that was logged before in exactly this form; `None` if there is none."""
        try:
            return self._by_key.get(key)
        except TypeError:  # a list or another type that cannot be hashed, which `as_path` refuses
            return None

    def _log(self, key: Key, values: Iterable[Any], settings: Settings) -> None:
        """Check everything, then log."""
        path = (*self._group, *as_path(key))
        plain = [as_value(path, value) for value in values]
        entry = self._keys.entries.get(path)
        if entry is not None and entry.is_reserved:
            raise reserved_error(path, call_site())
        if entry is None or settings not in (_NOTHING_GIVEN, entry.given):
            reduction = make_reduction(path, settings, default_reduce(plain))
        else:
            reduction = entry.reduction
        fitted = [fit(path, reduction, value) for value in plain]
        if is_new := entry is None:
            entry = Entry(path, reduction, call_site(), settings)
        else:
            entry = self._keys.fit_reduction(entry, reduction, None)
        for value in fitted:
            entry.set_shape(value.shape if isinstance(value, np.ndarray) else ())
        if is_new:
            self._keys.add(entry)
        if settings != _NOTHING_GIVEN:
            entry.given = settings
        self._by_key[key] = entry
        entry.add(fitted)

    # Results.

    def peek(self, key: Key | None = None, default: Any = float("nan")) -> Any:
        """Return the current result of a key, and forget nothing.

        Args:
            key: A key, a group of keys for a nested dict of their results, or `None` for the results of all keys.
            default: Value to return for an unknown key; the results of all keys are a dict, which may be empty.
        """
        entries, path = self._logged(), (*self._group, *(() if key is None else as_path(key)))
        if entry := self._keys.names.get(path):
            return entry.peek() if path == entry.path else entry.throughput(self._clock() - self._keys.period_start)
        found: Any = self._results([entry for entry in entries if not path or entry.path[0] == path[0]])
        for name in path:
            found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
        if found is _MISSING:
            return {} if key is None else default
        return found

    def peek_values(self, key: Key) -> list[Any]:
        """Return the values from which the result of a key is computed, the oldest first, and forget nothing.

        Keys with a window have them, such as `("env_runners", "episode_return_mean")`, and keys of some reductions
        (percentiles, item_series). The list is empty for other keys.
        """
        self._logged()
        entry = self._keys.names.get((*self._group, *as_path(key)))
        if entry is None or entry.reduction.name == "item" or not isinstance(entry.reducer, Values):
            return []
        entry.flush()
        return entry.reducer.peek_values()

    def take_values(self, key: Key) -> list[Any]:
        """Return the values of a key with a window that came since the last call, the oldest first.

        The window keeps them here. A logger whose parts another one aggregates hands them over no more.
        """
        entry = self._keys.names.get((*self._group, *as_path(key)))
        if entry is None or not isinstance(entry.reducer, Values):
            return []
        entry.flush()
        return entry.reducer.take()[1]

    def find(self, name: str) -> Entry | None:
        """Return the key that has a name in files, such as `env_runners/episode_return_mean`, or `None`."""
        return self._keys.named(name)

    def names_of_episodes(self) -> list[str]:
        """Return the names in files of the statistics of episodes; see `names_of_unfilled`."""
        return [name for entry in self._logged() if entry.may_be_of_episodes for name in entry.flat_names()]

    def names_of_unfilled(self, *, without_window: bool) -> list[str]:
        """Return the names in files of the statistics of episodes whose window is not full.

        Statistics of episodes are what runners log, and what user code logs and is not about learners.

        Args:
            without_window: Whether the statistics that have no window count as well.
        """
        entries = [entry for entry in self._logged() if entry.may_be_of_episodes]
        windows = [entry.reduction.window for entry in entries]
        return [
            name
            for entry, window in zip(entries, windows, strict=True)
            if (without_window if window is None else len(self.peek_values(entry.path)) < window)
            for name in entry.flat_names()
        ]

    def reduce(self) -> dict[str, Any]:
        """Return all results as a nested dict, and forget the values that count only for one iteration."""
        result: dict[str, Any] = self.peek()
        self.start_period()
        return result

    def start_period(self) -> None:
        """Forget the values that count only for one iteration, as `reduce` does, without computing results."""
        for entry in self._logged():
            if entry.reduction.clear_on_reduce:
                entry.reducer.clear()
            if entry.rate is not None:
                entry.rate.clear()
        if not self._group:
            self._keys.period_start = self._clock()

    def mark(self) -> None:
        """Set the time from which on `peek_new` counts values as new."""
        for entry in self._logged():
            entry.flush()
            entry.is_new = False

    def peek_new(self) -> dict[str, Any]:
        """Return the results of those keys, as a nested dict, that received values since the last `mark`."""
        return self._results([entry for entry in self._logged() if entry.has_news()])

    def peek_reserved(self) -> dict[str, Any]:
        """Return the results of the library's own keys, as a nested dict."""
        return self._results([entry for entry in self._logged() if entry.is_reserved])

    def _logged(self) -> list[Entry]:
        """Return all keys, after logging the numbers of the updates that wait, each key once."""
        keys = self._keys
        updates, keys.updates = keys.updates, []
        columns: dict[Path, list[float]] = {}
        for group, numbers in updates:
            for name, number in numbers.items():
                columns.setdefault((*group, name), []).append(number)
        for path, values in columns.items():
            if path not in keys.of_updates:
                keys.of_updates[path] = keys.reserve(path, Settings(reduction_of_updates(path[-1])))
            keys.of_updates[path].pending += values
        entries = list(keys.entries.values())
        return [entry for entry in entries if entry.path[: len(self._group)] == self._group] if self._group else entries

    def _results(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Return the results of entries as a nested dict, with throughputs of this period."""
        elapsed_s = self._clock() - self._keys.period_start
        result: dict[str, Any] = {}
        for entry in entries:
            group = result
            for name in entry.path[:-1]:
                group = group.setdefault(name, {})
            group[entry.path[-1]] = entry.peek()
            if entry.rate is not None:
                group[entry.rate_path[-1]] = entry.throughput(elapsed_s)
        return result

    # Other loggers, and state.

    def take(self) -> Parts:
        """Return the values logged since the last `take`, for `aggregate` in another process, and start a period.

        Only the logger that aggregates is reduced. In this logger, `take` begins a new period for `peek`, as `reduce`
        does in the other one.
        """
        if self._group:
            return {}
        parts = {entry.path: entry.take() for entry in self._logged()}
        self.start_period()
        return parts

    def aggregate(self, parts: Sequence[Parts], *, key: Key = ()) -> None:
        """Add the values that other loggers logged at the same time, under `key`.

        The results are the same as if one logger had logged all the values, in one call of `aggregate` or in several.
        If the order of values matters, the values of one call are ordered as follows. Windows and series interleave
        them, as if each logger had logged its values evenly over the same time; at equal times the loggers keep their
        order. Moving averages add the values of one logger after the values of another. An item is the item of the last
        logger that has a new one. A throughput counts the values of all loggers since the last `reduce()` of this
        logger, per second of this logger's clock.

        Args:
            parts: Return values of `take`, one for each logger.
            key: Group of the keys here.

        Raises:
            MetricsError: Two loggers have a key with different settings or shapes, or a key of one is a group here or
                the reverse. No value is added then.
        """
        prefix = (*self._group, *as_path(key))
        taken = []
        for path in dict.fromkeys(path for worker in parts for path in worker):
            logged = [worker[path] for worker in parts if path in worker]
            taken.append((self._keys.entry_for((*prefix, *path), logged), logged))
        for entry, logged in taken:
            entry.aggregate(logged)

    def get_state(self) -> dict[str, Any]:
        """Return everything as plain data: dicts with string keys, lists, numbers, strings and NumPy arrays."""
        return {
            # A duration, because the clock of another process may start at any time.
            "period_s": self._clock() - self._keys.period_start,
            "keys": [] if self._group else [entry.get_state() for entry in self._logged()],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Forget all keys, and restore a state that `get_state` returned; if that fails, nothing is changed.

        A view keeps its keys; see `view`.
        """
        restored = MetricsLogger(self._clock, self.reserved)
        for entry_state in state["keys"]:
            restored._keys.add(Entry.from_state(entry_state))
        if self._group:
            self.aggregate([restored.take()])
            return
        self.reset()
        self._keys.period_start -= state["period_s"]
        for entry in restored._logged():
            self._keys.add(entry)


def check_metrics_state(state: Mapping[str, Any]) -> None:
    """Check that a logger can continue from a state; raise what the damaged part raises."""
    trial = MetricsLogger()
    trial.set_state(state)
    trial.peek()
    for entry in trial._logged():
        entry.reducer.aggregate([entry.take().data])
    trial.reduce()


class Timed:
    """The context manager of `MetricsLogger.log_time`."""

    def __init__(self, logger: MetricsLogger, clock: Callable[[], float], key: Key, settings: dict[str, Any]) -> None:
        """Store the logger, the key and its settings."""
        self._logger, self._clock, self._key, self._settings = logger, clock, key, settings

    def __enter__(self) -> None:
        """Start the clock."""
        self._start = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Log the seconds."""
        self._logger.log_value(self._key, self._clock() - self._start, **self._settings)
