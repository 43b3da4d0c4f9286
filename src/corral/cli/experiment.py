"""Config and stop criteria from the options of the command line and a YAML file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from corral.algorithms.registry import config_from_dict
from corral.config.config import AlgorithmConfig
from corral.errors import ConfigError


def load_experiment(options: argparse.Namespace) -> tuple[AlgorithmConfig, dict[str, float]]:
    """Return the config and the stop criteria; options override the file.

    Raises:
        ConfigError: A name is unknown, a value is wrong, or algorithm, env or stop criterion is missing.
    """
    settings = read_experiment(options.config) if options.config else {}
    stop = settings.pop("stop", None) or {}
    if not isinstance(stop, dict):
        raise ConfigError(f"{options.config}: 'stop' must hold names and numbers, got {stop!r}.")
    if options.algo:
        settings["algo"] = options.algo
    if "algo" not in settings:
        raise ConfigError(
            "no algorithm: give --algo PPO or --algo my_algo:MyConfig, or 'algo' in the file of --config."
        )
    config = config_from_dict(settings)
    if options.env:
        config.env = options.env
    if options.seed is not None:
        config.seed = options.seed
    for text in options.settings:
        config.set_path(*parse_pair(text, "--set"))
    if options.stop:
        stop = dict(parse_pair(text, "--stop") for text in options.stop)
    if not stop:
        raise ConfigError("no stop criterion: give --stop episode_return_mean=450, or 'stop' in the file of --config.")
    return config, {name: _number(name, value) for name, value in stop.items()}


def read_experiment(path: Path) -> dict[str, Any]:
    """Read a YAML file of groups of settings.

    Raises:
        ConfigError: The file cannot be read, or does not hold a mapping.
    """
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {path}: expected groups of settings by name, got {type(settings).__name__}.")
    return settings


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"stop: {name} must be a number, got {value!r}.") from None


def parse_pair(text: str, option: str) -> tuple[str, Any]:
    """Split `name=value` and read the value as YAML.

    Raises:
        ConfigError: There is no `=`, or the value is not YAML.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{option} {text!r}: expected NAME=VALUE.")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option} {text!r}: the value is not valid YAML: {error}") from error
