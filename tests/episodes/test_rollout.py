"""Rollouts: episode statistics from whole arrays, room for more rows, and the observations that steps led to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from corral.core.spaces import space_tree
from corral.core.tree import Tree, map_tree
from corral.data.episodes.rollout import EpisodeCarry, Rollout, episode_statistics
from corral.modules.distributions import action_distribution

NESTED = spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32), "y": spaces.Tuple((spaces.Discrete(9),))})


def rollout_of(num_rows: int, num_envs: int, space: spaces.Space[object] = NESTED, seed: int = 0) -> Rollout:
    """Return a full rollout of random content."""
    rollout = Rollout.allocate(num_rows, num_envs, space_tree(space), action_distribution(spaces.Discrete(2), "clip"))
    rng = np.random.default_rng(seed)

    def fill(column: NDArray[np.generic]) -> None:
        column[...] = rng.integers(0, 2 if column.dtype == np.bool_ else 9, column.shape)

    map_tree(fill, rollout.obs)
    for name in ("actions", "rewards", "terminated", "truncated", "valid", "dist_inputs"):
        fill(getattr(rollout, name))
    rollout.row_times_s[:] = np.arange(1, num_rows + 1)
    rollout.num_rows = num_rows
    return rollout


@dataclass
class Running:
    """One sub-env's unfinished episode, step by step."""

    total: float = 0.0
    length: int = 0
    started_s: float = 0.0


def reference_statistics(rollout: Rollout, running: list[Running]) -> list[tuple[float, int, float]]:
    ended = []
    for t in range(rollout.num_rows):
        for n, episode in enumerate(running):
            if not rollout.valid[t, n]:
                if episode.length == 0 and (t == 0 or (rollout.done & rollout.valid)[t - 1, n]):  # the reset
                    episode.started_s = float(rollout.row_times_s[t])
                continue
            episode.total += float(rollout.rewards[t, n])
            episode.length += 1
            if rollout.terminated[t, n] or rollout.truncated[t, n]:
                now = float(rollout.row_times_s[t])
                ended.append((episode.total, episode.length, now - episode.started_s))
                running[n] = episode = Running(started_s=now)
    return ended


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4), num_envs=st.integers(1, 3), seed=st.integers(0, 10**6)
)
def test_statistics_match_a_plain_loop(sizes: list[int], num_envs: int, seed: int) -> None:
    running = [Running() for _ in range(num_envs)]
    carry = EpisodeCarry.fresh(num_envs, 0.0)
    clock = 0.0
    for k, num_rows in enumerate(sizes):
        rollout = rollout_of(num_rows, num_envs, seed=seed + k)
        rollout.row_times_s += clock
        clock += num_rows
        statistics, carry = episode_statistics(rollout, carry)
        expected = reference_statistics(rollout, running)
        found = zip(statistics.returns, statistics.lengths, statistics.durations_s, strict=True)
        assert [tuple(map(float, entry)) for entry in found] == expected
    assert carry.returns.tolist() == [episode.total for episode in running]
    assert carry.lengths.tolist() == [episode.length for episode in running]
    assert carry.start_times_s.tolist() == [episode.started_s for episode in running]


def test_statistics_leave_the_carry_that_they_were_given() -> None:
    carry = EpisodeCarry.fresh(2, 0.0)
    episode_statistics(rollout_of(5, 2), carry)
    assert carry.returns.tolist() == [0, 0]
    assert carry.start_times_s.tolist() == [0, 0]


@given(capacity=st.integers(0, 8), written=st.integers(0, 8), new_capacity=st.integers(0, 12))
def test_resize_keeps_what_was_written(capacity: int, written: int, new_capacity: int) -> None:
    rollout = rollout_of(capacity, 2)
    rollout.num_rows = min(capacity, written)
    before = rollout_of(capacity, 2)  # the same content
    rollout.resize(new_capacity)
    kept = min(rollout.num_rows, new_capacity)
    assert rollout.capacity == new_capacity
    for name in ("actions", "rewards", "terminated", "truncated", "valid", "dist_inputs", "row_times_s"):
        column = getattr(rollout, name)
        assert len(column) == new_capacity
        np.testing.assert_array_equal(column[:kept], getattr(before, name)[:kept], strict=True)

    def check(column: NDArray[np.generic], old: NDArray[np.generic]) -> None:
        assert len(column) == new_capacity + 1
        np.testing.assert_array_equal(column[: kept + 1], old[: kept + 1], strict=True)

    map_tree(check, rollout.obs, before.obs)


