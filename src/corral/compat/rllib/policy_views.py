"""Corral's modules as the policies of RLlib's older stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from corral.compat.rllib.adapted_modules import view_module
from corral.core.action_masks import legal_actions
from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.exploration import RowDistribution


class Policy:
    """A module with the methods of RLlib's older policies; everything else is the module's.

    Scripts name the class in annotations. Classes that derive from it are refused: an algorithm learns
    with its own loss.

    Attributes:
        model: The module of RLlib.
        exploration: Exploration of the algorithm or runner that has the policy, or `None`.
        config: RLlib's config of it.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        """Refuse classes that derive from it.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"class {cls.__name__}(Policy): policy classes of RLlib's older stack are refused: write a TorchRLModule "
            "for a network, and a learner class with compute_loss_for_module for a loss."
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Any = None, policy_ids: Any = None) -> Any:
        """Refuse: a checkpoint holds modules.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "Policy.from_checkpoint: a checkpoint holds modules: use RLModule.from_checkpoint(path / 'learner_group' / "
            "'learner' / 'rl_module' / 'default_policy'), or Algorithm.from_checkpoint(path).get_policy()."
        )

    def __init__(self, native: Any) -> None:
        """Keep the module of Corral."""
        self._native = native
        self.model = view_module(native)
        self.exploration: Any = None
        self.config: Any = getattr(self.model, "config", {})
        self._timestep: Callable[[], int] = int

    def act_with(self, exploration: Any, config: Any, timestep: Callable[[], int]) -> Policy:
        """Choose actions with an exploration from now on, and return the policy.

        Args:
            exploration: An exploration for the module.
            config: RLlib's config, whose `explore` is the default.
            timestep: Returns the env steps of all runners so far.
        """
        self.exploration, self.config, self._timestep = exploration, config, timestep
        return self

    @property
    def global_timestep(self) -> int:
        """Env steps sampled so far by all runners."""
        return self._timestep()

    def get_exploration_state(self) -> dict[str, Any]:
        """Return the state of the exploration, with what changes over time as `cur_...`, such as `cur_epsilon`."""
        if self.exploration is None:
            return {}
        now = self.global_timestep
        changing = {f"cur_{name}": value for name, value in self.exploration.get_metrics(now).items()}
        return {**changing, **self.exploration.get_state(), "last_timestep": now}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.model, name)

    def get_weights(self) -> dict[str, Any]:
        """Return the weights by name."""
        found: dict[str, Any] = self.model.get_state()
        return found

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Set the weights by name."""
        self.model.set_state(weights)

    def get_initial_state(self) -> list[Any]:
        """Return the state before an episode as a list, such as `[h, c]`; empty without memory."""
        if not self._native.has_memory():
            return []
        return [np.asarray(value) for name, value in self._native.initial_state().items() if _is_of_policy(name)]

    def is_recurrent(self) -> bool:
        """Return whether the module has memory."""
        return bool(self._native.has_memory())

    def compute_actions(
        self,
        obs_batch: Any,
        state_batches: Any = None,
        *args: Any,
        explore: bool | None = None,
        timestep: int | None = None,
        **settings: Any,
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """Return actions for observations `[B, ...]` as the module gives them, no states, and further outputs.

        Args:
            obs_batch: Observations.
            state_batches: Not used.
            *args: Not used.
            explore: Whether the exploration chooses the actions; `None` is the setting `explore`.
            timestep: Env steps for the schedules of the exploration; `None` is the present number.
            **settings: Not used.

        Raises:
            ConfigError: The module has memory.
        """
        if self._native.has_memory():
            raise ConfigError("Policy.compute_actions: the module has memory: use Algorithm.compute_single_action.")
        explore = self.config.get("explore", True) if explore is None else explore
        with torch.no_grad():
            obs = map_tree(torch.as_tensor, obs_batch)
            forward = self.model.forward_exploration if explore else self.model.forward_inference
            outputs = forward({"obs": obs})
        if "actions" in outputs and not getattr(self.model, "IS_DEFAULT", False):
            return np.asarray(outputs["actions"]), [], {}
        row = RowDistribution(self._native.distribution, np.random.default_rng(np.random.randint(2**31)), self._native)
        row.obs, row.inputs = map_tree(np.asarray, obs_batch), np.asarray(outputs["action_dist_inputs"], np.float32)
        row.legal = legal_actions(row.obs) if self._native.has_action_mask else None
        return self._choose(row, explore, timestep), [], {"action_dist_inputs": row.inputs}

    def _choose(self, row: RowDistribution, explore: bool, timestep: int | None) -> Any:
        if self.exploration is None:
            return row.sample() if explore else row.mode()
        timestep = self.global_timestep if timestep is None else timestep
        actions, _ = self.exploration.get_exploration_action(
            action_distribution=row, timestep=timestep, explore=explore
        )
        return np.asarray(actions)

    def compute_single_action(
        self, obs: Any = None, state: Any = None, *args: Any, **settings: Any
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """Return an action for one observation as the module gives it, no state, and further outputs."""
        actions, states, outputs = self.compute_actions(map_tree(lambda leaf: np.asarray(leaf)[None], obs), **settings)
        return map_tree(lambda leaf: leaf[0], actions), states, {name: value[0] for name, value in outputs.items()}


def view_policy(native: Any) -> Policy:
    """Return the policy of a module of Corral, always the same one."""
    found: Policy = native.view_as(Policy)
    return found


def state_from_list(state: Sequence[Any], native: Any) -> dict[str, Any]:
    """Return a state of the older stack, a list such as `[h, c]`, by the names of a module.

    A separate value network has its own state, which comes last. It does not act, so a list may leave it out.

    Raises:
        ConfigError: The module has another number of states.
    """
    initial = native.initial_state() if native.has_memory() else {}
    needed = [name for name in initial if _is_of_policy(name)]
    if len(state) not in (len(needed), len(initial)):
        raise ConfigError(f"state: {len(state)} arrays in a list, but the module's states are {needed}.")
    found = {name: np.asarray(value) for name, value in initial.items()}
    return found | {name: np.asarray(value, found[name].dtype) for name, value in zip(found, state, strict=False)}


def _is_of_policy(name: str) -> bool:
    return not name.startswith("value_")
