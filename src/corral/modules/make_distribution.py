"""The action distribution of a module: by the action space, or a custom class."""

from __future__ import annotations

import inspect
from typing import Any

from gymnasium import spaces

from corral.core.settings import import_path
from corral.errors import ConfigError
from corral.modules.distributions import UNSCALED, ActionDistribution, action_distribution
from corral.modules.joint_distribution import Joint


def make_distribution(
    space: spaces.Space[Any],
    action_bounds: str = "clip",
    action_parts: str = "independent",
    custom: type[ActionDistribution] | str | None = None,
) -> ActionDistribution:
    """Return the distribution of an action space.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, a floating-point Box, or a Dict or Tuple of these.
        action_bounds: `"clip"` or `"squash"`, for a Box: see `DiagGaussian` and `SquashedGaussian`.
        action_parts: `"independent"` or `"autoregressive"`, for a Dict or Tuple: see `Joint`.
        custom: A subclass of `ActionDistribution`, or its import path, which is called with the space instead. Without
            `normalize_actions` it is also called with `scaled` and `clipped`, as `DiagGaussian` is.

    Raises:
        ConfigError: No distribution fits the space, a setting has another value, or the class is no distribution.
    """
    if action_parts not in ("independent", "autoregressive"):
        raise ConfigError(f"model_config: action_parts is 'independent' or 'autoregressive', not {action_parts!r}.")
    if custom is not None:
        if action_parts == "autoregressive":
            raise ConfigError(
                "model_config: action_parts='autoregressive' has no effect on a custom action_distribution: leave one "
                "of them out."
            )
        return _custom_distribution(custom, space, action_bounds)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return Joint(space, action_bounds, autoregressive=action_parts == "autoregressive")
    if action_parts == "autoregressive":
        raise ConfigError(
            f"model_config: action_parts='autoregressive' is for Dict and Tuple actions, and the module has {space}: "
            "leave it out. With several agents, Tuple actions whose parts are all of one kind are joined to one plain "
            "space: give a Dict in place of it."
        )
    return action_distribution(space, action_bounds)


def _custom_distribution(given: Any, space: spaces.Space[Any], action_bounds: str) -> ActionDistribution:
    try:
        cls = import_path(given) if isinstance(given, str) else given
    except ConfigError as error:
        raise ConfigError(f"model_config: action_distribution {error}.") from error
    if not (inspect.isclass(cls) and issubclass(cls, ActionDistribution)):
        raise ConfigError(
            f"model_config: action_distribution={given!r} must be a subclass of "
            "corral.modules.distributions.ActionDistribution, or its import path."
        )
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(f"model_config: action_distribution {cls.__name__} must define {', '.join(missing)}.")
    settings = _settings_of_bounds(cls, action_bounds)
    make: Any = cls
    try:
        found: ActionDistribution = make(space, **settings)
    except Exception as error:
        raise ConfigError(
            f"model_config: action_distribution {cls.__name__} raised {type(error).__name__} for the action space "
            f"{space}: {error}."
        ) from error
    names = ("num_inputs", "num_noise", "action_shape", "action_dtype")
    if missing := [name for name in names if not hasattr(found, name)]:
        raise ConfigError(f"model_config: {cls.__name__}.__init__(space) must set {', '.join(missing)}.")
    return found


def _settings_of_bounds(cls: type[ActionDistribution], action_bounds: str) -> dict[str, bool]:
    """Return the arguments of a custom class for bounds of actions that are not the default.

    Raises:
        ConfigError: The class does not take them, so that the setting would have no effect.
    """
    if action_bounds in UNSCALED:
        if {"scaled", "clipped"} <= inspect.signature(cls).parameters.keys():
            return {"scaled": False, "clipped": action_bounds == "clip_unscaled"}
        raise ConfigError(
            f"normalize_actions=False has no effect on action_distribution {cls.__name__}: let its __init__ take "
            "scaled and clipped, as corral.modules.distributions.DiagGaussian does, or leave one of the two out."
        )
    if action_bounds != "clip":
        raise ConfigError(
            f"model_config: action_bounds={action_bounds!r} has no effect on action_distribution {cls.__name__}: leave "
            "one of them out."
        )
    return {}
