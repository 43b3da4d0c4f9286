"""Ratios of paired measurements and what can be said of their median: pure functions, no clocks, no files.

Systems are compared within a pair, where they ran one after the other, because a machine's speed drifts from
minute to minute by more than the differences of interest; a ratio within a pair is mostly free of that drift.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of several pairs, with an interval that would hold the true one mostly."""

    median: float
    low: float
    high: float
    pairs: int


def times_faster(ours: float, theirs: float, higher_is_better: bool) -> float:
    """Returns how many times as fast we are: above 1 is faster, for rates and for durations alike."""
    return ours / theirs if higher_is_better else theirs / ours


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of the median of `values`.

    Args:
        values: At least one measurement.
        confidence: The share of resampled medians that the interval holds.
        resamples: How many times to resample.
        seed: Seed of the resampling, so that a report can be rebuilt exactly.

    Returns:
        The lower and the upper end. With the usual five values that is close to their least and their most.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    outside = (1.0 - confidence) / 2.0
    last = resamples - 1
    return medians[round(outside * last)], medians[round((1.0 - outside) * last)]


def ratio_of_pairs(ratios: Sequence[float]) -> Ratio | None:
    """Returns the median ratio and its 95% interval, or None when no pair is complete."""
    if not ratios:
        return None
    low, high = bootstrap_interval(ratios)
    return Ratio(statistics.median(ratios), low, high, len(ratios))
