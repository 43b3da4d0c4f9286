"""Refuses one env object in several places, each of which would reset and step it under the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import gymnasium as gym
from gymnasium.vector import VectorEnv

from corral.envs.adapted_vector import AdaptedVectorEnv
from corral.envs.pettingzoo_env import FromPettingZoo
from corral.errors import ConfigError

# Vector envs of this process by the `id` of the innermost objects that they step.
_owners: WeakValueDictionary[int, VectorEnv[Any, Any, Any]] = WeakValueDictionary()


def find_innermost(env: Any) -> Any:
    """Return the object within all wrappers of an env or vector env, wrappers of other libraries included."""
    inner = env.unwrapped
    while isinstance(inner, (FromPettingZoo, AdaptedVectorEnv)):
        inner = getattr(inner.env, "unwrapped", inner.env)
    return inner


def describe_making(env: Any) -> str:
    """Return the expression that makes such an env."""
    spec = getattr(env, "spec", None)
    return f"gymnasium.make({spec.id!r})" if spec is not None else f"{type(find_innermost(env)).__name__}(...)"


def refuse_same_object(envs: Sequence[Any], name: str) -> None:
    """Refuse envs of which two are the same object within their wrappers.

    Raises:
        ConfigError: Two are the same; the message says what to write.
    """
    if len({id(find_innermost(env)) for env in envs}) < len(envs):
        raise ConfigError(
            f"env {name!r}: its factory returned the same env object again, so several sub-envs would reset and step "
            f"one env. {_remedy(envs[0])}"
        )


def refuse_owned(env: Any, name: str) -> None:
    """Refuse an env or vector env that, or a sub-env of which, an open vector env of this process steps.

    Raises:
        ConfigError: One does, or two sub-envs are the same object; the message says what to write.
    """
    parts = _parts(env)
    if len({*map(id, parts)}) < len(parts):
        raise ConfigError(
            f"env {name!r}: two sub-envs of its vector env are the same object, which both would reset and step. "
            f"Make a new env in each function that the vector env is given."
        )
    for part in parts:
        owner = _owners.get(id(part))
        if owner is not None and not owner.unwrapped.closed and any(each is part for each in _parts(owner)):
            raise ConfigError(
                f"env {name!r}: its factory returned an env object that is in use in this process already, such as by "
                f"the envs for training. {_remedy(env)}"
            )


def note_owner(owner: VectorEnv[Any, Any, Any]) -> None:
    """Note the envs that a vector env steps."""
    if owner.unwrapped.closed and not isinstance(owner.unwrapped, gym.vector.AsyncVectorEnv):
        owner.unwrapped.closed = False  # the check closed it, and the factory returned the same object again
    for part in _parts(owner):
        _owners[id(part)] = owner


def _parts(env: Any) -> list[Any]:
    """Return the innermost objects of an env or vector env and of its sub-envs in this process."""
    inner = find_innermost(env)
    found = getattr(inner, "envs", ()) if isinstance(env, VectorEnv) else ()
    sub_envs = found if isinstance(found, (list, tuple)) else ()
    return [inner, *(find_innermost(sub_env) for sub_env in sub_envs if hasattr(sub_env, "unwrapped"))]


def _remedy(env: Any) -> str:
    return (
        f"Make a new env in each call, as in lambda env_config: {describe_making(env)}. Only "
        "evaluate_policy(policy, env) takes an env that is made already."
    )
