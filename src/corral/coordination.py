"""Named actors: objects that envs, callbacks and the driver call by name, in any process.

    coordination.create("counter", Counter)       # in the driver, or in another process
    coordination.get("counter").call("inc", 1)    # in an env or a callback
    coordination.get("counter").call_async("inc", 1)  # without waiting; returns a future

If Ray is initialised, an actor is a Ray actor with this name. Otherwise, the object is in the driver's process. The
driver calls it directly, and other processes call it through a socket.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from corral.engines.actors import ENVIRONMENT_VARIABLE, actors, copy_value, environment, queue_of
from corral.errors import CoordinationError

__all__ = ["ENVIRONMENT_VARIABLE", "ActorHandle", "create", "environment", "get", "remove"]


@dataclass(frozen=True)
class ActorHandle:
    """Handle of an actor, which calls the actor by name. It can be pickled and used in any process of the run.

    Attributes:
        name: Name of the actor.
    """

    name: str

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, wait, and return the result.

        Calls of one actor run one after another, so a method is atomic. Calls of different actors do not wait for each
        other. Arguments and results are copies, in the driver too.

        Args:
            method: Name of the method.
            *args: Positional arguments of the method.
            **kwargs: Keyword arguments of the method.

        Raises:
            CoordinationError: There is no such actor or method (the message suggests the nearest name), or the actor
                cannot be reached.
            SerializationError: An argument or the result cannot be copied.
            Exception: Exception of the method; if the actor is in another process, with the remote traceback as a note.
        """
        return actors().call(self.name, method, args, kwargs)

    def call_async(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method without waiting, and return a future, whose `result()` waits and is what `call` returns.

        Calls of one process to one actor run in the order in which they were made. Arguments are copied at once.

        Args:
            method: Name of the method.
            *args: Positional arguments of the method.
            **kwargs: Keyword arguments of the method.

        Raises:
            SerializationError: An argument cannot be copied.
        """
        args, kwargs = copy_value((args, kwargs), f"actor {self.name!r}, method {method!r}: the arguments")
        return queue_of(self.name).submit(self.call, method, *args, **kwargs)


def create(name: str, cls: type, /, *args: Any, **kwargs: Any) -> ActorHandle:
    """Make an actor, `cls(*args, **kwargs)`, and return a handle.

    The actor exists until `remove`, or until the driver ends. A Ray actor made in a Ray worker ends with this worker.

    Args:
        name: New name, which no other actor has.
        cls: Class of the actor; with Ray, it may be decorated with `ray.remote`.
        *args: Positional arguments of the constructor.
        **kwargs: Keyword arguments of the constructor.

    Raises:
        CoordinationError: The name is taken, or the constructor raised.
        SerializationError: The class or an argument cannot be copied.
    """
    if not (isinstance(name, str) and name):
        raise CoordinationError(f"create: the name of an actor must be a non-empty str, got {name!r}.")
    actors().create(name, cls, args, kwargs)
    return ActorHandle(name)


def get(name: str) -> ActorHandle:
    """Return a handle of the actor with this name.

    Raises:
        CoordinationError: No actor has this name; the message suggests the nearest name.
    """
    actors().find(name)
    return ActorHandle(name)


def remove(name: str) -> None:
    """End the actor with this name. A running call continues to its end; if Ray runs the call, the call fails.

    Raises:
        CoordinationError: No actor has this name; the message suggests the nearest name.
    """
    actors().remove(name)
