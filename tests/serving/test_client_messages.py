"""What the policy server makes of messages, of well-formed ones and of others."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import msgpack
import numpy as np
import pytest
from grammar import Grammar
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from simulators import address_of, runner_of, served

from at_least import all_of
from corral import DQNConfig
from corral.core.spaces import space_tree
from corral.errors import ClientMessageError
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.runners.serving.client import pack_array, pack_message, unpack_array
from corral.runners.serving.messages import read_entries, read_message

BOX, PICKS = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3, start=1)
OUTPUTS = spaces.Box(-np.inf, np.inf, (3,))
DICT = spaces.Dict({"camera": spaces.Box(0, 255, (2, 2), np.uint8), "speed": BOX})


def read(message: dict[str, Any], num_envs: int = 4, obs: Any = BOX, actions: Any = PICKS) -> Any:
    found = read_message(msgpack.packb(message))
    return read_entries(found, num_envs, space_tree(obs), space_tree(actions), OUTPUTS)


def steps(**fields: Any) -> dict[str, Any]:
    return {"type": "steps", "id": 1, "envs": [0, 3], "obs": [[0.0, 1.0], [2.0, 3.0]], **fields}


def test_lists_and_packed_arrays_say_the_same() -> None:
    as_lists = read(steps(rewards=[1, 2.5], begins=[True, False], terminated=[False, True]))
    packed = read(steps(obs=pack_array(np.array([[0, 1], [2, 3]], np.float64))))
    assert as_lists.obs.dtype == packed.obs.dtype == np.float32
    assert as_lists.obs.tolist() == packed.obs.tolist() == [[0, 1], [2, 3]]
    assert as_lists.envs.tolist() == [0, 3]
    assert as_lists.rewards.tolist() == [1.0, 2.5]
    assert packed.rewards.tolist() == [0.0, 0.0]
    assert as_lists.begins.tolist() == [True, False]
    assert as_lists.terminated.tolist() == [False, True]
    assert not as_lists.truncated.any()
    assert as_lists.actions is None


def test_dict_observations_and_own_actions() -> None:
    obs = {"camera": np.arange(8, dtype=np.uint8).reshape(2, 2, 2), "speed": np.ones((2, 2), np.float32)}
    found = read(steps(obs=pack_array(obs), actions=[1, 3]), obs=DICT)
    np.testing.assert_array_equal(found.obs["camera"], obs["camera"])
    assert found.actions.tolist() == [1, 3]


def test_outputs_of_illegal_actions_are_large_and_other_numbers_are_not() -> None:
    outputs = [[-1e9, 0.5, 1e9], [0.0, -1e9, 0.0]]
    found = read(steps(outputs=outputs, draws=outputs, weights_version=0))
    assert found.outputs.tolist() == found.draws.tolist() == outputs
    for field in ("obs", "outputs", "draws"):
        largest = 2.0**24 if field == "obs" else 1e10
        for sign in (1, -1):
            wrong = {"outputs": outputs, "draws": outputs, field: [[0.0] * (2 if field == "obs" else 3)] * 2}
            wrong[field] = [*wrong[field][:1], [sign * largest * 1.01, *wrong[field][1][1:]]]
            with pytest.raises(ClientMessageError, match=f"steps.{field} holds .* may have a size of {largest:,.0f}"):
                read(steps(weights_version=0, **wrong))


@pytest.mark.parametrize(
    "array", [np.zeros((0, 2)), np.arange(6).reshape(2, 3), np.array(3.5), np.array([True, False])]
)
def test_arrays_come_back_as_they_were(array: Any) -> None:
    back = unpack_array(msgpack.unpackb(msgpack.packb(pack_array(array))))
    assert back.dtype == array.dtype and back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    big_endian = unpack_array(pack_array(array.astype(array.dtype.newbyteorder(">"))))
    np.testing.assert_array_equal(big_endian, array)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ([1, 2], "message"),
        ({"no": "type"}, "type"),
        ({"type": "step"}, "type"),
        ({"type": "ping"}, "ping.id"),
        ({"type": "ping", "id": -1}, "ping.id"),
        ({"type": "ping", "id": True}, "ping.id"),
        ({"type": "ping", "id": 1, "more": 2}, "ping.'more'"),
        ({"type": "hello"}, "hello.protocol"),
        ({"type": "hello", "protocol": "1"}, "hello.protocol"),
        (steps(envs=[]), "steps.envs"),
        (steps(envs=[0, 4]), "steps.envs[1]"),
        (steps(envs=[0, -1]), "steps.envs[1]"),
        (steps(envs=[0, 1.0]), "steps.envs[1]"),
        (steps(envs=[0] * 70_000), "steps.envs"),
        (steps(obs=[[0.0, 1.0]]), "steps.obs"),
        (steps(obs=[[0.0, 1.0], [2.0]]), "steps.obs"),
        (steps(obs=[[0.0, 1.0], [2.0, None]]), "steps.obs"),
        (steps(obs=[["a", "b"], ["c", "d"]]), "steps.obs"),
        (steps(obs=[[0.0, 1.0], [2.0, float("nan")]]), "steps.obs"),
        (steps(obs=[[0.0, 1.0], [2.0, 1e300]]), "steps.obs"),
        (steps(obs={"dtype": "<f4", "shape": [2, 2], "data": b"123"}), "steps.obs.data"),
        (steps(obs={"dtype": "<f4", "shape": [2, -2], "data": b""}), "steps.obs.shape"),
        (steps(obs={"dtype": "<f4", "shape": [2**62, 2**62], "data": b""}), "steps.obs.data"),
        (steps(obs={"dtype": "<f4", "shape": [0, 2**40, 2**40], "data": b""}), "steps.obs.shape"),
        (steps(obs=["a" * 2_000_000] + ["b"] * 20_000), "steps.obs"),
        (steps(obs=[[0.0, "a" * 2_000_000]] + [[1.0, 1.0]] * 20_000), "steps.obs"),
        (steps(obs=[b"a" * 2_000_000] + [b"b"] * 20_000), "steps.obs"),
        (steps(obs={"dtype": "a", "shape": [2, 2], "data": bytes(16)}), "steps.obs.dtype"),
        (steps(obs={"dtype": "O", "shape": [2, 2], "data": b""}), "steps.obs.dtype"),
        (steps(obs={"dtype": ">f4", "shape": [2, 2], "data": bytes(16)}), "steps.obs.dtype"),
        (steps(obs={"dtype": "f4,f4", "shape": [2, 1], "data": bytes(16)}), "steps.obs.dtype"),
        (steps(obs={"shape": [2, 2], "data": bytes(16)}), "steps.obs"),
        (steps(rewards=[1.0]), "steps.rewards"),
        (steps(rewards=[1.0, float("inf")]), "steps.rewards[1]"),
        (steps(rewards=[1.0, "2"]), "steps.rewards[1]"),
        (steps(rewards=[2**20, None]), "steps.rewards[1]"),
        (steps(rewards=[2**63, 0]), "steps.rewards[0]"),
        (steps(rewards=[2**24, -(2**24) - 1]), "steps.rewards[1]"),
        (steps(obs=[[-(2.0**24), 2.0**24], [0.0, -1.7e7]]), "steps.obs"),
        (steps(obs=pack_array(np.array([[0.0, 0.0], [3e38, 0.0]], np.float32))), "steps.obs"),
        (steps(outputs=[[0.0, 0.0, 3e38]] * 2, draws=[[0.0] * 3] * 2, weights_version=0), "steps.outputs"),
        (steps(begins=[True, 1]), "steps.begins[1]"),
        (steps(begins=[True, False], terminated=[True, False]), "steps.begins[0]"),
        (steps(actions=[0, 1]), "steps.actions"),
        (steps(actions=[1.5, 1.0]), "steps.actions"),
        (steps(infos=[{}, 3]), "steps.infos[1]"),
        (steps(infos=[{}]), "steps.infos"),
        (steps(counts=[True, 0]), "steps.counts[1]"),
        (steps(begins=[True, False], counts=[False, False]), "steps.counts[1]"),
    ],
)
def test_refusals_name_the_place(message: Any, place: str) -> None:
    with pytest.raises(ClientMessageError) as caught:
        read(message)
    assert caught.value.place == place
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"\xc1",
            b"\x81",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\x91" * 5000,
            b"\xc7\x05\x03hello",
        ),
        *map(msgpack.packb, (msgpack.Timestamp(1, 2), {1: 2})),
        msgpack.packb({"type": "bye"}) + b"x",
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ClientMessageError):
        read_message(body)


def test_dict_observations_need_all_keys() -> None:
    speed = np.ones((2, 2), np.float32)
    for obs in ({"speed": speed}, {"speed": speed, "camera": speed, "more": speed}):
        with pytest.raises(ClientMessageError, match="must be a map with the keys camera, speed"):
            read(steps(obs=pack_array(obs)), obs=DICT)
    with pytest.raises(ClientMessageError) as caught:
        read(steps(obs=pack_array({"speed": speed, "camera": speed})), obs=DICT)
    assert caught.value.place == "steps.obs.camera"


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
_NAMES = st.sampled_from(
    ["type", "id", "envs", "obs", "rewards", "begins", "terminated", "truncated", "actions", "infos", "counts"]
)


@given(st.dictionaries(_NAMES, _VALUES, max_size=6), st.sampled_from(["steps", "drop", "hello", "ping", "bye"]))
@settings(max_examples=60, deadline=None)
def test_any_fields_are_read_or_refused(fields: dict[str, Any], kind: str) -> None:
    try:
        read({**steps(), **fields, "type": kind} if kind == "steps" else {**fields, "type": kind})
    except ClientMessageError as error:
        assert error.place
    except KeyError:
        assert kind != "steps"  # `read` reads entries, which the others have not


def damaged_reads(seed: int, count: int) -> int:
    """Read whole messages with flipped bits, cut off, or repeated; return how many were refused."""
    rng = np.random.default_rng(seed)
    obs = {"camera": np.zeros((2, 2, 2), np.uint8), "speed": np.ones((2, 2), np.float32)}
    whole = msgpack.packb(steps(obs=pack_array(obs), rewards=[1.0, 2.0], begins=[False, True], infos=[{"a": 1}, {}]))
    num_refused = 0
    for _ in range(count):
        body = bytearray(whole)
        for _ in range(rng.integers(1, 6)):
            match rng.integers(4):
                case 0:
                    body[rng.integers(len(body))] ^= 1 << rng.integers(8)
                case 1 if len(body) > 2:
                    del body[rng.integers(1, len(body)) :]
                case 2:
                    body[rng.integers(len(body))] = rng.integers(256)
                case 3:
                    at = int(rng.integers(len(body)))
                    body[at:at] = rng.bytes(int(rng.integers(1, 9)))
        try:
            message = read_message(bytes(body))
            if message["type"] == "steps":
                found = read_entries(message, 4, space_tree(DICT), space_tree(PICKS), OUTPUTS)
                assert all_of(np.isfinite(leaf).all() for leaf in found.obs.values())
                assert np.isfinite(found.rewards).all() and len(found.rewards) == len(found.envs)
        except ClientMessageError:
            num_refused += 1
    return num_refused


def test_damaged_messages_are_read_or_refused() -> None:
    assert damaged_reads(0, 1500) > 500


@pytest.mark.slow
def test_ten_thousand_damaged_messages_are_read_or_refused() -> None:
    assert damaged_reads(1, 10_000) > 5000


def fuzzed_runs(seed: int, count: int) -> Counter[str]:
    """Send a runner messages of the grammar over many connections, next to a simulator; return how they were answered.

    The simulator sends a message with each of them, and must have its answer.
    """
    found, grammar = Counter[str](), Grammar(seed)
    with runner_of(served(DQNConfig(), num_envs=3)) as runner, PolicyFuzz(runner) as clients:
        for _ in range(count):
            clients.send(grammar)
            runner.collect(SampleRequest(num_timesteps=1))  # at least the step of the simulator
            found.update(clients.answers())
    return found


class PolicyFuzz:
    """A simulator that steps one env, and two connections that are opened again after the server closed them."""

    def __init__(self, runner: EnvRunner) -> None:
        self._runner, self._t = runner, 0
        self._fuzzed: list[socket.socket | None] = [None, None]

    def __enter__(self) -> Self:
        self._good = self._connect()
        self._good.sendall(pack_message({"type": "hello", "protocol": 1}))
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._good, *self._fuzzed):
            if one is not None:
                one.close()

    def _connect(self) -> socket.socket:
        host, _, port = address_of(self._runner).rpartition(":")
        return socket.create_connection((host, int(port)), 30)

    def send(self, grammar: Grammar) -> None:
        with contextlib.suppress(OSError):
            for place, one in enumerate(self._fuzzed):
                if one is None:
                    self._fuzzed[place] = one = self._connect()
                    one.sendall(grammar.rllink() if place else grammar.hello())
                one.sendall(grammar.rllink() if place else grammar.native())
        steps = [{"begins": [True]}] if not self._t else []
        for fields in (*steps, {"rewards": [1.0]}):
            self._t += 1
            message = {"type": "steps", "id": self._t, "envs": [0], "obs": [[float(self._t)] * 4], **fields}
            self._good.sendall(pack_message(message))

    def answers(self) -> Iterator[str]:
        for place, one in enumerate(self._fuzzed):
            if one is None:
                continue
            one.setblocking(False)
            try:
                data = one.recv(1 << 20)
                yield "error" if b"error" in data or b"ERROR" in data else "answer" if data else "closed"
                is_over = not data or b"error" in data or b"ERROR" in data
            except BlockingIOError:
                yield "nothing yet"
                is_over = False
            except OSError:
                is_over = True
            one.settimeout(30)
            if is_over:
                one.close()
                self._fuzzed[place] = None
        self._good.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert self._good.recv(1 << 20), "the simulator was cut off"
        self._good.settimeout(30)


def test_messages_that_are_valid_or_nearly_so_cost_nobody_else_anything() -> None:
    found = fuzzed_runs(0, 150)
    assert found["answer"] > 30 and found["error"] > 30, found


@pytest.mark.slow
def test_ten_thousand_messages_that_are_valid_or_nearly_so_cost_nobody_else_anything() -> None:
    found = fuzzed_runs(1, 10_000)
    assert found["answer"] > 1000 and found["error"] > 1000, found
