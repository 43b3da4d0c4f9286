"""Stepping a vector env of tensors with several agents, of which all act in every step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from corral.core.ids import AgentID
from corral.core.interrupts import interruptible
from corral.core.seeding import get_global_rngs, set_global_rngs
from corral.core.spaces import module_observation_space, space_tree
from corral.core.tree import Tree, map_tree
from corral.envs.checks import first_bad_value
from corral.envs.sub_envs import original
from corral.envs.tensor_env import as_arrays, to_array
from corral.episodes.lanes import SeatCarry
from corral.episodes.rollout import EpisodeCarry, Rollout, episode_statistics
from corral.episodes.tensor_agents_rollout import TensorAgentsRollout, TensorLanes
from corral.errors import CheckpointError
from corral.runners.device_actor import DeviceActor, find_setting_of_arrays
from corral.runners.mapping import NUM_TRIALS, agents_of_modules, make_mapping
from corral.runners.multi_agent_stepping import MultiAgentStepping
from corral.runners.sample_modes import SampleMode
from corral.runners.tensor_stepping import as_finals, log_setting_of_arrays, write_tensors

if TYPE_CHECKING:
    from corral.envs.seats import SeatBlock
    from corral.modules.spec import ModuleSpec


@dataclass
class _Group:
    """The agents of a module: seats of one block.

    Attributes:
        block: The block.
        places: Places of the agents in the block, on the device, int64 `[A]`.
        agents: Their ids.
        on_device: Chooses their actions, for lanes `[N * A, ...]`.
        space: Tree of the spaces of an observation.
        carry: Totals of the unfinished episodes of the lanes.
        last_obs: Observations of the lanes after the last rollout.
    """

    block: SeatBlock
    places: torch.Tensor
    agents: list[AgentID]
    on_device: DeviceActor
    space: Tree
    carry: EpisodeCarry
    last_obs: Tree = None

    def of_lanes(self, seats: Tree) -> Tree:
        """Return entries of the block's seats, a tree of `[N, B, ...]`, as entries of the lanes, `[N * A, ...]`."""
        if len(self.agents) == len(self.block.agents):
            return map_tree(lambda leaf: leaf.flatten(0, 1), seats)
        return map_tree(lambda leaf: leaf.index_select(1, self.places).flatten(0, 1), seats)


