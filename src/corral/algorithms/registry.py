"""Algorithms by name, for the command line and config files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.checkpoint import read_checkpoint, settings_of
from corral.config.config import AlgorithmConfig
from corral.errors import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm

# name -> "module:config class"; a module is imported when its algorithm is asked for
ALGORITHMS = {
    "PPO": "corral.algorithms.ppo:PPOConfig",
    "DQN": "corral.algorithms.dqn:DQNConfig",
    "SAC": "corral.algorithms.sac:SACConfig",
}


def config_class(name: str) -> type[AlgorithmConfig]:
    """Return the config class of an algorithm.

    Raises:
        ConfigError: No algorithm has the name.
    """
    known = {known_name.lower(): path for known_name, path in ALGORITHMS.items()}
    if name.lower() not in known:
        raise ConfigError(f"unknown algorithm {name!r}. {nearest(name, ALGORITHMS)}")
    module_name, _, class_name = known[name.lower()].partition(":")
    found: type[AlgorithmConfig] = getattr(importlib.import_module(module_name), class_name)
    return found


def config_from_dict(settings: Mapping[str, Any]) -> AlgorithmConfig:
    """Make the config of the algorithm that `settings["algo"]` names.

    Raises:
        ConfigError: There is no `algo`, or a setting is unknown.
    """
    if "algo" not in settings:
        raise ConfigError(f"config: 'algo' is missing; one of {', '.join(ALGORITHMS)}.")
    found = config_class(str(settings["algo"]))
    return found.from_dict({group: values for group, values in settings.items() if group != "algo"})


def algorithm_from_checkpoint(path: str | Path, cls: type[Algorithm]) -> Algorithm:
    """Build an algorithm from a checkpoint's config, and go on from its state; see `Algorithm.from_checkpoint`."""
    config = config_from_dict(settings_of(read_checkpoint(path)))
    if not issubclass(config.algo_class, cls):
        raise CheckpointError(f"{path} is a checkpoint of {config.algo_name}, not of {cls.__name__}.")
    algorithm = config.build()
    try:
        algorithm.restore_from_path(path)
    except BaseException:
        algorithm.stop()
        raise
    return algorithm
