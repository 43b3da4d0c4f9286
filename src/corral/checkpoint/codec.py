"""Nested plain data as bytes, and back. Decoding runs no code that the bytes name.

msgpack holds `None`, bools, numbers, strings, bytes, lists and dicts. Other types are extensions: a tuple
is its packed list, an integer beyond 64 bits is its digits, and an array is its `.npy` file, read without pickle.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from corral.errors import CheckpointError

# Codes in files: a code that was used keeps its meaning forever.
_TUPLE, _BIG_INT, _ARRAY, _SCALAR = 1, 2, 3, 4

_PLAIN = (type(None), bool, int, float, str, bytes)


def encode(state: Any) -> bytes:
    """Return nested plain data as bytes.

    Args:
        state: `None`, bools, integers of any size, floats, strings, bytes, NumPy arrays and scalars of any dtype
            except object, and lists, tuples and dicts of these; keys of dicts may be any of these that can be hashed.

    Raises:
        CheckpointError: The state holds another type; the message names its place.
    """
    try:
        return _pack(state)
    except (TypeError, ValueError) as error:
        place, culprit = next(_misfits(state, ""), ("", state))
        raise CheckpointError(
            f"the state cannot be saved: {place or 'it'} is {type(culprit).__module__}.{type(culprit).__qualname__} "
            f"{culprit!r:.80}. A state holds None, bools, numbers, strings, bytes, arrays without objects, and lists, "
            "tuples and dicts of these."
        ) from error


def decode(data: bytes) -> Any:
    """Return the data that `encode` received; arrays are new and writable.

    Raises:
        ValueError: The bytes are not such data, or not complete.
    """
    return msgpack.unpackb(data, ext_hook=_decode_extension, strict_map_key=False, unicode_errors="surrogatepass")


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_encode_extension, strict_types=True, unicode_errors="surrogatepass")
    return packed


def _encode_extension(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    if type(value) is int:
        return msgpack.ExtType(_BIG_INT, hex(value).encode())
    if type(value) is np.ndarray:
        return msgpack.ExtType(_ARRAY, _npy(value))
    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR, _npy(np.asarray(value)))
    raise TypeError(type(value))


def _decode_extension(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(decode(data))
    if code == _BIG_INT:
        return int(data, 16)
    if code in (_ARRAY, _SCALAR):
        array = npy.read_array(io.BytesIO(data), allow_pickle=False)
        return array if code == _ARRAY else array[()]
    raise ValueError(f"unknown extension {code}")


def _npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    npy.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _misfits(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each part that cannot be encoded."""
    if type(value) is dict:
        for key, part in value.items():
            yield from _misfits(key, f"the key {key!r} in {place or 'the state'}")
            yield from _misfits(part, f"{place}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, part in enumerate(value):
            yield from _misfits(part, f"{place}[{index}]")
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject or (isinstance(value, np.ndarray) and type(value) is not np.ndarray):
            yield place, value
    elif type(value) not in _PLAIN:
        yield place, value
