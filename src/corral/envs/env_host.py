"""The host of a runner's envs: it makes the envs, steps them within a time limit, and replaces failed ones."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from corral.core.plain import is_same
from corral.core.seeding import set_global_rngs
from corral.core.spaces import module_observation_space, space_kinds, space_tree
from corral.core.tree import Tree, copy_nested, map_tree
from corral.envs.async_vector import AsyncLimits, AsyncVectorEnv
from corral.envs.checks import mismatch
from corral.envs.config import EnvironmentSettings
from corral.envs.env_state import (
    plays_again,
    set_surroundings,
)
from corral.envs.episode_resets import (
    EpisodeReset,
    EpisodeResets,
    call_inside,
    inside,
)
from corral.envs.masked_resets import MaskedResets, infos_by_env
from corral.envs.step_checks import check_infos, check_step_columns, shorten
from corral.envs.step_timeout import StepTimer, can_interrupt, require_signals, sampling
from corral.envs.sub_envs import (
    Restarts,
    close_quietly,
    env_error,
    foreach_sub_env,
    known_tasks,
    original,
    takes_tasks,
)
from corral.envs.sync_vector import SyncVectorEnv
from corral.envs.tasks import choose_task, set_task
from corral.envs.vector import EnvContext, env_name, make_vector_env
from corral.envs.videos import Video
from corral.errors import ConfigError, EnvError, SampleError, SubEnvError

if TYPE_CHECKING:
    from corral.envs.config import HostConfig

log = logging.getLogger("corral")

_KNOWN_PACKAGES = ("gymnasium.envs.", "ale_py.")
"""Packages whose vector envs give rewards and flags of the right shapes and dtypes."""

_SETTINGS = tuple(field.name for field in dataclasses.fields(EnvironmentSettings))


class EnvHost:
    """Host of one runner's vector env: makes the vector env and replaces failed sub-envs. It knows no module or agent.

    Attributes:
        env: The vector env; the attribute is missing if `make` or `recover` failed.
        num_envs: Number of sub-envs N.
        name: Name of the env in messages.
        observation_space: Space of the observations of one sub-env, as modules get them: floats are float32.
        space: The same space as a tree of spaces without `Dict` and `Tuple`.
        is_same_step: Whether the vector env resets a sub-env in the step that ends its episode.
        is_async: Whether each sub-env is in a process of its own.
        steps_one_by_one: Whether the sub-envs are stepped one after the other, and not by a vector env of their own or
            processes.
        has_sub_envs: Whether the states of the envs are states of sub-envs, and not one state of a vector env of its
            own.
        plays_again: Whether a restored runner plays the episodes of the sub-envs again, so that their actions are kept.
        asks_iteration: Whether `env_reset_fn` may ask the sub-envs for the number of finished iterations.
        num_rows: Number of rows stepped before the current sample, over the lifetime of the host.
        restarts: Restarts of sub-envs.
    """

    env: VectorEnv[Any, Any, Any]
    num_envs: int

    def __init__(
        self,
        config: HostConfig,
        worker_index: int,
        seeds: np.random.SeedSequence,
        *,
        env_created: Callable[[VectorEnv[Any, Any, Any], EnvContext], None],
        sub_env_created: Callable[[Any, EnvContext, int], None],
        sub_env_restarted: Callable[[SubEnvError], None],
        needs_sub_envs: bool,
        has_own_process: bool,
    ) -> None:
        """Keep the arguments; `make` makes the env.

        Args:
            config: Settings of the env, of the vector env and of fault tolerance.
            worker_index: Index of the runner: 0 for the embedded runner, 1 and up for others.
            seeds: Seeds of all vector envs and sub-envs that the host makes.
            env_created: Function that is called with each new vector env and its context, before the first reset.
            sub_env_created: Function that is called with each new sub-env in this process, its context and its index,
                before the first reset.
            sub_env_restarted: Function that is called with the failure after a failed sub-env was replaced; it must
                call `count_restart`, because the host does not know the row.
            needs_sub_envs: Whether callbacks need the sub-envs, which a native vector env does not have.
            has_own_process: Whether this process may be ended if `env_step_timeout_s` cannot interrupt the env.

        Raises:
            ConfigError: `env_step_timeout_s` is set, and this is not the main thread.
        """
        self.num_rows = 0
        self._config = config
        self._worker_index = worker_index
        self._seeds = seeds
        self._env_created = env_created
        self._sub_env_created = sub_env_created
        self._needs_sub_envs = needs_sub_envs
        self._own_process = has_own_process
        # Asynchronous sub-envs have timers of their own, in their processes.
        timeout_s = None if config.vectorization == "async" else config.env_step_timeout_s
        if timeout_s is not None:
            require_signals()
        self._timer = StepTimer(math.inf if timeout_s is None else timeout_s)
        self._is_timed = False  # whether calls go through the timer
        self._built_with = self._settings()
        self._first_described: tuple[Any, Any, int] | None = None
        self._tasks: list[Any] | None = None  # last known tasks of the sub-envs
        self._num_episodes: list[int] | None = None  # last known; see `get_num_episodes`
        self._restarting: list[dict[str, Any]] | None = None  # states of envs that restart at the next reset
        self.restarts = Restarts(self._timer, lambda: next_seed(self._seeds), self._announce_sub_env, sub_env_restarted)

    # Making.

    def make(self) -> None:
        """Make the vector env, in place of the existing one if there is one, and call the `created` functions.

        Raises:
            ConfigError: The env id is unknown, or a setting contradicts the env.
            EnvError: The env raised an exception, or returned a value outside its spaces.
        """
        if hasattr(self, "env"):
            self.env.close()
            del self.env  # it must not be closed again if making the next one raises
        config = self._config
        self.name = env_name(config.env)
        # Seed of the first reset only; the next vector env gets another seed.
        self._reset_seed: int | None = next_seed(self._seeds)
        self._restarting = None
        self._reset_fn, self._chooses_resets = config.env_reset_fn, config.chooses_resets
        is_remote = config.vectorization == "async"
        self._context = EnvContext(
            config.env_config,
            self._worker_index,
            config.num_env_runners,
            remote=is_remote,
            device=config.device if not self._worker_index else "auto" if config.num_gpus_per_env_runner else "cpu",
        )
        self.env = make_vector_env(
            config.env,
            self._context,
            num_envs=config.num_envs_per_env_runner,
            default_num_envs=config.default_num_envs,
            vectorization=config.vectorization,
            autoreset_mode=config.autoreset_mode,
            wrappers=config.all_wrappers,
            outermost=partial(EpisodeResets, reset_fn=self._reset_fn) if self._chooses_resets else None,
            check=not config.disable_env_checking,
            seed=self._reset_seed,
            needs_sub_envs=self._needs_sub_envs or config.env_task_fn is not None,
            limits=AsyncLimits(config.env_step_timeout_s, config.start_timeout_s),
            restarts=self.restarts if config.restart_failed_sub_environments else None,
        )
        self.num_envs = self.env.num_envs
        self.is_same_step = self.env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        self.asks_iteration, self._iteration = self._reset_fn is not None, 0  # iterations that the sub-envs know of
        self.is_async = isinstance(self.env, AsyncVectorEnv)
        self.steps_one_by_one = isinstance(self.env, SyncVectorEnv)
        self.has_sub_envs = self.is_async or self.steps_one_by_one
        self.plays_again = self.is_async or (self.has_sub_envs and any(map(plays_again, self._sub_envs())))
        self._infos_are_by_env = isinstance(self.env, (SyncVectorEnv, AsyncVectorEnv, MaskedResets))
        self._gives_checked_steps = self._infos_are_by_env or type(self.env).__module__.startswith(_KNOWN_PACKAGES)
        self.observation_space = module_observation_space(self.env.single_observation_space)
        self.space: Tree = space_tree(self.observation_space)
        try:
            self._first_described = self._first_described or self.described
            check_alike(self.name, self._first_described, self.described)
            self._takes_tasks = takes_tasks(self.env)
            if config.env_task_fn is not None and not self._takes_tasks:
                raise ConfigError(
                    f"environment: env_task_fn chooses tasks, and env {self.name!r} takes none: define get_task() and "
                    "set_task(task) in the env, as corral.TaskSettableEnv has them, or in a wrapper of each sub-env."
                )
            for i, sub_env in enumerate(self._sub_envs()):
                self._announce_sub_env(i, sub_env)
            self._env_created(self.env, self._context)
        except BaseException:
            self.env.close()
            del self.env
            raise

    @property
    def described(self) -> tuple[Any, Any, int]:
        """Space of observations as modules get them, action space of one sub-env, and N."""
        return self.observation_space, self.env.single_action_space, self.num_envs

    def recover(self) -> None:
        """Replace a vector env that may have failed, and give the new one the same tasks.

        Raises:
            EnvError: The env cannot be made.
        """
        if hasattr(self, "env"):
            if not self.env.closed:
                self.get_tasks()
                self.get_num_episodes()
                close_quietly(self.env)
            del self.env  # it is closed, and must not be closed again if `make` raises
        self.make()
        self.set_tasks(self._tasks)
        self.set_num_episodes(self._num_episodes)

    def close(self) -> None:
        """Close the vector env, if there is one."""
        if hasattr(self, "env"):
            self.env.close()

    def _sub_envs(self) -> Sequence[Any]:
        """Return the sub-envs that are objects in this process: all of them or none."""
        return getattr(self.env.unwrapped, "envs", ())

    def sub_env(self, env_index: int) -> Any:
        """Return a sub-env with its wrappers, or `None` if it is not an object in this process."""
        sub_envs = self._sub_envs()
        return inside(sub_envs[env_index]) if sub_envs else None

    def _announce_sub_env(self, env_index: int, sub_env: Any) -> None:
        self._sub_env_created(inside(sub_env), self._context.at(env_index), env_index)

    # Stepping.

    def sampling(self, time_limit_s: float | None = None) -> AbstractContextManager[None]:
        """Limit `reset` and `step` inside the `with` block to `env_step_timeout_s`, if this setting is set.

        Args:
            time_limit_s: Seconds after which they raise `SampleOverdue`, too. In a thread that cannot be interrupted
                this has no effect.
        """
        limits_sample = time_limit_s is not None and can_interrupt()
        return nullcontext() if self._timer.timeout_s == math.inf and not limits_sample else self._timed(time_limit_s)

    @contextmanager
    def _timed(self, time_limit_s: float | None) -> Iterator[None]:
        # Inside the block, `step` and `timed` return functions that the timer calls; whoever asked before has others.
        if time_limit_s is not None:
            self._timer.sample_deadline_s = time.monotonic() + time_limit_s
        self._is_timed = True
        try:
            with sampling(self._timer, has_own_process=self._own_process):
                yield
        finally:
            self._is_timed, self._timer.sample_deadline_s = False, math.inf

    @property
    def step(self) -> Callable[..., Any]:
        """Function `step` of the vector env, with its time limit."""
        step = self.env.step if self._gives_checked_steps else partial(checked_step, self.env)
        return self.timed(step) if self._is_timed else step

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the vector env, with its time limit if calls go through the timer now."""
        return partial(self._timer.call, method) if self._is_timed else method

    def reset(self, resets: Sequence[EpisodeReset] | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Reset all sub-envs and return observations and infos; the first reset of a vector env uses its seed.

        Args:
            resets: Reset arguments of the next episodes; sub-env i takes number i, i + N, and so on.

        Raises:
            EnvError: The env raised an exception, or took too long.
            SampleError: There are reset arguments, and the sub-envs were made without the wrapper that takes them.
        """
        if resets is not None and not self._chooses_resets:
            raise SampleError(
                f"env {self.name!r}: a sample request gives the arguments of resets, which the config does not "
                "allow: set env_reset_fn, or for evaluation evaluation_seeds or evaluation_tasks."
            )
        try:
            if self._restarting is not None:
                self._begin_again(self._restarting)
            if self._chooses_resets:
                queues = [list(resets or ())[i :: self.num_envs] for i in range(self.num_envs)]
                self._foreach_lane(EpisodeResets.fill_queue, queues)
            obs, infos = self._reset(self._reset_seed)
        except Exception as error:
            raise self.error("reset", 0, error) from original(error)
        self._reset_seed = None
        return obs, infos

    def _reset(self, seed: int | None) -> tuple[Any, Mapping[str, Any]]:
        obs, infos = self.timed(self.env.reset)(seed=seed)
        return obs, infos if self._gives_checked_steps else check_infos(infos, "reset")

    def note_iteration(self, training_iteration: int | None) -> None:
        """Tell the sub-envs, if `asks_iteration`, how many iterations the algorithm has finished."""
        if training_iteration not in (None, self._iteration):
            self._foreach_lane(EpisodeResets.note_iteration, [training_iteration] * self.num_envs)
            self._iteration = training_iteration

    def get_num_episodes(self) -> list[int] | None:
        """Return how many episodes began in each sub-env, where `env_reset_fn` is told so; otherwise `None`."""
        if self._reset_fn is not None and not self.is_broken:
            self._num_episodes = self._foreach_lane(EpisodeResets.count_episodes, [None] * self.num_envs)
        return self._num_episodes

    def set_num_episodes(self, numbers: Sequence[int] | None) -> None:
        """Let `env_reset_fn` count from these numbers on; see `get_num_episodes`."""
        if numbers is not None and self._reset_fn is not None and len(numbers) == self.num_envs:
            self._num_episodes = self._foreach_lane(EpisodeResets.count_episodes, numbers)

    def take_videos(self) -> list[dict[int, Video]]:
        """Return the videos of each sub-env by the place of the episode in the last `resets`; it then has none."""
        return foreach_sub_env(self.env, self.name, EpisodeResets.take_videos)

    def _foreach_lane(self, fn: Callable[..., Any], each: Sequence[Any]) -> list[Any]:
        """Return `fn(wrapper, one)` for the wrapper of each sub-env that chooses its reset arguments."""
        if isinstance(self.env, MaskedResets):
            return [fn(lane, one) for lane, one in zip(self.env.lanes, each, strict=True)]
        return foreach_sub_env(self.env, self.name, fn, each)

    def _begin_again(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Prepare envs that restart for their reset: a new seed for what the env seeds itself, then its generator."""
        numbers = self.get_num_episodes()
        self._reset(next_seed(self._seeds))
        self.set_num_episodes(numbers)
        padded = [*states, *[None] * self.num_envs][: self.num_envs if self.has_sub_envs else 1]
        self._each(partial(_set_surroundings, is_async=self.is_async), padded)
        self._restarting = None

    def infos_by_env(self, infos: Mapping[Any, Any]) -> Mapping[int, Mapping[str, Any]]:
        """Return the infos of the vector env by index of the sub-env."""
        return infos if self._infos_are_by_env else infos_by_env(infos, self.num_envs)

    def final_obs(self, infos: Mapping[Any, Any], env_index: int) -> Tree:
        """Return the final observation of a sub-env that a same-step autoreset has reset.

        Raises:
            EnvError: The vector env did not give it.
        """
        if self._infos_are_by_env:
            return infos[env_index]["final_obs"]
        if "final_obs" not in infos:
            raise EnvError(
                f"env {self.name!r}: sub-env {env_index} ended with same-step autoreset, but infos has no 'final_obs' "
                f"(it has {sorted(infos)}): without it the last observation is lost."
            )
        final = infos["final_obs"]
        try:
            found = final[env_index] if isinstance(final, np.ndarray) else map_tree(lambda leaf: leaf[env_index], final)
        except (TypeError, IndexError):
            raise EnvError(
                f"env {self.name!r}: infos['final_obs'] must be of all sub-envs, got {shorten(final)}."
            ) from None
        if problem := mismatch(self.space, found, "final_obs", values=False):
            raise EnvError(f"env {self.name!r}, sub-env {env_index}: {problem}.")
        return found

    # Failures.

    @property
    def is_broken(self) -> bool:
        """Whether `recover` must replace the vector env before it can be reset again."""
        return not hasattr(self, "env") or getattr(self.env.unwrapped, "is_broken", False)

    def end_failed_call(self) -> int:
        """Close the vector env if it is broken, and return the steps that sub-envs took in a `step` that raised.

        A call of `step` that raised in one sub-env is over in the others only when a broken vector env is closed.
        """
        if not hasattr(self, "env"):
            return 0
        if self.is_broken:
            close_quietly(self.env)
        vector_env: Any = self.env.unwrapped
        num_steps = int(getattr(vector_env, "num_steps_of_failed_call", 0))
        if num_steps:
            vector_env.num_steps_of_failed_call = 0
        return num_steps

    def error(self, method: str, row: int, error: Exception) -> Exception:
        """Return the error that names the env, the step and the exception; `row` is the row in the current sample."""
        return env_error(self.name, self.num_rows + row, method, error)

    def bad_value(self, row: int, env_index: int, problem: str) -> EnvError:
        """Return the error for a bad value of a sub-env; `row` is the row in the current sample."""
        return EnvError(f"env {self.name!r}, sub-env {env_index}, step {self.num_rows + row}: {problem}.")

    def count_restart(self, failure: SubEnvError, row: int) -> None:
        """Count and log a sub-env that was restarted in a row of the current sample.

        Raises:
            SubEnvError: The sub-env fails again and again, without a single step in between.
        """
        took_step = self.is_same_step and failure.method == "reset"  # the step that ended the episode
        self.restarts.count(failure, self.name, self.num_rows + row, took_step=took_step)

    # Sub-envs and their tasks.

    def foreach(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Return `fn(sub_env)` for each sub-env, called in the process of the sub-env; see `foreach_sub_env`."""
        results = foreach_sub_env(self.env, self.name, partial(call_inside, fn))
        self.get_tasks()
        return results

    def choose_tasks(self, train_results: Mapping[str, Any]) -> None:
        """Call `env_task_fn` for each sub-env, in its process, and set the tasks that it returns.

        Raises:
            CallbackError: `env_task_fn` raised an exception.
        """
        choose = partial(call_inside, partial(choose_task, self._config.env_task_fn, train_results))
        foreach_sub_env(self.env, self.name, choose, [self._context.at(i) for i in range(self.num_envs)])
        self.get_tasks()

    def get_tasks(self) -> list[Any] | None:
        """Return the result of `get_task` of each sub-env, or `None` if the sub-envs have no tasks."""
        if self._takes_tasks and not self.is_broken:
            self._tasks = self.restarts.known_tasks = known_tasks(self.env, self._tasks)
        return self._tasks

    def set_tasks(self, tasks: Sequence[Any] | None, *, needed: bool = False) -> None:
        """Give each sub-env its task; if there are fewer tasks than sub-envs, the first ones follow after the last.

        Raises:
            EnvError: The tasks are needed, and the sub-envs take none.
        """
        if needed and not self._takes_tasks:
            raise EnvError(
                f"env {self.name!r} takes no tasks: define get_task() and set_task(task) in the env, as "
                "corral.TaskSettableEnv has them, or in a wrapper of each sub-env; a vector env without sub-envs that "
                "can be reached needs vectorization='sync'."
            )
        self._tasks = [copy_nested(tasks[i % len(tasks)]) for i in range(self.num_envs)] if tasks else None
        self.restarts.known_tasks = self._tasks
        if self._takes_tasks and self._tasks is not None:
            foreach_sub_env(self.env, self.name, set_task, self._tasks)

    # Settings of the env that changed after the runner was built.

    def _settings(self) -> dict[str, Any]:
        settings = {name: getattr(self._config, name) for name in _SETTINGS}
        return {**settings, "env_config": dict(settings["env_config"])}

    @property
    def changed_settings(self) -> dict[str, Any]:
        """Settings of `environment` that were changed after the runner was built."""
        now, before = self._settings(), self._built_with
        return {name: now[name] for name in now if not is_same(now[name], before[name])}

    def change_settings(self, changed: Mapping[str, Any]) -> bool:
        """Change settings to another host's `changed_settings`; return whether they differ: `make` must follow then."""
        wanted = {**self._built_with, **changed}
        others = {name: value for name, value in wanted.items() if not is_same(value, self._settings()[name])}
        for name, value in others.items():
            setattr(self._config, name, value)
        return bool(others)

    # State.

    def _each(self, fn: Callable[..., Any], each: Sequence[Any]) -> list[Any]:
        """Return `fn(env, one)` for each env and one of `each`, called in the process of the env."""
        return foreach_sub_env(self.env, self.name, fn, each) if self.has_sub_envs else [fn(self.env, each[0])]


def next_seed(seeds: np.random.SeedSequence) -> int:
    """Return a seed of the next env."""
    return int(seeds.spawn(1)[0].generate_state(1)[0]) >> 1


def check_alike(name: str, first: tuple[Any, Any, int], found: tuple[Any, Any, int]) -> None:
    """Refuse another env than the first one if modules that were made for that one do not fit.

    Raises:
        EnvError: The spaces or the numbers of sub-envs differ; only the bounds of Box observations may.
    """
    if (space_kinds(found[0]), *found[1:]) != (space_kinds(first[0]), *first[1:]):
        raise EnvError(
            f"env {name!r}: the new env has observations of {found[0]}, actions of {found[1]} and {found[2]} sub-envs, "
            f"and the module was made for {first[0]}, {first[1]} and {first[2]}: give envs of all sizes the same "
            "spaces, for instance the spaces of the largest size, with unused entries empty."
        )


def checked_step(env: VectorEnv[Any, Any, Any], actions: Any) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]:
    """Return what a step of a vector env gives, with its rewards and flags checked."""
    obs, rewards, terminated, truncated, infos = env.step(actions)
    columns = check_step_columns(env.num_envs, rewards, terminated, truncated)
    return obs, *columns, check_infos(infos, "step")


# Functions that are called in the process of a sub-env, which may be this one.


def _set_surroundings(env: Any, state: Mapping[str, Any] | None, *, is_async: bool) -> None:
    if state is not None:
        set_surroundings(env, state)
        if is_async:
            set_rngs(state)


def set_rngs(state: Mapping[str, Any]) -> None:
    """Let the global generators of a process continue from the state of its env; the process is the env's alone."""
    if "rngs" in state:
        set_global_rngs(state["rngs"])
