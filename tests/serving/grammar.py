"""Messages of clients that are valid or nearly so: a grammar of both protocols, in which any part may be wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from corral.runners.serving.client import HEADER, pack_array

FIELDS = ("obs", "rewards", "begins", "terminated", "truncated", "infos", "counts", "actions", "outputs", "draws")
KINDS = ("EPISODES", "EPISODES_AND_GET_STATE", "GET_STATE", "GET_CONFIG", "PING", "episodes", "")


class Grammar:
    """Draws messages for observations of 4 numbers and 3 actions.

    Args:
        seed: Seed of what is drawn.
        wrong: Share of the parts that are replaced by another value.
    """

    def __init__(self, seed: int, wrong: float = 0.03) -> None:
        self.rng, self._wrong, self._id = random.Random(seed), wrong, 0

    def _part(self, make: Callable[[], Any]) -> Any:
        """Return a part of a message, or now and then any other value."""
        return self._anything() if self.rng.random() < self._wrong else make()

    def _anything(self, depth: int = 0) -> Any:
        rng = self.rng
        values = [None, True, False, 0, -1, 2**31, 2**53 + 1, 2**64 - 1, -(2**63), 0.0, -0.0, 1e300, 3e38, 2.0**24 + 2]
        values += [
            float("nan"),
            float("inf"),
            float("-inf"),
            "",
            "steps",
            "\x1b[2J\n",
            "a" * 5000,
            "\u202e",
            b"",
            b"\xff\xfe",
        ]
        values += [
            {},
            [],
            [[]],
            [[], [1]],
            ["a" * 3000, *["b"] * 300],
            [None],
            {"dtype": "<f4"},
            {"": 0},
            list(range(500)),
        ]
        if depth < 3 and rng.random() < 0.3:
            inner = [self._anything(depth + 1) for _ in range(rng.randrange(4))]
            return inner if rng.random() < 0.6 else {str(index): one for index, one in enumerate(inner)}
        if rng.random() < 0.03:
            return _nested(rng.choice((30, 400, 2000)))
        return rng.choice(values)

    def _array(self, make: Callable[[], Any]) -> Any:
        array = np.array(make())
        if self.rng.random() < 0.5:
            return self._part(array.tolist)
        found = pack_array(array)
        shapes = ([0, 2**40, 2**40], [2**62, 4], [-1, 4], [], [1] * 33, [0], [True], "4", [2, 2])
        return {
            "dtype": self._part(lambda: found["dtype"] if self.rng.random() < 0.95 else self.rng.choice(DTYPES)),
            "shape": self._part(lambda: found["shape"] if self.rng.random() < 0.95 else self.rng.choice(shapes)),
            "data": self._part(lambda: found["data"]),
        }

    def steps(self) -> dict[str, Any]:
        rng, self._id = self.rng, self._id + 1
        count = rng.choice((1, 1, 1, 2, 5))
        numbers = (0.0, 1.0, -3.5, 2.0**24, -1e-40, 65_504.0)
        made: dict[str, Callable[[], Any]] = {
            "obs": lambda: self._array(lambda: [[rng.choice(numbers) for _ in range(4)] for _ in range(count)]),
            "rewards": lambda: [self._part(lambda: rng.choice((0, 1.5, -(2.0**24)))) for _ in range(count)],
            "infos": lambda: [{"a": self._anything()} for _ in range(count)],
            "actions": lambda: self._array(lambda: [rng.randrange(3) for _ in range(count)]),
            "outputs": lambda: self._array(lambda: [[rng.uniform(-9, 9) for _ in range(3)] for _ in range(count)]),
            "draws": lambda: self._array(lambda: [[rng.uniform(-9, 9) for _ in range(3)] for _ in range(count)]),
        }
        flags = lambda: [self._part(lambda: rng.random() < 0.4) for _ in range(count)]  # noqa: E731
        message = {"type": "steps", "id": self._part(lambda: self._id), "envs": [self._part(lambda: 0)] * count}
        shares = {"obs": 1.0, "rewards": 0.9, "begins": 0.7, "terminated": 0.4, "truncated": 0.2}
        for name in FIELDS:
            if rng.random() < shares.get(name, 0.1):
                message[name] = self._part(made.get(name, flags))
        if rng.random() < 0.1:
            message["weights_version"] = self._part(lambda: rng.choice((0, 1, 7)))
        return message

    def native(self) -> bytes:
        """Return the frame of a message that follows hello."""
        rng = self.rng
        self._id += 1
        message = rng.choice(
            (
                *(self.steps,) * 6,
                lambda: {"type": "drop", "id": self._part(lambda: self._id), "envs": self._part(lambda: [0])},
                lambda: {"type": "ping", "id": self._part(lambda: self._id)},
                lambda: {"type": self._anything(), "id": self._id},
                lambda: {"type": "hello", "protocol": self._part(lambda: 1), "name": self._anything()},
                self._anything,
            )
        )()
        return _framed(HEADER.pack, _packed(message), rng)

    def hello(self) -> bytes:
        """Return the frame of a first message."""
        message = {"type": self._part(lambda: "hello"), "protocol": self._part(lambda: 1)}
        for name, value in (("num_envs", 1), ("name", "x\n\x1b[2J" * 50), ("session", ""), ("wants_policy", False)):
            if self.rng.random() < 0.4:
                message[name] = self._part(lambda value=value: value)
        return _framed(HEADER.pack, _packed(message), self.rng)

    def rllink(self) -> bytes:
        """Return the frame of a message of RLlink, in JSON or in msgpack."""
        rng = self.rng
        as_json = rng.random() < 0.5

        def array(values: Any) -> Any:
            if as_json or rng.random() < 0.3:
                return self._part(lambda: values)
            found = np.array(values)
            shape = [*found.shape] if rng.random() < 0.95 else rng.choice(([0, 2**40, 2**40], [2**62, 4], [-1], "4"))
            parts = {b"type": found.dtype.str, b"kind": b"", b"shape": shape, b"data": found.tobytes()}
            return {b"nd": self._part(lambda: True), **{key: self._part(lambda v=v: v) for key, v in parts.items()}}

        def episode() -> Any:
            count = rng.randrange(4)
            found = {
                "obs": array([[float(rng.randrange(3))] * 4 for _ in range(count + 1)]),
                "actions": array([rng.randrange(3) for _ in range(count)]),
                "rewards": array([rng.choice((0.0, 1.0, 2.0**24)) for _ in range(count)]),
            }
            for name in ("is_terminated", "is_truncated", "terminateds"):
                if rng.random() < 0.3:
                    found[name] = self._part(lambda: rng.random() < 0.7)
            if rng.random() < 0.3:
                found["id_"] = self._part(lambda: rng.choice(("a", "b")))
            if rng.random() < 0.3:
                found["action_dist_inputs"] = array([[0.0, 1.0, 2.0]] * count)
            return found

        message = {"type": self._part(lambda: rng.choice(KINDS[:1] * 6 + KINDS))}
        if isinstance(message["type"], str) and "EPISODES" in message["type"]:
            message["episodes"] = self._part(lambda: [self._part(episode) for _ in range(rng.randrange(3))])
        try:
            body = json.dumps(message, default=lambda value: None).encode() if as_json else _packed(message)
        except (TypeError, RecursionError):
            body = _packed(message)
        return _framed(lambda size: b"%08d" % size, body, rng)


DTYPES = (">f4", "<f2", "<f8", "<f16", "O", "<U4", "f4,f4", "<M8", "|V4", "<c8", "|b1", "<i8", "float32", "")


def _nested(depth: int) -> Any:
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


def _packed(message: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(message)
    except ValueError:  # nested too deep for msgpack to write
        return b"\x81\xa4type" + b"\x91" * 5000 + b"\xc0"
    return packed


def _framed(header: Callable[[int], bytes], body: bytes, rng: random.Random) -> bytes:
    """Return a frame, whose length and bytes are now and then others."""
    damaged = bytearray(body)
    if damaged and rng.random() < 0.05:
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    size = len(body) if rng.random() < 0.99 else rng.choice((0, 1, len(body) - 1, len(body) + 1, 2**31))
    return header(max(0, min(size, 99_999_999))) + bytes(damaged)
