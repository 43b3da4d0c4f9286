"""Runners that are many times slower than the others: how long they are waited for, and how much they are asked for.

A slow runner may keep the others waiting for `PATIENCE_S` in all, on top of `straggler_factor` times what they need
themselves. From then on it gets shares that it can do in the time of the others, and its fragments count when they
arrive. As soon as it is as fast as the others again it is treated as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

from corral.runners.remote_runner import RemoteRunner

PATIENCE_S = 0.5


def usual_seconds_per_step(runner: RemoteRunner, runners: Collection[RemoteRunner]) -> float:
    """Return the median of the other runners' seconds a step; NaN as long as they have sampled nothing."""
    known = [
        other.seconds_per_step for other in runners if other is not runner and not math.isnan(other.seconds_per_step)
    ]
    return statistics.median(known) if known else math.nan


def add_excess_wait(
    runner: RemoteRunner, runners: Collection[RemoteRunner], factor: float | None, num_env_steps: int
) -> None:
    """Add to what a slow runner cost the others with a fragment; one that is as fast as they are has cost nothing.

    Args:
        runner: The runner whose fragment has arrived.
        runners: All of them.
        factor: The setting `straggler_factor`.
        num_env_steps: Of the fragment.
    """
    usual = usual_seconds_per_step(runner, runners)
    if factor is None or math.isnan(usual) or runner.seconds_per_step <= factor * usual:
        runner.excess_wait_s = 0.0
    else:
        runner.excess_wait_s += num_env_steps * (runner.seconds_per_step - factor * usual)


def is_straggler(runner: RemoteRunner) -> bool:
    """Say whether a runner has used up its patience."""
    return runner.excess_wait_s > PATIENCE_S


def patience_ends_s(runner: RemoteRunner, runners: Collection[RemoteRunner], factor: float | None) -> float:
    """Return the clock reading until which a requested fragment is worth waiting for; infinity if not known."""
    usual, call = usual_seconds_per_step(runner, runners), runner.sampling
    if factor is None or math.isnan(usual) or call is None or call.request.num_timesteps is None:
        return math.inf
    expected_s = factor * usual * call.request.num_timesteps
    return call.asked_s + expected_s + max(0.0, PATIENCE_S - runner.excess_wait_s)


def shares(num_wanted: int, idle: Sequence[RemoteRunner]) -> list[tuple[RemoteRunner, int]]:
    """Spread env steps, or episodes, over runners: evenly, and on top of that what stragglers can do in the same time.

    Args:
        num_wanted: How many the runners that are no stragglers take in all.
        idle: The runners that can be asked.

    Returns:
        Runners, and how many each is asked for; no runner that is asked for none.
    """
    slow = [runner for runner in idle if is_straggler(runner)]
    others = [runner for runner in idle if not is_straggler(runner)]
    if not others:  # nobody is faster
        slow, others = [], list(idle)
    if not others:
        return []
    share, extra = divmod(num_wanted, len(others))
    asked = [(runner, share + (position < extra)) for position, runner in enumerate(others)]
    for runner in slow:
        usual = usual_seconds_per_step(runner, others)
        asked.append((runner, share if math.isnan(usual) else round(share * usual / runner.seconds_per_step)))
    return [(runner, wanted) for runner, wanted in asked if wanted]
