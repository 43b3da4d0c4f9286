"""An env that plays random episodes of several agents, and notes what it was sent."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium import spaces

from agent_steps import AGENTS, Played, play
from corral import MultiAgentEnv

SAVED: list[dict[str, Any]] = []
"""Attributes of envs that were saved; a state is an index of this list."""


class ScriptedAgents(MultiAgentEnv):
    """Plays `play` episodes, whatever the actions are, and keeps them with the actions that were sent.

    Args:
        seed: Seed of the first episode; each episode has another one.
        num_steps: Env steps at which an episode ends at the latest.
        apart: Whether agents "b" and "d" have other spaces than the others.
        fails: Probability of a step to fail, after which the env is replaced.
        episodes: List that the episodes are appended to; `None` is a new one.
    """

    possible_agents = AGENTS

    def __init__(
        self, seed: int = 0, num_steps: int = 12, apart: bool = False, fails: float = 0.0, episodes: Any = None
    ) -> None:
        self.rng, self.num_steps = np.random.default_rng(seed), num_steps
        obs_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_spaces = dict.fromkeys(AGENTS, obs_space)
        self.action_spaces = {agent: spaces.Discrete(5 if apart and agent in ("b", "d") else 3) for agent in AGENTS}
        self.episodes: list[Played] = [] if episodes is None else episodes
        self.fails, self.t = fails, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        seed = len(self.episodes) + int(self.rng.integers(2**30))
        self.script, self.t = play(np.random.default_rng(seed), self.num_steps), 0
        self.log = Played(self.script.observations[:1], self.script.infos[:1])
        self.episodes.append(self.log)
        return self.script.observations[0], self.script.infos[0]

    def step(self, action_dict: dict[Any, Any]) -> Any:
        script, t = self.script, self.t
        assert set(action_dict) == set(script.actions[t])
        if self.rng.random() < self.fails:
            raise OSError("the simulator is gone")
        self.log.actions.append({agent: int(action) for agent, action in action_dict.items()})
        parts = [script.observations[t + 1], script.rewards[t], script.terminateds[t], script.truncateds[t]]
        parts.append(script.infos[t + 1])
        for name, part in zip(("observations", "rewards", "terminateds", "truncateds", "infos"), parts, strict=True):
            getattr(self.log, name).append(part)
        self.t += 1
        return tuple(parts)

    def get_state(self) -> int:
        SAVED.append(copy.deepcopy(vars(self)))
        return len(SAVED) - 1

    def set_state(self, state: int) -> None:
        vars(self).update(copy.deepcopy(SAVED[state]))
