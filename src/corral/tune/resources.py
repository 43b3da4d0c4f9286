"""Resources that a trial reserves in a Ray cluster."""

from __future__ import annotations

from ray.tune import PlacementGroupFactory

from corral.config.config import AlgorithmConfig
from corral.engines.base import TRAITS


def resources(config: AlgorithmConfig) -> PlacementGroupFactory:
    """Return the resources of a trial: a bundle for the algorithm, and one bundle per runner and learner.

    The algorithm has one CPU, and the GPUs of an embedded learner. Ray is initialised in a trial, so
    `engine_name="auto"` means Ray: runners and learners are actors with their own bundles. With the process engine, the
    resources of the processes are part of the algorithm's bundle. With the local engine, runners and learners run one
    after another on the CPU of the algorithm.
    """
    runner: dict[str, float] = {
        "CPU": config.num_cpus_per_env_runner,
        "GPU": config.num_gpus_per_env_runner,
        **config.custom_resources_per_env_runner,
    }
    learner: dict[str, float] = {"CPU": config.num_cpus_per_learner, "GPU": config.num_gpus_per_learner}
    workers: list[dict[str, float]] = [runner] * config.num_env_runners + [learner] * config.num_learners
    driver: dict[str, float] = {"CPU": 1, "GPU": 0 if config.num_learners else config.num_gpus_per_learner}
    traits = TRAITS["ray" if config.engine_name == "auto" else config.engine_name]
    if not traits.own_process:
        driver["GPU"] = max([driver["GPU"], *(worker["GPU"] for worker in workers)])
    elif traits.is_on_one_machine:
        for name in {name for worker in workers for name in worker}:
            driver[name] = driver.get(name, 0) + sum(worker.get(name, 0) for worker in workers)
    bundles = [driver] if traits.is_on_one_machine else [driver, *workers]
    return PlacementGroupFactory([bundle for bundle in map(_needed, bundles) if bundle])


def _needed(bundle: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in bundle.items() if amount}
