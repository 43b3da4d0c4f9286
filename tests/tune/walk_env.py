"""An env that continues where it stood."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Walk(gym.Env[Any, Any]):
    """A random walk that can be saved in the middle of an episode."""

    observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.place = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = float(self.np_random.normal())
        return np.array([self.place], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += float(self.np_random.normal()) + 2.0 * action - 1.0
        return np.array([self.place], np.float32), -abs(self.place), abs(self.place) > 4, False, {}

    def get_state(self) -> dict[str, Any]:
        return {"place": self.place}

    def set_state(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
