"""Refuses one env object in several places, each of which would reset and step it under the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

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
    """Refuse an env that an open vector env of this process steps.

    Raises:
        ConfigError: One does; the message says what to write.
    """
    inner = find_innermost(env)
    owner = _owners.get(id(inner))
    if owner is not None and not owner.closed and any(find_innermost(each) is inner for each in _parts(owner)):
        raise ConfigError(
            f"env {name!r}: its factory returned an env object that is in use in this process already, such as by the "
            f"envs for training. {_remedy(env)}"
        )


def note_owner(owner: VectorEnv[Any, Any, Any]) -> None:
    """Note the envs that a vector env steps."""
    for env in _parts(owner):
        _owners[id(find_innermost(env))] = owner


def _parts(owner: VectorEnv[Any, Any, Any]) -> Sequence[Any]:
    return getattr(owner, "envs", (owner,))


def _remedy(env: Any) -> str:
    return (
        f"Make a new env in each call, as in lambda env_config: {describe_making(env)}. Only "
        "evaluate_policy(policy, env) takes an env that is made already."
    )
