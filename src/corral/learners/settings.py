"""How one module learns: its loss and optimizer, fixed for a learner, and the settings of one update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from corral.errors import ConfigError
from corral.learners.losses import Loss
from corral.modules.module import Module

if TYPE_CHECKING:
    from corral.learners.config import LearnerConfig

Stop = Callable[[Mapping[str, float]], bool]
"""`stop(scalars)` returns whether the epochs of an update end, given the means that the latest epoch reported."""

AfterStep = Callable[[Module, Collection[str]], None]
"""`after_step(module, groups)` changes what gradient steps do not change, such as target networks."""


MAIN_LOSS = "main"
"""Name of the loss that `LearningSpec.loss` is."""


@dataclass(frozen=True)
class LearningSpec:
    """The loss and the optimizer of one module, fixed when a learner is made.

    A module may have further losses by name, each with its own optimizer, for an auxiliary phase or an auxiliary
    task. `UpdateSettings.loss` says which loss an update minimises. Two optimizers may move the same parameters.

    Attributes:
        loss: The loss, a pure function.
        optimizer_class: A `torch.optim.Optimizer`, called with the parameters and `optimizer_config`; or one for each
            group of parameters, by name.
        optimizer_config: Keyword arguments of the optimizer, apart from `lr`, which every update gives; if there is an
            optimizer for each group, by name of the group.
        lr_scheduler: Makes a scheduler of torch for an optimizer; it steps after each update of the module. `None` is
            none.
        others: Further losses of the module by name.
        parameters: Returns the parameters that a further loss moves, given the module; `None` is all of them. The main
            loss moves `Module.parameter_groups`.
    """

    loss: Loss
    optimizer_class: type[torch.optim.Optimizer] | Mapping[str, type[torch.optim.Optimizer]] = torch.optim.Adam
    optimizer_config: Mapping[str, Any] = field(default_factory=dict)
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    others: Mapping[str, LearningSpec] = field(default_factory=dict)
    parameters: Callable[[Module], Iterable[nn.Parameter]] | None = None


@dataclass(frozen=True)
class UpdateSettings:
    """How one module learns from one batch.

    It travels to the processes of the learners, so everything in it must be picklable.

    Attributes:
        lr: Learning rate, or one learning rate per group of parameters.
        num_epochs: Passes over the batch.
        minibatch_size: Rows per gradient step, or `None` for the whole batch. A batch that it does not divide is cut
            into equal parts of about this size, so that no row is dropped and no step sees only a few rows.
        shuffle: Whether each epoch visits the rows in a new order.
        grad_clip: Limit of the gradients, or `None`; or one limit for each of some groups of parameters.
        grad_clip_by: `"global_norm"` (per group of parameters), `"norm"` (per parameter) or `"value"` (per entry).
        coefficients: Numbers passed to the loss, by name.
        groups: Names of the groups of parameters that this update steps; `None` is all of them.
        every: Gradient steps from one step of a group to the next, by group; 1 for groups that are not named. With
            `{"actor": 2}` the actor moves in the second, fourth, ... gradient step of the update.
        after_step: Called after each gradient step, without gradients, with the module and the names of the groups
            that moved; or `None`.
        timestep: Env steps that were sampled before this update, for learners and losses that ask for them.
        stop: Asked after each epoch with the means that the epoch reported: True ends the epochs of this update. With
            several learners the means are over the rows of all of them. `None` takes all epochs.
        defers_report: Whether the results of one gradient step on tensors stay on the device, see `read_reports`.
        loss: Name of the loss that this update minimises, one of `LearningSpec.others`, or the main loss.
    """

    lr: float | Mapping[str, float]
    num_epochs: int = 1
    minibatch_size: int | None = None
    shuffle: bool = True
    grad_clip: float | Mapping[str, float] | None = None
    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    coefficients: Mapping[str, float] = field(default_factory=dict)
    groups: Collection[str] | None = None
    every: Mapping[str, int] = field(default_factory=dict)
    after_step: AfterStep | None = None
    timestep: int = 0
    stop: Stop | None = None
    defers_report: bool = False
    loss: str = MAIN_LOSS

    @classmethod
    def from_config(cls, config: LearnerConfig, *, lr: float | Mapping[str, float], **settings: Any) -> UpdateSettings:
        """Return the settings of a config, with this learning rate.

        Args:
            config: The config of the algorithm.
            lr: Learning rate, or one learning rate per group of parameters.
            **settings: Attributes of this class that no config has, such as `coefficients`.
        """
        return cls(
            lr=lr,
            num_epochs=config.num_epochs,
            minibatch_size=config.minibatch_size,
            shuffle=config.shuffle_batch_per_epoch,
            grad_clip=config.grad_clip,
            grad_clip_by=config.grad_clip_by,
            **settings,
        )

    def check_groups(self, names: Collection[str], num_gradient_steps: int) -> None:
        """Check that the groups that are named exist, and move in this update.

        Args:
            names: Names of the module's groups of parameters.
            num_gradient_steps: Gradient steps of the update, if nothing stops it.

        Raises:
            ConfigError: A group does not exist, has no learning rate, or would never move.
        """
        lrs = self.lr if isinstance(self.lr, Mapping) else None
        limits = self.grad_clip if isinstance(self.grad_clip, Mapping) else {}
        named = {*(self.groups or ()), *self.every, *(lrs or ()), *limits}
        if unknown := sorted(named - set(names)):
            raise ConfigError(
                f"update: the module has no group(s) of parameters {unknown}: `parameter_groups` names {sorted(names)}."
            )
        if lrs is not None and (missing := sorted(set(names) - lrs.keys())):
            raise ConfigError(f"update: lr={dict(lrs)} has no learning rate for the group(s) {missing}.")
        if wrong := {name: every for name, every in self.every.items() if every < 1}:
            raise ConfigError(f"update: every={wrong} must be at least 1; leave a group out of `groups` to skip it.")
        if never := {name: every for name, every in self.every.items() if every > num_gradient_steps}:
            raise ConfigError(
                f"update: every={never} counts gradient steps within one update, and this update takes "
                f"{num_gradient_steps}, so the group(s) would never move: give `groups` in the updates that step them."
            )

    def groups_at(self, step: int, names: Collection[str]) -> Collection[str]:
        """Return the groups that move in a gradient step.

        Args:
            step: Number of the gradient step in the update, from 1.
            names: Names of the module's groups of parameters.
        """
        chosen = names if self.groups is None else [name for name in names if name in self.groups]
        if not self.every:
            return chosen
        return [name for name in chosen if step % self.every.get(name, 1) == 0]
