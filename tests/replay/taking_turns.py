"""An env in which agents act at random times, whose observations say which step of which episode they belong to."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from corral import MultiAgentEnv


class TakingTurns(MultiAgentEnv):
    """Some of the living agents are observed in each step: each sees the number of its episode, and its age in it.

    An agent that acts is rewarded with its age, and may end. `ends` has the age of the last step of each episode, and
    whether it terminated.
    """

    num_episodes: ClassVar[list[int]] = [0]
    ends: ClassVar[dict[int, tuple[int, bool]]] = {}

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.possible_agents = [0, 1, 2, 3]
        self.observation_space = gym.spaces.Box(-1, 1e6, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episodes: dict[int, int] = {}
        self.ages: dict[int, int] = {}
        self.living, self.num_steps = set(range(4)), 0
        return self._some(), {}

    def _obs(self, agent: int) -> Any:
        return np.array([self.episodes[agent], self.ages[agent]], np.float32)

    def _some(self) -> dict[int, Any]:
        chosen = [agent for agent in sorted(self.living) if self.np_random.random() < 0.6] or [min(self.living)]
        for agent in chosen:
            if agent not in self.episodes:
                self.num_episodes[0] += 1
                self.episodes[agent], self.ages[agent] = self.num_episodes[0], 0
        return {agent: self._obs(agent) for agent in chosen}

    def step(self, action_dict: dict[int, Any]) -> Any:
        self.num_steps += 1
        rewards, flags = {}, ({"__all__": False}, {"__all__": False})
        dead = []
        for agent in action_dict:
            rewards[agent] = float(self.ages[agent])
            self.ages[agent] += 1
            if (drawn := self.np_random.random()) < 0.15:
                dead.append(agent)
                flags[drawn >= 0.1][agent] = True  # type: ignore[index]
                self.ends[self.episodes[agent]] = self.ages[agent] - 1, bool(drawn < 0.1)
        self.living -= set(dead)
        if self.living and self.num_steps < 20:
            obs = self._some()
        else:
            flags[0]["__all__"] = True
            last = self.living & self.episodes.keys()
            self.ends.update({self.episodes[agent]: (self.ages[agent] - 1, True) for agent in last})
            obs = {agent: self._obs(agent) for agent in last}
        obs |= {agent: self._obs(agent) for agent in dead}
        return obs, rewards, *flags, {}
