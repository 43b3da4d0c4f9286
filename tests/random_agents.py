"""An env whose agents join, wait, are rewarded and end at random, and a slow reference of what they experienced."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from corral.envs.multi_agent_env import MultiAgentEnv


@dataclass
class Experience:
    """One step of one agent: what it saw, did and got until it saw something again or ended."""

    agent: Any
    episode: int
    obs: float
    action: int
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    next_obs: float | None = None  # None while the outcome is not known


@dataclass
class Log:
    """What the agents of one sub-env experienced, by agent, and the returns of all agents in finished episodes."""

    steps: dict[Any, list[Experience]] = field(default_factory=dict)
    returns: list[dict[Any, float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class RandomAgents(MultiAgentEnv):
    """Agents `a0`, `a1`, ...; each observation is another number, so that none can be mistaken for another."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.possible_agents = [f"a{i}" for i in range(config.get("num_agents", 4))]
        self.agents = self.possible_agents
        kinds = config.get("num_kinds", 1)
        self.observation_spaces = {
            agent: spaces.Box(-np.inf, np.inf, (1 + i % kinds,), np.float32) for i, agent in enumerate(self.agents)
        }
        self.action_spaces = {agent: spaces.Discrete(3 + i % kinds) for i, agent in enumerate(self.agents)}
        self.rng = np.random.default_rng(1000 * config.get("seed", 0) + getattr(config, "vector_index", 0))
        self.together = config.get("together", False)
        self.fails_at = config.get("fails_at", -1)
        self.log, self.number, self.episode, self.num_steps = Log(), 0.0, -1, 0

    def _see(self, agent: str) -> Any:
        self.number += 1.0
        self.seen[agent] = self.number
        return np.full(self.observation_spaces[agent].shape, self.number, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.t = self.episode + 1, 0
        self.dead: set[str] = set()
        self.joined: set[str] = set()  # the agents that have acted
        self.seen: dict[str, float] = {}
        self.open: dict[str, Experience] = {}
        self.early: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        return self._shown({agent: self._see(agent) for agent in self._next_agents()}), {}

    def _shown(self, obs: dict[str, Any]) -> dict[str, Any]:
        self.to_act = obs.keys() - self.dead
        return obs

    def _next_agents(self) -> list[str]:
        alive = [agent for agent in self.possible_agents if agent not in self.dead]
        if self.together or not alive:
            return alive
        return [alive[i] for i in sorted(self.rng.choice(len(alive), self.rng.integers(1, len(alive) + 1), False))]

    def step(self, actions: dict[str, int]) -> Any:
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            for step in self.open.values():  # their steps, and what is open, come to nothing
                self.log.steps[step.agent].remove(step)
            raise RuntimeError("this sub-env fails")
        self.t += 1
        assert actions.keys() == self.to_act, (actions, self.to_act)
        for agent, action in actions.items():
            assert self.action_spaces[agent].contains(action)
            self.open[agent] = Experience(
                agent, self.episode, self.seen[agent], int(action), self.early.pop(agent, 0.0)
            )
            self.joined.add(agent)
            self.log.steps.setdefault(agent, []).append(self.open[agent])
        alive = [agent for agent in self.possible_agents if agent not in self.dead]
        rewards, rng = self._reward(alive), self.rng
        ends = {agent: bool(rng.random() < 0.5) for agent in alive if agent in self.seen and rng.random() < 0.08}
        self.dead |= ends.keys()
        over, terminates = rng.random() < 0.06 or len(self.dead) == len(self.possible_agents), bool(rng.random() < 0.5)
        observed = {agent for agent in ends if rng.random() < 0.5}
        if not over or rng.random() < 0.7:
            observed |= set(self._next_agents())
        obs = {agent: self._see(agent) for agent in self.possible_agents if agent in observed}
        outcomes = {**(dict.fromkeys(self.open, terminates) if over else {}), **ends}
        self._close(obs, outcomes)
        if over:
            self.log.returns.append({agent: self.totals.get(agent, 0.0) for agent in self.joined})
            self.log.lengths.append(self.t)
        terminated = {**ends, "__all__": over and terminates}
        truncated = {**{agent: not value for agent, value in ends.items()}, "__all__": over and not terminates}
        return self._shown(obs), rewards, terminated, truncated, {}

    def _reward(self, alive: list[str]) -> dict[str, float]:
        rewards = {a: float(self.rng.integers(1, 100)) for a in alive if self.together or self.rng.random() < 0.6}
        for agent, reward in rewards.items():
            self.totals[agent] = self.totals.get(agent, 0.0) + reward
            if agent in self.open:
                self.open[agent].reward += reward
            else:
                self.early[agent] = self.early.get(agent, 0.0) + reward
        return rewards

    def _close(self, obs: dict[str, Any], outcomes: dict[str, bool]) -> None:
        """Close the steps of agents that were observed, or that ended: by termination where the outcome is True."""
        for agent, step in list(self.open.items()):
            if agent in outcomes:
                step.terminated, step.truncated = outcomes[agent], not outcomes[agent]
            if agent in obs or agent in outcomes:
                step.next_obs = self.seen[agent]
                del self.open[agent]

    _KEPT = (
        "rng",
        "number",
        "episode",
        "num_steps",
        "t",
        "dead",
        "joined",
        "seen",
        "open",
        "early",
        "totals",
        "to_act",
    )

    def get_state(self) -> dict[str, Any]:
        return {"pickled": np.frombuffer(pickle.dumps({name: getattr(self, name) for name in self._KEPT}), np.uint8)}

    def set_state(self, state: dict[str, Any]) -> None:
        vars(self).update(pickle.loads(state["pickled"].tobytes()))
