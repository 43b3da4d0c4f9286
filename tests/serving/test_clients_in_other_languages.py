"""The clients in C++, JavaScript and Python, against real servers and against servers that misbehave."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from simulators import address_of, runner_of, served

from corral import Algorithm, ExternalEnv, PPOConfig
from corral.core.space_descriptions import describe_space
from corral.runners.requests import SampleRequest
from corral.runners.serving.client import HEADER, ClientError, PolicyClient, pack_array, pack_message, unpack_array
from corral.runners.serving.messages import Entries
from corral.runners.serving.server import PolicyServer, ServerSettings

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "clients"
SOURCES = Path(__file__).parent / "other_languages"
COMPILER = ["g++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{CLIENTS / 'cpp'}"]
NUM_ENVS = 8
TIMEOUT_S = 60
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@dataclass
class Client:
    """Programs of one language, which are compiled when they are asked for."""

    language: str
    build_dir: Path
    commands: ClassVar[dict[tuple[Path, bool], list[str]]] = {}  # of all clients: a program is compiled once

    def command(self, source: Path, acts_locally: bool = False) -> list[str]:
        """Return the command that runs a program."""
        if self.language == "javascript":
            loader = ["env", f"LOADER={SOURCES / 'remote_loader.mjs'}"] if acts_locally else []
            return [*loader, "node", f"{source}.mjs"]
        if self.language == "python":
            return [sys.executable, f"{source}.py"]
        if (source, acts_locally) not in self.commands:
            target = self.build_dir / f"{source.name}{acts_locally:d}"
            loader = [f"-I{SOURCES}", '-DLOADER="remote_loader.hpp"'] if acts_locally else []
            subprocess.run([*COMPILER, *loader, "-o", str(target), f"{source}.cpp"], check=True, timeout=TIMEOUT_S)
            self.commands[source, acts_locally] = [str(target)]
        return self.commands[source, acts_locally]

    @property
    def cartpole(self) -> list[str]:
        """The command that runs the example."""
        return self.command(CLIENTS / self.language / "cartpole")

    @property
    def acting_cartpole(self) -> list[str]:
        """The command that runs the example with a policy of its own, which a `ModelRunner` runs."""
        return self.command(CLIENTS / self.language / "cartpole", acts_locally=True)


def languages(*names: str) -> Any:
    """Return a decorator for a fixture that a test gets for each language."""
    # With the other tests that write graphs: one process imports what writes them.
    grouped = [pytest.param(name, marks=pytest.mark.xdist_group("graphs")) for name in names]
    return pytest.fixture(scope="module", params=grouped)


@languages("cpp", "javascript")
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """The client of each other language."""
    return client_in(request.param, tmp_path_factory)


@languages("cpp", "javascript", "python")
def any_client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """The client of each language."""
    return client_in(request.param, tmp_path_factory)


def client_in(language: str, tmp_path_factory: pytest.TempPathFactory) -> Client:
    needed = {"cpp": "g++", "javascript": "node"}.get(language, sys.executable)
    if shutil.which(needed) is None:
        pytest.skip(f"{needed} is not installed")
    return Client(language, tmp_path_factory.mktemp(language))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start programs; what is left of them is ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start_program(command: list[str], *arguments: Any, **environment: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(program)
        return program

    yield start_program
    for program in started:
        program.kill()
        program.communicate()


def build(address: str, num_envs: int = NUM_ENVS, *, callbacks: Any = None, **training: Any) -> Algorithm:
    env_config = {"address": address, "spaces_of": "CartPole-v1", "policy_interval_s": 1e-9}
    config = (
        PPOConfig()
        .environment(ExternalEnv, env_config=env_config)
        .env_runners(num_envs_per_env_runner=num_envs)
        .training(**training)
        .callbacks(**(callbacks or {}))
        .debugging(seed=0)
    )
    return config.build()


def server_of(algorithm: Algorithm) -> PolicyServer:
    runners = algorithm.env_runner_group.foreach_env_runner(lambda runner: runner)
    (server,) = [runner.env.server for runner in runners]
    return server


def ended(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit status, last line of the output, and errors of a program, which must end by itself."""
    output, errors = program.communicate(timeout=TIMEOUT_S)
    return program.returncode, output.strip().rpartition("\n")[2], errors


