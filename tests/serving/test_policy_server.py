"""Connections to a policy server: who is let in, who is cut off, who comes back."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from simulators import Simulator, address_of, end, runner_of, served

from corral.errors import ConfigError
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.runners.serving import server as server_module
from corral.runners.serving.client import (
    HEADER,
    ClientError,
    EpisodesLost,
    PolicyClient,
    ServerStopped,
    drive,
    pack_message,
)
from corral.runners.serving.listening import MAX_CONNECTIONS
from corral.runners.serving.server import PolicyServer, ServerSettings

DEADLINE_S = 30.0


@contextlib.contextmanager
def serving(runner: EnvRunner) -> Iterator[list[Any]]:
    """Sample in a thread until the block ends; the list holds the rollouts."""
    rollouts: list[Any] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.is_set():
            rollouts.append(runner.collect(SampleRequest(num_timesteps=50, time_limit_s=0.05)))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield rollouts
    finally:
        is_over.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], Any]) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def rows(*values: float) -> Any:
    return np.array([[value] * 4 for value in values], np.float32)


def connect(runner: EnvRunner) -> socket.socket:
    host, _, port = address_of(runner).rpartition(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


def read_reply(found: socket.socket) -> Any:
    """Return the next message of the server, or `None` where it closed the connection."""
    data = b""
    while len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack_from(data)[0]:
        try:
            part = found.recv(65_536)
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return msgpack.unpackb(data[HEADER.size :])


HELLO = {"type": "hello", "protocol": 1, "num_envs": 1}


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (pack_message({"type": "hello", "protocol": 2}), "version"),
        (pack_message({**HELLO, "num_envs": 9}), "full"),
        (pack_message({**HELLO, "num_envs": 0}), "protocol"),
        (pack_message({"type": "steps", "id": 1, "envs": [0], "obs": [[0.0] * 4]}), "protocol"),
        (b"\xff\xff\xff\xff", "too_large"),
        (HEADER.pack(100_000), "too_large"),
        (HEADER.pack(3) + b"\xc1\xc1\xc1", "protocol"),
        (b"QUIT\r\n\r\n", "too_large"),
    ],
)
def test_who_does_not_speak_the_protocol_is_told_so_and_cut_off(first: bytes, code: str) -> None:
    with runner_of(served(num_envs=2)) as runner, serving(runner), connect(runner) as found:
        found.sendall(first)
        assert read_reply(found)["code"] == code
        assert read_reply(found) is None


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"type": "steps", "id": 1, "envs": [0], "obs": [[0.0] * 4]}, "env 0 has no episode"),
        ({"type": "steps", "id": 1, "envs": [0], "obs": [[0.0] * 3], "begins": [True]}, "steps.obs must have shape"),
        ({"type": "steps", "id": 1, "envs": [0, 0], "obs": [[0.0] * 4] * 2, "begins": [True, True]}, "not over"),
        (
            {"type": "steps", "id": 1, "envs": [0, 0], "obs": [[0.0] * 4] * 2, "begins": [True] * 2, "actions": [0, 0]},
            "the one before is not over",
        ),
        ({"type": "steps", "id": 1, "envs": [0, 0], "obs": [[0.0] * 4] * 2, "begins": [True, False]}, "not told yet"),
        ({"type": "drop", "id": 1, "envs": [1]}, "must be 0 to 0"),
        (HELLO, "hello was said already"),
    ],
)
def test_a_wrong_message_ends_the_session_and_the_others_continue(message: Any, said: str) -> None:
    with runner_of(served(num_envs=3)) as runner:
        simulator = Simulator(address_of(runner), 1, 2).start()
        with serving(runner) as rollouts, connect(runner) as found:
            found.sendall(pack_message(HELLO))
            assert read_reply(found)["type"] == "welcome"
            found.sendall(pack_message(message))
            answer = read_reply(found)
            assert answer["type"] == "error" and said in answer["message"]
            before = len(rollouts)
            wait_for(lambda: len(rollouts) > before + 3)
            assert sum(rollout.num_env_steps for rollout in rollouts[before:]) > 0
        end(runner, simulator)


def test_a_client_that_sends_ahead_waits_and_one_that_floods_is_cut_off() -> None:
    config = served(num_envs=1, max_message_bytes=4096)
    with runner_of(config) as runner, serving(runner):
        one = pack_message({"type": "ping", "id": 1})
        with connect(runner) as found:
            found.sendall(pack_message(HELLO))
            assert read_reply(found)["max_message_bytes"] == 4096
            found.sendall(one)
            assert read_reply(found)["id"] == 1
            found.sendall(pack_message({"type": "bye"}))
            assert read_reply(found) is None
        with connect(runner) as found:
            found.sendall(pack_message(HELLO))
            assert read_reply(found)["type"] == "welcome"
            found.sendall(HEADER.pack(5000))
            assert read_reply(found)["code"] == "too_large"


def test_a_token_is_needed_where_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a secret\n")
    with runner_of(served(num_envs=1, token_file=str(file))) as runner, serving(runner):
        for token in (None, "", "a secre", "a secret "):
            with pytest.raises(ClientError) as caught:
                PolicyClient(address_of(runner), token=token)
            assert caught.value.code == "token"
        with PolicyClient(address_of(runner), token="a secret") as client:
            assert client.begin(rows(0)).shape == (1,)


def test_tls_protects_the_connection(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("openssl cannot make a certificate")
    with runner_of(served(num_envs=4, certificate=str(certificate), key=str(key))) as runner, serving(runner):
        with PolicyClient(address_of(runner), 4, tls=certificate) as client:
            assert isinstance(client._socket, ssl.SSLSocket)
            client.begin(rows(0, 1, 2, 3))
            for t in range(50):
                assert client.step(rows(t, 1, 2, 3), [0.0] * 4).shape == (4,)
        with pytest.raises((ServerStopped, ClientError)):  # in plain text
            PolicyClient(address_of(runner), retry_s=0.0, timeout_s=5.0)
        with pytest.raises(ClientError, match="certificate") as caught:  # of nobody whom the client trusts
            PolicyClient(address_of(runner), tls=ssl.create_default_context())
        assert caught.value.code == "tls"


def test_a_socket_in_the_file_system_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with runner_of(served(num_envs=1, address=f"unix:{path}")) as runner:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with serving(runner), PolicyClient(f"unix:{path}") as client:
            client.begin(rows(1))
        with (
            pytest.raises(ConfigError, match="cannot listen at unix:"),
            runner_of(served(num_envs=1, address=f"unix:{path}")),
        ):
            pass
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # as a server that was killed leaves it
    with runner_of(served(num_envs=1, address=f"unix:{path}")):
        pass


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with runner_of(served(num_envs=1)) as runner:
        with (
            pytest.raises(ConfigError, match=r"cannot listen at 127.0.0.1:.*in use.*--port") as caught,
            runner_of(served(num_envs=1, address=address_of(runner))),
        ):
            pass
        assert caught.value.__cause__ is None  # of which `corral serve` would print a traceback


@pytest.mark.parametrize(
    ("env_config", "said"),
    [
        ({"reconnect_timeout": 3}, "no setting 'reconnect_timeout'. Did you mean 'reconnect_timeout_s'"),
        ({"address": "5555"}, "must be 'host:port'"),
        ({"address": "127.0.0.1:70000"}, "must be 'host:port'"),
        ({"spaces_of": "CartPole-v1"}, "got observation_space and action_space and spaces_of"),
        ({"client_timeout_s": 0}, "client_timeout_s must be a number above 0"),
        ({"token": 5}, "token must be text"),
        ({"token": ""}, "the token is empty"),
        ({"token_file": "/no/such/file"}, "token_file '/no/such/file' cannot be read"),
        ({"certificate": "/no/such/file"}, "cannot be used for TLS"),
        ({"action_space": {"type": "Box"}}, "action_space"),
    ],
)
def test_settings_that_are_wrong_are_named(env_config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught, runner_of(served(num_envs=1, **env_config)):
        pass
    assert said in str(caught.value)


@pytest.mark.parametrize("setting", ["vectorization", "wrappers", "env_reset_fn", "autoreset_mode"])
def test_settings_that_clients_decide_are_refused(setting: str) -> None:
    config = served(num_envs=1)
    match setting:
        case "vectorization":
            config.env_runners(vectorization="sync")
        case "autoreset_mode":
            config.env_runners(autoreset_mode="same_step")
        case "wrappers":
            config.environment(wrappers=[lambda env: env])
        case _:
            config.environment(env_reset_fn=lambda: None)
    with pytest.raises(ConfigError, match=f"{setting}.* does not apply to an ExternalEnv"), runner_of(config):
        pass


def test_a_connection_that_breaks_costs_nothing() -> None:
    with runner_of(served(num_envs=2)) as runner, serving(runner) as rollouts:
        with PolicyClient(address_of(runner), 2) as client:
            client.begin(rows(0, 0))
            for t in range(1, 60):
                if t % 7 == 0:
                    client._socket.shutdown(socket.SHUT_RDWR)  # the message is sent, or not, and no answer comes
                if t % 11 == 0:
                    client._disconnect()
                client.step(rows(t, t), [1.0, 1.0], [False, t % 20 == 19], next_obs=rows(100 + t, 100 + t))
            client.drop()
        wait_for(lambda: sum(rollout.num_env_steps for rollout in rollouts) >= 118)
        assert runner.env.server.num_dropped == 2  # type: ignore[attr-defined]
    steps = sorted(
        (rollout.obs[t, lane, 0], rollout.obs[t + 1, lane, 0])
        for rollout in rollouts
        for t, lane in np.argwhere(rollout.valid).tolist()
    )
    firsts = {19: 119, 39: 139, 59: 159}
    expected = [(t - 1, t) for t in range(1, 60)] + [(firsts.get(t - 1, t - 1), t) for t in range(1, 60)]
    assert steps == sorted(expected)


def test_a_client_that_is_away_for_too_long_has_lost_its_episodes() -> None:
    with runner_of(served(num_envs=1, reconnect_timeout_s=0.1)) as runner, serving(runner):
        client = PolicyClient(address_of(runner))
        client.begin(rows(0))
        client._disconnect()
        wait_for(lambda: not runner.env.server.sessions)  # type: ignore[attr-defined]
        with pytest.raises(EpisodesLost):
            client.step(rows(1), [1.0])
        assert client.begin(rows(0)).shape == (1,)
        client.close()


def test_a_client_that_was_started_again_waits_for_its_seats() -> None:
    with runner_of(served(num_envs=2, reconnect_timeout_s=0.5)) as runner, serving(runner):
        before = PolicyClient(address_of(runner), 2)
        before.begin(rows(0, 0))
        before._disconnect()  # as a process does that is killed
        with pytest.raises(ClientError, match="are kept for clients") as caught:
            PolicyClient(address_of(runner), 2, retry_s=0.0)
        assert caught.value.code == "busy"
        with PolicyClient(address_of(runner), 2) as after:
            assert after.begin(rows(0, 0)).shape == (2,)
        with pytest.raises(ClientError, match="2 of 2 seats are free: set env_runners") as caught:
            PolicyClient(address_of(runner), 3)
        assert caught.value.code == "full"


def test_seats_are_kept_for_so_many_seconds_although_the_server_listens_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two looks at its clients a runner steps and a learner learns: then it listens for a part of the time."""
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.02
        return now_s

    settings = ServerSettings(address="127.0.0.1:0", reconnect_timeout_s=30.0)
    server = PolicyServer(settings, Box(-1, 1, (4,)), Discrete(2), 1)
    with contextlib.closing(server):
        thread = threading.Thread(target=lambda: PolicyClient(server.address)._disconnect())
        thread.start()
        while thread.is_alive() or any(session.left_s is None for session in server.sessions.values()):
            server.receive(0.01)
        [session] = server.sessions.values()
        session.last_id = 0  # it has begun an episode
        monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=clock))
        server._left_s = server._away_s = server._checked_s = 0.0
        session.left_s, session.heard_s = clock(), server._now_s
        ended_s = []
        while server.sessions and now_s < 200:
            now_s += 1.0
            server.receive(0.1)
            ended_s.append(now_s)
    assert not server.sessions
    assert 30 < ended_s[-1] < 45
    assert "did not come back" in caplog.text


