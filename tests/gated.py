"""An env whose steps wait until a file is there, so that a test decides which runner is late, and for how long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

DEADLINE_S = 60.0


class GatedEnv(gym.Env[Any, Any]):
    """Runner `slow` steps only while the file `gate` is there; every observation has a number of its own.

    The observation is `[runner, process, step]`; rewards are 1, and an episode takes 5 steps.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.runner = config.worker_index
        self.gate = Path(config["gate"]) if self.runner == config.get("slow") else None
        self.steps, self.task = 0, 0

    def get_task(self) -> int:
        return self.task

    def set_task(self, task: int) -> None:
        self.task = task

    def observe(self) -> Any:
        return np.array([self.runner, id(self) % 1_000_003, self.steps], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.gate is not None:
            deadline_s = time.monotonic() + DEADLINE_S
            while not self.gate.exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
        self.steps += 1
        return self.observe(), 1.0, self.steps % 5 == 0, False, {}
