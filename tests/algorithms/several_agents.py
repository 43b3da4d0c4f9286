"""A small env of several agents that can be restored, and rules that play in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from corral import (
    Algorithm,
    AlgorithmConfig,
    APPOConfig,
    DQNConfig,
    HeuristicModule,
    IMPALAConfig,
    MultiAgentEnv,
    PPOConfig,
    RandomModule,
    SACConfig,
)

AGENTS = ("red", "blue", "green")


class Signals(MultiAgentEnv):
    """Each agent sees a signal and is rewarded for repeating it; each stays for a number of steps of its own.

    With `box=True` actions are numbers, rewarded by how near they are.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        settings = dict(config or {})
        self.box, self.agent_ids = settings.get("box", False), tuple(settings.get("agents", AGENTS))
        self.possible_agents = self.agents = list(self.agent_ids)
        self.observation_spaces = {agent: spaces.Box(0, 1, (2,), np.float32) for agent in self.agent_ids}
        action_space: Any = spaces.Box(-1, 1, (1,), np.float32) if self.box else spaces.Discrete(2)
        self.action_spaces = dict.fromkeys(self.agent_ids, action_space)
        self.signals, self.age = dict.fromkeys(self.agent_ids, 0), 0

    def _obs(self, agent: str) -> Any:
        self.signals[agent] = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.signals[agent]]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.age, self.agents = 0, list(self.agent_ids)
        return {agent: self._obs(agent) for agent in self.agents}, {}

    def step(self, action_dict: dict[str, Any]) -> Any:
        self.age += 1
        rewards = {
            agent: 1 - abs(float(np.squeeze(action)) - self.signals[agent]) for agent, action in action_dict.items()
        }
        terminateds: dict[Any, bool] = {agent: self.age >= 5 + 2 * self.agent_ids.index(agent) for agent in action_dict}
        obs = {agent: self._obs(agent) for agent in action_dict}
        self.agents = [agent for agent in action_dict if not terminateds[agent]]
        terminateds["__all__"] = not self.agents
        return obs, rewards, terminateds, {"__all__": False}, {}

    def get_state(self) -> dict[str, Any]:
        rng = self.np_random.bit_generator.state
        return {"signals": dict(self.signals), "age": self.age, "agents": list(self.agents), "rng": _as_text(rng)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.signals, self.age, self.agents = dict(state["signals"]), state["age"], list(state["agents"])
        self.np_random.bit_generator.state = _as_numbers(state["rng"])


def _as_text(state: Any) -> Any:
    return {
        **state,
        "state": {name: str(number) for name, number in state["state"].items()},
    }


def _as_numbers(state: Any) -> Any:
    return {**state, "state": {name: int(number) for name, number in state["state"].items()}}


class Repeats(HeuristicModule):
    """Repeats the signal."""

    def choose_actions(self, obs: Any, rng: np.random.Generator) -> Any:
        return obs.argmax(-1)


def module_of(agent_id: str, episode: Any, **_: Any) -> str:
    """Map red and blue to modules of their own, and all others to `rest`."""
    return agent_id if agent_id in ("red", "blue") else "rest"


def all_to_red(agent_id: str, episode: Any, **_: Any) -> str:
    """Map all agents to the module `red`."""
    return "red"


CONFIGS: list[Any] = [PPOConfig, APPOConfig, pytest.param(IMPALAConfig, marks=pytest.mark.slow), DQNConfig, SACConfig]
SMALL = {"fcnet_hiddens": [8]}


def config_of(base: type[AlgorithmConfig], **multi_agent: Any) -> AlgorithmConfig:
    """Return a small config with the modules `red`, `blue` and, without a network, `rest`."""
    config = (
        base()
        .environment(Signals, env_config={"box": base is SACConfig})
        .env_runners(num_envs_per_env_runner=2)
        .rl_module(model_config=SMALL)
        .multi_agent(
            **{
                "policies": {"red": {}, "blue": {}, "rest": {"module_class": RandomModule}},
                "policy_mapping_fn": module_of,
                **multi_agent,
            }
        )
        .debugging(seed=3)
    )
    if base is PPOConfig:
        return config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=2)
    if base in (APPOConfig, IMPALAConfig):
        config.env_runners(num_env_runners=0, rollout_fragment_length=8).training(train_batch_size_per_learner=16)
        if base is APPOConfig:
            config.training(use_kl_loss=True, circular_buffer_num_batches=2, target_network_update_freq=3, tau=0.5)
        return config.reporting(min_sample_timesteps_per_iteration=48)
    settings: dict[str, Any] = {"num_steps_sampled_before_learning_starts": 20, "train_batch_size_per_learner": 16}
    settings["training_intensity"] = 4.0  # an update every 4 env steps
    return config.training(**settings).reporting(min_sample_timesteps_per_iteration=40)


def weights_of(algo: Algorithm) -> dict[str, dict[str, Any]]:
    weights = algo.learner_group.get_weights()
    return {module_id: {name: array.copy() for name, array in part.items()} for module_id, part in weights.items()}


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
