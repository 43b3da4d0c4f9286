"""The object that hosts the envs of a runner: it makes them, steps them within a time limit, and replaces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from corral.core.tree import Tree, space_tree
from corral.envs.async_vector import AsyncLimits, AsyncVectorEnv
from corral.envs.step_timeout import StepTimer, require_signals, sampling
from corral.envs.sub_envs import (
    Restarts,
    close_quietly,
    env_error,
    foreach_sub_env,
    known_tasks,
    original,
    set_task,
    takes_tasks,
)
from corral.envs.sync_vector import SyncVectorEnv
from corral.envs.vector import EnvContext, env_name, make_vector_env
from corral.errors import EnvError, SubEnvError

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig


class EnvHost:
    """Makes the vector env of one runner, and keeps it and its sub-envs alive. It knows no module and no agent.

    Attributes:
        env: The vector env; missing after `recover` failed to make one.
        num_envs: N.
        name: Name of the env in messages.
        space: Observation space of one sub-env, as a tree of spaces without `Dict` and `Tuple`.
        is_same_step: Whether the vector env resets a sub-env in the step that ends its episode.
        gives_new_infos: Whether the infos of each step are new objects, which may be kept without copying.
        num_rows: Rows that were stepped before the current sample, over the host's lifetime; messages count from there.
        restarts: Restarts of sub-envs.
    """

    env: VectorEnv[Any, Any, Any]
    num_envs: int

    def __init__(
        self,
        config: AlgorithmConfig,
        worker_index: int,
        seeds: np.random.SeedSequence,
        *,
        env_created: Callable[[VectorEnv[Any, Any, Any], EnvContext], None],
        sub_env_created: Callable[[Any, EnvContext, int], None],
        sub_env_restarted: Callable[[SubEnvError], None],
        needs_sub_envs: bool,
        own_process: bool,
    ) -> None:
        """Prepare; `make` makes the env.

        Args:
            config: Settings of the env, of the vector env and of faults.
            worker_index: 0 for the embedded runner, 1 and up for others.
            seeds: Seeds of all vector envs and sub-envs that are made here.
            env_created: Called with each vector env that was made, before its first reset, and its context.
            sub_env_created: Called with each sub-env that was made in this process, before its first reset, its
                context and its index.
            sub_env_restarted: Called with the failure when a new sub-env is in the place of one that failed; it calls
                `count_restart`, because the host does not know the row.
            needs_sub_envs: Whether somebody wants to see the sub-envs, which a native vector env does not have.
            own_process: Whether this process may be ended where `env_step_timeout_s` cannot interrupt the env.

        Raises:
            ConfigError: `env_step_timeout_s` is set, and this is not the main thread.
        """
        self.name = env_name(config.env)
        self.num_rows = 0
        self._config = config
        self._worker_index = worker_index
        self._seeds = seeds
        self._env_created = env_created
        self._sub_env_created = sub_env_created
        self._needs_sub_envs = needs_sub_envs
        self._own_process = own_process
        self._timer: StepTimer | None = None
        if config.env_step_timeout_s is not None and config.vectorization != "async":  # its processes have their own
            require_signals()
            self._timer = StepTimer(config.env_step_timeout_s)
        self._context = EnvContext(config.env_config, worker_index, config.num_env_runners)
        self._tasks: list[Any] | None = None  # of the sub-envs, when they were last asked
        self.restarts = Restarts(self._timer, self._next_seed, self._announce_sub_env, sub_env_restarted)

    # Making.

    def make(self) -> None:
        """Make the vector env, in place of the one there is, and announce it.

        Raises:
            ConfigError: The env id is unknown, or a setting contradicts the env.
            EnvError: The env raised, or gave what its spaces do not allow.
        """
        if hasattr(self, "env"):
            self.env.close()
        config = self._config
        # Used up by the first reset; another env gets another seed.
        self._reset_seed: int | None = self._next_seed()
        self._context = EnvContext(config.env_config, self._worker_index, config.num_env_runners)
        self.env = make_vector_env(
            config.env,
            self._context,
            num_envs=config.num_envs_per_env_runner,
            default_num_envs=config.DEFAULT_NUM_ENVS,
            vectorization=config.vectorization,
            autoreset_mode=config.autoreset_mode,
            wrappers=config.wrappers,
            check=not config.disable_env_checking,
            seed=self._reset_seed,
            needs_sub_envs=self._needs_sub_envs,
            limits=AsyncLimits(config.env_step_timeout_s, config.start_timeout_s),
            restarts=self.restarts if config.restart_failed_sub_environments else None,
        )
        self.num_envs = self.env.num_envs
        self.is_same_step = self.env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        # A vector env that is not ours may give the same arrays at every step.
        self.gives_new_infos = isinstance(self.env, (SyncVectorEnv, AsyncVectorEnv))
        self.space: Tree = space_tree(self.env.single_observation_space)
        try:
            self._takes_tasks = takes_tasks(self.env)
            for i, sub_env in enumerate(getattr(self.env.unwrapped, "envs", ())):
                self._announce_sub_env(i, sub_env)
            self._env_created(self.env, self._context)
        except BaseException:
            self.env.close()
            raise

    def recover(self) -> None:
        """Put a new vector env in the place of one that may have failed, with the same tasks.

        Raises:
            EnvError: The env cannot be made.
        """
        if hasattr(self, "env"):
            self.get_tasks()
            close_quietly(self.env)
            del self.env  # should `make` raise, there is nothing to close
        self.make()
        self._give_tasks()

    def close(self) -> None:
        """Close the vector env, if there is one."""
        if hasattr(self, "env"):
            self.env.close()

    def _next_seed(self) -> int:
        return int(self._seeds.spawn(1)[0].generate_state(1)[0]) >> 1

    def _announce_sub_env(self, env_index: int, sub_env: Any) -> None:
        self._sub_env_created(sub_env, self._context.at(env_index), env_index)

    # Stepping.

    def sampling(self) -> AbstractContextManager[None]:
        """Return a context in which `reset` and `step` are limited to `env_step_timeout_s`, if that is set."""
        return nullcontext() if self._timer is None else sampling(self._timer, own_process=self._own_process)

    @property
    def step(self) -> Callable[..., Any]:
        """The step of the vector env, with its time limit."""
        return self.env.step if self._timer is None else partial(self._timer.call, self.env.step)

    def reset(self) -> tuple[Any, Mapping[str, Any]]:
        """Reset all sub-envs; the first time with the env's seed.

        Raises:
            EnvError: The env raised, or took too long.
        """
        try:
            reset = self.env.reset if self._timer is None else partial(self._timer.call, self.env.reset)
            obs, infos = reset(seed=self._reset_seed)
        except Exception as error:
            raise self.error("reset", 0, error) from original(error)
        self._reset_seed = None
        return obs, infos

    # Failures.

    def error(self, method: str, row: int, error: Exception) -> Exception:
        """Return the error that names the env, the row of the current sample and what the env raised."""
        return env_error(self.name, self.num_rows + row, method, error)

    def bad_value(self, row: int, env_index: int, problem: str) -> EnvError:
        """Return the error for a value that a sub-env should not have given."""
        return EnvError(f"env {self.name!r}, sub-env {env_index}, step {self.num_rows + row}: {problem}.")

    def count_restart(self, failure: SubEnvError, row: int) -> None:
        """Count and log a sub-env that was restarted in a row of the current sample.

        Raises:
            SubEnvError: It fails again and again, without a single step in between.
        """
        self.restarts.count(failure, self.name, self.num_rows + row)

    # Sub-envs and their tasks.

    def foreach(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Return `fn(sub_env)` for every sub-env, in its process; see `foreach_sub_env`."""
        results = foreach_sub_env(self.env, self.name, fn)
        self.get_tasks()
        return results

    def get_tasks(self) -> list[Any] | None:
        """Return what `get_task` of each sub-env returns, or `None` where there is no such method."""
        if self._takes_tasks:
            self._tasks = known_tasks(self.env, self._tasks)
        return self._tasks

    def set_tasks(self, tasks: list[Any] | None) -> None:
        """Give each sub-env its task."""
        self._tasks = tasks
        self._give_tasks()

    def _give_tasks(self) -> None:
        if self._takes_tasks and self._tasks is not None:
            foreach_sub_env(self.env, self.name, set_task, self._tasks)
