"""Small envs with known answers."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

# The action spaces that IdentityEnv is solved with, by name.
IDENTITY_ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "discrete_from_minus_2": spaces.Discrete(4, start=-2),
    "multi_discrete": spaces.MultiDiscrete([3, 2]),
    "multi_discrete_2d": spaces.MultiDiscrete(np.array([[2, 3], [3, 2]])),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "box_uneven": spaces.Box(np.array([0.0, -5.0], np.float32), np.array([10.0, 1.0], np.float32)),
    "box_unbounded": spaces.Box(-np.inf, np.inf, (1,), np.float32),
}


class IdentityEnv(gym.Env[Any, Any]):
    """Pays for repeating the observation as the action; episodes have a fixed length.

    A step of a discrete space pays the share of entries that match, so the best return is `episode_length` and a
    random policy gets its chance level. A step of a Box pays `1 - mean(|action - observation|) / half_width`, with 1 as
    the half width of an unbounded one.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Take `space` (a name in `IDENTITY_ACTION_SPACES` or a space) and `episode_length` from the config."""
        config = config or {}
        space = config.get("space", "discrete")
        self.action_space = IDENTITY_ACTION_SPACES[space] if isinstance(space, str) else space
        self.observation_space = self.action_space
        if isinstance(self.action_space, spaces.Box) and not self.action_space.is_bounded():
            self.observation_space = spaces.Box(-1.0, 1.0, self.action_space.shape, np.float32)
        self._length = int(config.get("episode_length", 16))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._t = 0
        return self._next(), {}

    def _next(self) -> Any:
        self._obs = self.observation_space.sample()
        return self._obs

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Pay for the match and show the next observation; the time limit truncates."""
        self._t += 1
        if isinstance(self.action_space, spaces.Box):
            bounded = self.action_space.is_bounded()
            half_width = (self.action_space.high - self.action_space.low) / 2 if bounded else np.float32(1)
            reward = 1.0 - float(np.mean(np.abs(action - self._obs) / half_width))
        else:
            reward = float(np.mean(np.asarray(action) == np.asarray(self._obs)))
        return self._next(), reward, False, self._t >= self._length, {}


