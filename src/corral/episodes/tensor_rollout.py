"""The rollout of an env whose data are tensors: its columns stay on the device of the env."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.core.devices import warn_of_missing_finals
from corral.core.tree import Tree, map_tree, named_leaves
from corral.episodes.rollout import Rollout
from corral.errors import SampleError

if TYPE_CHECKING:
    from corral.modules.distributions import ActionDistribution

_OF_DEVICE = ("rewards", "terminated", "truncated")
"""Columns of which a complete rollout has a copy on the host: returns and ends of episodes are counted there."""


class TensorRollout(Rollout):
    """The columns of one `sample()` call as tensors on the device of the env, with time T on axis 0.

    `valid` and `row_times_s` are arrays, which Python writes and reads. Every sub-env acts in every row, and is reset
    in the step that ends its episode. `to_arrays` returns the rollout as others have it, with episodes and callbacks.

    Attributes:
        finals: Final observations of each row, trees of tensors `[N, ...]` that count where an episode ended; `None`
            where the env gave none.
        form_of_finals: Transforms of the final observations, in a rollout of `transformed()`; else `None`.
    """

    __slots__ = ("finals", "form_of_finals")

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take columns with room for as many rows as `rewards` has."""
        super().__init__(columns, num_rows=num_rows)
        self.same_step = True
        self.finals: list[Tree] = []
        self.form_of_finals: Callable[[Tree], Tree] | None = None

    @classmethod
    def on_device(
        cls, num_rows: int, num_envs: int, space: Tree, distribution: ActionDistribution, device: torch.device
    ) -> TensorRollout:
        """Return a rollout with uninitialised columns for `num_rows` rows; see `Rollout.allocate`."""
        shape = (num_rows, num_envs)

        def empty(shape: tuple[int, ...], dtype: Any) -> Tensor:
            return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=device)

        return cls(
            {
                "obs": map_tree(lambda leaf: empty((num_rows + 1, num_envs, *leaf.shape), leaf.dtype), space),
                "actions": empty((*shape, *distribution.action_shape), distribution.action_dtype),
                **empty_steps(shape, device),
                "dist_inputs": empty((*shape, distribution.num_inputs), np.float32),
            }
        )

    # On the host.

    def copy_to_host(self) -> Rollout:
        """Copy rewards and flags to the host, and return them as `host`."""
        columns = {name: self.columns[name][: self.num_rows].cpu().numpy() for name in _OF_DEVICE}
        columns["rewards"] = columns["rewards"].astype(np.float64)
        columns |= {name: self.columns[name][: self.num_rows] for name in ("valid", "row_times_s")}
        self.host = Rollout(columns, num_rows=self.num_rows)
        self.host.same_step = True
        return self.host

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether a step terminated or truncated its episode, bool `[T, N]`, on the host."""
        if self.host is not None:
            return self.host.done
        found: NDArray[np.bool_] = (self.terminated | self.truncated).cpu().numpy()
        return found

    def unfinished_in(self, row: int) -> NDArray[np.bool_]:
        """Return where an episode continues after a valid step in a row that is written, bool `[N]`."""
        ended: NDArray[np.bool_] = (self.terminated[row] | self.truncated[row]).cpu().numpy()
        unfinished: NDArray[np.bool_] = self.valid[row] & ~ended
        return unfinished

    def to_arrays(self) -> Rollout:
        """Return the complete rollout with arrays as columns; each column is copied to the host once."""
        columns = {name: map_tree(_to_array, column) for name, column in self.columns.items()}
        columns["rewards"] = columns["rewards"].astype(np.float64)
        found = self.make_rollout(columns)
        for name in (*Rollout.__slots__, "action_space", "observation_space", "info_rows"):
            setattr(found, name, getattr(self, name))
        found.host = None
        ends = found.done if self.finals else np.zeros((0, 0), np.bool_)
        for row in np.flatnonzero(ends.any(1)).tolist():
            envs = np.flatnonzero(ends[row])
            rows = map_tree(lambda leaf, envs=envs: _to_array(_take(leaf, envs)), self._final(row))
            for index, env_index in enumerate(envs.tolist()):
                found.add_final_obs(row, env_index, map_tree(lambda leaf, index=index: leaf[index], rows))
        return found

    def make_rollout(self, columns: dict[str, Tree]) -> Rollout:
        """Return a rollout of arrays with columns, which `to_arrays` completes."""
        return Rollout(columns, num_rows=self.num_rows)

    def chunks(self) -> list[tuple[int, Any]]:
        """Return the episodes as `episodes` does, each in a pair with its first row; the columns are copied for it."""
        return self.to_arrays().chunks()

    # Checks, on the device.

    def is_finite(self) -> bool:
        """Return whether all observations and rewards that were written are finite; one transfer for all of them."""
        columns = [leaf[: self.num_rows + 1] for _, leaf in named_leaves(self.obs)]
        done = self.done[: self.num_rows] if self.finals else np.zeros((0, 0), np.bool_)
        for row in np.flatnonzero(done.any(1)).tolist():
            columns += [_take(leaf, np.flatnonzero(done[row])) for _, leaf in named_leaves(self._final(row))]
        floats = [column for column in (*columns, self.rewards[: self.num_rows]) if column.is_floating_point()]
        flags = [column.isfinite().all() for column in floats]
        return bool(torch.stack(flags).all())

    # Batches.

    def transformed(self) -> Rollout:
        """Return the rollout with observations and rewards after the transforms; see `Rollout.transformed`."""
        if self.pipeline is None:
            return self
        seen, form = copy.copy(self), self.pipeline.tensor_form(self.rewards.device)
        rows = form(map_tree(lambda column: column.flatten(0, 1), self.obs))
        obs = map_tree(lambda leaf: leaf.unflatten(0, (-1, self.num_envs)), rows)
        seen.columns, seen.pipeline, seen.form_of_finals = {**self.columns, "obs": obs}, None, form
        seen.observation_space = self.pipeline.module_space
        if self.pipeline.changes_rewards:
            seen.columns["rewards"] = (self.reward_pipeline or self.pipeline).rewards(self.rewards)
        return seen

    def compute_values(self, value_fn: Callable[..., Any]) -> tuple[Any, Any]:
        """Return V(s_t), and V of the observation that step t led to, both `[T, N]`; see `Rollout.compute_values`."""
        device = self.rewards.device  # the learner may have another one
        flat = value_fn(map_tree(lambda column: column.flatten(0, 1), self.obs))
        values = flat.reshape(-1, self.num_envs).to(device)
        rows, envs = np.nonzero(self.done)
        next_values = values[1:]
        if len(rows):
            next_values = next_values.clone()
            counts = np.cumsum(np.bincount(rows, minlength=self.num_rows))[:-1]
            taken = [
                map_tree(lambda leaf, envs=envs_of_row: _take(leaf, envs), self._final(row))
                for row, envs_of_row in enumerate(np.split(envs, counts))
                if len(envs_of_row)
            ]
            finals = map_tree(lambda *leaf: torch.cat(leaf), *taken)
            if self.form_of_finals is not None:
                finals = self.form_of_finals(finals)
            indices = (torch.from_numpy(index).to(device) for index in (rows, envs))
            next_values[tuple(indices)] = value_fn(finals).to(device)
        return values[:-1], next_values

    def next_obs(self) -> Tree:
        """Return what the steps led to, a tree of `[T, N, ...]`: where episodes ended, the final observations."""
        found = map_tree(lambda column: column[1:].clone(), self.obs)
        done = self.terminated | self.truncated
        for t in np.flatnonzero(self.done.any(1)).tolist():

            def replace(column: Tensor, final: Tensor, t: int = t) -> None:
                ended = done[t].reshape(-1, *[1] * (final.ndim - 1))
                column[t] = torch.where(ended, final, column[t])

            map_tree(replace, found, self._final(t))
        return found

    def _final(self, row: int) -> Tree:
        """Return the final observations of a row in which an episode ended, a tree of `[N, ...]`, before transforms.

        If the env gave none, they are those from which the last actions were chosen.
        """
        if self.finals[row] is not None:
            return self.finals[row]
        warn_of_missing_finals()
        return map_tree(lambda column: column[row], self.obs)

    def valid_rows(self, column: Tree, *, by_lane: bool = False) -> Tree:
        """Return the valid steps of a column `[T, N, ...]` as `[B, ...]`, in the order of time.

        Raises:
            SampleError: They are asked for by lane, which modules with memory do, and these sample arrays.
        """
        if by_lane:
            raise SampleError("valid_rows: a rollout of tensors has no order by lane; use to_arrays() first.")
        flat = map_tree(lambda leaf: leaf.flatten(0, 1), column)
        if self.valid.all():
            return flat
        return map_tree(lambda leaf: _take(leaf, np.flatnonzero(self.valid)), flat)


def empty_steps(shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Return uninitialised columns `[T, N]` of rewards and flags on a device, and the columns of the host."""
    flags = {name: torch.empty(shape, dtype=torch.bool, device=device) for name in ("terminated", "truncated")}
    host = {"valid": np.empty(shape, np.bool_), "row_times_s": np.empty(shape[0])}
    return {"rewards": torch.empty(shape, device=device), **flags, **host}


def _to_array(column: Any) -> Any:
    return column.cpu().numpy() if isinstance(column, Tensor) else column


def _take(leaf: Tensor, indices: NDArray[np.int64]) -> Tensor:
    """Return the entries of a tensor `[N, ...]` at indices that the host knows."""
    return leaf.index_select(0, torch.from_numpy(indices).to(leaf.device))
