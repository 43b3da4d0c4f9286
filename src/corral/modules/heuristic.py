"""Modules without a network: rules of a user, and uniform random actions. They play, and never learn."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import Tree, num_rows
from corral.modules.module import Module


class HeuristicModule(Module):
    """A module that chooses actions by rules, in NumPy. Subclasses define `choose_actions`.

    It has no weights, no exploration and no values, so it cannot learn: it is an opponent, a partner or a baseline.

    Example:
        ```python
        class AlwaysLeft(corral.HeuristicModule):
            def choose_actions(self, obs, rng):
                return np.zeros(len(obs), np.int64)
        ```
    """

    MUST_DEFINE: ClassVar[tuple[str, ...]] = ("choose_actions",)

    def choose_actions(self, obs: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Return module actions `[B, ...]` for observations, a tree of arrays `[B, ...]`.

        Args:
            obs: Observations of the agents that act now.
            rng: Generator for random choices, so that a run can be repeated.

        Returns:
            Actions as the module's `distribution` has them, of its `action_shape` and `action_dtype`: for Discrete
            spaces numbers from 0, for Box spaces the values of the space (before tanh with `action_bounds="squash"`).
        """
        raise TypeError(f"{type(self).__name__} has no method choose_actions(obs, rng) -> actions [B, ...].")


class RandomModule(HeuristicModule):
    """A module that draws actions uniformly from the action space."""

    def choose_actions(self, obs: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Return uniform actions `[B, ...]`."""
        return self.distribution.random(rng, num_rows(obs))
