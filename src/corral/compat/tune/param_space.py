"""Functions that make a config from the settings of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.config.settings import GROUPS
from corral.algorithms.registry import config_class
from corral.errors import ConfigError, nearest

ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)

# Groups whose setter accepts the main setting without a name: `{"callbacks": MyCallback}` is `.callbacks(MyCallback)`.
_TAKE_ONE = ("environment", "rl_module", "callbacks", "engine")


def configured(base: ConfigT, settings: Mapping[str, Any]) -> ConfigT:
    """Return a copy of a config with the settings of a trial.

    Args:
        base: Config that the settings change.
        settings: Settings of the trial. Each key is a setting (`"lr"`), a path (`"training.lr"`,
            `"rl_module.model_config.hidden"`), or a group with its settings (`"training": {"lr": 1e-3}`). Later keys
            override earlier keys.

    Raises:
        ConfigError: A name is unknown (the message suggests the nearest name), or a value has the wrong type or is out
            of bounds.
    """
    config = base.copy()
    for name, value in settings.items():
        if name in GROUPS:
            _set_group(config, name, value)
        elif "." in name:
            config.set_path(name, value)
        elif name == "algo":
            if config_class(value) is not type(config):
                raise ConfigError(f"param_space: algo={value!r}, but the trainable runs {config.algo_name}.")
        else:
            _set_one(config, name, value)
    return config


def _set_group(config: AlgorithmConfig, group: str, value: Any) -> None:
    setter = getattr(config, group)
    if isinstance(value, Mapping):
        given = dict(value)
        functions = given.pop("callback_functions", {}) if group == "callbacks" else {}
        setter(**given, **functions)
    elif group in _TAKE_ONE:
        setter(value)
    else:
        raise ConfigError(f"param_space: group {group!r} must be a dict of settings by name, got {value!r}.")


def _set_one(config: AlgorithmConfig, name: str, value: Any) -> None:
    names = [known for group in config.group_fields().values() for known in group]
    if name not in names:
        hint = config.meaning_of(name) or nearest(name, [*names, *GROUPS])
        raise ConfigError(f"param_space: unknown setting {name!r}. {hint}")
    setattr(config, name, value)
