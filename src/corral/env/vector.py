"""From what `.environment(...)` was given to a Gymnasium vector env."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from corral.core.networks import space_tree
from corral.core.tree import Tree, map_tree
from corral.env.check import check_env, check_spaces, mismatch
from corral.errors import ConfigError, EnvError, SubEnvError, nearest

# A constructor whose first parameter has one of these names takes the whole EnvContext as one argument.
CONTEXT_NAMES = frozenset({"config", "cfg", "env_config", "context", "ctx", "env_context", "env_ctx"})


class EnvContext(dict[str, Any]):
    """The `env_config` as an env's factory sees it: a dict, and where the env will live.

    Attributes:
        worker_index: 0 for the embedded runner, 1 and up for the others.
        num_workers: How many runners there are besides the embedded one.
        vector_index: Index of the sub-env in its vector env.
    """

    def __init__(
        self, env_config: dict[str, Any], worker_index: int = 0, num_workers: int = 0, vector_index: int = 0
    ) -> None:
        """Copy the config and note the indices."""
        super().__init__(env_config)
        self.worker_index = worker_index
        self.num_workers = num_workers
        self.vector_index = vector_index

    def at(self, vector_index: int) -> EnvContext:
        """Return the context of another sub-env of the same runner."""
        return EnvContext(self, self.worker_index, self.num_workers, vector_index)


def env_name(env: Any) -> str:
    """Return the name of an env setting for messages and run directories."""
    return env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)


def resolve_env(env: Any) -> str | Callable[..., Any]:
    """Return a registered id as it is, and a class or factory for anything else.

    Args:
        env: A Gymnasium id, a `"package.module:Name"` import path, a class, or a factory `fn(env_config)`.

    Raises:
        ConfigError: The id is unknown; the nearest known one is named.
    """
    factory: Callable[..., Any]
    if callable(env):
        factory = env
        return factory
    if not isinstance(env, str):
        raise ConfigError(f"environment: env must be an id, a class or a factory, got {type(env).__name__} {env!r}.")
    module_name, _, attribute = env.partition(":")
    if attribute:
        try:
            module = importlib.import_module(module_name)  # may register ids: "my_package:MyEnv-v0"
        except ImportError as error:
            raise ConfigError(f"environment: cannot import {module_name!r} of env {env!r}: {error}") from error
        if callable(getattr(module, attribute, None)):
            factory = getattr(module, attribute)
            return factory
    env_id = attribute or env
    try:
        gym.spec(env_id)
    except gym.error.Error as error:
        if attribute:
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise ConfigError(
                f"environment: module {module_name!r} has no env {attribute!r}. {nearest(attribute, names)}"
            ) from error
        raise ConfigError(f"environment: unknown env id {env_id!r}. {nearest(env_id, gym.registry)}") from error
    return env_id


def _call_factory(factory: Callable[..., Any], context: EnvContext) -> Any:
    """Call a class or factory with the context if it takes one, else with `env_config` as keyword arguments.

    The first parameter takes the context if its name says so, or if it is the only required one and `env_config` has
    no value for it.
    """
    parameters = [p for p in inspect.signature(factory).parameters.values() if p.kind is not p.VAR_KEYWORD]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p for p in positional if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if positional and positional[0].name in CONTEXT_NAMES:
        return factory(context)
    if len(required) == 1 and required[0].name not in context:
        return factory(context)
    return factory(**context)


def make_vector_env(
    env: Any,
    context: EnvContext,
    *,
    num_envs: int | None,
    default_num_envs: int = 1,
    vectorization: str = "auto",
    autoreset_mode: str = "next_step",
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
    check: bool = True,
) -> VectorEnv[Any, Any, Any]:
    """Make the vector env of one runner.

    Args:
        env: See `resolve_env`. A factory may return a ready `VectorEnv`, which is taken as it is.
        context: Config and indices; its `vector_index` is ignored.
        num_envs: Number of sub-envs N, or `None` if the user did not say.
        default_num_envs: N for `None`, unless a ready `VectorEnv` has its own.
        vectorization: `"sync"`, `"async"` (a process each), or `"auto"`: the id's native vector env where it has one
            and no wrapper forbids it and N > 1, else `"sync"`.
        autoreset_mode: `"next_step"` or `"same_step"`, for sync and async.
        wrappers: Put around every sub-env, the first one innermost.
        check: Whether to check spaces, reset and first step.

    Raises:
        ConfigError: The id is unknown, or settings contradict a ready vector env.
        EnvError: The env raised, or gave what its spaces do not allow.
    """
    resolved, name, n = resolve_env(env), env_name(env), num_envs or default_num_envs
    if isinstance(resolved, str) and vectorization == "auto" and n > 1 and not wrappers:
        spec = gym.spec(resolved)
        if spec.vector_entry_point is not None and not spec.additional_wrappers:
            try:
                native = gym.make_vec(resolved, num_envs=n, vectorization_mode="vector_entry_point", **context)
            except Exception as error:
                raise _making_error(name, "its native vector env", context, error) from error
            return _checked_vector_env(native, name, check)

    def make(vector_index: int) -> Any:
        return _make_one(resolved, name, context.at(vector_index), wrappers)

    first = make(0)
    if isinstance(first, VectorEnv):
        _refuse_contradictions(first, name, num_envs, vectorization, wrappers)
        return _checked_vector_env(first, name, check)
    if check:
        check_env(first, name)
    mode = AutoresetMode.SAME_STEP if autoreset_mode == "same_step" else AutoresetMode.NEXT_STEP
    if vectorization == "async":
        first.close()
        return _make_async(make, n, mode, first)
    return SyncVectorEnv([lambda: first, *(partial(make, index) for index in range(1, n))], autoreset_mode=mode)


def _make_one(resolved: str | Callable[..., Any], name: str, context: EnvContext, wrappers: Sequence[Any]) -> Any:
    """Make one env and wrap it, or return the ready `VectorEnv` of a factory."""
    try:
        if isinstance(resolved, str):
            made = gym.make(resolved, disable_env_checker=True, **context)
        else:
            made = _call_factory(resolved, context)
        if isinstance(made, gym.Env):
            for wrapper in wrappers:
                made = wrapper(made)
    except Exception as error:
        raise _making_error(name, f"sub-env {context.vector_index}", context, error) from error
    if not isinstance(made, (gym.Env, VectorEnv)):
        raise EnvError(f"env {name!r}: expected a gymnasium Env or VectorEnv, got {type(made).__name__}.")
    return made


def _make_async(
    make: Callable[[int], Any], num_envs: int, mode: AutoresetMode, first: gym.Env[Any, Any]
) -> AsyncVectorEnv:
    sub_envs = [
        partial(_in_process, make, index, first.observation_space, first.action_space) for index in range(num_envs)
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
) -> gym.Env[Any, Any]:
    """Make one sub-env in its own process, or a stand-in: Gymnasium's worker reports no error before its loop runs."""
    try:
        return _ProcessEnv(make(index))
    except Exception as error:
        return _UnmadeEnv(error, observation_space, action_space)


