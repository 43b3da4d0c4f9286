"""Count, mean and squared deviations of numbers, which merge exactly (Chan, Golub and LeVeque 1979, eq. 2.1).

`m2` is the sum of the squared deviations from the mean, so that the variance is `m2 / count`. Columns may have their
largest absolute number too, under `largest/name`. All arrays are float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.core.devices import widened

Moments = Mapping[str, NDArray[Any]]
"""`count`, a number, and for each column `name` the arrays `mean/name` and `m2/name`."""


def no_moments(shapes: Mapping[str, tuple[int, ...]]) -> Moments:
    """Return the moments of no entries of columns with entries of these shapes."""
    zeros = {f"{kind}/{name}": np.zeros(shape) for name, shape in shapes.items() for kind in ("mean", "m2")}
    return {"count": np.zeros(()), **zeros}


def moments_of(columns: Mapping[str, Any]) -> Moments:
    """Return the moments of columns `[B, ...]`, arrays or tensors, over axis 0; a tensor takes one copy to the host."""
    count, found = 0, dict[str, NDArray[Any]]()
    for name, column in columns.items():
        count = len(column)
        if not count:
            return no_moments({name: tuple(column.shape[1:]) for name, column in columns.items()})
        if isinstance(column, Tensor):
            found[f"mean/{name}"], found[f"m2/{name}"] = _tensor_moments(column)
            continue
        # Each number along the contiguous axis, where sums are fast and exact to the last digits.
        numbers = np.array(column.reshape(count, -1).T, np.float64, order="C")
        mean = numbers.mean(1)
        numbers -= mean[:, None]
        m2 = np.einsum("ij,ij->i", numbers, numbers)
        found[f"mean/{name}"], found[f"m2/{name}"] = mean.reshape(column.shape[1:]), m2.reshape(column.shape[1:])
    return {"count": np.array(float(count)), **found}


def _tensor_moments(column: Tensor) -> NDArray[np.float64]:
    """Return mean and squared deviations of a tensor `[B, ...]` over axis 0, as an array `[2, ...]`."""
    numbers = widened(column)
    mean = numbers.mean(0)
    found: NDArray[np.float64] = torch.stack([mean, (numbers - mean).square().sum(0)]).cpu().numpy().astype(np.float64)
    return found


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """Return the moments of the entries of all parts together."""
    first, *others = [part for part in parts if part["count"] > 0] or parts[:1]
    for part in others:
        ours, theirs = float(first["count"]), float(part["count"])
        total, merged = ours + theirs, dict[str, NDArray[Any]]()
        for name in (name.removeprefix("mean/") for name in first if name.startswith("mean/")):
            gap = part[f"mean/{name}"] - first[f"mean/{name}"]
            mean, m2 = first[f"mean/{name}"] + gap * (theirs / total), first[f"m2/{name}"] + part[f"m2/{name}"]
            merged[f"mean/{name}"] = np.asarray(mean)
            merged[f"m2/{name}"] = np.asarray(m2 + np.square(gap) * (ours * theirs / total))
        for name in (name for name in first if name.startswith("largest/")):
            merged[name] = np.asarray(np.maximum(first[name], part[name]))
        first = {"count": np.array(total), **merged}
    return first


def mean_and_variance(moments: Moments, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and variance of a column; of no entries, 0 and 1."""
    mean, m2, count = moments[f"mean/{name}"], moments[f"m2/{name}"], float(moments["count"])
    return mean, (m2 / count if count else np.ones_like(m2))
