"""Functions for the sub-envs of a vector env: call functions with them, keep their tasks, restart failed ones."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from corral.core.tree import copy_nested
from corral.envs.checks import check_obs
from corral.envs.episode_resets import EpisodeResets
from corral.envs.step_checks import check_reset
from corral.envs.step_timeout import StepOverdue, StepTimer, limited
from corral.envs.tasks import has_tasks, set_task, task_of
from corral.errors import CallbackError, CorralError, EnvError, EnvTimeoutError, SubEnvError

log = logging.getLogger("corral")

MAX_FAILURES = 3
"""Limit of attempts to restart a sub-env, and of failures of a sub-env in a row, without a step in between."""

CLOSE_LIMIT_S = 5.0
"""Seconds that a failed vector env may take to close."""


class AbsentSubEnvs:
    """Attribute `envs` of a vector env that has none: reading it raises an `AttributeError` with a message.

    `hasattr(env, "envs")` is False, as without it, and an instance may have an attribute `envs` all the same.
    """

    def __init__(self, message: str) -> None:
        """Keep the message."""
        self._message = message

    def __get__(self, env: object, cls: type) -> Any:
        """Raise the error."""
        raise AttributeError(self._message)


class Restarts:
    """Counts the restarts of sub-envs, and holds what a vector env needs to restart one.

    Args:
        timer: Timer that limits the resets of new sub-envs; making a sub-env has no limit.
        next_seed: Function that returns the seed for the first reset of a new sub-env.
        created: Function that is called with the index and the new sub-env, before the reset; only for sub-envs in this
            process.
        restarted: Function that is called with the failure after the sub-env was replaced.

    Attributes:
        num_restarts: Restarts of sub-envs so far.
        known_tasks: Last known tasks of the sub-envs, or `None` if they have none.
    """

    def __init__(
        self,
        timer: StepTimer | None,
        next_seed: Callable[[], int],
        created: Callable[[int, gym.Env[Any, Any]], None],
        restarted: Callable[[SubEnvError], None],
    ) -> None:
        """Keep the functions, and start counting at 0."""
        self.next_seed, self.created, self.restarted = next_seed, created, restarted
        self.call = call_directly if timer is None else timer.call
        self.paused: Callable[[], AbstractContextManager[None]] = nullcontext if timer is None else timer.paused
        self.num_restarts = 0
        self.known_tasks: Sequence[Any] | None = None
        self._latest: dict[int, tuple[int, int]] = {}  # row of the sub-env's latest failure, and how many in a row

    def known_task(self, env_index: int) -> Any:
        """Return the last known task of a sub-env, or `None`."""
        return self.known_tasks[env_index] if self.known_tasks else None

    def get_state(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "num_restarts": self.num_restarts,
            "latest": [[index, row, streak] for index, (row, streak) in self._latest.items()],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Count from a state of `get_state` on."""
        latest = {int(index): (int(row), int(streak)) for index, row, streak in state["latest"]}
        self.num_restarts, self._latest = int(state["num_restarts"]), latest

    def count(self, failure: SubEnvError, name: str, row: int, *, took_step: bool = False) -> None:
        """Count and log a sub-env that was restarted.

        Args:
            failure: Failure of the old sub-env.
            name: Name of the env.
            row: Row in which the sub-env failed, over the runner's lifetime.
            took_step: Whether it took a step in this row before it failed.

        Raises:
            SubEnvError: The sub-env fails again and again, without a single step in between.
        """
        index = failure.env_index
        last_row, streak = self._latest.get(index, (-2, 0))
        streak = streak + 1 if row == last_row + 1 and not took_step else 1
        self._latest[index] = row, streak
        if streak == MAX_FAILURES:
            problem = f"{failure.problem}; it was restarted, and failed {streak} times in a row"
            raise SubEnvError(index, failure.method, problem) from failure.__cause__
        self.num_restarts += 1
        log.warning(
            "env %r, sub-env %d, step %d: failed in %s(): %s. It was restarted.",
            *(name, index, row, failure.method, failure.problem),
            exc_info=failure,
        )


