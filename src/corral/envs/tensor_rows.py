"""Tensors in the attributes of objects, of which some rows are kept over a change.

A simulator on tensors is a graph of objects, whose attributes, lists and dicts hold tensors with one row per sub-env.
The functions here find these tensors from some roots. They look into no functions, classes and modules.
"""

from __future__ import annotations

import enum
import logging
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CONSTANTS = (*_FUNCTIONS, type, types.ModuleType, logging.Logger, enum.Enum, np.ndarray, Tensor)


def _is_holder(value: Any) -> bool:
    """Return whether a value is a dict, a list or an object with attributes that can change."""
    return isinstance(value, (dict, list)) or (hasattr(value, "__dict__") and not isinstance(value, _CONSTANTS))


def _items_of(holder: Any) -> dict[Any, Any]:
    """Return attributes by name, or items by key or by index."""
    if isinstance(holder, list):
        return dict(enumerate(holder))
    return holder if isinstance(holder, dict) else vars(holder)


def _set_item(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, (dict, list)):
        holder[key] = value
    else:
        vars(holder)[key] = value  # not through a property, which might do more


def find_holders(roots: Mapping[str, Any]) -> list[Any]:
    """Return the objects, lists and dicts that are reached from the roots, which are objects by name, each once."""
    found = list(roots.values())
    seen = {id(root) for root in found}
    for holder in found:  # which grows
        for value in _parts(tuple(_items_of(holder).values())):
            if _is_holder(value) and id(value) not in seen:
                seen.add(id(value))
                found.append(value)
    return found


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value, or the parts of a tuple."""
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


class RowKeeper:
    """Attributes of a graph of objects as they are now, of which rows can be put back after a change.

    Nothing here waits for the device.

    Args:
        roots: Objects by name; see `find_holders`.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        """Copy all tensors; other values stay the same objects."""
        self._clones: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with the tensors, so that no two have one id
        self._before = {
            id(holder): (holder, {key: self._copy(value) for key, value in _items_of(holder).items()})
            for holder in find_holders(roots)
        }
        self._merged: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._filled: set[int] = set()

    def _copy(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self._copy, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._clones:
            self._clones[id(value)] = value, value.clone()
        return self._clones[id(value)][1]

    def keep_rows_except(self, mask: Tensor) -> None:
        """Put all rows back as they were, except the rows of the mask, which stay as they are now.

        The rows of a tensor are along its first axis of length N. Whatever has no such axis belongs to all rows, and is
        put back too: numbers, references to objects, other tensors. An object that is new since then stays, with its
        rows from the object that it replaces. It can be called once.

        Args:
            mask: bool `[N]`.
        """
        for holder, before in self._before.values():
            now = _items_of(holder)
            values = {key: self._merge(mask, old, now.get(key)) for key, old in before.items()}
            if isinstance(holder, list):
                holder[:] = values.values()
            else:
                now.update(values)

    def _merge(self, mask: Tensor, old: Any, new: Any) -> Any:
        """Return the value with the rows of the mask from the new value, and the others from the old one."""
        if isinstance(old, Tensor):
            fits = isinstance(new, Tensor) and new.shape == old.shape and len(mask) in old.shape
            return self._merge_rows(mask, old, new) if fits else old
        if type(old) is tuple and type(new) is tuple and len(old) == len(new):
            return tuple(self._merge(mask, *parts) for parts in zip(old, new, strict=True))
        if old is None and isinstance(new, Tensor):
            return new  # made in the meantime: there are no rows to put back
        if not _is_holder(new) or type(new) is not type(old) or id(new) in self._before:
            return old
        if id(new) not in self._filled:
            self._filled.add(id(new))
            before = self._before[id(old)][1]
            for key, value in [*_items_of(new).items()]:
                _set_item(new, key, self._merge(mask, before[key], value) if key in before else value)
        return new

    def _merge_rows(self, mask: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return one tensor for each pair, so that what is one tensor in two places stays one."""
        if (id(old), id(new)) not in self._merged:
            axis = old.shape.index(len(mask))
            rows = mask.view([-1 if i == axis else 1 for i in range(old.ndim)])
            self._merged[id(old), id(new)] = torch.where(rows, new, old), new  # the new one stays alive, with its id
        return self._merged[id(old), id(new)][0]
