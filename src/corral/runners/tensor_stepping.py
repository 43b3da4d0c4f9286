"""Stepping a vector env of tensors: observations, actions and rewards stay on its device from step to step."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from corral.core.tree import Tree, map_tree
from corral.envs.checks import first_bad_value
from corral.envs.sub_envs import original
from corral.envs.tensor_env import as_arrays, to_array
from corral.episodes.rollout import Rollout
from corral.episodes.tensor_rollout import TensorRollout
from corral.exploration.sampling import StochasticSampling
from corral.runners.sample_modes import SampleMode
from corral.runners.stepping import SingleAgentStepping

if TYPE_CHECKING:
    from corral.modules.spec import ModuleSpec

log = logging.getLogger("corral")


class TensorStepping(SingleAgentStepping):
    """Steps a vector env of tensors, and writes its rollouts on the device: nothing is copied to the host in a step.

    What looks at single episodes or needs arrays, such as callbacks of episodes and transforms, gets them: the env is
    then stepped as any other, and each step is copied to the host and back. On the CPU both ways give the same numbers.

    Args:
        runner: The runner.
    """

    def make_actors(self, module_specs: Mapping[str, ModuleSpec]) -> None:
        """Make the actor, and find out whether the data can stay on the device."""
        super().make_actors(module_specs)
        self._device: torch.device = self.host.env.device  # type: ignore[attr-defined]
        self.setting_of_arrays = self._find_setting_of_arrays()
        if self.setting_of_arrays:
            log.info("env %r: its steps are copied to the host because of %s.", self.host.name, self.setting_of_arrays)
            return
        self._module, self._version = self._actor.module, self.runner.weights_version
        self._generator: torch.Generator | None = None  # on the CPU noise is drawn as for arrays
        if self._device.type != "cpu":
            self._module = copy.deepcopy(self._actor.module).to(self._device)
            self._generator = torch.Generator(self._device)
            self._generator.manual_seed(int(self.runner.rng.integers(2**62)))

    def _find_setting_of_arrays(self) -> str:
        """Return the setting because of which actions are chosen on arrays, or `""`."""
        actor, runner = self._actor, self.runner
        exploration = actor.exploration
        if runner.shows_infos:
            return "callbacks"
        if actor.transforms is not None:
            return "env_runners.transforms"
        is_plain = actor.memory is None and not (actor.is_heuristic or actor.has_action_mask or actor.module.is_noisy)
        if not is_plain or "has_tensor_form" not in vars(type(actor.distribution)):
            return "rl_module"
        if type(exploration) is not StochasticSampling or exploration.random_timesteps:
            return "exploration.exploration_config"
        return ""

    # A rollout.

    def allocate(self, num_rows: int) -> Rollout:
        """Return a rollout with room for so many rows."""
        if self.setting_of_arrays:
            return super().allocate(num_rows)
        actor, host = self._actor, self.host
        rollout = TensorRollout.on_device(num_rows, host.num_envs, host.space, actor.distribution, self._device)
        rollout.observation_space, rollout.action_space = host.observation_space, actor.action_space
        return rollout

    def receive_reset(self, rollout: Rollout, obs: Any) -> None:
        """Write the observations of a reset, which are arrays, into row 0."""
        if self.setting_of_arrays:
            super().receive_reset(rollout, obs)
        else:
            self._write(rollout.obs, 0, map_tree(torch.from_numpy, obs))

    def resume(self, rollout: Rollout) -> None:
        """Write the last observations into row 0."""
        if self.setting_of_arrays:
            super().resume(rollout)
        else:
            self._write(rollout.obs, 0, self._last_obs)

    @staticmethod
    def _write(columns: Tree, row: int, obs: Tree) -> None:
        map_tree(lambda column, leaf: column[row].copy_(leaf), columns, obs)

    def step_rows(
        self, rollout: Rollout, num_rows: int, mode: SampleMode, timestep: int, *, explore: bool, random_actions: bool
    ) -> None:
        """Step `num_rows` times, on the device."""
        if self.setting_of_arrays:
            arguments = {"explore": explore, "random_actions": random_actions}
            return super().step_rows(rollout, num_rows, mode, timestep, **arguments)
        assert isinstance(rollout, TensorRollout)
        self._refresh_module()
        step, clock, seconds = self.host.step_tensors, time.perf_counter, self.runner.timers.seconds
        to_env = self._actor.distribution.tensor_to_env
        obs, actions, dist_inputs, finals = rollout.obs, rollout.actions, rollout.dist_inputs, rollout.finals
        rewards, terminated, truncated = rollout.rewards, rollout.terminated, rollout.truncated
        now = clock()
        for t in range(rollout.num_rows, rollout.num_rows + num_rows):
            row = obs[t] if isinstance(obs, Tensor) else map_tree(lambda column, t=t: column[t], obs)
            with torch.inference_mode():
                dist_inputs[t], actions[t] = self._choose(row, explore, random_actions)
            inferred = clock()
            try:
                next_obs, rewards[t], terminated[t], truncated[t], infos, final = step(to_env(actions[t]))
            except Exception as error:
                raise self.host.error("step", t, error) from original(error)
            finals.append(final)
            rollout.num_rows = t + 1
            stepped = clock()
            self._write(obs, t + 1, next_obs)
            if self.runner.keeps_infos and infos:
                self.keep_infos(rollout, t + 1, as_arrays(infos), to_array(terminated[t] | truncated[t]))
            rollout.row_times_s[t] = after = clock()
            seconds["inference"] += inferred - now
            seconds["env_step"] += stepped - inferred
            seconds["storage"] += after - stepped
            now = after
        mode.settle(rollout)

    def _refresh_module(self) -> None:
        """Copy new weights to the device."""
        if self._module is not self._actor.module and self._version != self.runner.weights_version:
            self._module.load_state_dict(self._actor.module.state_dict())
            self._version = self.runner.weights_version

    def _choose(self, obs: Tree, explore: bool, random_actions: bool) -> tuple[Tensor, Tensor]:
        """Return the outputs of the policy `[N, D]` and module actions `[N, ...]` for observations `[N, ...]`."""
        distribution, num_envs = self._actor.distribution, self.host.num_envs
        dist_inputs: Tensor = self._module.policy(obs)
        if random_actions:
            return dist_inputs, torch.from_numpy(distribution.random(self.runner.rng, num_envs)).to(self._device)
        if not explore:
            return dist_inputs, distribution.tensor_mode(dist_inputs)
        if self._generator is None:
            noise = torch.from_numpy(distribution.noise(self.runner.rng, (num_envs,)))
        else:
            noise = distribution.tensor_noise(self._generator, num_envs)
        return dist_inputs, distribution.tensor_sample(dist_inputs, noise)

    def finish(self, rollout: Rollout, *, explore: bool, timestep: int) -> Rollout:
        """Return the complete rollout, on the device or as arrays, and keep the last row for the next one.

        Raises:
            EnvError: An observation or a reward is not finite; row and sub-env are named.
        """
        if self.setting_of_arrays:
            return super().finish(rollout, explore=explore, timestep=timestep)
        assert isinstance(rollout, TensorRollout)
        rollout.copy_to_host()
        if rollout.num_rows:
            if not rollout.is_finite():
                bad = first_bad_value(rollout.to_arrays(), self.host.space, 0, rollout.num_rows, callbacks=False)
                raise self.host.bad_value(*(bad or (0, 0, "observation holds NaN or infinity (from reset)")))
            self._last_obs = map_tree(lambda leaf: leaf[-1].clone(), rollout.obs)
            self._last_infos = None
        if self.runner.config.ON_POLICY:
            distribution = self._actor.distribution
            flat = rollout.dist_inputs.flatten(0, 1), rollout.actions.flatten(0, 1)
            with torch.no_grad():
                rollout.columns["logp"] = distribution.logp(*flat).reshape(rollout.rewards.shape)
        else:
            rollout.columns["logp"] = torch.full_like(rollout.rewards, torch.nan)
        return rollout if self.runner.takes_tensors else rollout.to_arrays()

    # State.

    def get_unfinished(self) -> dict[str, Any]:
        """Return the last observations, and the generator of the device."""
        if self.setting_of_arrays:
            return super().get_unfinished()
        on_device, self._last_obs = self._last_obs, map_tree(to_array, self._last_obs)
        try:
            state = super().get_unfinished()
        finally:
            self._last_obs = on_device
        return state if self._generator is None else {**state, "generator": to_array(self._generator.get_state())}

    def set_unfinished(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_unfinished`."""
        super().set_unfinished(state)
        if self.setting_of_arrays:
            return
        self._last_obs = map_tree(lambda leaf: torch.from_numpy(leaf).to(self._device), self._last_obs)
        if self._generator is not None and "generator" in state:
            self._generator.set_state(torch.from_numpy(state["generator"]))
