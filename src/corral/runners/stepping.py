"""How a runner steps its vector env: from the latest observations through actions to rows of columns."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from corral.core.action_masks import NO_LEGAL_ACTION
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.interrupts import interruptible
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.core.plain import is_plain
from corral.core.tree import Tree, copy_nested, map_tree
from corral.data.episodes.infos import Infos, split_infos
from corral.data.episodes.rollout import Rollout
from corral.envs.checks import bad_obs, first_bad_value, write_row
from corral.envs.env_host import EnvHost
from corral.envs.replay import MAX_STEPS
from corral.envs.sub_envs import original
from corral.errors import CheckpointError
from corral.runners.actor import Actor, Actors
from corral.runners.episode_events import EpisodeEvents
from corral.runners.played_actions import NOT_SAVED, TOO_LONG, PlayedActions
from corral.runners.requests import SampleMode, make_mode

if TYPE_CHECKING:
    from corral.callbacks.dispatch import Dispatcher
    from corral.runners.config import RunnerConfig
    from corral.runners.lanes import Lanes


class Stepping(ABC):
    """Steps the vector env of a runner, and writes what happens into rollouts.

    The runner decides when: it makes a rollout with `allocate`, calls `begin` and `receive_reset` around a reset of all
    envs or else `resume`, then `step_rows` until enough rows are written, and `finish`. Between two rollouts it may ask
    for the state of the unfinished episodes.

    Args:
        config: Config of the runner.
        host: Host of the envs.
        actors: Choose the actions.
        timers: Timers of the parts of its work.
        metrics: Where it logs.
        worker: The runner, as callbacks receive it, and a mapping of agents to modules as `worker`.

    Attributes:
        lanes: With several agents the lanes of each module, by module id.
        events: Fires the events of episodes; `None` if nobody subscribed to one, and before the first reset.
        played: Actions of the unfinished episodes, where a restored runner must play them again.
    """

    RESETS_AFTER_CUT: ClassVar[bool] = True
    """Whether all envs are reset after a sample that its time limit cut short: one of them may hang."""

    HAS_METRICS: ClassVar[bool] = False
    """Whether there are numbers for the result in `get_metrics`, in addition to the numbers of explorations."""

    is_on_device: ClassVar[bool] = False
    """Whether rollouts are written on the device of an env of tensors."""

    BEGINS_EPISODES: ClassVar[bool] = True
    """Whether the runner begins the episodes, and not the programs in which the envs are."""

    setting_of_arrays: str = ""
    """The setting because of which an env of tensors is stepped on arrays; `""` if it is not."""

    make_mode: ClassVar[Callable[..., SampleMode]] = staticmethod(make_mode)
    """Function that returns how far a sample goes."""

    def __init__(
        self,
        config: RunnerConfig,
        host: EnvHost,
        actors: Actors,
        *,
        timers: Timers,
        metrics: MetricsLogger,
        worker: Any = None,
    ) -> None:
        """Keep the arguments; env and actors are made."""
        self.config, self.host, self.actors = config, host, actors
        self.timers, self.metrics, self.worker = timers, metrics, worker
        self.lanes: dict[str, Lanes] = {}
        self.events: EpisodeEvents | None = None
        self.played = PlayedActions()

    def set_modules(self) -> bool:
        """Use the actors as they are now, and return whether all envs must be reset for it."""
        raise NotImplementedError

    def get_metrics(self) -> dict[Any, float]:
        """Return numbers for the result by their keys, if `HAS_METRICS`."""
        return {}

    def make_episode(self, id_: str, env_index: int, rollout: Rollout) -> Any:
        """Return a view of an episode in a rollout that has not started."""
        return rollout.episode_class.view(id_, env_index, rollout)

    def make_events(self, callbacks: Dispatcher, metrics: MetricsLogger, rl_module: Any) -> EpisodeEvents:
        """Return what fires the events of the episodes."""
        arguments = {
            "env_runner": self.worker,
            "metrics_logger": metrics,
            "env": self.host.env,
            "rl_module": rl_module,
        }
        return EpisodeEvents(
            callbacks,
            self.host,
            arguments,
            episode_class=self.config.episode_class or self.config.default_episode_class,
            make_episode=self.make_episode,
            lanes=self.lanes,
            begins_episodes=self.BEGINS_EPISODES,
        )

    # A rollout.

    @abstractmethod
    def allocate(self, num_rows: int) -> Rollout:
        """Return a rollout with room for so many rows."""

    @abstractmethod
    def begin(self, rollout: Rollout) -> None:
        """Forget all episodes, before a reset of all envs with which the rollout begins."""

    @abstractmethod
    def receive_reset(self, rollout: Rollout, obs: Any) -> None:
        """Take the observations of that reset, which are row 0.

        Raises:
            EnvError: An observation is NaN or outside its space.
        """

    @abstractmethod
    def resume(self, rollout: Rollout) -> None:
        """Begin the rollout where the last one stopped, whose last observations are row 0."""

    @abstractmethod
    def step_rows(self, rollout: Rollout, num_rows: int, mode: SampleMode) -> None:
        """Step `num_rows` times, fill these rows of the rollout, and let the mode settle them.

        Args:
            rollout: Rollout with room for the rows.
            num_rows: Number of rows.
            mode: How the steps are taken, and how far the sample goes.

        Raises:
            EnvError: The env raised, gave NaN, or hung.
            CallbackError: A callback raised.
        """

    @abstractmethod
    def finish(self, rollout: Rollout, mode: SampleMode) -> Rollout:
        """Complete a rollout that was cut to its last row, return it, and keep what the next one begins with.

        Returns:
            What the runner hands out: the same rollout, or what was written in addition to it.

        Raises:
            CallbackError: A callback wrote an action outside the action space.
        """

    # State of the unfinished episodes, between two rollouts.

    @abstractmethod
    def get_unfinished(self) -> dict[str, Any]:
        """Return what the next rollout continues from, as copies of plain data."""

    @abstractmethod
    def check_unfinished(self, state: Mapping[str, Any]) -> None:
        """Check a state of `get_unfinished`, without changing anything.

        Raises:
            CheckpointError: It is of another env, other agents or other modules.
        """

    @abstractmethod
    def set_unfinished(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_unfinished`."""

    def get_replays(self, state: Mapping[str, Any]) -> list[Any]:
        """Return what each sub-env plays again to stand where the episodes of a state stood; see `continue_env`.

        Args:
            state: A state of `get_unfinished`, and `resetting`, the sub-envs that the next row only resets, bool `[N]`,
                and `returns`, the sums of the rewards so far, `[N]`.
        """
        ended, actions = state["resetting"].tolist(), state.get("played")
        if not actions:
            return [NOT_SAVED] * len(ended)
        return [
            TOO_LONG
            if one is None
            else self._get_replay(state, i, one) | {"ended": ended[i], "return": float(state["returns"][i])}
            for i, one in enumerate(actions)
        ]

    def _get_replay(self, state: Mapping[str, Any], env_index: int, actions: Tree) -> dict[str, Any]:
        """Return `actions` in the units of the env, and the observations `obs` that they led to."""
        raise NotImplementedError

    # What all do alike.

    def keep_infos(
        self, rollout: Rollout, row: int, infos: Mapping[Any, Any], ended: NDArray[np.bool_] | None = None
    ) -> None:
        """Keep the infos that came with a row of observations.

        Args:
            rollout: Rollout that is being written.
            row: Row of the observations.
            infos: Infos of the vector env.
            ended: Sub-envs that same-step autoreset has reset.
        """
        if infos:
            are_of_steps = getattr(self.host.env, "INFOS_ARE_OF_STEPS", False)
            rollout.info_rows[row] = split_infos(self.host.infos_by_env(infos), ended, are_of_steps=are_of_steps)

    def keep_played(self, actions: Any, rollout: Rollout) -> None:
        """Keep the actions of a complete rollout in `played`, and drop the first ones that are too many to play."""
        columns, played = rollout.columns, self.played
        played.parts.append((actions, columns["valid"].copy(), columns["terminated"] | columns["truncated"]))
        played.num_rows += rollout.num_rows
        while played.num_rows - len(played.parts[0][1]) >= MAX_STEPS:
            played.num_rows -= len(played.parts.popleft()[1])
            played.is_whole = False

    def complete(self, module_id: str, part: Rollout, mode: SampleMode) -> None:
        """Complete what a module and its exploration know of their actions in a rollout.

        Raises:
            CallbackError: A callback wrote an action outside the action space.
        """
        actor = self.actors[module_id]
        if self.events is not None:
            self.events.check_actions(part, actor.action_space)
        if self.config.ON_POLICY and part.num_rows:
            # From the outputs of the policy, except where the exploration gave log-probabilities.
            distribution, given = actor.distribution, part.columns.get("logp")
            outputs = torch.from_numpy(part.dist_inputs.reshape(-1, distribution.num_inputs))
            actions = torch.from_numpy(part.actions.reshape(-1, *distribution.action_shape))
            with torch.inference_mode():
                logp = distribution.logp(outputs, actions).numpy().reshape(part.rewards.shape)
            part.columns["logp"] = logp if given is None else np.where(np.isnan(given), logp, given)
        elif "logp" not in part.columns:  # nothing learns from it, so nobody pays for computing it
            part.columns["logp"] = np.full(part.rewards.shape, np.nan, np.float32)
        if actor.sees_samples:
            actor.exploration.end_sample(part, timestep=mode.timestep, explore=mode.explore)


