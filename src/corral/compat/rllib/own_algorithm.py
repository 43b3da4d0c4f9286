"""What algorithm classes of scripts need: an algorithm without a loss and a training step, and events for overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from corral.algorithms.algorithm import Algorithm
from corral.callbacks.callback import Callback
from corral.compat.rllib.runners import EnvRunnerGroup
from corral.config.config import AlgorithmConfig
from corral.errors import ConfigError
from corral.learners.losses import Batch
from corral.modules.module import Module


@dataclass(kw_only=True)
class OwnConfig(AlgorithmConfig):
    """Settings that all algorithms have."""

    @property
    def algo_class(self) -> type[Algorithm]:
        """`OwnAlgorithm`."""
        return OwnAlgorithm


class OwnAlgorithm(Algorithm):
    """An algorithm whose training step and loss are in the script."""

    def make_loss(self, config: Any) -> Callable[..., Any]:
        """Return `no_loss`."""
        return no_loss

    def training_step(self) -> dict[str, dict[str, float]]:
        """Refuse to train.

        Raises:
            ConfigError: Always: the class of the script has no training step.
        """
        raise ConfigError("Algorithm.training_step: this class defines none: override it, or derive from PPO.")


class RestoreEvents(Callback):
    """Calls `restore_env_runners` of an algorithm class that overrides it, after runners were replaced."""

    def on_env_runners_recreated(
        self, *, algorithm: Any, env_runner_group: Any, env_runner_indices: list[int], **kwargs: Any
    ) -> None:
        """Call it with RLlib's runner group; the method of the base class then returns these indices."""
        view = algorithm.view
        view._restored = list(env_runner_indices)
        try:
            view.restore_env_runners(EnvRunnerGroup(env_runner_group, algorithm))
        finally:
            view._restored = None


def no_loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
    """Return no loss, and nothing to report: `compute_loss_for_module` of the learner class returns the loss."""
    return None, {}
