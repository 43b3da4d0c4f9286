"""Schedules: settings that change during training, a number or `[[step, value], ...]` joined by straight lines."""

from __future__ import annotations

import itertools
import math
from numbers import Real
from typing import Any

from corral.errors import ConfigError

Schedule = float | list[tuple[float, float]]
"""A number, or `[[num_env_steps, value], ...]` joined by straight lines."""


def schedule_value(schedule: Schedule, num_env_steps: float) -> float:
    """Return the value of a schedule.

    Args:
        schedule: A number, or `[[step, value], ...]` with rising steps, the first of them 0, in env steps. Between two
            points the value changes linearly; after the last point it stays constant.
        num_env_steps: Env steps sampled since the start of the run.
    """
    if isinstance(schedule, (int, float)):
        return float(schedule)
    # In plain Python: runners ask at every time step, and for a few points NumPy takes ten times as long.
    (before, value), *points = schedule
    for step, next_value in points:
        if num_env_steps < step:
            return value + (next_value - value) * (num_env_steps - before) / (step - before)
        before, value = step, next_value
    return float(value)


def has_ended_at_zero(schedule: Schedule, num_env_steps: float) -> bool:
    """Return whether a schedule with several points is past its last one, where its value is 0."""
    return not isinstance(schedule, (int, float)) and schedule[-1][1] == 0 and num_env_steps >= schedule[-1][0] > 0


def validate_schedule(name: str, schedule: Schedule, *, minimum: float = 0.0) -> None:
    """Check the points of a schedule.

    Args:
        name: Name of the setting, for the messages.
        schedule: A number, or a list of points.
        minimum: Smallest value allowed.

    Raises:
        ConfigError: The first step is not 0, the steps do not rise, or a value is less than `minimum`.
    """
    if problem := schedule_problem(schedule, minimum=minimum):
        raise ConfigError(f"{name}: {problem}.")


def schedule_problem(schedule: Schedule, *, minimum: float = 0.0, maximum: float = math.inf) -> str | None:
    """Return what is wrong with a schedule's points, or `None`."""
    if isinstance(schedule, (int, float)):
        values: tuple[float, ...] = (float(schedule),)
    else:
        if not (isinstance(schedule, (list, tuple)) and all(map(_is_point, schedule))):
            return f"a schedule is a number, or a list of [step, value] pairs of numbers, got {schedule!r:.100}"
        if not schedule:
            return "a schedule needs at least one [step, value] pair"
        steps, values = zip(*schedule, strict=True)
        if steps[0] != 0:
            return f"the first step of a schedule must be 0, not {steps[0]:g}"
        if not all(earlier < later for earlier, later in itertools.pairwise(steps)):  # not NaN either
            return f"the steps of a schedule must rise, got {list(steps)}"
    if not all(minimum <= value <= maximum and math.isfinite(value) for value in values):
        bounds = f"at least {minimum:g}" if maximum == math.inf else f"in [{minimum:g}, {maximum:g}]"
        return f"values must be finite and {bounds}, got {list(values)}"
    return None


def _is_point(point: Any) -> bool:
    return isinstance(point, (list, tuple)) and len(point) == 2 and all(isinstance(number, Real) for number in point)
