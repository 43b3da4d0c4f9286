"""RLlib's `MetricsLogger`: Corral's, with RLlib's meaning of the methods that mean something else there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from corral.compat.rllib.missing import find
from corral.core.metrics.logger import MetricsLogger as NativeLogger
from corral.core.metrics.logger import Timed
from corral.core.metrics.reduction_settings import Path
from corral.core.metrics.values import as_path
from corral.core.tree import map_tree
from corral.errors import ConfigError

MISSING: Any = object()


class MetricsLogger:
    """A view of a logger of Corral with RLlib's signatures; everything else is Corral's.

    Keys that begin with a group of the result, such as `("evaluation", "env_runners")`, are Corral's. What the user
    logs there is kept in a logger of its own, `added`, which `Algorithm.train` merges into its result.

    Args:
        native: The logger; `None` makes one.
        root: Not used: totals over the lifetime are kept in every logger.
        stats_cls_lookup: Only `None`.

    Attributes:
        native: The logger.
        added: The logger of what the user logs in groups of the result.
    """

    def __init__(self, native: NativeLogger | None = None, *, root: bool = False, stats_cls_lookup: Any = None) -> None:
        """Keep the logger, or make it."""
        if stats_cls_lookup is not None:
            raise ConfigError("MetricsLogger: stats_cls_lookup: use a reduction of log_value.")
        self.native, self.added = native or NativeLogger(), NativeLogger()
        self._merged: dict[Path, NativeLogger] = {}  # what the latest `aggregate` into each group added

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "native":
            raise AttributeError(name)
        return find(self.native, "MetricsLogger", name)

    def _logger_of(self, key: Any) -> NativeLogger:
        """Return the logger of a key: `added` if it begins with a group that Corral's results use."""
        return self.added if key and as_path(key)[0] in self.native.reserved else self.native

    def log_value(self, key: Any, value: Any, *, clear_on_reduce: bool | None = None, **settings: Any) -> None:
        """Log one value; see Corral's logger.

        Without `reduce`, `clear_on_reduce=True` keeps every value, as RLlib 2.40 documents it. A mean with `ema_coeff`
        is an exponential moving average, which it was until 2.50; 2.60 refuses it.
        """
        if clear_on_reduce and settings.get("reduce") is None:
            settings["reduce"] = "item_series"
        if settings.get("ema_coeff") is not None and settings.get("reduce") == "mean":
            settings["reduce"] = "ema"
        if settings.get("window") == float("inf"):  # all values since the last `reduce`
            del settings["window"]
            settings.setdefault("reduce", "mean")
        self._logger_of(key).log_value(key, value, clear_on_reduce=clear_on_reduce, **settings)

    def log_dict(self, value_dict: Mapping[str, Any], *, key: Any = (), **settings: Any) -> None:
        """Log values by name, which may be nested; without settings, new keys are means, as in RLlib."""
        path = (key,) if isinstance(key, str) else tuple(key or ())
        for name, value in value_dict.items():
            if isinstance(value, Mapping):
                self.log_dict(value, key=(*path, name), **settings)
            elif settings.get("reduce") is None and (settings or (*path, name) not in self):
                self.log_value((*path, name), value, **{**settings, "reduce": "mean"})
            else:
                self.log_value((*path, name), value, **settings)

    def log_time(self, key: Any, **settings: Any) -> Timed:
        """Return a context manager that logs the seconds that its block takes; see Corral's logger."""
        return Timed(cast(NativeLogger, self), time.perf_counter, key, settings)

    def peek(
        self,
        key: Any = None,
        default: Any = MISSING,
        *,
        compile: bool = True,
        throughput: bool = False,
        latest_merged_only: bool = False,
    ) -> Any:
        """Return a value, reduced so far.

        Args:
            key: A key, or a group of keys; `None` is all keys.
            default: What to return if nothing was logged under the key.
            compile: False returns a list with the value, and a series as it is.
            throughput: Whether to return the throughput of the key, per second.
            latest_merged_only: Whether only the values count that the latest `aggregate` with the key added.

        Raises:
            KeyError: Nothing was logged under the key, or it has no throughput, and there is no default.
        """
        if throughput and key:
            path = as_path(key)
            key = (*path[:-1], f"{path[-1]}_throughput")
        loggers: Iterable[NativeLogger] = (
            reversed(self._merged.values()) if latest_merged_only else (self._logger_of(key), self.native)
        )
        values = (logger.peek(key or None, MISSING) for logger in loggers)
        found = next((value for value in values if value is not MISSING), MISSING)
        if found is not MISSING:
            return found if compile else map_tree(lambda value: value if isinstance(value, list) else [value], found)
        if default is MISSING:
            raise KeyError(key)
        return default

    def set_value(self, key: Any, value: Any, **settings: Any) -> None:
        """Replace what was logged under a key by one value, as RLlib until 2.44; `reduce` is `"mean"` if not given."""
        self.delete(key, key_error=False)
        self.log_value(key, value, **{"reduce": "mean", **settings})

    def delete(self, *key: Any, key_error: bool = True) -> None:
        """Remove what was logged under a key.

        Raises:
            KeyError: Nothing was, and `key_error` is True.
        """
        path = as_path(key[0] if len(key) == 1 else key)
        if not self._logger_of(path).delete(path) and key_error:
            raise KeyError(path)

    def __contains__(self, key: Any) -> bool:
        """Return whether something was logged under a key."""
        return self.peek(key, None) is not None

    @property
    def stats(self) -> dict[str, Any]:
        """All values, reduced so far, by name."""
        found: dict[str, Any] = self.native.peek()
        return found

    def compile(self) -> dict[str, Any]:
        """Return what `reduce` does."""
        return self.native.reduce()

    def aggregate(self, stats: Sequence[Any], *, key: Any = None) -> None:
        """Add what `env_runner.get_metrics()` returned."""
        path = () if key is None else as_path(key)
        self._logger_of(key).aggregate(list(stats), key=path)
        self._merged.pop(path, None)
        self._merged[path] = NativeLogger()
        self._merged[path].aggregate(list(stats), key=path)

    def merge_and_log_n_dicts(self, stats_dicts: Sequence[Any], *, key: Any = None, **settings: Any) -> None:
        """Add what `env_runner.get_metrics()` returned: the name of `aggregate` until 2.44."""
        self.aggregate(stats_dicts, key=key)


def as_rllib(logger: NativeLogger) -> MetricsLogger:
    """Return the view of a logger, always the same one."""
    return logger.view_as(MetricsLogger)
