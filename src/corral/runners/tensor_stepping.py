"""Stepping a vector env of tensors: observations, actions and rewards stay on its device from step to step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.core.ids import DEFAULT_MODULE_ID, AgentID
from corral.core.interrupts import interruptible
from corral.core.seeding import get_global_rngs, set_global_rngs
from corral.core.spaces import module_observation_space, space_tree
from corral.core.tree import Tree, map_tree
from corral.data.episodes.lane_rollout import SeatCarry
from corral.data.episodes.multi_agent_rollout import MultiAgentRollout
from corral.data.episodes.rollout import EpisodeCarry, Rollout, episode_statistics
from corral.data.episodes.tensor_rollout import TensorRollout
from corral.envs.checks import first_bad_value
from corral.envs.sub_envs import original
from corral.envs.tensor_env import to_array
from corral.errors import CheckpointError
from corral.runners.actor import Actor, Actors
from corral.runners.device_actor import DeviceActor, needs_arrays
from corral.runners.mapping import NUM_TRIALS, make_mapping
from corral.runners.multi_agent_stepping import check_place, log_agent_counts, log_returns
from corral.runners.requests import SampleMode
from corral.runners.stepping import Stepping, check_last_rows

if TYPE_CHECKING:
    from corral.envs.seats import SeatBlock
    from corral.runners.config import RunnerConfig

TOTALS = ("returns", "lengths", "counts")


def find_setting_of_arrays(config: RunnerConfig, actors: Actors, shows_infos: bool) -> str:
    """Return the setting because of which an env of tensors is stepped on arrays, or `""`.

    What looks at single episodes or needs arrays, such as callbacks of episodes and memory, gets them: the env is then
    stepped as any other, and each step is copied to the host and back. On the CPU both ways give the same numbers. So
    does a mapping that asks for more than the id of the agent: on the device an agent has one module in all episodes.
    """
    if shows_infos:
        return "callbacks"
    if config.is_multi_agent and not _maps_by_id_alone(config, actors.seats.agents):
        return "multi_agent.policy_mapping_fn"
    if config.critic_sees is not None:
        return "multi_agent.critic_sees"
    return next(filter(None, (needs_arrays(actor, config.ON_POLICY) for actor in actors.values())), "")


@dataclass
class _Group:
    """The lanes of a module: the sub-envs, or with several agents the seats of some of them in each sub-env.

    Attributes:
        actor: Actor of the module.
        on_device: Chooses their actions, for lanes `[N * A, ...]`.
        observation_space: Space of an observation.
        space: The same space as a tree.
        block: Block of the seats; `None` if there is one agent.
        places: Places of the agents in the block, on the device, int64 `[A]`.
        agents: Their ids.
        carry: With several agents, totals of the unfinished episodes of the lanes.
        last_obs: Observations of the lanes after the last rollout.
        part: Rollout of the lanes that is being written.
    """

    actor: Actor
    on_device: DeviceActor
    observation_space: Any
    space: Tree
    block: SeatBlock | None = None
    places: Any = None
    agents: tuple[AgentID, ...] = ()
    carry: Any = None
    last_obs: Tree = None
    part: Any = None

    def of_lanes(self, given: Any) -> Tree:
        """Return what the env gave, by block trees of `[N, B, ...]`, as a tree of entries of the lanes `[N * A, ...]`.

        With one agent it is the same already.
        """
        if self.block is None or given is None:
            return given
        seats = given[self.block.name]
        if len(self.agents) == len(self.block.agents):
            return map_tree(lambda leaf: leaf.flatten(0, 1), seats)
        return map_tree(lambda leaf: leaf.index_select(1, self.places).flatten(0, 1), seats)


class TensorStepping(Stepping):
    """Steps a vector env of tensors, and writes its rollouts on the device: nothing is copied to the host in a step.

    All agents act in every row, and their episodes end together, so that the lanes of all modules have the rows of the
    env. Its rollouts are `TensorRollout`s; with several agents a `MultiAgentRollout` of them.
    """

    is_on_device: ClassVar[bool] = True

    def __init__(self, *args: Any, **tools: Any) -> None:
        """Take the arguments of `Stepping`, and copy the modules to the device."""
        super().__init__(*args, **tools)
        host, actors = self.host, self.actors
        self._device: torch.device = host.env.device  # type: ignore[attr-defined]
        self._groups: dict[str, _Group] = {}
        if not self.config.is_multi_agent:
            actor = actors[DEFAULT_MODULE_ID]
            group = _Group(actor, DeviceActor(actor, self._device), host.observation_space, host.space)
            self._groups[DEFAULT_MODULE_ID] = group
            return
        for module_id, actor in actors.items():
            block, of_module = actors.blocks[module_id], actors.agents_of[module_id]
            agents = tuple(agent for agent in block.agents if agent in of_module)
            if not agents:
                continue
            num_lanes = host.num_envs * len(agents)
            if actor.transforms is not None:  # all envs are reset, and the module may have other agents now
                actor.transforms.restart(num_lanes)
            space = module_observation_space(block.observation_space)
            self._groups[module_id] = _Group(
                actor,
                DeviceActor(actor, self._device),
                space,
                space_tree(space),
                block,
                torch.tensor([block.agents.index(agent) for agent in agents], device=self._device),
                agents,
                EpisodeCarry.fresh(num_lanes, 0.0),
            )
        log_agent_counts(self.metrics, dict.fromkeys(actors, 0), dict.fromkeys(actors.seats.agents, 0))
        self._log_returns({})

    # A rollout.

    def allocate(self, num_rows: int) -> Rollout:
        """Return a rollout with room for so many rows, of the env steps if there are several agents."""
        host = self.host
        whole = TensorRollout.of_steps(num_rows, host.num_envs, self._device)
        for module_id, group in self._groups.items():
            group.part = part = whole
            if group.block is not None:
                part = TensorRollout.of_steps(num_rows, host.num_envs * len(group.agents), self._device)
                part.lane_envs = np.repeat(np.arange(host.num_envs), len(group.agents))
                part.lane_agents, part.module_id = [*group.agents] * host.num_envs, module_id
                whole.modules[module_id] = group.part = part
            part.add_choices(group.space, group.on_device.distribution)
            part.observation_space, part.action_space = group.observation_space, group.actor.action_space
            part.pipeline = None if group.actor.transforms is None else group.actor.transforms.pipeline
        return whole

    def begin(self, rollout: Rollout) -> None:
        """Forget all episodes, before a reset of all envs with which the rollout begins."""
        for group in self._groups.values():
            if group.carry is not None:
                group.carry = EpisodeCarry.fresh(len(group.carry.counts), 0.0)

    def receive_reset(self, rollout: Rollout, obs: Any) -> None:
        """Write the observations of a reset, which are arrays, into row 0."""
        if self.config.is_multi_agent:
            obs = obs["obs"]
        on_device = map_tree(lambda leaf: torch.from_numpy(leaf).to(self._device), obs)
        for group in self._groups.values():
            write_tensors(group.part.obs, 0, group.of_lanes(on_device))

    def resume(self, rollout: Rollout) -> None:
        """Write the last observations into row 0."""
        for group in self._groups.values():
            write_tensors(group.part.obs, 0, group.last_obs)

    @interruptible
    def step_rows(self, rollout: Rollout, num_rows: int, mode: SampleMode) -> None:
        """Step `num_rows` times, on the device."""
        assert isinstance(rollout, TensorRollout)
        groups, host, seconds = list(self._groups.values()), self.host, self.timers.seconds
        for group in groups:
            group.on_device.refresh()
        step, clock = host.timed(host.env.step_tensors), time.perf_counter  # type: ignore[attr-defined]
        timestep = mode.timestep + mode.num_samplers * mode.num_steps
        now = clock()
        for t in range(rollout.num_rows, rollout.num_rows + num_rows):
            # From the observations of row t to actions.
            actions = self._choose(t, timestep, mode)
            timestep += mode.num_samplers * host.num_envs
            inferred = clock()
            # One step, whose observations are row t + 1: of the next episode, where one has ended.
            try:
                obs, rewards, rollout.terminated[t], rollout.truncated[t], infos, final = step(actions)
                rollout.num_rows = t + 1  # at once, so that an interrupt below finds the steps counted
                stepped = clock()
                for group in groups:
                    part = group.part
                    write_tensors(part.obs, t + 1, group.of_lanes(obs))
                    part.finals.append(as_finals(part.obs, group.of_lanes(final)))
                    part.rewards[t] = group.of_lanes(rewards)
                if rollout.modules:
                    rollout.rewards[t] = torch.cat([*rewards.values()], 1).sum(1)
            except Exception as error:
                raise host.error("step", t, error) from original(error)
            if mode.keeps_infos and infos:
                ended = to_array(rollout.terminated[t] | rollout.truncated[t])
                self.keep_infos(rollout, t + 1, host.env.infos_as_arrays(infos), ended)  # type: ignore[attr-defined]
            rollout.row_times_s[t] = after = clock()
            seconds["inference"] += inferred - now
            seconds["env_step"] += stepped - inferred
            seconds["storage"] += after - stepped
            now = after
        mode.settle(rollout)

    def _choose(self, t: int, timestep: int, mode: SampleMode) -> Any:
        """Choose the actions of a row, and return them as the env takes them: with several agents by block."""
        found: dict[str, Any] = {}
        explore, random_actions = mode.explore, mode.random_actions
        for group in self._groups.values():
            part, block, distribution = group.part, group.block, group.on_device.distribution
            row = map_tree(lambda leaf: leaf[t], part.obs)
            part.dist_inputs[t], part.actions[t] = group.on_device.choose(
                row, part.num_envs, timestep=timestep, explore=explore, random_actions=random_actions
            )
            chosen = distribution.to_env(part.actions[t])
            if block is None:
                return chosen
            lanes = chosen.reshape(-1, len(group.agents), *chosen.shape[1:])
            if len(group.agents) == len(block.agents):
                found[block.name] = lanes
                continue
            if block.name not in found:
                shape = (lanes.shape[0], len(block.agents), *lanes.shape[2:])
                found[block.name] = lanes.new_zeros(shape)
            found[block.name].index_copy_(1, group.places, lanes)
        return found

    def finish(self, rollout: Rollout, mode: SampleMode) -> Rollout:
        """Return the complete rollout, on the device or as arrays, and keep the last rows for the next one.

        Raises:
            EnvError: An observation or a reward is not finite; row, sub-env and agent are named.
        """
        assert isinstance(rollout, TensorRollout)
        before = {module_id: group.carry for module_id, group in self._groups.items()}
        rollout.copy_to_host()
        for group in self._groups.values():
            if rollout.modules:
                group.part.take_steps(rollout, len(group.agents))
                group.part.carry = group.carry
            if rollout.num_rows:
                self._check_finite(group)
                group.last_obs = map_tree(lambda leaf: leaf[-1].clone(), group.part.obs)
            group.on_device.fill_logp(group.part, is_needed=self.config.ON_POLICY)
        found = self._join(rollout, before) if rollout.modules else rollout
        return found if mode.takes_tensors else found.to_arrays()

    def _check_finite(self, group: _Group) -> None:
        """Refuse an observation or a reward that is not finite; what is not in the columns came with a reset."""
        part = group.part
        if part.is_finite():
            return
        bad = first_bad_value(part.to_arrays(), group.space, 0, part.num_rows, callbacks=False)
        row, lane, problem = bad or (0, 0, "observation holds NaN or infinity (from reset)")
        if group.block is not None:
            lane, problem = int(part.lane_envs[lane]), f"agent {part.lane_agents[lane]!r}: {problem}"
        raise self.host.bad_value(row, lane, problem)

    # Several agents.

    def _join(self, rollout: TensorRollout, before: Mapping[str, EpisodeCarry]) -> MultiAgentRollout:
        """Return the env steps with the rollouts of the modules, and log the steps and returns of the agents.

        Args:
            rollout: The env steps.
            before: Totals of the episodes of the lanes of each module when it began.
        """
        agents, num_envs = self.actors.seats.agents, self.host.num_envs
        totals, module_ids = np.zeros((num_envs, len(agents))), np.full((num_envs, len(agents)), None, object)
        returns, of_agents, num_steps = {}, dict.fromkeys(agents, 0), dict.fromkeys(self.actors, 0)
        for module_id, group in self._groups.items():
            seats = [agents.index(agent) for agent in group.agents]
            totals[:, seats] = before[module_id].returns.reshape(-1, len(seats))
            module_ids[:, seats] = module_id
            statistics, group.carry = episode_statistics(group.part.host, group.carry)
            returns[module_id] = statistics.returns.reshape(-1, len(seats))  # lanes of a sub-env end in the same row
            of_agents |= dict.fromkeys(group.agents, rollout.num_env_steps)
            num_steps[module_id] = group.part.num_env_steps
        found = MultiAgentRollout.of_tensors(rollout, SeatCarry(agents, totals, module_ids), sum(num_steps.values()))
        if rollout.num_rows:
            log_agent_counts(self.metrics, num_steps, of_agents)
            self._log_returns(returns)
        return found

    def _log_returns(self, returns: Mapping[str, NDArray[np.float64]]) -> None:
        """Log the returns `[K, A]` of the agents of each module in the episodes that ended."""
        of_agents: dict[str, list[float]] = {str(agent): [] for agent in self.actors.seats.agents}
        of_modules: dict[str, list[float]] = {module_id: [] for module_id in self.actors}
        for module_id, found in returns.items():
            of_modules[module_id] = found.sum(1).tolist()
            by_agent = zip(self._groups[module_id].agents, found.T, strict=True)
            of_agents |= {str(agent): column.tolist() for agent, column in by_agent}
        log_returns(self.metrics, self.config, of_agents, of_modules)

    # State.

    def get_unfinished(self) -> dict[str, Any]:
        """Return the last observations, and the generator of the device; with several agents by module, with totals."""
        found = {
            module_id: {
                "obs": map_tree(to_array, group.last_obs),
                "generator": group.on_device.get_state(),
            }
            for module_id, group in self._groups.items()
        }
        if not self.config.is_multi_agent:
            begins = np.ones(self.host.num_envs, np.bool_)
            history = self.actors[DEFAULT_MODULE_ID].history.get_state()
            return {**found[DEFAULT_MODULE_ID], "begins": begins, "infos": None, **history}
        for module_id, group in self._groups.items():
            found[module_id]["history"] = group.actor.history.get_state()
            found[module_id] |= {name: getattr(group.carry, name).copy() for name in TOTALS}
        return {"on_device": found}

    def check_unfinished(self, state: Mapping[str, Any]) -> None:
        """Check a state of `get_unfinished`, without changing anything.

        Raises:
            CheckpointError: It is of other agents or modules, or with several agents, of a run on arrays.
        """
        if not self.config.is_multi_agent:
            check_last_rows(state, self.actors[DEFAULT_MODULE_ID], self.host)
            return
        check_place(state, on_device=True)
        saved = state["on_device"]
        if saved.keys() != self._groups.keys():
            raise CheckpointError(f"the unfinished episodes of a runner are of the modules {sorted(saved)}.")
        for module_id, group in self._groups.items():
            part, num_lanes = saved[module_id], len(group.carry.counts)

            def check(space: Any, leaf: Any, num_lanes: int = num_lanes) -> None:
                if leaf.shape != (num_lanes, *space.shape) or leaf.dtype != space.dtype:
                    raise CheckpointError(f"the observations of agents of a runner are {leaf.dtype}{leaf.shape}.")

            map_tree(check, group.space, part["obs"])
            if any(part[name].shape != (num_lanes,) for name in TOTALS):
                raise CheckpointError(f"the totals of the agents of a runner are not of {num_lanes} lanes.")
            group.actor.history.check_state(part["history"], num_lanes)

    def set_unfinished(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_unfinished`; with one agent also from a state of a run on arrays."""
        for module_id, group in self._groups.items():
            part = state["on_device"][module_id] if self.config.is_multi_agent else state
            group.last_obs = map_tree(lambda leaf: torch.tensor(leaf, device=self._device), part["obs"])
            group.on_device.set_state(part.get("generator"))
            group.actor.history.set_state(part.get("history", part))
            if group.carry is not None:
                for name in TOTALS:
                    getattr(group.carry, name)[:] = part[name]


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
