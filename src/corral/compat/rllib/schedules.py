"""Schedules of `ray.rllib.utils.schedules`: numbers that change with the time step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.core.schedules import schedule_value, validate_schedule


class Schedule:
    """A number that depends on the time step `t`: subclasses define `_value(t)`."""

    def __init__(self, framework: str | None = None) -> None:
        """Keep the framework, which changes nothing."""
        self.framework = framework

    def __call__(self, t: float) -> Any:
        """Return the value at a time step."""
        return self.value(t)

    def value(self, t: float) -> Any:
        """Return the value at a time step."""
        return self._value(t)

    def _value(self, t: float) -> Any:
        raise TypeError(f"{type(self).__name__} must define _value(t).")


class ConstantSchedule(Schedule):
    """The same number at all time steps."""

    def __init__(self, value: float, framework: str | None = None) -> None:
        """Keep the number."""
        super().__init__(framework)
        self._v = value

    def _value(self, t: float) -> Any:
        return self._v


class PiecewiseSchedule(Schedule):
    """Points `(t, value)` joined by straight lines."""

    def __init__(
        self,
        endpoints: Sequence[tuple[float, float]],
        framework: str | None = None,
        interpolation: Any = None,
        outside_value: float | None = None,
    ) -> None:
        """Keep the points.

        Args:
            endpoints: Pairs `(t, value)` with rising `t`.
            framework: Changes nothing.
            interpolation: Function `fn(left, right, share)` between two points; by default the straight line.
            outside_value: Value before the first point and after the last; by default the value of that point.
        """
        super().__init__(framework)
        self.endpoints = [(float(t), value) for t, value in endpoints]
        self.interpolation, self.outside_value = interpolation, outside_value

    def _value(self, t: float) -> Any:
        (first, start), (last, end) = self.endpoints[0], self.endpoints[-1]
        if t < first or t >= last:
            edge = start if t < first else end
            return edge if self.outside_value is None else self.outside_value
        if self.interpolation is None:
            return schedule_value([(step - first, value) for step, value in self.endpoints], t - first)
        for (left_t, left), (right_t, right) in zip(self.endpoints, self.endpoints[1:], strict=False):
            if left_t <= t < right_t:
                return self.interpolation(left, right, (t - left_t) / (right_t - left_t))
        return end


class PolynomialSchedule(Schedule):
    """A number that falls from `initial_p` to `final_p` in `schedule_timesteps`, as a power of the time left."""

    def __init__(
        self,
        schedule_timesteps: int,
        final_p: float,
        framework: str | None = None,
        initial_p: float = 1.0,
        power: float = 2.0,
    ) -> None:
        """Keep the ends and the power."""
        super().__init__(framework)
        self.schedule_timesteps, self.final_p, self.initial_p, self.power = (
            schedule_timesteps,
            final_p,
            initial_p,
            power,
        )

    def _value(self, t: float) -> Any:
        left = 1.0 - min(t, self.schedule_timesteps) / self.schedule_timesteps
        return self.final_p + (self.initial_p - self.final_p) * left**self.power


class LinearSchedule(PolynomialSchedule):
    """A number that falls from `initial_p` to `final_p` in `schedule_timesteps`, in a straight line."""

    def __init__(self, **kwargs: Any) -> None:
        """Keep the ends; the arguments are the same as for `PolynomialSchedule`, without `power`."""
        super().__init__(power=1.0, **kwargs)


class ExponentialSchedule(Schedule):
    """A number that is multiplied by `decay_rate` in every `schedule_timesteps`."""

    def __init__(
        self, schedule_timesteps: int, framework: str | None = None, initial_p: float = 1.0, decay_rate: float = 0.1
    ) -> None:
        """Keep the start and the rate."""
        super().__init__(framework)
        self.schedule_timesteps, self.initial_p, self.decay_rate = schedule_timesteps, initial_p, decay_rate

    def _value(self, t: float) -> Any:
        return self.initial_p * self.decay_rate ** (t / self.schedule_timesteps)


class Scheduler:
    """Holds the value of a setting that is a number or a list of points `[t, value]`."""

    def __init__(self, fixed_value_or_schedule: Any, *, framework: str = "torch", device: Any = None) -> None:
        """Start at the first value of the schedule."""
        self.use_schedule = isinstance(fixed_value_or_schedule, (list, tuple))
        self._schedule = fixed_value_or_schedule
        self._value = fixed_value_or_schedule[0][1] if self.use_schedule else fixed_value_or_schedule

    @staticmethod
    def validate(*, fixed_value_or_schedule: Any, setting_name: str, description: str = "") -> None:
        """Check the points of a schedule.

        Raises:
            ConfigError: The first step is not 0, or the steps do not rise.
        """
        if isinstance(fixed_value_or_schedule, (list, tuple)):
            validate_schedule(setting_name, list(fixed_value_or_schedule), minimum=float("-inf"))

    def get_current_value(self) -> Any:
        """Return the value at the time step of the last `update`."""
        return self._value

    def update(self, timestep: int) -> Any:
        """Move to a time step, and return the value there."""
        if self.use_schedule:
            self._value = schedule_value(list(self._schedule), timestep)
        return self._value
