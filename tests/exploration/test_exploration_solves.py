"""Envs that greedy action never solves, and each type does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from explorers import SamplingConfig

from corral import DQNConfig, PPOConfig, SACConfig
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.exploration import BUILT_IN
from corral.testing import DeepSea, PoorHabit

# Types that draw actions, with settings for an env in which a few tries are enough.
BY_ACTIONS: dict[str, dict[str, Any]] = {
    "EpsilonGreedy": {"epsilon_timesteps": 200},
    "PerWorkerEpsilonGreedy": {"epsilon_timesteps": 200},
    "SoftQ": {"temperature": 1.0},
    "Random": {},
    "StochasticSampling": {"random_timesteps": 100},
    "ParameterNoise": {"random_timesteps": 0},
}
BY_POSTERIOR = {"ThompsonSampling": {}, "UpperConfidenceBound": {}}
BY_REWARDS: dict[str, dict[str, Any]] = {"Curiosity": {}, "RND": {}, "RE3": {"k_nn": 10, "beta": 0.05}}
GAUSSIAN = {"random_timesteps": 0, "stddev": 0.2}
DRIFTING = {"random_timesteps": 0, "ou_base_scale": 0.5}
BY_NOISE = {
    "GaussianNoise": GAUSSIAN,
    "PerWorkerGaussianNoise": GAUSSIAN,  # with one actor, the deviation of the schedule
    "OrnsteinUhlenbeckNoise": DRIFTING,
    "PerWorkerOrnsteinUhlenbeckNoise": DRIFTING,
}


def test_every_type_is_here() -> None:
    assert {*BY_ACTIONS, *BY_POSTERIOR, *BY_REWARDS, *BY_NOISE} == {*BUILT_IN}


def greedy_return(algo: Algorithm) -> float:
    """Return the mean return of episodes without exploring, in the env that was trained in."""
    assert algo.env_runner is not None
    rollout = algo.env_runner.sample(num_episodes=16, explore=False)
    return float(rollout.rewards[rollout.valid].sum()) / 16


def habit_config(**exploration: Any) -> AlgorithmConfig:
    """Of DQN with a linear function: what is learned of one action says nothing of others."""
    config = (
        DQNConfig()
        .environment(PoorHabit, disable_env_checking=True)
        .env_runners(num_envs_per_env_runner=1)
        .debugging(seed=0)
    )
    config.rl_module(model_config={"fcnet_hiddens": []})
    config.training(lr=0.02, num_steps_sampled_before_learning_starts=32, gamma=0.0)
    config.reporting(min_sample_timesteps_per_iteration=400)
    return config.exploration(**exploration)


def test_greedy_action_keeps_to_the_poor_habit() -> None:
    with habit_config(explore=False).build() as algo:
        result = algo.train()
        assert result["env_runners"]["episode_return_max"] == 1.0
        assert greedy_return(algo) == 1.0


@pytest.mark.parametrize("kind", BY_ACTIONS)
def test_a_type_finds_what_pays_more(kind: str) -> None:
    with habit_config(exploration_config={"type": kind, **BY_ACTIONS[kind]}).build() as algo:
        algo.train()
        assert greedy_return(algo) == 2.0


def bandit_config(**exploration: Any) -> AlgorithmConfig:
    config = (
        SamplingConfig()
        .environment(PoorHabit, disable_env_checking=True)
        .env_runners(num_envs_per_env_runner=1)
        .debugging(seed=0)
    )
    return config.exploration(**exploration).training(train_batch_size_per_learner=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_POSTERIOR)
def test_a_bandit_finds_what_pays_more(kind: str) -> None:
    for explore, pays in ((False, 1.0), (True, 2.0)):
        with bandit_config(exploration_config={"type": kind}, explore=explore).build() as algo:
            for _ in range(30):
                algo.train()
            assert greedy_return(algo) == pays


def noisy_config(**exploration: Any) -> AlgorithmConfig:
    config = SACConfig().environment(PoorHabit, disable_env_checking=True).debugging(seed=0)
    config.environment(env_config={"space": "box_uneven", "episode_length": 20})
    config.training(gamma=0.0, lr=3e-3, num_steps_sampled_before_learning_starts=100)
    config.reporting(min_sample_timesteps_per_iteration=600).rl_module(model_config={"fcnet_hiddens": [32]})
    return config.exploration(**exploration)


@pytest.mark.slow
def test_greedy_action_stays_in_the_local_optimum() -> None:
    with noisy_config(explore=False).build() as algo:
        algo.train()
        assert greedy_return(algo) < 25  # of 40


# With one actor, those for each worker are the plain ones.
@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_NOISE)
def test_noise_leads_out_of_a_local_optimum(kind: str) -> None:
    with noisy_config(exploration_config={"type": kind, **BY_NOISE[kind]}).build() as algo:
        algo.train()
        assert greedy_return(algo) > 35


def sea_config(size: int, seed: int, **exploration: Any) -> AlgorithmConfig:
    config = PPOConfig().environment(DeepSea, env_config={"size": size}).debugging(seed=seed)
    config.training(train_batch_size_per_learner=640, minibatch_size=160, num_epochs=4, lr=3e-3, lambda_=0.9)
    return config.exploration(**exploration)


def iterations_to_the_treasure(config: AlgorithmConfig, at_most: int) -> float:
    """Return after how many iterations most episodes find it."""
    with config.build() as algo:
        for iteration in range(1, at_most + 1):
            if algo.train()["env_runners"]["episode_return_mean"] > 0.9:
                return iteration
    return np.inf


@pytest.mark.slow
@pytest.mark.parametrize("explore", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nobody_finds_the_treasure_by_the_rewards_alone(explore: bool) -> None:
    assert iterations_to_the_treasure(sea_config(16, 0, explore=explore), 25) == np.inf


def treasure_config(kind: str, size: int, seed: int) -> AlgorithmConfig:
    return sea_config(size, seed, exploration_config={"type": kind, **BY_REWARDS[kind]})


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
@pytest.mark.parametrize("kind", BY_REWARDS)
def test_an_intrinsic_reward_leads_to_the_treasure(kind: str, seed: int) -> None:
    assert iterations_to_the_treasure(treasure_config(kind, 16, seed), 25) < np.inf


# A forward model predicts every known path in the end. A seed that has not found the treasure before has no bonus left.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_seeds"), [("Curiosity", 2), ("RND", 5), ("RE3", 5)])
def test_an_intrinsic_reward_leads_through_a_sea_of_size_20(kind: str, num_seeds: int) -> None:
    needed = [iterations_to_the_treasure(treasure_config(kind, 20, seed), 40) for seed in range(5)]
    assert sum(np.isfinite(needed)) >= num_seeds, needed
