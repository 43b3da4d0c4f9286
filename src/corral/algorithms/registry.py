"""Algorithms by name, for the command line, files, checkpoints and Ray Tune.

A name is the short name of a built-in algorithm (`"PPO"`), a short name that `register_algorithm` was given or that an
installed package has as an entry point, or the import path of a config class (`"my_algo:MyConfig"`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corral.core.settings import import_path, path_of
from corral.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig

# Short name -> import path of the config class. A module is imported when its algorithm is asked for.
ALGORITHMS = {
    "PPO": "corral.algorithms.ppo:PPOConfig",
    "APPO": "corral.algorithms.appo:APPOConfig",
    "IMPALA": "corral.algorithms.impala:IMPALAConfig",
    "PQN": "corral.algorithms.pqn:PQNConfig",
    "DQN": "corral.algorithms.dqn:DQNConfig",
    "SAC": "corral.algorithms.sac:SACConfig",
    "TQC": "corral.algorithms.tqc:TQCConfig",
    "CrossQ": "corral.algorithms.crossq:CrossQConfig",
    "TD3": "corral.algorithms.td3:TD3Config",
    "DDPG": "corral.algorithms.td3:DDPGConfig",
    "DreamerV3": "corral.algorithms.dreamerv3:DreamerV3Config",
    "BC": "corral.algorithms.bc:BCConfig",
    "MARWIL": "corral.algorithms.marwil:MARWILConfig",
    "CQL": "corral.algorithms.cql:CQLConfig",
    "IQL": "corral.algorithms.iql:IQLConfig",
}

ENTRY_POINTS = "corral.algorithms"
"""Group of the entry points by which installed packages name their algorithms: `A2C = "my_package.a2c:A2CConfig"`."""

_registered: dict[str, str | type[AlgorithmConfig]] = {}


def register_algorithm(name: str, config: str | type[AlgorithmConfig]) -> None:
    """Give an algorithm a short name in this process, for `--algo`, `algo` in files, and `corral.compat.tune`.

    An installed package gives its algorithms short names in all processes with entry points of the group
    `corral.algorithms`. Checkpoints and run directories hold the import path of the config class instead, so that other
    processes can read them without this call.

    Args:
        name: The short name, such as `"A2C"`. Upper and lower case are the same. A name that was registered before is
            replaced.
        config: The config class of the algorithm, or its import path, which is imported when it is first used.

    Raises:
        ConfigError: A built-in algorithm has the name, the name looks like an import path, or `config` is no config
            class.
    """
    if not isinstance(name, str) or not name.strip() or ":" in name or "." in name:
        raise ConfigError(f"register_algorithm: {name!r} is not a short name: use a word without ':' and '.'.")
    if name.lower() in {known.lower() for known in ALGORITHMS}:
        raise ConfigError(f"register_algorithm: {name!r} is a built-in algorithm: choose another name.")
    if not isinstance(config, str):
        _check_config_class(config, f"register_algorithm: {config!r}")
    for known in [known for known in _registered if known.lower() == name.lower()]:
        del _registered[known]
    _registered[name] = config


def algorithm_names() -> list[str]:
    """Return the short names of all algorithms, built-in ones first."""
    return list(ALGORITHMS | _registered | _installed())


def _installed() -> dict[str, str]:
    """Return import paths by short name of the algorithms of installed packages."""
    from importlib.metadata import entry_points  # which takes time, and most processes ask for built-in names only

    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def _named(name: str) -> str | type[AlgorithmConfig]:
    """Return the config class of a short name, or its import path; a name that is not known is returned unchanged."""
    known = {short.lower(): target for short, target in (_registered | ALGORITHMS).items()}
    if name.lower() in known or ":" in name or "." in name:
        return known.get(name.lower(), name)
    return {short.lower(): target for short, target in _installed().items()}.get(name.lower(), name)


def config_class(algo: str | type[AlgorithmConfig]) -> type[AlgorithmConfig]:
    """Return the config class of an algorithm.

    Args:
        algo: A short name, the import path of a config class, or a config class.

    Raises:
        ConfigError: No algorithm has the name, or the import path names no config class.
    """
    if isinstance(algo, str):
        target = _named(algo)
        if isinstance(target, str):
            return _imported_config_class(algo, target)
        algo = target
    _check_config_class(algo, f"algo {algo!r}")
    return algo


def _imported_config_class(algo: str, path: str) -> type[AlgorithmConfig]:
    if ":" not in path and "." not in path:
        close = nearest_name(algo, algorithm_names())
        raise ConfigError(
            f"unknown algorithm {algo!r}. {'' if close is None else f'Did you mean {close!r}? '}"
            f"Known algorithms: {', '.join(sorted(algorithm_names()))}. An algorithm in a file of your own is named by "
            "the import path of its config class, such as 'my_algo:MyConfig'."
        )
    try:
        found: type[AlgorithmConfig] = import_path(path)
    except ConfigError as error:
        raise ConfigError(f"algo {error}.") from error
    _check_config_class(found, f"algo {path!r}")
    return found


def _check_config_class(found: Any, subject: str) -> None:
    # `AlgorithmConfig` uses this module, so that its subclasses are known by what only they have.
    if not (inspect.isclass(found) and hasattr(found, "group_fields")):
        hint = " Name the config class of the algorithm." if inspect.isclass(found) else ""
        raise ConfigError(f"{subject} is not a subclass of corral.AlgorithmConfig.{hint}")


def name_of(cls: type[AlgorithmConfig]) -> str:
    """Return the name of an algorithm that every process knows.

    Args:
        cls: The config class.

    Returns:
        The short name of a built-in algorithm, or the import path of the config class.
    """
    path = path_of(cls)
    return next((name for name, built_in in ALGORITHMS.items() if built_in == path), path)


def config_from_dict(settings: Mapping[str, Any]) -> AlgorithmConfig:
    """Return the config of the algorithm that `settings["algo"]` names.

    Args:
        settings: What `AlgorithmConfig.to_dict` returned, or any part of it with `algo`.

    Raises:
        ConfigError: There is no `algo`, or a setting is unknown.
    """
    if "algo" not in settings:
        raise ConfigError(
            f"config: 'algo' is missing; one of {', '.join(algorithm_names())}, or the import path of a config class."
        )
    algo = settings["algo"]
    found = config_class(algo if isinstance(algo, type) else str(algo))
    return found.from_dict({group: values for group, values in settings.items() if group != "algo"})
