"""The messages of clients, checked: what a client sent, as arrays that fit the spaces.

Nothing in a message is executed, and no size that a message names is trusted before the bytes are there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import msgpack
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.space_descriptions import DTYPE_KINDS
from corral.core.tree import Tree
from corral.envs.checks import mismatch
from corral.errors import ClientMessageError

FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {"protocol": int, "num_envs": int, "name": str, "token": str, "session": str, "wants_policy": bool},
    "steps": {
        "id": int,
        "envs": list,
        "obs": (dict, list),
        **dict.fromkeys(("rewards", "begins", "terminated", "truncated", "infos", "counts"), list),
        **dict.fromkeys(("actions", "outputs", "draws"), (dict, list)),
        "agents": dict,
        "weights_version": int,
    },
    "drop": {"id": int, "envs": list},
    "ping": {"id": int},
    "bye": {},
}
"""Fields of each type of message, and their types."""
NEEDED = {"hello": ("protocol",), "steps": ("id", "envs"), "drop": ("id", "envs"), "ping": ("id",)}
"""Fields that a message must have."""
ACTED = ("outputs", "draws", "weights_version")
"""Fields of `steps` that belong together."""
MAX_ENTRIES = 65_536
"""Entries of a message `steps`."""
MAX_AXES = 32
"""Axes of an array."""
MAX_NUMBER = 2.0**24
"""The largest reward, observation and action.

