"""An env that draws how far its episode is."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Brightening(gym.Env[Any, Any]):
    """Episodes of `num_steps` steps; the image of step t is grey, with the value 20 t. A reward is the action."""

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 25}  # noqa: RUF012
    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2, start=3)

    def __init__(self, num_steps: int = 10, render_mode: str | None = None) -> None:
        self.num_steps, self.render_mode, self.shown = num_steps, render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t / self.num_steps, np.float32), float(action), False, self.t == self.num_steps, {}

    def render(self) -> Any:
        if self.render_mode == "human":
            print("image", self.t)
            return None
        return np.full((33, 47, 3), 20 * self.t, np.uint8)


class WithBoth(Brightening):
    """An env that takes its settings and `render_mode` apart."""

    def __init__(self, env_config: Any, render_mode: str | None = None) -> None:
        super().__init__(env_config["num_steps"], render_mode)


def with_config(config: Any) -> Brightening:
    return Brightening(config["num_steps"], config.get("render_mode"))


def deaf(config: Any) -> Brightening:
    return Brightening()


class Plain(Brightening):
    """An env that takes no render_mode."""

    def __init__(self, num_steps: int = 10) -> None:
        super().__init__(num_steps)
