"""What networks see of images: numbers scaled by the bounds of their space or by a setting, and the right channels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import DQNConfig, FrameStack, NormalizeObservations, PPOConfig
from corral.algorithms.module_record import log_images
from corral.errors import ConfigError
from corral.modules.dreamerv3_module import DreamerV3Module
from corral.modules.networks import ImageEncoder
from corral.modules.pixels import find_scaling

SHAPE = (12, 12, 3)


def env_of(space: spaces.Space[Any]) -> type[gym.Env[Any, Any]]:
    class Draws(gym.Env[Any, Any]):
        """Observations are drawn from the space; an episode has 6 steps."""

        observation_space = space
        action_space = spaces.Discrete(2)

        def __init__(self, config: Mapping[str, Any] | None = None) -> None:
            self.t = 0

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed)
            self.t = 0
            return space.sample(), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            return space.sample(), 1.0, False, self.t >= 6, {}

    return Draws


def build(space: spaces.Space[Any], algorithm: type[Any] = PPOConfig, **model_config: Any) -> Any:
    config = algorithm().environment(env_of(space)).rl_module(model_config=model_config).debugging(seed=0)
    return config.env_runners(num_envs_per_env_runner=2)


def encoder_of(algo: Any) -> ImageEncoder:
    return next(part for part in algo.get_module().modules() if isinstance(part, ImageEncoder))


def seen_by_net(algo: Any, obs: Any) -> np.ndarray[Any, Any]:
    """Return what the first convolution of a module gets for observations."""
    found: list[Any] = []
    hook = encoder_of(algo).layers[0].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].numpy()))
    with torch.no_grad():
        encoder_of(algo)(torch.as_tensor(obs))
    hook.remove()
    pixels: np.ndarray[Any, Any] = found[0]
    return pixels


@pytest.mark.slow_cases("DQNConfig")
@pytest.mark.parametrize("algorithm", [PPOConfig, DQNConfig])
@pytest.mark.parametrize(
    ("low", "high", "dtype", "seen"),
    [
        (0, 255, np.uint8, (0, 1)),
        (0, 1, np.uint8, (0, 1)),
        (0, 10, np.uint8, (0, 1)),
        (100, 101, np.uint8, (0, 1)),
        (0, 255, np.int32, (0, 1)),
        (0, 255, np.int64, (0, 1)),
        (0, 65535, np.uint16, (0, 1)),
        (-128, 127, np.int8, (-1, 127 / 128)),
        (-1, 1, np.int8, (-1, 1)),
        (0, 255, np.float32, (0, 1)),
        (0, 255, np.float64, (0, 1)),
        (0, 1, np.float32, (0, 1)),
        (-1, 1, np.float32, (-1, 1)),
        (-10, 10, np.float32, (-10, 10)),
        (-np.inf, np.inf, np.float32, (-50, 50)),
    ],
)
def test_the_bounds_say_how_images_are_scaled(algorithm: Any, low: Any, high: Any, dtype: Any, seen: Any) -> None:
    with build(spaces.Box(low, high, SHAPE, dtype), algorithm).build() as algo:
        ends = [-50, 50] if np.isinf(high) else [low, high]
        obs = np.stack([np.full(SHAPE, end, dtype) for end in ends])
        pixels = seen_by_net(algo, obs)
    assert pixels[0].min() == pixels[0].max() == pytest.approx(seen[0])
    assert pixels[1].min() == pixels[1].max() == pytest.approx(seen[1])


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.float32])
def test_images_of_all_dtypes_are_learned_from(dtype: Any) -> None:
    space = spaces.Box(0, 200, SHAPE, dtype)
    ppo = build(space).training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1)
    dqn = build(space, DQNConfig).training(num_steps_sampled_before_learning_starts=20)
    for config in (ppo, dqn.reporting(min_sample_timesteps_per_iteration=40)):
        with config.build() as algo:
            assert np.isfinite(algo.train()["learners"]["default_policy"]["total_loss"])


def test_bytes_of_pictures_are_divided_by_255_as_before() -> None:
    scaling = find_scaling(spaces.Box(0, 255, SHAPE, np.uint8))
    assert (scaling.offset, scaling.scale) == (0.0, 1 / 255)


def test_entries_with_bounds_of_their_own_are_scaled_by_them() -> None:
    """Colours and a depth in metres, stacked: the bounds travel with the axes."""
    low, high = np.zeros(SHAPE, np.float32), np.full(SHAPE, 255.0, np.float32)
    low[..., 2], high[..., 2] = 2.0, 10.0
    config = build(spaces.Box(low, high)).env_runners(transforms=[FrameStack(2)])
    with config.build() as algo:
        obs = np.stack([np.stack([low, low]), np.stack([high, high])])
        pixels = seen_by_net(algo, obs)
        assert pixels.shape == (2, 6, 12, 12)
        assert np.unique(pixels[0]).tolist() == [0]
        assert pixels[1] == pytest.approx(np.ones((6, 12, 12)))
        assert not any("_scale" in name or "_offset" in name for name in algo.get_module().state_dict())


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, np.inf, SHAPE, np.float32),
        spaces.Box(0, np.iinfo(np.uint32).max, SHAPE, np.uint32),
        spaces.Box(np.iinfo(np.int32).min, np.iinfo(np.int32).max, SHAPE, np.int32),
    ],
)
def test_images_that_cannot_be_scaled_are_refused(space: spaces.Box) -> None:
    with pytest.raises(ConfigError, match=r"without bounds cannot be scaled.*image_scale"):
        build(space).build()
    with build(space, image_scale=0.5).build() as algo:
        assert np.unique(seen_by_net(algo, np.full((1, *SHAPE), 8, space.dtype))).tolist() == [4.0]


def test_a_number_scales_all_images() -> None:
    with build(spaces.Box(0, 255, SHAPE, np.uint8), image_scale=1.0).build() as algo:
        assert np.unique(seen_by_net(algo, np.full((1, *SHAPE), 200, np.uint8))).tolist() == [200.0]
    with pytest.raises(ConfigError, match="image_scale"):
        build(spaces.Box(0, 255, SHAPE, np.uint8), image_scale="bytes").build()


@pytest.mark.parametrize("setting", [{"image_scale": 0.5}, {"channel_axis": "last"}])
def test_settings_of_images_need_an_image(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}=.* has no effect"):
        build(spaces.Box(-1, 1, (4,), np.float32), **setting).build()


@pytest.mark.parametrize(
    ("shape", "channel_axis", "channels", "pixels"),
    [
        ((8, 8, 111), None, 111, (8, 8)),
        ((111, 8, 8), None, 111, (8, 8)),
        ((4, 84, 96), None, 4, (84, 96)),
        ((4, 4, 84, 96), None, 16, (84, 96)),
        ((10, 9, 14), None, 10, (9, 14)),
        ((10, 9, 14), "last", 14, (10, 9)),
        ((14, 10, 9), "first", 14, (10, 9)),
        ((10, 30, 9), "first", 10, (30, 9)),
    ],
)
def test_channels_are_where_the_setting_says_or_pixels_are_square(
    shape: tuple[int, ...], channel_axis: Any, channels: int, pixels: tuple[int, int]
) -> None:
    with build(spaces.Box(0, 1, shape, np.float32), channel_axis=channel_axis).build() as algo:
        assert seen_by_net(algo, np.zeros((1, *shape), np.float32)).shape == (1, channels, *pixels)


@pytest.mark.parametrize(("channel_axis", "shape"), [("last", (10, 9, 14)), ("first", (14, 10, 9))])
def test_the_axis_of_channels_is_the_one_of_the_env_under_a_stack(channel_axis: str, shape: tuple[int, ...]) -> None:
    config = build(spaces.Box(0, 1, shape, np.float32), channel_axis=channel_axis)
    with config.env_runners(transforms=[FrameStack(2)]).build() as algo:
        assert seen_by_net(algo, np.zeros((1, 2, *shape), np.float32)).shape == (1, 28, 10, 9)


@pytest.mark.parametrize(
    ("space", "transforms", "level", "text"),
    [
        (spaces.Box(0, 255, SHAPE, np.uint8), [], "INFO", "3 channels, numbers from 0 to 255 scaled to 0 to 1"),
        (spaces.Box(0, 1, SHAPE, np.float32), [], "INFO", "numbers from 0 to 1 as they are"),
        (spaces.Box(-255, 255, SHAPE, np.float32), [], "WARNING", "numbers from -255 to 255 as they are"),
        (spaces.Box(-np.inf, np.inf, SHAPE, np.float32), [], "WARNING", "image_scale"),
        (spaces.Box(-255, 255, SHAPE, np.float32), [NormalizeObservations()], "INFO", "as they are"),
    ],
)
def test_the_log_says_how_images_are_read(
    space: Any, transforms: list[Any], level: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "corral"), build(space).env_runners(transforms=transforms).build():
        (record,) = [record for record in caplog.records if "pixels" in record.getMessage()]
    assert record.levelname == level
    assert text in record.getMessage()


@pytest.mark.parametrize("high", [np.inf, 1.0])
def test_the_log_warns_of_pictures_of_world_models_too(high: float, caplog: pytest.LogCaptureFixture) -> None:
    space = spaces.Box(-high, high, (16, 16, 3), np.float32)
    log_images("default_policy", DreamerV3Module(space, spaces.Discrete(2), {"model_size": "nano"}), None)
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == (high > 1) and all(r"transforms=[NormalizeObservations()]" in text for text in found)


def test_bandits_scale_bytes_by_their_bounds() -> None:
    from corral.exploration.bandits import _features

    for high in (1, 10, 255):
        features = _features(spaces.Box(0, high, SHAPE, np.uint8), np.full((1, *SHAPE), high, np.uint8))
        assert features == pytest.approx(np.ones((1, 432)))


def test_curiosity_takes_settings_of_images() -> None:
    config = build(spaces.Box(0, 255, (16, 16, 3), np.uint8))
    settings = {"conv_filters": [[8, 3, 2]], "channel_axis": "last", "image_scale": 0.01}
    config.exploration(exploration_config={"type": "Curiosity", "feature_net_config": settings})
    config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1)
    with config.build() as algo:
        assert algo.train()["exploration"]["intrinsic_reward_mean"] > 0
