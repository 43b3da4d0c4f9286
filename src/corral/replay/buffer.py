"""The replay buffer: a ring of rows in the order of time, from which batches of transitions are drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.core.columns import check_new_column, describe, empty_column
from corral.core.interrupts import interruptible
from corral.core.returns import n_step_returns
from corral.core.tree import Tree, map_tree, named_leaves
from corral.episodes.lanes import LaneRollout
from corral.errors import CheckpointError, ColumnError, ConfigError, CorralError
from corral.replay.frames import MAX_FRAMES
from corral.replay.layout import Layout
from corral.replay.links import GridLinks, LaneLinks, lane_keys
from corral.replay.observations import Arrays, Observations, StackedObservations, array_of
from corral.replay.storage import Column, Storage, put_rows, spans

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
"""Names of the columns of every batch; user code added any other column."""

NumSteps = int | tuple[int, int]
"""Number of steps of a transition, or the smallest and the largest number, from which each transition draws its own."""

SEQUENCE_COLUMNS = ("states", "sequence_starts", "unit_starts", "burns_in", "learns")
"""Names of the other columns of batches of sequences."""

STATES = "states"
"""Name of the states of a module with memory; each leaf has a column, such as `states.h`."""

INTRINSIC = "rewards.intrinsic"
"""Name of the column of the intrinsic rewards, which batches contain as a part of their rewards only."""

_STATE_VERSION = 2
_OWN = ("actions", "rewards", "terminated", "truncated", "valid")


class EmptyReplayBufferError(CorralError, RuntimeError):
    """Transitions were drawn from a replay buffer that holds none."""


class ReplayBuffer:
    """Keeps the latest transitions of runners, and draws uniformly from them, with replacement (Lin 1992).

    Rollouts of several agents have lanes with clocks of their own, which come and go. Their rows are mixed in one ring,
    in the order of time, and linked to their neighbours in their lane; see `LaneLinks`. All else is the same.

    The columns are rings of rows `[R, L, ...]`: time on axis 0, as in rollouts, and lanes on axis 1, which are the
    sub-envs of all runners. The observation that a step led to is in the next row, so each observation is stored once.
    After the newest row of a runner there is a row that holds only the last observation. This row is called the gap;
    the next rollout of the runner overwrites it. Final observations that `obs` does not hold (same-step autoreset) are
    stored separately.

    Args:
        capacity: Env steps to keep, rounded up to whole rows. Rows in which a sub-env was only reset count too, and
            with several agents the rows that hold only the last observation of an episode.
        num_runners: Number of runners that add rollouts; each has its own lanes.
        frame_stack: Length k of the stack of frames that an observation is, as Gymnasium's `FrameStackObservation`
            gives it, on the first or otherwise the last axis of each leaf. Only the newest frame is stored. 1 if
            observations are no stacks.
        directory: Directory of the files that hold the columns, mapped into memory; `None` keeps them in memory. The
            files have no names, and disappear with the buffer or the process.
        seed: Seed of the draws.

    Raises:
        ConfigError: A number is out of range, or the directory does not exist.
    """

    kind = "uniform"

    num_env_steps_added: int
    """Number of valid steps that were ever added, of which the ring has overwritten some."""

    def __init__(
        self,
        capacity: int,
        *,
        num_runners: int = 1,
        frame_stack: int = 1,
        directory: str | os.PathLike[str] | None = None,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        """Check the numbers; columns are made when the first rollout shows their shapes and dtypes."""
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
        """Return to the state without any rollout."""
        self._layout: Layout | None = None
        self._observations: Observations | None = None
        self._columns: dict[str, Column] = {}
        self._added: list[str] = []  # names of columns that user code added
        self._workers: list[int] = []  # the runner of each block of lanes, in the order in which they came
        self._lanes: LaneLinks | None = None  # if lanes have clocks of their own
        self._links = GridLinks(0)
        self._written = np.zeros(self.num_runners, np.int64)  # rows ever written to each block, the gap included
        self._num_rows = self._num_lanes = self._num_valid = self.num_env_steps_added = 0
        self._candidates: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Return the number of transitions that can be drawn."""
        return self._num_valid

    @property
    def nbytes(self) -> int:
        """Bytes of memory, or of disk space, that the columns take."""
        observations = 0 if self._observations is None else self._observations.nbytes
        return observations + sum(column.grid.nbytes for column in self._columns.values())

    def close(self) -> None:
        """Free memory and disk space; the buffer is empty afterwards."""
        self._forget()
        self._storage.close()

    # Rollouts in.

    def add(self, rollouts: Rollout | Sequence[Rollout]) -> None:
        """Store rollouts `[T, N, ...]`, each with one write per column, or two writes at the end of the ring.

        The buffer keeps `obs`, `actions`, `rewards` (as float32), `terminated`, `truncated`, `valid` and the columns
        that user code added. Of a rollout that is larger than the buffer it keeps the last rows. No transition connects
        a rollout with the previous one of its runner, unless the rollout continues where that one stopped.

        Raises:
            ColumnError: A column has another shape or dtype than in the rollouts before, or an added column has one of
                the names `BATCH_COLUMNS`; or observations are not stacks of `frame_stack` frames. Nothing of that
                rollout is kept.
            ConfigError: The first rollout does not fit `frame_stack`, or the disk has too little space.
        """
        for rollout in rollouts if isinstance(rollouts, Sequence) else (rollouts,):
            if not rollout.num_rows:
                continue
            was_empty = self._layout is None
            try:
                if isinstance(rollout, LaneRollout):
                    self._add_lanes(rollout, self._layout or self._make_ring(rollout))
                else:
                    self._add(rollout, self._layout or self._make_columns(Layout.of(rollout)))
            except BaseException:
                if was_empty:
                    self._forget()
                raise

    def _make_ring(self, rollout: LaneRollout) -> Layout:
        """Make the columns of one ring, for lanes with clocks of their own."""
        num_lanes = rollout.num_envs * self.num_runners
        # Besides the transitions: a row for the tail of each lane, and rows for older frames.
        num_rows = max(self.capacity, num_lanes) + num_lanes * self.frame_stack
        return self._make_columns(replace(Layout.of(rollout), num_envs=1), num_rows)

    def _make_columns(self, layout: Layout, num_linked_rows: int | None = None) -> Layout:
        """Make all columns except those that user code adds; with a number of linked rows, one ring of them."""
        zeros = self._storage.zeros
        if num_linked_rows is None:
            lanes = layout.num_envs * self.num_runners
            # Besides the transitions: a row for the gap, and the rows whose older frames have been overwritten.
            rows = -(-self.capacity // lanes) + self.frame_stack
            self._links = GridLinks(lanes)
        else:
            lanes, rows = 1, num_linked_rows
            self._links = self._lanes = LaneLinks(rows, self._storage)
            self._written = np.zeros(1, np.int64)
        self._columns = {name: Column(zeros((rows, lanes), np.bool_)) for name in ("valid", "terminated", "truncated")}
        self._columns["rewards"] = Column(zeros((rows, lanes), np.float32))
        self._columns["actions"] = Column(zeros((rows, lanes, *layout.actions[1]), layout.actions[0]))
        if self.frame_stack == 1:
            self._observations = Observations(layout, self._storage, rows, lanes, self._links)
        else:
            self._observations = StackedObservations(self.frame_stack, layout, self._storage, rows, lanes, self._links)
        self._num_rows, self._num_lanes, self._layout = rows, lanes, layout
        return layout

    def _add(self, rollout: Rollout, layout: Layout) -> None:
        assert self._observations is not None
        obs, columns = self._checked(rollout, layout)
        num_added = int(np.count_nonzero(columns["valid"]))
        kept = min(rollout.num_rows, self._num_rows - self.frame_stack)
        skipped = rollout.num_rows - kept
        block = self._block_of(rollout.worker_index)
        lanes = slice(block * layout.num_envs, (block + 1) * layout.num_envs)
        joined = not skipped and self._continues(rollout, obs, block, lanes)
        final = rollout.final_obs
        if skipped:
            obs, columns = [leaf[skipped:] for leaf in obs], {name: part[skipped:] for name, part in columns.items()}
            final = {(t - skipped, n): leaf for (t, n), leaf in final.items() if t >= skipped}
        first = int(self._written[block]) - joined  # its observation 0 is in the gap already, or goes after the gap
        rows = self._observations.prepare(obs, final, first if joined else None, lanes)
        if columns.keys() != self._columns.keys():
            columns |= self._level_added(columns, (kept, layout.num_envs))
        # From here on nothing can fail.
        start = first if joined else first + self.frame_stack - 1
        stop = start + kept + 1
        # The gap is cleared, and so are the oldest rows whose older frames are overwritten.
        where = spans(first, stop + self.frame_stack - 1, self._num_rows)
        self._clear(where, lanes)
        self._observations.put(rows, start, lanes)
        put_rows([(self._columns[name], column) for name, column in columns.items()], start, lanes)
        self._workers[block : block + 1] = [rollout.worker_index]
        self._written[block] = stop
        self._num_valid += int(np.count_nonzero(columns["valid"]))
        self.num_env_steps_added += num_added
        self._candidates = None
        self._rewritten(where, lanes)

    def _add_lanes(self, rollout: LaneRollout, layout: Layout) -> None:
        """Store the steps of lanes that have clocks of their own, and the observation after the last step of each.

        This observation has a row of its own, the tail of the lane. If the next rollout continues the lane, the tail
        becomes the row of its first step.
        """
        assert self._observations is not None and self._lanes is not None
        observations, links, num_rows = self._observations, self._lanes, self._num_rows
        obs, columns = self._checked(rollout, replace(layout, num_envs=rollout.num_envs))
        if columns.keys() != self._columns.keys():
            columns |= self._level_added(columns, (rollout.num_rows, rollout.num_envs))
        num_added = int(np.count_nonzero(columns["valid"]))
        lengths = _lengths(columns["valid"])
        first, lanes = _latest_that_fit(lengths, num_rows, self.frame_stack)
        lengths = lengths[lanes] - first
        obs = [leaf[first:, lanes] for leaf in obs]
        columns = {name: column[first:, lanes] for name, column in columns.items()}
        keys = lane_keys(rollout.worker_index, rollout.lane_envs[lanes], [rollout.lane_agents[n] for n in lanes])

        tails = np.array([links.tails.get(key, -1) for key in keys], np.int64)
        if first or not rollout.continues:
            tails[:] = -1
        elif rollout.carry is not None:  # equal observations do not make steps of two episodes one
            tails = np.where(rollout.carry.lengths[lanes] > 0, tails, -1)
        tails = np.where(observations.same_lanes(tails, obs), tails, -1)
        written, num_older = int(self._written[0]), self.frame_stack - 1
        oldest = np.where(tails >= 0, observations.oldest_needed(tails), -1)
        while True:  # a tail that this rollout overwrites is of no use, and its lane then takes more rows
            count = int((lengths + 1 + num_older).sum()) - (1 + num_older) * int(np.count_nonzero(tails >= 0))
            lost = (tails >= 0) & (oldest < written + count - num_rows)
            if not lost.any():
                break
            tails[lost] = -1
        joined = tails >= 0
        rows = observations.prepare_lanes(obs, lengths, tails)
        # From here on nothing can fail.
        times = np.arange(-num_older, len(obs[0]))[:, None]
        present = (times <= lengths) & ((times >= 0) | ~joined)
        is_new = present & ((times != 0) | ~joined)
        positions = np.full(present.shape, -1, np.int64)
        positions[is_new] = np.arange(written, written + count)
        positions[num_older, joined] = tails[joined]
        where = spans(written, written + count, num_rows)
        stale = self._outdated(where)
        self._columns["valid"].flat[stale] = False
        self._num_valid -= len(stale)
        self._clear(where, slice(0, 1))
        observations.put_lanes(rows, written, is_new, positions)
        links.connect(positions, present, joined)
        links.tails |= dict(
            zip(keys, np.take_along_axis(positions, lengths[None] + num_older, 0)[0].tolist(), strict=True)
        )
        is_step = times[num_older:-1] < lengths
        taken = positions[num_older:-1][is_step] % num_rows
        for name, column in columns.items():
            self._columns[name].flat[taken] = column[is_step]
        self._written[0] = written + count
        self._num_valid += int(np.count_nonzero(columns["valid"][is_step]))
        self.num_env_steps_added += num_added
        self._candidates = None
        self._rewritten(where, slice(0, 1))
        self._revalued(np.concatenate([stale, taken]))

    def _checked(self, rollout: Rollout, layout: Layout) -> tuple[Arrays, dict[str, NDArray[Any]]]:
        """Return the leaves of the observations and the other columns to keep, after checking all of them."""
        num_rows, given = rollout.num_rows, rollout.columns
        obs = layout.leaves(given["obs"])
        layout.check(zip(layout.paths, obs, layout.obs, strict=True), num_rows + 1)
        columns = {name: given[name] for name in _OWN}
        layout.check([("actions", columns["actions"], layout.actions)], num_rows)
        for name in _OWN[1:]:
            if columns[name].shape != (num_rows, layout.num_envs):
                layout.check([(name, columns[name], (str(columns[name].dtype), ()))], num_rows)
        states = _columns_of_states(rollout.states) if "states" in given else []
        added = rollout.added
        taken = (*BATCH_COLUMNS, *SEQUENCE_COLUMNS, *(name for name, _ in states)) if states else BATCH_COLUMNS
        if clash := next(filter(taken.__contains__, added), None):
            raise ColumnError(
                f"column {clash!r} was added to a rollout, but batches of the replay buffer already have a column "
                f"of that name: choose a name other than {', '.join(taken)}."
            )
        others = [(name, leaf[:num_rows]) for name, leaf in states]
        if rollout.intrinsic_rewards is not None:
            others.append((INTRINSIC, rollout.intrinsic_rewards.astype(np.float32)))
        for name, column in [*added.items(), *others]:
            columns[name] = check_new_column(name, column, (num_rows, layout.num_envs))
            held = self._columns.get(name)
            if held is not None and (held.grid.shape[2:], held.grid.dtype) != (column.shape[2:], column.dtype):
                raise ColumnError(
                    f"column {name!r} was added as {describe(column)}, but the replay buffer holds it as "
                    f"{held.grid.dtype}{[num_rows, layout.num_envs, *held.grid.shape[2:]]}: entries must have the same "
                    "shape and dtype in all rollouts."
                )
        return obs, columns

    def _block_of(self, worker_index: int) -> int:
        """Return the block of lanes of a runner; a runner beyond `num_runners` takes over the block of another."""
        if worker_index in self._workers:
            return self._workers.index(worker_index)
        return len(self._workers) if len(self._workers) < self.num_runners else worker_index % self.num_runners

    def _continues(self, rollout: Rollout, obs: Arrays, block: int, lanes: slice) -> bool:
        """Return whether observation 0 of a rollout is the one in the gap; some rollouts may not have been added."""
        if not rollout.continues or self._workers[block : block + 1] != [rollout.worker_index]:
            return False
        assert self._observations is not None
        return self._observations.same((int(self._written[block]) - 1) % self._num_rows, lanes, obs)

    def _level_added(self, columns: dict[str, NDArray[Any]], shape: tuple[int, int]) -> dict[str, NDArray[Any]]:
        """Make the columns that are new here, and return the columns that a rollout lacks, without values."""
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
        """Make rows invalid before they are written."""
        assert self._observations is not None
        self._observations.clear(where, lanes)
        valid = self._columns["valid"].grid
        for span in where:
            self._num_valid -= int(np.count_nonzero(valid[span, lanes]))
            valid[span, lanes] = False

    def _outdated(self, where: list[slice]) -> NDArray[np.int64]:
        """Return the valid rows that need a frame of rows that are about to be overwritten."""
        assert self._observations is not None
        if self.frame_stack == 1:
            return np.empty(0, np.int64)
        old = np.concatenate([np.arange(span.start, span.stop) for span in where])
        old = old[old < self._num_rows_in_use]
        flat = np.unique(self._observations.outdated(old) % self._num_rows)
        stale: NDArray[np.int64] = flat[self._columns["valid"].flat[flat]]
        return stale

    def _revalued(self, flat: NDArray[np.int64]) -> None:
        """Update what depends on rows, by flat index, that became valid or not."""

    def _rewritten(self, where: list[slice], lanes: slice) -> None:
        """Update what depends on rows that were written or made invalid."""

    # Batches out.

    def sample(
        self,
        batch_size: int,
        *,
        n_step: NumSteps = 1,
        gamma: float = 1.0,
        beta: float = 0.0,
        reward_fn: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
    ) -> dict[str, Tree]:
        """Return a batch of drawn transitions, columns `[B, ...]`.

        A transition has n steps, or fewer if the episode ends earlier or the later steps are not in the buffer. It
        bootstraps from the observation that its last step led to, unless that step terminated.

        Args:
            batch_size: Number of transitions B.
            n_step: Number of steps n of a transition; with `(min, max)` each transition draws its own n evenly from
                min to max, both included.
            gamma: Discount per step.
            beta: Exponent of the importance weights. It has no effect here: draws are uniform, and all weights are 1.
            reward_fn: Function of the rewards of single steps, applied before they are summed.

        Returns:
            The batch by column: `obs`, `actions` and the added columns of the first step; `rewards` (float32), the
            discounted sum over the steps; `next_obs`, the observation that the last step led to; `terminated` and
            `truncated` of the last step; `num_steps` (int64), the number of steps; `discounts` (float32), gamma to the
            power of `num_steps`; `weights` (float32); and `indices` (int64), which identify the transitions and are
            never used again for others.

        Raises:
            EmptyReplayBufferError: The buffer holds no transitions.
            ValueError: `batch_size` or `n_step` is less than 1, or the range of `n_step` is empty.
        """
        _check_numbers("batch_size", batch_size, n_step)
        if not self._num_valid:
            raise EmptyReplayBufferError(
                "the replay buffer holds no transitions to draw: add rollouts first. Algorithms wait for "
                "num_steps_sampled_before_learning_starts env steps."
            )
        assert self._observations is not None
        flat, weights = self._draw(batch_size, beta)
        columns = self._columns
        if n_step == 1:
            last, rewards = flat, columns["rewards"].at(flat)
            if reward_fn is not None:
                rewards = self._changed_rewards(reward_fn, rewards, flat)
            num_steps, discounts = np.ones(batch_size, np.int64), np.full(batch_size, gamma, np.float32)
        else:
            within = self._within_steps(n_step, batch_size)
            steps = self._links.window(flat, len(within))
            done = columns["terminated"].at(steps) | columns["truncated"].at(steps)
            rewards = columns["rewards"].at(steps)
            rewards, num_steps, discounts = n_step_returns(
                rewards if reward_fn is None else self._changed_rewards(reward_fn, rewards, steps),
                columns["valid"].at(steps) & within,
                done,
                gamma=gamma,
            )
            last = steps[num_steps - 1, np.arange(batch_size)]
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
            **{name: columns[name].at(flat) for name in self._added if name != INTRINSIC},
        }

    def sample_steps(self, batch_size: int) -> dict[str, Tree]:
        """Return drawn single steps `[B, ...]` without their next observations, in about half the time of `sample`.

        Returns:
            The columns `obs`, `actions`, `indices` and `weights` of `sample`, and the added columns.

        Raises:
            EmptyReplayBufferError: The buffer holds no transitions.
            ValueError: `batch_size` is less than 1.
        """
        _check_numbers("batch_size", batch_size, 1)
        if not self._num_valid:
            raise EmptyReplayBufferError("the replay buffer holds no transitions to draw: add rollouts first.")
        assert self._observations is not None
        flat, weights = self._draw(batch_size, 0.0)
        return {
            "obs": self._observations.at(flat),
            "actions": self._columns["actions"].at(flat),
            "indices": self._stamped(flat),
            "weights": weights,
            **{name: self._columns[name].at(flat) for name in self._added if name != INTRINSIC},
        }

    def obs_after(self, indices: NDArray[np.int64], num_steps: NDArray[Any]) -> Tree:
        """Return the observations so many steps after steps of a batch, a tree of `[B, ...]`.

        Args:
            indices: The column `indices` of the batch, int64 `[B]`.
            num_steps: Number of steps, at least 1 each and all in the buffer, `[B]`; lanes must be in step.
        """
        assert self._observations is not None and self._lanes is None
        flat = indices % (self._num_rows * self._num_lanes)
        return self._observations.after(flat + (num_steps.astype(np.int64) - 1) * self._num_lanes)

    def get_steps(self) -> dict[str, Any]:
        """Return all steps, in the order of time within their episodes, with what they led to.

        Returns:
            Columns `[S, ...]`: `obs`, `actions`, `rewards`, `terminated`, `truncated`, `next_obs`, and `starts`, bool,
            the first steps of episodes or of the parts of episodes that the buffer holds.
        """
        columns, size = self._columns, self._num_rows * self._num_lanes
        if self._observations is None or not self._num_valid:
            return {"rewards": np.zeros(0, np.float32)}
        done = columns["terminated"].flat | columns["truncated"].flat
        goes_on = columns["valid"].flat & ~done  # steps after which another one of their episode may follow
        flat = np.flatnonzero(columns["valid"].flat)
        after = self._links.after(flat) % size
        follows = np.zeros(size, np.bool_)
        follows[after[goes_on[flat] & (after != flat)]] = True
        current = flat[~follows[flat]]
        chain, chains, rows = np.arange(len(current)), [], []
        while len(current):
            chains.append(chain)
            rows.append(current)
            after = self._links.after(current) % size
            goes = goes_on[current] & columns["valid"].flat[after] & (after != current)
            chain, current = chain[goes], after[goes]
        order = np.argsort(np.concatenate(chains), kind="stable")
        flat = np.concatenate(rows)[order]
        return {
            "obs": self._observations.at(flat),
            "next_obs": self._observations.after(flat),
            "starts": ~follows[flat],
            **{name: columns[name].at(flat) for name in ("actions", "rewards", "terminated", "truncated")},
        }

    def sample_sequences(
        self,
        num_sequences: int,
        initial_state: Tree,
        *,
        seq_len: int,
        burn_in: int = 0,
        n_step: NumSteps = 1,
        gamma: float = 1.0,
        reward_fn: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
    ) -> dict[str, Tree]:
        """Return drawn sequences of consecutive steps, each from any step on, for a module with memory.

        This is the replay of Kapturowski et al. 2019, with stored states and burn-in. The drawn step is the first of
        the `seq_len` steps to learn from, which are fewer if the episode or the stored steps end before. The burn-in is
        the `burn_in` steps before the drawn one, and fewer if the episode, or what the buffer holds of it, begins
        later. A sequence begins with the stored state of its first step, burn-in included; without stored states, as
        of recorded data, with the initial state. A step bootstraps from an observation of its sequence: at the end of
        a sequence it has fewer than n steps.

        Args:
            num_sequences: Number S of sequences.
            initial_state: Initial state of the module, a tree of arrays `[...]`.
            seq_len: Longest sequence that is learned from, in steps.
            burn_in: Most steps before it that only bring the state up to date.
            n_step: Number of steps whose rewards are summed; with `(min, max)` each step draws its own number.
            gamma: Discount per step.
            reward_fn: Function of the rewards of single steps, applied before they are summed.

        Returns:
            A batch whose rows are the steps of each sequence and one row for the observation after them, `[M, ...]`:
            `obs`, `actions`, `rewards`, `terminated`, `truncated`, `num_steps`, `discounts`, `weights` and `indices` as
            in `sample`; `states`; `sequence_starts` and `unit_starts`, bool; `burns_in`, bool, the steps of the
            burn-in; `learns`, bool, the other steps; and the added columns.

        Raises:
            EmptyReplayBufferError: The buffer holds no transitions.
            ValueError: `num_sequences` or `n_step` is less than 1, or the range of `n_step` is empty.
        """
        _check_numbers("num_sequences", num_sequences, n_step)
        if not self._num_valid:
            raise EmptyReplayBufferError("the replay buffer holds no transitions to draw: add rollouts first.")
        assert self._observations is not None
        columns = self._columns
        firsts, _ = self._draw(num_sequences, 0.0)
        named = dict(_columns_of_states(initial_state))
        has_states = columns.keys() >= named.keys()
        firsts, burns = self._starts_before(firsts, burn_in)
        steps = self._links.window(firsts, burn_in + seq_len)
        done = columns["terminated"].at(steps) | columns["truncated"].at(steps)
        taken = columns["valid"].at(steps)
        taken[1:] &= ~done[:-1]
        np.logical_and.accumulate(taken, axis=0, out=taken)
        lengths = np.minimum(taken.sum(0), burns + seq_len)
        # Places in the batch: the steps of each sequence, then the row after them.
        ends = np.cumsum(lengths + 1) - 1
        place = np.arange(int(ends[-1]) + 1)
        sequence = np.repeat(np.arange(num_sequences), lengths + 1)
        time, is_step = place - (ends - lengths)[sequence], np.ones(len(place), np.bool_)
        is_step[ends] = False
        flat = steps[np.minimum(time, lengths[sequence] - 1), sequence]  # the row after repeats the last step
        within = self._within_steps(n_step, len(place))
        window = place + np.arange(len(within))[:, None]
        inside = (window < ends[sequence]) & within
        window = flat[np.minimum(window, ends[sequence])]
        ended = columns["terminated"].at(window) | columns["truncated"].at(window)
        inside[0] = True  # also in the rows after the steps, which nobody reads
        rewards = columns["rewards"].at(window)
        rewards, num_steps, discounts = n_step_returns(
            rewards if reward_fn is None else self._changed_rewards(reward_fn, rewards, window),
            inside,
            ended,
            gamma=gamma,
        )
        last = window[num_steps - 1, place]
        after = self._observations.after(flat[ends - 1])
        obs = self._observations.at(flat)
        map_tree(lambda column, leaf: column.__setitem__(ends, leaf), obs, after)
        states = iter(
            [
                columns[name].at(flat) if has_states else np.repeat(leaf[None], len(flat), 0)
                for name, leaf in named.items()
            ]
        )
        return {
            "obs": obs,
            "actions": columns["actions"].at(flat),
            "rewards": rewards,
            "terminated": columns["terminated"].at(last),
            "truncated": columns["truncated"].at(last),
            "num_steps": num_steps,
            "discounts": discounts,
            "indices": self._stamped(flat % (self._num_rows * self._num_lanes)),
            "weights": np.ones(len(place), np.float32),
            "states": map_tree(lambda _: next(states), initial_state),
            "sequence_starts": time == 0,
            "unit_starts": time == 0,
            "burns_in": is_step & (time < burns[sequence]),
            "learns": is_step & (time >= burns[sequence]),
            **{name: columns[name].at(flat) for name in self._added if name not in named and name != INTRINSIC},
        }

    def _starts_before(self, flat: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows up to `most` steps before rows of steps, in the same episodes, and the numbers of steps."""
        columns, size = self._columns, self._num_rows * self._num_lanes
        counts = np.zeros(len(flat), np.int64)
        for _ in range(most):
            before = self._links.before(flat) % size
            ended = columns["terminated"].at(before) | columns["truncated"].at(before)
            # A row that was overwritten since the link to it was made is followed by another row.
            goes_on = columns["valid"].at(before) & ~ended & (self._links.after(before) % size == flat)
            if not goes_on.any():
                break
            flat = np.where(goes_on, before, flat)
            counts += goes_on
        return flat, counts

    def _changed_rewards(
        self, reward_fn: Callable[[NDArray[Any]], NDArray[Any]], rewards: NDArray[np.float32], flat: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Return what a function makes of rewards, plus the intrinsic rewards of the same steps, where there are any.

        Args:
            reward_fn: Function of the rewards.
            rewards: Rewards of the env.
            flat: Flat indices of their steps, of the same shape.
        """
        changed = reward_fn(rewards)
        if INTRINSIC in self._columns:
            changed = changed + np.nan_to_num(self._columns[INTRINSIC].at(flat))  # NaN where a rollout had none
        return changed

    def _within_steps(self, n_step: NumSteps, size: int) -> NDArray[np.bool_]:
        """Return which of the following steps may belong to each transition, bool `[n, size]` or `[n, 1]`."""
        if not isinstance(n_step, tuple):
            return np.ones((n_step, 1), np.bool_)
        smallest, largest = n_step
        within: NDArray[np.bool_] = np.arange(largest)[:, None] < smallest + self._evenly(largest - smallest + 1, size)
        return within

    def _draw(self, batch_size: int, beta: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return flat indices and weights, `[B]` each."""
        weights = np.ones(batch_size, np.float32)
        num_valid, num_entries = self._num_valid, self._num_rows_in_use * self._num_lanes
        if 4 * num_valid < num_entries:  # so few that most draws would be rejected
            if self._candidates is None:
                self._candidates = np.flatnonzero(self._columns["valid"].flat[:num_entries])
            return self._candidates.take(self._evenly(num_valid, batch_size)), weights
        # Draws are rejected where no step is valid. Enough are made at once that a second attempt is rare.
        num_draws = batch_size * num_entries // num_valid + batch_size // 8 + 8
        valid = self._columns["valid"]
        drawn = self._evenly(num_entries, num_draws)
        flat = drawn[valid.at(drawn)]
        while len(flat) < batch_size:
            drawn = self._evenly(num_entries, num_draws)
            flat = np.concatenate([flat, drawn[valid.at(drawn)]])
        return flat[:batch_size], weights

    def _evenly(self, stop: int, size: int) -> NDArray[np.int64]:
        """Return random integers from 0 to `stop` - 1, in half the time of `integers`, and uniform up to 53 bits."""
        return (self._rng.random(size) * stop).astype(np.int64)

    @property
    def _num_rows_in_use(self) -> int:
        return min(int(self._written.max()), self._num_rows)

    def _stamped(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return indices that keep counting past the end of the ring, so that no row ever gets the same ones again."""
        size = self._num_rows * self._num_lanes
        if len(self._written) == 1:
            lap, head = divmod(int(self._written[0]), self._num_rows)
            return flat + size * (lap - (flat >= head * self._num_lanes))
        assert self._layout is not None
        blocks = flat % self._num_lanes // self._layout.num_envs
        laps, heads = np.divmod(self._written, self._num_rows)
        stamped: NDArray[np.int64] = flat + size * (laps[blocks] - (flat >= heads[blocks] * self._num_lanes))
        return stamped

    # State.

    def get_rng_state(self) -> dict[str, str]:
        """Return the state of the draws as plain data."""
        return _plain_rng(self._rng)

    def set_rng_state(self, state: Mapping[str, str]) -> None:
        """Let the draws continue from a state that `get_rng_state` returned."""
        self._rng = _rng_of(state)

    def get_state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the state as plain data: strings, numbers, lists, dicts by string, and arrays of the rows in use.

        `corral.checkpoint.codec` and other formats for NumPy arrays can store it.

        Args:
            copy: Whether to copy the arrays. Otherwise they are views, which change when rollouts are added: write
                them first. Columns that are larger than the memory can only be written in this way.
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
            "num_env_steps_added": self.num_env_steps_added,
            "columns": {
                name: np.array(column.grid[:num_rows], copy=copy or None) for name, column in self._columns.items()
            },
            "added": [
                [name, str(self._columns[name].grid.dtype), list(self._columns[name].grid.shape[2:])]
                for name in self._added
            ],
            "obs": self._observations.get_state(num_rows, copy=copy),
            **({} if self._lanes is None else {"lanes": self._lanes.get_state(num_rows, copy=copy)}),
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must be the same in a state."""
        return {
            "type": self.kind,
            "capacity": self.capacity,
            "num_runners": self.num_runners,
            "frame_stack": self.frame_stack,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned; later samples equal the samples of the saved buffer.

        Raises:
            CheckpointError: The state is from a buffer with other settings or columns, or damaged. Nothing is changed.
        """
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the state is from a replay buffer with {name}={state.get(name)!r}, and this buffer has "
                    f"{name}={value!r}: make the buffer with {name}={state.get(name)!r}, or continue without the state."
                )
        if state.get("version") != _STATE_VERSION:
            raise CheckpointError(
                f"the state of the replay buffer has format {state.get('version')}, and this version of Corral reads "
                f"{_STATE_VERSION}: use the version that wrote it, or continue without the state."
            )
        was_empty = self._layout is None
        try:
            self._restore(state)
        except BaseException as error:
            if was_empty:
                self._forget()
            if isinstance(error, CorralError) or not isinstance(error, (KeyError, IndexError, TypeError, ValueError)):
                raise
            raise CheckpointError(f"the state of the replay buffer is damaged: {error!r}.") from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state["layout"] is None:
            rng = _rng_of(state["rng"])
            self._forget()
            self._rng = rng
            return
        layout = Layout.from_state(state["layout"])
        if self._layout is None:
            self._make_columns(layout, *([state["lanes"]["num_rows"]] if "lanes" in state else []))
        elif layout != self._layout:
            raise CheckpointError(
                f"the state is from a replay buffer with other columns: {layout} instead of {self._layout}. Use the "
                "environment and the number of envs that it was made with, or continue without the state."
            )
        self._load(state)

    @interruptible
    def _load(self, state: Mapping[str, Any]) -> None:
        """Check all of a state, then restore it."""
        assert self._observations is not None
        rng, written = _rng_of(state["rng"]), np.array(state["written"], np.int64).reshape(self._written.shape)
        num_rows = min(int(written.max()), self._num_rows)
        num_added, shape, added = int(state["num_env_steps_added"]), (num_rows, self._num_lanes), state["added"]
        specs = {name: (self._columns[name].grid.dtype, self._columns[name].grid.shape[2:]) for name in _OWN}
        specs |= {name: (np.dtype(dtype), tuple(entry)) for name, dtype, entry in added}
        columns = {
            name: array_of(state["columns"][name], dtype, (*shape, *entry)) for name, (dtype, entry) in specs.items()
        }
        obs = self._observations.checked_state(state["obs"], num_rows)
        lanes = None if self._lanes is None else self._lanes.checked_state(state["lanes"], num_rows)
        # From here on nothing can fail.
        if self._lanes is not None and lanes is not None:
            self._lanes.set_state(lanes, num_rows)
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
        self.num_env_steps_added = num_added


def _check_numbers(name: str, size: int, n_step: NumSteps) -> None:
    """Refuse numbers with which nothing can be drawn.

    Raises:
        ValueError: One is less than 1, or the range of `n_step` is empty.
    """
    smallest, largest = n_step if isinstance(n_step, tuple) else (n_step, n_step)
    if size < 1 or not 1 <= smallest <= largest:
        raise ValueError(f"{name}={size} and n_step={n_step} must be at least 1, and a range is (min, max).")


def _columns_of_states(states: Tree) -> list[tuple[str, NDArray[Any]]]:
    """Return the names of the columns that hold states, each with its leaf; checkpoints use `/` for another purpose."""
    return [(name.replace("/", "."), np.asarray(leaf)) for name, leaf in named_leaves(states, STATES)]


def _lengths(valid: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of rows of each lane up to its last valid one, `[L]`, for `[T, L]`."""
    lengths: NDArray[np.int64] = np.where(valid.any(0), len(valid) - valid[::-1].argmax(0), 0)
    return lengths


def _latest_that_fit(lengths: NDArray[np.int64], num_rows: int, frame_stack: int) -> tuple[int, NDArray[np.int64]]:
    """Return the first row of a rollout and the lanes whose steps fit into a ring of `num_rows` rows."""
    lanes = np.flatnonzero(lengths)
    rows = (lengths[lanes] > np.arange(lengths.max(initial=0))[:, None])[::-1]  # from the last row on
    needed = np.cumsum(rows.sum(1)) + np.maximum.accumulate(rows.sum(1)) * frame_stack
    num_kept = max(1, int(np.count_nonzero(needed <= num_rows)))
    first = max(0, len(rows) - num_kept)
    lanes = lanes[lengths[lanes] > first]
    return first, lanes[-(num_rows // (frame_stack + 1)) :]


def _plain_rng(rng: np.random.Generator) -> dict[str, str]:
    """Return the state of a generator as strings: its integers have more bits than most formats allow."""
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