def call_directly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function, called without a time limit."""
    return function(*args, **kwargs)


def restart_env(
    old: gym.Env[Any, Any],
    make: Callable[[], gym.Env[Any, Any]],
    *,
    seed: int,
    call: Callable[..., Any] = call_directly,
    created: Callable[[gym.Env[Any, Any]], None] = lambda env: None,
    begins: Callable[[gym.Env[Any, Any], int], None] = lambda env, seed: None,
    known_task: Any = None,
) -> tuple[gym.Env[Any, Any], Any, dict[str, Any]]:
    """Close a failed sub-env, and return a new one with the same task, after its first reset.

    Where reset arguments are chosen for each episode, the new sub-env begins the episode again that broke.

    Args:
        old: Sub-env that failed.
        make: Function that makes a sub-env.
        seed: Seed of the first reset; further attempts use the next numbers.
        call: Function that calls the methods of the env, within a time limit if there is one.
        created: Function that is called with the new sub-env before its reset.
        begins: Function that is called with the new sub-env and the seed of its reset, just before this reset.
        known_task: Last known task of the old sub-env, in case it cannot return its task any more.

    Returns:
        The new sub-env, and the observation and info of its reset.

    Raises:
        Exception: Exception of the last attempt.
    """
    task = _quietly("return its task", call, task_of, old)
    task = known_task if task is None else task
    _quietly("be closed", call, old.close)
    for attempt in range(MAX_FAILURES):
        new = None
        try:
            new = make()
            created(new)
            call(set_task, new, task)
            if isinstance(new, EpisodeResets):
                new.take_over(old)
            begins(new, seed + attempt)
            obs, info = check_reset(call(new.reset, seed=seed + attempt))
            check_obs(old.observation_space, obs)
        except CallbackError:
            raise
        except Exception:
            if new is not None:
                _quietly("be closed", call, new.close)
            if attempt == MAX_FAILURES - 1:
                raise
        else:
            return new, obs, info
    raise AssertionError("the last attempt returns or raises")


def restart_error(failure: SubEnvError, error: BaseException) -> SubEnvError:
    """Return the error for a failed sub-env that could not be restarted, with the first failure as its cause."""
    whole = SubEnvError(
        failure.env_index,
        failure.method,
        f"{failure.problem}; and it could not be restarted in {MAX_FAILURES} attempts: {problem_of(error)}",
    )
    whole.__cause__ = failure.__cause__ or error
    if error is not whole.__cause__:
        whole.__cause__.add_note(f"It could not be restarted:\n{''.join(traceback.format_exception(error))}")
    return whole


def problem_of(error: BaseException) -> str:
    """Return type and message of an exception; for errors of Corral, such as timeouts, only the message."""
    is_own = isinstance(error, (CorralError, StepOverdue))
    return str(error) if is_own else f"{type(error).__name__}: {error}"


def env_error(name: str, step: int, method: str, error: Exception) -> Exception:
    """Return an error that names the env, the step of the runner and the problem; a `CallbackError` is not changed."""
    if (found := _callback_error(error)) is not None:
        return found
    where, problem = "", problem_of(error)
    if isinstance(error, SubEnvError):
        where, method, problem = f", sub-env {error.env_index}", error.method, error.problem
    if isinstance(original(error), (EnvTimeoutError, StepOverdue)):
        return EnvTimeoutError(f"env {name!r}{where}, step {step}: {method}() {problem}")
    return EnvError(f"env {name!r}{where}, step {step}: raised in {method}(): {problem}")


def original(error: Exception) -> BaseException | None:
    """Return the original exception of the env or the callback, without the errors that wrap it."""
    if (found := _callback_error(error)) is not None:
        return found.__cause__
    return error.__cause__ if isinstance(error, SubEnvError) and error.__cause__ is not None else error


def _callback_error(error: Exception) -> CallbackError | None:
    """Return the error of the user's own function, which is no failure of the env, also from a sub-env's process."""
    found = error.__cause__ if isinstance(error, SubEnvError) else error
    return found if isinstance(found, CallbackError) else None


def _quietly(what: str, call: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function of a failed env, or `None` if the function raises an exception."""
    try:
        return call(function, *args)
    except Exception:
        log.warning("A sub-env that failed could not %s.", what, exc_info=True)
        return None


def close_quietly(env: Any) -> None:
    """Close an env or a vector env within `CLOSE_LIMIT_S`; exceptions are logged and not raised."""
    try:
        with limited(CLOSE_LIMIT_S + 1, "the limit of close()"):
            # Only the asynchronous vector env accepts a time limit.
            env.close(**({"timeout": CLOSE_LIMIT_S} if hasattr(env.unwrapped, "processes") else {}))
    except Exception:
        log.warning("An env that is not used any more could not be closed.", exc_info=True)


# All sub-envs of a vector env.


def foreach_sub_env(
    env: VectorEnv[Any, Any, Any], name: str, fn: Callable[..., Any], each: Sequence[Any] | None = None
) -> list[Any]:
    """Return `fn(sub_env)`, or `fn(sub_env, each[i])`, for each sub-env, called in the process of the sub-env.

    Raises:
        EnvError: The vector env has no sub-envs, or no sub-envs that can be reached.
    """
    arguments = [()] * env.num_envs if each is None else [(one,) for one in each]
    inner: Any = env.unwrapped
    if hasattr(inner, "envs"):
        return [fn(sub_env, *given) for sub_env, given in zip(inner.envs, arguments, strict=True)]
    if hasattr(inner, "foreach"):
        found: list[Any] = inner.foreach(fn, arguments)
        return found
    raise EnvError(
        f"env {name!r} is a {type(inner).__name__}, which has no sub-envs here for foreach_env: set "
        "vectorization='sync', or change the vector env itself, env_runner.env, in foreach_env_runner."
    )


def takes_tasks(env: VectorEnv[Any, Any, Any]) -> bool:
    """Return whether the sub-envs have tasks and can be reached."""
    reached = hasattr(env.unwrapped, "envs") or hasattr(env.unwrapped, "foreach")
    return reached and any(foreach_sub_env(env, "", has_tasks))


def known_tasks(env: VectorEnv[Any, Any, Any], before: list[Any] | None) -> list[Any] | None:
    """Return the tasks of all sub-envs, or the tasks known before, if the sub-envs fail to answer."""
    try:
        with limited(CLOSE_LIMIT_S, "the limit of get_task()"):
            return [copy_nested(task) for task in foreach_sub_env(env, "", task_of)]  # an env may change its task
    except Exception:
        log.warning("The sub-envs of a vector env that failed could not return their tasks.", exc_info=True)
        return before
