"""Conversion of the keys and values that users log, and the place in their code where they did."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from corral.core.metrics.reducers import saturated
from corral.core.metrics.reduction_settings import ELEMENTWISE, MetricsError, Path, Reduction

Key = str | tuple[Any, ...]
"""A name, or a (nested) tuple of names."""

_HOME = os.path.dirname(__file__)


def as_path(key: Key) -> Path:
    """Return a key as a flat tuple of names, which is empty for `()`.

    Raises:
        MetricsError: The key is neither a name nor a (nested) tuple of names.
    """
    return (key,) if isinstance(key, str) else tuple(_names(key, key))


def _names(part: Any, key: Any) -> Iterator[str]:
    if isinstance(part, tuple):
        for inner in part:
            yield from _names(inner, key)
    elif isinstance(part, str):
        yield part
    else:
        raise MetricsError(f"the key of a metric is a name or a (nested) tuple of names, not {key!r}.")


def as_value(path: Path, value: Any) -> Any:
    """Return a value as a Python number, an array (possibly the array of the caller) or a string.

    Args:
        path: The key, for the messages.
        value: A number, an array or tensor of numbers `[...]` on any device, or a string. An array without dimensions
            is a number.

    Raises:
        MetricsError: The value is of another type.
    """
    original = type(value)
    if isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic):
        return value
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # NumPy has no such type
            value = value.float()
    array = np.asarray(value) if hasattr(value, "__array__") else None
    if array is None or array.dtype.kind not in "biuf":
        raise MetricsError(
            f"metric {'/'.join(path)!r}: a value of type {original.__module__}.{original.__qualname__} cannot be "
            "logged; log a number, or a NumPy array or tensor of numbers."
        )
    return array if array.ndim else array.item()


def default_reduce(values: list[Any]) -> str:
    """Return the reduction of values like these if no setting says which."""
    return "item" if values and isinstance(values[0], np.ndarray) else "ema"


def fit(path: Path, reduction: Reduction, value: Any) -> Any:
    """Return a value as its reducer keeps it: an array as a copy, in float64 if it is reduced element by element.

    Raises:
        MetricsError: The reduction does not allow such a value.
    """
    where = f"metric {'/'.join(path)!r}"
    if isinstance(value, str):
        if reduction.name != "item":
            raise MetricsError(f"{where}: a string needs reduce='item', not {reduction.name!r}.")
        return value
    if isinstance(value, np.ndarray):
        if reduction.name == "percentiles":
            raise MetricsError(
                f"{where}: reduce='percentiles' takes numbers, not an array of shape {list(value.shape)}; log its "
                "elements with log_values, or the array with reduce='item' for a histogram."
            )
        return np.array(value, np.float64 if reduction.name in ELEMENTWISE else None)
    return value if reduction.name in ("item", "item_series") else saturated(value)


def call_site() -> str:
    """Return `file.py:line` of the innermost call that comes from outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _HOME:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
