"""An env may have several entries in a message; without actions of its own, only the last one may want an action."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from corral.runners.serving.client import ClientError, PolicyClient
from corral.runners.serving.server import PolicyServer, ServerSettings


@pytest.fixture
def client() -> Iterator[PolicyClient]:
    """A client of two envs; its server gives action 1 to all entries that want one."""
    server = PolicyServer(
        ServerSettings("127.0.0.1:0"), spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(2), num_seats=2
    )
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            for session, entries in server.receive(0.02).entries:
                wants = ~(entries.terminated | entries.truncated) & (entries.actions is None)
                server.answer(session, np.ones(np.count_nonzero(wants), np.int64))

    thread = threading.Thread(target=serve)
    thread.start()
    made = PolicyClient(server.address, 2, retry_s=0)
    yield made
    made.close()
    is_over.set()
    thread.join()
    server.close()


def obs(count: int) -> Any:
    return np.zeros((count, 2), np.float32)


@pytest.mark.parametrize("first", [[True, True, False], [True, False, False]])
def test_step_before_the_action_is_refused(client: PolicyClient, first: list[bool]) -> None:
    envs = [0, 1, 1] if first[1] else [1, 1, 1]
    with pytest.raises(ClientError, match=r"steps\.envs\[\d\].*env 1 takes a step with an action") as caught:
        client.exchange(envs, obs(3), begins=first)
    assert caught.value.code == "protocol"


def test_end_and_begin_in_one_message(client: PolicyClient) -> None:
    client.begin(obs(2))
    actions = client.exchange(
        [0, 1, 0, 0], obs(4), terminated=[1, 0, 0, 0], begins=[0, 0, 1, 0], actions=np.zeros(4, np.int64)
    )
    assert len(actions) == 0  # of its own actions, a client may report as many as it likes
    assert len(client.step(obs(2), [1, 1], [True, False], next_obs=obs(2))) == 2
