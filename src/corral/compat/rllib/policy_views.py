"""Corral's modules as the policies of RLlib's older stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from corral.compat.rllib.modules import view_module
from corral.core.tree import map_tree
from corral.errors import ConfigError


class Policy:
    """A module with the methods of RLlib's older policies; everything else is the module's.

    Classes that derive from it are refused: an algorithm learns with its own loss.

    Attributes:
        model: The module of RLlib.
    """

    def __init__(self, native: Any) -> None:
        """Keep the module of Corral."""
        self._native = native
        self.model = view_module(native)

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

    def compute_actions(
        self, obs_batch: Any, state_batches: Any = None, *args: Any, explore: bool = True, **settings: Any
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """Return actions for observations `[B, ...]` as the module gives them, no states, and further outputs.

        Raises:
            ConfigError: The module has memory.
        """
        if self._native.has_memory():
            raise ConfigError("Policy.compute_actions: the module has memory: use Algorithm.compute_single_action.")
        forward = self.model.forward_exploration if explore else self.model.forward_inference
        with torch.no_grad():
            outputs = forward({"obs": map_tree(torch.as_tensor, obs_batch)})
        if "actions" in outputs:
            return np.asarray(outputs["actions"]), [], {}
        inputs = np.asarray(outputs["action_dist_inputs"], np.float32)
        distribution = self._native.distribution
        if not explore:
            return distribution.mode(inputs), [], {"action_dist_inputs": inputs}
        noise = distribution.noise(np.random.default_rng(np.random.randint(2**31)), (len(inputs),))
        return distribution.sample(inputs, noise), [], {"action_dist_inputs": inputs}

    def compute_single_action(
        self, obs: Any = None, state: Any = None, *args: Any, **settings: Any
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """Return an action for one observation as the module gives it, no state, and further outputs."""
        actions, states, outputs = self.compute_actions(map_tree(lambda leaf: np.asarray(leaf)[None], obs), **settings)
        return map_tree(lambda leaf: leaf[0], actions), states, {name: value[0] for name, value in outputs.items()}


def view_policy(native: Any) -> Policy:
    """Return the policy of a module of Corral, always the same one."""
    if (view := vars(native).get("_rllib_policy")) is None:
        view = vars(native)["_rllib_policy"] = Policy(native)
    found: Policy = view
    return found
