"""The env of a config of RLlib: names that Ray's registry knows, and tasks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from corral.compat.rllib.results import add_rllib_keys

if TYPE_CHECKING:
    from corral.compat.rllib.config import AlgorithmConfig


def env_settings(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings of the env."""
    task_fn = config.env_task_fn
    return {
        "env": resolve_env(config.env),
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


def _choose_task(function: Callable[..., Any], train_results: Any, task_settable_env: Any, env_ctx: Any) -> Any:
    return function(add_rllib_keys(dict(train_results)), task_settable_env, env_ctx)
