"""Settings of every reduction, and what the tests of the metrics logger share."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

# By name, the settings of a key. All of these take numbers, and all but the percentiles arrays.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "ema": {"reduce": "ema", "ema_coeff": 0.3},
    "ema_cleared": {"reduce": "ema", "ema_coeff": 0.3, "clear_on_reduce": True},
    "mean": {"reduce": "mean"},
    "min": {"reduce": "min"},
    "max": {"reduce": "max"},
    "sum": {"reduce": "sum"},
    "lifetime_sum": {"reduce": "lifetime_sum"},
    "window": {"window": 3},
    **{f"window_{name}": {"reduce": name, "window": 3} for name in ("mean", "min", "max", "sum", "item_series")},
    "window_percentiles": {"reduce": "percentiles", "window": 3, "percentiles": [25]},
    "window_cleared": {"window": 3, "clear_on_reduce": True},
    "window_item_series_cleared": {"reduce": "item_series", "window": 3, "clear_on_reduce": True},
    **{f"{name}_kept": {"reduce": name, "clear_on_reduce": False} for name in ("mean", "min", "max", "sum")},
    "percentiles": {"reduce": "percentiles", "percentiles": (0, 50, 75, 100)},
    "item": {"reduce": "item"},
    "item_cleared": {"reduce": "item", "clear_on_reduce": True},
    "item_series": {"reduce": "item_series"},
    "sum_throughput": {"reduce": "sum", "with_throughput": True},
    "lifetime_sum_throughput": {"reduce": "lifetime_sum", "with_throughput": True},
}
PERCENTS = ("p0", "p50", "p75", "p100")


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def assert_same(found: Any, wanted: Any, rel: float = 1e-9) -> None:
    """Compare results: nested dicts, lists, arrays with their shape and dtype, numbers and strings."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value, rel)
    elif isinstance(wanted, list):
        assert isinstance(found, list)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, rel)
    elif isinstance(wanted, np.ndarray):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(found, wanted, rtol=rel, atol=rel)
    elif isinstance(wanted, float):
        assert type(found) is float
        assert found == pytest.approx(wanted, rel=rel, abs=rel, nan_ok=True)
    else:
        assert (type(found), found) == (type(wanted), wanted)


def at_once(name: str, workers: list[list[Any]]) -> list[Any]:
    """Return the values of workers that worked at the same time, in the order that `aggregate` stands for."""
    if "window" not in name and "item_series" not in name:
        return [value for values in workers for value in values]
    timed = [(Fraction(i + 1, len(values)), value) for values in workers for i, value in enumerate(values)]
    return [value for _, value in sorted(timed, key=lambda pair: pair[0])]
