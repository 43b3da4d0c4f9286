"""DQN learns CartPole with its defaults."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from corral import Algorithm, DQNConfig


def greedy_mean_return(algorithm: Algorithm, num_episodes: int = 100, seed: int = 0) -> float:
    """Return the mean return of CartPole-v1 episodes without exploration, one in each of as many envs."""
    env = gym.make_vec("CartPole-v1", num_envs=num_episodes, vectorization_mode="vector_entry_point")
    obs, _ = env.reset(seed=seed)
    returns, playing = np.zeros(num_episodes), np.ones(num_episodes, np.bool_)
    while playing.any():
        obs, rewards, terminated, truncated, _ = env.step(algorithm.compute_actions(obs, explore=False))
        returns += np.where(playing, rewards, 0.0)
        playing &= ~(terminated | truncated)
    env.close()
    return float(returns.mean())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_cartpole_greedily_within_100_000_steps(seed: int) -> None:
    best = 0.0
    with DQNConfig().environment("CartPole-v1").debugging(seed=seed).build() as algorithm:
        while best < 475 and algorithm.num_env_steps_sampled_lifetime < 100_000:
            for _ in range(5):
                algorithm.train()
            best = max(best, greedy_mean_return(algorithm))
    assert best >= 475
