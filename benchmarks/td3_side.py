"""Measures of Corral's TD3: env steps per second of the whole loop, and what it learns, at common settings."""

from typing import Any

import measuring
from measuring import Fields, Options


def config(options: Options) -> Any:
    """Returns the hyperparameters that all systems share."""
    from corral import TD3Config

    return (
        TD3Config()
        .environment("Pendulum-v1")
        .training(
            lr=1e-3,
            train_batch_size_per_learner=256,
            num_steps_sampled_before_learning_starts=500,
            replay_buffer_config={"capacity": 100_000},
            tau=0.005,
            gamma=0.99,
            policy_delay=2,
            target_noise=0.2,
            target_noise_clip=0.5,
        )
        .exploration(exploration_config={"stddev": 0.1})
        .rl_module(model_config={"fcnet_hiddens": [256, 256], "fcnet_activation": "relu"})
        .reporting(min_sample_timesteps_per_iteration=500)
        .debugging(seed=options.seed)
    )


def td3(options: Options) -> Fields:
    """Env steps per second of TD3, 500 env steps at a time."""
    with config(options).build() as algo:
        return measuring.training_rate(measuring.trainer(algo), options)


def td3_return(options: Options) -> Fields:
    """Mean return of 20 greedy episodes after 10,000 env steps."""
    with config(options).build() as algo:
        while algo.num_env_steps_sampled_lifetime < measuring.TD3_STEPS:
            algo.train()
        rollout = algo.env_runner.sample(num_episodes=20, explore=False)
    return {"mean_return": float(rollout.rewards[rollout.valid].sum()) / 20}
