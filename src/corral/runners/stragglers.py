"""Limit how long a group waits for runners that are many times slower than the others, and how much it asks of them.

A slow runner may keep the others waiting for `PATIENCE_S` in total, on top of `straggler_factor` times the time that
they need themselves. From then on it gets shares that it can finish in the time of the others, and its fragments count
when they arrive. As soon as it is as fast as the others again, it is treated like them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

from corral.runners.remote_runner import RemoteRunner

PATIENCE_S = 0.5


def usual_seconds_per_step(runner: RemoteRunner, runners: Collection[RemoteRunner]) -> float:
    """Return the median of the other runners' seconds per env step; NaN while they have sampled nothing."""
    known = [
        other.seconds_per_step for other in runners if other is not runner and not math.isnan(other.seconds_per_step)
    ]
    return statistics.median(known) if known else math.nan


def add_excess_wait(
    runner: RemoteRunner, runners: Collection[RemoteRunner], factor: float | None, num_env_steps: int
) -> None:
    """Add the time that a slow runner cost the others with a fragment; a runner as fast as they are starts at 0 again.

    Args:
        runner: Runner whose fragment has arrived.
        runners: All runners of the group.
        factor: Setting `straggler_factor`; `None` counts nothing.
        num_env_steps: Env steps of the fragment.
    """
    usual = usual_seconds_per_step(runner, runners)
    if factor is None or math.isnan(usual) or runner.seconds_per_step <= factor * usual:
        runner.excess_wait_s = 0.0
    else:
        runner.excess_wait_s += num_env_steps * (runner.seconds_per_step - factor * usual)


def is_straggler(runner: RemoteRunner) -> bool:
    """Return whether a runner has used up the patience of the others."""
    return runner.excess_wait_s > PATIENCE_S


def patience_ends_s(runner: RemoteRunner, runners: Collection[RemoteRunner], factor: float | None) -> float:
    """Return the clock reading until which a requested fragment is worth waiting for; infinity where not known."""
    usual, call = usual_seconds_per_step(runner, runners), runner.sampling
    if factor is None or math.isnan(usual) or call is None or call.request.num_timesteps is None:
        return math.inf
    expected_s = factor * usual * call.request.num_timesteps
    return call.asked_s + expected_s + max(0.0, PATIENCE_S - runner.excess_wait_s)


def shares(num_wanted: int, idle: Sequence[RemoteRunner], *, exactly: bool = False) -> list[tuple[RemoteRunner, int]]:
    """Return each runner's even part of env steps or episodes; stragglers get as much as they finish in the same time.

    Args:
        num_wanted: Env steps or episodes that the other runners take in total.
        idle: Runners that can be asked.
        exactly: Whether the shares of all runners must add up to `num_wanted`, as for episodes.

    Returns:
        Runners, each with its share; runners with a share of 0 are left out.
    """
    slow = [runner for runner in idle if is_straggler(runner)]
    others = [runner for runner in idle if not is_straggler(runner)]
    if exactly or not others:  # or nobody is faster
        slow, others = [], list(idle)
    if not others:
        return []
    share, extra = divmod(num_wanted, len(others))
    asked = [(runner, share + (position < extra)) for position, runner in enumerate(others)]
    for runner in slow:
        usual = usual_seconds_per_step(runner, others)
        asked.append((runner, share if math.isnan(usual) else round(share * usual / runner.seconds_per_step)))
    return [(runner, wanted) for runner, wanted in asked if wanted]
