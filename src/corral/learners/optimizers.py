"""Optimizers of torch, started in no time and stepping one vector for each module."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# These treat every entry of a parameter alike, so they can step one vector that holds all of them.
ELEMENTWISE_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop)


def optimizer_settings(
    optimizer_class: type[torch.optim.Optimizer], optimizer_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config's settings and those that we choose: Adam in one fused kernel, unless the config says how."""
    settings = dict(optimizer_config)
    if optimizer_class in (torch.optim.Adam, torch.optim.AdamW) and "foreach" not in settings:
        settings.setdefault("fused", True)
    return settings


def make_optimizer(
    groups: Iterable[Iterable[nn.Parameter]],
    optimizer_class: type[torch.optim.Optimizer],
    settings: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """Return an optimizer of groups of parameters; see `flat_parameters` for those of elementwise ones."""
    trainable = [[parameter for parameter in group if parameter.requires_grad] for group in groups]
    if optimizer_class in ELEMENTWISE_OPTIMIZERS:
        trainable = [flat_parameters(group) for group in trainable]
    return without_compiler(optimizer_class)([{"params": group} for group in trainable], **settings)


def without_compiler(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a class of the same name and behaviour that does not import torch's compiler.

    The methods of torch's own optimizers are wrapped so that `torch.compile` leaves them alone, and the wrappers import
    the compiler to say so: two seconds in every process that trains, as much as torch itself takes. Nothing is compiled
    here, so the wrapped methods are called directly. A class from elsewhere is returned as it is.
    """
    if not optimizer_class.__module__.startswith("torch."):
        return optimizer_class
    methods = {
        name: inspect.unwrap(method)
        for name, method in inspect.getmembers(optimizer_class, inspect.isfunction)
        if hasattr(method, "__wrapped__")
    }
    methods["step"] = _hooked(torch.no_grad()(inspect.unwrap(optimizer_class.step)))  # one of its wrappers did this too
    return type(optimizer_class.__name__, (optimizer_class,), methods)


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that goes torch's way around it, which notes it in the profiler's record, only if it has hooks."""
    with_hooks = torch.optim.Optimizer.profile_hook_step(step)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return (with_hooks if hooks else step)(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # torch wraps a step that is not marked so
    return wrapper


def flat_parameters(trainable: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Lay parameters and their gradients side by side in one vector for each dtype.

    The parameters themselves become views of it. Clipping and stepping one vector takes a tenth of the time that a
    dozen small tensors take, which is a sixth of a small net's gradient step.

    Returns:
        The vectors, for an optimizer that treats every entry alike.
    """
    vectors = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in trainable):
        parts = [parameter for parameter in trainable if parameter.dtype == dtype]
        vector = nn.Parameter(torch.cat([part.detach().reshape(-1) for part in parts]))
        vector.grad = torch.zeros_like(vector)
        sizes = [part.numel() for part in parts]
        for part, data, grad in zip(
            parts, torch.split(vector.data, sizes), torch.split(vector.grad, sizes), strict=True
        ):
            part.data, part.grad = data.view_as(part), grad.view_as(part)
        vectors.append(vector)
    return vectors


BoundParameter = tuple[nn.Parameter, Tensor, Tensor]
"""A parameter, and the data and the gradient that belong to it in the vectors of `flat_parameters`."""


def bound_parameters(parameters: Iterable[nn.Parameter]) -> list[BoundParameter]:
    """Return the parameters that `flat_parameters` has made views of vectors: the ones that have gradients already."""
    return [(parameter, parameter.data, parameter.grad) for parameter in parameters if parameter.grad is not None]


def bind_parameters(bound: Iterable[BoundParameter]) -> None:
    """Make parameters and their gradients views of their vectors again; their values stay.

    `module.zero_grad()`, `parameter.grad = None` and `parameter.data = ...` in user code put other tensors in place of
    the views, and the optimizer, which steps the vectors, would not notice.
    """
    for parameter, data, gradient in bound:
        if parameter.data_ptr() != data.data_ptr():
            data.copy_(parameter.data)
            parameter.data = data
        if parameter.grad is not gradient:
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None, by: str) -> float:
    """Clip gradients in place, and return their global norm before clipping.

    Args:
        parameters: After `backward`.
        limit: The largest norm or absolute value; `None` clips nothing.
        by: `"global_norm"`, `"norm"` or `"value"`; see `Learner`.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(gradients) == 1:  # a vector: its product with itself takes a third of the time of `norm`
        flat = gradients[0].view(-1)
        norm = math.sqrt(torch.dot(flat, flat).item())
    else:
        norm = nn.utils.get_total_norm(gradients).item()
    if limit is not None and by == "global_norm" and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)
    if limit is not None and by == "norm":
        for parameter in parameters:
            nn.utils.clip_grad_norm_(parameter, limit)
    if limit is not None and by == "value":
        nn.utils.clip_grad_value_(parameters, limit)
    return norm