def test_a_client_that_is_silent_is_cut_off() -> None:
    with runner_of(served(num_envs=1, client_timeout_s=0.3)) as runner, serving(runner):
        client = PolicyClient(address_of(runner))
        client.begin(rows(0))
        wait_for(lambda: not runner.env.server.sessions)  # type: ignore[attr-defined]
        with pytest.raises(ClientError) as caught:
            client.step(rows(1), [1.0])
        assert caught.value.code in ("timeout", "lost")
        client.close()


def test_a_server_without_clients_says_where_they_connect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "NOBODY_S", 0.1)
    with runner_of(served(num_envs=1)) as runner:
        runner.collect(SampleRequest(num_timesteps=1, time_limit_s=2.0))
        said = [record.message for record in caplog.records if "no client is connected" in record.message]
        assert len(said) == 1 and said[0].endswith(f"they connect to {address_of(runner)}.")


def test_time_in_which_the_server_does_not_listen_is_not_counted() -> None:
    with runner_of(served(num_envs=1, client_timeout_s=0.3)) as runner:
        with serving(runner):
            client = PolicyClient(address_of(runner))
            client.begin(rows(0))
        time.sleep(1.0)  # the learner works
        with serving(runner):
            assert client.step(rows(1), [1.0]).shape == (1,)
        client.close()


