"""The runner: steps one vector env with one copy of the module, and returns columns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from corral.callbacks.dispatch import make_dispatcher
from corral.core.metrics.logger import MetricsLogger, Parts
from corral.core.metrics.timers import Timers
from corral.core.seeding import id_prefix, runner_seeds, seed_everything
from corral.core.views import Viewable
from corral.data.episodes.rollout import NO_EPISODES, EpisodeCarry, EpisodeStatistics, Rollout, episode_statistics
from corral.envs.env_host import EnvHost
from corral.envs.env_state import warn_of_own_statistics
from corral.envs.seats import SeatsSpace
from corral.envs.step_timeout import SampleOverdue, limited
from corral.errors import ConfigError, SubEnvError, WeightsError, nearest
from corral.exploration.base import Exploration, overrides_method
from corral.modules.inference import Inference
from corral.modules.module import Module
from corral.modules.threads import num_threads_for, torch_threads
from corral.runners.actor import Actors
from corral.runners.episode_events import EPISODE_EVENTS
from corral.runners.requests import SampleMode, SampleRequest
from corral.runners.stepping import SingleAgentStepping, Stepping
from corral.runners.trajectory_events import show_sample

if TYPE_CHECKING:
    from corral.envs.episode_resets import EpisodeReset
    from corral.envs.vector import EnvContext
    from corral.modules.spec import ModuleSpec
    from corral.runners.config import RunnerConfig

log = logging.getLogger("corral")


class EnvRunner(Viewable):
    """Steps a vector env with the current policy and records what happened.

    Attributes:
        config: The runner's own copy of the config, in which settings of `environment` can change before `make_env`.
        host: Host of the envs, which makes, steps and restarts them.
        actors: Copies of the modules with what chooses their actions, by module id.
        stepping: Steps the envs and writes the rollouts, of one agent or of several, once there are modules; see
            `Stepping`. It fires the events of episodes.
        callbacks: Dispatcher of the subscribers.
        module: This runner's own copy of the module, if there is one agent, as `inference` and `exploration` are.
        episode_class: Class of the episodes that callbacks receive.
        worker_index: 0 for the embedded runner, 1 and up for others.
        weights_version: Version of the weights that choose the actions.
        weight_receivers: Functions that receive what the algorithm's `weight_providers` of the same names give. A
            callback of `on_environment_created` may add one.
        num_samplers: Runners that sample at the same time, by which schedules count; 0 in evaluation, where they stand
            still.
        shows_infos: Whether callbacks receive episodes or rollouts, with their infos.
        num_env_steps_sampled_lifetime: Env steps of all rollouts so far, also of the runners that this one replaced.
        num_env_steps_lost: Env steps that were taken so far and are in no rollout: steps of rollouts that an exception
            ended, and if whole episodes were asked for, steps of other episodes.
        num_env_steps_by_hand: Env steps of the rollouts that `sample` has returned; groups of runners call `collect`.
        num_episodes_over: Episodes of each sub-env that are over, int64 `[N]`: ended, or if whole episodes were asked
            for, dropped at the end of the rollout. A runner that replaces another one continues its counts.
        last_statistics: Statistics of the episodes that ended in the last rollout, before callbacks changed any column.
    """

    module: Module
    inference: Inference
    exploration: Exploration
    weight_receivers: dict[str, Callable[[Mapping[str, Any]], None]]

    def __init__(
        self,
        config: RunnerConfig,
        worker_index: int = 0,
        *,
        num_restarts: int = 0,
        has_own_process: bool = False,
        module_specs: Mapping[str, ModuleSpec] | None = None,
        makes_modules: bool = True,
        metrics: MetricsLogger | None = None,
        timers: Timers | None = None,
    ) -> None:
        """Make the env and the module.

        Args:
            config: Config of the algorithm, or of its evaluation.
            worker_index: 0 for the embedded runner, 1 and up for others.
            num_restarts: How many runners this one replaces, one after another; each draws its own random numbers.
            has_own_process: Whether this process is the runner's alone: its global generators get seeds, and it may be
                ended where `env_step_timeout_s` cannot interrupt the env.
            module_specs: Specs of the modules by module id; `None` is what the config and the spaces of this env give.
            makes_modules: Whether to make the modules now. Otherwise `make_modules` comes later, when the driver has
                made the specs for all runners from the spaces that `describe_env` returned.
            metrics: Where it logs; `None` is a logger of its own, from which `get_metrics` takes the values.
            timers: Timers of the parts of its work; `None` is its own, too.

        Raises:
            ConfigError: The env id is unknown, or a setting contradicts the env or the thread.
            EnvError: The env raised, or gave values that its spaces do not allow.
        """
        config = self.config = config.for_runner()
        self.worker_index = worker_index
        self._metrics, self.timers = metrics or MetricsLogger(), timers or Timers()
        self._hands_over = metrics is None  # what it logs and the seconds of its timers
        self.weights_version = 0
        self.weight_receivers = {}
        self.num_env_steps_sampled_lifetime = 0
        self.num_env_steps_lost = 0
        self.num_env_steps_by_hand = 0
        self._unlogged: tuple[int, int] | None = None  # env steps and episodes that are not in the metrics yet
        self.last_statistics = NO_EPISODES
        reserve_episode_metrics(self._metrics, config.metrics_num_episodes_for_smoothing)
        self.idle_since = time.perf_counter()
        self.callbacks = make_dispatcher(config)
        self._hears_episodes = self.callbacks.subscribed(*EPISODE_EVENTS)
        self._hears_samples = self.callbacks.subscribed("on_postprocess_trajectory", "on_sample_end")
        # Only callbacks that receive episodes or rollouts can read infos, so infos are kept for them alone.
        self.shows_infos = self._hears_episodes or self._hears_samples
        env_seeds, noise_seed, id_seed, process_seed = runner_seeds(
            config.seed or 0, worker_index, num_restarts, config.in_evaluation
        )
        self.has_own_process = has_own_process
        self.stepping: Any = None  # until there are modules, a `Stepping`
        if has_own_process:  # in the process of the algorithm, `build` did it
            seed_everything(int(process_seed.generate_state(1)[0]) >> 1)
        self.rng = np.random.default_rng(noise_seed)
        self.episode_class: type[Any] = config.episode_class or config.default_episode_class
        self.host = EnvHost(
            config,
            worker_index,
            env_seeds,
            env_created=partial(_announce_env, self),
            sub_env_created=partial(_announce_sub_env, self),
            sub_env_restarted=partial(_note_restart, self),
            needs_sub_envs=self.callbacks.needs_sub_envs(),
            has_own_process=has_own_process,
        )
        self.make_env()
        self.num_episodes_over = np.zeros(self.num_envs, np.int64)
        self._timestep = 0  # env steps of all runners when the current sample began, where known
        self.num_samplers = 0 if config.in_evaluation else max(1, config.num_env_runners)
        self._last_num_rows, self._last_time_s = 0, time.perf_counter()
        self._id_prefix = id_prefix(id_seed)
        self._num_resets = 0  # resets of all envs; each gives the ids of episodes another prefix
        self._carry = EpisodeCarry.fresh(self.num_envs, 0.0)
        self._resets_next = np.zeros(self.num_envs, np.bool_)  # sub-envs that the next row only resets
        self.actors = Actors(config, self.host, worker_index, self.rng)
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
        self.actors.make(module_specs)
        self.stepping, _ = _make_stepping(self)
        actors = list(self.actors.values())
        if not self.config.is_multi_agent:
            self.module, self.inference = actors[0].module, actors[0].inference
            self.exploration = actors[0].exploration
        self._num_threads = num_threads_for(actors[0].module, self.config.num_threads)
        self._note_actors()
        self.weight_receivers["modules"] = self.actors.load_weights
        self.weight_receivers["exploration"] = self.actors.set_explorations
        self.weight_receivers["transforms"] = self.actors.set_transforms

    def _note_actors(self) -> None:
        """Note what depends on the actors: whether there is something to measure, and the names of metrics."""
        actors = self.actors.values()
        # Evaluation changes no statistics.
        self._measures = not self.config.in_evaluation and any(actor.transforms is not None for actor in actors)
        explore = any(overrides_method(actor.exploration, "get_metrics") for actor in actors)
        self._has_metrics = explore or self.stepping.HAS_METRICS
        names = self.actors.get_metrics(self._timestep) | self.stepping.get_metrics()
        self.metrics.log_reserved(dict.fromkeys(names, ()), window=1)  # now, so that user code cannot take the names

    def set_modules(self, settings: Mapping[str, Any], module_specs: Mapping[str, ModuleSpec]) -> None:
        """Use other modules and another mapping from the next sample on; modules that stay keep what they have.

        Agents keep their modules until the end of their episodes. If a module was removed that acts in an episode, all
        envs are reset, and the unfinished episodes are dropped.

        Args:
            settings: Settings of the group `multi_agent`.
            module_specs: Specs of all modules by module id.

        Raises:
            ConfigError: A module does not fit the spaces of its agents, or the mapping leads to no module.
        """
        vars(self.config).update(settings)
        self.actors.make(module_specs)
        self.stepping, are_lost = _make_stepping(self, self.stepping)
        if are_lost:
            self._forget_sample()
        self._note_actors()
        if self.stepping.events is not None:
            self.stepping.events.show_modules(self.rl_module)

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
        if self.stepping is not None:
            self.stepping.events = None  # made at the first reset
        self._rollout: Rollout | None = None  # the one that is being written

    @property
    def timestep(self) -> int:
        """Env steps of all runners when the current sample began, where known; schedules of explorations see it."""
        return self._timestep

    @property
    def rl_module(self) -> Any:
        """The module, as callbacks receive it; with several agents a dict of modules by id."""
        if not self.config.is_multi_agent:
            return self.module
        return {module_id: actor.module for module_id, actor in self.actors.items()}

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
        rollout = self.collect(
            SampleRequest(
                num_timesteps=num_timesteps,
                num_episodes=num_episodes,
                explore=explore,
                random_actions=random_actions,
                force_reset=force_reset,
                timestep=timestep,
            )
        )
        self.num_env_steps_by_hand += rollout.num_env_steps
        return rollout

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
        wanted, num_envs, stepping = request.num_wanted, self.host.num_envs, self.stepping
        self._timestep = self._timestep if request.timestep is None else request.timestep
        if self.host.asks_iteration:
            self.host.note_iteration(request.training_iteration)
        self._needs_reset |= request.force_reset
        whole_episodes = request.num_episodes is not None or self.config.batch_mode == "complete_episodes"
        mode = stepping.make_mode(request, whole_episodes=whole_episodes, name=self.host.name)
        mode.explore = self.config.explore if request.explore is None else request.explore
        mode.random_actions, mode.takes_tensors = request.random_actions, request.takes_tensors
        mode.keeps_infos = self.shows_infos or request.with_infos
        mode.timestep, mode.num_samplers = self._timestep, self.num_samplers
        # Autoreset rows come on top; the last call's total is a good guess of how many.
        num_rows = -(-wanted // num_envs)
        rollout = stepping.allocate(max(num_rows, min(self._last_num_rows, 2 * num_rows)))
        rollout.weights_version, rollout.worker_index = self.weights_version, self.worker_index
        rollout.carry, rollout.begins_with_reset = self._carry, self._resets_next
        rollout.episode_class = self.episode_class
        self._rollout = rollout
        # Env steps and episodes of this rollout in the metrics: counted before callbacks see it, who may look at the
        # counts, and taken back if one of them raises.
        num_counted = 0, 0
        is_cut = False  # by the time limit of the request
        resets_all = self._needs_reset or whole_episodes
        try:
            if wanted:
                self._needs_reset = True  # until `_finish`
                with self.host.sampling(request.time_limit_s), torch_threads(self._num_threads):
                    is_cut = self._fill(rollout, request, mode, resets_all)
            num_episodes, handed_out = self._finish(
                rollout, mode, whole_episodes or (is_cut and stepping.RESETS_AFTER_CUT)
            )
            if whole_episodes:
                self.num_episodes_over += 1
                self.num_env_steps_lost += int(np.count_nonzero(rollout.steps_from(0))) - rollout.num_env_steps
            num_counted = rollout.num_env_steps, num_episodes
            self._count(*num_counted)
            if self._hears_samples:
                with self.timers.time("callbacks"):
                    show_sample(handed_out, self.callbacks, self.actors, env_runner=self, metrics=self.metrics)
            if stepping.events is not None and stepping.events.keeps_small:
                stepping.events.keep_small_columns(handed_out)
            if self._measures:
                with self.timers.time("storage"):
                    self.actors.measure(handed_out)
        except BaseException:
            self._needs_reset = True  # the next rollout would not continue one that anybody has
            if num_counted[0]:
                self._count(-num_counted[0], -num_counted[1])
                self.num_env_steps_lost += num_counted[0]
            else:
                self.num_env_steps_lost += int(np.count_nonzero(rollout.steps_from(0))) + self.host.end_failed_call()
            raise
        finally:
            self._rollout = None
        return handed_out

    def _fill(self, rollout: Rollout, request: SampleRequest, mode: SampleMode, resets_all: bool) -> bool:
        """Fill a rollout as a request asks, and return whether the time limit of the request cut it short."""
        deadline_s, stepping = time.perf_counter() + (request.time_limit_s or 0.0), self.stepping
        for actor in self.actors.values():
            actor.inference.begin_sample(mode.explore, self.rng)
        try:
            if resets_all:
                self._reset(rollout, request.resets, keeps_infos=mode.keeps_infos)
            else:  # continue where the last rollout stopped: its last row is the first row of this one
                # The pause belongs to no episode, but to the learner, for instance.
                paused_s = time.perf_counter() - self._last_time_s
                start_times_s = self._carry.start_times_s + paused_s
                self._carry = rollout.carry = replace(self._carry, start_times_s=start_times_s)
                rollout.continues = True
                stepping.resume(rollout)
                if stepping.events is not None:
                    stepping.events.continue_all(rollout, paused_s)
            while num_rows := mode.num_rows_wanted(rollout):
                if request.time_limit_s is not None:
                    num_rows = 1
                    if time.perf_counter() > deadline_s:
                        return True
                if rollout.num_rows + num_rows > len(rollout.rewards):
                    rollout.resize(max(rollout.num_rows + num_rows, len(rollout.rewards) * 3 // 2))
                stepping.step_rows(rollout, num_rows, mode)
        except SampleOverdue:  # inside an env; the row that it did not finish is dropped
            rollout.broken = [(row, i) for row, i in rollout.broken if row < rollout.num_rows]
            if not self.host.is_broken:  # else it is closed when it is replaced, which may take long
                self.num_env_steps_lost += self.host.end_failed_call()
            return True
        return False

    def _reset(self, rollout: Rollout, resets: Sequence[EpisodeReset] | None, *, keeps_infos: bool) -> None:
        """Reset all sub-envs, and begin all episodes with their first observations."""
        stepping = self.stepping
        # After an exception the last carry may not count all episodes, so the ids of episodes have another prefix.
        prefix = f"{self._id_prefix}{self._num_resets:06x}"
        self._num_resets += 1
        self._carry = rollout.carry = EpisodeCarry.fresh(self.host.num_envs, time.perf_counter(), prefix)
        rollout.begins_with_reset = None
        if stepping.events is None and self._hears_episodes:
            stepping.events = stepping.make_events(self.callbacks, self.metrics, self.rl_module)
        stepping.begin(rollout)
        if stepping.events is not None:
            with self.timers.time("callbacks"):
                stepping.events.create_all(rollout)
        with self.timers.time("env_step"):
            obs, infos = self.host.reset(resets)
        if keeps_infos:
            stepping.keep_infos(rollout, 0, infos)
        self._carry.start_times_s[:] = time.perf_counter()
        stepping.receive_reset(rollout, obs)
        if stepping.events is not None:
            with self.timers.time("callbacks"):
                stepping.events.start_all(rollout)

    def _finish(self, rollout: Rollout, mode: SampleMode, resets_next: bool) -> tuple[int, Rollout]:
        """Trim the columns, compute log-probabilities and statistics of episodes from them, and log the metrics.

        Returns:
            The number of episodes that ended, and the rollout to hand out.
        """
        tic = time.perf_counter()
        if len(rollout.rewards) > rollout.num_rows:
            rollout.resize(rollout.num_rows)
        rollout.num_env_steps = int(np.count_nonzero(rollout.valid))
        mode.timestep += self.num_samplers * rollout.num_env_steps
        handed_out = self.stepping.finish(rollout, mode)
        self._timestep = mode.timestep
        if rollout.num_rows or not self.stepping.RESETS_AFTER_CUT:
            self._needs_reset = resets_next
        if rollout.num_rows:
            self.host.num_rows += rollout.num_rows
            self._last_num_rows = rollout.num_rows
            self._last_time_s = float(rollout.row_times_s[-1])
            self._resets_next = rollout.resets_in(rollout.num_rows)
        counted = rollout if rollout.host is None else rollout.host
        self.last_statistics, self._carry = episode_statistics(counted, self._carry)
        num_episodes = len(self.last_statistics.returns)
        if num_episodes:
            np.add.at(self.num_episodes_over, self.last_statistics.env_indices, 1)
            window = self.config.metrics_num_episodes_for_smoothing
            log_episodes(self._metrics, window, self.last_statistics)
        self.timers.seconds["storage"] += time.perf_counter() - tic
        return num_episodes, handed_out

    @property
    def metrics(self) -> MetricsLogger:
        """Logger that callbacks receive, whose values are in `result["env_runners"]`."""
        self.log_samples()
        return self._metrics

    def log_samples(self) -> None:
        """Log what the samples since the last call counted, and the numbers of the explorations."""
        if self._unlogged is not None:
            (num_env_steps, num_episodes), self._unlogged = self._unlogged, None
            log_counts(self._metrics, [num_env_steps], [num_episodes])
            if self._has_metrics:
                numbers = self.actors.get_metrics(self._timestep)
                if not self.config.explore:  # an epsilon would say what no action had, in evaluation too
                    numbers = dict.fromkeys(numbers, np.nan)
                if self.stepping.HAS_METRICS:
                    numbers |= self.stepping.get_metrics()
                self._metrics.log_reserved({name: [value] for name, value in numbers.items()}, window=1)

    def log_later(self, num_env_steps: int) -> None:
        """Take back env steps that were logged, so that they are logged with the next samples."""
        self.log_samples()
        log_counts(self._metrics, [-num_env_steps], [0])
        self._unlogged = num_env_steps, 0

    def _count(self, num_env_steps: int, num_episodes: int) -> None:
        """Count the steps and the episodes of a rollout, or with negative numbers, of a rollout that was lost.

        They are logged when somebody looks, because samples may be short; callbacks look all the time.
        """
        self.num_env_steps_sampled_lifetime += num_env_steps
        before = self._unlogged or (0, 0)
        self._unlogged = before[0] + num_env_steps, before[1] + num_episodes
        if self.shows_infos:
            self.log_samples()

    # Checks, state and metrics.

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

    def get_metrics(self) -> tuple[Parts, dict[str, float], int]:
        """Return metrics and seconds of the timers since the last call, and the number of callback errors so far.

        The embedded runner has no metrics and no seconds to return: it logs into the logger of the algorithm.
        """
        self.log_samples()
        parts, seconds = (self._metrics.take(), self.timers.take()) if self._hands_over else ({}, {})
        return parts, seconds, self.callbacks.num_errors

    def describe_env(self) -> tuple[Any, Any, int, bool]:
        """Return the space of observations as modules get them, the action space of one sub-env, and N.

        With several agents they are the spaces of the vector env's seats; see `SeatsSpace`. The last part says whether
        the sub-envs are stepped one by one.
        """
        observation_space, action_space, num_envs = self.host.described
        if self.config.is_multi_agent:
            observation_space = self.env.single_observation_space
        return observation_space, action_space, num_envs, self.host.steps_one_by_one

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
        method, `num_episodes`: what `env_reset_fn` has counted in each sub-env, or `None` without one, and
        `num_episodes_over`.
        """
        return {
            "weights_version": self.weights_version,
            "num_env_steps_sampled_lifetime": self.num_env_steps_sampled_lifetime,
            "environment": self.host.changed_settings,
            "tasks": self.host.get_tasks(),
            "num_episodes": self.host.get_num_episodes(),
            "num_episodes_over": self.num_episodes_over.tolist(),
            "exploration": self.actors.collect(lambda actor: actor.exploration.get_state()),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`; weights and their version come through `set_weight_parts`."""
        self.num_env_steps_sampled_lifetime = state.get(
            "num_env_steps_sampled_lifetime", self.num_env_steps_sampled_lifetime
        )
        for actor, part in self.actors.each(state.get("exploration") or {}):
            if part:
                actor.exploration.set_state(part)
        if self.host.change_settings(state.get("environment", {})):
            self.make_env()
        if "tasks" in state:
            self.host.set_tasks(state["tasks"])
        self.host.set_num_episodes(state.get("num_episodes"))
        self.set_num_episodes_over(state.get("num_episodes_over"))

    def set_num_episodes_over(self, counts: Sequence[int] | None) -> None:
        """Continue the counts of a state, unless it has none, or has other sub-envs."""
        if counts is not None and len(counts) == self.num_envs:
            self.num_episodes_over = np.array(counts, np.int64)

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
        return self.callbacks.num_errors

    def ping(self) -> bool:
        """Return True: the runner can answer."""
        return True

    def stop(self) -> None:
        """Close the env."""
        self.host.close()


def reserve_episode_metrics(metrics: MetricsLogger, window: int) -> None:
    """Put the numbers of episodes into the result before there are any, so that user code cannot take the names."""
    log_counts(metrics, [], [])
    log_episodes(metrics, window, NO_EPISODES)


def log_counts(metrics: MetricsLogger, steps: Sequence[int], episodes: Sequence[int]) -> None:
    """Log numbers of env steps and of episodes."""
    metrics.log_reserved({"num_episodes": episodes, "num_env_steps_sampled": steps}, "sum")
    lifetime = {"num_episodes_lifetime": episodes, "num_env_steps_sampled_lifetime": steps}
    metrics.log_reserved(lifetime, "lifetime_sum")


def log_episodes(metrics: MetricsLogger, window: int, statistics: EpisodeStatistics) -> None:
    """Log the returns, lengths and durations of episodes that ended, over a window of so many episodes."""
    for name, values in (("return", statistics.returns.tolist()), ("len", statistics.lengths.tolist())):
        for reduce in ("mean", "min", "max"):
            metrics.log_reserved({f"episode_{name}_{reduce}": values}, reduce, window)
    metrics.log_reserved({"episode_duration_sec_mean": statistics.durations_s.tolist()}, window=window)


def _announce_env(runner: EnvRunner, env: VectorEnv[Any, Any, Any], context: EnvContext) -> None:
    """Fire the event of a new vector env, after a check that it has as many agents as the config."""
    config, name = runner.config, runner.host.name
    if not config.in_evaluation and runner.worker_index <= 1:
        warn_of_own_statistics(env, name)
    has_seats = isinstance(env.single_observation_space, SeatsSpace)
    if has_seats and not config.is_multi_agent:
        raise ConfigError(
            f"env {name!r} has several agents: name the modules that choose their actions, as in "
            ".multi_agent(policies={'main'}) or --set 'multi_agent.policies=[main]', or use an env of one agent."
        )
    if config.is_multi_agent and not has_seats:
        raise ConfigError(
            f"multi_agent: policies names the modules {config.module_ids}, and env {name!r} has one agent: leave "
            "policies out, or use a corral.MultiAgentEnv."
        )
    runner.callbacks.fire(
        "on_environment_created", env_runner=runner, metrics_logger=runner.metrics, env=env, env_context=context
    )


def _announce_sub_env(runner: EnvRunner, sub_env: Any, context: EnvContext, env_index: int) -> None:
    """Fire the event of a new sub-env."""
    runner.callbacks.fire(
        "on_sub_environment_created",
        env_runner=runner,
        metrics_logger=runner.metrics,
        sub_environment=sub_env,
        env_context=context,
        env_index=env_index,
    )


def _note_restart(runner: EnvRunner, failure: SubEnvError) -> None:
    """Count a sub-env that was restarted, and cut off the episode in whose step the old one failed."""
    rollout = runner._rollout
    row = 0 if rollout is None else rollout.num_rows
    runner.host.count_restart(failure, row)
    if rollout is not None and failure.method == "step":
        rollout.broken.append((row, failure.env_index))


def _make_stepping(runner: EnvRunner, before: Any = None) -> tuple[Any, bool]:
    """Return the stepping of a runner, and whether all envs must be reset for it.

    Args:
        runner: The runner, whose actors are made.
        before: The stepping so far, which stays unless the env is stepped on its device before or after.
    """
    config, env, setting = runner.config, runner.env, None
    if hasattr(env, "step_tensors"):
        from corral.runners.tensor_stepping import TensorStepping, find_setting_of_arrays

        if setting := find_setting_of_arrays(config, runner.actors, runner.shows_infos):
            log.info("env %r: its steps are copied to the host because of %s.", runner.host.name, setting)
    if before is not None and not before.is_on_device and setting != "":
        before.setting_of_arrays = setting or ""
        return before, before.set_modules()
    kind: type[Stepping] = SingleAgentStepping
    if getattr(env, "IS_EXTERNAL", False):
        from corral.runners.served_multi_agent import ServedMultiAgentStepping
        from corral.runners.served_stepping import ServedStepping

        kind = ServedMultiAgentStepping if config.is_multi_agent else ServedStepping
    elif setting == "":
        kind = TensorStepping
    elif config.is_multi_agent:
        from corral.runners.multi_agent_stepping import MultiAgentStepping

        kind = MultiAgentStepping
    tools: dict[str, Any] = {"timers": runner.timers, "metrics": runner._metrics, "worker": runner}
    stepping = kind(config, runner.host, runner.actors, **tools)
    stepping.setting_of_arrays = setting or ""
    return stepping, True
