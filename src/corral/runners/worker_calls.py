"""Functions that a group calls in the processes of its runners, each with the runner as its first argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from corral.core.plain import is_same
from corral.core.tree import copy_nested
from corral.runners.requests import SampleReply, SampleRequest, WorkerCounts
from corral.runners.runner import EnvRunner


def sample_and_report(runner: EnvRunner, request: SampleRequest) -> SampleReply:
    """Sample, and return the fragment with everything that the group wants to know of the runner then."""
    start = time.perf_counter()
    rollout = runner.collect(request)
    if request.digest is not None:
        samples = request.digest(runner, rollout)
    else:
        samples = rollout if request.with_infos else rollout.without_infos()
    metrics, seconds, _ = runner.get_metrics()
    end = time.perf_counter()
    idle_s, runner.idle_since = start - runner.idle_since, end
    return SampleReply(
        samples,
        metrics,
        seconds,
        WorkerCounts.of(runner),
        runner.get_state(),
        sample_s=end - start,
        idle_s=idle_s,
    )


UserCall = tuple[str | Callable[..., Any], dict[str, Any]]
"""A method of a runner by name, or a function that takes the runner, and further keyword arguments."""


def call_runner(
    runner: EnvRunner, fn: str | Callable[..., Any], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any], bool, int]:
    """Call a method by name, or a function with the runner; return the result and what it changed.

    Returns:
        The result, the state of the runner after the call, whether the call changed tasks or settings of the envs, and
        the env steps that it sampled.
    """
    steps_before = runner.num_env_steps_by_hand
    before = copy_nested((runner.host.get_tasks(), runner.host.changed_settings))
    result = call_directly(runner, fn, kwargs)
    after = runner.host.get_tasks(), runner.host.changed_settings
    return result, runner.get_state(), not is_same(before, after), runner.num_env_steps_by_hand - steps_before


def call_directly(runner: EnvRunner, fn: str | Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method by name, or a function with the runner, and return only the result."""
    return getattr(runner, fn)(**kwargs) if isinstance(fn, str) else fn(runner, **kwargs)


def restore_runner(
    runner: EnvRunner,
    weights: Mapping[str, Mapping[str, Any]],
    version: int,
    state: Mapping[str, Any],
    in_place: bool,
    missed: Sequence[UserCall],
) -> dict[str, Any]:
    """Make a failed runner or its replacement ready, and return its state.

    Args:
        runner: The runner.
        weights: Parts of the weights; see `EnvRunner.set_weight_parts`.
        version: Their version.
        state: State from which it continues; see `EnvRunner.get_state`.
        in_place: Whether it is the runner that failed, and not a replacement.
        missed: Calls that changed the envs of other runners in the meantime.

    Returns:
        Its state then.
    """
    if in_place:
        runner.recover()
    if state:
        runner.set_state(state)
    if weights:
        runner.set_weight_parts(weights, version)
    return repeat_calls(runner, missed)


def repeat_calls(runner: EnvRunner, missed: Sequence[UserCall]) -> dict[str, Any]:
    """Make calls that a runner missed while it was not ready, and return its state after them."""
    for fn, kwargs in missed:
        call_directly(runner, fn, kwargs)
    return runner.get_state()
