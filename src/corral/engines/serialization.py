"""Functions that send values and exceptions to other processes: pickled with cloudpickle, large arrays not copied."""

from __future__ import annotations

import functools
import inspect
import pickle
import struct
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import cloudpickle

from corral.errors import SerializationError

Frames = list[pickle.PickleBuffer | bytes | memoryview | bytearray]
"""A pickle, and the buffers to which the pickle refers."""

# Smaller arrays are copied into the pickle, which costs less than one more system call.
OUT_OF_BAND_BYTES = 64 * 1024


class Channel(Protocol):
    """The two operations of a socket that messages need."""

    def sendall(self, data: Any, /) -> None:
        """Send all bytes of a buffer."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive into a buffer, and return the number of bytes; 0 if the other process has closed the channel."""


def pack(value: Any, name: str, dumps: Callable[..., bytes] = cloudpickle.dumps) -> Frames:
    """Return a pickled value; the buffers of large arrays are not copied.

    Args:
        value: Any value; functions and classes that are not in a module are pickled by value.
        name: Name of the value for the error.
        dumps: Function `dumps` of cloudpickle, or of a library with its own copy of cloudpickle.

    Raises:
        SerializationError: A part of the value cannot be pickled; the message names the part.
    """
    buffers: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        return [dumps(value, protocol=5, buffer_callback=keep_in_band), *buffers]
    except Exception as error:  # the user's __reduce__ may raise anything
        raise SerializationError(f"{unpicklable_part(value, name)}. It must be sent to another process.") from error


def unpack(frames: Sequence[Any]) -> Any:
    """Return the value that `pack` packed; its arrays can be written to."""
    return pickle.loads(frames[0], buffers=frames[1:])


def send(channel: Channel, message: Sequence[Frames]) -> None:
    """Send several packed values as one message."""
    sizes = [[memoryview(frame).nbytes for frame in frames] for frames in message]
    header = struct.pack(f"!{1 + len(sizes)}Q", len(sizes), *map(len, sizes))
    channel.sendall(header + struct.pack(f"!{sum(map(len, sizes))}Q", *(size for part in sizes for size in part)))
    for frames in message:
        for frame in frames:
            channel.sendall(frame)


def receive(channel: Channel) -> list[list[bytearray]]:
    """Return the packed values of one message of `send`.

    Raises:
        EOFError: The other process has closed the channel.
        OSError: The channel is broken.
    """
    (num_parts,) = struct.unpack("!Q", _exactly(channel, 8))
    counts = struct.unpack(f"!{num_parts}Q", _exactly(channel, 8 * num_parts))
    sizes = iter(struct.unpack(f"!{sum(counts)}Q", _exactly(channel, 8 * sum(counts))))
    return [[_exactly(channel, next(sizes)) for _ in range(count)] for count in counts]


def _exactly(channel: Channel, num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return buffer


# Exceptions.


def portable_error(error: BaseException, where: str) -> tuple[BaseException, BaseException | None]:
    """Return an exception and its cause in a form that can be pickled, with the traceback as a note.

    Args:
        error: Exception of the worker.
        where: Name of the worker, for the note.
    """
    note = f"In {where}:\n{''.join(traceback.format_exception(error)).rstrip()}"
    # SystemExit and KeyboardInterrupt would end the process that receives them.
    survives = isinstance(error, Exception) and _survives(error)
    sent = error if survives else RuntimeError(f"{type(error).__name__}: {error}")
    sent.add_note(note)
    cause = error.__cause__
    return sent, cause if cause is not None and _survives(cause) else None


def _survives(error: BaseException) -> bool:
    try:
        return type(pickle.loads(cloudpickle.dumps(error))) is type(error)
    except Exception:
        return False


# What cannot be pickled.


def unpicklable_part(value: Any, name: str) -> str:
    """Return a sentence that names the innermost part of a value that cannot be pickled, and why."""
    seen: set[int] = set()
    error: Exception | None = None
    while id(value) not in seen:
        seen.add(id(value))
        error = _pickling_error(value) or error
        for label, part in _parts(value):
            if id(part) not in seen and _pickling_error(part) is not None:
                name, value = name + label, part
                break
    return f"{name} ({_kind(value)}) cannot be pickled: {error}"


def _pickling_error(value: Any) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return error
    return None


def _kind(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with the text that leads from the value to the part, such as `.name`."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f" holds {part!r}, which", part) for part in value)
    elif isinstance(value, functools.partial):
        yield from _partial_parts(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, type):
        yield from ((f".{name}", part) for name, part in vars(value).items() if not name.startswith("__"))
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        yield from ((f".{name}", getattr(value, name)) for name in slots if hasattr(value, name))
        yield ".__class__", type(value)


def _partial_parts(value: functools.partial[Any]) -> Iterator[tuple[str, Any]]:
    yield ".func", value.func
    try:
        given = inspect.signature(value.func).bind_partial(*value.args, **value.keywords).arguments
    except (TypeError, ValueError):
        given = {f"args[{index}]": part for index, part in enumerate(value.args)} | value.keywords
    yield from ((f".{name}", part) for name, part in given.items())


def _function_parts(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    found = inspect.getclosurevars(value)
    yield from ((f", whose variable {name}", part) for name, part in {**found.nonlocals, **found.globals}.items())
    defaults = inspect.signature(value).parameters.values()
    yield from ((f", whose default {p.name}", p.default) for p in defaults if p.default is not p.empty)
