"""The types of losses, the check of what a loss returns, its gradients and their clipping."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from corral.core.tree import Tree, num_rows
from corral.errors import ColumnError, LossError
from corral.modules.module import Module

Batch = dict[str, Tree]
"""Columns by name, each a tree of arrays or tensors `[B, ...]` of one length B."""

Loss = Callable[[Module, Batch, Mapping[str, float]], tuple[Tensor | Mapping[str, Tensor], dict[str, Tensor]]]
"""`loss(module, minibatch, coefficients)` returns what to minimise, and scalars or columns `[B]` to report.

What to minimise is one scalar for all groups of parameters, or a mapping with one scalar per group, of which each group
gets the gradient of its own alone.
"""

UserLoss = Callable[[Module, Batch, Mapping[str, float], Callable[..., Any]], Any]
"""`loss(module, minibatch, coefficients, default_loss)` returns what a `Loss` returns.

`default_loss(module, minibatch, coefficients)` is the loss of the algorithm. It returns what to minimise, what to
report, and a dict of the tensors that it computed, with their gradients.
"""

OWN_RESULTS = frozenset({"total_loss", "num_gradient_steps", "num_epochs", "module_train_batch_size_mean"})
"""Names of what every update reports, which a loss cannot report."""


def learner_metrics(*groups: str) -> tuple[str, ...]:
    """Return the names that every update reports besides the loss's own, given the names of groups of parameters."""
    return (
        *("total_loss", "module_train_batch_size_mean", "num_gradient_steps", "num_epochs"),
        *(f"gradients_{group}_optimizer_global_norm" for group in groups),
        *(f"{group}_optimizer_learning_rate" for group in groups),
    )


def wrap_user_loss(loss: UserLoss, default: Loss) -> Loss:
    """Return a user's loss as a `Loss`, with the default loss at hand; see `UserLoss`."""
    gives_outputs = "outputs" in inspect.signature(default).parameters
    return partial(_call_user_loss, loss, partial(_with_outputs, default, gives_outputs))


def _call_user_loss(
    loss: UserLoss, default: Any, module: Module, batch: Batch, coefficients: Mapping[str, float]
) -> Any:
    """Return what a user's loss returns.

    Raises:
        LossError: It made one scalar of the scalars of the groups, each of which would then move all groups.
    """
    groups: list[str] = []

    def at_hand(*arguments: Any) -> Any:
        result = default(*arguments)
        if isinstance(result[0], Mapping):
            groups.extend(result[0])
        return result

    result = loss(module, batch, coefficients, at_hand)
    if groups and isinstance(result, tuple) and isinstance(result[0], Tensor):
        raise LossError(
            f"loss: default_loss returned one scalar for each of the groups of parameters {groups}, but the loss "
            "returned one scalar for all of them. Its gradient would train each group with the losses of the others. "
            f"Return (losses, reported), such as losses={{**losses, {groups[0]!r}: losses[{groups[0]!r}] + penalty}}."
        )
    return result