def while_running(program: subprocess.Popen[str], train: Callable[[], Any]) -> Any:
    """Return what training gives; it would wait forever for a client that ended too early, so that this fails then."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(train()), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        if program.poll() is not None and thread.is_alive():
            pytest.fail(f"the client ended: {program.communicate()[1]}")
    assert found, "training failed"
    return found[0]


def steps_are_exact(episode: Any) -> bool:
    """Return whether each observation of an episode follows from the one before and the action, by CartPole's laws."""
    obs, actions = np.asarray(episode.get_observations(), np.float64), np.asarray(episode.get_actions())
    (x, speed, angle, turn), force = obs[:-1].T, np.where(actions == 1, 10.0, -10.0)
    push = (force + 0.05 * turn**2 * np.sin(angle)) / 1.1
    turn_rate = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    acceleration = push - 0.05 * turn_rate * np.cos(angle) / 1.1
    expected = np.stack([x + 0.02 * speed, speed + 0.02 * acceleration, angle + 0.02 * turn, turn + 0.02 * turn_rate])
    return bool(len(obs) == len(actions) + 1 and np.allclose(obs[1:], expected.T, atol=1e-5))


class Checked:
    """A callback that checks the episodes, and counts them."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.wrong = 0

    def __call__(self, episode: Any, **_: Any) -> None:
        self.lengths.append(len(episode))
        self.wrong += not steps_are_exact(episode)


@pytest.mark.slow
def test_client_trains_cartpole(any_client: Client, tmp_path: Path, start: Any) -> None:
    with build(
        f"unix:{tmp_path}/s", lr=2.5e-3, minibatch_size=256, num_epochs=8, train_batch_size_per_learner=2048
    ) as algorithm:
        program = start(any_client.cartpole, server_of(algorithm).address, NUM_ENVS)
        stop = {"episode_return_mean": 450, "num_env_steps": 400_000}
        result = while_running(program, lambda: algorithm.fit(stop=stop, run_dir=tmp_path / "run", progress=False))
        sampled = result["num_env_steps_sampled_lifetime"]
        assert result["env_runners"]["episode_return_mean"] >= 450
    status, num_steps, errors = ended(program)
    assert status == 0, errors
    assert 0 <= int(num_steps) - sampled <= NUM_ENVS  # what was on its way when the server left


def test_steps_of_a_client_arrive_as_they_were(client: Client, start: Any) -> None:
    checked = Checked()
    with build(
        "127.0.0.1:0", train_batch_size_per_learner=800, num_epochs=1, callbacks={"on_episode_end": checked}
    ) as algorithm:
        program = start(client.cartpole, server_of(algorithm).address, NUM_ENVS, 1)
        sampled = while_running(program, algorithm.train)["num_env_steps_sampled_lifetime"]
        assert server_of(algorithm).num_dropped == 0
    status, num_steps, errors = ended(program)
    assert status == 0, errors
    assert "the training is over" in errors
    assert 0 <= int(num_steps) - sampled <= NUM_ENVS
    assert len(checked.lengths) > 10 and checked.wrong == 0


class Proxy:
    """Carries bytes between clients and a server, and cuts each connection after some bytes.

    Args:
        target: Address of the server.
        cuts: For each connection that comes, after how many bytes to the server and to the client it is cut; `None` is
            never, and so are connections after the last one.
    """

    def __init__(self, target: str, cuts: list[tuple[int | None, int | None]]) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._cuts, self._lock = cuts, threading.Lock()
        self.num_cut = self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def _listen(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            cuts = self._cuts[self.num_connections] if self.num_connections < len(self._cuts) else (None, None)
            self.num_connections += 1
            for source, drain, limit in ((near, far, cuts[0]), (far, near, cuts[1])):
                self._threads.append(threading.Thread(target=self._carry, args=(source, drain, limit)))
                self._threads[-1].start()

    def _carry(self, source: socket.socket, drain: socket.socket, limit: int | None) -> None:
        try:
            while limit is None or limit > 0:
                data = source.recv(65_536 if limit is None else min(limit, 65_536))
                if not data:
                    break
                drain.sendall(data)
                limit = None if limit is None else limit - len(data)
        except OSError:
            pass  # the other thread cut the connection
        if limit == 0:
            with self._lock:
                self.num_cut += 1
        for end in (source, drain):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def turn_to(self, target: str) -> None:
        """Cut the connections, and carry the next ones to another server."""
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        for end in self._sockets[1:]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for end in self._sockets:
            end.close()


# In the length of a message, in hello or welcome, right after them, in steps and actions, between two messages.
CUTS = [0, 1, 3, 4, 30, 60, 90, 150, 400, 480, 520, 600, 700, 1000, 1234, 3000, 4321, 8000]


@pytest.mark.slow_cases("javascript", "cpp")
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_connection_that_is_cut_costs_nothing(any_client: Client, direction: str, start: Any) -> None:
    checked = Checked()
    cuts: list[tuple[int | None, int | None]] = [(k, None) if direction == "to_server" else (None, k) for k in CUTS]
    with build(
        "127.0.0.1:0", train_batch_size_per_learner=2000, num_epochs=1, callbacks={"on_episode_end": checked}
    ) as algorithm:
        proxy = Proxy(server_of(algorithm).address, cuts)
        try:
            program = start(any_client.cartpole, proxy.address, NUM_ENVS, 2)
            sampled = while_running(program, algorithm.train)["num_env_steps_sampled_lifetime"]
            num_dropped = server_of(algorithm).num_dropped
        finally:
            algorithm.stop()
            proxy.close()
    status, num_steps, errors = ended(program)
    assert status == 0, errors
    assert "lost" not in errors and "does not know" not in errors
    assert (proxy.num_cut, num_dropped) == (len(CUTS), 0)
    assert 0 <= int(num_steps) - sampled <= NUM_ENVS
    assert len(checked.lengths) > 20 and checked.wrong == 0


CARTPOLE_SPACES = spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Discrete(2)


def serve_until(server: PolicyServer, program: subprocess.Popen[str]) -> None:
    """Let a server answer until a program ends."""
    ends_s = time.monotonic() + TIMEOUT_S
    while program.poll() is None:
        assert time.monotonic() < ends_s
        server.receive(0.05)


@pytest.mark.parametrize("given", [{"CORRAL_TOKEN": "guessed"}, {}])
def test_wrong_token_is_refused(client: Client, given: dict[str, str], start: Any) -> None:
    server = PolicyServer(ServerSettings("127.0.0.1:0", token="the real one"), *CARTPOLE_SPACES, num_seats=1)
    try:
        program = start(client.cartpole, server.address, 1, **given)
        serve_until(server, program)
    finally:
        server.close()
    status, num_steps, errors = ended(program)
    assert (status, num_steps) == (1, "0")
    assert errors.startswith("error token: ")


def test_server_without_seats_refuses(client: Client, start: Any) -> None:
    server = PolicyServer(ServerSettings("127.0.0.1:0"), *CARTPOLE_SPACES, num_seats=1)
    try:
        program = start(client.cartpole, server.address, 2)
        serve_until(server, program)
    finally:
        server.close()
    status, _, errors = ended(program)
    assert status == 1 and errors.startswith("error full: ")


IMAGE = spaces.Box(0, 255, (2, 2), np.uint8)
PAIR = spaces.Tuple([spaces.Box(-np.inf, np.inf, (1,), np.float64), spaces.Discrete(5)])
DICT_SPACES = (
    spaces.Dict({"image": IMAGE, "pair": PAIR}),
    spaces.Dict({"move": spaces.Box(-10, 10, (1,), np.float32), "turn": spaces.Discrete(3)}),
)
SAYS = {  # name of the field: its values in the messages `steps`, in order
    "envs": [[0, 1, 2], [2, 0], [0, 1, 2], [1, 2], [0, 0, 1, 2, 2], [0, 1], [0, 1, 2], [0, 1, 2]],
    "rewards": [[0] * 3, [1.5, -2], [1, 2, 3], [0] * 2, [4, 0, 5, 6, 0], [0] * 2, [0] * 3, [1] * 3],
    "begins": [[1] * 3, [0] * 2, [0] * 3, [1] * 2, [0, 1, 0, 0, 1], [0] * 2, [1] * 3, [0] * 3],
    "terminated": [[0] * 3, [0] * 2, [0, 1, 0], [0] * 2, [1, 0, 0, 0, 0], [0] * 2, [0] * 3, [0] * 3],
    "truncated": [[0] * 3, [0] * 2, [0, 1, 1], [0] * 2, [0, 0, 0, 1, 0], [0] * 2, [0] * 3, [0] * 3],
    "obs": [
        [0, 1, 2],
        [3, 4],
        [5, 6, 7],
        [8, 9],
        [10, 13, 11, 12, 15],
        [16, 17],
        [0, 1, 2],
        [3, 4, 5],
    ],  # numbers that it encodes
}
INFOS = [{"note": "é", "level": 3, "big": -5_000_000_000}, {"list": [True, 0.5, None]}]


def play_all_calls(program: subprocess.Popen[str], server: PolicyServer) -> list[tuple[str, Entries]]:
    """Answer a program that makes all calls, and return its names and what it sent."""
    server.weights_version = 7
    found: list[tuple[str, Entries]] = []
    ends_s = time.monotonic() + TIMEOUT_S
    while program.poll() is None or server.sessions:  # until the server has read that the client leaves
        assert time.monotonic() < ends_s
        for session, entries in server.receive(0.05).entries:
            found.append((session.name, entries))
            is_over = entries.terminated | entries.truncated
            seats = session.seats[entries.envs[~is_over & (entries.actions is None)]]
            server.answer(session, {"move": np.array(seats + 0.5, np.float32)[:, None], "turn": np.array(seats)})
    return found


def check_all_calls(found: list[tuple[str, Entries]]) -> None:
    assert {name for name, _ in found} == {"all calls"}
    for name in ("envs", "rewards", "begins", "terminated", "truncated"):
        assert [getattr(entries, name).tolist() for _, entries in found] == SAYS[name], name
    for (_, entries), expected in zip(found, SAYS["obs"], strict=True):
        numbers = np.array(expected)
        images = (10 * numbers[:, None] + np.arange(4)).reshape(-1, 2, 2).astype(np.uint8)
        np.testing.assert_array_equal(entries.obs["image"], images)
        np.testing.assert_array_equal(entries.obs["pair"][0], numbers[:, None] + 0.25)
        np.testing.assert_array_equal(entries.obs["pair"][1], numbers % 5)
    (own,) = [entries for _, entries in found if entries.actions is not None]
    assert own.infos == INFOS
    assert own.actions["move"].tolist() == [[9], [8]] and own.actions["turn"].tolist() == [2, 1]


@pytest.mark.slow_cases("cpp")
def test_each_call_arrives_as_it_was_made(client: Client, start: Any) -> None:
    server = PolicyServer(ServerSettings("127.0.0.1:0", token="a token"), *DICT_SPACES, num_seats=3)
    try:
        program = start(client.command(SOURCES / "all_calls"), server.address)
        found = play_all_calls(program, server)
    finally:
        server.close()
    status, _, errors = ended(program)
    assert status == 0, errors
    check_all_calls(found)


@pytest.fixture
def secure_server(tmp_path: Path) -> Iterator[PolicyServer]:
    """A server that speaks TLS with a certificate for 127.0.0.1, which is `certificate.pem`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=corral"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*request.split(), *names], check=True, capture_output=True, timeout=TIMEOUT_S)
    settings = ServerSettings("127.0.0.1:0", token="a token", certificate=str(certificate), key=str(key))
    server = PolicyServer(settings, *DICT_SPACES, num_seats=3)
    yield server
    server.close()


