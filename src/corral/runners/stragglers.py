"""Limit how long a group waits for runners that are many times slower than the others, and how much it asks of them.

A slow runner may keep the others waiting for `PATIENCE_S` in total, on top of `straggler_factor` times the time that
they need themselves. From then on it gets shares that it can finish in the time of the others, and its fragments count
when they arrive. As soon as it is as fast as the others again, it is treated like them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from corral.runners.remote_runner import RemoteRunner

PATIENCE_S = 0.5


class Speeds:
    """The seconds per env step of all runners, sorted, so that a median takes no look at each of them."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        """Store the seconds per env step of the runners; NaN is a runner that has sampled nothing."""
        self._sorted = sorted(value for value in seconds if not math.isnan(value))

    def replace(self, old: float, new: float) -> None:
        """Note that a runner's seconds per env step have changed; NaN is not known."""
        if not math.isnan(old):
            del self._sorted[bisect_left(self._sorted, old)]
        if not math.isnan(new):
            insort(self._sorted, new)

    def usual_without(self, own: float) -> float:
        """Return the median of the other runners' seconds per env step; NaN while they have sampled nothing.

        Args:
            own: The runner's own seconds, which are among them; NaN if not known.
        """
        place = len(self._sorted) if math.isnan(own) else bisect_left(self._sorted, own)
        num_others = len(self._sorted) - (not math.isnan(own))
        if not num_others:
            return math.nan
        low, high = (num_others - 1) // 2, num_others // 2
        return (self._sorted[low + (low >= place)] + self._sorted[high + (high >= place)]) / 2


def add_excess_wait(runner: RemoteRunner, speeds: Speeds, factor: float | None, num_env_steps: int) -> None:
    """Add the time that a slow runner cost the others with a fragment; a runner as fast as they are starts at 0 again.

    Args:
        runner: Runner whose fragment has arrived.
        speeds: Speeds of all runners of the group.
        factor: Setting `straggler_factor`; `None` counts nothing.
        num_env_steps: Env steps of the fragment.
    """
    usual = speeds.usual_without(runner.seconds_per_step)
    if factor is None or math.isnan(usual) or runner.seconds_per_step <= factor * usual:
        runner.excess_wait_s = 0.0
    else:
        runner.excess_wait_s += num_env_steps * (runner.seconds_per_step - factor * usual)


def is_straggler(runner: RemoteRunner) -> bool:
    """Return whether a runner has used up the patience of the others."""
    return runner.excess_wait_s > PATIENCE_S


def patience_ends_s(runner: RemoteRunner, speeds: Speeds, factor: float | None) -> float:
    """Return the clock reading until which a requested fragment is worth waiting for; infinity where not known."""
    usual, call = speeds.usual_without(runner.seconds_per_step), runner.sampling
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
    usual = Speeds(runner.seconds_per_step for runner in others).usual_without(math.nan) if slow else math.nan
    for runner in slow:
        asked.append((runner, share if math.isnan(usual) else round(share * usual / runner.seconds_per_step)))
    return [(runner, wanted) for runner, wanted in asked if wanted]
