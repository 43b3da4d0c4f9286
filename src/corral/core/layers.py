"""Linear layers and activations in a row, as one step of torch's graph.

For nets as small as those of most policies, the graph costs more than the arithmetic: one node for all layers takes a
third off a forward and backward pass of two hidden layers of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_ACTIVATIONS: dict[type[nn.Module], tuple[Any, Any]] = {
    # in place, and the gradient before it from the one behind it and the output
    nn.ReLU: (torch.relu_, lambda grad, output: torch.ops.aten.threshold_backward(grad, output, 0)),
    nn.Tanh: (torch.tanh_, torch.ops.aten.tanh_backward),
}

_Row = list[tuple[nn.Linear, type[nn.Module] | None]]


def run_layers(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Apply layers one after another to float tensors `[B, in]`; the result is that of calling each.

    Gradients of gradients need layers that are called one by one: call them, or register a hook on one.
    """
    row = None if x.ndim != 2 or torch.is_autocast_enabled(x.device.type) else _row(layers)
    if row is None:
        for layer in layers:
            x = layer(x)
        return x
    activations = tuple(activation for _, activation in row)
    parameters = [parameter for linear, _ in row for parameter in (linear.weight, linear.bias)]
    if torch.is_grad_enabled():
        outputs: Tensor = _Layers.apply(x, activations, *parameters)  # type: ignore[no-untyped-call]
        return outputs
    return _forward(x, activations, parameters)[-1]


def _row(layers: Sequence[nn.Module]) -> _Row | None:
    """Pair each linear layer with the activation after it, or return `None` if something else is among them."""
    row: _Row = []
    for layer in layers:
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            return None
        if type(layer) is nn.Linear and layer.bias is not None:
            row.append((layer, None))
        elif type(layer) in _ACTIVATIONS and row and row[-1][1] is None:
            row[-1] = (row[-1][0], type(layer))
        else:
            return None
    return row or None


def _forward(x: Tensor, activations: Sequence[type[nn.Module] | None], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the input, and what comes after each layer."""
    outputs = [x]
    for index, activation in enumerate(activations):
        x = functional.linear(x, parameters[2 * index], parameters[2 * index + 1])
        if activation is not None:
            x = _ACTIVATIONS[activation][0](x)
        outputs.append(x)
    return outputs


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activations: tuple[type[nn.Module] | None, ...], *parameters: Tensor) -> Tensor:
        outputs = _forward(x, activations, parameters)
        ctx.activations = activations
        ctx.save_for_backward(*outputs, *parameters[::2])
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers, saved, needed = len(ctx.activations), ctx.saved_tensors, ctx.needs_input_grad
        outputs, weights = saved[: num_layers + 1], saved[num_layers + 1 :]
        grads: list[Tensor | None] = [None] * (2 * num_layers)
        for index in reversed(range(num_layers)):
            if ctx.activations[index] is not None:
                grad = _ACTIVATIONS[ctx.activations[index]][1](grad, outputs[index + 1])
            if needed[2 + 2 * index]:
                grads[2 * index] = grad.t() @ outputs[index]
            if needed[3 + 2 * index]:
                grads[2 * index + 1] = grad.sum(0)
            if index or needed[0]:
                grad = grad @ weights[index]
        return (grad if needed[0] else None, None, *grads)
