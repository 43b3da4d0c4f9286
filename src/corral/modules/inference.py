"""Policies while sampling: NumPy computes stacks of small linear layers, torch everything else.

Each torch call costs about 5 microseconds, more than the arithmetic of a two-layer policy on 8 observations takes.
`benchmarks/` measures both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from corral.core.action_masks import MASK_KEY
from corral.core.spaces import space_tree
from corral.core.tree import Tree, map_tree, named_leaves, num_rows
from corral.modules.distributions import ILLEGAL
from corral.modules.memory import initial_states
from corral.modules.module import Module
from corral.modules.networks import MAX_LOG_STD, MIN_LOG_STD, FloatArray, LogStdClamp

Activation = Callable[[FloatArray], Any]
Layer = tuple[FloatArray, FloatArray, Activation | None]
"""Weight `[in, out]`, bias `[out]`, and the function that is applied in place to the output, or `None`."""

# In wider layers the arithmetic dominates, and torch's kernels and threads are faster.
MAX_NUMPY_WIDTH = 512


def _clamp_log_std(dist_inputs: FloatArray) -> None:
    log_std = dist_inputs[..., dist_inputs.shape[-1] // 2 :]
    log_std.clip(MIN_LOG_STD, MAX_LOG_STD, out=log_std)  # other bounds are for torch


NUMPY_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
    LogStdClamp: _clamp_log_std,
}


class Inference:
    """Computes a module's policy on batches of observations while sampling.

    Args:
        module: The module; its weights are read at construction and at every `refresh`.

    Attributes:
        backend: `"numpy"` or `"torch"`.
        num_loads: How often weights were loaded.
    """

    def __init__(self, module: Module) -> None:
        """Choose the backend and read the weights."""
        self.module = module.eval()  # no dropout, and fixed batch statistics
        policy = module.policy_layers()
        layers = None if policy is None else numpy_layers(policy[0])
        self._stack = None if policy is None or layers is None else (layers, policy[1])
        # Layers with a method `numpy_form` are no stack, such as residual blocks; noise of their weights is for torch.
        self._blocks = None if policy is None or layers is not None or not _has_numpy_form(policy[0]) else policy
        self._keys = _keys_of_leaf(space_tree(module.features_space))
        self._steps = module.numpy_steps() if module.has_memory() else None
        self.backend = "numpy" if self._stack or self._blocks or self._steps else "torch"
        self._appended: FloatArray | None = None
        self._layers: list[Layer] = []
        # Each layer of the stack; plain layers with arrays in the memory of their parameters, which does not move here.
        self._sources = [
            (
                layer,
                (layer.weight.detach().numpy(), layer.bias.detach().numpy()) if type(layer) is nn.Linear else None,
                None if activation is None else NUMPY_ACTIVATIONS[activation],
            )
            for layer, activation in (self._stack[0] if self._stack else ())
        ]
        self._perturbed: Perturbed | None = None
        self._explores, self._is_noisy = True, module.is_noisy
        self._weights = {name: value.numpy() for name, value in module.acting_weights().items()}
        self.num_loads = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the weights of the module again after a change."""
        if self._stack is not None:
            self._layers = [
                (*(affine_arrays(layer) if arrays is None else (arrays[0].T.copy(), arrays[1].copy())), activation)
                for layer, arrays, activation in self._sources
            ]
            self._appended = None if self._stack[1] is None else self._stack[1].detach().numpy().copy()
        if self._steps is not None:
            self._steps = self.module.numpy_steps()
        if self._blocks is not None:
            self._functions = [_numpy_function(layer) for layer in self._blocks[0] if type(layer) is not nn.Identity]
            self._appended = None if self._blocks[1] is None else self._blocks[1].detach().numpy().copy()
        if self._perturbed is not None:
            self._perturbed.refresh(self._layers)

    def load_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Copy weights into the module by name, at least the names of `Module.acting_weights`, and refresh."""
        for name, array in self._weights.items():
            np.copyto(array, weights[name])
        self.num_loads += 1
        self.refresh()

    def begin_sample(self, explore: bool, rng: np.random.Generator) -> None:
        """Draw new noise for noisy layers; without exploration, turn it off, and the noise of `perturb` too."""
        self._explores = explore
        if self._is_noisy:
            if explore:
                self.module.draw_noise(rng)
            else:
                self.module.silence_noise()
            self.refresh()

    def perturb(self, stddev: float, rows: NDArray[np.bool_], rng: np.random.Generator) -> None:
        """Add noise to the weights from now on, different noise for each row of a batch.

        Args:
            stddev: Standard deviation of the noise.
            rows: Rows that get new noise, bool `[N]`; the noise of other rows is only rescaled.
            rng: Generator for the noise.
        """
        if self._perturbed is None or self._perturbed.num_rows != len(rows):
            kind = PerturbedModule if self._stack is None else PerturbedLayers
            self._perturbed, rows = kind(len(rows), self.module), np.ones_like(rows)
        self._perturbed.draw(stddev, rows, rng, self._layers)

    def get_noise(self) -> dict[str, Any] | None:
        """Return the noise of `perturb` as plain data, or `None` if there is none."""
        if self._perturbed is None:
            return None
        noise = self._perturbed
        arrays = [array.copy() for array in noise.arrays]
        return {"num_rows": noise.num_rows, "stddev": noise.stddev, "arrays": arrays}

    def set_noise(self, state: Mapping[str, Any] | None) -> None:
        """Use the noise that `get_noise` returned.

        Raises:
            ValueError: It is the noise of other layers.
        """
        if state is None:
            self._perturbed = None
            return
        kind = PerturbedModule if self._stack is None else PerturbedLayers
        noise, num_rows = kind(int(state["num_rows"]), self.module), int(state["num_rows"])
        noise.draw(float(state["stddev"]), np.zeros(num_rows, np.bool_), np.random.default_rng(0), self._layers)
        for array, saved in zip(noise.arrays, state["arrays"], strict=True):
            if array.shape != saved.shape or array.dtype != saved.dtype:
                raise ValueError(f"noise of shape {array.shape} cannot become {saved.shape}")
            np.copyto(array, saved)
        self._perturbed = noise

    def step(self, obs: Tree, states: Tree) -> tuple[FloatArray, Tree]:
        """Return `dist_inputs`, float32 `[N, D]`, and the next states of a module with memory, for trees of `[N, ...]`.

        The next states are new arrays, with keys in the order of `states`.
        """
        if self._steps is not None:
            return self._steps(obs, states)
        policy: Any = self.module.policy
        with torch.inference_mode():  # copies of the states, which a module may change in place
            outputs, after = policy(map_tree(_as_tensor, obs), map_tree(torch.tensor, states))
        return outputs.detach().numpy(), map_tree(lambda _, leaf: leaf.detach().numpy(), states, after)

    def __call__(self, obs: Tree, *, perturbed: bool = True) -> FloatArray:
        """Map observations, a tree of arrays `[N, ...]`, to `dist_inputs`, float32 `[N, D]`.

        Args:
            obs: Observations.
            perturbed: Whether to use the noise of `perturb`. It is used only for batches of N rows, and only if
                `begin_sample` enabled exploration.
        """
        noise = self._perturbed if perturbed and self._explores else None
        if self._stack is None and (noise is not None or self._blocks is None):
            with torch.inference_mode():
                tensors = map_tree(_as_tensor, obs)
                if noise is not None and noise.num_rows == num_rows(obs):
                    outputs: FloatArray = noise(tensors)
                else:
                    outputs = self.module.policy(tensors).numpy()
            return outputs
        leaf = obs
        for key in self._keys:
            leaf = leaf[key]
        x: FloatArray = leaf.reshape(leaf.shape[0], -1).astype(np.float32, copy=False)
        if self._blocks is not None:
            for function in self._functions:
                x = function(x)
        else:
            x = noise(x) if noise is not None and noise.num_rows == len(x) else layer_outputs(x, self._layers)[-1]
        if self._appended is not None:
            x = np.concatenate([x, np.broadcast_to(self._appended, (len(x), len(self._appended)))], -1)
        if self.module.has_action_mask:
            illegal = obs[MASK_KEY].reshape(x.shape) == 0  # as `Module.mask_outputs` does
            np.copyto(x, ILLEGAL, where=illegal & ~illegal.all(-1, keepdims=True))
        return x


class RowStates:
    """The states of a module with memory for the rows that act together.

    Attributes:
        states: State of each row after its last step, a tree of `[N, ...]`; replaced by new arrays at each step.
        before: States in which the latest observations were seen, where episodes began the initial state.
        action_state: Name of the part of a state that is the latest action; see `Module.ACTION_STATE`.
    """

    def __init__(self, module: Module, num_rows: int) -> None:
        """Begin with the initial state in all rows."""
        self._initial: Tree = map_tree(lambda leaf: leaf.numpy(), initial_states(module, 1))
        self.action_state = module.ACTION_STATE
        self.states: Tree = map_tree(lambda leaf: np.repeat(leaf, num_rows, 0), self._initial)
        self.before = self.states

    def begin(self, begins: NDArray[np.bool_]) -> None:
        """Return to the initial state where episodes begin, bool `[N]`."""
        if np.count_nonzero(begins):
            self.states = map_tree(
                lambda leaf, first: np.where(begins.reshape(-1, *[1] * (leaf.ndim - 1)), first, leaf),
                self.states,
                self._initial,
            )

    def step(self, inference: Inference, obs: Tree) -> FloatArray:
        """Return `dist_inputs`, float32 `[N, D]`, for observations `[N, ...]`, and keep the next states."""
        self.before = self.states
        outputs, self.states = inference.step(obs, self.before)
        return outputs

    def note_actions(self, actions: NDArray[Any], rows: Any = slice(None)) -> None:
        """Write the module actions of some rows into their states, for a module that needs them there."""
        assert self.action_state is not None
        latest = self.states[self.action_state].copy()
        latest[rows] = actions
        self.states = {**self.states, self.action_state: latest}

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Undo the last step in the rows that did not act; `rows`, bool `[N]`, says which did."""
        self.states = map_tree(
            lambda after, before: np.where(rows.reshape(-1, *[1] * (after.ndim - 1)), after, before),
            self.states,
            self.before,
        )

    def resize(self, size: int) -> None:
        """Add rows at the end, up to `size`, with the initial state."""
        more = size - num_rows(self.states)
        self.states = map_tree(
            lambda leaf, first: np.concatenate([leaf, np.repeat(first, more, 0)]), self.states, self._initial
        )

    def allocate(self, num_rows: int) -> Tree:
        """Return a column for the states of rows of observations, a tree of zeros `[num_rows, N, ...]`."""
        return map_tree(lambda leaf: np.zeros((num_rows, *leaf.shape), leaf.dtype), self.states)

    def check(self, states: Tree, size: int) -> None:
        """Check that states are like the module's, for `size` rows: a tree of `[size, ...]`.

        Raises:
            ValueError: Names the part that differs.
        """
        expected = {
            name: f"{leaf.dtype}{[size, *leaf.shape[1:]]}" for name, leaf in named_leaves(self._initial, "state")
        }
        given = {name: f"{leaf.dtype}{[*leaf.shape]}" for name, leaf in named_leaves(states, "state")}
        for name in {**expected, **given}:
            if expected.get(name) != given.get(name):
                raise ValueError(f"{name} is {given.get(name, 'missing')} and must be {expected.get(name, 'left out')}")


