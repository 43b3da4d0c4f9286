"""Sampling in training steps of scripts."""

from __future__ import annotations

from typing import Any


def synchronous_parallel_sample(
    *,
    worker_set: Any,
    max_agent_steps: int | None = None,
    max_env_steps: int | None = None,
    concat: bool = True,
    sample_timeout_s: float | None = None,
    _uses_new_env_runners: bool = True,
    _return_metrics: bool = False,
    **settings: Any,
) -> Any:
    """Return the episodes of all runners, sampled in rounds until there are enough steps.

    Args:
        worker_set: The runners, an `EnvRunnerGroup`.
        max_agent_steps: Agent steps after which no round starts.
        max_env_steps: Env steps after which no round starts; without a limit there is one round.
        concat: Whether the episodes are in one list; otherwise one list for each runner and round.
        sample_timeout_s: Seconds that a runner has.
        _uses_new_env_runners: Not used.
        _return_metrics: Whether to return the metrics of the runners too, for `MetricsLogger.aggregate`.
        **settings: Not used.
    """
    samples: list[list[Any]] = []
    metrics: list[Any] = []
    by_agent, limit = max_agent_steps is not None, max_agent_steps or max_env_steps
    while True:
        answers = worker_set.foreach_env_runner(
            _sample_with_metrics, local_env_runner=not worker_set.num_remote_workers(), timeout_seconds=sample_timeout_s
        )
        samples += [episodes for episodes, _ in answers]
        metrics += [parts for _, parts in answers]
        steps = sum(each.agent_steps() if by_agent else each.env_steps() for part in samples for each in part)
        if not limit or steps >= limit:
            break
    found = [episode for part in samples for episode in part] if concat else samples
    return (found, metrics) if _return_metrics else found


def _sample_with_metrics(env_runner: Any) -> Any:
    return env_runner.sample(), env_runner.get_metrics()
