"""PPO and DQN solve a task of images with their default networks."""

from __future__ import annotations

import numpy as np
import pytest

from corral import DQNConfig, PPOConfig
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.testing import FindSquare

LENGTH = 16  # of an episode, which is the best return; a random policy has a quarter of it


def greedy_return(algo: Algorithm, side: int) -> float:
    """Return the mean return of the most likely actions, over 512 images that no runner saw."""
    env, images, right = FindSquare({"side": side}), [], []
    image, _ = env.reset(seed=10_000)
    for _ in range(512):
        images.append(image)
        right.append(2 * (image[side // 2 :].any()) + image[:, side // 2 :].any())
        image, *_ = env.step(0)
    actions = algo.compute_actions(np.stack(images), explore=False)
    return LENGTH * float(np.mean(actions == np.array(right)))


def trained(config: AlgorithmConfig, side: int, num_env_steps: int) -> float:
    """Train for some env steps, and return the greedy return."""
    config.environment(FindSquare, env_config={"side": side, "episode_length": LENGTH})
    config.env_runners(num_envs_per_env_runner=8).learners(num_threads=1).debugging(seed=0)
    with config.build() as algo:
        while algo.num_env_steps_sampled_lifetime < num_env_steps:
            algo.train()
        return greedy_return(algo, side)


def ppo() -> PPOConfig:
    return PPOConfig().training(lr=3e-4, train_batch_size_per_learner=1024, minibatch_size=64, num_epochs=4)


def dqn() -> DQNConfig:
    config = DQNConfig().training(
        lr=1e-3, gamma=0.0, n_step=1, train_batch_size_per_learner=64, training_intensity=8.0,
        num_steps_sampled_before_learning_starts=500, target_network_update_freq=100,
        replay_buffer_config={"capacity": 10_000},
    )  # fmt: skip
    return config.exploration(exploration_config={"type": "EpsilonGreedy", "epsilon_schedule": 0.5})


@pytest.mark.slow
def test_ppo_solves_small_images() -> None:
    assert trained(ppo().training(lr=1e-3, train_batch_size_per_learner=512, gamma=0.0), 28, 4096) > 0.9 * LENGTH


@pytest.mark.slow
def test_dqn_solves_small_images() -> None:
    assert trained(dqn(), 28, 2000) > 0.9 * LENGTH


@pytest.mark.slow
def test_ppo_solves_images_in_the_steps_that_stable_baselines3_takes() -> None:
    """Stable-Baselines3's CnnPolicy has a greedy return of 16 after 6,144 env steps at these settings."""
    assert trained(ppo(), 84, 6144) > 0.9 * LENGTH


@pytest.mark.slow
def test_dqn_solves_images() -> None:
    assert trained(dqn(), 84, 3000) > 0.9 * LENGTH
