"""Algorithms whose episodes are played by simulators, on each engine."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from simulators import free_ports

from corral import APPOConfig, DDPGConfig, DQNConfig, ExternalEnv, IMPALAConfig, PPOConfig, SACConfig, TD3Config
from corral.runners.serving.client import PolicyClient, drive


@contextmanager
def simulators(env: str, port: int, num_runners: int, num_envs: int, **settings: Any) -> Iterator[list[int]]:
    """Drive envs for each runner until the training is over, and yield the steps that each drove."""
    errors: list[BaseException] = []
    counts = [0] * num_runners

    def play(index: int) -> None:
        try:
            with PolicyClient(f"127.0.0.1:{port + index}", num_envs, retry_s=60.0, **settings) as client:
                counts[index] = drive(client, [gym.make(env) for _ in range(num_envs)])
        except BaseException as error:
            traceback.print_exc()
            errors.append(error)

    threads = [threading.Thread(target=play, args=(index,), daemon=True) for index in range(num_runners)]
    for thread in threads:
        thread.start()
    yield counts
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors


def serve(config: Any, env: str, num_iterations: int, *, num_runners: int = 0, **settings: Any) -> list[Any]:
    """Train with simulators, and return the results."""
    port, num_envs = free_ports(max(1, num_runners)), 2
    config.environment(ExternalEnv, env_config={"spaces_of": env, "address": f"127.0.0.1:{port}"})
    config.env_runners(num_env_runners=num_runners, num_envs_per_env_runner=num_envs).debugging(seed=0)
    config.rl_module(model_config={"fcnet_hiddens": [16]})
    config.env_runners(sample_timeout_s=60.0)  # where simulators have failed
    with simulators(env, port, max(1, num_runners), num_envs, **settings) as counts:
        with config.build() as algo:
            results = [algo.train() for _ in range(num_iterations)]
            lifetime = algo.num_env_steps_sampled_lifetime
    # Steps that the simulators drove and that no iteration waited for are the difference.
    assert 0 < lifetime <= sum(counts)
    assert results[-1]["num_env_steps_sampled_lifetime"] == lifetime
    return results


OFF_POLICY = {"num_steps_sampled_before_learning_starts": 50, "train_batch_size_per_learner": 16}


@pytest.mark.xdist_group("graphs")
@pytest.mark.slow_cases("TD3Config-client", "DDPGConfig-server")
@pytest.mark.parametrize(
    ("algo", "where"),
    [(SACConfig, "server"), (SACConfig, "client"), (TD3Config, "client"), (DDPGConfig, "server")],
)
def test_off_policy_algorithms_of_box_actions_learn(algo: Any, where: str) -> None:
    config = algo().training(**OFF_POLICY).reporting(min_sample_timesteps_per_iteration=60)
    config.rl_module(model_config={"fcnet_hiddens": [16]})
    results = serve(config, "Pendulum-v1", 3, acts_locally=where == "client")
    assert np.isfinite(results[-1]["learners"]["default_policy"]["critic_loss"])
    lag = results[-1]["env_runners"]["policy_lag_mean"]
    assert np.isnan(lag) if where == "server" else lag >= 0


@pytest.mark.slow_cases("IMPALAConfig-server")
@pytest.mark.parametrize(
    ("algo", "where"), [pytest.param(APPOConfig, "client", marks=pytest.mark.slow), (IMPALAConfig, "server")]
)
def test_asynchronous_algorithms_learn_from_runners_in_processes(algo: Any, where: str) -> None:
    config = algo().training(train_batch_size_per_learner=64).reporting(min_sample_timesteps_per_iteration=200)
    config.env_runners(rollout_fragment_length=16)
    results = serve(config, "CartPole-v1", 3, num_runners=2, acts_locally=where == "client")
    assert results[-1]["fault_tolerance"]["num_healthy_workers"] == 2
    assert np.isfinite(results[-1]["learners"]["default_policy"]["policy_loss"])


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("algo", [PPOConfig, DQNConfig, APPOConfig])
def test_runners_on_ray_are_served(algo: Any, ray_runtime: Any) -> None:
    config = algo().engine("ray")
    if algo is not PPOConfig:
        config.reporting(min_sample_timesteps_per_iteration=200)
    else:
        config.training(train_batch_size_per_learner=200)
    results = serve(config, "CartPole-v1", 3, num_runners=2)
    assert results[-1]["fault_tolerance"]["num_healthy_workers"] == 2


def test_evaluation_plays_in_an_env_of_its_own() -> None:
    config = PPOConfig().training(train_batch_size_per_learner=100)
    config.evaluation(
        evaluation_interval=1, evaluation_duration=4, evaluation_config={"env": "CartPole-v1", "env_config": {}}
    )
    results = serve(config, "CartPole-v1", 2)
    for result in results:
        played = result["evaluation"]["env_runners"]
        assert played["num_episodes"] == 4
        assert played["episode_return_mean"] >= 8


def test_an_off_policy_run_continues_with_other_simulators(tmp_path: Any) -> None:
    config = DQNConfig().training(**OFF_POLICY).reporting(min_sample_timesteps_per_iteration=100)
    config.checkpointing(checkpoint_every_iterations=1)
    port = free_ports(1)
    config.environment(ExternalEnv, env_config={"spaces_of": "CartPole-v1", "address": f"127.0.0.1:{port}"})
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=2).debugging(seed=0)
    for iterations in (2, 4):
        with simulators("CartPole-v1", port, 1, 2), config.build() as algo:
            resume = {"resume": tmp_path} if iterations == 4 else {"run_dir": tmp_path}
            result = algo.fit(stop={"training_iteration": iterations}, progress=False, **resume)
    assert result["training_iteration"] == 4
    assert result["num_env_steps_sampled_lifetime"] >= 400


class SlowCartPole(CartPoleEnv):
    """A simulator that takes its time."""

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


def test_the_bottleneck_of_slow_simulators_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "make", lambda *_, **__: gym.wrappers.TimeLimit(SlowCartPole(), 500))
    config = PPOConfig().training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1)
    assert serve(config, "CartPole-v1", 1)[0]["bottleneck"]["setting"] == "the speed and the number of the simulators"
