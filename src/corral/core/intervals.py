"""The 95% interval of a mean of few values, such as one value per seed, by Student's t distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95


def t_interval(
    values: Sequence[float] | NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lower and the upper end of the 95% confidence intervals of means, by Student's t distribution.

    The interval is mean -+ t * deviation / sqrt(n), with n - 1 in the denominator of the deviation, and with the
    quantile t of n - 1 degrees of freedom.

    Args:
        values: `[n]` or `[n, ...]`; NaN is the absence of a value.

    Returns:
        Two arrays `[...]`; NaN where there are fewer than two values.
    """
    found = np.asarray(values, np.float64)
    n = np.sum(~np.isnan(found), axis=0)
    enough = n >= 2
    counts = np.where(enough, n, 2)
    mean = np.nansum(found, axis=0) / np.maximum(n, 1)
    deviation = np.sqrt(np.nansum((found - mean) ** 2, axis=0) / (counts - 1))
    half = np.vectorize(t_quantile, otypes=[np.float64])(counts - 1) * deviation / np.sqrt(counts)
    return np.where(enough, mean - half, np.nan), np.where(enough, mean + half, np.nan)


@cache
def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t for which -t..t holds a share `confidence` of Student's t distribution.

    Args:
        degrees: Degrees of freedom, at least 1.
        confidence: Share, above 0 and below 1.
    """
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _share_within(angle: float, degrees: int) -> float:
    """Return P(|T| < sqrt(degrees) * tan(angle)): Abramowitz and Stegun 1964, 26.7.3 and 26.7.4."""
    is_odd = degrees % 2
    total, term = 0.0, math.cos(angle) if is_odd else 1.0
    for k in range(degrees // 2):
        total += term
        term *= (2 * k + 1 + is_odd) / (2 * k + 2 + is_odd) * math.cos(angle) ** 2
    within = math.sin(angle) * total
    return 2 / math.pi * (angle + within) if is_odd else within
