"""Measures of PPO with nets whose arithmetic outweighs everything else: wide layers, and convolutions on images."""

from collections.abc import Callable
from typing import Any

import measuring
from corral_config import net_config, ppo_config
from measuring import Fields, Options


def wide_config(options: Options, **learners: Any) -> Any:
    """Returns the config of the PPO measure with wide layers."""
    return ppo_config(options).rl_module(model_config=net_config(measuring.WIDE)).learners(**learners)


def ppo_wide(options: Options) -> Fields:
    """Trained env steps per second of PPO with nets of 512-512."""
    with wide_config(options).build() as algo:
        return measuring.training_rate(measuring.trainer(algo), options)


def images_config(options: Options) -> Any:
    """Returns the config of PPO on images, with the convolutions and the 512 features that SB3 uses."""
    from corral import PPOConfig
    from image_env import ImageEnv

    return (
        PPOConfig()
        .environment(ImageEnv)
        .env_runners(num_envs_per_env_runner=8)
        .training(lr=2.5e-4, train_batch_size_per_learner=1024, minibatch_size=256, num_epochs=4, grad_clip=0.5)
        .rl_module(model_config={"fcnet_hiddens": [], "conv_features": 512, "vf_share_layers": True})
        .debugging(seed=options.seed)
    )


def ppo_images(options: Options) -> Fields:
    """Trained env steps per second of PPO on images."""
    with images_config(options).build() as algo:
        return measuring.training_rate(measuring.trainer(algo), options)


def compiled(make_config: Callable[..., Any]) -> measuring.Measure:
    """Returns the measure of how many times the env steps per second of the plain learner the compiled one takes."""

    def measure(options: Options) -> Fields:
        with make_config(options).build() as plain, make_config(options, compile=True).build() as fast:
            trains: list[Callable[[], int]] = [measuring.trainer(fast), measuring.trainer(plain)]
            for train in trains:  # compiles
                train()
            return measuring.relative_rate(*trains, options=options)

    return measure
