"""Return computations as pure functions on columns. Time is axis 0; they know no module and no env."""

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
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    A terminated step bootstraps nothing. A truncated step bootstraps from the value of its own final observation,
    and no advantage crosses it (Pardo et al. 2018, arXiv:1712.00378). The end of a fragment bootstraps from the
    observation after its last step.

    Args:
        rewards: `[T, N]`.
        values: `[T, N]`, V(s_t).
        next_values: `[T, N]`, V of the observation that step t led to: the final observation where the episode ended.
        terminated: `[T, N]`.
        truncated: `[T, N]`.
        valid: `[T, N]`, False where nothing was stepped, such as a reset; such rows get advantage 0, and no advantage
            crosses them. A step before one that neither terminated nor truncated bootstraps, as at a fragment's end.
        gamma: Discount a step.
        lambda_: GAE's lambda in [0, 1]: 0 is TD(0), 1 is the discounted return minus the value.

    Returns:
        Advantages and value targets (advantage + value), both float32 `[T, N]`.
    """
    shape = rewards.shape
    for column in (values, next_values, terminated, truncated, valid):
        assert column.shape == shape, f"columns differ in shape: {column.shape} and {shape}"
    deltas = np.where(valid, rewards + gamma * np.where(terminated, 0.0, next_values) - values, 0.0)
    # An invalid row needs no case of its own: its delta and its decay are 0, so nothing flows across.
    decays = np.where(terminated | truncated | ~valid, 0.0, gamma * lambda_)
    advantages = np.empty(shape, np.float64)
    running = np.zeros(shape[1:], np.float64)
    for t in range(shape[0] - 1, -1, -1):
        running *= decays[t]
        running += deltas[t]
        advantages[t] = running
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def n_step_returns(
    rewards: FloatColumn, valid: BoolColumn, done: BoolColumn, *, gamma: float
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Discounted sums of the rewards of up to n steps (Sutton 1988; with DQN: Hessel et al. 2018, arXiv:1710.02298).

    A sequence stops after the first step that is done, either way, and before the first that is not valid. What it
    bootstraps from is the observation that its last step led to, times the discount; nothing if that step terminated.

    Args:
        rewards: `[n, B]`, of n steps in a row.
        valid: `[n, B]`; row 0 is True throughout.
        done: `[n, B]`, terminated or truncated.
        gamma: Discount a step.

    Returns:
        The sums, float32 `[B]`; how many steps were taken, from 1 to n, int64 `[B]`; and gamma to the power of that
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
