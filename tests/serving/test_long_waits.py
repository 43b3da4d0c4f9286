"""A client whose server dies, or says nothing, while it waits for an answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from corral.runners.serving.client import HEADER, PolicyClient, ServerStopped, pack_array, pack_message

WELCOME: dict[str, Any] = {
    "type": "welcome",
    "protocol": 1,
    "session": "s",
    "resumed": True,
    "max_message_bytes": 1 << 20,
    "weights_version": 0,
    "observation_space": {},
    "action_space": {},
}
ANSWER = {"type": "actions", "id": 1, "weights_version": 0, "actions": pack_array(np.ones(1, np.int64))}
RETRY_S = 0.2


@contextmanager
def server(*connections: Callable[[socket.socket], None]) -> Iterator[str]:
    """Welcome clients, and do one thing after the other with the first message of each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)

        def serve() -> None:
            for work in connections:
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as stream:
                    read_message(stream)
                    connection.sendall(pack_message(WELCOME))
                    read_message(stream)
                    work(connection)
            listener.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30)


def read_message(stream: Any) -> None:
    (size,) = HEADER.unpack(stream.read(HEADER.size))
    stream.read(size)


def test_a_server_that_dies_after_a_long_wait_is_found_again() -> None:
    """The server takes longer for its answer than the client tries to reach one that is gone, and dies then."""

    def die(connection: socket.socket) -> None:
        time.sleep(3 * RETRY_S)

    with server(die, lambda connection: connection.sendall(pack_message(ANSWER))) as address:
        with PolicyClient(address, retry_s=RETRY_S) as client:
            assert client.begin(np.zeros((1, 4), np.float32)).tolist() == [1]


def test_a_server_that_never_answers_is_given_up() -> None:
    is_over = threading.Event()
    with server(lambda connection: is_over.wait(30) and None) as address:
        with (
            PolicyClient(address, retry_s=10, timeout_s=0.3) as client,
            pytest.raises(ServerStopped, match="does not answer: timed out"),
        ):
            client.begin(np.zeros((1, 4), np.float32))
        is_over.set()


def test_a_server_that_is_gone_is_given_up_after_retry_s() -> None:
    began_s = time.monotonic()
    with server(lambda connection: None) as address:
        with PolicyClient(address, retry_s=RETRY_S) as client, pytest.raises(ServerStopped):
            client.begin(np.zeros((1, 4), np.float32))
    assert time.monotonic() - began_s < 20
