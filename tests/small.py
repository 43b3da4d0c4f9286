"""The small config that tests build on: an iteration takes milliseconds, and each test names only what it is about."""

from __future__ import annotations

from typing import Any

from corral import PPOConfig
from corral.testing import CountingEnv

TRAINING = {"train_batch_size_per_learner": 32, "minibatch_size": 16, "num_epochs": 1}


def small(env: Any = CountingEnv, **settings: Any) -> PPOConfig:
    """Return PPO with two sub-envs, two minibatches of 16 env steps per iteration, and a net of 4 units.

    Args:
        env: The env.
        settings: Other settings by their plain names, in place of these.
    """
    other = {"num_envs_per_env_runner": 2, "model_config": {"fcnet_hiddens": [4]}, "seed": 0}
    return PPOConfig().copy(env=env, **{**TRAINING, **other, **settings})
