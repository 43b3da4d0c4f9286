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
from corral.core.ids import AgentID
from corral.core.tree import Tree, map_tree, named_leaves
from corral.data.episodes.lane_rollout import LaneRollout
from corral.data.episodes.rollout import Rollout
from corral.errors import SampleError

if TYPE_CHECKING:
    from corral.modules.distributions import ActionDistribution

_OF_DEVICE = ("rewards", "terminated", "truncated")
"""Columns of which a complete rollout has a copy on the host: returns and ends of episodes are counted there."""


class TensorRollout(Rollout):
    """The columns of one `sample()` call as tensors on the device of the env, with time T on axis 0.

    `valid` and `row_times_s` are arrays, which Python writes and reads. Every sub-env acts in every row, and is reset
    in the step that ends its episode. `to_arrays` returns the rollout as others have it, with episodes and callbacks.

    With several agents there is such a rollout for each module, whose N lanes are its agents in sub-env 0, in sub-env
    1, and so on; and while a runner writes them, one of the env steps, which holds them.

    Attributes:
        modules: In a rollout of env steps, the rollouts of the modules by module id; otherwise empty.
        lane_envs: In the rollout of a module, the index of the sub-env of each lane, int64 `[N]`.
        lane_agents: In the rollout of a module, the agent of each lane, N ids; `None` if there is one agent.
        module_id: Id of the module.
        parent: Rollout of the env steps, as in `LaneRollout`.
        finals: Final observations of each row, trees of tensors `[N, ...]` that count where an episode ended; `None`
            where the env gave none.
        before: In a rollout of `transformed()`, the rollout before, and its transforms; else `None`.
    """

    __slots__ = ("before", "finals", "lane_agents", "lane_envs", "module_id", "modules", "parent")

    lane_envs: NDArray[np.int64]
    parent: Any

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take columns with room for as many rows as `rewards` has."""
        super().__init__(columns, num_rows=num_rows)
        self.same_step = True
        self.finals: list[Tree] = []
        self.before: tuple[TensorRollout, Callable[[Tree], Tree]] | None = None
        self.modules: dict[str, TensorRollout] = {}
        self.lane_agents: list[AgentID] | None = None
        self.module_id = ""

    @classmethod
    def of_steps(cls, num_rows: int, num_envs: int, device: torch.device) -> TensorRollout:
        """Return a rollout with uninitialised columns of rewards and flags for `num_rows` rows."""
        return cls(empty_steps((num_rows, num_envs), device))

    def add_choices(self, space: Tree, distribution: ActionDistribution) -> None:
        """Add uninitialised columns of observations, actions and outputs of the policy; see `Rollout.allocate`."""
        device, (num_rows, num_lanes) = self.rewards.device, self.rewards.shape

        def empty(num_rows: int, shape: tuple[int, ...], dtype: Any) -> Tensor:
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
            return torch.empty((num_rows, num_lanes, *shape), dtype=dtype, device=device)

        self.columns |= {
            "obs": map_tree(lambda leaf: empty(num_rows + 1, leaf.shape, leaf.dtype), space),
            "actions": empty(num_rows, distribution.action_shape, distribution.action_dtype),
            "dist_inputs": empty(num_rows, (distribution.num_inputs,), np.float32),
        }

    def resize(self, capacity: int) -> None:
        """Give the columns, and the columns of the modules, room for `capacity` rows; the rows so far are kept."""
        super().resize(capacity)
        for part in self.modules.values():
            part.num_rows = self.num_rows
            part.resize(capacity)

    def take_steps(self, steps: TensorRollout, num_agents: int) -> None:
        """Complete the rollout of a module whose `num_agents` agents end together, from the one of the env steps."""
        self.num_rows = steps.num_rows
        for name in ("terminated", "truncated"):
            self.columns[name] = steps.columns[name].repeat_interleave(num_agents, 1)
        self.valid[:], self.row_times_s[:] = steps.valid.repeat(num_agents, 1), steps.row_times_s
        self.worker_index, self.weights_version = steps.worker_index, steps.weights_version
        self.continues, self.num_env_steps = steps.continues, int(np.count_nonzero(self.valid))
        self.copy_to_host()

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
        found = Rollout(columns, num_rows=self.num_rows)
        if self.lane_agents is not None:  # its lanes have the rows of the env
            found = LaneRollout(columns, num_rows=self.num_rows)
            found.lane_envs, found.lane_agents, found.module_id = self.lane_envs, self.lane_agents, self.module_id
            found.lane_rows = np.full(self.num_envs, self.num_rows)
            found.obs_rows = np.repeat(np.arange(self.num_rows + 1)[:, None], self.num_envs, 1)
        found.take_facts(self)
        if self.finals:  # a blank rollout has none
            rows, envs = np.nonzero(found.done)
            entries = map_tree(_to_array, self._finals_at(rows, envs))
            for index, place in enumerate(zip(rows.tolist(), envs.tolist(), strict=True)):
                found.add_final_obs(*place, map_tree(lambda leaf, index=index: leaf[index], entries))
        return found

    def chunks(self) -> list[tuple[int, Any]]:
        """Return the episodes as `episodes` does, each in a pair with its first row; the columns are copied for it."""
        return self.to_arrays().chunks()

    # Checks, on the device.

    def is_finite(self) -> bool:
        """Return whether all observations and rewards that were written are finite; one transfer for all of them."""
        columns = [leaf[: self.num_rows + 1] for _, leaf in named_leaves(self.obs)]
        if self.finals:
            ends = np.nonzero(self.done[: self.num_rows])
            columns += [leaf for _, leaf in named_leaves(self._finals_at(*ends))]
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
        seen.columns, seen.pipeline, seen.before = {**self.columns, "obs": obs}, None, (self, form)
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
            indices = (torch.from_numpy(index).to(device) for index in (rows, envs))
            next_values[tuple(indices)] = value_fn(self._finals_at(rows, envs)).to(device)
        return values[:-1], next_values

    def next_obs(self) -> Tree:
        """Return what the steps led to, a tree of `[T, N, ...]`: where episodes ended, the final observations."""
        rows, envs = np.nonzero(self.done)
        places = torch.from_numpy(rows * self.num_envs + envs).to(self.rewards.device)

        def replace(column: Tensor, final: Tensor) -> Tensor:
            return column[1:].flatten(0, 1).index_copy(0, places, final).reshape(column[1:].shape)

        return map_tree(replace, self.obs, self._finals_at(rows, envs))

    def _finals_at(self, rows: NDArray[np.int64], envs: NDArray[np.int64]) -> Tree:
        """Return the final observations of episodes that ended in rows of sub-envs, a tree of `[K, ...]`.

        If the env gave none, they are those from which the last actions were chosen.
        """
        if self.before is not None:
            rollout, form = self.before
            return form(rollout._finals_at(rows, envs))
        used, place_of_row = np.unique(rows, return_inverse=True)
        given = [self.finals[row] for row in used.tolist()]
        if not given:
            return map_tree(lambda column: column[0, :0], self.obs)
        if any(final is None for final in given):
            warn_of_missing_finals()
            given = [
                map_tree(lambda column, row=row: column[row], self.obs) if final is None else final
                for row, final in zip(used.tolist(), given, strict=True)
            ]
        places = place_of_row * self.num_envs + envs
        return map_tree(lambda *leaf: _take(torch.stack(leaf).flatten(0, 1), places), *given)

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
