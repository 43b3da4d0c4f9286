"""Resources that a trial reserves in a Ray cluster."""

from __future__ import annotations

from ray.tune import PlacementGroupFactory

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.resources import resources_of_workers
from corral.engines.base import TRAITS


def resources(config: AlgorithmConfig) -> PlacementGroupFactory:
    """Return the resources of a trial: a bundle for the algorithm, and one per runner, learner and evaluation runner.

    The algorithm has one CPU, and the GPUs of an embedded learner. It has a second CPU if it evaluates in parallel to
    training and has no evaluation runners, because then it starts a process for that. Ray is initialised in a trial, so
    `engine_name="auto"` means Ray: runners and learners are actors with their own bundles. With the process engine, the
    resources of the processes are part of the algorithm's bundle. With the local engine, runners and learners run one
    after another on the CPU of the algorithm.
    """
    workers: list[dict[str, float]] = [
        {"CPU": worker.num_cpus, "GPU": worker.num_gpus, **worker.custom} for worker in resources_of_workers(config)
    ]
    traits = TRAITS["ray" if config.engine_name == "auto" else config.engine_name]
    evaluates_here = config.evaluation_interval is not None and config.evaluation_parallel_to_training
    evaluates_here = evaluates_here and not config.evaluation_num_env_runners and traits.has_own_process
    driver: dict[str, float] = {
        "CPU": 1 + evaluates_here,
        "GPU": 0 if config.num_learners else config.num_gpus_per_learner,
    }
    if not traits.has_own_process:
        driver["GPU"] = max([driver["GPU"], *(worker["GPU"] for worker in workers)])
    elif traits.is_on_one_machine:
        for name in {name for worker in workers for name in worker}:
            driver[name] = driver.get(name, 0) + sum(worker.get(name, 0) for worker in workers)
    bundles = [driver] if traits.is_on_one_machine else [driver, *workers]
    return PlacementGroupFactory([bundle for bundle in map(_needed, bundles) if bundle])


def _needed(bundle: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in bundle.items() if amount}
