"""Parts of observations that no network can read and that a transform leaves out, such as texts and graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from corral.core.spaces import SUPPORTED_LEAVES, space_tree
from corral.core.tree import leaves

UNREAD = spaces.Discrete(1)
"""Space of what takes the place of such a part: it is always 0."""


def unread_wrappers(transforms: Sequence[Any]) -> list[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]]:
    """Return the wrapper that transforms of observations need, if they leave out keys."""
    keys = next((keys for each in transforms if (keys := getattr(each, "left_out", ()))), ())
    return [partial(blank_unread, keys=tuple(keys))] if keys else []


def blank_unread(env: gym.Env[Any, Any], keys: Sequence[str]) -> gym.Env[Any, Any]:
    """Return an env whose Dict observations hold 0 where a key that is left out has a space that nothing can read."""
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        return env
    parts = {key: leaves(space_tree(space[key])) for key in keys if key in space.spaces}
    unread = [key for key, part in parts.items() if not all(isinstance(leaf, SUPPORTED_LEAVES) for leaf in part)]
    return _BlankUnread(env, unread) if unread else env


class _BlankUnread(gym.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gym.Env[Any, Any], keys: Sequence[str]) -> None:
        super().__init__(env)
        self._blank = dict.fromkeys(keys, 0)
        assert isinstance(env.observation_space, spaces.Dict)
        self.observation_space = spaces.Dict({**env.observation_space.spaces, **dict.fromkeys(keys, UNREAD)})

    def observation(self, observation: Any) -> Any:
        return {**observation, **self._blank}
