"""Statistics of the returns and lengths of whole episodes, and whether rounds improve; pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.comparisons import interquartile_mean
from corral.core.metrics.result import NO_IMPROVEMENT

CONFIDENCE = 0.95
MIN_EPISODES_FOR_INTERVAL = 5
"""With fewer episodes than this, there are too few different resamples."""

NUM_RESAMPLES = 2000
MAX_DRAWS = 1_000_000
"""Draws that are in memory at a time."""


def summarize_episodes(returns: Sequence[float], lens: Sequence[int]) -> dict[str, float]:
    """Return statistics of returns and lengths; the order of the episodes does not matter.

    The keys are `episode_return_` with `mean`, `min`, `max`, `median`, `iqm` (see `interquartile_mean`), `std` (with
    n - 1 in the denominator), `interval_low` and `interval_high` (see `bootstrap_interval`), and `episode_len_` with
    `mean`, `min` and `max`. A number that these episodes do not have is NaN: all numbers without an episode, the
    deviation of one episode, and the interval of fewer than five.

    Args:
        returns: Return of each episode, without discount.
        lens: Length of each episode, in env steps.
    """
    values, steps = np.sort(np.asarray(returns, np.float64)), np.asarray(lens, np.float64)
    low, high = bootstrap_interval(values)
    return {
        "episode_return_mean": _mean(values),
        "episode_return_min": float(values[0]) if len(values) else math.nan,
        "episode_return_max": float(values[-1]) if len(values) else math.nan,
        "episode_return_median": float(np.median(values)) if len(values) else math.nan,
        "episode_return_iqm": interquartile_mean(values),
        "episode_return_std": float(values.std(ddof=1)) if len(values) > 1 else math.nan,
        "episode_return_interval_low": low,
        "episode_return_interval_high": high,
        "episode_len_mean": _mean(steps),
        "episode_len_min": float(steps.min()) if len(steps) else math.nan,
        "episode_len_max": float(steps.max()) if len(steps) else math.nan,
    }


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def bootstrap_interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean, by the studentized bootstrap; NaN for fewer than five values.

    Each of 2000 resamples gives t = (its mean - the mean) / its standard error. The interval reaches from
    mean - q(97.5%) * standard error to mean - q(2.5%) * standard error, with the quantiles q of these t (Efron and
    Tibshirani 1993, "An Introduction to the Bootstrap", section 12.5). Unlike the percentiles of the resampled means it
    covers the mean with few values, and unlike Student's t distribution it is longer on the side to which the values
    are skewed.

    The deviation of a resample counts as at least deviation / sqrt(n), because values of which few are different, such
    as success and failure, have resamples without any deviation. The interval depends on the values only, not on their
    order, and the resamples are the same in each call.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    n = len(ordered)
    if n < MIN_EPISODES_FOR_INTERVAL or not np.isfinite(ordered).all():
        return math.nan, math.nan
    mean, deviation = float(ordered.mean()), float(ordered.std(ddof=1))
    if ordered[0] == ordered[-1]:
        return float(ordered[0]), float(ordered[0])
    scores = (ordered - mean) / deviation
    rng = np.random.default_rng(0)
    size = max(1, MAX_DRAWS // n)
    chunks = []
    for start in range(0, NUM_RESAMPLES, size):
        resamples = scores[rng.integers(n, size=(min(size, NUM_RESAMPLES - start), n))]
        floored = np.maximum(resamples.std(axis=1, ddof=1), 1 / math.sqrt(n))
        chunks.append(resamples.mean(axis=1) / floored)
    low, high = np.quantile(np.concatenate(chunks), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return mean - float(high) * deviation, mean - float(low) * deviation


def improvement(
    metrics: Mapping[str, Any], before: Mapping[str, Any] | None, task_index: float | None
) -> dict[str, Any]:
    """Return the best mean return of the rounds of a task, and how many rounds there were since.

    A round that is truncated or skipped changes neither. A mean return of NaN is no improvement.

    Args:
        metrics: Metrics of a round.
        before: Metrics of the round before it, with what this function returned for it.
        task_index: Index of the task of the round, if tasks follow one another.
    """
    before = before or {}
    of_task = {} if task_index is None else {"task_index": task_index}
    is_same_task = of_task.items() <= before.items()
    best, num_rounds = (before.get(name, value) if is_same_task else value for name, value in NO_IMPROVEMENT.items())
    mean = metrics["env_runners"].get("episode_return_mean", math.nan)
    if not (metrics["truncated"] or metrics["skipped"]):
        is_better = not (mean <= best or math.isnan(mean))
        best, num_rounds = (mean, 0) if is_better else (best, num_rounds + 1)
    return {**dict(zip(NO_IMPROVEMENT, (best, num_rounds), strict=True)), **of_task}
