"""The host of the named actors of `corral.coordination`, and the client with which other processes reach the host.

The process of the driver has a host. The host holds the actors of this process, forwards calls to the actors of Ray if
Ray is in use, and serves other processes through a socket in a thread. Other processes find the address and the key of
the host in an environment variable. A process without this variable, such as a Ray worker, makes its own host. The
processes that it starts reach the actors of Ray through this host.
"""

from __future__ import annotations

import copy
import os
import pickle
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import cloudpickle

from corral.engines.serialization import portable_error, unpicklable_part
from corral.errors import CoordinationError, SerializationError, nearest

ENVIRONMENT_VARIABLE = "CORRAL_COORDINATION"
"""Variable that tells a process where the host is: `key:host:port`, or `key:@name` with the name of a Linux socket."""

_host: Host | None = None
_making_host = threading.Lock()


def actors() -> Host | Remote:
    """Return the host of the actors if it is in this process, else a client of the host in another process."""
    global _host
    if _host is None:
        if location := os.environ.get(ENVIRONMENT_VARIABLE):
            return Remote(location)
        with _making_host:
            if _host is None:
                _host = Host()
    # After a fork, `_host` is a copy of the parent's host, and its thread does not run here.
    return _host if _host.pid == os.getpid() else Remote(_host.location)


def environment() -> dict[str, str]:
    """Return the environment variables that a new process needs to reach the actors, also actors that are made later.

    Runners and asynchronous sub-envs receive these variables. A process that you start yourself does not: add them to
    its `os.environ`. Only processes on this machine can use them.
    """
    return {ENVIRONMENT_VARIABLE: actors().location}


_queues: dict[tuple[int, str], ThreadPoolExecutor] = {}


def queue_of(name: str) -> ThreadPoolExecutor:
    """Return the thread that makes the calls of this process to an actor for which nobody waits, in their order."""
    key = (os.getpid(), name)  # after a fork, the threads of the parent do not run here
    with _making_host:
        if key not in _queues:
            _queues[key] = ThreadPoolExecutor(1, thread_name_prefix=f"corral-calls-{name}")
        return _queues[key]


