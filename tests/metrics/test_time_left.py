"""The time that is left to a limit, at the speed of the last minute."""

from __future__ import annotations

import pytest

from corral.core.metrics.time_left import seconds_left, show_duration


@pytest.mark.parametrize(
    ("times_s", "values", "expected"),
    [
        ([0, 10], [0, 100], 90.0),  # 900 more at 10 each second
        ([0, 50, 100, 110], [0, 1, 100, 200], (1000 - 200) / (199 / 60)),  # the last minute only
        ([0, 1000], [0, 500], 1000.0),  # an iteration that takes longer than a minute
        ([5], [100], None),
        ([5, 5], [100, 200], None),
        ([5, 6], [100, 100], None),
        ([], [], None),
        ([0, 1], [900, 1000], 0.0),
        ([0, 1], [900, 1200], 0.0),
    ],
)
def test_the_speed_of_the_last_minute_decides(
    times_s: list[float], values: list[float], expected: float | None
) -> None:
    assert seconds_left(1000, times_s, values) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (99.4, "99 s"),
        (120, "2 min"),
        (5999, "1 h 40 min"),
        (3600 * 26 + 300, "26 h 05 min"),
        (86400 * 3.5, "3 d 12 h"),
    ],
)
def test_durations_have_one_or_two_units(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text
