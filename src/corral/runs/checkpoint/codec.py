"""Nested plain data as bytes, and back. Decoding runs no code that the bytes name.

msgpack holds `None`, bools, numbers, strings, bytes, lists and dicts. A tuple is a list that begins with a mark. The
other types are extensions: an integer beyond 64 bits is its digits, and an array is its dtype, its shape and its bytes.
"""

from __future__ import annotations

import math
import re
import reprlib
from typing import Any, Literal

import msgpack
import numpy as np
from numpy.typing import NDArray

from corral.core.plain import MAX_DEPTH, misfits
from corral.errors import CheckpointError

# Codes in files: a code that was used keeps its meaning forever.
_TUPLE, _BIG_INT, _ARRAY, _SCALAR = 1, 2, 3, 4
_TUPLE_MARK = msgpack.ExtType(_TUPLE, b"")

_CONTAINERS = (list, tuple, dict)
_SIMPLE_DTYPE = re.compile(r"[<>|](?:[biufcSU][1-9]\d{0,5}|[mM]8(?:\[\w+\])?)")


def encode(state: Any) -> bytes:
    """Return nested plain data as bytes.

    Args:
        state: `None`, bools, integers of any size, floats, strings, bytes, NumPy arrays and scalars of any dtype
            except object, and lists, tuples and dicts of these; keys of dicts may be any of these that can be hashed.

    Raises:
        CheckpointError: The state holds another type; the message names its place.
    """
    try:
        if _depth(state) > MAX_DEPTH:
            raise ValueError
        packed: bytes = msgpack.packb(state, default=_encode_other, strict_types=True, unicode_errors="surrogatepass")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        place, culprit = next(misfits(state, fits=_fits), ("", state))
        raise CheckpointError(
            f"the state cannot be saved: {place or 'it'} is {type(culprit).__module__}.{type(culprit).__qualname__} "
            f"{_short(culprit)}. A state holds None, bools, numbers, strings, bytes, arrays without objects, and "
            f"lists, tuples and dicts of these, at most {MAX_DEPTH} in each other."
        ) from error
    return packed


def decode(data: bytes) -> Any:
    """Return the data that `encode` received; arrays are new and writable.

    Raises:
        ValueError: The bytes are not such data, or not complete.
    """
    _check_lengths(data)
    return msgpack.unpackb(
        data, ext_hook=_decode_extension, list_hook=_tuple_or_list, strict_map_key=False, unicode_errors="surrogatepass"
    )


def _encode_other(value: Any) -> Any:
    if type(value) is tuple:
        return [_TUPLE_MARK, *value]
    if type(value) is int:
        return msgpack.ExtType(_BIG_INT, hex(value).encode())
    if type(value) is np.ndarray:
        return msgpack.ExtType(_ARRAY, _array_bytes(value))
    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR, _array_bytes(np.asarray(value)))
    raise TypeError(type(value))


def _tuple_or_list(items: list[Any]) -> list[Any] | tuple[Any, ...]:
    return tuple(items[1:]) if items and items[0] is _TUPLE_MARK else items


def _decode_extension(code: int, data: bytes) -> Any:
    if code == _TUPLE and not data:
        return _TUPLE_MARK
    if code == _BIG_INT:
        return int(data, 16)
    if code in (_ARRAY, _SCALAR):
        array = _array(data)
        return array if code == _ARRAY else array[()]
    raise ValueError(f"unknown extension {code}")


# Arrays: the packed description `[dtype, shape, order]`, then the bytes.


def _array_bytes(array: NDArray[Any]) -> bytes:
    described = describe_dtype(array.dtype)
    order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
    header: bytes = msgpack.packb([described, array.shape, order])
    return len(header).to_bytes(4, "little") + header + array.tobytes(order)


def _array(data: bytes) -> NDArray[Any]:
    start = 4 + int.from_bytes(data[:4], "little")
    _check_lengths(data[4:start])
    described, shape, order = msgpack.unpackb(data[4:start])
    dtype = described_dtype(described)
    if order not in ("C", "F") or size_of(dtype, shape) != len(data) - start:
        raise ValueError(f"an array of shape {shape!r:.80} and dtype {dtype} has {len(data) - start} bytes")
    return np.ndarray(shape, dtype, buffer=data, offset=start, order=order).copy(order="K")


