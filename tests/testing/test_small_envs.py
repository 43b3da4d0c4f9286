"""The small envs for tests give the rewards and ends that their docstrings promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corral.envs.vector import EnvContext
from corral.testing import (
    IDENTITY_ACTION_SPACES,
    CountingEnv,
    DeepSea,
    FaultyEnv,
    FindSquare,
    IdentityEnv,
    PoorHabit,
    TimeLimitCorridor,
)


def play(env: Any, actions: list[Any]) -> list[tuple[float, bool, bool]]:
    """Return reward, terminated and truncated of each step of one episode."""
    env.reset(seed=0)
    return [env.step(action)[1:4] for action in actions]


@pytest.mark.parametrize("space", IDENTITY_ACTION_SPACES)
def test_the_observation_is_the_best_action_of_the_identity_env(space: str) -> None:
    env = IdentityEnv({"space": space, "episode_length": 3})
    obs, _ = env.reset(seed=1)
    found = []
    for _ in range(3):
        obs, *step, _ = env.step(obs)
        found.append(tuple(step))
    assert found == [(1.0, False, False), (1.0, False, False), (1.0, False, True)]


@pytest.mark.parametrize(
    ("space", "obs", "action", "reward"),
    [
        ("discrete", 2, 1, 0.0),
        ("multi_discrete", [2, 1], [2, 0], 1 / 2),
        ("multi_binary", [0, 1, 1], [1, 1, 1], 2 / 3),
        ("box", [1.0, 0.0], [-1.0, 0.5], 1 - (2 / 1 + 0.5 / 1) / 2),
        ("box_uneven", [0.0, 1.0], [10.0, -2.0], 1 - (10 / 5 + 3 / 3) / 2),
        ("box_unbounded", [0.5], [2.0], 1 - 1.5),
    ],
)
def test_other_actions_of_the_identity_env_cost_their_distance(
    space: str, obs: Any, action: Any, reward: float
) -> None:
    env = IdentityEnv({"space": space})
    env.reset(seed=0)
    env._obs = np.array(obs)
    assert env.step(np.array(action))[1] == pytest.approx(reward)


def test_deep_sea_pays_for_the_way_right_alone() -> None:
    size = 5
    right, left = play(DeepSea({"size": size}), [1] * size), play(DeepSea({"size": size}), [0] * size)
    assert sum(reward for reward, _, _ in right) == pytest.approx(1 - 0.01)
    assert sum(reward for reward, _, _ in left) == 0
    assert [over for _, over, _ in right] == [over for _, over, _ in left] == [False] * (size - 1) + [True]
    one_left = play(DeepSea({"size": size}), [1, 1, 0, 1, 1])
    assert sum(reward for reward, _, _ in one_left) == pytest.approx(-0.01 * 4 / size)


@pytest.mark.parametrize(
    ("ends", "flags"),
    [
        ("terminated", [(True, False)] * 3),
        ("truncated", [(False, True)] * 3),
        ("alternate", [(True, False), (False, True), (True, False)]),
    ],
)
def test_the_counting_env_counts_and_ends_as_it_is_told(ends: str, flags: list[tuple[bool, bool]]) -> None:
    env = CountingEnv({"episode_length": 2, "ends": ends})
    for episode, flag in enumerate(flags):
        assert env.reset()[0].tolist() == [episode, 0]
        first, last = env.step(0), env.step(1)
        assert (first[0].tolist(), *first[1:4]) == ([episode, 1], 1.0, False, False)
        assert (last[0].tolist(), *last[1:4]) == ([episode, 2], 2.0, *flag)


def test_the_faulty_env_fails_at_its_step_in_one_sub_env() -> None:
    for index in (0, 1):
        env = FaultyEnv(EnvContext({"fault": "nan_reward", "at_step": 3}, vector_index=index))
        rewards = [reward for reward, _, _ in play(env, [0, 0, 0])]
        assert np.isnan(rewards).tolist() == [False, False, index == 1]


def test_the_corridor_is_truncated_and_never_terminates() -> None:
    assert play(TimeLimitCorridor({"episode_length": 2}), [0, 1]) == [(1.0, False, False), (1.0, False, True)]


def test_a_habit_is_worth_less_than_any_other_action() -> None:
    discrete = PoorHabit({"episode_length": 3})
    assert play(discrete, [2, 2, 1]) == [(1.0, False, False), (1.0, False, False), (2.0, True, False)]
    box = PoorHabit({"space": "box_uneven", "episode_length": 3})  # half widths of 5 and 3
    first, near, far = np.array([5.0, -2.0]), np.array([6.0, -2.0]), np.array([5.0, 0.0])
    assert [reward for reward, _, _ in play(box, [first, near, far])] == pytest.approx([1.0, 1 - 1 / 5, 2.0])


def test_the_square_is_in_the_quadrant_that_pays() -> None:
    env = FindSquare({"side": 14})
    obs, _ = env.reset(seed=0)
    quadrants = set()
    for _ in range(16):
        rows, columns, _ = np.nonzero(obs)
        assert len(rows) == 4 and obs.max() == 255  # two pixels wide
        top, bottom, left, right = rows.min() // 7, rows.max() // 7, columns.min() // 7, columns.max() // 7
        assert (top, left) == (bottom, right)
        quadrants.add(quadrant := int(2 * top + left))
        obs, reward, *_ = env.step(quadrant)
        assert reward == 1.0
    assert quadrants == {0, 1, 2, 3}
    rewards = [env.step(0)[1] for _ in range(64)]
    assert 0 < np.mean(rewards) < 0.5
