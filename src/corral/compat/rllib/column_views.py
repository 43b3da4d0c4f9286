"""Batches that callbacks of RLlib's older stack are given: Corral's columns under RLlib's names.

What is written into them is written into Corral's columns, so that it is learned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from corral.compat.rllib.batches import MultiAgentBatch, SampleBatch, concat_samples
from corral.compat.rllib.constants import Columns
from corral.compat.rllib.policy_views import view_policy
from corral.core.tree import map_tree
from corral.errors import ColumnError

AGENT = "agent0"
"""RLlib's id of the agent of an env with a single one."""

_NATIVE = {
    Columns.TERMINATEDS: "terminated",
    Columns.TRUNCATEDS: "truncated",
    Columns.ACTION_LOGP: "logp",
    Columns.ACTION_DIST_INPUTS: "dist_inputs",
    Columns.VF_PREDS: "values",
    Columns.NEXT_OBS: "next_obs",
    Columns.VALUE_TARGETS: "value_targets",
}
_RLLIB = {native: name for name, native in _NATIVE.items()}
_COMPUTED_LATER = (Columns.ADVANTAGES, Columns.VALUE_TARGETS, Columns.VF_PREDS)


class ColumnView(SampleBatch):
    """A batch of RLlib whose columns are columns of Corral.

    Args:
        native: The columns by Corral's names.
    """

    def __init__(self, native: Any) -> None:
        """Take the columns."""
        self._native = native
        super().__init__({_RLLIB.get(name, name): column for name, column in native.items()})

    def __missing__(self, name: str) -> Any:
        """Return what is put together on request: `new_obs`, `infos` and `dones`."""
        if name == SampleBatch.DONES:
            return np.logical_or(self[Columns.TERMINATEDS], self[Columns.TRUNCATEDS])
        return self._native[_NATIVE.get(name, name)]

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a column, which may be a new one.

        Raises:
            ColumnError: The column cannot be changed here.
        """
        native = _NATIVE.get(name, name)
        if name in _COMPUTED_LATER and native not in self._native:
            raise ColumnError(
                f"{name!r} is computed after on_postprocess_trajectory: change the rewards, or write a learner class "
                "with compute_loss_for_module."
            )
        if native in self._native:
            old = self._native[native]
            value = map_tree(lambda before, new: np.asarray(new, before.dtype), old, value)
        self._native[native] = value
        super().__setitem__(name, self._native[native])


class Samples(list[Any]):
    """The episodes and chunks of one `sample()` call; also with the names of the batches of the older stack.

    Args:
        native: The rollout.
    """

    def __init__(self, native: Any) -> None:
        """Take the rollout."""
        super().__init__(native.episodes())
        self._native = native

    @property
    def count(self) -> Any:
        """Number of env steps."""
        return self.env_steps()

    def env_steps(self) -> int:
        """Return the number of env steps."""
        return sum(episode.env_steps() for episode in self)

    def agent_steps(self) -> int:
        """Return the number of steps of all agents together."""
        return sum(episode.agent_steps() for episode in self)

    @property
    def policy_batches(self) -> dict[str, SampleBatch]:
        """Copies of the columns, by policy."""
        parts: dict[str, list[Any]] = {}
        for episode in self:
            for part in getattr(episode, "agent_episodes", {AGENT: episode}).values():
                batch = {name: part.get_extra_model_outputs(name) for name in part.extra_model_outputs}
                batch |= {Columns.OBS: part.get_observations(slice(0, len(part))), Columns.ACTIONS: part.get_actions()}
                batch |= {Columns.REWARDS: part.get_rewards(), Columns.INFOS: part.get_infos(slice(1, None))}
                parts.setdefault(part.module_id or "default_policy", []).append(SampleBatch(batch))
        return {policy_id: concat_samples(batches) for policy_id, batches in parts.items()}

    def as_multi_agent(self) -> MultiAgentBatch:
        """Return copies of the columns, by policy."""
        return MultiAgentBatch(self.policy_batches, self.env_steps())

    def __getitem__(self, key: Any) -> Any:
        """Return an episode; by a name, a copy of a column of an env with a single agent."""
        if isinstance(key, str):
            (only,) = self.policy_batches.values()
            return only[key]
        return super().__getitem__(key)


def view_originals(originals: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the trajectories of all agents as they were sampled: pairs of a policy and a batch, by agent."""
    return {
        view_agent(agent_id): (view_policy(module), ColumnView(dict(columns)))
        for agent_id, (module, columns) in originals.items()
    }


def view_agent(agent_id: Any) -> Any:
    """Return RLlib's id of an agent."""
    return AGENT if agent_id == "default_agent" else agent_id
