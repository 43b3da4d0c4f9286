"""The settings of a config that a file can hold, and those that no file can hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from corral.core.settings import path_of
from corral.errors import ConfigError

if TYPE_CHECKING:
    from corral.checkpoint.directory import Checkpoint
    from corral.config.config import AlgorithmConfig

# Settings whose strings are read as import paths.
_IMPORTED = {
    ("environment", "env"),
    ("environment", "wrappers"),
    ("training", "optimizer"),
    ("rl_module", "module_class"),
    ("callbacks", "callbacks_class"),
    ("callbacks", "callback_functions"),
}


def unnamed(config: AlgorithmConfig) -> list[str]:
    """Return the settings that no file can hold: lambdas, instances, classes defined in functions.

    Returns:
        Texts such as `"environment.env: <function <lambda> at 0x...>"`.
    """
    groups = {group: values for group, values in config.to_dict().items() if group != "algo"}
    algo = [] if _found_by_name(type(config)) else [f"algo: {path_of(type(config))}"]
    return algo + [
        f"{place}: {value!r:.80}"
        for group, values in groups.items()
        for name, setting in values.items()
        for place, value in _unnamed(setting, f"{group}.{name}", (group, name) in _IMPORTED)
    ]


def _unnamed(value: Any, place: str, imported: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                yield place, value
            yield from _unnamed(part, f"{place}.{key}", imported)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _unnamed(part, f"{place}.{index}", imported)
    elif hasattr(value, "__qualname__"):
        if not (imported and _found_by_name(value)):
            yield place, value
    elif not (value is None or isinstance(value, (bool, int, float, str)) or hasattr(value, "tolist")):
        yield place, value


def _found_by_name(value: Any) -> bool:
    """Return whether the import path of a value leads back to it, in this script at least."""
    if path_of(value).startswith("__main__:"):
        return False  # in a notebook, for example, where no other process ever finds it
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def settings_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings by group of a checkpoint's config, including `algo`.

    Raises:
        ConfigError: Some of them could not be saved.
    """
    if missing := checkpoint.metadata.get("unnamed"):
        raise ConfigError(
            f"{checkpoint.path}: the config holds values that no file can name ({'; '.join(map(str, missing))}): "
            "build the algorithm from your own config, and call its restore_from_path()."
        )
    return checkpoint.config
