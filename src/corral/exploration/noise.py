"""Noise on continuous actions: independent in each step, or correlated over time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.schedules import Schedule, schedule_value, validate_schedule
from corral.errors import ConfigError
from corral.exploration.base import Choice, Exploration, RowDistribution, not_negative
from corral.exploration.epsilon import of_actors, per_actor
from corral.modules.distributions import DiagGaussian

FloatArray = NDArray[np.float64]


class ActionNoise(Exploration, ABC):
    """Adds noise to the policy's most likely action. A subclass defines `noise`.

    The noise has the unit of `DiagGaussian.to_unit`: bounded dimensions have the range [-1, 1], other dimensions have
    the unit of the env. Actions outside of the bounds are clipped.

    Args:
        random_timesteps: Number of env steps at the beginning with actions drawn uniformly from the action space.
        initial_scale: Factor of the noise after the random steps.
        final_scale: Factor of the noise at the end.
        scale_timesteps: Number of env steps in which the factor changes linearly from the initial to the final value.
        scale_schedule: A number or `[[timestep, scale], ...]`, which replaces the three settings above.
    """

    on_policy = False
    action_spaces = (spaces.Box,)
    schedules: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scale_schedule": ("initial_scale", "final_scale", "scale_timesteps")
    }

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        random_timesteps: int = 1000,
        initial_scale: float = 1.0,
        final_scale: float = 0.02,
        scale_timesteps: int = 10_000,
        scale_schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(action_space, **kwargs)
        self.random_timesteps = not_negative(self, "random_timesteps", random_timesteps)
        if scale_schedule is None:
            length = max(1, not_negative(self, "scale_timesteps", scale_timesteps))
            points = [(0, initial_scale), (random_timesteps, initial_scale), (random_timesteps + length, final_scale)]
            scale_schedule = points[not random_timesteps :]
        validate_schedule(f"exploration_config of {type(self).__name__}: scale", scale_schedule)
        self.schedule = scale_schedule
        self._spread = per_actor(self) if self.by_actor else None

    @abstractmethod
    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
        """Return the noise of one row, `[N, ...]`, before scaling."""

    def scales(self, timestep: int, num_envs: int) -> float | FloatArray:
        """Return the factor of the noise: one number for all sub-envs, or an array `[N]` with one per sub-env."""
        return schedule_value(self.schedule, timestep) if self._spread is None else np.resize(self._spread, num_envs)

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Return the most likely actions; with exploration, add noise, or draw uniformly in the first steps."""
        if not explore:
            return action_distribution.mode(), None
        if timestep < self.random_timesteps:
            return action_distribution.random(), None
        gaussian = cast(DiagGaussian, action_distribution.distribution)  # the distribution of a Box
        actions = gaussian.to_unit(action_distribution.mode())
        noise = self.noise(actions.shape, action_distribution.rng)
        scales = self.scales(timestep, len(actions))
        noise *= scales if isinstance(scales, float) else scales.reshape(-1, *[1] * (noise.ndim - 1))
        return gaussian.from_unit(actions + noise), None

    def get_metrics(self, timestep: int) -> dict[str, float]:
        """Return `noise_scale`, the mean over the sub-envs of all runners."""
        factors = of_actors(self) if self.by_actor else None
        return {"noise_scale": float(np.mean(self.scales(timestep, self.num_envs) if factors is None else factors))}


class GaussianNoise(ActionNoise):
    """Adds Gaussian noise, which is independent in each step.

    Args:
        stddev: Standard deviation of the noise, before scaling.
    """

    paper = "Fujimoto et al. 2018, arXiv:1802.09477, section 6.1"

    def __init__(self, action_space: spaces.Space[Any], *, stddev: float = 0.1, **kwargs: Any) -> None:
        super().__init__(action_space, **kwargs)
        self.stddev = not_negative(self, "stddev", stddev)

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
        noise: FloatArray = self.stddev * rng.standard_normal(shape)
        return noise