class ActingWeights:
    """The weights of a module that runners need to act, by name: views on the CPU, copies from other devices.

    Collecting a module's `state_dict` takes longer than copying the weights of a small net, so it is done again only
    when a parameter or buffer has moved in memory or was replaced, or if the weights are not the module's own memory.
    """

    def __init__(self, module: Module) -> None:
        """Keep the module."""
        self._module = module
        self._tensors = [held for part in module.modules() for held in (part._parameters, part._buffers) if held]
        self._arrays: dict[str, NDArray[Any]] = {}
        self._places: list[int] = []

    def get(self) -> dict[str, NDArray[Any]]:
        """Return the arrays; copy views before the next update. The dict may be kept."""
        places = [tensor.data_ptr() for held in self._tensors for tensor in held.values() if tensor is not None]
        if places != self._places:
            weights = self._module.acting_weights()
            self._arrays = {name: value.detach().cpu().numpy() for name, value in weights.items()}
            own = set(places)
            are_views = all(value.device.type == "cpu" and value.data_ptr() in own for value in weights.values())
            self._places = places if are_views else []
        return dict(self._arrays)


def layer_outputs(x: FloatArray, layers: Sequence[Layer]) -> list[FloatArray]:
    """Return the input `[..., B, in]` and the output of each layer.

    The weights of a layer may have the axes before `B` too: each entry of these axes then has weights of its own.
    """
    outputs = [x]
    for weight, bias, activation in layers:
        x = x @ weight
        x += bias
        if activation is not None:
            activation(x)
        outputs.append(x)
    return outputs


