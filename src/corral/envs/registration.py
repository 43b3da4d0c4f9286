"""Envs that a script registers with `gym.register`, sent to the processes of the runners.

Gymnasium's registry is a table of one process. A config that is sent to another process takes along the specs of its
env ids. Entry points in the main script, which has the name `__main__` in its own process only, are sent as objects.
"""

from __future__ import annotations

import copy
import sys
import types
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from corral.envs.env_ids import is_of_package

# Name of the module that holds the entry points of another process's main script.
_MAIN_OF_SENDER = "corral_main_of_sender"
# Forked processes have the registry of their parent, and this name.
_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True)
class RegisteredEnvs:
    """Specs of env ids, with what they need of the main script.

    Attributes:
        specs: Specs in the registry of the sender.
        entry_points: Classes and functions of the main script that the specs name, by name.
        process: Name of the process of the sender.
    """

    specs: list[EnvSpec]
    entry_points: dict[str, Any]
    process: str = field(default=_PROCESS)


def registered_envs(env_ids: Iterable[Any]) -> RegisteredEnvs:
    """Return what `register_envs` needs in another process.

    Whatever is not a registered id is left out, and so are ids that the other process registers when it imports their
    package, which would warn of ids that are there already.
    """
    found = RegisteredEnvs([], {})
    for env_id in env_ids:
        if isinstance(env_id, str) and env_id in gym.registry and not is_of_package(gym.registry[env_id]):
            spec = copy.copy(gym.registry[env_id])
            spec.entry_point = _portable(spec.entry_point, found)
            spec.vector_entry_point = _portable(spec.vector_entry_point, found)
            spec.additional_wrappers = tuple(
                type(wrapper)(wrapper.name, _portable(wrapper.entry_point, found), wrapper.kwargs)
                for wrapper in spec.additional_wrappers
            )
            found.specs.append(spec)
    return found


def _portable(entry_point: Any, sent: RegisteredEnvs) -> Any:
    """Return an entry point that another process can load, after adding its object to what is sent."""
    if not isinstance(entry_point, str):
        return entry_point
    module_name, _, name = entry_point.partition(":")
    if module_name not in ("__main__", _MAIN_OF_SENDER) or not hasattr(sys.modules.get(module_name), name):
        return entry_point
    sent.entry_points[name] = getattr(sys.modules[module_name], name)
    return f"{_MAIN_OF_SENDER}:{name}"


def register_envs(sent: RegisteredEnvs) -> None:
    """Register the envs of another process in this one; envs of this process stay as they are."""
    if sent.process == _PROCESS:
        return
    main = sys.modules.setdefault(_MAIN_OF_SENDER, types.ModuleType(_MAIN_OF_SENDER))
    vars(main).update(sent.entry_points)
    gym.registry.update({spec.id: spec for spec in sent.specs})
