"""The asynchronous vector env: each sub-env in a process of its own."""

from __future__ import annotations

import pickle
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from corral.core.seeding import seed_everything
from corral.env.check import check_obs
from corral.errors import SubEnvError


def make_async(
    make: Callable[[int], Any], num_envs: int, mode: AutoresetMode, first: gym.Env[Any, Any], seed: int
) -> AsyncVectorEnv:
    """Start a process for each sub-env.

    Args:
        make: Makes sub-env `index`, in its process.
        num_envs: N.
        mode: When sub-envs are reset.
        first: An env made here, for its spaces.
        seed: Of the processes' global generators, which would otherwise all go on from this process's.

    Raises:
        EnvError: A sub-env could not be made; no process is left.
    """
    sub_envs = [
        partial(_in_process, make, index, first.observation_space, first.action_space, seed + index)
        for index in range(num_envs)
    ]
    env = AsyncVectorEnv(sub_envs, autoreset_mode=mode, worker=_worker)
    try:
        env.get_attr("ready")
    except SubEnvError as error:
        env.close()
        raise (error.__cause__ or error) from None
    return env


def _in_process(
    make: Callable[[int], Any],
    index: int,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    seed: int,
) -> gym.Env[Any, Any]:
    """Make one sub-env in its own process, or a stand-in: Gymnasium's worker reports no error before its loop runs."""
    seed_everything(seed)
    try:
        return _ProcessEnv(make(index))
    except Exception as error:
        return _UnmadeEnv(error, observation_space, action_space)


class _ProcessEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A sub-env in its own process: checks observations there, and raises nothing that cannot be pickled."""

    ready = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with _portable_errors():
            obs, info = self.env.reset(seed=seed, options=options)
            check_obs(self.observation_space, obs)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        with _portable_errors():
            obs, reward, terminated, truncated, info = self.env.step(action)
            check_obs(self.observation_space, obs)
        return obs, reward, terminated, truncated, info


class _UnmadeEnv(gym.Env[Any, Any]):
    """Stands for a sub-env that raised in its own process when it was made."""

    def __init__(self, error: Exception, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self._error = error
        self.observation_space, self.action_space = observation_space, action_space

    @property
    def ready(self) -> bool:
        raise self._error


@contextmanager
def _portable_errors() -> Iterator[None]:
    """Replace an exception that would not survive the way to another process by one with its name and message."""
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


class AsyncVectorEnv(gym.vector.AsyncVectorEnv[Any, Any]):
    """Gymnasium's asynchronous vector env, with errors that say which sub-env failed, and a clean end on Ctrl-C."""

    _interrupted = False

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step every sub-env; see `gymnasium.vector.AsyncVectorEnv.step`."""
        try:
            return super().step(actions)
        except KeyboardInterrupt:
            self._interrupted = True  # perhaps in the middle of a message: no pipe can be read any more
            raise

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the processes; see `gymnasium.vector.AsyncVectorEnv.close_extras`."""
        if self._interrupted:
            self._state, terminate = gym.vector.async_vector_env.AsyncState.DEFAULT, True
        super().close_extras(timeout=timeout, terminate=terminate)

    def _raise_if_errors(self, successes: Any) -> None:
        failed = [i for i, success in enumerate(successes) if not success]
        if not failed:
            return
        index, error_type, cause, trace = min((self.error_queue.get() for _ in failed), key=lambda entry: entry[0])
        for i in failed:
            self.parent_pipes[i].close()
            self.parent_pipes[i] = None  # type: ignore[call-overload]  # as Gymnasium's own close() expects
        self._state = gym.vector.async_vector_env.AsyncState.DEFAULT
        cause.add_note(f"In the process of sub-env {index}:\n{trace}")
        called = re.search(r"in (reset|step)\n", trace)
        raise SubEnvError(index, called[1] if called else "step", f"{error_type.__name__}: {cause}") from cause


def _worker(*arguments: Any) -> None:
    """Run Gymnasium's worker, deaf to Ctrl-C: a terminal sends it to every process, and the parent ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gym.vector.async_vector_env._async_worker(*arguments)
