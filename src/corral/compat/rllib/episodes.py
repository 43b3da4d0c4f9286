"""RLlib's episodes: Corral's, with RLlib's meaning of the methods that mean something else there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

from corral.compat.rllib.lookback_buffers import InfiniteLookbackBuffer
from corral.core.ids import COMMON, DEFAULT_MODULE_ID
from corral.data.episodes.episode import SingleAgentEpisode as NativeEpisode
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode as NativeMultiAgentEpisode
from corral.data.episodes.notes import Noted

COLUMNS = {"action_logp": "logp", "action_dist_inputs": "dist_inputs", "vf_preds": "values"}
"""Corral's names of columns, by RLlib's."""


class OldEpisode(Noted):
    """RLlib's names in episodes of one agent and of several; most of them are of its older stack."""

    __slots__ = ()

    @property
    def is_numpy(self) -> bool:
        """True: data are arrays from the first step on."""
        return True

    def to_numpy(self) -> Self:
        """Return the episode, whose data are arrays already."""
        return self

    finalize = to_numpy

    @property
    def user_data(self) -> dict[str, Any]:
        """Notes of user code; `custom_data` on the new stack."""
        data: dict[str, Any] = self.custom_data.setdefault("user_data", {})
        return data

    @property
    def custom_metrics(self) -> dict[str, Any]:
        """Numbers that are reported with mean, minimum and maximum when the episode ends."""
        data: dict[str, Any] = self.custom_data.setdefault("custom_metrics", {})
        return data

    @property
    def hist_data(self) -> dict[str, list[Any]]:
        """Lists of numbers that are reported as they are when the episode ends."""
        data: dict[str, list[Any]] = self.custom_data.setdefault("hist_data", {})
        return data

    @property
    def media(self) -> dict[str, Any]:
        """Notes of user code; not reported."""
        data: dict[str, Any] = self.custom_data.setdefault("media", {})
        return data

    @property
    def episode_id(self) -> str:
        """Id of the episode; `id_` on the new stack."""
        return self.id_

    def policy_for(self, agent_id: Any = None) -> str:
        """Return the id of the module of an agent; `module_for` on the new stack."""
        episode: Any = self
        found: str = episode.module_for(agent_id)
        return found


class SingleAgentEpisode(NativeEpisode, OldEpisode):
    """An episode of one agent, with RLlib's semantics: it answers for this chunk only, `get_return()` too."""

    JOINS_CHUNKS = False
    __slots__ = ()

    def get_return(self) -> float:
        """Return the sum of rewards of this chunk."""
        return super().get_return() - self.return_before

    def get_extra_model_outputs(self, key: str | None = None, *args: Any, **settings: Any) -> Any:
        """Return outputs of the module by RLlib's names, such as `action_logp`; Corral's names work too."""
        if key is not None:
            return super().get_extra_model_outputs(self._column_of(key), *args, **settings)
        found = super().get_extra_model_outputs(None, *args, **settings)
        names = {native: name for name, native in COLUMNS.items()}
        return {names.get(name, name): value for name, value in found.items()}

    def env_steps(self) -> int:
        """Return the number of env steps of this chunk."""
        return len(self)

    def agent_steps(self) -> int:
        """Return the number of agent steps of this chunk."""
        return len(self)

    @property
    def observations(self) -> Any:
        """All observations of this chunk, and of the lookback before it."""
        return self._buffer(self.get_observations, self.set_observations, self.observation_space)

    @property
    def actions(self) -> Any:
        """All actions of this chunk, and of the lookback before it."""
        return self._buffer(self.get_actions, self.set_actions, self.action_space)

    @property
    def rewards(self) -> Any:
        """All rewards of this chunk, and of the lookback before it."""
        return self._buffer(self.get_rewards, self.set_rewards)

    @property
    def infos(self) -> Any:
        """All infos of this chunk, and of the lookback before it."""
        return self._buffer(self.get_infos)

    @property
    def extra_model_outputs(self) -> dict[str, Any]:
        """All further outputs of the module, by name."""
        read, write = self.get_extra_model_outputs, self.set_extra_model_outputs
        return {
            key: self._buffer(functools.partial(read, key), functools.partial(write, key=self._column_of(key)))
            for key in read()
        }

    def _column_of(self, key: str) -> str:
        """Return Corral's name of a further output; an episode that is built by hand has RLlib's names."""
        return key if key in self._extra_names else COLUMNS.get(key, key)

    def _buffer(self, read: Callable[..., Any], write: Callable[..., None] | None = None, space: Any = None) -> Any:
        return InfiniteLookbackBuffer.of_episode(read, write, self.len_lookback, space)

    # Older stack.

    @property
    def length(self) -> int:
        """Env steps of the whole episode so far."""
        return self.t

    @property
    def total_reward(self) -> float:
        """Sum of rewards of the whole episode so far."""
        return super().get_return()

    @property
    def agent_rewards(self) -> dict[tuple[Any, str], float]:
        """Sum of rewards by agent and policy."""
        return {("agent0", "default_policy"): super().get_return()}

    def last_observation_for(self, agent_id: Any = None) -> Any:
        """Return the latest observation."""
        return self.get_observations(-1)

    last_raw_obs_for = last_observation_for

    def last_info_for(self, agent_id: Any = None) -> Any:
        """Return the latest info."""
        return self.get_infos(-1)

    def last_action_for(self, agent_id: Any = None) -> Any:
        """Return the latest action."""
        return self.get_actions(-1)

    def last_reward_for(self, agent_id: Any = None) -> float:
        """Return the latest reward."""
        return float(self.get_rewards(-1))

    def get_agents(self) -> list[Any]:
        """Return the ids of the agents."""
        return ["agent0"]

    def module_for(self, agent_id: Any = None) -> str:
        """Return the id of the only module."""
        return self.module_id or DEFAULT_MODULE_ID


