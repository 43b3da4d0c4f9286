"""The observations of a replay buffer: whole observations, or the newest frames of stacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.tree import Tree
from corral.errors import CheckpointError, ColumnError
from corral.replay.frames import FrameStacks
from corral.replay.layout import Layout
from corral.replay.links import GridLinks
from corral.replay.storage import Column, Storage, put_rows

Arrays = list[NDArray[Any]]


@dataclass
class Rows:
    """The observations of one rollout, as they are written.

    Attributes:
        leaves: Observations, or their newest frames, leaves `[T + 1, N, ...]`.
        final_at: Row and sub-env of each final observation that is stored separately.
        final: Final observations, leaves `[M, ...]`.
        history: Older frames of stacks that continue no row of the buffer, leaves `[k - 1, N, ...]`.
        ages: Ages of stacks, uint8 `[T + 1, N]`; see `FrameStacks`.
        padding: Kind of padding of stacks; see `FrameStacks`.
    """

    leaves: Arrays
    final_at: list[tuple[int, int]]
    final: Arrays
    history: Arrays = field(default_factory=list)
    ages: NDArray[np.uint8] | None = None
    padding: str | None = None


class Observations:
    """Whole observations: columns `[R, L, ...]`, and separately the final observations that they do not hold.

    Args:
        layout: Layout of the observations.
        storage: Storage that makes the arrays.
        num_rows: Number of rows R.
        num_lanes: Number of lanes L.
        links: Where the rows of a lane are; `None` if the lanes are in step.
    """

    def __init__(
        self, layout: Layout, storage: Storage, num_rows: int, num_lanes: int, links: GridLinks | None = None
    ) -> None:
        """Make the columns."""
        self._layout, self._storage, self._shape = layout, storage, (num_rows, num_lanes)
        self._num_lanes, self._links = num_lanes, links or GridLinks(num_lanes)
        specs = [(shape, dtype) for (dtype, _), shape in zip(layout.obs, self._entry_shapes(), strict=True)]
        storage.require(sum(num_rows * num_lanes * np.empty(shape, dtype).nbytes for shape, dtype in specs))
        self._columns = [Column(storage.zeros((*self._shape, *shape), dtype)) for shape, dtype in specs]
        self._slots: Column | None = None  # int32: index of the final observation of a row in `_final`, or -1
        self._final: Arrays = []
        self._free: list[int] = []

    def _entry_shapes(self) -> list[tuple[int, ...]]:
        return [shape for _, shape in self._layout.obs]

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        slots = 0 if self._slots is None else self._slots.grid.nbytes
        return slots + sum(column.grid.nbytes for column in self._columns) + sum(leaf.nbytes for leaf in self._final)

    # Rollouts in.

    def prepare(self, obs: Arrays, final: dict[tuple[int, int], Tree], first_row: int | None, lanes: slice) -> Rows:
        """Return the observations of a rollout as they will be written; nothing is written yet.

        Args:
            obs: Leaves `[T + 1, N, ...]`.
            final: By row and sub-env, the final observations that `obs` does not hold.
            first_row: Row of the buffer that holds observation 0 already, or `None`.
            lanes: Lanes of the runner.

        Raises:
            ColumnError: The observations do not fit the layout, or are not the stacks that were announced.
        """
        return Rows(obs, list(final), self._stacked(final) if final else [])

    def _stacked(self, final: dict[tuple[int, int], Tree]) -> Arrays:
        each = [self._layout.leaves(obs) for obs in final.values()]
        for leaves in each:
            for path, leaf, (dtype, shape) in zip(self._layout.paths, leaves, self._layout.obs, strict=True):
                if (str(leaf.dtype), leaf.shape) != (dtype, shape):
                    raise ColumnError(f"final observation {path!r} is {describe(leaf)}, not {dtype}{list(shape)}.")
        return [np.stack(leaf) for leaf in zip(*each, strict=True)]

    def put(self, rows: Rows, start: int, lanes: slice) -> None:
        """Write observations into rows that have been cleared."""
        put_rows(zip(self._columns, rows.leaves, strict=True), start, lanes)
        if not rows.final_at:
            return
        if self._slots is None:
            self._slots = Column(self._storage.zeros(self._shape, np.int32))
            self._slots.grid.fill(-1)
        slots = self._take_slots(rows.final)
        at = np.array(rows.final_at)
        self._slots.grid[(start + at[:, 0]) % self._shape[0], lanes.start + at[:, 1]] = slots
        for held, leaf in zip(self._final, rows.final, strict=True):
            held[slots] = leaf

    def _take_slots(self, final: Arrays) -> list[int]:
        """Return free slots for leaves `[M, ...]`, and make more slots if there are too few."""
        missing = len(final[0]) - len(self._free)
        if missing > 0:
            size = len(self._final[0]) if self._final else 0
            larger = max(2 * size, size + missing)
            grown = [self._storage.zeros((larger, *leaf.shape[1:]), leaf.dtype) for leaf in final]
            for old, new in zip(self._final, grown, strict=False):
                new[:size] = old
            self._final = grown
            self._free.extend(range(size, larger))
        taken = self._free[-len(final[0]) :]
        del self._free[-len(final[0]) :]
        return taken

    def clear(self, where: list[slice], lanes: slice) -> None:
        """Forget the final observations of rows that are about to be overwritten."""
        if self._slots is None:
            return
        for span in where:
            slots = self._slots.grid[span, lanes]
            self._free.extend(slots[slots >= 0].tolist())
            slots[...] = -1

    def same(self, row: int, lanes: slice, obs: Arrays) -> bool:
        """Return whether a row holds the first of observations `[T + 1, N, ...]`."""
        held = [column.grid[row, lanes].tobytes() for column in self._columns]
        return held == [leaf[0].tobytes() for leaf in obs]

    # Rollouts in, by lanes with clocks of their own.

    def prepare_lanes(self, obs: Arrays, lengths: NDArray[np.int64], tails: NDArray[np.int64]) -> Rows:
        """Return the observations of lanes as they will be written, with rows for older frames before them.

        Args:
            obs: Leaves `[T + 1, L, ...]`.
            lengths: Steps of each lane, `[L]`: it has one observation more.
            tails: Position of the row that holds observation 0 of a lane already, or -1, `[L]`.
        """
        return Rows(obs, [], [])

    def put_lanes(self, rows: Rows, start: int, present: NDArray[np.bool_], positions: NDArray[np.int64]) -> None:
        """Write the rows of lanes that are present, bool `[M, L]`, at consecutive positions from `start` on."""
        flat = [leaf[present][:, None] for leaf in rows.leaves]
        put_rows(zip(self._columns, flat, strict=True), start, slice(0, 1))

    def same_lanes(self, tails: NDArray[np.int64], obs: Arrays) -> NDArray[np.bool_]:
        """Return which rows, by position `[L]`, hold the first of observations `[T + 1, L, ...]`."""
        held = [column.at(tails) for column in self._columns]
        return _all_equal(held, [leaf[0] for leaf in obs])

    def outdated(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows, some of them twice, that need a frame of rows that are about to be overwritten."""
        return np.empty(0, np.int64)

    def oldest_needed(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of the oldest row that each of the observations of rows needs."""
        return flat

    # Batches out.

    def at(self, flat: NDArray[np.int64]) -> Tree:
        """Return the observations of rows, a tree of `[B, ...]`, by flat indices."""
        return self._layout.unflatten([column.at(flat) for column in self._columns])

    def after(self, flat: NDArray[np.int64]) -> Tree:
        """Return the observations that the steps of rows led to, a tree of `[B, ...]`."""
        later = self._links.after(flat)
        below = [column.at(later) for column in self._columns]
        if self._slots is not None:
            slots = self._slots.at(flat)
            aside = np.flatnonzero(slots >= 0)
            for leaf, held in zip(below, self._final, strict=True):
                leaf[aside] = held.take(slots[aside], 0)
        return self._layout.unflatten(below)

    # State.

    def get_state(self, num_rows: int, *, copy: bool = True) -> dict[str, Any]:
        """Return the first rows as plain data: copies, or views."""
        take = partial(np.array, copy=copy or None)
        return {
            "columns": [take(column.grid[:num_rows]) for column in self._columns],
            "final_slots": [] if self._slots is None else [take(self._slots.grid[:num_rows])],
            "final": [take(leaf) for leaf in self._final],
            "free_slots": list(self._free),
        }

    def checked_state(self, state: dict[str, Any], num_rows: int) -> dict[str, Any]:
        """Return a state that `get_state` returned with its parts as arrays, and change nothing.

        Raises:
            CheckpointError: A shape differs.
        """
        shape = (num_rows, self._num_lanes)
        dtypes = [dtype for dtype, _ in self._layout.obs]
        entries = self._entry_shapes()
        num_slots = len(state["final"][0]) if state["final"] else 0
        return {
            "columns": [
                array_of(part, dtype, (*shape, *entry))
                for part, dtype, entry in zip(state["columns"], dtypes, entries, strict=True)
            ],
            "final_slots": [array_of(part, np.int32, shape) for part in state["final_slots"]],
            "final": [
                array_of(part, dtype, (num_slots, *entry))
                for part, dtype, entry in zip(state["final"], dtypes, entries, strict=bool(state["final"]))
            ],
            "free_slots": [int(slot) for slot in state["free_slots"]],
        }

    def set_state(self, state: dict[str, Any], num_rows: int) -> None:
        """Restore a state that `checked_state` returned."""
        for column, rows in zip(self._columns, state["columns"], strict=True):
            column.grid[:num_rows] = rows
        self._slots = None
        if state["final_slots"]:
            self._slots = Column(self._storage.zeros(self._shape, np.int32))
            self._slots.grid.fill(-1)
            self._slots.grid[:num_rows] = state["final_slots"][0]
        self._final = [self._storage.zeros(leaf.shape, leaf.dtype) for leaf in state["final"]]
        for held, leaf in zip(self._final, state["final"], strict=True):
            held[...] = leaf
        self._free = state["free_slots"]


class StackedObservations(Observations):
    """Stacks of k frames: columns of the newest frame of each stack and of its age, see `FrameStacks`.

    Before a stack that does not continue the row above it, k - 1 rows hold its older frames.
    """

    def __init__(
        self,
        num_frames: int,
        layout: Layout,
        storage: Storage,
        num_rows: int,
        num_lanes: int,
        links: GridLinks | None = None,
    ) -> None:
        """Make the columns."""
        self._frames = FrameStacks(num_frames, layout)
        self._back = np.arange(num_frames - 1, -1, -1)  # number of rows that each frame of a stack is above it
        super().__init__(layout, storage, num_rows, num_lanes, links)
        self._ages = Column(storage.zeros(self._shape, np.uint8))

    def _entry_shapes(self) -> list[tuple[int, ...]]:
        return self._frames.frame_shapes

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return super().nbytes + self._ages.grid.nbytes

    def prepare(self, obs: Arrays, final: dict[tuple[int, int], Tree], first_row: int | None, lanes: slice) -> Rows:
        """Return the newest frames of stacks and their ages; see `Observations.prepare`."""
        stacks = self._frames.front(obs, 2)
        history: Arrays = []
        first: NDArray[Any] | int = self._frames.num_frames - 1
        if first_row is None:
            history = [np.moveaxis(stack[0, :, :-1], 1, 0) for stack in stacks]
        else:
            first = self._ages.grid[first_row % self._shape[0], lanes]
        ages, padding = self._frames.ages(obs, first)
        final_stacks = self._frames.front(self._stacked(final), 1) if final else []
        if final:
            at = tuple(np.array(list(final)).T)
            self._frames.check_final(final_stacks, [stack[at] for stack in stacks])
        return Rows(
            [stack[:, :, -1] for stack in stacks],
            list(final),
            [stack[:, -1] for stack in final_stacks],
            history,
            ages,
            padding,
        )

    def put(self, rows: Rows, start: int, lanes: slice) -> None:
        """Write stacks into rows that have been cleared."""
        assert rows.ages is not None
        super().put(rows, start, lanes)
        if rows.history:
            put_rows(zip(self._columns, rows.history, strict=True), start - len(rows.history[0]), lanes)
        put_rows([(self._ages, rows.ages)], start, lanes)
        self._frames.padding = rows.padding

    def same(self, row: int, lanes: slice, obs: Arrays) -> bool:
        """Return whether a row holds the first of observations `[T + 1, N, ...]`, with all their frames."""
        held = self._stacks(np.arange(row * self._num_lanes + lanes.start, row * self._num_lanes + lanes.stop))
        given = self._frames.front([leaf[0] for leaf in obs], 1)
        return all(mine.tobytes() == leaf.tobytes() for mine, leaf in zip(held, given, strict=True))

    def prepare_lanes(self, obs: Arrays, lengths: NDArray[np.int64], tails: NDArray[np.int64]) -> Rows:
        """Return the newest frames of stacks and their ages; see `Observations.prepare_lanes`."""
        num_older, padding = self._frames.num_frames - 1, self._frames.padding
        shape = (num_older + len(obs[0]), len(lengths))
        leaves = [np.zeros((*shape, *entry), leaf.dtype) for leaf, entry in zip(obs, self._entry_shapes(), strict=True)]
        ages = np.zeros(shape, np.uint8)
        try:
            for lane, (length, tail) in enumerate(zip(lengths.tolist(), tails.tolist(), strict=True)):
                own = [leaf[: length + 1, lane : lane + 1] for leaf in obs]
                rows = self.prepare(own, {}, None if tail < 0 else tail, slice(0, 1))
                self._frames.padding = rows.padding  # which the next lanes must have too
                assert rows.ages is not None
                ages[num_older : num_older + length + 1, lane] = rows.ages[:, 0]
                for leaf, newest in zip(leaves, rows.leaves, strict=True):
                    leaf[num_older : num_older + length + 1, lane] = newest[:, 0]
                for leaf, older in zip(leaves, rows.history, strict=False):
                    leaf[:num_older, lane] = older[:, 0]
        finally:
            found, self._frames.padding = self._frames.padding, padding
        return Rows(leaves, [], [], ages=ages, padding=found)

    def put_lanes(self, rows: Rows, start: int, present: NDArray[np.bool_], positions: NDArray[np.int64]) -> None:
        """Write the rows of lanes; see `Observations.put_lanes`."""
        assert rows.ages is not None
        super().put_lanes(rows, start, present, positions)
        put_rows([(self._ages, rows.ages[present][:, None])], start, slice(0, 1))
        self._frames.padding = rows.padding

    def same_lanes(self, tails: NDArray[np.int64], obs: Arrays) -> NDArray[np.bool_]:
        """Return which rows hold the first stacks of lanes; see `Observations.same_lanes`."""
        return _all_equal(self._stacks(tails), self._frames.front([leaf[0] for leaf in obs], 1))

    def outdated(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows that need a frame of rows that are about to be overwritten."""
        found, current = [], flat
        for age in range(1, self._frames.num_frames):
            current = self._links.after(current)
            found.append(current[self._ages.at(current) >= age])
        return np.concatenate(found)

    def oldest_needed(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of the oldest frame of each stack."""
        oldest: NDArray[np.int64] = self._links.stack(flat, self._ages.at(flat), self._frames.num_frames).min(1)
        return oldest

    def _stacks(self, flat: NDArray[np.int64]) -> Arrays:
        """Return the stacks of rows, leaves `[B, k, ...]`."""
        ages = self._ages.at(flat)
        rows = self._links.stack(flat, ages, self._frames.num_frames)
        stacks = [column.at(rows) for column in self._columns]
        if self._frames.padding == "zero":
            before = self._back > ages[:, None]
            for stack in stacks:
                stack[before] = 0
        return stacks

    def at(self, flat: NDArray[np.int64]) -> Tree:
        """Return the observations of rows, a tree of `[B, ...]`, by flat indices."""
        return self._tree(self._stacks(flat))

    def after(self, flat: NDArray[np.int64]) -> Tree:
        """Return the observations that the steps of rows led to, a tree of `[B, ...]`."""
        below = self._stacks(self._links.after(flat))
        if self._slots is not None:
            slots = self._slots.at(flat)
            aside = np.flatnonzero(slots >= 0)
            for leaf, seen, held in zip(below, self._stacks(flat[aside]), self._final, strict=True):
                leaf[aside, :-1] = seen[:, 1:]
                leaf[aside, -1] = held.take(slots[aside], 0)
        return self._tree(below)

    def _tree(self, stacks: Arrays) -> Tree:
        return self._layout.unflatten([self._frames.back(index, stack) for index, stack in enumerate(stacks)])

    def get_state(self, num_rows: int, *, copy: bool = True) -> dict[str, Any]:
        """Return the first rows as plain data: copies, or views."""
        return {
            **super().get_state(num_rows, copy=copy),
            "ages": np.array(self._ages.grid[:num_rows], copy=copy or None),
            "padding": self._frames.padding,
        }

    def checked_state(self, state: dict[str, Any], num_rows: int) -> dict[str, Any]:
        """Return a state that `get_state` returned with its parts as arrays, and change nothing."""
        ages = array_of(state["ages"], np.uint8, (num_rows, self._num_lanes))
        return {**super().checked_state(state, num_rows), "ages": ages, "padding": state["padding"]}

    def set_state(self, state: dict[str, Any], num_rows: int) -> None:
        """Restore a state that `checked_state` returned."""
        super().set_state(state, num_rows)
        self._ages.grid[:num_rows] = state["ages"]
        self._frames.padding = state["padding"]


def _all_equal(left: Arrays, right: Arrays) -> NDArray[np.bool_]:
    """Return by index of axis 0 whether arrays are equal."""
    equal = np.ones(len(left[0]), np.bool_)
    for mine, leaf in zip(left, right, strict=True):
        equal &= (mine == leaf).reshape(len(equal), -1).all(1)
    return equal


def array_of(data: Any, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array of a state, which a file format may have turned into nested lists.

    Raises:
        CheckpointError: The array has another shape.
    """
    array = np.asarray(data, dtype)
    if array.size == 0 and 0 in shape:  # nested lists do not keep the axes after an axis of length 0
        return np.zeros(shape, dtype)
    if array.shape != shape:
        raise CheckpointError(
            f"the state of the replay buffer is damaged: a column has shape {list(array.shape)} instead of "
            f"{list(shape)}."
        )
    return array
