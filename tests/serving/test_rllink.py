"""Clients that speak RLlink, RLlib's protocol for simulators that act themselves, at the port of a policy server."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from simulators import Simulator, address_of, end, runner_of, served

from corral import DQNConfig, PPOConfig
from corral.compat.rllib.rllink import read_chunk, read_message
from corral.core.spaces import space_tree
from corral.errors import ClientMessageError
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner

MESSAGES = Path(__file__).parent / "rllink_messages"
"""Messages as Ray sends them; `make_rllink_messages.py` wrote them."""
BOX, PICKS = space_tree(spaces.Box(-np.inf, np.inf, (4,))), space_tree(spaces.Discrete(3))


def of_ray(name: str) -> bytes:
    return (MESSAGES / f"{name}.bin").read_bytes()


def framed(message: Any, *, as_json: bool = True) -> bytes:
    body: bytes = json.dumps(message).encode() if as_json else msgpack.packb(message, default=as_msgpack_numpy)
    return str(len(body)).zfill(8).encode() + body


def as_msgpack_numpy(array: Any) -> Any:
    """Return what msgpack_numpy makes of an array or a number of NumPy."""
    if isinstance(array, np.ndarray):
        kind = b"O" if array.dtype == object else b""
        data = pickle.dumps(array) if kind else array.tobytes()
        return {b"nd": True, b"type": array.dtype.str, b"kind": kind, b"shape": array.shape, b"data": data}
    return {b"nd": False, b"type": array.dtype.str, b"data": array.tobytes()}


class Client:
    """A connection over which bytes are sent as they are."""

    def __init__(self, runner: EnvRunner) -> None:
        host, _, port = address_of(runner).rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 30)
        self.runner, self.others = runner, []  # type: ignore[var-annotated]

    def other(self) -> Client:
        """Return another client, which is closed with this one."""
        self.others.append(Client(self.runner))
        found: Client = self.others[-1]
        return found

    def close(self) -> None:
        for one in (self, *self.others):
            one.socket.close()

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.socket.sendall(message if isinstance(message, bytes) else framed(message))

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (part := self.socket.recv(count - len(data))):
            data += part
        return data

    def reply(self, *, as_json: bool = True) -> Any:
        """Return the next message of the server; `None` where it closed the connection."""
        try:
            header = self.read(8)
            return (json.loads if as_json else msgpack.unpackb)(self.read(int(header))) if header else None
        except ConnectionError:
            return None

    def rest(self) -> bytes:
        """Return all bytes until the server closes the connection."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while part := self.socket.recv(65_536):
                data += part
        return data

    def send_all_of_it(self, *messages: Any) -> bytes:
        """Send messages and no more, and return what the server says until it closes the connection."""
        with contextlib.suppress(OSError):  # it may have closed it before it read all
            self.send(*messages)
            self.socket.shutdown(socket.SHUT_WR)
        return self.rest()


@contextlib.contextmanager
def connected(config: Any = None, *, num_envs: int = 1, **env_config: Any) -> Iterator[tuple[EnvRunner, Client]]:
    config = served(DQNConfig() if config is None else config, num_envs=num_envs, **env_config)
    with runner_of(config) as runner:
        client = Client(runner)
        try:
            yield runner, client
        finally:
            client.close()


def serve(runner: EnvRunner, seconds: float = 0.3) -> Any:
    """Serve clients for a moment, and return the rollout."""
    return runner.collect(SampleRequest(num_timesteps=1000, time_limit_s=seconds))


@contextlib.contextmanager
def serving(runner: EnvRunner) -> Iterator[list[Any]]:
    """Serve clients in a thread until the block ends; the list holds the rollouts."""
    rollouts: list[Any] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            rollouts.append(serve(runner, 0.05))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield rollouts
    finally:
        is_over.set()
        thread.join(30)
        assert not thread.is_alive()


def steps(rollouts: list[Any]) -> list[tuple[Any, ...]]:
    """Return observation, action, reward, end and next observation of the valid steps, in the order of time."""
    return [
        (
            float(rollout.obs[t, lane, 0]),
            int(rollout.actions[t, lane]),
            float(rollout.rewards[t, lane]),
            bool(rollout.terminated[t, lane]),
            bool(rollout.truncated[t, lane]),
            float(rollout.obs[t + 1, lane, 0]),
        )
        for rollout in rollouts
        for t, lane in np.argwhere(rollout.valid).tolist()
    ]


