"""The Ray actor that holds a worker, and the values that it receives and returns.

Values are packed in the same way as in the process engine: the receiver owns its arrays, and the same values can be
pickled. Ray carries the packed buffers.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import ray.cloudpickle

from corral.engines.local import call_method, make_worker
from corral.engines.process_group_guard import guard_this_process
from corral.engines.serialization import Frames, pack, portable_error, unpack
from corral.engines.worker_logs import Record, WorkerLog
from corral.errors import SerializationError

Answer = tuple[bool, list[pickle.PickleBuffer], list[Record]]


class Parcel:
    """A value that is sent to an actor. The actor receives it unpacked.

    The value is packed while Ray pickles it, not before. So Ray sees the actor handles and object references in the
    value and keeps them alive.
    """

    def __init__(self, value: Any, name: str) -> None:
        """Keep the value, and its name for errors."""
        self._value, self._name = value, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[list[pickle.PickleBuffer]]]:
        """Pack the value."""
        return unpack_copy, (_buffers(pack(self._value, self._name, ray.cloudpickle.dumps)),)


def _buffers(frames: Frames) -> list[pickle.PickleBuffer]:
    """Return the frames as buffers, which Ray carries next to its own pickle."""
    return [pickle.PickleBuffer(frame) for frame in frames]


def unpack_copy(frames: Sequence[Any]) -> Any:
    """Return the value of frames in Ray's store; arrays are copied, because frames are read-only and use the store."""
    return unpack([frames[0], *map(bytearray, frames[1:])])


@contextlib.contextmanager
def serialization_errors() -> Iterator[None]:
    """Raise the original error of a `Parcel`, which Ray replaces with a `TypeError`."""
    try:
        yield
    except TypeError as error:
        problem = error.__cause__
        if isinstance(problem, SerializationError):
            raise problem from problem.__cause__
        raise


class Host:
    """Holds a worker in the process of an actor, and answers calls.

    An answer has three parts: whether the call succeeded, the frames of the result or of the exception and its cause,
    and what was logged.
    """

    def __init__(self, name: str) -> None:
        """Start a guard that ends the processes of the worker when this process ends."""
        self._name = name
        self._where = f"{name} (process {os.getpid()} on {ray.util.get_node_ip_address()})"
        self._worker: Any = None
        self._logs = WorkerLog()
        self._logs.install()
        guard_this_process()

    def make(self, factory: Callable[[], Any]) -> Answer:
        """Make the worker, and return an answer."""
        return self._answer(self._make, factory)

    def call(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the worker, and return the answer."""
        return self._answer(call_method, self._worker, method, args, kwargs)

    def _make(self, factory: Callable[[], Any]) -> None:
        self._worker = make_worker(factory)

    def _answer(self, function: Callable[..., Any], *args: Any) -> Answer:
        try:
            result = function(*args)
            return True, _buffers(pack(result, f"what {self._name} returned", ray.cloudpickle.dumps)), self._logs.take()
        except Exception as error:  # not BaseException: Ray ends an actor with SystemExit
            problem = portable_error(error, self._where)
            frames = _buffers(pack(problem, f"an exception in {self._where}", ray.cloudpickle.dumps))
            return False, frames, self._logs.take()


def actor_class() -> Any:
    """Return the class of the actors."""

    # A local class is pickled by value. The actor's process may not find this package before `sys.path` is set.
    class CorralWorker:
        def __init__(self, name: str, directory: str, root: str, paths: list[str], setup: str) -> None:
            self.name = name
            self.host: Any = None
            sys.path[:] = [root, *paths, *(path for path in sys.path if path not in paths)]
            import corral as corral  # from its own folder, also where the user has a file corral.py

            del sys.path[0]
            if os.path.isdir(directory):  # another machine may not have it
                os.chdir(directory)
            from corral.engines.worker_setup import set_up_worker

            set_up_worker(setup)

        def __repr__(self) -> str:
            return self.name  # Ray puts this before each line that the worker prints

        def make(self, factory: Any) -> Any:
            from corral.engines.ray_worker import Host

            host = Host(self.name)
            answer = host.make(factory)
            self.host = host if answer[0] else None
            return answer

        def call(self, call: Any, *args: Any) -> Any:
            # If there is no worker, the answer to `make` has said why.
            return self.host and self.host.call(call["method"], args, call["kwargs"])

    return ray.remote(CorralWorker)
