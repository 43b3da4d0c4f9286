"""An algorithm as a trainable of Ray Tune."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import cloudpickle
from ray import tune
from ray.tune.result import AUTO_RESULT_KEYS, DONE, TIMESTEPS_TOTAL

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.registry import algorithm_names, config_class
from corral.compat.tune.param_space import configured
from corral.compat.tune.resources import resources
from corral.core.metrics.result import EARLY_MEANS, without_early_means
from corral.core.result_values import classify
from corral.core.settings import main_name, set_sender

_OF_TUNE = frozenset((*AUTO_RESULT_KEYS, DONE, EARLY_MEANS))


def trainable(algorithm: str | AlgorithmConfig | type[AlgorithmConfig]) -> type[AlgorithmTrainable]:
    """Return the trainable of an algorithm, for `tune.Tuner`.

    Args:
        algorithm: A short name (`"PPO"`), the import path of a config class (`"my_algo:MyConfig"`), a config class, or
            a config from which each trial starts.

    Raises:
        ConfigError: No algorithm has the name, or the import path names no config class.
    """
    base = algorithm.copy() if isinstance(algorithm, AlgorithmConfig) else config_class(algorithm)()
    return type(base.algo_name, (AlgorithmTrainable,), {"base_config": base, "script": main_name()})


def register(*algorithms: str | type[AlgorithmConfig]) -> None:
    """Register algorithms with Tune by name, for `tune.Tuner("PPO", param_space={"env": "CartPole-v1"})`.

    Args:
        *algorithms: Short names and import paths, which become the names in Tune, and config classes, whose algorithm's
            name becomes the name in Tune. Without arguments, all algorithms with a short name are registered.

    Raises:
        ConfigError: No algorithm has the name, or the import path names no config class.
    """
    for algorithm in algorithms or algorithm_names():
        made = trainable(algorithm)
        tune.register_trainable(algorithm if isinstance(algorithm, str) else made.__name__, made)


class AlgorithmTrainable(tune.Trainable):
    """Trainable that runs one algorithm; an iteration of Tune is one iteration of the algorithm. Made by `trainable`.

    The checkpoints are checkpoints of the algorithm: `Algorithm.from_checkpoint(result.checkpoint.path)`.

    Attributes:
        base_config: Config that the settings of a trial change.
        script: Script that made the trainable, which checkpoints name as the place of its classes.
        algorithm: Algorithm of the trial.
    """

    base_config: ClassVar[AlgorithmConfig]
    script: ClassVar[str]
    algorithm: Algorithm

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the resources of a trial. Tune calls this in the driver, so a misspelt setting raises there."""
        return resources(configured(cls.base_config, config))

    def setup(self, config: dict[str, Any]) -> None:
        """Build the algorithm."""
        set_sender(self.script)
        self._build(configured(self.base_config, config))

    def _build(self, config: AlgorithmConfig) -> None:
        self.cleanup()
        self._config, self._pickles = config, _pickles(config)
        self._starts_again = False
        # Build from a copy: instances in the config, such as callbacks, change during a trial, and this actor may run
        # another trial later.
        copied: AlgorithmConfig = cloudpickle.loads(cloudpickle.dumps(config))
        self.algorithm = copied.build()

    def step(self) -> dict[str, Any]:
        """Run one iteration, and return its result, which ends the trial if a callback called `request_stop`."""
        if self._starts_again:
            self._build(self._config)
        result = reportable(self.algorithm.train())
        return result if self.algorithm.stop_requested is None else {**result, DONE: True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the algorithm."""
        self.algorithm.save(checkpoint_dir)

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Restore the algorithm."""
        self.algorithm.restore_from_path(checkpoint_dir)
        self.algorithm.stop_requested = None  # the trial before may have ended so
        self._starts_again = False

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Apply the settings of another trial, or settings that population-based training has changed; return True.

        If all changed settings can change in place, the algorithm is kept, with its runners and envs. In
        population-based training, Tune then restores a checkpoint. Without a checkpoint, another trial starts, and
        `step` builds a new algorithm.
        """
        config = configured(self.base_config, new_config)
        pickles = _pickles(config)
        changed = [name for name in pickles if pickles[name] != self._pickles[name]]
        fixed = self.algorithm.FIXED_SETTINGS
        if not set(changed) <= set(config.group_fields()["training"]) - fixed:
            self._build(config)
            return True
        self.algorithm.reconfigure(**{name: getattr(config, name) for name in changed})
        self._config, self._pickles = config, pickles
        self._starts_again = True
        return True

    def cleanup(self) -> None:
        """Stop the algorithm."""
        if hasattr(self, "algorithm"):
            self.algorithm.stop()


def _pickles(config: AlgorithmConfig) -> dict[str, bytes]:
    """Return each setting as bytes; equal settings have equal bytes, even if a function was sent here twice."""
    return {
        name: cloudpickle.dumps(getattr(config, name)) for group in config.group_fields().values() for name in group
    }


def reportable(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a result that Tune stores: numbers, texts and series of them, under the same nested keys.

    Searchers, schedulers and `stop=` decide by it, so early means are NaN; see docs/metrics.md.
    Keys that Tune sets itself are left out (`training_iteration`, `time_total_s`, `config`, `done`, ...), except
    `timesteps_total`, the number of env steps so far. Arrays, images and videos are left out.

    Args:
        result: Result of `Algorithm.train()`.
    """
    decisive = without_early_means(result)
    told: dict[str, Any] = _told({name: value for name, value in decisive.items() if name not in _OF_TUNE})
    return {**told, TIMESTEPS_TOTAL: result["num_env_steps_sampled_lifetime"]}


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            told[str(name)] = _told(value)
        elif (found := classify(value)).kind in ("none", "number", "text"):
            told[str(name)] = found.data
    return told
