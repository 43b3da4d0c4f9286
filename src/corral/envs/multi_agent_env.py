"""Envs with several agents: dicts by agent id in place of single values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

AgentID = str | int


class MultiAgentEnv(gym.Env[Any, Any]):
    """Env with several agents, whose observations, actions, rewards and flags are dicts by agent id.

    Agents may act together or in turn, begin to act in the middle of an episode, and end before the others. The agents
    in the observations of a `reset` or `step` act in the next step, except the agents that have ended.

    A subclass sets `possible_agents` and the spaces, in one of three ways: dicts `observation_spaces` and
    `action_spaces` by agent id, `Dict` spaces `observation_space` and `action_space` by agent id, or one
    `observation_space` and one `action_space` that all agents share.

    Attributes:
        possible_agents: Ids of all agents that may ever appear, strings or integers. The default is `agents`.
        agents: Ids of the agents that are in the env at present. Corral does not read it after the env was made.
        observation_spaces: Observation space of each agent.
        action_spaces: Action space of each agent.
        observation_space: Observation space of all agents, or a `Dict` of the observation spaces by agent id.
        action_space: Action space of all agents, or a `Dict` of the action spaces by agent id.
    """

    possible_agents: Sequence[AgentID] = ()
    agents: Sequence[AgentID] = ()
    observation_spaces: Mapping[Any, gym.Space[Any]] | None = None
    action_spaces: Mapping[Any, gym.Space[Any]] | None = None
    observation_space: Any = None
    action_space: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin an episode.

        Args:
            seed: Seed of the env's generator, or `None` to continue with the generator.
            options: Options of the env.

        Returns:
            Observations of the agents that act first, and infos, both by agent id. The key `"__common__"` of the infos
            is for the info of no agent in particular.
        """
        super().reset(seed=seed, options=options)
        return {}, {}

    def step(  # type: ignore[override]
        self, action_dict: dict[Any, Any]
    ) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, bool], dict[Any, bool], dict[Any, Any]]:
        """Step the env with the actions of the agents that act, by agent id.

        Returns:
            Five dicts by agent id: observations of the agents that act next, and of agents that ended; rewards, also
            of agents that did not act; whether agents have terminated; whether they were truncated; infos. The key
            `"__all__"` of both dicts of flags tells whether the episode has ended for all agents.
        """
        raise TypeError(f"{type(self).__name__} must define step(action_dict).")

    def get_observation_space(self, agent_id: AgentID) -> gym.Space[Any] | None:
        """Return the observation space of an agent, or `None` if it has none."""
        return _space_of(agent_id, self.observation_spaces, self.observation_space)

    def get_action_space(self, agent_id: AgentID) -> gym.Space[Any] | None:
        """Return the action space of an agent, or `None` if it has none."""
        return _space_of(agent_id, self.action_spaces, self.action_space)

    @property
    def num_agents(self) -> int:
        """Number of agents that are in the env at present."""
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        """Number of agents that may ever appear."""
        return len(self.possible_agents)


def _space_of(
    agent_id: AgentID, spaces: Mapping[Any, gym.Space[Any]] | None, shared: gym.Space[Any] | None
) -> gym.Space[Any] | None:
    if spaces is not None:
        return spaces.get(agent_id)
    if isinstance(shared, gym.spaces.Dict) and agent_id in shared.spaces:
        return shared[agent_id]
    return shared
