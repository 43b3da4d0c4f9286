"""Reset arguments chosen for each episode: the wrapper that gives them to `reset` of its sub-env."""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from corral.core.tree import copy_nested
from corral.envs.seated_env import SeatedEnv
from corral.envs.tasks import has_tasks, set_task
from corral.envs.videos import Video, VideoWriter
from corral.errors import CallbackError, ConfigError, EnvError, nearest

RESET_FN_ARGUMENTS = ("episode_index", "env_index", "worker_index", "training_iteration", "env_context")
"""Names of the arguments that `env_reset_fn` may take."""


@dataclass(frozen=True, kw_only=True)
class EpisodeReset:
    """How one episode begins. `None` leaves a part to the env, as without an `EpisodeReset`.

    Attributes:
        seed: Seed of `reset`, at least 0.
        options: Options of `reset`.
        task: Task that `set_task` of the env receives before the reset, and keeps after the episode.
        is_recorded: Whether a video of the episode is made, for which the env must render images.

    Raises:
        ConfigError: The seed is not an integer of at least 0, or the options are not a dict.
    """

    seed: int | None = None
    options: Mapping[str, Any] | None = None
    task: Any = None
    is_recorded: bool = False

    def __post_init__(self) -> None:
        """Check seed and options."""
        try:
            seed = None if self.seed is None else operator.index(self.seed)  # Gymnasium takes no integers of NumPy
        except TypeError:
            seed = -1
        if seed is not None and seed < 0:
            raise ConfigError(f"seed of a reset must be an integer of at least 0, got {self.seed!r}.")
        object.__setattr__(self, "seed", seed)
        if self.options is not None and not isinstance(self.options, Mapping):
            raise ConfigError(f"options of a reset must be a dict, got {self.options!r:.80}.")


class EpisodeResets(gym.Wrapper[Any, Any, Any, Any]):
    """Outermost wrapper of a sub-env, which chooses the arguments of each `reset`.

    They are the next ones in `queue`. When the queue is empty, they are what `reset_fn` returns. Without a function,
    the arguments of the caller apply. Other attributes are the attributes of the wrapped env.

    Args:
        env: The sub-env.
        context: Context of the sub-env, an `EnvContext`; only needed with `reset_fn`.
        reset_fn: The setting `env_reset_fn`.

    Attributes:
        queue: Reset arguments of the next episodes.
        chosen: Reset arguments of the current episode; `None` before the first one.
        num_episodes: Episodes begun so far.
        training_iteration: Finished iterations of the algorithm.
        videos: Videos of the episodes that were recorded, by their places in the last queue.
    """

    def __init__(self, env: gym.Env[Any, Any], context: Any = None, reset_fn: Callable[..., Any] | None = None) -> None:
        """Begin with an empty queue."""
        super().__init__(env)
        self.queue: deque[EpisodeReset] = deque()
        self.chosen: EpisodeReset | None = None
        self.num_episodes = 0
        self.training_iteration = 0
        self._context, self._reset_fn = context, reset_fn
        self._taken: EpisodeReset | None = None  # from the queue, for the current episode
        self.videos: dict[int, Video] = {}
        self._num_taken = 0  # from the queue
        self._video_writer: VideoWriter | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # while the wrapper itself is being made
            raise AttributeError(name)
        return getattr(self.env, name)

    def set_wrapper_attr(self, name: str, value: Any, **kwargs: Any) -> bool:
        """Set an attribute of the wrapped env where reading finds it, and return whether it was set."""
        return bool(self.env.set_wrapper_attr(name, value, **kwargs))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode, with its own arguments if it has any, and return observation and info.

        Raises:
            CallbackError: `reset_fn` raised an exception, or returned something else than reset arguments.
            EnvError: There is a task, and the env takes none.
        """
        self.num_episodes += 1
        self._taken = self.queue.popleft() if self.queue else None
        self._num_taken += self._taken is not None
        self._video_writer = None  # of an episode that did not end
        self.chosen = chosen = self._taken or self._choose(self.num_episodes - 1)
        if chosen.task is not None:
            if not has_tasks(self.env):
                owner = getattr(self.env.unwrapped, "vector_env", self.env.unwrapped)
                raise EnvError(
                    f"an episode has the task {chosen.task!r:.80}, and {type(owner).__name__} has no methods get_task "
                    "and set_task: define them, or use seed and options."
                )
            set_task(self.env, deepcopy(chosen.task))  # an env may change what it is given
        found = self.env.reset(
            seed=seed if chosen.seed is None else chosen.seed,
            options=options if chosen.options is None else copy_nested(dict(chosen.options)),
        )
        if chosen.is_recorded:
            self._video_writer = VideoWriter(self.env)
        return found

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the env, render the step if the episode is recorded, and return what the env gives."""
        found = self.env.step(action)
        if self._video_writer is not None:
            self._video_writer.add()
            if found[2] or found[3]:
                self.videos[self._num_taken - 1] = self._video_writer.finish()
                self._video_writer = None
        return found

    def _choose(self, episode_index: int) -> EpisodeReset:
        if self._reset_fn is None:
            return EpisodeReset()
        arguments = {
            "episode_index": episode_index,
            "env_index": self._context.vector_index,
            "worker_index": self._context.worker_index,
            "training_iteration": self.training_iteration,
            "env_context": self._context,
        }
        try:
            names = reset_fn_arguments(self._reset_fn)
            return as_reset(self._reset_fn(**{name: arguments[name] for name in names}))
        except Exception as error:
            where = f"env_reset_fn, episode {episode_index} of sub-env {self._context.vector_index}"
            raise CallbackError(f"{where}: {type(error).__name__}: {error}") from error

    def fill_queue(self, resets: Iterable[EpisodeReset]) -> None:
        """Set the reset arguments of the next episodes."""
        self.queue, self.videos, self._num_taken = deque(resets), {}, 0

    def take_videos(self) -> dict[int, Video]:
        """Return the videos by place in the last queue; there are none then."""
        videos, self.videos = self.videos, {}
        return videos

    def count_episodes(self, number: int | None) -> int:
        """Return how many episodes began, after setting the number if one is given."""
        self.num_episodes = self.num_episodes if number is None else number
        return self.num_episodes

    def note_iteration(self, training_iteration: int) -> None:
        """Take how many iterations the algorithm has finished."""
        self.training_iteration = training_iteration

    def take_over(self, old: gym.Env[Any, Any]) -> None:
        """Continue where the wrapper of a failed sub-env was: the episode that broke begins again."""
        if isinstance(old, EpisodeResets):
            self.queue = deque([*([] if old._taken is None else [old._taken]), *old.queue])
            self._num_taken, self.videos = old._num_taken - (old._taken is not None), old.videos
            self.num_episodes = max(0, old.num_episodes - 1)
            self.training_iteration = old.training_iteration


