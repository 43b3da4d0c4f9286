"""Dozens of runners, of which some fail, hang and are slow, in virtual time: every env step is counted once."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import scale
from corral import Algorithm, PPOConfig
from corral.engines.call_limits import CallLimits
from corral.engines.local import LocalEngine
from corral.runners.requests import SampleReply, SampleRequest, WorkerCounts
from corral.runners.runner_handle import PendingCall, PendingSample, RunnerHandle
from recorded_engine import Faults

MANY_FAULTS = Faults(failing=0.05, hanging=0.02, slow=0.05)


@pytest.mark.parametrize("case", ["sync", "async"])
def test_every_env_step_is_counted_once_while_runners_fail(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "FAULTS", MANY_FAULTS)
    used: list[Any] = []
    receive = Algorithm.group_trained

    def note(algorithm: Algorithm, rollouts: Any) -> Any:
        used.extend(rollouts)
        return receive(algorithm, rollouts)

    monkeypatch.setattr(Algorithm, "group_trained", note)
    found = scale.run_with_faults(case, 50, num_iterations=4)
    assert scale.counts_are_exact(found), found
    assert len({id(rollout) for rollout in used}) == len(used) > 150
    assert sum(rollout.num_env_steps for rollout in used) == found["sampled"]
    assert found["failed"] > 10 and found["hung"] > 3 and found["restarts"] > 10


@pytest.mark.parametrize("case", scale.CASES)
def test_the_driver_makes_as_many_calls_per_runner_with_many_runners(case: str) -> None:
    costs = {str(size): scale.count_only(case, size) for size in (10, 20, 60)}
    calls = {size: cost["calls"] for size, cost in costs.items()}
    assert scale.per_runner(calls, "60") < 1.1 * scale.per_runner(calls, "20")
    assert costs["60"]["num_packed"] == costs["20"]["num_packed"] <= 2  # not for each runner


def test_the_driver_makes_as_many_calls_per_runner_with_many_runners_of_which_some_fail() -> None:
    few, many = (scale.count_only("async", size, Faults(failing=0.1))["calls"] / size for size in (40, 160))
    assert many < 1.1 * few


def make_handle() -> RunnerHandle:
    return RunnerHandle(1, PPOConfig(), LocalEngine(), CallLimits("auto"))


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def test_steps_that_the_runner_believes_delivered_stay_lost_after_its_next_answer() -> None:
    """The weights did not arrive, so the fragment is dropped; the runner itself has lost nothing."""
    handle, rollout = make_handle(), SimpleNamespace(num_env_steps=7, weights_version=0)
    reply = SampleReply(rollout, {}, {}, WorkerCounts(), {}, sample_s=0.1, idle_s=0.0)
    for _ in range(2):
        handle.requests.append(PendingSample(done(reply), 0.0, request=SampleRequest(num_timesteps=7)))
    handle.forget_requests(RuntimeError("no weights"), handle.requests[0])
    handle.take(handle.requests[0], version=0)
    assert handle.counts.num_env_steps_lost == 7


def test_weights_that_did_not_arrive_are_known_after_costs_were_taken() -> None:
    handle = make_handle()
    handle.syncs += [PendingCall(done(None), 0.0), PendingCall(done(RuntimeError("no weights")), 0.0)]
    assert handle.take_costs().num_syncs == 1
    assert str(handle.sync_error()) == "no weights"
