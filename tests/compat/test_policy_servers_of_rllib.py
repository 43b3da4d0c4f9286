"""Scripts for RLlib's policy server and its clients, each in a process of its own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rllib_scripts import Run

from at_least import at_least

SERVER = """
import argparse

import gymnasium as gym
from ray.rllib.env.policy_server_input import PolicyServerInput
from ray.tune.registry import get_trainable_cls

parser = argparse.ArgumentParser()
parser.add_argument("--run", default="PPO")
parser.add_argument("--port", type=int)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--stop-iters", type=int, default=300)
parser.add_argument("--stop-reward", type=float, default=80.0)
args = parser.parse_args()


def make_input(ioctx):
    if ioctx.worker_index > 0 or ioctx.worker.num_workers == 0:
        port = args.port + ioctx.worker_index - (1 if ioctx.worker_index > 0 else 0)
        return PolicyServerInput(ioctx, "localhost", port)


config = get_trainable_cls(args.run).get_default_config()
config.environment(
    env=None,
    observation_space=gym.spaces.Box(float("-inf"), float("inf"), (4,)),
    action_space=gym.spaces.Discrete(2),
)
config.framework("torch").callbacks(None).debugging(seed=0)
config.offline_data(input_=make_input)
config.env_runners(num_rollout_workers=args.num_workers, enable_connectors=False)
config.evaluation(off_policy_estimation_methods={})
config.api_stack(enable_rl_module_and_learner=False)
if args.run == "DQN":
    config.update_from_dict({
        "num_steps_sampled_before_learning_starts": 500,
        "min_sample_timesteps_per_iteration": 500,
        "rollout_fragment_length": 4,
        "train_batch_size": 32,
        "lr": 1e-3,
        "epsilon": [(0, 1.0), (4000, 0.05)],
        "model": {"fcnet_hiddens": [64]},
    })
else:
    config.update_from_dict({
        "rollout_fragment_length": 500,
        "train_batch_size": 1000,
        "num_epochs": 8,
        "minibatch_size": 100,
        "lr": 1e-3,
        "gamma": 0.98,
        "model": {"fcnet_hiddens": [64]},
    })
algo = config.build()
best = 0.0
for _ in range(args.stop_iters):
    results = algo.train()
    best = max(best, results["episode_reward_mean"])
    if best >= args.stop_reward:
        break
print("best mean", best, "steps", results["timesteps_total"])
algo.stop()
"""

CLIENT = """
import argparse

import gymnasium as gym
from ray.rllib.env.policy_client import PolicyClient

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--no-train", action="store_true")
parser.add_argument("--inference-mode", default="local", choices=["local", "remote"])
parser.add_argument("--off-policy", action="store_true")
args = parser.parse_args()

env = gym.make("CartPole-v1")
client = PolicyClient(f"http://localhost:{args.port}", inference_mode=args.inference_mode)
while True:
    obs, info = env.reset()
    episode = client.start_episode(training_enabled=not args.no_train)
    is_over = False
    while not is_over:
        if args.off_policy:
            action = env.action_space.sample()
            client.log_action(episode, obs, action)
        else:
            action = client.get_action(episode, obs)
        obs, reward, terminated, truncated, info = env.step(action)
        client.log_returns(episode, reward, info=info)
        is_over = terminated or truncated
    client.end_episode(episode, obs)
"""


def free_port() -> int:
    """Return a port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("localhost", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("localhost", port + 1))
            except OSError:
                continue
            return port