@needs_node
def test_javascript_speaks_tls(secure_server: PolicyServer, tmp_path: Path, start: Any) -> None:
    program = start(
        ["node", f"{SOURCES}/all_calls.mjs"], secure_server.address, CERTIFICATES=str(tmp_path / "certificate.pem")
    )
    found = play_all_calls(program, secure_server)
    status, _, errors = ended(program)
    assert status == 0, errors
    check_all_calls(found)


@needs_node
def test_javascript_refuses_a_certificate_that_it_does_not_know(secure_server: PolicyServer, start: Any) -> None:
    call = f"""
    import {{ PolicyClient }} from "{CLIENTS}/javascript/corral_client.mjs";
    await PolicyClient.connect("{secure_server.address}", {{ tls: {{}} }}).catch((error) => console.log(error.code));
    """
    program = start(["node", "--input-type=module", "--eval", call])
    serve_until(secure_server, program)
    assert ended(program)[:2] == (0, "tls")


@needs_node
def test_javascript_takes_the_numbers_of_envs_as_a_typed_array(start: Any) -> None:
    call = f"""
    import {{ NdArray, PolicyClient }} from "{CLIENTS}/javascript/corral_client.mjs";
    const client = new PolicyClient("nowhere:1", {{ numEnvs: 2 }});
    client.exchange = ({{ envs, obs, begins }}) => console.log(JSON.stringify([envs, obs.numbers(), begins]));
    const [obs, nextObs] = [[1, 2], [3, 4]].map((numbers) => new NdArray(Float32Array.from(numbers), [2, 1]));
    await client.step(obs, [1, 1], {{ terminated: [true, false], envs: Int32Array.of(0, 1), nextObs }});"""
    status, printed, problem = ended(start(["node", "--input-type=module", "--eval", call]))
    assert status == 0, problem
    assert json.loads(printed) == [[0, 0, 1], [1, 3, 2], [False, True, False]]


