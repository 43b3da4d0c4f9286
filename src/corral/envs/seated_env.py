"""The wrapper that gives a multi-agent env the arrays of a single env: one row for each possible agent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from corral.core.ids import COMMON, AgentID
from corral.core.spaces import blank_array, space_tree, split_actions
from corral.core.tree import Tree, map_tree
from corral.envs.checks import bad_values, mismatch, warn_if_cast
from corral.envs.multi_agent_env import ALL
from corral.envs.seats import SeatBlock, Seats, SeatsSpace
from corral.envs.step_checks import FLAG_TYPES, is_number
from corral.errors import EnvError

MAX_KEY_SETS = 256
"""Sets of agents whose seats are kept; more come up only if agents are drawn at random."""

ALL_SEATS = slice(None)
FIELDS = ("observations", "rewards", "terminateds", "truncateds", "infos")
FIVE_DICTS = [dict] * 5


class SeatedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper of a multi-agent env that has one seat for each possible agent, in arrays of fixed shapes.

    The observation space is a `SeatsSpace`. Observations are in arrays that the next `reset` or `step` overwrites. The
    reward is the sum over all agents. The flags are the env's flags under `"__all__"`; if all agents that have appeared
    have ended, the episode has ended too. Infos are `{"agents": infos by agent id, "common": info under "__common__"}`,
    or empty.

    Actions are arrays `[B, ...]` for each block of seats; an action of a `Tuple` space of parts of one kind is one flat
    row, and other actions of Dict and Tuple spaces are trees of arrays. The env receives only the actions of the agents
    that have to act: they received an observation in the latest `reset` or `step`, and have not ended.

    Args:
        env: A `MultiAgentEnv`, or a wrapper around one.
        name: Name of the env in warnings.

    Attributes:
        joined: Whether each agent was observed in this episode, bool `[A]`.
        ended: Whether the episode of each agent has ended, bool `[A]`.

    Raises:
        EnvError: An agent has no space, or its id is not allowed. `reset` and `step` raise it for everything that does
            not fit: unknown agents, agents that have ended, observations outside their spaces, rewards that are no
            finite numbers, and a missing `"__all__"`.
    """

    def __init__(self, env: gym.Env[Any, Any], name: str = "") -> None:
        """Find the seats."""
        super().__init__(env)
        self.seats = Seats.of(env)
        self.observation_space, self.action_space = SeatsSpace(self.seats), self.seats.action_space
        self._name = name
        self._seat_of = {agent: seat for seat, agent in enumerate(self.seats.agents)}
        self._known: dict[tuple[Any, ...], _Present] = {}
        self._known_flags: set[tuple[Any, ...]] = set()
        num_seats = len(self.seats.agents)
        self._names = [block.name for block in self.seats.blocks]
        self._blocks = [_BlockRows(block, name) for block in self.seats.blocks]
        self.joined, self.ended = np.zeros(num_seats, np.bool_), np.zeros(num_seats, np.bool_)
        self._nobody = self._acting = self._find_seats((), "observations")
        self.write_to(map_tree(lambda leaf: np.empty(leaf.shape, leaf.dtype), space_tree(self.observation_space)))

    def write_to(self, arrays: dict[str, Any]) -> None:
        """Write all observations to these arrays from now on, for example to one row of a vector env's arrays."""
        self._obs, self._rewards = arrays, arrays["rewards"]
        self._flags = {field: arrays[field] for field in ("observed", "terminated", "truncated")}
        for array in (self._rewards, *self._flags.values()):
            array[:] = 0
        for name, rows in zip(self._names, self._blocks, strict=True):
            rows.columns = arrays["obs"][name]
            rows.blank()
        self._observed = self._nobody  # the agents whose observations the arrays have
        self._has_ends = False  # whether an agent ended in the latest step

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; return the observations of all seats and the infos."""
        returned: Any = self.env.reset(seed=seed, options=options)
        if not (
            isinstance(returned, tuple) and len(returned) == 2 and all(isinstance(part, dict) for part in returned)
        ):
            raise EnvError(f"reset() must return (observations, infos), two dicts by agent id, got {returned!r:.80}")
        obs, infos = returned
        self.joined[:], self.ended[:], self._rewards[:] = False, False, 0.0
        self._acting = self._nobody
        self._write_obs(obs)
        self._write_ends({}, {})
        self._choose_acting(obs)
        return self._obs, self._join_infos(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the env with the actions of the agents that have to act; return the arrays of all seats."""
        obs, rewards, terminateds, truncateds, infos = _five_dicts(self.env.step(self._agent_actions(action)))
        reward = self._write_rewards(rewards)
        self._write_obs(obs)
        self._write_ends(terminateds, truncateds)
        terminated, truncated = bool(terminateds.get(ALL)), bool(truncateds.get(ALL))
        if not (terminated or truncated):
            if self._has_ends and self.joined.any() and bool((self.ended >= self.joined).all()):
                terminated = bool(self._flags["terminated"].any())
                truncated = not terminated
            elif ALL not in terminateds and ALL not in truncateds:
                raise EnvError(
                    f"terminateds must tell under the key {ALL!r} whether the episode has ended for all agents"
                )
        if terminated or truncated:
            self._acting = self._nobody
        else:
            self._choose_acting(obs)
        return self._obs, reward, terminated, truncated, self._join_infos(infos)

    def _find_seats(self, agents: tuple[Any, ...], field: str) -> _Present:
        """Return the seats of agents, which are the keys of a field.

        Raises:
            EnvError: An agent is unknown.
        """
        if (present := self._known.get(agents)) is not None:
            return present
        self._refuse_unknown(agents, field)
        if len(self._known) >= MAX_KEY_SETS:
            self._known.clear()
        parts = []
        for i, block in enumerate(self.seats.blocks):
            inside = set(agents).intersection(block.agents)
            chosen = tuple(agent for agent in block.agents if agent in inside)
            rows = np.array([self._seat_of[agent] - block.start for agent in chosen], np.intp)
            if chosen:
                parts.append((i, chosen, ALL_SEATS if len(chosen) == len(block.agents) else rows))
        seats = np.array([self._seat_of[agent] for agent in agents], np.intp)
        mask = np.zeros(len(self.seats.agents), np.bool_)
        mask[seats] = True
        self._known[agents] = found = _Present(ALL_SEATS if agents == self.seats.agents else seats, mask, tuple(parts))
        return found

    def _refuse_unknown(self, agents: tuple[Any, ...], field: str) -> None:
        if unknown := [agent for agent in agents if agent not in self._seat_of]:
            raise EnvError(
                f"{field} have agent {unknown[0]!r}, which is not in possible_agents {[*self.seats.agents]!r:.200}"
            )

    # From the env.

    def _write_obs(self, obs: dict[Any, Any]) -> None:
        """Write the observations of a step, before its ends are known."""
        present = self._find_seats(tuple(obs), "observations")
        if present is not self._acting and (present.mask & self.ended).any():  # who has just acted has not ended
            agent = next(agent for agent in obs if self.ended[self._seat_of[agent]])
            raise EnvError(f"agent {agent!r} has an observation, and its episode has ended in an earlier step")
        if present is not self._observed:
            for rows in self._blocks:
                rows.blank()
            self._flags["observed"][:] = present.mask
            self._observed = present
        if present is not self._acting:
            self.joined |= present.mask
        for i, agents, index in present.parts:
            self._blocks[i].write(agents, index, [obs[agent] for agent in agents])

    def _write_rewards(self, rewards: dict[Any, Any]) -> float:
        """Write the rewards of a step; return their sum."""
        present = self._find_seats(tuple(rewards), "rewards")
        if present.seats is not ALL_SEATS:
            self._rewards[:] = 0.0
        try:
            self._rewards[present.seats] = [*rewards.values()]
            total = sum(rewards.values())
            is_right = isinstance(total, (int, float, np.number)) and math.isfinite(total)
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            _refuse_rewards(rewards)
        if present is not self._acting and self._rewards[self.ended].any():
            seat = int(np.flatnonzero(self.ended & (self._rewards != 0))[0])
            raise EnvError(
                f"agent {self.seats.agents[seat]!r} has reward {self._rewards[seat]}, and its episode has ended in an "
                "earlier step"
            )
        return float(total)

    def _write_ends(self, terminateds: dict[Any, Any], truncateds: dict[Any, Any]) -> None:
        """Write which agents end in this step."""
        if self._has_ends:
            self._flags["terminated"][:], self._flags["truncated"][:], self._has_ends = 0, 0, False
        for field, flags in (("terminated", terminateds), ("truncated", truncateds)):
            if (keys := tuple(flags)) not in self._known_flags:
                self._refuse_unknown(tuple(key for key in keys if key != ALL), f"{field}s")
                if len(self._known_flags) >= MAX_KEY_SETS:
                    self._known_flags.clear()
                self._known_flags.add(keys)
            if not FLAG_TYPES.issuperset(map(type, flags.values())):
                raise EnvError(f"{field}s must be bools by agent id, got {flags!r:.200}")
            if not any(flags.values()):
                continue
            ends = [self._seat_of[agent] for agent, flag in flags.items() if flag and agent != ALL]
            column = self._flags[field]
            column[ends] = 1
            column[self.ended] = 0  # in an earlier step
            self._has_ends = self._has_ends or bool(column.any())
        if self._has_ends:
            self.ended |= (self._flags["terminated"] | self._flags["truncated"]).view(np.bool_)

    def _join_infos(self, infos: dict[Any, Any]) -> dict[str, Any]:
        """Return the infos of one step under the keys of a seated env; without any info the dict is empty.

        Raises:
            EnvError: An info is not a dict, or is for an unknown agent.
        """
        if not any(infos.values()):
            return {}
        for agent, info in infos.items():
            if info and not isinstance(info, dict):
                raise EnvError(f"info of agent {agent!r} must be a dict, got {info!r:.80}")
        agents = {agent: info for agent, info in infos.items() if info and agent != COMMON}
        if not agents.keys() <= self._seat_of.keys():
            self._refuse_unknown(tuple(agents), "infos")
        return {"agents": agents, "common": infos.get(COMMON)}

    def _choose_acting(self, obs: dict[Any, Any]) -> None:
        """Note which agents have to act in the next step of an episode that continues; there may be none."""
        self._acting = self._observed
        if self._has_ends:
            acting = tuple(agent for agent in obs if not self.ended[self._seat_of[agent]])
            self._acting = self._find_seats(acting, "observations")

    @property
    def acting(self) -> NDArray[np.bool_]:
        """Whether each agent has to act in the next step, bool `[A]`."""
        return self._acting.mask

    @property
    def seat_state(self) -> dict[str, list[AgentID]]:
        """Agents that have to act, that have joined and that have ended, to continue the episode elsewhere."""
        masks = {"acting": self.acting, "joined": self.joined, "ended": self.ended}
        return {name: [self.seats.agents[seat] for seat in np.flatnonzero(mask)] for name, mask in masks.items()}

    @seat_state.setter
    def seat_state(self, state: dict[str, list[AgentID]]) -> None:
        acting = tuple(agent for agent in self.seats.agents if agent in state["acting"])
        self._acting = self._find_seats(acting, "observations")
        for mask, name in ((self.joined, "joined"), (self.ended, "ended")):
            mask[:] = [agent in state[name] for agent in self.seats.agents]

    # To the env.

    def _agent_actions(self, action: dict[str, Any]) -> dict[AgentID, Any]:
        """Return the actions of the agents that have to act."""
        given: dict[AgentID, Any] = {}
        for i, agents, index in self._acting.parts:
            own, parts = action[self._names[i]], self.seats.blocks[i].action_parts
            if isinstance(own, np.ndarray):
                rows = split_actions(parts, own[index]) if parts else own[index]
            else:
                places = np.arange(len(self.seats.blocks[i].agents))[index]
                rows = [map_tree(lambda leaf, place=place: leaf[place], own) for place in places]
            given.update(zip(agents, rows, strict=True))
        return given


