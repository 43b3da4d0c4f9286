"""Buffers that are larger than the memory of the machine are refused before anything is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral import DQNConfig, FrameStack, NormalizeObservations, SACConfig
from corral.data.replay.memory import bytes_per_step, check_memory
from corral.errors import ConfigError


class Steps(gym.Env[Any, Any]):
    """Returns samples of its space."""

    def __init__(self, config: Any) -> None:
        self.observation_space, self.action_space = config["space"], config.get("actions", spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observation_space.sample(), 0.0, False, self.steps == 20, {}


IMAGES = spaces.Box(0, 255, (16, 16, 1), np.uint8)
MIXED = spaces.Dict({"speed": spaces.Box(-1, 1, (30,)), "gear": spaces.Discrete(5), "camera": IMAGES})


@pytest.mark.slow_cases("transforms2")
@pytest.mark.parametrize(
    ("space", "transforms"),
    [(IMAGES, []), (MIXED, []), (MIXED, [NormalizeObservations]), (IMAGES, [lambda: FrameStack(4)])],
)
def test_the_estimate_is_the_size_of_the_buffer(space: spaces.Space[Any], transforms: list[Any]) -> None:
    config = DQNConfig().environment(Steps, env_config={"space": space})
    config.env_runners(transforms=[make() for make in transforms])
    config.training(
        replay_buffer_config={"capacity": 4000},
        num_steps_sampled_before_learning_starts=1000,
        train_batch_size_per_learner=32,
    )
    with config.build() as algo:
        algo.train()
        estimate = 4000 * algo.replay_buffers.bytes_per_step("default_policy")
        assert estimate == pytest.approx(algo.local_replay_buffer.nbytes, rel=0.1)


@pytest.mark.parametrize("config", [DQNConfig().environment("CartPole-v1"), SACConfig().environment("Pendulum-v1")])
def test_more_than_the_machine_has_is_refused_at_the_build(config: Any, tmp_path: Path) -> None:
    config.training(replay_buffer_config={"capacity": 10**13})
    with pytest.raises(ConfigError, match=r"capacity=10,000,000,000,000.*GiB.*lower capacity.*directory.*frame_stack"):
        config.build()
    config.training(replay_buffer_config={"capacity": 10**13, "directory": tmp_path})
    config.build().stop()  # the disk is checked when the columns are made


def test_buffers_of_several_modules_are_counted_together(caplog: pytest.LogCaptureFixture) -> None:
    check_memory({"one": (1000, 30), "two": (1000, 30)})
    with pytest.raises(ConfigError, match=r"the replay buffers of 2 modules take .* GiB"):
        check_memory({"one": (10**12, 1), "two": (10**16, 1)})
    assert not caplog.records


def test_a_frame_is_counted_once() -> None:
    stack = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    actions = spaces.Discrete(2)
    assert bytes_per_step(stack, actions, 4) - bytes_per_step(stack, actions, 1) == -3 * 84 * 84
