"""The bytes on the page about the protocol are what the server and the client send."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from simulators import Stranger

from corral.runners.serving import agent_messages, client, messages, server
from corral.runners.serving.client import HEADER, pack_message, unpack_array
from corral.runners.serving.listening import MAX_CONNECTIONS
from corral.runners.serving.server import PolicyServer, ServerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "policy-server-protocol.md").read_text(encoding="utf-8")
SPACES = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
OUTPUTS = spaces.Box(-np.inf, np.inf, (2,))


def read_examples() -> dict[str, bytes]:
    """Return the bytes of each example by its name."""
    found = {}
    for name, block in re.findall(r"<!-- example: (\w+) -->\n\n```text\n(.*?)```", PAGE, re.DOTALL):
        lines = [re.match(r"(?:[0-9a-f]{2} ?)+", line) for line in block.splitlines()]
        found[name] = bytes.fromhex("".join(line[0] for line in lines if line))
        assert all(lines)
    return found


EXAMPLES = read_examples()


def body(name: str) -> bytes:
    return EXAMPLES[name][HEADER.size :]


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyServer]:
    """A server with a token that gives action 1 to all entries; its sessions have the name of the page."""
    monkeypatch.setattr(server.secrets, "token_hex", lambda num_bytes: msgpack.unpackb(body("welcome"))["session"])
    made = PolicyServer(ServerSettings("127.0.0.1:0", token="secret"), *SPACES, num_seats=1)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            for session, entries in made.receive(0.02).entries:
                made.answer(session, np.ones(np.count_nonzero(~entries.terminated), np.int64))

    thread = threading.Thread(target=serve)
    thread.start()
    yield made
    is_over.set()
    thread.join()
    made.close()


def test_page_has_the_examples() -> None:
    assert list(EXAMPLES) == ["hello", "welcome", "steps", "actions", "end", "error"]


def test_examples_are_whole_frames() -> None:
    for data in EXAMPLES.values():
        assert pack_message(msgpack.unpackb(data[HEADER.size :])) == data


def test_server_answers_as_the_page_says(listening: PolicyServer) -> None:
    stranger = Stranger(listening.address)
    with stranger.socket:
        assert stranger.ask(EXAMPLES["hello"]) == EXAMPLES["welcome"]
        assert stranger.ask(EXAMPLES["steps"]) == EXAMPLES["actions"]
        answer = msgpack.unpackb(stranger.ask(EXAMPLES["end"])[HEADER.size :])
        assert (answer["id"], unpack_array(answer["actions"]).tolist()) == (2, [1])  # of the episode that begins
        stranger.socket.sendall(pack_message({"type": "bye"}))


def test_wrong_token_gets_the_error_of_the_page(listening: PolicyServer) -> None:
    stranger = Stranger(listening.address)
    with stranger.socket:
        assert stranger.ask(EXAMPLES["hello"].replace(b"secret", b"public")) == EXAMPLES["error"]


def test_values_of_the_examples_match_the_text() -> None:
    begin, end = (
        messages.read_entries(messages.read_message(body(name)), 1, messages_space(SPACES[0]), SPACES[1], OUTPUTS)
        for name in ("steps", "end")
    )
    assert (begin.obs.tolist(), begin.begins.tolist()) == ([[0.5, -1]], [True])
    assert (end.obs.tolist(), end.rewards.tolist()) == ([[1, 0], [0.5, 0.5]], [1, 0])
    assert (end.terminated.tolist(), end.begins.tolist()) == ([True, False], [False, True])
    assert unpack_array(msgpack.unpackb(body("actions"))["actions"]).tolist() == [1]


def messages_space(space: Any) -> Any:
    from corral.core.spaces import space_tree

    return space_tree(space)


def table(title: str) -> list[list[str]]:
    """Return the cells of the table below a title."""
    section = PAGE.partition(f" {title}\n")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def test_fields_of_the_page_match_the_code() -> None:
    found: dict[str, set[str]] = {}
    needed: dict[str, set[str]] = {}
    kind = ""
    for name, field, described, _ in table("From the client"):
        kind = name.strip("`") or kind
        names = set(re.findall(r"`(\w+)`", field))
        found.setdefault(kind, set()).update(names)
        if "needed" in described:
            needed.setdefault(kind, set()).update(names)
    assert found == {kind: set(fields) for kind, fields in messages.FIELDS.items()}
    assert needed == {kind: set(names) for kind, names in messages.NEEDED.items()}


def test_fields_of_agents_on_the_page_match_the_code() -> None:
    assert {row[0].strip("`") for row in table("Several agents")} == agent_messages.AGENT_FIELDS.keys()


def test_limits_and_codes_of_the_page_match_the_code() -> None:
    settings = ServerSettings()
    for text in (
        f"{server.MAX_HELLO_BYTES:,} bytes, within {server.HELLO_TIMEOUT_S:g} seconds",
        f"by default {settings.max_message_bytes >> 20} MiB",
        f"accept {client.MAX_MESSAGE_BYTES >> 20} MiB",
        f"{settings.client_timeout_s:g} seconds (`client_timeout_s`)",
        f"{settings.reconnect_timeout_s:g} seconds (`reconnect_timeout_s`)",
        f"| connections | {MAX_CONNECTIONS}, or three quarters",
        f"at most {messages.MAX_NUMBER:,.0f} in size |",
        f"actions of a Box | {messages.MAX_NUMBER:,.0f} in size |",
        f"{messages.MAX_OUTPUT:,.0f} in size; for on-policy",
        f"1 to {messages.MAX_ENTRIES:,} entries",
        f"version of the protocol, which is {client.PROTOCOL}",
    ):
        assert text in PAGE, text
    files = [Path(server.__file__), *Path(server.__file__).parents[1].glob("served_*.py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    codes = set(re.findall(r"(?:_refuse|cut_off)\(\s*[\w.]+,\s*\"(\w+)\"", source))
    assert {row[0].strip("`") for row in table("Errors")} == codes
