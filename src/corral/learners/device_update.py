"""The loop from minibatches to optimizer steps on a device that is asked for nothing until the update is over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corral.learners.losses import call_loss, total_loss
from corral.learners.minibatches import loss_error
from corral.learners.optimizers import ModuleOptimizer
from corral.learners.settings import UpdateSettings
from corral.learners.update import LearnerPart, Minibatch, ModuleUpdate


class DeviceUpdate(ModuleUpdate):
    """An update from a batch of tensors: what the steps report is copied to the host once, after the last of them.

    So is whether losses and gradients are finite. The first step for which they are not is not taken, and neither is
    any step after it: the optimizer of torch skips steps by a flag on the device, as it does for scaled gradients. The
    error comes when the update is over. `ModuleUpdate` asks after each step.

    Args:
        args: As for `ModuleUpdate`.
        kwargs: As for `ModuleUpdate`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Begin with no step that failed."""
        super().__init__(*args, **kwargs)
        self._torch_optimizer: Any = self.optimizer.torch_optimizer  # it reads the attribute `found_inf`
        # It is there already if an update before, whose report is not read yet, has set it.
        self._failed: Tensor = getattr(self._torch_optimizer, "found_inf", torch.zeros((), device=self._device))
        self._steps: list[tuple[tuple[int, int], Tensor, Mapping[str, Any], dict[str, Tensor], Tensor]] = []

    @staticmethod
    def suits(part: LearnerPart, settings: UpdateSettings) -> bool:
        """Return whether an update can be taken in this way: the optimizer skips steps, and clips no single tensors."""
        optimizer = part.objectives[settings.loss].optimizer
        return (
            isinstance(optimizer, ModuleOptimizer)
            and optimizer.is_flat
            and all(group.get("fused") for group in optimizer.torch_optimizer.param_groups)
            and settings.grad_clip_by == "global_norm"
        )

    def step(self, minibatch: Minibatch) -> None:
        """Take a gradient step on a minibatch, unless one has failed; see `ModuleUpdate.step` for other errors."""
        settings, optimizer, report = self.settings, self.optimizer, self.report
        groups: Collection[str] = optimizer.groups
        if not self._moves_all:
            groups = settings.groups_at(report.num_steps + 1, groups)
        loss_fn, rows = self._objective.loss, minibatch.rows
        loss, reported = call_loss(loss_fn, self.module_id, self.module, rows, settings.coefficients)
        total = total_loss(loss, groups) if isinstance(loss, Mapping) else loss
        self._compute_gradients(loss, True, groups, minibatch)
        limit, norms = settings.grad_clip, dict[str, Tensor]()
        for name in groups:
            most = limit.get(name) if isinstance(limit, Mapping) else limit
            norms[name] = _clip(optimizer.steppable[name], most, self._failed)
        is_finite = torch.stack([total.detach(), *norms.values()]).isfinite().all()
        self._failed = torch.where(is_finite, self._failed, 1.0)
        self._torch_optimizer.found_inf = self._failed
        optimizer.step(groups)
        for constrain in self._constraints:
            constrain()
        names = {f"gradients_{name}_optimizer_global_norm": norm for name, norm in norms.items()}
        report.add(total, {**reported, **names}, {}, minibatch.order)
        self._steps.append((minibatch.place, total.detach(), reported, norms, self._failed))
        if settings.after_step is not None:
            with torch.no_grad():
                settings.after_step(self.module, groups)
            optimizer.sync()

    def results(self) -> dict[str, Any]:
        """Return what the gradient steps reported; the first transfer to the host since the update began.

        Raises:
            LossError: A loss or a gradient was not finite; that step and those after it were not taken.
        """
        if self.settings.defers_report and len(self._steps) == 1:
            return self._defer()
        del self._torch_optimizer.found_inf
        failed = torch.stack([step[-1] for step in self._steps]).tolist()
        if any(failed):
            place, total, reported, norms, _ = self._steps[failed.index(1.0)]
            numbers = {name: norm.item() for name, norm in norms.items()}
            raise self._error(loss_error(self.module_id, *place, total, reported, numbers))
        return super().results()

    def _defer(self) -> dict[str, Any]:
        """Return the report of the only step as tensors, with the reading of what failed."""
        place, total, reported, norms, failed = self._steps[0]
        found = {"total_loss": total, **{name: value.detach() for name, value in reported.items()}}
        found |= {f"gradients_{name}_optimizer_global_norm": norm for name, norm in norms.items()}
        found |= {"module_train_batch_size_mean": float(self.report.size), "num_gradient_steps": 1.0, "num_epochs": 1.0}
        for name, lr in self.optimizer.end_update().items():
            found[f"{name}_optimizer_learning_rate"] = lr
        return found | {DEFERRED: Deferred(self.module_id, place, failed, self._torch_optimizer)}


DEFERRED = "deferred"
"""Key of the `Deferred` in results that stay on the device."""


@dataclass(frozen=True)
class Deferred:
    """What is known of a gradient step whose report is not read yet.

    Attributes:
        module_id: Id of the module.
        place: Numbers of the epoch and of the minibatch.
        failed: Whether this step, or one before it since the last reading, was not finite: 1 or 0, `[]`.
        torch_optimizer: The optimizer, which skips steps until the report is read.
    """

    module_id: str
    place: tuple[int, int]
    failed: Tensor
    torch_optimizer: Any


def read_at_once(updates: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Make updates, read all their reports at once, and return them."""
    reports: list[dict[str, Any]] = []
    try:
        for report in updates:
            reports.append(report)
    finally:  # after an interrupt too, optimizers must not wait for a reading
        if deferred := [report for report in reports if DEFERRED in report]:
            read_reports(deferred)
    return iter(reports)


def read_reports(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return reports that `UpdateSettings.defers_report` left on the device, with numbers, after one transfer for all.

    Raises:
        LossError: A loss or a gradient was not finite; that step and those after it were not taken.
    """
    waiting: list[Deferred] = [report.pop(DEFERRED) for report in reports]
    places = [(index, name) for index, report in enumerate(reports) for name in report if _is_scalar(report[name])]
    scalars = [reports[index][name].float() for index, name in places]
    numbers = torch.stack([*(each.failed for each in waiting), *scalars]).tolist()
    for each in waiting:
        each.torch_optimizer.__dict__.pop("found_inf", None)
    for (index, name), number in zip(places, numbers[len(waiting) :], strict=True):
        reports[index][name] = number
    if 1.0 in (failed := numbers[: len(waiting)]):
        first = failed.index(1.0)
        report, each = {k: torch.tensor(v) for k, v in reports[first].items() if isinstance(v, float)}, waiting[first]
        norms = {name: float(report.pop(name)) for name in list(report) if name.startswith("gradients_")}
        raise loss_error(each.module_id, *each.place, report.pop("total_loss"), report, norms)
    return list(reports)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.ndim


def _clip(vectors: list[Any], limit: float | None, like: Tensor) -> Tensor:
    """Scale gradients down to a norm of at most `limit`, on their device, and return their norm before.

    A group without gradients, because it is frozen, has the norm 0, in a tensor like the one that is given.
    """
    gradients = [vector.grad for vector in vectors if vector.grad is not None]
    if not gradients:
        return torch.zeros_like(like)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    if limit is not None:
        scale = (limit / norm).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
    return norm
