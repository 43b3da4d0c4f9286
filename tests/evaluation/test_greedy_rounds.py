"""Rounds act greedily unless they are told to explore, and runners have no more sub-envs than episodes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import DQNConfig, PPOConfig, evaluate_policy, make_multi_agent
from corral.testing import CountingEnv
from small import small


class Bandit(gym.Env[Any, Any]):
    """Episodes of one step, whose reward is the action."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), float(action), True, False, {}


def config(env: Any = Bandit, **evaluation: Any) -> PPOConfig:
    return small(env, num_envs_per_env_runner=None, train_batch_size_per_learner=64, minibatch_size=32, **evaluation)


def dqn(**evaluation: Any) -> DQNConfig:
    return DQNConfig().environment(Bandit).debugging(seed=0).evaluation(**evaluation)


def actions(made: Any, num_episodes: int = 60) -> tuple[set[float], bool]:
    """Return the rewards of a round, and what it says about exploring."""
    with made.evaluation(evaluation_duration=num_episodes).build() as algo:
        found = algo.evaluate()
        return set(found["env_runners"]["episode_returns"]), found["explore"]


def test_a_round_is_greedy_and_says_so() -> None:
    for made in (config(), dqn()):
        returns, explores = actions(made)
        assert len(returns) == 1 and explores is False


EPSILON = {"exploration_config": {"type": "EpsilonGreedy", "initial_epsilon": 0.5, "final_epsilon": 0.5}}


@pytest.mark.parametrize(
    "made",
    [
        config(evaluation_config={"explore": True}),
        config(evaluation_config=PPOConfig.overrides(explore=True)),
        dqn(evaluation_config=EPSILON),
    ],
    ids=["dict", "overrides", "exploration"],
)
def test_a_round_explores_where_it_is_told_to(made: Any) -> None:
    returns, explores = actions(made)
    assert returns == {0.0, 1.0} and explores is True


def test_greedy_rounds_may_be_asked_for() -> None:
    returns, explores = actions(dqn(evaluation_config={**EPSILON, "explore": False}))
    assert len(returns) == 1 and explores is False


def test_a_round_plays_the_policy_that_is_deployed() -> None:
    with config(CountingEnv, evaluation_interval=1, evaluation_duration=3).build() as algo:
        result = algo.train()["evaluation"]
        measured = evaluate_policy(algo, CountingEnv, episodes=3)
    assert result["explore"] is False
    assert result["env_runners"]["episode_return_mean"] == measured.episode_return_mean


def test_the_result_says_it_before_the_first_round() -> None:
    with config(evaluation_interval=3, evaluation_config={"explore": True}).build() as algo:
        assert algo.train()["evaluation"]["explore"] is True


@pytest.mark.parametrize(
    ("settings", "overrides", "expected"),
    [
        ({"evaluation_duration": 3}, {}, 3),
        ({"evaluation_duration": 10, "evaluation_num_env_runners": 4}, {}, 3),  # 3, 3, 2, 2
        ({"evaluation_duration": 100}, {}, 16),  # as many as in training
        ({"evaluation_duration": 3}, {"num_envs_per_env_runner": 5}, 5),
        ({"evaluation_seeds": range(4)}, {}, 4),
        ({"evaluation_duration": 32, "evaluation_duration_unit": "timesteps"}, {}, 16),
    ],
    ids=str,
)
def test_a_runner_has_at_most_one_sub_env_for_each_episode(
    settings: dict[str, Any], overrides: dict[str, Any], expected: int
) -> None:
    made = config(evaluation_config=overrides, **settings).engine("local")
    with made.build() as algo:
        algo.evaluate()
        assert algo.eval_env_runner_group is not None and algo.eval_env_runner_group.num_envs == expected
        assert algo.env_runner_group.num_envs == 16


def test_a_runner_has_at_most_one_sub_env_per_episode_if_training_sets_the_number() -> None:
    made = config(evaluation_duration=2).env_runners(num_envs_per_env_runner=8)
    with made.build() as algo:
        found = algo.evaluate()["env_runners"]
        assert found["num_episodes"] == 2
        assert algo.eval_env_runner_group is not None and algo.eval_env_runner_group.num_envs == 2


def test_a_factory_of_a_ready_vector_env_keeps_its_number() -> None:
    def make(context: Any) -> Any:
        return gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")

    for number in (None, 4):
        made = config(make, evaluation_duration=2).env_runners(num_envs_per_env_runner=number)
        with made.build() as algo:
            assert algo.evaluate()["env_runners"]["num_episodes"] == 2
            assert algo.eval_env_runner_group is not None and algo.eval_env_runner_group.num_envs == 4


def test_a_custom_function_has_the_number_of_training() -> None:
    def play(algorithm: Any, env_runner_group: Any) -> dict[str, Any]:
        return {"num_envs": env_runner_group.num_envs}

    with config(custom_evaluation_function=play, evaluation_duration=2).build() as algo:
        assert algo.evaluate()["num_envs"] == 16


def test_an_exploration_of_rounds_that_do_not_explore_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    dqn(evaluation_config={"explore": False, **EPSILON}).build().stop()
    (message,) = [text for text in caplog.messages if "exploration_config" in text]
    assert message.startswith("evaluation_config: ") and message.endswith(" has no effect with explore=False.")


@pytest.mark.parametrize("greedy", [True, False])
def test_an_exploration_of_rounds_is_for_all_modules(greedy: bool) -> None:
    """Also for a module with an exploration of its own in training."""
    made = DQNConfig().environment(make_multi_agent(Bandit), env_config={"num_agents": 2}).debugging(seed=0)
    made.multi_agent(
        policies={"a", "b"},
        policy_mapping_fn=lambda agent_id, episode: "ab"[int(agent_id)],
        algorithm_config_overrides_per_module={"a": {"exploration_config": {"type": "Random"}}},
    )
    epsilon = 0.0 if greedy else 1.0
    made.evaluation(
        evaluation_duration=60,
        evaluation_config={"exploration_config": {"initial_epsilon": epsilon, "final_epsilon": epsilon}},
    )
    with made.build() as algo:
        returns = algo.evaluate()["env_runners"]["episode_returns"]
    assert len(set(returns)) == (1 if greedy else 3)
