"""How fast the policy server answers, and how it shares its time between clients.

    python benchmarks/policy_server.py

Clients run in processes of their own, over TCP on this machine, and only ask: their observations are zeros,
so that all time is the server's and the client's. Four lines are printed: env steps per second of one client with 8
envs per message; the same of a client that acts itself; what the server adds to one request of one env (median); and
the messages of the slowest of 64 clients next to their median. What the server adds is the time of a request beyond one
that is answered at once, with the same bytes: the rest is the client's and the connection's.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.runners.serving.client import PolicyClient, ServerStopped, pack_array, pack_message

if TYPE_CHECKING:
    from corral.runners.runner import EnvRunner

NUM_STEPS = 20_000
NUM_CLIENTS = 64


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask is not None:
        ask(options.ask[0], int(options.ask[1]), acts_locally=options.ask[2] == "locally")
        return
    print(f"one client, 8 envs per message: {steps_per_second(8):,.0f} env steps per second")
    print(f"one client that acts itself, 8 envs: {steps_per_second(8, acts_locally=True):,.0f} env steps per second")
    at_once_s, (round_trip_s, choice_s) = answered_at_once(), request_time()
    print(
        f"one client, 1 env: {1e3 * round_trip_s:.2f} ms per request (median), {1e3 * at_once_s:.2f} ms where it is "
        f"answered at once: the server adds {1e3 * (round_trip_s - at_once_s):.2f} ms, of which choosing the action "
        f"takes {1e3 * choice_s:.2f} ms"
    )
    counts = fairness()
    print(f"{NUM_CLIENTS} clients: the slowest sent {counts.min()} messages, the median {np.median(counts):.0f}")


def make_runner(num_envs: int) -> EnvRunner:
    """Return a runner whose envs are served at a free port."""
    from corral import ExternalEnv, PPOConfig  # here, because clients need neither these nor torch
    from corral.runners.runner import EnvRunner

    config = PPOConfig().environment(ExternalEnv, env_config={"spaces_of": "CartPole-v1", "address": "127.0.0.1:0"})
    return EnvRunner(config.env_runners(num_envs_per_env_runner=num_envs).debugging(seed=0))


def address_of(runner: EnvRunner) -> str:
    """Return where the policy server of a runner listens."""
    address: str = runner.env.server.address  # type: ignore[attr-defined]
    return address


def start(address: str, num_envs: int, *, acts_locally: bool = False) -> subprocess.Popen[bytes]:
    """Start a client in a process of its own."""
    where = "locally" if acts_locally else "remotely"
    command = [sys.executable, str(Path(__file__).resolve()), "--ask", address, str(num_envs), where]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def ask(address: str, num_envs: int, *, acts_locally: bool) -> None:
    """Ask for actions until the server stops; print the number of messages, and the median time of one."""
    obs, rewards, times_s = np.zeros((num_envs, 4), np.float32), [1.0] * num_envs, []
    try:
        with PolicyClient(address, num_envs, acts_locally=acts_locally) as client:
            client.begin(obs)
            while True:
                began_s = time.perf_counter()
                client.step(obs, rewards)
                times_s.append(time.perf_counter() - began_s)
    except ServerStopped:
        print(len(times_s), np.median(times_s) if times_s else 0.0)


def ended(clients: list[subprocess.Popen[bytes]]) -> list[tuple[int, float]]:
    """Return what the clients printed."""
    found = []
    for client in clients:
        printed, _ = client.communicate()
        count, median_s = printed.split()
        found.append((int(count), float(median_s)))
    return found


def steps_per_second(num_envs: int, *, acts_locally: bool = False) -> float:
    """Return the env steps per second of one client."""
    runner = make_runner(num_envs)
    client = start(address_of(runner), num_envs, acts_locally=acts_locally)
    runner.sample(num_timesteps=1000)
    began_s = time.perf_counter()
    rollout = runner.sample(num_timesteps=NUM_STEPS)
    seconds = time.perf_counter() - began_s
    runner.stop()
    ended([client])
    return rollout.num_env_steps / seconds


def answered_at_once() -> float:
    """Return the median time of a request that a socket answers at once, with the bytes of an answer."""
    actions = {"type": "actions", "actions": pack_array(np.zeros(1, np.int64)), "weights_version": 0}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = start(f"127.0.0.1:{listener.getsockname()[1]}", 1)
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.recv(1 << 16)
            spaces = {name: {"type": "Discrete"} for name in ("observation_space", "action_space")}
            welcome = {"type": "welcome", "session": "", "max_message_bytes": 1 << 20, "weights_version": 0, **spaces}
            connection.sendall(pack_message(welcome))
            answers = [pack_message({**actions, "id": number}) for number in range(1, NUM_STEPS // 4)]
            for answer in answers:
                connection.recv(1 << 16)
                connection.sendall(answer)
            connection.sendall(pack_message({"type": "bye"}))
    return ended([client])[0][1]


def request_time() -> tuple[float, float]:
    """Return the median time of a request of one env, and the time that choosing its action takes."""
    runner = make_runner(1)
    client = start(address_of(runner), 1)
    runner.sample(num_timesteps=NUM_STEPS // 4)
    actor: Any = runner.actors["default_policy"]
    obs, begins, times_s = np.zeros((1, 4), np.float32), np.zeros(1, np.bool_), []
    for _ in range(1000):
        began_s = time.perf_counter()
        actor.choose(obs, begins, timestep=0, explore=True, random_actions=False)
        times_s.append(time.perf_counter() - began_s)
    runner.stop()
    return ended([client])[0][1], float(np.median(times_s))


def fairness() -> Any:
    """Return the number of messages of each of many clients that ask at the same time."""
    from corral.runners.requests import SampleRequest

    runner = make_runner(NUM_CLIENTS)
    clients = [start(address_of(runner), 1) for _ in range(NUM_CLIENTS)]
    server = runner.env.server  # type: ignore[attr-defined]
    while len(server.sessions) < NUM_CLIENTS:
        runner.collect(SampleRequest(num_timesteps=1, time_limit_s=0.1))
    before = {session.id_: session.last_id for session in server.sessions.values()}
    runner.sample(num_timesteps=2 * NUM_STEPS)
    counts = [session.last_id - before[session.id_] for session in server.sessions.values()]
    runner.stop()
    ended(clients)
    return np.array(counts)


if __name__ == "__main__":
    main()
