"""RLlib's algorithms as trainables of Ray Tune."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import ray
from ray import tune

from corral.compat.rllib.algorithm import Algorithm
from corral.compat.rllib.config import AlgorithmConfig
from corral.compat.rllib.native import to_native
from corral.compat.rllib.overrides import check_for_tune
from corral.compat.tune.resources import resources
from corral.compat.tune.trainable import reportable
from corral.core.settings import main_name, set_sender

log = logging.getLogger(__name__)

_made: dict[type[Algorithm], type[RLlibTrainable]] = {}


def make_trainable(algorithm_class: type[Algorithm]) -> type[RLlibTrainable]:
    """Return the trainable of an algorithm class, always the same one."""
    if algorithm_class not in _made:
        check_for_tune(algorithm_class)
        name = algorithm_class.__name__
        about = {"algorithm_class": algorithm_class, "script": main_name()}
        _made[algorithm_class] = type(name, (RLlibTrainable,), about)
    return _made[algorithm_class]


class RLlibTrainable(tune.Trainable):
    """Trainable that runs one algorithm; its config is a dict of RLlib's settings. Made by `make_trainable`.

    Attributes:
        algorithm_class: Class of the algorithm.
        script: Script that made the trainable, which checkpoints name as the place of its classes.
        algorithm: Algorithm of the trial.
    """

    algorithm_class: ClassVar[type[Algorithm]]
    script: ClassVar[str]
    algorithm: Algorithm

    @classmethod
    def get_default_config(cls) -> AlgorithmConfig:
        """Return the config with the defaults of the algorithm."""
        config: AlgorithmConfig = cls.algorithm_class.get_default_config()
        return config

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the resources of a trial. Tune calls this in the driver, so a misspelt setting raises there."""
        found: tune.PlacementGroupFactory = cls.algorithm_class.default_resource_request(config)
        return found

    def setup(self, config: dict[str, Any]) -> None:
        """Build the algorithm."""
        set_sender(self.script)
        self.algorithm = self.algorithm_class(config=fit_to_cluster(self.algorithm_class, config))

    def step(self) -> dict[str, Any]:
        """Run one iteration, and return its result."""
        return reportable(self.algorithm.train())

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the algorithm."""
        self.algorithm.save_checkpoint(checkpoint_dir)

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Restore the algorithm."""
        self.algorithm.load_checkpoint(checkpoint_dir)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Return whether the algorithm took another config; otherwise Tune begins the trial in another process."""
        return bool(self.algorithm.reset_config(new_config))

    def cleanup(self) -> None:
        """Stop the algorithm."""
        if hasattr(self, "algorithm"):
            self.algorithm.stop()


def request_resources(
    algorithm_class: type[Algorithm], config: AlgorithmConfig | Mapping[str, Any]
) -> tune.PlacementGroupFactory:
    """Return the resources of a trial of an algorithm."""
    return resources(to_native(fit_to_cluster(algorithm_class, config)))


def fit_to_cluster(algorithm_class: type[Algorithm], given: AlgorithmConfig | Mapping[str, Any]) -> AlgorithmConfig:
    """Return the config of a trial, whose workers share the CPU of the trial if the cluster has too few CPUs."""
    settings = given.to_dict() if isinstance(given, AlgorithmConfig) else given
    config: AlgorithmConfig = algorithm_class.get_default_config().update_from_dict(settings)
    wanted = resources(to_native(config)).required_resources.get("CPU", 0)
    there = ray.cluster_resources().get("CPU", wanted) if ray.is_initialized() else wanted
    if wanted > there:
        log.warning(
            "%s: a trial asks for %g CPUs, and the cluster has %g: the workers of a trial share one CPU.",
            algorithm_class.__name__,
            wanted,
            there,
        )
        config.env_runners(num_cpus_per_env_runner=0).learners(num_cpus_per_learner=0)
    return config
