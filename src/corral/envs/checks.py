"""Checks of an env's spaces and values: once at the start, and on whole columns after each block of steps."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from corral.core.action_masks import MASK_KEY, first_legal, has_mask
from corral.core.spaces import space_tree, unsupported
from corral.core.tree import Tree, leaves, map_tree, named_leaves
from corral.envs.seats import SeatsSpace
from corral.envs.step_checks import check_infos, check_reset, check_step, check_step_columns, shorten
from corral.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from corral.data.episodes.rollout import Rollout

log = logging.getLogger("corral")

COARSE_FROM = 2.0**24
"""Number from which float32 cannot hold every whole number."""


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put the name of an env into errors that do not know it."""
    try:
        yield
    except EnvError as error:
        raise EnvError(f"env {name!r}: {error}.") from error


def check_env(env: Any, name: str) -> None:
    """Check the spaces of an env or a vector env, its reset and its first step.

    Args:
        env: The env; it is reset and stepped once, and must be reset again before use.
        name: Name of the env in errors.

    Raises:
        EnvError: A space is missing or unsupported, or a field has the wrong type, shape or dtype. The message names
            the field and the expected value.
    """
    is_vector = isinstance(env, VectorEnv)
    check_spaces(env, name)
    of_one = _spaces_of(env)
    # Of a vector env not the spaces of all sub-envs, which some vector envs leave out. Actions are sampled from a copy,
    # so that the random stream of the env's own space does not change.
    observation_space, action_space = [batch_space(each, env.num_envs) for each in of_one] if is_vector else of_one
    action_space = copy.deepcopy(action_space)
    obs = _first_obs(env, name, observation_space, "reset", seed=0)
    warn_if_cast(name, observation_space, obs)
    action_space.seed(0)
    _first_obs(env, name, observation_space, "step", legal_sample(*of_one, action_space.sample(), obs, batch=is_vector))


def _first_obs(env: Any, name: str, space: spaces.Space[Any], method: str, *args: Any, **kwargs: Any) -> Any:
    """Return the observation of the first `reset` or `step`, after a check of all that it returned."""
    is_vector = isinstance(env, VectorEnv)
    try:
        returned: Any = getattr(env, method)(*args, **kwargs)
        if is_vector:
            obs, *columns, infos = returned
    except Exception as error:
        raise EnvError(f"env {name!r} raised in its first {method}(): {type(error).__name__}: {error}") from error
    with named(name):
        if not is_vector:
            obs = (check_reset if method == "reset" else check_step)(returned)[0]
        else:
            check_infos(infos, method)
            if columns:
                check_step_columns(env.num_envs, *columns)
    if problem := mismatch(space_tree(space), obs, "observation"):
        raise EnvError(f"env {name!r}: {problem} (from {method}()).")
    return obs


def _spaces_of(env: Any) -> tuple[Any, Any]:
    """Return the spaces of one observation and one action of an env or a vector env, `None` where they are missing."""
    prefix = "single_" if isinstance(env, VectorEnv) else ""
    return getattr(env, f"{prefix}observation_space", None), getattr(env, f"{prefix}action_space", None)


def legal_sample(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], action: Any, obs: Any, *, batch: bool = False
) -> Any:
    """Return a sampled action, or where the observation has a mask, the first legal one; with `batch`, N of both."""
    if isinstance(observation_space, SeatsSpace):
        return {
            block.name: legal_sample(
                block.observation_space, block.action_space, action[block.name], obs["obs"][block.name], batch=True
            )
            for block in observation_space.seats.blocks
        }
    try:
        if not has_mask(observation_space, action_space):
            return action
    except ConfigError:  # the module says it, unless masks are switched off
        return action
    masks = obs[MASK_KEY]
    return np.stack([first_legal(action_space, mask) for mask in masks]) if batch else first_legal(action_space, masks)


