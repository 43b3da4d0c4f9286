"""Tasks of envs, and `env_task_fn`, which chooses them after each iteration."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import Algorithm, PPOConfig, TaskSettableEnv
from corral.errors import CallbackError, ConfigError
from corral.testing import CountingEnv
from small import small
from user_files import SMALL

RAY = pytest.param("ray", marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow_on_ray])


class Levels(TaskSettableEnv):
    """The env of the documents: a task is a level. It notes the task of each episode."""

    observation_space = CountingEnv.observation_space
    action_space = CountingEnv.action_space

    def __init__(self, config: Any = None) -> None:
        self._env, self.level, self.episodes = CountingEnv(), 0, []

    def get_task(self) -> Any:
        return self.level

    def set_task(self, task: Any) -> None:
        self.level = task

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episodes.append(self.level)
        return self._env.reset(seed=seed)

    def step(self, action: Any) -> Any:
        return self._env.step(action)


def harder(train_results: dict[str, Any], task_settable_env: Any, env_ctx: Any) -> int:
    """The function of the documents."""
    current: int = task_settable_env.get_task()
    return current + 1


def config(env: Any = Levels, engine: str = "local", num_env_runners: int = 0, **settings: Any) -> PPOConfig:
    tasks = {"env_task_fn": harder, "disable_env_checking": True}
    return small(env, num_env_runners=num_env_runners, engine_name=engine, **{**SMALL, **tasks, **settings})


def levels(algo: Algorithm) -> list[list[Any]]:
    return algo.env_runner_group.foreach_env(lambda env: env.get_wrapper_attr("get_task")())


class TestTaskSettableEnv:
    def test_both_methods_must_be_defined(self) -> None:
        class Half(Levels):
            set_task = TaskSettableEnv.set_task

        with pytest.raises(TypeError, match="set_task"):
            Half()  # type: ignore[abstract]

    def test_by_default_only_the_task_in_force_can_be_sampled(self) -> None:
        env = Levels()
        env.set_task(7)
        assert env.sample_tasks(3) == [7, 7, 7]


@pytest.mark.parametrize(
    ("engine", "num_env_runners"),
    [
        ("local", 0),
        ("local", 2),
        pytest.param("process", 2, marks=pytest.mark.slow),
        pytest.param("ray", 2, marks=RAY.marks),
    ],
)
def test_the_function_of_the_documents_is_called_after_each_iteration(
    engine: str, num_env_runners: int, request: pytest.FixtureRequest
) -> None:
    if engine == "ray":
        request.getfixturevalue("ray_runtime")
    seen: list[Any] = []
    made = config(engine=engine, num_env_runners=num_env_runners)
    made.callbacks(on_train_result=lambda algorithm: seen.append(levels(algorithm)))
    with made.build() as algo:
        num_runners = max(1, num_env_runners)
        assert levels(algo) == [[0, 0]] * num_runners
        for iteration in (1, 2):
            algo.train()
            assert levels(algo) == seen[-1] == [[iteration] * 2] * num_runners  # set before on_train_result
        algo.train()
        # The task applies from the next reset on.
        [episodes, *_] = algo.env_runner_group.foreach_env(lambda env: env.unwrapped.episodes)[0]
        assert episodes == sorted(episodes) and set(episodes) == {0, 1, 2}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_it_is_given_the_result_the_env_and_its_context(vectorization: str) -> None:
    def place(train_results: dict[str, Any], task_settable_env: Any, env_ctx: Any) -> Any:
        assert isinstance(task_settable_env, Levels)
        return [train_results["training_iteration"], env_ctx.worker_index, env_ctx.vector_index, env_ctx["size"]]

    with config(env_task_fn=place, env_config={"size": 5}).env_runners(vectorization=vectorization).build() as algo:  # type: ignore[arg-type]
        algo.train()
        assert levels(algo) == [[[1, 0, 0, 5], [1, 0, 1, 5]]]


def test_an_env_has_tasks_through_wrappers() -> None:
    made = config(
        wrappers=[
            lambda env: gym.wrappers.TimeLimit(env, 5),
            lambda env: gym.wrappers.TransformReward(env, lambda reward: 2 * reward),
        ]
    )
    with made.build() as algo:
        algo.train()
        assert levels(algo) == [[1, 1]]


def test_none_keeps_the_task_and_the_same_task_is_not_set_again() -> None:
    class Strict(Levels):
        def set_task(self, task: Any) -> None:
            assert task != self.level
            super().set_task(task)

    def once(train_results: Any, task_settable_env: Any, env_ctx: Any) -> Any:
        return 3 if env_ctx.vector_index else None

    with config(Strict, env_task_fn=once).build() as algo:
        for _ in range(2):
            algo.train()
        assert levels(algo) == [[0, 3]]


class Described(Levels):
    """A task is a dict, which the env gives away."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.level, self.given = {"size": 1}, []

    def set_task(self, task: Any) -> None:
        self.given.append(task)
        self.level = task


