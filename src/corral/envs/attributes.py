"""The state of envs in pure Python, and of two well-known simulators, read from the attributes of their objects.

An env is a graph of objects. Its layers, the wrappers and the innermost env, stay where they are and get new
attributes. Everything that they hold is made again, with shared objects shared as before, except what cannot change
(functions, spaces) and the generators and simulators, which are set in place. No code of the env runs, and no
class is used that the env does not use already or that is not in one of its packages.

As plain data, a scalar is itself, and any other value is `(index,)`: its place in the list `objects`, whose entries are
the kind of the value and what the kind needs.
"""

from __future__ import annotations

import collections
import datetime
import enum
import logging
import pathlib
import random
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from corral.core.plain import SCALARS, has_no_objects
from corral.core.seeding import check_bits, get_rng, set_rng
from corral.core.tree import copy_nested
from corral.envs import simulators

_MISSING = object()
_CONTAINERS: dict[str, type] = {
    **{kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)},
    **{kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)},
}
_CONSTANTS = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.GenericAlias, range, complex, slice, np.dtype, np.ufunc),
    *(re.Pattern, pathlib.PurePath, logging.Logger, datetime.date, datetime.timedelta, type(...), type(NotImplemented)),
)
"""Types whose values cannot change: they are taken from the new env, and are recognised by their description."""
_LEFT = ("pygame.", "gymnasium.envs.registration.", "gymnasium.envs.mujoco.mujoco_rendering.")
"""What only shows the env, or describes how it was made: the new env keeps its own."""


class ObstacleError(Exception):
    """An attribute cannot be saved or continued; the message names it."""


def save_attributes(layers: Sequence[Any], chosen: Iterable[int]) -> dict[str, Any]:
    """Return the attributes of layers of an env as plain data.

    Args:
        layers: The wrappers of the env, from the outermost to the innermost, and the env.
        chosen: Indices of the layers whose attributes are saved; the others are only recognised.

    Raises:
        ObstacleError: An attribute can change, and is neither plain data nor a generator nor an object of these.
    """
    writer = _Writer(layers)
    try:
        saved = [[i, writer.attributes(layers[i], _name_of(layers, i))] for i in chosen]
    except RecursionError:
        raise ObstacleError(f"{type(layers[-1]).__name__} holds objects that are nested too deeply") from None
    return {"layers": saved, "objects": writer.entries}


def load_attributes(layers: Sequence[Any], saved: Mapping[str, Any]) -> None:
    """Give the layers of an env the attributes of `save_attributes`; nothing changes if one of them does not fit.

    Raises:
        ObstacleError: The env here has not what an attribute needs.
    """
    reader = _Reader(layers, saved["objects"])
    made = [(i, reader.attributes(layers[i], nodes, _name_of(layers, i))) for i, nodes in saved["layers"]]
    for fill in reader.changes:
        fill()
    for i, attributes in made:
        _set_attributes(layers[i], attributes)


def check_attributes(saved: Mapping[str, Any]) -> None:
    """Check that saved attributes are whole, without an env; raise what the damaged part raises."""
    objects = saved["objects"]

    def check_nodes(nodes: Iterable[Any]) -> None:
        for node in nodes:
            if type(node) is tuple:
                objects[node[0]]

    for index, nodes in saved["layers"]:
        int(index)
        check_nodes(nodes.values())
    for kind, *parts in objects:
        _READERS[kind]
        if kind == "generator":
            check_bits(parts[0])
        elif kind == "object":
            check_nodes(parts[1].values())
        elif kind == "container":
            _CONTAINERS[parts[0]]
            check_nodes(parts[1])


def _name_of(layers: Sequence[Any], index: int) -> str:
    return type(layers[index]).__name__


