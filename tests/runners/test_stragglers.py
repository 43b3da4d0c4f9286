"""How long a slow runner is waited for, and how much it is asked for: functions of what is known of the runners."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

import pytest

from corral import PPOConfig
from corral.engines.call_limits import CallLimits
from corral.engines.local import LocalEngine
from corral.runners.remote_runner import PendingSample, RemoteRunner
from corral.runners.requests import SampleRequest
from corral.runners.stragglers import (
    PATIENCE_S,
    add_excess_wait,
    is_straggler,
    patience_ends_s,
    shares,
    usual_seconds_per_step,
)


def runners(*seconds_per_step: float) -> list[RemoteRunner]:
    made = [
        RemoteRunner(i, PPOConfig(), LocalEngine(), CallLimits("auto")) for i, _ in enumerate(seconds_per_step, start=1)
    ]
    for runner, seconds in zip(made, seconds_per_step, strict=True):
        runner.seconds_per_step = seconds
    return made


def asked(idle: list[RemoteRunner], num_timesteps: int) -> dict[int, int]:
    return {runner.index: steps for runner, steps in shares(num_timesteps, idle)}


def test_usual_is_the_median_of_the_others() -> None:
    group = runners(1.0, 2.0, 30.0, math.nan)
    assert usual_seconds_per_step(group[2], group) == 1.5
    assert usual_seconds_per_step(group[0], group) == 16.0
    assert math.isnan(usual_seconds_per_step(group[0], group[:1]))


def test_equal_runners_get_equal_shares() -> None:
    assert asked(runners(math.nan, math.nan, math.nan), 11) == {1: 4, 2: 4, 3: 3}
    assert asked(runners(1.0, 2.9), 10) == {1: 5, 2: 5}
    assert asked(runners(1.0, 1.0, 1.0), 2) == {1: 1, 2: 1}
    assert asked([], 5) == {}


def test_a_straggler_gets_what_it_can_do_in_the_time_of_the_others() -> None:
    group = runners(0.01, 0.01, 0.1)
    group[2].excess_wait_s = PATIENCE_S + 0.1
    assert asked(group, 200) == {1: 100, 2: 100, 3: 10}
    assert asked(group[2:], 200) == {3: 200}  # alone, it is the fastest there is


@pytest.mark.parametrize(
    ("seconds_per_step", "factor", "excess"),
    [(0.1, 3.0, 7.0), (0.02, 3.0, 0.0), (0.03, 3.0, 0.0), (0.1, None, 0.0)],
)
def test_what_a_slow_runner_costs_adds_up_until_it_is_fast_again(
    seconds_per_step: float, factor: float | None, excess: float
) -> None:
    group = runners(0.01, seconds_per_step)
    add_excess_wait(group[1], group, factor, 100)
    assert group[1].excess_wait_s == pytest.approx(excess)
    assert is_straggler(group[1]) == (excess > PATIENCE_S)
    group[1].seconds_per_step = 0.01
    add_excess_wait(group[1], group, factor, 100)
    assert group[1].excess_wait_s == 0 and not is_straggler(group[1])


def test_patience_is_used_up_once() -> None:
    group = runners(0.01, math.nan)
    pending: Future[Any] = Future()
    group[1].requests.append(PendingSample(pending, asked_s=100.0, request=SampleRequest(num_timesteps=10)))
    assert patience_ends_s(group[1], group, 3.0) == pytest.approx(100.0 + 0.3 + PATIENCE_S)
    group[1].excess_wait_s = 0.2
    assert patience_ends_s(group[1], group, 3.0) == pytest.approx(100.0 + 0.3 + PATIENCE_S - 0.2)
    group[1].excess_wait_s = 9.0
    assert patience_ends_s(group[1], group, 3.0) == pytest.approx(100.3)
    assert patience_ends_s(group[1], group, None) == math.inf
    assert patience_ends_s(group[1], group[1:], 3.0) == math.inf
