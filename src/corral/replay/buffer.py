"""The replay buffer: a ring of rows in the order of time, from which transitions are drawn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.core.columns import check_new_column, describe, empty_column
from corral.core.returns import n_step_returns
from corral.core.tree import Tree
from corral.errors import CheckpointError, ColumnError, ConfigError, CorralError
from corral.replay.frames import MAX_FRAMES
from corral.replay.layout import Layout
from corral.replay.observations import Arrays, Observations, StackedObservations, array_of
from corral.replay.storage import Column, Storage, spans

if TYPE_CHECKING:
    from corral.episodes.rollout import Rollout

BATCH_COLUMNS = (
    "obs",
    "actions",
    "rewards",
    "next_obs",
    "terminated",
    "truncated",
    "num_steps",
    "discounts",
    "indices",
    "weights",
)
"""What every batch has; any other column was added by user code."""

_STATE_VERSION = 1
_OWN = ("actions", "rewards", "terminated", "truncated", "valid")


class EmptyReplayBufferError(CorralError, RuntimeError):
    """A replay buffer was asked for transitions, and holds none."""


class ReplayBuffer:
    """Keeps the last transitions of runners, and draws from them evenly, with repetition (Lin 1992).

    Columns are rings of rows `[R, L, ...]`: time on axis 0, as in rollouts, and the sub-envs of all runners side by
    side on axis 1. The observation that a step led to is the one of the row below, so each is stored once. Below a
    runner's newest row lies one that only holds the last observation: the gap, which its next rollout overwrites. A
    final observation that `obs` does not hold (same-step autoreset) lies aside.

    Args:
        capacity: Env steps to keep, rounded up to whole rows. A row in which a sub-env was only reset takes its place.
        num_runners: How many runners add rollouts; each has lanes of its own.
        frame_stack: Length k of the stack of frames that an observation is, as Gymnasium's `FrameStackObservation`
            gives it, on the first or else the last axis of each leaf. Only the newest frame is stored. 1 for no stacks.
        directory: Where the columns lie as files, mapped into memory; `None` keeps them in memory. The files have no
            names, and are gone with the buffer or the process.
        seed: Of the draws.

    Raises:
        ConfigError: A number is out of range, or there is no such directory.
    """

    kind = "uniform"

    def __init__(
        self,
        capacity: int,
        *,
        num_runners: int = 1,
        frame_stack: int = 1,
        directory: str | os.PathLike[str] | None = None,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        """Check the numbers; columns are made when the first rollout shows what they look like."""
        for name, number, most in (
            ("capacity", capacity, None),
            ("num_runners", num_runners, None),
            ("frame_stack", frame_stack, MAX_FRAMES),
        ):
            if number < 1 or (most and number > most):
                bounds = f"from 1 to {most}" if most else "at least 1"
                raise ConfigError(f"replay buffer: {name}={number} must be {bounds}.")
        self.capacity, self.num_runners, self.frame_stack = capacity, num_runners, frame_stack
        self._storage = Storage(directory)
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._forget()

    def _forget(self) -> None:
        """Go back to no rollout seen."""
        self._layout: Layout | None = None
        self._observations: Observations | None = None
        self._columns: dict[str, Column] = {}
        self._added: list[str] = []  # names of columns that user code added
        self._workers: list[int] = []  # the runner of each block of lanes, in the order in which they came
        self._written = np.zeros(self.num_runners, np.int64)  # rows of each block over its lifetime, the gap's too
        self._num_rows = self._num_lanes = self._num_valid = 0
        self._candidates: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Return how many transitions there are to draw from."""
        return self._num_valid

    @property
    def nbytes(self) -> int:
        """Memory, or disk space, that the columns take."""
        observations = 0 if self._observations is None else self._observations.nbytes
        return observations + sum(column.grid.nbytes for column in self._columns.values())

    def close(self) -> None:
        """Give back memory and disk space; the buffer is empty then."""
        self._forget()
        self._storage.close()

    # Rollouts in.

    def add(self, rollouts: Rollout | Sequence[Rollout]) -> None:
        """Take rollouts `[T, N, ...]` in, each with one write per column, or two at the ring's end.

        Kept are `obs`, `actions`, `rewards` (as float32), `terminated`, `truncated`, `valid` and the added columns. A
        rollout that is larger than the buffer leaves its last rows. One that does not go on where its runner's last one
        stopped is kept apart from that.

        Raises:
            ColumnError: A column has another shape or dtype than in the rollouts before, or the name of one of
                `BATCH_COLUMNS`; or observations are no stacks of frames, as `frame_stack` says they are. Nothing of
                that rollout is kept.
            ConfigError: The first rollout does not fit `frame_stack`, or the disk has too little room.
        """
        for rollout in rollouts if isinstance(rollouts, Sequence) else (rollouts,):
            if not rollout.num_rows:
                continue
            if self._layout is not None:
                self._add(rollout, self._layout)
                continue
            try:
                self._add(rollout, self._make_columns(Layout.of(rollout)))
            except BaseException:
                self._forget()
                raise

    def _make_columns(self, layout: Layout) -> Layout:
        """Make all columns but the added ones."""
        lanes = layout.num_envs * self.num_runners
        # Besides the transitions, a row for the gap, and those whose older frames have been overwritten.
        rows = -(-self.capacity // lanes) + self.frame_stack
        zeros = self._storage.zeros
        self._columns = {name: Column(zeros((rows, lanes), np.bool_)) for name in ("valid", "terminated", "truncated")}
        self._columns["rewards"] = Column(zeros((rows, lanes), np.float32))
        self._columns["actions"] = Column(zeros((rows, lanes, *layout.actions[1]), layout.actions[0]))
        if self.frame_stack == 1:
            self._observations = Observations(layout, self._storage, rows, lanes)
        else:
            self._observations = StackedObservations(self.frame_stack, layout, self._storage, rows, lanes)
        self._num_rows, self._num_lanes, self._layout = rows, lanes, layout
        return layout

    def _add(self, rollout: Rollout, layout: Layout) -> None:
        assert self._observations is not None
        obs, columns = self._checked(rollout, layout)
        kept = min(rollout.num_rows, self._num_rows - self.frame_stack)
        skipped = rollout.num_rows - kept
        block = self._block_of(rollout.worker_index)
        lanes = slice(block * layout.num_envs, (block + 1) * layout.num_envs)
        joined = not skipped and self._goes_on(rollout, obs, block, lanes)
        final = rollout.final_obs
        if skipped:
            obs, columns = [leaf[skipped:] for leaf in obs], {name: part[skipped:] for name, part in columns.items()}
            final = {(t - skipped, n): leaf for (t, n), leaf in final.items() if t >= skipped}
        first = int(self._written[block]) - joined  # its observation 0 is in the gap already, or comes behind it
        rows = self._observations.prepare(obs, final, first if joined else None, lanes)
        if columns.keys() != self._columns.keys():
            columns |= self._level_added(columns, (kept, layout.num_envs))
        # Nothing is refused from here on.
        start = first if joined else first + self.frame_stack - 1
        stop = start + kept + 1
        # The gap goes, and of the oldest rows left those whose older frames go.
        where = spans(first, stop + self.frame_stack - 1, self._num_rows)
        self._clear(where, lanes)
        self._observations.put(rows, start, lanes)
        for name, column in columns.items():
            self._columns[name].put(start, lanes, column)
        self._workers[block : block + 1] = [rollout.worker_index]
        self._written[block] = stop
        self._num_valid += int(np.count_nonzero(columns["valid"]))
        self._candidates = None
        self._rewritten(where, lanes)

    def _checked(self, rollout: Rollout, layout: Layout) -> tuple[Arrays, dict[str, NDArray[Any]]]:
        """Return the leaves of the observations and the other columns to be kept, all as they must be."""
        num_rows = rollout.num_rows
        obs = layout.leaves(rollout.obs)
        for path, leaf, spec in zip(layout.paths, obs, layout.obs, strict=True):
            layout.check(path, leaf, num_rows + 1, spec)
        columns = {name: rollout.columns[name] for name in _OWN}
        layout.check("actions", columns["actions"], num_rows, layout.actions)
        for name in _OWN[1:]:
            if columns[name].shape != (num_rows, layout.num_envs):
                layout.check(name, columns[name], num_rows, (str(columns[name].dtype), ()))
        for name, column in rollout.added.items():
            if name in BATCH_COLUMNS:
                raise ColumnError(
                    f"column {name!r} was added to a rollout, but batches of the replay buffer have a column of their "
                    f"own of that name: choose another one than {', '.join(BATCH_COLUMNS)}."
                )
            columns[name] = check_new_column(name, column, (num_rows, layout.num_envs))
            held = self._columns.get(name)
            if held is not None and (held.grid.shape[2:], held.grid.dtype) != (column.shape[2:], column.dtype):
                raise ColumnError(
                    f"column {name!r} was added as {describe(column)}, but the replay buffer holds it as "
                    f"{held.grid.dtype}{[num_rows, layout.num_envs, *held.grid.shape[2:]]}: an entry must look alike "
                    "in all rollouts."
                )
        return obs, columns

    def _block_of(self, worker_index: int) -> int:
        """Return the block of lanes of a runner; of one too many, the block of another, which is cut off by it."""
        if worker_index in self._workers:
            return self._workers.index(worker_index)
        return len(self._workers) if len(self._workers) < self.num_runners else worker_index % self.num_runners

    def _goes_on(self, rollout: Rollout, obs: Arrays, block: int, lanes: slice) -> bool:
        """Say whether a rollout's observation 0 is the one in the gap: rollouts between may have been left out."""
        if not rollout.continues or self._workers[block : block + 1] != [rollout.worker_index]:
            return False
        assert self._observations is not None
        return self._observations.same((int(self._written[block]) - 1) % self._num_rows, lanes, obs)

    def _level_added(self, columns: dict[str, NDArray[Any]], shape: tuple[int, int]) -> dict[str, NDArray[Any]]:
        """Make columns that are new here, and return those that a rollout lacks: NaN, or 0 where there is no NaN."""
        for name in [name for name in columns if name not in self._columns]:
            self._make_added(name, columns[name].shape[2:], columns[name].dtype)
        lacking = {name: self._columns[name].grid for name in self._added if name not in columns}
        return {name: empty_column(grid.dtype, (*shape, *grid.shape[2:])) for name, grid in lacking.items()}

    def _make_added(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        grid = self._storage.zeros((self._num_rows, self._num_lanes, *shape), dtype)
        if dtype.kind == "f":
            grid.fill(np.nan)
        self._columns[name] = Column(grid)
        self._added.append(name)

    def _clear(self, where: list[slice], lanes: slice) -> None:
        """Make rows invalid before they are written to."""
        assert self._observations is not None
        self._observations.clear(where, lanes)
        valid = self._columns["valid"].grid
        for span in where:
            self._num_valid -= int(np.count_nonzero(valid[span, lanes]))
            valid[span, lanes] = False

    def _rewritten(self, where: list[slice], lanes: slice) -> None:
        """Take note that rows were written to, or made invalid."""

    # Batches out.

    def sample(self, batch_size: int, *, n_step: int = 1, gamma: float = 1.0, beta: float = 0.0) -> dict[str, Tree]:
        """Draw transitions `[B, ...]`.

        A transition takes n steps, fewer where the episode ends before, or where the steps after are not in the buffer;
        it bootstraps from the observation that the last of them led to, unless that step terminated.

        Args:
            batch_size: B.
            n_step: n.
            gamma: Discount a step.
            beta: How far weights make up for uneven draws. Here all are drawn alike, and weigh 1 whatever it is.

        Returns:
            `obs`, `actions`, and the added columns, of the first step; `rewards` (float32), discounted and summed;
            `next_obs`; `terminated` and `truncated` of the last step; `num_steps` (int64), the steps taken; `discounts`
            (float32), gamma to the power of that; `weights` (float32); and `indices` (int64), which stay those of
            these transitions until they are overwritten, and are of no other then.

        Raises:
            EmptyReplayBufferError: There is nothing to draw from.
            ValueError: `batch_size` or `n_step` is less than 1.
        """
        if batch_size < 1 or n_step < 1:
            raise ValueError(f"sample(): batch_size={batch_size} and n_step={n_step} must be at least 1.")
        if not self._num_valid:
            raise EmptyReplayBufferError(
                "the replay buffer holds no transitions to draw from: add rollouts first. Algorithms wait for "
                "num_steps_sampled_before_learning_starts env steps."
            )
        assert self._observations is not None
        flat, weights = self._draw(batch_size, beta)
        columns = self._columns
        if n_step == 1:
            last, rewards = flat, columns["rewards"].at(flat)
            num_steps, discounts = np.ones(batch_size, np.int64), np.full(batch_size, gamma, np.float32)
        else:
            steps = flat + (np.arange(n_step) * self._num_lanes)[:, None]
            done = columns["terminated"].at(steps) | columns["truncated"].at(steps)
            rewards, num_steps, discounts = n_step_returns(
                columns["rewards"].at(steps), columns["valid"].at(steps), done, gamma=gamma
            )
            last = flat + (num_steps - 1) * self._num_lanes
        return {
            "obs": self._observations.at(flat),
            "actions": columns["actions"].at(flat),
            "rewards": rewards,
            "next_obs": self._observations.after(last),
            "terminated": columns["terminated"].at(last),
            "truncated": columns["truncated"].at(last),
            "num_steps": num_steps,
            "discounts": discounts,
            "indices": self._stamped(flat),
            "weights": weights,
            **{name: columns[name].at(flat) for name in self._added},
        }

    def _draw(self, batch_size: int, beta: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return flat indices and weights, `[B]` each."""
        weights = np.ones(batch_size, np.float32)
        num_valid, num_entries = self._num_valid, self._num_rows_in_use * self._num_lanes
        if 4 * num_valid < num_entries:  # so few that most draws would be in vain
            if self._candidates is None:
                self._candidates = np.flatnonzero(self._columns["valid"].flat[:num_entries])
            return self._candidates.take(self._evenly(num_valid, batch_size)), weights
        # Some draws more than enough, nearly always, and those of them that hit something.
        num_draws = batch_size * num_entries // num_valid + batch_size // 8 + 8
        valid = self._columns["valid"]
        drawn = self._evenly(num_entries, num_draws)
        flat = drawn[valid.at(drawn)]
        while len(flat) < batch_size:
            drawn = self._evenly(num_entries, num_draws)
            flat = np.concatenate([flat, drawn[valid.at(drawn)]])
        return flat[:batch_size], weights

    def _evenly(self, stop: int, size: int) -> NDArray[np.int64]:
        """Return numbers from 0 to below `stop`; half as dear as `integers`, and even to 53 bits."""
        return (self._rng.random(size) * stop).astype(np.int64)

    @property
    def _num_rows_in_use(self) -> int:
        return min(int(self._written.max()), self._num_rows)

    def _stamped(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return indices that count on past the end of the ring, so that a row written later has others."""
        size = self._num_rows * self._num_lanes
        if self.num_runners == 1:
            lap, head = divmod(int(self._written[0]), self._num_rows)
            return flat + size * (lap - (flat >= head * self._num_lanes))
        assert self._layout is not None
        blocks = flat % self._num_lanes // self._layout.num_envs
        laps, heads = np.divmod(self._written, self._num_rows)
        stamped: NDArray[np.int64] = flat + size * (laps[blocks] - (flat >= heads[blocks] * self._num_lanes))
        return stamped

    # State.

    def get_state(self) -> dict[str, Any]:
        """Return everything as plain data: strings, numbers, lists, dicts by string, and arrays of the rows in use.

        `corral.checkpoint.codec` and other packers of NumPy arrays can write it.
        """
        num_rows = self._num_rows_in_use
        state: dict[str, Any] = {"version": _STATE_VERSION, **self._settings(), "rng": _plain_rng(self._rng)}
        if self._layout is None or self._observations is None:
            return {**state, "layout": None}
        return {
            **state,
            "layout": self._layout.to_state(),
            "workers": list(self._workers),
            "written": self._written.tolist(),
            "columns": {name: np.array(self._columns[name].grid[:num_rows]) for name in self._columns},
            "added": [
                [name, str(self._columns[name].grid.dtype), list(self._columns[name].grid.shape[2:])]
                for name in self._added
            ],
            "obs": self._observations.get_state(num_rows),
        }

    def _settings(self) -> dict[str, Any]:
        """Return what a state must have been made with."""
        return {
            "type": self.kind,
            "capacity": self.capacity,
            "num_runners": self.num_runners,
            "frame_stack": self.frame_stack,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` gave; samples are those that the other buffer would have given from there on.

        Raises:
            CheckpointError: The state is of a buffer with other settings or columns, or damaged. Nothing is changed.
        """
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the state is of a replay buffer with {name}={state.get(name)!r}, and this one has "
                    f"{name}={value!r}: make the buffer with {name}={state.get(name)!r}, or go on without that state."
                )
        if state.get("version") != _STATE_VERSION:
            raise CheckpointError(
                f"the state of the replay buffer has format {state.get('version')}, and this version of Corral reads "
                f"{_STATE_VERSION}: use the version that wrote it, or go on without that state."
            )
        was_empty = self._layout is None
        try:
            self._take_over(state)
        except BaseException as error:
            if was_empty:
                self._forget()
            if isinstance(error, CorralError) or not isinstance(error, (KeyError, IndexError, TypeError, ValueError)):
                raise
            raise CheckpointError(f"the state of the replay buffer is damaged: {error!r}.") from error

    def _take_over(self, state: Mapping[str, Any]) -> None:
        if state["layout"] is None:
            rng = _rng_of(state["rng"])
            self._forget()
            self._rng = rng
            return
        layout = Layout.from_state(state["layout"])
        if self._layout is None:
            self._make_columns(layout)
        elif layout != self._layout:
            raise CheckpointError(
                f"the state is of a replay buffer of other columns than this one's: {layout} instead of "
                f"{self._layout}. Use the environment and the number of envs that it was made with, or go on without "
                "that state."
            )
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        """Read all of a state, and then take it over."""
        assert self._observations is not None
        rng, written = _rng_of(state["rng"]), np.array(state["written"], np.int64).reshape(self.num_runners)
        num_rows = min(int(written.max()), self._num_rows)
        shape, added = (num_rows, self._num_lanes), state["added"]
        specs = {name: (self._columns[name].grid.dtype, self._columns[name].grid.shape[2:]) for name in _OWN}
        specs |= {name: (np.dtype(dtype), tuple(entry)) for name, dtype, entry in added}
        columns = {
            name: array_of(state["columns"][name], dtype, (*shape, *entry)) for name, (dtype, entry) in specs.items()
        }
        obs = self._observations.checked_state(state["obs"], num_rows)
        # Nothing is refused from here on.
        for name in self._added:
            del self._columns[name]
        self._added = []
        for name, dtype, entry in added:
            self._make_added(name, tuple(entry), np.dtype(dtype))
        self._columns["valid"].grid[num_rows:] = False
        for name, column in columns.items():
            self._columns[name].grid[:num_rows] = column
        self._observations.set_state(obs, num_rows)
        self._rng, self._written, self._workers = rng, written, list(state["workers"])
        self._num_valid, self._candidates = int(np.count_nonzero(columns["valid"])), None


def _plain_rng(rng: np.random.Generator) -> dict[str, str]:
    """Return a generator's state; its integers have more bits than packers know."""
    state: Mapping[str, Any] = rng.bit_generator.state
    flat = {**state["state"], "has_uint32": state["has_uint32"], "uinteger": state["uinteger"]}
    return {name: str(number) for name, number in flat.items()}


def _rng_of(plain: Mapping[str, str]) -> np.random.Generator:
    numbers = {name: int(number) for name, number in plain.items()}
    bits = np.random.PCG64()
    bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": numbers["state"], "inc": numbers["inc"]},
        "has_uint32": numbers["has_uint32"],
        "uinteger": numbers["uinteger"],
    }
    return np.random.Generator(bits)
