"""Exploration of discrete actions by their values: epsilon-greedy, or drawn from the softmax of the values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.schedules import Schedule, schedule_value, validate_schedule
from corral.errors import ConfigError
from corral.exploration.base import Choice, Exploration, RowDistribution, not_negative

DISCRETE = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class EpsilonGreedy(Exploration):
    """Chooses a random action with probability epsilon, else the best action; independently for each sub-env.

    Args:
        initial_epsilon: Epsilon at the start, and for `warmup_timesteps`.
        final_epsilon: Epsilon at the end.
        warmup_timesteps: Number of env steps before epsilon begins to fall.
        epsilon_timesteps: Number of env steps in which epsilon falls linearly from the initial to the final value.
        epsilon_schedule: A number or `[[timestep, epsilon], ...]`, which replaces the four settings above.
    """

    on_policy = False
    action_spaces = DISCRETE
    schedules: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "epsilon_schedule": ("initial_epsilon", "final_epsilon", "warmup_timesteps", "epsilon_timesteps")
    }
    paper = "Watkins 1989; annealed as in Mnih et al. 2015, doi:10.1038/nature14236"

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        initial_epsilon: float = 1.0,
        final_epsilon: float = 0.05,
        warmup_timesteps: int = 0,
        epsilon_timesteps: int = 10_000,
        epsilon_schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(action_space, **kwargs)
        if epsilon_schedule is None:
            warmup = not_negative(self, "warmup_timesteps", warmup_timesteps)
            length = max(1, not_negative(self, "epsilon_timesteps", epsilon_timesteps))
            points = [(0, initial_epsilon), (warmup, initial_epsilon), (warmup + length, final_epsilon)]
            epsilon_schedule = points[not warmup :]
        validate_schedule("exploration_config: epsilon", epsilon_schedule)
        values = [epsilon_schedule] if isinstance(epsilon_schedule, (int, float)) else [y for _, y in epsilon_schedule]
        if max(values) > 1:
            raise ConfigError(f"exploration_config of {type(self).__name__}: an epsilon must be in [0, 1]: {values}.")
        self.schedule = epsilon_schedule

    def epsilons(self, timestep: int, num_envs: int) -> float | NDArray[np.float64]:
        """Return epsilon: one number for all sub-envs, or an array `[N]` with one per sub-env."""
        return schedule_value(self.schedule, timestep)

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Return the best actions; with exploration, replace each by a random action with probability epsilon."""
        actions = action_distribution.mode()
        if not explore:
            return actions, None
        randomly = action_distribution.rng.random(len(actions)) < self.epsilons(timestep, len(actions))
        if randomly.any():
            actions[randomly] = action_distribution.random()[randomly]
        return actions, None

    def get_metrics(self, timestep: int) -> dict[str, float]:
        """Return `epsilon`, the mean over the sub-envs of all runners."""
        factors = of_actors(self) if self.by_actor else None
        return {"epsilon": float(np.mean(self.epsilons(timestep, self.num_envs) if factors is None else factors))}


class PerWorkerEpsilonGreedy(EpsilonGreedy):
    """Epsilon-greedy with a constant epsilon per actor: `0.4 ** (1 + 7 * i / (n - 1))` for actor i of n.

    Each sub-env of each runner is an actor. If there is only one actor, epsilon follows the settings of
    `EpsilonGreedy`.
    """

    by_actor = True
    paper = "Horgan et al. 2018, arXiv:1803.00933, section 4.1"

    def epsilons(self, timestep: int, num_envs: int) -> float | NDArray[np.float64]:
        spread = per_actor(self)
        return super().epsilons(timestep, num_envs) if spread is None else np.resize(spread, num_envs)


def of_actors(exploration: Exploration, first: int = 0, number: int | None = None) -> NDArray[np.float64] | None:
    """Return the factors of the sub-envs of all runners, in order, or `None` if there is only one sub-env.

    They go from 0.4 for the first to 0.4 ** 8 for the last, with equal steps of the exponent (Horgan et al. 2018,
    arXiv:1803.00933).

    Args:
        exploration: Exploration of a runner.
        first: Index of the first sub-env whose factor is returned.
        number: Number of the factors; `None` is all from the first.
    """
    num_actors = max(1, exploration.num_workers) * exploration.num_envs
    if num_actors == 1:
        return None
    indices = first + np.arange(num_actors - first if number is None else number)
    factors: NDArray[np.float64] = 0.4 ** (1 + 7 * indices / (num_actors - 1))
    return factors


def per_actor(exploration: Exploration) -> NDArray[np.float64] | None:
    """Return the factors `[N]` of a runner's own sub-envs; see `of_actors`."""
    num_envs = exploration.num_envs
    return of_actors(exploration, max(0, exploration.worker_index - 1) * num_envs, num_envs)


class SoftQ(Exploration):
    """Draws actions from the softmax of the Q-values divided by a temperature (Boltzmann exploration).

    Args:
        temperature: A number above 0, or a schedule over timesteps; the lower it is, the more often the best action is
            chosen.
    """

    on_policy = False
    action_spaces = (spaces.Discrete, spaces.MultiDiscrete)
    paper = "Sutton 1990, doi:10.1016/B978-1-55860-141-3.50030-4"

    def __init__(self, action_space: spaces.Space[Any], *, temperature: Schedule = 1.0, **kwargs: Any) -> None:
        super().__init__(action_space, **kwargs)
        validate_schedule("exploration_config of SoftQ: temperature", temperature)
        values = [temperature] if isinstance(temperature, (int, float)) else [value for _, value in temperature]
        if min(values) <= 0:
            raise ConfigError(f"exploration_config of SoftQ: temperature={temperature} must be above 0.")
        self.temperature = temperature

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Return drawn actions; without exploration, the best actions."""
        if not explore:
            return action_distribution.mode(), None
        scaled = action_distribution.inputs / np.float32(schedule_value(self.temperature, timestep))
        return action_distribution.sample(scaled), None

    def get_metrics(self, timestep: int) -> dict[str, float]:
        """Return `temperature`."""
        return {"temperature": schedule_value(self.temperature, timestep)}