class PerturbedLayers:
    """A stack of layers with noise in their weights, different noise for each row.

    Attributes:
        num_rows: Number N of rows.
        stddev: Standard deviation of the noise.
    """

    def __init__(self, num_rows: int, module: Module) -> None:
        """Set N; `draw` sets the layers."""
        self.num_rows = num_rows
        self._layers: Sequence[Layer] = ()
        self._noise: list[tuple[FloatArray, FloatArray]] = []  # [N, in, out] and [N, 1, out]
        self._stacked: list[Layer] = []
        self._stale = np.ones(num_rows, np.bool_)  # rows whose noise, standard deviation or weights have changed
        self.stddev = 0.0

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """Noise of standard deviation 1 of each weight and bias, `[N, ...]`."""
        return [noise for pair in self._noise for noise in pair]

    def draw(self, stddev: float, rows: NDArray[np.bool_], rng: np.random.Generator, layers: Sequence[Layer]) -> None:
        """Draw noise for some rows, and set the standard deviation for all."""
        if not self._noise:
            shapes = [((self.num_rows, *weight.shape), (self.num_rows, 1, *bias.shape)) for weight, bias, _ in layers]
            self._noise = [(np.zeros(a, np.float32), np.zeros(b, np.float32)) for a, b in shapes]
            self._stacked = [
                (np.empty(a, np.float32), np.empty(b, np.float32), activation)
                for (a, b), (_, _, activation) in zip(shapes, layers, strict=True)
            ]
        for pair in self._noise:
            for noise in pair:
                noise[rows] = rng.standard_normal((int(rows.sum()), *noise.shape[1:]), dtype=np.float32)
        self._stale |= rows if stddev == self.stddev else True
        self.stddev = stddev
        self._layers = layers

    def refresh(self, layers: Sequence[Layer]) -> None:
        """Use new weights from the next call on."""
        self._layers = layers
        self._stale[:] = True

    def __call__(self, x: FloatArray) -> FloatArray:
        """Return the outputs `[N, D]` for `[N, in]`."""
        if self._stale.any():
            rows, scale = self._stale, np.float32(self.stddev)
            for layer, noises, stacked in zip(self._layers, self._noise, self._stacked, strict=True):
                for plain, noise, perturbed in zip(layer[:2], noises, stacked[:2], strict=True):
                    perturbed[rows] = plain + scale * noise[rows]
            self._stale[:] = False
        return layer_outputs(x[:, None, :], self._stacked)[-1][:, 0]