def _path_of(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _is_left(value: Any) -> bool:
    return f"{type(value).__module__}.{type(value).__qualname__}".startswith(_LEFT)


def _is_constant(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return all(type(part) in SCALARS for part in _enclosed(value))
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, types.ModuleType | type | None)
    return isinstance(value, _CONSTANTS)


def _describe(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return " ".join([_path_of(value), *map(repr, _enclosed(value))])
    is_named = isinstance(value, (type, types.BuiltinFunctionType))
    return _path_of(value) if is_named else f"{type(value).__name__} {value!r}"


def _enclosed(function: types.FunctionType) -> list[Any]:
    """Return what a function knows from the function around it."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


_HEAP_TYPE = 1 << 9  # flag of classes that are not compiled into Python


class _Empty:
    pass


def _slots(cls: type) -> list[str]:
    """Return the names of slots, as Python stores them, of a class and its bases."""
    found = []
    for base in cls.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return found


def _is_pure(cls: type, base: type = object) -> bool:
    """Return whether instances hold only the attributes that Python shows, and what a base holds."""
    if not all(part.__flags__ & _HEAP_TYPE for part in cls.__mro__ if part not in base.__mro__):
        return False
    largest = max(base.__basicsize__, _Empty.__basicsize__ - object.__basicsize__ + base.__basicsize__)
    slots = 0 if base is not object else len(_slots(cls))
    return cls.__basicsize__ <= largest + 8 * slots


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes that an object holds itself."""
    slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Let an object hold these attributes, and no others; no code of its class runs."""
    for name in _slots(type(value)):
        if name in attributes:
            object.__setattr__(value, name, attributes[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)
    if hasattr(value, "__dict__"):
        slots = {*_slots(type(value))}
        value.__dict__.clear()
        value.__dict__.update({name: part for name, part in attributes.items() if name not in slots})


def _base_of(cls: type) -> type:
    """Return the built-in container that a class derives from, or `object`."""
    return next((base for base in (dict, list, tuple) if issubclass(cls, base)), object)


def _items_of(value: Any) -> list[Any]:
    return [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)


def _owner_of_memory(array: Any) -> Any:
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


def _overlap(one: Any, other: Any) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=10_000))  # type: ignore[arg-type]  # not typed in NumPy
    except np.exceptions.TooHardError:
        return True


def _spaces_in(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    """Yield a space and the spaces in it, which have generators of their own."""
    yield space
    parts = getattr(space, "spaces", ())
    for part in parts.values() if isinstance(parts, Mapping) else parts:
        yield from _spaces_in(part)


# Writing.


class _Writer:
    """Writes values into a list of entries; a value that is met twice has one entry."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.entries: list[list[Any]] = [["layer", i] for i in range(len(layers))]
        self._places = {id(layer): i for i, layer in enumerate(layers)}
        self._seen: list[Any] = []  # alive, so that no two of them have one id
        self._arrays: dict[int, list[tuple[str, Any]]] = {}  # arrays and their places by the owner of their memory

    def attributes(self, owner: Any, place: str) -> dict[str, Any]:
        parts = _attributes_of(owner).items()
        return {name: self.node(value, f"{place}.{name}") for name, value in parts if not _is_left(value)}

    def node(self, value: Any, place: str) -> Any:
        """Return a value as a node."""
        if type(value) in SCALARS or (isinstance(value, np.generic) and has_no_objects(value.dtype)):
            return value
        if id(value) not in self._places:
            self._seen.append(value)
            index = self._places[id(value)] = len(self.entries)
            self.entries.append([])
            self.entries[index] = self._entry(value, place)
        return (self._places[id(value)],)

    def _entry(self, value: Any, place: str) -> list[Any]:
        for is_kind, write in _WRITERS:
            if is_kind(value):
                return write(self, value, place)
        kind = type(value)
        raise ObstacleError(f"the attribute {place} is a {kind.__module__}.{kind.__qualname__}")

    def array(self, value: Any, place: str) -> list[Any]:
        owner = _owner_of_memory(value)
        others = self._arrays.setdefault(id(owner), [])
        for other, array in others:
            if np.may_share_memory(value, array) and _overlap(value, array):
                raise ObstacleError(f"the attribute {place} shares its memory with {other}")
        others.append((place, value))
        is_own = owner is value or isinstance(owner, (np.ndarray, bytes, bytearray))
        return ["array" if is_own else "memory", value.copy()]

    def container(self, value: Any, place: str) -> list[Any]:
        extra = None
        if isinstance(value, collections.deque):
            extra = value.maxlen
        elif isinstance(value, collections.defaultdict):
            extra = self.node(value.default_factory, f"{place}.default_factory")
        return ["container", type(value).__name__, self._items(value, place), extra]

    def _items(self, value: Any, place: str) -> list[Any]:
        if isinstance(value, dict):
            return [
                self.node(part, f"{place}[{key!r:.40}]") for key, content in value.items() for part in (key, content)
            ]
        return [self.node(part, f"{place}[{i}]") for i, part in enumerate(value)]

    def method(self, value: Any, place: str) -> list[Any]:
        return ["method", self.node(value.__self__, place), value.__func__.__name__]

    def space(self, value: Any, place: str) -> list[Any]:
        return ["space", [self.node(space._np_random, place) for space in _spaces_in(value)]]

    def object(self, value: Any, place: str) -> list[Any]:
        items = None if _base_of(type(value)) is object else self._items(value, place)
        return ["object", _path_of(type(value)), self.attributes(value, place), items]


_WRITERS: list[tuple[Callable[[Any], bool], Callable[[_Writer, Any, str], list[Any]]]] = [
    (lambda value: type(value) is np.ndarray and has_no_objects(value.dtype), _Writer.array),
    (lambda value: type(value) in _CONTAINERS.values(), _Writer.container),
    (lambda value: type(value) is np.random.Generator, lambda _, value, place: ["generator", get_rng(value)]),
    (
        lambda value: type(value) is np.random.RandomState,
        lambda _, value, place: ["RandomState", copy_nested(value.get_state(legacy=False))],
    ),
    (lambda value: type(value) is random.Random, lambda _, value, place: ["Random", value.getstate()]),
    (
        lambda value: isinstance(value, enum.Enum),
        lambda _, value, place: ["enum", _path_of(type(value)), value.name],
    ),
    (_is_constant, lambda _, value, place: ["constant", _describe(value)]),
    (lambda value: isinstance(value, types.MethodType), _Writer.method),
    (lambda value: isinstance(value, gym.Space), _Writer.space),
    (simulators.is_simulator, lambda _, value, place: ["simulator", simulators.get_state(value)]),
    (lambda value: _is_pure(type(value), _base_of(type(value))), _Writer.object),
]


# Reading.


class _Reader:
    """Makes the values of nodes again, next to the values at the same places of a new env."""

    def __init__(self, layers: Sequence[Any], entries: Sequence[Sequence[Any]]) -> None:
        self.changes: list[Callable[[], None]] = []  # what is changed in place, once all is made
        self._layers, self._entries = layers, entries
        self._made: dict[int, Any] = {}
        self._used: set[int] = set()  # generators of the new env that have their state
        self._classes = [base for layer in layers for base in type(layer).__mro__[:-1]]

    def attributes(self, owner: Any, nodes: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the attributes of an object; what a new env keeps is taken from the object at its place."""
        here = {} if owner is _MISSING else _attributes_of(owner)
        left = {name: value for name, value in here.items() if _is_left(value)}
        made = {name: self.value(node, here.get(name, _MISSING), f"{place}.{name}") for name, node in nodes.items()}
        return {**left, **made}

    def value(self, node: Any, here: Any, place: str) -> Any:
        """Return the value of a node; `here` is what the new env has at its place, or `_MISSING`."""
        if type(node) is not tuple:
            return node
        [index] = node
        if index not in self._made:
            kind, *parts = self._entries[index]
            made = _READERS[kind](self, index, here, place, *parts)
            self._made[index] = made
        return self._made[index]

    def layer(self, index: int, here: Any, place: str, number: int) -> Any:
        return self._layers[number]

    def array(self, index: int, here: Any, place: str, array: Any) -> Any:
        return array.copy(order="K")

    def memory(self, index: int, here: Any, place: str, array: Any) -> Any:
        """Return an array whose memory belongs to another object: what the new env has there gets the numbers."""
        fits = type(here) is np.ndarray and here.shape == array.shape and here.dtype == array.dtype
        if not (fits and here.flags.writeable):
            raise ObstacleError(f"the attribute {place} is an array in the memory of another object")
        self.changes.append(lambda: np.copyto(here, array))
        return here

    def container(self, index: int, here: Any, place: str, name: str, nodes: Sequence[Any], extra: Any) -> Any:
        cls = _CONTAINERS[name]
        factory = getattr(here, "default_factory", _MISSING)
        arguments = {"deque": ((), extra), "defaultdict": (self.value(extra, factory, place),)}.get(name, ())
        if issubclass(cls, (tuple, frozenset)):
            return cls(self._items(nodes, here, place, False))
        made = self._made[index] = cls(*arguments)
        self._fill(made, self._items(nodes, here, place, issubclass(cls, dict)))
        return made

    def _items(self, nodes: Sequence[Any], here: Any, place: str, is_dict: bool) -> list[Any]:
        """Return the items of a container, or the keys and values of a dict in turn."""
        if is_dict:
            here = here if isinstance(here, dict) else {}
            made: list[Any] = []
            for key, node in zip(nodes[::2], nodes[1::2], strict=True):
                made.append(self.value(key, _MISSING, place))
                made.append(self.value(node, here.get(made[-1], _MISSING), f"{place}[{made[-1]!r:.40}]"))
            return made
        known = list(here) if isinstance(here, (list, tuple, collections.deque)) else []
        known += [_MISSING] * (len(nodes) - len(known))
        return [self.value(node, known[i], f"{place}[{i}]") for i, node in enumerate(nodes)]

    @staticmethod
    def _fill(made: Any, items: list[Any]) -> None:
        if isinstance(made, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                dict.__setitem__(made, key, value)
        elif isinstance(made, set):
            made.update(items)
        else:
            type(made).extend(made, items)

    def generator(self, index: int, here: Any, place: str, state: Any) -> Any:
        kind = getattr(np.random, state["bit_generator"])
        fits = type(here) is np.random.Generator and type(here.bit_generator) is kind and id(here) not in self._used
        made = here if fits else np.random.Generator(kind(0))
        self._used.add(id(made))
        self.changes.append(lambda: set_rng(made, state))
        return made

    def random_state(self, index: int, here: Any, place: str, state: Any) -> Any:
        made = here if type(here) is np.random.RandomState and id(here) not in self._used else np.random.RandomState(0)
        self._used.add(id(made))
        self.changes.append(lambda: made.set_state(state))
        return made

    def random(self, index: int, here: Any, place: str, state: Any) -> Any:
        made = here if type(here) is random.Random and id(here) not in self._used else random.Random(0)
        self._used.add(id(made))
        self.changes.append(lambda: made.setstate(state))
        return made

    def enum(self, index: int, here: Any, place: str, path: str, name: str) -> Any:
        cls = self._find(path, type(here), place)
        if not issubclass(cls, enum.Enum):
            raise ObstacleError(f"the attribute {place} is a {path}, which is no Enum here")
        return cls.__members__[name]

    def constant(self, index: int, here: Any, place: str, described: str) -> Any:
        if here is not _MISSING and _is_constant(here) and _describe(here) == described:
            return here
        found = self._search(described)
        if found is not None and _is_constant(found):
            return found
        raise ObstacleError(f"the attribute {place} is {described}, and a new env has another value")

    def method(self, index: int, here: Any, place: str, owner: Any, name: str) -> Any:
        made = self.value(owner, getattr(here, "__self__", _MISSING), place)
        function = next((vars(base)[name] for base in type(made).__mro__ if name in vars(base)), None)
        if isinstance(made, type):
            found = vars(made).get(name)
            function = found.__func__ if isinstance(found, classmethod) else None
        if not isinstance(function, types.FunctionType):
            raise ObstacleError(f"the attribute {place} is a method {name!r} that is not found here")
        return types.MethodType(function, made)

    def space(self, index: int, here: Any, place: str, nodes: Sequence[Any]) -> Any:
        spaces = list(_spaces_in(here)) if isinstance(here, gym.Space) else []
        if len(spaces) != len(nodes):
            raise ObstacleError(f"the attribute {place} is a space that a new env does not have")
        for space, node in zip(spaces, nodes, strict=True):
            made = self.value(node, space._np_random, place)
            self.changes.append(lambda space=space, made=made: setattr(space, "_np_random", made))  # type: ignore[misc]
        return here

    def simulator(self, index: int, here: Any, place: str, state: Any) -> Any:
        if not simulators.fits(here, state):
            raise ObstacleError(f"the attribute {place} is a simulator that a new env does not have")
        self.changes.append(lambda: simulators.set_state(here, state))
        return here

    def object(self, index: int, here: Any, place: str, path: str, nodes: Mapping[str, Any], items: Any) -> Any:
        cls: Any = self._find(path, type(here), place)
        base: Any = _base_of(cls)
        if not _is_pure(cls, base):
            raise ObstacleError(f"the attribute {place} is a {path}, which is not in pure Python here")
        same = here if type(here) is cls else _MISSING
        parts = [] if items is None else self._items(items, same, place, base is dict)
        made = tuple.__new__(cls, parts) if base is tuple else base.__new__(cls)
        self._made[index] = made
        if base is not object and base is not tuple:
            self._fill(made, parts)
        _set_attributes(made, self.attributes(same, nodes, place))
        return made

    def _find(self, path: str, here: type, place: str) -> type:
        """Return a class: the one that the new env has at this place, or one in the packages of the env."""
        if _path_of(here) == path:
            self._classes.append(here)
            return here
        found = self._search(path)
        if not isinstance(found, type):
            raise ObstacleError(f"the attribute {place} is a {path}, which is not found here")
        return found

    def _search(self, path: str) -> Any:
        """Return what the packages of the env call by this name, or `None`; nothing is imported."""
        module, _, name = path.partition(":")
        packages = {cls.__module__.partition(".")[0] for cls in self._classes}
        places: list[Any] = [sys.modules.get(module)] if module.partition(".")[0] in packages else []
        for cls in self._classes:  # a class that was sent here knows what its own methods name
            functions = (value for value in vars(cls).values() if isinstance(value, types.FunctionType))
            places += [types.SimpleNamespace(**function.__globals__) for function in functions][:1]
        for found in places:
            for part in name.split("."):
                found = getattr(found, part, None)
            if isinstance(found, (type, types.FunctionType)) and _path_of(found) == path:
                return found
        return None


_READERS: dict[str, Callable[..., Any]] = {
    **{kind: getattr(_Reader, kind) for kind in ("layer", "array", "memory", "container", "generator", "enum")},
    **{kind: getattr(_Reader, kind) for kind in ("constant", "method", "space", "simulator", "object")},
    "RandomState": _Reader.random_state,
    "Random": _Reader.random,
}
