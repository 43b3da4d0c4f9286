"""Each way to change the env while several agents learn, with the envs in the runner and in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from at_least import all_of
from corral import MultiAgentEnv, PPOConfig
from corral.callbacks.curriculum import LearningProgressSampler, ThresholdCurriculum
from small import small

RED = "env_runners/module_episode_return_mean/red"


class Stays(MultiAgentEnv):
    """Both agents get a reward of 1 per step; the task is the number of steps."""

    possible_agents = ("red", "blue")
    observation_space = gym.spaces.Box(0, 99, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.length = config.get("length", 2)

    def get_task(self) -> int:
        return int(self.length)

    def set_task(self, task: int) -> None:
        self.length = task

    def _obs(self) -> dict[Any, Any]:
        return {agent: np.full(1, self.time, np.float32) for agent in self.possible_agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time, self.end = 0, self.length
        return self._obs(), {}

    def step(self, action_dict: dict[Any, Any]) -> Any:
        self.time += 1
        return self._obs(), dict.fromkeys(action_dict, 1.0), {"__all__": self.time >= self.end}, {}, {}


def mean_of_red(result: Any) -> float:
    return float(result["env_runners"]["module_episode_return_mean"]["red"])


def choose_task(train_results: Any, task_settable_env: Any, env_ctx: Any) -> int:
    assert mean_of_red(train_results) >= 2
    return int(task_settable_env.get_task() + 1 + env_ctx.vector_index)


def set_length(algorithm: Any, result: Any) -> None:
    length = 5 if mean_of_red(result) < 3 else 6
    algorithm.env_runner_group.foreach_env(lambda env: env.set_task(length))


def make_longer_envs(algorithm: Any) -> None:
    def change(env_runner: Any) -> None:
        env_runner.config.environment(env_config={"length": 7})
        env_runner.make_env()

    if algorithm.training_iteration == 1:
        algorithm.env_runner_group.foreach_env_runner(change)


def choose_reset(episode_index: int, training_iteration: int) -> dict[str, Any]:
    return {"task": 3 + training_iteration}


# How the config is changed, and the tasks of the two sub-envs after 3 iterations.
FORMS: dict[str, tuple[Callable[[PPOConfig], Any], list[int]]] = {
    "env_task_fn": (lambda config: config.environment(env_task_fn=choose_task), [5, 8]),
    "env_reset_fn": (lambda config: config.environment(env_reset_fn=choose_reset), [5, 5]),
    "foreach_env": (lambda config: config.callbacks(on_train_result=set_length), [6, 6]),
    "make_env": (lambda config: config.callbacks(on_train_result=make_longer_envs), [7, 7]),
    "thresholds": (
        lambda config: config.callbacks(ThresholdCurriculum([2, 4, 6], thresholds=2.0, metric=RED, patience=1)),
        [6, 6],
    ),
}
SMALL = {"train_batch_size_per_learner": 64, "minibatch_size": 64, "num_epochs": 1}


def config(vectorization: Any) -> PPOConfig:
    made = small(Stays, vectorization=vectorization, metrics_num_episodes_for_smoothing=4, **SMALL)
    return made.multi_agent(policies={"red", "blue"})


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("form", FORMS)
def test_tasks_reach_the_env_of_several_agents(form: str, vectorization: str) -> None:
    change, expected = FORMS[form]
    made = config(vectorization)
    change(made)
    with made.build() as algo:
        results = [algo.train() for _ in range(3)]
        assert algo.env_runner_group.foreach_env(lambda env: env.get_task()) == [expected]
        lengths = [result["env_runners"]["episode_len_mean"] for result in results]
        assert lengths == sorted(lengths) and lengths[-1] > lengths[0]
        assert all_of(mean_of_red(result) == result["env_runners"]["episode_len_mean"] for result in results)


def test_learning_progress_counts_the_return_of_all_agents() -> None:
    with config("sync").callbacks(LearningProgressSampler([3, 4, 6])).build() as algo:
        of_tasks = [algo.train()["env_runners"]["by_task"] for _ in range(4)]
    seen = {
        task: part["episode_return_mean"]
        for by_task in of_tasks
        for task, part in by_task.items()
        if part["num_episodes"] and task != "2"
    }
    assert seen and seen == {task: 2.0 * int(task) for task in seen}
