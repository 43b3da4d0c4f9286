"""The observations of a replay buffer: whole observations, or the newest frames of stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.tree import Tree
from corral.data.replay.frames import FrameStacks
from corral.data.replay.layout import Layout
from corral.data.replay.links import NONE, GridLinks, Place
from corral.data.replay.storage import Column, Loaded, Storage, array_of, arrays_of, columns_in, put_rows, with_arrays
from corral.errors import ColumnError

Arrays = list[NDArray[Any]]


@dataclass
class Rows:
    """The observations of one rollout, as they are written.

    Attributes:
        pairs: Columns, each with its rows.
        final_at: Row and sub-env of each final observation that is stored separately.
        final: Final observations, leaves `[M, ...]`.
        padding: Kind of padding of stacks; see `FrameStacks`.
    """

    pairs: list[tuple[Column, NDArray[Any]]]
    final_at: list[tuple[int, int]]
    final: Arrays
    padding: str | None = None


class Observations:
    """Whole observations: columns `[R, L, ...]`, and separately the final observations that they do not hold.

    Args:
        layout: Layout of the observations.
        storage: Storage that makes the columns.
        links: Where the rows of a lane are.
    """

    def __init__(self, layout: Layout, storage: Storage, links: GridLinks) -> None:
        """Make the columns."""
        self._layout, self._storage, self._links = layout, storage, links
        self._shape = links.num_rows, links.num_lanes
        self._tree: Callable[[Arrays], Tree] = itemgetter(0) if layout.tree == 0 else layout.unflatten
        specs = [(shape, dtype) for (dtype, _), shape in zip(layout.obs, self._entry_shapes(), strict=True)]
        storage.require(sum(links.size * np.empty(shape, dtype).nbytes for shape, dtype in specs))
        self._columns = [storage.column((*self._shape, *shape), dtype) for shape, dtype in specs]
        self._slots: Column | None = None  # int32: index of the final observation of a row in `_final`, or -1
        self._final: Arrays = []
        self._free: list[int] = []

    def _entry_shapes(self) -> list[tuple[int, ...]]:
        return [shape for _, shape in self._layout.obs]

    def _stored(self) -> dict[str, Any]:
        """Return the columns by their keys in a state."""
        return {"columns": self._columns, "final_slots": [] if self._slots is None else [self._slots]}

    @property
    def nbytes(self) -> int:
        """Bytes that the columns take."""
        return sum(part.grid.nbytes for part in columns_in(self._stored())) + sum(leaf.nbytes for leaf in self._final)

    # Rollouts in.

    def prepare(self, obs: Arrays, final: dict[tuple[int, int], Tree], place: Place) -> Rows:
        """Return the observations of a rollout as they will be written; nothing is written yet.

        Args:
            obs: Leaves `[T + 1, N, ...]`.
            final: By row and sub-env, the final observations that `obs` does not hold.
            place: Where they will go.

        Raises:
            ColumnError: The observations do not fit the layout, or are not the stacks that were announced.
        """
        return Rows(list(zip(self._columns, obs, strict=True)), list(final), self._stacked(final) if final else [])

    def _stacked(self, final: dict[tuple[int, int], Tree]) -> Arrays:
        each = [self._layout.leaves(obs) for obs in final.values()]
        for leaves in each:
            for path, leaf, (dtype, shape) in zip(self._layout.paths, leaves, self._layout.obs, strict=True):
                if (str(leaf.dtype), leaf.shape) != (dtype, shape):
                    raise ColumnError(f"final observation {path!r} is {describe(leaf)}, not {dtype}{list(shape)}.")
        return [np.stack(leaf) for leaf in zip(*each, strict=True)]

    def put(self, rows: Rows, place: Place) -> None:
        """Write observations, and forget the final observations of the rows that they overwrite."""
        for span in [] if self._slots is None else place.overwritten:
            freed = self._slots.grid[span, place.lanes]  # type: ignore[union-attr]
            self._free.extend(freed[freed >= 0].tolist())
            freed[...] = -1
        put_rows(rows.pairs, place.obs_at, place.lanes)
        if not rows.final_at:
            return
        if self._slots is None:
            self._slots = self._make_slots()
        slots, at = self._take_slots(rows.final), np.array(rows.final_at)
        self._slots.grid[(place.steps_at + at[:, 0]) % self._shape[0], place.lanes.start + at[:, 1]] = slots
        for held, leaf in zip(self._final, rows.final, strict=True):
            held[slots] = leaf

    def _make_slots(self) -> Column:
        slots = self._storage.column(self._shape, np.int32)
        slots.grid.fill(-1)
        return slots

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

    # What a place depends on.

    def same(self, flat: NDArray[np.int64], first: Arrays, held: Arrays | None = None) -> bool | NDArray[np.bool_]:
        """Return True if rows hold the observations `[N, ...]`, else which do, to the bit: NaN is equal to itself.

        Args:
            flat: Flat indices of the rows, `[N]`.
            first: The leaves of the observations, `[N, ...]`.
            held: What the rows hold, if it is known.
        """
        held = held or [column.at(flat) for column in self._columns]
        if [mine.tobytes() for mine in held] == [leaf.tobytes() for leaf in first]:
            return True
        equal = np.ones(len(flat), np.bool_)
        for mine, leaf in zip(held, first, strict=True):
            bits = [np.ascontiguousarray(part).reshape(len(equal), -1).view(np.uint8) for part in (mine, leaf)]
            equal &= (bits[0] == bits[1]).all(1)
        return equal

    def outdated(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows, some of them twice, that need a frame of rows that are about to be overwritten."""
        return NONE

    def oldest_needed(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of the oldest row that each of the observations of rows needs."""
        return flat

    # Batches out.

    def at(self, flat: NDArray[np.int64]) -> Tree:
        """Return the observations of rows, a tree of `[B, ...]`, by flat indices."""
        return self._tree([column.at(flat) for column in self._columns])

    def after(self, flat: NDArray[np.int64]) -> Tree:
        """Return the observations that the steps of rows led to, a tree of `[B, ...]`."""
        below = self._entries(self._links.after(flat))
        if self._slots is not None:
            slots = self._slots.at(flat)
            aside = np.flatnonzero(slots >= 0)
            self._put_final(below, aside, [leaf.take(slots[aside], 0) for leaf in self._final], flat[aside])
        return self._tree(below)

    def _entries(self, flat: NDArray[np.int64]) -> Arrays:
        """Return the leaves of observations `[B, ...]`."""
        return [column.at(flat) for column in self._columns]

    def _put_final(self, below: Arrays, aside: NDArray[np.int64], final: Arrays, flat: NDArray[np.int64]) -> None:
        """Put final observations `[M, ...]` of rows into the places `aside` of leaves `[B, ...]`."""
        for leaf, held in zip(below, final, strict=True):
            leaf[aside] = held

    # State.

    def get_state(self, num_rows: int, *, copy: bool = True) -> dict[str, Any]:
        """Return the first rows as plain data: copies, or views."""
        final = [np.array(leaf, copy=copy or None) for leaf in self._final]
        return {**arrays_of(self._stored(), num_rows, copy=copy), "final": final, "free_slots": list(self._free)}

    def load(self, state: dict[str, Any], num_rows: int) -> Loaded:
        """Check a state that `get_state` returned, and return what is to be restored; nothing is written.

        Raises:
            CheckpointError: A shape differs.
        """
        slots = self._make_slots() if state["final_slots"] else None
        stored = {**self._stored(), "final_slots": [] if slots is None else [slots]}
        pairs, given, final = with_arrays(stored, state, num_rows), state["final"], []
        for column, entry, leaf in zip(self._columns, self._entry_shapes(), given, strict=True) if given else ():
            rows = array_of(leaf, column.dtype, (len(given[0]), *entry))
            final.append(self._storage.zeros(rows.shape, rows.dtype))
            final[-1][...] = rows
        free = [int(slot) for slot in state["free_slots"]]
        return Loaded(self, {"_slots": slots, "_free": free, "_final": final}, pairs)


class StackedObservations(Observations):
    """Stacks of k frames: columns of the newest frame of each stack and of its age, see `FrameStacks`.

    Before a stack that does not continue the row above it, k - 1 rows hold its older frames.

    Attributes:
        padding: `"reset"` if the first frame of an episode is repeated, `"zero"` if zeros fill the missing frames,
            `None` while the observations fit both.
    """

    padding: str | None = None

    def __init__(self, layout: Layout, storage: Storage, links: GridLinks) -> None:
        """Make the columns."""
        self._frames = FrameStacks(links.num_frames, layout)
        self._back = np.arange(links.num_frames - 1, -1, -1)  # number of rows that each frame of a stack is above it
        super().__init__(layout, storage, links)
        self._ages = storage.column(self._shape, np.uint8)
        self._tree = self._tree_of_stacks

    def _entry_shapes(self) -> list[tuple[int, ...]]:
        return self._frames.frame_shapes

    def _stored(self) -> dict[str, Any]:
        return {**super()._stored(), "ages": self._ages}

    def prepare(self, obs: Arrays, final: dict[tuple[int, int], Tree], place: Place) -> Rows:
        """Return the newest frames of stacks and their ages; see `Observations.prepare`."""
        stacks, num_older = self._frames.front(obs, 2), self._frames.num_frames - 1
        joined = place.tails >= 0
        first = np.where(joined, self._ages.at(place.tails), num_older)
        ages, padding = self._frames.ages(obs, first, self.padding, place.obs_in_use)
        rows = [stack[:, :, -1] for stack in stacks]
        if not joined.all():  # older frames that are in no row yet get rows before the others
            history = [np.moveaxis(stack[0, :, :-1], 1, 0) for stack in stacks]
            rows = [np.concatenate(parts) for parts in zip(history, rows, strict=True)]
            ages = np.concatenate([np.zeros((num_older, len(joined)), np.uint8), ages])
        final_stacks = self._frames.front(self._stacked(final), 1) if final else []
        if final:
            at = tuple(np.array(list(final)).T)
            self._frames.check_final(final_stacks, [stack[at] for stack in stacks])
        pairs = [*zip(self._columns, rows, strict=True), (self._ages, ages)]
        return Rows(pairs, list(final), [stack[:, -1] for stack in final_stacks], padding)

    def put(self, rows: Rows, place: Place) -> None:
        """Write stacks; see `Observations.put`."""
        super().put(rows, place)
        self.padding = rows.padding

    def same(self, flat: NDArray[np.int64], first: Arrays, held: Arrays | None = None) -> bool | NDArray[np.bool_]:
        """Return which rows hold the stacks `[N, ...]` with all their frames; see `Observations.same`."""
        return super().same(flat, self._frames.front(first, 1), self._entries(flat))

    def outdated(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows that need a frame of rows that are about to be overwritten."""
        found, current = [], rows
        for age in range(1, self._frames.num_frames):
            current = self._links.after(current)
            found.append(current[self._ages.at(current) >= age])
        return np.concatenate(found)

    def oldest_needed(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of the oldest frame of each stack."""
        oldest: NDArray[np.int64] = self._links.stack(flat, self._ages.at(flat)).min(1)
        return oldest

    def at(self, flat: NDArray[np.int64]) -> Tree:
        """Return the observations of rows, a tree of `[B, ...]`, by flat indices."""
        return self._tree(self._entries(flat))

    def _entries(self, flat: NDArray[np.int64]) -> Arrays:
        """Return the stacks of rows, leaves `[B, k, ...]`."""
        ages = self._ages.at(flat)
        rows = self._links.stack(flat, ages)
        stacks = [column.at(rows) for column in self._columns]
        if self.padding == "zero":
            before = self._back > ages[:, None]
            for stack in stacks:
                stack[before] = 0
        return stacks

    def _put_final(self, below: Arrays, aside: NDArray[np.int64], final: Arrays, flat: NDArray[np.int64]) -> None:
        for leaf, seen, held in zip(below, self._entries(flat), final, strict=True):
            leaf[aside, :-1] = seen[:, 1:]
            leaf[aside, -1] = held

    def _tree_of_stacks(self, stacks: Arrays) -> Tree:
        return self._layout.unflatten([self._frames.back(index, stack) for index, stack in enumerate(stacks)])

    def get_state(self, num_rows: int, *, copy: bool = True) -> dict[str, Any]:
        """Return the first rows as plain data: copies, or views."""
        return {**super().get_state(num_rows, copy=copy), "padding": self.padding}

    def load(self, state: dict[str, Any], num_rows: int) -> Loaded:
        """Check a state, and return what is to be restored."""
        loaded = super().load(state, num_rows)
        loaded.values["padding"] = state["padding"]
        return loaded
