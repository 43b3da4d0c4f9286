"""Where 90% of the actions are illegal, masks make learning fast."""

from __future__ import annotations

from typing import Any

import pytest

from corral import DQNConfig, PPOConfig, SACConfig
from corral.testing import DoorCorridor


def mean_return(config: Any, masks: str | None, num_env_steps: int, seed: int) -> float:
    """Return the mean return of the latest episodes in a corridor with 2 legal actions of 20 at each position."""
    config = config.copy().environment(DoorCorridor, env_config={"masks": masks}).debugging(seed=seed)
    config.env_runners(num_envs_per_env_runner=4)
    config.rl_module(model_config={"fcnet_hiddens": [32], "use_layernorm": False})
    config.reporting(min_sample_timesteps_per_iteration=500, metrics_num_episodes_for_smoothing=20)
    with config.build() as algo:
        while algo.num_env_steps_sampled_lifetime < num_env_steps:
            result = algo.train()
    return float(result["env_runners"]["episode_return_mean"])


def ppo() -> PPOConfig:
    return PPOConfig().training(lr=3e-3, train_batch_size_per_learner=512, minibatch_size=128)


def dqn() -> DQNConfig:
    config = DQNConfig().training(num_steps_sampled_before_learning_starts=100, train_batch_size_per_learner=64)
    # Slow enough that the steps are too few without masks.
    config.training(lr=1e-3, tau=1.0, target_network_update_freq=500)
    return config.exploration(exploration_config={"epsilon_timesteps": 1000})


def test_ppo_learns_with_masks_in_steps_that_are_too_few_without() -> None:
    assert mean_return(ppo(), "observations", 2000, 0) > 0.95
    assert mean_return(ppo(), None, 2000, 0) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("make_config", "num_env_steps", "solved"),
    [
        (ppo, 2000, 0.95),
        (dqn, 2000, 0.95),
        (lambda: SACConfig().training(num_steps_sampled_before_learning_starts=100, lr=3e-3), 2000, 0.6),
    ],
    ids=["ppo", "dqn", "sac"],
)
def test_every_algorithm_learns_with_masks(make_config: Any, num_env_steps: int, solved: float, seed: int) -> None:
    with_masks = mean_return(make_config(), "observations", num_env_steps, seed)
    assert with_masks > solved
    assert with_masks > 2 * mean_return(make_config(), None, num_env_steps, seed)