class CountingEnv(gym.Env[NDArray[np.float32], int]):
    """Episodes of known content: the observation is `[episode, t]`, the reward of step t is t, whatever the action.

    With `ends="terminated"` or `"truncated"` an episode ends after `episode_length` steps; `"alternate"` takes turns,
    starting with termination. `vector_index` of the context adds to the length, so that sub-envs end apart.
    """

    observation_space: Any = spaces.Box(-1.0, 1e6, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Take `episode_length` (3), `ends` ("terminated") and `stagger` (False) from the config."""
        config = config or {}
        self._length = int(config.get("episode_length", 3))
        if config.get("stagger"):
            self._length += int(getattr(config, "vector_index", 0))
        self._ends = config.get("ends", "terminated")
        self._episode = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the next episode."""
        super().reset(seed=seed)
        self._episode += 1
        self._t = 0
        return self._obs(), {}

    def _obs(self) -> NDArray[np.float32]:
        return np.array([self._episode, self._t], np.float32)

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Count one step."""
        self._t += 1
        over = self._t >= self._length
        truncates = self._ends == "truncated" or (self._ends == "alternate" and self._episode % 2 == 1)
        return self._obs(), float(self._t), over and not truncates, over and truncates, {}


class TimeLimitCorridor(gym.Env[NDArray[np.float32], int]):
    """One state, reward 1 a step, cut by a time limit that the observation does not show.

    With discount gamma the value is 1 / (1 - gamma) in every state if, and only if, a truncated step bootstraps. An
    algorithm that takes the time limit for a termination learns far less.
    """

    observation_space: Any = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Take `episode_length` (5) from the config."""
        self._length = int((config or {}).get("episode_length", 5))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._t = 0
        return np.ones(1, np.float32), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Pay 1."""
        self._t += 1
        return np.ones(1, np.float32), 1.0, False, self._t >= self._length, {}


class FaultyEnv(CountingEnv):
    """A `CountingEnv` that goes wrong in one sub-env after some steps.

    `fault` is one of raise_step, raise_reset, nan_reward, nan_obs, shape and dtype; `at_step` (4) counts the env's
    steps over its lifetime, and `vector_index` (1) says in which sub-env.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Take the fault, where and when from the config."""
        super().__init__(config)
        config = config or {}
        self._fault = config.get("fault", "raise_step")
        self._at_step = int(config.get("at_step", 4))
        self._faulty = int(getattr(config, "vector_index", 0)) == int(config.get("vector_index", 1))
        self._steps = 0

    def _due(self) -> bool:
        return self._faulty and self._steps >= self._at_step

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode, or raise."""
        if self._fault == "raise_reset" and self._due():
            raise OSError("the simulator is gone")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Step, and go wrong when it is time."""
        self._steps += 1
        obs, reward, terminated, truncated, info = super().step(action)
        if self._due():
            if self._fault == "raise_step":
                raise ZeroDivisionError("the simulator divided by zero")
            reward = float("nan") if self._fault == "nan_reward" else reward
            if self._fault == "nan_obs":
                obs = np.array([0, np.nan], np.float32)
            if self._fault == "shape":
                obs = np.zeros(3, np.float32)
            if self._fault == "dtype":
                obs = np.array([1j, 2j], np.complex64)
        return obs, reward, terminated, truncated, info


class DeepSea(gym.Env[NDArray[np.float32], int]):
    """A sea of `size` rows and columns, in which one course of actions out of `2 ** size` finds the treasure.

    It starts at the top left, and sinks one row per step. Action 1 goes right and costs `0.01 / size`, action 0 goes
    left for nothing, and in the last row at the far right is a treasure of 1. So whoever follows the rewards that are
    easily found learns to go left. The observation is one-hot over the cells (Osband et al. 2019, arXiv:1703.07608).
    """

    action_space: Any = spaces.Discrete(2)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Take `size` (10) from the config."""
        self.size = int((config or {}).get("size", 10))
        self.observation_space: Any = spaces.Box(0.0, 1.0, (self.size * self.size,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start at the top left."""
        super().reset(seed=seed)
        self._row, self._column = 0, 0
        return self._obs(), {}

    def _obs(self) -> NDArray[np.float32]:
        cells = np.zeros(self.size * self.size, np.float32)
        cells[self._row * self.size + self._column] = 1.0
        return cells

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Sink one row, to the left or to the right."""
        found = bool(action == 1 and self._column == self.size - 1)
        reward = found - (0.01 / self.size if action == 1 else 0.0)
        self._column = min(self.size - 1, self._column + 1) if action == 1 else max(0, self._column - 1)
        over = self._row == self.size - 1
        self._row = min(self._row + 1, self.size - 1)
        return self._obs(), float(reward), over, False, {}


class PoorHabit(gym.Env[NDArray[np.float32], Any]):
    """One state that pays 1 for what was done there first, and 2 for anything else.

    What is done first is the very first action of the env's life, so set `disable_env_checking`: the check would make
    it otherwise. A greedy agent keeps doing it, because it pays more than nothing. For a Box, the first action stands
    for all actions within a third of the half width of it, and they pay 1 minus their distance from it: the first
    action is a local optimum.
    """

    observation_space: Any = spaces.Box(0.0, 1.0, (1,), np.float32)
    radius = 1 / 3

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Take `space`, a name in `IDENTITY_ACTION_SPACES` or a space, and `episode_length` (1) from the config."""
        config = config or {}
        space = config.get("space", "discrete")
        self.action_space = IDENTITY_ACTION_SPACES[space] if isinstance(space, str) else space
        self._length = int(config.get("episode_length", 1))
        self._first: NDArray[Any] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._t = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Pay."""
        self._t += 1
        if self._first is None:
            self._first = np.array(action)
        half_width: Any = 1.0
        if isinstance(self.action_space, spaces.Box) and self.action_space.is_bounded():
            half_width = (self.action_space.high - self.action_space.low) / 2
        distance = float(np.max(np.abs(np.asarray(action) - self._first) / half_width))
        reward = 2.0 if distance > self.radius else 1.0 - distance
        return np.ones(1, np.float32), reward, self._t >= self._length, False, {}
