"""Merged statistics equal the statistics of all data."""

from __future__ import annotations

import numpy as np
import pytest

from corral.modules.transforms.moments import mean_and_variance, merge_moments, moments_of, no_moments
from corral.modules.transforms.rewards import discounted_returns


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_merged_moments_equal_the_moments_of_all_data(offset: float) -> None:
    data = np.random.default_rng(0).normal(offset, 3.0, (1000, 4))
    parts = [moments_of({"a": part}) for part in np.split(data, [0, 1, 7, 500, 500, 990])]
    mean, variance = mean_and_variance(merge_moments([no_moments({"a": (4,)}), *parts]), "a")
    np.testing.assert_allclose(mean, data.mean(0), rtol=1e-12)
    np.testing.assert_allclose(variance, data.var(0), rtol=1e-9)
    assert float(merge_moments(parts)["count"]) == 1000


def test_columns_of_float32_are_summed_in_float64() -> None:
    data = np.random.default_rng(0).normal(1e4, 1e-1, (100_000, 1)).astype(np.float32)
    mean, variance = mean_and_variance(moments_of({"": data}), "")
    np.testing.assert_allclose(mean, data.astype(np.float64).mean(0), rtol=1e-12)
    np.testing.assert_allclose(variance, data.astype(np.float64).var(0), rtol=1e-9)


def test_the_order_of_the_parts_does_not_matter_beyond_rounding() -> None:
    parts = [moments_of({"a": np.random.default_rng(i).normal(i, 1.0, (10 * i, 2))}) for i in range(1, 6)]
    one, other = merge_moments(parts), merge_moments(parts[::-1])
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-13)


def test_no_data_has_mean_0_and_variance_1() -> None:
    mean, variance = mean_and_variance(
        merge_moments([no_moments({"a": (2,)}), moments_of({"a": np.zeros((0, 2))})]), "a"
    )
    assert mean.tolist() == [0, 0] and variance.tolist() == [1, 1]


def test_discounted_returns_equal_a_loop_over_episodes() -> None:
    rng, gamma = np.random.default_rng(0), 0.9
    rewards, valid, done = rng.normal(size=(50, 3)), rng.random((50, 3)) < 0.9, rng.random((50, 3)) < 0.2
    done &= valid
    expected, left = np.zeros((50, 3)), np.zeros(3)
    for n in range(3):
        total = 0.0
        for t in range(50):
            if valid[t, n]:
                total = gamma * total + rewards[t, n]
            expected[t, n] = total
            if done[t, n]:
                total = 0.0
        left[n] = total
    first, carried = discounted_returns(rewards[:20], valid[:20], done[:20], np.zeros(3), gamma)
    second, after = discounted_returns(rewards[20:], valid[20:], done[20:], carried, gamma)
    np.testing.assert_allclose(np.concatenate([first, second])[valid], expected[valid], rtol=1e-12)
    np.testing.assert_allclose(after, left, rtol=1e-12)
