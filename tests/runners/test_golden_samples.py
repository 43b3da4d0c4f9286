"""What each way of stepping samples and fires, as digests that must not change; actions are drawn at random."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import ExternalEnv, PPOConfig
from corral.envs.tensor_env import TensorVectorEnv
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.runners.serving.client import MultiAgentPolicyClient, PolicyClient, drive
from corral.testing import CountingEnv
from random_agents import RandomAgents

EVENTS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")
COUNTING, AGENTS = {"episode_length": 3, "stagger": True}, {"seed": 3, "num_kinds": 2}


class Line(TensorVectorEnv):
    """Sub-env i counts its steps from i on, and ends after 3 + i, in turn terminated and truncated."""

    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        self.num_envs, self.device, self.starts = num_envs, torch.device(device), torch.arange(num_envs)
        self.single_observation_space: Any = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space: Any = spaces.Discrete(3)

    def observe(self) -> Any:
        return self.count[:, None].float()

    def reset(self, **arguments: Any) -> Any:
        self.count, self.num_ends = self.starts.clone(), torch.zeros(self.num_envs, dtype=torch.int64)
        return self.observe(), {}

    def step(self, actions: Any) -> Any:
        self.count = self.count + 1
        final, over = self.observe(), self.count - self.starts >= 3 + self.starts
        terminated = over & (self.num_ends % 2 == 0)
        self.num_ends += over
        self.count = torch.where(over, self.starts, self.count)
        return self.observe(), final[:, 0] + 10, terminated, over & ~terminated, {"final_obs": final}


class Lines(Line):
    """Two agents in each sub-env; the second one sees twice the count."""

    possible_agents = ("a", "b")

    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        super().__init__(num_envs, device)
        for name in ("single_observation_space", "single_action_space"):
            setattr(self, name, spaces.Dict(dict.fromkeys(self.possible_agents, getattr(self, name))))

    @staticmethod
    def for_both(value: Any) -> Any:
        return {"a": value, "b": 2 * value}

    def reset(self, **arguments: Any) -> Any:
        return self.for_both(super().reset()[0]), {}

    def step(self, actions: Any) -> Any:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        final = {"final_obs": self.for_both(infos["final_obs"])}
        return self.for_both(obs), self.for_both(rewards), terminated, truncated, final


def module_of(agent: Any, episode: Any) -> str:
    return "even" if str(agent)[-1] in "024b" else "odd"


def of_clients(env: Any, client: Any) -> tuple[Any, dict[str, Any], Callable[[EnvRunner], None]]:
    """Return env and env config of a policy server, and what lets one client play an env."""
    several = hasattr(env, "possible_agents")
    names = [f"{kind}_space{'s' * several}" for kind in ("observation", "action")]

    def play(runner: EnvRunner) -> None:
        def run() -> None:
            with client(runner.env.server.address) as connected:  # type: ignore[attr-defined]
                drive(connected, [env])

        threading.Thread(target=run, daemon=True).start()

    return ExternalEnv, {"address": "127.0.0.1:0", **{name: getattr(env, name) for name in names}}, play


FORMS: dict[str, Any] = {
    "one agent, next step": lambda: (CountingEnv, COUNTING, {"autoreset_mode": "next_step"}),
    "one agent, same step": lambda: (CountingEnv, COUNTING, {"autoreset_mode": "same_step"}),
    "several agents, next step": lambda: (RandomAgents, AGENTS, {}),
    "tensors": lambda: (Line, {}, {}),
    "tensors of several agents, same step": lambda: (Lines, {}, {}),
    "clients": lambda: of_clients(CountingEnv(COUNTING), PolicyClient),
    "clients of several agents": lambda: of_clients(RandomAgents(AGENTS), MultiAgentPolicyClient),
}


def sample(form: str, on_events: Mapping[str, Any]) -> str:
    """Return all valid steps of some samples of a form, and the episodes that they belong to, as text."""
    env, env_config, settings = FORMS[form]()
    config = PPOConfig().environment(env, env_config=env_config, disable_env_checking=True).debugging(seed=7)
    config.env_runners(num_envs_per_env_runner=1 if callable(settings) else 3).callbacks(**on_events)
    if "several" in form:
        config.multi_agent(policies=["even", "odd"], policy_mapping_fn=module_of)
    if not callable(settings):
        config.env_runners(**settings)
    runner, found = EnvRunner(config.freeze()), []
    try:
        if callable(settings):
            settings(runner)
        for wanted in ({"num_timesteps": 20}, {"num_timesteps": 1}, {"num_episodes": 5}, {"num_timesteps": 17}):
            rollout = runner.collect(SampleRequest(**wanted, random_actions=True))
            for module_id, part in rollout.by_module().items():
                columns = [part[name] for name in ("obs", "actions", "rewards", "terminated", "truncated")]
                for lane, t in np.argwhere(part.valid.T).tolist():
                    step = [column[t, lane].tolist() for column in columns]
                    found.append(f"{module_id} {lane} {step} {np.ravel(part.next_obs_at(t, lane)).tolist()}")
            found += [f"{one.id_} {one.t} {len(one)} {one.get_return()} {one.is_done}" for one in rollout.episodes()]
    finally:
        runner.stop()
    return "\n".join(found)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


DIGESTS = {  # of the steps, and of the events
    "one agent, next step": ("d53b8b239487", "3f5dae3c89d0"),
    "one agent, same step": ("e1ba220c3aa6", "85070ebeeb52"),
    "several agents, next step": ("901eec7144a7", "9bd3e20f79c7"),
    "tensors": ("5bc4d1715b11", "85070ebeeb52"),
    "tensors of several agents, same step": ("9a6c36406696", "bad17665d79d"),
    "clients": ("28909b7e30f6", "4b95be0f54b2"),
    "clients of several agents": ("7854cd24fb78", "467d949f18fa"),
}


@pytest.mark.parametrize("form", FORMS)
def test_steps_and_events_of_each_form(form: str) -> None:
    trace: list[str] = []

    def noting(event: str) -> Callable[..., None]:
        def note(episode: Any, env_index: int) -> None:
            agents = getattr(episode, "agent_episodes", {})
            lengths = {str(agent): (part.t, len(part)) for agent, part in agents.items()}
            trace.append(f"{event} {env_index} {episode.id_} {episode.t} {len(episode)} {lengths}")

        return note

    heard = sample(form, {event: noting(event) for event in EVENTS})
    assert heard.count("\n") > 40 and len(trace) > 30
    assert (digest(heard), digest("\n".join(trace))) == DIGESTS[form]
    if "tensors" in form:  # which stay on their device without callbacks
        assert sample(form, {}) == heard
