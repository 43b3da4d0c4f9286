"""What central critics see, against a slow loop over what the env gave, however agents join, wait, end and fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from agent_steps import AGENTS, Played
from at_least import all_of
from corral import PPOConfig
from corral.errors import ConfigError
from corral.runners.runner import EnvRunner
from corral.runners.runner_state import get_runner_state, set_runner_state
from corral.runs.checkpoint.codec import decode, encode
from scripted_agents import ScriptedAgents

NUMBERS = (1, 2, 30, 3, 90, 7, 1, 1, 60)


def numbers_of_all(agent_id: Any, observations: Any, actions: Any, present: Any) -> Any:
    """Return what each agent sees, what it did, whether it is present, and whose critic it is."""
    rows = len(present[agent_id])
    columns = [observations[agent][:, 0] for agent in AGENTS]
    columns += [actions[agent] for agent in AGENTS] + [present[agent] for agent in AGENTS]
    return np.stack([*columns, np.full(rows, AGENTS.index(agent_id))], -1)


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


def ended(played: Played, agent: Any, t: int) -> bool:
    """Return whether an agent ended alone in the env step that led to time t."""
    return t > 0 and bool(played.terminateds[t - 1].get(agent) or played.truncateds[t - 1].get(agent))


def is_over(played: Played, t: int) -> bool:
    return t > 0 and bool(played.terminateds[t - 1].get("__all__") or played.truncateds[t - 1].get("__all__"))


def expected(played: Played) -> Iterator[tuple[float, list[float]]]:
    """Yield the number by which an agent's row is known, and what `numbers_of_all` gives for it, for all rows.

    A row is known by the number that the agent sees, or for a final row of an agent that was not observed in the end by
    minus its latest number.
    """
    waits: set[Any] = set()  # agents that have acted, and were not observed since
    latest: dict[Any, float] = {}
    for t in range(len(played) + 1):
        seen = {agent: float(obs[0]) for agent, obs in played.observations[t].items()}
        over = is_over(played, t)
        acting = {agent for agent in seen if not over and not ended(played, agent, t)}
        final = {agent for agent in waits if over or ended(played, agent, t)}
        together = final if over else acting
        known = {**latest, **{agent: number for agent, number in seen.items() if agent in acting | final}}
        before = played.actions[t - 1] if t else {}
        for agent in [agent for agent in AGENTS if agent in acting | final]:
            present = together | {agent}
            row = [known[each] if each in present else 0.0 for each in AGENTS]
            row += [float(before.get(each, 0)) for each in AGENTS] + [float(each in present) for each in AGENTS]
            yield known[agent] if agent in seen else -known[agent], [*row, float(AGENTS.index(agent))]
        latest = known
        waits = (waits - final - acting) | acting


def found(rollouts: list[Any]) -> Iterator[tuple[float, Any]]:
    """Yield the rows that steps began with or led to, by their numbers as `expected` does."""
    for rollout in rollouts:
        for part in rollout.modules.values():
            for t, lane in np.argwhere(part.valid).tolist():
                for row in (t, t + 1):
                    number = float(part.obs[row, lane, 0])
                    unseen = row > t and number == float(part.obs[t, lane, 0])
                    yield -number if unseen else number, np.array(part["critic_obs"])[row, lane]


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
    # Observations of two episodes may have the same numbers: each has its own list of rows.
    wanted: dict[float, list[list[float]]] = {}
    for played in [played for of_env in episodes.values() for played in of_env]:
        for number, row in expected(played):
            wanted.setdefault(number, []).append(row)
    rows = list(found(rollouts))
    assert all_of((row.tolist() in wanted[number] for number, row in rows), 300)
    present = np.array([row[8:12].sum() for _, row in rows])
    assert set(present) >= {1, 2, 3} and any(number < 0 for number, _ in rows)


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
