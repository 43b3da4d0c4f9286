"""Indexing of data with a lookback buffer in front, for the getters and setters of episodes.

The data of an episode are `[E, ...]`: E entries, of which the first `lookback` are from before the episode. Index 0 is
the first entry after the lookback buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.tree import Tree, leaves, map_tree

Indices = int | slice | Sequence[int] | None
Positions = int | slice | NDArray[np.int64]


class Reading(TypedDict, total=False):
    """How a getter of an episode takes its indices; see `SingleAgentEpisode`."""

    neg_index_as_lookback: bool
    fill: Any


class Writing(TypedDict, total=False):
    """Which entries a setter of an episode overwrites; see `SingleAgentEpisode`."""

    at_indices: Indices
    neg_index_as_lookback: bool


def positions(
    indices: Indices, num_entries: int, lookback: int, *, neg_index_as_lookback: bool = False, clip: bool = True
) -> Positions:
    """Return the positions of indices among all entries, lookback included.

    Args:
        indices: An int, a slice, a sequence of ints, or `None` for all entries after the lookback.
        num_entries: Number of all entries E.
        lookback: Number of entries before index 0.
        neg_index_as_lookback: Whether -1 is the last entry of the lookback, rather than the last entry of all.
        clip: Whether slices stop at the first and the last entry; otherwise their positions may be outside.

    Returns:
        An int for an int, a slice for a clipped slice, otherwise an array `[K]`. All but the clipped slice may be
        outside `[0, num_entries)`.
    """
    from_end = 0 if neg_index_as_lookback else num_entries - lookback

    def position(index: int) -> int:
        return lookback + (index if index >= 0 else index + from_end)

    if indices is None:
        return slice(lookback, num_entries)
    if isinstance(indices, (int, np.integer)):
        return position(int(indices))
    if not isinstance(indices, slice):
        return np.array([position(int(index)) for index in indices], np.int64)
    step = 1 if indices.step is None else int(indices.step)
    first, past = (lookback, num_entries) if step > 0 else (num_entries - 1, lookback - 1)
    start = first if indices.start is None else position(int(indices.start))
    stop = past if indices.stop is None else position(int(indices.stop))
    if not clip:
        return np.arange(start, stop, step)
    low, high = (0, num_entries) if step > 0 else (-1, num_entries - 1)
    start, stop = min(max(start, low), high), min(max(stop, low), high)
    if start < 0:  # reversed, and before the first entry
        return slice(0, 0)
    return slice(start, None if stop < 0 else stop, step)


def _outside(where: Positions, num_entries: int) -> NDArray[np.bool_]:
    if isinstance(where, slice):
        return np.zeros(len(range(num_entries)[where]), np.bool_)
    where = np.asarray(where)
    return (where < 0) | (where >= num_entries)


def pick(data: Tree, where: Positions, fill: Any = None) -> Tree:
    """Return entries by position: views for an int or a slice, copies for a list.

    Args:
        data: Tree of `[E, ...]`.
        where: Positions as `positions` returns them.
        fill: Value at positions outside; `None` refuses such positions.

    Raises:
        IndexError: A position is outside, and there is no `fill`.
    """
    num_entries = len(leaves(data)[0])
    outside = _outside(where, num_entries)
    if not outside.any():
        return map_tree(lambda leaf: leaf[where], data)
    if fill is None:
        raise IndexError(
            f"index out of range: there are {num_entries} entries, lookback included. Give fill=... to pad."
        )

    def filled(leaf: NDArray[Any]) -> NDArray[Any]:
        # The dtype stays unless the fill value would change in it.
        exact = np.isscalar(fill) and np.asarray(fill).astype(leaf.dtype) == fill
        dtype = leaf.dtype if exact else np.result_type(leaf.dtype, np.asarray(fill).dtype)
        padded: NDArray[Any] = np.full((*outside.shape, *leaf.shape[1:]), fill, dtype)
        padded[~outside] = leaf[np.asarray(where)[~outside]]
        return padded

    return map_tree(filled, data)


def overwrite(data: Tree, where: Positions, new: Tree) -> None:
    """Write new entries by position, in place; nothing is written if anything does not fit.

    Args:
        data: Tree of `[E, ...]`.
        where: Positions as `positions` returns them.
        new: Tree of the same nesting: one entry for an int, otherwise `[K, ...]`.

    Raises:
        IndexError: The new data have another size or dtype, or a position is outside.
    """
    num_entries = len(leaves(data)[0])
    outside = _outside(where, num_entries)
    if outside.any():
        raise IndexError(f"index out of range: there are {num_entries} entries, lookback included.")

    def check(leaf: NDArray[Any], values: Any) -> NDArray[Any]:
        array: NDArray[Any] = np.asarray(values)
        wanted = (*outside.shape, *leaf.shape[1:])
        if array.shape != wanted:
            raise IndexError(f"new data must be {leaf.dtype} {list(wanted)}, got {describe(array)}.")
        if array.size and not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            raise IndexError(f"new data must be {leaf.dtype}; {array.dtype} cannot be converted to it without loss.")
        return array

    map_tree(lambda leaf, values: leaf.__setitem__(where, values), data, map_tree(check, data, new))


def one_hot(data: Tree, space: spaces.Space[Any] | None, name: str) -> Tree:
    """Return data with every Discrete and MultiDiscrete part of a space as float32 one-hot vectors.

    Args:
        data: Tree of `[E, ...]`.
        space: Space of one entry.
        name: Name of the space, for the message.

    Raises:
        ValueError: The space is `None`.
    """
    if space is None:
        raise ValueError(f"one_hot_discrete=True needs the episode's {name}: give it to the constructor.")
    if isinstance(space, spaces.Dict):
        return {key: one_hot(data[key], part, name) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(one_hot(leaf, part, name) for leaf, part in zip(data, space, strict=True))
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[data - space.start]
    if isinstance(space, spaces.MultiDiscrete):
        flat = (data - space.start).reshape(len(data), -1)
        parts = [np.eye(int(n), dtype=np.float32)[flat[:, i]] for i, n in enumerate(space.nvec.reshape(-1))]
        return np.concatenate(parts, axis=-1)
    return data
