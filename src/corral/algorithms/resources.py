"""The resources of all workers of an algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig
    from corral.engines.base import Resources


def resources_of_workers(config: AlgorithmConfig) -> list[Resources]:
    """Return the resources of each worker of an algorithm: its env runners, its learners, its evaluation runners.

    Evaluation runners count if the config says when to evaluate.
    """
    evaluation = config.for_evaluation()
    num_evaluation_runners = 0 if config.evaluation_interval is None else evaluation.num_env_runners
    return [
        *[config.runner_resources] * (config.num_env_runners if config.samples else 0),
        *[config.learner_resources] * config.num_learners,
        *[evaluation.runner_resources] * num_evaluation_runners,
    ]