@contextmanager
def clients(tmp_path: Path, *arguments: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Run scripts of clients until the block ends."""
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    command = [sys.executable, "-m", "corral.compat.rllib", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*command, *more], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for more in arguments
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def best_mean(text: str) -> float:
    found = re.search(r"best mean (\S+) steps", text)
    assert found is not None, text
    return float(found[1])


# Random play has a mean return of 22.
@pytest.mark.slow
def test_rllibs_scripts_for_cartpole_train_ppo_with_two_clients(run: Run, tmp_path: Path) -> None:
    port = str(free_port())
    with clients(tmp_path, ["--port", port], ["--port", port, "--inference-mode", "remote"]) as started:
        done = run(SERVER, "--port", port, with_ray=False)
        errors = [process.communicate(timeout=60)[1] for process in started]
    assert best_mean(done.stdout) >= 80.0
    assert all("ServerStopped: the training is over" in error for error in at_least(1, errors))


@pytest.mark.slow
def test_rllibs_scripts_for_cartpole_reach_a_return_of_450(run: Run, tmp_path: Path) -> None:
    port = str(free_port())
    with clients(tmp_path, *[["--port", port]] * 2):
        done = run(SERVER, "--port", port, "--stop-reward", "450", timeout_s=900)
    assert best_mean(done.stdout) >= 450.0


@pytest.mark.slow
def test_a_client_that_acts_at_random_and_one_that_is_not_learned_from(run: Run, tmp_path: Path) -> None:
    port = str(free_port())
    arguments = [["--port", port, "--off-policy"], ["--port", port, "--no-train"]]
    with clients(tmp_path, *arguments):
        done = run(SERVER, "--run", "DQN", "--port", port, "--stop-iters", "3", "--stop-reward", "500", with_ray=False)
    assert 10.0 < best_mean(done.stdout) < 40.0  # of the random one alone
    num_steps = int(done.stdout.split()[-1])
    assert 1500 <= num_steps < 1600


@pytest.mark.slow
def test_runners_listen_at_the_ports_of_the_script(run: Run, tmp_path: Path) -> None:
    port = free_port()
    with clients(tmp_path, ["--port", str(port)], ["--port", str(port + 1)]):
        run(SERVER, "--port", str(port), "--num-workers", "2", "--stop-iters", "2", with_ray=False)


def test_settings_of_policy_servers_become_an_external_env(run: Run) -> None:
    run(
        """
import gymnasium as gym
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.policy_server_input import PolicyServerInput
import corral
from corral.compat.rllib.native import to_native
from corral.errors import ConfigError

def served(config, function=lambda ioctx: PolicyServerInput(ioctx, "localhost", 9900 + ioctx.worker_index), **env):
    env = env or {"env": "CartPole-v1"}
    return to_native(config.environment(**env).offline_data(input_=function))

native = served(DQNConfig().training(train_batch_size=32, n_step=3).env_runners(rollout_fragment_length=8))
assert native.env is corral.ExternalEnv
assert native.env_config["address"] == "localhost:9900"
assert native.env_config["observation_space"]["shape"] == [4] and native.env_config["action_space"]["n"] == 2
assert native.num_envs_per_env_runner == 16 and native.training_intensity == 4.0
assert native.evaluation_config["env"] == "CartPole-v1"
assert "num_envs_per_env_runner" not in native.evaluation_config

from ray.rllib.env.tcp_client_inference_env_runner import TcpClientInferenceEnvRunner
space, actions = gym.spaces.Box(-1.0, 1.0, (4,)), gym.spaces.Discrete(2)
for num_env_runners, address in ((0, "localhost:6000"), (2, "localhost:6001")):
    config = PPOConfig().environment(observation_space=space, action_space=actions, env_config={"port": 6000})
    config.env_runners(env_runner_cls=TcpClientInferenceEnvRunner, num_env_runners=num_env_runners)
    native = to_native(config)
    assert native.env is corral.ExternalEnv and native.env_config["address"] == address
    assert set(native.env_config) == {"address", "observation_space", "action_space"}

native = served(PPOConfig().env_runners(num_env_runners=2, num_envs_per_env_runner=3, rollout_fragment_length=500)
                .training(train_batch_size=2900))
assert native.env_config["address"] == "localhost:9901"
assert (native.num_envs_per_env_runner, native.train_batch_size_per_learner) == (3, 3000)

def refused(*arguments, **settings):
    try:
        served(*arguments, **settings)
    except ConfigError as error:
        return str(error)

assert "ports that follow one another" in refused(
    PPOConfig().env_runners(num_env_runners=2), lambda ioctx: PolicyServerInput(ioctx, "localhost", 9900))
assert "set .environment(observation_space=" in refused(PPOConfig(), env=None)
assert "returns a PolicyServerInput" in refused(PPOConfig(), lambda ioctx: None)
"""
    )
