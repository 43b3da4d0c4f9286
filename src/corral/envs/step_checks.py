"""Checks of what `step` and `reset` returned besides observations: the parts, the reward, the flags and the info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.errors import EnvError

FLAG_TYPES = frozenset({bool, np.bool_})
"""Types of the flags of a step."""

NUMBER_TYPES = frozenset({float, int, np.float64, np.float32})
"""Most frequent types of the reward of a step."""


def check_step(returned: Any) -> Any:
    """Return what the `step` of one env returned, after a check of everything except for the observation.

    Callers on a hot path ask for the types in `NUMBER_TYPES` and `FLAG_TYPES` first, which nearly all envs return.

    Raises:
        EnvError: It is no tuple of five, the reward is not one number, a flag is not a bool, or the info is not a dict.
    """
    if not (isinstance(returned, tuple) and len(returned) == 5):
        raise EnvError(
            f"step() must return (observation, reward, terminated, truncated, info), got {shorten(returned)}"
        )
    _, reward, terminated, truncated, info = returned
    if not is_number(reward):
        raise EnvError(f"reward from step() must be one number, got {shorten(reward)}")
    for field, flag in (("terminated", terminated), ("truncated", truncated)):
        if type(flag) not in FLAG_TYPES:
            raise EnvError(f"{field} from step() must be a bool, got {shorten(flag)}")
    if not isinstance(info, dict):
        raise EnvError(f"info from step() must be a dict, got {shorten(info)}")
    return returned


def check_reset(returned: Any) -> Any:
    """Return what the `reset` of one env returned, after a check of everything except for the observation.

    Raises:
        EnvError: It is no tuple of two, or the info is not a dict.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise EnvError(f"reset() must return (observation, info), got {shorten(returned)}")
    if not isinstance(returned[1], dict):
        raise EnvError(f"info from reset() must be a dict, got {shorten(returned[1])}")
    return returned


def check_infos(infos: Any, method: str) -> Any:
    """Return the infos of a vector env that Corral did not make, after a check that they are a dict.

    Raises:
        EnvError: They are not.
    """
    if not isinstance(infos, Mapping):
        raise EnvError(
            f"infos from {method}() must be a dict, in which each value is of all sub-envs, got {shorten(infos)}"
        )
    return infos


def check_step_columns(num_envs: int, *columns: Any) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return rewards, terminated and truncated of one step of a vector env that Corral did not make, as arrays `[N]`.

    Flags may be numbers, as some libraries give them, if all are 0 or 1.

    Args:
        num_envs: Number of sub-envs N.
        columns: The three columns.

    Raises:
        EnvError: A column has another shape, rewards are no numbers, or a flag is neither a bool nor 0 nor 1.
    """
    found = []
    for field, column in zip(("rewards", "terminated", "truncated"), columns, strict=True):
        if np.shape(column) != (num_envs,):
            raise EnvError(f"{field} from step() must have shape ({num_envs},), got {np.shape(column)}")
        array = np.asarray(column)
        if array.dtype.kind not in "biuf":
            raise EnvError(f"{field} from step() must be numbers, got {array.dtype}: {array.tolist()!r:.80}")
        if field != "rewards" and array.dtype != np.bool_:
            if not ((array == 0) | (array == 1)).all():
                raise EnvError(f"{field} from step() must be bools, got {array.dtype}: {array.tolist()!r:.80}")
            array = array.astype(np.bool_)
        found.append(array)
    rewards, terminated, truncated = found
    return rewards, terminated, truncated


def is_number(value: Any) -> bool:
    """Return whether a value is one real number, which may be in an array without axes."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, (int, float))


def shorten(value: Any) -> str:
    """Return the type and the beginning of the text of a value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
