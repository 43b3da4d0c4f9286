"""What algorithm classes of scripts need: an algorithm without a loss and a training step, and events for overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.callbacks.callback import Callback
from corral.compat.rllib.overrides import overrides
from corral.errors import ConfigError
from corral.learners.losses import Batch
from corral.modules.module import Module


@dataclass(kw_only=True)
class OwnConfig(AlgorithmConfig):
    """Settings that all algorithms have."""

    @property
    def algo_class(self) -> type[Algorithm]:
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


def own_events(algorithm_class: Any) -> list[type[Callback]]:
    """Return the callback classes that call methods of a class of a script, of those that it overrides."""
    events: dict[str, type[Callback]] = {"restore_env_runners": RestoreEvents, "validate_env": ValidateEvents}
    return [event for name, event in events.items() if overrides(algorithm_class, name)]


class RestoreEvents(Callback):
    """Notes which runners were replaced, for `restore_env_runners` of an algorithm class that overrides it."""

    def on_env_runners_recreated(
        self, *, algorithm: Any, env_runner_indices: list[int], is_evaluation: bool, **kwargs: Any
    ) -> None:
        """Note the indices until the method of the base class returns them."""
        algorithm.view.restored[is_evaluation] += env_runner_indices


class ValidateEvents(Callback):
    """Calls `validate_env` of an algorithm class that overrides it, for each sub-env that samples for training."""

    def on_sub_environment_created(
        self, *, env_runner: Any, sub_environment: Any, env_context: Any, **kwargs: Any
    ) -> None:
        """Call it with the env as its class or function made it, and with its context."""
        if env_runner.config.in_evaluation:
            return  # as in RLlib
        env = sub_environment
        while type(env).__module__.startswith("corral.") and "env" in vars(env):
            env = env.env
        env_runner.config.origin.algo_class.validate_env(env, env_context)


def no_loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
    """Return no loss, and nothing to report: `compute_loss_for_module` of the learner class returns the loss."""
    return None, {}
