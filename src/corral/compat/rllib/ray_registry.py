"""The algorithms in Ray's registry, where `ray.tune` looks for them by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from corral.compat.rllib.ray_stub import is_stub

_HOME = f"{__package__}.algorithm"

ALGORITHMS: dict[str, Callable[[], tuple[Any, Any]]] = {}
"""Functions that return the class and the default config of an algorithm, by its name."""

_SERVED = ("PPO", "APPO", "IMPALA", "DQN", "SAC", "TQC", "MARWIL", "BC", "CQL", "IQL", "DreamerV3")


def _class_and_config(name: str) -> tuple[Any, Any]:
    return pkgutil.resolve_name(f"{_HOME}:{name}"), pkgutil.resolve_name(f"{_HOME}:{name}Config")()


class _ByName:
    """Stands for an algorithm class in Ray's registry, and is unpickled as the class.

    So that the class is imported when somebody asks for it, and not when all algorithms are registered.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def resolve(self) -> Any:
        """Import and return the class."""
        return algorithm_class(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return algorithm_class, (self._name,)


def algorithm_class(name: str) -> Any:
    """Return what Ray's registry has for an algorithm: its trainable, or without Ray its class."""
    found = pkgutil.resolve_name(f"{_HOME}:{name}")
    return found if is_stub() else pkgutil.resolve_name(f"{__package__}.tune:make_trainable")(found)


def _register_all() -> None:
    """Register the algorithms by their names; `ray.tune.registry` calls this when it does not know a name.

    Ray's `register_trainable` would need the class itself, and so import all algorithms.
    """
    registry = pkgutil.resolve_name("ray.tune.registry:_global_registry")
    for name in ALGORITHMS:
        if not registry.contains("trainable_class", name):
            registry.register("trainable_class", name, _ByName(name))


ALGORITHMS.update({name: lambda name=name: _class_and_config(name) for name in _SERVED})  # type: ignore[misc]
