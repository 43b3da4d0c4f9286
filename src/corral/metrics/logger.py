"""The metrics logger: values under (nested) keys, reduced once an iteration, aggregated over workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.metrics.entry import FLUSH_AT, Entry, Part
from corral.metrics.reduction_settings import MetricsError, Path, Reduction, Settings, make_reduction
from corral.metrics.values import Key, as_path, as_value, call_site, default_reduce, fit

__all__ = ["Key", "MetricsError", "MetricsLogger", "Parts"]

Parts = dict[Path, Part]
"""What `MetricsLogger.take` hands out: plain data, fit to be pickled."""

_NOTHING_GIVEN = Settings()
_MISSING = object()


class MetricsLogger:
    """Collects values under keys and reduces them.

    A value is a number (a bool and a 0-d array or tensor too), or an array or tensor of numbers of any shape: a
    `[H, W, 3]` uint8 array is an image, a `[T, H, W, 3]` one a video, and any other a histogram to the loggers that
    write results; here they are arrays. Tensors may be on any device.

    Reductions:
        mean, min, max, sum: Of the values since the last `reduce()`, or of the latest `window`.
        lifetime_sum: Of all values.
        ema: The exponential moving average e <- (1 - c) e + c v, started at the first value; c is `ema_coeff`, 0.01.
        percentiles: A dict `{"p50": ...}` of numbers, linearly interpolated, of the values since the last `reduce()`
            or of the latest `window`; which ones is `percentiles`, by default 0, 50, 75, 90, 95, 99 and 100.
        item: The latest value, a string too.
        item_series: The list of the values since the last `reduce()`, or of the latest `window`.

    Without `reduce`, a number's key is an `ema`, an array's an `item`, and with `window` either's a `mean`. Arrays are
    reduced element by element in float64, all of one shape; `item` and `item_series` keep them as they are, and
    `percentiles` takes none. Of no values at all, a sum is 0, a series empty, and everything else NaN.

    `reduce()` clears what counts since the last `reduce()`; a window, an item, a lifetime sum and an average go on.
    `clear_on_reduce` says so where that does not fit.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, reserved: Collection[str] = frozenset()) -> None:
        """Start without keys.

        Args:
            clock: Gives the time in seconds, for throughputs and `log_time`.
            reserved: First names that no key may have.
        """
        self._clock, self._reserved = clock, reserved
        self.reset()

    def reset(self) -> None:
        """Forget all keys, and start throughputs anew."""
        self._entries: dict[Path, Entry] = {}
        self._by_key: dict[Key, Entry] = {}  # by the keys as callers write them, to spare the calls after the first
        self._names: dict[Path, Entry] = {}  # what a result has numbers under: keys, and their throughputs
        self._groups: set[Path] = set()
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
            value: A number, or an array or tensor of numbers, of which a copy is kept; for an `item` a string too.
            reduce: One of the reductions; see the class.
            window: Number of latest values that count, at least 1.
            ema_coeff: Weight of a new value in (0, 1], for `ema`.
            percentiles: List of numbers from 0 to 100, for `percentiles`.
            clear_on_reduce: Whether `reduce()` forgets the values; see the class for the defaults.
            with_throughput: Whether the result has a key `<name>_throughput` beside this one: the sum of the values
                since the last `reduce()`, a second. For `sum` and `lifetime_sum`, without a window.

        Raises:
            MetricsError: The settings contradict each other, or those that the key was first logged with; the value is
                of a kind, or of a shape, that does not go with them; or the key is a group of other keys, lies below
                another key, or is no key.
        """
        given = (reduce, window, ema_coeff, percentiles, clear_on_reduce, with_throughput)
        entry = self._entry_of(key)
        if entry is None or type(value) not in entry.plain or (given != entry.given and given != _NOTHING_GIVEN):
            self._log(key, [value], Settings(*given))
            return
        # The way of nearly every call: nothing is looked at twice, and the reducer gets many values at a time.
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
        """Log many values under one key, oldest first; an empty sequence only makes the key known.

        Args:
            key: As in `log_value`, like the settings.
            values: A sequence of values, or an array `[n, ...]` of n of them.
            reduce: See `log_value`.
            window: See `log_value`.
            ema_coeff: See `log_value`.
            percentiles: See `log_value`.
            clear_on_reduce: See `log_value`.
            with_throughput: See `log_value`.

        Raises:
            MetricsError: As in `log_value`; none of the values is logged then.
        """
        settings = Settings(reduce, window, ema_coeff, percentiles, clear_on_reduce, with_throughput)
        many: Any = values.tolist() if isinstance(values, np.ndarray) and values.ndim == 1 else values
        entry = self._entry_of(key)
        if entry is None or settings != entry.given or not entry.plain.issuperset(map(type, many)):
            self._log(key, many, settings)
        else:
            entry.add(many)

    def log_dict(self, values: Mapping[str, Any], *, key: Key = (), **settings: Any) -> None:
        """Log a (nested) dict of values under `key`, all with the same settings as `log_value` takes."""
        prefix = as_path(key)
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.log_dict(value, key=(*prefix, name), **settings)
            else:
                self.log_value((*prefix, name), value, **settings)

    def log_time(self, key: Key, **settings: Any) -> Timed:
        """Return a context manager that logs the seconds that its block takes, also if it raises."""
        return Timed(self, self._clock, key, settings)

    def _entry_of(self, key: Key) -> Entry | None:
        """Return the entry of a key that was logged in this very spelling."""
        try:
            return self._by_key.get(key)
        except TypeError:  # a list or the like, which `as_path` refuses in words
            return None

    def _log(self, key: Key, values: Iterable[Any], settings: Settings) -> None:
        """Check everything, then log."""
        path = as_path(key)
        plain = [as_value(path, value) for value in values]
        entry = self._entries.get(path)
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
        """Make a key known, if no other is in its way."""
        paths = (entry.path, entry.rate_path) if entry.reduction.with_throughput else (entry.path,)
        for path in paths:
            self._check_free(path)
        for path in paths:
            self._names[path] = entry
        self._groups.update(entry.path[:length] for length in range(1, len(entry.path)))
        self._entries[entry.path] = entry
        return entry

    def _check_free(self, path: Path) -> None:
        if not path:
            raise MetricsError("a metric's key needs at least one name, and () has none.")
        if path[0] in self._reserved:
            raise MetricsError(f"metric {'/'.join(path)!r}: the result has {path[0]!r} for something else.")
        above = [path[:length] for length in range(1, len(path) + 1) if path[:length] in self._names]
        if not above and path not in self._groups:
            return
        other = above[0] if above else next(name for name in self._names if name[: len(path)] == path)
        raise MetricsError(
            f"metric {'/'.join(path)!r}: {'/'.join(other)!r} is logged too, at {self._names[other].site}, and a name "
            "is that of one value or of a group of them, not both."
        )

    # Results.

    def peek(self, key: Key | None = None, default: Any = float("nan")) -> Any:
        """Return the result under a key now (`default` if there is none); nothing is forgotten.

        Args:
            key: A key; a group of keys gives their nested dict, and `None` that of all.
            default: What to return for an unknown key.
        """
        path = () if key is None else as_path(key)
        if entry := self._names.get(path):
            return entry.peek() if path == entry.path else entry.throughput(self._clock() - self._period_start)
        nearby = [entry for entry in self._entries.values() if not path or entry.path[0] == path[0]]
        found: Any = self._results(nearby, self._period_start)
        for name in path:
            found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
        return default if found is _MISSING else found

    def reduce(self) -> dict[str, Any]:
        """Return all results as a nested dict, and forget what does not outlive an iteration."""
        result: dict[str, Any] = self.peek()
        for entry in self._entries.values():
            entry.reduced()
        self._period_start = self._clock()
        return result

    def mark(self) -> None:
        """Let `peek_new` give the keys that something comes in for from now on."""
        for entry in self._entries.values():
            entry.flush()
            entry.is_new = False

    def peek_new(self) -> dict[str, Any]:
        """Return the results as `peek` does, but only of keys that something came in for since the last `mark`."""
        return self._results([entry for entry in self._entries.values() if entry.has_news()], self._period_start)

    def _results(self, entries: Sequence[Entry], since: float) -> dict[str, Any]:
        """Return the results of entries as a nested dict, with throughputs since a time of the clock."""
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
        """Return what was logged since the last `take`, for `aggregate` in another process.

        Windows, items, sums and averages stay for `peek`; what else counts since the last reduce starts anew.
        """
        return {path: entry.take() for path, entry in self._entries.items()}

    def aggregate(self, parts: Sequence[Parts], *, key: Key = ()) -> None:
        """Take in what other loggers logged at the same time, under `key`.

        The results are those of one logger that logged all their values, in one call of `aggregate` or in several.
        Where the order of one call's values matters: windows and series hold them interleaved as if each logger had
        logged its own evenly over the same time, the loggers in order where two fall together; moving averages take one
        logger's values after the other's; and an item is that of the last logger that has a new one. A throughput is
        what all of them logged since this logger's last `reduce()`, a second of this logger's clock.

        Args:
            parts: What `take` returned, one of each logger.
            key: The group to put their keys under.

        Raises:
            MetricsError: Two have a key that is reduced in different ways, or different shapes under one; or one has a
                key that is a group here, or the other way round. No value is taken in then.
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
            entry = self._add_entry(Entry(path, parts[0].reduction, parts[0].site, _NOTHING_GIVEN))
        for part in parts:
            _check_reduction(entry, part.reduction, part.site)
            entry.set_shape(part.shape)
        return entry

    def get_state(self) -> dict[str, Any]:
        """Return everything as plain data: dicts with string keys, lists, numbers, strings and NumPy arrays."""
        return {
            # A duration, since the clock of another process may start anywhere.
            "period_s": self._clock() - self._period_start,
            "keys": [entry.get_state() for entry in self._entries.values()],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Forget all keys, and go on where the logger of this state was."""
        self.reset()
        self._period_start = self._clock() - state["period_s"]
        for entry_state in state["keys"]:
            self._add_entry(Entry.from_state(entry_state))


def _check_reduction(entry: Entry, reduction: Reduction, site: str | None) -> None:
    """Refuse other settings than those of the key; `site` says where they were given, `None` by the call under way."""
    if entry.reduction != reduction:
        raise MetricsError(
            f"metric {'/'.join(entry.path)!r} was logged as {entry.reduction} at {entry.site}, and now as {reduction} "
            f"at {site or call_site()}."
        )


class Timed:
    """The context manager of `MetricsLogger.log_time`."""

    def __init__(self, logger: MetricsLogger, clock: Callable[[], float], key: Key, settings: dict[str, Any]) -> None:
        """Take where the seconds go."""
        self._logger, self._clock, self._key, self._settings = logger, clock, key, settings

    def __enter__(self) -> None:
        """Start the clock."""
        self._start = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Log the seconds."""
        self._logger.log_value(self._key, self._clock() - self._start, **self._settings)
