"""The lanes of one module in a runner: the agents that the module acts for, and the rollout that their steps fill.

All functions work on arrays over the lanes. A lane has a clock of its own: the row of the rollout that its next action
fills. The action opens the row; the next observation of the agent, or its end, closes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.ids import AgentID
from corral.core.spaces import blank_array, space_tree
from corral.core.tree import Tree, map_tree
from corral.data.episodes.lane_rollout import LaneRollout
from corral.data.episodes.rollout import EpisodeCarry, Rollout, episode_statistics
from corral.data.episodes.step_columns import COLUMNS_OF_OBS
from corral.errors import CheckpointError
from corral.modules.distributions import ActionDistribution
from corral.runners.row_history import RowHistory

CARRY = ("returns", "lengths", "start_times_s", "counts")
TOTALS = ("returns", "lengths", "counts")
OF_LANES = ("is_open", "acts", "is_used", "begins", "early_rewards", "open_rows")
"""What the lanes remember between two rollouts, by name of the attribute and in their state."""


class Lanes:
    """The seats of one block that one module may act for, one lane for each of them in each sub-env.

    Args:
        places: Places of the agents in the block of seats, int64 `[K]`; there are L = N * K lanes, ordered by sub-env.
        agents: Ids of these agents.
        num_envs: Number of sub-envs N.
        block_size: Number of seats in the block.
        observation_space: Space of one observation, as the module gets it.
        action_space: Space of one module action.
        distribution: Action distribution of the module.
        history: What the module and its transforms remember of each lane.
        counts_by_end: Whether a step counts if the env step counts that ended it, and not the one in which its action
            was taken.

    Attributes:
        envs: Index of the sub-env of each lane, int64 `[L]`.
        places: Place of each lane's agent in the block, int64 `[L]`.
        agents: Agent of each lane, L ids.
        obs: Latest observation of each lane, a tree of `[L, ...]`.
        acts: Whether the agent has to act in the next env step, bool `[L]`.
        space_tree: Space of one observation, a tree of plain spaces.
        is_used: Whether the module acts for the agent in the current episode, bool `[L]`.
        begins: Whether the agent has not acted yet in its episode, bool `[L]`.
        rollout: The rollout that is being written.
        played: What the rollout that was finished last played: distribution, columns of actions `[T, L, ...]` and
            of rows of observations, which rows hold an action, bool `[T, L]`, and sub-env and place of each lane.
    """

    rollout: LaneRollout
    played: tuple[Any, ...]

    def __init__(
        self,
        places: NDArray[np.int64],
        agents: Sequence[AgentID],
        *,
        num_envs: int,
        block_size: int,
        observation_space: Any,
        action_space: Any,
        distribution: ActionDistribution,
        history: RowHistory,
        counts_by_end: bool = False,
    ) -> None:
        """Make the lanes, none of them in use."""
        self._history, self._counts_by_end = history, counts_by_end
        self.envs, self.places = np.repeat(np.arange(num_envs), len(places)), np.tile(places, num_envs)
        self.agents = list(agents) * num_envs
        self._lane_at = np.full((num_envs, block_size), -1)
        self._lane_at[self.envs, self.places] = np.arange(len(self))
        self._is_whole = len(places) == block_size  # then the lanes are the seats of the block, in their order
        self._space, self._action_space, self._distribution = observation_space, action_space, distribution
        self.space_tree = space_tree(observation_space)
        self._blank: Tree = map_tree(blank_array, self.space_tree)  # of one agent that was not observed
        self.obs: Tree = map_tree(lambda leaf: np.repeat(leaf[None], len(self), 0), self._blank)
        self.forget()

    def __len__(self) -> int:
        """Return the number of lanes L."""
        return len(self.envs)

    def forget(self) -> None:
        """Forget all episodes, before the envs are reset."""
        num_lanes = len(self)
        self._clock = np.zeros(num_lanes, np.int64)
        self.is_open, self.acts, self.is_used, self.begins = (np.zeros(num_lanes, np.bool_) for _ in range(4))
        self.early_rewards = np.zeros(num_lanes)  # before the first action of the episode
        self.open_rows = np.full(num_lanes, -1)  # where the next rollout has the observations of the open steps
        self._carry = EpisodeCarry.fresh(num_lanes, 0.0)
        # Columns of the open steps between two rollouts: copies, because callbacks write into the rollout. `None` while
        # a rollout is written.
        self._open_steps: dict[str, Tree] | None = {}

    def begin_counting(self) -> None:
        """Forget the totals of the episodes so far, which do not count any more."""
        self._carry = EpisodeCarry.fresh(len(self), 0.0)

    def of_seats(self, seats: NDArray[Any]) -> NDArray[Any]:
        """Return the entries of the lanes, `[L, ...]`, of an array over the block, `[N, B, ...]`."""
        if self._is_whole:
            return seats.reshape(len(self), *seats.shape[2:])
        return seats[self.envs, self.places]

    # State, between two rollouts.

    def get_state(self) -> dict[str, Any]:
        """Return a copy of what the next rollout continues from, with the columns `[K, ...]` of the open steps."""
        return {
            "obs": map_tree(np.copy, self.obs),
            **{name: getattr(self, name).copy() for name in ("envs", "places", *OF_LANES)},
            **{name: getattr(self._carry, name).copy() for name in TOTALS},
            "open_steps": {name: map_tree(np.copy, column) for name, column in self._get_open_steps().items()},
            **self._history.get_state(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check a state, without changing anything.

        Raises:
            CheckpointError: It is of other envs, agents or observations.
        """
        shape, num_lanes = self._lane_at.shape, len(state["envs"])
        seats = state["envs"], state["places"]
        if any(((part < 0) | (part >= size)).any() for part, size in zip(seats, shape, strict=True)):
            raise CheckpointError(f"a runner has {shape[0]} sub-envs and {shape[1]} agents, and its state has others.")
        for name, dtype in (("is_open", "bool"), ("acts", "bool"), ("is_used", "bool"), ("returns", "float64")):
            if state[name].shape != (num_lanes,) or state[name].dtype != dtype:
                raise CheckpointError(f"{name} of the agents of a runner are {state[name].dtype}{state[name].shape}.")

        def check(here: NDArray[Any], leaf: NDArray[Any]) -> None:
            if leaf.shape != (num_lanes, *here.shape[1:]) or leaf.dtype != here.dtype:
                raise CheckpointError(f"the observations of agents of a runner are {leaf.dtype}{leaf.shape}.")

        map_tree(check, self.obs, state["obs"])
        self._history.check_state(state, num_lanes)

    def missing_places(self, state: Mapping[str, Any]) -> list[int]:
        """Return the places of a state for which there are no lanes here."""
        return [place for place in np.unique(state["places"]).tolist() if not self.has(place)]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; `add` has made lanes for all of its places. The order of the lanes is as saved."""
        saved = self._lane_at[state["envs"], state["places"]]
        self._reorder(np.append(saved, np.setdiff1d(np.arange(len(self)), saved)))
        self.forget()
        lanes = np.arange(len(saved))
        self.obs = map_tree(np.copy, self.obs)
        map_tree(lambda here, saved: here.__setitem__(lanes, saved), self.obs, state["obs"])
        self._history.set_state(state, lanes)
        for name in OF_LANES:
            getattr(self, name)[lanes] = state[name]
        for name in TOTALS:
            getattr(self._carry, name)[lanes] = state[name]
        self._open_steps = {name: map_tree(np.copy, column) for name, column in state["open_steps"].items()}

    def _reorder(self, order: NDArray[np.int64]) -> None:
        """Put the lanes into another order; draws and the state of an exploration are by lane."""
        self.envs, self.places = self.envs[order], self.places[order]
        self.agents = [self.agents[lane] for lane in order.tolist()]
        self._lane_at = np.full_like(self._lane_at, -1)
        self._lane_at[self.envs, self.places] = np.arange(len(self))
        self._is_whole = np.array_equal(self._lane_at.ravel(), np.arange(len(self)))

    # A rollout.

    def begin(self, num_rows: int, parent: Rollout) -> None:
        """Begin a rollout with room for `num_rows` env steps; steps that are open become its first rows."""
        lanes, open_steps = np.flatnonzero(self.is_open), self._get_open_steps()
        self._open_steps = None
        self.rollout = rollout = self._allocate(num_rows + 2)
        self._describe(rollout, parent)
        rollout.carry = self._carry
        map_tree(lambda column, now: np.copyto(column[0], now), rollout.obs, self.obs)
        rollout.obs_rows[0] = 0
        for name, column in open_steps.items():
            if name not in rollout.columns:
                rollout.add_column(name, column)
            map_tree(lambda new, old: _put(new, 0, lanes, old), rollout[name], column)
        rollout.obs_rows[0, lanes] = self.open_rows[lanes]
        self._clock[:] = 0

    def _get_open_steps(self) -> dict[str, Tree]:
        """Return the columns of the open steps, trees of `[K, ...]`."""
        if self._open_steps is not None:
            return self._open_steps
        (lanes,) = self.is_open.nonzero()
        columns = self.rollout.columns if len(lanes) else {}
        return {
            name: map_tree(lambda leaf: leaf[self._clock[lanes], lanes], column)
            for name, column in columns.items()
            if name != "row_times_s"
        }

    def _allocate(self, num_rows: int) -> LaneRollout:
        shape, distribution = (num_rows, len(self)), self._distribution
        # Blank, because rows that no lane fills are computed with, though they count nowhere.
        columns: dict[str, Tree] = {
            "obs": map_tree(
                lambda leaf: np.broadcast_to(leaf, (num_rows + 1, *shape[1:], *leaf.shape)).copy(), self._blank
            ),
            "actions": np.zeros((*shape, *distribution.action_shape), distribution.action_dtype),
            "rewards": np.zeros(shape),
            **{name: np.zeros(shape, np.bool_) for name in ("terminated", "truncated", "valid")},
            "dist_inputs": np.zeros((*shape, distribution.num_inputs), np.float32),
            "row_times_s": np.zeros(num_rows),
            **self._history.allocate(num_rows + 1),
        }
        return LaneRollout(columns)

    def _make_room(self) -> None:
        """Give the rollout room for one more step and the row after it."""
        if int(self._clock.max()) + 2 > self.rollout.capacity:
            self._enlarge(2 * self.rollout.capacity + 2)

    def _enlarge(self, num_rows: int) -> None:
        """Give the rollout that is being written `num_rows` rows, and columns of the lanes that were added."""
        written, larger = self.rollout, self._allocate(num_rows)
        for name, column in written.columns.items():
            if name not in larger.columns:
                larger.add_column(name, column[0])
            map_tree(_copy_corner, larger[name], column)
        _copy_corner(larger.obs_rows, written.obs_rows)
        written.columns, written.obs_rows = larger.columns, larger.obs_rows

    def finish(self, parent: Rollout) -> LaneRollout:
        """Return the rollout, complete except for `logp`.

        Args:
            parent: The rollout of the env steps, whose `valid` says which of them count.
        """
        rollout, self._open_steps = self.rollout, self._get_open_steps()
        open_lanes = np.flatnonzero(self.is_open)
        num_rows = int(self._clock.max(initial=0))
        done = self._with_rows(rollout, num_rows)
        acts = rollout.columns["valid"].copy()
        acts[self._clock[open_lanes], open_lanes] = True
        # Copies, because callbacks may write into the rollout later.
        actions = rollout.columns["actions"].copy()
        self.played = self._distribution, actions, rollout.obs_rows, acts, self.envs, self.places
        rows = done.obs_rows[1:] - 1 if self._counts_by_end else done.obs_rows[:-1]
        counts = parent.valid[np.clip(rows, 0, parent.num_rows - 1), self.envs]
        # An action of an earlier rollout has no row here. Where envs have clocks of their own, its episode may not
        # count; row 0 belongs to the same one.
        done.valid &= counts if parent.lane_rows is not None else (rows < 0) | counts
        stops = parent.num_rows if parent.lane_rows is None else parent.lane_rows[self.envs[open_lanes]]
        self.open_rows[open_lanes] = rollout.obs_rows[self._clock[open_lanes], open_lanes] - stops
        done.num_env_steps = int(np.count_nonzero(done.valid))
        _, self._carry = episode_statistics(done, self._carry)
        return done

    def _with_rows(self, rollout: LaneRollout, num_rows: int) -> LaneRollout:
        """Return the first rows of a rollout, as a rollout of their own; the open steps stay in `rollout`."""
        columns = {
            name: map_tree(lambda leaf, stop=num_rows + (name in COLUMNS_OF_OBS): leaf[:stop], column)
            for name, column in rollout.columns.items()
        }
        done = LaneRollout(columns, num_rows=num_rows)
        self._describe(done, rollout.parent)
        done.carry, done.broken, done.obs_rows = rollout.carry, rollout.broken, rollout.obs_rows[: num_rows + 1]
        done.lane_rows, done.waits = self._clock.copy(), np.zeros(len(self), np.bool_)
        rollout.lane_rows, rollout.waits = done.lane_rows, done.waits  # the next rollout uses the arrays again
        return done

    def _describe(self, rollout: LaneRollout, parent: Rollout) -> None:
        """Set what a rollout says of itself besides columns."""
        rollout.lane_envs, rollout.lane_agents = self.envs, self.agents
        rollout.lane_rows, rollout.waits = self._clock, self.is_open
        rollout.observation_space, rollout.action_space = self._space, self._action_space
        rollout.worker_index, rollout.weights_version = parent.worker_index, parent.weights_version
        rollout.continues, rollout.parent, rollout.info_rows = parent.continues, parent, parent.info_rows

    @property
    def oldest_row(self) -> int:
        """Row of the next rollout, 0 or negative, of the oldest observation that it needs."""
        return int(self.open_rows[self.is_open].min(initial=0))

    # A step.

    def use(self, env_index: int, place: int, early_reward: float) -> None:
        """Let the module act for an agent until the end of the episode.

        Args:
            env_index: Sub-env of the agent.
            place: Place of the agent in the block.
            early_reward: Rewards that the agent got in the episode before it was first observed.
        """
        lane = self._lane_at[env_index, place]
        self.is_used[lane], self.begins[lane], self.early_rewards[lane] = True, True, early_reward

    def has(self, place: int) -> bool:
        """Return whether there are lanes for an agent, by its place in the block."""
        return bool(self._lane_at[0, place] >= 0)

    def add(self, place: int, agent: AgentID) -> None:
        """Add lanes for one more agent, one in each sub-env; they come after the other lanes."""
        num_envs, before = len(self._lane_at), len(self)
        more = np.zeros(num_envs, np.int64)
        self._lane_at[:, place] = before + np.arange(num_envs)
        self._is_whole = False
        self.envs, self.places = np.append(self.envs, np.arange(num_envs)), np.append(self.places, more + place)
        self.agents = [*self.agents, *[agent] * num_envs]
        for name in ("_clock", *OF_LANES):
            array = getattr(self, name)
            setattr(self, name, np.append(array, more.astype(array.dtype)))
        self._history.resize(len(self))
        self.obs = map_tree(
            lambda leaf, blank: np.append(leaf, np.repeat(blank[None], num_envs, 0), 0), self.obs, self._blank
        )
        fresh = EpisodeCarry.fresh(num_envs, 0.0)
        totals: dict[str, Any] = {name: np.append(getattr(self._carry, name), getattr(fresh, name)) for name in CARRY}
        self._carry = replace(self._carry, **totals)
        if hasattr(self, "rollout"):  # a runner that is restored has none yet
            self._enlarge(self.rollout.capacity)
            self._describe(self.rollout, self.rollout.parent)
            self.rollout.carry = self._carry

    def act(self, actions: NDArray[Any], dist_inputs: NDArray[np.float32], logp: Any) -> NDArray[np.int64]:
        """Open a step of every lane that acts, and return the lanes, int64 `[K]`.

        Args:
            actions: Module actions of all lanes, `[L, ...]`.
            dist_inputs: Outputs of the policy, float32 `[L, D]`.
            logp: Log-probabilities of the actions, `[L]`, or `None` where the outputs give them.
        """
        self._make_room()
        columns, (lanes,) = self.rollout.columns, self.acts.nonzero()
        steps = self._flat_rows(lanes)
        _flat(columns["actions"])[steps] = actions[lanes]
        _flat(columns["dist_inputs"])[steps] = dist_inputs[lanes]
        if self._history.has_columns:
            self._write_all(steps, lanes, self._history.get_chosen())
            self._history.keep(self.acts)
            self._history.note_actions(actions[lanes], lanes)
        if logp is not None:
            if "logp" not in columns:
                columns["logp"] = np.full(columns["rewards"].shape, np.nan, np.float32)
            _flat(columns["logp"])[steps] = np.asarray(logp)[lanes]
        _flat(columns["rewards"])[steps] = self.early_rewards[lanes]
        self.early_rewards[lanes] = 0.0
        self.is_open |= self.acts
        self.begins &= ~self.acts
        self.acts = np.zeros(len(self), np.bool_)
        return lanes

    def receive(
        self,
        obs: Tree,
        observed: NDArray[np.bool_],
        rewards: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        ends: NDArray[np.bool_],
    ) -> None:
        """Take what an env step gave to the seats of the block, all `[N, B, ...]`: close steps, and note who acts next.

        Args:
            obs: Observations, a tree; only entries of observed seats are used.
            observed: Whether the agent was observed.
            rewards: Rewards.
            terminated: Whether the agent, or its whole episode, terminated in this step.
            truncated: Whether the agent, or its whole episode, was truncated in this step.
            ends: Whether one of both.
        """
        rollout, columns, clock, is_open = self.rollout, self.rollout.columns, self._clock, self.is_open
        seen = self.of_seats(observed) & self.is_used
        ends = self.of_seats(ends)
        (lanes,) = is_open.nonzero()
        _flat(columns["rewards"])[self._flat_rows(lanes)] += self.of_seats(rewards)[lanes]
        closes = is_open & (seen | ends)
        (lanes,) = closes.nonzero()
        steps = self._flat_rows(lanes)
        _flat(columns["valid"])[steps] = True
        if self._history.has_columns:
            self._history.note_rewards(_flat(columns["rewards"])[steps], lanes)
        if np.count_nonzero(ends):
            _flat(columns["terminated"])[steps] = self.of_seats(terminated)[lanes]
            _flat(columns["truncated"])[steps] = self.of_seats(truncated)[lanes]
        clock += closes
        is_open ^= closes
        (lanes,) = seen.nonzero()
        map_tree(lambda latest, seats: _replace(latest, lanes, self.of_seats(seats)), self.obs, obs)
        (lanes,) = (seen | closes).nonzero()  # an agent that ended unobserved has its last observation as the final one
        steps = self._flat_rows(lanes)
        self._write(steps, lanes, rollout.obs, self.obs)
        if self._history.has_columns:  # `act` writes the initial states where episodes begin
            self._write_all(steps, lanes, self._history.get_next(self.obs, self.begins))
        rows = rollout.parent.lane_rows
        _flat(rollout.obs_rows)[steps] = rollout.parent.num_rows if rows is None else rows[self.envs[lanes]]
        clock += closes & ends  # the row after the last step holds only the final observation
        self.acts = self.acts | (seen & ~ends)
        self.is_used &= ~ends

    def _write_all(self, steps: NDArray[np.int64], lanes: NDArray[np.int64], rows: Mapping[str, Tree]) -> None:
        """Write entries of lanes, from trees of `[L, ...]` by column, to steps of these columns."""
        for name, row in rows.items():
            self._write(steps, lanes, self.rollout.columns[name], row)

    @staticmethod
    def _write(steps: NDArray[np.int64], lanes: NDArray[np.int64], columns: Tree, rows: Tree) -> None:
        """Write entries of lanes, from a tree of `[L, ...]`, to steps of columns; see `_flat_rows`."""
        map_tree(lambda column, now: _flat(column).__setitem__(steps, now[lanes]), columns, rows)

    def _flat_rows(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where lanes have their current rows in columns without an axis of lanes; one index is faster."""
        rows: NDArray[np.int64] = self._clock[lanes] * len(self.envs) + lanes
        return rows

    def drop(self, env_index: int) -> None:
        """Drop the open steps of a sub-env that failed; what its agents saw last stays in the row, which counts not."""
        # An agent that was to act keeps a row too, so that its last step and its next episode stay apart.
        lanes = np.flatnonzero((self.is_open | self.acts) & (self.envs == env_index))
        self.rollout.broken += zip(self._clock[lanes].tolist(), lanes.tolist(), strict=True)
        self._clock[lanes] += 1
        self.is_open[lanes] = False
        of_env = self.envs == env_index
        self.is_used &= ~of_env
        self.acts &= ~of_env


def _copy_corner(new: NDArray[Any], old: NDArray[Any]) -> None:
    """Copy a column into one with as many rows and lanes, or more."""
    new[tuple(map(slice, old.shape))] = old


def _flat(column: NDArray[Any]) -> NDArray[Any]:
    """Return a column `[T, L, ...]` as `[T * L, ...]`, in the same memory."""
    return column.reshape(-1, *column.shape[2:])


def _put(column: NDArray[Any], rows: Any, lanes: NDArray[np.int64], values: NDArray[Any]) -> None:
    column[rows, lanes] = values


def _replace(latest: NDArray[Any], lanes: NDArray[np.int64], values: NDArray[Any]) -> None:
    if len(lanes) == len(latest):
        np.copyto(latest, values, casting="same_kind")
    else:
        latest[lanes] = values[lanes]