def chunk(*obs: float, end: str = "", actions: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """Return an episode of JSON with one step between two observations, whose rewards are the observations."""
    ends = {f"is_{end}": True} if end else {}
    actions = [int(value) % 3 for value in obs[:-1]] if actions is None else actions
    return {"obs": [[value] * 4 for value in obs], "actions": actions, "rewards": [*obs[1:]], **ends, **more}


def episodes(*chunks: dict[str, Any], kind: str = "EPISODES") -> dict[str, Any]:
    return {"type": kind, "episodes": [*chunks], "timesteps": sum(len(one["rewards"]) for one in chunks)}


PING, PONG = {"type": "PING"}, {"type": "PONG"}


def test_a_ping_is_answered_in_the_encoding_in_which_it_comes() -> None:
    assert of_ray("ping") == b"00000011\x81\xa4type\xa4PING"
    with connected(num_envs=2) as (runner, client), serving(runner):
        client.send(of_ray("ping"))
        assert client.read(19) == b"00000011\x81\xa4type\xa4PONG"
        client.send(b'00000016{"type": "PING"}')
        assert client.read(24) == b'00000016{"type": "PONG"}'
        for byte in of_ray("ping"):  # and if it comes in pieces
            client.send(bytes([byte]))
        assert client.reply(as_json=False) == PONG
        other = client.other()
        for byte in of_ray("ping"):
            other.send(bytes([byte]))
        assert other.reply(as_json=False) == PONG


def test_the_config_is_plain_in_json_and_refused_where_it_is_a_pickle(caplog: pytest.LogCaptureFixture) -> None:
    with connected() as (runner, client), serving(runner):
        client.send({"type": "GET_CONFIG"})
        assert client.reply() == {"type": "SET_CONFIG", "env_steps_per_sample": 200, "force_on_policy": True}
        client.send(of_ray("get_config"))
        error = client.reply(as_json=False)
        assert error["type"] == f"ERROR: {error['message']}" and error["code"] == "protocol"
        assert "is a pickle, which Corral neither sends nor reads: send JSON" in error["message"]
        assert client.reply() is None
    assert "is a pickle, which Corral neither sends nor reads: send JSON" in caplog.text


def test_episodes_in_json_are_learned_from() -> None:
    with connected() as (runner, client), serving(runner) as rollouts:
        client.send(episodes(chunk(0, 1, 2, 3, end="terminated"), chunk(10, 11, end="truncated"), chunk(20, 21)))
        client.send(episodes(chunk(21, 22), chunk(22, 23), chunk(23)))  # which continue it
        client.send(episodes(chunk(23, 24, actions=[1], terminateds=True)), PING)
        assert client.reply() == PONG  # after all of them
    assert steps(rollouts) == [
        (0.0, 0, 1.0, False, False, 1.0),
        (1.0, 1, 2.0, False, False, 2.0),
        (2.0, 2, 3.0, True, False, 3.0),
        (10.0, 1, 11.0, False, True, 11.0),
        (20.0, 2, 21.0, False, False, 21.0),
        (21.0, 0, 22.0, False, False, 22.0),
        (22.0, 1, 23.0, False, False, 23.0),
        (23.0, 1, 24.0, True, False, 24.0),
    ]


def test_an_episode_that_is_not_continued_keeps_its_steps_and_is_linked_to_no_other() -> None:
    with connected() as (runner, client), serving(runner) as rollouts:
        client.send(episodes(chunk(0, 1, 2), chunk(10, 11, 12, end="terminated"), chunk(20)))
        client.send(episodes(chunk(30, 31), chunk(40, 41, end="terminated")), PING)
        assert client.reply() == PONG
    assert steps(rollouts) == [
        (0.0, 0, 1.0, False, False, 1.0),
        (1.0, 1, 2.0, False, False, 2.0),
        (10.0, 1, 11.0, False, False, 11.0),
        (11.0, 2, 12.0, True, False, 12.0),
        (30.0, 0, 31.0, False, False, 31.0),
        (40.0, 1, 41.0, True, False, 41.0),
    ]
    found = [episode for rollout in rollouts for episode in rollout.episodes() if len(episode)]
    assert len({episode.id_ for episode in found}) == 4


def test_episodes_as_ray_sends_them_are_learned_from() -> None:
    with connected() as (runner, client), serving(runner) as rollouts:
        client.send(*(of_ray(f"episodes_{number}") for number in (1, 2, 3)), PING)
        assert client.reply() == PONG
    first = [(float(t), t % 3, 10.0 + t, t == 5, False, t + 1.0) for t in range(6)]
    other = [(20.0, 2, 30.0, False, False, 21.0), (21.0, 0, 31.0, False, True, 22.0)]
    assert steps(rollouts) == first + other


def test_dict_observations_of_both_forms() -> None:
    space = spaces.Dict({"a": spaces.Box(-9, 9, (2,)), "b": spaces.Tuple([spaces.Discrete(5), spaces.Box(0, 1)])})
    tree = space_tree(space)
    entries = [{"a": [t, -t], "b": [t, [0.5]]} for t in range(3)]
    columns = {"a": np.array([[t, -t] for t in range(3)]), "b": [np.arange(3), np.full((3, 1), 0.5)]}
    rest = {"actions": [0, 1], "rewards": [1, 2]}
    for sent in (
        {"obs": entries, **rest},
        {"observations": {"data": columns, "finalized": True, "lookback": 0}, **rest},
        {"observations": {"data": [entries[0], *entries], "finalized": False, "lookback": 1}, **rest},
    ):
        found = read_chunk(sent, tree, PICKS, "episodes[0]").obs
        assert found["a"].tolist() == [[0, 0], [1, -1], [2, -2]]
        assert found["b"][0].tolist() == [0, 1, 2] and found["b"][1].tolist() == [[0.5]] * 3


def test_many_messages_without_answers_are_all_learned_from() -> None:
    count, length = 60, 50
    with connected() as (runner, client), serving(runner) as rollouts:
        for number in range(count):
            first = number * length
            client.send(episodes(chunk(*range(first, first + length + 1), end="terminated" if number % 7 == 6 else "")))
        client.send(PING)
        assert client.reply() == PONG
    found = steps(rollouts)
    last = (count * length) - 1  # waits for the message after it, which is not there
    assert [step[0] for step in found] == [float(t) for t in range(last)]


def test_an_on_policy_algorithm_says_that_it_needs_the_outputs_of_its_policy() -> None:
    with connected(PPOConfig()) as (runner, client), serving(runner):
        client.send(episodes(chunk(0, 1, 2)))
        assert "learns only from actions of its own policy" in client.reply()["type"]
        assert client.reply() is None


def test_clients_of_both_protocols_share_a_server() -> None:
    with connected(num_envs=3) as (runner, client):
        simulator = Simulator(address_of(runner), 7, 2).start()
        with serving(runner) as rollouts:
            client.send(episodes(chunk(100, 101, 102, end="terminated")), PING)
            assert client.reply() == PONG
        end(runner, simulator)
    found = steps(rollouts)
    assert [step for step in found if step[0] >= 100] == [
        (100.0, 1, 101.0, False, False, 101.0),
        (101.0, 2, 102.0, True, False, 102.0),
    ]
    assert sum(step[0] == 7.0 for step in found) == len(found) - 2


def test_a_server_without_a_seat_or_with_a_token_says_so() -> None:
    with connected(token="secret") as (runner, client), serving(runner):
        client.send(PING)
        assert "serves only clients that say its token" in client.reply()["message"]
    with connected() as (runner, client), serving(runner):
        client.send(PING)
        assert client.reply() == PONG
        other = client.other()
        other.send(PING)
        assert "0 of 1 seats are free" in other.reply()["message"]


def test_a_client_may_be_silent_while_it_collects_steps() -> None:
    with connected(num_envs=2, client_timeout_s=0.2) as (runner, client):
        client.send(PING)
        serve(runner, 0.9)
        client.send(PING)
        serve(runner, 0.2)
        assert [client.reply(), client.reply()] == [PONG, PONG]


def test_rllibs_own_policy_client_is_told_how_to_run() -> None:
    with connected() as (runner, client), serving(runner):
        body = pickle.dumps({"command": "START_EPISODE", "episode_id": None, "training_enabled": True})
        client.send(b"POST / HTTP/1.1\r\nHost: localhost:9900\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        first, _, rest = client.rest().partition(b"\r\n")
    assert first.startswith(b"HTTP/1.1 501 Corral speaks no HTTP and reads no pickles.")
    assert rest.endswith(b"Run scripts of RLlib with python -m corral.compat.rllib")


# Clients that act by the policy that the server sends.


class Actor:
    """A client that plays CartPole with the ONNX file of SET_STATE, as RLlib's client in Python does."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client, self.env, self.rng = client, gym.make("CartPole-v1"), np.random.default_rng(seed)
        client.send(PING, {"type": "GET_CONFIG"}, {"type": "GET_STATE"})
        assert client.reply() == PONG
        self.num_steps = client.reply()["env_steps_per_sample"]
        self.versions: list[int] = []
        self.played: dict[tuple[float, ...], tuple[int, list[float]]] = {}  # action and outputs by observation
        self.set_state()
        self.begin(self.env.reset(seed=seed)[0])

    def set_state(self) -> None:
        state = self.client.reply()
        assert state["type"] == "SET_STATE", state
        import onnxruntime

        self.session = onnxruntime.InferenceSession(gzip.decompress(base64.b64decode(state["onnx_file"])))
        self.versions.append(state["weights_seq_no"])

    def begin(self, obs: Any) -> None:
        self.obs = obs
        self.chunk: dict[str, Any] = {name: [] for name in ("actions", "rewards", "action_dist_inputs", "action_logp")}
        self.chunk["obs"] = [obs.tolist()]

    def sample(self) -> None:
        """Play as many steps as one message holds, send them, and wait for the next weights."""
        chunks = []
        for t in range(self.num_steps):
            (logits,) = self.session.run(None, {"onnx::Gemm_0": self.obs[None]})[0]
            action = int((logits + self.rng.gumbel(size=2)).argmax())
            self.played[tuple(self.obs.tolist())] = action, logits.tolist()
            obs, reward, terminated, truncated, _ = self.env.step(action)
            logp = float(logits[action] - np.log(np.exp(logits).sum()))
            for name, value in (
                ("actions", action),
                ("rewards", reward),
                ("action_dist_inputs", logits.tolist()),
                ("action_logp", logp),
                ("obs", obs.tolist()),
            ):
                self.chunk[name].append(value)
            self.obs, is_over = obs, terminated or truncated
            if is_over or t == self.num_steps - 1:
                chunks.append({**self.chunk, "terminateds": terminated, "truncateds": truncated})
                self.begin(self.env.reset()[0] if is_over else obs)
        self.client.send(episodes(*chunks, kind="EPISODES_AND_GET_STATE"))
        self.set_state()


CARTPOLE = {"observation_space": gym.make("CartPole-v1").observation_space, "action_space": spaces.Discrete(2)}


@pytest.mark.xdist_group("graphs")
@pytest.mark.parametrize("config", [PPOConfig(), DQNConfig()])
def test_steps_of_a_client_that_acts_by_the_policy_are_ordinary_samples(config: Any) -> None:
    config.rl_module(model_config={"fcnet_hiddens": [8]})
    with connected(config, num_envs=2, **CARTPOLE) as (runner, client):
        with serving(runner) as rollouts:
            actor = Actor(client, 3)
            for _ in range(3):
                actor.sample()
        obs = np.array([*actor.played][-1], np.float32)[None]
        expected = runner.actors["default_policy"].inference(obs)
        np.testing.assert_allclose(actor.session.run(None, {"onnx::Gemm_0": obs})[0], expected, atol=1e-5)
    num_steps = 0
    for rollout in rollouts:
        for t, lane in np.argwhere(rollout.valid).tolist():
            action, outputs = actor.played[tuple(rollout.obs[t, lane].tolist())]
            assert rollout.actions[t, lane] == action
            np.testing.assert_allclose(rollout.dist_inputs[t, lane], outputs, atol=1e-6)
            num_steps += 1
    assert num_steps == 3 * actor.num_steps - 1  # the last one comes with the next message


# Random play has a mean return of 22.
@pytest.mark.slow
def test_a_client_that_acts_by_the_policy_trains_it() -> None:
    settings = {"lr": 1e-3, "train_batch_size_per_learner": 1000, "minibatch_size": 100, "num_epochs": 8, "gamma": 0.98}
    config = served(PPOConfig(), num_envs=1, **CARTPOLE).training(**settings)
    config.rl_module(model_config={"fcnet_hiddens": [64]})
    with config.build() as algorithm:
        client, is_over, error = Client(algorithm.env_runner), threading.Event(), []

        def play() -> None:
            try:
                actor = Actor(client, 0)
                while not is_over.is_set():
                    actor.sample()
            except BaseException as caught:
                error.append(caught)

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        best = 0.0
        for _ in range(20):
            result = algorithm.train()
            best = max(best, result["env_runners"]["episode_return_mean"])
            if best >= 80.0:
                break
        lag = result["env_runners"]["policy_lag_max"]
        is_over.set()
    client.close()
    thread.join(30)
    assert best >= 80.0
    assert lag <= 1  # the steps of one message may be of the weights before


# Hostile clients.


class Bomb:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "executed"))


def test_pickles_are_refused_and_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "executed"
    bomb = np.array([Bomb(path)], object)
    state = {"observations": {"data": bomb, "lookback": 0}, "actions": [0], "rewards": [1.0]}
    attacks = [
        framed({"type": "EPISODES", "episodes": [state]}, as_json=False),
        framed({"type": "PING", "more": bomb}, as_json=False),
        framed({"type": "EPISODES", "episodes": pickle.dumps(Bomb(path))}, as_json=False),
        b"00000100" + pickle.dumps(Bomb(path)).ljust(100, b" "),
        pickle.dumps(Bomb(path)),
        b"POST / HTTP/1.1\r\n\r\n" + pickle.dumps(Bomb(path)),
    ]
    with connected(num_envs=9) as (runner, client), serving(runner):
        for attack in attacks:
            client.other().send_all_of_it(attack)
        client.send(PING)  # the server is there, as before
        assert client.reply() == PONG
    assert not path.exists()
    pickle.loads(pickle.dumps(Bomb(path)))  # and the bomb is one
    assert path.exists()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"0000001x" + b"{}", "header must be a length of 8 digits"),
        (
            b"99999999",
            "message has 99,999,999 bytes: at most 65,536 are accepted of the first message: send PING before",
        ),
        (b"00000002[]", "message is neither JSON nor msgpack"),
        (b"00000002{]", "message is neither JSON nor msgpack"),
        (framed([1, 2], as_json=False), "message must be a map, got list"),
        ({"no": "type"}, "type must be one of PING, GET_CONFIG, GET_STATE"),
        ({"type": "START_EPISODE"}, "type must be one of PING"),
        ({"type": "EPISODES"}, "EPISODES.episodes must be a list"),
        ({"type": "EPISODES", "episodes": [3]}, "EPISODES.episodes[0] must be a map"),
        (episodes(chunk(0, 1), {"obs": []} | {"rewards": []}), "EPISODES.episodes[1].actions is missing"),
        (episodes(chunk(0, 1, 2, actions=[0])), "EPISODES.episodes[0].actions must be 2 for 2 rewards, got 1"),
        (episodes(chunk(0, 1, 2, actions=[0, 7])), "EPISODES.episodes[0].actions is outside Discrete(3)"),
        (episodes({**chunk(0, 1), "obs": [[0] * 3, [1] * 3]}), "EPISODES.episodes[0].obs must have shape"),
        (framed({"type": np.zeros(2)}, as_json=False), "type must be one of PING"),
        (framed({"type": "PING", "x": {b"nd": True, b"kind": np.zeros(2)}}, as_json=False), "message"),
        (episodes({**chunk(0, 1), "obs": ["a" * 1000] + ["b"] * 9}), "EPISODES.episodes[0].obs must be numbers"),
        (episodes({**chunk(0, 1), "obs": [[0] * 4, [1] * 3]}), "EPISODES.episodes[0].obs must be numbers"),
        (episodes({**chunk(0, 1), "obs": ["ab", "cd"]}), "EPISODES.episodes[0].obs must be numbers"),
        (episodes({**chunk(0, 1), "obs": [[0] * 4, [2**70] * 4]}), "EPISODES.episodes[0].obs must"),
        (episodes({**chunk(0, 1), "obs": [[float("nan")] * 4, [0] * 4]}), "EPISODES.episodes[0].obs"),
        (
            episodes({**chunk(0, 1, 2), "rewards": [float("inf"), 1]}),
            "EPISODES.episodes[0].rewards[1] must be",
        ),
        (episodes({**chunk(0, 1), "rewards": [[1.0]]}), "EPISODES.episodes[0].rewards must be a list of numbers"),
        (episodes({**chunk(0, 1), "is_terminated": 1}), "EPISODES.episodes[0].is_terminated must be true or false"),
        (episodes({**chunk(0, 1), "id_": 1}), "EPISODES.episodes[0].id_ must be text"),
        (
            framed({"type": "PING", "x": {b"nd": True, b"type": "<f4", b"shape": [9], b"data": b"123"}}, as_json=False),
            "message.data must be 36 bytes, got 3 bytes",
        ),
        (
            framed({"type": "PING", "x": {b"nd": True, b"type": "O", b"shape": [1], b"data": b"1"}}, as_json=False),
            "message.dtype must be such as '<f4', '<i8' or '|u1', got 'O'",
        ),
        (framed({"type": "PING", "x": msgpack.ExtType(5, b"x")}, as_json=False), "extension type 5"),
    ],
)
def test_refusals_say_what_is_wrong_and_where(message: Any, said: str) -> None:
    with connected() as (runner, client), serving(runner):
        client.send(message)
        data = client.rest()
        body = data[8:]
        error = json.loads(body) if body[:1] == b"{" else msgpack.unpackb(body)
    assert said in error["message"]
    assert int(data[:8]) == len(body)


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
_KEYS = st.sampled_from(
    ["id_", "obs", "observations", "actions", "rewards", "is_terminated", "terminateds", "is_truncated", "data"]
)


@given(st.dictionaries(_KEYS, _VALUES, max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_episode_is_read_or_refused(fields: dict[str, Any]) -> None:
    try:
        found = read_chunk({**chunk(0, 1, 2), **fields}, BOX, PICKS, "episodes[0]")
    except ClientMessageError as error:
        assert error.place.startswith("episodes[0]")
    else:
        assert len(found.obs) == len(found.actions) + 1 == len(found.rewards) + 1


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for start in (b"", b"{", b"\x82\xa4type\xa4PING\xa1x"):
        try:
            assert read_message(start + body)["type"]
        except ClientMessageError as error:
            assert error.place


def damaged(seed: int, count: int) -> int:
    """Send damaged messages of Ray over connections of their own, and return how many were refused."""
    rng, num_refused = np.random.default_rng(seed), 0
    whole = [of_ray(f"episodes_{number}") for number in (1, 2, 3)] + [framed(episodes(chunk(0, 1, 2)))]
    with connected(num_envs=2) as (runner, first), serving(runner):
        first.send(PING)
        assert first.reply() == PONG
        for _ in range(count):
            data = bytearray(whole[rng.integers(len(whole))])
            for _ in range(rng.integers(1, 6)):
                match rng.integers(3):
                    case 0:
                        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
                    case 1 if len(data) > 9:
                        del data[rng.integers(9, len(data)) :]
                    case 2:
                        data[8 + rng.integers(len(data) - 8)] = rng.integers(256)
            client = first.other()
            num_refused += b"ERROR: " in client.send_all_of_it(bytes(data), PING)
            client.socket.close()
        first.send(PING)
        assert first.reply() == PONG
    return num_refused


def test_damaged_messages_cost_their_connection_and_no_other_one() -> None:
    assert damaged(0, 60) > 10


@pytest.mark.slow
def test_a_thousand_damaged_messages_cost_their_connections_and_no_other_one() -> None:
    assert damaged(1, 1000) > 200
