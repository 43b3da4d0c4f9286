"""Optimizers of torch that user code made, as learners step them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from corral.learners.group_optimizers import GroupOptimizers
from corral.learners.optimizers import ModuleOptimizer


class ReadyOptimizer(ModuleOptimizer):
    """An optimizer of torch that keeps its own settings and learning rates; its parameters are one group.

    Args:
        name: Name of the group.
        optimizer: The optimizer. It may have several `param_groups`.
        lr_scheduler: Makes a scheduler of torch for the optimizer; `None` is none.
    """

    keeps_lrs = True

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        """Keep the optimizer."""
        self._ready = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        super().__init__({name: parameters}, type(optimizer), {}, lr_scheduler)

    def make_torch_optimizer(self, optimizer_class: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Return the optimizer that was given."""
        self.is_flat, self._settings = False, {}
        return self._ready

    def describe_state(self, describe: Callable[[Any], str]) -> list[dict[str, str]] | None:
        """Return `None`: what the state looks like is known after a step only."""
        return None


def ready_optimizers(
    optimizers: Mapping[str, torch.optim.Optimizer],
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> GroupOptimizers:
    """Return optimizers of torch as the optimizer of a module, for `Learner.make_optimizer`.

    Each optimizer steps the parameters that it was made with, at its own learning rate: the setting `lr` has no effect.
    Parameters of the module that no optimizer has do not move.

    Args:
        optimizers: Optimizers by name; the names are the names of groups of parameters.
        lr_scheduler: Makes a scheduler of torch for each optimizer; `None` is none.

    Raises:
        ConfigError: Two optimizers have a parameter in common.
    """
    return GroupOptimizers({name: ReadyOptimizer(name, each, lr_scheduler) for name, each in optimizers.items()})