def describe_dtype(dtype: np.dtype[Any]) -> str | list[Any]:
    """Return a dtype in types that msgpack holds: its short string, or `[name, dtype, shape]` for each of its fields.

    Raises:
        TypeError: The dtype holds objects, or other types that no file should hold.
    """
    described = (
        dtype.str
        if dtype.names is None
        else [[name, describe_dtype(dtype[name].base), list(dtype[name].shape)] for name in dtype.names]
    )
    try:
        if described_dtype(described) == dtype:
            return described
    except ValueError:
        pass
    raise TypeError(dtype)


def described_dtype(described: Any) -> np.dtype[Any]:
    """Return the dtype that `describe_dtype` described.

    Raises:
        ValueError: It describes none, or one that is not read from files.
    """
    if isinstance(described, str) and _SIMPLE_DTYPE.fullmatch(described):
        return np.dtype(described)
    if isinstance(described, list) and described:
        return np.dtype([(str(name), described_dtype(part), tuple(shape)) for name, part, shape in described])
    raise ValueError(f"{described!r:.80} is not a dtype that is read from files")


def size_of(dtype: np.dtype[Any], shape: Any) -> int:
    """Return the number of bytes of an array.

    Raises:
        ValueError: The shape is no list of sizes.
    """
    if len(shape) > 32 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r:.80} is not a shape")
    return int(dtype.itemsize * math.prod(shape))


# What the first byte of each of msgpack's forms says: width of the length that follows, bytes and items of content, and
# bytes and items per unit of that length.
_FORMS: dict[int, tuple[int, int, int, int, int]] = {
    **dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), (0, 0, 0, 0, 0)),
    **{0x80 + i: (0, 0, 2 * i, 0, 0) for i in range(16)},  # dicts
    **{0x90 + i: (0, 0, i, 0, 0) for i in range(16)},  # lists
    **{0xA0 + i: (0, i, 0, 0, 0) for i in range(32)},  # strings
    **{0xC4 + i: (1 << i, 0, 0, 1, 0) for i in range(3)},  # bytes
    **{0xC7 + i: (1 << i, 1, 0, 1, 0) for i in range(3)},  # extensions
    **{0xCA + i: (0, 4 << i, 0, 0, 0) for i in range(2)},  # floats
    **{0xCC + i: (0, 1 << i % 4, 0, 0, 0) for i in range(8)},  # integers
    **{0xD4 + i: (0, 1 + (1 << i), 0, 0, 0) for i in range(5)},  # extensions
    **{0xD9 + i: (1 << i, 0, 0, 1, 0) for i in range(3)},  # strings
    **{0xDC + i: (2 << i, 0, 0, 0, 1) for i in range(2)},  # lists
    **{0xDE + i: (2 << i, 0, 0, 0, 2) for i in range(2)},  # dicts
}


def _check_lengths(data: bytes) -> None:
    """Refuse what would take more memory than the bytes do: msgpack makes room for a list before it reads its items.

    Raises:
        ValueError: The bytes announce more than they hold, or containers are nested too deeply.
    """
    at, num_due, due = 0, 1, [1]  # items that are still to come, in all and at each level
    while num_due:
        if num_due > len(data) - at:
            raise ValueError("it declares more bytes than it holds")
        while due[-1] == 0:
            due.pop()
        form = _FORMS.get(data[at])
        if form is None:
            raise ValueError(f"no value begins with byte {data[at]}")
        width, num_bytes, num_items, unit_bytes, unit_items = form
        at += 1
        if width:
            length = int.from_bytes(data[at : at + width], "big")
            num_bytes, num_items = num_bytes + length * unit_bytes, length * unit_items
        at += width + num_bytes
        due[-1] -= 1
        num_due += num_items - 1
        if num_items:
            due.append(num_items)
            if len(due) > MAX_DEPTH + 1:
                raise ValueError(f"it nests more than {MAX_DEPTH} containers")
    if at != len(data):
        raise ValueError(f"it has {len(data)} bytes, and its content {at}")


def _depth(value: Any) -> int:
    """Return the number of containers in each other."""
    if type(value) not in _CONTAINERS:
        return 0
    parts = [*value, *value.values()] if type(value) is dict else value
    return 1 + max((_depth(part) for part in parts if type(part) in _CONTAINERS), default=0)


def _fits(dtype: np.dtype[Any]) -> bool:
    try:
        describe_dtype(dtype)
    except TypeError:
        return False
    return True


def _short(value: Any) -> str:
    return reprlib.repr(value) if type(value) in _CONTAINERS else f"{value!r:.80}"
