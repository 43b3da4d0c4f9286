"""What the getters of `MultiAgentEpisode` read, by agent, and how indices of env steps pick from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.ids import AgentID
from corral.core.tree import Tree, leaves, map_tree
from corral.data.episodes.episode import SingleAgentEpisode
from corral.data.episodes.lookback import Indices, Positions, Reading, one_hot, pick, positions
from corral.errors import EpisodeError


@dataclass
class PendingStep:
    """A step of an agent that has acted and was not observed since.

    Attributes:
        action: Its action.
        outputs: Further outputs of the module by name.
        reward: Sum of the rewards so far.
    """

    action: Any
    outputs: dict[str, Any] = field(default_factory=dict)
    reward: float = 0.0


def read(episode: SingleAgentEpisode, what: str, last: Any = None, *, one_hot_space: str = "") -> Tree:
    """Return the data of an agent, its lookback and its pending step included, as a tree of `[E, ...]`.

    Args:
        episode: Episode of the agent.
        what: What is read, such as `"rewards"` for its `get_rewards`; infos are an array of dicts.
        last: Entry of the pending step, or `None`.
        one_hot_space: Attribute with the space whose Discrete and MultiDiscrete parts are returned as one-hot vectors.
    """
    # All entries, with negative indices for the lookback.
    found = getattr(episode, f"get_{what}")(slice(-episode.len_lookback, None), neg_index_as_lookback=True)
    if what == "infos":
        data = np.empty(len(found), object)
        data[:] = found
        return data
    data = _with_last(found, last)
    if not one_hot_space or not len(leaves(data)[0]):
        return data
    return one_hot(data, getattr(episode, one_hot_space), one_hot_space)


def read_outputs(episode: SingleAgentEpisode, step: PendingStep | None) -> dict[str, Tree]:
    """Return the outputs of the module other than actions, by name, as `read` returns other data."""
    every = slice(-episode.len_lookback, None)
    known = episode.get_extra_model_outputs(None, every, neg_index_as_lookback=True)
    pending = step.outputs if step else {}
    return {name: _with_last(known.get(name), pending.get(name)) for name in dict.fromkeys([*known, *pending])}


def _with_last(data: Tree, last: Any) -> Tree:
    """Return entries `[E, ...]` with one more, if it is not `None`; `data` may be empty or `None`."""
    if last is None:
        return data
    if data is None or not len(leaves(data)[0]):
        return map_tree(lambda leaf: np.asarray(leaf)[None], last)
    return map_tree(lambda column, leaf: np.append(column, np.asarray(leaf, column.dtype)[None], axis=0), data, last)


AgentIds = Collection[AgentID] | AgentID | None
"""Id or ids of agents; `None` is all."""


class AgentReading(Reading, total=False):
    """How a getter of `MultiAgentEpisode` takes its indices, and what it returns.

    Attributes:
        neg_index_as_lookback: Whether negative indices count from the start back into the lookback buffer.
        fill: Value of all elements where an agent has no data, and outside; `None` leaves them out.
        env_steps: Whether indices are env steps, rather than steps of each agent; the default is True.
        return_list: Whether to return a list with one dict by agent for each index, which must be an env step.
    """

    env_steps: bool
    return_list: bool


@dataclass(frozen=True)
class AgentQuery:
    """The arguments of a getter; see `MultiAgentEpisode.get_observations`.

    Raises:
        EpisodeError: `return_list` without `env_steps`.
    """

    indices: Indices
    agent_ids: AgentIds
    env_steps: bool = True
    neg_index_as_lookback: bool = False
    fill: Any = None
    return_list: bool = False

    def __post_init__(self) -> None:
        """Check the arguments against each other."""
        if self.return_list and not self.env_steps:
            raise EpisodeError("return_list=True gives a dict for each env step: leave out env_steps=False.")

    def pick_agent_steps(self, data: Mapping[AgentID, Tree], lookbacks: Mapping[AgentID, int]) -> dict[AgentID, Any]:
        """Return what the indices mean as steps of each agent.

        Args:
            data: By agent, a tree of `[E, ...]`.
            lookbacks: By agent, how many of these entries are lookback.
        """
        return {
            agent_id: pick(part, self._positions(len(leaves(part)[0]), lookbacks[agent_id]), self.fill)
            for agent_id, part in data.items()
        }

    def pick_env_steps(
        self, data: Mapping[AgentID, Tree], times: Mapping[AgentID, NDArray[Any]], num_entries: int, lookback: int
    ) -> Any:
        """Return what the indices mean as env steps: a dict by agent, or for `return_list` a list of them.

        Args:
            data: By agent, a tree of `[E, ...]`.
            times: By agent, the entry of the env in which each of these was, int `[E]`, counted like `num_entries`.
            num_entries: Number of entries of the env, lookback included.
            lookback: How many of them are lookback.

        Raises:
            IndexError: An int is outside, and there is no `fill`.
        """
        where = self._positions(num_entries, lookback)
        steps = np.arange(num_entries)[where] if isinstance(where, slice) else np.asarray(where)
        if self.fill is None and ((steps < 0) | (steps >= num_entries)).any():
            raise IndexError(
                f"index out of range: there are {num_entries} entries, lookback included. Give fill=... to pad."
            )
        if self.return_list:
            return [self._pick_at(step, data, times) for step in np.atleast_1d(steps)]
        return self._pick_at(steps, data, times)

    def _pick_at(
        self, steps: NDArray[np.int64], data: Mapping[AgentID, Tree], times: Mapping[AgentID, NDArray[Any]]
    ) -> dict[AgentID, Any]:
        picked = {}
        for agent_id, part in data.items():
            entries = _entries_at(times[agent_id], steps)
            if self.fill is None:
                if not (entries >= 0).any():
                    continue
                entries = entries[entries >= 0] if entries.ndim else entries
            picked[agent_id] = pick(part, entries if entries.ndim else int(entries), self.fill)
        return picked

    def _positions(self, num_entries: int, lookback: int) -> Positions:
        """Return the positions of the indices among all entries, lookback included."""
        return positions(
            self.indices,
            num_entries,
            lookback,
            neg_index_as_lookback=self.neg_index_as_lookback,
            clip=self.fill is None,
        )


def _entries_at(known: NDArray[Any], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the entry of each env step among entries whose env steps are `known` `[E]`, in order; -1 for none."""
    if not len(known):
        return np.full_like(steps, -1)
    entries = np.minimum(np.searchsorted(known, steps), len(known) - 1)
    return np.where(known[entries] == steps, entries, -1)
