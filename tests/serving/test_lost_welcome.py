"""Clients whose connection broke before they read `welcome` come back as new ones, and find free seats."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from gymnasium import spaces

from corral.runners.serving.client import HEADER, PROTOCOL, PolicyClient, pack_message
from corral.runners.serving.server import PolicyServer, ServerSettings


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    """A server with two seats that listens in another thread."""
    made = PolicyServer(
        ServerSettings("127.0.0.1:0"), spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2), num_seats=2
    )
    is_over = threading.Event()

    def listen() -> None:
        while not is_over.is_set():
            made.receive(0.02)

    thread = threading.Thread(target=listen)
    thread.start()
    yield made
    is_over.set()
    thread.join()
    made.close()


def leave_after_hello(server: PolicyServer) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(pack_message({"type": "hello", "protocol": PROTOCOL, "num_envs": 2}))
        assert len(connection.recv(HEADER.size)) == HEADER.size  # the server has given the seats to this session


def test_seats_of_a_lost_welcome_are_given_again(server: PolicyServer) -> None:
    leave_after_hello(server)
    client = PolicyClient(server.address, 2, retry_s=0)
    client.drop()
    client.close()


def test_session_without_messages_continues(server: PolicyServer) -> None:
    client = PolicyClient(server.address, 2, retry_s=10)
    client._socket.shutdown(socket.SHUT_RDWR)
    client.drop()  # which raises EpisodesLost if the server had forgotten the session
    client.close()
