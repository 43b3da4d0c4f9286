"""Helpers of `ray.rllib.utils.spaces.space_utils`: spaces and batches of nested values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from corral.compat.rllib.numpy_helpers import sorted_leaves
from corral.core.tree import leaves, map_tree

__all__ = [
    "BatchedNdArray",
    "batch",
    "clip_action",
    "convert_element_to_space_type",
    "flatten_space",
    "flatten_to_single_ndarray",
    "from_jsonable_if_needed",
    "get_base_struct_from_space",
    "get_dummy_batch_for_space",
    "get_original_space",
    "is_composite_space",
    "normalize_action",
    "to_jsonable_if_needed",
    "unbatch",
    "unsquash_action",
]


class BatchedNdArray(np.ndarray[Any, Any]):
    """An array whose first axis is a batch axis already, so that `batch` joins such arrays along it."""

    def __new__(cls, input_array: Any) -> BatchedNdArray:
        """Return a view of an array."""
        return np.asarray(input_array).view(cls)


def get_original_space(space: gym.Space[Any]) -> gym.Space[Any]:
    """Return the space that a preprocessor has kept in `original_space`, or the space itself."""
    found: gym.Space[Any] = getattr(space, "original_space", space)
    return found


def is_composite_space(space: gym.Space[Any]) -> bool:
    """Return whether a space is a Dict or a Tuple."""
    return isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple))


def flatten_space(space: gym.Space[Any]) -> list[gym.Space[Any]]:
    """Return the parts of a nested space that are neither Dict nor Tuple; keys of a Dict are sorted."""
    return sorted_leaves(space)


def get_base_struct_from_space(space: Any) -> Any:
    """Return dicts and tuples of spaces in the place of Dict and Tuple spaces."""
    if isinstance(space, gym.spaces.Dict):
        return {key: get_base_struct_from_space(part) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(get_base_struct_from_space(part) for part in space)
    return space


def get_dummy_batch_for_space(
    space: gym.Space[Any],
    batch_size: int = 32,
    *,
    fill_value: float | str = 0.0,
    time_size: int | None = None,
    time_major: bool = False,
    one_hot_discrete: bool = False,
) -> Any:
    """Return a batch of values of a nested space: all `fill_value`, or `"random"` ones.

    Args:
        space: The space.
        batch_size: Number of values B; 0 means one value without a batch axis.
        fill_value: Number, or `"random"`.
        time_size: Number of time steps T; the arrays are then `[B, T, ...]`.
        time_major: Whether they are `[T, B, ...]`.
        one_hot_discrete: Whether integers have the place of one-hot vectors, filled as all other parts are.
    """
    axes: tuple[int, ...] = (batch_size,) if batch_size else ()
    if time_size is not None:
        axes = (time_size, batch_size) if time_major else (batch_size, time_size)

    def fill(leaf: gym.Space[Any]) -> Any:
        if one_hot_discrete and isinstance(leaf, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            size = int(leaf.n if isinstance(leaf, gym.spaces.Discrete) else leaf.nvec.sum())
            leaf = gym.spaces.Box(0.0, 1.0, (size,), np.float32)
        if fill_value == "random":
            rows = np.asarray([leaf.sample() for _ in range(int(np.prod(axes)))])
            return rows.reshape((*axes, *(leaf.shape or ())))
        return np.full((*axes, *(leaf.shape or ())), fill_value, dtype=leaf.dtype)

    return map_tree(fill, get_base_struct_from_space(space))


def flatten_to_single_ndarray(input_: Any) -> NDArray[Any]:
    """Return all parts of a nested value, flattened and joined; an array or a number is returned unchanged.

    The parts of a dict are joined in the order of its sorted keys.
    """
    if not isinstance(input_, (dict, list, tuple)):
        return cast("NDArray[Any]", input_)
    return np.concatenate([np.ravel(part) for part in sorted_leaves(input_)])


def batch(list_of_structs: Sequence[Any], *, individual_items_already_have_batch_dim: bool | str = False) -> Any:
    """Return one nested value of stacked arrays from a list of nested values.

    Args:
        list_of_structs: The values, all of one structure.
        individual_items_already_have_batch_dim: Whether the arrays are joined along their first axis instead; `"auto"`
            means if they are `BatchedNdArray`.

    Raises:
        ValueError: The list is empty.
    """
    if not list_of_structs:
        raise ValueError("batch: the list is empty.")
    first, *others = list_of_structs
    joins = individual_items_already_have_batch_dim
    if joins == "auto":
        joins = isinstance(leaves(first)[0], BatchedNdArray)
    return map_tree(lambda *parts: np.concatenate(parts) if joins else np.stack(parts), first, *others)


def unbatch(batches_struct: Any) -> list[Any]:
    """Return the rows of nested arrays `[B, ...]` as a list of B nested values."""
    return [map_tree(lambda part, i=i: part[i], batches_struct) for i in range(len(leaves(batches_struct)[0]))]


def clip_action(action: Any, action_space: Any) -> Any:
    """Return nested actions with the parts of Box spaces clipped to their bounds."""

    def clip(part: Any, space: Any) -> Any:
        return np.clip(part, space.low, space.high) if isinstance(space, gym.spaces.Box) else part

    return map_tree(clip, action, get_base_struct_from_space(action_space))


def unsquash_action(action: Any, action_space_struct: Any) -> Any:
    """Return nested actions with the parts of bounded Box spaces stretched from [-1, 1] to their bounds.

    Parts of bounded Box spaces of integers count from 0, and begin at the lower bound then.
    """

    def stretch(part: Any, space: Any) -> Any:
        if not (isinstance(space, gym.spaces.Box) and space.is_bounded()):
            return part
        if space.dtype not in (np.float32, np.float64):
            return space.low + part if np.issubdtype(space.dtype, np.integer) else part
        values = space.low + (np.asarray(part) + 1.0) * (space.high - space.low) / 2.0
        return np.clip(values, space.low, space.high).astype(space.dtype)

    return map_tree(stretch, action, get_base_struct_from_space(action_space_struct))


def normalize_action(action: Any, action_space_struct: Any) -> Any:
    """Return nested actions with the parts of bounded Box spaces shrunk from their bounds to [-1, 1]."""

    def shrink(part: Any, space: Any) -> Any:
        if not (isinstance(space, gym.spaces.Box) and space.is_bounded() and space.dtype in (np.float32, np.float64)):
            return part
        return (np.asarray(part) - space.low) * 2.0 / (space.high - space.low) - 1.0

    return map_tree(shrink, action, get_base_struct_from_space(action_space_struct))


def convert_element_to_space_type(element: Any, sampled_element: Any) -> Any:
    """Return a nested value with the types of a sample of the space: arrays of its dtype, or Python's numbers."""

    def convert(part: Any, sample: Any) -> Any:
        if isinstance(sample, np.ndarray):
            return np.asarray(part, dtype=sample.dtype)
        return type(sample)(part) if isinstance(sample, (int, float, np.generic)) else part

    return map_tree(convert, element, sampled_element)


def to_jsonable_if_needed(sample: Any, space: gym.Space[Any]) -> Any:
    """Return a nested value in a form for JSON, if its space is composite."""
    return space.to_jsonable([sample]) if is_composite_space(space) else sample


def from_jsonable_if_needed(sample: Any, space: gym.Space[Any]) -> Any:
    """Return what `to_jsonable_if_needed` was given."""
    return space.from_jsonable(sample)[0] if is_composite_space(space) else sample
