"""Vector envs of other libraries, which follow the calls of Gymnasium's vector envs, as vector envs of Gymnasium."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from corral.core.space_descriptions import is_described
from corral.errors import ConfigError, EnvError, nearest

ENVPOOL = "envpool:"
"""Prefix of the ids of EnvPool."""
_SEED_LIMIT = 2**31  # seeds of EnvPool are int32
# Settings of EnvPool that Corral decides, and what decides them.
_DECIDED = {
    "num_envs": "set num_envs_per_env_runner",
    "batch_size": "all sub-envs are stepped together",
    "seed": "set debugging(seed=...)",
    "env_seed": "set debugging(seed=...)",
    "env_type": "it is 'gymnasium'",
    "gym_reset_return_info": "it is True",
    "max_num_players": "envs with several players are not supported",
}
_RENDERING = ("from_pixels", "render_mode", "render_env_id", "render_width", "render_height", "render_camera_id")


class AdaptedVectorEnv(VectorEnv[Any, Any, Any]):
    """A vector env of another library, which has the calls of Gymnasium's vector envs and another class.

    Attributes:
        env: The vector env of the other library.

    Args:
        env: The same; it has `num_envs`, `reset(seed=, options=)`, `step(actions)`, `single_observation_space` and
            `single_action_space` or, in place of these, `observation_space` and `action_space` of all sub-envs, and
            says in `metadata["autoreset_mode"]` when sub-envs are reset.

    Raises:
        EnvError: A space is missing, or the space of one sub-env cannot be told from the space of all.
    """

    def __init__(self, env: Any) -> None:
        """Find the spaces and the autoreset mode."""
        self.env, self.num_envs = env, int(env.num_envs)
        self.single_observation_space = _single_space(env, "observation_space")
        self.single_action_space = _single_space(env, "action_space")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = dict(getattr(env, "metadata", None) or {})
        given = self.metadata.get("autoreset_mode", getattr(env, "autoreset_mode", None))
        self.metadata["autoreset_mode"] = next(
            (m for m in AutoresetMode if given in (m, m.value, m.name.lower())), given
        )

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all sub-envs; see `gymnasium.vector.VectorEnv.reset`."""
        found: tuple[Any, dict[str, Any]] = self.env.reset(seed=seed, options=options)
        return found

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all sub-envs; see `gymnasium.vector.VectorEnv.step`."""
        found: tuple[Any, Any, Any, Any, dict[str, Any]] = self.env.step(actions)
        return found

    def close_extras(self, **kwargs: Any) -> None:
        """Close the vector env of the other library, if it can be closed."""
        if hasattr(self.env, "close"):
            self.env.close()


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """Sub-envs of EnvPool, https://github.com/sail-sg/envpool, which threads in C++ step.

    EnvPool takes seeds only when it makes its sub-envs, so that `reset` with a seed makes them again. As in Gymnasium,
    the seed of sub-env i is then `seed + i`. A sub-env is reset in the step after the end of its episode.

    Attributes:
        pool: The object of EnvPool; `None` until the first reset where only its settings were given.

    Args:
        spec: Settings and spaces of the pool, an `EnvSpec` of EnvPool.
        make: Function that makes the pool with a list of seeds.
        pool: The pool, if it is made already.
    """

    def __init__(self, spec: Any, make: Callable[[list[int]], Any], pool: Any = None) -> None:
        """Find the spaces."""
        self._make, self.pool = make, pool
        self.num_envs = int(spec.config.num_envs)
        self.single_observation_space = _without_warnings(lambda: spec.gymnasium_observation_space)
        self.single_action_space = _without_warnings(lambda: spec.gymnasium_action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all sub-envs, which are made again for a seed; see `gymnasium.vector.VectorEnv.reset`."""
        if seed is None and self.pool is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        if seed is not None:
            seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
            self.close_extras()  # before, so that there are never two pools of threads
            self.pool = pool = self._make([one % _SEED_LIMIT for one in seeds])
            _without_warnings(lambda: pool.observation_space)  # which it makes once
        found: tuple[Any, dict[str, Any]] = self.pool.reset(**({"options": options} if options else {}))
        return found

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all sub-envs; see `gymnasium.vector.VectorEnv.step`."""
        found: tuple[Any, Any, Any, Any, dict[str, Any]] = self.pool.step(actions)
        return found

    def close_extras(self, **kwargs: Any) -> None:
        """End the pool."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def _without_warnings(make_space: Callable[[], Any]) -> Any:
    """Return a space of EnvPool, which gives float64 bounds to float32 spaces, of which Gymnasium warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make_space()


def adapt_pool(pool: Any) -> EnvPoolVectorEnv:
    """Return an object of EnvPool as a vector env of Gymnasium.

    Raises:
        EnvError: It has another API, or is asynchronous.
    """
    has_gymnasium_calls = isinstance(pool, gym.Env)
    if not has_gymnasium_calls:
        raise EnvError("EnvPool made it with env_type='dm': make it with env_type='gymnasium'")
    if pool.is_async:
        config = pool.config
        raise EnvError(
            f"EnvPool made it with batch_size={config['batch_size']} of num_envs={config['num_envs']}, so that a step "
            "returns some sub-envs only: leave batch_size out"
        )
    spec = pool.spec
    shown = {name: value for name, value in vars(pool).items() if name.startswith("_render_")}

    def make(seeds: list[int]) -> Any:
        made = type(pool)(type(spec)(spec.config._replace(seed=0, env_seed=seeds)))
        vars(made).update(shown)
        return made

    return EnvPoolVectorEnv(spec, make, pool)


def check_pool_id(env: str, envpool: Any) -> None:
    """Check an id `"envpool:Name"` against the ids of the package.

    Raises:
        ConfigError: The id is unknown; the message names the nearest one.
    """
    known = envpool.list_all_envs()
    if env.removeprefix(ENVPOOL) not in known:
        hint = nearest(env.removeprefix(ENVPOOL), known)
        hint = hint if hint.startswith("Did") else "envpool.list_all_envs() returns all ids."
        raise ConfigError(f"environment: EnvPool has no env {env.removeprefix(ENVPOOL)!r}. {hint}")


def make_pool(env: str, num_envs: int, env_config: Mapping[str, Any]) -> EnvPoolVectorEnv:
    """Return the sub-envs of an id `"envpool:Name"`.

    Args:
        env: The id.
        num_envs: Number of sub-envs N.
        env_config: Settings of EnvPool for this id, such as `max_episode_steps`.

    Raises:
        ConfigError: A setting is unknown to EnvPool, or Corral decides it.
    """
    import envpool

    task = env.removeprefix(ENVPOOL)
    for key in env_config:
        if key in _DECIDED:
            raise ConfigError(f"env_config[{key!r}] does not apply to env {env!r}: {_DECIDED[key]}.")
    known = {*envpool.make_spec(task).config._fields, *_RENDERING} - set(_DECIDED)
    if unknown := sorted(set(env_config) - known):
        raise ConfigError(f"env_config: env {env!r} has no setting {unknown[0]!r}. {nearest(unknown[0], known)}")
    settings = {**env_config, "num_envs": num_envs}
    spec = envpool.make_spec(task, **settings)
    return EnvPoolVectorEnv(spec, lambda seeds: envpool.make_gymnasium(task, seed=seeds, **settings))


def _single_space(env: Any, name: str) -> spaces.Space[Any]:
    """Return the space of one sub-env of a vector env, from its own attribute or from the space of all sub-envs."""
    single, batched = getattr(env, f"single_{name}", None), getattr(env, name, None)
    if isinstance(single, spaces.Space):
        return single
    if single is None and isinstance(batched, spaces.Space) and is_described(batched):
        found = _one_of(batched, env.num_envs)
        if found is not None and batch_space(found, env.num_envs) == batched:
            return found
    raise EnvError(
        f"{type(env).__name__} has num_envs={env.num_envs}, and its single_{name} must be a gymnasium space, got "
        f"{single!r:.80}"
    )


def _one_of(batched: spaces.Space[Any], num_envs: int) -> spaces.Space[Any] | None:
    """Return a space whose batch of N may be `batched`, or `None`."""
    if isinstance(batched, spaces.Dict):
        parts = {key: _one_of(part, num_envs) for key, part in batched.items()}
        return spaces.Dict({key: part for key, part in parts.items() if part is not None})
    if not batched.shape or batched.shape[0] != num_envs:
        return None
    if isinstance(batched, spaces.Box):
        return spaces.Box(batched.low[0], batched.high[0], dtype=batched.dtype.type)
    if isinstance(batched, spaces.MultiDiscrete) and len(batched.shape) == 1:
        return spaces.Discrete(int(batched.nvec[0]), start=int(batched.start[0]))
    return None
