"""When a runner that failed is restarted, and how the time between its fragments is counted."""

from __future__ import annotations

import time

import pytest

from corral import PPOConfig
from corral.engines.call_limits import CallLimits
from corral.engines.local import LocalEngine
from corral.runners.requests import SampleRequest
from corral.runners.restarts import note_failure
from corral.runners.runner_handle import RunnerHandle
from corral.runners.worker_calls import sample_and_report
from handmade import MakeRunner


def test_each_failure_in_a_row_doubles_the_delay_up_to_a_minute() -> None:
    config = PPOConfig().fault_tolerance(
        delay_between_env_runner_restarts_s=10.0, num_consecutive_env_runner_failures_tolerance=9
    )
    runner = RunnerHandle(1, config, LocalEngine(), CallLimits("auto"))
    delays_s = []
    for _ in range(6):
        before_s = time.perf_counter()
        assert note_failure(runner, OSError("the simulator is gone"), config, 0) is None
        assert runner.restart_at_s is not None
        delays_s.append(runner.restart_at_s - before_s)
    assert delays_s == pytest.approx([0, 10, 20, 40, 60, 60], abs=5)


def test_the_time_of_sampling_is_no_idle_time(make_runner: MakeRunner) -> None:
    runner = make_runner("CartPole-v1")
    begin_s = time.perf_counter()
    replies = [sample_and_report(runner, SampleRequest(num_timesteps=200)) for _ in range(3)]
    elapsed_s = time.perf_counter() - begin_s
    parts_s = [reply.sample_s for reply in replies] + [reply.idle_s for reply in replies[1:]]
    assert min(parts_s) > 0
    assert sum(parts_s) <= elapsed_s
