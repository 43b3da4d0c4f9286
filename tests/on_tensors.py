"""Runs the tests of pure functions on columns once more with tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def on_tensors(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays that calls another one with tensors, and returns its tensors as arrays."""

    def convert(value: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        found = fn(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})
        return tuple(part.numpy() for part in found)

    return call