def _making_error(name: str, what: str, context: EnvContext, error: Exception) -> EnvError:
    return EnvError(
        f"env {name!r} raised when {what} was made with env_config {dict(context)}: {type(error).__name__}: {error}"
    )


def _refuse_contradictions(
    env: VectorEnv[Any, Any, Any], name: str, num_envs: int | None, vectorization: str, wrappers: Sequence[Any]
) -> None:
    if num_envs is not None and num_envs != env.num_envs:
        raise ConfigError(
            f"num_envs_per_env_runner={num_envs} contradicts env {name!r}, whose factory returned a VectorEnv of "
            f"{env.num_envs}: leave num_envs_per_env_runner unset, or set it to {env.num_envs}."
        )
    if vectorization != "auto" or wrappers:
        raise ConfigError(
            f"vectorization={vectorization!r} and wrappers={list(wrappers)} do not apply to env {name!r}, whose "
            "factory returned a VectorEnv: wrap it in the factory, and leave vectorization at 'auto'."
        )


def _checked_vector_env(env: VectorEnv[Any, Any, Any], name: str, check: bool) -> VectorEnv[Any, Any, Any]:
    """Check a vector env that was not built here: its spaces, its autoreset mode, and one reset and step."""
    check_spaces(env, name, "single_")
    if env.metadata.get("autoreset_mode") not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        raise EnvError(
            f"env {name!r}: metadata['autoreset_mode'] of a VectorEnv must be AutoresetMode.NEXT_STEP or SAME_STEP, "
            f"got {env.metadata.get('autoreset_mode')!r}: without it, episodes cannot be told apart."
        )
    if check:
        obs, _ = env.reset(seed=0)
        problem = mismatch(space_tree(env.observation_space), obs, "observation")
        if problem:
            raise EnvError(f"env {name!r}: {problem} (from reset()).")
        env.action_space.seed(0)
        obs, *columns, _ = env.step(env.action_space.sample())
        problem = mismatch(space_tree(env.observation_space), obs, "observation")
        for field, column in zip(("rewards", "terminated", "truncated"), columns, strict=True):
            if np.shape(column) != (env.num_envs,):
                problem = problem or f"{field} must have shape ({env.num_envs},), got {np.shape(column)}"
        if problem:
            raise EnvError(f"env {name!r}: {problem} (from step()).")
    return env


