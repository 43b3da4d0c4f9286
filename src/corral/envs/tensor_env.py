"""The contract of vector envs whose data are tensors on one device, such as simulators on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from corral.core.ids import AgentID
from corral.core.tree import Tree


class TensorVectorEnv(ABC):
    """N sub-envs that are stepped together, whose observations, rewards and flags are tensors on one device.

    A class of another library needs no base class: what has these attributes and methods is such an env, as the envs
    of Isaac Lab, ManiSkill and Gymnasium's `VectorEnv` with tensors have them. A sub-env whose episode ends is reset in
    the same step; its last observation is in `infos["final_obs"]`.

    With several agents, `possible_agents` names them, all of them act in every step, and their episodes end together.
    The two spaces are then `Dict` spaces by agent, and observations, actions and rewards are dicts by agent.

    An env with `get_state()`, which returns all that the next steps depend on as plain data (arrays, numbers, texts),
    and `set_state(state)` continues exactly when a run is restored. Other envs then begin new episodes.

    Attributes:
        num_envs: Number of sub-envs N.
        device: Device of all tensors.
        single_observation_space: Space of the observations of one sub-env.
        single_action_space: Space of the actions of one sub-env.
        possible_agents: Ids of the agents; empty for an env with one agent.
    """

    num_envs: int
    device: torch.device
    single_observation_space: spaces.Space[Any]
    single_action_space: spaces.Space[Any]
    possible_agents: tuple[AgentID, ...] = ()

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        """Reset all sub-envs.

        Args:
            seed: Seed of the generator of all sub-envs; `None` goes on with the generator as it is.
            options: Not used by most envs.

        Returns:
            Observations, a tree of tensors `[N, ...]`, and infos.
        """

    @abstractmethod
    def step(self, actions: Tree) -> tuple[Tree, Tree, Tensor, Tensor, dict[str, Any]]:
        """Step all sub-envs.

        The tensors that it returns belong to the caller: the next step must not write into them.

        Args:
            actions: Actions in the units of the action space, a tensor `[N, ...]` on the device.

        Returns:
            Observations, a tree of `[N, ...]`, of the next episode where one has ended; rewards, floats `[N]`;
            `terminated` and `truncated`, bool `[N]`; and infos. Where an episode has ended, `infos["final_obs"]`, a
            tree of `[N, ...]`, holds its last observation; its other rows may hold anything. It may be left out in a
            step that ends no episode.
        """

    def close(self) -> None:  # noqa: B027 (most envs have nothing to release)
        """Release what the env holds, such as a simulator."""
