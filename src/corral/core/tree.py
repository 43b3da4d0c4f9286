"""Nested columns: an array, or a dict or tuple of nested columns.

Observations of Dict and Tuple spaces stay such trees from the vector env to the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Tree = Any  # an array or tensor, or a dict or tuple of trees


def map_tree(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Return a tree of the results of `fn`, called with each leaf of `tree` and the same leaf of each of `others`."""
    if isinstance(tree, dict):
        return {key: map_tree(fn, tree[key], *(other[key] for other in others)) for key in tree}
    if isinstance(tree, tuple):
        return tuple(map_tree(fn, *parts) for parts in zip(tree, *others, strict=True))
    return fn(tree, *others)


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, leaf)` pairs; a path looks like `camera/0`, and is `name` for a single leaf."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield from named_leaves(part, f"{name}/{key}" if name else str(key))
    elif isinstance(tree, tuple):
        for index, part in enumerate(tree):
            yield from named_leaves(part, f"{name}/{index}" if name else str(index))
    else:
        yield name, tree


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves of a tree, in the order of `named_leaves`."""
    return [leaf for _, leaf in named_leaves(tree)] if isinstance(tree, (dict, tuple)) else [tree]


def slice_rows(batch: dict[str, Tree], start: int, stop: int) -> dict[str, Tree]:
    """Return the rows from `start` to `stop` of columns `[B, ...]` by name."""
    return {
        name: map_tree(lambda leaf: leaf[start:stop], column)
        if isinstance(column, (dict, tuple))
        else column[start:stop]
        for name, column in batch.items()
    }


def copy_nested(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples and of the arrays in them; other objects are kept as they are."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: copy_nested(part) for key, part in value.items()}
    return type(value)(map(copy_nested, value)) if type(value) in (list, tuple) else value


def copy_containers(value: Any) -> Any:
    """Return copies of dicts and lists at every depth; other values, such as envs, callbacks and arrays, are kept."""
    if type(value) is dict:
        return {key: copy_containers(part) for key, part in value.items()}
    return [copy_containers(part) for part in value] if type(value) is list else value


def concatenate(*parts: Any) -> Any:
    """Return arrays, or tensors of one device, one after the other along axis 0."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(parts)


def num_rows(batch: Tree) -> int:
    """Return the length B of the leaves `[B, ...]` of a tree: the length of the first leaf."""
    while not hasattr(batch, "shape"):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)
