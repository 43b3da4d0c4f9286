"""Where the named actors of `corral.coordination` are, and the way there from other processes.

The driver's process has a host: the actors that live there, Ray's if Ray is in use, and a thread that serves a socket.
Other processes find its address and key in an environment variable. A process that finds none, such as a Ray worker,
has a host of its own, and so the processes that it starts reach Ray's actors through it.
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
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import cloudpickle

from corral.engines.serialization import portable_error, unpicklable_part
from corral.errors import CoordinationError, SerializationError, nearest

ENVIRONMENT_VARIABLE = "CORRAL_COORDINATION"
"""Tells a process where the actors are: key, host and port with colons between, or `@` and a name for host and port."""

_host: Host | None = None
_making_host = threading.Lock()


def actors() -> Host | Remote:
    """Return what has the actors: this process, or the way to the process that does."""
    global _host
    if _host is None:
        if location := os.environ.get(ENVIRONMENT_VARIABLE):
            return Remote(location)
        with _making_host:
            if _host is None:
                _host = Host()
    # After a fork this is a dead copy of the parent's.
    return _host if _host.pid == os.getpid() else Remote(_host.location)


def environment() -> dict[str, str]:
    """Return what a new process needs in its `os.environ` to reach the actors, those made later too.

    Runners and asynchronous sub-envs are given it; a process that you start yourself is not. Only processes of this
    machine can use it.
    """
    return {ENVIRONMENT_VARIABLE: actors().location}


def _ray() -> Any:
    """Return the module of Ray's actors if Ray is initialised in this process, else `None`."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from corral.engines import ray_actors

    return ray_actors


class _Actor:
    """An object of this process, `None` until it is made, and the lock that its calls take in turn."""

    def __init__(self) -> None:
        self.value: Any = None
        self.lock = threading.RLock()  # its own methods may call it by name


