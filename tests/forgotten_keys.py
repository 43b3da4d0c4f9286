"""Which keys of the state of an algorithm a resumed run needs: it forgets each of them in turn, and trains on.

A key is a path in the state without the numbers of runners, envs and parameters and the names of modules, so that it
stands for one field of one class, wherever this field is. What the runners of an evaluation hold has the keys of other
runners, and what loggers hold has the same keys in each place; the whole of it in each place is a key, too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector.utils import create_empty_array

from corral import Algorithm, AlgorithmConfig
from corral.core.metrics.entry import Entry
from corral.core.metrics.logger import MetricsLogger
from corral.errors import CorralError
from corral.runs.checkpoint import codec
from exact_runs import differences

Path = tuple[Any, ...]
Keys = dict[str, list[Path]]
_MISSING: Any = object()
_INDIVISIBLE = ("latest_numbers", "latest", "made_for", "objects", "layers")
_WITH_PARTS = ("evaluation", "exploration", "metrics", "callbacks", "events", "episodes")
_IDENTITY = ("path", "reduction", "site")  # of a key of a logger
_MODULES = ("one", "other", "default_policy")


def install_clock(patch: Any) -> None:
    """Let all that measures time in this process read a clock that moves by 1/1024 s whenever it is read.

    So measured times are equal in equal runs, and differ where the time before was forgotten.
    """
    ticks = itertools.count()

    def clock() -> float:
        return next(ticks) / 1024

    for name in ("perf_counter", "time", "monotonic"):
        patch.setattr(time, name, clock)
    make: Any = MetricsLogger.__init__
    patch.setattr(make, "__defaults__", (clock, *make.__defaults__[1:]))


# Keys.


def keys_of(state: Any) -> Keys:
    """The paths in a state, by key."""
    found: Keys = {}
    for path, name in _places(state, (), ""):
        for prefix in ("evaluation/runners/runners/*/", "runners/runners/*/"):
            name = "runner/" + name.removeprefix(prefix) if name.startswith(prefix) else name
        for part, shown in (("metrics/keys/", "logger/"), ("callbacks/callbacks/", "callback/")):
            name = shown + name.rpartition(part)[2] if part in name else name
        found.setdefault(name, []).append(path)
    return found


def _places(value: Any, path: Path, name: str) -> Iterator[tuple[Path, str]]:
    is_whole = path[-1:] and path[-1] in _WITH_PARTS
    if not _is_divisible(value, path) or is_whole:
        yield path, name
    if not _is_divisible(value, path):
        return
    is_logger = path[-2:] == ("metrics", "keys")
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    alike = isinstance(value, Sequence) and len({type(part) for part in value}) == 1
    for part_name, part in pairs:
        shown = "*" if alike or part_name in _MODULES else str(part_name)
        if isinstance(value, Mapping) and type(part_name) is int:
            shown = "*"
        if is_logger:
            shown = type(Entry.from_state(part).reducer).__name__
            shown += " clear_on_reduce" * part["reduction"].get("clear_on_reduce", False)
            yield (*path, part_name), f"{name}/{shown}"
        if "weights" in path[-2:] and not isinstance(part, Mapping):
            shown = shown.split(".")[0]
        if not (path[-3:-1] == ("metrics", "keys") and part_name in _IDENTITY):
            yield from _places(part, (*path, part_name), f"{name}/{shown}" if name else shown)


def _is_divisible(value: Any, path: Path) -> bool:
    if (path and path[-1] in _INDIVISIBLE) or path[-2:-1] == ("reducer",):
        return False
    if isinstance(value, Mapping):
        return bool(value) and "uinteger" not in value  # the state of a generator
    parts = value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(part, (Mapping, list, tuple, np.ndarray)) for part in parts)


# Forgetting.


def forget(state: Any, fresh: Any, paths: Sequence[Path]) -> Any:
    """A state in which the parts at some paths are as in a run that has just begun."""
    for path in reversed(paths):  # entries of loggers vanish, the last ones first
        state = _with(state, path, _fresh(state, fresh, path))
    return state


def _fresh(state: Any, fresh: Any, path: Path) -> Any:
    """What a part of the state is in a run that has just begun, or `_MISSING`."""
    value, new = _at(state, path), _at(fresh, path)
    if "keys" in path[:-1] and "metrics" in path:
        start = len(path) - path[::-1].index("keys") + 1
        if len(path) == start:
            return _MISSING
        entry = Entry.from_state(_at(state, path[:start]))
        entry.reducer.clear()
        entry.is_new = False
        return _at({**entry.get_state(), "is_reserved": False, "shape": []}, path[start:])
    if isinstance(value, np.ndarray):
        is_alike = isinstance(new, np.ndarray) and (new.shape, new.dtype) == (value.shape, value.dtype)
        return new if is_alike else np.zeros_like(value)
    if new is not _MISSING and (value is None or new is None or type(new) is type(value)):
        return new
    is_generator = isinstance(value, Mapping) and "bit_generator" in value
    return None if value is None or is_generator else type(value)()


def _at(value: Any, path: Path) -> Any:
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return value


def _with(value: Any, path: Path, part: Any) -> Any:
    """A copy of a nested value with another part at a path, or without it; all else is shared."""
    if not path:
        return part
    name, rest = path[0], path[1:]
    new = _with(value[name], rest, part)
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    changed = {key: new if key == name else old for key, old in pairs}
    if new is _MISSING:
        del changed[name]
    return changed if isinstance(value, Mapping) else type(value)(changed.values())


# Runs.


def observe(algo: Algorithm) -> Iterator[Any]:
    """All that a run shows, bit by bit: now, in two further iterations, and in its state after them."""
    yield {"latest": algo.latest_numbers, "actions": _act(algo)}
    try:
        for _ in range(2):
            yield {name: value for name, value in algo.train().items() if name != "config"}
    except CorralError as error:
        yield f"{type(error).__name__}: {error}"
        return
    yield algo.get_state()


def _act(algo: Algorithm) -> list[Any]:
    """Actions of each module, which move its generator."""
    found = []
    for module_id in algo.module_ids:
        policy = algo.acting_policy(module_id)
        obs = create_empty_array(policy.observation_space, 1, np.zeros)
        state = policy.initial_states(1) if policy.has_memory else None
        found.append(algo.compute_actions(obs, module_id=module_id, state=state, explore=True))
    return found


def as_saved(state: Any) -> Any:
    """A state as a file gives it back."""
    return codec.decode(codec.encode(state))


class Study:
    """A run with its state at the beginning and after two iterations, and with what it did after that.

    Attributes:
        keys: Keys of the state that are not what they were at the beginning.
        unmoved: Keys of the state that are what they were at the beginning.
    """

    def __init__(self, make: Callable[[], AlgorithmConfig], num_iterations: int = 3) -> None:
        self.make = make
        with make().build() as algo:
            self.fresh = as_saved(algo.get_state())
            for _ in range(num_iterations):
                algo.train()
                _act(algo)
            self.state = as_saved(algo.get_state())
            self.expected = list(observe(algo))
        keys = keys_of(self.state)
        self.keys = {name: paths for name, paths in keys.items() if self.changed(paths)}
        self.unmoved = {name: paths for name, paths in keys.items() if name not in self.keys}

    def changed(self, paths: Sequence[Path]) -> bool:
        """Whether a state without these parts is another one."""
        return any(
            _fresh(self.state, self.fresh, path) is _MISSING
            or differences(_at(self.state, path), _fresh(self.state, self.fresh, path))
            for path in paths
        )

    def is_empty(self, paths: Sequence[Path]) -> bool:
        """Whether a state has nothing at these paths, where another run has more."""
        values = [_at(self.state, path) for path in paths]
        return all(value is None or (isinstance(value, (Mapping, Sequence)) and not value) for value in values)

    def makes_no_difference(self, names: Sequence[str]) -> list[str]:
        """The given keys without which a resumed run does the same as with them."""
        algo = self.make().build()
        try:
            algo.set_state(self.state)
            resumed = list(observe(algo))
            found = []
            for name in names:
                if algo._stage == "stopped":
                    algo = self.make().build()
                try:
                    algo.set_state(forget(self.state, self.fresh, self.keys[name]))
                    pairs = zip(observe(algo), resumed, strict=True)
                    if not any(differences(one, other) for one, other in pairs):
                        found.append(name)
                except Exception:  # it is refused, or nothing can continue without it
                    continue
            return found
        finally:
            algo.stop()