class Walk:
    """An env of Gymnasium's form, whose episodes take 5 steps."""

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.full(4, self.t, np.float32), 1.0, self.t == 5, False, {}


def test_drive_plays_envs_until_the_server_stops_or_enough_steps() -> None:
    with runner_of(served(num_envs=3)) as runner:
        done: list[int] = []

        def play(num_steps: int | None) -> None:
            with PolicyClient(address_of(runner), 3) as client:
                done.append(drive(client, [Walk(), Walk(), Walk()], num_steps=num_steps))

        thread = threading.Thread(target=play, args=(60,), daemon=True)
        with serving(runner) as rollouts:
            thread.start()
            thread.join(DEADLINE_S)
        assert done == [60]
        sampled = sum(rollout.num_env_steps for rollout in rollouts)
        assert sampled == 60
        thread = threading.Thread(target=play, args=(None,), daemon=True)
        thread.start()
        rollout = runner.sample(num_timesteps=90)
        runner.stop()
        thread.join(DEADLINE_S)
        assert done[1] >= rollout.num_env_steps
        assert {len(episode) for episode in rollout.episodes() if episode.is_done} == {5}


# One client costs nobody else anything: a server without a runner, in one thread.


@contextlib.contextmanager
def serve(num_seats: int = 2, **settings: Any) -> Iterator[PolicyServer]:
    server = PolicyServer(
        ServerSettings(address="127.0.0.1:0", **settings), Box(-1, 1, (1,), np.float32), Discrete(2), num_seats
    )
    try:
        yield server
    finally:
        server.close()


