"""Gradient steps of Q-learning in NumPy, for networks so small that torch's graph costs more than the arithmetic.

The learner asks `fast_form` at every update. It returns `None`, and autograd does the work, unless everything that the
update depends on is plain at that moment: the loss, the module, its layers and their hooks, the parameters and their
gradients, the optimizer and the columns. Both forms compute the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from corral.learners.losses import Batch, Loss
from corral.modules.inference import NUMPY_ACTIVATIONS, Activation, Layer, layer_outputs, numpy_layers
from corral.modules.module import Module
from corral.modules.networks import Encoder, Flat, FloatArray, LayerNorm, arrays_of, normalize_rows
from corral.modules.q_module import QModule, QNetwork

FastForm = Callable[[Module, Batch, Mapping[str, float]], tuple[np.floating, dict[str, Any]]]
"""Like a loss, but on columns that are arrays: returns arrays, and leaves the gradients in the parameters."""

LOSS = ("corral.algorithms.dqn", "dqn_loss")  # known by its name: learners import no algorithm
GLOBAL_HOOKS = tuple(
    f"_global_{name}_hooks" for name in ("backward_pre", "backward", "forward_pre", "forward")
)  # names in torch.nn.modules.module
PLAIN_PARTS = frozenset(
    (QNetwork, Encoder, nn.ModuleList, nn.Sequential, Flat, nn.Linear, LayerNorm, nn.Tanh, nn.ReLU, nn.Identity)
)
PARTS_WITH_PARAMETERS = (nn.Linear, LayerNorm)
OBS_DTYPES = frozenset(map(np.dtype, ("f2", "f4", "f8", "?", "u1", "i1", "i2", "i4", "i8")))
COLUMN_DTYPES = {
    "actions": np.dtype(np.int64),
    "rewards": np.dtype(np.float32),
    "terminated": np.dtype(np.bool_),
    "discounts": np.dtype(np.float32),
    "weights": np.dtype(np.float32),
}

# Read from the attributes of modules and parameters, without a Python function for each of them.
_MODULES, _PARAMETERS = operator.itemgetter("_modules"), operator.itemgetter("_parameters")
_HOOKS = operator.itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GRAD, _REQUIRES_GRAD = operator.attrgetter("grad"), operator.attrgetter("requires_grad")
_BACKWARD_HOOKS = operator.attrgetter("_backward_hooks")
_ACCUMULATE_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")
OWN_METHODS = ("q_values", "draw_noise")  # of the module, which an instance may replace

# Each multiplies a gradient behind an activation, in place, by the activation's derivative, which its output gives.
_DERIVATIVES: dict[type[nn.Module], Callable[[FloatArray, FloatArray], Any]] = {
    nn.Tanh: lambda grad, output: np.multiply(grad, 1 - output * output, out=grad),
    nn.ReLU: lambda grad, output: np.multiply(grad, output > 0, out=grad),
}


Stack = list[tuple[nn.Linear, LayerNorm | None, type[nn.Module] | None]]
"""Linear layers, each with the layer normalisation and the activation after it, or `None`."""


class Norm:
    """A layer normalisation and the activation after it, with what the latest call computed.

    Args:
        norm: The layer.
        activation: Function that is applied in place, or `None`.

    Attributes:
        normal: Rows `[B, n]` with mean 0 and variance 1.
        deviations: By what they were divided, `[B, 1]`.
    """

    normal: FloatArray
    deviations: FloatArray

    def __init__(self, norm: LayerNorm, activation: Activation | None) -> None:
        """Keep views of the parameters."""
        (self._gain, self._shift), self._epsilon = arrays_of(norm), norm.eps
        self._activation = activation

    def __call__(self, x: FloatArray) -> None:
        """Change `[B, n]` in place."""
        self.normal, self.deviations = normalize_rows(x, self._epsilon)
        np.multiply(self.normal, self._gain, out=x)
        x += self._shift
        if self._activation is not None:
            self._activation(x)

    def backward(self, grad: FloatArray, gain_grad: FloatArray, shift_grad: FloatArray) -> None:
        """Turn a gradient by what the normalisation gave into one by its input, in place; see Ba et al. 2016.

        Args:
            grad: The gradient before the activation, `[B, n]`.
            gain_grad: Receives the gradient of the gain, `[n]`.
            shift_grad: Receives the gradient of the shift, `[n]`.
        """
        np.einsum("ij,ij->j", grad, self.normal, out=gain_grad)
        np.add.reduce(grad, axis=0, out=shift_grad)
        # A change of a row moves its mean and deviation too, which takes two directions out of the gradient.
        grad *= self._gain
        along = np.einsum("ij,ij->i", grad, self.normal)[:, None] * (1 / grad.shape[1])
        grad -= grad.mean(1, keepdims=True)
        grad -= self.normal * along
        grad /= self.deviations


def is_q_loss(loss: Loss) -> bool:
    """Return whether a loss is the one that has a form here; learners ask it when they are given the loss."""
    if not isinstance(loss, partial) or hasattr(loss.func, "__wrapped__"):
        return False
    return (loss.func.__module__, loss.func.__qualname__) == LOSS


def fast_form(loss: Any, module: Module, optimizer: Any, batch: Batch) -> FastForm | None:
    """Return the loss in NumPy for an update of one gradient step, or `None` where autograd has to compute it.

    Args:
        loss: The loss, of which `is_q_loss` is true.
        module: The module that the update trains.
        optimizer: The optimizer of torch of the module.
        batch: Columns of the update, as arrays.
    """
    if type(module) is not QModule or module.form.num_atoms != 1:
        return None
    if not _columns_fit(module, batch) or torch.is_autocast_enabled("cpu"):
        return None
    networks = _networks.get(module)
    if networks is None or not networks.is_current(optimizer):
        parts = _plain_parts(module)
        networks = None if parts is None else NumpyNetworks.of(module, parts, optimizer)
        if networks is None:
            _networks.pop(module, None)
            return None
        _networks[module] = networks
    return partial(dqn_loss_in_numpy, networks, **loss.keywords)


def _columns_fit(module: Module, batch: Batch) -> bool:
    """Say whether the columns are arrays of the shapes and dtypes that a replay buffer draws."""
    size = len(batch["rewards"])
    obs_shape = (size, *(module.observation_space.shape or ()))
    for name in ("obs", "next_obs"):
        column = batch[name]
        if not isinstance(column, np.ndarray) or column.shape != obs_shape or column.dtype not in OBS_DTYPES:
            return False
    for name, dtype in COLUMN_DTYPES.items():
        if batch[name].dtype != dtype or batch[name].shape != (size,):
            return False
    return True


def _plain_parts(module: Module) -> list[nn.Module] | None:
    """Return the module and all parts of both networks, or `None` if one is not plain or has hooks."""
    found = [cast(nn.Module, module.q), cast(nn.Module, module.target_q)]
    for part in found:  # the list grows on the way
        if type(part) not in PLAIN_PARTS or any(_HOOKS(vars(part))):
            return None
        found += vars(part)["_modules"].values()
    return [module, *found]


class NumpyNetworks:
    """A Q-network and its target as arrays in the memory of their parameters.

    Attributes:
        layers: Layers of the network.
        target_layers: Layers of the target.
    """

    def __init__(
        self, stack: Stack, target_stack: Stack, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer
    ) -> None:
        """Take linear layers, each with the activation after it; see `of`."""
        self.layers, self.target_layers = _arrays(stack), _arrays(target_stack)
        self._activations = [activation for *_, activation in stack]
        self._parts, self._types = parts, list(map(type, parts))
        self._attributes = list(map(vars, parts))
        self._with_parameters = [vars(part) for part in parts if type(part) in PARTS_WITH_PARAMETERS]
        self._children = list(map(id, chain.from_iterable(map(dict.values, map(_MODULES, self._attributes)))))
        self._owned = list(chain.from_iterable(map(dict.values, map(_PARAMETERS, self._with_parameters))))
        self._parameters = _layer_parameters(stack)
        self._gradients = [cast(Tensor, parameter.grad) for parameter in self._parameters]
        gradients = iter([gradient.numpy() for gradient in self._gradients])
        self._gradient_arrays = [[next(gradients) for _ in _parameters_of(layer, norm)] for layer, norm, _ in stack]
        self._vectors = _stepped(optimizer)
        self._vector_gradients = [vector.grad for vector in self._vectors]
        self._ids = list(
            map(id, chain(self._owned, self._vectors, self._vector_gradients, self._gradients))
        )  # all of these stay alive, so that no other object can get the same id
        self._addresses = list(map(Tensor.data_ptr, self._owned))

    @classmethod
    def of(cls, module: QModule, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> NumpyNetworks | None:
        """Return the networks of a module, or `None` if NumPy should not compute them.

        Args:
            module: The module.
            parts: All parts of both networks, of plain types.
            optimizer: The optimizer of the module.
        """
        stack, target_stack = _stack(module.q), _stack(module.target_q)
        if stack is None or target_stack is None:
            return None
        parameters = _layer_parameters(stack)
        owned = [p for part in parts if type(part) in PARTS_WITH_PARAMETERS for p in vars(part)["_parameters"].values()]
        if len({parameter.data_ptr() for parameter in owned}) < len(parameters) + len(_layer_parameters(target_stack)):
            return None  # layers share weights
        vectors = _stepped(optimizer)
        if not all(map(_is_plain, owned)) or not all(_is_bound(parameter, vectors) for parameter in parameters):
            return None
        if sum(vector.numel() for vector in vectors) != sum(parameter.numel() for parameter in parameters):
            return None  # `backward` would leave old gradients in what else the optimizer steps
        networks = cls(stack, target_stack, parts, optimizer)
        return networks if networks.is_current(optimizer) else None

    def is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether parts, parameters and gradients are still the same, and autograd would do nothing else.

        It is asked at every update, so no Python function is called for each part.
        """
        attributes, vectors = self._attributes, _stepped(optimizer)
        held = chain(
            chain.from_iterable(map(dict.values, map(_PARAMETERS, self._with_parameters))),
            vectors,
            map(_GRAD, vectors),
            map(_GRAD, self._parameters),
        )
        return (
            list(map(id, held)) == self._ids
            and list(map(id, chain.from_iterable(map(dict.values, map(_MODULES, attributes))))) == self._children
            and list(map(type, self._parts)) == self._types
            and not any(map(any, map(_HOOKS, attributes)))
            and not any(map(vars(torch_module).__getitem__, GLOBAL_HOOKS))
            and not any(map(dict.keys(attributes[0]).__contains__, OWN_METHODS))
            and not any(map(operator.contains, attributes, repeat("forward")))
            and all(map(_REQUIRES_GRAD, self._parameters))
            and list(map(Tensor.data_ptr, self._owned)) == self._addresses
            and all(map(Tensor.is_contiguous, self._owned))
            and not any(map(_BACKWARD_HOOKS, self._parameters))
            and not any(map(_ACCUMULATE_HOOKS, self._parameters))
        )

    def backward(self, outputs: Sequence[FloatArray], grad: FloatArray) -> None:
        """Leave the gradients of the network in its parameters, in place of the gradients that were there.

        Args:
            outputs: The input of the network and the output of each layer, of the latest call.
            grad: Gradient of the loss by the last output, float32 `[B, n]`; it is overwritten.
        """
        for index in reversed(range(len(self.layers))):
            activation = self._activations[index]
            if activation is not None:
                _DERIVATIVES[activation](grad, outputs[index + 1])
            weight_grad, bias_grad, *norm_grads = self._gradient_arrays[index]
            if norm_grads:
                cast(Norm, self.layers[index][2]).backward(grad, *norm_grads)
            np.matmul(grad.T, outputs[index], out=weight_grad)
            np.add.reduce(grad, axis=0, out=bias_grad)
            if index:
                grad = grad @ self.layers[index][0].T


