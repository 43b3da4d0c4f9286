"""Policies at sampling speed: NumPy for stacks of small linear layers, torch for everything else.

A torch call costs some 5 microseconds whatever its size, and a two-layer policy on 8 observations does less work
than that. `benchmarks/` measures both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from corral.core.module import Module
from corral.core.tree import Tree, map_tree

FloatArray = NDArray[np.float32]

# Past this width a layer is dominated by its arithmetic, and torch's kernels and threads win.
MAX_NUMPY_WIDTH = 512

_NUMPY_ACTIVATIONS: dict[type[nn.Module], Callable[[FloatArray], Any]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
}


class Inference:
    """Calls a module's policy on batches of observations while sampling.

    Args:
        module: The module; its weights are read at construction and at every `refresh`.

    Attributes:
        backend: `"numpy"` or `"torch"`.
    """

    def __init__(self, module: Module) -> None:
        """Choose the path and read the weights."""
        self.module = module.eval()  # acting is no training: dropout and batch statistics stay still
        self._stack = _numpy_stack(module)
        self.backend = "torch" if self._stack is None else "numpy"
        self._appended: FloatArray | None = None
        self._layers: list[tuple[FloatArray, FloatArray, Callable[[FloatArray], Any] | None]] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the weights of the module again, after they changed."""
        if self._stack is None:
            return
        self._layers = [
            (np.ascontiguousarray(linear.weight.detach().numpy().T), linear.bias.detach().numpy().copy(), activation)
            for linear, activation in self._stack[0]
        ]
        self._appended = None if self._stack[1] is None else self._stack[1].detach().numpy().copy()

    def load_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Copy weights by parameter name into the module, and refresh."""
        with torch.no_grad():
            for name, parameter in self.module.state_dict().items():
                parameter.copy_(torch.from_numpy(weights[name]))
        self.refresh()

    def __call__(self, obs: Tree) -> FloatArray:
        """Map observations, a tree of arrays `[N, ...]`, to `dist_inputs`, float32 `[N, D]`."""
        if self._stack is None:
            with torch.inference_mode():
                outputs: FloatArray = self.module.policy(map_tree(_as_tensor, obs)).numpy()
            return outputs
        x: FloatArray = obs.reshape(obs.shape[0], -1).astype(np.float32, copy=False)
        for weight, bias, activation in self._layers:
            x = x @ weight
            x += bias
            if activation is not None:
                activation(x)
        if self._appended is not None:
            x = np.concatenate([x, np.broadcast_to(self._appended, (len(x), len(self._appended)))], -1)
        return x


def _as_tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


_Activation = Callable[[FloatArray], Any]


def _numpy_stack(
    module: Module,
) -> tuple[list[tuple[nn.Linear, _Activation | None]], nn.Parameter | None] | None:
    """Pair each linear layer with the activation after it, or return `None` if NumPy should not compute the policy."""
    policy = module.policy_layers()
    if policy is None:
        return None
    stack: list[tuple[nn.Linear, _Activation | None]] = []
    for layer in policy[0]:
        if isinstance(layer, nn.Linear) and layer.bias is not None and layer.out_features <= MAX_NUMPY_WIDTH:
            stack.append((layer, None))
        elif type(layer) in _NUMPY_ACTIVATIONS and stack and stack[-1][1] is None:
            stack[-1] = (stack[-1][0], _NUMPY_ACTIVATIONS[type(layer)])
        else:
            return None
    return stack, policy[1]
