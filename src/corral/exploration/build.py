"""Functions that make explorations from an `exploration_config`: a type (name, import path or class) and settings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gymnasium import spaces

from corral.core.settings import check_names, import_path
from corral.errors import ConfigError, nearest
from corral.exploration.base import Exploration

if TYPE_CHECKING:
    from corral.core.config import ExplorationConfig

# Module of each built-in type, by name; the module is imported when its type is used.
BUILT_IN = {
    "StochasticSampling": "corral.exploration.base",
    "Random": "corral.exploration.base",
    "EpsilonGreedy": "corral.exploration.epsilon",
    "PerWorkerEpsilonGreedy": "corral.exploration.epsilon",
    "SoftQ": "corral.exploration.epsilon",
    "GaussianNoise": "corral.exploration.noise",
    "PerWorkerGaussianNoise": "corral.exploration.noise",
    "OrnsteinUhlenbeckNoise": "corral.exploration.noise",
    "PerWorkerOrnsteinUhlenbeckNoise": "corral.exploration.noise",
    "ParameterNoise": "corral.exploration.parameter_noise",
    "Curiosity": "corral.exploration.curiosity",
    "RND": "corral.exploration.distillation",
    "RE3": "corral.exploration.state_entropy",
    "ThompsonSampling": "corral.exploration.bandits",
    "UpperConfidenceBound": "corral.exploration.bandits",
}

# Arguments that the runner gives; they are not settings.
_GIVEN = frozenset(inspect.signature(Exploration.__init__).parameters)


def exploration_class(kind: Any) -> type[Exploration]:
    """Return the exploration class for the key `type` of an `exploration_config`.

    Args:
        kind: Name of a built-in type, import path such as `"package.module:Name"`, or class.

    Raises:
        ConfigError: `kind` is not an exploration class, or does not name one.
    """
    if isinstance(kind, str) and kind in BUILT_IN:
        found = getattr(importlib.import_module(BUILT_IN[kind]), kind)
    elif isinstance(kind, str) and ("." in kind or ":" in kind):
        try:
            found = import_path(kind)
        except ConfigError as error:
            raise ConfigError(f"exploration_config: type {error}.") from error
    elif isinstance(kind, str):
        raise ConfigError(f"exploration_config: unknown type {kind!r}. {nearest(kind, BUILT_IN)}")
    else:
        found = kind
    if not (inspect.isclass(found) and issubclass(found, Exploration)):
        raise ConfigError(f"exploration_config: type {found!r} is not a subclass of corral.Exploration.")
    if found.get_exploration_action is Exploration.get_exploration_action:
        raise ConfigError(f"exploration_config: {found.__name__} must define get_exploration_action.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(vars(found)["__abstractmethods__"]))
        raise ConfigError(f"exploration_config: {found.__name__} is abstract: a subclass must define {missing}.")
    return found


def settings_of(cls: type[Exploration]) -> dict[str, Any]:
    """Return the default of each setting of a type, by name; `inspect.Parameter.empty` for required settings."""
    settings: dict[str, Any] = {}
    for owner in cls.__mro__:
        if owner is Exploration:
            break
        if "__init__" not in vars(owner):
            continue
        parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
        for parameter in parameters:
            if (
                parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
                and parameter.name not in _GIVEN
            ):
                settings.setdefault(parameter.name, parameter.default)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return settings


def resolved(exploration_config: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return an `exploration_config` with a type; settings of the default's type that it leaves out are the default's.

    A schedule that it gives takes the place of the default's parts of this schedule, and the other way round.
    """
    cls = exploration_class(default["type"])
    if exploration_class(exploration_config.get("type", cls)) is not cls:
        return dict(exploration_config)
    hidden: set[str] = set()
    for schedule, parts in cls.schedules.items():
        if exploration_config.get(schedule) is not None:
            hidden.update(parts)
        elif any(part in exploration_config for part in parts):
            hidden.add(schedule)
    return {**{name: value for name, value in default.items() if name not in hidden}, **exploration_config}


