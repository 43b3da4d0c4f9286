"""Simulators that drive themselves: clients of a policy server that write down what they did."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import msgpack
import numpy as np

from corral import ExternalEnv, PPOConfig
from corral.algorithms.config.config import AlgorithmConfig
from corral.data.episodes.rollout import Rollout
from corral.runners.runner import EnvRunner
from corral.runners.serving.client import HEADER, PolicyClient, ServerStopped, pack_message

OBS = {"type": "Box", "shape": [4], "low": "-inf", "high": "inf", "dtype": "float32"}
ACTIONS = {"type": "Discrete", "n": 3, "start": 0, "dtype": "int64"}


def served(config: AlgorithmConfig | None = None, *, num_envs: int = 8, **env_config: Any) -> AlgorithmConfig:
    """Return a config whose env is served at a free port, with observations of 4 numbers and 3 actions."""
    spaces = {"observation_space": OBS, "action_space": ACTIONS}
    config = config or PPOConfig()
    config.environment(ExternalEnv, env_config={"address": "127.0.0.1:0", **spaces, **env_config})
    return config.env_runners(num_envs_per_env_runner=num_envs).debugging(seed=0)


@contextmanager
def runner_of(config: AlgorithmConfig) -> Iterator[EnvRunner]:
    """Make the embedded runner of a config, and stop it at the end."""
    runner = EnvRunner(config)
    try:
        yield runner
    finally:
        runner.stop()


def free_ports(count: int) -> int:
    """Return the first of so many neighbouring ports that are free."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for index in range(1, count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + index))
            except (OSError, OverflowError):
                continue
            return port


def end(runner: EnvRunner, *simulators: Simulator) -> None:
    """Stop a runner, which tells the simulators, and raise what one of them raised."""
    runner.stop()
    for simulator in simulators:
        simulator.join()


def address_of(runner: EnvRunner) -> str:
    address: str = runner.env.server.address  # type: ignore[attr-defined]
    return address


@dataclass
class Step:
    """One transition, as a simulator saw it."""

    obs: tuple[float, ...]
    action: int
    reward: float
    terminated: bool
    truncated: bool
    next_obs: tuple[float, ...]


def steps_of(rollout: Rollout) -> list[tuple[int, Step]]:
    """Return lane and transition of each valid step, read from the columns alone."""
    found = []
    for t, lane in np.argwhere(rollout.valid).tolist():
        found.append(
            (
                lane,
                Step(
                    tuple(rollout.obs[t, lane].tolist()),
                    int(rollout.actions[t, lane]),
                    float(rollout.rewards[t, lane]),
                    bool(rollout.terminated[t, lane]),
                    bool(rollout.truncated[t, lane]),
                    tuple(rollout.obs[t + 1, lane].tolist()),
                ),
            )
        )
    return found


class Stranger:
    """A client that knows only the page of the protocol."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 120)  # the export of a graph takes seconds

    def say(self, message: dict[str, Any]) -> None:
        self.socket.sendall(pack_message(message))

    def ask(self, data: bytes) -> bytes:
        """Send bytes, and return the frame of the answer."""
        self.socket.sendall(data)
        return self._read_frame()

    def read(self) -> dict[str, Any]:
        """Return the next message."""
        message: dict[str, Any] = msgpack.unpackb(self._read_frame()[HEADER.size :])
        return message

    def _read_frame(self) -> bytes:
        head = self._read(HEADER.size)
        return head + self._read(*HEADER.unpack(head))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            assert part, "the server closed the connection"
            data += part
        return data


class Playing:
    """A simulator in a thread, which plays until the server stops; `join` raises what it raised."""

    error: BaseException | None = None

    def __init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Self:
        self.thread.start()
        return self

    def join(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self.connect_and_play()
        except ServerStopped:
            pass
        except BaseException as error:
            self.error = error

    def connect_and_play(self) -> None:
        raise NotImplementedError


@dataclass
class Simulator(Playing):
    """Plays episodes of random lengths in some envs; each of its observations is another one.

    An observation is the number of the client, of the env, of the episode, and of the step. In a message are the envs
    that `chooses` picks, so that envs of one client have paces of their own too.
    """

    address: str
    number: int
    num_envs: int = 1
    pause_s: float = 0.0
    max_steps: int = 10**9
    acts_locally: bool = False
    steps_per_message: int = 5
    every_env: bool = False
    breaks_every: int = 10**9  # messages after which the connection breaks
    num_breaks: int = 0
    episodes: dict[tuple[int, int], list[Step]] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(self.number)

    def connect_and_play(self) -> None:
        local: Any = {"acts_locally": True, "steps_per_message": self.steps_per_message, "seed": self.number}
        settings = local if self.acts_locally else {}
        with PolicyClient(self.address, self.num_envs, name=f"simulator {self.number}", **settings) as client:
            self.play(client)

    def _obs(self, env: int) -> tuple[float, ...]:
        return (float(self.number), float(env), float(self._episode[env]), float(self._t[env]))

    def play(self, client: PolicyClient) -> None:
        self._episode, self._t = [0] * self.num_envs, [0] * self.num_envs
        actions = {env: int(action) for env, action in enumerate(client.begin(self._all(range(self.num_envs))))}
        for number in range(1, 1 + self.max_steps):
            time.sleep(self.pause_s)
            if number % self.breaks_every == 0:
                client._socket.shutdown(socket.SHUT_RDWR)
                self.num_breaks += 1
            share = 1.0 if self.every_env else 0.7
            chosen = [env for env in range(self.num_envs) if self._rng.random() < share] or [0]
            entries: dict[str, list[Any]] = {name: [] for name in ("envs", "obs", "rewards", "begins")}
            flags: dict[str, list[bool]] = {"terminated": [], "truncated": []}
            asking = []
            for env in chosen:
                before = self._obs(env)
                self._t[env] += 1
                reward, (terminated, truncated) = float(self._rng.normal()), self._rng.random(2) < 0.05
                step = Step(before, actions[env], reward, bool(terminated), bool(truncated), self._obs(env))
                self.episodes.setdefault((env, self._episode[env]), []).append(step)
                self._add(entries, flags, env, self._obs(env), reward, False, bool(terminated), bool(truncated))
                if terminated or truncated:
                    self._episode[env], self._t[env] = self._episode[env] + 1, 0
                    self._add(entries, flags, env, self._obs(env), 0.0, True, False, False)
                asking.append(env)
            found = client.exchange(
                entries["envs"],
                np.array(entries["obs"], np.float32),
                **{k: entries[k] for k in ("rewards", "begins")},
                **flags,
            )
            self.versions.append(client.weights_version)
            actions |= {env: int(action) for env, action in zip(asking, found, strict=True)}

    def _all(self, envs: Sequence[int]) -> Any:
        return np.array([self._obs(env) for env in envs], np.float32)

    @staticmethod
    def _add(entries: Any, flags: Any, env: int, obs: Any, reward: float, begins: bool, *ends: bool) -> None:
        entries["envs"].append(env)
        entries["obs"].append(obs)
        entries["rewards"].append(reward)
        entries["begins"].append(begins)
        flags["terminated"].append(ends[0])
        flags["truncated"].append(ends[1])
