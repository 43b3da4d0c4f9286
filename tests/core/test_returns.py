"""GAE against closed forms, against a slow reference, and across autoreset modes and fragment boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from corral.core.returns import gae
from on_tensors import on_tensors

Columns = dict[str, NDArray[Any]]


@pytest.fixture(autouse=True, scope="module", params=["arrays", "tensors"])
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tensors":
            patch.setitem(globals(), "gae", on_tensors(gae))
        yield


def columns(rewards: Any, values: Any, next_values: Any, **flags: Any) -> Columns:
    """Make columns [T, N] from rows or, for one sub-env, from plain lists."""
    made: Columns = {}
    for name, column in {"rewards": rewards, "values": values, "next_values": next_values}.items():
        array = np.asarray(column, np.float64)
        made[name] = array[:, None] if array.ndim == 1 else array
    for name, default in (("terminated", False), ("truncated", False), ("valid", True)):
        flag = np.asarray(flags.get(name, np.full(made["rewards"].shape, default)), np.bool_)
        made[name] = flag[:, None] if flag.ndim == 1 else flag
    return made


def slow_gae(c: Columns, gamma: float, lambda_: float) -> NDArray[np.float64]:
    """Sum eq. 16 of the paper term by term, for each step of each sub-env, up to the end of its episode."""
    advantages = np.zeros(c["rewards"].shape)
    num_rows, num_envs = advantages.shape
    for n in range(num_envs):
        for t in range(num_rows):
            weight = 1.0
            for k in range(t, num_rows):
                if not c["valid"][k, n]:
                    break
                bootstrap = 0.0 if c["terminated"][k, n] else gamma * c["next_values"][k, n]
                advantages[t, n] += weight * (c["rewards"][k, n] + bootstrap - c["values"][k, n])
                weight *= gamma * lambda_
                if c["terminated"][k, n] or c["truncated"][k, n]:
                    break
    return advantages


@st.composite
def rollouts(draw: st.DrawFn) -> Columns:
    """Draw next-step autoreset columns: after an end comes one invalid row full of garbage."""
    num_rows, num_envs = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (num_rows, num_envs)
    c = columns(*(rng.normal(size=shape) for _ in range(3)))
    ends = rng.choice(["", "", "", "end", "cut", "both"], num_rows * num_envs)
    for n in range(num_envs):
        pending = False
        for t in range(num_rows):
            c["valid"][t, n] = not pending
            end = ends[t * num_envs + n] if not pending else ""
            c["terminated"][t, n] = end in ("end", "both")
            c["truncated"][t, n] = end in ("cut", "both")
            pending = bool(end)
    for name in ("rewards", "values", "next_values"):
        c[name][~c["valid"]] = 1e6
    return c


@given(c=rollouts(), gamma=st.floats(0, 1), lambda_=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_matches_the_sum_in_the_paper(c: Columns, gamma: float, lambda_: float) -> None:
    advantages, targets = gae(**c, gamma=gamma, lambda_=lambda_)
    np.testing.assert_allclose(advantages, slow_gae(c, gamma, lambda_), rtol=1e-4, atol=1e-4)
    valid = c["valid"]
    np.testing.assert_allclose(targets[valid], (advantages + c["values"])[valid], rtol=1e-5, atol=1e-5)
    assert (advantages[~valid] == 0).all()
    assert advantages.dtype == targets.dtype == np.float32


def test_terminated_step_bootstraps_nothing() -> None:
    c = columns([1, 2, 3], [0.5, 0.5, 0.5], [0.5, 0.5, 99.0], terminated=[False, False, True])
    advantages, targets = gae(**c, gamma=0.9, lambda_=1.0)
    returns = [1 + 0.9 * (2 + 0.9 * 3), 2 + 0.9 * 3, 3]
    np.testing.assert_allclose(targets[:, 0], returns, rtol=1e-6)
    np.testing.assert_allclose(advantages[:, 0], np.array(returns) - 0.5, rtol=1e-6)


def test_truncated_step_bootstraps_from_its_final_observation() -> None:
    # The final observation is worth 10; the next episode's first observation (row 2's value) is worth -7.
    c = columns([1, 2, 5], [0.5, 0.5, -7.0], [0.5, 10.0, 1.0], truncated=[False, True, False])
    _, targets = gae(**c, gamma=0.9, lambda_=1.0)
    np.testing.assert_allclose(targets[:2, 0], [1 + 0.9 * (2 + 0.9 * 10), 2 + 0.9 * 10], rtol=1e-6)


def test_termination_wins_where_a_time_limit_falls_on_the_same_step() -> None:
    c = columns([1], [0.0], [50.0], terminated=[True], truncated=[True])
    assert gae(**c, gamma=0.9, lambda_=0.5)[0][0, 0] == 1.0


def test_a_value_that_is_nan_after_termination_is_never_read() -> None:
    c = columns([1, 1], [0, 0], [0, np.nan], terminated=[False, True])
    assert np.isfinite(gae(**c, gamma=0.9, lambda_=0.9)[0]).all()


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_next_step_and_same_step_autoreset_give_the_same_advantages(flag: str) -> None:
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 6))
    over = np.array([False, False, True, False, True, False])
    same_step = columns(rewards, values, next_values, **{flag: over})
    rows = [0, 1, 2, -1, 3, 4, -1, 5]  # -1: the row that only resets
    is_reset = np.array(rows) < 0

    def spread(column: NDArray[Any], garbage: Any) -> NDArray[Any]:
        return np.where(is_reset, garbage, column[rows])

    next_step = columns(
        *(spread(column, 1e3) for column in (rewards, values, next_values)),
        valid=~is_reset,
        **{flag: spread(over, False)},
    )
    expected, expected_targets = gae(**same_step, gamma=0.97, lambda_=0.9)
    advantages, targets = gae(**next_step, gamma=0.97, lambda_=0.9)
    np.testing.assert_array_equal(advantages[~is_reset], expected)
    np.testing.assert_array_equal(targets[~is_reset], expected_targets)


def cut(c: Columns, start: int, stop: int) -> Columns:
    return {name: column[start:stop] for name, column in c.items()}


@given(c=rollouts(), at=st.integers(1, 11))
@settings(max_examples=20, deadline=None)
def test_td_0_does_not_depend_on_where_a_rollout_is_cut(c: Columns, at: int) -> None:
    num_rows = len(c["rewards"])
    at = min(at, num_rows)
    whole = gae(**c, gamma=0.9, lambda_=0.0)[0]
    parts = [gae(**cut(c, *ends), gamma=0.9, lambda_=0.0)[0] for ends in ((0, at), (at, num_rows))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_td_0_is_the_temporal_difference() -> None:
    c = columns([1, 2], [3, 4], [4, 5])
    np.testing.assert_allclose(gae(**c, gamma=0.5, lambda_=0.0)[0][:, 0], [1 + 2 - 3, 2 + 2.5 - 4])


def test_lambda_1_at_a_fragment_end_is_the_discounted_return_with_bootstrap() -> None:
    rewards, values, gamma = np.array([1.0, 2.0, 3.0]), np.array([0.3, 0.7, 0.2]), 0.9
    c = columns(rewards, values, [0.7, 0.2, 4.0])
    discounts = gamma ** np.arange(3)
    returns = [(discounts[: 3 - t] * rewards[t:]).sum() + gamma ** (3 - t) * 4.0 for t in range(3)]
    np.testing.assert_allclose(gae(**c, gamma=gamma, lambda_=1.0)[1][:, 0], returns, rtol=1e-6)


def test_a_constant_reward_under_a_time_limit_has_the_value_of_an_endless_task() -> None:
    # With V = 1 / (1 - gamma) everywhere a step's surprise is 0, if the time limit bootstraps.
    value = 1 / (1 - 0.9)
    c = columns(np.ones(5), np.full(5, value), np.full(5, value), truncated=[False] * 4 + [True])
    np.testing.assert_allclose(gae(**c, gamma=0.9, lambda_=0.95)[0], 0, atol=1e-6)


def test_sub_envs_do_not_mix() -> None:
    c = columns([[1, 10], [1, 10]], np.zeros((2, 2)), np.zeros((2, 2)), terminated=[[True, False], [False, True]])
    np.testing.assert_allclose(gae(**c, gamma=1.0, lambda_=1.0)[0], [[1, 20], [1, 10]])
