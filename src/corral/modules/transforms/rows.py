"""A pipeline in use: the transforms of one module with what they remember of N sub-envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.core.tree import Tree, map_tree
from corral.errors import CheckpointError
from corral.modules.transforms.pipeline import Pipeline
from corral.modules.transforms.rewards import discounted_returns
from corral.modules.transforms.transform import State


class RowTransforms:
    """Applies a pipeline to one row of observations after another, and measures fragments.

    Args:
        pipeline: The pipeline.
        action: A module action of zeros.
        num_rows: Number of observations in a row: N sub-envs, or the lanes of agents.

    Attributes:
        pipeline: The pipeline; its statistics may be replaced between two fragments.
        is_temporal: Whether a transform remembers earlier rows.
        stored: Observations of the latest row after the last temporal transform, if there is one.
    """

    stored: Tree

    def __init__(self, pipeline: Pipeline, action: NDArray[Any], num_rows: int) -> None:
        """Begin without any episode."""
        self.pipeline, self._action = pipeline, action
        self.is_temporal, self._needs_actions = pipeline.is_temporal, pipeline.needs_actions
        self.restart(num_rows)

    def restart(self, num_rows: int) -> None:
        """Forget all episodes, and have `num_rows` observations in a row from now on."""
        self._memories = self.pipeline.initial_memories(num_rows)
        self._actions = np.zeros((num_rows, *self._action.shape), self._action.dtype)
        self._rewards = np.zeros(num_rows)
        self._returns = {name: np.zeros(num_rows) for name in self.pipeline.discounts}

    def set_state(self, state: Mapping[str, State], gamma: float) -> None:
        """Use other statistics, and the discount that the algorithm has now, from now on."""
        self.pipeline = self.pipeline.with_state(state).with_gamma(gamma)

    # Rows.

    def __call__(self, obs: Tree, begins: NDArray[np.bool_], acts: NDArray[np.bool_] | None = None) -> Tree:
        """Return the observations of one row, a tree of `[N, ...]`, as the module sees them.

        Args:
            obs: Observations of the env.
            begins: Where episodes begin, bool `[N]`.
            acts: Where an action is chosen now, bool `[N]`; nothing is remembered elsewhere. `None` is everywhere.
        """
        if self.is_temporal:
            obs, memories = self.pipeline.to_store(obs, self._memories, begins, self._actions, self._rewards)
            self.stored = obs
            if acts is not None:
                memories = map_tree(lambda after, before: _where(acts, after, before), memories, self._memories)
            self._memories = memories
        return self.pipeline.from_stored(obs)

    def peek(self, obs: Tree, begins: NDArray[np.bool_]) -> Tree:
        """Return the next row after the last temporal transform, and remember nothing of it."""
        return self.pipeline.to_store(obs, self._memories, begins, self._actions, self._rewards)[0]

    def allocate(self, num_rows: int) -> Tree:
        """Return a column for observations after the last temporal transform, a tree of `[num_rows, N, ...]`."""
        num_lanes = len(self._rewards)
        blank = self.peek(self.pipeline.example_rows(num_lanes), np.ones(num_lanes, np.bool_))
        return map_tree(lambda leaf: np.repeat(leaf[None], num_rows, 0), blank)

    def note_step(
        self, actions: NDArray[Any] | None, rewards: NDArray[Any] | None, lanes: NDArray[np.int64] | slice
    ) -> None:
        """Remember the module actions or the rewards of some lanes, which the next observations follow."""
        if self._needs_actions:
            if actions is not None:
                self._actions = self._actions.copy()
                self._actions[lanes] = actions
            if rewards is not None:
                self._rewards = self._rewards.copy()
                self._rewards[lanes] = rewards

    def resize(self, num_rows: int) -> None:
        """Add lanes, in which no episode has begun."""
        more = num_rows - len(self._rewards)
        fresh = self.pipeline.initial_memories(more)
        self._memories = map_tree(lambda old, new: np.concatenate([old, new]), self._memories, fresh)
        self._actions, self._rewards = _padded(self._actions, num_rows), _padded(self._rewards, num_rows)
        self._returns = {name: _padded(returns, num_rows) for name, returns in self._returns.items()}

    # Fragments.

    def measure(
        self,
        obs: Tree,
        stored: Tree,
        rewards: NDArray[Any],
        valid: NDArray[np.bool_],
        over: NDArray[np.bool_],
        *,
        continues: bool,
    ) -> dict[str, State]:
        """Return the statistics of a fragment alone, and continue with the next one.

        Args:
            obs: Observations of the env, a tree of `[T + 1, N, ...]`, arrays or tensors.
            stored: Observations after the last temporal transform, a tree of `[T + 1, N, ...]`.
            rewards: Rewards of the env, `[T, N]`.
            valid: Which steps count, bool `[T, N]`.
            over: After which rows an episode was over, bool `[T, N]`; see `Rollout.over`.
            continues: Whether row 0 continues the fragment before.
        """
        if not self.pipeline.state:
            return {}
        returns = {}
        for name, discount in self.pipeline.discounts.items():
            start = self._returns[name] if continues else np.zeros_like(self._returns[name])
            received = self.pipeline.rewards(rewards, until=name)
            found, after = discounted_returns(received, valid, over, start, discount)
            returns[name], self._returns = found[valid], {**self._returns, name: after}
        rows = np.flatnonzero(valid)
        given = obs if self.pipeline.measures_env_obs else ()
        of_env, steps = map_tree(lambda leaf: _taken(leaf.reshape(-1, *leaf.shape[2:]), rows), (given, stored))
        return self.pipeline.measure(of_env, steps, returns)

    # What a checkpoint holds of it.

    def get_state(self) -> dict[str, Any]:
        """Return a copy of what the next fragment continues from, without the statistics, as plain data."""
        return {
            "memories": [map_tree(np.copy, memory) for memory in self._memories],
            "actions": self._actions.copy(),
            "rewards": self._rewards.copy(),
            "returns": [returns.copy() for returns in self._returns.values()],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check what `get_state` of another runner returned.

        Raises:
            CheckpointError: It is of other transforms.
        """
        num_rows = len(state["rewards"])
        here = self.pipeline.initial_memories(num_rows), np.zeros((num_rows, *self._action.shape), self._action.dtype)
        try:
            map_tree(_check_alike, here, (tuple(state["memories"]), state["actions"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"what the transforms of a runner remember is of other transforms: {error}"
            ) from error
        if len(state["returns"]) != len(self._returns):
            raise CheckpointError("the returns that a runner keeps for its transforms are of other transforms.")

    @staticmethod
    def check(transforms: RowTransforms | None, state: Mapping[str, Any] | None) -> None:
        """Check the state of transforms, or that there are none here and in a state.

        Raises:
            CheckpointError: There are transforms on one side only, or others.
        """
        if (transforms is None) != (state is None):
            here, there = ("no transforms", "a module with") if transforms is None else ("transforms", "one without")
            raise CheckpointError(f"the module has {here}, and the state of a runner is of {there}.")
        if transforms is not None and state is not None:
            transforms.check_state(state)

    def continue_from(self, state: Mapping[str, Any], lanes: Any = slice(None)) -> None:
        """Continue from what `get_state` returned, in these lanes."""

        def set_lanes(here: NDArray[Any], saved: NDArray[Any]) -> NDArray[Any]:
            found = here.copy()
            found[lanes] = saved
            return found

        self._memories = map_tree(set_lanes, self._memories, tuple(state["memories"]))
        self._actions, self._rewards = (
            set_lanes(self._actions, state["actions"]),
            set_lanes(self._rewards, state["rewards"]),
        )
        pairs = zip(self._returns.items(), state["returns"], strict=True)
        self._returns = {name: set_lanes(here, saved) for (name, here), saved in pairs}


def _taken(leaf: Any, rows: NDArray[np.int64]) -> Any:
    """Return the rows of an array, or of a tensor, `[B, ...]`."""
    if isinstance(leaf, Tensor):
        return leaf.index_select(0, torch.from_numpy(rows).to(leaf.device))
    return leaf.take(rows, 0)  # several times faster than a mask


def _where(acts: NDArray[np.bool_], after: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
    return np.where(acts.reshape(-1, *(1,) * (after.ndim - 1)), after, before)


def _check_alike(here: NDArray[Any], saved: NDArray[Any]) -> None:
    if here.shape != saved.shape or here.dtype != saved.dtype:
        raise ValueError(f"{saved.dtype}{list(saved.shape)} is not {here.dtype}{list(here.shape)}")


def _padded(array: NDArray[Any], length: int) -> NDArray[Any]:
    """Return an array with zeros at its end."""
    return np.concatenate([array, np.zeros((length - len(array), *array.shape[1:]), array.dtype)])
