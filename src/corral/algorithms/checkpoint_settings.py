"""The settings of a config that a file can hold, and those that must be given again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from corral.core.settings import found_by_name, path_of
from corral.errors import ConfigError, nearest
from corral.modules.transforms.settings import settings_of
from corral.modules.transforms.transform import Transform
from corral.runs.checkpoint.imports import IMPORTED, IMPORTED_IN_MODEL_CONFIG, check_imports, import_paths

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig
    from corral.runs.checkpoint.directory import Checkpoint


_POLICIES = "multi_agent.policies."
# Beginnings of the places of settings that hold spaces, which files describe.
_WITH_SPACES = (_POLICIES, "environment.observation_space", "environment.action_space")
# Beginnings of the places of settings that hold other settings by name.
_OVERRIDES = ("evaluation.evaluation_config", _POLICIES, "multi_agent.algorithm_config_overrides_per_module.")


def unnamed(config: AlgorithmConfig) -> dict[str, str]:
    """Return the settings that no file can hold: lambdas, instances, classes defined in functions or in a notebook.

    Returns:
        Texts by place, such as `{"environment.env": "<function <lambda> at 0x...>"}`.
    """
    groups = {group: values for group, values in config.to_dict().items() if group != "algo"}
    algo = {} if found_by_name(type(config)) else {"algo": path_of(type(config))}
    return algo | {
        place: f"{value!r:.80}"
        for group, values in groups.items()
        for name, setting in values.items()
        for place, value in _unnamed(setting, f"{group}.{name}", name in IMPORTED)
    }


def _unnamed(value: Any, place: str, imported: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                yield place, value
            is_kind = place.endswith(".exploration_config") and key == "type"
            is_kind |= place.endswith(".model_config") and key in IMPORTED_IN_MODEL_CONFIG
            is_override = place.startswith(_OVERRIDES) and key in IMPORTED
            yield from _unnamed(part, f"{place}.{key}", imported or is_kind or is_override)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _unnamed(part, f"{place}.{index}", imported)
    elif _is_transform(value) or (place.startswith(_WITH_SPACES) and _is_described(value)):
        return
    elif hasattr(value, "__qualname__"):
        if not (imported and found_by_name(value)):
            yield place, value
    elif not (value is None or isinstance(value, (bool, int, float, str)) or hasattr(value, "tolist")):
        yield place, value


def _is_transform(value: Any) -> bool:
    """Return whether a value is a transform that a file can name, with all of its settings."""
    return isinstance(value, Transform) and settings_of(value) is not None and found_by_name(type(value))


def _is_described(value: Any) -> bool:
    from corral.core.space_descriptions import is_described  # here: it imports gymnasium

    return is_described(value)


def of_script(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the import paths in a script, such as `train.py:MyEnv`, which no other program can import.

    Args:
        settings: The settings by group of a checkpoint, and `algo`.

    Returns:
        Import paths by name of the setting.
    """
    return {name: path for name, path in import_paths(settings) if ".py:" in path}


def call_with(places: Iterable[str]) -> str:
    """Return the call that gives settings again, such as `from_checkpoint(path, env=..., callbacks_class=...)`."""
    names = dict.fromkeys(setting_name(place) for place in places)
    return f"from_checkpoint(path, {', '.join(f'{name}=...' for name in names)})"


def setting_name(place: str) -> str:
    """Return the name of the setting at a place, such as `env_config` at `environment.env_config.space`."""
    return place.split(".")[min(1, place.count("."))]


def config_of(checkpoint: Checkpoint, given: Mapping[str, Any]) -> AlgorithmConfig:
    """Return the config of a checkpoint; the classes and functions that it names are imported.

    Args:
        checkpoint: The checkpoint.
        given: Settings by name that replace the settings of the checkpoint, which are then not imported.

    Raises:
        CheckpointError: A setting names something that is not taken from a checkpoint.
        ConfigError: A setting could not be saved and is not given, a given one is unknown, or a value is wrong.
    """
    from corral.algorithms.config.without_effect import without_unused_settings
    from corral.algorithms.registry import config_from_dict

    given = dict(given)
    settings = {
        group: {name: value for name, value in values.items() if name not in given}
        if isinstance(values, Mapping)
        else values
        for group, values in checkpoint.config.items()
    }
    unsaved = checkpoint.metadata.get("unnamed") or {}
    if missing := {place: text for place, text in unsaved.items() if setting_name(place) not in given}:
        described = "; ".join(f"{place}: {text}" for place, text in missing.items())
        raise ConfigError(
            f"{checkpoint.path}: the config holds values that no file can name ({described}): give them again with "
            f"{call_with(missing)}; or build the algorithm from your own config, and call its restore_from_path()."
        )
    if "algo" in given:
        settings["algo"] = given.pop("algo")
    check_imports(settings, checkpoint.path)
    try:
        config = _with_settings(config_from_dict(settings), given)
        config = without_unused_settings(config, given)  # versions before this one accepted them
        config.keep_networks_of(checkpoint.policies)
        config.validate()
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from error
    return config


def _with_settings(config: AlgorithmConfig, given: dict[str, Any]) -> AlgorithmConfig:
    known = [name for names in config.group_fields().values() for name in names]
    for name in given:
        if name not in known:
            hint = config.meaning_of(name) or nearest(name, known)
            raise ConfigError(f"from_checkpoint: unknown setting {name!r}. {hint}")
    functions = given.pop("callback_functions", {})
    if "callbacks_class" in given:
        config = config.copy().callbacks(given.pop("callbacks_class"))
    return config.copy(**given).callbacks(**functions)
