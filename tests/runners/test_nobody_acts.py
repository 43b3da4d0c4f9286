"""Resets and steps in which no agent is observed: the env gets an empty dict of actions, and open steps continue."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from at_least import all_of
from corral import DQNConfig, MultiAgentEnv, PPOConfig, SampleRequest, evaluate_policy
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode


class Road(MultiAgentEnv):
    """10 steps; the observation is the time. `empty` has the times at which nobody is on the road."""

    given: Any

    def __init__(self, empty: Any) -> None:
        self.possible_agents = self.agents = ["a", "b"]
        self.observation_space, self.action_space = gym.spaces.Box(0, 20, (1,), np.float32), gym.spaces.Discrete(2)
        self.empty, self.given = empty, []

    def see(self) -> dict[str, Any]:
        return {} if self.t in self.empty else dict.fromkeys("ab", np.array([self.t], np.float32))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.see(), {}

    def step(self, action_dict: dict[Any, Any]) -> Any:
        assert action_dict.keys() == self.see().keys()
        self.given.append(len(action_dict))
        self.t += 1
        rewards = dict.fromkeys("ab", 1.0) if 0 not in self.empty or self.t > 2 else {}
        return self.see(), rewards, {"__all__": self.t == 10}, {"__all__": False}, {}


EMPTY = {"gap": [4, 5], "empty reset": [0, 1], "both": [0, 1, 5], "last": [10], "before the last": [8, 9]}


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
def test_what_agents_see_and_get(empty: list[int]) -> None:
    config = PPOConfig().environment(Road, env_config={"empty": empty}).multi_agent(policies={"m"})
    with config.env_runners(num_envs_per_env_runner=2).debugging(seed=0).build() as algorithm:
        assert algorithm.env_runner is not None
        rollout = algorithm.env_runner.collect(SampleRequest(num_episodes=2))
        episodes = rollout.episodes()
        given = algorithm.env_runner.foreach_env(lambda env: env.given)
    assert [len(episode) for episode in episodes] == [10, 10] and not rollout.truncated.any()
    seen = [t for t in range(11) if t not in empty]
    # An agent that ended unobserved has its last observation as the final one.
    final = seen if 10 in seen else [*seen, seen[-1]]
    rewarded = range(1, 11) if 0 not in empty else range(3, 11)
    for episode in episodes:
        for agent in "ab":
            part = episode.agent_episodes[agent]
            assert part.get_observations().ravel().tolist() == final
            assert part.get_rewards().sum() == len(rewarded) and part.is_terminated
    assert all_of(counts[:10] == [2 * (t in seen) for t in range(10)] for counts in given)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_ppo_trains_and_is_evaluated(vectorization: Any) -> None:
    config = PPOConfig().environment(Road, env_config={"empty": EMPTY["both"]}).multi_agent(policies={"m"})
    config.env_runners(num_envs_per_env_runner=2, vectorization=vectorization)
    config.training(train_batch_size_per_learner=44, minibatch_size=20, num_epochs=1).evaluation(evaluation_duration=2)
    with config.debugging(seed=0).build() as algorithm:
        for _ in range(2):
            result = algorithm.train()
        assert result["env_runners"]["episode_len_mean"] == 10 and result["env_runners"]["episode_return_mean"] == 16
        assert algorithm.evaluate()["env_runners"]["episode_len_mean"] == 10
        found = evaluate_policy(algorithm, Road, env_config={"empty": EMPTY["both"]}, episodes=2)
        assert found.episode_lens == (10, 10) and found.episode_returns == (16.0, 16.0)


@pytest.mark.parametrize("memory", [False, True])
def test_dqn_trains_on_fragments_in_which_nobody_acts(memory: bool) -> None:
    config = DQNConfig().environment(Road, env_config={"empty": [*range(8)]}).multi_agent(policies={"m"})
    config.env_runners(num_envs_per_env_runner=1, rollout_fragment_length=2)
    config.training(num_steps_sampled_before_learning_starts=4, train_batch_size_per_learner=4)
    if memory:
        config.rl_module(model_config={"use_lstm": True, "max_seq_len": 4})
    with config.reporting(min_sample_timesteps_per_iteration=20).debugging(seed=0).build() as algorithm:
        for _ in range(3):
            result = algorithm.train()
        assert result["num_env_steps_sampled_lifetime"] >= 60
        assert result["env_runners"]["num_agent_steps_sampled_lifetime"] == pytest.approx(24, abs=8)


def test_an_episode_by_hand_that_nobody_has_joined_is_not_over() -> None:
    episode = MultiAgentEpisode("e")
    episode.add_env_reset({})
    episode.add_env_step({}, {}, {})
    assert not episode.is_done and episode.env_t == 1
    episode.add_env_step({"a": 1.0}, {}, {})
    episode.add_env_step({"a": 2.0}, {"a": 0}, {"a": 1.0}, terminateds={"__all__": True})
    assert episode.is_done and episode.get_return() == 1.0
