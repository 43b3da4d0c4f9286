"""Corral's algorithm without a loss and a training step of its own, for algorithm classes of scripts that have both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from corral.algorithms.algorithm import Algorithm
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


def no_loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
    """Return no loss, and nothing to report: `compute_loss_for_module` of the learner class returns the loss."""
    return None, {}
