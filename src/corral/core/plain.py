"""Plain data: what a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

SCALARS = (type(None), bool, int, float, str, bytes)
"""Types of single values, in addition to NumPy's."""

MAX_DEPTH = 200
"""The most containers in each other: what reads them may need some of Python's stack for each."""


def has_no_objects(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of a dtype hold only their own bytes."""
    return not dtype.hasobject


def misfits(
    value: Any, place: str = "", depth: int = 0, *, fits: Callable[[np.dtype[Any]], bool] = has_no_objects
) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each part that is not plain.

    Plain data are `None`, bools, numbers, strings, bytes, NumPy arrays and scalars without objects, and lists, tuples
    and dicts of these, at most `MAX_DEPTH` in each other.

    Args:
        value: The data.
        place: Where it is, such as `"['a'][0]"`.
        depth: Containers around it.
        fits: Whether arrays and scalars of a dtype are plain.
    """
    if depth > MAX_DEPTH:
        yield place, value
    elif type(value) is dict:
        for key, part in value.items():
            yield from misfits(key, f"the key {key!r} in {place or 'the state'}", depth + 1, fits=fits)
            yield from misfits(part, f"{place}[{key!r}]", depth + 1, fits=fits)
    elif type(value) in (list, tuple):
        for index, part in enumerate(value):
            yield from misfits(part, f"{place}[{index}]", depth + 1, fits=fits)
    elif isinstance(value, np.ndarray | np.generic):
        if not fits(value.dtype) or (isinstance(value, np.ndarray) and type(value) is not np.ndarray):
            yield place, value
    elif type(value) not in SCALARS:
        yield place, value


def check_parts(state: Any, names: Iterable[str], what: str, error: type[Exception]) -> None:
    """Raise an error if a state is no dict, or lacks one of the parts."""
    missing = sorted(set(names) - state.keys()) if isinstance(state, Mapping) else [type(state).__name__]
    if missing:
        is_dict = isinstance(state, Mapping)
        raise error(f"the state of {what} {'lacks ' + ', '.join(missing) if is_dict else f'is a {missing[0]}'}.")


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, as arrays and in dicts, lists and tuples too; if they cannot tell, no."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if type(one) in (list, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    try:
        return one is other or bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)
    except Exception:
        return False


def is_plain(value: Any) -> bool:
    """Return whether a value is plain data."""
    return next(misfits(value), None) is None


def check_plain(value: Any, source: str, error: type[Exception]) -> None:
    """Raise an error that names the source, the place in the value and the type, if a value is not plain data."""
    for place, culprit in misfits(value):
        raise error(
            f"{source} returned a state with {type(culprit).__module__}.{type(culprit).__qualname__} {culprit!r:.80}"
            f"{f' at {place}' if place else ''}: a state holds None, bools, numbers, strings, bytes, arrays without "
            "objects, and lists, tuples and dicts of these."
        )
