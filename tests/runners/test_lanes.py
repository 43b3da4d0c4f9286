"""Lanes against a slow reference: what every agent saw, did and got, however agents join, wait and end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from at_least import all_of
from corral import PPOConfig
from corral.data.episodes.lane_rollout import LaneRollout
from corral.data.episodes.multi_agent_rollout import MultiAgentRollout
from corral.data.episodes.rollout import Rollout
from corral.errors import CheckpointError
from corral.modules.heuristic import HeuristicModule, RandomModule
from corral.runners.runner import EnvRunner
from corral.runners.runner_state import check_runner_state, get_runner_state, set_runner_state
from corral.runs.checkpoint.codec import decode, encode
from random_agents import Experience, Log, RandomAgents

Played = dict[tuple[int, Any], list[tuple[float, ...]]]


def make(logs: dict[int, Log], mapping: Any = None, policies: Any = ("shared",), **settings: Any) -> Any:
    count = itertools.count()

    def make_env(config: Any) -> RandomAgents:
        env = RandomAgents(config)
        env.number = 1e4 * next(count)
        logs.setdefault(config.vector_index, env.log)  # of the first env, if it fails and another takes its place
        return env

    config = PPOConfig().environment(make_env, disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=3, vectorization="sync").debugging(seed=0)
    config.multi_agent(policies=policies, policy_mapping_fn=mapping)
    return EnvRunner(config.copy(**settings).freeze())


def played(rollouts: list[MultiAgentRollout]) -> Played:
    """Return the steps of each agent in each sub-env over all rollouts, as the lanes hold them."""
    found: Played = {}
    for rollout in rollouts:
        for part in rollout.modules.values():
            for lane, (env_index, agent) in enumerate(zip(part.lane_envs.tolist(), part.lane_agents, strict=True)):
                for t in np.flatnonzero(part.valid[:, lane]).tolist():
                    flags = float(part.terminated[t, lane]), float(part.truncated[t, lane])
                    step = part.obs[t, lane, 0], part.actions[t, lane], part.rewards[t, lane], *flags
                    found.setdefault((env_index, agent), []).append(
                        (*map(float, step), float(part.obs[t + 1, lane, 0]))
                    )
    # The steps of an agent that has had two modules are in two rollouts. Its observations are increasing numbers.
    return {key: sorted(steps) for key, steps in found.items()}


def expected(logs: dict[int, Log], keeps: Callable[[Experience], bool] = lambda step: True) -> Played:
    return {
        (env_index, agent): [
            (one.obs, one.action, one.reward, float(one.terminated), float(one.truncated), one.next_obs)
            for one in steps
            if one.next_obs is not None and keeps(one)
        ]
        for env_index, log in logs.items()
        for agent, steps in log.steps.items()
    }


def changing(agent: str, episode: Any) -> str:
    """Map an agent to one of two modules, another one in each episode."""
    return ("one", "other")[(int(agent[1:]) + int(episode.id_[-8:], 16)) % 2]


WAYS = {
    "shared": {},
    "by agent": {"policies": [f"a{i}" for i in range(4)]},
    "changing": {"policies": ["one", "other"], "mapping": changing},
    "kinds": {"policies": [f"a{i}" for i in range(4)], "env_config": {"num_kinds": 2}},
    "together": {"env_config": {"together": True}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(2))
def test_every_agent_has_what_it_saw_did_and_got(way: str, seed: int) -> None:
    logs: dict[int, Log] = {}
    settings = {**WAYS[way], "env_config": {**WAYS[way].get("env_config", {}), "seed": seed}}
    runner = make(logs, **settings)
    rollouts = [runner.sample(num_timesteps=num) for num in (1, 2, 50, 3, 300, 7, 1, 1, 90)]
    assert played(rollouts) == {key: steps for key, steps in expected(logs).items() if steps}
    for rollout in rollouts:
        assert rollout.num_agent_steps == sum(int(part.valid.sum()) for part in rollout.modules.values())
        for part in rollout.modules.values():
            assert np.isfinite(part.obs).all() and np.isfinite(part.logp[part.valid]).all()
    metrics = runner.metrics.reduce()
    finished = [returns for log in logs.values() for returns in log.returns]
    assert metrics["num_episodes"] == len(finished) > 10
    assert metrics["num_env_steps_sampled"] == sum(rollout.num_env_steps for rollout in rollouts)
    assert metrics["num_agent_steps_sampled"] == sum(rollout.num_agent_steps for rollout in rollouts)
    of_agents = dict.fromkeys((f"a{i}" for i in range(4)), 0)
    for (_, agent), steps in played(rollouts).items():
        of_agents[agent] += len(steps)
    assert metrics["num_agent_steps_sampled_by_agent"] == of_agents
    for agent in (f"a{i}" for i in range(4)):
        of_agent = [returns[agent] for returns in finished if agent in returns]
        assert metrics["agent_episode_return_mean"][agent] == pytest.approx(np.mean(of_agent))


def test_a_step_that_waits_keeps_what_it_has_when_somebody_writes_into_the_rollout_before() -> None:
    logs: dict[int, Log] = {}
    runner, found, num_open = make(logs), dict[Any, Any](), 0
    for num_timesteps in (1, 2, 5, 3, 40, 7, 1, 90):
        rollout = runner.sample(num_timesteps=num_timesteps)
        for key, steps in played([rollout]).items():
            found.setdefault(key, []).extend(steps)
        for part in rollout.modules.values():
            num_open += int(np.count_nonzero(runner.stepping.lanes[part.module_id].is_open))
            for name in ("obs", "actions", "rewards", "dist_inputs"):
                part.columns[name] *= 0
    assert num_open > 5
    assert {key: sorted(steps) for key, steps in found.items()} == {k: v for k, v in expected(logs).items() if v}


def test_the_log_probability_of_a_step_that_waited_is_the_one_of_its_action() -> None:
    logs: dict[int, Log] = {}
    runner = make(logs)
    for part in (runner.sample(num_timesteps=2).modules.get("shared") for _ in range(40)):
        if part is None:
            continue
        logits = part.dist_inputs - np.log(np.exp(part.dist_inputs).sum(-1, keepdims=True))
        exact = np.take_along_axis(logits, part.actions[..., None].astype(int), -1)[..., 0]
        np.testing.assert_allclose(part.logp[part.valid], exact[part.valid], rtol=1e-5)


@pytest.mark.parametrize("mode", ["complete_episodes", "episodes"])
def test_whole_episodes_hold_no_step_of_others(mode: str) -> None:
    logs: dict[int, Log] = {}
    runner = make(logs, batch_mode="complete_episodes" if mode == "complete_episodes" else "truncate_episodes")
    rollout = runner.sample(**({"num_episodes": 5} if mode == "episodes" else {"num_timesteps": 60}))
    assert len(runner.last_statistics.returns) == 5 or mode == "complete_episodes"
    first = {
        env_index: len(runner.last_statistics.env_indices[runner.last_statistics.env_indices == env_index])
        for env_index in range(3)
    }
    assert played([rollout]) == {
        key: steps
        for key, steps in {
            (env_index, agent): [
                (one.obs, one.action, one.reward, float(one.terminated), float(one.truncated), one.next_obs)
                for one in all_steps
                if one.episode < first[env_index]
            ]
            for env_index, log in logs.items()
            for agent, all_steps in log.steps.items()
        }.items()
        if steps
    }
    assert rollout.num_env_steps == sum(sum(log.lengths[: first[i]]) for i, log in logs.items())


def test_a_sub_env_that_fails_costs_what_was_open() -> None:
    logs: dict[int, Log] = {}
    runner = make(logs, restart_failed_sub_environments=True, env_config={"fails_at": 20})
    before = dict(logs)
    rollouts: list[Rollout] = [runner.sample(num_timesteps=30) for _ in range(6)]
    assert runner.num_sub_env_restarts >= 3
    for env_index, log in before.items():
        ours = {agent: steps for (i, agent), steps in played(rollouts).items() if i == env_index}
        for (_, agent), steps in expected({env_index: log}).items():
            assert ours.get(agent, [])[: len(steps)] == steps


def test_a_mapping_may_use_lanes_that_no_trial_showed() -> None:
    logs: dict[int, Log] = {}
    is_late = []

    def mapping(agent: str, episode: Any) -> str:
        return "other" if is_late and agent == "a1" else "one" if agent == "a0" else "other" if agent == "a2" else "one"

    runner = make(logs, mapping, policies=("one", "other"))
    rollouts = [runner.sample(num_timesteps=40)]
    num_lanes = len(runner.stepping.lanes["other"])
    is_late.append(True)
    rollouts += [runner.sample(num_timesteps=40) for _ in range(5)]
    assert len(runner.stepping.lanes["other"]) == num_lanes + 3
    assert played(rollouts) == {key: steps for key, steps in expected(logs).items() if steps}
    assert all_of(isinstance(part, LaneRollout) for rollout in rollouts for part in rollout.modules.values())


@pytest.mark.slow_cases("31-shared", "31-kinds")
@pytest.mark.parametrize("way", ["shared", "changing", "kinds"])
@pytest.mark.parametrize("num_timesteps", [4, 31])
def test_a_runner_continues_exactly_from_its_state(way: str, num_timesteps: int) -> None:
    """Another runner continues steps whose outcome is not known, agents that wait, and episodes of several modules."""
    runner = make({}, **WAYS[way])
    for _ in range(4):
        runner.sample(num_timesteps=num_timesteps)
        state = decoded(get_runner_state(runner))
        other = make({}, **WAYS[way])
        other.sample(num_timesteps=13)  # what it has done before is forgotten
        check_runner_state(other, state)
        assert set_runner_state(other, state)["num_envs_continued"] == 3
        expected_next = [other.sample(num_timesteps=num_timesteps) for _ in range(3)]
        other = make({}, **WAYS[way])
        set_runner_state(other, state)
        set_runner_state(other, state)  # a second time, which changes nothing
        for rollout in expected_next:
            assert_same(rollout, other.sample(num_timesteps=num_timesteps))
        assert_same(expected_next[0], runner.sample(num_timesteps=num_timesteps))


def test_a_state_of_other_agents_is_refused() -> None:
    runner, other = make({}), make({}, env_config={"num_agents": 3})
    runner.sample(num_timesteps=9)
    with pytest.raises(CheckpointError, match=r"agents|observations"):
        check_runner_state(other, get_runner_state(runner))


def decoded(state: Any) -> Any:
    return decode(encode(state))


def assert_same(one: MultiAgentRollout, other: MultiAgentRollout) -> None:
    assert one.modules.keys() == other.modules.keys() and one.num_agent_steps == other.num_agent_steps
    for module_id, part in one.modules.items():
        assert part.obs_rows.tolist() == other.modules[module_id].obs_rows.tolist()
        for name, column in part.columns.items():
            np.testing.assert_array_equal(column, other.modules[module_id].columns[name], err_msg=name)


class LowestOfSeen(HeuristicModule):
    """Plays the number that it has just seen, by its remainder."""

    def choose_actions(self, obs: Any, rng: np.random.Generator) -> Any:
        return obs[:, 0].astype(np.int64) % 3


@pytest.mark.parametrize("explore", [True, False])
def test_rules_choose_the_actions_of_their_agents(explore: bool) -> None:
    policies = {"rules": {"module_class": LowestOfSeen}, "random": {"module_class": RandomModule}, "net": {}}
    runner = make({}, lambda agent, episode: {"a0": "rules", "a1": "random"}.get(agent, "net"), policies)
    rollout = runner.sample(num_timesteps=600, explore=explore)
    rules = rollout.modules["rules"]
    np.testing.assert_array_equal(rules.actions[rules.valid], rules.obs[:-1, :, 0][rules.valid].astype(int) % 3)
    at_random = rollout.modules["random"]
    counts = np.bincount(at_random.actions[at_random.valid].astype(int), minlength=3)
    assert counts.min() > 0.6 * counts.mean()
    wild = runner.sample(num_timesteps=300, random_actions=True).modules["rules"]
    assert len(np.unique(wild.actions[wild.valid] - wild.obs[:-1, :, 0][wild.valid].astype(int) % 3)) > 1


def test_agents_keep_their_modules_when_an_idle_one_is_removed() -> None:
    """The episodes continue, though the other modules then have other places in the list of modules."""
    logs: dict[int, Log] = {}
    mapping = {"a0": "one", "a1": "other", "a2": "other", "a3": "one"}
    policies = {"idle": {}, "one": {}, "other": {}}
    runner = make(logs, lambda agent, episode: mapping[agent], policies)
    rollouts = [runner.sample(num_timesteps=num) for num in (7, 31)]
    kept = {module_id: part for module_id, part in runner.config.policies.items() if module_id != "idle"}
    specs = {
        module_id: part
        for module_id, part in runner.config.module_specs(*runner.describe_env()[:2]).items()
        if module_id != "idle"
    }
    runner.set_modules({"policies": kept}, specs)
    rollouts += [runner.sample(num_timesteps=num) for num in (5, 60)]
    assert played(rollouts) == {key: steps for key, steps in expected(logs).items() if steps}
    finished = [returns for log in logs.values() for returns in log.returns]
    totals = [sum(returns[agent] for agent in ("a1", "a2") if agent in returns) for returns in finished]
    joined = [total for total, returns in zip(totals, finished, strict=True) if {"a1", "a2"} & returns.keys()]
    assert runner.metrics.peek(("module_episode_return_mean", "other")) == pytest.approx(np.mean(joined))
