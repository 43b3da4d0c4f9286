"""Evaluation of policies whose mean return is known."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from corral import PPOConfig
from corral.testing import IdentityEnv


class Quit(gym.Env[Any, Any]):
    """Pays 1 per step until action 1 ends the episode: under a uniform policy the return is geometric with mean 2."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, bool(action == 1), False, {}


def make_uniform(policy: Any) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()


def test_the_interval_holds_the_mean_of_a_random_policy_in_90_of_100_rounds() -> None:
    config = PPOConfig().environment(Quit).debugging(seed=0).callbacks(on_create_policy=make_uniform)
    config.evaluation(evaluation_duration=20, evaluation_config={"explore": True})
    config.rl_module(model_config={"fcnet_hiddens": [4]})
    with config.build() as algo:
        rounds = [algo.evaluate()["env_runners"] for _ in range(100)]
    held = [found["episode_return_interval_low"] <= 2 <= found["episode_return_interval_high"] for found in rounds]
    assert sum(held) >= 90
    returns = np.concatenate([found["episode_returns"] for found in rounds])
    assert abs(returns.mean() - 2) < 3 * np.sqrt(2 / len(returns))  # the variance is (1 - p) / p^2 = 2


@pytest.mark.slow
def test_evaluated_and_trained_returns_of_a_solved_env_agree() -> None:
    config = (
        PPOConfig()
        .environment(IdentityEnv, env_config={"episode_length": 10})
        .training(train_batch_size_per_learner=320, minibatch_size=64, num_epochs=6, lr=0.01)
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .debugging(seed=0)
        .evaluation(evaluation_interval=1, evaluation_duration=16)
    )
    with config.build() as algo:
        for _ in range(40):
            result = algo.train()
            if result["env_runners"]["episode_return_mean"] > 9.9:
                break
    assert result["env_runners"]["episode_return_mean"] > 9.9
    assert abs(result["evaluation"]["env_runners"]["episode_return_mean"] - 10) < 0.2
