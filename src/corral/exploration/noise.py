"""Noise on continuous actions: drawn again at every step, or drifting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.schedules import Schedule, schedule_value, validate_schedule
from corral.errors import ConfigError
from corral.exploration.base import Choice, Exploration, RowDistribution
from corral.exploration.epsilon import per_actor
from corral.exploration.sampling import not_negative
from corral.modules.distributions import DiagGaussian

FloatArray = NDArray[np.float64]


class ActionNoise(Exploration, ABC):
    """Adds noise to the policy's most likely action. A subclass gives `noise`.

    The unit is the unit of `DiagGaussian.to_unit`: [-1, 1] along bounded dimensions, the env's own along others. What
    leaves the bounds is clipped.

    Args:
        random_timesteps: Env steps at the beginning whose actions are drawn evenly from the action space.
        initial_scale: What the noise is multiplied by when they are over.
        final_scale: What it is multiplied by in the end.
        scale_timesteps: Env steps from the one to the other, along a straight line.
        scale_schedule: A number or `[[timestep, scale], ...]` in place of the three.
    """

    on_policy = False
    action_spaces = (spaces.Box,)
    per_worker: ClassVar[bool] = False
    """Whether each actor has a constant scale of its own; see `per_actor`."""

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
        """Take the settings."""
        super().__init__(action_space, **kwargs)
        self.random_timesteps = not_negative(self, "random_timesteps", random_timesteps)
        if scale_schedule is None:
            length = max(1, not_negative(self, "scale_timesteps", scale_timesteps))
            points = [(0, initial_scale), (random_timesteps, initial_scale), (random_timesteps + length, final_scale)]
            scale_schedule = points[not random_timesteps :]
        validate_schedule(f"exploration_config of {type(self).__name__}: scale", scale_schedule)
        self.schedule = scale_schedule
        self._spread = per_actor(self) if self.per_worker else None

    @abstractmethod
    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
        """Draw the noise of one row, `[N, ...]`, before it is scaled."""

    def scales(self, timestep: int, num_envs: int) -> float | FloatArray:
        """Return what the noise is multiplied by, of all sub-envs or `[N]` of each."""
        return schedule_value(self.schedule, timestep) if self._spread is None else np.resize(self._spread, num_envs)

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Take the most likely actions, and add noise."""
        if not explore:
            return action_distribution.mode(), None
        if timestep < self.random_timesteps:
            return action_distribution.random(), None
        gaussian = cast(DiagGaussian, action_distribution.distribution)  # what there is for a Box
        actions = gaussian.to_unit(action_distribution.mode())
        noise = self.noise(actions.shape, action_distribution.rng)
        scales = self.scales(timestep, len(actions))
        noise *= scales if isinstance(scales, float) else scales.reshape(-1, *[1] * (noise.ndim - 1))
        return gaussian.from_unit(actions + noise), None

    def get_metrics(self, timestep: int) -> dict[str, float]:
        """Return `noise_scale`, the mean over the sub-envs."""
        return {"noise_scale": float(np.mean(self.scales(timestep, self.num_envs)))}


class GaussianNoise(ActionNoise):
    """Adds Gaussian noise, drawn again at every step.

    Args:
        stddev: Standard deviation of the noise, before it is scaled.
    """

    paper = "Fujimoto et al. 2018, arXiv:1802.09477, section 6.1"

    def __init__(self, action_space: spaces.Space[Any], *, stddev: float = 0.1, **kwargs: Any) -> None:
        """Take the settings."""
        super().__init__(action_space, **kwargs)
        self.stddev = not_negative(self, "stddev", stddev)

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
        """Draw from a Gaussian."""
        noise: FloatArray = self.stddev * rng.standard_normal(shape)
        return noise


class PerWorkerGaussianNoise(GaussianNoise):
    """Gaussian noise with a constant scale for each actor, as `PerWorkerEpsilonGreedy` spreads its epsilon.

    With a single actor the scale follows the settings of `GaussianNoise`.
    """

    per_worker = True
    paper = "Horgan et al. 2018, arXiv:1803.00933, section 4.1, for the spread"


class OrnsteinUhlenbeckNoise(ActionNoise):
    """Adds noise that drifts: an Ornstein-Uhlenbeck process for each sub-env, which starts at 0 with each episode.

    A step moves it by `-ou_theta * state + ou_sigma * normal`. What is added is the state times `ou_base_scale`, times
    the scale, times the width of the bounds (1 along dimensions without).

    Args:
        ou_theta: The part of its state that the process loses in a step, in [0, 2).
        ou_sigma: Standard deviation of what it gains.
        ou_base_scale: A constant factor.
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
        """Take the settings."""
        super().__init__(action_space, **kwargs)
        self.theta = between(self, "ou_theta", ou_theta, 0, 2)
        self.sigma = not_negative(self, "ou_sigma", ou_sigma)
        self.base_scale = not_negative(self, "ou_base_scale", ou_base_scale)
        assert isinstance(action_space, spaces.Box)
        bounded = np.isfinite(action_space.low) & np.isfinite(action_space.high)
        self._factor = self.base_scale * np.where(bounded, 2.0, 1.0)
        self.state: FloatArray = np.zeros((self.num_envs, *action_space.shape))

    def begin_episodes(self, begins: NDArray[np.bool_], *, timestep: int, explore: bool) -> None:
        """Let the process start again where an episode begins."""
        if len(begins) == len(self.state):
            self.state[begins] = 0.0

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
        """Take one step of the process; a batch of another size starts one of its own."""
        if shape != self.state.shape:
            self.state = np.zeros(shape)
        self.state += self.sigma * rng.standard_normal(shape) - self.theta * self.state
        noise: FloatArray = self.state * self._factor
        return noise

    def get_state(self) -> dict[str, Any]:
        """Return `ou_state`, `[N, ...]`."""
        return {"ou_state": self.state.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of as many sub-envs; a state of fewer or more is ignored."""
        if state["ou_state"].shape == self.state.shape:
            self.state = state["ou_state"].copy()


class PerWorkerOrnsteinUhlenbeckNoise(OrnsteinUhlenbeckNoise):
    """Ornstein-Uhlenbeck noise with a constant scale for each actor, as `PerWorkerEpsilonGreedy` spreads its epsilon.

    With a single actor the scale follows the settings of `OrnsteinUhlenbeckNoise`.
    """

    per_worker = True
    paper = "Horgan et al. 2018, arXiv:1803.00933, section 4.1, for the spread"


def between(exploration: Exploration, name: str, value: Any, low: float, high: float) -> Any:
    """Return a number of at least `low` and below `high`.

    Raises:
        ConfigError: It is outside, or it is no number.
    """
    if not isinstance(value, (int, float)) or not low <= value < high:
        raise ConfigError(
            f"exploration_config of {type(exploration).__name__}: {name}={value!r} must be in [{low}, {high})."
        )
    return value
