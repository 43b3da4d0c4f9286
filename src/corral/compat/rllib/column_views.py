"""Batches that callbacks of RLlib's older stack are given: Corral's columns under RLlib's names.

What is written into them is written into Corral's columns, so that it is learned from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from corral.compat.rllib.batch_infos import COLUMN, find_infos
from corral.compat.rllib.batches import MultiAgentBatch, SampleBatch, concat_samples
from corral.compat.rllib.constants import Columns
from corral.compat.rllib.policy_views import view_policy
from corral.core.returns import gae
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
ESTIMATES = {
    Columns.ADVANTAGES: "rllib_advantages",
    Columns.VALUE_TARGETS: "rllib_value_targets",
    Columns.VF_PREDS: "rllib_vf_preds",
}
"""Columns of a rollout that hold estimates of `on_postprocess_trajectory`, NaN where nobody looked at them."""


class ColumnView(SampleBatch):
    """A batch of RLlib whose columns are columns of Corral.

    Args:
        native: The columns by Corral's names.
        estimate: Returns advantages, value targets and values of a trajectory, by RLlib's names; `None` if they are
            columns, or cannot be estimated.
    """

    def __init__(self, native: Any, estimate: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Take the columns."""
        self._native, self._estimate = native, estimate
        columns = {_RLLIB.get(name, name): column for name, column in native.items()}
        if COLUMN in columns:
            columns[Columns.INFOS] = find_infos(columns.pop(COLUMN))
        super().__init__(columns)

    def __missing__(self, name: str) -> Any:
        """Return what is put together on request: `new_obs`, `infos` and `dones`."""
        if name == SampleBatch.DONES:
            return np.logical_or(self[Columns.TERMINATEDS], self[Columns.TRUNCATEDS])
        if name in ESTIMATES and self._estimate is not None:
            self._add_estimates()
            return self[name]
        return self._native[_NATIVE.get(name, name)]

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a column, which may be a new one.

        Raises:
            ColumnError: The column cannot be changed here.
        """
        if name in ESTIMATES and self._estimate is not None:
            self._add_estimates()
        native = ESTIMATES[name] if name in ESTIMATES and ESTIMATES[name] in self._native else _NATIVE.get(name, name)
        if name in ESTIMATES and native not in self._native:
            raise ColumnError(
                f"{name!r} is computed after on_postprocess_trajectory: change the rewards, or write a learner class "
                "with compute_loss_for_module."
            )
        if native in self._native:
            old = self._native[native]
            value = map_tree(lambda before, new: np.asarray(new, before.dtype), old, value)
        self._native[native] = value
        super().__setitem__(name, self._native[native])

    def _add_estimates(self) -> None:
        """Add the columns that the learner takes in place of its own estimates, so that writes into them count."""
        assert self._estimate is not None
        found, self._estimate = self._estimate(), None
        for name, value in found.items():
            self._native[ESTIMATES[name]] = np.asarray(value, np.float32)
            super().__setitem__(name, self._native[ESTIMATES[name]])


def estimates_of(episode: Any, actor: Any, config: Any) -> dict[str, Any]:
    """Return advantages, value targets and values `[len]` of an episode or chunk by GAE, with RLlib's names.

    Args:
        episode: The episode of one agent.
        actor: Who chose its actions, without memory; its transforms see one observation at a time.
        config: RLlib's config of the module.
    """
    obs, rewards = episode.get_observations(), np.asarray(episode.get_rewards())[:, None]
    if actor.transforms is not None:
        obs, rewards = actor.transforms.pipeline.from_stored(obs), actor.transforms.pipeline.rewards(rewards)
    rewards = rewards.astype(np.float32)
    with torch.inference_mode():
        values = actor.module.value(map_tree(torch.as_tensor, obs)).numpy().astype(np.float32)
    ended = np.zeros((2, *rewards.shape), np.bool_)
    ended[0, -1], ended[1, -1] = episode.is_terminated, episode.is_truncated
    advantages, targets = gae(
        *(rewards, values[:-1, None], values[1:, None], ended[0], ended[1], np.ones(rewards.shape, np.bool_)),
        gamma=config.gamma,
        lambda_=config.lambda_,
    )
    return {Columns.ADVANTAGES: advantages[:, 0], Columns.VALUE_TARGETS: targets[:, 0], Columns.VF_PREDS: values[:-1]}


def view_postprocessed(arguments: Mapping[str, Any]) -> ColumnView:
    """Return the batch of `on_postprocess_trajectory` for the arguments of the event."""
    runner, policy_id, agent_id = arguments["env_runner"], arguments["policy_id"], arguments["agent_id"]
    actor, config = runner.actors[policy_id], runner.config.origin.get_config_for_module(policy_id)
    can_estimate = config.ALGORITHM == "PPO" and not (
        actor.is_heuristic
        or actor.module.has_memory()
        or (actor.transforms is not None and actor.transforms.pipeline.is_temporal)
    )
    if not can_estimate:
        return ColumnView(arguments["postprocessed_batch"])
    episode = getattr(arguments["episode"], "agent_episodes", {agent_id: arguments["episode"]})[agent_id]
    return ColumnView(arguments["postprocessed_batch"], functools.partial(estimates_of, episode, actor, config))


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
