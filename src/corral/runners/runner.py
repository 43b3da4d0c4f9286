"""The runner: steps one vector env with one copy of the module, and returns columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from corral.callbacks.dispatch import make_dispatcher
from corral.core.action_masks import NO_LEGAL_ACTION
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.plain import is_plain
from corral.core.seeding import id_prefix, runner_seeds, seed_everything
from corral.core.tree import Tree, copy_nested, map_tree
from corral.envs.checks import bad_obs, first_bad_value, write_row
from corral.envs.env_host import EnvHost
from corral.envs.env_state import warn_of_own_statistics
from corral.envs.seats import SeatsSpace
from corral.envs.step_timeout import SampleOverdue, limited
from corral.envs.sub_envs import original
from corral.episodes.infos import Infos, split_infos
from corral.episodes.rollout import NO_EPISODES, EpisodeCarry, EpisodeStatistics, Rollout, episode_statistics
from corral.errors import CheckpointError, ConfigError, SubEnvError, WeightsError, nearest
from corral.metrics.logger import MetricsLogger, Parts
from corral.metrics.timers import Timers
from corral.modules.distributions import ActionDistribution
from corral.modules.module import Module
from corral.modules.threads import num_threads_for, torch_threads
from corral.runners.actor import Actor
from corral.runners.episode_events import EPISODE_EVENTS, EpisodeEvents
from corral.runners.requests import SampleRequest
from corral.runners.sample_modes import SampleMode, make_mode, num_taken
from corral.runners.trajectory_events import postprocess_trajectories

if TYPE_CHECKING:
    from corral.envs.episode_resets import EpisodeReset
    from corral.envs.vector import EnvContext
    from corral.modules.spec import ModuleSpec
    from corral.runners.config import RunnerConfig


class EnvRunner:
    """Steps a vector env with the current policy and records what happened.

    Attributes:
        config: The runner's own copy of the config, in which settings of `environment` can change before `make_env`.
        host: Host of the envs, which makes, steps and restarts them.
        actors: Copies of the modules with what chooses their actions, by module id.
        module: This runner's own copy of the module, if there is one agent.
        worker_index: 0 for the embedded runner, 1 and up for others.
        weights_version: Version of the weights that choose the actions.
        weight_receivers: Functions that receive what the algorithm's `weight_providers` of the same names give. A
            callback of `on_environment_created` may add one.
        num_env_steps_sampled_lifetime: Env steps of all rollouts so far, also of the runners that this one replaced.
        num_env_steps_lost: Env steps that were taken so far and are in no rollout: steps of rollouts that an exception
            ended, and if whole episodes were asked for, steps of other episodes.
        last_statistics: Statistics of the episodes that ended in the last rollout, before callbacks changed any column.
    """

    module: Module
    actors: dict[str, Actor]
    weight_receivers: dict[str, Callable[[Mapping[str, Any]], None]]

    def __init__(
        self,
        config: RunnerConfig,
        worker_index: int = 0,
        *,
        num_restarts: int = 0,
        own_process: bool = False,
        module_specs: Mapping[str, ModuleSpec] | None = None,
        makes_modules: bool = True,
    ) -> None:
        """Make the env and the module.

        Args:
            config: Config of the algorithm, or of its evaluation.
            worker_index: 0 for the embedded runner, 1 and up for others.
            num_restarts: How many runners this one replaces, one after another; each draws its own random numbers.
            own_process: Whether this process is the runner's alone: its global generators get seeds, and it may be
                ended where `env_step_timeout_s` cannot interrupt the env.
            module_specs: Specs of the modules by module id; `None` is what the config and the spaces of this env give.
            makes_modules: Whether to make the modules now. Otherwise `make_modules` comes later, when the driver has
                made the specs for all runners from the spaces that `describe_env` returned.

        Raises:
            ConfigError: The env id is unknown, or a setting contradicts the env or the thread.
            EnvError: The env raised, or gave values that its spaces do not allow.
        """
        config = self.config = config.for_runner()
        self.worker_index = worker_index
        self._metrics = MetricsLogger()
        self.timers = Timers()
        self.weights_version = 0
        self.weight_receivers = {}
        self.num_env_steps_sampled_lifetime = 0
        self.num_env_steps_lost = 0
        self._unlogged: tuple[int, int] | None = None  # env steps and episodes that are not in the metrics yet
        self._log_counts(0, 0)  # now, so that user code cannot take the names
        self.last_statistics = NO_EPISODES
        self._log_episodes(self.last_statistics)
        self.idle_since = time.perf_counter()
        self._callbacks = make_dispatcher(config)
        self._hears_episodes = self._callbacks.subscribed(*EPISODE_EVENTS)
        self._hears_samples = self._callbacks.subscribed("on_postprocess_trajectory", "on_sample_end")
        # Only callbacks that receive episodes or rollouts can read infos, so infos are kept for them alone.
        self._keeps_infos = self._shows_infos = self._hears_episodes or self._hears_samples
        env_seeds, noise_seed, id_seed, process_seed = runner_seeds(
            config.seed or 0, worker_index, num_restarts, config.in_evaluation
        )
        self.own_process = own_process
        if own_process:  # in the process of the algorithm, `build` did it
            seed_everything(int(process_seed.generate_state(1)[0]) >> 1)
        self._rng = np.random.default_rng(noise_seed)
        self.host = EnvHost(
            config,
            worker_index,
            env_seeds,
            env_created=self._announce_env,
            sub_env_created=self._announce_sub_env,
            sub_env_restarted=self._note_restart,
            needs_sub_envs=self._callbacks.needs_sub_envs(),
            own_process=own_process,
        )
        self.make_env()
        self._timestep = 0  # env steps of all runners when the current sample began, where known
        # Schedules stand still while the runner evaluates.
        self._num_samplers = 0 if config.in_evaluation else max(1, config.num_env_runners)
        self._last_num_rows = 0
        self._last_infos: Infos | None = None
        self._id_prefix = id_prefix(id_seed)
        self._num_resets = 0  # resets of all envs; each gives the ids of episodes another prefix
        self._carry = EpisodeCarry.fresh(self.num_envs, 0.0)
        self._resetting = np.zeros(self.num_envs, np.bool_)  # sub-envs that the next row only resets
        if makes_modules:
            try:
                self.make_modules(module_specs or config.module_specs(*self.describe_env()[:2]))
            except BaseException:
                self.host.close()
                raise

    def make_modules(self, module_specs: Mapping[str, ModuleSpec]) -> None:
        """Make this runner's copies of the modules, by module id, and the explorations that choose actions with them.

        Raises:
            ConfigError: A module or an exploration does not fit the spaces.
        """
        self._make_actors(module_specs)
        actors = list(self.actors.values())
        self._num_threads = num_threads_for(actors[0].module, self.config.num_threads)
        # Evaluation changes no statistics.
        self._measures = not self.config.in_evaluation and any(actor.transforms is not None for actor in actors)
        # Now, so that user code cannot take the names.
        self.metrics.log_reserved(dict.fromkeys(self._exploration_metrics(), ()), window=1)
        self.weight_receivers["modules"] = self._set_module_weights
        self.weight_receivers["exploration"] = self._set_exploration_weights
        self.weight_receivers["transforms"] = self._set_transform_states

    def _make_actors(self, module_specs: Mapping[str, ModuleSpec]) -> None:
        action_space = self.env.single_action_space
        actor = Actor(
            self.config,
            module_specs[DEFAULT_MODULE_ID],
            action_space=action_space,
            num_rows=self.num_envs,
            worker_index=self.worker_index,
            rng=self._rng,
        )
        self.actors = {DEFAULT_MODULE_ID: actor}
        self.module, self.inference, self.exploration = actor.module, actor.inference, actor.exploration
        self._distribution, self._remembered = actor.distribution, actor.remembered

    def _exploration_metrics(self) -> dict[Any, float]:
        """Return the numbers of the explorations, by their keys in the result."""
        return dict(self.exploration.get_metrics(self._timestep))

    def make_env(self) -> None:
        """Make a vector env, which replaces the current one, and fire `on_environment_created`.

        It is made with the settings of this runner's own config, which may have been changed before, as in
        `env_runner.config.environment(env_config={"size": 8})`. Episodes that are not finished are dropped.

        Raises:
            ConfigError: The env id is unknown, or a setting contradicts the env.
            EnvError: The env raised an exception, or its spaces or its number of sub-envs are others than before.
        """
        self._forget_sample()
        self.host.make()

    def _forget_sample(self) -> None:
        """Forget the episodes of the current vector env, so that the next sample begins with a reset."""
        self._needs_reset = True
        self._events: EpisodeEvents | None = None  # made at the first reset
        self._rollout: Rollout | None = None  # the one that is being written

    # Called by the host of the envs.

    def _announce_env(self, env: VectorEnv[Any, Any, Any], context: EnvContext) -> None:
        if not self.config.in_evaluation and self.worker_index <= 1:
            warn_of_own_statistics(env, self.host.name)
        has_seats = isinstance(env.single_observation_space, SeatsSpace)
        if has_seats and not self.config.is_multi_agent:
            raise ConfigError(
                f"env {self.host.name!r} has several agents: name the modules that choose their actions, as in "
                ".multi_agent(policies={'main'}), or use an env of one agent."
            )
        if self.config.is_multi_agent and not has_seats:
            raise ConfigError(
                f"multi_agent: policies names the modules {self.config.module_ids}, and env {self.host.name!r} has one "
                "agent: leave policies out, or use a corral.MultiAgentEnv."
            )
        self._callbacks.fire(
            "on_environment_created", env_runner=self, metrics_logger=self.metrics, env=env, env_context=context
        )

    def _announce_sub_env(self, sub_env: Any, context: EnvContext, env_index: int) -> None:
        self._callbacks.fire(
            "on_sub_environment_created",
            env_runner=self,
            metrics_logger=self.metrics,
            sub_environment=sub_env,
            env_context=context,
            env_index=env_index,
        )

    def _note_restart(self, failure: SubEnvError) -> None:
        """Count a sub-env that was restarted, and cut off the episode in whose step the old one failed."""
        row = 0 if self._rollout is None else self._rollout.num_rows
        self.host.count_restart(failure, row)
        if self._rollout is not None and failure.method == "step":
            self._rollout.broken.append((row, failure.env_index))

    @property
    def rl_module(self) -> Any:
        """The module, as callbacks receive it; with several agents a dict of modules by id."""
        return self.module

    # The envs.

    @property
    def env(self) -> VectorEnv[Any, Any, Any]:
        """The vector env."""
        return self.host.env

    @property
    def num_envs(self) -> int:
        """Number of sub-envs N."""
        return self.host.num_envs

    @property
    def num_sub_env_restarts(self) -> int:
        """Restarts of sub-envs over the runner's lifetime."""
        return self.host.restarts.num_restarts

    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
        timestep: int | None = None,
    ) -> Rollout:
        """Step the env and return the columns; see `SampleRequest` for the arguments, and `collect` for the errors.

        Raises:
            SampleError: Neither or both of the numbers are given, or one is negative.
        """
        return self.collect(
            SampleRequest(
                num_timesteps=num_timesteps,
                num_episodes=num_episodes,
                explore=explore,
                random_actions=random_actions,
                force_reset=force_reset,
                timestep=timestep,
            )
        )

    def collect(self, request: SampleRequest) -> Rollout:
        """Step the env as a request asks, and return the columns.

        Raises:
            EnvError: An env raised, gave NaN, or hung (`EnvTimeoutError`); the message names env, sub-env, step and
                field. The next call begins with a reset, in a new vector env if an asynchronous one was left broken.
                Every exception has an attribute `num_env_steps_lost`: the steps that were taken for this rollout.
            CallbackError: A callback raised, gave a column another shape or dtype, or wrote an action outside the
                action space; the message names event and callback, and an episode where there is one.
        """
        lost_before = self.num_env_steps_lost
        try:
            if self.host.is_broken:
                began_s = time.perf_counter()
                with limited(request.time_limit_s, "the time limit of the sample"):
                    self.recover()
                request = request.after(time.perf_counter() - began_s)
            return self._sample(request)
        except BaseException as error:
            # It travels with the exception, also to other processes.
            error.num_env_steps_lost = self.num_env_steps_lost - lost_before  # type: ignore[attr-defined]
            raise

    def _sample(self, request: SampleRequest) -> Rollout:
        """Return a rollout: fill it, complete it, and let callbacks see it. An exception loses its steps."""
        wanted, num_envs = request.num_wanted, self.host.num_envs
        self._keeps_infos = self._shows_infos or request.with_infos
        explore = self.config.explore if request.explore is None else request.explore
        self._timestep = self._timestep if request.timestep is None else request.timestep
        if self.host.asks_iteration:
            self.host.note_iteration(request.training_iteration)
        self._needs_reset |= request.force_reset
        whole_episodes = request.num_episodes is not None or self.config.batch_mode == "complete_episodes"
        mode = make_mode(request, whole_episodes=whole_episodes, name=self.host.name)
        # Autoreset rows come on top; the last call's total is a good guess of how many.
        num_rows = -(-wanted // num_envs)
        rollout = self._rollout = self._allocate(max(num_rows, min(self._last_num_rows, 2 * num_rows)))
        resetting = self._resetting  # in the first row
        num_counted = 0, 0  # env steps and episodes of this rollout in the metrics
        is_cut = False  # by the time limit of the request
        try:
            if wanted:
                begins_with_reset, self._needs_reset = self._needs_reset or whole_episodes, True  # until `_finish`
                if begins_with_reset:
                    resetting = np.zeros(num_envs, np.bool_)
                with self.host.sampling(request.time_limit_s), torch_threads(self._num_threads):
                    is_cut = self._fill(rollout, request, mode, begins_with_reset, explore)
            if self._hears_episodes:
                self._check_actions(rollout, *EPISODE_EVENTS)
            num_episodes = self._finish(rollout, whole_episodes or is_cut, explore)
            if whole_episodes:
                num_steps = num_taken(rollout, resetting, same_step=self.host.is_same_step)
                self.num_env_steps_lost += num_steps - rollout.num_env_steps
            num_counted = rollout.num_env_steps, num_episodes
            self._count(*num_counted)
            if self._hears_samples:
                self._show(rollout)
            if self._measures:
                self._measure(rollout)
        except BaseException:
            self._needs_reset = True  # the next rollout would not continue one that anybody has
            if num_counted[0]:
                self._count(-num_counted[0], -num_counted[1])
                self.num_env_steps_lost += num_counted[0]
            else:
                self.num_env_steps_lost += num_taken(rollout, resetting, same_step=self.host.is_same_step)
                self.num_env_steps_lost += self.host.end_failed_call()
            raise
        finally:
            self._rollout = None
        return rollout

    def _allocate(self, num_rows: int) -> Rollout:
        actor = self.actors[DEFAULT_MODULE_ID]
        rollout = Rollout.allocate(num_rows, self.host.num_envs, self.host.space, self._distribution)
        rollout.weights_version = self.weights_version
        rollout.worker_index = self.worker_index
        rollout.observation_space, rollout.action_space = self.host.observation_space, actor.action_space
        rollout.carry = self._carry
        if self._remembered.has_columns:
            rollout.columns.update(self._remembered.allocate(num_rows + 1))
        if actor.transforms is not None:
            rollout.pipeline = actor.transforms.pipeline
        return rollout

    def _fill(
        self, rollout: Rollout, request: SampleRequest, mode: SampleMode, begins_with_reset: bool, explore: bool
    ) -> bool:
        """Fill a rollout as a request asks, and return whether the time limit of the request ended it before."""
        deadline_s = time.perf_counter() + (request.time_limit_s or 0.0)
        for actor in self.actors.values():
            actor.inference.begin_sample(explore, self._rng)
        try:
            if begins_with_reset:
                self._reset(rollout, request.resets)
            else:
                self._continue(rollout)
            while num_rows := mode.num_rows_wanted(rollout):
                if request.time_limit_s is not None:
                    num_rows = 1
                    if time.perf_counter() > deadline_s:
                        return True
                if rollout.num_rows + num_rows > len(rollout.rewards):
                    rollout.resize(max(rollout.num_rows + num_rows, len(rollout.rewards) * 3 // 2))
                self._step_rows(rollout, num_rows, mode, explore, request.random_actions)
        except SampleOverdue:  # inside an env; the row that it did not finish is dropped
            rollout.broken = [(row, i) for row, i in rollout.broken if row < rollout.num_rows]
            if not self.host.is_broken:  # else it is closed when it is replaced, which may take long
                self.num_env_steps_lost += self.host.end_failed_call()
            return True
        return False

    def _show(self, rollout: Rollout) -> None:
        """Fire the events of a complete rollout, whose callbacks may change it."""
        with self.timers.time("callbacks"):
            if self._callbacks.subscribed("on_postprocess_trajectory"):
                postprocess_trajectories(rollout, self._callbacks, self)
                self._check_actions(rollout, "on_postprocess_trajectory")
            self._callbacks.fire("on_sample_end", env_runner=self, metrics_logger=self.metrics, samples=rollout)
            self._check_actions(rollout, "on_sample_end")

    def _reset(self, rollout: Rollout, resets: Sequence[EpisodeReset] | None) -> None:
        """Reset all sub-envs, and begin all episodes with their first observations."""
        self._carry = rollout.carry = EpisodeCarry.fresh(self.host.num_envs, time.perf_counter(), self._next_prefix())
        self._forget_episodes(rollout)
        if self._events is None and self._hears_episodes:
            self._events = self.make_events()
        if self._events is not None:
            with self.timers.time("callbacks"):
                self._events.create_all(rollout)
        with self.timers.time("env_step"):
            obs, infos = self.host.reset(resets)
        self._keep_infos(rollout, 0, infos, None)
        self._resetting, self._begins = np.zeros(self.host.num_envs, np.bool_), np.ones(self.host.num_envs, np.bool_)
        self._carry.start_times_s[:] = time.perf_counter()
        self._take_first_obs(rollout, obs)
        if self._events is not None:
            with self.timers.time("callbacks"):
                self._events.start_all(rollout)

    def _forget_episodes(self, rollout: Rollout) -> None:
        """Forget what is kept of the episodes before a reset, apart from their carry."""

    def _take_first_obs(self, rollout: Rollout, obs: Any) -> None:
        """Write the observations of a reset into row 0."""
        write_row(rollout.obs, 0, obs)
        if found := bad_obs(rollout, self.host.space, 0, 1):
            raise self.host.bad_value(*min(found))

    def make_events(self) -> EpisodeEvents:
        """Return what fires the events of the episodes of this runner."""
        return EpisodeEvents(self, self._callbacks, same_step=self.host.is_same_step)

    def _next_prefix(self) -> str:
        """Return the prefix of the ids of the episodes from the next reset on.

        After an exception the last carry may not count all episodes, so every reset has another prefix.
        """
        prefix = f"{self._id_prefix}{self._num_resets:06x}"
        self._num_resets += 1
        return prefix

    def _resume_carry(self, rollout: Rollout) -> float:
        """Continue the totals of the unfinished episodes, and return the seconds since the last rollout.

        This time belongs to no episode, but to the learner, for instance.
        """
        rollout.continues = True
        paused_s = time.perf_counter() - self._last_time_s
        self._carry = replace(self._carry, start_times_s=self._carry.start_times_s + paused_s)
        rollout.carry = self._carry
        return paused_s

    def _continue(self, rollout: Rollout) -> None:
        """Continue where the last rollout stopped: its last row is the first row of this one."""
        paused_s = self._resume_carry(rollout)
        write_row(rollout.obs, 0, self._last_obs)
        if self._last_infos is not None:
            rollout.info_rows[0] = self._last_infos
        if self._events is not None:
            self._events.continue_all(rollout, paused_s)

    def _step_rows(
        self, rollout: Rollout, num_rows: int, mode: SampleMode, explore: bool, random_actions: bool
    ) -> None:
        """Step `num_rows` times. This is the hot loop: no work per sub-env, and no allocation that can be saved."""
        start, stop = rollout.num_rows, rollout.num_rows + num_rows
        actor, remembered, events = self.actors[DEFAULT_MODULE_ID], self._remembered, self._events
        choose, to_env, step, clock = actor.choose, actor.distribution.to_env, self.host.step, time.perf_counter
        obs, actions, dist_inputs = rollout.obs, rollout.actions, rollout.dist_inputs
        rewards, terminated, truncated = rollout.rewards, rollout.terminated, rollout.truncated
        times, broken, num_broken = rollout.row_times_s, rollout.broken, len(rollout.broken)
        num_envs, same_step = self.host.num_envs, self.host.is_same_step
        single_leaf, looks_at_infos = isinstance(obs, np.ndarray), same_step or self._keeps_infos
        begins, resetting = self._begins, self._resetting
        timestep = self._timestep + self._num_samplers * mode.num_steps
        inference_s = env_step_s = storage_s = 0.0
        now = clock()
        for t in range(start, stop):
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
            if logp is not None or remembered.has_columns:
                self._write_choice(rollout, t, logp)
            inferred = clock()
            try:
                next_obs, rewards[t], terminated[t], truncated[t], infos = step(to_env(actions[t]))
                rollout.num_rows = t + 1  # at once, so that an interrupt below finds the steps counted
                stepped = clock()
                write_row(obs, t + 1, next_obs)
            except Exception as error:
                self._check_block(rollout, start, t)  # a NaN in an earlier row explains the failure better
                raise self.host.error("step", t, error) from original(error)
            timestep += self._num_samplers * (num_envs - int(np.count_nonzero(resetting)))
            done = terminated[t] | truncated[t]
            begins, resetting = (done, resetting) if same_step else (resetting, done)
            if len(broken) > num_broken:  # sub-envs that failed show the first observation of the new ones next
                begins = begins.copy()
                begins[[i for _, i in broken[num_broken:]]] = True
                num_broken = len(broken)
            if remembered.has_columns:
                remembered.note_rewards(rewards[t])
            if looks_at_infos:
                self._take_infos(rollout, t, infos, done)
            times[t] = after = clock()
            inference_s += inferred - now
            env_step_s += stepped - inferred
            storage_s += after - stepped
            now = after
            if events is not None:
                events.fire_row(rollout, t, done, mode.playing)
                now = clock()
                self.timers.seconds["callbacks"] += now - after
        mode.settle(rollout, self._resetting, same_step=same_step)
        self._begins, self._resetting = begins, resetting
        self._check_block(rollout, start, stop)
        seconds = self.timers.seconds
        seconds["inference"] += inference_s
        seconds["env_step"] += env_step_s
        seconds["storage"] += storage_s + clock() - now

    def _write_choice(self, rollout: Rollout, t: int, logp: Any) -> None:
        """Write the log-probabilities of row t, and what was remembered when its actions were chosen."""
        if logp is not None:
            rollout.set_logp(t, logp)
        if self._remembered.has_columns:
            _write_columns(rollout, t, self._remembered.get_chosen())
            self._remembered.note_actions(rollout.actions[t])

    def _check_choice(self, t: int, obs: Tree, resetting: NDArray[np.bool_]) -> None:
        """Raise if a sub-env that acts has no legal action."""
        if (stuck := self.actors[DEFAULT_MODULE_ID].first_without_choice(obs, ~resetting)) is not None:
            raise self.host.bad_value(t, stuck, NO_LEGAL_ACTION)

    def _keep_infos(
        self, rollout: Rollout, row: int, infos: Mapping[Any, Any], ended: NDArray[np.bool_] | None
    ) -> None:
        """Keep the infos that came with a row of observations, if a callback may read them.

        Args:
            rollout: Rollout that is being written.
            row: Row of the observations.
            infos: Infos of the vector env.
            ended: Sub-envs that same-step autoreset has reset.
        """
        if infos and self._keeps_infos:
            rollout.info_rows[row] = split_infos(self.host.infos_by_env(infos), ended)

    def _take_infos(self, rollout: Rollout, t: int, infos: Mapping[Any, Any], done: NDArray[np.bool_]) -> None:
        """Keep the infos of a step, and the final observations that a same-step autoreset overwrites in row t + 1."""
        self._keep_infos(rollout, t + 1, infos, done if self.host.is_same_step else None)
        ended = np.flatnonzero(done).tolist() if self.host.is_same_step else []
        for i in ended:
            rollout.add_final_obs(t, i, self.host.final_obs(infos, i))
        if ended and self._remembered.has_columns:
            row = map_tree(lambda leaf: leaf[t].copy(), rollout.obs)
            for i in ended:
                map_tree(lambda leaf, final, i=i: leaf.__setitem__(i, final), row, rollout.final_obs[t, i])
            finals = {"states": rollout.final_states, "stored": rollout.final_stored}
            for name, rows in self._remembered.get_next(row, np.zeros(self.num_envs, np.bool_)).items():
                for i in ended:
                    finals[name][t, i] = map_tree(lambda leaf, i=i: leaf[i].copy(), rows)

    def _finish(self, rollout: Rollout, whole_episodes: bool, explore: bool) -> int:
        """Trim the columns, compute log-probabilities and statistics of episodes from them, and log the metrics.

        Returns:
            The number of episodes that ended.
        """
        tic = time.perf_counter()
        if len(rollout.rewards) > rollout.num_rows:
            rollout.resize(rollout.num_rows)
        rollout.num_env_steps = int(np.count_nonzero(rollout.valid))
        self._timestep += self._num_samplers * rollout.num_env_steps
        if rollout.num_rows:
            self._needs_reset = whole_episodes
            self.host.num_rows += rollout.num_rows
            self._last_num_rows = rollout.num_rows
            self._last_time_s = float(rollout.row_times_s[-1])
            self._keep_last_row(rollout)
        self._finish_actions(rollout, explore)
        self.last_statistics, self._carry = episode_statistics(rollout, self._carry)
        num_episodes = len(self.last_statistics.returns)
        if num_episodes:
            self._log_episodes(self.last_statistics)
        self.timers.seconds["storage"] += time.perf_counter() - tic
        return num_episodes

    def _keep_last_row(self, rollout: Rollout) -> None:
        """Keep what the next rollout begins with, if it continues."""
        obs = rollout.obs
        self._last_obs = obs[-1].copy() if isinstance(obs, np.ndarray) else map_tree(lambda leaf: leaf[-1].copy(), obs)
        if self._remembered.has_columns:
            _write_columns(rollout, rollout.num_rows, self._remembered.get_next(self._last_obs, self._begins))
        self._last_infos = rollout.info_rows.get(rollout.num_rows)

    def _finish_actions(self, rollout: Rollout, explore: bool) -> None:
        """Complete what the modules and explorations know of the actions of a rollout."""
        fill_logp(rollout, self._distribution, needed=self.config.ON_POLICY)
        if self.actors[DEFAULT_MODULE_ID].sees_samples:
            self.exploration.end_sample(rollout, timestep=self._timestep, explore=explore)

    def _measure(self, rollout: Rollout) -> None:
        """Measure what statistics of transforms need."""
        with self.timers.time("storage"):
            for module_id, part in rollout.by_module().items():
                self.actors[module_id].measure(part)

    @property
    def metrics(self) -> MetricsLogger:
        """Logger that callbacks receive; aggregated into `result["env_runners"]`."""
        self._log_samples()
        return self._metrics

    def _log_samples(self) -> None:
        """Log what the samples since the last call counted, and the numbers of the explorations."""
        if self._unlogged is not None:
            counts, self._unlogged = self._unlogged, None
            self._log_counts(*counts)
            if numbers := self._exploration_metrics():
                self._metrics.log_reserved({name: [value] for name, value in numbers.items()}, window=1)

    def _count(self, num_env_steps: int, num_episodes: int) -> None:
        """Count the steps and the episodes of a rollout, or with negative numbers, of a rollout that was lost.

        They are logged when somebody looks, because samples may be short; callbacks look all the time.
        """
        self.num_env_steps_sampled_lifetime += num_env_steps
        before = self._unlogged or (0, 0)
        self._unlogged = before[0] + num_env_steps, before[1] + num_episodes
        if self._shows_infos:
            self._log_samples()

    def _log_counts(self, num_env_steps: int, num_episodes: int) -> None:
        episodes, steps = [num_episodes], [num_env_steps]
        self._metrics.log_reserved({"num_episodes": episodes, "num_env_steps_sampled": steps}, "sum")
        lifetime = {"num_episodes_lifetime": episodes, "num_env_steps_sampled_lifetime": steps}
        self._metrics.log_reserved(lifetime, "lifetime_sum")

    def _log_episodes(self, statistics: EpisodeStatistics) -> None:
        """Log the returns, lengths and durations of the episodes that ended."""
        window = self.config.metrics_num_episodes_for_smoothing
        for name, values in (("return", statistics.returns.tolist()), ("len", statistics.lengths.tolist())):
            for reduce in ("mean", "min", "max"):
                self._metrics.log_reserved({f"episode_{name}_{reduce}": values}, reduce, window)
        durations_s = statistics.durations_s.tolist()
        self._metrics.log_reserved({"episode_duration_sec_mean": durations_s}, window=window)

    # Checks, state and metrics.

    def _check_block(self, rollout: Rollout, start: int, stop: int) -> None:
        """Raise for NaN or a value outside the spaces in the rows that were just written; the earliest is named."""
        if bad := first_bad_value(rollout, self.host.space, start, stop, callbacks=self._events is not None):
            raise self.host.bad_value(*bad)

    def _check_actions(self, rollout: Rollout, *events: str) -> None:
        """Refuse actions that only a callback of one of these events can have written."""
        if not self._callbacks.subscribed(*events):
            return
        for module_id, part in rollout.by_module().items():
            space = self.actors[module_id].action_space
            self._callbacks.check_actions(part.actions[: part.num_rows], space, *events)

    def set_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]], version: int) -> None:
        """Set the weights of modules, by module id and parameter name, and note their version."""
        self.set_weight_parts({"modules": weights}, version)

    def set_weight_parts(self, parts: Mapping[str, Mapping[str, Any]], version: int) -> None:
        """Give each part of the weights to its receiver, and note the version.

        Args:
            parts: Arrays by name of receiver: `{"modules": {module_id: {name: array}}, "exploration": {...}}`.
            version: Version of all of them together.

        Raises:
            WeightsError: A part has no receiver here; no receiver was called.
        """
        for name in parts:
            if name not in self.weight_receivers:
                raise WeightsError(
                    f"weights: runner {self.worker_index} has no receiver for the part {name!r}. "
                    f"{nearest(name, self.weight_receivers)} Add one to env_runner.weight_receivers in "
                    "on_environment_created."
                )
        for name, arrays in parts.items():
            self.weight_receivers[name](arrays)
        self.weights_version = version

    def _set_module_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        for module_id, actor in self.actors.items():
            if module_id in weights:  # else it was added a moment ago, and its weights follow
                actor.inference.load_weights(weights[module_id])

    def _set_exploration_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        self.exploration.set_weights(weights)

    def _set_transform_states(self, states: Mapping[str, Any]) -> None:
        for module_id, state in states.items():
            actor = self.actors.get(module_id)  # there is none if the module was removed
            if actor is not None and actor.transforms is not None:
                actor.transforms.set_state(state)

    def get_metrics(self) -> tuple[Parts, dict[str, float], int]:
        """Return metrics and seconds of the timers since the last call, and the number of callback errors so far."""
        return self.metrics.take(), self.timers.take(), self._callbacks.num_errors

    def describe_env(self) -> tuple[Any, Any, int]:
        """Return the space of observations as modules get them, the action space of one sub-env, and N."""
        return self.host.described

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Return `fn(sub_env)` for every sub-env, called in its process, as in `lambda env: env.set_task(3)`.

        Raises:
            EnvError: The vector env has no sub-envs, or none that can be reached.
            Exception: What `fn` raised.
        """
        if self.host.is_broken:
            self.recover()
        return self.host.foreach(fn)

    def set_tasks(self, tasks: Sequence[Any]) -> None:
        """Give sub-env i task i, from its next reset on; if there are fewer tasks, the first follow after the last.

        Raises:
            EnvError: The envs have no `get_task` and `set_task`, or the sub-envs cannot be reached.
        """
        if self.host.is_broken:
            self.recover()
        self.host.set_tasks(tasks, needed=True)

    def choose_tasks(self, train_results: Mapping[str, Any]) -> None:
        """Call the setting `env_task_fn` for every sub-env, and set the tasks that it returns.

        Args:
            train_results: The result of the latest iteration.

        Raises:
            CallbackError: `env_task_fn` raised an exception.
        """
        if self.host.is_broken:
            self.recover()
        self.host.choose_tasks(train_results)

    def get_state(self) -> dict[str, Any]:
        """Return the state from which a replacement of this runner continues, without the weights.

        `weights_version`, `num_env_steps_sampled_lifetime`, `exploration`, `environment`: settings of the env that were
        changed in this runner, `tasks`: what `get_task` of each sub-env returns, or `None` where there is no such
        method, and `num_episodes`: what `env_reset_fn` has counted in each sub-env, or `None` without one.
        """
        return {
            "weights_version": self.weights_version,
            "num_env_steps_sampled_lifetime": self.num_env_steps_sampled_lifetime,
            "environment": self.host.changed_settings,
            "tasks": self.host.get_tasks(),
            "num_episodes": self.host.get_num_episodes(),
            "exploration": self._get_exploration_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`; weights and their version come through `set_weight_parts`."""
        self.num_env_steps_sampled_lifetime = state.get(
            "num_env_steps_sampled_lifetime", self.num_env_steps_sampled_lifetime
        )
        if state.get("exploration"):
            self._set_exploration_state(state["exploration"])
        if self.host.change_settings(state.get("environment", {})):
            self.make_env()
        if "tasks" in state:
            self.host.set_tasks(state["tasks"])
        self.host.set_num_episodes(state.get("num_episodes"))

    # The part of `get_runner_state` that depends on the kind of runner: what the next rollout continues from.

    def get_unfinished(self) -> dict[str, Any]:
        """Return the last observations, and their infos if a checkpoint can hold them."""
        infos = self._last_infos
        known = None if infos is None else [infos.of_lanes, infos.final]
        return {
            "obs": map_tree(np.copy, self._last_obs),
            "infos": copy_nested(known) if is_plain(known) else None,
            **self._remembered.get_state(),
        }

    def check_unfinished(self, state: Mapping[str, Any]) -> None:
        """Check a state of `get_unfinished`, without changing anything.

        Raises:
            CheckpointError: The observations are of another env, or the states of another module.
        """

        def check(space: Any, leaf: Any) -> None:
            if leaf.shape != (self.num_envs, *space.shape) or leaf.dtype != space.dtype:
                raise CheckpointError(f"the last observations of a runner are {leaf.dtype}{leaf.shape}.")

        map_tree(check, self.host.space, state["obs"])
        self._remembered.check_state(state, self.num_envs)

    def set_unfinished(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_unfinished`."""
        self._last_obs = map_tree(np.copy, state["obs"])
        self._remembered.set_state(state)
        self._last_infos = None if state["infos"] is None else Infos(*copy_nested(state["infos"]))

    def _get_exploration_state(self) -> dict[str, Any]:
        return self.exploration.get_state()

    def _set_exploration_state(self, state: Mapping[str, Any]) -> None:
        self.exploration.set_state(state)

    def recover(self) -> None:
        """Prepare for the next `sample` after an exception: make a new vector env with the tasks of the old one.

        The unfinished rollout is lost; the metrics of finished rollouts stay.

        Raises:
            EnvError: The env cannot be made.
        """
        self._forget_sample()
        self.host.recover()

    @property
    def num_callback_errors(self) -> int:
        """Exceptions so far that `on_error="log"` kept from ending the run."""
        return self._callbacks.num_errors

    def ping(self) -> bool:
        """Return True: the runner can answer."""
        return True

    def stop(self) -> None:
        """Close the env."""
        self.host.close()


def _write_columns(rollout: Rollout, row: int, rows: Mapping[str, Tree]) -> None:
    """Write to a row of several columns, from trees of `[N, ...]` by name of the column."""
    write_row({name: rollout.columns[name] for name in rows}, row, rows)


def fill_logp(rollout: Rollout, distribution: ActionDistribution, *, needed: bool) -> None:
    """Fill the column `logp`, where the exploration gave none, from the outputs of the policy.

    Args:
        rollout: Rollout that is complete except for this column.
        distribution: Distribution whose parameters the policy's outputs are.
        needed: Whether the algorithm learns from the column; otherwise entries that the exploration did not give are
            NaN.
    """
    given: NDArray[Any] | None = rollout.columns.get("logp")
    if not needed or not rollout.num_rows:
        if given is None:
            rollout.columns["logp"] = np.full(rollout.rewards.shape, np.nan, np.float32)
        return
    flat = rollout.dist_inputs.reshape(-1, distribution.num_inputs)
    actions = rollout.actions.reshape(-1, *distribution.action_shape)
    with torch.inference_mode():
        logp = distribution.logp(torch.from_numpy(flat), torch.from_numpy(actions)).numpy()
    logp = logp.reshape(rollout.rewards.shape)
    rollout.columns["logp"] = logp if given is None else np.where(np.isnan(given), logp, given)
