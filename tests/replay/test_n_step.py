"""n-step returns against their closed form, with termination, truncation and cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from streams import Stream

from corral.core.returns import n_step_returns
from corral.data.replay import PrioritizedReplayBuffer, ReplayBuffer

ONES, NO = [1.0, 1.0, 1.0, 1.0], [False] * 4


@pytest.mark.parametrize(
    ("rewards", "valid", "done", "expected", "num_steps"),
    [
        (ONES, [True] * 4, NO, (1 - 0.5**4) / (1 - 0.5), 4),  # the geometric sum
        ([1.0, 2.0, 4.0, 8.0], [True] * 4, NO, 4.0, 4),
        (ONES, [True] * 4, [False, True, False, False], 1.5, 2),  # the step that is done counts
        (ONES, [True] * 4, [True, False, False, True], 1.0, 1),
        (ONES, [True, True, False, True], NO, 1.5, 2),  # one that is not valid does not, nor what comes behind it
        ([1.0, np.nan, np.inf, 1.0], [True, False, False, False], NO, 1.0, 1),
    ],
)
def test_closed_forms(rewards: Any, valid: Any, done: Any, expected: float, num_steps: int) -> None:
    columns = [np.array(column)[:, None] for column in (rewards, valid, done)]
    sums, taken, discounts = n_step_returns(*columns, gamma=0.5)
    assert (sums.dtype, taken.dtype, discounts.dtype) == (np.float32, np.int64, np.float32)
    assert (sums.tolist(), taken.tolist(), discounts.tolist()) == ([expected], [num_steps], [0.5**num_steps])


def test_sequences_do_not_mix() -> None:
    sums, taken, discounts = n_step_returns(
        np.array([[1.0, 10.0], [2.0, 20.0]]),
        np.ones((2, 2), np.bool_),
        np.array([[False, True], [False] * 2]),
        gamma=0.1,
    )
    np.testing.assert_allclose(sums, [1.2, 10.0], rtol=1e-6)
    assert taken.tolist() == [2, 1]
    np.testing.assert_allclose(discounts, [0.01, 0.1], rtol=1e-6)


@pytest.mark.parametrize(("gamma", "expected"), [(0.0, [0.0, 0.0]), (1.0, [1.0, 1.0])])
def test_gamma_at_its_bounds(gamma: float, expected: list[float]) -> None:
    flags = np.zeros((3, 2), np.bool_)
    sums, _, discounts = n_step_returns(np.ones((3, 2)), ~flags, flags, gamma=gamma)
    assert discounts.tolist() == expected and sums.tolist() == [1 + 2 * gamma] * 2


@pytest.mark.parametrize(
    ("terminated", "truncated", "num_steps", "flags"),
    [
        (True, False, [3, 2, 1, 2, 1], [(1, 0), (1, 0), (1, 0), (0, 0), (0, 0)]),
        (False, True, [3, 2, 1, 2, 1], [(0, 1), (0, 1), (0, 1), (0, 0), (0, 0)]),
    ],
)
def test_a_buffer_stops_at_ends_and_at_its_newest_row(
    terminated: bool, truncated: bool, num_steps: list[int], flags: list[tuple[int, int]]
) -> None:
    """Row 2 ends the episode, row 3 is only a reset, and after row 5 nothing is known."""
    rollout = Stream(1, end_rate=0.0).next(6)
    rollout.terminated[2], rollout.truncated[2], rollout.valid[3] = terminated, truncated, False
    rollout.rewards[...] = 1.0
    buffer = ReplayBuffer(6, seed=0)
    buffer.add(rollout)
    batch = buffer.sample(500, n_step=3, gamma=0.5)
    rows, first = np.unique(batch["obs"][:, 2] - 1, return_index=True)
    assert rows.tolist() == [0, 1, 2, 4, 5]
    assert batch["num_steps"][first].tolist() == num_steps
    assert [*zip(batch["terminated"][first], batch["truncated"][first], strict=True)] == flags
    assert batch["discounts"][first].tolist() == [0.5**n for n in num_steps]
    assert batch["rewards"][first].tolist() == [2 - 0.5 ** (n - 1) for n in num_steps]
    assert (batch["next_obs"][first, 2] - 1).tolist() == [3, 3, 3, 6, 6]


@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
def test_each_transition_draws_its_own_number_of_steps(kind: type[ReplayBuffer]) -> None:
    """Of a range the two ends come as often as the numbers between, for every row, up to where the rows end."""
    rollout = Stream(1, end_rate=0.0).next(20)
    rollout.rewards[...] = 1.0
    buffer = kind(20, seed=0)
    buffer.add(rollout)
    batch = buffer.sample(8000, n_step=(2, 5), gamma=0.5)
    rows = batch["obs"][:, 2].astype(int) - 1
    shares = [np.bincount(batch["num_steps"][rows == row], minlength=6) / (rows == row).sum() for row in range(20)]
    np.testing.assert_allclose(shares[:16], [[0, 0, 0.25, 0.25, 0.25, 0.25]] * 16, atol=0.1)
    np.testing.assert_allclose(
        shares[16:19], [[0, 0, 0.25, 0.25, 0.5, 0], [0, 0, 0.25, 0.75, 0, 0], [0, 0, 1, 0, 0, 0]], atol=0.1
    )
    assert shares[19].tolist() == [0, 1, 0, 0, 0, 0]
    np.testing.assert_array_equal(batch["next_obs"][:, 2] - 1, rows + batch["num_steps"])
    np.testing.assert_array_equal(batch["discounts"], 0.5 ** batch["num_steps"])
    np.testing.assert_array_equal(batch["rewards"], 2 - 0.5 ** (batch["num_steps"] - 1.0))


@pytest.mark.parametrize("n_step", [0, (0, 2), (3, 2)])
def test_numbers_of_steps_that_no_transition_has_are_refused(n_step: Any) -> None:
    buffer = ReplayBuffer(20)
    buffer.add(Stream(1).next(20))
    with pytest.raises(ValueError, match="n_step="):
        buffer.sample(1, n_step=n_step)
    with pytest.raises(ValueError, match="n_step="):
        buffer.sample_sequences(1, {}, seq_len=2, n_step=n_step)
