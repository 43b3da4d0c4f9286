"""RLlib's `MetricsLogger`: Corral's, with RLlib's meaning of the methods that mean something else there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.metrics.logger import MetricsLogger as NativeLogger

_MISSING: Any = object()


class MetricsLogger(NativeLogger):
    """A logger with RLlib's signatures."""

    def log_value(self, key: Any, value: Any, *, clear_on_reduce: bool | None = None, **settings: Any) -> None:
        """Log one value; see Corral's logger.

        Without `reduce`, `clear_on_reduce=True` keeps every value, as RLlib 2.40 documents it.
        """
        if clear_on_reduce and settings.get("reduce") is None:
            settings["reduce"] = "item_series"
        if settings.get("window") == float("inf"):  # all values since the last `reduce`
            del settings["window"]
            settings.setdefault("reduce", "mean")
        super().log_value(key, value, clear_on_reduce=clear_on_reduce, **settings)

    def peek(self, key: Any = None, default: Any = _MISSING, **settings: Any) -> Any:
        """Return a value, reduced so far.

        Raises:
            KeyError: Nothing was logged under the key, and there is no default.
        """
        found = super().peek(key or None, _MISSING)
        if found is not _MISSING:
            return found
        if default is _MISSING:
            raise KeyError(key)
        return default

    def aggregate(self, stats: Sequence[Any], *, key: Any = None) -> None:
        """Add what `env_runner.get_metrics()` returned."""
        super().aggregate(list(stats), key=() if key is None else key)


def as_rllib(logger: NativeLogger) -> MetricsLogger:
    """Return a logger with the methods of RLlib and the values of a logger of Corral, which both keep together."""
    values = vars(logger)
    if (view := values.get("rllib")) is None:
        view = values["rllib"] = object.__new__(MetricsLogger)
        view.__dict__ = values
    found: MetricsLogger = view
    return found
