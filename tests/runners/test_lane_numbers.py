"""What learning computes from lanes, against loops over the steps of each agent on its own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from at_least import at_least
from corral import DQNConfig, PPOConfig
from corral.algorithms.ppo import ppo_batch
from corral.core.returns import gae
from corral.exploration.base import StochasticSampling
from corral.runners.runner import EnvRunner
from random_agents import Experience, Log, RandomAgents

NAMES = ["one", "other"]


def make(logs: list[Log], **settings: Any) -> Any:
    count = itertools.count(1)

    def make_env(config: Any) -> RandomAgents:
        env = RandomAgents(config)
        env.number = 1e4 * next(count)
        logs.append(env.log)
        return env

    env_config = settings.pop("env_config", {})
    mapping = settings.pop("mapping", lambda agent, episode: NAMES[(int(agent[1:]) + int(episode.id_[-8:], 16)) % 2])
    config = PPOConfig().environment(make_env, env_config=env_config, disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=3, vectorization="sync").debugging(seed=0)
    config.fault_tolerance(restart_failed_sub_environments=True)
    config.multi_agent(policies=NAMES, policy_mapping_fn=mapping)
    return EnvRunner(config.copy(**settings).freeze())


def value(obs: Any) -> Any:
    return np.sin(np.asarray(obs, np.float64)).reshape(len(obs), -1)[:, 0]


def advantage(step: Experience, later: list[Experience], gamma: float, lambda_: float) -> float:
    """Return the advantage of a step from the steps of the same agent after it in the rollout, by the definition."""
    bootstrap = 0.0 if step.terminated else float(np.sin(np.float64(step.next_obs)))
    delta = step.reward + gamma * bootstrap - float(np.sin(np.float64(step.obs)))
    follows = later and later[0].episode == step.episode and not (step.terminated or step.truncated)
    return delta + (gamma * lambda_ * advantage(later[0], later[1:], gamma, lambda_) if follows else 0.0)


def advantages(rollout: Any, values: Any, next_values: Any) -> Any:
    ended = rollout.terminated, rollout.truncated
    return gae(rollout.rewards, values, next_values, *ended, rollout.valid, gamma=0.9, lambda_=0.8)


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("fails_at", [-1, 30])
def test_advantages_are_sums_over_the_steps_of_one_agent(fails_at: int, batch_mode: str) -> None:
    logs: list[Log] = []
    runner = make(logs, env_config={"fails_at": fails_at, "seed": 3}, batch_mode=batch_mode)
    num_compared = 0
    for num_timesteps in (1, 5, 60, 2, 120, 9, 9, 33):
        rollout = runner.sample(num_timesteps=num_timesteps)
        numbers: dict[float, tuple[float, float]] = {}
        for part in rollout.modules.values():
            batch = ppo_batch([part], value, advantages, normalize_advantages=False)
            found = zip(batch["obs"][:, 0].tolist(), batch["advantages"], batch["value_targets"], strict=True)
            numbers |= {obs: (float(one), float(target)) for obs, one, target in found}
        for log in logs:
            for steps in log.steps.values():
                here = [step for step in steps if step.obs in numbers]
                for index, step in enumerate(here):
                    exact = advantage(step, here[index + 1 :], 0.9, 0.8)
                    assert numbers[step.obs] == pytest.approx((exact, exact + np.sin(step.obs)), rel=1e-5, abs=1e-4)
                    num_compared += 1
        assert sum(len(part.rewards[part.valid]) for part in rollout.modules.values()) == len(numbers)
    assert num_compared > 300 or fails_at > 0


def test_a_step_that_waits_for_the_next_rollout_keeps_the_outputs_that_chose_it() -> None:
    runner = make([])
    num_waited = 0
    for _ in range(60):
        for module_id, part in runner.sample(num_timesteps=3).modules.items():
            outputs = runner.actors[module_id].inference(part.obs[:-1].reshape(-1, 1)).reshape(part.dist_inputs.shape)
            np.testing.assert_allclose(part.dist_inputs[part.valid], outputs[part.valid], rtol=1e-4, atol=1e-5)
            num_waited += int((part.obs_rows[0] < 0).sum())
    assert num_waited > 10


def test_a_step_that_waits_for_the_next_rollout_keeps_the_log_probability_that_the_exploration_gave() -> None:
    runner = make([], exploration_config={"type": "StochasticSampling", "random_timesteps": 10_000})
    for _ in range(60):
        for part in runner.sample(num_timesteps=3).modules.values():
            np.testing.assert_allclose(part.logp[part.valid], -np.log(3), rtol=1e-6)


def test_only_the_episodes_that_were_asked_for_are_in_the_returns() -> None:
    runner = make([])
    returns: dict[Any, list[float]] = {}
    for _ in range(6):
        for part in runner.sample(num_episodes=4).modules.values():
            for lane, start, stop, _ in part.spans():
                returns.setdefault(part.lane_agents[lane], []).append(part.rewards[start:stop, lane].sum())
    found = runner.metrics.reduce()["agent_episode_return_mean"]
    assert found == {agent: pytest.approx(np.mean(values)) for agent, values in returns.items()}


class NotesBegins(StochasticSampling):
    """Notes the observations, each of which is another number, in which episodes begin."""

    def begin_episodes(self, begins: Any, *, timestep: int, explore: bool) -> None:
        self.begins = begins.copy()

    def get_exploration_action(self, *, action_distribution: Any, **settings: Any) -> Any:
        self.noted = [*getattr(self, "noted", []), *action_distribution.obs[self.begins, 0].tolist()]
        self.timesteps = [*getattr(self, "timesteps", []), settings["timestep"]]
        return super().get_exploration_action(action_distribution=action_distribution, **settings)


@pytest.mark.parametrize("fails_at", [-1, 30])
def test_an_exploration_sees_each_episode_of_each_agent_begin_once(fails_at: int) -> None:
    logs: list[Log] = []
    runner = make(logs, env_config={"fails_at": fails_at}, exploration_config={"type": NotesBegins})
    for _ in range(40):
        runner.sample(num_timesteps=5)
    noted = [obs for actor in runner.actors.values() for obs in actor.exploration.noted]
    firsts = [
        step.obs
        for log in logs
        for steps in log.steps.values()
        for before, step in zip([None, *steps], steps, strict=False)
        if before is None or before.episode != step.episode
    ]
    assert len(noted) == len({*noted}) > 30
    if fails_at > 0:  # steps that came to nothing are not in the logs
        assert {*firsts} <= {*noted}
    else:
        assert sorted(noted) == sorted(firsts)


def test_an_exploration_knows_the_env_steps_so_far() -> None:
    runner = make([], mapping=lambda agent, episode: "one", exploration_config={"type": NotesBegins})
    for start in (1000, 7000):
        valid = runner.sample(num_timesteps=100, timestep=start).valid
        exploration = runner.actors["one"].exploration
        assert at_least(20, exploration.timesteps) == [
            start + np.count_nonzero(valid[:row]) for row in range(len(valid)) if valid[row].any()
        ]
        exploration.timesteps.clear()


def test_an_exploration_keeps_what_it_has_adapted_when_agents_come_to_its_module() -> None:
    late: list[bool] = []
    config = DQNConfig().environment(RandomAgents, disable_env_checking=True).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=2).multi_agent(
        policies=["one", "other"],
        policy_mapping_fn=lambda agent, episode: "other" if agent == "a0" or late else "one",
    )
    config.exploration(exploration_config={"type": "ParameterNoise", "random_timesteps": 0})
    runner = EnvRunner(config.freeze())
    exploration = runner.actors["other"].exploration
    exploration.stddev = 0.125
    late.append(True)
    rollout = runner.sample(num_timesteps=60)
    assert {*rollout.modules["other"].lane_agents} == {"a0", "a1", "a2", "a3"}
    assert runner.actors["other"].exploration.stddev == pytest.approx(0.125, rel=0.011)


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_returns_and_steps_are_counted_by_module(batch_mode: str) -> None:
    logs: list[Log] = []
    runner = make(logs, mapping=lambda agent, episode: NAMES[agent == "a3"], batch_mode=batch_mode)
    lifetime = dict.fromkeys(NAMES, 0)
    for num_timesteps in (200, 90):
        rollout = runner.sample(num_timesteps=num_timesteps)
        metrics = runner.metrics.reduce()
        for name in NAMES:
            count = int(rollout.modules[name].valid.sum())
            lifetime[name] += count
            assert metrics["num_module_steps_sampled"][name] == count
            assert metrics["num_module_steps_sampled_lifetime"][name] == lifetime[name]
        assert metrics["num_agent_steps_sampled_lifetime"] == sum(lifetime.values())
    if batch_mode == "truncate_episodes":
        for name, agents in zip(NAMES, (("a0", "a1", "a2"), ("a3",)), strict=True):
            returns = [
                sum(episode[agent] for agent in agents if agent in episode)
                for log in logs
                for episode in log.returns
                if episode.keys() & {*agents}
            ]
            assert len(returns) > 10
            assert metrics["module_episode_return_mean"][name] == pytest.approx(np.mean(returns))


def test_the_noise_in_weights_adapts_to_the_latest_step_of_each_agent() -> None:
    config = DQNConfig().environment(RandomAgents, env_config={"together": True}, disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=3).debugging(seed=0).multi_agent(policies=["one"])
    config.exploration(exploration_config={"type": "ParameterNoise", "random_timesteps": 0})
    runner = EnvRunner(config.freeze())
    exploration = runner.actors["one"].exploration
    measured, distance = [], exploration.distance
    exploration.distance = lambda plain, noisy: (measured.append(len(plain)), distance(plain, noisy))[1]
    for _ in range(20):
        part = runner.sample(num_timesteps=60).modules["one"]
        assert measured.pop() == np.count_nonzero(part.valid.any(0))
