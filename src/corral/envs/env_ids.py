"""Ids of envs: the packages that register them, and what to write or to install when an id is unknown."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from corral.core.settings import module_named
from corral.errors import ConfigError, MissingPackageError, nearest_name


class Package(NamedTuple):
    """A package that registers ids when it is imported.

    Attributes:
        pattern: Regular expression that its ids begin with.
        module_name: Name of the module.
        install: What `pip install` takes.
    """

    pattern: str
    module_name: str
    install: str


PACKAGES = (
    Package(
        r"ALE/|\w*(NoFrameskip|Deterministic|-ram)\w*-v|(Pong|Breakout|SpaceInvaders|Qbert)-v",
        "ale_py",
        "corral[atari]",
    ),
    Package(r"Fetch|Hand|Adroit|FrankaKitchen|(Ant|Point)Maze", "gymnasium_robotics", "gymnasium-robotics"),
    Package(r"MiniGrid-|BabyAI-", "minigrid", "minigrid"),
    Package(r"(highway|merge|roundabout|parking|intersection|racetrack)-", "highway_env", "highway-env"),
    Package(r"dm_control/", "shimmy", "shimmy[dm-control]"),
)
EXTRAS = {"ale_py": "corral[atari]", "envpool": "corral[envpool]"}
"""What `pip install` takes to install a module that is named in front of an id."""


def package_of(env_id: str) -> Package | None:
    """Return the known package that registers an id, or `None`."""
    return next((package for package in PACKAGES if re.match(package.pattern, env_id)), None)


def is_of_package(spec: EnvSpec) -> bool:
    """Return whether a spec is registered by the known package of its id, and not by the user under such an id."""
    package = package_of(spec.id)
    return package is not None and str(spec.entry_point).partition(".")[0] == package.module_name


def import_package(env_id: str) -> None:
    """Import the known package that registers an id, if the id is unknown until now and the package is installed.

    Raises:
        ConfigError: The package is installed, and its import fails.
    """
    package = package_of(env_id) if env_id not in gym.registry else None
    if package is not None and find_spec(package.module_name):
        import_module(package.module_name, env_id)


def import_module(module_name: str, env: str) -> Any:
    """Return the module that an env is in.

    Raises:
        ConfigError: The module cannot be imported.
        MissingPackageError: It is not installed, and an extra of Corral installs it.
    """
    try:
        return module_named(module_name, env)
    except ConfigError as error:
        if module_name in EXTRAS:
            remedy = f"Run `pip install '{EXTRAS[module_name]}'`."
            raise MissingPackageError(f"environment: env {error}. {remedy}") from error
        raise ConfigError(f"environment: env {error}.") from error


def is_of_missing_package(env_id: str) -> bool:
    """Return whether the known package that registers an id is not installed."""
    package = package_of(env_id)
    return package is not None and find_spec(package.module_name) is None


def id_hint(env_id: str) -> str:
    """Return a sentence with what to write, or to install, instead of an unknown id."""
    package = package_of(env_id)
    if package is not None and is_of_missing_package(env_id):
        return f"It is in another package: run `pip install '{package.install}'`."
    known = newest_version(env_id) or nearest_name(env_id, gym.registry)
    if known is not None:
        return f"Did you mean {known!r}?"
    module_name, dot, attribute = env_id.rpartition(".")
    if dot and "/" not in env_id:
        return f"If it is an import path, write a colon before the name: '{module_name}:{attribute}'."
    return "gymnasium.pprint_registry() shows all ids; an id of another package is 'package:Name-v0'."


def newest_version(env_id: str) -> str | None:
    """Return the registered id with the same name, in upper or lower case, that has the highest version."""
    name = re.sub(r"-v\d+$", "", env_id).lower()
    same = [known for known in gym.registry.values() if re.sub(r"-v\d+$", "", known.id).lower() == name]
    return max(same, key=lambda spec: spec.version or 0).id if same else None