class SingleAgentStepping(Stepping):
    """Steps a vector env in which each sub-env has one agent; all sub-envs act in every row."""

    def __init__(self, *args: Any, **tools: Any) -> None:
        """Take the arguments of `Stepping`."""
        super().__init__(*args, **tools)
        self._actor = self.actors[DEFAULT_MODULE_ID]

    def allocate(self, num_rows: int) -> Rollout:
        """Return a rollout with room for so many rows."""
        actor, host = self._actor, self.host
        rollout = Rollout.allocate(num_rows, host.num_envs, host.space, actor.distribution)
        rollout.observation_space, rollout.action_space = host.observation_space, actor.action_space
        rollout.same_step = host.is_same_step
        if actor.history.has_columns:
            rollout.columns.update(actor.history.allocate(num_rows + 1))
        if actor.transforms is not None:
            rollout.pipeline = actor.transforms.pipeline
        return rollout

    def begin(self, rollout: Rollout) -> None:
        """All episodes begin with the next observations."""
        self._begins = np.ones(self.host.num_envs, np.bool_)
        self.played.forget()

    def receive_reset(self, rollout: Rollout, obs: Any) -> None:
        """Write the observations of a reset into row 0."""
        try:
            write_row(rollout.obs, 0, obs)
        except Exception as error:
            raise self.host.error("reset", 0, error) from original(error)
        if found := bad_obs(rollout, self.host.space, 0, 1):
            raise self.host.bad_value(*min(found))

    def resume(self, rollout: Rollout) -> None:
        """Write the last observations into row 0."""
        write_row(rollout.obs, 0, self._last_obs)
        if self._last_infos is not None:
            rollout.info_rows[0] = self._last_infos

    @interruptible
    def step_rows(self, rollout: Rollout, num_rows: int, mode: SampleMode) -> None:
        """Step `num_rows` times. This is the hot loop: no work per sub-env, and no allocation that can be saved.

        A row is one `step` of the vector env. Where an episode ends in row t, the two autoreset modes differ in what
        the next rows hold; `obs[t + 1]` is what `step` returned in row t:

            next step    row t    o3 -> a3, ends    obs[t + 1] = final observation
                         row t+1  only a reset      obs[t + 2] = o0 of the next episode; no step counts in this row
                         row t+2  o0 -> a0, begins

            same step    row t    o3 -> a3, ends    obs[t + 1] = o0 of the next episode; the final one is in the infos
                         row t+1  o0 -> a0, begins

        So `resetting` of a row, the sub-envs that it only resets, are those that ended in the row before, or none; and
        `begins`, those whose observation begins an episode, are those that the row before reset, or that ended in it.
        """
        start, stop = rollout.num_rows, rollout.num_rows + num_rows
        actor, events, num_samplers, seconds = self._actor, self.events, mode.num_samplers, self.timers.seconds
        explore, random_actions, timestep = mode.explore, mode.random_actions, mode.timestep
        timestep += num_samplers * mode.num_steps
        choose, to_env, step, clock = actor.choose, actor.distribution.to_env, self.host.step, time.perf_counter
        obs, actions, dist_inputs = rollout.obs, rollout.actions, rollout.dist_inputs
        rewards, terminated, truncated = rollout.rewards, rollout.terminated, rollout.truncated
        times, num_envs, same_step = rollout.row_times_s, self.host.num_envs, self.host.is_same_step
        single_leaf, remembers = isinstance(obs, np.ndarray), actor.history.has_columns
        looks_at_infos = same_step or mode.keeps_infos
        begins, resetting, num_broken = self._begins, rollout.resets_in(start), len(rollout.broken)
        inference_s = env_step_s = storage_s = 0.0
        now = clock()
        for t in range(start, stop):
            # From the observations of row t to actions.
            row = obs[t] if single_leaf else map_tree(lambda column, t=t: column[t], obs)
            if actor.has_action_mask:
                self._check_choice(t, row, resetting)
            try:
                actions[t], dist_inputs[t], logp = choose(
                    row, begins, timestep=timestep, explore=explore, random_actions=random_actions
                )
            except Exception:
                self._check_block(rollout, start, t)  # a bad value of the env may be why the module raised
                raise
            if logp is not None or remembers:
                self._write_choice(rollout, t, logp)
            inferred = clock()
            # One step of all sub-envs, whose observations are row t + 1.
            try:
                next_obs, rewards[t], terminated[t], truncated[t], infos = step(to_env(actions[t]))
                rollout.num_rows = t + 1  # at once, so that an interrupt below finds the steps counted
                stepped = clock()
                write_row(obs, t + 1, next_obs)
            except Exception as error:
                self._check_block(rollout, start, t)  # a NaN in an earlier row explains the failure better
                raise self.host.error("step", t, error) from original(error)
            # Where episodes ended and begin; see above.
            timestep += num_samplers * (num_envs - int(np.count_nonzero(resetting)))
            done = terminated[t] | truncated[t]
            begins, resetting = (done, resetting) if same_step else (resetting, done)
            if len(rollout.broken) > num_broken:  # where a sub-env failed, the next observation begins an episode
                begins, num_broken = begins.copy(), len(rollout.broken)
                begins[rollout.broken_in(t)] = True
            if remembers:
                actor.history.note_rewards(rewards[t])
            if looks_at_infos:
                self._keep_step_infos(rollout, t, infos, done, keeps_all=mode.keeps_infos)
            times[t] = after = clock()
            inference_s += inferred - now
            env_step_s += stepped - inferred
            storage_s += after - stepped
            now = after
            if events is not None:
                events.fire_row(rollout, t, done, mode.playing)
                now = clock()
                seconds["callbacks"] += now - after
        mode.settle(rollout)
        self._begins = begins
        self._check_block(rollout, start, stop)
        seconds["inference"] += inference_s
        seconds["env_step"] += env_step_s
        seconds["storage"] += storage_s + clock() - now

    def _write_choice(self, rollout: Rollout, t: int, logp: Any) -> None:
        """Write the log-probabilities of row t, and what was remembered when its actions were chosen."""
        history = self._actor.history
        if logp is not None:
            rollout.set_logp(t, logp)
        if history.has_columns:
            _write_columns(rollout, t, history.get_chosen())
            history.note_actions(rollout.actions[t])

    def _check_choice(self, t: int, obs: Tree, resetting: NDArray[np.bool_]) -> None:
        """Raise if a sub-env that acts has no legal action."""
        if (stuck := self._actor.first_without_choice(obs, ~resetting)) is not None:
            raise self.host.bad_value(t, stuck, NO_LEGAL_ACTION)

    def _check_block(self, rollout: Rollout, start: int, stop: int) -> None:
        """Raise for NaN or a value outside the spaces in the rows that were just written; the earliest is named."""
        if bad := first_bad_value(rollout, self.host.space, start, stop, callbacks=self.events is not None):
            raise self.host.bad_value(*bad)

    def _keep_step_infos(
        self, rollout: Rollout, t: int, infos: Mapping[Any, Any], done: NDArray[np.bool_], *, keeps_all: bool
    ) -> None:
        """Keep the infos of a step, and the final observations that a same-step autoreset overwrites in row t + 1."""
        if keeps_all:
            self.keep_infos(rollout, t + 1, infos, done if self.host.is_same_step else None)
        if not self.host.is_same_step:
            return
        ended = np.flatnonzero(done).tolist()
        for i in ended:
            rollout.add_final_obs(t, i, self.host.final_obs(infos, i))
        history = self._actor.history
        if ended and history.has_columns:
            row = map_tree(lambda leaf: leaf[t].copy(), rollout.obs)
            for i in ended:
                map_tree(lambda leaf, final, i=i: leaf.__setitem__(i, final), row, rollout.final_obs[t, i])
            finals = {"states": rollout.final_states, "stored": rollout.final_stored}
            for name, rows in history.get_next(row, np.zeros(len(done), np.bool_)).items():
                for i in ended:
                    finals[name][t, i] = map_tree(lambda leaf, i=i: leaf[i].copy(), rows)

    def finish(self, rollout: Rollout, mode: SampleMode) -> Rollout:
        """Return the rollout with the columns of module and exploration, and keep the last row for the next one."""
        if rollout.num_rows:
            obs = rollout.obs
            is_leaf = isinstance(obs, np.ndarray)
            self._last_obs = obs[-1].copy() if is_leaf else map_tree(lambda leaf: leaf[-1].copy(), obs)
            if self._actor.history.has_columns:
                rows = self._actor.history.get_next(self._last_obs, self._begins)
                _write_columns(rollout, rollout.num_rows, rows)
            self._last_infos = rollout.info_rows.get(rollout.num_rows)
            if self.host.plays_again:  # copies, because callbacks may write into the rollout now
                self.keep_played(rollout.columns["actions"].copy(), rollout)
        self.complete(DEFAULT_MODULE_ID, rollout, mode)
        return rollout

    def get_unfinished(self) -> dict[str, Any]:
        """Return the last observations, and their infos if a checkpoint can hold them."""
        infos = self._last_infos
        known = None if infos is None else [infos.of_lanes, infos.final]
        return {
            "obs": map_tree(np.copy, self._last_obs),
            "begins": self._begins.copy(),
            "infos": copy_nested(known) if is_plain(known) else None,
            **self._actor.history.get_state(),
            **self._get_played(),
        }

    def _get_played(self) -> dict[str, Any]:
        if not self.host.plays_again:
            return {}
        return {"played": self.played.get(same_step=self.host.is_same_step, convert=lambda actions, _: actions)}

    def _get_replay(self, state: Mapping[str, Any], env_index: int, actions: Tree) -> dict[str, Any]:
        return {
            "actions": self._actor.distribution.to_env(actions),
            "obs": map_tree(lambda leaf: leaf[env_index], state["obs"]),
        }

    def check_unfinished(self, state: Mapping[str, Any]) -> None:
        """Check a state of `get_unfinished`, without changing anything.

        Raises:
            CheckpointError: The observations are of another env, or the states of another module.
        """
        check_last_rows(state, self._actor, self.host)
        shape, dtype = self._actor.distribution.action_shape, self._actor.distribution.action_dtype
        for actions in state.get("played", ()):
            if actions is not None and (actions.shape[1:] != shape or actions.dtype != dtype):
                raise CheckpointError(f"the actions of an episode of a runner are {actions.dtype}{actions.shape}.")

    def set_unfinished(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_unfinished`."""
        self._last_obs, self._begins = map_tree(np.copy, state["obs"]), state["begins"].copy()
        self._actor.history.set_state(state)
        if self.host.plays_again:
            self.played.set(state.get("played", ()))
        self._last_infos = None if state["infos"] is None else Infos(*copy_nested(state["infos"]))


def check_last_rows(state: Mapping[str, Any], actor: Actor, host: EnvHost) -> None:
    """Check the last observations of a state of one agent, and what the module remembers with them.

    Raises:
        CheckpointError: They are of another env or another module.
    """
    num_envs, begins = host.num_envs, state["begins"]
    if begins.shape != (num_envs,) or begins.dtype != np.bool_:
        raise CheckpointError(f"begins of the episodes of a runner are {begins.dtype}{begins.shape}.")

    def check(space: Any, leaf: Any) -> None:
        if leaf.shape != (num_envs, *space.shape) or leaf.dtype != space.dtype:
            raise CheckpointError(f"the last observations of a runner are {leaf.dtype}{leaf.shape}.")

    map_tree(check, host.space, state["obs"])
    actor.history.check_state(state, num_envs)


def _write_columns(rollout: Rollout, row: int, rows: Mapping[str, Tree]) -> None:
    """Write to a row of several columns, from trees of `[N, ...]` by name of the column."""
    write_row({name: rollout.columns[name] for name in rows}, row, rows)
