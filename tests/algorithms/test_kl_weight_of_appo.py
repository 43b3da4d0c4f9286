"""The weight of APPO's KL penalty, and how often its target policy changes."""

from __future__ import annotations

import pytest

from corral import APPOConfig


def small(**training: object) -> APPOConfig:
    config = APPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    config.env_runners(rollout_fragment_length=20).reporting(min_sample_timesteps_per_iteration=0).debugging(seed=0)
    return config.training(train_batch_size_per_learner=40, **training)


def test_a_weight_of_0_stays_0() -> None:
    with small(use_kl_loss=True, kl_coeff=0.0).build() as algo:
        first, second = (algo.train()["learners"]["default_policy"] for _ in range(2))
    assert first["curr_kl_coeff"] == second["curr_kl_coeff"] == 0.0


def test_a_weight_falls_to_0_and_training_continues() -> None:
    config = small(use_kl_loss=True, kl_coeff=5e-324, kl_target=1e9)  # the smallest float, whose half is 0
    with config.build() as algo:
        for _ in range(2):
            found = algo.train()["learners"]["default_policy"]
    assert found["curr_kl_coeff"] == 0.0


@pytest.mark.parametrize(("every", "num_updates"), [(2, 32), (0.5, 8), (0.125, 2), (0.01, 1)])
def test_the_target_changes_after_a_fraction_of_a_traversal(every: float, num_updates: int) -> None:
    assert APPOConfig().training(target_network_update_freq=every).num_updates_per_target == num_updates
