"""Rounds with fixed seeds give the same episodes; tasks of evaluation are given in turn and reported by task."""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from at_least import all_of
from corral import Callback, PPOConfig, evaluate_policy
from corral.errors import ConfigError
from corral.testing import CountingEnv
from small import small

SEEDS = [5, 3, 5, 11, 8, 2, 0]


def cartpole(**evaluation: Any) -> PPOConfig:
    return small("CartPole-v1", seed=1, evaluation_config={"explore": False}, **evaluation)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({}, "local"),
        ({"evaluation_num_env_runners": 3}, "local"),
        pytest.param(
            {"evaluation_num_env_runners": 2, "enable_async_evaluation": True}, "process", marks=pytest.mark.slow
        ),
    ],
    ids=["embedded", "three runners", "processes in pieces"],
)
def test_the_returns_are_in_the_order_of_the_seeds(settings: dict[str, Any], engine: str) -> None:
    with cartpole(evaluation_seeds=SEEDS, **settings).engine(engine).build() as algo:
        first, second = algo.evaluate()["env_runners"], algo.evaluate()["env_runners"]
        expected = evaluate_policy(algo, "CartPole-v1", seeds=SEEDS)
    assert first["episode_seeds"] == second["episode_seeds"] == SEEDS
    assert first["episode_returns"] == second["episode_returns"] == list(expected.episode_returns)
    assert first["episode_returns"][0] == first["episode_returns"][2]  # the same seed
    assert len(set(first["episode_returns"])) > 2


def test_a_range_of_seeds_is_a_round_of_its_length() -> None:
    with cartpole(evaluation_seeds=range(4), evaluation_interval=2).build() as algo:
        before, after = (algo.train()["evaluation"]["env_runners"] for _ in range(2))
    assert before["episode_seeds"] == []
    assert after["episode_seeds"] == [0, 1, 2, 3]
    assert after["num_episodes"] == 4


class Leveled(CountingEnv):
    """Episodes of as many steps as the task says: the return of task n is 1 + 2 + ... + n."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.task = 2

    def get_task(self) -> int:
        return self.task

    def set_task(self, task: int) -> None:
        self.task = task

    def reset(self, **arguments: Any) -> Any:
        self._length = self.task
        return super().reset(**arguments)


class Level(Callback):
    """Sets the task of all training envs to one more than the iteration."""

    def on_train_result(self, *, algorithm: Any, **kwargs: Any) -> None:
        task = algorithm.training_iteration + 1
        algorithm.env_runner_group.foreach_env(lambda env: env.unwrapped.set_task(task))


def leveled(env: Any = Leveled, **evaluation: Any) -> PPOConfig:
    return cartpole(**evaluation).environment(env)


@pytest.mark.parametrize("num_runners", [0, 2])
def test_tasks_are_played_in_turn_and_reported_by_task(num_runners: int) -> None:
    tasks = [1, 4, 3]
    config = leveled(evaluation_tasks=tasks, evaluation_interval=2, evaluation_duration=7).engine("local")
    with config.evaluation(evaluation_num_env_runners=num_runners).build() as algo:
        before, after = (algo.train()["evaluation"] for _ in range(2))
        trained = algo.env_runner_group.foreach_env(lambda env: env.unwrapped.get_task())
    assert after["env_runners"]["episode_lens"] == [1, 4, 3, 1, 4, 3, 1]
    assert after["by_task"] == {
        "1": {"episode_return_mean": 1.0, "num_episodes": 3},
        "4": {"episode_return_mean": 10.0, "num_episodes": 2},
        "3": {"episode_return_mean": 6.0, "num_episodes": 2},
    }
    assert before["by_task"].keys() == after["by_task"].keys()
    assert all_of(math.isnan(number) for numbers in before["by_task"].values() for number in numbers.values())
    assert {task for tasks in trained for task in tasks} == {2}  # training keeps its own


class Taking(Leveled):
    """Env that takes its task out of the dict that it is given."""

    def set_task(self, task: Any) -> None:
        self.task = task.pop("level")


def test_an_env_may_change_the_task_that_it_is_given() -> None:
    tasks = [{"level": 1}, {"level": 3}]
    with leveled(Taking, evaluation_tasks=tasks, evaluation_duration=4).build() as algo:
        for _ in range(2):
            evaluation = algo.evaluate()
            assert evaluation["env_runners"]["episode_lens"] == [1, 3, 1, 3]
            assert list(evaluation["by_task"]) == ["{'level': 1}", "{'level': 3}"]


def test_seeds_and_tasks_go_together() -> None:
    with leveled(evaluation_tasks=[1, 3], evaluation_seeds=[7, 8, 9]).build() as algo:
        found = algo.evaluate()["env_runners"]
    assert (found["episode_seeds"], found["episode_lens"]) == ([7, 8, 9], [1, 3, 1])


@pytest.mark.parametrize("parallel", [False, True])
def test_evaluation_has_the_tasks_of_training_when_a_round_begins(parallel: bool) -> None:
    config = leveled(evaluation_tasks="training", evaluation_interval=1, evaluation_duration=3).callbacks(Level)
    config.evaluation(evaluation_parallel_to_training=parallel).engine("local")
    with config.build() as algo:
        found = [algo.train()["evaluation"] for _ in range(3)]
    assert [set(round_["env_runners"]["episode_lens"]) for round_ in found] == [{2}, {2}, {3}]
    assert "by_task" not in found[0]


class StallsOnce(Leveled):
    """Env that sleeps for ten minutes in the second iteration of the first training runner."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._stalls, self._num_steps = config.worker_index == 1 and not config["evaluates"], 0

    def step(self, action: int) -> Any:
        self._num_steps += 1
        if self._stalls and self._num_steps > 12:
            time.sleep(600)
        return super().step(action)


