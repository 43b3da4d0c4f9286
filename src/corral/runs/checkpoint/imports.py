"""The import paths of a checkpoint that `from_checkpoint` follows, and those that it refuses.

A config names classes and functions, which are then called with arguments that the config holds too. So that a file
cannot call just anything, Python's standard library is refused before it is imported, and so is what makes no env where
an env is named. Optimizers, modules, callbacks, explorations and algorithms are checked as in any config.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from corral.core.familiar_names import ALIASES
from corral.core.settings import module_named, names_script
from corral.errors import CheckpointError, ConfigError

IMPORTED = frozenset(
    {
        *(
            "algo",
            "env",
            "wrappers",
            "transforms",
            "loss",
            "optimizer",
            "lr_scheduler",
            "module_class",
            "learner_class",
            "episode_class",
        ),
        *("callbacks_class", "callback_functions", "env_task_fn", "env_reset_fn", "custom_evaluation_function"),
        *("policy_mapping_fn", "policies_to_train", "critic_sees", "loggers"),
    }
)
"""Settings whose strings are read as import paths; their names are unique among all groups."""

IMPORTED_IN_MODEL_CONFIG = ("action_distribution", "features_extractor")
"""Keys of `model_config` whose strings are read as import paths."""

_ALIASES = {alias: name for aliases in ALIASES.values() for alias, name in aliases.items()}

# Here a string without a colon is a name: `"CartPole-v1"`, `"adam"`.
_NAMED = ("env", "optimizer")


def check_imports(settings: Mapping[str, Any], place: object) -> None:
    """Refuse a config whose import paths lead to what a checkpoint should not call; the other paths are imported.

    Args:
        settings: Settings by group, and `algo`.
        place: The checkpoint, for the message.

    Raises:
        CheckpointError: The message names the setting and the import path.
        ConfigError: A module cannot be imported.
    """
    for name, path in import_paths(settings):
        check_import(path, name, place)


def import_paths(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and import path of each setting that is read as an import path; see `check_imports`."""
    for group, values in settings.items():
        yield from _import_paths({group: values} if group == "algo" else values)


def check_import(path: str, setting: str, place: object) -> None:
    """Refuse an import path that leads to what a checkpoint should not call; see `check_imports`."""
    try:
        problem = _problem(path, setting)
    except ConfigError as error:
        raise ConfigError(f"{place}: {setting} {error}.") from error
    if problem:
        raise CheckpointError(
            f"{place}: {setting}={path!r:.200} is not taken from a checkpoint: it {problem}. Give your own, with "
            f"{setting}=...."
        )


def _import_paths(values: Any) -> Iterator[tuple[str, str]]:
    """Yield name and import path of the settings of a group."""
    for given, value in values.items() if isinstance(values, Mapping) else ():
        name = _ALIASES.get(given, given)
        if name == "evaluation_config":
            yield from _import_paths(value)
        elif name in ("policies", "algorithm_config_overrides_per_module"):
            for settings in value.values() if isinstance(value, Mapping) else ():
                yield from _import_paths(settings)
        elif name == "policies_to_train" and isinstance(value, list):
            continue  # ids
        elif name == "model_config":
            yield from _paths_of_model(value)
        elif name in ("transforms", "loggers"):
            types = [part.get("type") if isinstance(part, Mapping) else part for part in value or ()]
            yield from ((name, path) for path in _strings(types) if _is_path(path))
        elif name == "exploration_config":
            yield from ((name, path) for path in _strings(value) if _is_path(path))
        elif name in IMPORTED:
            yield from (
                (name, path) for path in _strings(value) if ":" in path or (name not in _NAMED and _is_path(path))
            )


def _paths_of_model(config: Any) -> Iterator[tuple[str, str]]:
    """Yield name and import path of what a `model_config` names."""
    for key in IMPORTED_IN_MODEL_CONFIG if isinstance(config, Mapping) else ():
        yield from ((key, path) for path in _strings(config.get(key)) if _is_path(path))


def _is_path(text: str) -> bool:
    return ":" in text or "." in text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(part)


def _problem(path: str, setting: str) -> str | None:
    """Return why an import path is refused."""
    module_name, colon, qualname = path.strip().partition(":")
    if not colon:
        module_name, _, qualname = path.strip().rpartition(".")
    if not module_name or module_name.startswith(".") or not module_name.isprintable():
        return "names no module"
    if _is_standard(module_name) and not names_script(path):
        return "is in Python's standard library"
    found: Any = module_named(module_name, path)
    for name in qualname.split("."):
        found = getattr(found, name, None)
        if inspect.ismodule(found):
            return "leads into another module"
    if found is None:
        return None  # the id of an env, or an error that the setting itself gives
    if _is_standard(getattr(found, "__module__", "builtins")):
        return "is from Python's standard library"
    if setting == "features_extractor":  # it is called with arguments from the file
        from torch import nn

        return None if inspect.isclass(found) and issubclass(found, nn.Module) else "is no class of torch.nn.Module"
    return _problem_of_env(found, setting) if setting in ("env", "wrappers") else None


def _is_standard(module_name: Any) -> bool:
    return (
        str(module_name).partition(".")[0] in sys.stdlib_module_names or "__main__" in str(module_name).split(".")[1:]
    )


def _problem_of_env(found: Any, setting: str) -> str | None:
    """Return why something is refused as env or wrapper."""
    if inspect.isclass(found):
        return None if _is_env(found) else "is no class of envs"
    # A function is called with an env_config from the file, as in `torch.load(f=..., weights_only=False)`.
    from corral.envs.env_ids import PACKAGES

    of_envs = {"gymnasium", "pettingzoo", "envpool", "vmas", *(package.module_name for package in PACKAGES)}
    home = sys.modules.get(found.__module__)
    makes_envs = any(_is_env(value) or _package(value) in of_envs for value in vars(home).values())
    if setting == "env" and (not makes_envs or _package(found) in ("gymnasium", "corral")):
        return "is no function of a module with envs"
    return None


def _is_env(value: Any) -> bool:
    """Return whether something is a class of envs, of Gymnasium, PettingZoo or another library."""
    return inspect.isclass(value) and all(callable(getattr(value, name, None)) for name in ("reset", "step"))


def _package(value: Any) -> str:
    """Return the package of a module, or of what a module defines."""
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "")
    return str(name).partition(".")[0]
