"""Batches of the older API: dicts of columns, by policy if there are several agents.

Corral has rollouts and episodes. These classes only carry columns to callbacks of the older API and back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from corral.compat.rllib.constants import DEFAULT_POLICY_ID, Columns
from corral.core.tree import copy_nested, leaves, map_tree


class SampleBatch(dict[str, Any]):
    """Columns of equal length, by name; `len(batch)` is the number of time steps."""

    OBS = CUR_OBS = Columns.OBS
    NEXT_OBS = Columns.NEXT_OBS
    ACTIONS = Columns.ACTIONS
    REWARDS = Columns.REWARDS
    PREV_ACTIONS = "prev_actions"
    PREV_REWARDS = "prev_rewards"
    TERMINATEDS = Columns.TERMINATEDS
    TRUNCATEDS = Columns.TRUNCATEDS
    DONES = "dones"
    INFOS = Columns.INFOS
    SEQ_LENS = Columns.SEQ_LENS
    T = Columns.T
    EPS_ID = Columns.EPS_ID
    ENV_ID = "env_id"
    AGENT_INDEX = "agent_index"
    UNROLL_ID = "unroll_id"
    ACTION_DIST = "action_dist"
    ACTION_DIST_INPUTS = Columns.ACTION_DIST_INPUTS
    ACTION_PROB = Columns.ACTION_PROB
    ACTION_LOGP = Columns.ACTION_LOGP
    VF_PREDS = Columns.VF_PREDS
    VALUES_BOOTSTRAPPED = Columns.VALUES_BOOTSTRAPPED
    RETURNS_TO_GO = Columns.RETURNS_TO_GO
    OBS_EMBEDS = "obs_embeds"
    ATTENTION_MASKS = "attention_masks"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Keep the columns; lists become arrays, except infos."""
        super().__init__(*args, **kwargs)
        for name, column in self.items():
            if isinstance(column, list) and name != Columns.INFOS:
                super().__setitem__(name, np.asarray(column))

    @property
    def count(self) -> int:
        """Number of time steps."""
        columns = [column for name, column in self.items() if not _is_by_sequence(name)]
        return len(leaves(columns[0])[0]) if columns else 0

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return self.count > 0

    def env_steps(self) -> int:
        """Return the number of time steps."""
        return self.count

    agent_steps = env_steps

    def __getitem__(self, key: Any) -> Any:
        """Return a column; a slice of time steps gives a batch."""
        return self.slice(key.start, key.stop) if isinstance(key, slice) else super().__getitem__(key)

    def slice(self, start: int | None, end: int | None) -> Self:
        """Return a batch of the time steps from `start` to before `end`, with the sequences that they are in."""
        found = {name: map_tree(lambda part: part[start:end], column) for name, column in self.items()}
        if Columns.SEQ_LENS in self:
            lengths = np.asarray(self[Columns.SEQ_LENS])
            steps, ends = range(self.count)[start:end], np.cumsum(lengths)
            kept = np.minimum(ends, steps.stop) - np.maximum(ends - lengths, steps.start)
            found |= {name: map_tree(lambda part: part[kept > 0], self[name]) for name in self if _is_by_sequence(name)}
            found[Columns.SEQ_LENS] = kept[kept > 0]
        return type(self)(found)

    def copy(self, shallow: bool = False) -> Self:
        """Return a copy, with copies of the arrays unless it is shallow."""
        return type(self)({name: column if shallow else copy_nested(column) for name, column in self.items()})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the time steps, one after another."""
        for i in range(self.count):
            yield {name: map_tree(lambda part, i=i: part[i], column) for name, column in self.items()}

    def columns(self, keys: Sequence[str]) -> list[Any]:
        """Return several columns."""
        return [self[key] for key in keys]

    def shuffle(self) -> Self:
        """Put the time steps in a random order, the same for all columns, and return the batch."""
        order = np.random.permutation(self.count)
        for name, column in self.items():
            super().__setitem__(name, map_tree(lambda part: np.asarray(part)[order], column))
        return self

    def split_by_episode(self, key: str | None = None) -> list[Self]:
        """Return a batch for each episode, by the ids in a column or, with `"dones"`, by the ends of episodes."""
        if key == self.DONES or (key is None and Columns.EPS_ID not in self):
            ends = np.asarray(self[Columns.TERMINATEDS], bool) | np.asarray(self.get(Columns.TRUNCATEDS, False), bool)
            cuts = np.flatnonzero(ends[:-1]) + 1
        else:
            ids = np.asarray(self[key or Columns.EPS_ID])
            cuts = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        edges = [0, *cuts.tolist(), self.count]
        return [self.slice(start, end) for start, end in itertools.pairwise(edges)]

    def as_multi_agent(self, module_id: str | None = None) -> MultiAgentBatch:
        """Return a batch with this one under a policy's id."""
        return MultiAgentBatch({module_id or DEFAULT_POLICY_ID: self}, self.count)


def _is_by_sequence(name: str) -> bool:
    """Return whether a column has an entry for each sequence, not for each time step."""
    return name == Columns.SEQ_LENS or name.startswith("state_in_")


class MultiAgentBatch:
    """Batches by policy id.

    Args:
        policy_batches: Batches by policy id.
        env_steps: Number of env steps in which they were sampled.
    """

    def __init__(self, policy_batches: Mapping[str, SampleBatch], env_steps: int) -> None:
        """Keep the batches."""
        self.policy_batches = dict(policy_batches)
        self.count = env_steps

    def env_steps(self) -> int:
        """Return the number of env steps."""
        return self.count

    def agent_steps(self) -> int:
        """Return the number of steps of all agents together."""
        return sum(batch.count for batch in self.policy_batches.values())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: str) -> SampleBatch:
        return self.policy_batches[key]

    def copy(self) -> MultiAgentBatch:
        """Return a copy, with copies of the batches."""
        return MultiAgentBatch({name: batch.copy() for name, batch in self.policy_batches.items()}, self.count)

    def as_multi_agent(self) -> MultiAgentBatch:
        """Return this batch."""
        return self


def concat_samples(samples: Sequence[Any]) -> Any:
    """Return the time steps of several batches in one batch; batches of several policies are joined by policy."""
    if any(isinstance(part, MultiAgentBatch) for part in samples):
        parts = [part.as_multi_agent() for part in samples]
        ids = dict.fromkeys(name for part in parts for name in part.policy_batches)
        joined = {
            name: concat_samples([part.policy_batches[name] for part in parts if name in part.policy_batches])
            for name in ids
        }
        return MultiAgentBatch(joined, sum(part.count for part in parts))
    first, *others = [part for part in samples if len(part)] or [SampleBatch()]
    return SampleBatch(
        {
            name: map_tree(lambda *columns: np.concatenate(columns), column, *(other[name] for other in others))
            for name, column in first.items()
        }
    )


def convert_ma_batch_to_sample_batch(batch: Any) -> SampleBatch:
    """Return the batch of the only policy of a batch.

    Raises:
        ValueError: There is another number of policies.
    """
    if not isinstance(batch, MultiAgentBatch):
        found: SampleBatch = batch
        return found
    (only,) = batch.policy_batches.values()
    return only
