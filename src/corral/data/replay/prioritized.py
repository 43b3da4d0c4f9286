"""Proportional prioritised replay (Schaul et al. 2016, arXiv:1511.05952)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from corral.data.replay.buffer import ReplayBuffer
from corral.data.replay.layout import Layout
from corral.data.replay.links import Place
from corral.data.replay.storage import Column
from corral.data.replay.sum_tree import SumTree
from corral.errors import ConfigError

# Bounds of the powers of priorities, so that their sums are neither 0 nor infinite.
_SMALLEST, _LARGEST = 1e-290, 1e290


class PrioritizedReplayBuffer(ReplayBuffer):
    """Draws transition i with probability p_i ** alpha / sum_k p_k ** alpha.

    New transitions get the largest priority so far, which is 1 at first. For a batch, the sum is divided into B equal
    parts, and one transition is drawn from each (appendix B.2.1 of the paper).

    Args:
        capacity: See `ReplayBuffer`.
        alpha: Exponent of the priorities; 0 draws uniformly.
        epsilon: Number added to priorities, so that transitions without TD error are drawn as well.
        **settings: Other arguments of `ReplayBuffer`.

    Raises:
        ConfigError: A number is out of range, or the directory does not exist.
    """

    kind = "prioritized"

    def __init__(self, capacity: int, *, alpha: float = 0.6, epsilon: float = 1e-6, **settings: Any) -> None:
        """Check the numbers."""
        if not 0 <= alpha < math.inf:
            raise ConfigError(f"replay buffer: alpha={alpha} must be finite, and at least 0.")
        if not 0 < epsilon < math.inf:
            raise ConfigError(f"replay buffer: epsilon={epsilon} must be finite, and more than 0.")
        self.alpha, self.epsilon = alpha, epsilon
        super().__init__(capacity, **settings)

    def _forget(self) -> None:
        super()._forget()
        self._tree = SumTree(1)
        self._set_max_priority(1.0)

    def _make_columns(self, layout: Layout, num_linked_rows: int | None = None) -> Layout:
        super()._make_columns(layout, num_linked_rows)
        self._tree = SumTree(self._links.size)
        self._powers = Column(self._tree.leaves.reshape(-1, self._links.num_lanes))
        return layout

    def _stored(self) -> dict[str, Any]:
        return {**super()._stored(), "priorities": self._powers}

    @property
    def nbytes(self) -> int:
        """Bytes of memory, or of disk space, that the columns take, and of memory that the priorities take."""
        return super().nbytes + self._tree.nbytes - self._tree.leaves.nbytes

    def _set_max_priority(self, priority: float) -> None:
        self.max_priority, self._newest = priority, float(self._powers_of(np.array(priority)))

    def _powers_of(self, priorities: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(over="ignore", under="ignore"):
            powers: NDArray[np.float64] = np.clip(priorities**self.alpha, _SMALLEST, _LARGEST)
        return powers

    def _note_written(self, place: Place) -> None:
        powers, valid, num_lanes = self._powers.grid, self._columns["valid"], self._links.num_lanes
        for span in place.overwritten:
            np.multiply(valid.grid[span, place.lanes], self._newest, out=powers[span, place.lanes])
            self._tree.update_range(span.start * num_lanes, span.stop * num_lanes)
        if isinstance(place.steps_at, tuple):  # some are in the tails of their lanes, elsewhere in the ring
            flat = np.concatenate([place.outdated, place.steps_at[1]])
            self._tree.leaves[flat] = valid.flat[flat] * self._newest
            self._tree.update(flat)

    def _draw(self, batch_size: int, beta: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return flat indices and weights: (len * P(i)) ** -beta over the largest of the batch, as in Dopamine."""
        flat, drawn = self._tree.find((np.arange(batch_size) + self._rng.random(batch_size)) / batch_size)
        while not (smallest := drawn.min()):  # rounding led to an entry next to a transition
            missed = np.flatnonzero(drawn == 0)
            flat[missed], drawn[missed] = self._tree.find(self._rng.random(len(missed)))
        # Dividing by the largest weight cancels the number of transitions and the sum of priorities.
        weights = (drawn / smallest) ** -beta
        return flat, weights.astype(np.float32)

    def update_priorities(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Set the priorities of transitions.

        Args:
            indices: `indices` of a sample, `[B]`. Transitions that were overwritten since are skipped: an index is
                never used again.
            priorities: Usually absolute TD errors, `[B]`; `epsilon` is added. For an index given twice, the last
                counts.

        Raises:
            ValueError: A priority is NaN, infinite or negative (the first one is named), or the indices do not fit.
                Nothing is changed then.
        """
        stamped, given = np.asarray(indices), np.asarray(priorities, np.float64)
        if stamped.shape != given.shape or stamped.dtype.kind not in "iu":
            raise ValueError(
                f"update_priorities() needs one integer index for each priority, got indices {stamped.dtype}"
                f"{list(stamped.shape)} and priorities {given.dtype}{list(given.shape)}."
            )
        if not given.size:
            return
        if not 0 <= given.min() <= given.max() < math.inf:
            bad = int(np.flatnonzero(~((given >= 0) & (given < math.inf)))[0])
            raise ValueError(
                f"update_priorities(): the priority of index {stamped[bad]} is {given[bad]}: priorities must be "
                "finite and not negative. Give absolute TD errors; if these are not finite, neither is the loss."
            )
        flat = stamped.astype(np.int64) % self._links.size
        there = (self._links.stamped(flat) == stamped) & self._columns["valid"].at(flat)
        if not there.all():
            flat, given = flat[there], given[there]
            if not given.size:
                return
        given = given + self.epsilon
        if given.max() > self.max_priority:
            self._set_max_priority(float(given.max()))
        self._tree.leaves[flat] = self._powers_of(given)
        self._tree.update(flat)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "alpha": self.alpha, "epsilon": self.epsilon}

    def get_state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the state as plain data; see `ReplayBuffer.get_state`. It holds priorities to the power of `alpha`."""
        return {**super().get_state(copy=copy), "max_priority": self.max_priority}

    def _load(self, state: Mapping[str, Any]) -> None:
        max_priority = float(state["max_priority"])
        super()._load(state)
        self._powers.grid[self._links.num_rows_in_use :] = 0.0
        self._tree.update_range(0, self._links.size)
        self._set_max_priority(max_priority)
