"""Helpers of `ray.rllib.utils.numpy`: functions on arrays."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from corral.compat.rllib.constants import SMALL_NUMBER
from corral.core.tree import map_tree

__all__ = [
    "convert_to_numpy",
    "fc",
    "flatten_inputs_to_1d_tensor",
    "huber_loss",
    "l2_loss",
    "make_action_immutable",
    "one_hot",
    "one_hot_multidiscrete",
    "relu",
    "sigmoid",
    "softmax",
]


def _array(value: Any) -> Any:
    """Return a torch tensor as an array, and anything else unchanged; torch is not imported for it."""
    torch = sys.modules.get("torch")
    return value.detach().cpu().numpy() if torch is not None and isinstance(value, torch.Tensor) else value


def convert_to_numpy(x: Any, reduce_type: bool = True) -> Any:
    """Return nested data with arrays in the place of tensors; a tensor without axes becomes a number.

    Args:
        x: Nested tensors, arrays and other values.
        reduce_type: Whether 64-bit floats and ints of arrays become 32-bit ones.
    """

    def convert(item: Any) -> Any:
        found = _array(item)
        if found is not item and found.ndim == 0:
            return found.item()
        if reduce_type and isinstance(found, np.ndarray) and found.dtype.kind in "fi":
            return found.astype(np.float32 if found.dtype.kind == "f" else np.int32)
        return found

    return _map(convert, x)


def _map(fn: Any, x: Any) -> Any:
    if isinstance(x, list):
        return [_map(fn, part) for part in x]
    return map_tree(lambda leaf: _map(fn, leaf) if isinstance(leaf, list) else fn(leaf), x)


def sorted_leaves(tree: Any) -> list[Any]:
    """Return the parts of nested values or spaces; dicts in the order of their sorted keys, as RLlib joins them."""
    if isinstance(tree, Mapping):
        tree = [tree[key] for key in sorted(tree)]
    if not isinstance(tree, (list, tuple, gym.spaces.Tuple)):
        return [tree]
    return [leaf for part in tree for leaf in sorted_leaves(part)]


def softmax(x: Any, axis: int = -1, epsilon: float | None = None) -> NDArray[Any]:
    """Return the softmax along an axis, at least `epsilon` everywhere (1e-6 if it is not given)."""
    values = np.asarray(x)
    powers = np.exp(values - values.max(axis=axis, keepdims=True))
    found: NDArray[Any] = powers / powers.sum(axis=axis, keepdims=True)
    return cast("NDArray[Any]", np.maximum(found, epsilon or SMALL_NUMBER))


def one_hot(
    x: Any, depth: int = 0, on_value: float = 1.0, off_value: float = 0.0, dtype: Any = np.float32
) -> NDArray[Any]:
    """Return `[..., depth]` one-hot vectors of the integers or bools `x` of shape `[...]`.

    Args:
        x: Integers; bools have the depth 2. Negative ones count from the last class.
        depth: Number of classes; 0 means the largest integer plus one.
        on_value: Value at the place of the integer.
        off_value: Value at the other places.
        dtype: Type of the numbers.

    Raises:
        AssertionError: An integer is not in `[-depth, depth)`.
    """
    values = np.asarray(_array(x))
    if values.dtype == np.bool_:
        values, depth = values.astype(np.int64), 2
    depth = depth or int(values.max()) + 1
    assert values.max() < depth, f"one_hot: the largest value {values.max()} is not less than the depth {depth}"
    assert values.min() >= -depth, f"one_hot: the smallest value {values.min()} is less than {-depth}"
    return np.where(np.arange(depth) == (values % depth)[..., None], on_value, off_value).astype(dtype)


def one_hot_multidiscrete(x: Any, depths: Sequence[int]) -> NDArray[Any]:
    """Return the one-hot vectors of the columns of `x`, joined along the last axis."""
    columns = np.moveaxis(np.asarray(_array(x)), -1, 0)
    return np.concatenate([one_hot(column, depth) for column, depth in zip(columns, depths, strict=True)], axis=-1)


def relu(x: NDArray[Any], alpha: float = 0.0) -> NDArray[Any]:
    """Return `x` where it is positive, and `alpha` times `x` elsewhere."""
    return cast("NDArray[Any]", np.maximum(x, alpha * x))


def sigmoid(x: NDArray[Any], derivative: bool = False) -> Any:
    """Return the logistic function of `x`; with `derivative`, its slope where `x` is the value of the function."""
    return x * (1 - x) if derivative else 1 / (1 + np.exp(-x))


def huber_loss(x: NDArray[Any], delta: float = 1.0) -> NDArray[Any]:
    """Return Huber's loss: quadratic up to `delta`, linear beyond (https://en.wikipedia.org/wiki/Huber_loss)."""
    size = np.abs(x)
    return cast("NDArray[Any]", np.where(size < delta, 0.5 * np.square(x), delta * (size - 0.5 * delta)))


def l2_loss(x: NDArray[Any]) -> Any:
    """Return half the sum of squares."""
    return 0.5 * np.sum(np.square(x))


def fc(x: Any, weights: Any, biases: Any = None, framework: str | None = None) -> Any:
    """Return the output of a dense layer; torch's weights `[out, in]` are transposed if only that fits `x`."""
    inputs, matrix = _array(x), _array(weights)
    if framework == "torch" and inputs.shape[1] != matrix.shape[0]:
        matrix = matrix.T
    return inputs @ matrix + (0.0 if biases is None else _array(biases))


def make_action_immutable(obj: Any) -> Any:
    """Return an array that cannot be written to, or a read-only view of a dict; anything else is returned."""
    if isinstance(obj, np.ndarray):
        obj.setflags(write=False)
        return obj
    return MappingProxyType(obj) if isinstance(obj, dict) else obj


def flatten_inputs_to_1d_tensor(
    inputs: Any, spaces_struct: Any = None, time_axis: bool = False, batch_axis: bool = True
) -> NDArray[Any]:
    """Return nested inputs as one vector per row: parts of Discrete spaces one-hot, the rest flattened.

    The parts of a dict are joined in the order of its sorted keys.

    Args:
        inputs: Nested arrays `[B, T, ...]`, where T is there with `time_axis` and B with `batch_axis`.
        spaces_struct: The spaces of the parts, in the same structure; `None` means that all parts are numbers.
        time_axis: Whether there is a time axis.
        batch_axis: Whether there is a batch axis.
    """
    num_axes = int(time_axis) + int(batch_axis)
    parts = [np.asarray(_array(part)) for part in sorted_leaves(inputs)]
    spaces = [None] * len(parts) if spaces_struct is None else sorted_leaves(spaces_struct)
    rows = []
    for part, space in zip(parts, spaces, strict=True):
        if isinstance(space, gym.spaces.Discrete):
            part = one_hot(part, int(space.n))
        elif isinstance(space, gym.spaces.MultiDiscrete):
            part = one_hot_multidiscrete(part.reshape(*part.shape[:num_axes], -1), np.ravel(space.nvec).tolist())
        rows.append(part.reshape(*part.shape[:num_axes], -1).astype(np.float32))
    return np.concatenate(rows, axis=-1)
