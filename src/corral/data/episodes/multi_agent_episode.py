"""Episodes of several agents: the episodes of the agents, and the env steps at which each of them was observed.

An env step is one step of the env; an agent step leads from an observation of one agent to its next one, which may take
several env steps. Observation t of the env, from 0 for the reset, is what the actions of env step t saw.
"""

from __future__ import annotations

import copy
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self, Unpack

import numpy as np
from gymnasium import spaces

from corral.core.ids import COMMON, AgentID
from corral.core.tree import Tree, leaves, map_tree
from corral.data.episodes.agent_data import (
    AgentIds,
    AgentQuery,
    AgentReading,
    PendingStep,
    read,
    read_outputs,
)
from corral.data.episodes.episode import SingleAgentEpisode
from corral.data.episodes.html import multi_agent_episode_html
from corral.data.episodes.lane_rollout import LaneRollout, SeatCarry
from corral.data.episodes.lookback import Indices, Writing
from corral.data.episodes.notes import Noted, Notes, find_lookback
from corral.data.episodes.rollout import Rollout
from corral.data.episodes.step_columns import STANDARD_COLUMNS
from corral.errors import EpisodeError, nearest

AgentDict = Mapping[AgentID, Any]
"""Values by agent; as flags of an end also under `"__all__"`."""

_ALL = "__all__"
_PLAIN_STATE = ("id_", "env_index", "env_t_started", "is_terminated", "is_truncated")


