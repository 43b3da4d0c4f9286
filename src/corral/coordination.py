"""Named actors: objects that envs, callbacks and the driver reach by name, wherever each of them runs.

    coordination.create("counter", Counter)       # in the driver, or anywhere else
    coordination.get("counter").call("inc", 1)    # in an env or a callback

Where Ray is initialised, an actor is a Ray actor of that name. Otherwise the object lives in the driver's process,
which calls it directly, while other processes go through a socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.engines.actors import ENVIRONMENT_VARIABLE, actors, environment
from corral.errors import CoordinationError

__all__ = ["ENVIRONMENT_VARIABLE", "ActorHandle", "create", "environment", "get", "remove"]


@dataclass(frozen=True)
class ActorHandle:
    """An actor by its name. It can be pickled, and works wherever the actor can be reached.

    Attributes:
        name: The actor's.
    """

    name: str

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, wait, and return what it returns.

        Calls of one actor run one after another, so a method is atomic; calls of different actors do not wait for each
        other. Arguments and results are copies, in the driver too.

        Args:
            method: Its name.
            *args: The method's.
            **kwargs: The method's.

        Raises:
            CoordinationError: There is no such actor or method (the nearest is named), or it cannot be reached.
            SerializationError: An argument or the result cannot be copied.
            Exception: What the method raised; from another process, with the traceback there as a note.
        """
        return actors().call(self.name, method, args, kwargs)


def create(name: str, cls: type, /, *args: Any, **kwargs: Any) -> ActorHandle:
    """Make an actor, `cls(*args, **kwargs)`, and return a handle.

    It lives until `remove`, or the end of the driver; a Ray actor made in a Ray worker ends with that worker.

    Args:
        name: One that no actor has yet.
        cls: A class. With Ray it may be one that `ray.remote` decorated.
        *args: The constructor's.
        **kwargs: The constructor's.

    Raises:
        CoordinationError: The name is taken, or the constructor raised.
        SerializationError: The class or an argument cannot be copied.
    """
    if not (isinstance(name, str) and name):
        raise CoordinationError(f"create: the name of an actor is a text that is not empty, got {name!r}.")
    actors().create(name, cls, args, kwargs)
    return ActorHandle(name)


def get(name: str) -> ActorHandle:
    """Return a handle on the actor of this name.

    Raises:
        CoordinationError: There is none; the nearest name is given, or all.
    """
    actors().find(name)
    return ActorHandle(name)


def remove(name: str) -> None:
    """End the actor of this name. A call under way continues to its end, unless Ray runs it: then it fails.

    Raises:
        CoordinationError: There is none; the nearest name is given, or all.
    """
    actors().remove(name)