def check_exploration(config: ExplorationConfig, action_space: spaces.Space[Any] | None = None) -> None:
    """Refuse an exploration that does not fit the algorithm, or the action space if the space is known.

    Raises:
        ConfigError: The type does not fit, and the message names types that fit; or a setting is unknown or missing.
    """
    kind, settings = _split(config)
    cls = exploration_class(kind)
    accepted = settings_of(cls)
    check_names(f"exploration_config of {cls.__name__}", settings, accepted, list_known=True)
    _check_schedules(cls, settings)
    missing = [
        name for name, default in accepted.items() if default is inspect.Parameter.empty and name not in settings
    ]
    if missing:
        raise ConfigError(f"exploration_config: {cls.__name__} needs {', '.join(missing)}.")
    if config.ON_POLICY and not cls.on_policy:
        fitting = [name for name in BUILT_IN if exploration_class(name).on_policy]
        raise ConfigError(
            f"exploration_config: {config.algo_name} learns from actions of its own policy only, and {cls.__name__} "
            f"chooses other actions: use {', '.join(fitting)}."
        )
    _check_spaces(config, cls, settings, action_space)


def _check_schedules(cls: type[Exploration], settings: Mapping[str, Any]) -> None:
    """Refuse a schedule together with its parts."""
    for schedule, parts in cls.schedules.items():
        if settings.get(schedule) is not None and (given := [part for part in parts if part in settings]):
            raise ConfigError(
                f"exploration_config of {cls.__name__}: {schedule}={settings[schedule]!r:.80} replaces "
                f"{', '.join(given)}: give the schedule, or its parts."
            )


def _check_spaces(
    config: ExplorationConfig,
    cls: type[Exploration],
    settings: Mapping[str, Any],
    action_space: spaces.Space[Any] | None,
) -> None:
    """Refuse a type, or a setting of it, that has no use for the action space."""
    for name, needed in cls.for_actions.items() if action_space is not None else ():
        if name in settings and not isinstance(action_space, needed):
            raise ConfigError(
                f"exploration_config of {cls.__name__}: {name}={settings[name]!r} has no effect on actions in "
                f"{action_space}: leave it out."
            )
    if action_space is not None and not isinstance(action_space, cls.action_spaces):
        fitting = [
            name
            for name in BUILT_IN
            if isinstance(action_space, (found := exploration_class(name)).action_spaces)
            and (found.on_policy or not config.ON_POLICY)
        ]
        raise ConfigError(
            f"exploration_config: {cls.__name__} needs the action space {_names(cls.action_spaces)}, and the env has "
            f"{action_space}: use {', '.join(fitting)}."
        )


def make_exploration(config: ExplorationConfig, action_space: spaces.Space[Any], **given: Any) -> Exploration:
    """Return the exploration of a config.

    Args:
        config: Config of the algorithm.
        action_space: Action space of one sub-env.
        **given: Further arguments of `Exploration.__init__`.

    Raises:
        ConfigError: A setting is unknown, or does not fit the algorithm or the action space.
    """
    check_exploration(config, action_space)
    kind, settings = _split(config)
    cls = exploration_class(kind)
    arguments = {"policy_config": config.origin or config, "framework": "torch", "num_workers": 0, "worker_index": 0}
    arguments |= given
    exploration = cls.__new__(cls)
    vars(exploration).update(given, config=config)  # for a constructor that does not take all of it
    exploration.__init__(action_space, **_taken_by(cls, arguments), **settings)  # type: ignore[misc]
    return exploration


def _taken_by(cls: type[Exploration], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the constructor of a class takes, which may name some and have no `**kwargs`."""
    parameters = inspect.signature(cls.__init__).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def make_sub_exploration(exploration: Exploration, sub_config: Mapping[str, Any] | None) -> Exploration:
    """Return an exploration to which another exploration delegates; `None` as config means the algorithm's default.

    Raises:
        ConfigError: It is no dict, or a setting is unknown, or does not fit the algorithm or the action space.
    """
    if not isinstance(sub_config, Mapping | None):
        raise ConfigError(
            f"exploration_config of {type(exploration).__name__}: sub_exploration={sub_config!r} must be a dict, such "
            "as {'type': 'EpsilonGreedy'}."
        )
    config = exploration.config.copy(exploration_config=dict(sub_config or {}))
    return make_exploration(
        config,
        exploration.action_space,
        model=exploration.model,
        inference=exploration.inference,
        num_workers=exploration.num_workers,
        worker_index=exploration.worker_index,
        num_envs=exploration.num_envs,
        rng=exploration.rng,
    )


def _split(config: ExplorationConfig) -> tuple[Any, dict[str, Any]]:
    settings = resolved(config.exploration_config, config.default_exploration)
    return settings.pop("type"), settings


def _names(classes: tuple[type, ...]) -> str:
    return " or ".join(cls.__name__ for cls in classes)
