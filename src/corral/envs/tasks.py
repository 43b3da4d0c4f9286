"""Tasks of an env: what `get_task` and `set_task` of the env, or of one of its wrappers, exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from corral.core.plain import is_same
from corral.core.tree import copy_nested
from corral.errors import CallbackError


class TaskSettableEnv(gym.Env[Any, Any], ABC):
    """Env with tasks, such as levels of difficulty.

    An env without this base class has tasks too, if it or one of its wrappers has `get_task` and `set_task`.
    """

    @abstractmethod
    def get_task(self) -> Any:
        """Return the task in force. Plain data, such as a number or a dict, can be saved in checkpoints."""

    @abstractmethod
    def set_task(self, task: Any) -> None:
        """Take a task, which applies from the next `reset` on."""

    def sample_tasks(self, n_tasks: int) -> list[Any]:
        """Return tasks drawn from the env's own distribution; by default copies of the task in force."""
        return [self.get_task()] * n_tasks


def has_tasks(env: gym.Env[Any, Any]) -> bool:
    """Return whether an env, or one of its wrappers, has `get_task` and `set_task`."""
    return env.has_wrapper_attr("get_task") and env.has_wrapper_attr("set_task")


def task_of(env: gym.Env[Any, Any]) -> Any:
    """Return the task of a sub-env, or `None` if it has none."""
    return env.get_wrapper_attr("get_task")() if has_tasks(env) else None


def set_task(env: gym.Env[Any, Any], task: Any) -> None:
    """Give a sub-env a task, unless the task is `None` or the env has no tasks."""
    if task is not None and has_tasks(env):
        env.get_wrapper_attr("set_task")(task)


def choose_task(fn: Callable[..., Any], train_results: Mapping[str, Any], env: gym.Env[Any, Any], context: Any) -> None:
    """Give a sub-env the task that an `env_task_fn` returns, unless it is the task in force or `None`.

    Raises:
        CallbackError: The function raised an exception.
    """
    settable: Any = env
    while not hasattr(settable, "get_task"):  # wrappers of Gymnasium do not have the attributes of the env inside
        settable = settable.env
    before = copy_nested(settable.get_task())  # the function may change the task in place, and return it
    try:
        task = fn(train_results, settable, context)
    except Exception as error:
        where = f"sub-env {context.vector_index} of runner {context.worker_index}"
        raise CallbackError(f"env_task_fn, {where}: {type(error).__name__}: {error}") from error
    if not is_same(task, before):
        set_task(env, task)
