"""Returns of episodes next to a reward that is larger than a float64 sum of both can hold."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import PPOConfig
from corral.runners.runner import EnvRunner


class Penalty(gym.Env[Any, Any]):
    """An episode has ten rewards of 1; the second one ends with -1e20."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.num_episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t, self.num_episodes = 0, self.num_episodes + 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = -1e20 if self.num_episodes == 3 and self.t == 10 else 1.0  # the check of the env resets once
        return np.zeros(1, np.float32), reward, self.t == 10, False, {}


@pytest.mark.parametrize("autoreset_mode", ["next_step", "same_step"])
@pytest.mark.parametrize("num_timesteps", [80, 7])
def test_a_huge_reward_counts_in_its_own_episode_only(autoreset_mode: str, num_timesteps: int) -> None:
    config = PPOConfig().environment(Penalty).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=2, vectorization="sync", autoreset_mode=autoreset_mode)
    runner = EnvRunner(config.freeze())
    returns: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(240 // num_timesteps):
        runner.sample(num_timesteps=num_timesteps)
        ended = runner.last_statistics
        for env_index, episode_return in zip(ended.env_indices.tolist(), ended.returns.tolist(), strict=True):
            returns[env_index].append(episode_return)
    runner.stop()
    for found in returns.values():
        assert len(found) >= 8
        assert sorted(found) == [-1e20, *[10.0] * (len(found) - 1)]
