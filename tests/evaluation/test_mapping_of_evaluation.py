"""Evaluation may map agents to other modules than training does."""

from __future__ import annotations

import pytest

from corral import PPOConfig, RandomModule, make_multi_agent


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
            evaluation_config={"policy_mapping_fn": lambda agent_id, episode: ["main", "random"][agent_id]},
        )
    )
    with config.build() as algo:
        training = algo.train()["env_runners"]["num_module_steps_sampled"]
        assert training["main"] >= 128 and training["random"] == 0
        evaluation = algo.evaluate()["env_runners"]
        assert all(evaluation["num_module_steps_sampled"][name] >= 4 * 8 for name in ("main", "random"))
        returns = evaluation["module_episode_return_mean"]
        assert returns["main"] + returns["random"] == pytest.approx(evaluation["episode_return_mean"])