_networks: WeakKeyDictionary[Module, NumpyNetworks] = WeakKeyDictionary()


def _stack(network: nn.Module) -> Stack | None:
    assert isinstance(network, QNetwork)
    flat = [*network.encoder.parts]
    if len(flat) != 1 or type(flat[0]) is not Flat:
        return None
    norms: dict[nn.Module, LayerNorm] = {}
    others: list[nn.Module] = []
    for part in (*network.encoder.mlp, *network.streams, network.head):
        if type(part) is LayerNorm and others and type(others[-1]) is nn.Linear:
            norms[others[-1]] = part
        else:
            others.append(part)
    stack = numpy_layers(others)
    return None if stack is None else [(cast(nn.Linear, layer), norms.get(layer), after) for layer, after in stack]


def _arrays(stack: Stack) -> list[Layer]:
    layers: list[Layer] = []
    for layer, norm, kind in stack:
        activation = None if kind is None else NUMPY_ACTIVATIONS[kind]
        layers.append((*arrays_of(layer), activation if norm is None else Norm(norm, activation)))
    return layers


def _parameters_of(*layers: nn.Module | None) -> list[nn.Parameter]:
    found = [(layer.weight, layer.bias) for layer in layers if layer is not None]
    return cast(list[nn.Parameter], [parameter for pair in found for parameter in pair])


