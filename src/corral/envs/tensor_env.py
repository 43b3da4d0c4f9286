"""The contract of vector envs whose data are tensors on one device, such as simulators on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from corral.core.devices import warn_of_missing_finals
from corral.core.ids import AgentID
from corral.core.tree import Tree, copy_nested, leaves, map_tree
from corral.envs.adapted_vector import AdaptedVectorEnv
from corral.errors import EnvError

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
        """Reset all sub-envs, and return their observations and infos.

        Args:
            seed: Seed of the generator of all sub-envs; with `None` the generator stays as it is.
            options: Not used by most envs.

        Returns:
            Observations, a tree of tensors `[N, ...]`, and infos.
        """

    @abstractmethod
    def step(self, actions: Tree) -> tuple[Tree, Tree, Tensor, Tensor, dict[str, Any]]:
        """Step all sub-envs, and return what they give.

        Final observations belong to the caller: later steps must not write into them. The other tensors are copied
        before the next step.

        Args:
            actions: Actions in the units of the action space, a tensor `[N, ...]` on the device.

        Returns:
            Observations, a tree of `[N, ...]`, of the next episode where one has ended; rewards, floats `[N]`;
            `terminated` and `truncated`, bool `[N]`; and infos. Where an episode has ended, `infos["final_obs"]`, a
            tree of `[N, ...]`, holds its last observation; its other rows may hold anything. It may be left out in a
            step that ends no episode. Other infos are of the step, also where it ended an episode.
        """

    def close(self) -> None:  # noqa: B027 (most envs have nothing to release)
        """Release what the env holds, such as a simulator."""


class TensorEnvAdapter(AdaptedVectorEnv):
    """A tensor vector env as a vector env of Gymnasium: `reset` and `step` take and return arrays.

    `reset_tensors` and `step_tensors` leave the data on the device. An env that gives no final observations, such as
    the envs of Isaac Lab, is said to have ended where the last action was chosen, as rsl_rl does; see
    `warn_of_missing_finals`.

    Args:
        env: A `TensorVectorEnv`, or an object of another library with the same attributes and methods.

    Attributes:
        env: The same.
        device: Device of its tensors.

    Raises:
        EnvError: A space is missing, or the env does not reset sub-envs in the step that ends their episodes.
    """

    INFOS_ARE_OF_STEPS = True
    """Whether infos of a step that ended an episode are of this step, and not of the reset, without `final_info`."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.device = torch.device(env.device)
        mode = self.metadata["autoreset_mode"]
        if mode not in (None, AutoresetMode.SAME_STEP):
            raise EnvError(
                f"{type(env).__name__} gives tensors and has metadata['autoreset_mode']={mode}: a tensor vector env "
                "must reset a sub-env in the step that ends its episode (SAME_STEP)"
            )
        self.metadata["autoreset_mode"] = AutoresetMode.SAME_STEP
        self._latest: Tree = None  # observations from which the next actions are chosen, as arrays

    # On the device.

    def reset_tensors(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, Any]:
        """Reset all sub-envs, and return observations, a tree of tensors `[N, ...]`, and infos.

        Raises:
            EnvError: The observations are no tensors.
        """
        with torch.no_grad():
            obs, infos = self.env.reset(seed=seed, options=options)
        if not all(isinstance(leaf, Tensor) for leaf in leaves(obs)):
            raise EnvError(
                f"{type(self.env).__name__} has an attribute device, so that it must give tensors, but reset() gave "
                f"{type(leaves(obs)[0]).__name__}: remove the attribute, or return tensors on this device"
            )
        return obs, infos

    def step_tensors(self, actions: Tree) -> tuple[Tree, Tensor, Tensor, Tensor, Any, Tree]:
        """Step all sub-envs, with actions on the device, and return what they give.

        Returns:
            What `TensorVectorEnv.step` returns, rewards and flags as `[N]`, and the final observations: a tree of
            `[N, ...]` that counts where an episode ended, or `None` if the env gives none in this step.
        """
        obs, rewards, terminated, truncated, infos, final = self._step(actions)
        flags = self.checked("terminated", terminated).bool(), self.checked("truncated", truncated).bool()
        return obs, self.checked("rewards", rewards), *flags, infos, final

    def _step(self, actions: Tree) -> tuple[Any, ...]:
        """Return what the env gives, as it is, and its final observations, or `None`."""
        with torch.no_grad():
            *found, infos = self.env.step(actions)
        return *found, infos, next((infos[key] for key in FINAL_OBS if key in infos), None)

    def checked(self, name: str, column: Any) -> Tensor:
        """Return rewards or flags of a step, after a check that they are a tensor `[N]`, which nothing broadcasts.

        Raises:
            ValueError: They are not; the caller adds the name of the env and the step.
        """
        if not isinstance(column, Tensor) or column.shape != (self.num_envs,):
            got = f"a tensor {[*column.shape]}" if isinstance(column, Tensor) else type(column).__name__
            remedy = ": return it with .squeeze(-1)" if isinstance(column, Tensor) and column.ndim == 2 else ""
            raise ValueError(f"{name} from step() must be a tensor [{self.num_envs}], got {got}{remedy}")
        return column

    # As arrays.

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = self.reset_tensors(seed, options)
        self._latest = map_tree(to_array, obs)
        return self._latest, self.infos_as_arrays(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        on_device = map_tree(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)).to(self.device), actions)
        obs, rewards, terminated, truncated, infos, final = self.step_tensors(on_device)
        ends = to_array(terminated | truncated)
        found = self.infos_as_arrays(infos)
        if ends.any():
            found |= {"final_obs": self._final_arrays(final), "_final_obs": ends}
        self._latest = map_tree(to_array, obs)
        return self._latest, to_array(rewards), to_array(terminated), to_array(truncated), found

    def infos_as_arrays(self, infos: Mapping[str, Any]) -> dict[str, Any]:
        """Return infos as arrays, without final observations."""
        return as_arrays(infos)

    def _final_arrays(self, final: Tree) -> Tree:
        """Return final observations as arrays; if the env gave none, those from which the last actions were chosen."""
        if final is not None:
            return map_tree(to_array, final)
        warn_of_missing_finals()
        return self._latest

    # State.

    @property
    def OBSTACLE(self) -> str:
        """Why the env cannot continue where it stood, or `""`."""
        has_state = hasattr(self.env, "get_state") and hasattr(self.env, "set_state")
        return "" if has_state else f"{type(self.env).__name__} has no get_state and set_state"

    def get_state(self) -> dict[str, Any]:
        """Return the state of the env, as plain data, and the latest observations."""
        return {"env": self.env.get_state(), "latest": copy_nested(self._latest)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        self.env.set_state(state["env"])
        self._latest = copy_nested(state["latest"])


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