def _ray() -> Any:
    """Return the module of Ray's actors if Ray is initialised in this process, else `None`."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from corral.engines import ray_actors

    return ray_actors


class _Actor:
    """An object of this process, `None` until it is made, and the lock that allows one call at a time."""

    def __init__(self) -> None:
        self.value: Any = None
        self.lock = threading.RLock()  # a method of the actor may call the actor by name


class Host:
    """The actors of this process, the actors of Ray if it is in use, and a thread that serves them to other processes.

    Attributes:
        pid: Id of this process.
        location: Value of `ENVIRONMENT_VARIABLE` for other processes.
    """

    def __init__(self) -> None:
        """Listen on a socket, and start the thread. The thread does not keep the process alive."""
        self.pid = os.getpid()
        self._actors: dict[str, _Actor] = {}
        self._key = secrets.token_hex(16)
        if sys.platform == "linux":
            name = f"corral-{self.pid}-{secrets.token_hex(4)}"  # an abstract socket leaves no file behind
            self._listener = Listener(f"\0{name}", backlog=128)
            self.location = f"{self._key}:@{name}"
        else:
            self._listener = Listener(("localhost", 0), backlog=128)
            self.location = ":".join([self._key, *map(str, self._listener.address)])
        threading.Thread(target=self._accept, name="corral-coordination", daemon=True).start()

    # Requests of this process or of another process; see `corral.coordination`.

    def create(self, name: str, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make an actor."""
        if name in self._actors:
            raise name_taken(name)
        if (ray := _ray()) is not None:
            ray.create(name, cls, args, kwargs)
            return
        if not isinstance(cls, type):
            raise CoordinationError(f"create({name!r}): expected a class, got {type(cls).__name__} {cls!r}.")
        args, kwargs = copy_value((args, kwargs), f"create({name!r}): the constructor's arguments")
        actor = _Actor()
        with actor.lock:  # a caller that finds the name now waits until the object is made
            if self._actors.setdefault(name, actor) is not actor:
                raise name_taken(name)
            try:
                actor.value = cls(*args, **kwargs)
            except Exception as error:
                raise not_made(name, f"{type(error).__name__}: {error}") from error
            finally:
                if actor.value is None:
                    del self._actors[name]

    def find(self, name: str) -> None:
        """Raise a `CoordinationError` if no actor has this name."""
        if name not in self._actors:
            self._ray_with(name)

    def call(self, name: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method and return a copy of what it returns."""
        actor = self._actors.get(name)
        if actor is None:
            return self._ray_with(name).call(name, method, args, kwargs)
        args, kwargs = copy_value((args, kwargs), f"actor {name!r}, method {method!r}: the arguments")
        with actor.lock:
            if actor.value is None:
                raise self._unknown(name)
            function = getattr(actor.value, method, None)
            if not callable(function):
                raise no_method(name, method, actor.value)
            # The copy is made before the next call can change the original.
            return copy_value(function(*args, **kwargs), f"actor {name!r}, method {method!r}: the result")

    def remove(self, name: str) -> None:
        """Remove an actor."""
        if self._actors.pop(name, None) is None:
            self._ray_with(name).remove(name)

    def _ray_with(self, name: str) -> Any:
        """Return the module of Ray's actors if one of the actors has this name, else raise an error."""
        ray = _ray()
        if ray is None or not ray.exists(name):
            raise self._unknown(name)
        return ray

    def _unknown(self, name: str) -> CoordinationError:
        ray = _ray()
        known = [*self._actors, *(ray.names() if ray is not None else [])]
        hint = nearest(name, known) if known else f"There are no actors: coordination.create({name!r}, cls) makes it."
        if ray is not None:
            hint += " Ray's workers do not see actors that were created before ray.init()."
        return CoordinationError(f"no actor is named {name!r}. {hint}")

    # Serving other processes.

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # the client has closed the connection, or no more files can be opened
                time.sleep(0.01)
                continue
            threading.Thread(target=self._serve, args=[connection], name="corral-coordination", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer the requests of one thread of another process until the thread ends."""
        with connection:
            try:
                # Authenticate here and not in the listener: a client that stops in the middle must not block others.
                deliver_challenge(connection, self._key.encode())
                answer_challenge(connection, self._key.encode())
                while True:
                    connection.send_bytes(self._answer(connection.recv_bytes()))
            except (EOFError, OSError, AuthenticationError):
                return

    def _answer(self, request: bytes) -> bytes:
        name = "?"
        try:
            operation, name, *arguments = pickle.loads(request)
            result = getattr(self, operation)(name, *arguments)
            return packed((result, None), f"the result of actor {name!r}")
        except BaseException as error:  # every exception goes to the caller
            explains_itself = isinstance(error, (CoordinationError, SerializationError)) and error.__cause__ is None
            where = f"actor {name!r} (process {self.pid})"
            return packed((None, (error, None) if explains_itself else portable_error(error, where)), "")


class Remote:
    """Client of the host in another process.

    Attributes:
        location: Key and address of the host; see `ENVIRONMENT_VARIABLE`.
    """

    # Each thread has its own connection, so that no thread waits for the call of another thread.
    _open = threading.local()

    def __init__(self, location: str) -> None:
        """Keep the location; the first request connects."""
        self.location = location

    def create(self, name: str, *arguments: Any) -> None:
        """Ask the host to make an actor."""
        self._ask("create", name, *arguments)

    def find(self, name: str) -> None:
        """Ask the host to raise an error if no actor has this name."""
        self._ask("find", name)

    def call(self, name: str, *arguments: Any) -> Any:
        """Ask the host to call a method, and return the result."""
        return self._ask("call", name, *arguments)

    def remove(self, name: str) -> None:
        """Ask the host to remove an actor."""
        self._ask("remove", name)

    def _ask(self, operation: str, name: str, *arguments: Any) -> Any:
        request = packed((operation, name, *arguments), f"{operation} of actor {name!r}: the request")
        result, failure = pickle.loads(self._exchange(request))
        if failure is not None:
            error, error.__cause__ = failure
            raise error
        return result

    def _exchange(self, request: bytes) -> bytes:
        here = (os.getpid(), self.location)  # a forked process must not use its copy of the parent's connection
        if getattr(self._open, "here", None) != here:
            self._open.connection, self._open.here = self._connect(), here
        connection: Connection = self._open.connection
        try:
            connection.send_bytes(request)
            return connection.recv_bytes()
        except BaseException as error:
            self._open.here = None  # the answer may still come, and must not be read as the answer to a later call
            connection.close()
            if isinstance(error, (EOFError, OSError)):
                raise CoordinationError(f"the process that has the actors ended: {error!r}.") from error
            raise

    def _connect(self) -> Connection:
        try:
            key, host, *port = self.location.split(":")
            address: Any = (host, int(port[0])) if port else f"\0{host[1:]}"
            return Client(address, authkey=key.encode())
        except (EOFError, OSError, ValueError, AuthenticationError) as error:
            raise CoordinationError(
                f"the process that has the actors cannot be reached: it has ended, or {ENVIRONMENT_VARIABLE} does not "
                f"have the value of that process ({type(error).__name__}: {error})."
            ) from error


# Errors that are the same for all actors.


def name_taken(name: str) -> CoordinationError:
    """Return the error for a second actor with the same name."""
    return CoordinationError(
        f"create({name!r}): an actor with this name exists. coordination.get({name!r}) returns it; "
        f"coordination.remove({name!r}) ends it, so that you can create another."
    )


def not_made(name: str, problem: str) -> CoordinationError:
    """Return the error for an actor whose constructor raised."""
    return CoordinationError(f"create({name!r}): the constructor raised {problem}")


def no_method(name: str, method: str, value: Any) -> CoordinationError:
    """Return the error for a call of a method that an actor does not have; `dir(value)` must list its methods."""
    known = [known for known in dir(value) if not known.startswith("_")]
    return CoordinationError(f"actor {name!r} has no method {method!r}. {nearest(method, known)}")


# Copies.


def copy_value(value: Any, name: str) -> Any:
    """Return a copy, so that the actor and its caller share no objects, as if they were in different processes."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        packed(value, name)  # its error names the part, if the part cannot be pickled either
        raise SerializationError(f"{name} cannot be copied: {type(error).__name__}: {error}") from error


def packed(value: Any, name: str) -> bytes:
    """Return a pickled value.

    Args:
        value: Value that an actor receives or returns.
        name: Name of the value for the error.

    Raises:
        SerializationError: A part of the value cannot be pickled; the message names the part.
    """
    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:  # the user's __reduce__ may raise anything
        raise SerializationError(f"{unpicklable_part(value, name)}. Actors receive and return copies.") from error
    return pickled
