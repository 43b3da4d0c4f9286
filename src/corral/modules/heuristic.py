"""Modules without a network: rules of a user, and uniform random actions. They play, and never learn."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from corral.core.action_masks import MASK_KEY, first_illegal, legal_actions
from corral.core.spaces import first_outside
from corral.core.tree import Tree, num_rows
from corral.errors import ConfigError
from corral.modules.distributions import module_action_space, uniform_logits
from corral.modules.module import Module


class HeuristicModule(Module):
    """A module that chooses actions by rules, in NumPy. Subclasses define `choose_actions`.

    It has no weights, no exploration and no values, so it cannot learn: it is an opponent, a partner or a baseline.

    Example::

        class AlwaysLeft(corral.HeuristicModule):
            def choose_actions(self, obs, rng):
                return np.zeros(len(obs), np.int64)
    """

    MUST_DEFINE: ClassVar[tuple[str, ...]] = ("choose_actions",)

    def choose_actions(self, obs: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Return module actions `[B, ...]` for observations, a tree of arrays `[B, ...]`.

        Args:
            obs: Observations of the agents that act now.
            rng: Generator for random choices, so that a run can be repeated.

        Returns:
            Actions as the module's `distribution` has them, of its `action_shape` and `action_dtype`: for Discrete
            spaces numbers from 0, for Box spaces numbers in [-1, 1], which are clipped and mapped to the bounds (before
            tanh with `action_bounds="squash"`). Dimensions without two finite bounds have the units of the env, and so
            have all of them with `normalize_actions=False`.
        """
        raise TypeError(f"{type(self).__name__} has no method choose_actions(obs, rng) -> actions [B, ...].")

    def checked_actions(self, obs: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Return what `choose_actions` returns, with the dtype of module actions.

        Raises:
            ConfigError: The shape, the dtype or a value does not fit.
        """
        name, form = f"{type(self).__name__}.choose_actions", self.distribution
        actions, shape = np.asarray(self.choose_actions(obs, rng)), (num_rows(obs), *form.action_shape)
        if actions.shape != shape or not np.can_cast(actions.dtype, form.action_dtype, "same_kind"):
            raise ConfigError(
                f"{name} must return {np.dtype(form.action_dtype)} actions of shape {shape}, got {actions.dtype} "
                f"actions of shape {actions.shape}."
            )
        space = module_action_space(self.action_space)
        if (index := first_outside(space, actions)) is not None:
            raise ConfigError(f"{name} returned the action {actions[index].tolist()}, which is outside {space}.")
        if self.has_action_mask and (row := first_illegal(legal_actions(obs), space, actions)) is not None:
            raise ConfigError(f"{name} returned the action {actions[row].tolist()}, which {MASK_KEY} does not allow.")
        return actions.astype(form.action_dtype, copy=False)


class RandomModule(HeuristicModule):
    """A module that draws actions uniformly from the action space."""

    def choose_actions(self, obs: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Return uniform actions `[B, ...]`; only legal ones, if observations hold a mask."""
        if not self.has_action_mask:
            return self.distribution.random(rng, num_rows(obs))
        legal = legal_actions(obs)
        noise = self.distribution.noise(rng, (len(legal),))
        actions: NDArray[Any] = self.distribution.sample(uniform_logits(legal), noise)
        return actions
