"""The host of a runner's envs: it makes the envs, steps them within a time limit, and replaces failed ones."""

from __future__ import annotations

import copy
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
from numpy.typing import NDArray

from corral.core.plain import is_plain, is_same
from corral.core.seeding import get_global_rngs, get_seeds, make_seeds, set_global_rngs
from corral.core.spaces import module_observation_space, space_kinds, space_tree
from corral.core.tree import Tree, copy_nested, map_tree
from corral.envs.async_vector import AsyncLimits, AsyncVectorEnv
from corral.envs.checks import mismatch
from corral.envs.config import EnvironmentSettings
from corral.envs.env_state import (
    check_env_state,
    continue_env,
    find_obstacle,
    get_env_state,
    plays_again,
    set_surroundings,
)
from corral.envs.episode_resets import (
    EpisodeReset,
    EpisodeResets,
    call_inside,
    count_episodes,
    fill_queue,
    inside,
    note_iteration,
    take_videos,
)
from corral.envs.masked_resets import MaskedResets, infos_by_env
from corral.envs.replay import LIMIT_S
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
from corral.errors import CheckpointError, ConfigError, EnvError, SampleError, SubEnvError

if TYPE_CHECKING:
    import torch

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
        self.restarts = Restarts(self._timer, self._next_seed, self._announce_sub_env, sub_env_restarted)

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
        self._reset_seed: int | None = self._next_seed()
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
        is_async = isinstance(self.env, AsyncVectorEnv)  # its sub-envs are in other processes
        self.plays_again = is_async or (self._has_sub_envs and any(map(plays_again, self._sub_envs())))
        self._infos_are_by_env = isinstance(self.env, (SyncVectorEnv, AsyncVectorEnv, MaskedResets))
        self._gives_checked_steps = self._infos_are_by_env or type(self.env).__module__.startswith(_KNOWN_PACKAGES)
        self.observation_space = module_observation_space(self.env.single_observation_space)
        self.space: Tree = space_tree(self.observation_space)
        try:
            self._check_alike()
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

    def _check_alike(self) -> None:
        """Refuse another env than the first one if modules that were made for that one do not fit.

        Raises:
            EnvError: The spaces or the numbers of sub-envs differ; only the bounds of Box observations may.
        """
        found = self.described
        first = self._first_described = self._first_described or found
        if (space_kinds(found[0]), *found[1:]) != (space_kinds(first[0]), *first[1:]):
            raise EnvError(
                f"env {self.name!r}: the new env has observations of {found[0]}, actions of {found[1]} and {found[2]} "
                f"sub-envs, and the module was made for {first[0]}, {first[1]} and {first[2]}: give envs "
                "of all sizes the same spaces, for instance the spaces of the largest size, with unused entries empty."
            )

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
        self._give_tasks()
        self.set_num_episodes(self._num_episodes)

    def close(self) -> None:
        """Close the vector env, if there is one."""
        if hasattr(self, "env"):
            self.env.close()

    def _next_seed(self) -> int:
        return int(self._seeds.spawn(1)[0].generate_state(1)[0]) >> 1

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
        step = self.env.step if self._gives_checked_steps else self._checked_step
        return partial(self._timer.call, step) if self._is_timed else step

    @property
    def device(self) -> torch.device:
        """Device of a vector env of tensors."""
        device: torch.device = self.env.device  # type: ignore[attr-defined]
        return device

    @property
    def step_tensors(self) -> Callable[..., Any]:
        """Function `step_tensors` of a vector env of tensors, with its time limit."""
        step = self.env.step_tensors  # type: ignore[attr-defined]
        return partial(self._timer.call, step) if self._is_timed else step

    def _checked_step(self, actions: Any) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]:
        """Step a vector env whose rewards and flags nobody has checked yet."""
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        columns = check_step_columns(self.num_envs, rewards, terminated, truncated)
        return obs, *columns, check_infos(infos, "step")

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
                self._foreach_lane(fill_queue, queues)
            obs, infos = self._reset(self._reset_seed)
        except Exception as error:
            raise self.error("reset", 0, error) from original(error)
        self._reset_seed = None
        return obs, infos

    def _reset(self, seed: int | None) -> tuple[Any, Mapping[str, Any]]:
        reset = partial(self._timer.call, self.env.reset) if self._is_timed else self.env.reset
        obs, infos = reset(seed=seed)
        return obs, infos if self._gives_checked_steps else check_infos(infos, "reset")

    def note_iteration(self, training_iteration: int | None) -> None:
        """Tell the sub-envs, if `asks_iteration`, how many iterations the algorithm has finished."""
        if training_iteration not in (None, self._iteration):
            self._foreach_lane(note_iteration, [training_iteration] * self.num_envs)
            self._iteration = training_iteration

    def get_num_episodes(self) -> list[int] | None:
        """Return how many episodes began in each sub-env, where `env_reset_fn` is told so; otherwise `None`."""
        if self._reset_fn is not None and not self.is_broken:
            self._num_episodes = self._foreach_lane(count_episodes, [None] * self.num_envs)
        return self._num_episodes

    def set_num_episodes(self, numbers: Sequence[int] | None) -> None:
        """Let `env_reset_fn` count from these numbers on; see `get_num_episodes`."""
        if numbers is not None and self._reset_fn is not None and len(numbers) == self.num_envs:
            self._num_episodes = self._foreach_lane(count_episodes, numbers)

    def take_videos(self) -> list[dict[int, Video]]:
        """Return the videos of each sub-env by the place of the episode in the last `resets`; it then has none."""
        return foreach_sub_env(self.env, self.name, take_videos)

    def _foreach_lane(self, fn: Callable[..., Any], each: Sequence[Any]) -> list[Any]:
        """Return `fn(wrapper, one)` for the wrapper of each sub-env that chooses its reset arguments."""
        if isinstance(self.env, MaskedResets):
            return [fn(lane, one) for lane, one in zip(self.env.lanes, each, strict=True)]
        return foreach_sub_env(self.env, self.name, fn, each)

    def _begin_again(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Prepare envs that restart for their reset: a new seed for what the env seeds itself, then its generator."""
        numbers = self.get_num_episodes()
        self._reset(self._next_seed())
        self.set_num_episodes(numbers)
        padded = [*states, *[None] * self.num_envs][: self.num_envs if self._has_sub_envs else 1]
        self._each(_set_surroundings, padded)
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
        self._give_tasks()

    def _give_tasks(self) -> None:
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

    @property
    def steps_one_by_one(self) -> bool:
        """Whether the sub-envs are stepped one after the other, and not by a vector env of their own or processes."""
        return isinstance(self.env, SyncVectorEnv)

    @property
    def _has_sub_envs(self) -> bool:
        """Whether the states of the envs are states of sub-envs, and not one state of a vector env of its own."""
        return isinstance(self.env, (SyncVectorEnv, AsyncVectorEnv))

    def _each(self, fn: Callable[..., Any], each: Sequence[Any]) -> list[Any]:
        """Return `fn(env, one, has_own_process)` for each env and one of `each`, called in the process of the env."""
        has_own_process = isinstance(self.env, AsyncVectorEnv)
        if not self._has_sub_envs:
            return [fn(self.env, each[0], has_own_process)]
        return foreach_sub_env(self.env, self.name, partial(_call_with, fn, has_own_process), each)

    def _env_states(self) -> list[dict[str, Any]]:
        starts = self.env.starts() if isinstance(self.env, (SyncVectorEnv, AsyncVectorEnv)) else [None]
        states = self._each(_get_env_state, starts)
        problems = {state["obstacle"]: state.pop("traceback") for state in states if "traceback" in state}
        for obstacle, traceback in problems.items():
            log.warning(
                "env %r will begin its episode again when the run is restored: %s\n%s", self.name, obstacle, traceback
            )
        return states

    def get_state(self) -> dict[str, Any]:
        """Return the state from which the envs continue, with the seeds that come next, as plain data.

        `envs` has a state for each sub-env, or one for a vector env of its own; `None` if no env was reset so far.
        """
        envs = None if self.is_broken or self._reset_seed is not None else self._restarting or self._env_states()
        return {
            "seeds": get_seeds(self._seeds),
            "reset_seed": self._reset_seed,
            "num_rows": self.num_rows,
            "restarts": self.restarts.get_state(),
            **self._plain_env_config(),
            "tasks": self._plain_tasks(),
            "num_episodes": self.get_num_episodes(),
            "same_step": self.is_same_step,
            "envs": envs,
        }

    def _plain_env_config(self) -> dict[str, Any]:
        """Return `env_config` if it was changed, and warn of changed settings that a checkpoint cannot hold.

        `built_env_config` is the value before the change, if a checkpoint can hold it.
        """
        changed, before = self.changed_settings, self._built_with["env_config"]
        lost = [name for name, value in changed.items() if name != "env_config" or not is_plain(value)]
        if lost:
            log.warning(
                "env %r: %s was changed in a runner to a value that a checkpoint cannot hold: a restored runner has "
                "the setting of the config.",
                self.name,
                ", ".join(lost),
            )
        if "env_config" not in changed or "env_config" in lost:
            return {"env_config": None}
        built = {"built_env_config": before} if is_plain(before) else {}
        return {"env_config": changed["env_config"], **built}

    def _plain_tasks(self) -> list[Any] | None:
        tasks = self.get_tasks()
        if tasks is None or is_plain(tasks):
            return tasks
        log.warning(
            "env %r: get_task() returned %s, which a checkpoint cannot hold: a restored env has its first task again.",
            self.name,
            type(tasks[0]).__name__,
        )
        return None

    def find_obstacles(self, state: Mapping[str, Any], num_envs: int) -> list[str]:
        """Return for each sub-env why it cannot continue where its env of a state stood; else it restarts.

        The reason is `""` where nothing is in the way. If one of them cannot continue, all of them restart.

        Args:
            state: The state.
            num_envs: Number of sub-envs of the runner of the state.
        """
        envs = state["envs"]
        reason = ""
        if envs is None or self.is_broken:
            reason = "no env was saved"
        elif num_envs != self.num_envs:
            reason = f"{num_envs} sub-envs were saved, and here are {self.num_envs}"
        elif len(envs) != (self.num_envs if self._has_sub_envs else 1):
            reason = "the vectorization is another one"
        elif state["same_step"] != self.is_same_step:
            reason = "the autoreset mode is another one"
        return [reason] * self.num_envs if reason else self._per_sub_env(self._each(_find_obstacle, envs))

    def _per_sub_env(self, reasons: list[str]) -> list[str]:
        return reasons if self._has_sub_envs else reasons * self.num_envs

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a state is whole, without changing anything; raise what the damaged part raises."""
        make_seeds(state["seeds"]).spawn(1)
        copy.copy(self.restarts).set_state(state["restarts"])
        int(state["num_rows"] + (state["reset_seed"] or 0) + sum(state.get("num_episodes") or ()))
        if state["tasks"] is not None and not state["tasks"]:
            raise CheckpointError(f"env {self.name!r}: the list of tasks in the state is empty.")
        if not isinstance(state.get("env_config"), dict | None):
            raise CheckpointError(f"env {self.name!r}: env_config in the state is {state['env_config']!r:.80}.")
        for env in state["envs"] or ():
            check_env_state(env)

    def set_state(self, state: Mapping[str, Any], resets_next: NDArray[np.bool_], replays: Sequence[Any]) -> list[str]:
        """Continue from a state of `get_state`; return for each sub-env what is in the way, see `find_obstacles`.

        Envs that do not continue restart at the next reset, with their generators where they were.

        Args:
            state: The state.
            resets_next: Bool, one for each sub-env of the state: those that the next step only resets.
            replays: For each sub-env of the state what it plays again; see `continue_env`.

        Raises:
            EnvError: An env raised an exception in `reset`.
            Exception: Exception of `set_state` of an env.
        """
        self.get_tasks()
        env_config = find_env_config(state, self._built_with["env_config"])
        kept = {name: value for name, value in self.changed_settings.items() if name != "env_config"}
        if self.change_settings(kept if env_config is None else {**kept, "env_config": dict(env_config)}):
            self.make()
        obstacles = self.find_obstacles(state, len(resets_next))
        self.num_rows = int(state["num_rows"])
        self.restarts.set_state(state["restarts"])
        if state["tasks"] is not None:
            self.set_tasks(state["tasks"])
        self._seeds, self._reset_seed, self._restarting = make_seeds(state["seeds"]), None, None
        if state["envs"] is None:
            self._reset_seed = self._next_seed() if state["reset_seed"] is None else int(state["reset_seed"])
            obstacles = [""] * self.num_envs if state["reset_seed"] is not None else obstacles
        elif any(obstacles):
            self._restarting = list(state["envs"])
        else:
            obstacles = self._continue(state, resets_next, replays)
        self.set_num_episodes(state.get("num_episodes"))
        return obstacles

    def _continue(self, state: Mapping[str, Any], resets_next: NDArray[np.bool_], replays: Sequence[Any]) -> list[str]:
        """Let all envs continue, or prepare all of them to restart; return for each sub-env what is in the way."""
        limit_s = self._config.worker_timeout_s  # of the call in which a runner restores its state
        deadline_s = time.monotonic() + (min(LIMIT_S, limit_s / 2) if isinstance(limit_s, (int, float)) else LIMIT_S)
        if not self.steps_one_by_one:
            self._reset_seed = self._next_seed()
            self.reset()  # so that wrappers and processes are ready
        try:
            given = zip(state["envs"], replays, strict=False)
            obstacles = self._each(_continue_env, [(*each, self._next_seed(), deadline_s) for each in given])
        except Exception as error:
            if not self.is_broken:
                raise
            obstacles = [f"its process failed when its episode was played again: {error}"] * self.num_envs
            self.recover()
        self._seeds = make_seeds(state["seeds"])  # envs that continue draw no seed
        if any(obstacles):
            self._restarting = list(state["envs"])
        elif isinstance(self.env, (SyncVectorEnv, AsyncVectorEnv)):
            self.env.continue_from([env.get("start") for env in state["envs"]], resets_next & (not self.is_same_step))
        if self.plays_again or self._reset_fn is not None:  # the episodes have had the tasks of their resets
            self._give_tasks()
        return self._per_sub_env(obstacles)


def find_env_config(state: Mapping[str, Any], built_with: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `env_config` that was changed in the runner of a state, or `None` to leave the setting as it is.

    Args:
        state: State of an `EnvHost`.
        built_with: The `env_config` of the config of now. If it is not the one with which the runner of the state was
            built, the user has chosen another one, which holds.
    """
    changed: Mapping[str, Any] | None = state.get("env_config")
    if changed is None or is_same(state.get("built_env_config", built_with), built_with):
        return changed
    log.warning(
        "env_config=%s replaces the value %s to which the run that is restored had changed it in its runners.",
        built_with,
        changed,
    )
    return None


# Functions that are called in the process of a sub-env, which may be this one.


def _call_with(fn: Callable[..., Any], has_own_process: bool, env: Any, one: Any) -> Any:
    return fn(env, one, has_own_process)


def _get_env_state(env: Any, start: Any, has_own_process: bool) -> dict[str, Any]:
    state = get_env_state(env, start)
    return {**state, "rngs": get_global_rngs()} if has_own_process else state


def _find_obstacle(env: Any, state: Mapping[str, Any], has_own_process: bool) -> str:
    return find_obstacle(env, state)


def _continue_env(env: Any, given: tuple[Any, ...], has_own_process: bool) -> str:
    obstacle = continue_env(env, *given)
    _set_rngs(given[0], has_own_process)
    return obstacle


def _set_surroundings(env: Any, state: Mapping[str, Any] | None, has_own_process: bool) -> None:
    if state is not None:
        set_surroundings(env, state)
        _set_rngs(state, has_own_process)


def _set_rngs(state: Mapping[str, Any], has_own_process: bool) -> None:
    if has_own_process and "rngs" in state:
        set_global_rngs(state["rngs"])
