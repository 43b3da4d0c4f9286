"""The contract of vector envs whose data are tensors on one device, such as simulators on a GPU."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from corral.core.ids import AgentID
from corral.core.tree import Tree, leaves, map_tree
from corral.envs.adapted_vector import AdaptedVectorEnv
from corral.errors import EnvError

log = logging.getLogger("corral")

FINAL_OBS = ("final_obs", "final_observation")
"""Keys of infos under which libraries give the last observations of episodes."""


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
    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
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


class TensorEnvAdapter(AdaptedVectorEnv):
    """A tensor vector env as a vector env of Gymnasium: `reset` and `step` take and return arrays.

    `reset_tensors` and `step_tensors` leave the data on the device. An env that gives no final observations, such as
    those of Isaac Lab, is said to have ended where the last action was chosen, as rsl_rl does; a warning says so once.

    Args:
        env: A `TensorVectorEnv`, or an object of another library with the same attributes and methods.

    Attributes:
        env: The same.
        device: Device of its tensors.

    Raises:
        EnvError: A space is missing, or the env does not reset sub-envs in the step that ends their episodes.
    """

    def __init__(self, env: Any) -> None:
        """Find the spaces, the device and the autoreset mode."""
        super().__init__(env)
        self.device = torch.device(env.device)
        mode = self.metadata["autoreset_mode"]
        if mode not in (None, AutoresetMode.SAME_STEP):
            raise EnvError(
                f"{type(env).__name__} gives tensors and has metadata['autoreset_mode']={mode}: a tensor vector env "
                "must reset a sub-env in the step that ends its episode (SAME_STEP)"
            )
        self.metadata["autoreset_mode"] = AutoresetMode.SAME_STEP
        self._latest: Tree = None  # observations from which the next actions are chosen
        self._warned = False

    # On the device.

    def reset_tensors(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, Any]:
        """Reset all sub-envs, and return observations, a tree of tensors `[N, ...]`, and infos.

        Raises:
            EnvError: The observations are no tensors.
        """
        obs, infos = self.env.reset(seed=seed, options=options)
        if not all(isinstance(leaf, Tensor) for leaf in leaves(obs)):
            raise EnvError(
                f"{type(self.env).__name__} has an attribute device, so that it must give tensors, but reset() gave "
                f"{type(leaves(obs)[0]).__name__}: remove the attribute, or return tensors on this device"
            )
        self._latest = obs
        return obs, infos

    def step_tensors(self, actions: Tree) -> tuple[Tree, Tensor, Tensor, Tensor, Any, Tree]:
        """Step all sub-envs, with actions on the device.

        Returns:
            What `TensorVectorEnv.step` returns, rewards and flags as `[N]`, and the final observations: a tree of
            `[N, ...]` that counts where an episode ended.
        """
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        final = next((infos[key] for key in FINAL_OBS if key in infos), None)
        if final is None:
            final = self._latest
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s gives no infos['final_obs']: where an episode is cut off, the value of the observation before "
                    "its last step stands in for the value of the last observation.",
                    type(self.env).__name__,
                )
        self._latest = obs
        return obs, rewards, terminated.bool(), truncated.bool(), infos, final

    # As arrays.

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all sub-envs; see `gymnasium.vector.VectorEnv.reset`."""
        obs, infos = self.reset_tensors(seed, options)
        return map_tree(to_array, obs), as_arrays(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all sub-envs; see `gymnasium.vector.VectorEnv.step`."""
        on_device = map_tree(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)).to(self.device), actions)
        obs, rewards, terminated, truncated, infos, final = self.step_tensors(on_device)
        ends = to_array(terminated | truncated)
        found = as_arrays(infos)
        if ends.any():
            found |= {"final_obs": map_tree(to_array, final), "_final_obs": ends}
        flags = to_array(terminated), to_array(truncated)
        return map_tree(to_array, obs), to_array(rewards), *flags, found

    # State.

    @property
    def OBSTACLE(self) -> str:
        """Why the env cannot continue where it stood, or `""`."""
        has_state = hasattr(self.env, "get_state") and hasattr(self.env, "set_state")
        return "" if has_state else f"{type(self.env).__name__} has no get_state and set_state"

    def get_state(self) -> dict[str, Any]:
        """Return the state of the env, as plain data, and the latest observations."""
        latest = None if self._latest is None else map_tree(to_array, self._latest)
        return {"env": self.env.get_state(), "latest": latest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        self.env.set_state(state["env"])
        latest = state["latest"]
        self._latest = None if latest is None else map_tree(lambda leaf: torch.tensor(leaf, device=self.device), latest)


def to_array(tensor: Tensor) -> Any:
    """Return a copy of a tensor in the memory of the host, as an array."""
    return tensor.detach().cpu().numpy().copy()


def as_arrays(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Return infos without final observations, and with arrays in place of tensors, at any depth of dicts."""
    return {
        key: as_arrays(value)
        if isinstance(value, Mapping)
        else (to_array(value) if isinstance(value, Tensor) else value)
        for key, value in infos.items()
        if key.removeprefix("_") not in FINAL_OBS
    }
