"""LearningProgressSampler: returns by task, probabilities by progress, and the same draws after a restart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corral import Algorithm, PPOConfig
from corral.callbacks.curriculum import LearningProgressSampler
from corral.errors import ConfigError
from corral.testing import CountingEnv
from exact_runs import differences, play, without_times
from small import small
from user_files import SMALL

TASKS = [1, 10, 100]


class Rewarding(CountingEnv):
    """The reward of each step is the task with which the episode began; it may change in the middle."""

    def __init__(self, config: Any = None) -> None:
        super().__init__({"episode_length": 3})
        self.task, self.level = 0, 0

    def get_task(self) -> Any:
        return self.task

    def set_task(self, task: Any) -> None:
        self.task = task

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.level = self.task
        return super().reset(seed=seed)

    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return obs, float(self.level), *rest

    def get_state(self) -> Any:
        return {**super().get_state(), "level": self.level}

    def set_state(self, state: Any) -> None:
        super().set_state(state)


Rewarding.STATE = (*CountingEnv.STATE, "level")


def config(sampler: LearningProgressSampler, env: Any = Rewarding, **settings: Any) -> PPOConfig:
    many = {**SMALL, "train_batch_size_per_learner": 56, "num_envs_per_env_runner": 4, **settings}
    return small(env, disable_env_checking=True, **many).callbacks(sampler)


def tasks(algo: Algorithm) -> list[list[Any]]:
    return algo.env_runner_group.foreach_env(lambda env: env.task)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_returns_belong_to_the_task_with_which_the_episode_began(num_env_runners: int, mode: str) -> None:
    made = config(LearningProgressSampler(TASKS), autoreset_mode=mode)
    with made.env_runners(num_env_runners=num_env_runners).engine("local").build() as algo:
        num_episodes = dict.fromkeys(map(str, TASKS), 0)
        for _ in range(6):
            result = algo.train()
            by_task = result["env_runners"]["by_task"]
            assert by_task.keys() == num_episodes.keys()
            for name, found in by_task.items():
                num_episodes[name] += found["num_episodes"]
                if found["num_episodes"]:
                    assert found["episode_return_mean"] == 3 * int(name)
        assert sum(num_episodes.values()) == result["env_runners"]["num_episodes_lifetime"]
        assert min(num_episodes.values()) > 0


def test_an_episode_that_follows_a_failure_belongs_to_its_own_task() -> None:
    class Failing(Rewarding):
        num_steps = 0

        def step(self, action: int) -> Any:
            Failing.num_steps += 1
            if Failing.num_steps % 23 == 1:
                raise OSError("the simulator is gone")
            return super().step(action)

    made = config(LearningProgressSampler(TASKS), env=Failing, restart_failed_sub_environments=True)
    with made.build() as algo:
        for _ in range(8):
            for name, found in algo.train()["env_runners"]["by_task"].items():
                assert found["num_episodes"] == 0 or found["episode_return_mean"] == 3 * int(name)
        assert algo.env_runner_group.counts.num_sub_env_restarts > 8


def test_tasks_may_be_arrays() -> None:
    goals = [np.array([0.0, 1.0]), np.array([2.0, 3.0])]

    class Goals(CountingEnv):
        goal = goals[0]

        def get_task(self) -> Any:
            return self.goal

        def set_task(self, task: Any) -> None:
            self.goal = np.array(task)

    with config(LearningProgressSampler(goals), env=Goals).build() as algo:
        result = algo.train()
    assert sorted(result["curriculum"]["task_share"]) == ["[0. 1.]", "[2. 3.]"]


def test_a_second_algorithm_begins_again_and_other_tasks_are_refused() -> None:
    sampler = LearningProgressSampler(TASKS)
    with config(sampler).build() as algo:
        algo.train()
        state = sampler.get_state()
    assert np.isfinite(sampler.averages).any() and sampler.num_draws == 1
    with config(sampler).build():
        assert np.isnan(sampler.averages).all() and sampler.num_draws == 0 and sampler.playing == {}
    with pytest.raises(ConfigError, match=r"is of the tasks \['1', '10', '100'\], not \['1', '10', '7'\]"):
        LearningProgressSampler([1, 10, 7]).set_state(state)


def test_episodes_of_the_evaluation_have_their_own_task() -> None:
    made = config(LearningProgressSampler(TASKS)).evaluation(evaluation_interval=1, evaluation_duration=2)
    with made.build() as algo:
        result = algo.train()
    assert result["evaluation"]["env_runners"]["episode_return_mean"] == 0.0
    assert sum(found["num_episodes"] for found in result["env_runners"]["by_task"].values()) == 16


def test_probabilities_follow_the_distance_of_two_averages() -> None:
    sampler = LearningProgressSampler(TASKS, fast=0.5, slow=0.1, even=0.25)
    assert sampler.probabilities.tolist() == [1 / 3] * 3  # nothing is known
    sampler.averages[:] = [[6.0, 5.0, np.nan], [5.0, 8.0, np.nan]]
    # Progress 1 and 3; a task that was not tried counts as the most.
    np.testing.assert_allclose(sampler.probabilities, 0.75 * np.array([1, 3, 3]) / 7 + 0.25 / 3)


def test_the_averages_move_by_their_weights() -> None:
    class Group:
        def foreach_env_runner(self, fn: Any) -> None:
            pass

    class Driver:
        env_runner_group = Group()

    class Log:
        def log_value(self, *args: Any, **kwargs: Any) -> None:
            pass

    sampler = LearningProgressSampler(["a", "b"], fast=0.5, slow=0.1)
    for mean, num in ((4.0, 2), (9.0, 0), (8.0, 1)):  # without an episode nothing moves
        by_task = {"a": {"episode_return_mean": mean, "num_episodes": num}, "b": {"num_episodes": 0}}
        sampler.on_train_result(algorithm=Driver(), metrics_logger=Log(), result={"env_runners": {"by_task": by_task}})
    np.testing.assert_allclose(sampler.averages[:, 0], [6.0, 4.4])
    assert np.isnan(sampler.averages[:, 1]).all()


def test_the_task_whose_returns_change_is_drawn_most() -> None:
    class Improving(Rewarding):
        num_steps = 0

        def step(self, action: int) -> Any:
            obs, _, *rest = super().step(action)
            Improving.num_steps += self.level == 10
            return obs, Improving.num_steps / 10 if self.level == 10 else 1.0, *rest

    with config(LearningProgressSampler(TASKS), env=Improving).build() as algo:
        for _ in range(8):
            result = algo.train()
    assert result["curriculum"]["task_share"]["10"] > 0.8
    assert sum(result["curriculum"]["task_share"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_it_continues_exactly_from_a_state(num_env_runners: int) -> None:
    def made() -> PPOConfig:
        return config(LearningProgressSampler(TASKS), num_env_runners=num_env_runners, engine_name="local")

    with made().build() as algo:
        for _ in range(3):
            algo.train()
        state = algo.get_state()
        expected = play(algo)
    with made().build() as algo:
        algo.set_state(state)
        assert differences(without_times(expected), without_times(play(algo))) == []


def test_a_restarted_runner_has_the_drawn_tasks() -> None:
    with config(LearningProgressSampler(TASKS), num_env_runners=2, engine_name="local").build() as algo:
        algo.train()
        before = tasks(algo)
        algo.env_runner_group._runners[2].handle.kill()
        while algo.env_runner_group.num_remote_worker_restarts < 1:
            algo.env_runner_group.restore_runners()
        assert tasks(algo) == before and before[0] != before[1]


def test_bad_arguments() -> None:
    for wrong in ({"tasks": []}, {"tasks": TASKS, "slow": 0.5}, {"tasks": TASKS, "even": 2.0}):
        with pytest.raises(ConfigError, match="LearningProgressSampler"):
            LearningProgressSampler(**wrong)  # type: ignore[arg-type]