class MultiAgentEpisode(Noted):
    """One episode of an env with several agents, or a chunk of it.

    Each agent has its own `SingleAgentEpisode`, whose steps are the steps of that agent. An agent that has acted and
    was not observed since has a hanging action; rewards that it gets meanwhile are added to the reward of this step.
    The step counts when the next observation of the agent has come: before that the getters return it, and no length
    or return counts it.

    A runner's episodes hold no data, like episodes of a single agent: they read the columns of its rollouts. An episode
    that spans several `sample()` calls appears as chunks; in `on_episode_end` it answers for all of its steps. A step
    that an agent has not ended when a chunk ends is the first step of the agent in the next one, and hangs only while
    the chunk is written.

    Getters take indices as the getters of `SingleAgentEpisode` do, and return a dict by agent. With `env_steps=True`
    index i is env step i of this chunk: agents that were not observed at it, or did not act in it, are left out, or
    have `fill`. With `env_steps=False` index i is the step of each agent.

    Attributes:
        id_: Id, the same for all chunks of an episode, and different for every episode of a run.
        env_index: Index of the sub-env; 0 for an episode built by hand.
        agent_episodes: Episodes of the agents that were observed, by agent id. An agent that ended before this chunk
            and its lookback has none.
        env_t_started: Env steps of the episode before this chunk.
        len_lookback: Number of env steps in the lookback buffer.
        is_terminated: Whether the last env step terminated the episode for all agents.
        is_truncated: Whether the last env step truncated the episode for all agents.
        agent_to_module_mapping_fn: Function `(agent_id, episode)` that returns the module id of an agent.
        notes: `custom_data` and the temporary data; the chunks of a runner's episode share them.
        observation_space: Spaces of observations by agent id, where known.
        action_space: Spaces of module actions by agent id, where known.
        agent_class: Class of the episodes of agents; a subclass may have another one.
    """

    agent_class: ClassVar[type[SingleAgentEpisode]] = SingleAgentEpisode
    agent_to_module_mapping_fn: Callable[[AgentID, MultiAgentEpisode], str]
    observation_space: dict[AgentID, spaces.Space[Any]]
    action_space: dict[AgentID, spaces.Space[Any]]
    _module_ids: dict[AgentID, str]

    # Construction.

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Sequence[AgentDict] | None = None,
        observation_space: Mapping[AgentID, spaces.Space[Any]] | None = None,
        infos: Sequence[AgentDict] | None = None,
        actions: Sequence[AgentDict] | None = None,
        action_space: Mapping[AgentID, spaces.Space[Any]] | None = None,
        rewards: Sequence[AgentDict] | None = None,
        terminateds: AgentDict | bool = False,
        truncateds: AgentDict | bool = False,
        extra_model_outputs: Sequence[AgentDict] | None = None,
        env_t_started: int | None = None,
        agent_t_started: Mapping[AgentID, int] | None = None,
        len_lookback_buffer: int | str = "auto",
        agent_module_ids: Mapping[AgentID, str] | None = None,
        agent_to_module_mapping_fn: Callable[[AgentID, MultiAgentEpisode], str] | None = None,
    ) -> None:
        """Build an episode by hand, from the env steps so far or without steps.

        An agent that does not act at an env step at which it was observed has ended there.

        Args:
            id_: Id; `None` makes a new one.
            observations: Dicts of observations by agent, one more than env steps.
            observation_space: Spaces of observations by agent id.
            infos: Dicts of info dicts by agent, one for each dict of observations, or `None`.
            actions: Dict of actions by agent for each env step.
            action_space: Spaces of actions by agent id.
            rewards: Dict of rewards by agent for each env step.
            terminateds: Whether the last env step terminated the episode of all agents, or of each agent, by id.
            truncateds: Whether the last env step truncated the episode of all agents, or of each agent, by id.
            extra_model_outputs: Dict of dicts of further outputs of the module by agent, for each env step.
            env_t_started: Env steps before the chunk, the lookback included; `None` is 0.
            agent_t_started: Steps of each agent before the chunk, the lookback included; 0 for an agent without one.
            len_lookback_buffer: Number of the first env steps that are from before this chunk, at most all of them;
                `"auto"` is all of them.
            agent_module_ids: Module ids by agent id; they are not asked of `agent_to_module_mapping_fn`.
            agent_to_module_mapping_fn: Function `(agent_id, episode)` that returns the module id of an agent, called
                once for each agent; `None` gives all agents the module `default_policy`.

        Raises:
            EpisodeError: The lengths do not fit together, or an env step does not fit to the steps before.
        """
        self._clear(id_ or uuid.uuid4().hex, 0)
        self.observation_space, self.action_space = dict(observation_space or {}), dict(action_space or {})
        self._module_ids = dict(agent_module_ids or {})
        self.agent_to_module_mapping_fn = agent_to_module_mapping_fn or _default_module
        observations, actions, rewards = observations or (), actions or (), rewards or ()
        infos = [{} for _ in observations] if infos is None else infos
        outputs = [{} for _ in actions] if extra_model_outputs is None else extra_model_outputs
        num_steps = _check_lengths(observations, infos, actions, rewards, outputs)
        lookback = find_lookback(len_lookback_buffer, num_steps)
        self.env_t_started = env_t_started or 0
        for t, observation in enumerate(observations):
            if t == 0:
                self.add_env_reset(observation, infos[0])
                continue
            is_last = t == num_steps
            gone = {} if is_last else {agent_id: True for agent_id in observation if agent_id not in actions[t]}
            self.add_env_step(
                observation,
                actions[t - 1],
                rewards[t - 1],
                infos[t],
                terminateds=_flags(terminateds) if is_last else gone,
                truncateds=_flags(truncateds) if is_last else None,
                extra_model_outputs=outputs[t - 1],
            )
        self._begin_at(lookback)
        for agent_id, t in (agent_t_started or {}).items():
            if agent_id in self.agent_episodes:
                self.agent_episodes[agent_id].t_started = t
        self._start_time_s = self._last_time_s = 0.0

    def _clear(self, id_: str, env_index: int) -> None:
        self.id_, self.env_index = id_, env_index
        self.agent_episodes: dict[AgentID, SingleAgentEpisode] = {}
        self.env_t_started = self._env_t = self.len_lookback = 0
        self.is_reset = self.is_terminated = self.is_truncated = False
        self.notes: Notes = ({}, {})
        self.observation_space, self.action_space = {}, {}
        self.agent_to_module_mapping_fn, self._module_ids = _default_module, {}
        self._times: dict[AgentID, list[int]] = {}  # env step of each observation, the lookback included
        self._common: dict[int, dict[str, Any]] = {}  # infos of no agent in particular, by env step
        self._pending: dict[AgentID, PendingStep] = {}
        self._early_rewards: dict[AgentID, float] = {}  # of agents that did not act yet; they count in the first step
        self._gone_returns: dict[AgentID, float] = {}  # of agents that ended before this chunk and its lookback
        self._return_of_nobody = 0.0  # rewards before a first action, of which a view does not know the agents
        self._start_time_s = self._last_time_s = 0.0
        self._rollout: Rollout | None = None  # the rollout that a view reads
        self._seat_carry: SeatCarry | None = None
        self._lanes: dict[AgentID, LaneRollout] = {}  # rollouts of the modules that it reads
        self._return_before = 0.0
        self._start = 0  # row of index 0 in it
        self._stop: int | None = None  # row past the last; None follows the rollout as it grows

    # Views, made and moved on by runners.

    @classmethod
    def view(cls, id_: str, env_index: int, rollout: Rollout, seat_carry: SeatCarry | None = None) -> Self:
        """Return a view of one sub-env that has not started, and has no agents yet; see `start`.

        Args:
            id_: Id of the episode.
            env_index: Index of the sub-env.
            rollout: Rollout of the env steps.
            seat_carry: What the agents had when the rollout began.
        """
        episode = cls.__new__(cls)
        episode._clear(id_, env_index)
        episode._rollout, episode._seat_carry = rollout, seat_carry
        return episode

    def start(self, row: int, now_s: float) -> None:
        """Start the view at the row of the rollout whose actions saw the observations of the reset.

        Args:
            row: The row.
            now_s: Clock reading at the reset.
        """
        self.is_reset, self._start = True, row
        self._start_time_s = self._last_time_s = now_s
        for episode in self.agent_episodes.values():
            episode.start(episode.place[0], now_s)

    def add_view(self, lanes: LaneRollout, lane: int, module_id: str, row: int) -> SingleAgentEpisode:
        """Add a view of the steps of an agent, and return it.

        Args:
            lanes: Rollout of its module.
            lane: Its lane.
            module_id: Id of its module.
            row: Row of the lane with its first observation in this chunk.
        """
        agent_id = lanes.lane_agents[lane]
        episode = self.agent_class.view(agent_episode_id(self.id_, agent_id), lane, lanes)
        episode.env_index, episode.multi_agent_episode_id = self.env_index, self.id_
        episode.agent_id, episode.module_id = agent_id, module_id
        episode.start(row, self._start_time_s)
        self.agent_episodes[agent_id], self._module_ids[agent_id] = episode, module_id
        self._lanes[agent_id] = lanes
        return episode

    def end(self, terminated: bool, truncated: bool, stop: int) -> None:
        """End the view: say whether its last env step ended the episode for all agents, and the row after that step."""
        self.is_terminated, self.is_truncated, self._stop = terminated, truncated, stop

    def continue_from(self, t_started: int, return_before: float) -> None:
        """Set the env steps before this chunk, and the sum of the rewards of all agents, hanging ones included."""
        self.env_t_started, self._return_before = t_started, return_before

    def continued_in(self, rollout: Rollout, return_before: float, last_time_s: float, paused_s: float = 0.0) -> Self:
        """Return the next chunk, which starts with row 0 of another rollout, without agents; this one is complete.

        Args:
            rollout: The next rollout, with the same sub-envs.
            return_before: Sum of the rewards of all agents in the episode so far.
            last_time_s: Clock reading at the end of this chunk's rollout.
            paused_s: Seconds from then until the next chunk, which do not count in the duration.
        """
        seat_carry: SeatCarry | None = getattr(rollout, "seat_carry", None)
        chunk = self.view(self.id_, self.env_index, rollout, seat_carry)  # also if user code made this one own data
        chunk.notes, chunk._module_ids = self.notes, self._module_ids
        chunk.agent_to_module_mapping_fn = self.agent_to_module_mapping_fn
        if self.is_reset:
            chunk.start(0, self._start_time_s + paused_s)
            chunk._last_time_s = last_time_s + paused_s
            chunk.continue_from(self.env_t, return_before)
        if self._rollout is not None:
            self._stop = self._end
        self.read_complete_columns()
        return chunk

    def read_complete_columns(self) -> None:
        """Read the columns of the rollout, which is complete now, rather than the columns that were written."""
        if self._rollout is None:
            return
        complete = self._rollout.by_module()
        for agent_id, episode in self.agent_episodes.items():
            lanes = complete.get(episode.module_id or "")
            if isinstance(lanes, LaneRollout):
                episode._columns = self._lanes[agent_id] = lanes

    def _own_data(self) -> None:
        """Copy what a view reads, so that the episode can grow."""
        if self._rollout is not None:
            self._own_env_data()
            for episode in self.agent_episodes.values():
                episode._own_data()

    def _own_env_data(self) -> None:
        """Copy what a view reads of the env; the episodes of the agents stay views."""
        self._common = copy.deepcopy(self._common_infos())
        self._times = {agent_id: list(self._obs_times(agent_id)) for agent_id in self.agent_episodes}
        self._pending = {a: step for a in self.agent_episodes if (step := self._hanging(a)) is not None}
        self._return_of_nobody = self._unassigned_return()
        self._gone_returns, self._env_t = self._returns_of_gone(), self.env_t
        self._last_time_s = self._start_time_s + self.get_duration_s()
        self._rollout = None

    def without_large_columns(self, kept: Mapping[str, LaneRollout]) -> Self:
        """Return this complete chunk over small columns, so that it does not keep its rollouts.

        Args:
            kept: By module, what `without_large` returns. A module that ended no step has none, and its agents, whose
                first steps are in the next chunk, are left out.
        """
        chunk = copy.copy(self)
        chunk._own_env_data()
        chunk._pending = copy.deepcopy(chunk._pending)  # entries are views of the columns
        chunk._lanes, chunk._seat_carry = {}, None
        chunk.agent_episodes = {
            agent_id: episode.without_large_columns(kept[module_id])
            for agent_id, episode in self.agent_episodes.items()
            if (module_id := episode.module_id or "") in kept
        }
        return chunk

    def joined(self, earlier: Sequence[Self]) -> Self:
        """Return the episode, whose last chunk this is, as one that answers for the chunks before it too."""
        chunks = (*earlier, self)
        whole = copy.copy(self)
        whole._own_env_data()
        whole.env_t_started, whole._gone_returns = earlier[0].env_t_started, earlier[0]._returns_of_gone()
        whole._common = {t: info for chunk in chunks for t, info in chunk._common_infos().items()}
        whole._times, whole.agent_episodes = {}, {}
        for agent_id in dict.fromkeys(agent_id for chunk in chunks for agent_id in chunk.agent_episodes):
            found = [chunk for chunk in chunks if agent_id in chunk.agent_episodes]
            *before, last = (chunk.agent_episodes[agent_id] for chunk in found)
            times = whole._times[agent_id] = []
            for chunk in found:  # which begins with the last observation of the chunk before
                times[len(times) - bool(times) :] = list(chunk._obs_times(agent_id))
            whole.agent_episodes[agent_id] = last.joined(before) if before else last
        return whole

    def _begin_at(self, lookback: int) -> None:
        """Make the first env steps the lookback of this chunk."""
        self.len_lookback = lookback
        for agent_id, episode in self.agent_episodes.items():
            start = min(bisect_left(self._times[agent_id], self.env_t_started + lookback), len(episode))
            self.agent_episodes[agent_id] = _part(episode, 0, start, len(episode))
        for times in self._times.values():
            times[:] = [t - lookback for t in times]
        self._common = {t - lookback: info for t, info in self._common.items()}
        self._env_t -= lookback

    # Steps added by hand.

    def add_env_reset(self, observations: AgentDict, infos: AgentDict | None = None) -> None:
        """Start an episode built by hand with the observations and the infos of a reset, by agent.

        Raises:
            EpisodeError: The episode has started already.
        """
        if self.is_reset:
            raise EpisodeError(f"episode {self.id_} was reset already, and has {self.env_t} steps.")
        self.is_reset, self._env_t = True, self.env_t_started
        for agent_id, observation in observations.items():
            self._join(agent_id, observation, (infos or {}).get(agent_id))
        self._note_common(infos)
        self._start_time_s = self._last_time_s = time.perf_counter()

    def _note_common(self, infos: AgentDict | None) -> None:
        if common := (infos or {}).get(COMMON):
            self._common[self._env_t] = dict(common)

    def _join(self, agent_id: AgentID, observation: Tree, info: Any) -> None:
        """Add an agent, whose first observation this is."""
        self.agent_episodes[agent_id] = episode = self.agent_class(
            agent_episode_id(self.id_, agent_id),
            observation_space=self.observation_space.get(agent_id),
            action_space=self.action_space.get(agent_id),
            agent_id=agent_id,
            module_id=self.module_for(agent_id),
            multi_agent_episode_id=self.id_,
        )
        episode.add_env_reset(observation, info)
        self._times[agent_id] = [self._env_t]

    def add_env_step(
        self,
        observations: AgentDict,
        actions: AgentDict,
        rewards: AgentDict,
        infos: AgentDict | None = None,
        *,
        terminateds: AgentDict | None = None,
        truncateds: AgentDict | None = None,
        extra_model_outputs: AgentDict | None = None,
    ) -> None:
        """Add one env step.

        An agent that ends without an observation has its last one as its final observation. An agent whose first
        observation comes with its end is not in the episode. Rewards before the first action of an agent count in its
        first step. When all agents have ended, the episode is over.

        Args:
            observations: Observations by agent that the step led to.
            actions: Actions by agent: exactly the agents that had to act, see `get_agents_to_act`.
            rewards: Rewards by agent; an agent may get one without being observed.
            infos: Info dicts by agent.
            terminateds: Whether the step terminated the episode of an agent, by agent; of all under `"__all__"`.
            truncateds: Whether the step truncated the episode of an agent, by agent; of all under `"__all__"`.
            extra_model_outputs: Dicts of further outputs of the module by agent.

        Raises:
            EpisodeError: The episode was not reset or is over, other agents acted than had to, or an agent that has
                ended was observed or got a reward other than 0.
        """
        self._check_step(observations, actions, rewards)
        self._own_data()
        infos, outputs = infos or {}, extra_model_outputs or {}
        terminateds, truncateds = terminateds or {}, truncateds or {}
        for agent_id, action in actions.items():
            early_reward = self._early_rewards.pop(agent_id, 0.0)
            self._pending[agent_id] = PendingStep(action, dict(outputs.get(agent_id) or {}), early_reward)
        self._env_t += 1
        self._note_common(infos)
        all_terminated, all_truncated = bool(terminateds.get(_ALL)), bool(truncateds.get(_ALL))
        for agent_id in dict.fromkeys([*self.agent_episodes, *observations, *rewards]):
            terminated, truncated = bool(terminateds.get(agent_id)), bool(truncateds.get(agent_id))
            if not (terminated or truncated):  # an agent that ends by itself has its own flags only
                terminated, truncated = all_terminated, all_truncated
            reward = float(rewards.get(agent_id) or 0.0)
            observation, info = observations.get(agent_id), infos.get(agent_id)
            if agent_id not in self.agent_episodes:
                if agent_id in observations and not (terminated or truncated):
                    self._join(agent_id, observation, info)
                if reward:
                    self._early_rewards[agent_id] = self._early_rewards.get(agent_id, 0.0) + reward
            elif (step := self._pending.get(agent_id)) is not None:
                step.reward += reward
                if observation is None and (terminated or truncated):
                    observation = self.agent_episodes[agent_id].get_observations(-1)
                if observation is not None:
                    self._complete(agent_id, observation, info, terminated, truncated)
        over = bool(self.agent_episodes) and all(episode.is_done for episode in self.agent_episodes.values())
        self.is_terminated, self.is_truncated = all_terminated or (over and not all_truncated), all_truncated
        self._last_time_s = time.perf_counter()

    def _complete(self, agent_id: AgentID, observation: Tree, info: Any, terminated: bool, truncated: bool) -> None:
        """Let the hanging step of an agent end with an observation."""
        step = self._pending.pop(agent_id)
        self.agent_episodes[agent_id].add_env_step(
            observation,
            step.action,
            step.reward,
            info,
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs=step.outputs,
        )
        self._times[agent_id].append(self._env_t)

    def _check_step(self, observations: AgentDict, actions: AgentDict, rewards: AgentDict) -> None:
        where = f"episode {self.id_}, env step {self.env_t}:"
        if not self.is_reset or self.is_done:
            raise EpisodeError(f"{where} it {'is over' if self.is_done else 'was not reset'}: no step can be added.")
        to_act = self.get_agents_to_act()
        if actions.keys() != to_act:
            raise EpisodeError(
                f"{where} the agents {_names(to_act)} have to act, because they were observed at this step, and there "
                f"are actions of {_names(actions)}."
            )
        for agent_id, episode in self.agent_episodes.items():
            if episode.is_done and (agent_id in observations or rewards.get(agent_id)):
                what = "observed" if agent_id in observations else f"given the reward {rewards[agent_id]}"
                raise EpisodeError(f"{where} agent {agent_id!r} has ended, and was {what} again.")

    # State.

    @property
    def env_t(self) -> int:
        """Env steps of the whole episode so far."""
        if self._rollout is None:
            return self._env_t
        return self.env_t_started + (self._end - self._start if self.is_reset else 0)

    @property
    def t(self) -> int:
        """Env steps of the whole episode so far, as `env_t`."""
        return self.env_t

    @property
    def _end(self) -> int:
        """Row after the last env step of a view."""
        assert self._rollout is not None
        return self._rollout.num_rows_of(self.env_index) if self._stop is None else self._stop

    @property
    def agent_ids(self) -> set[AgentID]:
        """Ids of the agents that have an episode here."""
        return set(self.agent_episodes)

    def __len__(self) -> int:
        """Return the number of env steps in this chunk, without the lookback."""
        return self.env_t - self.env_t_started

    def env_steps(self) -> int:
        """Return the number of env steps in this chunk, without the lookback."""
        return len(self)

    def agent_steps(self) -> int:
        """Return the number of steps of all agents in this chunk, without the lookback and hanging actions."""
        return sum(map(len, self.agent_episodes.values()))

    def get_return(self, include_hanging_rewards: bool = False) -> float:
        """Return the sum of rewards of all agents in the whole episode so far, earlier chunks included.

        Args:
            include_hanging_rewards: Whether to count the rewards of steps that hang, and those that agents got before
                their first action.
        """
        if include_hanging_rewards and self._rollout is not None:
            rewards = self._rollout.rewards[self._start : self._end, self.env_index] if self.is_reset else np.zeros(0)
            return self._return_before + float(rewards.sum())
        of_nobody = self._return_of_nobody if include_hanging_rewards else 0.0
        return float(sum(self.get_agent_returns(include_hanging_rewards).values())) + of_nobody

    def get_agent_returns(self, include_hanging_rewards: bool = False) -> dict[AgentID, float]:
        """Return the sums of rewards by agent, also of agents that ended before this chunk; see `get_return`.

        A runner's episode does not know whose rewards before a first action are; only `get_return` counts them.
        """
        returns = self._returns_of_gone()
        returns |= {agent_id: episode.get_return() for agent_id, episode in self.agent_episodes.items()}
        if include_hanging_rewards:
            steps = {agent_id: self._hanging(agent_id) for agent_id in self.agent_episodes}
            hanging = {agent_id: step.reward for agent_id, step in steps.items() if step is not None}
            for part in (hanging, self._early_rewards):
                for agent_id, reward in part.items():
                    returns[agent_id] = returns.get(agent_id, 0.0) + reward
        return returns

    def _returns_of_gone(self) -> dict[AgentID, float]:
        """Return the rewards of agents that have no episode here; in a view also of one that waits all the time."""
        carry = self._seat_carry
        if self._rollout is None or carry is None or not self.env_t_started or self._start:
            return dict(self._gone_returns)
        returns, module_ids = carry.returns[self.env_index].tolist(), carry.module_ids[self.env_index]
        gone = {}
        for agent_id, module_id, value in zip(carry.agents, module_ids, returns, strict=True):
            if module_id is not None and agent_id not in self.agent_episodes:
                self._module_ids[agent_id], gone[agent_id] = module_id, value
        return gone

    def _unassigned_return(self) -> float:
        """Return the rewards before a first action of which no agent is known."""
        if self._rollout is None:
            return self._return_of_nobody
        return self.get_return(include_hanging_rewards=True) - sum(self.get_agent_returns(True).values())

    def get_module_returns(self, include_hanging_rewards: bool = False) -> dict[str, float]:
        """Return the sums of rewards by module, over its agents; see `get_return`."""
        returns: dict[str, float] = {}
        for agent_id, value in self.get_agent_returns(include_hanging_rewards).items():
            module_id = self.module_for(agent_id)
            returns[module_id] = returns.get(module_id, 0.0) + value
        return returns

    def get_agents_to_act(self) -> set[AgentID]:
        """Return the agents that act in the next env step: those that were just observed and have not ended."""
        return {agent_id for agent_id in self.get_agents_that_stepped() if not self.agent_episodes[agent_id].is_done}

    def get_agents_that_stepped(self) -> set[AgentID]:
        """Return the agents that were observed after the last env step, or that it ended."""
        return {agent_id for agent_id in self.agent_episodes if self._obs_times(agent_id)[-1] == self.env_t}

    def get_terminateds(self) -> dict[AgentID, bool]:
        """Return whether the episode of each agent was terminated; under `"__all__"`, whether the whole episode was."""
        ended = {agent_id: episode.is_terminated for agent_id, episode in self.agent_episodes.items()}
        return {**ended, _ALL: self.is_terminated}

    def get_truncateds(self) -> dict[AgentID, bool]:
        """Return whether the episode of each agent was truncated; under `"__all__"`, whether the whole episode was."""
        ended = {agent_id: episode.is_truncated for agent_id, episode in self.agent_episodes.items()}
        return {**ended, _ALL: self.is_truncated}

    def get_duration_s(self) -> float:
        """Return the seconds from the reset to the latest env step; 0 if the episode was built from data."""
        last_s = self._last_time_s
        if self._rollout is not None and len(self):
            last_s = self._rollout.time_at(self._end - 1, self.env_index)
        return last_s - self._start_time_s

    def module_for(self, agent_id: AgentID) -> str:
        """Return the id of the module that chooses the actions of an agent, the same in the whole episode."""
        if agent_id not in self._module_ids:
            self._module_ids[agent_id] = self.agent_to_module_mapping_fn(agent_id, self)
        return self._module_ids[agent_id]

    def set_module(self, agent_id: AgentID, module_id: str) -> None:
        """Set the id of the module of an agent, of which `agent_to_module_mapping_fn` is then not asked."""
        self._module_ids[agent_id] = module_id

    def validate(self) -> None:
        """Check that the episode was reset, and that each agent has an env step for each observation.

        Raises:
            EpisodeError: It is not so.
        """
        if not self.is_reset:
            raise EpisodeError(f"episode {self.id_} was not reset, so it has no observation.")
        for agent_id, episode in self.agent_episodes.items():
            episode.validate()
            times = self._obs_times(agent_id)
            if len(times) != episode.len_lookback + len(episode) + 1 or (np.diff(times) <= 0).any():
                raise EpisodeError(
                    f"episode {self.id_}: agent {agent_id!r} took {len(episode)} steps after {episode.len_lookback} in "
                    f"the lookback, and was observed at the env steps {list(times)}."
                )

    # Getters.

    def get_observations(
        self,
        indices: Indices = None,
        agent_ids: AgentIds = None,
        *,
        one_hot_discrete: bool = False,
        **how: Unpack[AgentReading],
    ) -> Any:
        """Return the observations by agent, `[K, ...]`, or a single one for an int; -1 is the latest.

        Args:
            indices: An int, a slice, a sequence of ints, or `None` for the whole chunk.
            agent_ids: Id or ids of the agents; `None` is all.
            one_hot_discrete: Whether Discrete and MultiDiscrete parts are returned as one-hot vectors.
            **how: What the indices mean, and what is returned; see `AgentReading`.

        Raises:
            IndexError: An int is outside, and there is no `fill`.
            KeyError: There is no agent of this id.
            EpisodeError: `return_list` without `env_steps`.
        """
        query = AgentQuery(indices, agent_ids, **how)
        space = "observation_space" if one_hot_discrete else ""
        return self._get(lambda episode, _: read(episode, "observations", one_hot_space=space), query, 1)

    def get_infos(self, indices: Indices = None, agent_ids: AgentIds = None, **how: Unpack[AgentReading]) -> Any:
        """Return lists of info dicts by agent, one for each observation; see `get_observations`.

        The infos of no agent in particular are under `"__common__"`, which may be among `agent_ids`. They have env
        steps, also with `env_steps=False`; where the env gave none, there is no entry.
        """
        query = AgentQuery(indices, agent_ids, **how)
        found = self._get(lambda episode, _: read(episode, "infos"), query, 1, self._common_infos())
        if query.return_list:
            return found
        return {agent: part.tolist() if isinstance(part, np.ndarray) else part for agent, part in found.items()}

    def get_actions(
        self,
        indices: Indices = None,
        agent_ids: AgentIds = None,
        *,
        one_hot_discrete: bool = False,
        **how: Unpack[AgentReading],
    ) -> Any:
        """Return module actions by agent, hanging ones included; see `get_observations`."""
        query = AgentQuery(indices, agent_ids, **how)
        space = "action_space" if one_hot_discrete else ""
        return self._get(
            lambda episode, step: read(episode, "actions", step and step.action, one_hot_space=space), query
        )

    def get_rewards(self, indices: Indices = None, agent_ids: AgentIds = None, **how: Unpack[AgentReading]) -> Any:
        """Return rewards by agent, at the env step in which the agent acted; see `get_observations`."""
        query = AgentQuery(indices, agent_ids, **how)
        return self._get(lambda episode, step: read(episode, "rewards", step and step.reward), query)

    def get_extra_model_outputs(
        self,
        key: str | None = None,
        indices: Indices = None,
        agent_ids: AgentIds = None,
        **how: Unpack[AgentReading],
    ) -> Any:
        """Return the outputs of the module other than actions by agent; see `get_observations`.

        Args:
            key: Name of one output; `None` returns a dict of all outputs for each agent.
            indices: See `get_observations`.
            agent_ids: See `get_observations`.
            **how: See `get_observations`.

        Raises:
            KeyError: No agent has an output of this name.
        """
        names = list(
            dict.fromkeys(
                name
                for agent_id, episode in self.agent_episodes.items()
                for name in read_outputs(episode, self._hanging(agent_id))
            )
        )
        if key is not None and names and key not in names:
            raise KeyError(f"episode {self.id_} has no extra model output {key!r}. {nearest(key, names)}")
        query = AgentQuery(indices, agent_ids, **how)

        def read_key(episode: SingleAgentEpisode, step: PendingStep | None) -> Tree:
            outputs = read_outputs(episode, step)
            return outputs if key is None else outputs.get(key, {})

        return self._get(read_key, query)

    def _hanging(self, agent_id: AgentID) -> PendingStep | None:
        """Return the step that an agent has begun and not ended, or `None`."""
        if self._rollout is None:
            return self._pending.get(agent_id)
        episode, lanes = self.agent_episodes[agent_id], self._lanes[agent_id]
        lane = episode.place[1]
        if episode.is_done or not lanes.waits[lane]:
            return None
        step = {
            name: map_tree(lambda leaf: leaf[lanes.lane_rows[lane], lane], column)
            for name, column in lanes.columns.items()
            if name not in STANDARD_COLUMNS or name in ("actions", "rewards", "dist_inputs")
        }
        return PendingStep(step.pop("actions"), reward=float(step.pop("rewards")), outputs=step)

    def _obs_times(self, agent_id: AgentID) -> Sequence[int]:
        """Return the env step of each observation of an agent, its lookback included."""
        if self._rollout is None:
            return self._times[agent_id]
        first, lane = (episode := self.agent_episodes[agent_id]).place
        rows = self._lanes[agent_id].obs_rows[first : first + len(episode) + 1, lane]
        times: list[int] = (rows + (self.env_t_started - self._start)).tolist()
        return times

    def _common_infos(self) -> dict[int, dict[str, Any]]:
        """Return the infos of no agent in particular by env step, in order."""
        if self._rollout is None:
            return self._common
        rows, first = self._rollout.info_rows, self.env_t_started - self._start
        found = {
            row: (rows[row].of_step if self._start < row == self._end else rows[row].at)(self.env_index).get("common")
            for row in sorted(rows)
            if self._start <= row <= self._end
        }
        return {row + first: dict(info) for row, info in found.items() if info}

    def _get(
        self,
        read: Callable[[SingleAgentEpisode, PendingStep | None], Tree],
        query: AgentQuery,
        num_more: int = 0,
        common: Mapping[int, Any] = MappingProxyType({}),
    ) -> Any:
        """Return what a getter returns.

        Args:
            read: Returns the data of an agent, a tree of `[E, ...]`, from its episode and its pending step.
            query: Arguments of the getter.
            num_more: Entries of the env more than env steps: 1 for observations.
            common: What belongs to no agent, by env step.
        """
        chosen = self._chosen(query.agent_ids)
        read_of = {
            agent_id: read(self.agent_episodes[agent_id], self._hanging(agent_id))
            for agent_id in chosen
            if agent_id != COMMON
        }
        data = {agent_id: part for agent_id, part in read_of.items() if leaves(part)}
        known = {agent: self._obs_times(agent)[: len(leaves(part)[0])] for agent, part in data.items()}
        lookbacks = {agent: self.agent_episodes[agent].len_lookback for agent in data}
        if common and (query.agent_ids is None or COMMON in chosen):
            data[COMMON], known[COMMON] = np.array([*common.values(), None], object)[:-1], list(common)
            lookbacks[COMMON] = sum(t < self.env_t_started for t in common)
        if not query.env_steps:
            return query.pick_agent_steps(data, lookbacks)
        first = self.env_t_started - self.len_lookback
        times = {agent: np.asarray(ts) - first for agent, ts in known.items()}
        return query.pick_env_steps(data, times, self.len_lookback + len(self) + num_more, self.len_lookback)

    def _chosen(self, agent_ids: AgentIds) -> list[AgentID]:
        if agent_ids is None:
            return list(self.agent_episodes)
        chosen = [agent_ids] if isinstance(agent_ids, str | int) else list(agent_ids)
        for agent_id in chosen:
            if agent_id not in self.agent_episodes and agent_id != COMMON:
                known = [str(known) for known in self.agent_episodes]
                raise KeyError(f"episode {self.id_} has no agent {agent_id!r}. {nearest(str(agent_id), known)}")
        return chosen

    # Setters.

    def set_observations(self, *, new_data: AgentDict, **where: Unpack[Writing]) -> None:
        """Overwrite observations of agents; indices are steps of each agent, see `SingleAgentEpisode.set_observations`.

        Args:
            new_data: By agent, one observation for each index.
            **where: `at_indices` and `neg_index_as_lookback`, see `SingleAgentEpisode`.

        Raises:
            IndexError: The new data have another size than the data they replace, or an index is outside.
            KeyError: There is no agent of this id.
        """
        self._set("set_observations", new_data, **where)

    def set_actions(self, *, new_data: AgentDict, **where: Unpack[Writing]) -> None:
        """Overwrite module actions of agents; see `set_observations`."""
        self._set("set_actions", new_data, **where)

    def set_rewards(self, *, new_data: AgentDict, **where: Unpack[Writing]) -> None:
        """Overwrite rewards of agents; see `set_observations`."""
        self._set("set_rewards", new_data, **where)

    def set_extra_model_outputs(self, *, key: str, new_data: AgentDict, **where: Unpack[Writing]) -> None:
        """Overwrite an extra model output of agents, or add one; see `set_observations`."""
        self._set("set_extra_model_outputs", new_data, key=key, **where)

    def _set(self, setter: str, new_data: AgentDict, **how: Any) -> None:
        for agent_id in self._chosen(list(new_data)):
            if agent_id == COMMON:
                raise KeyError(f"{setter}: {COMMON!r} is no agent, and has infos only.")
            getattr(self.agent_episodes[agent_id], setter)(new_data=new_data[agent_id], **how)

    # Parts of episodes, and episodes of parts.

    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> Self:
        """Return some of the env steps as an episode that owns its data; its return counts only these steps.

        The steps of an agent are those that it began in these env steps. A step that ended later hangs, with its whole
        reward. An agent that was not observed in the slice is not in it.

        Args:
            slice_: Slice of the env steps of this chunk, without a step width; it stops at the ends of the chunk.
            len_lookback_buffer: Number of env steps before the slice to keep as its lookback, at most as many as there
                are; `None` keeps as many as this episode has.

        Raises:
            EpisodeError: The slice has a step width, the episode was not reset, or the lookback is negative.
        """
        self._check_window(slice_, len_lookback_buffer or 0)
        start, stop, _ = slice_.indices(len(self))
        kept = self.len_lookback if len_lookback_buffer is None else len_lookback_buffer
        return self._window(start, max(start, stop), kept, with_waiting=False)

    def cut(self, len_lookback_buffer: int = 0) -> Self:
        """Return the chunk that comes next: the same id, no steps yet, the last observation of each agent.

        Hanging steps continue in the next chunk: they will count there, with all their rewards.

        Args:
            len_lookback_buffer: Number of the last env steps of this chunk that the next one keeps as its lookback, at
                most as many as there are.

        Raises:
            EpisodeError: The episode is over, or the lookback is negative.
        """
        self._check_window(None, len_lookback_buffer)
        chunk = self._window(len(self), len(self), len_lookback_buffer, with_waiting=True)
        returns = {agent_id: episode.whole_return() for agent_id, episode in self.agent_episodes.items()}
        for agent_id, episode in chunk.agent_episodes.items():
            episode.continue_from(self.agent_episodes[agent_id].t, returns[agent_id])
        returns = self._returns_of_gone() | returns
        chunk._early_rewards = dict(self._early_rewards)
        chunk._gone_returns = {
            agent_id: value for agent_id, value in returns.items() if agent_id not in chunk.agent_ids
        }
        return chunk

    def _window(self, start: int, stop: int, lookback: int, *, with_waiting: bool) -> Self:
        """Return the env steps from `start` to `stop` as an episode that owns its data.

        Args:
            start: Index of its first env step.
            stop: Index after its last env step.
            lookback: Env steps before, at most as many as there are.
            with_waiting: Whether agents are in it that were observed only earlier and have not ended.
        """
        self.validate()
        part = type(self)(self.id_)
        part._clear(self.id_, self.env_index)
        part.observation_space, part.action_space = self.observation_space, self.action_space
        part.agent_to_module_mapping_fn, part._module_ids = self.agent_to_module_mapping_fn, dict(self._module_ids)
        part.is_reset, part.len_lookback = True, min(lookback, self.len_lookback + start)
        part.env_t_started, part._env_t = self.env_t_started + start, self.env_t_started + stop
        oldest = part.env_t_started - part.len_lookback
        part._common = {t: copy.deepcopy(info) for t, info in self._common_infos().items() if oldest <= t <= part.env_t}
        if stop == len(self):
            part.is_terminated, part.is_truncated = self.is_terminated, self.is_truncated
        for agent_id, episode in self.agent_episodes.items():
            times = list(self._obs_times(agent_id))
            last = bisect_right(times, part.env_t) - 1
            first = bisect_left(times, oldest)
            if with_waiting and not episode.is_done:
                first = min(first, last)
            if first > last:
                continue
            begin = min(bisect_left(times, part.env_t_started), last)
            part.agent_episodes[agent_id] = _part(episode, first, begin, last)
            part._times[agent_id] = times[first : last + 1]
            if times[last] < part.env_t and not part.agent_episodes[agent_id].is_done:
                part._pending[agent_id] = self._step_at(agent_id, last)
        part.notes = self._copied_notes()
        return part

    def _step_at(self, agent_id: AgentID, entry: int) -> PendingStep:
        """Return a step of an agent as one that hangs; entries count from the oldest, lookback included."""
        index = entry - self.agent_episodes[agent_id].len_lookback
        how: dict[str, Any] = {"indices": index, "agent_ids": agent_id, "env_steps": False}
        how["neg_index_as_lookback"] = True
        action, reward = self.get_actions(**how)[agent_id], self.get_rewards(**how)[agent_id]
        outputs = self.get_extra_model_outputs(**how).get(agent_id, {})
        return copy.deepcopy(PendingStep(action, outputs, float(reward)))

    def concat_episode(self, other: MultiAgentEpisode) -> None:
        """Append the next chunk of the same episode; this episode then owns its data.

        Raises:
            EpisodeError: The chunks have different ids, do not follow one another, or this episode is over.
        """
        self._check_follows(other, other.env_t_started)
        self._own_data()
        for agent_id in other.agent_episodes:
            self._concat_agent(agent_id, other)
        own_common = {t: info for t, info in other._common_infos().items() if t >= other.env_t_started}
        self._common |= copy.deepcopy(own_common)
        self._module_ids = other._module_ids | self._module_ids
        self._early_rewards = dict(other._early_rewards)
        self._return_of_nobody = other._unassigned_return()
        self._env_t, self._last_time_s = other.env_t, other._last_time_s
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated
        self._take_notes(other)

    def _concat_agent(self, agent_id: AgentID, other: MultiAgentEpisode) -> None:
        """Append the steps of one agent in the next chunk."""
        theirs, mine = other.agent_episodes[agent_id], self.agent_episodes.get(agent_id)
        skip, times = theirs.len_lookback, list(other._obs_times(agent_id))
        if mine is None:
            self.agent_episodes[agent_id] = _part(theirs, skip, skip, skip + len(theirs))
            self._times[agent_id] = times[skip:]
        elif not mine.is_done:
            if theirs.t_started == mine.t + 1:  # a step that hangs here, and ended in the chunk
                first, info = theirs.get_observations(0), theirs.get_infos(0)
                ends = theirs.is_terminated, theirs.is_truncated
                self._complete(agent_id, first, info, *(ends if not len(theirs) else (False, False)))
                self._times[agent_id][-1] = times[skip]
            if not mine.is_done:
                mine.concat_episode(theirs)
                self._times[agent_id] += times[skip + 1 :]
        self._pending.pop(agent_id, None)
        if (step := other._hanging(agent_id)) is not None:
            self._pending[agent_id] = copy.deepcopy(step)

    def get_state(self) -> dict[str, Any]:
        """Return all but the spaces and the mapping function, as dicts, lists, numbers, strings and arrays."""
        state = {name: getattr(self, name) for name in _PLAIN_STATE}
        gone_returns = self._returns_of_gone()  # in a view, it also finds the modules of these agents
        agents = [
            {
                "episode": episode.get_state(),
                "times": [int(t) for t in self._obs_times(agent_id)],
                "pending": None if (step := self._hanging(agent_id)) is None else copy.deepcopy(vars(step)),
            }
            for agent_id, episode in self.agent_episodes.items()
        ]
        return state | {
            "env_t": self.env_t,
            "is_reset": self.is_reset,
            "len_lookback": self.len_lookback,
            "agents": agents,
            # Pairs, because the keys of a dict in a file are strings, and ids may be numbers.
            "module_ids": [list(pair) for pair in self._module_ids.items()],
            "early_rewards": [list(pair) for pair in self._early_rewards.items()],
            "return_of_nobody": self._unassigned_return(),
            "gone_returns": [list(pair) for pair in gone_returns.items()],
            "common_infos": [[t, copy.deepcopy(info)] for t, info in self._common_infos().items()],
            **self._plain_notes(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return an episode with a state that `get_state` returned; it owns its data."""
        episode = cls(state["id_"])
        for name in (*_PLAIN_STATE, "is_reset", "len_lookback"):
            setattr(episode, name, state[name])
        episode._env_t = state["env_t"]
        for agent in state["agents"]:
            part = cls.agent_class.from_state(agent["episode"])
            assert part.agent_id is not None
            episode.agent_episodes[part.agent_id] = part
            episode._times[part.agent_id] = list(agent["times"])
            if agent["pending"] is not None:
                episode._pending[part.agent_id] = PendingStep(**copy.deepcopy(agent["pending"]))
        for name in ("module_ids", "early_rewards", "gone_returns"):
            setattr(episode, f"_{name}", {agent_id: value for agent_id, value in state[name]})
        episode._return_of_nobody = state.get("return_of_nobody", 0.0)  # versions before this one saved none
        episode._common = {t: dict(info) for t, info in state.get("common_infos", ())}
        episode.notes = copy.deepcopy(state["custom_data"]), copy.deepcopy(state["temporary_data"])
        return episode

    def print(self) -> None:
        """Print a table with a row for each agent, and an x at each env step of this chunk at which it was observed."""
        steps = range(self.env_t_started, self.env_t + 1)
        width = len(str(self.env_t)) + 1
        names = {agent_id: str(agent_id) for agent_id in _names(self.agent_episodes)}
        longest = max(map(len, ("env_t", *names.values())))
        print(f"{'env_t':{longest}}", *(f"{t:{width}}" for t in steps))
        for agent_id, name in names.items():
            observed = {*self._obs_times(agent_id)}
            print(f"{name:{longest}}", *(f"{'x' if t in observed else '.':>{width}}" for t in steps))

    def __repr__(self) -> str:
        """Return the id, the sub-env, the number of env steps, the agents and the state."""
        return (
            f"MultiAgentEpisode({self.id_}, env_index={self.env_index}, env_t={self.env_t}, "
            f"agents={_names(self.agent_episodes)}, {self._describe_end()})"
        )

    def _repr_html_(self) -> str:
        """Return a table of the agents and, where there are any, frames, for a notebook."""
        return multi_agent_episode_html(self)


def agent_episode_id(id_: str, agent_id: AgentID) -> str:
    """Return the id of the episode of an agent in an episode."""
    return f"{id_}_{agent_id}"


def _default_module(agent_id: AgentID, episode: MultiAgentEpisode) -> str:
    return "default_policy"


def _names(agent_ids: Collection[AgentID]) -> list[AgentID]:
    return sorted(agent_ids, key=str)


def _flags(ended: AgentDict | bool) -> AgentDict:
    return {_ALL: ended} if isinstance(ended, bool) else ended


def _check_lengths(
    observations: Sequence[Any], infos: Sequence[Any], actions: Sequence[Any], *others: Sequence[Any]
) -> int:
    """Return the number of env steps, and refuse lists of dicts by agent that do not fit together."""
    num_steps = len(actions)
    if (
        any(len(part) != num_steps for part in others)
        or len(infos) != len(observations)
        or (len(observations) != num_steps + 1 and (observations or actions))
    ):
        raise EpisodeError(
            "an episode of n env steps needs n dicts of actions, rewards and extra outputs, and n + 1 of observations "
            f"and infos; got {num_steps} of actions, {' and '.join(str(len(part)) for part in others)} of rewards and "
            f"extra outputs, {len(observations)} of observations and {len(infos)} of infos."
        )
    return num_steps


def _part(episode: SingleAgentEpisode, first: int, start: int, stop: int) -> SingleAgentEpisode:
    """Return steps of an agent as an episode with the flags of its end; see `SingleAgentEpisode._part`."""
    part = episode._part(first, start, stop)
    part.t_started = episode.t_started + start - episode.len_lookback
    if stop == episode.len_lookback + len(episode):
        part.is_terminated, part.is_truncated = episode.is_terminated, episode.is_truncated
    return part