def _with_outputs(
    loss: Any, gives_outputs: bool, module: Module, batch: Batch, coefficients: Mapping[str, float]
) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Return what a loss returns, and the tensors that it computed, if it can give them."""
    outputs: dict[str, Tensor] = {}
    scalar, reported = loss(module, batch, coefficients, **({"outputs": outputs} if gives_outputs else {}))
    return scalar, reported, outputs


def call_loss(
    loss: Loss, module_id: str, module: Module, batch: Batch, coefficients: Mapping[str, float]
) -> tuple[Tensor | Mapping[str, Tensor], dict[str, Tensor]]:
    """Return what a loss returns for a minibatch, after checking it.

    Raises:
        LossError: The loss returned something else; see `Loss`.
        ColumnError: The loss asked for a column or coefficient that does not exist.
    """
    try:
        result = loss(module, batch, coefficients)
    except KeyError as error:
        name = error.args[0] if error.args else None
        if not isinstance(name, str) or name in batch or name in coefficients:
            raise
        raise ColumnError(
            f"learners/{module_id}: the loss asked for {name!r}, and there are only the columns {sorted(batch)} and "
            f"the coefficients {sorted(coefficients)}: add a column in a callback such as on_sample_end, or a "
            "coefficient in UpdateSettings."
        ) from error
    if fault := find_fault(result, batch):
        raise LossError(
            f"learners/{module_id}: the loss {fault}: it must return (loss, {{name: tensor}}), which are the scalar "
            "tensor to minimise, and scalars and columns [B] to report. Return (loss, {}) to report nothing."
        )
    return result


def find_fault(result: Any, batch: Batch) -> str | None:
    """Return what is wrong with the result of a loss for a minibatch, or `None`."""
    if not isinstance(result, tuple) or len(result) != 2:
        return f"returned {_describe(result)}"
    loss, reported = result
    for group, scalar in loss.items() if isinstance(loss, Mapping) else (("", loss),):
        if not isinstance(scalar, Tensor) or scalar.ndim:
            what = f"loss of {group!r}" if group else "loss"
            return f"returned as the {what} {_describe(scalar)}, not a scalar tensor such as errors.mean()"
    if not isinstance(reported, Mapping):
        return f"returned {_describe(reported)} as what to report"
    for name, value in reported.items():
        if not isinstance(value, Tensor):
            return f"reported {name!r} as {_describe(value)}, not as a tensor"
        if value.ndim and len(value) != (size := num_rows(batch)):
            return f"reported {name!r} as {_describe(value)}, neither a scalar nor a column of B={size} rows"
    if taken := sorted(OWN_RESULTS & reported.keys()):
        return f"reported {taken}, which every update reports itself (give them other names)"
    return None


def _describe(value: Any) -> str:
    """Return type and shape of a value in words."""
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype}{list(value.shape)}".replace("torch.", "")
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def total_loss(loss: Any, groups: Collection[str]) -> Any:
    """Return the scalar that a gradient step on groups of parameters minimises.

    Args:
        loss: A scalar, or one scalar per group by name.
        groups: Names of the groups that move.

    Raises:
        LossError: A group that moves has no scalar.
    """
    if not isinstance(loss, Mapping):
        return loss
    if missing := [name for name in groups if name not in loss]:
        raise LossError(
            f"the loss returned scalars for the groups of parameters {sorted(loss)}, but the update also moves "
            f"{missing}: return a scalar for each of them, or leave them out of `UpdateSettings.groups`."
        )
    return torch.stack([loss[name].detach() for name in groups]).sum() if groups else torch.zeros(())


def backward(
    loss: Tensor | Mapping[str, Tensor], groups: Mapping[str, Sequence[nn.Parameter]], module_id: str, num_groups: int
) -> None:
    """Add the gradients of a loss to the gradients of the parameters of groups, and of no others.

    Args:
        loss: One scalar for all groups, or one scalar per group, whose gradient only this group gets.
        groups: Trainable parameters of the groups that move, by name.
        module_id: The module, for the message of an error.
        num_groups: Number of groups of the module.

    Raises:
        LossError: A loss does not depend on any trainable parameter.
    """
    learning = [(name, parameters) for name, parameters in groups.items() if parameters]
    scalars = {name: loss[name] for name, _ in learning} if isinstance(loss, Mapping) else {"": loss}
    if not learning:
        return
    for name, scalar in scalars.items():
        if not scalar.requires_grad:
            raise LossError(
                f"learners/{module_id}: the loss{f' of {name!r}' if name else ''} does not depend on any trainable "
                "parameter: the loss was detached, or what it depends on is frozen (requires_grad=False)."
            )
    if isinstance(loss, Mapping):
        for index, (name, parameters) in enumerate(learning, 1):
            scalars[name].backward(inputs=parameters, retain_graph=index < len(learning))  # type: ignore[no-untyped-call]
    elif len(groups) == num_groups:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        inputs = [parameter for _, parameters in learning for parameter in parameters]
        loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]


def clip_gradients(
    groups: Mapping[str, Sequence[nn.Parameter]],
    names: Collection[str],
    limit: float | Mapping[str, float] | None,
    by: str,
) -> dict[str, float]:
    """Clip the gradients of groups of parameters in place, and return the norm of each group before clipping.

    Args:
        groups: Parameters with gradients, by group.
        names: Names of the groups to clip.
        limit: Largest norm or absolute value, or one for each group; `None` clips nothing.
        by: `"global_norm"`, `"norm"` or `"value"`; see `UpdateSettings`.
    """
    norms: dict[str, float] = {}
    for name in names:
        parameters, most = groups[name], limit.get(name) if isinstance(limit, Mapping) else limit
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if len(gradients) == 1:  # one vector: the dot product takes a third of the time of `norm`
            flat = gradients[0] if gradients[0].ndim == 1 else gradients[0].reshape(-1)
            norm = norms[name] = math.sqrt(torch.dot(flat, flat).item())
        else:
            norm = norms[name] = nn.utils.get_total_norm(gradients).item()
        if most is None:
            continue
        if by == "norm":
            for parameter in parameters:
                nn.utils.clip_grad_norm_(parameter, most)
        elif by == "value":
            nn.utils.clip_grad_value_(parameters, most)
        elif norm > most:
            for gradient in gradients:
                gradient.mul_(most / norm)
    return norms
