"""Envs whose episodes can be told from their numbers, and what they gave, for tests of recorded data."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

LENGTHS = (3, 1, 5, 2)


class Counting(gym.Env[Any, Any]):
    """Observes (episode, step); episodes have the lengths `LENGTHS` in turn, and the odd ones are truncated.

    Everything that it gave and received is in `log`, a list of episodes, each a list of (obs, action, reward).
    """

    log: ClassVar[list[list[tuple[Any, Any, float]]]] = []

    def __init__(self, config: Any = None) -> None:
        settings = {"actions": "discrete", "nested": False, **(config or {})}
        low, high = np.float32(-1000), np.float32(1000)
        box = gym.spaces.Box(low, high, (2,), np.float32)
        self.nested = settings["nested"]
        self.observation_space = gym.spaces.Dict({"place": box, "kind": gym.spaces.Discrete(4)}) if self.nested else box
        self.action_space = {
            "discrete": gym.spaces.Discrete(3, start=2),
            "box": gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)),
            "parts": gym.spaces.MultiDiscrete([2, 3]),
        }[settings["actions"]]
        self.episode = -1

    def _obs(self) -> Any:
        place = np.array([self.episode, self.t], np.float32)
        return {"place": place, "kind": np.int64(self.episode % 4)} if self.nested else place

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        self.steps: list[tuple[Any, Any, float]] = []
        return self._obs(), {"begun": self.episode}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        before, self.t = self._obs(), self.t + 1
        reward = 10.0 * self.episode + self.t
        self.steps.append((before, np.array(action), reward))
        is_over = self.t == LENGTHS[self.episode % len(LENGTHS)]
        if is_over:
            self.log.append(self.steps)
        odd = bool(self.episode % 2)
        return self._obs(), reward, is_over and not odd, is_over and odd, {"t": self.t, "array": np.arange(2)}
