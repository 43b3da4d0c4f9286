"""`sample(num_episodes=n)`: n episodes, short and long ones as frequent as in the env, in any number of sub-envs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from corral import PPOConfig
from corral.core.metrics.timers import Timers
from corral.engines.lazy import LazyEngine
from corral.runners.requests import SampleRequest
from corral.runners.runner_group import EnvRunnerGroup
from corral.testing import CountingEnv

TRUE_MEAN = 0.5


class Uneven(CountingEnv):
    """Half of the episodes take 1 step and return 0, the others take 20 steps and return 1."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = super().reset(seed=seed, options=options)
        self._length = 20 if self.np_random.random() < 0.5 else 1
        return answer

    def step(self, action: int) -> Any:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(terminated and self._length == 20), terminated, truncated, info


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[EnvRunnerGroup]:
    num_env_runners, num_envs, mode = request.param
    config = PPOConfig().environment(Uneven, disable_env_checking=True).engine("local").debugging(seed=0)
    config.env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=num_envs, autoreset_mode=mode)
    engine = LazyEngine("local")
    made = EnvRunnerGroup(config.freeze(), engine)
    yield made
    made.stop()
    engine.stop()


SHAPES = [(0, 1, "next_step"), (0, 4, "next_step"), (0, 16, "same_step"), (2, 4, "next_step"), (3, 2, "same_step")]


@pytest.mark.parametrize("group", SHAPES, indirect=True, ids=str)
def test_expectation_and_count(group: EnvRunnerGroup) -> None:
    returns: list[float] = []
    for _ in range(400 // 8):
        episodes = [e for rollout in group.sample(SampleRequest(num_episodes=8), Timers()) for e in rollout]
        assert len(episodes) == 8 and all(episode.is_done for episode in episodes)
        returns += [episode.get_return() for episode in episodes]
    # Four standard deviations of a mean of 400 coin flips; the first 8 episodes to end of 16 have a mean of 0.
    assert np.mean(returns) == pytest.approx(TRUE_MEAN, abs=0.1)


@pytest.mark.parametrize("group", [(2, 3, "next_step")], indirect=True, ids=str)
@pytest.mark.parametrize("num_episodes", range(1, 15))
def test_any_number_is_spread_evenly(group: EnvRunnerGroup, num_episodes: int) -> None:
    counts = []
    for rollout in group.sample(SampleRequest(num_episodes=num_episodes), Timers()):
        counts += [sum(episode.env_index == i for episode in rollout) for i in range(3)]
        assert rollout.num_env_steps == sum(len(episode) for episode in rollout)
    assert sum(counts) == num_episodes
    assert max(counts) - min(counts + [0] * (6 - len(counts))) <= 1


@pytest.mark.parametrize("group", [(2, 2, "next_step")], indirect=True, ids=str)
def test_a_slow_runner_changes_no_count(group: EnvRunnerGroup) -> None:
    slow, fast = group._runners.values()
    for runner, seconds in ((slow, 10.0), (fast, 0.001)):
        group.mail._speeds.replace(runner.seconds_per_step, seconds)
        runner.seconds_per_step = seconds
    slow.excess_wait_s = 1e9
    rollouts = group.sample(SampleRequest(num_episodes=6), Timers())
    assert [len(rollout.episodes()) for rollout in rollouts] == [3, 3]
