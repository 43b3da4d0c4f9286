"""The metrics logger: values under (nested) keys, reduced once per iteration, aggregated over workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.views import Viewable
from corral.metrics.entry import FLUSH_AT, Entry, Part
from corral.metrics.reducers import Values
from corral.metrics.reduction_settings import (
    MetricsError,
    Path,
    Reduction,
    Settings,
    make_reduction,
    reduction_of_updates,
)
from corral.metrics.values import Key, as_path, as_value, call_site, default_reduce, fit

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
        self.reset()

    def reset(self) -> None:
        """Forget all keys, and restart the throughputs."""
        self._entries: dict[Path, Entry] = {}
        self._by_key: dict[Key, Entry] = {}  # by the keys as callers write them, so that later calls need no parsing
        self._reserved_by_key: dict[Key, Entry] = {}  # as well, of the library's own keys
        self._flat: dict[str, Entry] = {}  # by the names in files, which have a slash where a group ends
        self._names: dict[Path, Entry] = {}  # by all keys of a result: keys, and the keys of their throughputs
        self._groups: set[Path] = set()
        self._updates: list[tuple[Path, dict[str, Any]]] = []  # that wait to be logged, each with its group
        self._period_start = self._clock()  # a period ends with a reduce

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
        many: Any = values.tolist() if isinstance(values, np.ndarray) and values.ndim == 1 else values
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
                entry = self._reserved_by_key[key] = self._reserve(as_path(key), Settings(reduce, window))
            elif (entry.reduction.name, entry.reduction.window) != (reduce, window):
                _check_reduction(entry, make_reduction(entry.path, Settings(reduce, window), "ema"), None)
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
        self._updates.append((group, numbers))
        if len(self._updates) >= FLUSH_AT:
            self._logged()

    def _reserve(self, path: Path, given: Settings) -> Entry:
        """Return the entry of one of the library's own keys, which a checkpoint may have brought back."""
        reduction, entry = make_reduction(path, given, "ema"), self._entries.get(path)
        if entry is not None and entry.is_reserved and entry.reduction != reduction:
            self._drop(entry)  # restored from a version, or with a config, that reduced it in another way
            entry = None
        if entry is None:
            entry = self._add_entry(Entry(path, reduction, call_site(), given, is_reserved=True))
        elif not entry.is_reserved:
            raise _reserved_error(path, entry.site)
        entry.given = given
        entry.set_shape(())
        return entry

    def _drop(self, entry: Entry) -> None:
        """Forget a key, whose name stays free for the same key with other settings."""
        del self._entries[entry.path]
        self._names = {path: other for path, other in self._names.items() if other is not entry}
        self._flat = {name: other for name, other in self._flat.items() if other is not entry}

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
        path = as_path(key)
        plain = [as_value(path, value) for value in values]
        entry = self._entries.get(path)
        if entry is not None and entry.is_reserved:
            raise _reserved_error(path, call_site())
        if entry is None or settings not in (_NOTHING_GIVEN, entry.given):
            reduction = make_reduction(path, settings, default_reduce(plain))
            if entry is not None:
                _check_reduction(entry, reduction, None)
        else:
            reduction = entry.reduction
        fitted = [fit(path, reduction, value) for value in plain]
        if is_new := entry is None:
            entry = Entry(path, reduction, call_site(), settings)
        for value in fitted:
            entry.set_shape(value.shape if isinstance(value, np.ndarray) else ())
        if is_new:
            self._add_entry(entry)
        if settings != _NOTHING_GIVEN:
            entry.given = settings
        self._by_key[key] = entry
        entry.add(fitted)

    def _add_entry(self, entry: Entry) -> Entry:
        """Add a key, unless its name is taken."""
        paths = (entry.path, entry.rate_path) if entry.reduction.with_throughput else (entry.path,)
        for path in paths:
            self._check_free(path, entry.site)
        flat = entry.flat_names()
        for name in flat:
            if name in self._flat:
                other = self._flat[name]
                raise MetricsError(
                    f"metric {entry.path!r}, logged at {entry.site}, and metric {other.path!r}, logged at "
                    f"{other.site}, have one name in files, {name!r}: rename one of them."
                )
        for path in paths:
            self._names[path] = entry
        self._flat |= dict.fromkeys(flat, entry)
        self._groups.update(entry.path[:length] for length in range(1, len(entry.path)))
        self._entries[entry.path] = entry
        return entry

    def _check_free(self, path: Path, site: str) -> None:
        if not path:
            raise MetricsError("the key of a metric needs at least one name, and () has none.")
        group = path[0].partition("/")[0]
        if group in self.reserved:
            raise MetricsError(
                f"metric {'/'.join(path)!r}, logged at {site}: the result uses {group!r} for something else; choose "
                "another name."
            )
        above = [path[:length] for length in range(1, len(path) + 1) if path[:length] in self._names]
        if not above and path not in self._groups:
            return
        other = above[0] if above else next(name for name in self._names if name[: len(path)] == path)
        raise MetricsError(
            f"metric {'/'.join(path)!r}, logged at {site}: {'/'.join(other)!r} is logged too, at "
            f"{self._names[other].site}, and a name can be a value or a group of values, not both."
        )

    # Results.

    def peek(self, key: Key | None = None, default: Any = float("nan")) -> Any:
        """Return the current result of a key, and forget nothing.

        Args:
            key: A key, a group of keys for a nested dict of their results, or `None` for the results of all keys.
            default: Value to return for an unknown key.
        """
        entries, path = self._logged(), () if key is None else as_path(key)
        if entry := self._names.get(path):
            return entry.peek() if path == entry.path else entry.throughput(self._clock() - self._period_start)
        nearby = [entry for entry in entries if not path or entry.path[0] == path[0]]
        found: Any = self._results(nearby, self._period_start)
        for name in path:
            found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
        return default if found is _MISSING else found

    def peek_values(self, key: Key) -> list[Any]:
        """Return the values from which the result of a key is computed, the oldest first, and forget nothing.

        Keys with a window have them, such as `("env_runners", "episode_return_mean")`, and keys of some reductions
        (percentiles, item_series). The list is empty for other keys.
        """
        self._logged()
        entry = self._names.get(as_path(key))
        if entry is None or entry.reduction.name == "item" or not isinstance(entry.reducer, Values):
            return []
        entry.flush()
        return entry.reducer.peek_values()

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
        self._period_start = self._clock()

    def mark(self) -> None:
        """Set the time from which on `peek_new` counts values as new."""
        for entry in self._logged():
            entry.flush()
            entry.is_new = False

    def peek_new(self) -> dict[str, Any]:
        """Return the results of those keys, as a nested dict, that received values since the last `mark`."""
        return self._results([entry for entry in self._logged() if entry.has_news()], self._period_start)

    def peek_reserved(self) -> dict[str, Any]:
        """Return the results of the library's own keys, as a nested dict."""
        return self._results([entry for entry in self._logged() if entry.is_reserved], self._period_start)

    def _logged(self) -> list[Entry]:
        """Return all keys, after logging the numbers of the updates that wait, each key once."""
        updates, self._updates = self._updates, []
        columns: dict[Path, list[float]] = {}
        for group, numbers in updates:
            for name, number in numbers.items():
                columns.setdefault((*group, name), []).append(number)
        for path, values in columns.items():
            if path not in self._reserved_by_key:
                self._reserved_by_key[path] = self._reserve(path, Settings(reduction_of_updates(path[-1])))
            self._reserved_by_key[path].pending += values
        return list(self._entries.values())

    def _results(self, entries: Sequence[Entry], since: float) -> dict[str, Any]:
        """Return the results of entries as a nested dict, with throughputs since a reading of the clock."""
        elapsed_s = self._clock() - since
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
        prefix = as_path(key)
        taken = []
        for path in dict.fromkeys(path for worker in parts for path in worker):
            logged = [worker[path] for worker in parts if path in worker]
            taken.append((self._entry_for((*prefix, *path), logged), logged))
        for entry, logged in taken:
            entry.aggregate(logged)

    def _entry_for(self, path: Path, parts: Sequence[Part]) -> Entry:
        entry = self._entries.get(path)
        if entry is None:
            first = parts[0]
            entry = Entry(path, first.reduction, first.site, _NOTHING_GIVEN, is_reserved=first.is_reserved)
            self._add_entry(entry)
        for part in parts:
            if part.is_reserved != entry.is_reserved:
                raise _reserved_error(path, entry.site if part.is_reserved else part.site)
            _check_reduction(entry, part.reduction, part.site)
            entry.set_shape(part.shape)
        return entry

    def get_state(self) -> dict[str, Any]:
        """Return everything as plain data: dicts with string keys, lists, numbers, strings and NumPy arrays."""
        return {
            # A duration, because the clock of another process may start at any time.
            "period_s": self._clock() - self._period_start,
            "keys": [entry.get_state() for entry in self._logged()],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Forget all keys, and restore a state that `get_state` returned; if that fails, nothing is changed."""
        restored = MetricsLogger(self._clock, self.reserved)
        restored._period_start = self._clock() - state["period_s"]
        for entry_state in state["keys"]:
            restored._add_entry(Entry.from_state(entry_state))
        vars(self).update(vars(restored))


def check_metrics_state(state: Mapping[str, Any]) -> None:
    """Check that a logger can continue from a state; raise what the damaged part raises."""
    trial = MetricsLogger()
    trial.set_state(state)
    trial.peek()
    for entry in trial._entries.values():
        entry.reducer.aggregate([entry.take().data])
    trial.reduce()


def _reserved_error(path: Path, site: str) -> MetricsError:
    """Return the error for user code that logs a key of the library's own, with the place where it does."""
    return MetricsError(
        f"metric {'/'.join(path)!r}, logged at {site}: the result has a number of this name, which the library logs; "
        "choose another name."
    )


def _check_reduction(entry: Entry, reduction: Reduction, site: str | None) -> None:
    """Refuse settings other than the settings of the key; `site` is where they were given, `None` for this call."""
    if entry.reduction != reduction:
        raise MetricsError(
            f"metric {'/'.join(entry.path)!r} was logged as {entry.reduction} at {entry.site}, and now as {reduction} "
            f"at {site or call_site()}: give a key the same settings in all places."
        )


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
