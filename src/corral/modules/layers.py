"""Linear layers and activations in a row, as one step of torch's graph.

For nets as small as those of most policies, the graph costs more than the arithmetic: one node for all layers takes a
third off a forward and backward pass of two hidden layers of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Haarnoja et al. 2018 (arXiv:1801.01290) keep the log standard deviation in this range.
MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0


class LogStdClamp(nn.Module):
    """Keeps the second half of `[B, 2d]`, log standard deviations, within `MIN_LOG_STD` and `MAX_LOG_STD`.

    What lies outside gets no gradient.
    """

    def forward(self, dist_inputs: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        mean, log_std = dist_inputs.chunk(2, -1)
        return torch.cat([mean, log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)], -1)


def _clamp_log_std_(dist_inputs: Tensor) -> Tensor:
    dist_inputs[:, dist_inputs.shape[1] // 2 :].clamp_(MIN_LOG_STD, MAX_LOG_STD)
    return dist_inputs


def _clamp_log_std_backward(grad: Tensor, output: Tensor) -> Tensor:
    mean, log_std = grad.chunk(2, -1)
    _, clamped = output.chunk(2, -1)
    return torch.cat([mean, log_std * ((clamped > MIN_LOG_STD) & (clamped < MAX_LOG_STD))], -1)


_ACTIVATIONS: dict[type[nn.Module], tuple[Any, Any]] = {
    # in place, and the gradient before it from the one behind it, which it may overwrite, and the output
    nn.ReLU: (
        torch.relu_,
        lambda grad, output: torch.ops.aten.threshold_backward.grad_input(grad, output, 0, grad_input=grad),
    ),
    nn.Tanh: (
        torch.tanh_,
        lambda grad, output: torch.ops.aten.tanh_backward.grad_input(grad, output, grad_input=grad),
    ),
    LogStdClamp: (_clamp_log_std_, _clamp_log_std_backward),
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


def _backward(
    grad: Tensor,
    outputs: Sequence[Tensor],
    activations: Sequence[type[nn.Module] | None],
    take: Callable[[int, Tensor], None],
    through: Callable[[int, Tensor], Tensor],
    to_input: bool,
) -> Tensor | None:
    """Go back from the last layer to the first.

    Args:
        grad: Behind the last layer.
        outputs: The input, and what came after each layer.
        activations: After each linear layer.
        take: Called with each linear layer's index and the gradient behind it.
        through: Likewise, and returns the gradient before it.
        to_input: Whether that of the input is asked for.
    """
    last = len(activations) - 1
    for index in reversed(range(len(activations))):
        activation = activations[index]
        if activation is not None:
            grad = grad.clone() if index == last else grad  # which is the caller's
            grad = _ACTIVATIONS[activation][1](grad, outputs[index + 1])
        take(index, grad)
        if index or to_input:
            grad = through(index, grad)
    return grad if to_input else None


class LayerRow:
    """Layers in a row, forwards and backwards without torch's graph, for losses that know their own gradients.

    Hidden layers keep their memory from one pass to the next: torch gives it back to the system each time, and getting
    it anew costs a tenth of an update of nets of 256. Call it under `torch.no_grad()`.
    """

    def __init__(self, row: _Row) -> None:
        """Take the linear layers, each with the activation after it; see `of`."""
        self._linear = [linear for linear, _ in row]
        self._activations = [activation for _, activation in row]
        self._memory: dict[tuple[str, int], Tensor] = {}

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> LayerRow | None:
        """Return a row of layers, or `None` if they are none, or not float32 on the CPU."""
        row = _row(layers)
        if row is None:
            return None
        weights = [linear.weight for linear, _ in row]
        plain = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
        return cls(row) if plain else None

    @property
    def has_gradients(self) -> bool:
        """Whether all parameters have gradients that `backward` can fill."""
        return all(layer.weight.grad is not None and layer.bias.grad is not None for layer in self._linear)

    def _kept(self, name: str, index: int, num_rows: int, width: int) -> Tensor:
        found = self._memory.get((name, index))
        if found is None or len(found) < num_rows:
            found = self._memory[name, index] = torch.empty(num_rows, width)
        return found[:num_rows]

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the input, float32 `[B, in]`, and what comes after each layer.

        All but the last of these stay what they are until the next call.
        """
        outputs, last = [x], len(self._linear) - 1
        for index, (linear, activation) in enumerate(zip(self._linear, self._activations, strict=True)):
            kept = None if index == last else self._kept("output", index, len(x), linear.out_features)
            x = torch.addmm(linear.bias, x, linear.weight.t(), out=kept)
            if activation is not None:
                x = _ACTIVATIONS[activation][0](x)
            outputs.append(x)
        return outputs

    def backward(self, outputs: Sequence[Tensor], grad: Tensor) -> None:
        """Leave gradients in the parameters, in place of those there are.

        Args:
            outputs: What `forward` returned.
            grad: Of the loss by the last output, float32 `[B, out]`.
        """

        def take(index: int, grad: Tensor) -> None:
            layer = self._linear[index]
            torch.mm(grad.t(), outputs[index], out=layer.weight.grad)
            torch.sum(grad, 0, out=layer.bias.grad)

        _backward(grad, outputs, self._activations, take, self._through, to_input=False)

    def backward_to_input(self, outputs: Sequence[Tensor], grad: Tensor) -> Tensor:
        """Return the gradient by the input, `[B, in]`, and leave those of the parameters as they are."""
        found = _backward(grad, outputs, self._activations, lambda *_: None, self._through, to_input=True)
        assert found is not None
        return found

    def _through(self, index: int, grad: Tensor) -> Tensor:
        weight = self._linear[index].weight
        kept = self._kept("grad", index, len(grad), weight.shape[1]) if index else None
        before: Tensor = torch.mm(grad, weight, out=kept)
        return before


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

        def take(index: int, grad: Tensor) -> None:
            if needed[2 + 2 * index]:
                grads[2 * index] = grad.t() @ outputs[index]
            if needed[3 + 2 * index]:
                grads[2 * index + 1] = grad.sum(0)

        def through(index: int, grad: Tensor) -> Tensor:
            before: Tensor = grad @ weights[index]
            return before

        return (_backward(grad, outputs, ctx.activations, take, through, needed[0]), None, *grads)