class MultiAgentEpisode(NativeMultiAgentEpisode, OldEpisode):
    """An episode of several agents, with RLlib's semantics: `get_return()` counts this chunk only."""

    JOINS_CHUNKS = False
    agent_class = SingleAgentEpisode

    def get_return(self, include_hanging_rewards: bool = False) -> float:
        """Return the sum of the rewards of all agents in this chunk."""
        if include_hanging_rewards and self._rollout is not None:
            return super().get_return(include_hanging_rewards=True) - self._return_before
        return float(sum(self.get_agent_returns(include_hanging_rewards).values()))

    def get_agent_returns(self, include_hanging_rewards: bool = False) -> dict[Any, float]:
        """Return the sums of the rewards in this chunk by agent, without agents that ended before it."""
        found = super().get_agent_returns(include_hanging_rewards)
        return {agent: found[agent] for agent in self.agent_episodes}

    @property
    def agent_t_started(self) -> dict[Any, int]:
        """Steps of each agent before this chunk."""
        return {agent: episode.t_started for agent, episode in self.agent_episodes.items()}

    @property
    def agent_episode_ids(self) -> dict[Any, str]:
        """Ids of the episodes of the agents."""
        return {agent: episode.id_ for agent, episode in self.agent_episodes.items()}

    # Older stack.

    @property
    def length(self) -> int:
        """Env steps of the whole episode so far."""
        return self.env_t

    @property
    def total_reward(self) -> float:
        """Sum of the rewards of all agents in the whole episode so far."""
        return sum(self.agent_rewards.values())

    @property
    def agent_rewards(self) -> dict[tuple[Any, str], float]:
        """Sum of rewards in the whole episode so far, by agent and policy."""
        parts: dict[Any, Any] = dict(self.agent_episodes)
        here = {agent: part.total_reward for agent, part in parts.items()}
        return {(agent, self.module_for(agent)): value for agent, value in (self._returns_of_gone() | here).items()}

    def last_observation_for(self, agent_id: Any) -> Any:
        """Return the latest observation of an agent."""
        return self.agent_episodes[agent_id].get_observations(-1)

    last_raw_obs_for = last_observation_for

    def get_infos(self, indices: Any = None, agent_ids: Any = None, **query: Any) -> Any:
        """Return infos by agent; infos of no agent only where `agent_ids` has `"__common__"`."""
        return super().get_infos(indices, list(self.agent_episodes) if agent_ids is None else agent_ids, **query)

    def last_info_for(self, agent_id: Any) -> Any:
        """Return the latest info of an agent, or under `"__common__"` of no agent in particular."""
        if agent_id == COMMON:
            return next(reversed(self._common_infos().values()), {})
        return self.agent_episodes[agent_id].get_infos(-1)

    def last_action_for(self, agent_id: Any) -> Any:
        """Return the latest action of an agent."""
        return self.agent_episodes[agent_id].get_actions(-1)

    def last_reward_for(self, agent_id: Any) -> float:
        """Return the latest reward of an agent."""
        return float(self.agent_episodes[agent_id].get_rewards(-1))

    def get_agents(self) -> list[Any]:
        """Return the ids of the agents."""
        return list(self.agent_episodes)
