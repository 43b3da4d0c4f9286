"""Comparisons of experiments: closed forms, slow loops, and how often intervals cover."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from corral.core.comparisons import Estimate, estimate_improvement, estimate_iqm, interquartile_mean


def slow_iqm(values: list[float]) -> float:
    ordered = sorted(values)
    cut = int(0.25 * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def test_the_interquartile_mean_is_the_one_of_all_tasks_and_runs() -> None:
    rng = np.random.default_rng(0)
    for sizes in ([1], [4], [5, 5], [3, 10, 6]):
        tasks = [rng.normal(size=size) for size in sizes]
        expected = slow_iqm([score for task in tasks for score in task.tolist()])
        assert estimate_iqm(tasks).value == pytest.approx(expected)
        assert interquartile_mean(np.concatenate(tasks)) == pytest.approx(expected)
    assert estimate_iqm([[1.0, math.nan, 2.0, 3.0, 100.0]]).value == pytest.approx(2.5)


def test_the_probability_of_improvement_is_the_share_of_pairs() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = ([rng.integers(0, 6, size) for size in sizes] for sizes in ([5, 4], [3, 7]))
    shares = [
        np.mean([(a > b) + 0.5 * (a == b) for a, b in itertools.product(one.tolist(), other.tolist())])
        for one, other in zip(ours, theirs, strict=True)
    ]
    assert estimate_improvement(ours, theirs).value == pytest.approx(np.mean(shares))
    assert estimate_improvement(theirs, ours).value == pytest.approx(1 - np.mean(shares))
    assert estimate_improvement([[5, 6, 7]], [[1, 2, 3]]) == Estimate(1.0, 1.0, 1.0)
    same = estimate_improvement([[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5]])
    assert same.value == 0.5 and same.low < 0.25 and same.high > 0.75


def test_an_interval_has_the_percentiles_of_resamples_within_tasks() -> None:
    """A slow bootstrap with other draws has the same ends, up to its error."""
    rng = np.random.default_rng(2)
    tasks, others = ([rng.normal(shift + 5 * task, 1, 6) for task in range(3)] for shift in (0.6, 0.0))
    iqms, shares = [], []
    for _ in range(4000):
        ours, theirs = (
            [[task[i] for i in rng.integers(len(task), size=len(task))] for task in each] for each in (tasks, others)
        )
        iqms.append(slow_iqm([score for task in ours for score in task]))
        pairs = [np.mean(np.subtract.outer(a, b) > 0) for a, b in zip(ours, theirs, strict=True)]
        shares.append(np.mean(pairs))
    for found, slow in ((estimate_iqm(tasks), iqms), (estimate_improvement(tasks, others), shares)):
        low, high = np.percentile(slow, [2.5, 97.5])
        assert found.low == pytest.approx(low, abs=0.06) and found.high == pytest.approx(high, abs=0.06)


def test_intervals_cover_most_of_the_time() -> None:
    """With ten runs a percentile interval covers somewhat less often than its 95%."""
    rng, covered = np.random.default_rng(3), 0
    for _ in range(300):
        found = estimate_iqm([rng.normal(3.0, 1.0, 10)])
        covered += found.low <= 3.0 <= found.high
    assert 0.85 < covered / 300 < 0.98


def test_the_order_of_runs_does_not_matter_and_few_runs_have_no_interval() -> None:
    assert estimate_iqm([[3.0, 1.0, 2.0, 9.0]]) == estimate_iqm([[9.0, 2.0, 1.0, 3.0]])
    few = estimate_iqm([[1.0, 2.0, 3.0], [4.0, 5.0]])
    assert few.value == 3.0 and math.isnan(few.low) and math.isnan(few.high)
    assert all(map(math.isnan, (*estimate_iqm([[]]), *estimate_improvement([[1.0]], [[math.nan]]))))
    with pytest.raises(ValueError, match="1 and 2 tasks"):
        estimate_improvement([[1.0]], [[1.0], [2.0]])
