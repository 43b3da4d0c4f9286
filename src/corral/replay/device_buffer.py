"""A replay buffer on the device of an env of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.core.seeding import get_rng, set_rng
from corral.core.tree import Tree, map_tree, named_leaves
from corral.errors import CheckpointError
from corral.replay.buffer import EmptyReplayBufferError, NumSteps

if TYPE_CHECKING:
    from corral.episodes.tensor_rollout import TensorRollout

_VERSION = 1
_COLUMNS = ("actions", "rewards", "terminated", "truncated")


class DeviceReplayBuffer:
    """Keeps the latest transitions of one runner as tensors, and draws uniformly from them, with replacement.

    The columns are rings of rows `[R, L, ...]`, as in `ReplayBuffer`, from which this class draws the same transitions
    with the same seed on the CPU. Each row also holds what its step led to, so that observations take twice the memory.
    All lanes are valid in the same rows, which the host knows: nothing is copied from the device but by `get_state`.

    Args:
        capacity: Env steps to keep, rounded up to whole rows.
        device: Device of the columns.
        seed: Seed of the draws.

    Attributes:
        num_env_steps_added: Number of steps that were ever added.
    """

    kind = "uniform"

    def __init__(self, capacity: int, device: torch.device, *, seed: int | Sequence[int] | None = None) -> None:
        """Make an empty buffer; its columns are made when the first rollout shows their shapes."""
        self.capacity, self.device = capacity, device
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._generator: torch.Generator | None = None
        if device.type != "cpu":
            self._generator = torch.Generator(device)
            self._generator.manual_seed(int(self._rng.integers(2**62)))
        self.close()

    def close(self) -> None:
        """Free the memory; the buffer is empty afterwards."""
        self._columns: dict[str, Tree] = {}
        self._valid = np.zeros(0, np.bool_)  # rows
        self._known: tuple[Tensor, Tensor] | None = None  # see `_valid_on_device`
        self._written = self._num_lanes = self.num_env_steps_added = 0

    def __len__(self) -> int:
        """Return the number of transitions that can be drawn."""
        return int(np.count_nonzero(self._valid)) * self._num_lanes

    @property
    def nbytes(self) -> int:
        """Bytes that the columns take."""
        leaves = (leaf for column in self._columns.values() for _, leaf in named_leaves(column))
        return sum(leaf.nbytes for leaf in leaves)

    # Rollouts in.

    def add(self, rollouts: Sequence[TensorRollout]) -> None:
        """Store rollouts; of a rollout that is larger than the buffer it keeps the last rows."""
        for rollout in rollouts:
            if not rollout.num_rows:
                continue
            columns = {name: rollout.columns[name] for name in _COLUMNS}
            columns |= {"obs": map_tree(lambda leaf: leaf[:-1], rollout.obs), "next_obs": rollout.next_obs()}
            if not self._columns:
                self._make_columns(columns, rollout.num_envs)
            self._add(rollout, columns)

    def _make_columns(self, columns: dict[str, Tree], num_lanes: int) -> None:
        num_rows = -(-self.capacity // num_lanes) + 1  # one row is always free, as in `ReplayBuffer`
        self._columns = map_tree(lambda leaf: leaf.new_zeros((num_rows, *leaf.shape[1:])), columns)
        self._valid, self._num_lanes = np.zeros(num_rows, np.bool_), num_lanes

    def _add(self, rollout: TensorRollout, columns: dict[str, Tree]) -> None:
        num_rows = len(self._valid)
        kept = min(rollout.num_rows, num_rows - 1)
        start = self._written - int(rollout.continues and self._written > 0 and kept == rollout.num_rows)
        rows = np.arange(start, start + kept + 1) % num_rows
        self._valid[rows] = False
        where = torch.from_numpy(rows[:-1]).to(self.device)
        map_tree(lambda held, new: held.index_copy_(0, where, new[-kept:]), self._columns, columns)
        self._valid[rows[:-1]] = rollout.valid[-kept:].all(1)
        self._known = None
        self._written = start + kept + 1
        self.num_env_steps_added += rollout.num_env_steps

    # Batches out.

    def sample(
        self,
        batch_size: int,
        *,
        n_step: NumSteps = 1,
        gamma: float = 1.0,
        beta: float = 0.0,
        reward_fn: Callable[[Any], Any] | None = None,
    ) -> dict[str, Tree]:
        """Return a batch of drawn transitions, tensors `[B, ...]`; see `ReplayBuffer.sample`.

        `beta` has no effect, as in `ReplayBuffer`: draws are uniform.

        Raises:
            EmptyReplayBufferError: The buffer holds no transitions.
        """
        if not self._valid.any():
            raise EmptyReplayBufferError("the replay buffer holds no transitions to draw: add rollouts first.")
        num_rows, num_lanes = len(self._valid), self._num_lanes
        flat = self._draw(batch_size)
        last, steps, num_steps = flat, flat, torch.ones_like(flat)
        if n_step != 1:
            smallest, largest = n_step if isinstance(n_step, tuple) else (n_step, n_step)
            steps = (flat + num_lanes * torch.arange(largest, device=self.device)[:, None]) % (num_rows * num_lanes)
            taken = self._valid_on_device()[0][steps // num_lanes]
            if smallest < largest:
                wanted = torch.from_numpy(smallest + self._evenly(largest - smallest + 1, batch_size)).to(self.device)
                taken &= torch.arange(largest, device=self.device)[:, None] < wanted
            done = self._at("terminated", steps) | self._at("truncated", steps)
            taken[1:] &= ~done[:-1]
            taken = taken.cumprod(0).bool()
            num_steps = taken.sum(0)
            last = steps.gather(0, num_steps[None] - 1)[0]
        rewards: Any = self._at("rewards", steps)
        rewards = rewards if reward_fn is None else reward_fn(rewards)
        if n_step != 1:
            powers = gamma ** torch.arange(largest, device=self.device)
            rewards = (powers[:, None] * rewards * taken).sum(0)
        return {
            "obs": self._at("obs", flat),
            "actions": self._at("actions", flat),
            "rewards": rewards,
            "next_obs": self._at("next_obs", last),
            "terminated": self._at("terminated", last),
            "truncated": self._at("truncated", last),
            "num_steps": num_steps,
            "discounts": torch.full_like(rewards, gamma) ** num_steps,
            "indices": flat,
            "weights": torch.ones_like(rewards),
        }

    def _at(self, name: str, flat: Tensor) -> Tree:
        return map_tree(lambda column: column.flatten(0, 1)[flat], self._columns[name])

    def _valid_on_device(self) -> tuple[Tensor, Tensor]:
        """Return which rows are valid, bool `[R]`, and their indices; they are copied once after each change."""
        if self._known is None:
            valid = torch.from_numpy(self._valid).to(self.device, copy=True)
            self._known = valid, torch.from_numpy(np.flatnonzero(self._valid)).to(self.device)
        return self._known

    def _draw(self, batch_size: int) -> Tensor:
        """Return flat indices of valid rows, int64 `[B]`, on the device."""
        if self._generator is None:
            return torch.from_numpy(self._draw_on_host(batch_size))
        rows = self._valid_on_device()[1]
        size, lanes = (batch_size,), self._num_lanes
        drawn = torch.randint(len(rows) * lanes, size, generator=self._generator, device=self.device)
        return rows[drawn // lanes] * lanes + drawn % lanes

    def _draw_on_host(self, batch_size: int) -> NDArray[np.int64]:
        """Return what `ReplayBuffer` would draw: even numbers, without those in rows that are not valid."""
        lanes, valid = self._num_lanes, self._valid
        num_valid, num_entries = len(self), min(self._written, len(valid)) * lanes
        if 4 * num_valid < num_entries:
            candidates = np.flatnonzero(np.repeat(valid, lanes)[:num_entries])
            return candidates[self._evenly(num_valid, batch_size)]
        num_draws = batch_size * num_entries // num_valid + batch_size // 8 + 8
        found = np.zeros(0, np.int64)
        while len(found) < batch_size:
            drawn = self._evenly(num_entries, num_draws)
            found = np.concatenate([found, drawn[valid[drawn // lanes]]])
        return found[:batch_size]

    def _evenly(self, stop: int, size: int) -> NDArray[np.int64]:
        return (self._rng.random(size) * stop).astype(np.int64)

    # State.

    def get_state(self) -> dict[str, Any]:
        """Return copies of the columns as arrays, and where the ring stands."""
        return {
            "version": _VERSION,
            "kind": "device",
            "columns": map_tree(lambda leaf: leaf.cpu().numpy().copy(), self._columns),
            "valid": self._valid.copy(),
            "written": self._written,
            "num_lanes": self._num_lanes,
            "num_env_steps_added": self.num_env_steps_added,
            "rng": get_rng(self._rng),
            "generator": None if self._generator is None else self._generator.get_state().numpy(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`.

        Raises:
            CheckpointError: It is of another kind of buffer, or of another capacity.
        """
        if state.get("kind") != "device" or state.get("version") != _VERSION:
            raise CheckpointError(
                "the state of a replay buffer on arrays cannot continue in one on the device of an env of tensors."
            )
        valid, num_lanes = state["valid"], int(state["num_lanes"])
        if num_lanes and len(valid) != -(-self.capacity // num_lanes) + 1:
            raise CheckpointError(f"the state of a replay buffer has {len(valid)} rows; its capacity is another one.")
        self._columns = map_tree(lambda leaf: torch.tensor(leaf, device=self.device), dict(state["columns"]))
        self._valid, self._written, self._num_lanes = valid.copy(), int(state["written"]), num_lanes
        self.num_env_steps_added, self._known = int(state["num_env_steps_added"]), None
        set_rng(self._rng, state["rng"])
        if self._generator is not None and state["generator"] is not None:
            self._generator.set_state(torch.from_numpy(state["generator"].copy()))
