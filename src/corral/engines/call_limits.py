"""Seconds that a worker may take to answer a call before it counts as hung; see `FaultToleranceSettings`."""

from __future__ import annotations

from typing import Literal

# With the setting "auto", a call may take 10 times as long per unit of work as the slowest call before it.
FACTOR = 10.0
# A call may always take at least this long.
LEAST_S = 300.0
# The limit if no worker has finished work of this kind yet, or if the amount of work is not known.
UNKNOWN_S = 3600.0


class CallLimits:
    """Time limits for calls of the workers of one group, which do the same kinds of work.

    Args:
        setting: `worker_timeout_s`: a number of seconds for every call; `"auto"`, limits from the durations so far; or
            `None`, no limit.
    """

    def __init__(self, setting: float | Literal["auto"] | None) -> None:
        """Know no durations yet."""
        self._setting = setting
        self._slowest_s: dict[str, float] = {}  # by kind of work: seconds per unit of work

    def limit_s(self, work: str | None = None, amount: float = 1.0) -> float | None:
        """Return the seconds that a call may take; `None` is no limit.

        Args:
            work: Kind of work; `None` if calls like this one have no typical duration.
            amount: Units of work, such as env steps.
        """
        if self._setting != "auto":
            return self._setting
        if work is None or work not in self._slowest_s:
            return UNKNOWN_S
        return max(LEAST_S, FACTOR * self._slowest_s[work] * amount)

    def note(self, work: str, amount: float, seconds: float) -> None:
        """Note how long a worker took for an amount of work."""
        if amount > 0:
            self._slowest_s[work] = max(self._slowest_s.get(work, 0.0), seconds / amount)


def overdue_message(timeout_s: float) -> str:
    """Return what happened to a worker that did not answer in time, for its `WorkerDiedError`."""
    return (
        f"did not answer within {timeout_s:g} s, and was killed: it hangs, or it is stopped. "
        "If calls may take longer, set fault_tolerance(worker_timeout_s=...)"
    )