def check_spaces(env: Any, name: str) -> None:
    """Check that an env or a vector env has an observation space and an action space that modules support.

    Raises:
        EnvError: A space is missing or unsupported.
    """
    prefix, found = "single_" if isinstance(env, VectorEnv) else "", _spaces_of(env)
    for field, space in zip(("observation_space", "action_space"), found, strict=True):
        if not isinstance(space, spaces.Space):
            remedy = " Several agents need a corral.MultiAgentEnv." if hasattr(env, "possible_agents") else ""
            raise EnvError(f"env {name!r}: {prefix}{field} must be a gymnasium space, got {shorten(space)}.{remedy}")
    if isinstance(found[0], SeatsSpace):  # the spaces of each agent were checked when the seats were made
        return
    if problem := unsupported(*found):
        raise EnvError(f"env {name!r}: {problem}.")


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


def warn_if_cast(name: str, space: spaces.Space[Any], obs: Any) -> None:
    """Warn, once in this process, if an observation has a dtype that its space cannot hold without loss."""
    if problem := mismatch(space_tree(space), obs, "observation", cast="safe", values=False):
        _warn_once(f"env {name!r}: {problem}. Until then each observation is cast to this dtype.")
    map_tree(partial(_warn_if_coarse, name), space_tree(space), obs)


def _warn_if_coarse(name: str, space: Any, leaf: Any) -> None:
    """Warn of floats so large that float32, which modules and transforms get, cannot tell neighbours apart."""
    if isinstance(space, spaces.Box) and space.dtype is not None and space.dtype.kind == "f":
        numbers = np.abs(np.asarray(leaf, np.float64))
        largest = float(numbers.max(initial=0.0, where=np.isfinite(numbers)))
        if largest >= COARSE_FROM:
            _warn_once(
                f"env {name!r}: an observation has numbers around {largest:.2g}. Observations are float32, which tells "
                f"them apart only in steps of {float(np.spacing(np.float32(largest))):g}, before NormalizeObservations "
                "sees them: subtract an offset, or scale them, in the env or a wrapper."
            )


def mismatch(
    space: Tree,
    value: Any,
    path: str,
    *,
    cast: Literal["safe", "same_kind"] = "same_kind",
    values: bool = True,
    batch: tuple[int, ...] = (),
) -> str | None:
    """Return how an observation differs from a tree of spaces, with the name of the field, or `None` if it fits.

    Args:
        space: A tree of spaces without Dict and Tuple.
        value: Observation to check.
        path: Name of the observation in the answer.
        cast: Casting rule of `np.can_cast` for the dtype of the observation and the dtype of the space.
        values: Whether to check the values too, in addition to nesting, shapes and dtypes.
        batch: Axes of the value before the axes of the space.
    """
    inside = partial(mismatch, cast=cast, values=values, batch=batch)
    if isinstance(space, dict):
        if not isinstance(value, dict) or set(value) != set(space):
            got = f"keys {sorted(value)}" if isinstance(value, dict) else shorten(value)
            return f"{path} must be a dict with keys {sorted(space)}, got {got}"
        return next((p for key in space if (p := inside(space[key], value[key], f"{path}/{key}"))), None)
    if isinstance(space, tuple):
        if not isinstance(value, tuple) or len(value) != len(space):
            return f"{path} must be a tuple of {len(space)}, got {shorten(value)}"
        return next((p for i in range(len(space)) if (p := inside(space[i], value[i], f"{path}/{i}"))), None)
    problem = _leaf_mismatch(space, value, path, cast, batch)
    return bad_values(space, np.asarray(value)[None], path) if values and problem is None else problem


def _leaf_mismatch(
    space: Any, value: Any, path: str, cast: Literal["safe", "same_kind"], batch: tuple[int, ...]
) -> str | None:
    try:
        array = np.asarray(value)
    except ValueError:
        return f"{path} must be an array, got {shorten(value)}"
    if array.shape != (*batch, *space.shape):
        return f"{path} must have shape {(*batch, *space.shape)}, got {array.shape}"
    # The dtype of a plain Python number is arbitrary, so it is checked less strictly than the dtype of an array.
    cast = cast if isinstance(value, (np.ndarray, np.generic)) else "same_kind"
    integers = np.issubdtype(array.dtype, np.integer) and np.issubdtype(space.dtype, np.integer)
    fits = _fits_integer(array, space.dtype) if integers else np.can_cast(array.dtype, space.dtype, cast)
    if not fits:
        return f"{path} must have dtype {space.dtype}, got {array.dtype}: return it with .astype({space.dtype})"
    return None


