"""Small envs with known answers, for tests of algorithms and of code built on Corral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.seeding import get_rng, set_rng

__all__ = [
    "IDENTITY_ACTION_SPACES",
    "BitFlippingEnv",
    "CartPolePositions",
    "CountingEnv",
    "DeepSea",
    "DoorCorridor",
    "FaultyEnv",
    "FindSquare",
    "IdentityEnv",
    "PoorHabit",
    "ReachEnv",
    "TMaze",
    "TimeLimitCorridor",
]

__path__: list[str] = []  # checkpoints of earlier versions name `corral.testing.envs`, which corral/moved.py finds

# Action spaces for IdentityEnv and PoorHabit, by name.
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


class _Plain:
    """Lets an env be saved and restored: its state is the attributes that `STATE` names."""

    STATE: ClassVar[tuple[str, ...]] = ("_t",)

    def get_state(self) -> dict[str, Any]:
        """Return the state, from which another env of the same settings continues."""
        return {name: getattr(self, name) for name in self.STATE}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        for name in self.STATE:
            setattr(self, name, state[name])


class IdentityEnv(_Plain, gym.Env[Any, Any]):
    """Env that rewards an action equal to the observation; episodes have a fixed length.

    For discrete spaces, the reward is the fraction of entries that are equal, so the best return is `episode_length`.
    For a Box, the reward is `1 - mean(|action - observation| / half_width)`; the half width of an unbounded Box is 1.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read `space` (a name in `IDENTITY_ACTION_SPACES` or a space) and `episode_length` (16) from the config."""
        config = config or {}
        space = config.get("space", "discrete")
        self.action_space = IDENTITY_ACTION_SPACES[space] if isinstance(space, str) else space
        self.observation_space = self.action_space
        if isinstance(self.action_space, spaces.Box) and not self.action_space.is_bounded():
            self.observation_space = spaces.Box(-1.0, 1.0, self.action_space.shape, np.float32)
        self._length = int(config.get("episode_length", 16))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode, and return its first observation."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._t = 0
        return self._next(), {}

    def get_state(self) -> dict[str, Any]:
        """Return the state, with the generator of the observation space, from which the observations are drawn."""
        rng = get_rng(self.observation_space.np_random)
        return {**super().get_state(), "obs": self._obs, "rng": rng}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        super().set_state(state)
        self._obs = state["obs"]
        set_rng(self.observation_space.np_random, state["rng"])

    def _next(self) -> Any:
        self._obs = self.observation_space.sample()
        return self._obs

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the next observation and the reward; the last step truncates the episode."""
        self._t += 1
        if isinstance(self.action_space, spaces.Box):
            bounded = self.action_space.is_bounded()
            half_width = (self.action_space.high - self.action_space.low) / 2 if bounded else np.float32(1)
            reward = 1.0 - float(np.mean(np.abs(action - self._obs) / half_width))
        else:
            reward = float(np.mean(np.asarray(action) == np.asarray(self._obs)))
        return self._next(), reward, False, self._t >= self._length, {}


