"""What central critics see: the observations of all agents of a sub-env, as a column of each module's rollout.

The column is computed when a sample ends, from what the lanes hold: no step of the env waits for it. What each lane saw
where a rollout ends is kept for the first row of the next one, so that it does not matter where rollouts are cut.
"""

from __future__ import annotations

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
    """

    def __init__(self, critic_sees: Any, seats: Seats, name: str) -> None:
        """Begin without an earlier rollout."""
        self._critic_sees, self._seats, self._name = critic_sees, seats, name
        self._latest: dict[str, Tree] = {}  # what each lane saw in its last row, [L, ...]

    def get_state(self) -> dict[str, Tree]:
        """Return a copy of what the lanes of each module saw last."""
        return {module_id: map_tree(np.copy, tree) for module_id, tree in self._latest.items()}

    def set_state(self, state: Mapping[str, Tree]) -> None:
        """Continue from a state of `get_state`."""
        self._latest = {module_id: map_tree(np.copy, tree) for module_id, tree in state.items()}

    def check_state(self, state: Mapping[str, Tree], seen: Mapping[str, spaces.Space[Any]]) -> None:
        """Check a state, without changing anything.

        Args:
            state: The state.
            seen: Space of what the critic of each module sees.

        Raises:
            CheckpointError: The critics saw something else.
        """

        def check(space: spaces.Space[Any], leaf: NDArray[Any]) -> None:
            if leaf.shape[1:] != space.shape or leaf.dtype != space.dtype:
                raise CheckpointError(f"what a central critic saw in a runner is {describe(leaf)}.")

        for module_id in state.keys() & seen.keys():
            map_tree(check, space_tree(seen[module_id]), state[module_id])

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
        rows, keys = _blank_rows(self._seats, num_keys * (1 + rollout.same_step), rollout.num_envs), {}
        for module_id, part in parts.items():
            of, clock = lanes[module_id], part.lane_rows
            is_final = np.zeros(part.obs_rows.shape, np.bool_)
            is_final[1:] = part.terminated | part.truncated
            key = part.obs_rows.clip(0)
            ends_all = over[key, of.envs]
            if rollout.same_step:  # the first observation of an episode came in one row with the final one before it
                key += num_keys * (ends_all & ~is_final)
            times = np.arange(len(key))[:, None]
            shown = (times < clock) | ((times == clock) & (of.is_open | of.acts))
            shown &= (part.obs_rows >= 0) & (ends_all | ~is_final)
            keys[module_id] = key
            for agent, own in _lanes_by_agent(of).items():
                at, i = shown[:, own].nonzero()
                index = key[at, own[i]], of.envs[own[i]]
                map_tree(_write(index, (at, own[i])), rows["observations"][agent], part.obs)
                rows["present"][agent][index] = True
            if callable(self._critic_sees):
                _write_actions(rows["actions"], of, part.broken, rollout.broken)
        for module_id, space in seen.items():
            if module_id in parts:
                column = self._column(rows, lanes[module_id], parts[module_id], keys[module_id], space)
                self._keep(module_id, column, parts[module_id], continues=rollout.continues)

    def _column(
        self, rows: dict[str, Any], lanes: Lanes, part: LaneRollout, keys: NDArray[np.int64], space: spaces.Space[Any]
    ) -> Tree:
        """Return what the critic of a module sees, a tree of `[T + 1, L, ...]`."""
        tree = space_tree(space)
        column: Tree = map_tree(lambda leaf: np.zeros((*keys.shape, *leaf.shape), leaf.dtype), tree)
        for agent, own in _lanes_by_agent(lanes).items():
            index = keys[:, own].ravel(), np.tile(lanes.envs[own], len(keys))
            joint = map_tree(lambda leaf, index=index: leaf[index], rows)
            joint["observations"][agent] = map_tree(
                lambda leaf, own=own: leaf[:, own].reshape(-1, *leaf.shape[2:]), part.obs
            )
            joint["present"][agent][:] = True
            seen = self._see(agent, joint, space)
            map_tree(
                lambda leaf, entries, own=own: leaf.__setitem__(
                    (slice(None), own), entries.reshape(len(keys), len(own), *leaf.shape[2:])
                ),
                column,
                seen,
            )
        return column

    def _see(self, agent: AgentID, joint: dict[str, Any], space: spaces.Space[Any]) -> Tree:
        """Return what the critic of an agent sees of rows `[B, ...]`."""
        present = joint["present"]
        if not callable(self._critic_sees):
            is_agent = np.array([name == agent for name in self._seats.agents], np.float32)
            flags = np.stack([present[name] for name in self._seats.agents], -1)
            observations = {str(name): obs for name, obs in joint["observations"].items()}
            return {
                "observations": observations,
                "present": flags,
                "agent": np.broadcast_to(is_agent, (len(flags), len(is_agent))),
            }
        entries = _call(self._critic_sees, agent, joint)
        if entries.shape != (expected := (len(present[agent]), *(space.shape or ()))):
            raise ConfigError(
                f"env {self._name!r}: {FORM} returned {describe(entries)} for agent {agent!r}, and entries were "
                f"{list(expected[1:])} when the algorithm was built: return {list(expected)} for {expected[0]} rows, "
                "with zeros for agents that are absent."
            )
        return entries

    def _keep(self, module_id: str, column: Tree, part: LaneRollout, *, continues: bool) -> None:
        """Add a column to a rollout, row 0 as lanes saw it in the rollout before, and keep what they saw last."""
        if continues and module_id in self._latest:

            def write(leaf: NDArray[Any], latest: NDArray[Any]) -> None:
                (kept,) = (part.obs_rows[0, : len(latest)] <= 0).nonzero()  # lanes may have been added
                leaf[0, kept] = latest[kept]

            map_tree(write, column, self._latest[module_id])
        part.columns["critic_obs"] = column
        self._latest[module_id] = map_tree(lambda leaf: leaf[part.lane_rows, np.arange(part.num_lanes)], column)


def _lanes_by_agent(lanes: Lanes) -> dict[AgentID, NDArray[np.int64]]:
    """Return the lanes of each agent."""
    found: dict[AgentID, list[int]] = {}
    for lane, agent in enumerate(lanes.agents):
        found.setdefault(agent, []).append(lane)
    return {agent: np.array(own) for agent, own in found.items()}


def _write(index: Any, source: Any) -> Any:
    return lambda leaf, given: leaf.__setitem__(index, given[source])


def _write_actions(
    actions: dict[AgentID, Tree],
    lanes: Lanes,
    broken_steps: Sequence[tuple[int, int]],
    broken: Sequence[tuple[int, int]],
) -> None:
    """Write actions, in the units of the env, to the rows that they led to.

    Args:
        actions: By agent, where to write them.
        lanes: The lanes that chose them.
        broken_steps: Row and lane of the steps that a failure of the env ended, of which others saw the beginning.
        broken: Row and sub-env of the env steps that failed: what was chosen there led to nothing.
    """
    distribution, taken, obs_rows, acts, envs, _ = lanes.played
    acts = acts & (obs_rows[: len(acts)] >= 0)  # others are of an earlier rollout
    for row, lane in broken_steps:
        acts[row, lane] = obs_rows[row, lane] >= 0 and (obs_rows[row, lane], envs[lane]) not in broken
    for agent, own in _lanes_by_agent(lanes).items():
        at, i = acts[:, own].nonzero()
        index = obs_rows[at, own[i]] + 1, envs[own[i]]
        chosen = distribution.to_env(taken[at, own[i]])
        map_tree(lambda leaf, part, index=index: leaf.__setitem__(index, part), actions[agent], chosen)
