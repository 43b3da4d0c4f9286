"""The replay buffer: a ring of rows in the order of time, from which batches of transitions are drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from corral.core.columns import check_new_column, describe, empty_column
from corral.core.interrupts import interruptible
from corral.core.returns import n_step_returns
from corral.core.tree import Tree, map_tree, named_leaves
from corral.data.episodes.lane_rollout import LaneRollout
from corral.data.replay.frames import MAX_FRAMES
from corral.data.replay.layout import Layout
from corral.data.replay.links import GridLinks, LaneLinks, Place
from corral.data.replay.observations import Arrays, Observations, StackedObservations
from corral.data.replay.storage import Column, Loaded, Storage, array_of, arrays_of, columns_in, put_rows, with_arrays
from corral.errors import CheckpointError, ColumnError, ConfigError, CorralError

if TYPE_CHECKING:
    from corral.data.episodes.rollout import Rollout

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

RewardFn = Callable[[NDArray[Any]], NDArray[Any]]
"""Function of the rewards of single steps."""

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
    LINKS: ClassVar[type[GridLinks]] = GridLinks

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
        self._links: Any = None  # how the lanes of the ring are linked
        self._observations: Any = None
        self._columns: dict[str, Column] = {}
        self._added: list[str] = []  # names of columns that user code added
        self._num_valid = self.num_env_steps_added = 0
        self._derived: dict[str, Any] = {}  # what was computed from the rows since they changed

    def __len__(self) -> int:
        """Return the number of transitions that can be drawn."""
        return self._num_valid

    @property
    def nbytes(self) -> int:
        """Bytes of memory, or of disk space, that the columns take."""
        if self._layout is None:
            return 0
        num_bytes: int = self._observations.nbytes
        return num_bytes + sum(column.grid.nbytes for column in columns_in(self._stored()))

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
            if not rollout.num_rows or (isinstance(rollout, LaneRollout) and not rollout.valid.any()):
                continue
            was_empty = self._layout is None
            try:
                self._add(rollout, self._layout or self._begin(rollout))
            except BaseException:
                if was_empty:
                    self._forget()
                raise

    def _begin(self, rollout: Rollout) -> Layout:
        """Make the columns for rollouts like the first one."""
        layout = Layout.of(rollout)
        if not isinstance(rollout, LaneRollout):
            return self._make_columns(layout)
        # One ring of lanes with clocks of their own. Besides the transitions: a row for the tail of each lane, and rows
        # for older frames.
        num_lanes = rollout.num_envs * self.num_runners
        num_rows = max(self.capacity, num_lanes) + num_lanes * self.frame_stack
        return self._make_columns(replace(layout, num_envs=1), num_rows)

    def _make_columns(self, layout: Layout, num_linked_rows: int | None = None) -> Layout:
        """Make all columns except those that user code adds; with a number of linked rows, one ring of them."""
        make, num_frames = self._storage.column, self.frame_stack
        if num_linked_rows is None:
            # Besides the transitions: a row for the gap, and the rows whose older frames have been overwritten.
            num_rows = -(-self.capacity // (layout.num_envs * self.num_runners)) + num_frames
            self._links = self.LINKS(num_rows, layout.num_envs, self.num_runners, num_frames)
        else:
            self._links = LaneLinks(num_linked_rows, num_frames, self._storage)
        shape = self._links.num_rows, self._links.num_lanes
        self._columns = {
            "valid": make(shape, np.bool_, on_host=True),
            "terminated": make(shape, np.bool_),
            "truncated": make(shape, np.bool_),
            "rewards": make(shape, np.float32),
            "actions": make((*shape, *layout.actions[1]), layout.actions[0]),
        }
        self._observations = self._make_observations(layout)
        self._layout = layout
        return layout

    def _make_observations(self, layout: Layout) -> Observations:
        kind = Observations if self.frame_stack == 1 else StackedObservations
        return kind(layout, self._storage, self._links)

    def _add(self, rollout: Rollout, layout: Layout) -> None:
        observations, links, valid = self._observations, self._links, self._columns["valid"]
        # All checks come first.
        obs, columns = self._checked(rollout, layout)
        num_added = int(np.count_nonzero(columns["valid"]))
        place = links.place(rollout, obs, columns["valid"], observations)
        if place.kept is not None:
            obs, columns = (
                [leaf[place.kept] for leaf in obs],
                {name: part[place.kept] for name, part in columns.items()},
            )
        skipped = rollout.num_rows - len(columns["valid"])
        final = {(t - skipped, n): leaf for (t, n), leaf in rollout.final_obs.items() if t >= skipped}
        rows = observations.prepare(obs, final, place)
        if columns.keys() != self._columns.keys():
            columns |= self._level_added(columns)
        # From here on nothing can fail. First what is overwritten becomes invalid, and what needs a frame of it.
        if place.outdated is not None:
            place.outdated = place.outdated[valid.flat[place.outdated]]
            valid.flat[place.outdated] = False
            self._num_valid -= len(place.outdated)
        for span in place.overwritten:
            self._num_valid -= int(np.count_nonzero(valid.grid[span, place.lanes]))
            valid.grid[span, place.lanes] = False
        # Then the rows are written and linked.
        observations.put(rows, place)
        put_rows([(self._columns[name], column) for name, column in columns.items()], place.steps_at, place.lanes)
        links.note(place, rollout.worker_index)
        self._num_valid += int(np.count_nonzero(columns["valid"]))
        self.num_env_steps_added += num_added
        self._derived.clear()
        self._note_written(place)

    def _checked(self, rollout: Rollout, layout: Layout) -> tuple[Arrays, dict[str, NDArray[Any]]]:
        """Return the leaves of the observations and the other columns to keep, after checking all of them."""
        num_rows, given, has_lanes = rollout.num_rows, rollout.columns, isinstance(self._links, LaneLinks)
        if isinstance(rollout, LaneRollout) != has_lanes:
            raise ColumnError(
                "the replay buffer holds steps of " + ("several agents" if has_lanes else "one agent") + ", and this "
                "rollout has other ones: give each its own buffer."
            )
        columns = {name: given[name] for name in _OWN}
        shape = (num_rows, rollout.num_envs if has_lanes else layout.num_envs)
        obs = layout.checked(given["obs"], columns, *shape)
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
            columns[name] = check_new_column(name, column, shape)
            held = self._columns.get(name)
            if held is not None and (held.grid.shape[2:], held.dtype) != (column.shape[2:], column.dtype):
                raise ColumnError(
                    f"column {name!r} was added as {describe(column)}, but the replay buffer holds it as "
                    f"{held.dtype}{[*shape, *held.grid.shape[2:]]}: entries must have the same shape and dtype in all "
                    "rollouts."
                )
        return obs, columns

    def _level_added(self, columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Make the columns that are new here, and return the columns that a rollout lacks, without values."""
        for name in [name for name in columns if name not in self._columns]:
            self._make_added(name, columns[name].shape[2:], columns[name].dtype)
        lacking = {name: self._columns[name] for name in self._added if name not in columns}
        lead = columns["valid"].shape
        return {name: empty_column(held.dtype, (*lead, *held.grid.shape[2:])) for name, held in lacking.items()}

    def _make_added(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        column = self._storage.column((self._links.num_rows, self._links.num_lanes, *shape), dtype)
        if dtype.kind == "f":
            column.grid.fill(np.nan)
        self._columns[name] = column
        self._added.append(name)

    def _note_written(self, place: Place) -> None:
        """Update what depends on rows that were written or made invalid."""

    # Batches out.

    def sample(
        self,
        batch_size: int,
        *,
        n_step: NumSteps = 1,
        gamma: float = 1.0,
        beta: float = 0.0,
        reward_fn: RewardFn | None = None,
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
        self._check_draw("batch_size", batch_size, n_step)
        flat, weights = self._draw(batch_size, beta)
        columns = self._columns
        last, rewards, num_steps, discounts = self._n_steps(flat, n_step, gamma, reward_fn)
        return {
            "obs": self._observations.at(flat),
            "actions": columns["actions"].at(flat),
            "rewards": rewards,
            "next_obs": self._observations.after(last),
            "terminated": columns["terminated"].at(last),
            "truncated": columns["truncated"].at(last),
            "num_steps": num_steps,
            "discounts": discounts,
            "indices": self._links.stamped(flat),
            "weights": weights,
            **{name: columns[name].at(flat) for name in self._added if name != INTRINSIC},
        }

    def _n_steps(self, flat: Any, n_step: NumSteps, gamma: float, reward_fn: RewardFn | None) -> tuple[Any, ...]:
        """Return the last step of transitions, their rewards, numbers of steps and discounts, `[B]` each."""
        if n_step == 1:
            rewards = self._columns["rewards"].at(flat)
            if reward_fn is not None:
                rewards = self._changed_rewards(reward_fn, rewards, flat)
            return flat, rewards, np.ones(len(flat), np.int64), np.full(len(flat), gamma, np.float32)
        within = self._within_steps(n_step, len(flat))
        steps = self._links.window(flat, len(within))
        found = self._sums(steps, self._columns["valid"].at(steps) & within, gamma, reward_fn)
        return steps[found[1] - 1, np.arange(len(flat))], *found

    def _sums(
        self, steps: NDArray[np.int64], inside: NDArray[np.bool_], gamma: float, reward_fn: RewardFn | None
    ) -> tuple[NDArray[Any], ...]:
        """Return what `n_step_returns` does for windows of steps `[n, B]`, of which those `inside` may be taken."""
        done = self._columns["terminated"].at(steps) | self._columns["truncated"].at(steps)
        rewards = self._columns["rewards"].at(steps)
        if reward_fn is not None:
            rewards = self._changed_rewards(reward_fn, rewards, steps)
        return n_step_returns(rewards, inside, done, gamma=gamma)

    def sample_steps(self, batch_size: int) -> dict[str, Tree]:
        """Return drawn single steps `[B, ...]` without their next observations, in about half the time of `sample`.

        Returns:
            The columns `obs`, `actions`, `indices` and `weights` of `sample`, and the added columns.

        Raises:
            EmptyReplayBufferError: The buffer holds no transitions.
            ValueError: `batch_size` is less than 1.
        """
        self._check_draw("batch_size", batch_size, 1)
        flat, weights = self._draw(batch_size, 0.0)
        return {
            "obs": self._observations.at(flat),
            "actions": self._columns["actions"].at(flat),
            "indices": self._links.stamped(flat),
            "weights": weights,
            **{name: self._columns[name].at(flat) for name in self._added if name != INTRINSIC},
        }

    def obs_after(self, indices: NDArray[np.int64], num_steps: NDArray[Any]) -> Tree:
        """Return the observations so many steps after steps of a batch, a tree of `[B, ...]`.

        Args:
            indices: The column `indices` of the batch, int64 `[B]`.
            num_steps: Number of steps, at least 1 each and all in the buffer, `[B]`; lanes must be in step.
        """
        assert type(self._links) is GridLinks
        flat = indices % self._links.size
        return self._observations.after(flat + (num_steps.astype(np.int64) - 1) * self._links.num_lanes)

    def get_steps(self) -> dict[str, Any]:
        """Return all steps, in the order of time within their episodes, with what they led to.

        Returns:
            Columns `[S, ...]`: `obs`, `actions`, `rewards`, `terminated`, `truncated`, `next_obs`, and `starts`, bool,
            the first steps of episodes or of the parts of episodes that the buffer holds.
        """
        if not self._num_valid:
            return {"rewards": np.zeros(0, np.float32)}
        columns, size = self._columns, self._links.size
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
        reward_fn: RewardFn | None = None,
        across_episodes: bool = False,
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
            across_episodes: Whether `seq_len` steps, without burn-in, continue in the next episode of the sub-env after
                the end of one, as one more sequence. All steps of an episode are then drawn equally often. With several
                agents they end with the episode.

        Returns:
            A batch whose rows are the steps of each sequence and one row for the observation after them, `[M, ...]`:
            `obs`, `actions`, `rewards`, `terminated`, `truncated`, `num_steps`, `discounts`, `weights` and `indices` as
            in `sample`; `states`; `sequence_starts` and `unit_starts`, bool; `burns_in`, bool, the steps of the
            burn-in; `learns`, bool, the other steps; and the added columns.

        Raises:
            EmptyReplayBufferError: The buffer holds no transitions.
            ValueError: `num_sequences` or `n_step` is less than 1, or the range of `n_step` is empty.
        """
        self._check_draw("num_sequences", num_sequences, n_step)
        columns = self._columns
        firsts, _ = self._draw(num_sequences, 0.0)
        named = dict(_columns_of_states(initial_state))
        has_states = columns.keys() >= named.keys()
        firsts, burns = self._starts_before(firsts, burn_in)
        if across_episodes:
            assert not burn_in
            firsts, lengths = self._parts_of_windows(firsts, seq_len)
            burns = np.zeros_like(lengths)
            steps = self._links.window(firsts, int(lengths.max()))
        else:
            steps = self._links.window(firsts, burn_in + seq_len)
            done = columns["terminated"].at(steps) | columns["truncated"].at(steps)
            taken = columns["valid"].at(steps)
            taken[1:] &= ~done[:-1]
            np.logical_and.accumulate(taken, axis=0, out=taken)
            lengths = np.minimum(taken.sum(0), burns + seq_len)
        # Places in the batch: the steps of each sequence, then the row after them.
        ends = np.cumsum(lengths + 1) - 1
        place = np.arange(int(ends[-1]) + 1)
        sequence = np.repeat(np.arange(len(lengths)), lengths + 1)
        time, is_step = place - (ends - lengths)[sequence], np.ones(len(place), np.bool_)
        is_step[ends] = False
        flat = steps[np.minimum(time, lengths[sequence] - 1), sequence]  # the row after repeats the last step
        within = self._within_steps(n_step, len(place))
        window = place + np.arange(len(within))[:, None]
        inside = (window < ends[sequence]) & within
        window = flat[np.minimum(window, ends[sequence])]
        inside[0] = True  # also in the rows after the steps, which nobody reads
        rewards, num_steps, discounts = self._sums(window, inside, gamma, reward_fn)
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
            "indices": self._links.stamped(flat % self._links.size),
            "weights": np.ones(len(place), np.float32),
            "states": map_tree(lambda _: next(states), initial_state),
            "sequence_starts": time == 0,
            "unit_starts": time == 0,
            "burns_in": is_step & (time < burns[sequence]),
            "learns": is_step & (time >= burns[sequence]),
            **{name: columns[name].at(flat) for name in self._added if name not in named and name != INTRINSIC},
        }

    def _parts_of_windows(self, flat: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the parts of episodes in the `seq_len` rows from each row on: their first rows and their lengths."""
        columns, size = self._columns, self._links.size
        steps = self._links.window(flat, seq_len) % size
        # After the newest row of a lane the ring continues with its oldest one.
        in_time = np.ones(steps.shape, np.bool_)
        np.logical_and.accumulate(np.diff(self._links.stamped(steps), axis=0) > 0, axis=0, out=in_time[1:])
        taken = columns["valid"].at(steps) & in_time
        ended = columns["terminated"].at(steps) | columns["truncated"].at(steps)
        begins = taken.copy()
        begins[1:] &= ~taken[:-1] | ended[:-1]
        taken, begins = taken.T.ravel(), begins.T.ravel()  # one sequence after the other
        return steps.T.ravel()[begins], np.bincount(np.cumsum(begins)[taken] - 1)

    def _starts_before(self, flat: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows up to `most` steps before rows of steps, in the same episodes, and the numbers of steps."""
        columns, size = self._columns, self._links.size
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
        self, reward_fn: RewardFn, rewards: NDArray[np.float32], flat: NDArray[np.int64]
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
        num_valid, num_entries = self._num_valid, self._links.num_rows_in_use * self._links.num_lanes
        if 4 * num_valid < num_entries:  # so few that most draws would be rejected
            if "valid" not in self._derived:
                self._derived["valid"] = np.flatnonzero(self._columns["valid"].flat[:num_entries])
            return self._derived["valid"].take(self._evenly(num_valid, batch_size)), weights
        # Draws are rejected where no step is valid. Enough are made at once that a second attempt is rare.
        num_draws = batch_size * num_entries // num_valid + batch_size // 8 + 8
        valid = self._columns["valid"]
        flat = np.empty(0, np.int64)
        while len(flat) < batch_size:
            drawn = self._evenly(num_entries, num_draws)
            drawn = drawn[valid.at(drawn)]
            flat = np.concatenate([flat, drawn]) if len(flat) else drawn
        return flat[:batch_size], weights

    def _evenly(self, stop: int, size: int) -> NDArray[np.int64]:
        """Return random integers from 0 to `stop` - 1, in half the time of `integers`, and uniform up to 53 bits."""
        return (self._rng.random(size) * stop).astype(np.int64)

    def _check_draw(self, name: str, size: int, n_step: NumSteps) -> None:
        """Refuse to draw from an empty buffer, and numbers with which nothing can be drawn.

        Raises:
            EmptyReplayBufferError: The buffer holds no transitions.
            ValueError: A number is less than 1, or the range of `n_step` is empty.
        """
        smallest, largest = n_step if isinstance(n_step, tuple) else (n_step, n_step)
        if size < 1 or not 1 <= smallest <= largest:
            raise ValueError(f"{name}={size} and n_step={n_step} must be at least 1, and a range is (min, max).")
        if not self._num_valid:
            raise EmptyReplayBufferError(
                "the replay buffer holds no transitions to draw: add rollouts first. Algorithms wait for "
                "num_steps_sampled_before_learning_starts env steps."
            )

    # State.

    def get_rng_state(self) -> dict[str, str]:
        """Return the state of the draws as plain data."""
        return _plain_rng(self._rng)

    def set_rng_state(self, state: Mapping[str, str]) -> None:
        """Let the draws continue from a state that `get_rng_state` returned."""
        self._rng = _rng_of(state)

    def get_state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the state as plain data: strings, numbers, lists, dicts by string, and arrays of the rows in use.

        `corral.runs.checkpoint.codec` and other formats for NumPy arrays can store it.

        Args:
            copy: Whether to copy the arrays. Otherwise they are views, which change when rollouts are added: write
                them first. Columns that are larger than the memory can only be written in this way.
        """
        state: dict[str, Any] = {"version": _STATE_VERSION, **self._settings(), "rng": _plain_rng(self._rng)}
        if self._layout is None:
            return {**state, "layout": None}
        num_rows, own = self._links.num_rows_in_use, [(name, self._columns[name]) for name in self._added]
        return {
            **state,
            "layout": self._layout.to_state(),
            "num_env_steps_added": self.num_env_steps_added,
            "added": [[name, str(column.dtype), list(column.grid.shape[2:])] for name, column in own],
            "obs": self._observations.get_state(num_rows, copy=copy),
            **arrays_of(self._stored(), num_rows, copy=copy),
            **self._links.get_state(copy=copy),
        }

    def _stored(self) -> dict[str, Any]:
        """Return the columns that this class keeps besides the observations, by their keys in a state."""
        return {"columns": self._columns}

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
        if ("generator" in state) != (self.kind == "device"):
            raise CheckpointError(
                "the state of a replay buffer on arrays cannot continue in one on the device of an env of tensors, nor "
                "the other way round: build with the env and the callbacks of that run, or continue without the state."
            )
        if state.get("version") != _STATE_VERSION:
            raise CheckpointError(
                f"the state of the replay buffer has format {state.get('version')}, and this version of Corral reads "
                f"{_STATE_VERSION}: use the version that wrote it, or continue without the state."
            )
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the state is from a replay buffer with {name}={state.get(name)!r}, and this buffer has "
                    f"{name}={value!r}: make the buffer with {name}={state.get(name)!r}, or continue without the state."
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
        rng, links = _rng_of(state["rng"]), self._links.load(state)
        num_rows = links.values["num_rows_in_use"]
        num_added = int(state["num_env_steps_added"])
        added = [(name, np.dtype(dtype), tuple(entry)) for name, dtype, entry in state["added"]]
        own = {name: column for name, column in self._columns.items() if name not in self._added}
        columns = with_arrays({**self._stored(), "columns": own}, state, num_rows)
        lead = num_rows, self._links.num_lanes
        more = [(*one, array_of(state["columns"][one[0]], one[1], (*lead, *one[2]))) for one in added]
        observations = self._observations.load(state["obs"], num_rows)
        # From here on nothing can fail.
        self._columns, self._added = own, []
        for name, dtype, entry, rows in more:
            self._make_added(name, entry, dtype)
            columns.append((self._columns[name], rows))
        self._columns["valid"].grid[num_rows:] = False
        for loaded in (links, observations, Loaded(self, {"_rng": rng, "num_env_steps_added": num_added}, columns)):
            loaded.restore()
        self._derived.clear()
        self._num_valid = int(np.count_nonzero(self._columns["valid"].grid))


def _columns_of_states(states: Tree) -> list[tuple[str, NDArray[Any]]]:
    """Return the names of the columns that hold states, each with its leaf; checkpoints use `/` for another purpose."""
    return [(name.replace("/", "."), np.asarray(leaf)) for name, leaf in named_leaves(states, STATES)]


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
