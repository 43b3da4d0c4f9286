"""Stepping with several agents: one vector env of seats, whose steps fill the lanes of each module."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector.utils import create_empty_array
from numpy.typing import NDArray

from corral.core.action_masks import NO_LEGAL_ACTION
from corral.core.ids import AgentID
from corral.core.interrupts import interruptible
from corral.core.metrics.logger import MetricsLogger
from corral.core.plain import is_plain
from corral.core.spaces import module_observation_space, split_actions
from corral.core.tree import Tree, copy_nested, map_tree
from corral.data.episodes.infos import Infos
from corral.data.episodes.lane_rollout import LaneRollout, SeatCarry
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
from corral.data.episodes.multi_agent_rollout import MultiAgentRollout
from corral.data.episodes.rollout import Rollout, episode_id
from corral.data.episodes.step_columns import outcomes
from corral.envs.checks import bad_obs
from corral.envs.sub_envs import original
from corral.errors import CheckpointError, ConfigError
from corral.runners.lanes import Lanes
from corral.runners.mapping import make_mapping
from corral.runners.requests import SampleMode
from corral.runners.stepping import Stepping

if TYPE_CHECKING:
    from corral.envs.seats import SeatBlock
    from corral.runners.central_critic import CentralCritic
    from corral.runners.config import RunnerConfig


class MultiAgentStepping(Stepping):
    """Steps a vector env of several agents, and writes the steps of each agent into the rollout of its module.

    Its rollouts are `MultiAgentRollout`s. All work of a step is on arrays over seats or lanes; Python
    looks at single agents only when an episode begins or ends.

    Attributes:
        ended: Row, sub-env, returns of the agents and their modules of each episode that ended in this rollout.
        open_infos: Infos of observations that the next rollout begins with, by its row <= 0.
        num_over: Episodes of each sub-env that are over in this rollout, int64 `[N]`.
    """

    _module_of: NDArray[np.int64]
    num_over: NDArray[np.int64]
    ended: list[tuple[int, int, NDArray[np.float64], NDArray[np.int64]]]

    def __init__(self, *args: Any, **tools: Any) -> None:
        """Take the arguments of `Stepping`, and make the lanes of the modules."""
        super().__init__(*args, **tools)
        self._seats = self.actors.seats
        self._use_modules()
        self._block_of_seat: list[SeatBlock] = [block for block in self._seats.blocks for _ in block.agents]
        self._actions: Any = create_empty_array(self.host.env.single_action_space, self.host.num_envs, np.zeros)
        self._forget_seats()
        self.open_infos: dict[int, Infos] = {}
        self._critic: CentralCritic | None = None
        if self.config.critic_sees is not None and not self.config.in_evaluation:
            from corral.runners.central_critic import CentralCritic

            self._critic = CentralCritic(self.config.critic_sees, self._seats, self.host.name)

    # Modules.

    def _use_modules(self) -> None:
        """Make lanes for the modules that have none yet, and drop the lanes of modules without an actor."""
        kept = dict(self.lanes)
        self.lanes.clear()  # the same dict, which the events read
        for module_id, actor in self.actors.items():
            if module_id in kept:
                self.lanes[module_id] = kept[module_id]
                continue
            block, agents_of = self.actors.blocks[module_id], self.actors.agents_of[module_id]
            agents = [agent for agent in block.agents if agent in agents_of] or list(block.agents)
            self.lanes[module_id] = lanes = Lanes(
                np.array([block.agents.index(agent) for agent in agents]),
                agents,
                num_envs=self.host.num_envs,
                block_size=len(block.agents),
                observation_space=module_observation_space(block.observation_space),
                action_space=actor.action_space,
                distribution=actor.distribution,
                history=actor.history,
            )
            if len(lanes) != actor.num_rows:  # it acted for other agents when the env was stepped on its device
                actor.make_exploration(self.actors.configs[module_id], len(lanes))
        self._mapping = make_mapping(self.config)
        # Now, so that user code cannot take the names.
        log_agent_counts(self.metrics, dict.fromkeys(self.lanes, 0), dict.fromkeys(self._seats.agents, 0))
        self._log_agent_returns([])

    def set_modules(self) -> bool:
        """Use the actors and the mapping as they are now, and return whether a removed one acts in an episode."""
        names: list[str | None] = [*self.lanes, None]
        kept: NDArray[np.int64] = self._module_of
        self._use_modules()
        index_of: dict[str | None, int] = {module_id: index for index, module_id in enumerate(self.lanes)}
        are_lost = bool({names[index] for index in np.unique(kept).tolist()} - {None, *index_of})
        self._module_of = np.array([index_of.get(name, -1) for name in names])[kept]  # -1 is the last name, None
        return are_lost

    # State.

    def get_unfinished(self) -> dict[str, Any]:
        """Return the lanes, and which module acts for each seat in the current episodes."""
        return {
            "lanes": {module_id: lanes.get_state() for module_id, lanes in self.lanes.items()},
            "modules": [[self._name_of(index) for index in row] for row in self._module_of.tolist()],
            "seat_returns": self._returns.copy(),
            "infos": [
                [row, *copy_nested([infos.of_lanes, infos.final])]
                for row, infos in self.open_infos.items()
                if is_plain([infos.of_lanes, infos.final])
            ],
            **({"played": self._get_played()} if self.host.plays_again else {}),
            **({} if self._critic is None else {"critic_obs": dict(self._critic.latest)}),
        }

    def _get_played(self) -> list[Tree | None]:
        return self.played.get(same_step=self.host.is_same_step, convert=self._to_seats)

    def _to_seats(self, parts: Any, num_rows: int) -> Tree:
        """Return the actions of the seats, by block a tree of `[T, N, B, ...]` in the units of the env.

        Args:
            parts: What was kept of the rollouts of the modules, see `Lanes.played`; or the actions already.
            num_rows: Number of env steps T.
        """
        if isinstance(parts, dict):
            return parts
        seats = map_tree(lambda leaf: np.zeros((num_rows, *leaf.shape), leaf.dtype), self._actions)
        for block, distribution, actions, obs_rows, acts, envs, places in parts:
            rows, lanes = acts.nonzero()
            steps = obs_rows[rows, lanes]
            is_here = (steps >= 0) & (steps < num_rows)  # not the steps that an earlier rollout had opened
            rows, lanes = rows[is_here], lanes[is_here]
            index = steps[is_here], envs[lanes], places[lanes]
            map_tree(
                lambda column, chosen, index=index: column.__setitem__(index, chosen),
                seats[block],
                distribution.to_env(actions[rows, lanes]),
            )
        return seats

    def _get_replay(self, state: Mapping[str, Any], env_index: int, actions: Tree) -> dict[str, Any]:
        observed = []
        for module_id, lanes in state["lanes"].items():
            if module_id in self.actors.blocks:
                block = self.actors.blocks[module_id].name
                for lane in np.flatnonzero(lanes["acts"] & (lanes["envs"] == env_index)).tolist():
                    rows = map_tree(lambda leaf, lane=lane: leaf[lane], lanes["obs"])
                    observed.append((block, int(lanes["places"][lane]), rows))
        return {"actions": actions, "obs": observed}

    def check_unfinished(self, state: Mapping[str, Any]) -> None:
        """Check a state of `get_unfinished`, without changing anything.

        Raises:
            CheckpointError: It is of other agents or modules, or of a run on a device.
        """
        check_place(state, on_device=False)
        shape = self._returns.shape
        if state["seat_returns"].shape != shape or [len(row) for row in state["modules"]] != [shape[1]] * shape[0]:
            raise CheckpointError(f"the unfinished episodes of a runner are not of {shape[1]} agents.")
        used = {module_id for row in state["modules"] for module_id in row} - {None}
        if unknown := sorted(used - self.lanes.keys()):
            raise CheckpointError(f"modules {unknown} act in unfinished episodes of a runner that has no such modules.")
        for module_id, part in state["lanes"].items():
            if module_id in self.lanes:
                self.lanes[module_id].check_state(part)

        if self._critic is not None:
            from corral.runners.central_critic import check_seen

            check_seen(state.get("critic_obs", {}), self._critic_spaces())

        def check(here: NDArray[Any], leaf: NDArray[Any]) -> None:
            if leaf.shape[1:] != here.shape[1:] or leaf.dtype != here.dtype:
                raise CheckpointError(f"the actions of agents of a runner are {leaf.dtype}{leaf.shape}.")

        for actions in state.get("played", ()):
            if actions is not None:
                map_tree(check, self._actions, actions)

    def set_unfinished(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_unfinished`."""
        self._forget_seats()
        self._returns = state["seat_returns"].copy()
        self.open_infos = {row: Infos(*copy_nested(infos)) for row, *infos in state["infos"]}
        index_of = {module_id: index for index, module_id in enumerate(self.lanes)}
        self._module_of = np.array([[index_of.get(name, -1) for name in row] for row in state["modules"]])
        for module_id, lanes in self.lanes.items():
            if module_id in state["lanes"]:
                for place in lanes.missing_places(state["lanes"][module_id]):
                    self._add_lanes(module_id, place, self.actors.blocks[module_id].agents[place])
                lanes.set_state(state["lanes"][module_id])
        if self.host.plays_again:
            self.played.set(state.get("played", ()))
        if self._critic is not None:
            self._critic.latest = dict(state.get("critic_obs", {}))

    def _critic_spaces(self) -> dict[str, Any]:
        """Return the space of what the critic of each module sees, for the modules that have a central critic."""
        found = {module_id: self.actors[module_id].module.critic_space for module_id in self.lanes}
        return {module_id: space for module_id, space in found.items() if space is not None}

    def _name_of(self, index: int) -> str | None:
        return list(self.lanes)[index] if index >= 0 else None

    # Sampling.

    def allocate(self, num_rows: int) -> Rollout:
        """Return a rollout with room for so many rows."""
        self.ended = []
        rollout = MultiAgentRollout(outcomes(num_rows, self.host.num_envs))
        rollout.same_step = self.host.is_same_step
        return rollout

    def _forget_seats(self) -> None:
        """Forget which agents take part in the current episodes."""
        shape = self.host.num_envs, len(self._seats.agents)
        self._module_of = np.full(shape, -1)  # index of the module of each seat, -1 before its first observation
        self._returns = np.zeros(shape)  # of the episodes so far
        self._episodes: list[MultiAgentEpisode | None] = [None] * self.host.num_envs  # what the mapping is given

    def begin_lanes(self, rollout: Rollout) -> None:
        """Let the lanes write into a rollout from now on."""
        self._episodes = [None] * self.host.num_envs  # they would keep the last rollout
        self.num_over = np.zeros(self.host.num_envs, np.int64)
        assert isinstance(rollout, MultiAgentRollout)
        module_ids = np.array([*self.lanes, None], object)[self._module_of]
        rollout.seat_carry = SeatCarry(self._seats.agents, self._returns.copy(), module_ids)
        for lanes in self.lanes.values():
            lanes.begin(rollout.capacity, rollout)

    def begin(self, rollout: Rollout) -> None:
        """Forget all episodes, before a reset of all envs with which the rollout begins."""
        self._forget_seats()
        self.played.forget()
        for lanes in self.lanes.values():
            lanes.forget()
        self.begin_lanes(rollout)

    def receive_reset(self, rollout: Rollout, obs: Any) -> None:
        """Give the observations of a reset to the lanes."""
        nobody = np.zeros(self.host.num_envs, np.bool_)
        self.receive(rollout, obs, nobody, nobody)

    def resume(self, rollout: Rollout) -> None:
        """Begin with the steps that are open in the lanes."""
        self.begin_lanes(rollout)
        rollout.info_rows.update(self.open_infos)

    @interruptible
    def step_rows(self, rollout: Rollout, num_rows: int, mode: SampleMode) -> None:
        """Step `num_rows` times: let the modules act whose agents are due, and give the lanes what the env returns."""
        start, stop, events = rollout.num_rows, rollout.num_rows + num_rows, self.events
        step, clock, seconds = self.host.step, time.perf_counter, self.timers.seconds
        resetting, same_step = rollout.resets_in(start), rollout.same_step
        timestep = mode.timestep + mode.num_samplers * mode.num_steps
        for t in range(start, stop):
            began = clock()
            # The modules whose agents were observed choose actions, which open steps of their lanes.
            for module_id, lanes in self.lanes.items():
                if np.count_nonzero(lanes.acts):
                    self.act(t, module_id, lanes, timestep, mode)
            timestep += mode.num_samplers * (self.host.num_envs - int(np.count_nonzero(resetting)))
            inferred = clock()
            # One step of all sub-envs. Agents that have nothing to do have the actions that they had before.
            try:
                obs, rollout.rewards[t], terminated, truncated, infos = step(self._actions)
            except Exception as error:
                raise self.host.error("step", t, error) from original(error)
            rollout.num_rows = t + 1  # at once, so that an interrupt below finds the steps counted
            stepped = clock()
            rollout.terminated[t], rollout.truncated[t] = terminated, truncated
            # What the agents got closes their steps, and says who acts next.
            for env_index in rollout.broken_in(t):
                self.drop(env_index)
            if mode.keeps_infos:
                self.keep_infos(rollout, t + 1, infos, terminated | truncated if same_step else None)
            resetting = self.receive(rollout, obs, terminated, truncated)
            rollout.row_times_s[t] = after = clock()
            seconds["inference"] += inferred - began
            seconds["env_step"] += stepped - inferred
            seconds["storage"] += after - stepped
            if events is not None:
                events.fire_row(rollout, t, resetting, mode.playing)
                seconds["callbacks"] += clock() - after
            if same_step:
                resetting = self._receive_resets(rollout, resetting)
        mode.settle(rollout)
        if not np.isfinite(rollout.rewards[start:stop]).all():
            row, env_index = np.argwhere(~np.isfinite(rollout.rewards[start:stop]))[0].tolist()
            raise self.host.bad_value(start + row, env_index, f"reward is {rollout.rewards[start + row, env_index]}")

    def _receive_resets(self, rollout: Rollout, ended: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Begin the next episodes where a vector env has reset what ended in the same step.

        Returns:
            The sub-envs that the next row only resets, bool `[N]`: none.
        """
        nobody = np.zeros_like(ended)
        if ended.any():
            self.receive(rollout, self.host.env.get_reset_obs(), nobody, nobody)  # type: ignore[attr-defined]
            if self.events is not None:
                self.events.start_waiting(rollout)
        return nobody

    def act(self, row: int, module_id: str, lanes: Lanes, timestep: int, mode: SampleMode) -> None:
        """Choose the actions of the lanes that act in a row, and put them into the actions for the vector env."""
        actor, block = self.actors[module_id], self.actors.blocks[module_id]
        if actor.has_action_mask and (lane := actor.first_without_choice(lanes.obs, lanes.acts)) is not None:
            problem = f"agent {lanes.agents[lane]!r}: {NO_LEGAL_ACTION}"
            raise self.host.bad_value(row, int(lanes.envs[lane]), problem)
        actions, outputs, logp = actor.choose_in_lanes(lanes, timestep, mode)
        acting = lanes.act(actions, outputs, logp)
        env_actions, seats = actor.distribution.to_env(actions), self._actions[block.name]
        index = lanes.envs[acting], lanes.places[acting]
        map_tree(lambda column, chosen: column.__setitem__(index, chosen[acting]), seats, env_actions)

    def receive(
        self, rollout: Rollout, obs: Any, terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Give what the vector env returned to the lanes, after mapping the agents that were observed first.

        Returns:
            The sub-envs whose episodes ended, bool `[N]`.
        """
        observed, rewards, over = obs["observed"].view(np.bool_), obs["rewards"], terminated | truncated
        flags = obs["terminated"].view(np.bool_), obs["truncated"].view(np.bool_)
        self._returns += rewards
        ends = ends_alone = flags[0] | flags[1]
        if np.count_nonzero(over):  # agents that did not end alone end as their episode does
            ends = ends_alone | over[:, None]
            flags = (
                np.where(ends_alone, flags[0], terminated[:, None]),
                np.where(ends_alone, flags[1], truncated[:, None]),
            )
        # Who ends with the first observation takes no step.
        if np.count_nonzero(new := observed & (self._module_of < 0) & ~ends):
            self._map(rollout, new)
        for module_id, lanes in self.lanes.items():
            block = self.actors.blocks[module_id]
            part = slice(block.start, block.stop)
            lanes.receive(
                obs["obs"][block.name],
                observed[:, part],
                rewards[:, part],
                flags[0][:, part],
                flags[1][:, part],
                ends[:, part],
            )
        rows = rollout.lane_rows
        for i in over.nonzero()[0].tolist():
            stop = rollout.num_rows if rows is None else int(rows[i])
            self.ended.append((stop - 1, i, self._returns[i].copy(), self._module_of[i].copy()))
            self._end_episode(i)
        return over

    def _end_episode(self, env_index: int) -> None:
        self._module_of[env_index], self._returns[env_index] = -1, 0.0
        self._episodes[env_index] = None
        self.num_over[env_index] += 1

    def drop(self, env_index: int) -> None:
        """Forget the episode of a sub-env that failed."""
        for lanes in self.lanes.values():
            lanes.drop(env_index)
        self._end_episode(env_index)

    def _map(self, rollout: Rollout, new: NDArray[np.bool_]) -> None:
        """Ask for the modules of agents that were observed for the first time in their episodes, bool `[N, A]`."""
        module_ids = list(self.lanes)
        for env_index, seat in np.argwhere(new).tolist():
            agent = self._seats.agents[seat]
            try:
                module_id = self._episode(rollout, env_index).module_for(agent)
            except ConfigError as error:
                raise ConfigError(f"env {self.host.name!r}, sub-env {env_index}: {error}") from error
            block = self._block_of_seat[seat]
            if self.actors.blocks.get(module_id, self._seats) is not block:
                raise ConfigError(
                    f"env {self.host.name!r}, sub-env {env_index}: policy_mapping_fn returned {module_id!r} for agent "
                    f"{agent!r}, and this module is made for other spaces than {block.observation_space} and "
                    f"{block.action_space}."
                )
            lanes, place = self.lanes[module_id], seat - block.start
            if not lanes.has(place):
                self._add_lanes(module_id, place, agent)
            lanes.use(env_index, place, float(self._returns[env_index, seat]))
            self._module_of[env_index, seat] = module_ids.index(module_id)

    def _episode(self, rollout: Rollout, env_index: int) -> MultiAgentEpisode:
        """Return the episode of a sub-env for the mapping, the same one for all agents of the episode."""
        if (episode := self._episodes[env_index]) is None:
            carry = rollout.carry
            assert carry is not None
            count = int(carry.counts[env_index] + self.num_over[env_index])
            id_ = episode_id(carry.id_prefix, env_index, count)
            episode = None if self.events is None else self.events.episode(env_index)
            if episode is None or episode.id_ != id_:  # the callbacks still have the one of an env that failed
                episode = self.make_episode(id_, env_index, rollout)
            self._episodes[env_index] = episode
        return episode

    def make_episode(self, id_: str, env_index: int, rollout: Rollout) -> MultiAgentEpisode:
        """Return a view of an episode that knows the modules of the agents that take part already."""
        seat_carry = getattr(rollout, "seat_carry", None)
        episode: MultiAgentEpisode = rollout.episode_class.view(id_, env_index, rollout, seat_carry)
        episode.agent_to_module_mapping_fn = lambda agent, episode: self._mapping(agent, episode, self.worker)
        module_ids, modules = list(self.lanes), self._module_of[env_index]
        for seat in np.flatnonzero(modules >= 0).tolist():
            episode.set_module(self._seats.agents[seat], module_ids[modules[seat]])
        return episode

    def _add_lanes(self, module_id: str, place: int, agent: AgentID) -> None:
        """Add lanes of an agent to a module that had none for it; its exploration is made again, for more rows."""
        lanes, actor = self.lanes[module_id], self.actors[module_id]
        lanes.add(place, agent)
        actor.make_exploration(self.actors.configs[module_id], len(lanes))

    def actions_of(self, seat: int, envs: NDArray[np.int64]) -> Tree:
        """Return the latest actions of an agent in some sub-envs, in the units of the env, a tree of `[K, ...]`."""
        block = self._block_of_seat[seat]
        rows = map_tree(lambda leaf: leaf[envs, seat - block.start], self._actions[block.name])
        if not block.action_parts:
            return rows
        return tuple(map(np.stack, zip(*split_actions(block.action_parts, rows), strict=True)))

    # The end of a sample.

    def finish(self, rollout: Rollout, mode: SampleMode) -> Rollout:
        """Return the complete rollouts of the modules; the lanes keep the latest observations and the open steps."""
        assert isinstance(rollout, MultiAgentRollout)
        if not rollout.num_rows:
            return rollout
        steps, modules, parts, kept = {}, {}, dict[str, LaneRollout](), []
        of_agents = dict.fromkeys(self._seats.agents, 0)
        for module_id, lanes in self.lanes.items():
            parts[module_id] = part = lanes.finish(rollout)
            self._check_obs(lanes, part)
            if self.host.plays_again:
                kept.append((self.actors.blocks[module_id].name, *lanes.played))
            steps[module_id] = part.num_env_steps
            if not part.num_env_steps:
                continue
            for agent, count in zip(lanes.agents, part.valid.sum(0).tolist(), strict=True):
                of_agents[agent] += count
            transforms = self.actors[module_id].transforms
            part.pipeline = None if transforms is None else transforms.pipeline
            self.complete(module_id, part, mode)
            modules[module_id] = part
        if self._critic is not None:
            self._critic.add_columns(rollout, self.lanes, parts, self._critic_spaces())
        rollout.set_modules(modules)
        rollout.num_agent_steps = sum(steps.values())
        oldest = min(lanes.oldest_row for lanes in self.lanes.values())
        rows = {row - rollout.num_rows: infos for row, infos in rollout.info_rows.items()}
        self.open_infos = {row: infos for row, infos in rows.items() if row >= oldest}
        if self.host.plays_again:
            self.keep_played(kept, rollout)
        log_agent_counts(self.metrics, steps, of_agents)
        valid = rollout.valid
        self._log_agent_returns(ended for ended in self.ended if valid[ended[0], ended[1]])
        return rollout

    def _check_obs(self, lanes: Lanes, part: LaneRollout) -> None:
        """Raise for an observation of an agent that is NaN or outside its space."""
        if bad := bad_obs(part, lanes.space_tree, 0, part.num_rows + 1):
            row, lane, problem = min(bad)
            env_row = max(0, int(part.obs_rows[row, lane]) - 1)
            raise self.host.bad_value(env_row, int(lanes.envs[lane]), f"agent {lanes.agents[lane]!r}: {problem}")

    def _log_agent_returns(self, ended: Iterable[tuple[int, int, NDArray[np.float64], NDArray[np.int64]]]) -> None:
        """Log the returns of agents and modules in the episodes that ended; a module's is the sum over its agents."""
        of_agents: dict[str, list[float]] = {str(agent): [] for agent in self._seats.agents}
        of_modules: dict[str, list[float]] = {module_id: [] for module_id in self.lanes}
        names, agents = list(of_modules), list(of_agents)
        for _, _, returns, modules in ended:
            for seat in np.flatnonzero(modules >= 0).tolist():
                of_agents[agents[seat]].append(float(returns[seat]))
            for index in np.unique(modules[modules >= 0]).tolist():
                of_modules[names[index]].append(float(returns[modules == index].sum()))
        log_returns(self.metrics, self.config, of_agents, of_modules)


def check_place(state: Mapping[str, Any], *, on_device: bool) -> None:
    """Refuse a state of episodes of several agents that were sampled on a device, or with `on_device`, on arrays.

    Raises:
        CheckpointError: They were.
    """
    if ("on_device" in state) != on_device:
        raise CheckpointError(
            "the unfinished episodes of a runner with several agents were sampled "
            f"{'on arrays' if on_device else 'on a device'}, and continue the other way."
        )


def log_agent_counts(metrics: MetricsLogger, of_modules: Mapping[str, int], of_agents: Mapping[AgentID, int]) -> None:
    """Log the steps of the agents in a sample: of all together, by module and by agent."""
    counts: dict[tuple[str, ...], int] = {("num_agent_steps_sampled",): sum(of_modules.values())}
    counts |= {("num_module_steps_sampled", module_id): count for module_id, count in of_modules.items()}
    counts |= {("num_agent_steps_sampled_by_agent", str(agent)): count for agent, count in of_agents.items()}
    metrics.log_reserved({key: [count] for key, count in counts.items()}, "sum")
    lifetime = {(f"{key[0]}_lifetime", *key[1:]): [count] for key, count in counts.items()}
    metrics.log_reserved(lifetime, "lifetime_sum")


def log_returns(
    metrics: MetricsLogger, config: RunnerConfig, of_agents: Mapping[str, Any], of_modules: Mapping[str, Any]
) -> None:
    """Log the returns of agents and of modules in the episodes that ended, by id."""
    # In evaluation of the episodes of a round, as all other returns.
    window = None if config.in_evaluation else config.metrics_num_episodes_for_smoothing
    for kind, found in (("agent", of_agents), ("module", of_modules)):
        by_key = {(f"{kind}_episode_return_mean", name): values for name, values in found.items()}
        metrics.log_reserved(by_key, window=window)
