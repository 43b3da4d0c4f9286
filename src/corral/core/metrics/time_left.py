"""How long a run will take to reach a number of steps or seconds, from its latest results."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW_S = 60.0
"""Seconds before the latest result from which the speed is taken."""


def seconds_left(limit: float, times_s: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the seconds until a number that grows reaches a limit, at the speed of the last minute.

    Args:
        limit: The limit.
        times_s: Duration of the run in seconds at each of its latest results, in their order.
        values: The number in these results.

    Returns:
        The seconds; 0 if the limit is reached, and `None` if the number does not grow.
    """
    if not times_s or not values[-1] < limit:
        return 0.0 if times_s else None
    # At least the result before the last one: an iteration may take longer than a minute.
    first = next((i for i, time_s in enumerate(times_s) if times_s[-1] - time_s <= WINDOW_S), len(times_s) - 1)
    first = max(0, min(first, len(times_s) - 2))
    passed_s, grown = times_s[-1] - times_s[first], values[-1] - values[first]
    if not (passed_s > 0 and grown > 0):
        return None
    return (limit - values[-1]) / grown * passed_s


def show_duration(seconds: float) -> str:
    """Return a duration for people, in one or two units: `45 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
