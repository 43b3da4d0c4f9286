"""RLlib's connectors that change one observation at a time."""

from __future__ import annotations

from typing import Any

from corral.compat.rllib.connectors import ConnectorV2
from corral.errors import ConfigError


class SingleAgentObservationPreprocessor(ConnectorV2):
    """Changes the observations of each agent, one at a time; define `preprocess`."""

    def preprocess(self, observation: Any, episode: Any) -> Any:
        """Return the changed observation, of the space that `recompute_output_observation_space` returns."""
        raise ConfigError(f"{type(self).__name__} has no method preprocess(observation, episode).")

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Change the latest observation of each agent."""
        for episode in self.single_agent_episode_iterator(episodes):
            changed = self.preprocess(observation=episode.get_observations(-1), episode=episode)
            episode.set_observations(new_data=changed, at_indices=-1)
        return batch


class MultiAgentObservationPreprocessor(ConnectorV2):
    """Changes the observations of all agents at a time: dicts by agent id; define `preprocess`."""

    def preprocess(self, observations: Any, episode: Any) -> Any:
        """Return the changed observations by agent."""
        raise ConfigError(f"{type(self).__name__} has no method preprocess(observations, episode).")

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Change the latest observations of all agents."""
        for episode in episodes:
            changed = self.preprocess(observations=episode.get_observations(-1), episode=episode)
            for agent_id, observation in changed.items():
                episode.agent_episodes[agent_id].set_observations(new_data=observation, at_indices=-1)
        return batch
