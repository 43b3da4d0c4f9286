"""Action masks: the part of a Dict observation that tells which actions are legal."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.tree import Tree
from corral.errors import ConfigError

MASK_KEY = "action_mask"
OBS_KEY = "observations"  # next to the mask, where Corral puts the two together
NO_LEGAL_ACTION = f"{MASK_KEY} allows no action: it must allow one in each observation after which the agent acts"


def num_choices(action_space: spaces.Space[Any]) -> list[int] | None:
    """Return how many values each entry of an action has, or `None` if actions are not Discrete or MultiDiscrete."""
    if isinstance(action_space, spaces.Discrete):
        return [int(action_space.n)]
    return action_space.nvec.reshape(-1).tolist() if isinstance(action_space, spaces.MultiDiscrete) else None


def has_mask_key(obs: Any) -> bool:
    """Return whether observations, or their space, are a Dict with `action_mask` and other keys."""
    return isinstance(obs, (dict, spaces.Dict)) and len(obs) > 1 and MASK_KEY in obs.keys()


def has_mask(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> bool:
    """Return whether observations hold a mask: a Dict with `action_mask` and other keys, for discrete actions.

    Raises:
        ConfigError: There is such a key, but not with one entry of 0 or 1 for each value of each entry of the action.
    """
    sizes = num_choices(action_space)
    if sizes is None or not has_mask_key(observation_space):
        return False
    mask = observation_space[MASK_KEY]  # type: ignore[index]
    is_binary = isinstance(mask, spaces.MultiBinary) or (
        isinstance(mask, spaces.Box) and bool((mask.low >= 0).all() and (mask.high <= 1).all())
    )
    if not is_binary or int(np.prod(mask.shape or ())) != sum(sizes):
        raise ConfigError(
            f"the observations have a key {MASK_KEY!r} of {mask}, which is no mask of the actions {action_space}: a "
            f"mask is a Box(0, 1, ({sum(sizes)},), np.int8), with 1 for each legal value. Set "
            ".environment(action_masks=False) if the key means something else."
        )
    return True


def without_mask(observation_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return a space without its mask, if it has one."""
    if not has_mask_key(observation_space):
        return observation_space
    assert isinstance(observation_space, spaces.Dict)
    return spaces.Dict({key: part for key, part in observation_space.spaces.items() if key != MASK_KEY})


def legal_actions(obs: Tree) -> NDArray[np.bool_]:
    """Return which values are legal, bool `[B, n]`, for observations with a mask, a tree of `[B, ...]`."""
    mask = obs[MASK_KEY]
    legal: NDArray[np.bool_] = mask.reshape(len(mask), -1) != 0
    return legal


def first_without_choice(
    legal: NDArray[np.bool_], action_space: spaces.Space[Any], acts: NDArray[np.bool_]
) -> int | None:
    """Return the first row with no legal value for an entry of the action, or `None`.

    Args:
        legal: Which values are legal, bool `[B, n]`.
        action_space: Space of one action.
        acts: Rows that count, bool `[B]`.
    """
    starts = np.cumsum([0, *(num_choices(action_space) or ())[:-1]])
    stuck = ~np.logical_or.reduceat(legal, starts, axis=1).all(1) & acts
    return int(stuck.argmax()) if stuck.any() else None


def first_illegal(legal: NDArray[np.bool_], action_space: spaces.Space[Any], actions: NDArray[Any]) -> int | None:
    """Return the first row with a legal action whose module action is another one, or `None`."""
    starts = np.cumsum([0, *(num_choices(action_space) or ())[:-1]])
    allowed = np.take_along_axis(legal, actions.reshape(len(actions), -1) + starts, 1).all(1)
    wrong = ~allowed & np.logical_or.reduceat(legal, starts, axis=1).all(1)
    return int(wrong.argmax()) if wrong.any() else None


def first_legal(action_space: spaces.Space[Any], mask: NDArray[Any]) -> Any:
    """Return the env action of the first legal value of each entry, for one mask `[n]`."""
    ends = np.cumsum(num_choices(action_space) or ())[:-1]
    picks = np.array([part.argmax() for part in np.split(np.ravel(mask) != 0, ends)])
    shifted = picks.reshape(action_space.shape or ()) + action_space.start  # type: ignore[attr-defined]
    return np.asarray(shifted, action_space.dtype)[()]  # a scalar for Discrete
