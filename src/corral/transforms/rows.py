"""A pipeline in use: the transforms of one module with what they need of the earlier rows of N sub-envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import Tree
from corral.errors import CheckpointError
from corral.transforms.pipeline import History, Pipeline
from corral.transforms.rewards import discounted_returns
from corral.transforms.transform import State


class RowTransforms:
    """Applies a pipeline to one row of observations after another, and measures fragments.

    Args:
        pipeline: The pipeline.
        action: A module action of zeros.
        num_rows: Number of observations in a row: N sub-envs, or the lanes of agents.

    Attributes:
        pipeline: The pipeline; its statistics may be replaced between two fragments.
    """

    def __init__(self, pipeline: Pipeline, action: NDArray[Any], num_rows: int) -> None:
        """Begin without any episode."""
        self.pipeline = pipeline
        self._action, self._is_temporal = action, pipeline.is_temporal
        self._returns = {discount: np.zeros(num_rows) for discount in pipeline.discounts}

    def set_state(self, state: Mapping[str, State]) -> None:
        """Use other statistics from now on."""
        self.pipeline = self.pipeline.with_state(state)

    def __call__(self, obs: Tree, begins: NDArray[np.bool_]) -> Tree:
        """Return the observations of one row, a tree of `[N, ...]`, as the module sees them."""
        return self.pipeline.batch(obs)

    def history(self) -> History | None:
        """Return what the transforms need besides the columns of the fragment that was sampled."""
        return None

    def measure(
        self,
        obs: Tree,
        rewards: NDArray[Any],
        valid: NDArray[np.bool_],
        done: NDArray[np.bool_],
        history: History | None,
        *,
        continues: bool,
    ) -> dict[str, State]:
        """Return the statistics of a fragment alone, and go on to the next one.

        Args:
            obs: Observations of the env, a tree of `[T + 1, N, ...]`.
            rewards: Rewards of the env, `[T, N]`.
            valid: Which steps count, bool `[T, N]`.
            done: Which steps ended an episode, bool `[T, N]`.
            history: See `History`.
            continues: Whether row 0 continues the fragment before.
        """
        returns = {}
        for discount, before in self._returns.items():
            start = _padded(before, valid.shape[1]) if continues else np.zeros(valid.shape[1])
            returns[discount], self._returns[discount] = discounted_returns(rewards, valid, done, start, discount)
        return self.pipeline.measure(obs, {}, history, valid, returns)

    # What a checkpoint holds of it.

    def get_state(self) -> dict[str, Any]:
        """Return a copy of what the next fragment continues from, without the statistics, as plain data."""
        return {"returns": [returns.copy() for returns in self._returns.values()]}

    def check_runner_state(self, state: Mapping[str, Any]) -> None:
        """Check what `get_state` of another runner returned.

        Raises:
            CheckpointError: It is of other transforms.
        """
        if len(state["returns"]) != len(self._returns):
            raise CheckpointError("the returns that a runner keeps for its transforms are of other transforms.")

    def set_runner_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `get_state` returned."""
        self._returns = {
            discount: returns.copy() for discount, returns in zip(self._returns, state["returns"], strict=True)
        }


def _padded(array: NDArray[Any], length: int) -> NDArray[Any]:
    """Return an array with zeros at its end: lanes may have been added."""
    if len(array) == length:
        return array
    return np.concatenate([array, np.zeros((length - len(array), *array.shape[1:]), array.dtype)])