class SyncVectorEnv(gym.vector.SyncVectorEnv[Any, Any]):
    """Gymnasium's synchronous vector env with a faster step, and errors that say which sub-env failed.

    Every step writes its observations into a new array, which the caller may keep.
    """

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset every sub-env; see `gymnasium.vector.SyncVectorEnv.reset`."""
        seeds: Sequence[int | None] = seed if isinstance(seed, list) else [None] * self.num_envs
        if isinstance(seed, int):
            seeds = [seed + i for i in range(self.num_envs)]
        self._autoreset_envs = np.zeros(self.num_envs, np.bool_)
        self._terminations, self._truncations = self._autoreset_envs.copy(), self._autoreset_envs.copy()
        obs, infos = self._empty_obs(), dict[str, Any]()
        for i, env in enumerate(self.envs):
            try:
                env_obs, info = env.reset(seed=seeds[i], options=options)
                self._write(obs, i, env_obs)
            except Exception as error:
                raise SubEnvError(i, "reset", f"{type(error).__name__}: {error}") from error
            if info:
                infos = self._add_info(infos, info, i)
        return obs, infos

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step every sub-env; see `gymnasium.vector.SyncVectorEnv.step`."""
        n = self.num_envs
        rewards, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        obs, infos = self._empty_obs(), dict[str, Any]()
        same_step = self.autoreset_mode == AutoresetMode.SAME_STEP
        pending = self._autoreset_envs.tolist()
        for i, env in enumerate(self.envs):
            method = "reset" if pending[i] and not same_step else "step"
            try:
                if method == "reset":
                    env_obs, info = env.reset()
                else:
                    env_obs, rewards[i], terminated[i], truncated[i], info = env.step(actions[i])
                    if same_step and (terminated[i] or truncated[i]):
                        _check_obs(self.single_observation_space, env_obs)
                        infos = self._add_info(infos, {"final_obs": env_obs, "final_info": info}, i)
                        method = "reset"
                        env_obs, info = env.reset()
                self._write(obs, i, env_obs)
            except Exception as error:
                raise SubEnvError(i, method, f"{type(error).__name__}: {error}") from error
            if info:
                infos = self._add_info(infos, info, i)
        self._autoreset_envs = terminated | truncated
        return obs, rewards, terminated, truncated, infos

    def _empty_obs(self) -> Tree:
        return map_tree(
            lambda space: np.empty((self.num_envs, *space.shape), space.dtype),
            space_tree(self.single_observation_space),
        )

    def _write(self, columns: Tree, i: int, obs: Tree) -> None:
        """Write one sub-env's observation into the batch; NumPy alone would broadcast a wrong shape into place."""
        if isinstance(columns, np.ndarray):
            if np.shape(obs) != columns.shape[1:]:
                raise ValueError(f"observation must have shape {columns.shape[1:]}, got {np.shape(obs)}")
            try:
                np.copyto(columns[i, ...], obs, casting="same_kind")
            except TypeError:
                _check_obs(self.single_observation_space, obs)  # names the field
                raise
            return
        _check_obs(self.single_observation_space, obs)
        map_tree(lambda column, leaf: np.copyto(column[i, ...], leaf, casting="same_kind"), columns, obs)


def _check_obs(space: gym.Space[Any], obs: Tree) -> None:
    """Refuse an observation that would be broadcast, or lose more than precision, on its way into the batch."""
    problem = mismatch(space_tree(space), obs, "observation", cast="same_kind")
    if problem and "NaN" not in problem:  # NaN is found, and placed in time, by the runner's check
        raise ValueError(problem)


class _ProcessEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A sub-env in its own process: checks observations there, and raises nothing that cannot be pickled."""

    ready = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with _portable_errors():
            obs, info = self.env.reset(seed=seed, options=options)
            _check_obs(self.observation_space, obs)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        with _portable_errors():
            obs, reward, terminated, truncated, info = self.env.step(action)
            _check_obs(self.observation_space, obs)
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
