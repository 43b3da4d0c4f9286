"""Rollouts: the columns of one `sample()` call, written in place row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.distributions import ActionDistribution
from corral.core.networks import space_tree
from corral.core.tree import Tree, map_tree

_ROW_COLUMNS = ("actions", "rewards", "terminated", "truncated", "valid", "dist_inputs", "row_times_s")


@dataclass
class Rollout:
    """Columns with time T on axis 0 and the sub-envs N on axis 1, in one allocation for each `sample()` call.

    A rollout is never written again after `sample()` returned it, so whoever keeps it keeps the data.

    Attributes:
        obs: Tree of `[T + 1, N, ...]`: row t is what the action of row t saw, row T what the last step led to.
        actions: Module actions `[T, N, ...]`; see `ActionDistribution.to_env`.
        rewards: float64 `[T, N]`.
        terminated: bool `[T, N]`.
        truncated: bool `[T, N]`.
        valid: bool `[T, N]`; False where nothing was stepped: a row of next-step autoreset, or one past the last
            episode that was asked for.
        dist_inputs: float32 `[T, N, D]`, the policy's outputs.
        logp: float32 `[T, N]`, log-probability of the actions; filled when the rollout is complete.
        row_times_s: float64 `[T]`, clock readings at the end of each row.
        final_obs: By (t, n) of a step that ended its episode, the final observation that `obs` does not hold because a
            same-step autoreset overwrote it; in the order of time.
        weights_version: Version of the weights that acted.
        num_rows: Rows written so far; T once complete.
    """

    obs: Tree
    actions: NDArray[Any]
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    dist_inputs: NDArray[np.float32]
    row_times_s: NDArray[np.float64]
    final_obs: dict[tuple[int, int], Tree]
    logp: NDArray[np.float32]
    weights_version: int = 0
    num_rows: int = 0

    @classmethod
    def allocate(
        cls, num_rows: int, num_envs: int, observation_space: spaces.Space[Any], distribution: ActionDistribution
    ) -> Rollout:
        """Make columns for `num_rows` rows, uninitialised."""
        shape = (num_rows, num_envs)
        space = space_tree(observation_space)
        return cls(
            obs=map_tree(lambda leaf: np.empty((num_rows + 1, num_envs, *leaf.shape), leaf.dtype), space),
            actions=np.empty((*shape, *distribution.action_shape), distribution.action_dtype),
            rewards=np.empty(shape),
            terminated=np.empty(shape, np.bool_),
            truncated=np.empty(shape, np.bool_),
            valid=np.empty(shape, np.bool_),
            dist_inputs=np.empty((*shape, distribution.num_inputs), np.float32),
            row_times_s=np.empty(num_rows),
            final_obs={},
            logp=np.empty((0, num_envs), np.float32),
        )

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return len(self.rewards)

    @property
    def num_envs(self) -> int:
        """N."""
        return int(self.rewards.shape[1])

    @property
    def num_env_steps(self) -> int:
        """Steps that were taken: the valid entries."""
        return int(np.count_nonzero(self.valid[: self.num_rows]))

    @property
    def done(self) -> NDArray[np.bool_]:
        """Where an episode ended, either way: bool `[T, N]`, for bookkeeping; returns keep the two apart."""
        return self.terminated | self.truncated

    def __len__(self) -> int:
        """Return the number of rows T."""
        return self.num_rows

    def resize(self, capacity: int) -> None:
        """Give the columns room for `capacity` rows, and keep the rows written so far."""
        rows = min(self.num_rows, capacity)

        def resized(column: NDArray[Any], extra: int = 0) -> NDArray[Any]:
            if capacity + extra <= len(column):
                return column[: capacity + extra]
            larger = np.empty((capacity + extra, *column.shape[1:]), column.dtype)
            larger[: rows + extra] = column[: rows + extra]
            return larger

        self.obs = map_tree(lambda column: resized(column, 1), self.obs)
        for name in _ROW_COLUMNS:
            setattr(self, name, resized(getattr(self, name)))

    def add_final_obs(self, row: int, env_index: int, obs: Tree) -> None:
        """Keep a final observation that a same-step autoreset takes out of `obs`."""
        self.final_obs[row, env_index] = map_tree(lambda column, leaf: np.array(leaf, column.dtype), self.obs, obs)

    def next_obs_at(self, row: int, env_index: int) -> Tree:
        """Return the observation that a step led to: the final one where it ended its episode."""
        if (row, env_index) in self.final_obs:
            return self.final_obs[row, env_index]
        return map_tree(lambda column: column[row + 1, env_index], self.obs)

    def evaluate(self, value_fn: Callable[[Tree], NDArray[np.float32]]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Compute the values that return computations need.

        Args:
            value_fn: Maps observations (tree of `[B, ...]`) to values `[B]`.

        Returns:
            V(s_t) and V of the observation that step t led to, both `[T, N]`.
        """
        shape = (self.num_rows + 1, self.num_envs)
        values = value_fn(map_tree(lambda column: column.reshape(-1, *column.shape[2:]), self.obs)).reshape(shape)
        next_values = values[1:]
        if self.final_obs:
            next_values = next_values.copy()
            rows, envs = zip(*self.final_obs, strict=True)
            next_values[rows, envs] = value_fn(map_tree(lambda *leaf: np.stack(leaf), *self.final_obs.values()))
        return values[:-1], next_values

    def valid_rows(self, column: Tree) -> Tree:
        """Flatten a column `[T, N, ...]` to the valid steps `[B, ...]`."""
        if self.valid.all():
            return map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), column)
        return map_tree(lambda leaf: leaf[self.valid], column)


