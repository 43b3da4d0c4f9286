"""Ids of the envs that can be made here, found without making or importing any of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from corral.envs.adapted_vector import ENVPOOL
from corral.envs.env_ids import PACKAGES

VERSION = re.compile(r"-v(\d+)$")


def env_ids() -> dict[str, list[str]]:
    """Return the ids of Gymnasium's registry, of PettingZoo and of EnvPool, sorted, by the package that has them.

    The known packages that register ids are imported where they are installed.
    """
    for package in PACKAGES:
        if find_spec(package.module_name):
            import_module(package.module_name)
    found = registered_ids()
    for name, ids in (("pettingzoo", _pettingzoo()), ("envpool", _envpool())):
        if ids:
            found[name] = sorted({*ids}, key=str.lower)
    own = {"gymnasium": found.pop("gymnasium", [])}
    return {**own, **dict(sorted(found.items()))}


def registered_ids() -> dict[str, list[str]]:
    """Return the ids that Gymnasium's registry has now, sorted, by the package that has them."""
    found: dict[str, list[str]] = {}
    for env_id in sorted(gym.registry, key=str.lower):
        found.setdefault(_package(gym.registry[env_id]), []).append(env_id)
    return found


def _package(spec: EnvSpec) -> str:
    """Return the package of an env; the entry point of an old version may be a function that raises."""
    entry_point: Any = spec.entry_point or spec.vector_entry_point
    path = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "unknown")
    return re.split("[.:]", path)[0]


def newest_versions(ids: Iterable[str]) -> list[str]:
    """Return the ids that have no higher version, in the same order."""
    ids = list(ids)
    newest: dict[str, int] = {}
    for env_id in ids:
        name, version = _split(env_id)
        newest[name] = max(version, newest.get(name, version))
    return [env_id for env_id in ids if newest[_split(env_id)[0]] == _split(env_id)[1]]


def _split(env_id: str) -> tuple[str, int]:
    """Return name and version of an id; -1 without one."""
    match = VERSION.search(env_id)
    return (env_id, -1) if match is None else (env_id[: match.start()], int(match[1]))


def _pettingzoo() -> list[str]:
    """Return the ids that `pettingzoo:make` takes as `id`."""
    if not find_spec("pettingzoo"):
        return []
    module = import_module("pettingzoo")
    return [str(env_id) for name in ("parallel_registry", "aec_registry") for env_id in getattr(module, name, ())]


def _envpool() -> list[str]:
    return [f"{ENVPOOL}{env_id}" for env_id in import_module("envpool").list_all_envs()] if find_spec("envpool") else []
