"""What a runner makes of a client whose envs have paces of their own, as digests that must not change.

The client gives episodes up, plays some that do not count, and tells two steps of an env in one message. It waits for
each answer, so that nothing depends on a clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from simulators import Playing, address_of, runner_of, served

from corral import ExternalEnv, PPOConfig
from corral.core.tree import leaves, map_tree
from corral.runners.requests import SampleRequest
from corral.runners.serving.client import MultiAgentPolicyClient, PolicyClient, _Agents
from random_agents import RandomAgents

EVENTS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")
REQUESTS: list[dict[str, Any]] = [
    *({"num_timesteps": n} for n in (30, 1, 4, 60)),
    {"num_episodes": 5},
    {"num_timesteps": 25, "force_reset": True},
    {"num_episodes": 1},
    {"num_timesteps": 90},
]


class Walk:
    """An env of one agent; an observation is the number of the env, of its episode, and of the step."""

    def __init__(self, number: int) -> None:
        self.rng, self.at = np.random.default_rng(number), np.array([number, 0, 0, 0], np.float32)

    def reset(self) -> Any:
        self.at += np.array([0, 1, -self.at[2], 0], np.float32)
        return self.at.copy(), {"new": int(self.at[1])}

    def step(self, action: Any) -> Any:
        self.at[2] += 1
        terminated, truncated = (self.rng.random(2) < 0.08).tolist()
        return self.at.copy(), float(self.rng.normal()), terminated, truncated, {"t": int(self.at[2])}


class Walks(RandomAgents):
    """An env of several agents, some of which have infos."""

    agents_now: Any

    def reset(self, **arguments: Any) -> Any:
        obs, _ = super().reset()
        self.agents_now = _Agents(obs)
        return obs, {agent: {"new": self.episode} for agent in list(obs)[::2]}

    def step(self, actions: Any) -> Any:
        obs, *rest, _ = self.agents_now.note(super().step({agent: int(action) for agent, action in actions.items()}))
        return obs, *rest, {"__common__": {"t": self.t}, **{agent: {"t": self.t} for agent in list(obs)[::2]}}


class Client(Playing):
    """Plays three envs, some of them in each message."""

    def __init__(self, address: str, several: bool) -> None:
        super().__init__()
        self._address, self._rng = address, np.random.default_rng(0)
        self._client_class: Any = MultiAgentPolicyClient if several else PolicyClient
        self._envs: list[Any] = [Walks({"seed": env, "num_kinds": 2}) if several else Walk(env) for env in range(3)]
        self._actions: dict[int, Any] = {}  # of the envs in an episode

    def connect_and_play(self) -> None:
        with self._client_class(self._address, 3) as client:
            while True:
                chosen = self._rng.permutation(3)[: self._rng.integers(1, 4)].tolist()
                if entries := [entry for env in chosen for entry in self._next(client, env)]:
                    self._exchange(client, *map(list, zip(*entries, strict=True)))

    def _exchange(self, client: Any, envs: Any, obs: Any, rewards: Any, *rest: Any) -> None:
        terminated, truncated, infos, begins, counts = rest
        flags = {"terminated": terminated, "truncated": truncated, "begins": begins, "counts": counts}
        obs = obs if client.HAS_AGENTS else np.array(obs)
        found = iter(client.exchange(envs, obs, rewards=rewards, infos=infos, **flags))
        for env, *ends in zip(envs, terminated, truncated, strict=True):
            actions = next(found) if client.HAS_AGENTS or not any(ends) else None
            if not any(map(self._is_over, ends)):
                self._actions[env] = actions

    @staticmethod
    def _is_over(flag: Any) -> bool:
        return bool(flag.get("__all__") if isinstance(flag, dict) else flag)

    def _next(self, client: Any, env: int) -> list[tuple[Any, ...]]:
        """Step an env, or begin its next episode, or both, and return the entries for it."""
        rng, played, found = self._rng, self._envs[env], []
        if env in self._actions and rng.random() < 0.05:
            client.drop([env])
            del self._actions[env]
        if env in self._actions:
            obs, *rest = played.step(self._actions.pop(env))
            found.append((env, obs, *rest, False, True))
            if not any(map(self._is_over, rest[1:3])) or rng.random() < 0.3:
                return found
        obs, infos = played.reset()
        nothing: Any = {} if client.HAS_AGENTS else 0
        return [*found, (env, obs, nothing, nothing, nothing, infos, True, bool(rng.random() < 0.8))]


def shown(rollout: Any, prefix: str = "") -> list[str]:
    """Return all columns of a rollout that depend on no clock and no weights, its infos and its episodes, as text."""
    found = [
        f"{name} {[(leaf.shape, leaf.tolist()) for leaf in leaves(column)]}"
        for name, column in sorted(rollout.columns.items())
        if name not in ("row_times_s", "dist_inputs", "logp")
    ]
    found += [f"{name} {getattr(rollout, name)}" for name in ("num_rows", "num_env_steps", "broken", "continues")]
    found.append(f"{list(rollout.notes)}")
    found.append(f"{[(row, sorted(infos.of_lanes.items())) for row, infos in rollout.info_rows.items()]}")
    for one in rollout.episodes():
        found.append(f"{one.id_} {one.t} {len(one)} {one.get_return()} {one.is_done} {one.get_infos()}")
    modules = getattr(rollout, "modules", {})
    found += [str(step) for step in rollout.step_infos()]
    found = [f"{prefix}{text}" for text in found]
    return found + [text for name, part in modules.items() for text in shown(part, f"{prefix}{name} ")]


def configured(several: bool) -> Any:
    if not several:
        return served(num_envs=3)
    spaces = {name: getattr(Walks({"num_kinds": 2}), name) for name in ("observation_spaces", "action_spaces")}
    config = PPOConfig().environment(ExternalEnv, env_config={"address": "127.0.0.1:0", **spaces})
    config.multi_agent(policies={"even", "odd"}, policy_mapping_fn=lambda agent, _: ("even", "odd")[int(agent[1]) % 2])
    return config.env_runners(num_envs_per_env_runner=3).debugging(seed=0)


def sample(several: bool, on_events: Mapping[str, Any], **settings: Any) -> str:
    """Return what the rollouts of some requests hold, and what the runner counts, as text."""
    found: list[str] = []
    with runner_of(configured(several).callbacks(**on_events).env_runners(**settings)) as runner:
        client = Client(address_of(runner), several).start()
        for wanted in REQUESTS:
            found += shown(runner.collect(SampleRequest(**wanted, random_actions=True, with_infos=True)))
            ended = runner.last_statistics
            found.append(f"{ended.returns.tolist()} {ended.lengths.tolist()} {ended.env_indices.tolist()}")
            found.append(f"{runner.num_episodes_over.tolist()} {runner.num_env_steps_lost} {runner.timestep}")
        found += [f"{name} {value!r}" for name, value in sorted(runner.metrics.reduce().items()) if "_sec" not in name]
        runner.stop()
        client.join()
    return "\n".join(found)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


DIGESTS: dict[tuple[bool, str], tuple[str, str]] = {  # of what was sampled, and of the events
    (False, "truncate_episodes"): ("d75fb3c7107a", "a2a24bb3b833"),
    (False, "complete_episodes"): ("95303c4aabe9", "68c654b87402"),
    (True, "truncate_episodes"): ("925d416119ee", "4d0dd8f0af51"),
    (True, "complete_episodes"): ("624015a71f33", "3d01ddade2d5"),
}


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("several", [False, True])
def test_rollouts_counts_and_events(several: bool, batch_mode: str) -> None:
    trace: list[str] = []

    def noting(event: str) -> Callable[..., None]:
        def note(episode: Any, env_index: int) -> None:
            agents = getattr(episode, "agent_episodes", {})
            lengths = {str(agent): (part.t, len(part)) for agent, part in agents.items()}
            last = ""
            if len(episode):
                last = f"{map_tree(np.ndarray.tolist, episode.get_observations(-1))} {episode.get_infos(-1)}"
            trace.append(f"{event} {env_index} {episode.id_} {episode.t} {len(episode)} {lengths} {last}")
            trace.append(f"{episode.get_return()}")

        return note

    heard = sample(several, {event: noting(event) for event in EVENTS}, batch_mode=batch_mode)
    assert len(trace) > 400
    assert (digest(heard), digest("\n".join(trace))) == DIGESTS[several, batch_mode]
