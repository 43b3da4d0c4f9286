"""What central critics see: the observations of all agents of a sub-env, as a column of each module's rollout.

The column is computed when a sample ends, from what the lanes hold: no step of the env waits for it. What each lane saw
where a rollout ends is kept for the first row of the next one, so that it does not matter where rollouts are cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.ids import AgentID
from corral.core.spaces import blank_array, module_observation_space, space_tree
from corral.core.tree import Tree, map_tree
from corral.data.episodes.lane_rollout import LaneRollout
from corral.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from corral.data.episodes.multi_agent_rollout import MultiAgentRollout
    from corral.envs.seats import Seats
    from corral.runners.lanes import Lanes

FORM = "critic_sees(agent_id, observations, actions, present)"
_TRIAL_ROWS = 2


def critic_space(critic_sees: Any, seats: Seats, agents: Sequence[AgentID]) -> spaces.Space[Any]:
    """Return the space of what the critic of some agents sees.

    Args:
        critic_sees: The setting, `"all"` or a function.
        seats: Seats of all agents.
        agents: Agents of the module.

    Raises:
        ConfigError: The function raises, does not return an entry for each row, or returns entries of several shapes.
    """
    if critic_sees == "all":
        flags = spaces.Box(0.0, 1.0, (len(seats.agents),), np.float32)
        seen = {
            str(agent): module_observation_space(block.observation_space)
            for block in seats.blocks
            for agent in block.agents
        }
        return spaces.Dict({"observations": spaces.Dict(seen), "present": flags, "agent": flags})
    blank, shapes = _blank_rows(seats, _TRIAL_ROWS), dict[AgentID, tuple[int, ...]]()
    for agent in agents:
        given = _call(critic_sees, agent, blank)
        if given.shape[:1] != (_TRIAL_ROWS,):
            raise ConfigError(
                f"multi_agent: {FORM} must return an array with an entry for each row that it is given, and returned "
                f"{describe(given)} for {_TRIAL_ROWS} rows of agent {agent!r}."
            )
        shapes[agent] = given.shape[1:]
    first, shape = next(iter(shapes.items()))
    if others := [agent for agent in agents if shapes[agent] != shape]:
        raise ConfigError(
            f"multi_agent: {FORM} returned entries of shape {shape} for agent {first!r} and {shapes[others[0]]} for "
            f"agent {others[0]!r}, which have one module: return the same shape for both, or give each its own module."
        )
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def _call(function: Any, agent: AgentID, rows: Mapping[str, Any]) -> NDArray[np.float32]:
    try:
        return np.asarray(function(agent, *rows.values()), np.float32)
    except Exception as error:
        raise ConfigError(f"multi_agent: {FORM} raised {type(error).__name__} for agent {agent!r}: {error}") from error


def _blank_rows(seats: Seats, *shape: int) -> dict[str, Any]:
    """Return rows `[*shape, ...]` without any agent: by agent `observations`, latest `actions`, and `present`."""
    agents = [(agent, block) for block in seats.blocks for agent in block.agents]

    def blank(space: spaces.Space[Any]) -> Tree:
        return map_tree(lambda leaf: blank_array(leaf, *shape), space_tree(space))

    return {
        "observations": {agent: blank(module_observation_space(block.observation_space)) for agent, block in agents},
        "actions": {agent: blank(block.action_space) for agent, block in agents},
        "present": {agent: np.zeros(shape, np.bool_) for agent, _ in agents},
    }


class CentralCritic:
    """Adds the column `critic_obs` to the rollouts of the modules in one runner.

    An agent is present in a row if it acts next, or if its episode ends there with the episodes of all. The agent whose
    critic it is always is. So one that ends before the others sees them next to its final observation, which they do
    not see.

    Args:
        critic_sees: The setting, `"all"` or a function.
        seats: Seats of all agents.
        name: Name of the env, for messages.

    Attributes:
        latest: By module id, `seen`, what each lane saw last, a tree of `[L, ...]`, and `is_there`, whether the next
            rollout begins with it, bool `[L]`; arrays that nobody changes.
    """

    def __init__(self, critic_sees: Any, seats: Seats, name: str) -> None:
        """Begin without an earlier rollout."""
        self._critic_sees, self._seats, self._name = critic_sees, seats, name
        self.latest: dict[str, dict[str, Any]] = {}

    def add_columns(
        self,
        rollout: MultiAgentRollout,
        lanes: Mapping[str, Lanes],
        parts: Mapping[str, LaneRollout],
        seen: Mapping[str, spaces.Space[Any]],
    ) -> None:
        """Add the column to the finished rollouts of modules.

        Args:
            rollout: Rollout of the env steps.
            lanes: Lanes of all modules.
            parts: Their rollouts, by module id.
            seen: Space of what the critic of each module sees.

        Raises:
            ConfigError: The function raises, or returns entries of another shape than when the algorithm was built.
        """
        num_keys = rollout.num_rows + 1
        over = np.zeros((num_keys, rollout.num_envs), np.bool_)
        over[1:] = (rollout.terminated | rollout.truncated)[: rollout.num_rows]
        joint, keys = _blank_rows(self._seats, num_keys * (1 + rollout.same_step), rollout.num_envs), {}
        for module_id, part in parts.items():
            of, clock = lanes[module_id], part.lane_rows
            is_final = np.zeros(part.obs_rows.shape, np.bool_)
            is_final[1:] = part.terminated | part.truncated
            keys[module_id] = key = part.obs_rows.clip(0)
            ends_all = over[key, of.envs]
            if rollout.same_step:  # the first observation of an episode came in one row with the final one before it
                key += num_keys * (ends_all & ~is_final)
            times = np.arange(len(key))[:, None]
            shown = (times < clock) | ((times == clock) & (of.is_open | of.acts))
            shown &= (part.obs_rows >= 0) & (ends_all | ~is_final)
            for agent, own in _lanes_by_agent(of).items():
                at, i = shown[:, own].nonzero()
                index = key[at, own[i]], of.envs[own[i]]
                _set(joint["observations"][agent], index, _at(part.obs, (at, own[i])))
                joint["present"][agent][index] = True
            if callable(self._critic_sees):
                _set_actions(joint["actions"], of, part.broken, rollout)
        for module_id, space in seen.items():
            of, part, key = lanes[module_id], parts[module_id], keys[module_id]
            column = map_tree(lambda leaf, key=key: np.zeros((*key.shape, *leaf.shape), leaf.dtype), space_tree(space))
            for agent, own in _lanes_by_agent(of).items():
                rows = _at(joint, (key[:, own], of.envs[own]))
                rows["observations"][agent] = _at(part.obs, (slice(None), own))
                rows["present"][agent][:] = True
                _set(column, (slice(None), own), self._see(agent, rows, space))
            if rollout.continues and module_id in self.latest:
                (kept,) = self.latest[module_id]["is_there"].nonzero()
                _set(column, (0, kept), _at(self.latest[module_id]["seen"], kept))
            part.columns["critic_obs"] = column
            seen_last = _at(column, (part.lane_rows, np.arange(part.num_lanes)))
            self.latest[module_id] = {"seen": seen_last, "is_there": of.is_open | of.acts}

    def _see(self, agent: AgentID, rows: dict[str, Any], space: spaces.Space[Any]) -> Tree:
        """Return what the critic of an agent sees of rows `[T, L, ...]`."""
        present, shape = rows["present"], rows["present"][agent].shape
        if not callable(self._critic_sees):
            return {
                "observations": {str(name): obs for name, obs in rows["observations"].items()},
                "present": np.stack([present[name] for name in self._seats.agents], -1),
                "agent": np.array([name == agent for name in self._seats.agents]),
            }
        entries = _call(self._critic_sees, agent, map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows))
        if entries.shape != (expected := (math.prod(shape), *(space.shape or ()))):
            raise ConfigError(
                f"env {self._name!r}: {FORM} returned {describe(entries)} for agent {agent!r}, and entries were "
                f"{list(expected[1:])} when the algorithm was built: return {list(expected)} for {expected[0]} rows, "
                "with zeros for agents that are absent."
            )
        return entries.reshape(*shape, *expected[1:])


def check_seen(state: Mapping[str, Any], seen: Mapping[str, spaces.Space[Any]]) -> None:
    """Check a state that is to become `CentralCritic.latest`, by the space of what the critic of each module sees.

    Raises:
        CheckpointError: The critics saw something else.
    """

    def check(space: spaces.Space[Any], leaf: NDArray[Any]) -> None:
        if leaf.shape[1:] != space.shape or leaf.dtype != space.dtype:
            raise CheckpointError(f"what a central critic saw in a runner is {describe(leaf)}.")

    for module_id in state.keys() & seen.keys():
        map_tree(check, space_tree(seen[module_id]), state[module_id]["seen"])


def _lanes_by_agent(lanes: Lanes) -> dict[AgentID, NDArray[np.int64]]:
    """Return the lanes of each agent."""
    agents = np.array(lanes.agents, object)
    return {agent: (agents == agent).nonzero()[0] for agent in dict.fromkeys(lanes.agents)}


def _at(tree: Tree, index: Any) -> Tree:
    return map_tree(lambda leaf: leaf[index], tree)


def _set(tree: Tree, index: Any, values: Tree) -> None:
    map_tree(lambda leaf, part: leaf.__setitem__(index, part), tree, values)


def _set_actions(
    actions: dict[AgentID, Tree], lanes: Lanes, ended: Sequence[tuple[int, int]], rollout: MultiAgentRollout
) -> None:
    """Write actions, in the units of the env, to the rows that they led to.

    Args:
        actions: By agent, where to write them.
        lanes: The lanes that chose them.
        ended: Row and lane of the steps that ended because the env failed later: others saw what they began with.
        rollout: Rollout of the env steps; what was chosen where one failed led to nothing.
    """
    distribution, taken, obs_rows, acts, envs, _ = lanes.played
    acts = acts.copy()
    for row, lane in ended:
        acts[row, lane] = (obs_rows[row, lane], envs[lane]) not in rollout.broken
    # Others are of an earlier rollout, or led to the next one: a client has not reported the step.
    acts &= (obs_rows[: len(acts)] >= 0) & (obs_rows[: len(acts)] < rollout.num_rows)
    for agent, own in _lanes_by_agent(lanes).items():
        at, i = acts[:, own].nonzero()
        chosen = distribution.to_env(taken[at, own[i]])
        _set(actions[agent], (obs_rows[at, own[i]] + 1, envs[own[i]]), chosen)