@pytest.mark.slow
def test_the_tasks_of_a_training_runner_that_stalls_are_known() -> None:
    config = leveled(StallsOnce, evaluation_tasks="training", evaluation_interval=1, evaluation_duration=4)
    config.environment(env_config={"evaluates": False}).env_runners(num_env_runners=2, sample_timeout_s=1.0)
    config.evaluation(evaluation_config={"explore": False, "env_config": {"evaluates": True}})
    with config.engine("process").build() as algo:
        algo.env_runner_group.foreach_env_runner(lambda runner: runner.set_tasks([runner.worker_index]))
        for _ in range(3):
            start = time.perf_counter()
            lens = algo.train()["evaluation"]["env_runners"]["episode_lens"]
            assert lens == [1, 1, 2, 2]
            assert time.perf_counter() - start < 20
        group: Any = algo.env_runner_group
        group._runners[1].handle.kill()  # stopping would wait for it


@pytest.mark.parametrize("tasks", ["training", None])
def test_evaluation_as_in_training_has_the_resets_of_training(tasks: Any) -> None:
    def choose(episode_index: int) -> dict[str, Any]:
        return {"task": 3 + episode_index}

    config = leveled(evaluation_tasks=tasks, evaluation_duration=4).environment(env_reset_fn=choose)
    with config.build() as algo:
        found = algo.evaluate()["env_runners"]["episode_lens"]
    assert found == ([3, 3, 4, 4] if tasks == "training" else [2, 2, 2, 2])


class Native(gym.vector.SyncVectorEnv):
    """A vector env that a factory returns."""

    def __init__(self) -> None:
        super().__init__([CountingEnv, CountingEnv])


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        (Leveled, {"evaluation_seeds": [1], "evaluation_duration_unit": "timesteps"}, "evaluation_seeds.*timesteps"),
        (Leveled, {"evaluation_tasks": [1], "evaluation_duration_unit": "timesteps"}, "evaluation_tasks.*timesteps"),
        (Leveled, {"evaluation_seeds": [1, 2], "evaluation_duration": 3}, "evaluation_duration=3.*2 evaluation_seeds"),
        (
            Leveled,
            {"evaluation_seeds": [1], "evaluation_duration": "auto", "evaluation_parallel_to_training": True},
            "evaluation_duration='auto'.*evaluation_seeds",
        ),
        (Leveled, {"evaluation_seeds": []}, "evaluation_seeds.*empty"),
        (Leveled, {"evaluation_tasks": []}, "evaluation_tasks.*empty"),
        (Leveled, {"evaluation_tasks": [1, 2, 3], "evaluation_duration": 2}, "2 of 3 evaluation_tasks"),
        (Leveled, {"evaluation_tasks": [1, 2], "evaluation_seeds": [4]}, "1 of 2 evaluation_tasks"),
        (CountingEnv, {"evaluation_tasks": [1]}, "evaluation_tasks.*get_task and set_task"),
        (Native, {"evaluation_seeds": [1]}, "evaluation_seeds"),
    ],
)
def test_what_cannot_be_played_is_refused_at_build(env: Any, settings: dict[str, Any], message: str) -> None:
    config = leveled(env, evaluation_interval=1, **settings)
    if env is Native:
        config.env_runners(num_envs_per_env_runner=None)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        config.build().stop()


def test_seeds_pair_the_episodes_of_two_policies() -> None:
    """The difference of paired returns varies less than the difference of returns with other seeds."""

    def returns(seeds: Any, push: float) -> Any:
        def act(obs: Any) -> int:
            return int(obs[2] + push * obs[3] > 0)

        return np.array(evaluate_policy(act, "CartPole-v1", seeds=seeds).episode_returns)

    paired = returns(range(20), 0.0) - returns(range(20), 0.001)
    unpaired = returns(range(20), 0.0) - returns(range(20, 40), 0.001)
    assert paired.std() < 0.5 * unpaired.std()
