"""VMAS's multi-robot simulator as a tensor vector env (https://github.com/proroklab/VectorizedMultiAgentSimulator)."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from corral.core.devices import find_tensor_device
from corral.core.ids import AgentID
from corral.core.tree import Tree, map_tree
from corral.envs.tensor_env import TensorVectorEnv
from corral.envs.tensor_rows import RowKeeper
from corral.errors import ConfigError, MissingPackageError, nearest

_FIXED = {"dict_spaces": True, "terminated_truncated": True, "grad_enabled": False, "wrapper": None}
"""Arguments of `vmas.make_env` that this class relies on."""


class VmasVectorEnv(TensorVectorEnv):
    """N sub-envs of a scenario of VMAS (Bettini et al., "VMAS", arXiv:2207.03530), with one id for each agent.

    An episode ends for all agents together. Actions outside of their bounds are clipped. Infos have what the scenario
    reports, by agent, and `final_obs` in each step that ends an episode.

    VMAS can reset all sub-envs, or one. Where some have ended, all are reset at once, and the rows of the others are
    put back in all tensors that the scenario holds. What a scenario shares between all sub-envs, such as which landmark
    of `simple_push` is the goal, is chosen when all of them are reset together. A step waits for the device once, to
    learn whether an episode has ended, and VMAS itself waits to check the actions of each agent.

    Args:
        scenario: Name of a scenario, such as `"balance"`, or a `BaseScenario` of VMAS.
        num_envs: Number of sub-envs N.
        device: Device of all tensors.
        max_steps: Steps after which an episode is truncated; `None` leaves its end to the scenario.
        seed: Seed of what the scenario draws when it is made, and until the first `reset` with a seed.
        **settings: Other arguments of `vmas.make_env`, such as `continuous_actions=False`, and settings of the
            scenario, such as `n_agents=3`.

    Attributes:
        vmas_env: Env of VMAS.

    Raises:
        MissingPackageError: VMAS is not installed.
        ConfigError: There is no such scenario, or it does not have a setting.
    """

    def __init__(
        self,
        scenario: Any,
        num_envs: int,
        device: str | torch.device = "cpu",
        max_steps: int | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        """Make the env of VMAS, and read its spaces."""
        make_env = _find_make_env(scenario)
        self.num_envs = num_envs
        self.device = find_tensor_device(device)
        self._random_states = _seed_random_states(np.random.SeedSequence(seed), self.device)
        for name in settings.keys() & _FIXED.keys():
            raise ConfigError(f"VmasVectorEnv: {name} is always {_FIXED[name]!r}: leave it out.")
        arguments = {"num_envs": num_envs, "device": self.device, "max_steps": max_steps, "clamp_actions": True}
        with self._use_random_states(), warnings.catch_warnings():
            warnings.filterwarnings("error", "Scenario kwargs", UserWarning)
            try:
                self.vmas_env = make_env(scenario, **arguments | _FIXED | settings)
            except UserWarning as warning:
                if not str(warning).startswith("Scenario kwargs"):
                    raise
                raise ConfigError(f"VmasVectorEnv: a setting is not known to {scenario!r}. {warning}") from None
        self.possible_agents = tuple(agent.name for agent in self.vmas_env.agents)
        self.single_observation_space = _convert_space(self.vmas_env.observation_space)
        self.single_action_space = _convert_space(self.vmas_env.action_space)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Reset all sub-envs; see `TensorVectorEnv.reset`. There are no options."""
        if seed is not None:
            self._random_states = _seed_random_states(np.random.SeedSequence(seed), self.device)
        with self._use_random_states():
            return self.vmas_env.reset(), {}

    def step(
        self, actions: Mapping[AgentID, Tensor]
    ) -> tuple[dict[str, Tree], dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        # VMAS adds an axis to actions [N] in place: a view keeps the tensors of the caller as they are.
        columns = [actions[agent].view(self.num_envs, -1) for agent in self.possible_agents]
        with self._use_random_states():
            obs, rewards, terminated, truncated, infos = self.vmas_env.step(columns)
            rewards = {agent: reward.reshape(-1).float() for agent, reward in rewards.items()}
            ended = terminated | truncated
            num_ended = int(ended.sum())
            if num_ended:
                infos["final_obs"] = obs
                obs = self.vmas_env.reset() if num_ended == self.num_envs else reset_rows(self.vmas_env, ended, obs)
        return obs, rewards, terminated, truncated, infos

    @contextmanager
    def _use_random_states(self) -> Iterator[None]:
        """Let VMAS draw from the random states of this env, and not from states that all its envs share."""
        from vmas.simulator.environment import Environment

        shared, on_device = Environment.vmas_random_state, self._random_states[3:]
        others = list(shared)
        shared[:] = self._random_states[:3]
        others_on_device = [torch.cuda.get_rng_state(self.device) for _ in on_device]
        for device_state in on_device:
            torch.cuda.set_rng_state(device_state, self.device)
        try:
            yield
        finally:
            self._random_states = [*shared, *(torch.cuda.get_rng_state(self.device) for _ in on_device)]
            shared[:] = others
            for device_state in others_on_device:
                torch.cuda.set_rng_state(device_state, self.device)


def reset_rows(vmas_env: Any, mask: Tensor, obs: Mapping[str, Tree]) -> dict[str, Tree]:
    """Reset some sub-envs of an env of VMAS, and return the observations of all.

    Args:
        vmas_env: Env of VMAS, with `dict_spaces`.
        mask: The sub-envs to reset, bool `[N]`.
        obs: Observations of the others by agent, trees of `[N, ...]`.
    """
    keeper, steps = RowKeeper(_roots_of(vmas_env)), vmas_env.steps
    fresh = vmas_env.reset()
    keeper.keep_rows_except(mask)
    vmas_env.steps = torch.where(mask, 0, steps)

    def choose(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(mask.view(-1, *[1] * (old.ndim - 1)), new, old)

    return {agent: map_tree(choose, fresh[agent], obs[agent]) for agent in fresh}


def _roots_of(vmas_env: Any) -> dict[str, Any]:
    """Return the objects of an env that hold its state; scenarios refer to agents and landmarks in changing places."""
    world = vmas_env.world
    entities = {f"entity{i}": entity for i, entity in enumerate([*world.agents, *world.landmarks])}
    return {"scenario": vmas_env.scenario, **entities}


def _torch_devices(device: torch.device) -> list[torch.device]:
    """Return the devices whose generators VMAS draws from."""
    return [torch.device("cpu"), *([device] if device.type == "cuda" else [])]


def _seed_random_states(seeds: np.random.SeedSequence, device: torch.device) -> list[Any]:
    """Return states of the generators of torch, NumPy and Python, and of torch on a GPU, as VMAS stores them."""
    seed = int(seeds.generate_state(1)[0])
    torch_state, *device_state = [torch.Generator(at).manual_seed(seed).get_state() for at in _torch_devices(device)]
    return [torch_state, np.random.RandomState(seed).get_state(), random.Random(seed).getstate(), *device_state]


def _find_make_env(scenario: Any) -> Any:
    """Return `vmas.make_env`, if the scenario exists."""
    try:
        import vmas
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "vmas":
            raise
        raise MissingPackageError("VmasVectorEnv needs VMAS: run `pip install 'corral[vmas]'`.") from error
    names = [*vmas.scenarios, *vmas.mpe_scenarios, *vmas.debug_scenarios]
    if isinstance(scenario, str) and scenario.removesuffix(".py") not in names:
        raise ConfigError(f"VmasVectorEnv: VMAS has no scenario {scenario!r}. {nearest(scenario, names)}")
    return vmas.make_env


def _convert_space(space: Any) -> spaces.Space[Any]:
    """Return the space of Gymnasium for a space of gym."""
    kind = type(space).__name__
    if kind == "Dict":
        return spaces.Dict({key: _convert_space(part) for key, part in space.spaces.items()})
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    return spaces.Box(space.low, space.high, space.shape, np.float32)
