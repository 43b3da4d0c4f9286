"""Checks of what an env gives: once at start by its spaces, and after each block of steps on whole columns."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.tree import Tree, leaves, map_tree, named_leaves, space_tree
from corral.errors import EnvError

if TYPE_CHECKING:
    from corral.episodes.rollout import Rollout

SUPPORTED_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_env(env: gym.Env[Any, Any], name: str) -> None:
    """Check an env's spaces, its reset and its first step.

    Args:
        env: A single env; it is reset and stepped once, and must be reset before use.
        name: What to call it in errors.

    Raises:
        EnvError: A space is missing or unsupported, or a field has the wrong type, shape or dtype. The message names
            the field and what was expected.
    """
    check_spaces(env, name)
    returned: Any
    try:
        returned = env.reset(seed=0)
    except Exception as error:
        raise EnvError(f"env {name!r} raised in its first reset(): {type(error).__name__}: {error}") from error
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise EnvError(f"env {name!r}: reset() must return (observation, info), got {_short(returned)}.")
    _check_fields(name, "reset", returned[0], returned[1], env.observation_space)
    # A copy of the space, so that the env's own random stream is left alone.
    action_space = copy.deepcopy(env.action_space)
    action_space.seed(0)
    try:
        returned = env.step(action_space.sample())
    except Exception as error:
        raise EnvError(f"env {name!r} raised in its first step(): {type(error).__name__}: {error}") from error
    if not (isinstance(returned, tuple) and len(returned) == 5):
        raise EnvError(
            f"env {name!r}: step() must return (observation, reward, terminated, truncated, info), "
            f"got {_short(returned)}."
        )
    obs, reward, terminated, truncated, info = returned
    _check_fields(name, "step", obs, info, env.observation_space)
    if not _is_number(reward):
        raise EnvError(f"env {name!r}: reward from step() must be one number, got {_short(reward)}.")
    for field, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise EnvError(f"env {name!r}: {field} from step() must be a bool, got {_short(flag)}.")


def check_spaces(env: Any, name: str, prefix: str = "") -> None:
    """Check that an env has an observation and an action space, of kinds that modules can be built for.

    Args:
        env: A single env, or a vector env with `prefix="single_"`.
        name: What to call it in errors.
        prefix: Prefix of the names of the attributes.
    """
    for field in ("observation_space", "action_space"):
        space = getattr(env, prefix + field, None)
        if not isinstance(space, spaces.Space):
            raise EnvError(f"env {name!r}: {prefix}{field} must be a gymnasium space, got {_short(space)}.")
    observation_space = getattr(env, prefix + "observation_space")
    for path, leaf in named_leaves(space_tree(observation_space), "observation_space"):
        if not isinstance(leaf, SUPPORTED_LEAVES):
            raise EnvError(
                f"env {name!r}: unsupported observation space {leaf} at {path}; use Box, Discrete, MultiDiscrete, "
                "MultiBinary, or a Dict or Tuple of those."
            )
    action_space = getattr(env, prefix + "action_space")
    is_float_box = isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating)
    if not isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)) and not is_float_box:
        raise EnvError(
            f"env {name!r}: unsupported action space {action_space}; use Discrete, MultiDiscrete, MultiBinary or a "
            "floating-point Box (flatten a Dict or Tuple with gymnasium.wrappers)."
        )


def _check_fields(name: str, method: str, obs: Any, info: Any, space: spaces.Space[Any]) -> None:
    problem = mismatch(space_tree(space), obs, "observation")
    if problem:
        raise EnvError(f"env {name!r}: {problem} (from {method}()).")
    if not isinstance(info, dict):
        raise EnvError(f"env {name!r}: info from {method}() must be a dict, got {_short(info)}.")


def mismatch(
    space: Tree, value: Any, path: str, *, cast: Literal["safe", "same_kind"] = "safe", values: bool = True
) -> str | None:
    """Return what is wrong with an observation against a tree of spaces, naming the field, or `None`.

    Args:
        space: A tree of spaces without Dict and Tuple.
        value: The observation.
        path: What to call it.
        cast: Which dtypes are accepted for the dtype of the space, as in `np.can_cast`.
        values: Whether to look at the values too, besides nesting, shapes and dtypes.
    """
    inside = partial(mismatch, cast=cast, values=values)
    if isinstance(space, dict):
        if not isinstance(value, dict) or set(value) != set(space):
            got = f"keys {sorted(value)}" if isinstance(value, dict) else _short(value)
            return f"{path} must be a dict with keys {sorted(space)}, got {got}"
        return next((p for key in space if (p := inside(space[key], value[key], f"{path}/{key}"))), None)
    if isinstance(space, tuple):
        if not isinstance(value, tuple) or len(value) != len(space):
            return f"{path} must be a tuple of {len(space)}, got {_short(value)}"
        return next((p for i in range(len(space)) if (p := inside(space[i], value[i], f"{path}/{i}"))), None)
    problem = _leaf_mismatch(space, value, path, cast)
    return bad_values(space, np.asarray(value)[None], path) if values and problem is None else problem


def _leaf_mismatch(space: Any, value: Any, path: str, cast: Literal["safe", "same_kind"]) -> str | None:
    try:
        array = np.asarray(value)
    except ValueError:
        return f"{path} must be an array, got {_short(value)}"
    if array.shape != space.shape:
        return f"{path} must have shape {space.shape}, got {array.shape}"
    # A plain Python number carries no dtype worth holding it to; an array does.
    cast = cast if isinstance(value, (np.ndarray, np.generic)) else "same_kind"
    integers = np.issubdtype(array.dtype, np.integer) and np.issubdtype(space.dtype, np.integer)
    fits = _fits_integer(array, space.dtype) if integers else np.can_cast(array.dtype, space.dtype, cast)
    if not fits:
        return f"{path} must have dtype {space.dtype}, got {array.dtype}: return it with .astype({space.dtype})"
    return None


def bad_values(space: spaces.Space[Any], values: NDArray[Any], path: str) -> str | None:
    """Return what is wrong with the values of a leaf `[..., *space.shape]`: NaN, infinity, or an index out of range.

    A Box's own bounds are not enforced: many envs step a little over them, and nothing breaks when they do.
    """
    if values.dtype.kind == "f":
        return None if np.isfinite(values).all() else f"{path} holds NaN or infinity"
    if isinstance(space, spaces.Discrete):
        low, high = space.start, space.start + space.n - 1
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    else:
        return None
    if (values < low).any() or (values > high).any():
        return f"{path} is outside {space}"
    return None


def bad_obs(rollout: Rollout, space: Tree, start: int, stop: int) -> list[tuple[int, int, str]]:
    """Return row, sub-env and problem of the first bad observation of each leaf; row 0 holds what a reset gave.

    Args:
        rollout: Whose observations `[T + 1, N, ...]` to look at.
        space: A tree of spaces, as `space_tree` gives.
        start: The first row.
        stop: The row after the last.
    """
    found = []
    for (path, column), leaf_space in zip(named_leaves(rollout.obs, "observation"), leaves(space), strict=True):
        if bad_values(leaf_space, column[start:stop], path) is None:
            continue
        for t, i in np.ndindex(stop - start, rollout.num_envs):
            if problem := bad_values(leaf_space, column[start + t, i][None], path):
                found.append((max(0, start + t - 1), i, problem))
                break
    return found


def first_bad_value(
    rollout: Rollout, space: Tree, start: int, stop: int, *, callbacks: bool
) -> tuple[int, int, str] | None:
    """Return row, sub-env and problem of the earliest NaN or value outside its space, or `None`.

    Args:
        rollout: Whose rows to look at.
        space: A tree of spaces, as `space_tree` gives.
        start: The first row that was stepped.
        stop: The row after the last.
        callbacks: Whether callbacks could have written rewards.
    """
    found = bad_obs(rollout, space, start + 1, stop + 1)
    rewards = rollout.rewards[start:stop]
    if not np.isfinite(rewards).all():
        t, i = np.argwhere(~np.isfinite(rewards))[0].tolist()
        blame = ", from the env or from a callback that wrote it" if callbacks else ""
        found.append((start + t, i, f"reward is {rewards[t, i]}{blame}"))
    for (t, i), obs in reversed(rollout.final_obs.items()):
        if t < start:
            break
        for (path, leaf), leaf_space in zip(named_leaves(obs, "final_obs"), leaves(space), strict=True):
            if problem := bad_values(leaf_space, leaf[None], path):
                found.append((t, i, problem))
    return min(found) if found else None


def write_row(columns: Tree, row: int, obs: Tree) -> None:
    """Write a vector env's observations, a tree of `[N, ...]`, into a row of columns; see `copy_row`."""
    if isinstance(columns, np.ndarray):
        copy_row(columns[row], obs)
    else:
        map_tree(lambda column, value: copy_row(column[row], value), columns, obs)


def copy_row(row: NDArray[Any], value: Any) -> None:
    """Write a vector env's observations into a row of a column.

    Raises:
        ValueError: The shape is another one; NumPy alone would spread a smaller one over the row.
        TypeError: The dtype would lose more than precision.
    """
    if np.shape(value) != row.shape:
        raise ValueError(f"observation must have shape {row.shape}, got {np.shape(value)}")
    np.copyto(row, value, casting="same_kind")


def _fits_integer(array: NDArray[Any], dtype: Any) -> bool:
    """Accept another integer width if the values fit: `Discrete` is int64, and envs return int32 or Python ints."""
    limits = np.iinfo(dtype)
    return bool(array.min() >= limits.min and array.max() <= limits.max)


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and isinstance(value, (int, float, np.number, np.bool_, np.ndarray))


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def check_obs(space: gym.Space[Any], obs: Tree) -> None:
    """Refuse an observation that would be broadcast, or lose more than precision, on its way into the batch."""
    # Values are looked at by the runner, in whole blocks, which also knows the step.
    if problem := mismatch(space_tree(space), obs, "observation", cast="same_kind", values=False):
        raise ValueError(problem)
