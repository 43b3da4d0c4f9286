"""Nothing of an episode is left in the next one: rewards of agents, states of modules, and returns of transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral import (
    FrameStack,
    MultiAgentEnv,
    NormalizeRewards,
    PPOConfig,
    PrevActionsPrevRewards,
    evaluate_policy,
    load_policy,
)
from corral.runners.requests import SampleRequest
from corral.testing import FaultyEnv
from small import small

SPACES: Any = spaces.Box(-1.0, 1.0, (1,), np.float32), spaces.Discrete(3)


class RewardedAtTheEnd(MultiAgentEnv):
    """Agent "b" acts only in the first of three steps, and is rewarded in the last one, in which its episode ends."""

    seen: list[float]

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.possible_agents = self.agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.agents, SPACES[0])
        self.action_spaces = dict.fromkeys(self.agents, SPACES[1])

    def _obs(self, *agents: str) -> Any:
        return {agent: np.zeros(1, np.float32) for agent in agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._obs("a", "b"), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        rewards = {"a": 1.0, "b": 10.0} if self.t == 3 else {"a": 1.0}
        return self._obs("a"), rewards, {"__all__": self.t == 3}, {"__all__": False}, {}


@pytest.mark.parametrize("num_envs", [1, 2])
def test_rewards_of_agents_end_with_their_episode(num_envs: int) -> None:
    config = PPOConfig().environment(RewardedAtTheEnd).rl_module(model_config={"fcnet_hiddens": [4]})
    config.multi_agent(policies=["shared"]).env_runners(transforms=[PrevActionsPrevRewards()])
    with config.build() as algo:
        policies = algo.acting.agent_policies()
        policy = policies.policies["shared"]
        seen, act = [], policy.act

        def noting(obs: Any, states: Any, *, explore: bool) -> Any:
            seen.extend(states["rewards"].tolist())
            return act(obs, states, explore=explore)

        policy.act = noting
        evaluate_policy(policies, RewardedAtTheEnd, episodes=3 * num_envs, num_envs=num_envs)
    assert max(seen) == 1.0 and min(seen) == 0.0


def test_a_reset_policy_begins_whatever_the_call_says(tmp_path: Path) -> None:
    config = PPOConfig().environment("Pendulum-v1").env_runners(transforms=[FrameStack(3)]).debugging(seed=0)
    with config.rl_module(model_config={"fcnet_hiddens": [4]}).build() as algo:
        policy = load_policy(algo.save(tmp_path / "saved"))
    obs, nowhere = np.ones((2, 3), np.float32), np.zeros(2, np.bool_)
    states = policy.initial_states(2)
    first = policy.act(obs, states)[0]
    assert not np.array_equal(first, policy.act(obs, {**states, "begins": nowhere})[0])  # frames of before are zeros
    policy.batch(-obs)
    policy.reset()
    assert np.array_equal(policy.batch(obs, begins=nowhere), first)


def test_a_policy_begins_again_where_a_sub_env_was_restarted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small(transforms=[FrameStack(2)])
    with config.build() as algo:
        policy = load_policy(algo.save(tmp_path / "saved"))
    seen, act = [], policy.act

    def noting(obs: Any, states: Any, *, explore: bool) -> Any:
        seen.extend(zip(obs[:, 1].tolist(), states["begins"].tolist(), strict=True))
        return act(obs, states, explore=explore)

    policy.act = noting  # type: ignore[method-assign]
    restarted = {"restart_failed_sub_environments": True}
    evaluate_policy(policy, FaultyEnv, episodes=6, num_envs=2, env_config={"episode_length": 3}, **restarted)
    assert "sub-env 1" in caplog.text and "It was restarted" in caplog.text
    assert [begins for _, begins in seen] == [t == 0 for t, _ in seen]


class OneReward(gym.Env[Any, Any]):
    """Rewards every step with 1, in episodes without an end."""

    observation_space, action_space = SPACES

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize(("force_reset", "expected"), [(False, [4.0, 5.0, 6.0]), (True, [1.0, 2.0, 3.0])])
def test_normalized_returns_begin_again_where_all_envs_are_reset(
    force_reset: bool, expected: list[float], make_runner: Any
) -> None:
    runner = make_runner(OneReward, num_envs=2, transforms=[NormalizeRewards(gamma=1.0)])
    runner.collect(SampleRequest(num_timesteps=6))
    rollout = runner.collect(SampleRequest(num_timesteps=6, force_reset=force_reset))
    measured = rollout.measured["NormalizeRewards"]
    assert measured["mean/return"] == np.mean(expected) and measured["count"] == 6
