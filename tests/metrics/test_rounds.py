"""Metrics of an iteration with several rounds of sampling: as one logger of all values gives them, in order of time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import Env, spaces
from metric_cases import SETTINGS, Clock, assert_same, at_once

from corral import PPOConfig
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.runners.requests import SampleRequest

NUM_ROUNDS = 3


class Rising(Env[Any, Any]):
    """Episodes of one or two steps, of which the k-th of an env has the return k."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._count, self._step = 0, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._count, self._step = self._count + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        over = self._step > self._count % 2
        return np.zeros(1, np.float32), float(self._count) * over, over, False, {}


def values_of(worker_index: int, round_: int) -> list[float]:
    """Return what a runner logs in a round: a few values, sometimes none."""
    size = (3 * worker_index + 2 * round_) % 5
    return np.random.default_rng([worker_index, round_]).normal(size=size).tolist()


def log_values(env_runner: Any, metrics_logger: MetricsLogger) -> None:
    env_runner.round = getattr(env_runner, "round", -1) + 1
    for name, given in SETTINGS.items():
        metrics_logger.log_values(("case", name), values_of(env_runner.worker_index, env_runner.round), **given)


def config(num_env_runners: int, num_rounds: int = NUM_ROUNDS, **settings: Any) -> PPOConfig:
    config = PPOConfig().environment(Rising, disable_env_checking=True).engine("local").debugging(seed=0)
    config.env_runners(
        num_env_runners=num_env_runners, num_envs_per_env_runner=1, rollout_fragment_length=20, straggler_factor=None
    )
    batch = 20 * num_rounds * max(1, num_env_runners)
    config.training(train_batch_size_per_learner=batch, minibatch_size=20, num_epochs=1)
    return config.copy(**settings)


@pytest.mark.parametrize("num_env_runners", [1, 2, 3])
def test_every_reduction_counts_the_rounds_one_after_another(num_env_runners: int) -> None:
    clock = Clock()
    reference = MetricsLogger(clock)
    with config(num_env_runners).callbacks(on_sample_end=log_values).build() as algo:
        for iteration in range(3):
            found = algo.train()["env_runners"]["case"]
            for round_ in range(iteration * NUM_ROUNDS, (iteration + 1) * NUM_ROUNDS):
                workers = [values_of(index + 1, round_) for index in range(num_env_runners)]
                for name, given in SETTINGS.items():
                    reference.log_values(name, at_once(name, workers), **given)
            clock.now += 1.0
            wanted = reference.reduce()
            for name in list(wanted):
                if name.endswith("_throughput") and name not in SETTINGS:  # per second, of a clock that nobody sets
                    del wanted[name], found[name]
            assert_same(found, wanted)


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_returns_of_the_latest_episodes_of_one_runner(num_env_runners: int) -> None:
    with config(num_env_runners, num_rounds=5, metrics_num_episodes_for_smoothing=4).build() as algo:
        for _ in range(2):
            result = algo.train()["env_runners"]
            latest = np.arange(result["num_episodes_lifetime"])[-4:] + 1
            assert result["episode_return_mean"] == latest.mean()
            assert (result["episode_return_min"], result["episode_return_max"]) == (latest[0], latest[-1])


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_a_run_continues_with_another_window_of_returns(num_env_runners: int, tmp_path: Path) -> None:
    with config(num_env_runners, num_rounds=2, metrics_num_episodes_for_smoothing=4).build() as algo:
        algo.train()
        before = algo.metrics.peek_values(("env_runners", "episode_return_mean"))
        algo.save_to_path(tmp_path)
    assert len(before) == 4
    with config(num_env_runners, num_rounds=2, metrics_num_episodes_for_smoothing=1000).build() as algo:
        algo.restore_from_path(tmp_path)
        result = algo.train()["env_runners"]
        values = algo.metrics.peek_values(("env_runners", "episode_return_mean"))
        assert values[:4] == before
        assert len(values) == 4 + result["num_episodes"]


def test_fragments_that_come_one_by_one_are_rounds_of_their_own() -> None:
    """A runner that delivers twice before another does is ahead of it: its first fragment is the older one."""
    with config(2).callbacks(on_sample_end=log_values).build() as algo:
        group, metrics = algo.env_runner_group, MetricsLogger(Clock())
        for _ in range(NUM_ROUNDS):
            group.sample_async(SampleRequest(num_timesteps=5))
            group.fetch_samples(timeout_seconds=10)
        group.collect_metrics(metrics, Timers())
        reference = MetricsLogger(Clock())
        for round_ in range(NUM_ROUNDS):
            for name, given in SETTINGS.items():
                reference.log_values(name, at_once(name, [values_of(1, round_), values_of(2, round_)]), **given)
        found = metrics.peek(("env_runners", "case"))
        wanted = reference.peek()
        for name in SETTINGS:
            assert_same(found[name], wanted[name])