def test_a_task_that_the_function_changes_in_place_is_set() -> None:
    def grow(train_results: Any, task_settable_env: Any, env_ctx: Any) -> Any:
        task = task_settable_env.get_task()
        task["size"] += 1
        return task

    with config(Described, env_task_fn=grow).build() as algo:
        algo.train()
        assert algo.env_runner_group.foreach_env(lambda env: env.given) == [[[{"size": 2}]] * 2]


def test_tasks_of_arrays_that_are_equal_are_not_set_again() -> None:
    def fixed(train_results: Any, task_settable_env: Any, env_ctx: Any) -> Any:
        return {"goal": np.array([1.0, 2.0])}

    with config(Described, env_task_fn=fixed).build() as algo:
        for _ in range(3):
            algo.train()
        assert algo.env_runner_group.foreach_env(lambda env: len(env.given)) == [[1, 1]]


def test_sub_envs_and_states_have_tasks_of_their_own() -> None:
    task = {"size": 1}
    with config(Described, env_task_fn=None).build() as algo:
        algo.env_runner_group.foreach_env_runner("set_tasks", kwargs={"tasks": [task]})
        state = algo.get_state()
        algo.env_runner_group.foreach_env(lambda env: env.level.update(size=env.level["size"] + 1))
        assert levels(algo) == [[{"size": 2}] * 2] and task == {"size": 1}
        for _ in range(2):
            algo.set_state(state)
            assert levels(algo) == [[{"size": 1}] * 2]
            algo.env_runner_group.foreach_env(lambda env: env.level.update(size=3))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_sub_env_that_fails_wholly_keeps_its_last_known_task(vectorization: str) -> None:
    class Gone(Levels):
        num_steps = 0

        def get_task(self) -> Any:
            if self.num_steps < 0:
                raise OSError("the simulator is gone")
            return super().get_task()

        def step(self, action: Any) -> Any:
            self.num_steps += 1
            if self.num_steps == 5:
                self.num_steps = -100
            self.get_task()
            return super().step(action)

    made = config(Gone, env_task_fn=None).fault_tolerance(restart_failed_sub_environments=True)
    with made.env_runners(vectorization=vectorization).build() as algo:  # type: ignore[arg-type]
        algo.env_runner_group.foreach_env_runner("set_tasks", kwargs={"tasks": [7, 8]})
        algo.train()
        assert algo.env_runner_group.counts.num_sub_env_restarts >= 2
        assert levels(algo) == [[7, 8]]


def test_an_env_without_tasks_is_refused_at_build() -> None:
    with pytest.raises(ConfigError, match=r"env 'CountingEnv' takes none: define get_task\(\) and set_task\(task\)"):
        config(CountingEnv).build()


@pytest.mark.parametrize("wrong", [lambda results, env: 1, 3], ids=["two arguments", "int"])
def test_a_function_of_other_arguments_is_refused_at_build(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="env_task_fn"):
        config(env_task_fn=wrong).validate()


@pytest.mark.parametrize(
    ("engine", "num_env_runners"), [("local", 0), pytest.param("process", 1, marks=pytest.mark.slow)]
)
def test_what_the_function_raises_ends_the_run(engine: str, num_env_runners: int) -> None:
    def fail(train_results: Any, task_settable_env: Any, env_ctx: Any) -> Any:
        raise LookupError("no such level")

    with config(engine=engine, num_env_runners=num_env_runners, env_task_fn=fail).build() as algo:
        with pytest.raises(CallbackError, match=r"env_task_fn, sub-env 0 of runner .: LookupError: no such level"):
            algo.train()


def test_a_native_vector_env_gives_way_to_single_envs() -> None:
    class Tasks(gym.Wrapper[Any, Any, Any, Any]):
        task = 0

        def get_task(self) -> int:
            return self.task

        def set_task(self, task: int) -> None:
            self.task = task

    with pytest.raises(ConfigError, match="env 'CartPole-v1' takes none"):
        config("CartPole-v1").build()
    with config("CartPole-v1", wrappers=[Tasks]).build() as algo:
        algo.train()
        assert levels(algo) == [[1, 1]]


def test_a_function_of_the_iteration_is_given_the_finished_ones() -> None:
    with config(env_task_fn=None, env_reset_fn=lambda training_iteration: {"task": training_iteration}).build() as algo:
        for iteration in range(3):
            algo.train()
            assert levels(algo) == [[iteration] * 2]


def test_evaluation_runners_choose_no_tasks() -> None:
    made = config(env_reset_fn=lambda: None)
    alone = made.for_evaluation()
    assert alone.env_task_fn is None and alone.env_reset_fn is None and not alone.chooses_resets
    assert made.copy(evaluation_tasks="training").for_evaluation().env_reset_fn is made.env_reset_fn
    own = made.copy(evaluation_config={"env_reset_fn": harder}).for_evaluation()
    assert own.env_reset_fn is harder and own.chooses_resets
    assert made.copy(evaluation_seeds=[1]).for_evaluation().chooses_resets
