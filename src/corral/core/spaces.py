"""Spaces as trees: nested as the observations and actions in them are."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from corral.core.tree import Tree


def space_tree(space: spaces.Space[Any]) -> Tree:
    """Return a space as a tree of plain spaces, nested like the observations of the space."""
    if isinstance(space, spaces.Dict):
        return {key: space_tree(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(space_tree(part) for part in space.spaces)
    return space
