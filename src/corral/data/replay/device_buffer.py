"""A replay buffer on the device of an env of tensors: the same ring, whose columns are tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from corral.core.tree import Tree
from corral.data.replay.buffer import NumSteps, ReplayBuffer, RewardFn
from corral.data.replay.layout import Layout
from corral.data.replay.links import GridLinks
from corral.data.replay.observations import Observations
from corral.data.replay.storage import Column, Storage

if TYPE_CHECKING:
    from corral.data.episodes.tensor_rollout import TensorRollout


class TensorColumn(Column):
    """A column whose grid is a tensor `[R, L, ...]`; flat indices must be less than R * L."""

    __slots__ = ()

    def __init__(self, grid: Tensor) -> None:
        """Store the tensor."""
        self.grid: Any = grid
        self.flat: Any = grid.flatten(0, 1)
        self.dtype = np.dtype(str(grid.dtype).removeprefix("torch."))
        self.at: Any = self.flat.__getitem__

    def first_rows(self, num_rows: int, *, copy: bool = True) -> NDArray[Any]:
        """Return a copy of the first rows as an array."""
        rows: NDArray[Any] = self.grid[:num_rows].cpu().numpy().copy()
        return rows

    def set_first_rows(self, rows: NDArray[Any]) -> None:
        """Write the first rows, an array."""
        self.grid[: len(rows)] = torch.tensor(rows, device=self.grid.device)


class DeviceStorage(Storage):
    """Makes columns of tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        """Keep the device."""
        super().__init__()
        self._device = device

    def column(self, shape: tuple[int, ...], dtype: DTypeLike, *, on_host: bool = False) -> Column:
        """Return a column of zeros, on the device unless Python reads it."""
        if on_host:
            return super().column(shape, dtype)
        return TensorColumn(torch.zeros(shape, dtype=getattr(torch, np.dtype(dtype).name), device=self._device))


class DeviceLinks(GridLinks):
    """Lanes in step, whose rows nobody asks for by indices that count on."""

    def stamped(self, flat: Any) -> Any:
        """Return the flat indices themselves."""
        return flat


class PairedObservations(Observations):
    """Each row also holds what its step led to, the final observation included: columns of both, one after the other.

    Observations take twice the memory, and nothing is searched for on the device.
    """

    def __init__(self, layout: Layout, storage: Storage, links: GridLinks) -> None:
        """Make the columns."""
        super().__init__(layout, storage, links)
        self._columns += [storage.column((*self._shape, *shape), dtype) for dtype, shape in layout.obs]

    def same(self, flat: NDArray[np.int64], first: Any, held: Any = None) -> bool:
        """Return True: rollouts of tensors come one after the other, and are not compared."""
        return True

    def at(self, flat: Any) -> Tree:
        """Return the observations of rows, a tree of `[B, ...]`, by flat indices."""
        return self._tree([column.at(flat) for column in self._columns[: len(self._columns) // 2]])

    def after(self, flat: Any) -> Tree:
        """Return the observations that the steps of rows led to, a tree of `[B, ...]`."""
        return self._tree([column.at(flat) for column in self._columns[len(self._columns) // 2 :]])


class DeviceReplayBuffer(ReplayBuffer):
    """Keeps the latest transitions of one runner as tensors, and draws uniformly from them, with replacement.

    It draws the same transitions as `ReplayBuffer` with the same seed on the CPU. All lanes are valid in the same rows,
    which the host knows: nothing is copied from the device but by `get_state`.

    Args:
        capacity: Env steps to keep, rounded up to whole rows.
        device: Device of the columns.
        seed: Seed of the draws.
    """

    kind = "device"
    LINKS: ClassVar[type[GridLinks]] = DeviceLinks

    def __init__(self, capacity: int, device: torch.device, *, seed: int | Sequence[int] | None = None) -> None:
        """Make an empty buffer; its columns are made when the first rollout shows their shapes."""
        super().__init__(capacity, seed=seed)
        self.device, self._storage = device, DeviceStorage(device)
        self._generator: torch.Generator | None = None
        if device.type != "cpu":
            self._generator = torch.Generator(device)
            self._generator.manual_seed(int(self._rng.integers(2**62)))

    def _make_observations(self, layout: Layout) -> Observations:
        return PairedObservations(layout, self._storage, self._links)

    def _checked(self, rollout: TensorRollout, layout: Layout) -> tuple[Any, Any]:  # type: ignore[override]
        obs = [leaf[:-1] for leaf in layout.leaves(rollout.obs)]
        columns = {name: rollout.columns[name] for name in self._columns}
        columns["valid"] = np.broadcast_to(rollout.valid.all(1, keepdims=True), rollout.valid.shape)
        return [*obs, *layout.leaves(rollout.next_obs())], columns

    # Batches out.

    def _draw(self, batch_size: int, beta: float) -> tuple[Any, Any]:
        """Return flat indices of valid rows and weights, `[B]` each, on the device."""
        if self._generator is None:
            flat = torch.from_numpy(super()._draw(batch_size, beta)[0])
        else:
            rows, lanes = self._valid_on_device()[1], self._links.num_lanes
            drawn = torch.randint(len(rows) * lanes, (batch_size,), generator=self._generator, device=self.device)
            flat = rows[drawn // lanes] * lanes + drawn % lanes
        return flat, torch.ones(batch_size, device=self.device)

    def _n_steps(self, flat: Any, n_step: NumSteps, gamma: float, reward_fn: RewardFn | None) -> tuple[Any, ...]:
        columns, num_lanes = self._columns, self._links.num_lanes
        last, steps, num_steps = flat, flat, torch.ones_like(flat)
        if n_step != 1:
            largest = n_step[1] if isinstance(n_step, tuple) else n_step
            back = torch.arange(largest, device=self.device)[:, None]
            steps = (flat + num_lanes * back) % self._links.size
            taken = self._valid_on_device()[0][steps // num_lanes]
            if isinstance(n_step, tuple):
                taken &= torch.from_numpy(self._within_steps(n_step, len(flat))).to(self.device)
            # A transition stops after the first step that ended its episode, and before the first that is not valid.
            done = columns["terminated"].at(steps) | columns["truncated"].at(steps)
            taken[1:] &= ~done[:-1]
            taken = taken.cumprod(0).bool()
            num_steps = taken.sum(0)
            last = steps.gather(0, num_steps[None] - 1)[0]
        rewards: Any = columns["rewards"].at(steps)
        rewards = rewards if reward_fn is None else reward_fn(rewards)
        if n_step != 1:
            rewards = (gamma**back * rewards * taken).sum(0)
        return last, rewards, num_steps, torch.full_like(rewards, gamma) ** num_steps

    def _valid_on_device(self) -> tuple[Tensor, Tensor]:
        """Return which rows are valid, bool `[R]`, and their indices; they are copied once after each change."""
        if "on_device" not in self._derived:
            valid = self._columns["valid"].grid[:, 0]
            both = (torch.from_numpy(part).to(self.device) for part in (valid.copy(), np.flatnonzero(valid)))
            self._derived["on_device"] = tuple(both)
        found: tuple[Tensor, Tensor] = self._derived["on_device"]
        return found

    # State.

    def get_state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return copies of the columns as arrays, and all else; see `ReplayBuffer.get_state`."""
        generator = None if self._generator is None else self._generator.get_state().numpy()
        return {**super().get_state(copy=copy), "generator": generator}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`; see `ReplayBuffer.set_state`."""
        super().set_state(state)
        if self._generator is not None and state["generator"] is not None:
            self._generator.set_state(torch.from_numpy(np.array(state["generator"])))
