"""A module on the device of an env of tensors, with what chooses its actions there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from corral.core.tree import Tree
from corral.exploration.base import StochasticSampling
from corral.exploration.epsilon import EpsilonGreedy, PerWorkerEpsilonGreedy
from corral.exploration.noise import GaussianNoise
from corral.modules.distributions import DiagGaussian

if TYPE_CHECKING:
    from corral.data.episodes.tensor_rollout import TensorRollout
    from corral.modules.transforms.pipeline import Pipeline
    from corral.runners.actor import Actor


def needs_arrays(actor: Actor, is_on_policy: bool) -> str:
    """Return the setting because of which the actions of an actor are chosen on arrays, or `""`.

    Args:
        actor: The actor.
        is_on_policy: Whether what learns needs the log-likelihood of the actions, which even draws have too.
    """
    exploration: Any = actor.exploration
    if actor.transforms is not None and not actor.transforms.pipeline.has_tensor_form:
        return "env_runners.transforms"
    is_plain = actor.memory is None and not (actor.is_heuristic or actor.has_action_mask or actor.module.is_noisy)
    # A subclass that draws in another way inherits the form on tensors, which does not.
    if not is_plain or "has_tensor_form" not in vars(type(actor.distribution)):
        return "rl_module"
    kind = type(exploration)
    is_known = kind in (StochasticSampling, EpsilonGreedy, PerWorkerEpsilonGreedy) or (
        kind is GaussianNoise and isinstance(actor.distribution, DiagGaussian)
    )
    if not is_known or (is_on_policy and _random_timesteps(exploration)):
        return "exploration.exploration_config"
    return ""


def _random_timesteps(exploration: Any) -> int:
    """Return with how many timesteps of random actions an exploration begins."""
    return getattr(exploration, "random_timesteps", 0)


class DeviceActor:
    """Chooses actions for tensors `[B, ...]`. On the CPU it draws the numbers that the actor would draw for arrays.

    Args:
        actor: The actor, whose weights count.
        device: Device of the env.
    """

    def __init__(self, actor: Actor, device: torch.device) -> None:
        """Copy the module to the device; on the CPU it is the actor's own."""
        self._actor, self._device = actor, device
        self.distribution = actor.distribution
        self._module, self._num_loads = actor.module, -1
        self._pipeline: Pipeline | None = None
        self._transform: Callable[[Tree], Tree] | None = None
        self._generator: torch.Generator | None = None
        if device.type != "cpu":
            self._module = copy.deepcopy(actor.module).to(device)
            self._generator = torch.Generator(device)
            self._generator.manual_seed(int(actor.row_distribution.rng.integers(2**62)))

    def refresh(self) -> None:
        """Copy weights and statistics of transforms to the device if there are others since the last call."""
        transforms = self._actor.transforms
        if transforms is not None and transforms.pipeline is not self._pipeline:
            self._pipeline = transforms.pipeline
            self._transform = self._pipeline.tensor_form(self._device)
        num_loads = self._actor.inference.num_loads
        if self._module is not self._actor.module and self._num_loads != num_loads:
            self._module.load_state_dict(self._actor.module.state_dict())
            self._num_loads = num_loads

    def choose(
        self, obs: Tree, num_rows: int, *, timestep: int, explore: bool, random_actions: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the policy `[B, D]` and module actions `[B, ...]`.

        Args:
            obs: Observations of the env, a tree of `[B, ...]`.
            num_rows: B.
            timestep: Env steps of all runners so far.
            explore: Whether to draw the actions; otherwise they are the most likely ones.
            random_actions: Whether to draw actions evenly from the action space instead.
        """
        with torch.inference_mode():
            if self._transform is not None:
                obs = self._transform(obs)
            dist_inputs: Tensor = self._module.policy(obs)
            exploration: Any = self._actor.exploration
            if random_actions or (explore and timestep < _random_timesteps(exploration)):
                drawn = self.distribution.random(self._actor.row_distribution.rng, num_rows)
                return dist_inputs, torch.from_numpy(drawn).to(self._device)
            if not explore:
                return dist_inputs, self.distribution.mode(dist_inputs)
            if isinstance(exploration, GaussianNoise):
                return dist_inputs, self._add_noise(exploration, self.distribution.mode(dist_inputs), timestep)
            if isinstance(exploration, EpsilonGreedy):
                return dist_inputs, self._choose_epsilon_greedily(exploration, dist_inputs, timestep)
            if self._generator is None:
                noise = torch.from_numpy(self._actor.row_distribution.next_noise(num_rows))
            else:
                noise = self.distribution.noise(self._generator, (num_rows,))
            return dist_inputs, self.distribution.sample(dist_inputs, noise)

    def _add_noise(self, exploration: GaussianNoise, actions: Tensor, timestep: int) -> Tensor:
        """Return the most likely actions `[B, ...]` with noise; see `ActionNoise`."""
        gaussian: Any = self.distribution
        scale = float(exploration.scales(timestep, len(actions)))
        if self._generator is None:
            noise = torch.from_numpy(exploration.noise(tuple(actions.shape), self._actor.row_distribution.rng))
        else:
            drawn = torch.randn(actions.shape, generator=self._generator, device=self._device)
            noise = exploration.stddev * drawn
        noisy: Tensor = gaussian.from_unit(gaussian.to_unit(actions) + scale * noise)
        return noisy

    def _choose_epsilon_greedily(self, exploration: EpsilonGreedy, dist_inputs: Tensor, timestep: int) -> Tensor:
        """Return the best actions `[B, ...]`, each replaced by a random action with probability epsilon."""
        if self._generator is None:
            row = self._actor.row_distribution
            row.inputs = dist_inputs.numpy()
            chosen, _ = exploration.get_exploration_action(action_distribution=row, timestep=timestep)
            return torch.from_numpy(chosen)
        num_rows = len(dist_inputs)
        epsilons: Any = exploration.epsilons(timestep, num_rows)
        if isinstance(epsilons, np.ndarray):  # one per sub-env
            epsilons = torch.from_numpy(epsilons).to(self._device)
        randomly = torch.rand(num_rows, generator=self._generator, device=self._device) < epsilons
        best, noise = self.distribution.mode(dist_inputs), self.distribution.noise(self._generator, (num_rows,))
        evenly = self.distribution.sample(torch.zeros_like(dist_inputs), noise)  # equal logits
        return torch.where(randomly.reshape(-1, *[1] * (best.ndim - 1)), evenly, best)

    def fill_logp(self, rollout: TensorRollout, *, is_needed: bool) -> None:
        """Fill the column `logp` of a rollout that is complete except for it, with NaN if nothing learns from it."""
        if not is_needed:
            rollout.columns["logp"] = torch.full_like(rollout.rewards, torch.nan)
            return
        flat = rollout.dist_inputs.flatten(0, 1), rollout.actions.flatten(0, 1)
        with torch.no_grad():
            rollout.columns["logp"] = self.distribution.logp(*flat).reshape(rollout.rewards.shape)

    def get_state(self) -> Any:
        """Return the state of the generator of the device as an array; `None` on the CPU, where the actor draws."""
        return None if self._generator is None else self._generator.get_state().numpy()

    def set_state(self, state: Any) -> None:
        """Continue from a state of `get_state`, unless it is of another kind of device."""
        if self._generator is not None and state is not None:
            self._generator.set_state(torch.from_numpy(state))
