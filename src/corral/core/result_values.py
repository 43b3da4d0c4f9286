"""The kind of each value of a result: a number, a text, an image, a video, an array."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["none", "number", "text", "image", "video", "array", "other"]


class Value(NamedTuple):
    """A value of a result, and its kind.

    Attributes:
        kind: Kind of the value. `number`: a bool, int or float. `text`: a string. `image`: uint8 `[H, W, 3]` (RGB) or
            `[H, W, 4]` (RGBA). `video`: uint8 `[T, H, W, 3]`. `array`: any other bools or real numbers in an array.
            `none`: `None`. `other`: anything else, including lists of lists and lists of different kinds.
        series: Whether the value is a list of values of this kind, as `reduce="item_series"` gives.
        data: The value in plain types: NumPy scalars and arrays without axes as Python numbers, tensors as arrays, an
            int that no float can hold as an infinity. A list of these if it is a series.
    """

    kind: Kind
    series: bool
    data: Any


def classify(value: Any) -> Value:
    """Return the kind of a value of a result.

    Args:
        value: A leaf of a result. An empty list is a series of no numbers.
    """
    if not isinstance(value, (list, tuple)):
        return Value(*_classify_one(value))
    parts = [_classify_one(part) for part in value]
    kinds = {kind for kind, _, _ in parts} or {"number"}
    if len(kinds) > 1 or kinds & {"none", "other"}:
        return Value("other", False, value)
    return Value(kinds.pop(), True, [data for _, _, data in parts])


def _classify_one(value: Any) -> tuple[Kind, bool, Any]:
    """Return kind, series and data of a value that is not a series."""
    if hasattr(value, "detach"):  # a tensor; a logger does not import torch for it
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() and value.itemsize < 4 else value).numpy()
    elif hasattr(value, "__array__") and not isinstance(value, (np.ndarray, np.generic)):
        value = np.asarray(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()
    if value is None:
        return "none", False, None
    if isinstance(value, (bool, int, float)):
        return "number", False, _in_range(value)
    if isinstance(value, str):
        return "text", False, value
    if isinstance(value, np.ndarray):
        return _array_kind(value), False, value
    return "other", False, value


def _in_range(value: float) -> float:
    """Return a number, or an infinity for an int that no float can hold."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf
    return value


def _array_kind(array: np.ndarray[Any, Any]) -> Kind:
    """Return the kind of an array with at least one axis."""
    if array.dtype == np.uint8 and array.size:
        if array.ndim == 3 and array.shape[-1] in (3, 4):
            return "image"
        if array.ndim == 4 and array.shape[-1] == 3:
            return "video"
    return "array" if array.dtype.kind in "biuf" else "other"
