"""Actions drawn from the policy's distribution, or uniformly from the action space."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from corral.errors import ConfigError
from corral.exploration.base import Choice, Exploration, RowDistribution


class StochasticSampling(Exploration):
    """Draws actions from the policy's distribution; without exploration, chooses the most likely action.

    Args:
        random_timesteps: Number of env steps at the beginning with actions drawn uniformly from the action space.
    """

    action_spaces = (*Exploration.action_spaces, spaces.Dict, spaces.Tuple)
    paper = "Williams 1992, doi:10.1007/BF00992696"

    def __init__(self, action_space: spaces.Space[Any], *, random_timesteps: int = 0, **kwargs: Any) -> None:
        super().__init__(action_space, **kwargs)
        self.random_timesteps = not_negative(self, "random_timesteps", random_timesteps)

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Return drawn actions and their log-likelihood; without exploration, the most likely actions."""
        if not explore:
            return action_distribution.mode(), None
        if timestep < self.random_timesteps:
            actions = action_distribution.random()
            return actions, action_distribution.random_logp(actions)
        return action_distribution.sample(), None


class Random(Exploration):
    """Draws actions uniformly from the action space; without exploration, chooses the policy's most likely action."""

    on_policy = False
    action_spaces = (*Exploration.action_spaces, spaces.Dict, spaces.Tuple)
    paper = "a baseline"

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Return drawn actions and their log-likelihood; without exploration, the most likely actions."""
        if not explore:
            return action_distribution.mode(), None
        actions = action_distribution.random()
        return actions, action_distribution.random_logp(actions)


def not_negative(exploration: Exploration, name: str, value: Any) -> Any:
    """Return the value if it is a finite number of at least 0.

    Raises:
        ConfigError: The value is not a number, is negative, or is not finite.
    """
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(
            f"exploration_config of {type(exploration).__name__}: {name}={value!r} must be a number of at least 0."
        )
    return value
