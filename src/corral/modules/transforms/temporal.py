"""Transforms of an observation and of what came before it in its episode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import Field

from corral.core.action_masks import MASK_KEY, OBS_KEY, has_mask_key, without_mask
from corral.core.spaces import blank_array, space_tree
from corral.core.tree import Tree, leaves, map_tree
from corral.errors import ConfigError
from corral.modules.transforms.transform import TemporalTransform, set_checked

MAX_FRAMES = 255


@dataclass(frozen=True)
class FrameStack(TemporalTransform):
    """Stacks the last observations of an episode on a new first axis, the newest one last.

    Each part of a Dict or Tuple observation is stacked. Before an episode has so many observations, its first one is
    repeated, as `gymnasium.wrappers.FrameStackObservation` does. The default module takes stacked images as channels.
    An action mask, under the key `action_mask`, is not stacked.

    Attributes:
        num_frames: Number k of observations: `[*shape]` becomes `[k, *shape]`.
    """

    num_frames: int = 4

    def __post_init__(self) -> None:
        """Refuse a number that is out of bounds.

        Raises:
            ConfigError: `num_frames` is not from 2 to 255.
        """
        if type(self.num_frames) is not int or not 2 <= self.num_frames <= MAX_FRAMES:
            raise ConfigError(f"transforms: FrameStack: num_frames={self.num_frames!r} must be from 2 to {MAX_FRAMES}.")

    def observation_space(self, space: spaces.Space[Any]) -> spaces.Space[Any]:
        mask = {MASK_KEY: space[MASK_KEY]} if has_mask_key(space) else {}  # type: ignore[index]
        stacks = self._stacked(without_mask(space))
        return spaces.Dict({**stacks.spaces, **mask}) if mask else stacks  # type: ignore[attr-defined]

    def _stacked(self, space: spaces.Space[Any]) -> spaces.Space[Any]:
        """Return the space of the stacks of all parts."""
        k = self.num_frames
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: self._stacked(part) for key, part in space.spaces.items()})
        if isinstance(space, spaces.Tuple):
            return spaces.Tuple([self._stacked(part) for part in space.spaces])
        if isinstance(space, spaces.Box):
            return spaces.Box(np.stack([space.low] * k), np.stack([space.high] * k), dtype=space.dtype.type)
        if isinstance(space, spaces.Discrete):
            return spaces.MultiDiscrete([int(space.n)] * k, space.dtype.type, start=[int(space.start)] * k)
        if isinstance(space, spaces.MultiDiscrete):
            start = np.stack([space.start] * k)
            return spaces.MultiDiscrete(np.stack([space.nvec] * k), space.dtype.type, start=start)
        return spaces.MultiBinary((k, *(space.shape or ())))

    def initial_memory(self, space: spaces.Space[Any], num_envs: int) -> Tree:
        """Return blank stacks, a tree of `[N, k, ...]`."""
        shape, space = (num_envs, self.num_frames), without_mask(space)
        return map_tree(lambda leaf: blank_array(leaf, *shape), space_tree(space))

    def step(
        self,
        obs: Tree,
        memory: Tree,
        begins: NDArray[np.bool_],
        actions: NDArray[Any] | None,
        rewards: NDArray[Any] | None,
    ) -> tuple[Tree, Tree]:
        """Return the stacks with the newest observations, a tree of `[N, k, ...]`, which are the memory too."""

        def stacked(now: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
            stack = np.empty_like(before)
            stack[:, :-1], stack[:, -1] = before[:, 1:], now
            if begins.any():
                stack[begins] = now[begins, None]
            return stack

        if has_mask_key(obs):
            stacks = {key: map_tree(stacked, obs[key], memory[key]) for key in memory}
            return {key: stacks.get(key, part) for key, part in obs.items()}, stacks
        stacks = map_tree(stacked, obs, memory)
        return stacks, stacks


@dataclass(frozen=True)
class PrevActionsPrevRewards(TemporalTransform):
    """Adds the actions and the rewards of the steps before to each observation; zeros before an episode begins.

    The observation becomes a Dict with `observations`, `prev_actions` (the module action) and `prev_rewards` (the
    reward of the env, float32). To a Dict with the key `observations` or with an action mask, the two are added.

    Attributes:
        num_actions: Number of actions. Several are stacked on a new first axis, the newest one last; 0 adds none.
        num_rewards: Number of rewards, `prev_rewards` is `[num_rewards]`; 0 adds none.
    """

    needs_actions = True
    num_actions: Annotated[int, Field(ge=0, le=MAX_FRAMES)] = 1
    num_rewards: Annotated[int, Field(ge=0, le=MAX_FRAMES)] = 1
    _action_space: spaces.Space[Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse numbers that are out of bounds.

        Raises:
            ConfigError: A number is not from 0 to 255, or both are 0.
        """
        set_checked(self)
        if not self.num_actions + self.num_rewards:
            raise ConfigError("transforms: PrevActionsPrevRewards: num_actions=0 and num_rewards=0 have no effect.")

    def with_spaces(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> Self:
        return replace(self, _action_space=module_actions(action_space))

    def observation_space(self, space: spaces.Space[Any]) -> spaces.Space[Any]:
        assert self._action_space is not None
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) and _is_open(space.spaces) else {OBS_KEY: space}
        if self.num_actions:
            stacked = FrameStack(self.num_actions).observation_space if self.num_actions > 1 else None
            parts["prev_actions"] = self._action_space if stacked is None else stacked(self._action_space)
        if self.num_rewards:
            parts["prev_rewards"] = spaces.Box(-np.inf, np.inf, (self.num_rewards,), np.float32)
        return spaces.Dict(parts)

    def initial_memory(self, space: spaces.Space[Any], num_envs: int) -> Tree:
        """Return zeros for the actions and rewards before the latest ones, which are given at each step."""
        if max(self.num_actions, self.num_rewards) <= 1:
            return ()
        action: Any = self._action_space
        actions = (num_envs, max(0, self.num_actions - 1), *action.shape)
        rewards = (num_envs, max(0, self.num_rewards - 1))
        return np.zeros(actions, action.dtype), np.zeros(rewards, np.float32)

    def step(
        self,
        obs: Tree,
        memory: Tree,
        begins: NDArray[np.bool_],
        actions: NDArray[Any] | None,
        rewards: NDArray[Any] | None,
    ) -> tuple[Tree, Tree]:
        """Return the observations with the actions and rewards of the steps before."""
        assert actions is not None and rewards is not None
        known = [actions[:, None].copy(), rewards[:, None].astype(np.float32)]
        if memory:
            known = [np.concatenate(pair, axis=1) for pair in zip(memory, known, strict=True)]
        for column in known:
            column[begins] = 0
        parts = obs if isinstance(obs, dict) and _is_open(obs) else {OBS_KEY: obs}
        found = dict(parts)
        if self.num_actions:
            found["prev_actions"] = known[0] if self.num_actions > 1 else known[0][:, 0]
        if self.num_rewards:
            found["prev_rewards"] = known[1]
        # In the order of the space, which sorts its keys.
        return {name: found[name] for name in sorted(found)}, memory and tuple(column[:, 1:] for column in known)


def _is_open(parts: Mapping[str, Any]) -> bool:
    """Return whether the parts of a Dict get the previous actions and rewards next to them."""
    return OBS_KEY in parts or has_mask_key(dict(parts))


def module_actions(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of the actions of a module: they have no bounds, and integers begin at 0.

    Actions of a Dict or Tuple space are rows of numbers.
    """
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec, np.int64)
    if isinstance(space, spaces.MultiBinary):
        return space
    shape = space.shape
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        shape = (sum(math.prod(leaf.shape) for leaf in leaves(space_tree(space))),)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)
