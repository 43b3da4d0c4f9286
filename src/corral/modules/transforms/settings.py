"""Transforms as settings: what a config takes, and what a file holds of it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from corral.core.settings import imported, path_of
from corral.errors import ConfigError, nearest
from corral.modules.transforms.transform import Transform

BUILT_IN = {
    "ClipObservations": "corral.modules.transforms.observations",
    "ClipRewards": "corral.modules.transforms.rewards",
    "FlattenObservations": "corral.modules.transforms.observations",
    "FrameStack": "corral.modules.transforms.temporal",
    "NormalizeObservations": "corral.modules.transforms.observations",
    "NormalizeRewards": "corral.modules.transforms.rewards",
    "PrevActionsPrevRewards": "corral.modules.transforms.temporal",
}
"""Names of the built-in transforms, and where they are."""


def make_transforms(settings: Any) -> list[Transform]:
    """Return transforms from what a user may give for each: a transform, its class, its name, or a dict with `type`.

    Raises:
        ConfigError: Something else is given, or a setting is unknown.
    """
    if not isinstance(settings, (list, tuple)):
        raise ConfigError(f"transforms={settings!r:.80} must be a list, such as [NormalizeObservations()].")
    return [_transform(given) for given in settings]


def _transform(given: Any) -> Transform:
    kwargs: dict[str, Any] = {}
    if isinstance(given, Mapping):
        kwargs = {str(name): value for name, value in given.items() if name != "type"}
        if "type" not in given:
            raise ConfigError(f"transforms: {dict(given)!r:.80} has no 'type', the name of the transform.")
        given = given["type"]
    if isinstance(given, str):
        given = _named(given)
    if isinstance(given, Transform) and not kwargs:
        return given
    if not (inspect.isclass(given) and issubclass(given, Transform)):
        raise ConfigError(
            f"transforms: {given!r:.80} is no transform: give a subclass of corral.Transform or an instance of one. "
            "Wrappers of envs belong to .environment(wrappers=[...])."
        )
    try:
        return given(**kwargs)
    except TypeError as error:
        known = [name for name in inspect.signature(given).parameters if not name.startswith("_")]
        names = ", ".join(known) or "no settings"
        raise ConfigError(f"transforms: {given.__name__}: {error}. It takes {names}.") from error


def _named(name: str) -> Any:
    if name in BUILT_IN:
        return getattr(importlib.import_module(BUILT_IN[name]), name)
    if ":" not in name and "." not in name:
        raise ConfigError(f"transforms: there is no transform {name!r}. {nearest(name, BUILT_IN)}")
    return imported(name)


def settings_of(transform: Transform) -> dict[str, Any] | None:
    """Return the settings of a transform by name, or `None` if they are not known, or are no plain values."""
    if not dataclasses.is_dataclass(transform):
        return None if vars(transform) else {}
    names = [field.name for field in dataclasses.fields(transform) if not field.name.startswith("_")]
    found = {name: getattr(transform, name) for name in names}
    plain = type(None), bool, int, float, str
    parts = [part for value in found.values() for part in (value if isinstance(value, tuple) else [value])]
    return found if all(isinstance(part, plain) for part in parts) else None


def name_of(transform: Transform) -> str:
    """Return the name of a built-in transform, or the import path of another one's class."""
    cls = type(transform)
    return cls.__name__ if BUILT_IN.get(cls.__name__) == cls.__module__ else path_of(cls)


def describe_transform(transform: Transform) -> dict[str, Any]:
    """Return a transform as a dict with `type` and its settings, which JSON holds; see `settings_of`."""
    return {"type": name_of(transform), **(settings_of(transform) or {})}