@dataclass
class EpisodeCarry:
    """What the unfinished episodes of a runner have behind them, all `[N]`."""

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    start_times_s: NDArray[np.float64]

    @classmethod
    def fresh(cls, num_envs: int, now_s: float) -> EpisodeCarry:
        """Return the carry of episodes that start now."""
        return cls(np.zeros(num_envs), np.zeros(num_envs, np.int64), np.full(num_envs, now_s))


@dataclass(frozen=True)
class EpisodeStatistics:
    """The episodes that ended in a rollout, in the order of their ends, all `[K]`."""

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    durations_s: NDArray[np.float64]


def episode_statistics(rollout: Rollout, carry: EpisodeCarry) -> tuple[EpisodeStatistics, EpisodeCarry]:
    """Work out ended episodes from whole columns.

    Args:
        rollout: A complete rollout.
        carry: Of the rollout before it.

    Returns:
        The ended episodes, and the carry for the next rollout.
    """
    if not rollout.num_rows:
        return EpisodeStatistics(np.zeros(0), np.zeros(0, np.int64), np.zeros(0)), carry
    returns = np.cumsum(np.where(rollout.valid, rollout.rewards, 0.0), axis=0) + carry.returns
    lengths = np.cumsum(rollout.valid, axis=0) + carry.lengths
    envs, rows = np.nonzero((rollout.done & rollout.valid).T)  # by env, then by time
    end_times = rollout.row_times_s[rows]
    first_of_env = np.diff(envs, prepend=-1) != 0

    def since_last_end(totals: NDArray[Any], start: Any) -> NDArray[Any]:
        passed = totals.copy()
        passed[1:] -= totals[:-1]
        passed[first_of_env] = (totals - start)[first_of_env]
        return passed[order]

    order = np.argsort(rows, kind="stable")  # back to the order of time
    statistics = EpisodeStatistics(
        since_last_end(returns[rows, envs], 0.0),
        since_last_end(lengths[rows, envs], 0),
        since_last_end(end_times, carry.start_times_s[envs]),
    )
    left = EpisodeCarry(returns[-1].copy(), lengths[-1].copy(), carry.start_times_s.copy())
    # Assignment takes the last of repeated indices, which is each env's latest end.
    at_end_returns, at_end_lengths = np.zeros(rollout.num_envs), np.zeros(rollout.num_envs, np.int64)
    at_end_returns[envs], at_end_lengths[envs] = returns[rows, envs], lengths[rows, envs]
    left.returns -= at_end_returns
    left.lengths -= at_end_lengths
    left.start_times_s[envs] = end_times
    return statistics, left