class PerWorkerGaussianNoise(GaussianNoise):
    """Adds Gaussian noise with a constant scale per actor, equal to the epsilon of `PerWorkerEpsilonGreedy`.

    If there is only one actor, the scale follows the settings of `GaussianNoise`.
    """

    by_actor = True
    paper = "Horgan et al. 2018, arXiv:1803.00933, section 4.1, for the spread"


class OrnsteinUhlenbeckNoise(ActionNoise):
    """Adds noise of an Ornstein-Uhlenbeck process per sub-env; the process starts at 0 in each episode.

    With several agents each agent has a process, which takes a step when the agent acts. In each step the state changes
    by `-ou_theta * state + ou_sigma * normal`. The noise is the state times `ou_base_scale`, times the scale, times the
    width of the range: 2 for bounded dimensions, 1 for others.

    Args:
        ou_theta: Fraction of the state that the process loses per step, in [0, 2).
        ou_sigma: Standard deviation of the random change per step.
        ou_base_scale: Constant factor of the noise.
    """

    paper = "Uhlenbeck and Ornstein 1930, doi:10.1103/PhysRev.36.823; Lillicrap et al. 2016, arXiv:1509.02971"

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        ou_theta: float = 0.15,
        ou_sigma: float = 0.2,
        ou_base_scale: float = 0.1,
        **kwargs: Any,
    ) -> None:
        """Keep the settings, and start the processes at 0."""
        super().__init__(action_space, **kwargs)
        self.theta = between(self, "ou_theta", ou_theta, 0, 2)
        self.sigma = not_negative(self, "ou_sigma", ou_sigma)
        self.base_scale = not_negative(self, "ou_base_scale", ou_base_scale)
        assert isinstance(action_space, spaces.Box)
        bounded = np.isfinite(action_space.low) & np.isfinite(action_space.high)
        self._factor = self.base_scale * np.where(bounded, 2.0, 1.0)
        self.state: FloatArray = np.zeros((self.num_envs, *action_space.shape))

    def begin_episodes(self, begins: NDArray[np.bool_], *, timestep: int, explore: bool) -> None:
        """Set the process to 0 in the sub-envs in which an episode begins."""
        if len(begins) == len(self.state):
            self.state[begins] = 0.0

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Return actions as `ActionNoise` does; the processes of rows that do not act stay as they are."""
        acts = action_distribution.acts
        before = None if acts is None else self.state.copy()
        choice = super().get_exploration_action(
            action_distribution=action_distribution, timestep=timestep, explore=explore
        )
        if acts is not None and before is not None and before.shape == self.state.shape:
            self.state[~acts] = before[~acts]
        return choice

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
        """Return the noise after one step of the process; a batch of another size starts a new process."""
        if shape != self.state.shape:
            self.state = np.zeros(shape)
        self.state += self.sigma * rng.standard_normal(shape) - self.theta * self.state
        noise: FloatArray = self.state * self._factor
        return noise

    def get_state(self) -> dict[str, Any]:
        """Return the state of the processes, `ou_state`, `[N, ...]`."""
        return {"ou_state": self.state.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state; with another number of sub-envs than it has, the processes start when they are used."""
        if state["ou_state"].shape[1:] == self.state.shape[1:]:
            self.state = state["ou_state"].copy()


class PerWorkerOrnsteinUhlenbeckNoise(OrnsteinUhlenbeckNoise):
    """Adds Ornstein-Uhlenbeck noise with a constant scale per actor, equal to the epsilon of `PerWorkerEpsilonGreedy`.

    If there is only one actor, the scale follows the settings of `OrnsteinUhlenbeckNoise`.
    """

    by_actor = True
    paper = "Horgan et al. 2018, arXiv:1803.00933, section 4.1, for the spread"


def between(exploration: Exploration, name: str, value: Any, low: float, high: float) -> Any:
    """Return the value if it is a number in [low, high).

    Raises:
        ConfigError: The value is not a number, or is out of range.
    """
    if not isinstance(value, (int, float)) or not low <= value < high:
        raise ConfigError(
            f"exploration_config of {type(exploration).__name__}: {name}={value!r} must be in [{low}, {high})."
        )
    return value
