"""How long a slow runner is waited for, and how much it is asked for: functions of what is known of the runners."""

from __future__ import annotations

import math
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest

from corral import PPOConfig
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.engines.call_limits import CallLimits
from corral.engines.local import LocalEngine, LocalHandle
from corral.runners.mailbox import (
    PATIENCE_S,
    Speeds,
    add_excess_wait,
    is_straggler,
    patience_ends_s,
    shares,
)
from corral.runners.requests import SampleRequest
from corral.runners.runner_group import EnvRunnerGroup
from corral.runners.runner_handle import PendingSample, RunnerHandle
from corral.testing import IdentityEnv


def runners(*seconds_per_step: float) -> list[RunnerHandle]:
    made = [
        RunnerHandle(i, PPOConfig(), LocalEngine(), CallLimits("auto")) for i, _ in enumerate(seconds_per_step, start=1)
    ]
    for runner, seconds in zip(made, seconds_per_step, strict=True):
        runner.seconds_per_step = seconds
    return made


def asked(idle: list[RunnerHandle], num_timesteps: int) -> dict[int, int]:
    return {runner.index: steps for runner, steps in shares(num_timesteps, idle)}


def speeds_of(group: list[RunnerHandle]) -> Speeds:
    return Speeds(runner.seconds_per_step for runner in group)


def test_usual_is_the_median_of_the_others() -> None:
    speeds = Speeds([1.0, 2.0, 30.0, math.nan])
    assert [speeds.usual_without(own) for own in (30.0, 1.0, 2.0, math.nan)] == [1.5, 16.0, 15.5, 2.0]
    assert math.isnan(Speeds([1.0]).usual_without(1.0)) and math.isnan(Speeds().usual_without(math.nan))


def test_usual_follows_the_speeds_of_the_runners() -> None:
    rng = np.random.default_rng(0)
    seconds = np.full(7, math.nan)
    speeds = Speeds()
    for _ in range(200):
        place, new = int(rng.integers(7)), float(rng.integers(1, 5))  # with equal ones among them
        speeds.replace(float(seconds[place]), new)
        seconds[place] = new
        own = int(rng.integers(7))
        others = np.delete(seconds, own)
        if np.isfinite(others).any():
            assert speeds.usual_without(float(seconds[own])) == np.nanmedian(others)


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
    add_excess_wait(group[1], speeds_of(group), factor, 100)
    assert group[1].excess_wait_s == pytest.approx(excess)
    assert is_straggler(group[1]) == (excess > PATIENCE_S)
    group[1].seconds_per_step = 0.01
    add_excess_wait(group[1], speeds_of(group), factor, 100)
    assert group[1].excess_wait_s == 0 and not is_straggler(group[1])


def test_patience_is_used_up_once() -> None:
    group = runners(0.01, math.nan)
    pending: Future[Any] = Future()
    group[1].requests.append(PendingSample(pending, asked_s=100.0, request=SampleRequest(num_timesteps=10)))
    assert patience_ends_s(group[1], speeds_of(group), 3.0) == pytest.approx(100.0 + 0.3 + PATIENCE_S)
    group[1].excess_wait_s = 0.2
    assert patience_ends_s(group[1], speeds_of(group), 3.0) == pytest.approx(100.0 + 0.3 + PATIENCE_S - 0.2)
    group[1].excess_wait_s = 9.0
    assert patience_ends_s(group[1], speeds_of(group), 3.0) == pytest.approx(100.3)
    assert patience_ends_s(group[1], speeds_of(group), None) == math.inf
    assert patience_ends_s(group[1], speeds_of(group[1:]), 3.0) == math.inf


class OneWorkerEngine(LocalEngine):
    """An engine whose handles answer at once, all of them with the same worker, so that a runner costs no memory."""

    def __init__(self) -> None:
        self.handle: LocalHandle | None = None

    def start(self, factory: Any, *, name: str = "worker", resources: Any = None) -> LocalHandle:
        self.handle = self.handle or super().start(factory, name=name)
        return self.handle


class LateHandle:
    """The handle of `OneWorkerEngine`, whose answers to `sample` come one by one while the driver waits for them."""

    def __init__(self, handle: LocalHandle, threads: ThreadPoolExecutor) -> None:
        self.handle, self.threads = handle, threads

    def call(self, method: Any, *args: Any, **settings: Any) -> Future[Any]:
        done = self.handle.call(method, *args, **settings)
        return (
            self.threads.submit(self.answer, done) if getattr(method, "__name__", "") == "sample_and_report" else done
        )

    def answer(self, done: Future[Any]) -> Any:
        time.sleep(0)  # the driver's turn
        return done.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)


class LateEngine(OneWorkerEngine):
    """An engine of `LateHandle`s."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__()
        self.threads = threads

    def start(self, factory: Any, *, name: str = "worker", resources: Any = None) -> Any:
        return LateHandle(super().start(factory, name=name), self.threads)


def calls_of_the_driver(num_runners: int, *, one_by_one: bool, engine: Any = None) -> float:
    """Return the calls in the driver's files per runner, of an iteration after the first."""
    config = PPOConfig().environment(IdentityEnv).env_runners(num_env_runners=num_runners, num_envs_per_env_runner=1)
    group = EnvRunnerGroup(config, engine or OneWorkerEngine())
    metrics, timers, files = MetricsLogger(), Timers(), ("runner_group.py", "runner_handle.py", "mailbox.py")
    num_calls = 0

    def iterate() -> None:
        if one_by_one:
            group.sample_async(SampleRequest(num_timesteps=1))
            while group.mail.next_sample() is not None:
                pass
        else:
            group.sample(SampleRequest(num_timesteps=num_runners))
        group.collect_metrics(metrics, timers)
        group.take_costs()
        group.fault_results()

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call") and frame.f_code.co_filename.endswith(files)

    try:
        iterate()
        sys.setprofile(count)
        iterate()
    finally:
        sys.setprofile(None)
        group.stop()
    return num_calls / num_runners


@pytest.mark.parametrize("one_by_one", [False, True], ids=["sample", "next_sample"])
def test_an_iteration_costs_the_driver_the_same_per_runner_with_many_of_them(one_by_one: bool) -> None:
    few, many = (calls_of_the_driver(number, one_by_one=one_by_one) for number in (8, 100))
    assert 1 < many <= few


def test_answers_that_come_one_by_one_cost_the_driver_the_same_per_runner_with_many_of_them() -> None:
    """A look at all runners for each answer would make hundreds of calls per runner here."""
    with ThreadPoolExecutor(1) as threads:
        few, many = (calls_of_the_driver(number, one_by_one=False, engine=LateEngine(threads)) for number in (8, 200))
    assert 1 < many <= 1.2 * few
