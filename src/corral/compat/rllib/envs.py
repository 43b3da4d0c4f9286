"""The env of a config of RLlib: names that Ray's registry knows, and tasks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from corral.compat.rllib.results import add_rllib_keys
from corral.envs.env_arguments import check_env_config
from corral.errors import ConfigError

if TYPE_CHECKING:
    from corral.compat.rllib.config import AlgorithmConfig


def env_settings(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings of the env.

    The config keeps the function of a registered name: runners in other processes, which get a copy of the config, do
    not have the registry, and make their envs again.
    """
    task_fn = config.env_task_fn
    creators = vars(config).get("_env_creators", {})
    env = resolve_env(config.env)
    if isinstance(config.env, str) and env is not config.env:
        vars(config)["_env_creators"] = creators | {config.env: env}
    elif isinstance(env, str):
        env = creators.get(env, env)
    return {
        "env": _with_context(env, dict(config.env_config)),
        "env_config": dict(config.env_config),
        "env_task_fn": task_fn and functools.partial(_choose_task, task_fn),
    }


def resolve_env(env: Any) -> Any:
    """Return what makes an env: for a name that was registered with `register_env`, its function."""
    registry = sys.modules.get("ray.tune.registry")
    if isinstance(env, str) and registry is not None:
        known = registry._global_registry
        if known.contains(registry.ENV_CREATOR, env):
            return known.get(registry.ENV_CREATOR, env)
    return env


class WithContext:
    """A class or function whose first parameter receives the `EnvContext`, as RLlib does it, whatever its name is."""

    def __init__(self, make: Callable[..., Any]) -> None:
        """Keep what makes the env."""
        self.make, self.__name__ = make, getattr(make, "__name__", type(make).__name__)

    def __call__(self, env_config: Any) -> Any:
        """Return the env."""
        return self.make(env_config)


def _with_context(env: Any, env_config: dict[str, Any]) -> Any:
    """Return what makes an env; if it takes `env_config` neither whole nor by name, its first parameter receives it."""
    if callable(env):
        try:
            check_env_config(env, env_config, "")
        except ConfigError:
            return WithContext(env)
    return env


def _choose_task(function: Callable[..., Any], train_results: Any, task_settable_env: Any, env_ctx: Any) -> Any:
    return function(add_rllib_keys(dict(train_results)), task_settable_env, env_ctx)
