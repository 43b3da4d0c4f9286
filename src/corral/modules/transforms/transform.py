"""What a transform is: the base classes of the built-in transforms and of your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from corral.core.settings import check_setting
from corral.core.tree import Tree

if TYPE_CHECKING:
    import torch
    from gymnasium import spaces

State = Mapping[str, NDArray[Any]]
"""Statistics of one transform, arrays by name. States are never changed in place."""

NO_STATE: State = {}


class Transform:
    """A function of single observations, of single rewards, or of both. Subclasses define one of the two methods.

    The methods must not keep anything between two calls: a transform is applied to rows of sub-envs while sampling, and
    again to whole batches while learning, and must give the same values. A transform that needs earlier observations of
    an episode is a `TemporalTransform`.
    """

    def transform_obs(self, obs: Tree) -> Tree:
        """Return the transformed observations, a tree of `[B, ...]`, for observations, a tree of `[B, ...]`."""
        return obs

    def transform_rewards(self, rewards: NDArray[Any]) -> NDArray[Any]:
        """Return the transformed rewards for rewards of any shape; the function is applied to each reward alone."""
        return rewards

    def observation_space(self, space: spaces.Space[Any]) -> spaces.Space[Any] | None:
        """Return the space of one transformed observation, or `None` to find it by calling `transform_obs`."""
        return None

    def transform_tensors(self, obs: Tree) -> Tree:
        """Return what `transform_obs` returns, for tensors: what exported policies do. Override it if they differ."""
        return self.transform_obs(obs)

    def tensor_form(self, device: torch.device) -> Callable[[Tree], Tree]:
        """Return `transform_tensors` for tensors on a device, where it keeps what it needs of the statistics."""
        return self.transform_tensors

    def with_spaces(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> Self:
        """Return a transform of the same settings for these spaces; called once, when the pipeline is built."""
        return self

    # What transforms with statistics also define.

    def initial_state(self, space: spaces.Space[Any]) -> State:
        """Return the statistics of no observations and no rewards; empty for a transform without statistics."""
        return NO_STATE

    def with_state(self, state: State) -> Self:
        """Return a transform of the same settings that uses other statistics."""
        return self

    def measure(self, obs: Tree, returns: NDArray[np.float64]) -> State:
        """Return the statistics of a fragment alone.

        Args:
            obs: Observations in which actions were taken, as this transform receives them, a tree of `[B, ...]`.
            returns: Discounted sums so far in each episode of the rewards that this transform receives, float64 `[B]`;
                empty without `discount`.
        """
        return NO_STATE

    @property
    def discount(self) -> float | None:
        """Discount of the returns that `measure` needs; `None` if it needs none."""
        return None


class TemporalTransform(Transform):
    """A function of an observation and of what came before it in its episode. Subclasses define two methods.

    What it needs of earlier rows is its memory, a tree of `[N, ...]` with one entry for each sub-env.
    """

    needs_actions = False
    """Whether `step` reads the actions and rewards of the steps before."""

    def initial_memory(self, space: spaces.Space[Any], num_envs: int) -> Tree:
        """Return the memory of N sub-envs in which no episode has begun, a tree of `[N, ...]`.

        Args:
            space: Space of one observation, as this transform receives it.
            num_envs: N.
        """
        raise TypeError(f"{type(self).__name__} has no method initial_memory(space, num_envs).")

    def step(
        self,
        obs: Tree,
        memory: Tree,
        begins: NDArray[np.bool_],
        actions: NDArray[Any] | None,
        rewards: NDArray[Any] | None,
    ) -> tuple[Tree, Tree]:
        """Return the transformed observations of one row, and the memory for the next row, both in new arrays.

        Args:
            obs: Observations, a tree of `[N, ...]`.
            memory: The memory.
            begins: Where episodes begin with this observation, bool `[N]`; the memory does not count there.
            actions: Module actions of the steps that led to the observations, `[N, ...]`, where `needs_actions`.
            rewards: Rewards of these steps, `[N]`, where `needs_actions`.
        """
        raise TypeError(f"{type(self).__name__} has no method step(obs, memory, begins, actions, rewards).")


def set_checked(transform: Any) -> None:
    """Convert the settings of a new transform, a frozen dataclass, to their types; private fields are no settings.

    Raises:
        ConfigError: A setting has the wrong type or is out of bounds.
    """
    cls = type(transform)
    for name in (field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")):
        value = check_setting(cls, name, getattr(transform, name), f"transforms: {cls.__name__}: ")
        object.__setattr__(transform, name, value)
