"""Random episodes of several agents as dicts by agent, and what their getters must return, computed step by step."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from corral.data.episodes.multi_agent_episode import MultiAgentEpisode

AGENTS = ("a", "b", 2, "d")


@dataclass
class Played:
    """What an env with several agents was sent and gave, one entry for each env step; observations have one more."""

    observations: list[dict[Any, Any]] = field(default_factory=list)
    infos: list[dict[Any, Any]] = field(default_factory=list)
    actions: list[dict[Any, Any]] = field(default_factory=list)
    rewards: list[dict[Any, float]] = field(default_factory=list)
    terminateds: list[dict[Any, bool]] = field(default_factory=list)
    truncateds: list[dict[Any, bool]] = field(default_factory=list)
    outputs: list[dict[Any, dict[str, Any]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.actions)


def play(rng: random.Random | np.random.Generator, num_steps: int = 12, *, ends: bool = True) -> Played:
    """Play at random: agents join late, wait for turns, get rewards without being observed, and die, also unobserved.

    Every observation and action is a different number, so that nothing can be mistaken for something else.
    """
    played, count = Played(), iter(range(1, 100_000))
    waiting, gone = set(), set()  # agents that acted and were not observed since; agents that ended
    to_act = {agent for agent in AGENTS if rng.random() < 0.5} or {AGENTS[0]}
    known = set(to_act)

    def observed(agents: set[Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        obs = {agent: np.array([next(count), 0], np.float32) for agent in AGENTS if agent in agents}
        return obs, {agent: {"at": next(count)} for agent in obs if rng.random() < 0.5}

    for part, new in zip((played.observations, played.infos), observed(to_act), strict=True):
        part.append(new)
    for t in range(num_steps):
        played.actions.append({agent: next(count) for agent in AGENTS if agent in to_act})
        played.outputs.append({agent: {"v": float(next(count))} for agent in to_act})
        waiting |= to_act
        over = ends and (t == num_steps - 1 or (t > 2 and rng.random() < 0.03))
        dies = {agent for agent in waiting if rng.random() < 0.06}
        truncated = {agent for agent in dies if rng.random() < 0.5}
        seen = {agent for agent in waiting if rng.random() < 0.6}
        joins = {agent for agent in AGENTS if agent not in known and rng.random() < 0.1}
        if not over and not (seen | joins) - dies:  # somebody has to act
            seen |= {agent for agent in waiting - dies} or {agent for agent in waiting}
            dies -= seen
            truncated &= dies
        played.rewards.append(
            {agent: float(next(count)) for agent in AGENTS if agent not in gone and rng.random() < 0.6}
        )
        how = rng.random() < 0.5
        played.terminateds.append({agent: True for agent in dies - truncated} | {"__all__": over and how})
        played.truncateds.append({agent: True for agent in truncated} | {"__all__": over and not how})
        for part, new in zip((played.observations, played.infos), observed(seen | joins), strict=True):
            part.append(new)
        waiting, gone, known = waiting - seen - dies, gone | dies, known | joins
        to_act = (seen | joins) - dies
        if over or not (to_act or waiting):
            break
    return played


def build(played: Played, start: int = 0, stop: int | None = None, episode: MultiAgentEpisode | None = None) -> Any:
    """Return an episode of env steps from `start` to `stop`, added one by one to a new one or to the one given."""
    if episode is None:
        episode = MultiAgentEpisode("e", agent_to_module_mapping_fn=module_of)
        episode.add_env_reset(played.observations[0], played.infos[0])
    for t in range(start, len(played) if stop is None else stop):
        episode.add_env_step(
            played.observations[t + 1],
            played.actions[t],
            played.rewards[t],
            played.infos[t + 1],
            terminateds=played.terminateds[t],
            truncateds=played.truncateds[t],
            extra_model_outputs=played.outputs[t],
        )
    return episode


def module_of(agent_id: Any, episode: Any = None) -> str:
    return "main" if agent_id in ("a", 2) else "other"


@dataclass
class AgentSteps:
    """The steps of one agent, from the definition.

    Attributes:
        obs: Its observations, with the env step at which each came.
        steps: Action, reward, outputs, and env step of the action of each step that has ended.
        hanging: The step that has not ended.
        ended: Whether it was terminated, and truncated.
    """

    obs: list[tuple[int, Any]] = field(default_factory=list)
    infos: list[Any] = field(default_factory=list)
    steps: list[tuple[Any, float, float, int]] = field(default_factory=list)
    hanging: tuple[Any, float, float, int] | None = None
    early: float = 0.0
    ended: tuple[bool, bool] = (False, False)


def reference(played: Played, stop: int | None = None) -> dict[Any, AgentSteps]:
    """Return the steps of each agent in the first env steps, by a loop over env steps and agents."""
    agents: dict[Any, AgentSteps] = defaultdict(AgentSteps)
    for t in range(-1, len(played) if stop is None else stop):
        obs, infos = played.observations[t + 1], played.infos[t + 1]
        ends = [played.terminateds[t], played.truncateds[t]] if t >= 0 else [{}, {}]
        for agent in AGENTS:
            found = agents[agent]
            if t >= 0 and agent in played.actions[t]:
                found.hanging = played.actions[t][agent], found.early, played.outputs[t][agent]["v"], t
                found.early = 0.0
            reward = played.rewards[t].get(agent, 0.0) if t >= 0 else 0.0
            own = bool(ends[0].get(agent)), bool(ends[1].get(agent))
            ended = own if any(own) else (bool(ends[0].get("__all__")), bool(ends[1].get("__all__")))
            if found.hanging is None:
                if agent in obs and not any(ended):
                    found.obs.append((t + 1, obs[agent]))
                    found.infos.append(infos.get(agent, {}))
                if not any(found.ended):
                    found.early += reward
                continue
            action, before, output, at = found.hanging
            found.hanging = action, before + reward, output, at
            if agent in obs or any(ended):
                found.obs.append((t + 1, obs.get(agent, found.obs[-1][1])))
                found.infos.append(infos.get(agent, {}))
                found.steps.append(found.hanging)
                found.hanging = None
                found.ended = ended
    return {agent: found for agent, found in agents.items() if found.obs}


def same(a: Any, b: Any) -> bool:
    """Return whether nested dicts and lists of arrays are equal."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b))