def call(server: PolicyServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


def listen_until(server: PolicyServer, condition: Callable[[], Any], at_once_s: float = 0.01) -> list[Any]:
    """Let a server listen until a condition holds, and return what clients reported meanwhile.

    The condition is looked at every `at_once_s` seconds.
    """
    ends_s, entries = time.monotonic() + DEADLINE_S, list[Any]()
    while not condition():
        assert time.monotonic() < ends_s
        entries += server.receive(at_once_s).entries
    return entries


def is_open(found: socket.socket) -> bool:
    """Return whether the server has neither closed nor reset a connection; nothing was sent to it."""
    found.setblocking(False)
    try:
        return found.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        found.settimeout(DEADLINE_S)


def enter(server: PolicyServer, found: socket.socket, **fields: Any) -> None:
    """Say hello, and read the welcome."""
    known = set(server.sessions)
    found.sendall(pack_message({**HELLO, **fields}))
    listen_until(server, lambda: set(server.sessions) - known)
    assert read_reply(found)["type"] == "welcome"


@pytest.mark.parametrize("said", [b"", b"\x00\x00", b"0000", b"00000000", b"00000016{", HEADER.pack(20) + b"\x81"])
def test_a_connection_without_a_whole_message_takes_no_seat_and_is_closed(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HELLO_TIMEOUT_S", 0.5)
    monkeypatch.setattr(server_module, "CHECK_EVERY_S", 0.05)
    with serve(1) as server, call(server) as silent, call(server) as found:
        silent.sendall(said)
        enter(server, found)
        assert is_open(silent) or said == b"00000000"  # which is a message of no bytes
        listen_until(server, lambda: not is_open(silent) or len(server._connections) == 1)
        assert is_open(found) and len(server.sessions) == 1


def test_a_client_of_rllink_that_is_silent_gives_its_seat_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CHECK_EVERY_S", 0.01)
    with serve(1, client_timeout_s=0.02) as server, call(server) as found:
        begins_s = time.monotonic()
        found.sendall(b'00000016{"type": "PING"}')
        listen_until(server, lambda: server.sessions)
        listen_until(server, lambda: not server.sessions)
        assert time.monotonic() - begins_s > 0.02 * server_module.SILENT_PATIENCE
        assert b"it was silent for 10 times client_timeout_s=0.02 seconds" in found.recv(65_536)


def test_a_client_of_rllink_that_leaves_gives_its_seat_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CHECK_EVERY_S", 0.01)
    with serve(1) as server:
        for _ in range(2):  # which never come back, while others may within reconnect_timeout_s
            with call(server) as found:
                found.sendall(b'00000016{"type": "PING"}')
                listen_until(server, lambda: server.sessions)
            listen_until(server, lambda: not server.sessions)


def test_pings_in_one_packet_are_answered_one_after_another_and_others_take_turns() -> None:
    with serve(2) as server, call(server) as eager, call(server) as other:
        enter(server, eager)
        enter(server, other)
        count = 2000
        eager.sendall(b"".join(pack_message({"type": "ping", "id": number}) for number in range(count)))
        # In so short a time no machine answers half of them.
        listen_until(server, lambda: any(one.last_id >= 0 for one in server.sessions.values()), at_once_s=0.001)
        other.sendall(pack_message({"type": "ping", "id": 7}))
        [session] = [one for one in server.sessions.values() if one.last_id >= 0]
        [waiting] = [one for one in server.sessions.values() if one is not session]
        listen_until(server, lambda: waiting.last_id == 7, at_once_s=0.001)
        assert session.last_id < count - 1  # the other one was not behind all of them
        assert read_reply(other)["id"] == 7
        listen_until(server, lambda: session.last_id == count - 1)
        data, ids = b"", list[int]()
        while len(ids) < count:
            data += eager.recv(1 << 16)
            while len(data) >= HEADER.size and len(data) >= HEADER.size + HEADER.unpack_from(data)[0]:
                end = HEADER.size + HEADER.unpack_from(data)[0]
                ids.append(msgpack.unpackb(data[HEADER.size : end])["id"])
                data = data[end:]
        assert ids == [*range(count)]


def test_a_client_is_heard_again_after_more_than_the_server_reads_ahead() -> None:
    body = b'{"type": "EPISODES", "episodes": [], "env_steps": 0, "more": "%s"}' % (b"-" * 4000)
    with serve(1, max_message_bytes=8192) as server, call(server) as found:
        found.setblocking(False)
        for unsent in (b"%08d%s" % (len(body), body) * 400, b'00000016{"type": "PING"}'):  # the first has no answers
            ends_s = time.monotonic() + DEADLINE_S
            while unsent or any(one.read for one in server._connections):
                assert time.monotonic() < ends_s
                with contextlib.suppress(BlockingIOError):
                    unsent = unsent[found.send(unsent) :]
                server.receive(0.001)
        listen_until(server, lambda: select.select([found], [], [], 0)[0])
        assert b"PONG" in found.recv(65_536)


def test_a_client_that_reads_no_answers_is_not_answered_without_end_and_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(server_module, "HELLO_TIMEOUT_S", 0.1)
    with serve(1, client_timeout_s=0.3, max_message_bytes=1024) as server, call(server) as found:
        enter(server, found)
        [connection], [session] = server._connections, server.sessions.values()
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that few answers fill it
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        found.setblocking(False)
        pings = b"".join(pack_message({"type": "ping", "id": number}) for number in range(20_000))
        ends_s = time.monotonic() + DEADLINE_S
        while server._connections:
            assert time.monotonic() < ends_s
            with contextlib.suppress(OSError):
                pings = pings[found.send(pings) :]
            server.receive(0.01)
            assert len(connection.unsent) < 1000 and len(connection.read) < 1 << 20
        assert not server.sessions and 0 < session.last_id < 19_999


def test_a_server_that_is_full_of_silent_connections_still_lets_clients_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "max_connections", lambda: 4)
    with serve(2) as server, contextlib.ExitStack() as stack:
        first = stack.enter_context(call(server))
        enter(server, first)
        silent = [stack.enter_context(call(server)) for _ in range(7)]
        listen_until(server, lambda: sum(map(is_open, silent)) == 3)
        assert [is_open(one) for one in silent] == [False] * 4 + [True] * 3
        enter(server, stack.enter_context(call(server)))
        assert is_open(first) and len(server.sessions) == 2


def test_connections_leave_files_for_checkpoints() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for soft, expected in ((256, 192), (1024, 768), (min(before[1], 4096), MAX_CONNECTIONS)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
            assert server_module.max_connections() == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_full_table_of_files_is_one_line_and_clients_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "PAUSE_S", 0.1)
    monkeypatch.setattr(server_module, "CHECK_EVERY_S", 0.01)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serve(1) as server, call(server) as found:
        num_open = max(map(int, os.listdir("/proc/self/fd"))) + 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, before[1]))
            places = []
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    places.append(os.dup(found.fileno()))
            waited = 0
            for _ in range(30):
                assert not server.receive(0.02)
                waited += server._listener not in server._selector.get_map()  # and takes no time of others
            assert waited > 10
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for place in places:
            os.close(place)
        said = [record.message for record in caplog.records if "Too many open files" in record.message]
        assert len(said) == 1 and "accepts no more" in said[0]
        enter(server, found)


