"""How long a worker may take to answer: a number of seconds, or a multiple of what such work took before."""

from __future__ import annotations

import pytest

from corral.engines.call_limits import FACTOR, LEAST_S, UNKNOWN_S, CallLimits


@pytest.mark.parametrize("setting", [3.0, None])
def test_a_number_and_none_are_the_limit_of_every_call(setting: float | None) -> None:
    limits = CallLimits(setting)
    limits.note("env steps", 10, 1000.0)
    assert limits.limit_s() == limits.limit_s("env steps", 1e6) == setting


def test_without_experience_the_limit_is_long() -> None:
    limits = CallLimits("auto")
    limits.note("episodes", 1, 5.0)
    assert limits.limit_s("env steps", 1) == limits.limit_s() == UNKNOWN_S


def test_the_limit_is_a_multiple_of_the_slowest_work_so_far() -> None:
    limits = CallLimits("auto")
    limits.note("env steps", 100, 200.0)  # 2 s per step
    limits.note("env steps", 1000, 1.0)  # a fast one changes nothing
    assert limits.limit_s("env steps", 500) == FACTOR * 2.0 * 500
    assert limits.limit_s("env steps", 1) == LEAST_S  # short work may have a pause too


def test_work_of_no_units_says_nothing() -> None:
    limits = CallLimits("auto")
    limits.note("env steps", 0, 200.0)
    assert limits.limit_s("env steps", 1) == UNKNOWN_S
