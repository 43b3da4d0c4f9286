"""Intervals by Student's t distribution: closed forms, and the quantiles that tables print."""

from __future__ import annotations

import math

import numpy as np
import pytest

from corral.core.intervals import t_interval, t_quantile


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_quantiles_have_closed_forms_for_few_degrees(confidence: float) -> None:
    p = (1 + confidence) / 2
    assert t_quantile(1, confidence) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
    assert t_quantile(2, confidence) == pytest.approx((2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p))), rel=1e-9)
    alpha = 4 * p * (1 - p)
    q = math.cos(math.acos(math.sqrt(alpha)) / 3) / math.sqrt(alpha)
    assert t_quantile(4, confidence) == pytest.approx(2 * math.sqrt(q - 1), rel=1e-9)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(3, 3.182446), (5, 2.570582), (9, 2.262157), (29, 2.045230), (100, 1.983972)]
)
def test_quantiles_match_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-7)


def test_the_interval_of_two_and_of_three_values() -> None:
    # Of two values a and b, the standard error is |a - b| / 2, and t is tan(0.475 pi).
    low, high = t_interval([1.0, 3.0])
    assert (float(low), float(high)) == pytest.approx((2 - math.tan(0.475 * math.pi), 2 + math.tan(0.475 * math.pi)))
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)  # of 1, 2, 3, whose deviation is 1
    low, high = t_interval([1.0, 2.0, 3.0])
    assert (float(low), float(high)) == pytest.approx((2 - half, 2 + half))


def test_absent_values_do_not_count() -> None:
    low, high = t_interval(np.array([[1.0, 5.0, np.nan], [3.0, np.nan, np.nan], [np.nan, np.nan, np.nan]]))
    assert low[0] == pytest.approx(float(t_interval([1.0, 3.0])[0]))
    assert np.isnan([low[1:], high[1:]]).all()


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    samples = np.random.default_rng(0).normal(7.0, 2.0, size=(3, 20_000))
    low, high = t_interval(samples)
    assert np.mean((low < 7) & (7 < high)) == pytest.approx(0.95, abs=0.005)