class TensorAgentsStepping(MultiAgentStepping):
    """Steps a vector env of tensors with several agents, and writes the rollouts of the modules on the device.

    An agent has the same module in all episodes. What looks at single episodes or needs arrays gets them, as with
    `TensorStepping`; so does a mapping that asks for more than the id of the agent.

    Args:
        runner: The runner.
    """

    def make_actors(self, module_specs: Mapping[str, ModuleSpec]) -> None:
        """Make the actors, and find out whether the data can stay on the device."""
        super().make_actors(module_specs)
        self._prepare()

    def set_modules(self, module_specs: Mapping[str, ModuleSpec]) -> bool:
        """Use other modules and the mapping of the config, and return whether all envs must be reset."""
        are_lost = super().set_modules(module_specs)
        self._prepare()
        return are_lost or not self.setting_of_arrays

    def _prepare(self) -> None:
        self.setting_of_arrays = self._find_setting_of_arrays()
        self.is_on_device = not self.setting_of_arrays
        if self.setting_of_arrays:
            log_setting_of_arrays(self.host.name, self.setting_of_arrays)
            return
        agents_of, num_envs = agents_of_modules(self.runner.config, self._seats), self.host.num_envs
        self._groups: dict[str, _Group] = {}
        for module_id, actor in self.actors.items():
            block = self._blocks[module_id]
            agents = [agent for agent in block.agents if agent in agents_of[module_id]]
            if agents:
                if actor.transforms is not None:  # all envs are reset, and the module may have other agents now
                    actor.transforms.restart(num_envs * len(agents))
                self._groups[module_id] = _Group(
                    block,
                    torch.tensor([block.agents.index(agent) for agent in agents], device=self.host.device),
                    agents,
                    DeviceActor(actor, self.host.device),
                    space_tree(module_observation_space(block.observation_space)),
                    EpisodeCarry.fresh(num_envs * len(agents), 0.0),
                )

    def _find_setting_of_arrays(self) -> str:
        if self.runner.shows_infos:
            return "callbacks"
        if not _maps_by_id_alone(self.runner.config, self._seats.agents):
            return "multi_agent.policy_mapping_fn"
        is_on_policy = self.runner.config.ON_POLICY
        return next(filter(None, (find_setting_of_arrays(actor, is_on_policy) for actor in self.actors.values())), "")

    # A rollout.

    def allocate(self, num_rows: int) -> Any:
        """Return a rollout with room for so many rows."""
        if self.setting_of_arrays:
            return super().allocate(num_rows)
        host, names = self.host, np.full(len(self._seats.agents), None, object)
        rollout = TensorAgentsRollout.of_steps(num_rows, host.num_envs, host.device)
        for module_id, group in self._groups.items():
            num_lanes = host.num_envs * len(group.agents)
            distribution = group.on_device.distribution
            part: Any = TensorLanes.on_device(num_rows, num_lanes, group.space, distribution, host.device)
            part.lane_envs = np.repeat(np.arange(host.num_envs), len(group.agents))
            part.lane_agents, part.module_id = group.agents * host.num_envs, module_id
            part.observation_space = module_observation_space(group.block.observation_space)
            part.action_space, transforms = self.actors[module_id].action_space, self.actors[module_id].transforms
            part.pipeline = None if transforms is None else transforms.pipeline
            rollout.modules[module_id] = part
            names[[self._seats.agents.index(agent) for agent in group.agents]] = module_id
        module_ids = np.repeat(names[None], host.num_envs, 0)
        rollout.seat_carry = SeatCarry(self._seats.agents, self._seat_returns(), module_ids)
        return rollout

    def _seat_returns(self) -> NDArray[np.float64]:
        """Return the sums of rewards in the unfinished episodes, float64 `[N, A]`."""
        returns = np.zeros((self.host.num_envs, len(self._seats.agents)))
        for group in self._groups.values():
            seats = [self._seats.agents.index(agent) for agent in group.agents]
            returns[:, seats] = group.carry.returns.reshape(-1, len(seats))
        return returns

    def begin(self, rollout: Rollout) -> None:
        """Forget all episodes, before a reset of all envs with which the rollout begins."""
        if self.setting_of_arrays:
            return super().begin(rollout)
        for group in self._groups.values():
            group.carry = EpisodeCarry.fresh(len(group.carry.counts), 0.0)

    def receive_reset(self, rollout: Rollout, obs: Any) -> None:
        """Write the observations of a reset, which are arrays, into row 0."""
        if self.setting_of_arrays:
            return super().receive_reset(rollout, obs)
        assert isinstance(rollout, TensorAgentsRollout)
        for module_id, group in self._groups.items():
            seats = map_tree(lambda leaf: torch.from_numpy(leaf).to(self.host.device), obs["obs"][group.block.name])
            write_tensors(rollout.modules[module_id].obs, 0, group.of_lanes(seats))

    def resume(self, rollout: Rollout) -> None:
        """Write the last observations into row 0."""
        if self.setting_of_arrays:
            return super().resume(rollout)
        assert isinstance(rollout, TensorAgentsRollout)
        for module_id, group in self._groups.items():
            write_tensors(rollout.modules[module_id].obs, 0, group.last_obs)

    @interruptible
    def step_rows(
        self, rollout: Rollout, num_rows: int, mode: SampleMode, timestep: int, *, explore: bool, random_actions: bool
    ) -> None:
        """Step `num_rows` times, on the device."""
        how = {"explore": explore, "random_actions": random_actions}
        if self.setting_of_arrays:
            return super().step_rows(rollout, num_rows, mode, timestep, **how)
        assert isinstance(rollout, TensorAgentsRollout)
        for group in self._groups.values():
            group.on_device.refresh()
        step, clock, seconds = self.host.step_tensors, time.perf_counter, self.runner.timers.seconds
        now = clock()
        for t in range(rollout.num_rows, rollout.num_rows + num_rows):
            actions = self._choose(rollout, t, timestep, how)
            timestep += self.runner.num_samplers * self.host.num_envs
            inferred = clock()
            try:
                obs, rewards, rollout.terminated[t], rollout.truncated[t], infos, final = step(actions)
                rollout.num_rows = t + 1  # at once, so that an interrupt below finds the steps counted
                stepped = clock()
                rollout.rewards[t] = torch.cat([*rewards.values()], 1).sum(1)
                for module_id, group in self._groups.items():
                    part, name = rollout.modules[module_id], group.block.name
                    write_tensors(part.obs, t + 1, group.of_lanes(obs[name]))
                    part.finals.append(as_finals(part.obs, None if final is None else group.of_lanes(final[name])))
                    part.rewards[t] = group.of_lanes(rewards[name])
            except Exception as error:
                raise self.host.error("step", t, error) from original(error)
            if self.runner.keeps_infos and infos:
                ended = to_array(rollout.terminated[t] | rollout.truncated[t])
                self.keep_infos(rollout, t + 1, as_arrays(infos), ended)
            rollout.row_times_s[t] = after = clock()
            seconds["inference"] += inferred - now
            seconds["env_step"] += stepped - inferred
            seconds["storage"] += after - stepped
            now = after
        mode.settle(rollout)

    def _choose(self, rollout: TensorAgentsRollout, t: int, timestep: int, how: Mapping[str, bool]) -> dict[str, Tree]:
        """Choose the actions of a row, and return them as the vector env takes them, by block `[N, B, ...]`."""
        found: dict[str, Any] = {}
        for module_id, group in self._groups.items():
            part, block, distribution = rollout.modules[module_id], group.block, group.on_device.distribution
            row = map_tree(lambda leaf: leaf[t], part.obs)
            part.dist_inputs[t], part.actions[t] = group.on_device.choose(row, part.num_envs, timestep=timestep, **how)
            chosen = distribution.to_env(part.actions[t])
            lanes = chosen.reshape(-1, len(group.agents), *chosen.shape[1:])
            if len(group.agents) == len(block.agents):
                found[block.name] = lanes
                continue
            if block.name not in found:
                shape = (lanes.shape[0], len(block.agents), *lanes.shape[2:])
                found[block.name] = lanes.new_zeros(shape)
            found[block.name].index_copy_(1, group.places, lanes)
        return found

    def finish(self, rollout: Rollout, *, explore: bool, timestep: int) -> Rollout:
        """Return the complete rollout, on the device or as arrays, and keep the last rows for the next one.

        Raises:
            EnvError: An observation or a reward of an agent is not finite; row, sub-env and agent are named.
        """
        if self.setting_of_arrays:
            return super().finish(rollout, explore=explore, timestep=timestep)
        assert isinstance(rollout, TensorAgentsRollout)
        rollout.copy_to_host()
        if not rollout.num_rows:
            return rollout if self.runner.takes_tensors else rollout.to_arrays()
        returns = {}
        for module_id, group in self._groups.items():
            returns[module_id] = self._finish_part(rollout, rollout.modules[module_id], group)
        self._log(rollout, returns)
        return rollout if self.runner.takes_tensors else rollout.to_arrays()

    def _finish_part(self, rollout: TensorAgentsRollout, part: TensorLanes, group: _Group) -> NDArray[np.float64]:
        """Complete the rollout of a module, and return the returns of episodes that ended here, `[K, A]`."""
        num_agents = len(group.agents)
        part.num_rows = rollout.num_rows
        for name in ("terminated", "truncated"):
            part.columns[name] = rollout.columns[name].repeat_interleave(num_agents, 1)
        part.valid[:], part.row_times_s[:] = rollout.valid.repeat(num_agents, 1), rollout.row_times_s
        part.worker_index, part.weights_version = rollout.worker_index, rollout.weights_version
        part.continues, part.carry = rollout.continues, group.carry
        part.num_env_steps = int(np.count_nonzero(part.valid))
        host = part.copy_to_host()
        if not part.is_finite():
            row, lane, problem = first_bad_value(part.to_arrays(), group.space, 0, part.num_rows, callbacks=False) or (
                0,
                0,
                "observation holds NaN or infinity (from reset)",
            )
            raise self.host.bad_value(row, int(part.lane_envs[lane]), f"agent {part.lane_agents[lane]!r}: {problem}")
        group.last_obs = map_tree(lambda leaf: leaf[-1].clone(), part.obs)
        group.on_device.fill_logp(part, is_needed=self.runner.config.ON_POLICY)
        statistics, group.carry = episode_statistics(host, group.carry)
        return statistics.returns.reshape(-1, num_agents)  # the lanes of a sub-env end in the same row

    def _log(self, rollout: TensorAgentsRollout, returns: Mapping[str, NDArray[np.float64]]) -> None:
        """Log the steps and the returns of agents and modules."""
        num_steps = rollout.num_env_steps
        steps = {module_id: part.num_env_steps for module_id, part in rollout.modules.items()}
        rollout.num_agent_steps = sum(steps.values())
        of_agents = {str(agent): num_steps for group in self._groups.values() for agent in group.agents}
        everyone = dict.fromkeys(map(str, self._seats.agents), 0)
        self._log_agent_counts(steps, {**everyone, **of_agents})
        by_agent: dict[str, list[float]] = {str(agent): [] for agent in self._seats.agents}
        by_module: dict[str, list[float]] = {module_id: [] for module_id in self.lanes}
        for module_id, group in self._groups.items():
            by_module[module_id] = returns[module_id].sum(1).tolist()
            for agent, column in zip(group.agents, returns[module_id].T, strict=True):
                by_agent[str(agent)] = column.tolist()
        self.log_returns(by_agent, by_module)

    # State.

    def get_unfinished(self) -> dict[str, Any]:
        """Return the last observations and the totals of the lanes, by module."""
        if self.setting_of_arrays:
            return super().get_unfinished()
        return {
            "on_device": {
                module_id: {
                    "obs": map_tree(to_array, group.last_obs),
                    "generator": group.on_device.get_state(),
                    "history": self.actors[module_id].history.get_state(),
                    **{name: getattr(group.carry, name).copy() for name in ("returns", "lengths", "counts")},
                }
                for module_id, group in self._groups.items()
            }
        }

    def check_unfinished(self, state: Mapping[str, Any]) -> None:
        """Check a state of `get_unfinished`, without changing anything.

        Raises:
            CheckpointError: It is of other agents or modules, or of a run on arrays, or the other way round.
        """
        if ("on_device" in state) == bool(self.setting_of_arrays):
            raise CheckpointError(
                "the unfinished episodes of a runner with several agents were sampled "
                f"{'on a device' if self.setting_of_arrays else 'on arrays'}, and continue the other way."
            )
        if self.setting_of_arrays:
            return super().check_unfinished(state)
        saved = state["on_device"]
        if saved.keys() != self._groups.keys():
            raise CheckpointError(f"the unfinished episodes of a runner are of the modules {sorted(saved)}.")
        for module_id, group in self._groups.items():
            part, num_lanes = saved[module_id], len(group.carry.counts)

            def check(space: Any, leaf: Any, num_lanes: int = num_lanes) -> None:
                if leaf.shape != (num_lanes, *space.shape) or leaf.dtype != space.dtype:
                    raise CheckpointError(f"the observations of agents of a runner are {leaf.dtype}{leaf.shape}.")

            map_tree(check, group.space, part["obs"])
            if any(part[name].shape != (num_lanes,) for name in ("returns", "lengths", "counts")):
                raise CheckpointError(f"the totals of the agents of a runner are not of {num_lanes} lanes.")
            self.actors[module_id].history.check_state(part["history"], num_lanes)

    def set_unfinished(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_unfinished`."""
        if self.setting_of_arrays:
            return super().set_unfinished(state)
        for module_id, part in state["on_device"].items():
            group = self._groups[module_id]
            group.last_obs = map_tree(lambda leaf: torch.tensor(leaf, device=self.host.device), part["obs"])
            group.on_device.set_state(part["generator"])
            self.actors[module_id].history.set_state(part["history"])
            for name in ("returns", "lengths", "counts"):
                getattr(group.carry, name)[:] = part[name]


class _Unasked:
    """In place of an episode: shows whether a mapping asks for it."""

    def __getattribute__(self, name: str) -> Any:
        raise _AskedError(name)


class _AskedError(Exception):
    """A mapping asked for an episode."""


def _maps_by_id_alone(config: Any, agents: tuple[AgentID, ...]) -> bool:
    """Return whether each agent has one module, which its id alone decides."""
    if config.policy_mapping_fn is None:
        return True
    mapping, rngs = make_mapping(config), get_global_rngs()
    unasked: Any = _Unasked()
    try:
        trials = [[mapping(agent, unasked, None) for agent in agents] for _ in range(NUM_TRIALS)]
    except Exception:  # it asked for the episode, or raises with a real one too
        return False
    finally:
        set_global_rngs(rngs)  # a mapping may draw from them
    return all(trial == trials[0] for trial in trials)
