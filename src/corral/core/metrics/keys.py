"""The keys of a logger and of its views, and the names that they take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from corral.core.metrics.entry import Entry, Part
from corral.core.metrics.reduction_settings import MetricsError, Path, Reduction, Settings, make_reduction
from corral.core.metrics.values import Key, call_site


class Keys:
    """The keys of a logger, which its views share.

    Attributes:
        entries: Entries by key.
        names: Entries by all keys of a result: keys, and the keys of their throughputs.
        updates: Results of updates that wait to be logged, each with its group.
        of_updates: Entries of the numbers of updates so far, by key.
        period_start: Reading of the clock when the period began; a period ends with a reduce.
    """

    period_start: float

    def __init__(self, reserved: Collection[str]) -> None:
        """Start without keys; no key may begin with a name of `reserved`."""
        self._reserved = reserved
        self.entries: dict[Path, Entry] = {}
        self.names: dict[Path, Entry] = {}
        self.updates: list[tuple[Path, dict[str, Any]]] = []
        self._flat: dict[str, Entry] = {}  # by the names in files, which have a slash where a group ends
        self._groups: set[Path] = set()
        self._written: list[dict[Key, Entry]] = []
        self.of_updates = self.as_written()

    def as_written(self) -> dict[Key, Entry]:
        """Return a dict for entries by the keys as callers write them; it is emptied when all keys are forgotten."""
        self._written.append({})
        return self._written[-1]

    def named(self, name: str) -> Entry | None:
        """Return the entry that has a name in files, or `None`."""
        return self._flat.get(name)

    def clear(self) -> None:
        """Forget all keys."""
        all_of_them: list[Any] = [self.entries, self.names, self.updates, self._flat, self._groups, *self._written]
        for each in all_of_them:
            each.clear()

    def remove(self, entry: Entry) -> None:
        """Forget one key."""
        tables: list[dict[Any, Entry]] = [self.entries, self.names, self._flat, *self._written]
        for table in tables:
            for name in [name for name, each in table.items() if each is entry]:
                del table[name]
        self._groups = {path[:length] for path in self.entries for length in range(1, len(path))}

    def add(self, entry: Entry) -> Entry:
        """Add a key, unless its name is taken, and return its entry."""
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
            self.names[path] = entry
        self._flat |= dict.fromkeys(flat, entry)
        self._groups.update(entry.path[:length] for length in range(1, len(entry.path)))
        self.entries[entry.path] = entry
        return entry

    def _check_free(self, path: Path, site: str) -> None:
        if not path:
            raise MetricsError("the key of a metric needs at least one name, and () has none.")
        group = path[0].partition("/")[0]
        if group in self._reserved:
            raise MetricsError(
                f"metric {'/'.join(path)!r}, logged at {site}: the result uses {group!r} for something else; choose "
                "another name."
            )
        above = [path[:length] for length in range(1, len(path) + 1) if path[:length] in self.names]
        if not above and path not in self._groups:
            return
        other = above[0] if above else next(name for name in self.names if name[: len(path)] == path)
        raise MetricsError(
            f"metric {'/'.join(path)!r}, logged at {site}: {'/'.join(other)!r} is logged too, at "
            f"{self.names[other].site}, and a name can be a value or a group of values, not both."
        )

    def reserve(self, path: Path, given: Settings) -> Entry:
        """Return the entry of one of the library's own keys, which a checkpoint may have brought back."""
        reduction, entry = make_reduction(path, given, "ema"), self.entries.get(path)
        if entry is None:
            entry = self.add(Entry(path, reduction, call_site(), given, is_reserved=True))
        elif not entry.is_reserved:
            raise reserved_error(path, entry.site)
        entry = self.fit_reduction(entry, reduction, call_site())
        entry.given = given
        entry.set_shape(())
        return entry

    def fit_reduction(self, entry: Entry, reduction: Reduction, site: str | None) -> Entry:
        """Return the entry of a key that is logged with these settings at a place, `None` for this call.

        A key that a checkpoint brought takes the settings of the first call: the config or the code may have changed.

        Raises:
            MetricsError: The key was logged with other settings.
        """
        if entry.reduction != reduction:
            if not entry.is_restored:
                raise MetricsError(
                    f"metric {'/'.join(entry.path)!r} was logged as {entry.reduction} at {entry.site}, and now as "
                    f"{reduction} at {site or call_site()}: give a key the same settings in all places."
                )
            del self.entries[entry.path]
            self.names = {path: other for path, other in self.names.items() if other is not entry}
            self._flat = {name: other for name, other in self._flat.items() if other is not entry}
            entry = self.add(entry.with_reduction(reduction, site or call_site()))
        entry.is_restored = False
        return entry

    def entry_for(self, path: Path, parts: Sequence[Part]) -> Entry:
        """Return the entry that can aggregate parts of other loggers."""
        entry = self.entries.get(path)
        if entry is None:
            first = parts[0]
            entry = Entry(path, first.reduction, first.site, Settings(), is_reserved=first.is_reserved)
            self.add(entry)
        for part in parts:
            if part.is_reserved != entry.is_reserved:
                raise reserved_error(path, entry.site if part.is_reserved else part.site)
            entry = self.fit_reduction(entry, part.reduction, part.site)
            entry.set_shape(part.shape)
        return entry


def reserved_error(path: Path, site: str) -> MetricsError:
    """Return the error for user code that logs a key of the library's own, with the place where it does."""
    return MetricsError(
        f"metric {'/'.join(path)!r}, logged at {site}: the result has a number of this name, which the library logs; "
        "choose another name."
    )
