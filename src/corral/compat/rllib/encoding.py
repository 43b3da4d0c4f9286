"""Settings of RLlib in types that JSON holds: classes and functions as import paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from corral.core.settings import import_path, path_of
from corral.errors import CheckpointError, ConfigError
from corral.runs.checkpoint.imports import check_import


def encode(value: Any) -> Any:
    """Return settings in types that JSON holds; what no file can name is described."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"dataclass": path_of(type(value)), "fields": {name: encode(part) for name, part in fields.items()}}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(part)] for key, part in value.items()]}
    if isinstance(value, (list, tuple, set)):
        return {type(value).__name__: [encode(part) for part in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__qualname__") and _is_found(value):
        return {"path": path_of(value)}
    return {"unnamed": f"{value!r:.80}"}


def _is_found(value: Any) -> bool:
    try:
        return import_path(path_of(value)) is value
    except ConfigError:
        return False


def decode(value: Any, place: Path) -> Any:
    """Return what `encode` was given.

    Raises:
        CheckpointError: Something names what no checkpoint should.
        ConfigError: A value was only described.
    """
    if not isinstance(value, dict):
        return value
    ((kind, content), *more) = value.items()
    if kind == "unnamed":
        raise ConfigError(
            f"{place}: the config holds {content}, which no file can name: build the algorithm from your own config, "
            "and call its restore_from_path()."
        )
    if kind == "path":
        return import_checked(content, place)
    if kind == "dataclass":
        if not content.startswith(f"{__package__}."):
            raise CheckpointError(f"{place}: {content} is not taken from a checkpoint.")
        return import_path(content)(**{name: decode(part, place) for name, part in dict(more)["fields"].items()})
    if kind == "dict":
        return {decode(key, place): decode(part, place) for key, part in content}
    kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}
    return kinds[kind](decode(part, place) for part in content)


def import_checked(path: str, place: Path) -> Any:
    """Return what an import path in a checkpoint names, unless no checkpoint should name it."""
    check_import(path, "module_class", place)
    return import_path(path)
