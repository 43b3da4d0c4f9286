"""Comparison of experiments by few runs each, as Agarwal et al. 2021 (arXiv:2108.13264) recommend; pure functions.

Scores are given by task, one array `[R]` of the scores of R runs for each; numbers of runs may differ. Intervals are
95% percentile intervals of 2000 bootstrap resamples, stratified by task: runs are drawn again within each task. They
are the same in each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 2000
PERCENTILES = (2.5, 97.5)
MIN_RUNS = 3
"""Runs of a task below which there are too few different resamples for an interval."""

Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A number with its interval; the ends are NaN where there are too few runs.

    Attributes:
        value: The number.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)


def interquartile_mean(values: ArrayLike) -> float:
    """Return the mean without the lowest and the highest quarter of the values; NaN without values.

    Each quarter is rounded down to whole values.
    """
    flat = np.asarray(values, np.float64).reshape(1, -1)
    return float(_iqm_of_rows(flat)[0]) if flat.size else math.nan


def _iqm_of_rows(values: Floats) -> Floats:
    """Return the interquartile mean of each row, `[N]`, of `[N, M]`."""
    quarter = values.shape[1] // 4
    means: Floats = np.sort(values, 1)[:, quarter : values.shape[1] - quarter].mean(1)
    return means


def estimate_iqm(scores: Sequence[ArrayLike]) -> Estimate:
    """Return the interquartile mean of the scores of all tasks and runs, with its interval.

    Args:
        scores: Scores by task, comparable across tasks; NaN is a run without a score, which does not count.
    """
    tasks = _present(scores)
    if not any(task.size for task in tasks):
        return NO_ESTIMATE
    value = interquartile_mean(np.concatenate(tasks))
    return Estimate(value, *_interval([tasks], lambda drawn: _iqm_of_rows(np.concatenate(drawn[0], 1))))


def estimate_improvement(scores: Sequence[ArrayLike], others: Sequence[ArrayLike]) -> Estimate:
    """Return how probable it is that a run scores higher than a run of another experiment in the same task.

    It is the share of the pairs of runs in which the first one is higher, half of the ties included (the statistic of
    Mann and Whitney 1947), averaged over tasks.

    Args:
        scores: Scores by task.
        others: Scores of the other experiment in the same tasks; NaN does not count in both.
    """
    ours, theirs = _present(scores), _present(others)
    if len(ours) != len(theirs):
        raise ValueError(f"there are {len(ours)} and {len(theirs)} tasks: give scores of the same tasks.")
    if not all(task.size for task in (*ours, *theirs)):
        return NO_ESTIMATE

    def share(drawn: Sequence[Sequence[Floats]]) -> Floats:
        first, second = drawn
        shares = [_share_higher(one, other) for one, other in zip(first, second, strict=True)]
        mean: Floats = np.mean(shares, 0)
        return mean

    value = float(share([[task[None] for task in ours], [task[None] for task in theirs]])[0])
    return Estimate(value, *_interval([ours, theirs], share))


def _share_higher(one: Floats, other: Floats) -> Floats:
    """Return the share of pairs in which the first one is higher, `[N]`, of `[N, R]` and `[N, S]`."""
    gaps = one[:, :, None] - other[:, None, :]
    shares: Floats = ((gaps > 0) + 0.5 * (gaps == 0)).mean((1, 2))
    return shares


def _present(scores: Sequence[ArrayLike]) -> list[Floats]:
    arrays = [np.asarray(task, np.float64).reshape(-1) for task in scores]
    return [np.sort(task[~np.isnan(task)]) for task in arrays]  # sorted, so that the order of runs does not matter


def _interval(
    samples: Sequence[Sequence[Floats]], statistic: Callable[[list[list[Floats]]], Floats]
) -> tuple[float, float]:
    """Return the ends of the interval of a statistic of resamples `[2000, R]` by sample and task."""
    if min(task.size for tasks in samples for task in tasks) < MIN_RUNS:
        return math.nan, math.nan
    rng = np.random.default_rng(0)
    drawn = [[task[rng.integers(task.size, size=(NUM_RESAMPLES, task.size))] for task in tasks] for tasks in samples]
    low, high = np.percentile(statistic(drawn), PERCENTILES)
    return float(low), float(high)
