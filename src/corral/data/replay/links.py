"""Where rows of a rollout go, and where their neighbours are: in a grid of lanes in step, or linked in one ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.data.replay.storage import Loaded, Storage, Where, arrays_of, spans, with_arrays
from corral.errors import CheckpointError

if TYPE_CHECKING:
    from corral.data.episodes.rollout import Rollout

Positions = NDArray[np.int64]
LaneKey = tuple[int, int, str | int]
"""Index of the runner, index of the sub-env, and id of the agent."""
NONE: Positions = np.empty(0, np.int64)


@dataclass
class Place:
    """Where the rows of a rollout go.

    Attributes:
        kept: Index of what is kept of columns `[T, N, ...]`; `None` is all.
        lanes: Lanes of the ring that are written.
        tails: Flat index of the row that holds observation 0 of a lane already, or -1, int64 `[N]`.
        overwritten: Spans of rows that are written, or whose older frames are.
        obs_at: Where the rows of observations go, with the rows of older frames before them.
        steps_at: Where the rows of steps go.
        stop: Position after the last row.
        block: Index of the block of lanes.
        obs_in_use: Which observations `[T + 1, N]` count; `None` is all.
        outdated: Flat indices of other rows, some not valid, whose older frames are overwritten; `None` is none.
        connect: Function that links the rows, once they are written.
    """

    kept: Any
    lanes: slice
    tails: Positions
    overwritten: list[slice]
    obs_at: Where
    steps_at: Where
    stop: int
    block: int = 0
    obs_in_use: NDArray[np.bool_] | None = None
    outdated: Positions | None = None
    connect: Callable[[], None] | None = None


class GridLinks:
    """Lanes in step, side by side: the next row of a lane is L entries further in the flat ring.

    Each runner has a block of lanes. After its newest row there is a row that holds only the last observation, the gap;
    if its next rollout continues there, the gap becomes the row of its first step.

    Attributes:
        num_rows: Number of rows R.
        num_lanes: Number of lanes L.
        workers: The runner of each block, in the order in which they came.
        written: Rows ever written to each block, the gap included, int64.
        num_rows_in_use: Number of rows that were ever written to any block, at most R.
    """

    def __init__(self, num_rows: int, num_envs: int, num_blocks: int, num_frames: int) -> None:
        """Keep the numbers; an observation is in the rows of its `num_frames` frames."""
        self.num_rows, self.num_lanes, self.num_frames = num_rows, num_envs * num_blocks, num_frames
        self.size, self._num_envs = num_rows * self.num_lanes, num_envs
        self.workers: list[int] = []
        self.written, self.num_rows_in_use = np.zeros(num_blocks, np.int64), 0
        self._lanes, self._no_tails = np.arange(self.num_lanes), np.full(num_envs, -1)

    def after(self, flat: Positions) -> Positions:
        """Return the entries after entries, `[B]`."""
        return flat + self.num_lanes

    def before(self, flat: Positions) -> Positions:
        """Return the entries before entries, `[B]`; an entry without one may be its own."""
        return flat - self.num_lanes

    def window(self, flat: Positions, num_steps: int) -> Positions:
        """Return the entries and the entries after them, `[num_steps, B]`."""
        return flat + (np.arange(num_steps) * self.num_lanes)[:, None]

    def stack(self, flat: Positions, ages: NDArray[Any]) -> Positions:
        """Return the entries that hold the frames of stacks, `[B, k]`, the newest last.

        Args:
            flat: Entries of the stacks, `[B]`.
            ages: Number of older frames of each stack that are in earlier entries, `[B]`.
        """
        back = np.arange(self.num_frames - 1, -1, -1)
        rows: Positions = flat[:, None] - np.minimum(back, ages[:, None]) * self.num_lanes
        return rows

    def stamped(self, flat: Positions) -> Positions:
        """Return indices that keep counting past the end of the ring, so that no row ever gets the same ones again."""
        if len(self.written) == 1:
            lap, head = divmod(int(self.written[0]), self.num_rows)
            return flat + self.size * (lap - (flat >= head * self.num_lanes))
        blocks = flat % self.num_lanes // self._num_envs
        laps, heads = np.divmod(self.written, self.num_rows)
        stamped: Positions = flat + self.size * (laps[blocks] - (flat >= heads[blocks] * self.num_lanes))
        return stamped

    # Rollouts in.

    def place(self, rollout: Rollout, obs: list[NDArray[Any]], valid: NDArray[np.bool_], held: Any) -> Place:
        """Return where a rollout goes; nothing is changed. Of one that is larger than the ring the last rows are kept.

        Args:
            rollout: The rollout `[T, N, ...]`.
            obs: Leaves of its observations `[T + 1, N, ...]`.
            valid: Its column `valid`.
            held: The observations in the ring, as `Observations`.
        """
        kept = min(len(valid), self.num_rows - self.num_frames)
        worker, num_blocks = rollout.worker_index, len(self.written)
        if worker in self.workers:
            block = self.workers.index(worker)
        else:  # a runner too many takes over the block of another
            block = len(self.workers) if len(self.workers) < num_blocks else worker % num_blocks
        lanes, written = slice(block * self._num_envs, (block + 1) * self._num_envs), int(self.written[block])
        tails = (written - 1) % self.num_rows * self.num_lanes + self._lanes[lanes]
        # Some rollouts may not have been added, or another runner had these lanes.
        continues = rollout.continues and kept == len(valid) and self.workers[block : block + 1] == [worker]
        joined = continues and held.same(tails, [leaf[0] for leaf in obs]) is True
        first = written - joined  # observation 0 is in the gap already, or goes after the gap and its older frames
        start = first if joined else first + self.num_frames - 1
        stop = start + kept + 1
        return Place(
            None if kept == len(valid) else slice(len(valid) - kept, None),
            lanes,
            tails if joined else self._no_tails,
            # With the oldest rows whose older frames are overwritten.
            spans(first, stop + self.num_frames - 1, self.num_rows),
            first,
            start,
            stop,
            block,
        )

    def note(self, place: Place, worker_index: int) -> None:
        """Note that the rows of a rollout of a runner were written where `place` says."""
        if place.connect is not None:
            place.connect()
        self.workers[place.block : place.block + 1] = [worker_index]
        self.written[place.block] = place.stop
        self.num_rows_in_use = max(self.num_rows_in_use, min(place.stop, self.num_rows))

    # State.

    def get_state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the state as plain data, by its keys in the state of the buffer."""
        return {"workers": list(self.workers), "written": self.written.tolist()}

    def load(self, state: dict[str, Any]) -> Loaded:
        """Check a state, and return what is to be restored; nothing is written.

        Raises:
            CheckpointError: The state is of a ring of another size, or damaged.
        """
        written = np.array(state["written"], np.int64).reshape(self.written.shape)
        num_rows = min(int(written.max()), self.num_rows)
        return Loaded(self, {"written": written, "workers": list(state["workers"]), "num_rows_in_use": num_rows}, [])


