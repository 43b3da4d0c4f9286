"""The default modules with memory in NumPy, for small batches while sampling: the same step as in torch, at less cost.

The sigmoid is computed as (1 + tanh(x / 2)) / 2. With half of the weights of these gates, one tanh computes all gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from corral.modules.inference import (
    MAX_NUMPY_WIDTH,
    NUMPY_ACTIVATIONS,
    Layer,
    affine_arrays,
    layer_outputs,
    numpy_layers,
)
from corral.modules.networks import FloatArray

State = dict[str, FloatArray]


class RecurrentSteps:
    """Steps of encoders with a recurrent layer, and of a policy head, by the weights that they had at construction.

    Args:
        encoders: By the prefix of the names of their states, layers and the recurrent layer after them. The head reads
            the `h` of the first one, whose prefix is empty.
        head: Layers of the policy head.
        appended: What the policy appends to the outputs of the head, or `None`.
    """

    def __init__(
        self,
        encoders: Mapping[str, tuple[Sequence[nn.Module], Any]],
        head: Sequence[nn.Module],
        appended: nn.Parameter | None,
    ) -> None:
        """Read the weights."""
        self._encoders: list[tuple[str, list[Layer], Callable[[FloatArray, State], State]]] = [
            (prefix, _arrays(layers), LSTMCell(rnn) if isinstance(rnn, nn.LSTM) else GRUCell(rnn))
            for prefix, (layers, rnn) in encoders.items()
        ]
        self._head = _arrays(head)
        self._appended = None if appended is None else appended.detach().numpy().copy()

    def __call__(self, obs: FloatArray, states: State) -> tuple[FloatArray, State]:
        """Return `dist_inputs`, float32 `[N, D]`, and the next states, for observations `[N, ...]`."""
        flat = obs.reshape(len(obs), -1).astype(np.float32, copy=False)
        after: State = {}
        for prefix, layers, cell in self._encoders:
            own = {name: states[prefix + name] for name in ("h", "c") if prefix + name in states}
            own = cell(layer_outputs(flat, layers)[-1], own)
            after |= {prefix + name: part for name, part in own.items()} if prefix else own
        outputs = layer_outputs(after["h"], self._head)[-1]
        if self._appended is not None:
            outputs = np.concatenate([outputs, np.broadcast_to(self._appended, outputs.shape)], -1)
        return outputs, after


def _arrays(layers: Sequence[nn.Module]) -> list[Layer]:
    return [
        (*affine_arrays(layer), None if activation is None else NUMPY_ACTIVATIONS[activation])
        for layer, activation in numpy_layers(layers) or ()
    ]


def numpy_can_compute(layers: Sequence[nn.Module], rnn: Any) -> bool:
    """Return whether NumPy computes layers and a recurrent layer after them, and faster than torch."""
    return numpy_layers(layers) is not None and rnn.hidden_size <= MAX_NUMPY_WIDTH


class LSTMCell:
    """One step of an LSTM; see `torch.nn.LSTM` for the equations."""

    def __init__(self, rnn: nn.LSTM) -> None:
        """Read the weights: one matrix `[in + H, 4 H]` for inputs and state, and one bias."""
        size = rnn.hidden_size
        scale = np.repeat(np.array([0.5, 0.5, 1.0, 0.5], np.float32), size)  # the third gate is a tanh itself
        self._size = size
        self._weight, self._bias = _joined(rnn, scale)

    def __call__(self, x: FloatArray, state: State) -> State:
        """Return the next states of inputs `[N, in]`."""
        size = self._size
        gates = np.concatenate([x, state["h"]], 1) @ self._weight
        gates += self._bias
        np.tanh(gates, out=gates)
        new = gates[:, 2 * size : 3 * size]
        keep, before = gates[:, size : 2 * size], state["c"]
        # (1 + t) / 2 for the gates of the sigmoid
        c: FloatArray = (before + keep * before + new + gates[:, :size] * new) * np.float32(0.5)
        h = np.tanh(c)
        h += h * gates[:, 3 * size :]
        h *= np.float32(0.5)
        return {"h": h, "c": c}


class GRUCell:
    """One step of a GRU; see `torch.nn.GRU` for the equations."""

    def __init__(self, rnn: nn.GRU) -> None:
        """Read the weights: of the two gates for inputs and state together, and of the new values for each."""
        self._size = size = rnn.hidden_size
        weight, bias = _joined(rnn, np.repeat(np.array([0.5, 0.5, 1.0], np.float32), size))
        self._gates, self._gates_bias = weight[:, : 2 * size].copy(), bias[: 2 * size].copy()
        arrays = [
            getattr(rnn, f"{kind}_{of}_l0").detach().numpy()[2 * size :]
            for of in ("ih", "hh")
            for kind in ("weight", "bias")
        ]
        self._in, self._in_bias, self._own, self._own_bias = (array.T.copy() for array in arrays)

    def __call__(self, x: FloatArray, state: State) -> State:
        """Return the next states of inputs `[N, in]`."""
        h, size = state["h"], self._size
        gates = np.concatenate([x, h], 1) @ self._gates
        gates += self._gates_bias
        np.tanh(gates, out=gates)
        gates += 1
        gates *= np.float32(0.5)
        new = h @ self._own
        new += self._own_bias
        new *= gates[:, :size]
        new += x @ self._in
        new += self._in_bias
        np.tanh(new, out=new)
        new += gates[:, size:] * (h - new)
        return {"h": new}


def _joined(rnn: Any, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the weights of inputs and state as `[in + H, gates]`, and the sum of the biases, scaled by gate."""
    weights = [getattr(rnn, f"weight_{of}_l0").detach().numpy() for of in ("ih", "hh")]
    bias = rnn.bias_ih_l0.detach().numpy() + rnn.bias_hh_l0.detach().numpy()
    return np.concatenate(weights, 1).T * scale, bias * scale
