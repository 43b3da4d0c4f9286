"""Histograms, as loggers write them."""

from __future__ import annotations

import numpy as np

from corral.core.pictures import Array

HISTOGRAM_BINS = 64
LARGEST = 1e38
"""Largest absolute value of a histogram, at which values are clipped: TensorBoard reads bins as 32-bit floats."""


def histogram_of(values: Array) -> tuple[Array, Array] | None:
    """Return the finite ones of numbers `[size]`, clipped, and the edges `[65]` of bins of equal width.

    `None` if no number is finite. Edges are given, since NumPy computes none for values that are nearly equal.
    """
    values = np.asarray(values, np.float64)
    values = np.clip(values[np.isfinite(values)], -LARGEST, LARGEST)
    if not values.size:
        return None
    return values, np.linspace(values.min(), values.max(), HISTOGRAM_BINS + 1)
