"""Tuned settings: YAML files of settings by env, one file for each algorithm."""

from __future__ import annotations

import copy
import functools
from importlib.resources import files
from typing import Any

import yaml

from corral.errors import ConfigError, nearest

TUNED_ALGORITHMS = ("PPO", "DQN", "SAC", "TD3", "APPO", "IMPALA", "PQN", "BC", "MARWIL", "IQL", "CQL")
"""Algorithms with tuned settings. Where several have settings for an env, the first one is taken.

The last four learn from recorded data, which a user adds.
"""


def tuned_settings(env: str, algo: str | None = None) -> dict[str, Any]:
    """Return tuned settings by group, with `algo`, `environment` and `stop`, in the form of an experiment file.

    `corral.algorithms.registry.config_from_dict` makes a config of them once `stop` is removed.

    Args:
        env: Id of the env, such as `"CartPole-v1"`.
        algo: Name of the algorithm; `None` is the first one of `TUNED_ALGORITHMS` that has settings for the env.

    Raises:
        ConfigError: There are none for this env, or none of this algorithm; the message says what there is.
    """
    by_env = tuned_algorithms()
    if algo is not None:  # upper and lower case are the same, as for all names of algorithms
        algo = next((known for known in TUNED_ALGORITHMS if known.lower() == algo.lower()), algo)
    if algo is not None and algo not in TUNED_ALGORITHMS:
        near = nearest(algo, TUNED_ALGORITHMS)
        raise ConfigError(f"there are no tuned settings of {algo!r}. {near}")
    if env not in by_env:
        raise ConfigError(f"there are no tuned settings for env {env!r}. {nearest(env, [*by_env])}")
    if algo is None:
        algo = by_env[env][0]
    elif algo not in by_env[env]:
        raise ConfigError(f"there are no tuned settings of {algo} for env {env!r}, only of {', '.join(by_env[env])}.")
    return {"algo": algo, "environment": {"env": env}, **copy.deepcopy(_read(algo)[env])}


def tuned_algorithms() -> dict[str, list[str]]:
    """Return the names of the algorithms that have tuned settings, by id of the env."""
    envs = dict.fromkeys(env for algo in TUNED_ALGORITHMS for env in _read(algo))
    return {env: [algo for algo in TUNED_ALGORITHMS if env in _read(algo)] for env in envs}


@functools.cache
def _read(algo: str) -> dict[str, dict[str, Any]]:
    text = files("corral.algorithms").joinpath("tuned", f"{algo.lower()}.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found
