"""Actions drawn from the policy's own distribution, or evenly from the action space."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from corral.errors import ConfigError
from corral.exploration.base import Choice, Exploration, RowDistribution


class StochasticSampling(Exploration):
    """Draws from the policy's distribution; without exploration, its most likely action.

    Args:
        random_timesteps: Env steps at the beginning whose actions are drawn evenly from the action space.
    """

    paper = "Williams 1992, doi:10.1007/BF00992696"

    def __init__(self, action_space: spaces.Space[Any], *, random_timesteps: int = 0, **kwargs: Any) -> None:
        """Take the settings."""
        super().__init__(action_space, **kwargs)
        self.random_timesteps = not_negative(self, "random_timesteps", random_timesteps)

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Draw, or take the mode."""
        if not explore:
            return action_distribution.mode(), None
        if timestep < self.random_timesteps:
            actions = action_distribution.random()
            return actions, action_distribution.random_logp(actions)
        return action_distribution.sample(), None


class Random(Exploration):
    """Draws evenly from the action space, always; without exploration, the policy's most likely action."""

    on_policy = False
    paper = "a baseline"

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Draw, or take the mode."""
        if not explore:
            return action_distribution.mode(), None
        actions = action_distribution.random()
        return actions, action_distribution.random_logp(actions)


def not_negative(exploration: Exploration, name: str, value: Any) -> Any:
    """Return a number that may not be negative.

    Raises:
        ConfigError: It is, or it is no number.
    """
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(
            f"exploration_config of {type(exploration).__name__}: {name}={value!r} must be a number of at least 0."
        )
    return value