class LaneLinks(GridLinks):
    """Lanes with clocks of their own, mixed in one ring of R rows: each row is linked to its neighbours in its lane.

    Positions count all rows that were ever written; the row of a position is its remainder by R. Links lead to rows
    that were written later, and the oldest rows are overwritten first, so a link to a next row never leads astray. The
    last observation of each lane has a row of its own, the tail, as the gap has in a grid.

    Attributes:
        next: Position of the next row of the lane, a column int64 `[R]`; at the end of a lane, the row's own.
        previous: Position of the row before, a column int64 `[R]`; at the beginning of a lane, the row's own.
        tails: Position of the newest row of each lane, which holds only an observation, by key.
    """

    def __init__(self, num_rows: int, num_frames: int, storage: Storage) -> None:
        """Make the links of an empty ring."""
        super().__init__(num_rows, 1, 1, num_frames)
        self.next, self.previous = (storage.column((num_rows,), np.int64, on_host=True) for _ in range(2))
        self.tails: dict[LaneKey, int] = {}

    def after(self, flat: Positions) -> Positions:
        """Return the positions of the next rows, `[B]`."""
        return self.next.at(flat)

    def before(self, flat: Positions) -> Positions:
        """Return the positions of the rows before, `[B]`; at the beginning of a lane, the row's own."""
        return self.previous.at(flat)

    def window(self, flat: Positions, num_steps: int) -> Positions:
        """Return the rows and the rows after them, `[num_steps, B]`."""
        steps = np.empty((num_steps, len(flat)), np.int64)
        steps[0] = flat
        for step in range(1, num_steps):
            steps[step] = self.after(steps[step - 1])
        return steps

    def stack(self, flat: Positions, ages: NDArray[Any]) -> Positions:
        """Return the rows that hold the frames of stacks, `[B, k]`; see `GridLinks.stack`."""
        rows = np.empty((len(flat), self.num_frames), np.int64)
        rows[:, -1] = current = flat
        for age in range(1, self.num_frames):
            current = np.where(ages >= age, self.before(current), current)
            rows[:, -1 - age] = current
        return rows

    def place(self, rollout: Any, obs: list[NDArray[Any]], valid: NDArray[np.bool_], held: Any) -> Place:
        """Return where the steps of lanes go, and the observations after the last steps; see `GridLinks.place`."""
        lengths = np.where(valid.any(0), len(valid) - valid[::-1].argmax(0), 0)  # of each lane, to its last valid row
        first, lanes = self._latest_that_fit(lengths)
        lengths, num_older, written = lengths[lanes] - first, self.num_frames - 1, int(self.written[0])
        agents = [rollout.lane_agents[lane] for lane in lanes]
        keys = [(rollout.worker_index, *seat) for seat in zip(rollout.lane_envs[lanes].tolist(), agents, strict=True)]

        tails = np.array([self.tails.get(key, -1) for key in keys], np.int64)
        if first or not rollout.continues:
            tails[:] = -1
        elif rollout.carry is not None:  # equal observations do not make steps of two episodes one
            tails[rollout.carry.lengths[lanes] == 0] = -1
        tails = np.where(held.same(tails, [leaf[0, lanes] for leaf in obs]), tails, -1)
        oldest = np.where(tails >= 0, held.oldest_needed(tails), -1)
        while True:  # a tail that this rollout overwrites is of no use, and its lane then takes more rows
            joined = tails >= 0
            count = int((lengths + 1 + num_older).sum()) - (1 + num_older) * int(np.count_nonzero(joined))
            lost = joined & (oldest < written + count - self.num_rows)
            if not lost.any():
                break
            tails[lost] = -1

        # The rows of a lane: older frames, the observation 0, and what its steps led to. What is there already keeps
        # its place, and the others follow each other in the order of time.
        times = np.arange(0 if joined.all() else -num_older, len(valid) - first + 1)[:, None]
        present = (times <= lengths) & ((times >= 0) | ~joined)
        is_new = present & ((times != 0) | ~joined)
        positions = np.full(present.shape, -1, np.int64)
        positions[is_new] = np.arange(written, written + count)
        begin = len(times) - len(valid) + first - 1  # index of time 0
        positions[begin, joined] = tails[joined]
        is_step = times[begin:-1] < lengths
        overwritten = spans(written, written + count, self.num_rows)
        old = np.concatenate([np.arange(span.start, span.stop) for span in overwritten])

        def connect() -> None:
            self._connect(positions, present, joined)
            ends = np.take_along_axis(positions, lengths[None] + begin, 0)[0].tolist()
            self.tails |= dict(zip(keys, ends, strict=True))

        return Place(
            (slice(first, None), lanes),
            slice(0, 1),
            tails,
            overwritten,
            (is_new, positions[is_new] % self.num_rows),
            (is_step, positions[begin:-1][is_step] % self.num_rows),
            written + count,
            0,
            present[begin:],
            np.unique(held.outdated(old[old < self.num_rows_in_use]) % self.num_rows),
            connect,
        )

    def _latest_that_fit(self, lengths: Positions) -> tuple[int, Positions]:
        """Return the first row of a rollout and the lanes whose steps fit into the ring, for lanes of given lengths."""
        lanes = np.flatnonzero(lengths)
        rows = (lengths[lanes] > np.arange(lengths.max(initial=0))[:, None])[::-1]  # from the last row on
        needed = np.cumsum(rows.sum(1)) + np.maximum.accumulate(rows.sum(1)) * self.num_frames
        num_kept = max(1, int(np.count_nonzero(needed <= self.num_rows)))
        first = max(0, len(rows) - num_kept)
        lanes = lanes[lengths[lanes] > first]
        return first, lanes[-(self.num_rows // (self.num_frames + 1)) :]

    def _connect(self, positions: Positions, present: NDArray[np.bool_], joined: NDArray[np.bool_]) -> None:
        """Link rows that were written.

        Args:
            positions: Position of each row of each lane, `[M, L]`.
            present: Which of them are rows, bool `[M, L]`; the rows of a lane are consecutive.
            joined: Whether the first row of a lane was there before, bool `[L]`.
        """
        both = present[:-1] & present[1:]
        firsts, lasts = present.copy(), present.copy()
        firsts[1:] &= ~present[:-1]
        lasts[:-1] &= ~present[1:]
        earlier, later = positions[:-1][both], positions[1:][both]
        begins, ends = positions[firsts & ~joined], positions[lasts]
        previous, after = self.previous.grid, self.next.grid
        previous[begins % self.num_rows], after[ends % self.num_rows] = begins, ends
        after[earlier % self.num_rows], previous[later % self.num_rows] = later, earlier

    # State.

    @property
    def _columns(self) -> dict[str, Any]:
        return {"next": self.next, "previous": self.previous}

    def get_state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the state as plain data; see `GridLinks.get_state`."""
        arrays = arrays_of(self._columns, self.num_rows_in_use, copy=copy)
        tails = [[*key, position] for key, position in self.tails.items()]
        return {**super().get_state(), "lanes": {"num_rows": self.num_rows, **arrays, "tails": tails}}

    def load(self, state: dict[str, Any]) -> Loaded:
        """Check a state; see `GridLinks.load`."""
        loaded, lanes = super().load(state), state["lanes"]
        if lanes["num_rows"] != self.num_rows:
            raise CheckpointError(
                f"the state is from a replay buffer of {lanes['num_rows']} rows, and this one has {self.num_rows}: use "
                "the environment and the number of envs that it was made with, or continue without the state."
            )
        tails = {(int(runner), int(env), agent): int(position) for runner, env, agent, position in lanes["tails"]}
        pairs = with_arrays(self._columns, lanes, loaded.values["num_rows_in_use"])
        return Loaded(self, {**loaded.values, "tails": tails}, pairs)