def _layer_parameters(stack: Stack) -> list[nn.Parameter]:
    return [parameter for layer, norm, _ in stack for parameter in _parameters_of(layer, norm)]


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.device.type == "cpu" and parameter.dtype == torch.float32


def _stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that an optimizer steps."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _is_bound(parameter: nn.Parameter, vectors: Iterable[Tensor]) -> bool:
    """Say whether a parameter and its gradient are the same piece of a vector and of the vector's gradient."""
    for vector in vectors:
        if vector is not parameter and parameter.grad is not None and vector.grad is not None:
            offset = parameter.data_ptr() - vector.data_ptr()
            if 0 <= offset < vector.nbytes and parameter.grad.data_ptr() - vector.grad.data_ptr() == offset:
                return True
    return False


def dqn_loss_in_numpy(
    networks: NumpyNetworks,
    module: Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    double_q: bool,
    huber: bool,
) -> tuple[np.floating, dict[str, Any]]:
    """Return what `dqn_loss` returns, as arrays, and leave the gradients in the parameters; see `dqn_loss`."""
    rows, actions = np.arange(len(batch["rewards"])), batch["actions"]
    next_obs = _flat(batch["next_obs"])
    next_values = layer_outputs(next_obs, networks.target_layers)[-1]
    chooser = layer_outputs(next_obs, networks.layers)[-1] if double_q else next_values
    outputs = layer_outputs(_flat(batch["obs"]), networks.layers)
    q_taken = outputs[-1][rows, actions]
    next_value = next_values[rows, chooser.argmax(1)]
    td_error = q_taken - (batch["rewards"] + batch["discounts"] * ~batch["terminated"] * next_value)
    if huber:
        slope = td_error.clip(-1, 1)
        losses = slope * (td_error - 0.5 * slope)
    else:
        slope, losses = 2 * td_error, td_error * td_error
    grad = np.zeros_like(outputs[-1])
    grad[rows, actions] = batch["weights"] * slope / np.float32(len(rows))
    networks.backward(outputs, grad)
    reported = {"qf_mean": q_taken.mean(), "qf_min": q_taken.min(), "qf_max": q_taken.max(), "td_error": td_error}
    return batch["weights"] @ losses / np.float32(len(rows)), reported


def _flat(obs: FloatArray) -> FloatArray:
    return obs.reshape(len(obs), -1).astype(np.float32, copy=False)