def test_python_refuses_a_certificate_that_it_does_not_know(secure_server: PolicyServer) -> None:
    is_over = threading.Event()

    def listen() -> None:
        while not is_over.is_set():
            secure_server.receive(0.02)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        with pytest.raises(ClientError, match="is not accepted") as caught:
            PolicyClient(secure_server.address, tls=ssl.create_default_context())
    finally:
        is_over.set()
        thread.join()
    assert caught.value.code == "tls"


WELCOME = {
    "type": "welcome",
    "protocol": 1,
    "session": "s",
    "resumed": False,
    "max_message_bytes": 1 << 20,
    "weights_version": 0,
    "observation_space": {},
    "action_space": {},
}
ANSWER = {"type": "actions", "id": 1, "weights_version": 0, "actions": pack_array(np.zeros(1, np.int64))}


def framed(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


DAMAGED = {
    "cut": framed(msgpack.packb(ANSWER)[:-3]),
    "longer": framed(msgpack.packb(ANSWER) + b"\xc0"),
    "empty": framed(b""),
    "no_map": framed(b"\x01"),
    "no_type": framed(msgpack.packb({"id": 1})),
    "deep": framed(nested(40)),
    "very_deep": framed(nested(1_000_000)),
    "huge_list": framed(b"\xdd\xff\xff\xff\xff"),
    "huge_map": framed(b"\xdf\xff\xff\xff\xff"),
    "huge_text": framed(b"\xdb\xff\xff\xff\xff"),
    "huge_bytes": framed(b"\xc6\xff\xff\xff\xff"),
    "extension": framed(msgpack.packb({**ANSWER, "actions": msgpack.ExtType(1, b"x")})),
    "unknown_byte": framed(b"\xc1"),
    "key": framed(msgpack.packb({1: 2})),
    "few_bytes": framed(msgpack.packb({**ANSWER, "actions": {**ANSWER["actions"], "shape": [2]}})),
    "huge_shape": framed(msgpack.packb({**ANSWER, "actions": {**ANSWER["actions"], "shape": [2**40, 2**40]}})),
    "negative_shape": framed(msgpack.packb({**ANSWER, "actions": {**ANSWER["actions"], "shape": [-1]}})),
    "dtype": framed(msgpack.packb({**ANSWER, "actions": {**ANSWER["actions"], "dtype": "|O8"}})),
    "no_array": framed(msgpack.packb({**ANSWER, "actions": 5})),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_answer_is_refused(client: Client, name: str, start: Any) -> None:
    status, errors = answered_with(client, start, DAMAGED[name])
    assert status == 1, errors
    assert errors.startswith("error message: the server sent a damaged message: "), errors


def test_message_that_is_too_large_is_refused(client: Client, start: Any) -> None:
    status, errors = answered_with(client, start, b"\xff\xff\xff\xff")
    assert status == 1 and errors.startswith("error too_large: "), errors


def test_error_of_the_server_is_shown(client: Client, start: Any) -> None:
    status, errors = answered_with(client, start, pack_message({"type": "error", "code": "timeout", "message": "é"}))
    assert (status, errors) == (1, "error timeout: é\n")


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_answer_is_refused_in_python(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=give, args=(listener, DAMAGED[name]))
        thread.start()
        client = PolicyClient(f"127.0.0.1:{listener.getsockname()[1]}", retry_s=0)
        with pytest.raises(ClientError, match="damaged message") as caught:
            client.begin(np.zeros((1, 4), np.float32))
        thread.join()
    assert caught.value.code == "message"
    assert client._socket is None


def answered_with(client: Client, start: Any, answer: bytes) -> tuple[int, str]:
    """Return exit status and errors of a client whose first message gets an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = start(client.cartpole, f"127.0.0.1:{listener.getsockname()[1]}", 1)
        give(listener, answer)
        status, _, errors = ended(program)
    return status, errors


def give(listener: socket.socket, answer: bytes) -> None:
    """Welcome the next client, give an answer to its first message, and wait until it leaves."""
    listener.settimeout(TIMEOUT_S)
    connection, _ = listener.accept()
    connection.settimeout(TIMEOUT_S)
    with connection, connection.makefile("rwb") as stream:
        for sent in (pack_message(WELCOME), answer):
            (size,) = HEADER.unpack(stream.read(HEADER.size))
            stream.read(size)
            stream.write(sent)
            stream.flush()
        with contextlib.suppress(ConnectionError):
            stream.read()


def test_examples_name_the_version_of_the_protocol() -> None:
    from corral.runners.serving.client import PROTOCOL

    found = {
        re.search(r"\bPROTOCOL = (\d+)", path.read_text(encoding="utf-8"))
        for path in (CLIENTS / "cpp" / "corral_client.hpp", CLIENTS / "javascript" / "corral_client.mjs")
    }
    assert {match and int(match[1]) for match in found} == {PROTOCOL}


# Clients that act themselves.


class ModelRunner:
    """Runs ONNX files for programs, and remembers what they gave it.

    Args:
        path: The Unix socket at which it listens.
        refusal: What it says to a program that gives it a file; empty text is nothing.

    Attributes:
        models: Each file that it was given, and the inputs and outputs of each call of it.
    """

    def __init__(self, path: Path, refusal: str = "") -> None:
        self.refusal = refusal
        self.models: list[tuple[bytes, list[tuple[dict[str, Any], dict[str, Any]]]]] = []
        self.environment = {"MODEL_RUNNER": str(path)}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # the test is over
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream, contextlib.suppress(ConnectionError):
            model = self._read(stream)
            self.models.append((model, []))
            self._write(stream, self.refusal.encode())
            if self.refusal:
                return
            session = one_thread(model)
            names = [one.name for one in session.get_outputs()]
            while body := self._read(stream):
                inputs = {name: unpack_array(packed) for name, packed in msgpack.unpackb(body).items()}
                outputs = dict(zip(names, session.run(None, inputs), strict=True))
                self.models[-1][1].append((inputs, outputs))
                self._write(stream, msgpack.packb({name: pack_array(array) for name, array in outputs.items()}))

    def _read(self, stream: Any) -> bytes:
        head = stream.read(HEADER.size)
        return bytes(stream.read(*HEADER.unpack(head))) if head else b""

    def _write(self, stream: Any, body: bytes) -> None:
        stream.write(framed(body))
        stream.flush()

    def calls(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [call for _, calls in self.models for call in calls]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def one_thread(model: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@pytest.fixture
def model_runner(tmp_path: Path) -> Iterator[ModelRunner]:
    """Runs the models of the clients of a test."""
    runner = ModelRunner(tmp_path / "models")
    yield runner
    runner.close()


class Columns:
    """A callback that keeps the steps of each sample."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []

    def __call__(self, samples: Any, **_: Any) -> None:
        valid, names = samples.valid, ("actions", "dist_inputs", "logp")
        self.samples.append({"obs": samples.obs[:-1][valid], **{k: getattr(samples, k)[valid] for k in names}})

    def check(self, models: list[Any]) -> None:
        """Check that each step has the action and the outputs that one of the models gave for its observation."""
        given = {
            obs.tobytes(): (int(action), outputs)
            for _, calls in models
            for inputs, found in calls
            for obs, action, outputs in zip(inputs["obs"], found["actions"], found["outputs"], strict=True)
        }
        for sample in self.samples:
            found = [given[obs.tobytes()] for obs in sample["obs"]]
            outputs = np.array([row for _, row in found])
            np.testing.assert_array_equal(sample["actions"], [action for action, _ in found])
            np.testing.assert_array_equal(sample["dist_inputs"], outputs)
            logits = outputs[np.arange(len(found)), sample["actions"]] - np.logaddexp(*outputs.T)
            np.testing.assert_allclose(sample["logp"], logits, atol=1e-5)


KEPT = 32 * NUM_ENVS  # steps that a client sends at once


@pytest.mark.slow_cases("cpp")
def test_client_acts_by_the_policy_that_it_is_sent(client: Client, start: Any, model_runner: ModelRunner) -> None:
    checked, columns = Checked(), Columns()
    training = {"train_batch_size_per_learner": 800, "minibatch_size": 200, "num_epochs": 2, "lr": 1e-2}
    with build("127.0.0.1:0", callbacks={"on_episode_end": checked, "on_sample_end": columns}, **training) as algorithm:
        address = server_of(algorithm).address
        program = start(client.acting_cartpole, address, NUM_ENVS, 1, **model_runner.environment)
        results = [while_running(program, algorithm.train) for _ in range(4)]
        assert server_of(algorithm).num_dropped == 0
    status, num_steps, errors = ended(program)
    assert status == 0, errors
    counts = [result["num_env_steps_sampled_lifetime"] for result in results]
    assert all(800 <= now - before < 800 + NUM_ENVS for before, now in zip([0, *counts], counts, strict=False))
    assert [len(sample["obs"]) for sample in columns.samples] == np.diff([0, *counts]).tolist()
    assert 0 <= int(num_steps) - counts[-1] <= 2 * KEPT + NUM_ENVS
    assert len(checked.lengths) > 10 and checked.wrong == 0
    columns.check(model_runner.models)
    lags = [(result["env_runners"]["policy_lag_mean"], result["env_runners"]["policy_lag_max"]) for result in results]
    assert lags[0] == (0, 0) and lags[-1][1] == 1 and 0 < lags[-1][0] < 1
    # The weights of each update acted, and gave other outputs than those before.
    used = [(model, calls) for model, calls in model_runner.models if calls]
    assert len(used) >= 4
    (inputs, outputs), *_ = used[0][1]
    sessions = [one_thread(model) for model, _ in used]
    given = [session.run(["outputs"], inputs)[0] for session in sessions]
    np.testing.assert_array_equal(given[0], outputs["outputs"])
    assert all(np.abs(now - before).max() > 1e-3 for before, now in itertools.pairwise(given))
    for session, (_, calls) in zip(sessions, used, strict=True):
        np.testing.assert_array_equal(session.run(["draws"], calls[-1][0])[0], calls[-1][1]["draws"])


@pytest.mark.slow
def test_client_that_acts_itself_survives_cuts(client: Client, start: Any, model_runner: ModelRunner) -> None:
    checked, columns = Checked(), Columns()
    cuts: list[tuple[int | None, int | None]] = [(k, None) if k % 2 else (None, 3 * k) for k in CUTS]
    callbacks = {"on_episode_end": checked, "on_sample_end": columns}
    with build("127.0.0.1:0", train_batch_size_per_learner=2000, num_epochs=1, callbacks=callbacks) as algorithm:
        proxy = Proxy(server_of(algorithm).address, cuts)
        try:
            program = start(client.acting_cartpole, proxy.address, NUM_ENVS, 2, **model_runner.environment)
            sampled = while_running(program, algorithm.train)["num_env_steps_sampled_lifetime"]
            num_dropped = server_of(algorithm).num_dropped
        finally:
            algorithm.stop()
            proxy.close()
    status, num_steps, errors = ended(program)
    assert status == 0, errors
    assert "does not know" not in errors
    assert (proxy.num_cut, num_dropped) == (len(CUTS), 0)
    assert 0 <= int(num_steps) - sampled <= 2 * KEPT + NUM_ENVS
    assert len(checked.lengths) > 20 and checked.wrong == 0
    columns.check(model_runner.models)


@pytest.mark.slow
def test_client_that_acts_itself_continues_with_a_new_server(
    client: Client, start: Any, model_runner: ModelRunner
) -> None:
    """The new server has the first weights; it would refuse steps with the version of the server before."""
    settings = {"train_batch_size_per_learner": 400, "minibatch_size": 200, "num_epochs": 1, "lr": 1e-2}
    checked, columns = Checked(), Columns()
    with (
        build("127.0.0.1:0", **settings) as first,
        build("127.0.0.1:0", callbacks={"on_episode_end": checked, "on_sample_end": columns}, **settings) as second,
    ):
        proxy = Proxy(server_of(first).address, [])
        try:
            program = start(client.acting_cartpole, proxy.address, NUM_ENVS, 3, **model_runner.environment)
            for _ in range(3):
                while_running(program, first.train)
            num_before = len(model_runner.models)
            proxy.turn_to(server_of(second).address)
            results = [while_running(program, second.train) for _ in range(2)]
            second.stop()
        finally:
            proxy.close()
    status, _, errors = ended(program)
    assert status == 0, errors
    assert errors.count("does not know the episodes of this client.") == 1
    assert num_before >= 3
    columns.check(model_runner.models[num_before:])
    assert 800 <= results[-1]["num_env_steps_sampled_lifetime"] < 800 + 2 * NUM_ENVS
    assert len(checked.lengths) > 5 and checked.wrong == 0
    assert results[0]["env_runners"]["policy_lag_max"] == 0


# Of each step that `acts_locally` reports: the numbers of its two observations, its reward, and how it ended.
STEPS = {
    (2, 3, 1.5, 0, 0),
    (0, 4, -2, 0, 0),
    (4, 5, 1, 0, 0),
    (1, 6, 2, 1, 1),
    (3, 7, 3, 0, 1),
    (5, 10, 4, 1, 0),
    (8, 11, 5, 0, 0),
    (9, 12, 6, 0, 1),
    (13, 16, 1, 1, 0),
    (11, 17, 1, 1, 0),
    (15, 18, 1, 1, 0),
    *((number, number + 3, 1, 0, 0) for number in range(22, 28)),
}


@pytest.mark.slow
def test_nested_observations_and_actions_of_a_client_that_acts_itself(
    client: Client, start: Any, model_runner: ModelRunner
) -> None:
    obs, actions = map(describe_space, DICT_SPACES)
    config = served(PPOConfig(), num_envs=3, observation_space=obs, action_space=actions)
    command = client.command(SOURCES / "acts_locally")
    printed, uniform, rollouts = [], [], []
    with runner_of(config) as runner:
        for seed in (1, 1, 2**53 - 1):
            num_before = len(model_runner.models)
            program = start(command, address_of(runner), seed, **model_runner.environment)
            while program.poll() is None:
                rollouts.append(runner.collect(SampleRequest(num_timesteps=1000, time_limit_s=0.05)))
            output, errors = program.communicate()
            assert program.returncode == 0, errors
            calls = [call for _, calls in model_runner.models[num_before:] for call in calls]
            said = [[float(number) for number in line.split()] for line in output.splitlines()]
            for (inputs, outputs), numbers in zip(calls, said, strict=True):
                check_nested(inputs)
                move, turn = outputs["actions/move"], outputs["actions/turn"]
                np.testing.assert_allclose(numbers, [*move[:, 0], *turn], rtol=1e-6)
            printed.append(said)
            uniform.append(np.concatenate([inputs["uniform"].ravel() for inputs, _ in calls]))
        rollouts.append(runner.collect(SampleRequest(num_timesteps=1000, time_limit_s=0.05)))
    np.testing.assert_array_equal(uniform[0], uniform[1])
    assert printed[0] == printed[1] != printed[2]
    assert len(set(uniform[0]) | set(uniform[2])) > 2 * len(uniform[0]) - 3
    assert all(0 <= row.min() < 0.2 < 0.8 < row.max() < 1 and abs(row.mean() - 0.5) < 0.15 for row in uniform)
    found = Counter(step for rollout in rollouts for step in nested_steps(rollout))
    assert found == dict.fromkeys(STEPS, 3)


def check_nested(inputs: dict[str, Any]) -> None:
    """Check that observations arrive at a model by their names; all floats are float32 there."""
    assert {name: array.dtype.str for name, array in inputs.items()} == {
        "obs/image": "|u1",
        "obs/pair/0": "<f4",
        "obs/pair/1": "<i8",
        "uniform": "<f4",
    }
    numbers = inputs["obs/pair/0"][:, 0] - 0.25
    np.testing.assert_array_equal(inputs["obs/pair/1"], numbers % 5)
    images = (10 * numbers[:, None] + np.arange(4)).reshape(-1, 2, 2)
    np.testing.assert_array_equal(inputs["obs/image"], images.astype(np.uint8))


def nested_steps(rollout: Any) -> Iterator[tuple[float, ...]]:
    places = rollout.obs["pair"][0][..., 0] - 0.25
    for t, lane in np.argwhere(rollout.valid).tolist():
        ends = int(rollout.terminated[t, lane]), int(rollout.truncated[t, lane])
        yield float(places[t, lane]), float(places[t + 1, lane]), float(rollout.rewards[t, lane]), *ends


def test_policy_that_only_the_server_can_act_with_is_refused(
    client: Client, start: Any, model_runner: ModelRunner
) -> None:
    config = served(PPOConfig().rl_module(model_config={"use_lstm": True}), num_envs=1)
    with runner_of(config) as runner:
        program = start(client.acting_cartpole, address_of(runner), 1, **model_runner.environment)
        while program.poll() is None:
            runner.collect(SampleRequest(num_timesteps=50, time_limit_s=0.05))
    status, _, errors = ended(program)
    assert status == 1
    assert errors.startswith("error policy: the policy cannot act in clients: the module has memory"), errors
    assert "let the server choose the actions" in errors


def test_policy_that_the_loader_refuses_is_told(client: Client, start: Any, tmp_path: Path) -> None:
    models = ModelRunner(tmp_path / "refusing", "opset 99 is unknown")
    with runner_of(served(num_envs=1)) as runner:
        program = start(client.acting_cartpole, address_of(runner), 1, **models.environment)
        while program.poll() is None:
            runner.collect(SampleRequest(num_timesteps=50, time_limit_s=0.05))
    models.close()
    status, _, errors = ended(program)
    name = {"cpp": "load_model", "javascript": "loadModel"}[client.language]
    (model, _), *_ = models.models
    what = f"the policy with weights version 0, an ONNX file of {len(model)} bytes"
    assert status == 1
    assert errors.startswith(f"error model: {name} cannot load {what}: opset 99 is unknown."), errors
    assert f"leave {name} out" in errors


@pytest.mark.slow
def test_client_that_acts_itself_solves_cartpole(
    client: Client, tmp_path: Path, start: Any, model_runner: ModelRunner
) -> None:
    training = {"lr": 2.5e-3, "minibatch_size": 256, "num_epochs": 8, "train_batch_size_per_learner": 2048}
    with build(f"unix:{tmp_path}/s", **training) as algorithm:
        address = server_of(algorithm).address
        program = start(client.acting_cartpole, address, NUM_ENVS, **model_runner.environment)
        stop = {"episode_return_mean": 450, "num_env_steps": 400_000}
        result = while_running(program, lambda: algorithm.fit(stop=stop, run_dir=tmp_path / "run", progress=False))
    assert result["env_runners"]["episode_return_mean"] >= 450
    status, _, errors = ended(program)
    assert status == 0, errors
