"""An env whose step takes a given time, for measures of many runners."""

from time import perf_counter, sleep
from typing import Any

import gymnasium
import numpy as np

EPISODE_STEPS = 200


class TimedEnv(gymnasium.Env[Any, Any]):
    """Steps in about `env_config["step_s"]` seconds, in one runner ten times as long.

    The observation is the index of the runner; episodes are truncated after 200 steps.

    Args:
        config: `step_s`; `spins`, whether a step keeps its core busy meanwhile; `slow_runner`, the index of the
            runner that takes ten times as long, or None; `stall_s` and `stall_share`, how long a part of the steps
            takes instead; and `blocks_s`, how long the first step of the runner `blocked_runner` takes.
    """

    observation_space = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        """Notes where the env is and how long its steps take."""
        self.observation = np.array([config.worker_index], np.float32)
        self.step_s = config["step_s"] * (10 if config.worker_index == config.get("slow_runner") else 1)
        self.spins = config.get("spins", False)
        self.stall_s, self.stall_share = config.get("stall_s", 0.0), config.get("stall_share", 0.0)
        self.blocks_s = config.get("blocks_s", 0.0) if config.worker_index == config.get("blocked_runner") else 0.0
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode; takes no time."""
        super().reset(seed=seed)
        self.steps = 0
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Lets the time pass."""
        if self.blocks_s:
            blocks_s, self.blocks_s = self.blocks_s, 0.0
            sleep(blocks_s)
        if self.stall_share and self.np_random.random() < self.stall_share:
            sleep(self.stall_s)
        elif self.spins:
            end = perf_counter() + self.step_s
            while perf_counter() < end:
                pass
        else:
            sleep(self.step_s)
        self.steps += 1
        return self.observation, 1.0, False, self.steps >= EPISODE_STEPS, {}
