"""Functions that a group calls in the processes of its runners, each with the runner as its first argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from corral.runners.requests import SampleReply, SampleRequest
from corral.runners.runner import EnvRunner


def sample_and_report(runner: EnvRunner, request: SampleRequest) -> SampleReply:
    """Sample, and return the fragment with everything that the group wants to know of the runner then."""
    start = time.perf_counter()
    rollout = runner.collect(request)
    if request.digest is not None:
        samples = request.digest(runner, rollout)
    else:
        samples = rollout if request.with_infos else rollout.without_infos()
    metrics, seconds, num_callback_errors = runner.get_metrics()
    end = time.perf_counter()
    idle_s, runner.idle_since = start - runner.idle_since, end
    return SampleReply(
        samples,
        metrics,
        seconds,
        num_callback_errors,
        runner.num_sub_env_restarts,
        runner.num_env_steps_lost,
        runner.get_state(),
        sample_s=end - start,
        idle_s=idle_s,
    )


def call_runner(
    runner: EnvRunner, fn: str | Callable[..., Any], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Call a method by name, or a function with the runner; return the result and the state of the runner after it."""
    result = getattr(runner, fn)(**kwargs) if isinstance(fn, str) else fn(runner, **kwargs)
    return result, runner.get_state()


def restore_runner(
    runner: EnvRunner,
    weights: Mapping[str, Mapping[str, Any]],
    version: int,
    state: Mapping[str, Any],
    in_place: bool,
) -> None:
    """Make a runner ready again that failed, or make its replacement ready."""
    if in_place:
        runner.recover()
    if state:
        runner.set_state(state)
    if weights:
        runner.set_weight_parts(weights, version)
