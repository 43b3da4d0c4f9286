"""Spaces as trees: nested as the observations and actions in them are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.tree import Tree, named_leaves

SUPPORTED_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def space_tree(space: spaces.Space[Any]) -> Tree:
    """Return a space as a tree of plain spaces, nested like the observations of the space."""
    if isinstance(space, spaces.Dict):
        return {key: space_tree(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(space_tree(part) for part in space.spaces)
    return space


def blank_array(space: spaces.Space[Any], *shape: int) -> NDArray[Any]:
    """Return entries of a plain space where nothing was observed, `[*shape, ...]`: zeros, or first discrete numbers."""
    return np.full((*shape, *(space.shape or ())), getattr(space, "start", 0), space.dtype)


def unsupported(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> str | None:
    """Return which of the spaces of an agent modules do not support, and what to use instead, or `None`."""
    if (empty := _empty_part(observation_space, "observation_space")) is not None:
        return (
            f"empty observation space {empty[1]} at {empty[0]}: leave this part out; an agent without sensors observes "
            "one number that never changes, with gymnasium.spaces.Box(0, 1, (1,))"
        )
    actions = [leaf for _, leaf in named_leaves(space_tree(action_space))]
    if all(leaf.shape is not None and 0 in leaf.shape for leaf in actions) or _empty_group(action_space):
        return (
            f"empty action space {action_space}: an agent that chooses nothing needs one action that the env ignores, "
            "gymnasium.spaces.Discrete(1)"
        )
    for path, leaf in named_leaves(space_tree(observation_space), "observation_space"):
        if not isinstance(leaf, SUPPORTED_LEAVES):
            return (
                f"unsupported observation space {leaf} at {path}; use Box, Discrete, MultiDiscrete, MultiBinary, or a "
                "Dict or Tuple of these spaces, and leave other parts out with .environment(wrappers=[...])"
            )
    for path, leaf in named_leaves(space_tree(action_space), "action_space"):
        is_float_box = isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating)
        if not isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)) and not is_float_box:
            return (
                f"unsupported action space {leaf} at {path}; use Discrete, MultiDiscrete, MultiBinary, a "
                "floating-point Box, or a Dict or Tuple of these spaces"
            )
    return None


def _empty_part(space: spaces.Space[Any], path: str) -> tuple[str, spaces.Space[Any]] | None:
    """Return path and space of the first part without any number, or `None`."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)) and len(space.spaces):
        named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return next((found for key, part in named if (found := _empty_part(part, f"{path}/{key}"))), None)
    return (path, space) if isinstance(space, (spaces.Dict, spaces.Tuple)) or 0 in (space.shape or ()) else None


def _empty_group(space: spaces.Space[Any]) -> bool:
    """Return whether a space is or holds a Dict or Tuple of nothing."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return False
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
    return not space.spaces or any(map(_empty_group, parts))


def module_observation_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of the observations that modules get: the space of the env, with floats of any size as float32.

    Rollouts and replay buffers hold these observations too. Integers and bools keep their dtype.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: module_observation_space(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([module_observation_space(part) for part in space.spaces])
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f" or space.dtype == np.float32:
        return space
    with np.errstate(over="ignore"):  # a bound that float32 cannot hold becomes infinite
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), space.shape, np.float32)


def space_kinds(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return what a module depends on in a space of observations: its leaves by name, without the bounds of a Box."""
    return {
        name: ("Box", leaf.shape, leaf.dtype) if isinstance(leaf, spaces.Box) else leaf
        for name, leaf in named_leaves(space_tree(space))
    }


def first_outside(space: spaces.Space[Any], values: NDArray[Any]) -> tuple[int, ...] | None:
    """Return the index of the first of values `[..., *space.shape]` that is outside a plain space, or `None`.

    A float is outside if it is NaN or infinite: policies exceed the bounds of a Box, and actions are clipped later.
    """
    if isinstance(space, spaces.Box):
        bad = ~np.isfinite(values)
    elif isinstance(space, spaces.MultiBinary):
        bad = (values != 0) & (values != 1)
    else:
        sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec  # type: ignore[attr-defined]
        bad = (values < space.start) | (values >= space.start + sizes)  # type: ignore[attr-defined]
    num_axes = values.ndim - len(space.shape or ())
    return tuple(np.argwhere(bad)[0, :num_axes].tolist()) if bad.any() else None


def join_action_spaces(parts: Sequence[spaces.Space[Any]]) -> spaces.Space[Any] | None:
    """Return one plain space for the actions of several plain spaces, flat and one after another.

    Returns:
        A `MultiDiscrete`, `MultiBinary` or floating-point `Box` of one axis, or `None` if the parts are of different
        kinds.
    """
    if all(isinstance(part, (spaces.Discrete, spaces.MultiDiscrete)) for part in parts):
        sizes = [np.ravel(part.n if isinstance(part, spaces.Discrete) else part.nvec) for part in parts]  # type: ignore[attr-defined]
        starts = [np.ravel(part.start) for part in parts]  # type: ignore[attr-defined]
        return spaces.MultiDiscrete(np.concatenate(sizes), start=np.concatenate(starts))
    if all(isinstance(part, spaces.MultiBinary) for part in parts):
        return spaces.MultiBinary(sum(math.prod(part.shape or ()) for part in parts))
    if all(isinstance(part, spaces.Box) and part.dtype.kind == "f" for part in parts):
        low, high = (np.concatenate([np.ravel(getattr(part, name)) for part in parts]) for name in ("low", "high"))
        return spaces.Box(low, high, dtype=low.dtype.type)
    return None


def split_actions(parts: Sequence[spaces.Space[Any]], actions: NDArray[Any]) -> list[tuple[Any, ...]]:
    """Return for each of flat actions `[B, D]` of joined spaces a tuple of the actions of the parts."""
    ends = np.cumsum([math.prod(part.shape or ()) for part in parts])[:-1]
    columns = np.split(actions, ends, axis=1)
    shaped = [
        column.reshape(len(actions), *(part.shape or ())).astype(part.dtype, copy=False)
        for part, column in zip(parts, columns, strict=True)
    ]
    return list(zip(*shaped, strict=True))


def is_bounded_floats(space: spaces.Space[Any]) -> bool:
    """Return whether a space is a Box of floats whose bounds are all finite."""
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.is_bounded()


def remedy_for_bounds(space: spaces.Space[Any]) -> str:
    """Return what to do about actions that are not floats with finite bounds, where an algorithm needs such actions."""
    if isinstance(space, spaces.Box):
        return "give them such bounds with a wrapper, or use PPO"
    return "use DQN, SAC or PPO" if isinstance(space, spaces.Discrete) else "use PPO"
