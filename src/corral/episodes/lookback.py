"""Indexing data that has a lookback buffer in front: what the episodes' getters and setters share.

The rows of an episode are `lookback` rows from before its start, then its own. Index 0 is the first of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.tree import Tree, leaves, map_tree

Indices = int | slice | Sequence[int] | None
Positions = int | slice | NDArray[np.int64]


def positions(
    indices: Indices, num_rows: int, lookback: int, *, neg_index_as_lookback: bool = False, clip: bool = True
) -> Positions:
    """Turn indices into positions among all rows, lookback included.

    Args:
        indices: An int, a slice, a sequence of ints, or `None` for all rows but the lookback.
        num_rows: All rows.
        lookback: How many of them lie before index 0.
        neg_index_as_lookback: Whether -1 is the last row of the lookback, rather than the last of all.
        clip: Whether slices stop at the first and the last row; otherwise their positions may lie outside.

    Returns:
        An int for an int and a slice for a clipped slice, else an array `[K]`. All but the clipped slice may lie
        outside `[0, num_rows)`.
    """
    from_end = 0 if neg_index_as_lookback else num_rows - lookback

    def position(index: int) -> int:
        return lookback + (index if index >= 0 else index + from_end)

    if indices is None:
        return slice(lookback, num_rows)
    if isinstance(indices, (int, np.integer)):
        return position(int(indices))
    if not isinstance(indices, slice):
        return np.array([position(int(index)) for index in indices], np.int64)
    step = 1 if indices.step is None else int(indices.step)
    first, past = (lookback, num_rows) if step > 0 else (num_rows - 1, lookback - 1)
    start = first if indices.start is None else position(int(indices.start))
    stop = past if indices.stop is None else position(int(indices.stop))
    if not clip:
        return np.arange(start, stop, step)
    low, high = (0, num_rows) if step > 0 else (-1, num_rows - 1)
    start, stop = min(max(start, low), high), min(max(stop, low), high)
    if start < 0:  # reversed, and before the first row
        return slice(0, 0)
    return slice(start, None if stop < 0 else stop, step)


def _outside(where: Positions, num_rows: int) -> NDArray[np.bool_]:
    if isinstance(where, slice):
        return np.zeros(len(range(num_rows)[where]), np.bool_)
    where = np.asarray(where)
    return (where < 0) | (where >= num_rows)


def pick(rows: Tree, where: Positions, fill: Any = None) -> Tree:
    """Return rows by position: views for an int or a slice, copies for a list.

    Args:
        rows: Tree of `[R, ...]`.
        where: As `positions` gives them.
        fill: What stands at positions outside; `None` refuses them.

    Raises:
        IndexError: A position lies outside, and there is no `fill`.
    """
    num_rows = len(leaves(rows)[0])
    outside = _outside(where, num_rows)
    if not outside.any():
        return map_tree(lambda leaf: leaf[where], rows)
    if fill is None:
        raise IndexError(f"index out of range: there are {num_rows} rows, lookback included. Give fill=... to pad.")

    def filled(leaf: NDArray[Any]) -> NDArray[Any]:
        # The dtype stays unless the fill value would change in it.
        exact = np.isscalar(fill) and np.asarray(fill).astype(leaf.dtype) == fill
        dtype = leaf.dtype if exact else np.result_type(leaf.dtype, np.asarray(fill).dtype)
        padded: NDArray[Any] = np.full((*outside.shape, *leaf.shape[1:]), fill, dtype)
        padded[~outside] = leaf[np.asarray(where)[~outside]]
        return padded

    return map_tree(filled, rows)


def overwrite(rows: Tree, where: Positions, new: Tree) -> None:
    """Write new data into rows by position, in place; nothing is written if anything does not fit.

    Args:
        rows: Tree of `[R, ...]`.
        where: As `positions` gives them.
        new: Of the same nesting: one entry for an int, else `[K, ...]`.

    Raises:
        IndexError: The new data have another size or dtype, or a position lies outside.
    """
    num_rows = len(leaves(rows)[0])
    outside = _outside(where, num_rows)
    if outside.any():
        raise IndexError(f"index out of range: there are {num_rows} rows, lookback included.")

    def check(leaf: NDArray[Any], values: Any) -> NDArray[Any]:
        array: NDArray[Any] = np.asarray(values)
        wanted = (*outside.shape, *leaf.shape[1:])
        if array.shape != wanted:
            raise IndexError(f"new data must be {leaf.dtype} {list(wanted)}, got {describe(array)}.")
        if array.size and not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            raise IndexError(f"new data must be {leaf.dtype}, which {array.dtype} cannot become without loss.")
        return array

    map_tree(lambda leaf, values: leaf.__setitem__(where, values), rows, map_tree(check, rows, new))


def one_hot(rows: Tree, space: spaces.Space[Any] | None, name: str) -> Tree:
    """Return rows with every Discrete and MultiDiscrete part of a space as float32 one-hot vectors.

    Raises:
        ValueError: The space is not known.
    """
    if space is None:
        raise ValueError(f"one_hot_discrete=True needs the episode's {name}: give it to the constructor.")
    if isinstance(space, spaces.Dict):
        return {key: one_hot(rows[key], part, name) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(one_hot(leaf, part, name) for leaf, part in zip(rows, space, strict=True))
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[rows - space.start]
    if isinstance(space, spaces.MultiDiscrete):
        flat = (rows - space.start).reshape(len(rows), -1)
        parts = [np.eye(int(n), dtype=np.float32)[flat[:, i]] for i, n in enumerate(space.nvec.reshape(-1))]
        return np.concatenate(parts, axis=-1)
    return rows
