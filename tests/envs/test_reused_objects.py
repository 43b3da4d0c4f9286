"""Envs that return the same array at every step, or write into the actions that they receive."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from handmade import MakeRunner

EPISODE_LENGTH = 3


class OneArray(gym.Env[Any, Any]):
    """Observations `[episode, t]`, always in the same array, in a Dict space if asked; it overwrites its actions."""

    def __init__(self, config: Any) -> None:
        self.action_space = config["action_space"]
        box = spaces.Box(-1, 1e6, (2,), np.float32)
        self.observation_space: Any = spaces.Dict({"a": spaces.Tuple([box])}) if config["nested"] else box
        self.array = np.full(2, -1, np.float32)
        self.obs: Any = {"a": (self.array,)} if config["nested"] else self.array
        self.reward = np.zeros(())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.array += 1, 0
        self.array[1] = 0
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if isinstance(action, np.ndarray):
            action[...] = 0
        self.array[1] += 1
        self.reward[...] = self.array[1]
        return self.obs, self.reward, False, bool(self.array[1] == EPISODE_LENGTH), {}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_every_observation_is_kept_as_it_was(
    make_runner: MakeRunner, mode: str, vectorization: str, nested: bool
) -> None:
    env_config = {"action_space": spaces.MultiBinary(3), "nested": nested}
    runner = make_runner(
        OneArray,
        num_envs=2,
        env_config=env_config,
        autoreset_mode=mode,
        vectorization=vectorization,
        disable_env_checking=True,
    )
    rollouts = [runner.sample(num_timesteps=2 * n) for n in (5, 6)]
    episodes = [episode for rollout in rollouts for episode in rollout.episodes()]
    for episode in episodes:
        obs = episode.get_observations()
        obs = obs["a"][0] if nested else obs
        first = int(obs[0, 1])
        assert obs[:, 1].tolist() == list(range(first, first + len(obs)))
        assert len(set(obs[:, 0].tolist())) == 1
        assert episode.get_rewards().tolist() == obs[1:, 1].tolist()
    assert sum(episode.is_truncated for episode in episodes) >= 4


@pytest.mark.parametrize(
    "action_space", [spaces.MultiBinary(4), spaces.MultiDiscrete([3, 3, 3, 3]), spaces.Box(-1, 1, (4,), np.float32)]
)
def test_an_env_that_writes_into_its_action_changes_no_column(make_runner: MakeRunner, action_space: Any) -> None:
    runner = make_runner(OneArray, env_config={"action_space": action_space, "nested": False})
    rollout = runner.sample(num_timesteps=20)
    assert np.count_nonzero(rollout.actions[rollout.valid]) > 10
