"""Curves and their means against closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from corral.tools.report.curves import Curve, curve_of, make_curve, mean_curve, speed_curve, thinned
from corral.tools.report.runs import read_run
from written_runs import evaluated, result, write_run

T_1, T_2 = math.tan(0.475 * math.pi), 0.95 * math.sqrt(2 / (1 - 0.95**2))  # 97.5% quantiles of Student's t


def line(x: list[float], slope: float, start: float = 0.0) -> Curve:
    return Curve(np.array(x, float), start + slope * np.array(x, float))


def test_the_mean_of_straight_lines_is_a_straight_line() -> None:
    found = mean_curve([line([0, 10], 1), line([0, 5, 10], 2), line([0, 2, 10], 3)])
    assert found.x.tolist() == [0, 2, 5, 10]
    np.testing.assert_allclose(found.mean, 2 * found.x)
    # The deviation of x, 2x and 3x is x.
    np.testing.assert_allclose(found.high - found.mean, T_2 * found.x / math.sqrt(3))
    np.testing.assert_allclose(found.mean - found.low, T_2 * found.x / math.sqrt(3))
    assert found.num_curves.tolist() == [3] * 4


def test_the_interval_of_two_curves() -> None:
    found = mean_curve([line([0, 1], 0, start=1), line([0, 1], 0, start=3)])
    np.testing.assert_allclose(found.mean, 2)
    np.testing.assert_allclose([found.low, found.high], [[2 - T_1] * 2, [2 + T_1] * 2])


def test_a_curve_counts_only_where_it_has_values() -> None:
    short, long = line([1, 2, 3], 0, start=4), line([1, 2, 3, 4, 5, 6], 0, start=8)
    found = mean_curve([short, long, make_curve(np.array([]), np.array([]))])
    assert found.num_curves.tolist() == [2, 2, 2, 2, 1, 1]  # the short one counts for one more of its distances
    assert found.mean.tolist() == [6, 6, 6, 6, 8, 8]
    assert np.isnan(found.low).tolist() == [False] * 4 + [True] * 2


def test_single_points_that_nearly_meet_have_a_mean_with_an_interval() -> None:
    found = mean_curve([line([100], 0, start=4), line([102], 0, start=6), line([103], 0, start=8)])
    assert found.num_curves.tolist() == [3, 3, 3]
    np.testing.assert_allclose(found.mean, 6)
    np.testing.assert_allclose(found.high - found.mean, T_2 * 2 / math.sqrt(3))


def test_a_single_point_counts_for_one_distance_of_the_other_curves() -> None:
    found = mean_curve([line([101], 0, start=4), line([100, 200, 300, 400], 0, start=8)])
    assert found.x.tolist() == [100, 101, 200, 300, 400]
    assert found.num_curves.tolist() == [2, 2, 2, 1, 1]


def test_two_curves_of_more_have_no_interval() -> None:
    found = mean_curve([line([0, 1], 1), line([0, 1, 5], 1), line([0, 1, 5], 2)])
    assert found.num_curves.tolist() == [3, 3, 2]
    assert np.isnan(found.high).tolist() == [False, False, True]


def test_many_points_are_compared_at_equal_distances() -> None:
    found = mean_curve([line(list(range(0, 3000, 2)), 1), line(list(range(1, 3001, 2)), 1)])
    assert len(found.x) == 400
    np.testing.assert_allclose(found.mean[1:-1], found.x[1:-1])


def test_the_mean_of_nothing_is_nothing() -> None:
    assert mean_curve([]).x.size == 0


def test_points_are_ordered_and_those_without_a_value_left_out() -> None:
    nan = math.nan
    found = make_curve(np.array([30, 10, 20, nan, 20, 40]), np.array([3, 1, 2, 9, 2.5, nan]))
    assert (found.x.tolist(), found.y.tolist()) == ([10, 20, 30], [1, 2.5, 3])


def test_evaluation_has_a_point_for_each_round(tmp_path: Path) -> None:
    rows = [evaluated(result(i, 1.0), mean, fresh=i % 2 == 0) for i, mean in enumerate([None, 7, 7, 9, 9], 1)]
    run = read_run(write_run(tmp_path / "run", results=rows))
    found = curve_of(run, "evaluation/env_runners/episode_return_mean", "time")
    assert (found.x.tolist(), found.y.tolist()) == ([4, 8], [7, 9])
    assert curve_of(run, "no/such/key", "steps").x.size == 0


def test_the_speed_is_env_steps_per_second(tmp_path: Path) -> None:
    found = speed_curve(read_run(write_run(tmp_path / "run")), "steps")
    assert (found.x.tolist(), found.y.tolist()) == ([100, 200, 300], [50, 50, 50])


@pytest.mark.parametrize("size", [1, 5, 51, 300, 5000])
@pytest.mark.parametrize("max_points", [4, 5, 50])
def test_a_thinned_curve_keeps_its_extremes_and_its_ends(size: int, max_points: int) -> None:
    curve = Curve(np.arange(size, dtype=float), np.random.default_rng(size).normal(size=size))
    found = thinned(curve, max_points)
    assert len(found.x) <= max_points + 2
    assert (found.y.min(), found.y.max()) == (curve.y.min(), curve.y.max())
    assert (found.x[0], found.x[-1]) == (curve.x[0], curve.x[-1])
    assert (np.diff(found.x) > 0).all()
    assert (curve.y[found.x.astype(int)] == found.y).all()


@pytest.mark.parametrize("size", [5, 50])
def test_a_short_curve_is_not_thinned(size: int) -> None:
    curve = line(list(range(size)), 1)
    assert thinned(curve, 50) is curve
