"""Evaluation may map agents to other modules than training does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from corral import PPOConfig, RandomModule, make_multi_agent


def first_is_main(agent_id: Any, episode: Any) -> str:
    return ["main", "random"][agent_id]


@pytest.mark.parametrize("num_runners", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_evaluation_plays_with_its_own_mapping(num_runners: int) -> None:
    config = (
        PPOConfig()
        .environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
        .multi_agent(
            policies={"main": {}, "random": {"module_class": RandomModule}},
            policy_mapping_fn=lambda agent_id, episode: "main",
        )
        .training(train_batch_size_per_learner=64, num_epochs=1)
        .evaluation(
            evaluation_duration=4,
            evaluation_num_env_runners=num_runners,
            evaluation_config={"policy_mapping_fn": first_is_main},
        )
    )
    with config.build() as algo:
        training = algo.train()["env_runners"]["num_module_steps_sampled"]
        assert training["main"] >= 128 and training["random"] == 0
        evaluation = algo.evaluate()["env_runners"]
        assert all(evaluation["num_module_steps_sampled"][name] >= 4 * 8 for name in ("main", "random"))
        returns = evaluation["module_episode_return_mean"]
        assert returns["main"] + returns["random"] == pytest.approx(evaluation["episode_return_mean"])


@pytest.mark.slow
def test_evaluation_in_parallel_with_training_plays_the_same_seeds_with_its_own_mapping() -> None:
    config = (
        PPOConfig()
        .environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
        .multi_agent(
            policies={"main": {}, "random": {"module_class": RandomModule}},
            policy_mapping_fn=lambda agent_id, episode: "main",
        )
        .rl_module(model_config={"fcnet_hiddens": [4]})
        .training(train_batch_size_per_learner=64, num_epochs=1, lr=0.0)
        .env_runners(num_env_runners=1, num_envs_per_env_runner=2)
        .evaluation(
            evaluation_interval=1,
            evaluation_num_env_runners=1,
            evaluation_parallel_to_training=True,
            evaluation_seeds=[3, 4, 5, 6],
            evaluation_config={"policy_mapping_fn": first_is_main},
        )
        .engine("process")
        .debugging(seed=0)
    )
    with config.build() as algo:
        results = [algo.train() for _ in range(2)]
        algo.add_module("later", copy_from="main", policy_mapping_fn=lambda agent_id, episode: "later")
        results += [algo.train() for _ in range(2)]
    for number, result in enumerate(results):
        training = result["env_runners"]["num_module_steps_sampled"]
        assert training["later" if number == 3 else "main"] > 0 and training["random"] == 0
        evaluation = result["evaluation"]["env_runners"]
        assert evaluation["num_episodes"] == 4
        returns = evaluation["module_episode_return_mean"]
        assert returns["main"] + returns["random"] == pytest.approx(evaluation["episode_return_mean"])
        assert number < 2 or math.isnan(returns["later"])
