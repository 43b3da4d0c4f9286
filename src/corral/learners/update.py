"""The loop from minibatches to optimizer steps: one update of one module."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from corral.core.tree import map_tree, slice_rows
from corral.errors import LossError
from corral.learners.group_optimizers import GroupOptimizers
from corral.learners.losses import Batch, Loss, backward, call_loss, clip_gradients, total_loss
from corral.learners.minibatches import Cuts, UpdateReport, loss_error
from corral.learners.numpy_q_learning import FastForm, fast_form, is_q_loss
from corral.learners.optimizers import ModuleOptimizer
from corral.learners.settings import Stop, UpdateSettings
from corral.modules.inference import ActingWeights
from corral.modules.layers import Layers
from corral.modules.module import Module

ShowGradients = Callable[[str, ModuleOptimizer | GroupOptimizers, Collection[str]], None]
"""`show(module_id, optimizer, groups)` shows the gradients of groups of parameters to callbacks."""


@dataclass
class Objective:
    """A loss of a module with its optimizer.

    Attributes:
        loss: The loss, a pure function.
        optimizer: Optimizer of the parameters that the loss moves.
        has_numpy_form: Whether NumPy may compute the gradients of the loss; see `corral.learners.numpy_q_learning`.
    """

    loss: Loss
    optimizer: ModuleOptimizer | GroupOptimizers
    has_numpy_form: bool = field(init=False)

    def __post_init__(self) -> None:
        """Resolve what does not change."""
        self.has_numpy_form = is_q_loss(self.loss) and self.optimizer.torch_optimizer is not None


@dataclass
class LearnerPart:
    """What a learner has for one module.

    Attributes:
        module_id: Id of the module.
        module: The module.
        layers: Its layers, as they were when it came.
        acting: Its weights that runners need.
        num_threads: Intra-op threads for it; `None` is torch's choice.
        constraints: Functions that put weights back where they must be, called after each gradient step.
        objectives: What it learns, by name of the loss; empty if it does not learn.
    """

    module_id: str
    module: Module
    layers: Layers
    acting: ActingWeights
    num_threads: int | None
    constraints: list[Callable[[], None]]
    objectives: dict[str, Objective] = field(default_factory=dict)


class Minibatch(NamedTuple):
    """What one gradient step learns from.

    Attributes:
        rows: Its columns: tensors on the device, or arrays if NumPy computes the gradients.
        place: Numbers of the epoch and of the minibatch in it, from 0.
        order: The order of the rows of the batch in the epoch; `None` if they are taken as they come.
        numpy_form: The loss in NumPy, which computes the gradients too; `None` leaves them to autograd.
    """

    rows: Batch
    place: tuple[int, int]
    order: Tensor | None
    numpy_form: FastForm | None


class ModuleUpdate:
    """An update of one module from one batch: a gradient step on each minibatch, in one or several epochs.

    `Learner.update_group` calls `step` with each of the `minibatches()`, and then `results()`.

    Args:
        part: What the learner has for the module.
        batch: Columns `[B, ...]`, arrays.
        settings: How the module learns from the batch.
        device: Device of the module.
        rng: Generator for shuffling.
        show_gradients: Shows the gradients of each step to callbacks; `None` if no callback asks for them.
        smallest: Size and number of units of the smallest batch of all learners; `None` is this batch.

    Attributes:
        module_id: Id of the module.
        module: The module.
        settings: How it learns from the batch.
        optimizer: The optimizer of the loss that is minimised.
        cuts: How the batch is cut into minibatches.
        report: What the gradient steps reported so far.
    """

    def __init__(
        self,
        part: LearnerPart,
        batch: Batch,
        settings: UpdateSettings,
        device: torch.device,
        rng: np.random.Generator,
        show_gradients: ShowGradients | None,
        *,
        smallest: tuple[int, int] | None = None,
    ) -> None:
        """Cut the batch, and give the optimizer its learning rates.

        Raises:
            ConfigError: The settings name unknown groups of parameters, or a layer or parameter was replaced.
        """
        self.module_id, self.module, self.settings = part.module_id, part.module, settings
        self._batch, self._objective = batch, part.objectives[settings.loss]
        self._constraints = part.constraints
        self._device, self._show_gradients = device, show_gradients
        self.optimizer = optimizer = self._objective.optimizer
        # User code may have replaced layers, frozen parameters or changed weights since the last update.
        part.layers.check_same(part.module_id)
        optimizer.sync()
        # Parts of equal size instead of a small last one; several learners cut alike, by the smallest of their batches.
        self.cuts = Cuts(batch)
        if settings.minibatch_size:
            size, num_units = smallest or (self.cuts.size, self.cuts.num_units)
            num_minibatches = min(num_units, max(1, round(size / settings.minibatch_size)))
            self.cuts.cut(num_minibatches, rng if settings.shuffle else None)
        # Most updates move all groups of parameters in each step; then nothing is asked for in the steps.
        self._num_steps = settings.num_epochs * self.cuts.num_parts
        self._moves_all = settings.groups is None and not settings.every
        by_group = [each for each in (settings.lr, settings.grad_clip) if isinstance(each, Mapping)]
        if not self._moves_all or any(each.keys() != optimizer.groups.keys() for each in by_group):
            settings.check_groups(optimizer.groups, self._num_steps)
        optimizer.set_lr(settings.lr)
        self.report = UpdateReport(self.cuts.size, self.cuts.num_parts)

    def minibatches(self) -> Iterator[Minibatch]:
        """Yield the minibatches of all epochs, each in a new order, until `UpdateSettings.stop` ends the epochs."""
        if not self.module.training:  # `Learner.values` leaves it in evaluation mode
            self.module.train()
        # NumPy reads the arrays of a whole batch, in one step; minibatches of several steps are slices of tensors.
        fast = None
        if self._num_steps == 1 and self._objective.has_numpy_form:
            fast = fast_form(self._objective.loss, self.module, self.optimizer.torch_optimizer, self._batch)
        batch = to_tensors(self._batch, self._device) if fast is None else self._batch
        for epoch in range(self.settings.num_epochs):
            # The batch is put into its new order once per epoch, so that minibatches are slices and no copies.
            new_order, bounds = self.cuts.draw()
            rows, order = batch, None
            if new_order is not None:
                order = torch.from_numpy(new_order).to(self._device)
                rows = map_tree(lambda column, order=order: column.index_select(0, order), batch)
            for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
                part = rows if len(bounds) == 2 else slice_rows(rows, start, stop)
                yield Minibatch(part, (epoch, index), order, fast)
            # Only after whole epochs: the mean over one minibatch is too noisy to decide by.
            if self.settings.stop is not None and self._asks_to_stop(self.settings.stop):
                break

    def step(self, minibatch: Minibatch) -> None:
        """Take a gradient step on a minibatch.

        Raises:
            LossError: The loss or a gradient is not finite, and the step is not taken; or the loss returned something
                else than `Loss` says, has no scalar for a group that moves, or depends on no trainable parameter.
            ColumnError: The loss asked for a column that does not exist, or a callback added or removed gradients.
        """
        # Which parameters move: critics may take each step, and an actor every second one.
        settings, optimizer, report = self.settings, self.optimizer, self.report
        groups: Collection[str] = optimizer.groups
        if not self._moves_all:
            groups = settings.groups_at(report.num_steps + 1, groups)
        # A loss is one scalar, or a scalar for each group of parameters, whose sum is reported.
        loss: Any
        given = self.module, minibatch.rows, settings.coefficients
        if minibatch.numpy_form is None:
            loss, reported = call_loss(self._objective.loss, self.module_id, *given)
        else:
            loss, reported = minibatch.numpy_form(*given)
        total = total_loss(loss, groups) if isinstance(loss, Mapping) else loss
        # Gradients are clipped and checked before the step: a step that is not finite would ruin the weights.
        if self._compute_gradients(loss, math.isfinite(total.item()), groups, minibatch):
            clipped = optimizer.trainable if settings.grad_clip_by == "norm" else optimizer.steppable
            norms = clip_gradients(clipped, groups, settings.grad_clip, settings.grad_clip_by)
        else:
            norms = dict.fromkeys(groups or optimizer.groups, math.nan)
        if not all(map(math.isfinite, norms.values())):
            raise self._error(loss_error(self.module_id, *minibatch.place, total, reported, norms))
        # Some layers have weights that must stay in a set, such as a norm of 1: they are put back after each step.
        optimizer.step(groups)
        for constrain in self._constraints:
            constrain()
        # Target networks follow here, after each gradient step.
        report.add(total, reported, norms, minibatch.order)
        if settings.after_step is not None:
            with torch.no_grad():
                settings.after_step(self.module, groups)
            optimizer.sync()  # it may have frozen parameters, or replaced parameters and gradients

    def results(self) -> dict[str, Any]:
        """Return what the gradient steps reported, and let the scheduler set the next learning rates."""
        results = self.report.results()
        for name, lr in self.optimizer.end_update().items():
            results[f"{name}_optimizer_learning_rate"] = lr
        return results

    def _compute_gradients(self, loss: Any, is_finite: bool, groups: Collection[str], minibatch: Minibatch) -> bool:
        """Compute the gradients of groups of parameters, and return whether they can be used."""
        if is_finite and minibatch.numpy_form is None:
            self.optimizer.zero_grad(groups)
            trainable = self.optimizer.trainable
            backward(loss, {name: trainable[name] for name in groups}, self.module_id, len(self.optimizer.groups))
        if is_finite and self._show_gradients is not None:
            self._show_gradients(self.module_id, self.optimizer, groups)
            self.optimizer.sync()  # the callback may have replaced gradients, or frozen parameters
        return is_finite

    def _error(self, error: LossError) -> LossError:
        return error

    def _asks_to_stop(self, stop: Stop) -> bool:
        return stop(self.report.epoch_means())


def to_tensors(batch: Batch, device: torch.device) -> Batch:
    """Return columns, of arrays or tensors, as tensors on a device; on the CPU they share the memory of the arrays."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(column)).to(device)
        if isinstance(column, np.ndarray)
        else map_tree(
            lambda leaf: (leaf if isinstance(leaf, Tensor) else torch.from_numpy(np.ascontiguousarray(leaf))).to(
                device
            ),
            column,
        )
        for name, column in batch.items()
    }
