"""DQN learns CartPole."""

from __future__ import annotations

from typing import Any

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


def best_greedy_return(seed: int, **settings: Any) -> float:
    """Train for 100,000 env steps at most, and return the best greedy mean return, looked at every 5,000 steps."""
    best = 0.0
    with DQNConfig().environment("CartPole-v1").training(**settings).debugging(seed=seed).build() as algorithm:
        while best < 475 and algorithm.num_env_steps_sampled_lifetime < 100_000:
            for _ in range(5):
                algorithm.train()
            best = max(best, greedy_mean_return(algorithm))
    return best


@pytest.mark.slow
def test_cartpole_greedily_with_the_defaults() -> None:
    """One of five seeds may learn and forget, as DQN does where the target network is a late copy."""
    best = [best_greedy_return(seed) for seed in range(5)]
    assert sum(mean_return >= 475 for mean_return in best) >= 4, best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_cartpole_greedily_with_a_soft_target_network(seed: int) -> None:
    assert best_greedy_return(seed, target_network_update_freq=0, tau=0.01) >= 475
