"""What `on_learn_on_batch` gets: every column of the steps, also those that no loss reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corral import APPOConfig, DQNConfig, IMPALAConfig, PPOConfig, SACConfig
from corral.algorithms.config.config import AlgorithmConfig
from corral.testing import CountingEnv

CONFIGS: dict[str, type[AlgorithmConfig]] = {
    **{"ppo": PPOConfig, "impala": IMPALAConfig, "appo": APPOConfig, "dqn": DQNConfig, "sac": SACConfig},
}


def note_columns(train_batch: Any, metrics_logger: Any) -> None:
    """Log what the columns say about the steps: CountingEnv rewards step t with t, and ends after the third."""
    rewards = np.asarray(train_batch["rewards"])
    assert rewards.shape == train_batch["terminated"].shape == train_batch["truncated"].shape
    ends = np.asarray(train_batch["terminated"])
    np.testing.assert_array_equal(ends, rewards == 3)
    np.testing.assert_array_equal(rewards, np.asarray(train_batch["obs"])[:, 1] + 1)
    assert not np.asarray(train_batch["truncated"]).any()
    metrics_logger.log_value("num_ends", int(ends.sum()), reduce="sum")


@pytest.mark.parametrize(
    ("algorithm", "num_learners"),
    [
        *((name, 0) for name in CONFIGS),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("ppo", "appo", "dqn")),
    ],
)
def test_callbacks_of_learners_read_rewards_and_ends(algorithm: str, num_learners: int) -> None:
    config = CONFIGS[algorithm]().environment(CountingEnv).callbacks(on_learn_on_batch=note_columns)
    config.training(train_batch_size_per_learner=32, gamma=0.5)
    if algorithm == "ppo":
        config.training(minibatch_size=16)
    elif algorithm in ("impala", "appo"):
        config.env_runners(num_env_runners=0, rollout_fragment_length=8)
    else:
        config.training(num_steps_sampled_before_learning_starts=32, n_step=1)
    config.learners(num_learners=num_learners).engine("process").reporting(min_sample_timesteps_per_iteration=64)
    with config.build() as algo:
        assert algo.train()["learners"]["num_ends"] > 0


def test_ppo_trains_on_no_column_that_nobody_reads() -> None:
    seen: list[set[str]] = []
    with (
        PPOConfig()
        .environment(CountingEnv)
        .training(train_batch_size_per_learner=32, minibatch_size=16)
        .build() as algo
    ):
        update = algo.learner_group.update
        algo.learner_group.update = lambda batches, settings: (  # type: ignore[method-assign]
            seen.append(set(batches["default_policy"])) or update(batches, settings)  # type: ignore[func-returns-value]
        )
        algo.train()
    assert seen and not seen[0] & {"rewards", "terminated", "truncated"}
