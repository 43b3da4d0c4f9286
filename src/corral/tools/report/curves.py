"""Curves of runs, and the mean of several ones with its 95% interval; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from corral.core.intervals import t_interval
from corral.tools.report.runs import RunFiles

Column = NDArray[np.float64]

X_AXES = {"steps": "num_env_steps_sampled_lifetime", "time": "time_total_s"}
X_TITLES = {"steps": "env steps", "time": "seconds of training"}
FRESH = "evaluation/fresh"
MAX_GRID = 400
"""Number of points at which means are computed, if the runs together have more."""


@dataclass(frozen=True)
class Curve:
    """Points of one run, by ascending `x`, without NaN.

    Attributes:
        x: Env steps or seconds, `[num_points]`.
        y: Values, `[num_points]`.
    """

    x: Column
    y: Column


NO_POINTS = Curve(np.array([]), np.array([]))


@dataclass(frozen=True)
class MeanCurve:
    """Mean of several curves.

    Attributes:
        x: Env steps or seconds, `[num_points]`.
        mean: Mean of the curves that reach over x, `[num_points]`; NaN where there is none.
        low: Lower end of the 95% interval of the mean, `[num_points]`; NaN where fewer than two curves reach, and where
            two curves of more do, of which the interval would be far longer than its neighbours.
        high: Upper end.
        num_curves: Number of curves that reach over x, `[num_points]`.
    """

    x: Column
    mean: Column
    low: Column
    high: Column
    num_curves: NDArray[np.int64]


def curve_of(run: RunFiles, key: str, x_axis: str) -> Curve:
    """Return the points of a number of a run; none if the run has no such number.

    Numbers of evaluation have a point for each round, and none for iterations that repeat the last round.

    Args:
        run: The run.
        key: Path of the number in the result, such as `env_runners/episode_return_mean`.
        x_axis: `"steps"` or `"time"`.
    """
    y = run.numbers.get(key, np.array([]))
    if key.startswith("evaluation/") and FRESH in run.numbers and len(y):
        y = np.where(run.numbers[FRESH] == 1, y, np.nan)
    return make_curve(run.numbers.get(X_AXES[x_axis], np.full(len(y), np.nan)), y)


def speed_curve(run: RunFiles, x_axis: str) -> Curve:
    """Return the env steps per second of each iteration of a run."""
    steps, seconds = (
        run.numbers.get(key, np.array([])) for key in ("env_runners/num_env_steps_sampled", "timers/iteration_s")
    )
    if len(steps) != len(seconds):
        return NO_POINTS
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(seconds > 0, steps / seconds, np.nan)
    return make_curve(run.numbers.get(X_AXES[x_axis], np.full(len(speed), np.nan)), speed)


def make_curve(x: Column, y: Column) -> Curve:
    """Return a curve by ascending `x`, of the points without NaN; of several points at one `x`, the last one.

    Args:
        x: Env steps or seconds, `[num_results]`.
        y: Values, `[num_results]`, or none at all.
    """
    if len(x) != len(y):
        x, y = np.array([]), np.array([])
    there = ~(np.isnan(x) | np.isnan(y))
    x, y = x[there], y[there]
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    is_last = np.append(x[1:] != x[:-1], True)[: len(x)]
    return Curve(x[is_last], y[is_last])


def mean_curve(curves: Sequence[Curve]) -> MeanCurve:
    """Return the mean of curves, with its 95% interval by Student's t distribution.

    The curves are compared at the same points: at every point that one of them has, or at 400 points at equal distances
    if they have more. Between its points a curve is a straight line. Beyond its first and its last point it keeps their
    values for the usual distance of its points, so that runs that ended in the same iteration end together, and has no
    value after that. The distance of a single point is the shortest one of the other curves, or the way from 0 to it.

    Args:
        curves: The curves; those without points do not count.
    """
    curves = [curve for curve in curves if curve.x.size]
    if not curves:
        empty = np.array([])
        return MeanCurve(empty, empty, empty, empty, np.array([], np.int64))
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    if x.size > MAX_GRID:
        x = np.linspace(x[0], x[-1], MAX_GRID)
    distances = [float(np.median(np.diff(curve.x))) for curve in curves if curve.x.size > 1]
    values = np.stack([_values_at(x, curve, min(distances, default=float(curve.x[0]))) for curve in curves])
    num_curves = np.sum(~np.isnan(values), axis=0)
    sums = np.nansum(values, axis=0)
    mean = np.where(num_curves > 0, sums / np.maximum(num_curves, 1), np.nan)
    has_interval = (num_curves == len(curves)) | (num_curves > 2)
    low, high = (np.where(has_interval, end, np.nan) for end in t_interval(values))
    return MeanCurve(x, mean, low, high, num_curves)


def _values_at(x: Column, curve: Curve, distance_of_one: float) -> Column:
    distance = float(np.median(np.diff(curve.x))) if curve.x.size > 1 else distance_of_one
    is_near = (x >= curve.x[0] - distance) & (x <= curve.x[-1] + distance)
    return np.where(is_near, np.interp(x, curve.x, curve.y), np.nan)


def thinned(curve: Curve, max_points: int) -> Curve:
    """Return a curve of at most about `max_points` points that keeps its extremes: two of each stretch, and both ends.

    Args:
        curve: The curve.
        max_points: Largest number of points, at least 4.
    """
    size = len(curve.x)
    if size <= max_points:
        return curve
    edges = np.linspace(0, size, max_points // 2).astype(int)
    kept = {0, size - 1}
    for start, end in pairwise(edges):
        kept |= {start + int(np.argmin(curve.y[start:end])), start + int(np.argmax(curve.y[start:end]))}
    indices = sorted(kept)
    return Curve(curve.x[indices], curve.y[indices])
