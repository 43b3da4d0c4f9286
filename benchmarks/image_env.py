"""An env of images whose step costs next to nothing, for measures of convolutions."""

from typing import Any

import gymnasium
import numpy as np

SIDE, CHANNELS, EPISODE_STEPS = 84, 4, 100


class ImageEnv(gymnasium.Env[Any, Any]):
    """Shows one of two pictures, and rewards the action that names it; images are uint8 `[84, 84, 4]`."""

    observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE, CHANNELS), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        """Draws both pictures; `config` is not used."""
        self.pictures = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, CHANNELS), np.uint8)
        self.shown = self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode of 100 steps."""
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Rewards the action, and shows the next picture."""
        reward = float(action == self.shown)
        self.steps += 1
        return self._show(), reward, False, self.steps >= EPISODE_STEPS, {}

    def _show(self) -> Any:
        self.shown = int(self.np_random.integers(2))
        return self.pictures[self.shown]
