"""Workers beside the runners, on the same engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from corral.engines.base import Engine, Resources, WorkerHandle
from corral.env.remote_runner import resources_of_runner

if TYPE_CHECKING:
    from corral.algorithms.config import AlgorithmConfig


def start_learners(
    engine: Engine, config: AlgorithmConfig, factories: Sequence[Callable[[], Any]]
) -> list[WorkerHandle]:
    """Start a worker for each factory, `learner 1`, `learner 2`, ...; all of them, or none.

    Raises:
        ConfigError: The engine can never run them all, beside the runners.
        SerializationError: A factory holds something that cannot be pickled.
    """
    resources = Resources(config.num_cpus_per_learner, config.num_gpus_per_learner)
    engine.require([resources_of_runner(config)] * config.num_env_runners + [resources] * len(factories))
    handles: list[WorkerHandle] = []
    try:
        for index, factory in enumerate(factories, 1):
            handles.append(engine.start(factory, name=f"learner {index}", resources=resources))
    except BaseException:
        for handle in handles:
            handle.kill()
        raise
    return handles
