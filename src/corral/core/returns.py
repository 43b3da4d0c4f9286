"""Return computations as pure functions on columns, with time on axis 0. They know no module and no env."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatColumn = NDArray[np.floating]
BoolColumn = NDArray[np.bool_]


def gae(
    rewards: FloatColumn,
    values: FloatColumn,
    next_values: FloatColumn,
    terminated: BoolColumn,
    truncated: BoolColumn,
    valid: BoolColumn,
    *,
    gamma: float,
    lambda_: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return generalised advantage estimates and value targets (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    A terminated step does not bootstrap. A truncated step bootstraps from the value of its own final observation,
    and no advantage crosses it (Pardo et al. 2018, arXiv:1712.00378). The last step of a fragment bootstraps from the
    value of the observation after it.

    Args:
        rewards: `[T, N]`.
        values: `[T, N]`, V(s_t).
        next_values: `[T, N]`, V of the observation that step t led to: the final observation where the episode ended.
        terminated: `[T, N]`.
        truncated: `[T, N]`.
        valid: `[T, N]`, False where no env step was taken, such as at a reset. There the advantage is 0, and no
            advantage crosses it. A step before it that neither terminated nor truncated bootstraps, as at the end of a
            fragment.
        gamma: Discount per step.
        lambda_: GAE's lambda in [0, 1]: 0 is TD(0), 1 is the discounted return minus the value.

    Returns:
        Advantages and value targets (advantage + value), both float32 `[T, N]`.
    """
    shape = rewards.shape
    for column in (values, next_values, terminated, truncated, valid):
        assert column.shape == shape, f"columns differ in shape: {column.shape} and {shape}"
    deltas = np.where(valid, rewards + gamma * np.where(terminated, 0.0, next_values) - values, 0.0)
    # An invalid entry needs no special case: its delta and its decay are 0, so nothing flows across.
    decays = np.where(terminated | truncated | ~valid, 0.0, gamma * lambda_)
    advantages = np.empty(shape, np.float64)
    running = np.zeros(shape[1:], np.float64)
    for t in range(shape[0] - 1, -1, -1):
        running *= decays[t]
        running += deltas[t]
        advantages[t] = running
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def vtrace(
    ratios: FloatColumn,
    rewards: FloatColumn,
    values: FloatColumn,
    next_values: FloatColumn,
    terminated: BoolColumn,
    truncated: BoolColumn,
    valid: BoolColumn,
    *,
    gamma: float,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg_rho: float | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return V-trace's value targets and advantages of another policy's steps (Espeholt et al. 2018, arXiv:1802.01561).

    The targets are eq. 1 of the paper, with lambda as in its remark 2; the advantages are for the policy gradient
    of its section 4.2. Ends of episodes and fragments are treated as by `gae`: a terminated step does not bootstrap,
    and a truncated one bootstraps from the value of its own final observation. With all ratios 1, the targets are the
    targets of `gae`; so are the advantages if lambda is 1.

    Args:
        ratios: `[T, N]`, probability of the action in the policy that learns, divided by that in the policy that acted.
        rewards: `[T, N]`.
        values: `[T, N]`, V(s_t).
        next_values: `[T, N]`, V of the observation that step t led to: the final observation where the episode ended.
        terminated: `[T, N]`.
        truncated: `[T, N]`.
        valid: `[T, N]`, False where no env step was taken; there the advantage is 0, and the target the value.
        gamma: Discount per step.
        lambda_: In [0, 1]; 0 looks one step ahead.
        clip_rho: The largest weight of a temporal difference; it decides to which policy's value the targets lead.
        clip_c: The largest weight with which a later difference is passed on; it decides how fast values are learned.
        clip_pg_rho: The largest weight of an advantage; `None` is `clip_rho`.

    Returns:
        Advantages and value targets, both float32 `[T, N]`.
    """
    shape = rewards.shape
    for column in (ratios, values, next_values, terminated, truncated, valid):
        assert column.shape == shape, f"columns differ in shape: {column.shape} and {shape}"
    ratios = np.where(valid, ratios, 0.0)
    bootstraps = rewards + gamma * np.where(terminated, 0.0, next_values) - values
    deltas = np.where(valid, np.minimum(ratios, clip_rho) * bootstraps, 0.0)
    # Where an episode ended, and at an invalid entry, nothing of the later steps is passed on.
    discounts = np.where(terminated | truncated | ~valid, 0.0, gamma)
    decays = discounts * lambda_ * np.minimum(ratios, clip_c)
    corrections = np.zeros((shape[0] + 1, *shape[1:]), np.float64)  # of the values: target minus value
    for t in range(shape[0] - 1, -1, -1):
        corrections[t] = deltas[t] + decays[t] * corrections[t + 1]
    pg_rhos = np.minimum(ratios, clip_rho if clip_pg_rho is None else clip_pg_rho)
    advantages = np.where(valid, pg_rhos * (bootstraps + discounts * corrections[1:]), 0.0)
    return advantages.astype(np.float32), (values + corrections[:-1]).astype(np.float32)


def n_step_returns(
    rewards: FloatColumn, valid: BoolColumn, done: BoolColumn, *, gamma: float
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Return discounted sums of the rewards of up to n steps.

    Sources: Sutton 1988; with DQN, Hessel et al. 2018, arXiv:1710.02298. A sequence stops after the first step that
    terminated or truncated, and before the first step that is not valid. It bootstraps from the value of the
    observation that its last step led to, times the returned discount, unless that step terminated.

    Args:
        rewards: `[n, B]`, rewards of n consecutive steps.
        valid: `[n, B]`; all of index 0 on axis 0 are True.
        done: `[n, B]`, terminated or truncated.
        gamma: Discount per step.

    Returns:
        The sums, float32 `[B]`; the number of steps taken, from 1 to n, int64 `[B]`; and gamma to the power of that
        number, float32 `[B]`.
    """
    assert rewards.shape == valid.shape == done.shape, f"{rewards.shape}, {valid.shape} and {done.shape} differ"
    taken = valid.copy()
    taken[1:] &= ~done[:-1]
    np.logical_and.accumulate(taken, axis=0, out=taken)
    num_steps = taken.sum(axis=0)
    powers = np.power(float(gamma), np.arange(len(rewards) + 1))
    sums = powers[:-1] @ np.where(taken, rewards, 0.0)
    return sums.astype(np.float32), num_steps, powers.astype(np.float32).take(num_steps)
