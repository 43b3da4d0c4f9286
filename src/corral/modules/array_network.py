"""Gradient steps of small nets in NumPy, which is several times faster than torch's graph for them.

A stack of linear layers is small if `Inference` acts with it in NumPy too. Its weights and gradients are those of the
torch parameters, in the same memory, so that optimizers, callbacks and checkpoints see no difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from corral.modules.inference import NUMPY_ACTIVATIONS, FloatArray, numpy_layers

_GRADIENTS = {  # of the loss before the activation, from that behind it, in place, and the output
    nn.Tanh: lambda grad, output: np.multiply(grad, 1 - output * output, out=grad),
    nn.ReLU: lambda grad, output: np.multiply(grad, output > 0, out=grad),
}


class ArrayNetwork:
    """A stack of linear layers with activations, forwards and backwards, on arrays `[B, in]`."""

    def __init__(self, layers: Sequence[tuple[nn.Linear, type[nn.Module] | None]]) -> None:
        """Take the layers, each with the activation after it; see `of`."""
        self._activations = [activation for _, activation in layers]
        self._parameters = [parameter for layer, _ in layers for parameter in (layer.weight, layer.bias)]
        self._places = [parameter.data_ptr() for parameter in self._parameters]
        arrays = [parameter.detach().numpy() for parameter in self._parameters]
        grads = [None if parameter.grad is None else parameter.grad.numpy() for parameter in self._parameters]
        self._weights, self._biases = arrays[::2], arrays[1::2]
        self._weight_grads, self._bias_grads = grads[::2], grads[1::2]

    @property
    def is_current(self) -> bool:
        """Whether the parameters still lie where they did when this was made; all of them move at once, or none."""
        return self._places[0] == self._parameters[0].data_ptr()

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> ArrayNetwork | None:
        """Return a network of layers, or `None` if they are no stack that NumPy should compute."""
        stack = numpy_layers(layers)
        if stack is None or any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
            return None
        linear = [(layer, activation) for layer, activation in stack if type(layer) is nn.Linear]
        on_cpu = all(layer.weight.device.type == "cpu" for layer, _ in linear)
        return cls(linear) if len(linear) == len(stack) and on_cpu else None

    def forward(self, x: FloatArray) -> list[FloatArray]:
        """Return the input `[B, in]` as it is used, and what comes after each layer."""
        x = x.reshape(len(x), -1).astype(np.float32, copy=False)
        outputs = [x]
        for weight, bias, activation in zip(self._weights, self._biases, self._activations, strict=True):
            x = x @ weight.T
            x += bias
            if activation is not None:
                NUMPY_ACTIVATIONS[activation](x)
            outputs.append(x)
        return outputs

    def backward(self, outputs: Sequence[FloatArray], grad: FloatArray) -> None:
        """Leave gradients in the parameters, in place of those there are.

        Args:
            outputs: What `forward` returned.
            grad: Of the loss by the last output, float32 `[B, out]`; it is overwritten.
        """
        for index in reversed(range(len(self._weights))):
            activation, weight_grad, bias_grad = (
                self._activations[index],
                self._weight_grads[index],
                self._bias_grads[index],
            )
            if activation is not None:
                _GRADIENTS[activation](grad, outputs[index + 1])
            np.matmul(grad.T, outputs[index], out=weight_grad)
            np.add.reduce(grad, axis=0, out=bias_grad)
            if index:
                grad = grad @ self._weights[index]