class CountingEnv(_Plain, gym.Env[NDArray[np.float32], int]):
    """Env with known observations and rewards: the observation is `[episode, t]`, the reward of step t is t.

    The actions have no effect. An episode ends after `episode_length` steps, with `ends="terminated"` or `"truncated"`;
    `"alternate"` alternates between both, beginning with termination. With `stagger`, the `vector_index` of the context
    is added to the length, so that episodes of different sub-envs end at different steps.
    """

    observation_space: Any = spaces.Box(-1.0, 1e6, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    STATE: ClassVar[tuple[str, ...]] = ("_t", "_episode")

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read `episode_length` (3), `ends` ("terminated") and `stagger` (False) from the config."""
        config = config or {}
        self._length = int(config.get("episode_length", 3))
        if config.get("stagger"):
            self._length += int(getattr(config, "vector_index", 0))
        self._ends = config.get("ends", "terminated")
        self._episode = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the next episode, and return its first observation."""
        super().reset(seed=seed)
        self._episode += 1
        self._t = 0
        return self._obs(), {}

    def _obs(self) -> NDArray[np.float32]:
        return np.array([self._episode, self._t], np.float32)

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Count one step, and return `[episode, t]` and the reward t."""
        self._t += 1
        over = self._t >= self._length
        truncates = self._ends == "truncated" or (self._ends == "alternate" and self._episode % 2 == 1)
        return self._obs(), float(self._t), over and not truncates, over and truncates, {}


class TimeLimitCorridor(_Plain, gym.Env[NDArray[np.float32], int]):
    """Env with one state and reward 1 per step, truncated by a time limit that the observation does not show.

    With discount gamma, the value of the state is 1 / (1 - gamma) if, and only if, truncated steps bootstrap. An
    algorithm that treats the time limit as a termination learns a much lower value.
    """

    observation_space: Any = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read `episode_length` (5) from the config."""
        self._length = int((config or {}).get("episode_length", 5))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode, and return its first observation."""
        super().reset(seed=seed)
        self._t = 0
        return np.ones(1, np.float32), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Return the reward 1; the last step truncates the episode."""
        self._t += 1
        return np.ones(1, np.float32), 1.0, False, self._t >= self._length, {}


class BitFlippingEnv(_Plain, gym.Env[Any, Any]):
    """Env with goals: bits that start at random are to become other random bits (Andrychowicz et al. 2017).

    A Discrete action flips one bit, and a Box action all bits whose entry is above 0. The reward is 0 where the bits
    are the goal, and -1 elsewhere, so that with many bits an agent that never reaches a goal learns nothing. An episode
    has as many steps as bits; with `terminates` it ends where the goal is reached. Each `info` says `is_success`.
    """

    STATE: ClassVar[tuple[str, ...]] = ("_t", "_bits", "_goal")

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read `num_bits` (8), `space` ("discrete" or "box") and `terminates` (True) from the config."""
        config = config or {}
        self._num_bits = num_bits = int(config.get("num_bits", 8))
        self._terminates = bool(config.get("terminates", True))
        bits = spaces.Box(0.0, 1.0, (num_bits,), np.float32)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict(dict.fromkeys(names, bits))
        self.action_space = spaces.Discrete(num_bits)
        if config.get("space", "discrete") == "box":
            self.action_space = spaces.Box(-1.0, 1.0, (num_bits,), np.float32)

    def get_state(self) -> dict[str, Any]:
        """Return the state, with the generator from which bits are drawn."""
        return {**super().get_state(), "rng": get_rng(self.np_random)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        super().set_state(state)
        set_rng(self.np_random, state["rng"])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        """Draw the bits and another goal, and return the observation."""
        super().reset(seed=seed)
        self._t = 0
        self._bits, self._goal = self.np_random.integers(0, 2, (2, self._num_bits)).astype(np.float32)
        if (self._bits == self._goal).all():
            self._goal[0] = 1 - self._goal[0]
        return self._obs(), {}

    def _obs(self) -> dict[str, NDArray[np.float32]]:
        return {"observation": self._bits.copy(), "achieved_goal": self._bits.copy(), "desired_goal": self._goal.copy()}

    def step(self, action: Any) -> tuple[dict[str, NDArray[np.float32]], float, bool, bool, dict[str, Any]]:
        """Flip bits, and return observation, reward and flags."""
        self._t += 1
        flipped = action > 0 if isinstance(self.action_space, spaces.Box) else np.arange(self._num_bits) == action
        self._bits = np.where(flipped, 1 - self._bits, self._bits).astype(np.float32)
        reached = bool((self._bits == self._goal).all())
        is_over = self._terminates and reached
        truncated = self._t >= self._num_bits and not is_over
        reward = float(self.compute_reward(self._bits, self._goal, {}))
        return self._obs(), reward, is_over, truncated, {"is_success": reached}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        """Return the rewards `[...]` of achieved goals `[..., bits]`."""
        return np.float32((achieved_goal == desired_goal).all(-1)) - 1

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        """Return whether episodes terminate, `[...]`."""
        return (achieved_goal == desired_goal).all(-1) & self._terminates


class ReachEnv(_Plain, gym.Env[Any, Any]):
    """Env with goals: a point in a cube moves to another point, by at most 0.1 along each axis in a step.

    The reward is 0 within 0.1 of the goal, and -1 elsewhere. An episode has 40 steps, after which it is truncated.
    Random actions reach the goal in one of a hundred episodes. Each `info` says `is_success`.
    """

    STATE: ClassVar[tuple[str, ...]] = ("_t", "_place", "_goal")
    NUM_STEPS: ClassVar[int] = 40
    REACH: ClassVar[float] = 0.1

    action_space: Any = spaces.Box(-1.0, 1.0, (3,), np.float32)
    observation_space: Any = spaces.Dict(
        dict.fromkeys(("observation", "achieved_goal", "desired_goal"), spaces.Box(-1.0, 1.0, (3,), np.float32))
    )

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Take no settings."""

    def get_state(self) -> dict[str, Any]:
        """Return the state, with the generator from which points are drawn."""
        return {**super().get_state(), "rng": get_rng(self.np_random)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        super().set_state(state)
        set_rng(self.np_random, state["rng"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw the point and its goal, and return the observation."""
        super().reset(seed=seed)
        self._t = 0
        self._place, self._goal = self.np_random.uniform(-1, 1, (2, 3)).astype(np.float32)
        return self._obs(), {}

    def _obs(self) -> dict[str, NDArray[np.float32]]:
        place = self._place
        return {"observation": place.copy(), "achieved_goal": place.copy(), "desired_goal": self._goal.copy()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the point, and return observation, reward and flags."""
        self._t += 1
        self._place = np.clip(self._place + 0.1 * np.clip(action, -1, 1), -1, 1).astype(np.float32)
        reward = float(self.compute_reward(self._place, self._goal, {}))
        return self._obs(), reward, False, self._t >= self.NUM_STEPS, {"is_success": reward == 0}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        """Return the rewards `[...]` of achieved goals `[..., 3]`."""
        return np.float32(np.linalg.norm(achieved_goal - desired_goal, axis=-1) < self.REACH) - 1


class FaultyEnv(CountingEnv):
    """A `CountingEnv` that fails in one sub-env after some steps.

    `fault` is one of raise_step, raise_reset, nan_reward, nan_obs, shape and dtype. `at_step` (4) is the step of the
    first fault, counted over the lifetime of the env. `vector_index` (1) is the index of the sub-env that fails.
    """

    STATE = (*CountingEnv.STATE, "_steps")

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read `fault` ("raise_step"), `at_step` (4) and `vector_index` (1) from the config."""
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
        """Start an episode, and return its first observation, or raise an `OSError`."""
        if self._fault == "raise_reset" and self._due():
            raise OSError("the simulator is gone")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Make one step, with the fault if `at_step` is reached, and return observation, reward and flags."""
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


class DeepSea(_Plain, gym.Env[NDArray[np.float32], int]):
    """Grid of `size` rows and columns, in which one of `2 ** size` sequences of actions finds the treasure.

    The agent starts at the top left, and moves down one row per step. Action 1 moves right and costs `0.01 / size`.
    Action 0 moves left without cost. A treasure of 1 is at the right end of the last row. So an agent that follows
    the frequent rewards learns to move left. The observation is one-hot over the cells (Osband et al. 2019,
    arXiv:1703.07608).
    """

    action_space: Any = spaces.Discrete(2)
    STATE = ("_row", "_column")

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read `size` (10) from the config."""
        self.size = int((config or {}).get("size", 10))
        self.observation_space: Any = spaces.Box(0.0, 1.0, (self.size * self.size,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode at the top left, and return its first observation."""
        super().reset(seed=seed)
        self._row, self._column = 0, 0
        return self._obs(), {}

    def _obs(self) -> NDArray[np.float32]:
        cells = np.zeros(self.size * self.size, np.float32)
        cells[self._row * self.size + self._column] = 1.0
        return cells

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move down one row, to the left or to the right, and return observation, reward and flags."""
        found = bool(action == 1 and self._column == self.size - 1)
        reward = found - (0.01 / self.size if action == 1 else 0.0)
        self._column = min(self.size - 1, self._column + 1) if action == 1 else max(0, self._column - 1)
        over = self._row == self.size - 1
        self._row = min(self._row + 1, self.size - 1)
        return self._obs(), float(reward), over, False, {}


class PoorHabit(_Plain, gym.Env[NDArray[np.float32], Any]):
    """Env with one state that rewards the first action with 1, and all other actions with 2.

    The first action is the first one in the lifetime of the env. So set `disable_env_checking`; otherwise the check
    chooses the first action. A greedy agent repeats the first action, because its reward is above 0. For a Box, an
    action within a third of the half width from the first action has the reward 1 minus this distance, in half widths:
    the first action is a local optimum.
    """

    observation_space: Any = spaces.Box(0.0, 1.0, (1,), np.float32)
    radius = 1 / 3
    STATE = ("_t", "_first")

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read `space` (a name in `IDENTITY_ACTION_SPACES` or a space) and `episode_length` (1) from the config."""
        config = config or {}
        space = config.get("space", "discrete")
        self.action_space = IDENTITY_ACTION_SPACES[space] if isinstance(space, str) else space
        self._length = int(config.get("episode_length", 1))
        self._first: NDArray[Any] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode, and return its first observation."""
        super().reset(seed=seed)
        self._t = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Return the reward of the action; the last step terminates the episode."""
        self._t += 1
        if self._first is None:
            self._first = np.array(action)
        half_width: Any = 1.0
        if isinstance(self.action_space, spaces.Box) and self.action_space.is_bounded():
            half_width = (self.action_space.high - self.action_space.low) / 2
        distance = float(np.max(np.abs(np.asarray(action) - self._first) / half_width))
        reward = 2.0 if distance > self.radius else 1.0 - distance
        return np.ones(1, np.float32), reward, self._t >= self._length, False, {}


class FindSquare(_Plain, gym.Env[NDArray[np.uint8], int]):
    """Env that shows a white square on black, and rewards the action that names the quadrant that it is in with 1.

    The square is a seventh of the image wide, and its place in the quadrant is random. A random policy has a mean
    return of a quarter of `episode_length`.
    """

    action_space: Any = spaces.Discrete(4)
    STATE = ("_t", "_quadrant")

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read `side` (84), in pixels, and `episode_length` (16) from the config."""
        config = config or {}
        self._side = int(config.get("side", 84))
        self._length = int(config.get("episode_length", 16))
        self.observation_space: Any = spaces.Box(0, 255, (self._side, self._side, 1), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start an episode, and return its first observation."""
        super().reset(seed=seed)
        self._t = 0
        return self._next(), {}

    def _next(self) -> NDArray[np.uint8]:
        half, width = self._side // 2, self._side // 7
        self._quadrant = int(self.np_random.integers(4))
        top, left = self.np_random.integers(half - width + 1, size=2) + half * np.array(divmod(self._quadrant, 2))
        obs = np.zeros(self.observation_space.shape, np.uint8)
        obs[top : top + width, left : left + width] = 255
        return obs

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Return the next image and the reward; the last step truncates the episode."""
        reward = float(int(action) == self._quadrant)
        self._t += 1
        return self._next(), reward, False, self._t >= self._length, {}


class DoorCorridor(_Plain, gym.Env[Any, Any]):
    """Corridor in which two values of each entry of the action are legal at each position: one forward, one back.

    The agent moves forward if all entries of its action do, and otherwise back; each step gains or loses
    `1 / length`, so the best return is 1. Episodes end at the end of the corridor, and after `4 * length` steps. With
    masks an illegal action is an error. Without masks it wastes the step.

    The observation is the position, one-hot. At the end the mask allows nothing, as in many board games.
    """

    STATE = ("_t", "_position")

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read the config.

        Its keys are `masks` (`"observations"` by default, `"infos"`, `"method"` or `None`), `length` (8), `sizes` (the
        number of values of each entry, [20]; one entry makes a Discrete space) and `start` of the action space (0).
        """
        config = config or {}
        self._masks, self._length = config.get("masks", "observations"), int(config.get("length", 8))
        sizes, self._start = list(config.get("sizes", [20])), int(config.get("start", 0))
        self.action_space: spaces.Space[Any] = (
            spaces.Discrete(sizes[0], start=self._start)
            if len(sizes) == 1
            else spaces.MultiDiscrete(sizes, start=[self._start] * len(sizes))
        )
        position = spaces.Box(0, 1, (self._length + 1,), np.float32)
        mask = spaces.Box(0, 1, (sum(sizes),), np.int8)
        self.observation_space: spaces.Space[Any] = position
        if self._masks == "observations":
            self.observation_space = spaces.Dict(action_mask=mask, observations=position)
        rng = np.random.default_rng(0)
        pairs = [[rng.permutation(n)[:2] for n in sizes] for _ in range(self._length)]
        self._doors: NDArray[np.int64] = np.array(pairs)  # [position, entry, (forward, back)]
        self._offsets = np.cumsum([0, *sizes[:-1]])
        self._num_values = sum(sizes)

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which values are legal here, bool `[n]`."""
        mask = np.zeros(self._num_values, np.bool_)
        if self._position < self._length:
            mask[self._doors[self._position] + self._offsets[:, None]] = True
        return mask

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode at position 0, and return its first observation."""
        super().reset(seed=seed)
        self._t = self._position = 0
        return self._see()

    def _see(self) -> tuple[Any, dict[str, Any]]:
        position = np.eye(self._length + 1, dtype=np.float32)[self._position]
        if self._masks == "observations":
            return {"action_mask": self.action_masks().astype(np.int8), "observations": position}, {}
        return position, {"action_mask": self.action_masks()} if self._masks == "infos" else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go through a door, and return observation, reward and flags."""
        self._t += 1
        doors, values = self._doors[self._position], np.ravel(action) - self._start
        before = self._position
        if not (doors == values[:, None]).any(1).all():
            if self._masks is not None:
                raise ValueError(f"the action {action} is illegal at position {self._position}")
        elif (doors[:, 0] == values).all():
            self._position += 1
        else:
            self._position = max(0, self._position - 1)
        reward = (self._position - before) / self._length
        obs, info = self._see()
        return obs, reward, self._position == self._length, self._t >= 4 * self._length, info


class TMaze(_Plain, gym.Env[NDArray[np.float32], int]):
    """A corridor with a junction at its end, where the first observation says which way is right (Bakker 2001).

    Action 0 moves on, 1 and 2 turn left and right. Turning in the corridor, and moving on at the junction, leaves the
    agent where it is and costs 0.1. A turn at the junction ends the episode, with a reward of 1 for the right way and
    of -1 for the other. The observation is the sign, which is -1 or 1 at the start and 0 elsewhere, and whether the
    agent is at the junction. Without memory, the best return is 0; with memory it is 1.
    """

    observation_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: Any = spaces.Discrete(3)
    STATE = ("_t", "_place", "_side")

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Read `length` (20), the steps from the start to the junction, from the config."""
        self._length = int((config or {}).get("length", 20))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode at the start of the corridor, and return its first observation."""
        super().reset(seed=seed)
        self._t, self._place = 0, 0
        self._side = int(self.np_random.integers(1, 3))
        return self._obs(), {}

    def get_state(self) -> dict[str, Any]:
        """Return the state, with the generator of the right way."""
        return {**super().get_state(), "rng": get_rng(self.np_random)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        super().set_state(state)
        set_rng(self.np_random, state["rng"])

    def _obs(self) -> NDArray[np.float32]:
        sign = 0.0 if self._place else 2.0 * self._side - 3.0
        return np.array([sign, self._place == self._length], np.float32)

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move on or turn, and return observation, reward and flags; three times the needed steps truncate."""
        self._t += 1
        at_junction, turns = self._place == self._length, action > 0
        reward = (1.0 if action == self._side else -1.0) if at_junction else -0.1
        if at_junction != turns:
            self._place, reward = min(self._place + 1, self._length), -0.1 if at_junction else 0.0
        over = bool(at_junction and turns)
        return self._obs(), reward, over, not over and self._t == 3 * (self._length + 1), {}


class CartPolePositions(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole-v1 that shows position and angle without the velocities, which only memory can estimate.

    Both are divided by the limits at which an episode ends.
    """

    observation_space: Any = spaces.Box(-2.0, 2.0, (2,), np.float32)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """Make CartPole; there are no settings."""
        super().__init__(gym.make("CartPole-v1"))
        cart_pole: Any = self.env.unwrapped
        self._limits = np.array([cart_pole.x_threshold, cart_pole.theta_threshold_radians], np.float32)

    def observation(self, observation: Any) -> NDArray[np.float32]:
        """Return position and angle, float32 `[2]`."""
        positions: NDArray[np.float32] = observation[::2] / self._limits
        return positions
