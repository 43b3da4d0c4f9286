"""Stepping a vector env of tensors: observations, actions and rewards stay on its device from step to step."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from corral.core.interrupts import interruptible
from corral.core.tree import Tree, map_tree
from corral.envs.checks import first_bad_value
from corral.envs.sub_envs import original
from corral.envs.tensor_env import as_arrays, to_array
from corral.episodes.rollout import Rollout
from corral.episodes.tensor_rollout import TensorRollout
from corral.runners.device_actor import DeviceActor, find_setting_of_arrays
from corral.runners.sample_modes import SampleMode
from corral.runners.stepping import SingleAgentStepping

if TYPE_CHECKING:
    from corral.modules.spec import ModuleSpec

log = logging.getLogger("corral")


class TensorStepping(SingleAgentStepping):
    """Steps a vector env of tensors, and writes its rollouts on the device: nothing is copied to the host in a step.

    What looks at single episodes or needs arrays, such as callbacks of episodes and memory, gets them: the env is then
    stepped as any other, and each step is copied to the host and back. On the CPU both ways give the same numbers.

    Args:
        runner: The runner.
    """

    def make_actors(self, module_specs: Mapping[str, ModuleSpec]) -> None:
        """Make the actor, and find out whether the data can stay on the device."""
        super().make_actors(module_specs)
        is_on_policy, shows_infos = self.runner.config.ON_POLICY, self.runner.shows_infos
        self.setting_of_arrays = "callbacks" if shows_infos else find_setting_of_arrays(self._actor, is_on_policy)
        self.is_on_device = not self.setting_of_arrays
        if self.is_on_device:
            self._on_device = DeviceActor(self._actor, self.host.device)
        else:
            log_setting_of_arrays(self.host.name, self.setting_of_arrays)

    # A rollout.

    def allocate(self, num_rows: int) -> Rollout:
        """Return a rollout with room for so many rows."""
        if self.setting_of_arrays:
            return super().allocate(num_rows)
        actor, host = self._actor, self.host
        rollout = TensorRollout.on_device(num_rows, host.num_envs, host.space, actor.distribution, host.device)
        rollout.observation_space, rollout.action_space = host.observation_space, actor.action_space
        rollout.pipeline = None if actor.transforms is None else actor.transforms.pipeline
        return rollout

    def receive_reset(self, rollout: Rollout, obs: Any) -> None:
        """Write the observations of a reset, which are arrays, into row 0."""
        if self.setting_of_arrays:
            super().receive_reset(rollout, obs)
        else:
            write_tensors(rollout.obs, 0, map_tree(torch.from_numpy, obs))

    def resume(self, rollout: Rollout) -> None:
        """Write the last observations into row 0."""
        if self.setting_of_arrays:
            super().resume(rollout)
        else:
            write_tensors(rollout.obs, 0, self._last_obs)

    @interruptible
    def step_rows(
        self, rollout: Rollout, num_rows: int, mode: SampleMode, timestep: int, *, explore: bool, random_actions: bool
    ) -> None:
        """Step `num_rows` times, on the device."""
        how = {"explore": explore, "random_actions": random_actions}
        if self.setting_of_arrays:
            return super().step_rows(rollout, num_rows, mode, timestep, **how)
        assert isinstance(rollout, TensorRollout)
        self._on_device.refresh()
        step, clock, seconds = self.host.step_tensors, time.perf_counter, self.runner.timers.seconds
        choose, to_env = self._on_device.choose, self._actor.distribution.to_env
        obs, actions, dist_inputs = rollout.obs, rollout.actions, rollout.dist_inputs
        rewards, terminated, truncated = rollout.rewards, rollout.terminated, rollout.truncated
        now = clock()
        for t in range(rollout.num_rows, rollout.num_rows + num_rows):
            row = obs[t] if isinstance(obs, Tensor) else map_tree(lambda column, t=t: column[t], obs)
            dist_inputs[t], actions[t] = choose(row, self.host.num_envs, timestep=timestep, **how)
            timestep += self.runner.num_samplers * self.host.num_envs
            inferred = clock()
            try:
                next_obs, rewards[t], terminated[t], truncated[t], infos, final = step(to_env(actions[t]))
                rollout.num_rows = t + 1  # at once, so that an interrupt below finds the steps counted
                stepped = clock()
                write_tensors(obs, t + 1, next_obs)
                rollout.finals.append(as_finals(obs, final))
            except Exception as error:
                raise self.host.error("step", t, error) from original(error)
            if self.runner.keeps_infos and infos:
                self.keep_infos(rollout, t + 1, as_arrays(infos), to_array(terminated[t] | truncated[t]))
            rollout.row_times_s[t] = after = clock()
            seconds["inference"] += inferred - now
            seconds["env_step"] += stepped - inferred
            seconds["storage"] += after - stepped
            now = after
        mode.settle(rollout)

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
            self._last_obs, self._last_infos = map_tree(lambda leaf: leaf[-1].clone(), rollout.obs), None
        self._on_device.fill_logp(rollout, is_needed=self.runner.config.ON_POLICY)
        return rollout if self.runner.takes_tensors else rollout.to_arrays()

    # State.

    def get_unfinished(self) -> dict[str, Any]:
        """Return the last observations, and the generator of the device."""
        if self.setting_of_arrays:
            return super().get_unfinished()
        on_device, self._last_obs = self._last_obs, map_tree(to_array, self._last_obs)
        try:
            return {**super().get_unfinished(), "generator": self._on_device.get_state()}
        finally:
            self._last_obs = on_device

    def set_unfinished(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_unfinished`, on tensors or on arrays."""
        super().set_unfinished(state)
        if not self.setting_of_arrays:
            self._last_obs = map_tree(lambda leaf: torch.from_numpy(leaf).to(self.host.device), self._last_obs)
            self._on_device.set_state(state.get("generator"))


def write_tensors(columns: Tree, row: int, values: Tree) -> None:
    """Write a tree of tensors `[N, ...]` to a row of columns `[T, N, ...]`.

    Raises:
        ValueError: The shapes differ; torch alone would broadcast a smaller tensor over the row.
    """
    if not isinstance(columns, Tensor):
        map_tree(lambda column, value: write_tensors(column, row, value), columns, values)
        return
    check_like("observation", columns, values)
    columns[row] = values


def as_finals(columns: Tree, final: Tree) -> Tree:
    """Return the final observations of a row, a tree of `[N, ...]`, in the dtypes of the columns of observations.

    Raises:
        ValueError: A shape or a dtype does not fit.
    """
    if final is None:
        return None

    def as_final(column: Tensor, leaf: Tensor) -> Tensor:
        check_like("final_obs", column, leaf)
        return leaf.to(column.dtype)

    return map_tree(as_final, columns, final)


def check_like(name: str, column: Tensor, values: Tensor) -> None:
    """Refuse values `[N, ...]` that would be broadcast over a row of a column, or lose more than precision.

    Raises:
        ValueError: Names what does not fit.
    """
    if values.shape != column.shape[1:]:
        raise ValueError(f"{name} must have shape {[*column.shape[1:]]}, got {[*values.shape]}")
    if not torch.can_cast(values.dtype, column.dtype):
        raise ValueError(f"{name} must have dtype {column.dtype}, got {values.dtype}: convert it with .to(...)")


def log_setting_of_arrays(name: str, setting: str) -> None:
    """Log why the steps of an env of tensors are copied to the host."""
    log.info("env %r: its steps are copied to the host because of %s.", name, setting)