class Host:
    """The actors of this process, the actors of Ray if it is in use, and a thread that serves them to other processes.

    Attributes:
        pid: Id of this process.
        location: What other processes need in `ENVIRONMENT_VARIABLE`.
    """

    def __init__(self) -> None:
        """Listen, and start the thread; it does not keep the process."""
        self.pid = os.getpid()
        self._actors: dict[str, _Actor] = {}
        self._key = secrets.token_hex(16)
        if sys.platform == "linux":
            name = f"corral-{self.pid}-{secrets.token_hex(4)}"  # no file, which could stay behind
            self._listener = Listener(f"\0{name}", backlog=128)
            self.location = f"{self._key}:@{name}"
        else:
            self._listener = Listener(("localhost", 0), backlog=128)
            self.location = ":".join([self._key, *map(str, self._listener.address)])
        threading.Thread(target=self._accept, name="corral-coordination", daemon=True).start()

    # What is asked of it, by this process or another; see `corral.coordination`.

    def create(self, name: str, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make an actor."""
        if name in self._actors:
            raise name_taken(name)
        if (ray := _ray()) is not None:
            ray.create(name, cls, args, kwargs)
            return
        if not isinstance(cls, type):
            raise CoordinationError(f"create({name!r}): expected a class, got {type(cls).__name__} {cls!r}.")
        args, kwargs = _copied((args, kwargs), f"create({name!r}): the constructor's arguments")
        actor = _Actor()
        with actor.lock:  # whoever finds the name now waits until the object is there
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
        """Refuse a name that no actor has."""
        if name not in self._actors:
            self._ray_with(name)

    def call(self, name: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method and return a copy of what it returns."""
        actor = self._actors.get(name)
        if actor is None:
            return self._ray_with(name).call(name, method, args, kwargs)
        args, kwargs = _copied((args, kwargs), f"actor {name!r}, method {method!r}: the arguments")
        with actor.lock:
            if actor.value is None:
                raise self._unknown(name)
            function = getattr(actor.value, method, None)
            if not callable(function):
                raise no_method(name, method, actor.value)
            # The copy is made before the next call can change the original.
            return _copied(function(*args, **kwargs), f"actor {name!r}, method {method!r}: the result")

    def remove(self, name: str) -> None:
        """Forget an actor."""
        if self._actors.pop(name, None) is None:
            self._ray_with(name).remove(name)

    def _ray_with(self, name: str) -> Any:
        """Return the module of Ray's actors, if one of them has this name."""
        ray = _ray()
        if ray is None or not ray.exists(name):
            raise self._unknown(name)
        return ray

    def _unknown(self, name: str) -> CoordinationError:
        ray = _ray()
        known = [*self._actors, *(ray.names() if ray is not None else [])]
        hint = nearest(name, known) if known else f"There is none: coordination.create({name!r}, cls) makes it."
        if ray is not None:
            hint += " Ray's workers do not see actors that were created before ray.init()."
        return CoordinationError(f"no actor is named {name!r}. {hint}")

    # Serving other processes.

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # the client is gone again, or no more files can be opened
                time.sleep(0.01)
                continue
            threading.Thread(target=self._serve, args=[connection], name="corral-coordination", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer one thread of another process until it ends."""
        with connection:
            try:
                # Here and not in the listener, so that a client that stops in the middle holds up nobody.
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
        except BaseException as error:  # it is the caller's, whatever it is
            explains_itself = isinstance(error, (CoordinationError, SerializationError)) and error.__cause__ is None
            where = f"actor {name!r} (process {self.pid})"
            return packed((None, (error, None) if explains_itself else portable_error(error, where)), "")


class Remote:
    """The host of another process.

    Attributes:
        location: Where it is; see `ENVIRONMENT_VARIABLE`.
    """

    # Each thread has a connection of its own, so that none waits for another's call.
    _open = threading.local()

    def __init__(self, location: str) -> None:
        """Connect later, at the first request."""
        self.location = location

    def create(self, name: str, *arguments: Any) -> None:
        """Ask the host to make an actor."""
        self._ask("create", name, *arguments)

    def find(self, name: str) -> None:
        """Ask the host whether there is an actor."""
        self._ask("find", name)

    def call(self, name: str, *arguments: Any) -> Any:
        """Ask the host to call a method."""
        return self._ask("call", name, *arguments)

    def remove(self, name: str) -> None:
        """Ask the host to end an actor."""
        self._ask("remove", name)

    def _ask(self, operation: str, name: str, *arguments: Any) -> Any:
        request = packed((operation, name, *arguments), f"{operation} of actor {name!r}: the request")
        result, failure = pickle.loads(self._exchange(request))
        if failure is not None:
            error, error.__cause__ = failure
            raise error
        return result

    def _exchange(self, request: bytes) -> bytes:
        here = (os.getpid(), self.location)  # a fork has a copy of its parent's connection, which it must not use
        if getattr(self._open, "here", None) != here:
            self._open.connection, self._open.here = self._connect(), here
        connection: Connection = self._open.connection
        try:
            connection.send_bytes(request)
            return connection.recv_bytes()
        except BaseException as error:
            self._open.here = None  # the answer may still come, and nobody must take it for another call's
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
                f"the process that has the actors cannot be reached: it has ended, or {ENVIRONMENT_VARIABLE} is not "
                f"what it gave out ({type(error).__name__}: {error})."
            ) from error


# Errors that are the same for all actors.


def name_taken(name: str) -> CoordinationError:
    """Return the error of making a second actor of a name."""
    return CoordinationError(
        f"create({name!r}): there is an actor of that name. coordination.get({name!r}) returns it; "
        f"coordination.remove({name!r}) ends it, to make another."
    )


def not_made(name: str, problem: str) -> CoordinationError:
    """Return the error of an actor whose constructor raised."""
    return CoordinationError(f"create({name!r}): the constructor raised {problem}")


def no_method(name: str, method: str, value: Any) -> CoordinationError:
    """Return the error of calling what an actor does not have; `dir(value)` lists what it does."""
    known = [known for known in dir(value) if not known.startswith("_")]
    return CoordinationError(f"actor {name!r} has no method {method!r}. {nearest(method, known)}")


# Copies.


def _copied(value: Any, name: str) -> Any:
    """Return a copy, so that no two sides share what one of them changes; across processes it is the same."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        packed(value, name)  # says which part it is, if that cannot be pickled either
        raise SerializationError(f"{name} cannot be copied: {type(error).__name__}: {error}") from error


def packed(value: Any, name: str) -> bytes:
    """Pickle a value.

    Args:
        value: What an actor is given, or gives.
        name: What it is called, for the error.

    Raises:
        SerializationError: Part of it cannot be pickled; the message names the part.
    """
    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:  # a __reduce__ of the user's may raise anything
        raise SerializationError(f"{unpicklable_part(value, name)}. Actors are given copies, and give them.") from error
    return pickled