def quotas(num_episodes: int, num_envs: int) -> NDArray[np.int64]:
    """Return how many of numbered episodes each of N sub-envs plays, int64 `[N]`: sub-env i plays i, i + N, and so on.

    The quotas are fixed before the first episode begins. To count the first episodes that end in any sub-env would
    count short episodes too often.
    """
    return (num_episodes - np.arange(num_envs) + num_envs - 1) // num_envs


def as_reset(given: Any) -> EpisodeReset:
    """Return the reset arguments that a function returned: a dict with any of `seed`, `options` and `task`, or `None`.

    Raises:
        ConfigError: It is something else.
    """
    if given is None:
        return EpisodeReset()
    if isinstance(given, EpisodeReset):
        return given
    known = ("seed", "options", "task")
    if not isinstance(given, Mapping):
        raise ConfigError(f"it must return a dict with any of {', '.join(known)}, or None; got {given!r:.80}.")
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(f"it returned a dict with the key {unknown[0]!r}. {nearest(unknown[0], known)}")
    return EpisodeReset(**given)


def reset_fn_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that an `env_reset_fn` takes, any subset of `RESET_FN_ARGUMENTS`.

    Raises:
        ConfigError: It needs another argument, or takes one by position only, or its signature is unknown.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"env_reset_fn: the signature of {function!r} is unknown ({error}): wrap it in a lambda."
        ) from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return RESET_FN_ARGUMENTS
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if is_needed and (parameter.name not in RESET_FN_ARGUMENTS or parameter.kind is parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"env_reset_fn has the parameter {parameter.name!r}, which is not given. Its parameters may be any of: "
                f"{', '.join(RESET_FN_ARGUMENTS)}."
            )
    return tuple(p.name for p in parameters if p.name in RESET_FN_ARGUMENTS)


# Functions that are called in the process of a sub-env, which may be this one.


def inside(env: Any) -> Any:
    """Return the sub-env as the user made it, which user code is given: what it writes must not stay in the wrapper."""
    while isinstance(env, (EpisodeResets, SeatedEnv)):
        env = env.env
    return env


def call_inside(fn: Callable[..., Any], env: Any, *args: Any) -> Any:
    """Return `fn(sub_env, *args)` with the sub-env as the user made it."""
    return fn(inside(env), *args)
