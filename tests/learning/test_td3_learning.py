"""TD3 and DDPG learn to swing a pendulum up."""

from __future__ import annotations

import pytest

from corral import DDPGConfig, TD3Config


def best_greedy_return(config: TD3Config, *, target: float, most_env_steps: int) -> float:
    """Train until the mean return of 10 episodes without noise reaches the target, and return the best one."""
    best = -float("inf")
    config.environment("Pendulum-v1").reporting(min_sample_timesteps_per_iteration=500)
    with config.build() as algo:
        while best < target and algo.num_env_steps_sampled_lifetime < most_env_steps:
            algo.train()
            assert algo.env_runner is not None
            rollout = algo.env_runner.sample(num_episodes=10, explore=False)
            best = max(best, float(rollout.rewards[rollout.valid].sum()) / 10)
    return best


@pytest.mark.slow
def test_a_small_td3_swings_the_pendulum_up() -> None:
    """Without learning the return is about -1,300; with a mean of -400 most episodes end upright."""
    config = TD3Config().rl_module(model_config={"fcnet_hiddens": [32, 32]}).debugging(seed=0)
    config.training(lr=3e-3, gamma=0.95, tau=0.01, train_batch_size_per_learner=64)
    config.training(num_steps_sampled_before_learning_starts=500)
    assert best_greedy_return(config, target=-400, most_env_steps=6000) >= -400


@pytest.mark.slow
@pytest.mark.parametrize("cls", [TD3Config, DDPGConfig])
@pytest.mark.parametrize("seed", range(3))
def test_the_pendulum_is_solved_with_the_defaults(cls: type[TD3Config], seed: int) -> None:
    config = cls().debugging(seed=seed)
    assert best_greedy_return(config, target=-200, most_env_steps=15_000) >= -200