class PerturbedModule:
    """The policy of any module with noise in its weights, different noise for each row.

    Attributes:
        num_rows: Number N of rows.
        stddev: Standard deviation of the noise.
    """

    def __init__(self, num_rows: int, module: Module) -> None:
        """Set N and the module; every call reads the weights of the module."""
        self.num_rows = num_rows
        self._policy = _Policy(module)
        acting = module.acting_weights()
        self._noise = {
            f"module.{name}": torch.zeros(num_rows, *parameter.shape)
            for name, parameter in module.named_parameters()
            if name in acting
        }
        self.stddev = 0.0

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """Noise of standard deviation 1 of each parameter, `[N, ...]`, as views."""
        return [noise.numpy() for noise in self._noise.values()]

    def draw(self, stddev: float, rows: NDArray[np.bool_], rng: np.random.Generator, layers: Sequence[Layer]) -> None:
        """Draw noise for some rows, and set the standard deviation for all."""
        for noise in self._noise.values():
            drawn = rng.standard_normal((int(rows.sum()), *noise.shape[1:]), dtype=np.float32)
            noise[torch.from_numpy(rows)] = torch.from_numpy(drawn)
        self.stddev = stddev

    def refresh(self, layers: Sequence[Layer]) -> None:
        """Do nothing: the weights are read at every call."""

    def __call__(self, obs: Tree) -> FloatArray:
        """Return the outputs `[N, D]` for tensors `[N, ...]`."""
        own = dict(self._policy.named_parameters())
        weights = {name: own[name].detach() + self.stddev * noise for name, noise in self._noise.items()}

        def one(row_weights: dict[str, torch.Tensor], row: Tree) -> torch.Tensor:
            batch = map_tree(lambda leaf: leaf.unsqueeze(0), row)
            # Where two networks share a layer, torch would put back wrong weights with `tie_weights=True`.
            outputs: torch.Tensor = torch.func.functional_call(self._policy, row_weights, (batch,), tie_weights=False)
            return outputs[0]

        outputs: FloatArray = torch.func.vmap(one)(weights, obs).numpy()
        return outputs


