"""Return computations as pure functions on columns, with time on axis 0. They know no module and no env.

The columns of `gae` and `vtrace` are arrays, or tensors on one device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.core.devices import widened

FloatColumn = NDArray[np.floating]
"""Floats `[T, N]`; where the env is on a device, a tensor."""
BoolColumn = NDArray[np.bool_]
"""Bools `[T, N]`; where the env is on a device, a tensor."""


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
    if isinstance(rewards, Tensor):
        return _tensor_gae(rewards, values, next_values, terminated, truncated, valid, gamma, lambda_)
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


def _tensor_gae(
    rewards: Tensor,
    values: Any,
    next_values: Any,
    terminated: Any,
    truncated: Any,
    valid: Any,
    gamma: float,
    lambda_: float,
) -> tuple[Any, Any]:
    """Return what `gae` returns, for tensors."""
    values, valid = widened(values), torch.as_tensor(valid, device=rewards.device)
    bootstraps = widened(rewards) + gamma * widened(next_values).masked_fill(terminated, 0.0) - values
    deltas = bootstraps.masked_fill(~valid, 0.0)
    decays = torch.full_like(deltas, gamma * lambda_).masked_fill(terminated | truncated | ~valid, 0.0)
    advantages = _accumulate_back(deltas, decays)
    return advantages.float(), (advantages + values).float()


def _accumulate_back(deltas: Tensor, decays: Tensor) -> Tensor:
    """Return x `[T, ...]` with `x[t] = deltas[t] + decays[t] * x[t + 1]`, and 0 after the last row.

    Each round doubles the number of rows that x sums over, so that there are log2(T) operations on whole columns in
    place of T on rows (Hillis and Steele 1986, doi:10.1145/7902.7903).
    """
    step = 1
    while step < len(deltas):
        sums, factors = deltas.clone(), torch.zeros_like(decays)
        sums[:-step] += decays[:-step] * deltas[step:]
        factors[:-step] = decays[:-step] * decays[step:]
        deltas, decays, step = sums, factors, 2 * step
    return deltas


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
    clip_pg_rho = clip_rho if clip_pg_rho is None else clip_pg_rho
    if isinstance(rewards, Tensor):
        columns = (ratios, rewards, values, next_values, terminated, truncated, valid)
        return _tensor_vtrace(*columns, gamma, lambda_, clip_rho, clip_c, clip_pg_rho)
    ratios = np.where(valid, ratios, 0.0)
    bootstraps = rewards + gamma * np.where(terminated, 0.0, next_values) - values
    deltas = np.where(valid, np.minimum(ratios, clip_rho) * bootstraps, 0.0)
    # Where an episode ended, and at an invalid entry, nothing of the later steps is passed on.
    discounts = np.where(terminated | truncated | ~valid, 0.0, gamma)
    decays = discounts * lambda_ * np.minimum(ratios, clip_c)
    corrections = np.zeros((shape[0] + 1, *shape[1:]), np.float64)  # of the values: target minus value
    for t in range(shape[0] - 1, -1, -1):
        corrections[t] = deltas[t] + decays[t] * corrections[t + 1]
    pg_rhos = np.minimum(ratios, clip_pg_rho)
    advantages = np.where(valid, pg_rhos * (bootstraps + discounts * corrections[1:]), 0.0)
    return advantages.astype(np.float32), (values + corrections[:-1]).astype(np.float32)


def _tensor_vtrace(
    ratios: Any,
    rewards: Tensor,
    values: Any,
    next_values: Any,
    terminated: Any,
    truncated: Any,
    valid: Any,
    gamma: float,
    lambda_: float,
    clip_rho: float,
    clip_c: float,
    clip_pg_rho: float,
) -> tuple[Any, Any]:
    """Return what `vtrace` returns, for tensors."""
    values, valid = widened(values), torch.as_tensor(valid, device=rewards.device)
    ratios = widened(ratios).masked_fill(~valid, 0.0)
    bootstraps = widened(rewards) + gamma * widened(next_values).masked_fill(terminated, 0.0) - values
    deltas = (ratios.clamp(max=clip_rho) * bootstraps).masked_fill(~valid, 0.0)
    discounts = torch.full_like(deltas, gamma).masked_fill(terminated | truncated | ~valid, 0.0)
    corrections = _accumulate_back(deltas, discounts * lambda_ * ratios.clamp(max=clip_c))
    later = torch.cat([corrections[1:], torch.zeros_like(corrections[:1])])
    advantages = ratios.clamp(max=clip_pg_rho) * (bootstraps + discounts * later)
    return advantages.masked_fill(~valid, 0.0).float(), (values + corrections).float()


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
