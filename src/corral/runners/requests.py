"""What a runner of the engine hands over with a fragment: one answer, so that steps and their metrics arrive together.

These functions run where the runner lives; the group sends them there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from corral.episodes.rollout import Rollout
from corral.metrics.logger import Parts
from corral.runners.runner import EnvRunner


@dataclass(frozen=True)
class SampleReply:
    """A fragment, and what there is to say about it.

    Attributes:
        rollout: The fragment.
        metrics: What the runner logged since its last report.
        seconds: Of the runner's timers since then, by part.
        num_callback_errors: Exceptions in callbacks that were logged, in this runner's lifetime.
        num_sub_env_restarts: Sub-envs made anew, likewise.
        state: What a replacement of the runner goes on from; see `EnvRunner.get_state`.
        sample_s: Seconds that sampling took.
        idle_s: Seconds that the runner had waited for the request.
    """

    rollout: Rollout
    metrics: Parts
    seconds: dict[str, float]
    num_callback_errors: int
    num_sub_env_restarts: int
    state: dict[str, Any]
    sample_s: float
    idle_s: float


def sample_with_report(runner: EnvRunner, num_timesteps: int, timestep: int) -> SampleReply:
    """Sample, and report."""
    start = time.perf_counter()
    rollout = runner.sample(num_timesteps=num_timesteps, timestep=timestep)
    metrics, seconds, num_callback_errors = runner.get_metrics()
    end = time.perf_counter()
    idle_s, runner.idle_since = start - runner.idle_since, end
    return SampleReply(
        rollout,
        metrics,
        seconds,
        num_callback_errors,
        runner.num_sub_env_restarts,
        runner.get_state(),
        sample_s=end - start,
        idle_s=idle_s,
    )


def apply(runner: EnvRunner, fn: str | Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Call a method by name, or a function with the runner; return the result, and the runner's state after it."""
    result = getattr(runner, fn)(**kwargs) if isinstance(fn, str) else fn(runner, **kwargs)
    return result, runner.get_state()


def revive(
    runner: EnvRunner,
    weights: Mapping[str, Mapping[str, NDArray[Any]]],
    version: int,
    state: Mapping[str, Any],
    in_place: bool,
) -> None:
    """Make a runner ready that failed, or the one that replaces it."""
    if in_place:
        runner.recover()
    if state:
        runner.set_state(state)
    if weights:
        runner.set_weights(weights, version)