def bad_values(space: spaces.Space[Any], values: NDArray[Any], path: str) -> str | None:
    """Return the problem of the values of a leaf `[..., *space.shape]`, or `None`: not finite, too large, or no index.

    The bounds of a Box are not enforced: many envs exceed them a little, which does no harm.
    """
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            return f"{path} holds NaN or infinity"
        if values.dtype == space.dtype or (np.abs(values) <= np.finfo(space.dtype).max).all():
            return None
        return f"{path} holds a number that is too large for {space.dtype}"
    if isinstance(space, spaces.Discrete):
        low, high = space.start, space.start + space.n - 1
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, spaces.MultiBinary):
        low, high = 0, 1
    else:
        return None
    if (values < low).any() or (values > high).any():
        return f"{path} is outside {space}"
    return None


def bad_obs(rollout: Rollout, space: Tree, start: int, stop: int) -> list[tuple[int, int, str]]:
    """Return row, sub-env and problem of the first bad observation of each leaf, if there is one.

    Row 0 of the observations comes from a reset or from the last rollout, so observation t + 1 belongs to row t.

    Args:
        rollout: Rollout whose observations `[T + 1, N, ...]` are checked.
        space: A tree of spaces, as returned by `space_tree`.
        start: First row of observations to check.
        stop: Row after the last one to check.
    """
    found = []
    is_leaf = isinstance(rollout.obs, np.ndarray)
    pairs = ((rollout.obs, space),) if is_leaf else zip(leaves(rollout.obs), leaves(space), strict=True)
    for index, (column, leaf_space) in enumerate(pairs):
        if bad_values(leaf_space, column[start:stop], "") is None:
            continue
        path = list(named_leaves(rollout.obs, "observation"))[index][0]
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
        rollout: Rollout whose rows are checked.
        space: A tree of spaces, as returned by `space_tree`.
        start: First row to check.
        stop: Row after the last one to check.
        callbacks: Whether callbacks could have changed rewards.
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
    """Write the observations of a vector env, a tree of `[N, ...]`, to a row of columns, a tree of `[T, N, ...]`.

    Raises:
        ValueError: The shapes differ; NumPy alone would broadcast a smaller array over the row.
        TypeError: The cast to the dtype of the row would lose more than precision; integers of any dtype may be cast
            where the values fit.
    """
    if not isinstance(columns, np.ndarray):
        map_tree(lambda column, value: write_row(column, row, value), columns, obs)
        return
    array = np.asarray(obs)
    if array.shape != columns.shape[1:]:
        raise ValueError(f"observation must have shape {columns.shape[1:]}, got {array.shape}")
    if array.dtype == columns.dtype or array.dtype.kind not in "iu" or columns.dtype.kind not in "iu":
        np.copyto(columns[row], array, casting="same_kind")
    elif not _fits_integer(array, columns.dtype):
        raise TypeError(
            f"observation must be integers of {columns.dtype}, got {array.dtype} from {array.min()} to {array.max()}"
        )
    else:
        columns[row] = array


def _fits_integer(array: NDArray[Any], dtype: Any) -> bool:
    """Return whether the values fit an integer dtype: `Discrete` is int64, but envs return int32 or Python ints too."""
    limits = np.iinfo(dtype)
    return bool(array.min() >= limits.min and array.max() <= limits.max)


def check_obs(space: gym.Space[Any], obs: Tree) -> None:
    """Refuse an observation that would be broadcast, or lose more than precision, when it is written to the batch.

    Raises:
        ValueError: The nesting, a shape or a dtype does not fit the space.
    """
    # The values are checked by the runner, which checks whole blocks and knows the step.
    if problem := mismatch(space_tree(space), obs, "observation", values=False):
        raise ValueError(problem)
