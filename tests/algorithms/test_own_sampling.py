"""Training steps that sample by hand: their env steps count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corral import Algorithm, AlgorithmConfig, SampleRequest
from corral.errors import SampleError
from corral.testing import CountingEnv

NUM_STEPS = 10


def by_group(algo: Algorithm) -> Any:
    return algo.env_runner_group.sample(SampleRequest(num_episodes=4))


def by_runner(algo: Algorithm) -> Any:
    assert algo.env_runner is not None
    return [algo.env_runner.sample(num_timesteps=20), algo.env_runner.sample(num_timesteps=20)]


def in_each_runner(algo: Algorithm) -> Any:
    """Each of two runners samples by a call of the user, with a function and by the name of the method."""
    group, kwargs = algo.env_runner_group, {"num_timesteps": 40 // (2 * len(algo.env_runner_group.worker_indices))}
    return [
        *group.foreach_env_runner(
            lambda runner, num_timesteps: runner.sample(num_timesteps=num_timesteps), kwargs=kwargs
        ),
        *group.foreach_env_runner("sample", kwargs=kwargs),
    ]


def asynchronously(algo: Algorithm) -> Any:
    group = algo.env_runner_group
    group.sample_async(SampleRequest(num_timesteps=40 // len(group.worker_indices)))
    rollouts: list[Any] = []
    while sum(rollout.num_env_steps for rollout in rollouts) < 40:
        rollouts += group.fetch_samples(timeout_seconds=10.0)
    return rollouts


def and_received(algo: Algorithm) -> Any:
    rollouts = asynchronously(algo)
    algo.receive(rollouts)
    return rollouts


def whole_episodes(algo: Algorithm) -> Any:
    rollouts = algo.sample(num_episodes=4)
    assert sum(int(rollout.done[rollout.valid].sum()) for rollout in rollouts) == 4
    return rollouts


def both(algo: Algorithm) -> Any:
    return [*algo.sample(20), *algo.env_runner_group.sample(SampleRequest(num_timesteps=20))]


@dataclass(kw_only=True)
class SamplerConfig(AlgorithmConfig):
    """Settings of Sampler."""

    @property
    def algo_class(self) -> type[Algorithm]:
        return Sampler


class Sampler(Algorithm):
    """Samples 40 env steps per iteration in some way, and learns nothing."""

    way: Callable[[Algorithm], Any]

    def make_loss(self, config: Any) -> Any:
        return lambda module, batch, coefficients: (None, {})

    def training_step(self) -> dict[str, dict[str, float]]:
        assert sum(rollout.num_env_steps for rollout in type(self).way(self)) == 40
        return {}


def config(way: Callable[[Algorithm], Any], num_env_runners: int = 0) -> AlgorithmConfig:
    Sampler.way = way
    made = SamplerConfig().environment(CountingEnv, env_config={"episode_length": NUM_STEPS}).debugging(seed=0)
    made.env_runners(num_envs_per_env_runner=2, num_env_runners=num_env_runners).engine("local")
    return made.rl_module(model_config={"fcnet_hiddens": [4]})


WAYS = [by_group, by_runner, in_each_runner, asynchronously, and_received, whole_episodes, both]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_env_steps_count_once(way: Any, num_env_runners: int) -> None:
    if way is by_runner and num_env_runners:
        pytest.skip("there is no embedded runner")
    with config(way, num_env_runners).build() as algo:
        counts = [algo.train()["num_env_steps_sampled_lifetime"] for _ in range(3)]
    assert counts == [40, 80, 120]


def test_a_run_ends_at_its_number_of_env_steps_and_continues(tmp_path: Path) -> None:
    with config(by_group).build() as algo:
        result = algo.fit(stop={"num_env_steps": 100}, run_dir=tmp_path / "run", progress=False)
    assert (result["training_iteration"], result["num_env_steps_sampled_lifetime"]) == (3, 120)
    with config(by_group).build() as algo:
        result = algo.fit(stop={"num_env_steps": 150}, resume=tmp_path / "run", progress=False)
    assert (result["training_iteration"], result["num_env_steps_sampled_lifetime"]) == (4, 160)


def test_samples_between_training_steps_do_not_count() -> None:
    with config(by_group).build() as algo:
        algo.train()
        by_group(algo)
        assert algo.train()["num_env_steps_sampled_lifetime"] == 80


def test_a_sample_needs_exactly_one_of_both_numbers() -> None:
    with config(by_group).build() as algo:
        for arguments in ({}, {"num_timesteps": 4, "num_episodes": 2}):
            with pytest.raises(SampleError, match="exactly one"):
                algo.sample(**arguments)
        assert algo.sample(num_episodes=0) == algo.sample(0) == []


def test_a_rollout_has_its_columns_for_the_module_under_both_names() -> None:
    with config(by_group).build() as algo:
        (rollout,) = algo.sample(num_episodes=2)
        assert rollout.for_module() is rollout.transformed() is rollout
