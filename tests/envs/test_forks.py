"""Processes that an env forks in the process of an asynchronous sub-env."""

from __future__ import annotations

import os
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from corral import PPOConfig
from corral.runners.runner import EnvRunner


class ForkingEnv(gym.Env[NDArray[np.float32], int]):
    """Forks in every third step a process that ends as `env_config["end"]` says; observations count the steps."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: dict[str, Any]) -> None:
        self._end, self._count = config["end"], 0

    def reset(self, **kwargs: Any) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(**kwargs)
        self._count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._count += 1
        if self._count % 3 == 0:
            forked = os.fork()
            if forked == 0:
                if self._end == "raise":
                    raise RuntimeError("in the forked process")
                if self._end == "exit":
                    sys.exit(0)
                return np.full(1, 99, np.float32), 99.0, True, False, {}
            os.waitpid(forked, 0)
        return np.full(1, self._count, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("end", ["return", "raise", "exit"])
def test_a_process_that_a_sub_env_forks_answers_nobody(end: str) -> None:
    config = PPOConfig().environment(ForkingEnv, env_config={"end": end}, disable_env_checking=True)
    runner = EnvRunner(config.env_runners(num_envs_per_env_runner=2, vectorization="async"))
    try:
        rollout = runner.sample(num_timesteps=20)
    finally:
        runner.stop()
    np.testing.assert_array_equal(rollout.obs[:, :, 0], np.arange(11)[:, None] * np.ones(2))
    np.testing.assert_array_equal(rollout.rewards, 1.0)
