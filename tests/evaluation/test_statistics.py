"""Statistics of episodes against closed forms, and how often the interval holds the true mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from corral.core.comparisons import interquartile_mean
from corral.runners.evaluation.statistics import bootstrap_interval, summarize_episodes


def test_the_statistics_of_known_episodes() -> None:
    found = summarize_episodes([6.0, 1.0, 2.0, 3.0, 103.0], [60, 10, 20, 30, 5])
    assert found.pop("episode_return_std") == pytest.approx(math.sqrt(8014 / 4))
    low, high = found.pop("episode_return_interval_low"), found.pop("episode_return_interval_high")
    assert low < 23 < high
    assert found == {
        "episode_return_mean": 23.0,
        "episode_return_min": 1.0,
        "episode_return_max": 103.0,
        "episode_return_median": 3.0,
        "episode_return_iqm": pytest.approx(11 / 3),
        "episode_len_mean": 25.0,
        "episode_len_min": 5.0,
        "episode_len_max": 60.0,
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [([7.0], 7.0), ([1.0, 2.0, 9.0], 4.0), ([9.0, 1.0, 2.0, 4.0], 3.0), (list(range(8, 0, -1)), 4.5)],
)
def test_the_interquartile_mean_leaves_out_whole_quarters(values: list[float], expected: float) -> None:
    assert interquartile_mean(values) == expected


def test_what_few_episodes_do_not_have_is_nan() -> None:
    none = summarize_episodes([], [])
    assert all(math.isnan(value) for value in none.values())
    assert none.keys() == summarize_episodes([1.0], [1]).keys()
    one = summarize_episodes([4.0], [7])
    assert (one["episode_return_mean"], one["episode_return_iqm"], one["episode_len_max"]) == (4.0, 4.0, 7.0)
    assert math.isnan(one["episode_return_std"])
    assert all(math.isnan(end) for end in bootstrap_interval([1.0, 2.0, 3.0, 4.0]))
    assert all(math.isnan(end) for end in bootstrap_interval([1.0, 2.0, 3.0, 4.0, math.inf]))


def test_equal_returns_have_an_interval_without_width() -> None:
    assert bootstrap_interval([0.1] * 7) == (0.1, 0.1)


def test_the_order_does_not_matter_and_the_unit_does_not_matter() -> None:
    values = np.random.default_rng(0).exponential(size=12)
    low, high = bootstrap_interval(values)
    assert bootstrap_interval(values[::-1]) == (low, high)
    assert bootstrap_interval(1000 * values - 5) == pytest.approx((1000 * low - 5, 1000 * high - 5))
    assert bootstrap_interval(-values) == pytest.approx((-high, -low), rel=0.1)


def reference_interval(values: list[float], num_resamples: int) -> tuple[float, float]:
    """Return the interval by the definition, one resample at a time, with other random numbers."""
    rng = np.random.default_rng(123)
    n, mean, deviation = len(values), np.mean(values), np.std(values, ddof=1)
    ratios = []
    for _ in range(num_resamples):
        resample = rng.choice(values, n)
        standard_error = max(np.std(resample, ddof=1), deviation / math.sqrt(n)) / math.sqrt(n)
        ratios.append((np.mean(resample) - mean) / standard_error)
    standard_error = deviation / math.sqrt(n)
    return mean - np.quantile(ratios, 0.975) * standard_error, mean - np.quantile(ratios, 0.025) * standard_error


def test_the_interval_is_the_studentized_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).exponential(3.0, 15).tolist()
    expected = reference_interval(values, 20_000)
    assert bootstrap_interval(values) == pytest.approx(expected, abs=0.03 * (expected[1] - expected[0]))
    whole = bootstrap_interval(values)
    monkeypatch.setattr("corral.runners.evaluation.statistics.MAX_DRAWS", 200)  # the draws of 13 resamples at a time
    assert bootstrap_interval(values) == whole


# The shares of the intervals of 5, 10, 20 and 50 values that hold the mean, measured with 6,000 repeats. Student's t
# holds it in 88%, 90%, 92% and 93% for exponential returns, and in 82%, 84%, 87% and 89% for lognormal returns.
@pytest.mark.parametrize(
    ("draw", "mean", "shares"),
    [
        (lambda rng, size: rng.exponential(1.0, size), 1.0, (0.893, 0.939, 0.948, 0.943)),
        (lambda rng, size: rng.lognormal(0.0, 1.0, size), math.exp(0.5), (0.837, 0.904, 0.926, 0.929)),
        (lambda rng, size: rng.random(size) < 0.5, 0.5, (0.943, 0.977, 0.962, 0.951)),
    ],
    ids=["exponential", "lognormal", "success or failure"],
)
def test_the_interval_covers_the_mean(draw: Callable[..., Any], mean: float, shares: tuple[float, ...]) -> None:
    rng, repeats = np.random.default_rng(0), 300
    for n, share in zip((5, 10, 20, 50), shares, strict=True):
        intervals = [bootstrap_interval(values) for values in draw(rng, (repeats, n))]
        found = np.mean([low <= mean <= high for low, high in intervals])
        assert abs(found - share) < 3 * math.sqrt(share * (1 - share) / repeats), n


@pytest.mark.parametrize("values", [[3.0, 1.0, 4.0, 1.5, 9.0], [0.0, 1.0, 1.0, 1.0, 1.0]])
def test_the_interval_of_five_values_equals_a_loop_over_the_same_draws(values: list[float]) -> None:
    ordered = sorted(values)
    mean = sum(ordered) / 5
    deviation = math.sqrt(sum((value - mean) ** 2 for value in ordered) / 4)
    found = []
    for row in np.random.default_rng(0).integers(5, size=(2000, 5)).tolist():
        drawn = [(ordered[place] - mean) / deviation for place in row]
        own_mean = sum(drawn) / 5
        own_deviation = math.sqrt(sum((value - own_mean) ** 2 for value in drawn) / 4)
        found.append(own_mean / max(own_deviation, 1 / math.sqrt(5)))
    low, high = np.quantile(found, [0.025, 0.975])
    expected = (mean - high * deviation, mean - low * deviation)
    assert bootstrap_interval(values) == pytest.approx(expected, rel=1e-9)