@dataclass(frozen=True)
class _Present:
    """Seats of the agents that are the keys of a dict.

    Attributes:
        seats: Seats in the order of the keys, int `[K]`, or `ALL_SEATS`.
        mask: Which seats these are, bool `[A]`.
        parts: For each block with one of the agents: index of the block, the agents in the order of their seats, and
            the index of their rows in the block.
    """

    seats: NDArray[np.intp] | slice
    mask: NDArray[np.bool_]
    parts: tuple[tuple[int, tuple[AgentID, ...], Any], ...]


class _BlockRows:
    """Columns `[B, ...]` with the observations of the agents of one block."""

    def __init__(self, block: SeatBlock, name: str) -> None:
        self._space, self._tree, self._name = block.observation_space, space_tree(block.observation_space), name
        num_seats = len(block.agents)
        self._blank = map_tree(lambda leaf: blank_array(leaf, num_seats), self._tree)
        self.columns: Tree = None
        self._is_cast = False

    def blank(self) -> None:
        map_tree(np.copyto, self.columns, self._blank)

    def write(self, agents: Sequence[AgentID], index: Any, values: list[Any]) -> None:
        """Write the observations of agents to rows.

        Raises:
            EnvError: An observation does not fit its space.
        """
        try:
            if self._write(self._tree, self.columns, index, values):
                return
        except (TypeError, ValueError, KeyError, IndexError):  # the check finds out what it was
            pass
        for agent, value in zip(agents, values, strict=True):
            if problem := mismatch(self._tree, value, f"observation of agent {agent!r}"):
                raise EnvError(problem)
        rows = range(len(agents)) if isinstance(index, slice) else index
        for row, value in zip(rows, values, strict=True):
            map_tree(lambda column, leaf, row=row: np.copyto(column[row, ...], leaf, "unsafe"), self.columns, value)

    def _write(self, space: Tree, column: Tree, index: Any, values: list[Any]) -> bool:
        """Write observations that fit without a doubt; otherwise return False."""
        if not isinstance(column, np.ndarray):
            keys = space if isinstance(space, dict) else range(len(space))
            kind, num_keys = type(space), len(space)
            return all(isinstance(value, kind) and len(value) == num_keys for value in values) and all(
                self._write(space[key], column[key], index, [value[key] for value in values]) for key in keys
            )
        rows = np.array(values)
        if rows.dtype != column.dtype:
            if not (column.dtype.kind == "f" and np.can_cast(rows.dtype, column.dtype, "same_kind")):
                return False
            if not self._is_cast:
                self._is_cast = True
                warn_if_cast(self._name, space, values[0])
        if rows.shape[1:] != column.shape[1:]:
            return False
        column[index] = rows
        if column.dtype.kind == "f":
            return bool(np.count_nonzero(np.isfinite(rows)) == rows.size)  # faster than all()
        return bad_values(space, rows, "") is None


def _five_dicts(returned: Any) -> Any:
    """Return the five dicts of a step; a time limit of Gymnasium puts one bool in place of the flags of all agents."""
    if type(returned) is tuple and [*map(type, returned)] == FIVE_DICTS:  # the usual case, as fast as can be
        return returned
    if not (isinstance(returned, tuple) and len(returned) == 5):
        raise EnvError(f"step() must return ({', '.join(FIELDS)}), got {returned!r:.80}")
    obs, rewards, *flags, infos = returned
    flags = [{ALL: part} if isinstance(part, (bool, np.bool_)) else part for part in flags]
    for field, part in zip(FIELDS, (obs, rewards, *flags, infos), strict=True):
        if not isinstance(part, dict):
            raise EnvError(f"{field} from step() must be a dict by agent id, got {part!r:.80}")
    return obs, rewards, *flags, infos


def _refuse_rewards(rewards: dict[Any, Any]) -> None:
    for agent, reward in rewards.items():
        if not (is_number(reward) and math.isfinite(reward)):
            raise EnvError(f"reward of agent {agent!r} must be one finite number, got {reward!r:.80}")
    raise EnvError(f"rewards must be finite numbers by agent id, got {rewards!r:.200}")
