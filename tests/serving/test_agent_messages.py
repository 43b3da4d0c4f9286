"""Messages of clients with several agents that are damaged, or say what nobody expects."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from simulators import Stranger, address_of, runner_of

from corral import ExternalEnv, PPOConfig
from corral.core.tree import leaves
from corral.errors import ClientMessageError
from corral.runners.serving.agent_messages import read_agent_entries
from corral.runners.serving.client import HEADER, MultiAgentPolicyClient, ServerStopped, pack_array, pack_message
from corral.runners.serving.external_env import find_spaces
from corral.runners.serving.messages import read_message

PLAIN = spaces.Box(-1, 1, (2,), np.float32)
NESTED = spaces.Dict({"x": PLAIN, "y": spaces.Tuple((spaces.Discrete(3), PLAIN))})
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(2), "observations": PLAIN})
SPACES: dict[str, dict[Any, Any]] = {
    "observation_spaces": {"a": PLAIN, 1: NESTED, "c": PLAIN, "d": MASKED},
    "action_spaces": {
        "a": spaces.Discrete(2),
        1: spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))),
        "c": spaces.Discrete(2),
        "d": spaces.Discrete(2),
    },
}
SEATS: Any = find_spaces(SPACES)[0]


def obs_of(agent: str, rng: np.random.Generator, count: int) -> Any:
    """Return packed observations of an agent, `[count, ...]`; some are not legal."""
    plain = rng.uniform(-1, 1, (count, 2)).astype(np.float32)
    if agent == "1":
        return pack_array({"x": plain, "y": (rng.integers(0, 3, count), plain)})
    mask = np.array(rng.random((count, 2)) < 0.97, np.int8)
    return pack_array({"action_mask": mask, "observations": plain} if agent == "d" else plain)


def steps(rng: np.random.Generator, envs: list[int], begins: list[bool]) -> dict[str, Any]:
    """Return a message `steps` that may be right; who ended before is not known."""
    count, agents = len(envs), dict[str, Any]()
    for name in ("a", "1", "c", "d"):
        rows = [row for row in range(count) if rng.random() < 0.7]
        part: dict[str, Any] = {"entries": rows, "obs": obs_of(name, rng, len(rows))} if rows else {}
        if rng.random() < 0.7:
            part["rewards"] = [0.0 if first else float(rng.normal()) for first in begins]
        if rng.random() < 0.1:
            ends = [not first and bool(rng.random() < 0.5) for first in begins]
            part["terminated" if rng.random() < 0.5 else "truncated"] = ends
        if rng.random() < 0.2:
            part["infos"] = [{"n": int(rng.integers(9))} for _ in envs]
        agents[name] = part
    message = {"type": "steps", "id": int(rng.integers(1, 2**40)), "envs": envs, "begins": begins, "agents": agents}
    if rng.random() < 0.2:
        message["terminated"] = [not first and bool(rng.random() < 0.5) for first in begins]
    return message


ODD: list[Any] = [None, True, -1, 2**63, 0.5, float("nan"), float("inf"), "a", "", b"x"]
ODD += [[], {}, [[]], [None], [0] * 70_000, {"": 0}]


def odd(message: Any, rng: np.random.Generator) -> Any:
    """Return a message in which something, at any depth, was replaced, removed or added."""
    if isinstance(message, dict) and message and rng.random() < 0.9:
        key = [*message][int(rng.integers(len(message)))]
        match rng.integers(8):
            case 0:
                return {name: part for name, part in message.items() if name != key}
            case 1:
                return {**message, ["e", "obs", "__all__", "entries", "x"][int(rng.integers(5))]: message[key]}
        return {**message, key: odd(message[key], rng)}
    if isinstance(message, list) and message and rng.random() < 0.8:
        place = int(rng.integers(len(message)))
        match rng.integers(4):
            case 0:
                return message[:place] + message[place + 1 :]
            case 1:
                return [*message, message[place]]
        return [*message[:place], odd(message[place], rng), *message[place + 1 :]]
    return ODD[int(rng.integers(len(ODD)))]


def damaged(message: dict[str, Any], rng: np.random.Generator) -> bytes:
    """Return a message as bytes, in which something is odd, or bytes are."""
    while rng.random() < 0.6:
        changed = odd(message, rng)
        message = changed if isinstance(changed, dict) else message
    body = bytearray(msgpack.packb(message))
    while rng.random() < 0.4:
        at = int(rng.integers(len(body)))
        match rng.integers(3):
            case 0:
                body[at] ^= 1 << int(rng.integers(8))
            case 1:
                body[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case 2:
                del body[at + 1 :]
    return bytes(body)


def read(body: bytes) -> None:
    message = read_message(body)
    if message["type"] != "steps":
        return
    entries = read_agent_entries(message, 4, SEATS.seats)
    said: Any = entries.obs
    assert len(entries) == len(entries.rewards) <= 8
    for leaf in leaves(said):
        assert len(leaf) == len(entries) and np.isfinite(leaf).all()


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_messages_are_read_or_refused_at_a_place(count: int) -> None:
    rng, num_refused = np.random.default_rng(count), 0
    for _ in range(count):
        try:
            read(damaged(steps(rng, [0, 0, 2], [False, True, True]), rng))
        except ClientMessageError as error:
            num_refused += 1
            assert error.place
    assert 0.3 * count < num_refused < count


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64 - 1) | st.floats() | st.text(max_size=3) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "dtype"]), inner),
    max_leaves=6,
)
_PARTS = st.dictionaries(
    st.sampled_from(["entries", "obs", "rewards", "terminated", "truncated", "infos", "more"]), _VALUES, max_size=4
)


@given(st.dictionaries(st.sampled_from(["a", "1", "c", "z", "__all__"]), _PARTS | _VALUES, max_size=3))
@settings(max_examples=60, deadline=None)
def test_anything_said_of_agents_is_read_or_refused_at_a_place(agents: dict[str, Any]) -> None:
    try:
        read(msgpack.packb({"type": "steps", "id": 1, "envs": [0], "begins": [True], "agents": agents}))
    except ClientMessageError as error:
        assert error.place.startswith("steps.")


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_clients_that_send_nonsense_cost_the_runner_and_other_clients_nothing(count: int) -> None:
    """Each of them plays as the protocol says until its message is refused; then it comes back as a new client."""
    env_config = {"address": "127.0.0.1:0", "reconnect_timeout_s": 0.01, **SPACES}
    config = PPOConfig().environment(ExternalEnv, env_config=env_config, action_masks=True)
    config.env_runners(num_envs_per_env_runner=9).multi_agent(
        policies={"plain", "nested", "masked"},
        policy_mapping_fn=lambda agent, episode: {1: "nested", "d": "masked"}.get(agent, "plain"),
    )
    num_played, codes, errors = [0], Counter[str](), list[BaseException]()
    seen = [{"a": np.zeros(2, np.float32), "c": np.ones(2, np.float32)}]

    def play(address: str) -> None:
        with suppress(ServerStopped), MultiAgentPolicyClient(address) as client:
            client.begin(seen)
            while True:
                client.step(seen, [{"a": 1.0}], [{"__all__": num_played[0] % 7 == 6}], next_obs=seen)
                num_played[0] += 1

    def talk_nonsense(address: str) -> None:
        rng = np.random.default_rng(count)
        codes.update(say_nonsense(address, rng) for _ in range(count))

    def work(said: Any, address: str) -> None:
        try:
            said(address)
        except BaseException as error:
            errors.append(error)

    with runner_of(config) as runner:
        address = address_of(runner)
        threads = [threading.Thread(target=work, args=(said, address), daemon=True) for said in (play, talk_nonsense)]
        for thread in threads:
            thread.start()
        while threads[1].is_alive() and not errors:
            before = num_played[0]
            for episode in runner.sample(num_timesteps=20):
                episode.validate()
            assert num_played[0] > before
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not errors, errors
    assert codes.keys() <= {"protocol", "too_large", "busy", "actions", "done", "left"}
    assert codes["protocol"] > 0.3 * count and codes["actions"] > 0.05 * count


def say_nonsense(address: str, rng: np.random.Generator) -> str:
    """Play a few steps, send one damaged message, and return the kind of the answer or the code of the error."""
    stranger = Stranger(address)
    with stranger.socket:
        stranger.say({"type": "hello", "protocol": 1, "num_envs": 2})
        welcome = stranger.read()
        if welcome["type"] == "error":  # the seats of those that died are kept a while
            return str(welcome["code"])
        playing = [False, False]
        for number in range(1, int(rng.integers(1, 4))):
            message = {**steps(rng, [0, 1], [not flag for flag in playing]), "id": number}
            stranger.say(message)
            answer = stranger.read()
            if answer["type"] == "error":
                return str(answer["code"])
            playing = [not flag for flag in message.get("terminated", [False] * 2)]
        body = damaged(steps(rng, [0, 1], [not flag for flag in playing]), rng)
        if rng.random() < 0.03:  # it dies in the middle of a message
            stranger.socket.sendall((HEADER.pack(len(body)) + body)[: int(rng.integers(1, 4 + len(body)))])
            return "left"
        stranger.socket.sendall(HEADER.pack(len(body)) + body)
        stranger.socket.sendall(pack_message({"type": "bye"}))
        try:
            answer = stranger.read()
        except AssertionError:  # it was read as bye
            return "left"
        return str(answer.get("code", answer["type"]))
