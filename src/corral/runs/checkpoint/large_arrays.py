"""Large arrays of a state, which travel to files of their own by reference, and back as memory maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.errors import CheckpointError

PARTS = ("replay_buffer",)
"""Parts of a state whose arrays may be larger than the memory."""


def split_arrays(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return a state with `None` in the places of its large arrays, and these arrays by place, such as `a/b/0`."""
    arrays = {place: array for part in PARTS if part in state for place, array in _arrays(state[part], part)}
    return {name: _emptied(part) if name in PARTS else part for name, part in state.items()}, arrays


def join_arrays(state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the state that `split_arrays` split.

    Raises:
        CheckpointError: The state has no such place.
    """
    joined: dict[str, Any] = _copied(state)
    for place, array in arrays.items():
        *path, last = place.split("/")
        try:
            holder: Any = joined
            for name in path:
                holder = holder[int(name) if isinstance(holder, list) else name]
            holder[int(last) if isinstance(holder, list) else last] = array
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state has no place {place!r} for the array of this name.") from error
    return joined


def _arrays(value: Any, place: str) -> Iterator[tuple[str, NDArray[Any]]]:
    if isinstance(value, np.ndarray):
        yield place, value
    elif isinstance(value, (dict, list)):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _arrays(part, f"{place}/{name}")


def _emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _emptied(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_emptied(part) for part in value]
    return None if isinstance(value, np.ndarray) else value


def _copied(value: Any) -> Any:
    """Return copies of dicts and lists, with the same values in them."""
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value