def test_lines_about_clients_are_limited_and_show_their_names_as_escapes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "corral")
    monkeypatch.setattr(server_module, "MAX_LOG_LINES", 5)
    with serve(1) as server:
        for _ in range(20):
            with call(server) as found:
                enter(server, found, name="x\n2026-01-01 00:00:00 WARNING forged \x1b[2J" + "y" * 1000)
                found.sendall(pack_message({"type": "bye"}))
                listen_until(server, lambda: not server.sessions)
        said = [record.getMessage() for record in caplog.records if "client x" in record.getMessage()]
        assert len(said) == 5
        assert said[0].startswith(r"policy server: client x\n2026-01-01 00:00:00 WARNING forged \x1b[2Jyy")
        assert all(text.isprintable() and len(text) < 120 for text in said)
        server._log._since_s -= 61  # a minute later
        with call(server) as found:
            enter(server, found, name="y")
        later = [record.getMessage() for record in caplog.records][-2:]
        assert re.fullmatch(r"policy server: \d+ lines about clients were left out\.", later[0])
        assert later[1].startswith("policy server: client y came")


def test_the_time_for_the_next_message_begins_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CHECK_EVERY_S", 0.01)
    with serve(1, client_timeout_s=0.3) as server, call(server) as found:
        enter(server, found)
        found.sendall(pack_message({"type": "steps", "id": 1, "envs": [0], "obs": [[0.0]], "begins": [True]}))
        [(session, _)] = listen_until(server, lambda: any(one.waits for one in server.sessions.values()))
        server.receive(0.5)  # longer than a client may be silent, and the server listens
        server.answer(session, np.array([1]))
        server.receive(0.05)
        assert session.id_ in server.sessions
        found.sendall(pack_message({"type": "ping", "id": 2}))
        listen_until(server, lambda: session.last_id == 2)
        assert b"actions" in found.recv(65_536)
        listen_until(server, lambda: not server.sessions)  # and it ends


class Faulty(PolicyServer):
    """A server that lacks a check: a message with the env 7 raises what nothing expects."""

    def _read_steps(self, session: Any, message: Any) -> Any:
        if message["envs"] == [7]:
            raise RecursionError("as deep as it goes")
        return super()._read_steps(session, message)


def test_what_no_check_was_thought_of_costs_only_the_client_that_sent_it() -> None:
    settings = ServerSettings(address="127.0.0.1:0")
    server = Faulty(settings, Box(-1, 1, (1,), np.float32), Discrete(2), 2)
    with contextlib.closing(server), call(server) as other, call(server) as found:
        enter(server, other)
        enter(server, found)
        found.sendall(pack_message({"type": "steps", "id": 1, "envs": [7], "obs": [[0.0]], "begins": [True]}))
        listen_until(server, lambda: len(server.sessions) == 1)
        assert "cannot be used: RecursionError: as deep as it goes" in read_reply(found)["message"]
        other.sendall(pack_message({"type": "ping", "id": 1}))
        listen_until(server, lambda: any(one.last_id == 1 for one in server.sessions.values()))
        assert read_reply(other) == {"type": "done", "id": 1, "weights_version": 0}
