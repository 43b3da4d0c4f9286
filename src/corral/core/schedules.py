"""Settings that change during training: a number, or points `[[step, value], ...]` joined by straight lines."""

from __future__ import annotations

import itertools

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


def validate_schedule(name: str, schedule: Schedule, *, minimum: float = 0.0) -> None:
    """Check the points of a schedule.

    Args:
        name: Name of the setting, for the messages.
        schedule: A number, or a list of points.
        minimum: Smallest value allowed.

    Raises:
        ConfigError: The first step is not 0, the steps do not rise, or a value is less than `minimum`.
    """
    if isinstance(schedule, (int, float)):
        values: tuple[float, ...] = (float(schedule),)
    else:
        if not schedule:
            raise ConfigError(f"{name}: a schedule needs at least one [step, value] pair.")
        steps, values = zip(*schedule, strict=True)
        if steps[0] != 0:
            raise ConfigError(f"{name}: the first step of a schedule must be 0, not {steps[0]}.")
        if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise ConfigError(f"{name}: the steps of a schedule must rise, got {list(steps)}.")
    if not all(minimum <= value < float("inf") for value in values):
        raise ConfigError(f"{name}: values must be finite and at least {minimum}, got {list(values)}.")
