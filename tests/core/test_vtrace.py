"""V-trace against GAE, against closed forms, and against a slow reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_returns import Columns, columns, rollouts

from corral.core.returns import gae, vtrace
from on_tensors import on_tensors


@pytest.fixture(autouse=True, scope="module", params=["arrays", "tensors"])
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tensors":
            patch.setitem(globals(), "vtrace", on_tensors(vtrace))
        yield


def slow_vtrace(
    c: Columns, ratios: NDArray[Any], gamma: float, lambda_: float, clip_rho: float, clip_c: float, clip_pg_rho: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum eq. 1 of the paper term by term, with the product of the c written out; return advantages and targets."""
    num_rows, num_envs = c["rewards"].shape
    targets, advantages = np.array(c["values"], np.float64), np.zeros((num_rows, num_envs))

    def goes_on(t: int, n: int) -> bool:
        """Return whether the step after t belongs to the same episode and is in the columns."""
        ended = c["terminated"][t, n] or c["truncated"][t, n]
        return bool(not ended and t + 1 < num_rows and c["valid"][t + 1, n])

    def bootstrap(t: int, n: int) -> float:
        return 0.0 if c["terminated"][t, n] else float(c["next_values"][t, n])

    for n in range(num_envs):
        for s in range(num_rows):
            product, t = 1.0, s
            while c["valid"][s, n]:
                delta = c["rewards"][t, n] + gamma * bootstrap(t, n) - c["values"][t, n]
                targets[s, n] += gamma ** (t - s) * product * min(clip_rho, ratios[t, n]) * delta
                product *= lambda_ * min(clip_c, ratios[t, n])
                if not goes_on(t, n):
                    break
                t += 1
        for s in range(num_rows):
            if c["valid"][s, n]:
                change = targets[s + 1, n] - c["values"][s + 1, n] if goes_on(s, n) else 0.0
                next_target = bootstrap(s, n) + change
                weight = min(clip_pg_rho, ratios[s, n])
                advantages[s, n] = weight * (c["rewards"][s, n] + gamma * next_target - c["values"][s, n])
    return advantages, targets


@given(
    c=rollouts(),
    seed=st.integers(0, 2**32 - 1),
    gamma=st.floats(0, 1),
    lambda_=st.floats(0, 1),
    clips=st.tuples(*[st.floats(0.1, 3)] * 3),
)
@settings(max_examples=40, deadline=None)
def test_matches_the_sum_in_the_paper(
    c: Columns, seed: int, gamma: float, lambda_: float, clips: tuple[float, float, float]
) -> None:
    ratios = np.exp(np.random.default_rng(seed).normal(size=c["rewards"].shape))
    expected = slow_vtrace(c, ratios, gamma, lambda_, *clips)
    clip_rho, clip_c, clip_pg_rho = clips
    found = vtrace(ratios, **c, gamma=gamma, lambda_=lambda_, clip_rho=clip_rho, clip_c=clip_c, clip_pg_rho=clip_pg_rho)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        assert one.dtype == np.float32


@given(c=rollouts(), gamma=st.floats(0, 1), lambda_=st.floats(0, 1))
@settings(max_examples=15, deadline=None)
def test_on_policy_it_is_gae(c: Columns, gamma: float, lambda_: float) -> None:
    ratios, valid = np.ones_like(c["rewards"]), c["valid"]
    advantages, targets = vtrace(ratios, **c, gamma=gamma, lambda_=lambda_)
    expected, expected_targets = gae(**c, gamma=gamma, lambda_=lambda_)
    np.testing.assert_allclose(targets[valid], expected_targets[valid], rtol=1e-5, atol=1e-5)
    if lambda_ == 1:
        np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-4)


def test_two_steps_by_hand() -> None:
    """Two states, one after the other, and then the end; rho is clipped at 1, c at 0.5."""
    c = columns([1.0, 2.0], [0.5, 0.25], [0.25, 9.0], terminated=[False, True])
    advantages, targets = vtrace(np.array([[2.0], [0.8]]), **c, gamma=0.9, clip_c=0.5)
    second = 0.25 + 0.8 * (2.0 - 0.25)
    first = 0.5 + 1.0 * (1.0 + 0.9 * 0.25 - 0.5) + 0.9 * 0.5 * (second - 0.25)
    np.testing.assert_allclose(targets[:, 0], [first, second], rtol=1e-6)
    np.testing.assert_allclose(advantages[:, 0], [1.0 + 0.9 * second - 0.5, 0.8 * (2.0 - 0.25)], rtol=1e-6)


def test_without_clips_it_corrects_the_mean_of_the_other_policy() -> None:
    """One step with two actions: the mean target under the policy that acted is the value of the one that learns."""
    acted, learns, rewards = np.array([0.8, 0.2]), np.array([0.3, 0.7]), np.array([1.0, 5.0])
    c = columns(rewards[None], [[2.0, 2.0]], [[0.0, 0.0]], terminated=[[True, True]])
    _, targets = vtrace((learns / acted)[None], **c, gamma=0.9, clip_rho=np.inf, clip_c=np.inf)
    assert acted @ targets[0] == pytest.approx(learns @ rewards, rel=1e-6)


def test_the_largest_rho_decides_whose_value_it_is() -> None:
    """With rho clipped to 1, the fixed point is the value of a policy in proportion to min(acted, learns)."""
    acted, learns, rewards = np.array([0.8, 0.2]), np.array([0.3, 0.7]), np.array([1.0, 5.0])
    value = 0.0
    for _ in range(200):
        c = columns(rewards[None], [[value, value]], [[0.0, 0.0]], terminated=[[True, True]])
        value = float(acted @ vtrace((learns / acted)[None], **c, gamma=0.9)[1][0])
    between = np.minimum(acted, learns) / np.minimum(acted, learns).sum()
    assert value == pytest.approx(between @ rewards, rel=1e-5)


def test_nan_where_nothing_was_stepped_is_never_read() -> None:
    c = columns([1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, np.nan], terminated=[True, False, True])
    c["valid"][1] = False
    for name in ("rewards", "values", "next_values"):
        c[name][1] = np.nan
    advantages, targets = vtrace(np.array([[1.0], [np.nan], [1.0]]), **c, gamma=0.9)
    assert advantages[:, 0].tolist() == [1.0, 0.0, 1.0]
    assert np.isfinite(targets[[0, 2]]).all()
