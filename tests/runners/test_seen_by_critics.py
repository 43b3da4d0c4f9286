"""What central critics see, against a slow loop over what the env gave, however agents join, wait, end and fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent_steps import AGENTS, Played
from corral import PPOConfig
from corral.errors import ConfigError
from corral.runners.runner import EnvRunner
from corral.runners.runner_state import get_runner_state, set_runner_state
from corral.runs.checkpoint.codec import decode, encode
from scripted_agents import ScriptedAgents
from seen_by_critics import assert_seen, numbers_of_all

NUMBERS = (1, 2, 30, 3, 90, 7, 1, 1, 60)


def make(episodes: dict[int, list[Played]], critic_sees: Any, policies: Any = ("shared",), **settings: Any) -> Any:
    def make_env(config: Any) -> ScriptedAgents:
        index = config.vector_index
        mine = episodes.setdefault(index, [])
        return ScriptedAgents(100 + index + 10 * len(mine), episodes=mine, **config.get("env", {}))

    config = PPOConfig().environment(make_env, disable_env_checking=True).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=3, vectorization="sync")
    mapping = None if len(policies) == 1 else lambda agent, episode: policies[int(agent in ("b", "d"))]
    config.multi_agent(policies=policies, policy_mapping_fn=mapping, critic_sees=critic_sees)
    return EnvRunner(config.copy(**settings).freeze())


WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "two modules": {"policies": ["one", "other"]},
    "other spaces": {"policies": ["one", "other"], "env_config": {"env": {"apart": True}}},
    "failures": {"env_config": {"env": {"fails": 0.02}}, "restart_failed_sub_environments": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_function_is_given_what_all_agents_saw_and_did(way: str) -> None:
    episodes: dict[int, list[Played]] = {}
    runner = make(episodes, numbers_of_all, **WAYS[way])
    rollouts = [runner.sample(num_timesteps=number) for number in NUMBERS]
    rows = assert_seen([played for of_env in episodes.values() for played in of_env], rollouts, 300)
    present = np.array([row[8:12].sum() for _, row in rows])
    assert set(present) >= {1, 2, 3} and any(
        number < 0 for number, _ in rows
    )  # also of agents that were not observed in the end


def test_all_is_the_observations_with_who_is_present_and_whose_critic_it_is() -> None:
    by_function, by_all = (
        make({}, critic_sees).sample(num_timesteps=200).modules["shared"] for critic_sees in (numbers_of_all, "all")
    )
    column, numbers = by_all["critic_obs"], by_function["critic_obs"]
    there = by_all.valid & (by_all.obs_rows[:-1] >= 0)
    for index, agent in enumerate(AGENTS):
        np.testing.assert_array_equal(column["observations"][str(agent)][:-1][there, 0], numbers[:-1][there, index])
        np.testing.assert_array_equal(column["agent"][:-1][there, index], numbers[:-1][there, 12] == index)
    np.testing.assert_array_equal(column["present"][:-1][there], numbers[:-1][there, 8:12])
    assert there.sum() > 100


def test_a_runner_that_continues_from_a_state_shows_critics_the_same() -> None:
    runner = make({}, numbers_of_all)
    runner.sample(num_timesteps=20)
    state = decode(encode(get_runner_state(runner)))
    after = runner.sample(num_timesteps=60).modules["shared"]
    other = make({}, numbers_of_all)
    set_runner_state(other, state)
    again = other.sample(num_timesteps=60).modules["shared"]
    np.testing.assert_array_equal(after.valid, again.valid)
    np.testing.assert_array_equal(after["critic_obs"][:-1][after.valid], again["critic_obs"][:-1][after.valid])
    assert (after.obs_rows[0] < 0).any()  # some agents wait since the sample before


def test_another_shape_in_a_later_step_is_refused() -> None:
    calls: list[int] = []

    def shrinking(agent_id: Any, observations: Any, actions: Any, present: Any) -> Any:
        calls.append(len(present[agent_id]))
        return np.zeros((calls[-1], 2 if len(calls) > 6 else 3))

    runner = make({}, shrinking)
    with pytest.raises(
        ConfigError, match=r"env .*critic_sees\(.*returned float32\[\d+, 2\] for agent .* return \[\d+, 3\]"
    ):
        for _ in range(3):
            runner.sample(num_timesteps=9)


@pytest.mark.parametrize(
    ("critic_sees", "problem"),
    [
        (lambda agent_id, observations, actions, present: np.zeros(3), r"an entry for each row.*float32\[3\]"),
        (lambda agent_id, observations, actions, present: 1 / 0, "raised ZeroDivisionError for agent 'a'"),
        (
            lambda agent_id, observations, actions, present: np.zeros((2, 3 + (agent_id == "b"))),
            "shape .3,. for agent 'a' and .4,. for agent 'b', which have one module",
        ),
    ],
)
def test_a_function_that_gives_something_else_is_refused_at_building(critic_sees: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make({}, critic_sees)