Training is in float32, which holds whole numbers up to here, and numbers up to 3e38: the square of a gradient, which is
the product of an error of returns and an observation, must be smaller.
"""
MAX_OUTPUT = 1e10
"""The largest output of a policy; of an illegal action, it is -1e9."""
MAX_ID = 2**53
"""The largest number that a client may give a message; every language holds it exactly."""
DTYPE_NAMES = re.compile(r"[<>|=]?[biuf]\d{1,2}|u?int\d{1,2}|float\d\d|bool")
"""Names of dtypes that NumPy is asked for; it warns of others that it knew once."""


@dataclass
class Entries:
    """What a message `steps` says, for K entries in the order of time.

    Attributes:
        envs: Number of the env in its client, int64 `[K]`.
        obs: Observations, a tree of `[K, ...]`.
        rewards: Rewards of the actions before, float64 `[K]`.
        begins: Whether an episode begins with the observation, bool `[K]`.
        terminated: Whether the episode ended with it, bool `[K]`.
        truncated: Whether it was cut off with it, bool `[K]`.
        actions: Actions that the client took itself, in the units of the env, a tree of `[K, ...]`, or `None`.
        outputs: What the policy that the client was sent says of the observations, float32 `[K, D]`, or `None`.
        draws: What it drew, whose mode is the action, float32 `[K, D]`, or `None`.
        taken: Module actions that stand for `actions` or `draws`, `[K, ...]`; filled in by the runner.
        weights_version: Version of the weights of this policy.
        infos: Infos of the entries, K of them, or `None`.
        counts: Whether the episode that begins counts, bool `[K]`, or `None` for true everywhere.
    """

    envs: NDArray[np.int64]
    obs: Tree
    rewards: NDArray[np.float64]
    begins: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    actions: Tree | None = None
    outputs: NDArray[np.float32] | None = None
    draws: NDArray[np.float32] | None = None
    taken: NDArray[Any] | None = None
    weights_version: int = 0
    infos: list[dict[str, Any]] | None = None
    counts: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        """Return the number of entries K."""
        return len(self.envs)

    @cached_property
    def ends(self) -> NDArray[np.bool_]:
        """Whether the episode ended, bool `[K]`."""
        return self.terminated | self.truncated

    @property
    def is_acted(self) -> bool:
        """Whether the client acted itself."""
        return self.actions is not None or self.draws is not None


def read_message(body: bytes | memoryview) -> dict[str, Any]:
    """Return a message, with fields that are known and of the right types.

    Raises:
        ClientMessageError: It is no such message.
    """
    try:
        # No extension types, which could be dates, and no keys but text. A length that a message names is at most what
        # it has in bytes, so that msgpack never makes more room than the message takes.
        message = msgpack.unpackb(body, ext_hook=_refuse_extension, strict_map_key=True)
    except ClientMessageError:
        raise
    except Exception as error:  # msgpack raises many
        raise ClientMessageError("message", f"is no msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(message, dict):
        raise ClientMessageError("message", f"must be a map, got {type(message).__name__}")
    kind = message.pop("type", None)
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ClientMessageError("type", f"must be one of {', '.join(FIELDS)}, got {_shown(kind)}")
    check_fields(kind, message, FIELDS[kind])
    _check_needed(kind, message)
    return {"type": kind, **message}


def check_fields(kind: str, message: Mapping[str, Any], known: Mapping[str, type | tuple[type, ...]]) -> None:
    """Check that all fields of a message, or of a part of it, are known and of the right types.

    Raises:
        ClientMessageError: One is not; the error names it as a field of `kind`.
    """
    for name, value in message.items():
        if name not in known:
            raise ClientMessageError(f"{kind}.{_shown(name)}", f"is no field: there are {', '.join(known) or 'none'}")
        expected = known[name]
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            names = " or ".join(one.__name__ for one in (expected if isinstance(expected, tuple) else (expected,)))
            raise ClientMessageError(f"{kind}.{name}", f"must be {names}, got {_shown(value)}")


def _check_needed(kind: str, message: Mapping[str, Any]) -> None:
    for name in NEEDED.get(kind, ()):
        if name not in message:
            raise ClientMessageError(f"{kind}.{name}", "is missing")
    if not 0 <= message.get("id", 0) <= MAX_ID:
        raise ClientMessageError(f"{kind}.id", f"must be 0 to {MAX_ID}, got {message['id']}")


def read_entries(
    message: Mapping[str, Any], num_envs: int, obs_space: Tree, action_space: Tree, output_space: spaces.Box
) -> Entries:
    """Return what a message `steps` says.

    Args:
        message: The message.
        num_envs: Number of envs of the client.
        obs_space: Space of one observation, a tree of spaces without Dict and Tuple.
        action_space: Space of one action of the env, such a tree too.
        output_space: Space of what the policy says of one observation.

    Raises:
        ClientMessageError: A part does not fit the spaces or the other parts; the error names it.
    """
    if "agents" in message or "obs" not in message:
        name = "agents" if "agents" in message else "obs"
        problem = "this server has one agent: say obs and rewards in the message itself"
        raise ClientMessageError(f"steps.{name}", problem if name == "agents" else "is missing")
    envs = read_envs(message["envs"], num_envs, "steps.envs")
    count = len(envs)
    flags: dict[str, Any] = {
        name: read_flags(message.get(name), count, f"steps.{name}") for name in ("begins", "terminated", "truncated")
    }
    choices: dict[str, Any] = {
        name: read_arrays(message[name], space, count, f"steps.{name}", largest)
        for name, space, largest in (
            ("actions", action_space, MAX_NUMBER),
            ("outputs", output_space, MAX_OUTPUT),
            ("draws", output_space, MAX_OUTPUT),
        )
        if name in message
    }
    entries = Entries(
        envs=envs,
        obs=read_arrays(message["obs"], obs_space, count, "steps.obs"),
        rewards=read_rewards(message.get("rewards"), count, "steps.rewards"),
        infos=read_infos(message.get("infos"), count, "steps.infos"),
        counts=read_flags(message["counts"], count, "steps.counts") if "counts" in message else None,
        weights_version=message.get("weights_version", 0),
        **flags,
        **choices,
    )
    check_ends(entries)
    given = [name for name in (*ACTED, "actions") if name in message]
    if given not in ([], [*ACTED], ["actions"]):
        needed = f"the policy that a client was sent acts by {', '.join(ACTED)}, and a client of its own by actions"
        raise ClientMessageError(f"steps.{given[0]}", f"{needed}; got only {' and '.join(given)}")
    return entries


def check_ends(entries: Entries) -> None:
    """Check that no episode begins and ends with one observation, and that only one that begins may not count.

    Raises:
        ClientMessageError: One does.
    """
    if (both := entries.begins & (entries.terminated | entries.truncated)).any():
        place = int(np.flatnonzero(both)[0])
        raise ClientMessageError(f"steps.begins[{place}]", "an episode cannot begin and end with one observation")
    if entries.counts is not None and (late := ~entries.counts & ~entries.begins).any():
        place = int(np.flatnonzero(late)[0])
        raise ClientMessageError(f"steps.counts[{place}]", "can be false only where an episode begins")


def read_envs(given: list[Any], num_envs: int, place: str) -> NDArray[np.int64]:
    """Return numbers of envs, int64 `[K]`.

    Raises:
        ClientMessageError: There is none, there are too many, or one is no env of the client.
    """
    if not 1 <= len(given) <= MAX_ENTRIES:
        raise ClientMessageError(place, f"must have 1 to {MAX_ENTRIES} entries, got {len(given)}")
    for index, env in enumerate(given):
        if type(env) is not int or not 0 <= env < num_envs:
            raise ClientMessageError(f"{place}[{index}]", f"must be 0 to {num_envs - 1}, got {_shown(env)}")
    return np.array(given, np.int64)


def read_flags(given: list[Any] | None, count: int, place: str) -> NDArray[np.bool_]:
    """Return flags, bool `[count]`, false if none are given.

    Raises:
        ClientMessageError: They are no such flags.
    """
    if given is None:
        return np.zeros(count, np.bool_)
    _check_count(given, count, place)
    for index, flag in enumerate(given):
        if type(flag) is not bool:
            raise ClientMessageError(f"{place}[{index}]", f"must be true or false, got {_shown(flag)}")
    return np.array(given, np.bool_)


def read_rewards(given: list[Any] | None, count: int, place: str) -> NDArray[np.float64]:
    """Return rewards, float64 `[count]`, zeros if none are given.

    Raises:
        ClientMessageError: They are no such rewards.
    """
    if given is None:
        return np.zeros(count)
    _check_count(given, count, place)
    for index, reward in enumerate(given):
        if type(reward) not in (int, float) or not abs(reward) <= MAX_NUMBER:
            problem = f"must be a number from -{MAX_NUMBER:,.0f} to {MAX_NUMBER:,.0f}, got {_shown(reward)}"
            raise ClientMessageError(f"{place}[{index}]", f"{problem}: scale the rewards, for training is in float32")
    return np.array(given, np.float64)


def read_infos(given: list[Any] | None, count: int, place: str) -> list[dict[str, Any]] | None:
    """Return infos, one dict for each entry, or `None` if none are given.

    Raises:
        ClientMessageError: They are no such infos.
    """
    if given is None:
        return None
    _check_count(given, count, place)
    for index, info in enumerate(given):
        if not isinstance(info, dict):
            raise ClientMessageError(f"{place}[{index}]", f"must be a map, got {_shown(info)}")
    return given


def _check_count(given: Sequence[Any], count: int, place: str) -> None:
    if len(given) != count:
        raise ClientMessageError(place, f"must have {count} entries as envs has, got {len(given)}")


def read_arrays(given: Any, space: Tree, count: int, place: str, largest: float = MAX_NUMBER) -> Tree:
    """Return arrays `[count, ...]` for a tree of spaces.

    Args:
        given: What was sent.
        space: A tree of spaces without Dict and Tuple.
        count: Number of entries.
        place: Name of the arrays in errors.
        largest: Largest number of a Box; its bounds are not enforced.

    Raises:
        ClientMessageError: They do not fit the spaces; the error names the part.
    """
    if isinstance(space, dict):
        if not isinstance(given, dict) or given.keys() != space.keys():
            got = f"the keys {', '.join(map(_shown, given))}" if isinstance(given, dict) else _shown(given)
            raise ClientMessageError(place, f"must be a map with the keys {', '.join(space)}, got {got}")
        return {name: read_arrays(given[name], part, count, f"{place}.{name}", largest) for name, part in space.items()}
    if isinstance(space, tuple):
        if not isinstance(given, list) or len(given) != len(space):
            raise ClientMessageError(place, f"must be a list of {len(space)} arrays, got {_shown(given)}")
        parts = zip(given, space, strict=True)
        return tuple(read_arrays(part, inner, count, f"{place}[{i}]", largest) for i, (part, inner) in enumerate(parts))
    array = _array(given, place)
    if problem := mismatch(space, array, "it", batch=(count,)):
        raise ClientMessageError(place, problem.removeprefix("it "))
    if isinstance(space, spaces.Box) and array.dtype.itemsize > 1:  # smaller ones hold only small numbers
        largest = min(largest, float(np.finfo(space.dtype).max)) if np.dtype(space.dtype).kind == "f" else largest
        if (found := max(float(array.max()), -float(array.min()))) > largest:
            problem = f"holds {found:,.6g}, and numbers may have a size of {largest:,.0f} at most"
            raise ClientMessageError(place, f"{problem}, for training is in float32: scale them, or subtract an offset")
    return array.astype(space.dtype, copy=False)


def _array(given: Any, place: str) -> NDArray[Any]:
    """Return one array: of a map with dtype, shape and data, or of nested lists of numbers."""
    if isinstance(given, list):
        return read_numbers(given, place)
    if not isinstance(given, dict):
        raise ClientMessageError(place, f"must be an array, got {_shown(given)}")
    if given.keys() != {"dtype", "shape", "data"}:
        raise ClientMessageError(
            place, f"an array is a map of dtype, shape and data, got the keys {', '.join(map(_shown, given))}"
        )
    array = unpack_array(given["dtype"], given["shape"], given["data"], place)
    if array.dtype.byteorder == ">":
        raise ClientMessageError(
            f"{place}.dtype", f"must be such as '<f4', '<i8' or '|u1', got {_shown(given['dtype'])}"
        )
    return array


def read_numbers(given: Any, place: str) -> NDArray[Any]:
    """Return an array of nested lists of numbers, or of arrays of one shape.

    What is in the lists is looked at first: NumPy would give each text the room of the longest one.

    Raises:
        ClientMessageError: They are no such lists.
    """
    level, shape = [given], tuple[int, ...]()
    while (kinds := set(map(type, level))) == {list}:
        lengths = set(map(len, level))
        if len(lengths) > 1 or len(shape) == MAX_AXES:
            got = f"lengths {min(lengths)} and {max(lengths)}" if len(lengths) > 1 else f"more than {MAX_AXES} axes"
            raise ClientMessageError(place, f"must be numbers, or lists of numbers of one length, got {got}")
        shape, level = (*shape, *lengths), [*chain.from_iterable(level)]
    are_arrays = np.ndarray in kinds
    if not kinds <= {int, float, bool, np.ndarray} or (are_arrays and len(set(map(np.shape, level))) > 1):
        strange = next((one for one in level if type(one) not in (int, float, bool, np.ndarray)), given)
        raise ClientMessageError(place, f"must be numbers, or lists of numbers of one length, got {_shown(strange)}")
    try:
        array = np.array(level)
        array = array.reshape((*shape, *array.shape[1:]))
    except (ValueError, OverflowError) as error:
        raise ClientMessageError(place, f"must be numbers, or lists of numbers of one length: {error}") from error
    if array.dtype.kind not in DTYPE_KINDS:
        raise ClientMessageError(place, f"must hold numbers, got {_shown(given)}")
    return array


def unpack_array(name: Any, shape: Any, data: Any, place: str) -> NDArray[Any]:
    """Return the array of the name of a dtype, a shape, and bytes.

    Raises:
        ClientMessageError: They are of other types, or do not fit each other; the error names the part.
    """
    try:
        dtype = np.dtype(name) if isinstance(name, str) and DTYPE_NAMES.fullmatch(name) else None
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype.kind not in DTYPE_KINDS:
        raise ClientMessageError(f"{place}.dtype", f"must be such as '<f4', '<i8' or '|u1', got {_shown(name)}")
    is_shape = isinstance(shape, list) and len(shape) <= MAX_AXES and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape:
        raise ClientMessageError(f"{place}.shape", f"must be a list of numbers, got {_shown(shape)}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if not isinstance(data, bytes) or len(data) != num_bytes:
        got = f"{len(data)} bytes" if isinstance(data, bytes) else _shown(data)
        raise ClientMessageError(f"{place}.data", f"must be {num_bytes} bytes, got {got}")
    if dtype.kind == "b" and data.translate(None, b"\x00\x01"):
        raise ClientMessageError(f"{place}.data", "must hold bytes 0 and 1 for a dtype of true and false")
    try:
        return np.frombuffer(data, dtype).reshape(shape)
    except ValueError as error:  # such as axes that are too long, next to one without entries
        raise ClientMessageError(
            f"{place}.shape", f"must be the shape of an array, got {_shown(shape)}: {error}"
        ) from error


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ClientMessageError("message", f"holds the extension type {code} of msgpack: send numbers, text and arrays")


def _shown(value: Any) -> str:
    """Return a value for an error message, cut short."""
    if isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'map'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
