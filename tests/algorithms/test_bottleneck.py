"""The advice of `result["bottleneck"]` is followed, and what it gains is seen in who waits for whom, not by a clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import PPOConfig

LIMIT_S = 0.02


class Meeting(gym.Env[Any, Any]):
    """A step waits until another sub-env is in a step, at most `LIMIT_S`; the reward says whether one came."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, context: Any) -> None:
        self.place = Path(context["folder"]) / f"{context.worker_index}-{context.vector_index}"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.num_steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.place.touch()
        limit, met = time.monotonic() + LIMIT_S, False
        while not met and time.monotonic() < limit:
            met = any(other != self.place for other in self.place.parent.iterdir())
            time.sleep(0.001)
        if met:
            time.sleep(0.004)  # so that the other one sees this one, too
        self.place.unlink()
        self.num_steps += 1
        return np.zeros(2, np.float32), float(met), False, self.num_steps >= 5, {}


def follow(config: Any, setting: str, value: Any) -> Any:
    group, _, name = setting.partition(".")
    return getattr(config.copy(), group)(**{name: value})


def train(config: Any) -> Any:
    with config.build() as algo:
        return algo.train()


@pytest.mark.slow_cases("num_env_runners-2")
@pytest.mark.parametrize(
    ("num_envs", "setting", "value"),
    [(2, "env_runners.vectorization", "async"), (1, "env_runners.num_env_runners", 2)],
)
def test_with_the_setting_that_is_named_slow_envs_step_at_the_same_time(
    num_envs: int, setting: str, value: Any, tmp_path: Path
) -> None:
    config = PPOConfig().environment(Meeting, env_config={"folder": str(tmp_path)})
    config.env_runners(num_envs_per_env_runner=num_envs)
    config.training(train_batch_size_per_learner=40, minibatch_size=40, num_epochs=1)
    result = train(config)
    assert result["env_runners"]["episode_return_mean"] == 0  # nobody else is in a step
    assert result["bottleneck"]["part"] == "env_step"
    assert result["bottleneck"]["setting"] == setting
    assert train(follow(config, setting, value))["env_runners"]["episode_return_max"] >= 2


def test_a_larger_minibatch_makes_fewer_updates() -> None:
    sizes: list[int] = []

    def counted(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        sizes.append(len(batch["actions"]))
        return default_loss(module, batch, coefficients)[:2]

    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=8)
    config.training(train_batch_size_per_learner=512, minibatch_size=8, num_epochs=2, loss=counted)
    result = train(config)
    assert result["bottleneck"]["setting"] == "training.minibatch_size"
    num_before = len(sizes)
    sizes.clear()
    train(follow(config, "training.minibatch_size", 256))
    assert num_before >= 16 * len(sizes)
