"""RLlib's `MetricsLogger`: Corral's, with RLlib's meaning of the methods that mean something else there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.metrics.logger import MetricsLogger as NativeLogger
from corral.metrics.values import as_path

_MISSING: Any = object()


class MetricsLogger(NativeLogger):
    """A logger with RLlib's signatures.

    Keys that begin with a group of the result, such as `("evaluation", "env_runners")`, are Corral's. What the user
    logs there is kept in a logger of its own, `added`, which `Algorithm.train` merges into its result.
    """

    @property
    def added(self) -> MetricsLogger:
        """The logger of what the user logs in groups of the result."""
        return vars(self).setdefault("rllib_added", MetricsLogger())  # type: ignore[no-any-return]

    def _is_ours(self, key: Any) -> bool:
        """Return whether a key begins with a group that Corral's results use."""
        return bool(key) and as_path(key)[0] in self._reserved

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
        if self._is_ours(key):
            self.added.log_value(key, value, clear_on_reduce=clear_on_reduce, **settings)
        else:
            super().log_value(key, value, clear_on_reduce=clear_on_reduce, **settings)

    def peek(self, key: Any = None, default: Any = _MISSING, **settings: Any) -> Any:
        """Return a value, reduced so far.

        Raises:
            KeyError: Nothing was logged under the key, and there is no default.
        """
        found = self.added.peek(key, None) if self._is_ours(key) else None
        found = super().peek(key or None, _MISSING) if found is None else found
        if found is not _MISSING:
            return found
        if default is _MISSING:
            raise KeyError(key)
        return default

    def aggregate(self, stats: Sequence[Any], *, key: Any = None) -> None:
        """Add what `env_runner.get_metrics()` returned."""
        if self._is_ours(key):
            self.added.aggregate(stats, key=key)
        else:
            super().aggregate(list(stats), key=() if key is None else key)

    def merge_and_log_n_dicts(self, stats_dicts: Sequence[Any], *, key: Any = None, **settings: Any) -> None:
        """Add what `env_runner.get_metrics()` returned: the name of `aggregate` until 2.44."""
        self.aggregate(stats_dicts, key=key)


def as_rllib(logger: NativeLogger) -> MetricsLogger:
    """Return a logger with the methods of RLlib and the values of a logger of Corral, which both keep together."""
    values = vars(logger)
    if (view := values.get("rllib")) is None:
        view = values["rllib"] = object.__new__(MetricsLogger)
        view.__dict__ = values
    found: MetricsLogger = view
    return found
