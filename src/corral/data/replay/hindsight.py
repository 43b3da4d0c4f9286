"""Hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495) for envs whose observations hold a goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.returns import n_step_returns
from corral.core.tree import Tree, map_tree
from corral.data.replay.buffer import INTRINSIC, ReplayBuffer, RewardFn
from corral.data.replay.layout import Layout
from corral.data.replay.links import Place
from corral.data.replay.storage import array_of, put_rows
from corral.errors import ConfigError

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
GOAL_KEYS = ("observation", ACHIEVED, DESIRED)
"""Keys of the observations of envs with goals."""

GoalFunction = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
"""Function of achieved goals and desired goals, both `[M, ...]`, that returns numbers `[M]`."""


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class GoalFunctions:
    """The functions of an env.

    Attributes:
        rewards_of: Rewards of steps that led to achieved goals where other goals were desired, float `[M]`.
        terminates: Whether these steps terminate their episodes, bool `[M]`; `None` if goals do not decide that.
        close: Called when the functions are not needed any more.
    """

    rewards_of: GoalFunction
    terminates: GoalFunction | None = None
    close: Callable[[], None] = _do_nothing


Strategy = Literal["future", "final", "episode"]
"""From which steps of an episode goals come."""


class HindsightReplayBuffer(ReplayBuffer):
    """Draws transitions uniformly, and gives most of them another goal, which their episode achieved.

    The goal of a transition that is relabelled is what was achieved in a step of its episode: with `"future"` in this
    step or a later one, drawn evenly; with `"episode"` in any step; with `"final"` in the last one. Of an episode that
    is not over, or not whole in the buffer, only the steps that are there count. Observations are dicts with the keys
    `observation`, `achieved_goal` and `desired_goal`.

    Args:
        capacity: See `ReplayBuffer`.
        goals: What the env computes for other goals. Without `terminates`, `terminated` stays as it was.
        strategy: From which steps of the episode goals come.
        num_goals: Transitions that are relabelled for each one that is not.
        **settings: Other arguments of `ReplayBuffer`; observations are whole, so that `frame_stack` is 1.

    Raises:
        ConfigError: A number is out of range, or the directory does not exist.
    """

    kind = "hindsight"

    def __init__(
        self,
        capacity: int,
        *,
        goals: GoalFunctions,
        strategy: Strategy = "future",
        num_goals: float = 4,
        **settings: Any,
    ) -> None:
        """Check the numbers."""
        if not num_goals > 0:
            raise ConfigError(f"replay buffer: num_goals={num_goals} must be more than 0.")
        self._goals = goals
        self.strategy, self.num_goals = strategy, num_goals
        super().__init__(capacity, frame_stack=1, **settings)

    def close(self) -> None:
        """Free memory and disk space, and close the env that computes rewards."""
        super().close()
        self._goals.close()

    # The episodes of a lane are numbered. A table of R entries for each lane holds the first and the last row of each
    # episode by its number: no more than R episodes of a lane are in the ring.

    def _make_columns(self, layout: Layout, num_linked_rows: int | None = None) -> Layout:
        if num_linked_rows is not None:
            raise ConfigError(
                "replay_buffer_config: type='hindsight' needs one agent whose envs step together, and these steps come "
                "from several agents or from clients of a policy server: use type='uniform'."
            )
        keys = layout.tree.keys() if isinstance(layout.tree, dict) else ()
        missing = [key for key in GOAL_KEYS if key not in keys]
        if missing:
            raise ConfigError(
                f"replay_buffer_config: type='hindsight' needs observations with the keys {', '.join(GOAL_KEYS)}, and "
                f"{missing[0]!r} is not among {', '.join(layout.paths)}: use another type, or leave out transforms "
                "that change the form of the observations before they are stored."
            )
        super()._make_columns(layout)
        shape = self._links.num_rows, self._links.num_lanes
        # The number of the episode of each row; by number, the first and the last row, counting all rows ever written.
        self._numbers, *self._bounds = (self._storage.column(shape, np.int64) for _ in range(3))
        self._latest = np.zeros(shape[1], np.int64)  # number of the newest episode of each lane
        self._is_over = np.ones(shape[1], np.bool_)  # whether the next row begins another one
        return layout

    def _stored(self) -> dict[str, Any]:
        return {**super()._stored(), "episodes": [self._numbers, *self._bounds]}

    def _note_written(self, place: Place) -> None:
        lanes, num_rows = place.lanes, self._links.num_rows
        assert isinstance(place.steps_at, int)  # lanes are in step
        rows = np.arange(place.steps_at, place.stop - 1)
        if place.tails[0] < 0:  # the rollout does not continue the one before
            self._is_over[lanes] = True
        valid, terminated, truncated = (
            self._columns[name].grid[rows % num_rows, lanes] for name in ("valid", "terminated", "truncated")
        )
        over = terminated | truncated | ~valid
        begins = np.concatenate([self._is_over[None, lanes], over[:-1]])
        numbers = self._latest[lanes] + np.cumsum(begins, 0)
        self._latest[lanes], self._is_over[lanes] = numbers[-1], over[-1]
        put_rows([(self._numbers, numbers)], int(rows[0]), lanes)
        for column, where in zip(self._bounds, (begins & valid, valid), strict=True):
            at, lane = where.nonzero()  # in the order of time, so the last one of several rows stays
            column.grid[numbers[at, lane] % num_rows, lanes.start + lane] = rows[at]

    def _achieved_later(self, flat: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return a goal for each of the steps, `[M, ...]`.

        Args:
            flat: Flat indices of the steps, `[M]`.
            rows: Their rows, counting all rows ever written, `[M]`.
        """
        num_rows, num_lanes = self._links.num_rows, self._links.num_lanes
        lanes = flat % num_lanes
        entries = self._numbers.at(flat) % num_rows * num_lanes + lanes
        first, last = (column.at(entries) for column in self._bounds)
        if self.strategy == "final":
            chosen = last
        else:
            oldest = self._links.written[lanes * self.num_runners // num_lanes] - num_rows
            start = rows if self.strategy == "future" else np.maximum(first, oldest)
            chosen = start + (self._rng.random(len(rows)) * (last + 1 - start)).astype(np.int64)
        return self._achieved_after(chosen % num_rows * num_lanes + lanes)

    def _achieved_after(self, flat: NDArray[np.int64]) -> NDArray[Any]:
        """Return what was achieved after steps, `[M, ...]`."""
        achieved: NDArray[Any] = self._observations.after(flat)[ACHIEVED]
        return achieved

    # Batches out.

    def sample(
        self, batch_size: int, *, gamma: float = 1.0, reward_fn: RewardFn | None = None, **how: Any
    ) -> dict[str, Tree]:
        """Return drawn transitions `[B, ...]`, most of them with other goals; see `ReplayBuffer.sample`."""
        if reward_fn is None and INTRINSIC in self._columns:
            reward_fn = np.asarray  # all rewards as they are, to which the intrinsic ones are added
        batch = super().sample(batch_size, gamma=gamma, reward_fn=reward_fn, **how)
        (at,) = (self._rng.random(batch_size) * (1 + self.num_goals) < self.num_goals).nonzero()
        if not len(at):
            return batch
        stamps: NDArray[np.int64] = batch["indices"][at]
        flat = stamps % self._links.size
        goals = self._achieved_later(flat, stamps // self._links.num_lanes)
        # What the env says of the steps of each transition with its other goal.
        num_steps = batch["num_steps"][at]
        longest = int(num_steps.max(initial=1))
        steps = self._links.window(flat, longest)
        within = np.arange(longest)[:, None] < num_steps
        achieved, desired = self._achieved_after(steps[within]), goals[within.nonzero()[1]]
        rewards = np.zeros(steps.shape, np.float32)
        rewards[within] = _checked(self._goals.rewards_of(achieved, desired), "compute_reward", len(achieved))
        if reward_fn is not None:
            rewards = self._changed_rewards(reward_fn, rewards, steps)
        terminated = self._columns["terminated"].at(steps)
        truncated = self._columns["truncated"].at(steps)
        if self._goals.terminates is not None:
            ended = _checked(self._goals.terminates(achieved, desired), "compute_terminated", len(achieved))
            terminated[within] = ended != 0
        # The transition ends where its episode would have ended with this goal.
        batch["rewards"][at], taken, batch["discounts"][at] = n_step_returns(
            rewards, within, terminated | truncated, gamma=gamma
        )
        ends = taken - 1, np.arange(len(at))
        batch["num_steps"][at] = taken
        batch["terminated"][at], batch["truncated"][at] = terminated[ends], truncated[ends]
        if (taken < num_steps).any():  # the other goal was achieved earlier
            after = self._observations.after(steps[ends])
            map_tree(lambda leaf, now: leaf.__setitem__(at, now), batch["next_obs"], after)
        for name in ("obs", "next_obs"):
            batch[name][DESIRED][at] = goals
        return batch

    # State.

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "strategy": self.strategy, "num_goals": self.num_goals}

    def get_state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the state as plain data; see `ReplayBuffer.get_state`."""
        state = super().get_state(copy=copy)
        if self._layout is None:
            return state
        return {**state, "latest": self._latest.copy(), "is_over": self._is_over.copy()}

    def _load(self, state: Mapping[str, Any]) -> None:
        latest = array_of(state["latest"], np.int64, self._latest.shape)
        is_over = array_of(state["is_over"], np.bool_, self._is_over.shape)
        super()._load(state)
        self._latest, self._is_over = latest.copy(), is_over.copy()


def _checked(values: Any, name: str, size: int) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf" or array.size != size or not np.isfinite(array).all():
        raise ConfigError(
            f"replay_buffer_config: {name} of the env must return finite numbers [{size}], got {describe(array)}: "
            f"{values!r:.100}."
        )
    return array.reshape(size)
