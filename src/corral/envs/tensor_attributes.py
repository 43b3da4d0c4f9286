"""Tensors in the attributes of objects: rows of them kept over a change, and all of them saved as plain data.

A simulator on tensors is a graph of objects, whose attributes, lists and dicts hold tensors with one row per sub-env.
The functions here find these tensors from some roots. They look into no functions, classes and modules.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CONSTANTS = (type, types.ModuleType, types.FunctionType, types.MethodType, enum.Enum, np.ndarray, Tensor)
_PLAIN = (type(None), bool, int, float, str, np.ndarray, np.generic)


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


def _names_of(holder: Any) -> dict[str, Any]:
    """Return the keys of a holder by their names in a path: `name`, `[3]`, or `#0` for any other key in place 0."""
    names = {}
    for i, key in enumerate(_items_of(holder)):
        names[key if isinstance(key, str) else f"[{key}]" if isinstance(key, int) else f"#{i}"] = key
    return names


def find_holders(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects, lists and dicts that are reached from the roots by their paths, each once.

    Args:
        roots: Objects by name. A root that another one refers to is found under its own name.
    """
    found = dict(roots)
    seen = {id(root) for root in roots.values()}
    waiting = list(roots.items())
    while waiting:
        path, holder = waiting.pop()
        items = _items_of(holder)
        for name, key in _names_of(holder).items():
            for place, value in _parts(f"{path}.{name}", items[key]):
                if _is_holder(value) and id(value) not in seen:
                    seen.add(id(value))
                    found[place] = value
                    waiting.append((place, value))
    return found


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value with its path, or the parts of a tuple."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _parts(f"{path}.{i}", part)
    else:
        yield path, value


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
            for holder in find_holders(roots).values()
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


def save_items(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors, numbers, texts and references in a graph of objects as plain data.

    Returns:
        `tensors`, arrays, each once; and `items`: by path of the holder and name what is there, `["tensor", index]`,
        `["plain", value]`, `["at", path]` for another holder, `["tuple", parts]`, or `None` for any other value, which
        a new graph has itself.
    """
    holders = find_holders(roots)
    paths = {id(holder): path for path, holder in holders.items()}
    tensors: list[Tensor] = []
    indices: dict[int, int] = {}

    def encode(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in indices:
                indices[id(value)] = len(tensors)
                tensors.append(value)
            return ["tensor", indices[id(value)]]
        if isinstance(value, _PLAIN):
            return ["plain", value.copy() if isinstance(value, np.ndarray) else value]
        if type(value) is tuple:
            return ["tuple", [encode(part) for part in value]]
        return ["at", paths[id(value)]] if id(value) in paths else None

    items = {
        path: {name: encode(_items_of(holder)[key]) for name, key in _names_of(holder).items()}
        for path, holder in holders.items()
    }
    return {"tensors": [tensor.detach().cpu().numpy().copy() for tensor in tensors], "items": items}


def load_items(roots: Mapping[str, Any], state: Mapping[str, Any], device: torch.device) -> list[str]:
    """Give a graph of objects what `save_items` found in a graph made in the same way; return what is missing.

    Nothing changes if anything is missing.

    Args:
        roots: Objects by name, as they were given to `save_items`.
        state: What `save_items` returned.
        device: Device of tensors in places where there is none now.

    Returns:
        Paths in the state that do not exist in this graph.
    """
    holders = find_holders(roots)
    tensors: dict[int, Tensor] = {}

    def decode(code: Any, here: Any) -> Any:
        if code is None:
            return here
        kind, value = code
        if kind == "tensor":
            if value not in tensors:
                place = here.device if isinstance(here, Tensor) else device
                tensors[value] = torch.tensor(state["tensors"][value], device=place)
            return tensors[value]
        if kind == "tuple":
            parts = here if isinstance(here, tuple) and len(here) == len(value) else (None,) * len(value)
            return tuple(map(decode, value, parts))
        return holders.get(value, here) if kind == "at" else value

    missing = [path for path in state["items"] if path not in holders]
    if not missing:
        for path, codes in state["items"].items():
            _fill(holders[path], codes, decode)
    return missing


def _fill(holder: Any, codes: Mapping[str, Any], decode: Callable[[Any, Any], Any]) -> None:
    """Give a holder its saved items; objects and dicts may get new ones, and lists another length."""
    here = _items_of(holder)
    if isinstance(holder, list):
        holder[:] = [decode(code, here.get(i)) for i, code in enumerate(codes.values())]
        return
    names = _names_of(holder)
    for name, code in codes.items():
        if name in names or not name.startswith("#"):
            key = names.get(name, int(name[1:-1]) if name.startswith("[") else name)
            here[key] = decode(code, here.get(key))
