"""Several agents on other engines: the results of one process, and a worker that dies."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from several_agents import config_of, weights_of

from corral import AlgorithmConfig, APPOConfig, DQNConfig, PPOConfig

RAY = [pytest.mark.xdist_group("ray"), pytest.mark.slow]
DEADLINE_S = 120.0


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """The engine's name, with a Ray runtime there if it is Ray."""
    if request.param == "ray":
        request.getfixturevalue("ray_runtime")
    name: str = request.param
    return name


def train_on(engine: str, base: type[AlgorithmConfig], num_learners: int) -> Any:
    """Train on two runners, and return the numbers that do not depend on time, and the weights."""
    config = config_of(base, policies_to_train=["red", "blue"]).env_runners(num_env_runners=2, straggler_factor=None)
    config.learners(num_learners=num_learners).engine(engine)
    if base is APPOConfig:
        config.env_runners(sample_async=False, rollout_fragment_length=4)  # else batches hold what arrives first
    if num_learners and base is PPOConfig:
        config.training(train_batch_size_per_learner=32)
    with config.build() as algo:
        results = [algo.train() for _ in range(3)]
        steps = [result["env_runners"]["num_module_steps_sampled"] for result in results]
        returns = [result["env_runners"]["module_episode_return_mean"] for result in results]
        return [result["learners"] for result in results], steps, returns, weights_of(algo)


@pytest.mark.parametrize(
    ("engine", "base"),
    [
        pytest.param("process", PPOConfig, marks=pytest.mark.slow),
        pytest.param("process", APPOConfig, marks=pytest.mark.slow),
        pytest.param("process", DQNConfig, marks=pytest.mark.slow),
        pytest.param("ray", PPOConfig, marks=RAY),
        pytest.param("ray", DQNConfig, marks=RAY),
    ],
    indirect=["engine"],
)
def test_the_same_seed_gives_the_same_results_as_in_this_process(engine: str, base: type[AlgorithmConfig]) -> None:
    np.testing.assert_equal(train_on(engine, base, 0), train_on("local", base, 0))


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
@pytest.mark.parametrize("base", [PPOConfig, DQNConfig])
def test_learners_on_ray_give_what_learners_in_processes_give(ray_runtime: Any, base: type[AlgorithmConfig]) -> None:
    np.testing.assert_equal(train_on("ray", base, 2), train_on("process", base, 2))


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
def test_a_killed_runner_on_ray_is_replaced_by_one_with_all_modules(ray_runtime: Any) -> None:
    """In processes, see test_added_modules.py."""
    config = config_of(DQNConfig).env_runners(num_env_runners=2, straggler_factor=None).engine("ray")
    with config.build() as algo:
        algo.train()
        os.kill(algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid())[-1], signal.SIGKILL)
        deadline_s = time.monotonic() + DEADLINE_S
        while (result := algo.train())["fault_tolerance"]["num_healthy_workers"] < 2:
            assert time.monotonic() < deadline_s, result["fault_tolerance"]
        result = algo.train()
        assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1
        steps = result["runner_group"]["by_runner"]
        assert all(each["num_env_steps_sampled"] > 0 for each in steps.values()) and len(steps) == 2
        algo.sync_weights()
        learned = weights_of(algo)
        for module_id in ("red", "blue"):
            for weights in algo.env_runner_group.foreach_env_runner(
                lambda runner, module_id: {
                    name: value.numpy() for name, value in runner.actors[module_id].module.acting_weights().items()
                },
                kwargs={"module_id": module_id},
            ):
                assert weights and all(np.array_equal(learned[module_id][name], weights[name]) for name in weights)
