"""Discrete observations that leave out 0, with several agents: rows that no agent wrote hold numbers of the space."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import DQNConfig, FrameStack, MultiAgentEnv, PPOConfig

SPACES: dict[str, gym.Space[Any]] = {
    "Discrete": gym.spaces.Discrete(6, start=1),
    "negative": gym.spaces.Discrete(3, start=-5),
    "MultiDiscrete": gym.spaces.MultiDiscrete([3, 4], start=[2, 5]),
    "nested": gym.spaces.Dict({"die": gym.spaces.Discrete(6, start=1), "x": gym.spaces.Box(-1, 1, (2,), np.float32)}),
}


class InTurn(MultiAgentEnv):
    """Agents `a` and `b` act in turn, and `c` never does."""

    def __init__(self, space: str) -> None:
        self.possible_agents = self.agents = ["a", "b", "c"]
        self.observation_spaces = dict.fromkeys("abc", SPACES[space])
        self.action_spaces = dict.fromkeys("abc", gym.spaces.Discrete(2, start=3))

    def see(self) -> dict[str, Any]:
        agent = "ab"[self.t % 2]
        return {agent: self.observation_spaces[agent].sample()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.see(), {}

    def step(self, action_dict: Any) -> Any:
        self.t += 1
        return self.see(), dict.fromkeys(action_dict, 1.0), {"__all__": self.t == 4}, {"__all__": False}, {}


@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("space", SPACES)
def test_agents_train(space: str, stacks: bool) -> None:
    transforms: Any = {"transforms": [FrameStack(2)]} if stacks else {}
    ppo = PPOConfig().training(train_batch_size_per_learner=8, minibatch_size=8, num_epochs=1)
    dqn = DQNConfig().training(num_steps_sampled_before_learning_starts=8, train_batch_size_per_learner=8)
    for config in (ppo, dqn):
        config.environment(InTurn, env_config={"space": space}).multi_agent(policies={"m"}).debugging(seed=0)
        config.env_runners(num_envs_per_env_runner=2, **transforms).reporting(min_sample_timesteps_per_iteration=16)
        with config.build() as algorithm:
            for _ in range(2):
                algorithm.train()
            assert algorithm.train()["env_runners"]["episode_return_mean"] == 4.0