Perturbed = PerturbedLayers | PerturbedModule


class _Policy(nn.Module):
    """A module whose `forward` is the policy of another module, so that torch can call it with other weights."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, obs: Tree) -> torch.Tensor:
        return self.module.policy(obs)


def _as_tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def affine_arrays(layer: Any) -> tuple[FloatArray, FloatArray]:
    """Return copies of the weight `[in, out]` and bias `[out]` of a layer that computes a linear function."""
    weight, bias = layer.affine() if hasattr(layer, "affine") else (layer.weight, layer.bias)
    return weight.detach().numpy().T.copy(), bias.detach().numpy().copy()


Stack = list[tuple[nn.Module, type[nn.Module] | None]]
"""Layers that compute a linear function, each with the type of the activation after it, or `None`."""


def numpy_layers(layers: Sequence[nn.Module]) -> Stack | None:
    """Return each linear layer with the activation after it, or `None` if NumPy should not compute the layers."""
    stack: Stack = []
    for layer in layers:
        if type(layer) is nn.Linear and layer.bias is not None and layer.out_features <= MAX_NUMPY_WIDTH:
            stack.append((layer, None))
        elif callable(getattr(layer, "affine", None)):  # of normalisations of torch it is a bool
            stack.append((layer, None))
        elif type(layer) is nn.Identity:
            continue
        elif isinstance(layer, LogStdClamp) and (layer.low, layer.high) != (MIN_LOG_STD, MAX_LOG_STD):
            return None
        elif type(layer) in NUMPY_ACTIVATIONS and stack and stack[-1][1] is None:
            stack[-1] = (stack[-1][0], type(layer))
        else:
            return None
    return stack


def _keys_of_leaf(tree: Tree) -> list[Any]:
    """Return the keys that lead to the first leaf of a tree of spaces: to the flat observation that a stack reads."""
    keys = []
    while isinstance(tree, (dict, tuple)):
        keys.append(next(iter(tree)) if isinstance(tree, dict) else 0)
        tree = tree[keys[-1]]
    return keys


def _has_numpy_form(layers: Sequence[nn.Module]) -> bool:
    """Return whether NumPy should compute layers of which some have a method `numpy_form`."""
    others = [layer for layer in layers if not hasattr(type(layer), "numpy_form")]
    parts = [part for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)]
    is_narrow = all(part.out_features <= MAX_NUMPY_WIDTH for part in parts)
    return len(others) < len(layers) and is_narrow and numpy_layers(others) is not None


def _numpy_function(layer: Any) -> Callable[[FloatArray], FloatArray]:
    """Return a layer by its weights of now as a function of float32 arrays `[B, in]`."""
    if hasattr(layer, "numpy_form"):
        form: Callable[[FloatArray], FloatArray] = layer.numpy_form()
        return form
    if (activation := NUMPY_ACTIVATIONS.get(type(layer))) is not None:
        return partial(_apply, activation)
    return partial(_apply_affine, *affine_arrays(layer))


def _apply(activation: Activation, x: FloatArray) -> FloatArray:
    activation(x)
    return x


def _apply_affine(weight: FloatArray, bias: FloatArray, x: FloatArray) -> FloatArray:
    outputs: FloatArray = x @ weight
    outputs += bias
    return outputs