class TestNextObs:
    def test_is_the_next_row(self) -> None:
        rollout = rollout_of(3, 2)
        np.testing.assert_array_equal(rollout.next_obs_at(2, 1)["x"], rollout.obs["x"][3, 1])
        assert rollout.next_obs_at(0, 0)["y"][0] == rollout.obs["y"][0][1, 0]

    def test_is_the_final_one_where_a_reset_overwrote_the_row(self) -> None:
        rollout = rollout_of(3, 2)
        rollout.add_final_obs(1, 0, {"x": [0.25, 0.5], "y": (7,)})
        rollout.add_final_obs(2, 1, {"x": np.array([0.75, 1.0]), "y": (8,)})
        assert rollout.next_obs_at(1, 0)["x"].tolist() == [0.25, 0.5]
        assert rollout.next_obs_at(1, 0)["y"][0] == 7
        assert rollout.next_obs_at(2, 1)["x"].tolist() == [0.75, 1.0]
        np.testing.assert_array_equal(rollout.next_obs_at(1, 1)["x"], rollout.obs["x"][2, 1])
        assert rollout.next_obs_at(1, 0)["x"].dtype == np.float32


class TestEvaluate:
    @staticmethod
    def value(obs: Tree) -> NDArray[np.float32]:
        values: NDArray[np.float32] = obs["x"].sum(-1) + 100 * obs["y"][0].astype(np.float32)
        return values

    @pytest.mark.parametrize("same_step", [False, True])
    def test_values_before_and_after_each_step(self, same_step: bool) -> None:
        rollout = rollout_of(4, 3)
        ends = [(0, 2), (2, 0), (3, 1)]
        rollout.terminated[...], rollout.truncated[...] = False, False
        for k, (t, n) in enumerate(ends):
            rollout.truncated[t, n] = True
            if same_step:
                rollout.add_final_obs(t, n, {"x": np.array([k, 0.5]), "y": (3,)})
        values, next_values = rollout.compute_values(self.value)
        assert values.shape == next_values.shape == (4, 3)
        for t, n in np.ndindex(4, 3):
            row = map_tree(lambda column, t=t, n=n: column[t, n][None], rollout.obs)
            assert values[t, n] == self.value(row)[0]
            after = map_tree(lambda leaf: np.asarray(leaf)[None], rollout.next_obs_at(t, n))
            assert next_values[t, n] == self.value(after)[0]
        if same_step:
            assert next_values[2, 0] == 301.5

    def test_a_final_value_stays_out_of_the_next_episodes(self) -> None:
        rollout = rollout_of(3, 1)
        before, _ = rollout.compute_values(self.value)
        rollout.add_final_obs(0, 0, {"x": [50.0, 50.0], "y": (0,)})
        values, next_values = rollout.compute_values(self.value)
        assert values.tolist() == before.tolist()
        assert next_values[0, 0] == 100


def test_valid_rows_flatten_in_time_order() -> None:
    rollout = rollout_of(3, 2)
    rollout.valid[...] = [[True, True], [False, True], [True, False]]
    rollout.rewards[...] = [[0, 1], [2, 3], [4, 5]]
    assert rollout.valid_rows(rollout.rewards).tolist() == [0, 1, 3, 4]
    assert rollout.valid_rows({"a": (rollout.rewards,)})["a"][0].tolist() == [0, 1, 3, 4]
    rollout.valid[...] = True
    assert rollout.valid_rows(rollout.rewards).tolist() == [0, 1, 2, 3, 4, 5]
