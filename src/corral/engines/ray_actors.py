"""Named actors of `corral.coordination` in Ray: ordinary Ray actors, which `ray.get_actor` finds too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from corral.engines.actors import name_taken, no_method, not_made, packed
from corral.errors import CoordinationError

REMOVAL_TIMEOUT_S = 10.0

# Handles of the actors that were made in this process, by name: Ray ends an actor when its first handle is deleted.
_made_here: dict[str, Any] = {}


def create(name: str, cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Make an actor and wait for its constructor. The actor reserves no CPU, unless the user has decorated the class.

    Raises:
        CoordinationError: The name is taken, or the constructor raised.
    """
    actor_class = ray.remote(num_cpus=0)(cls) if isinstance(cls, type) else cls
    try:
        actor = actor_class.options(name=name).remote(*args, **kwargs)
    except ValueError as error:
        raise (name_taken(name) if exists(name) else error) from None
    try:
        ray.get(actor.__ray_ready__.remote())
    except RayActorError as error:
        _end(name, actor)
        raise not_made(name, str(error).strip().splitlines()[-1]) from error
    _made_here[name] = actor


def exists(name: str) -> bool:
    """Return whether an actor with this name is in the namespace of this job."""
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def names() -> list[str]:
    """Return the names of all actors in the namespace of this job."""
    found: list[str] = ray.util.list_named_actors()
    return found


def call(name: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of an actor, wait, and return the result.

    Raises:
        CoordinationError: The actor has no such method, or the actor has ended.
        Exception: Exception of the method, with the traceback in the actor's process as a note.
    """
    actor = ray.get_actor(name)
    if method not in dir(actor):
        raise no_method(name, method, actor)
    try:
        return ray.get(getattr(actor, method).remote(*args, **kwargs))
    except RayTaskError as error:
        cause: BaseException = error.cause
        cause.add_note(f"In actor {name!r}:\n{error}")
        raise cause from None
    except TypeError:  # raised in this process: the arguments do not fit the method, or cannot be pickled
        packed((args, kwargs), f"actor {name!r}, method {method!r}: the arguments")
        raise
    except RayActorError as error:
        raise CoordinationError(f"actor {name!r} ended during the call of {method!r}: {error}") from error


def remove(name: str) -> None:
    """End an actor, and wait until its name is free."""
    _end(name, ray.get_actor(name))
    _made_here.pop(name, None)


def _end(name: str, actor: Any) -> None:
    ray.kill(actor)
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    while exists(name):
        if time.monotonic() > deadline:
            raise CoordinationError(f"actor {name!r} has ended, but Ray keeps its name.")
        time.sleep(0.005)
