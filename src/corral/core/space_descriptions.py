"""Spaces in types that JSON holds, and back. Reading a description imports nothing."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

# More entries than any observation has: a damaged description must not use up the memory.
MAX_ENTRIES = 2**27
MAX_DEPTH = 32
DTYPE_KINDS = "biuf"
_DTYPES = {"Box": "float32", "Discrete": "int64", "MultiDiscrete": "int64"}
"""Gymnasium's dtypes, where a description that a user wrote leaves them out."""


def describe_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as a dict of plain values; `described_space` is the inverse.

    A Box whose bounds are the same in all entries has one number for each bound. Infinite bounds are strings, since
    JSON has no such numbers.

    Raises:
        ValueError: The space is neither Box, Discrete, MultiDiscrete nor MultiBinary, nor a Dict or Tuple of these.
    """
    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise ValueError(f"the keys of {space} are not all strings.")
        return {"type": "Dict", "spaces": [[key, describe_space(part)] for key, part in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [describe_space(part) for part in space.spaces]}
    described: dict[str, Any] = {"dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.Box):
        bounds = {"low": _numbers(space.low), "high": _numbers(space.high)}
        return {"type": "Box", "shape": list(space.shape), **bounds, **described}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), **described}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist(), **described}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    raise ValueError(f"{space} is neither Box, Discrete, MultiDiscrete nor MultiBinary, nor a Dict or Tuple of these.")


def is_described(value: Any) -> bool:
    """Return whether a value is a space whose type `describe_space` knows."""
    try:
        return isinstance(value, spaces.Space) and bool(describe_space(value))
    except ValueError:
        return False


def described_space(description: Any) -> spaces.Space[Any]:
    """Return the space of a description, in which `dtype` and `start` may be left out.

    Raises:
        ValueError: The description is damaged, or nested more than `MAX_DEPTH` times.
    """
    try:
        return _space(description, 0)
    except KeyError as error:
        raise ValueError(f"{description!r:.80} describes no space: it lacks {error}") from error
    except (TypeError, ValueError, AssertionError, AttributeError, OverflowError) as error:
        raise ValueError(f"{description!r:.80} describes no space: {type(error).__name__}: {error}") from error


def _space(description: Any, depth: int) -> spaces.Space[Any]:
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deep")
    kind = description["type"]
    if kind == "Dict":
        parts = ((str(key), _space(part, depth + 1)) for key, part in description["spaces"])
        return spaces.Dict(OrderedDict(parts))  # in this order; of a plain dict, Gymnasium sorts the keys
    if kind == "Tuple":
        return spaces.Tuple([_space(part, depth + 1) for part in description["spaces"]])
    if kind == "MultiBinary":
        n = description["n"]
        return spaces.MultiBinary(_shape([n])[0] if isinstance(n, int) else _shape(n))
    if kind not in _DTYPES:
        raise ValueError(f"{kind!r:.80} is no type of space")
    dtype = np.dtype(str(description.get("dtype", _DTYPES[kind])))
    if dtype.kind not in DTYPE_KINDS:
        raise ValueError(f"a space has no dtype {dtype}")
    if kind == "Box":
        shape = _shape(description["shape"])
        low, high = (_bound(description[name], shape, dtype) for name in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return _with_dtype(spaces.Discrete(int(description["n"]), start=int(description.get("start", 0))), dtype)
    nvec = np.array(description["nvec"])
    return spaces.MultiDiscrete(nvec, dtype.type, start=np.array(description.get("start", np.zeros_like(nvec))))


def _with_dtype(space: spaces.Discrete, dtype: np.dtype[Any]) -> spaces.Discrete:
    """Set the dtype; before Gymnasium 1.2, `Discrete` does not receive it."""
    space.dtype = dtype
    space.n, space.start = dtype.type(space.n), dtype.type(space.start)
    return space


def _numbers(values: NDArray[Any]) -> Any:
    """Return one number if all values are equal, and nested lists otherwise; infinite values are strings."""
    if values.size and (values == values.flat[0]).all():
        values = values.flat[0]
    return _without_infinity(values.tolist())


def _without_infinity(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_infinity(part) for part in value]
    return value if math.isfinite(value) else str(value)


def _bound(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.broadcast_to(np.array(value, dtype), shape).copy()


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (list, tuple)):
        raise ValueError(f"a shape is a list of lengths, and not {shape!r:.80}")
    lengths = tuple(int(length) for length in shape)
    if any(length < 0 for length in lengths) or math.prod(lengths) > MAX_ENTRIES:
        raise ValueError(f"a space has no shape {shape!r:.80}")
    return lengths
