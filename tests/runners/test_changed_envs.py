"""User code that changes the envs of runners: also of runners that were not there, and of those that replace others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from corral import PPOConfig
from corral.core.metrics.timers import Timers
from corral.engines.lazy import LazyEngine
from corral.errors import EnvError
from corral.runners.requests import SampleRequest
from corral.runners.runner_group import EnvRunnerGroup
from corral.runners.runner_state import get_runner_state, set_runner_state
from corral.testing import CountingEnv
from handmade import MakeRunner

RAY = pytest.param("ray", marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow])


class SizedEnv(CountingEnv):
    """A `CountingEnv` with a task, and with a size from `env_config`."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.size, self.task = config.get("size", 4), 0
        self.observation_space = type(self).observation_space
        if self.size > 100:
            self.action_space = type(self.action_space)(3)

    def get_task(self) -> Any:
        return self.task

    def set_task(self, task: Any) -> None:
        self.task = task


@contextmanager
def started(engine_name: str, **settings: Any) -> Iterator[EnvRunnerGroup]:
    made = PPOConfig().environment(SizedEnv, disable_env_checking=True)
    made.env_runners(num_env_runners=2, num_envs_per_env_runner=2).engine(engine_name).debugging(seed=0)
    made.fault_tolerance(delay_between_env_runner_restarts_s=0.0)
    engine = LazyEngine(engine_name)
    group = EnvRunnerGroup(made.copy(**settings).freeze(), engine)
    try:
        yield group
    finally:
        group.stop()
        engine.stop()


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[EnvRunnerGroup]:
    if request.param == "ray":
        request.getfixturevalue("ray_runtime")
    with started(request.param) as made:
        yield made


ENGINES = pytest.mark.parametrize("group", ["process", RAY], indirect=True)


def kill(group: EnvRunnerGroup, index: int) -> None:
    group._runners[index].handle.kill()


def await_all(group: EnvRunnerGroup) -> None:
    deadline_s = time.monotonic() + 60
    group.restore_runners()
    while group.num_healthy_remote_workers < 2 and time.monotonic() < deadline_s:
        group.restore_runners()
        time.sleep(0.01)


def see(group: EnvRunnerGroup) -> list[list[tuple[int, Any]]]:
    """Size and task of every sub-env."""
    return group.foreach_env(lambda env: (env.size, env.task))


def grow(env_runner: Any, size: int = 8) -> None:
    env_runner.config.environment(env_config={"size": size})
    env_runner.make_env()


@pytest.mark.slow_cases("process")
@ENGINES
def test_what_changed_the_envs_reaches_runners_that_were_down_then(group: EnvRunnerGroup) -> None:
    kill(group, 2)
    group.foreach_env_runner(grow)  # it finds runner 2 dead
    group.foreach_env(lambda env: env.set_task(4))
    assert see(group) == [[(8, 4)] * 2]
    await_all(group)
    assert see(group) == [[(8, 4)] * 2] * 2
    kill(group, 2)
    await_all(group)  # from its state this time
    assert see(group) == [[(8, 4)] * 2] * 2


@pytest.mark.parametrize("group", ["local", RAY], indirect=True)
def test_a_replaced_runner_has_the_settings_and_the_tasks_of_the_runner_before(group: EnvRunnerGroup) -> None:
    group.foreach_env_runner(grow, remote_worker_ids=[1])
    group.foreach_env(lambda env: env.set_task(env.size))
    kill(group, 1)
    await_all(group)
    assert see(group) == [[(8, 8)] * 2, [(4, 4)] * 2]
    group.foreach_env_runner(grow, kwargs={"size": 4}, remote_worker_ids=[1])  # back to what it was built with
    kill(group, 1)
    await_all(group)
    assert [size for size, _ in see(group)[0]] == [4, 4]


@pytest.mark.slow
def test_a_runner_that_died_in_the_call_gets_it_again(tmp_path: Path) -> None:
    fatal = tmp_path / "fatal"
    fatal.touch()

    def change(env_runner: Any, fatal: Path = fatal) -> None:
        if env_runner.worker_index == 2 and fatal.exists():
            fatal.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        env_runner.foreach_env(lambda env: env.set_task(env.task + 1))

    with started("process") as group:
        group.foreach_env_runner(change)
        assert see(group) == [[(4, 1)] * 2]
        await_all(group)
        assert see(group) == [[(4, 1)] * 2] * 2


def test_calls_that_change_no_env_are_not_repeated(tmp_path: Path) -> None:
    def note(env_runner: Any, directory: Path = tmp_path) -> None:
        (directory / f"{env_runner.worker_index}").touch()
        env_runner.foreach_env(lambda env: env.get_task())

    with started("local") as group:
        kill(group, 2)
        group.foreach_env_runner(note)
        await_all(group)
        assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_call_that_reached_nobody_is_made_as_soon_as_somebody_is_there() -> None:
    with started("local") as group:
        kill(group, 1)
        kill(group, 2)
        assert group.foreach_env(lambda env: env.set_task(6)) == []
        await_all(group)
        assert see(group) == [[(4, 6)] * 2] * 2


@pytest.mark.slow
def test_calls_during_a_restart_are_made_before_the_runner_samples() -> None:
    with started("process") as group:
        kill(group, 2)
        for _ in range(2):  # it finds runner 2 dead, and begins to restart it
            group.restore_runners()
        assert group._runners[2].starting is not None
        group.foreach_env(lambda env: env.set_task(3))
        await_all(group)
        assert see(group) == [[(4, 3)] * 2] * 2


@pytest.mark.parametrize("how", ["late", pytest.param("never fetched", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_calls_whose_results_nobody_waits_for_count(how: str) -> None:
    def change(env: Any) -> None:
        time.sleep(0.05)
        env.set_task(3)

    with started("process") as group:
        kill(group, 2)
        if how == "late":
            assert group.foreach_env(change, timeout_seconds=0.0) == []
        else:
            group.foreach_env_runner_async("foreach_env", kwargs={"fn": change})
        group.foreach_env(lambda env: None, remote_worker_ids=[1])  # after the late call
        group.restore_runners()
        kill(group, 1)
        await_all(group)
        assert see(group) == [[(4, 3)] * 2] * 2


@pytest.mark.slow
def test_a_busy_runner_chooses_its_tasks_after_its_fragment(tmp_path: Path) -> None:
    class Gated(SizedEnv):
        def __init__(self, config: Any = None) -> None:
            super().__init__(config)
            self.open_at_s = time.monotonic() + (10 if config.worker_index == 2 else 0)

        def step(self, action: Any, gate: Path = tmp_path / "gate") -> Any:
            while not gate.exists() and time.monotonic() < self.open_at_s:
                time.sleep(0.01)
            return super().step(action)

    def count(train_results: Any, task_settable_env: Any, env_ctx: Any) -> Any:
        return task_settable_env.get_task() + train_results["step"]

    with started("process", env=Gated, env_task_fn=count) as group:
        group.sample_async(SampleRequest(num_timesteps=4))
        group.choose_tasks({"step": 1})
        group.choose_tasks({"step": 2})
        assert not group._runners[2].sampling.future.done()  # type: ignore[union-attr]
        assert group.foreach_env(lambda env: env.task, remote_worker_ids=[1]) == [[3, 3]]
        (tmp_path / "gate").touch()
        assert group.foreach_env(lambda env: env.task) == [[3, 3]] * 2


def test_a_chosen_runner_only() -> None:
    with started("local") as group:
        kill(group, 2)
        group.foreach_env(lambda env: env.set_task(3), remote_worker_ids=[1])
        await_all(group)
        assert see(group) == [[(4, 3)] * 2, [(4, 0)] * 2]


class TestMakeEnv:
    def test_the_config_of_a_runner_is_its_own(self, make_runner: MakeRunner) -> None:
        runner, other = (make_runner(SizedEnv, num_envs=2, env_config={"size": 5}) for _ in range(2))
        runner.sample(num_timesteps=4)
        grow(runner)
        assert runner.foreach_env(lambda env: env.size) == [8, 8]
        assert other.config.env_config == {"size": 5} and runner.config.env_config == {"size": 8}
        assert runner.sample(num_timesteps=4).obs[0].tolist() == [[0, 0]] * 2  # a reset

    def test_a_setting_may_be_changed_in_place(self, make_runner: MakeRunner) -> None:
        runner, replacement = (make_runner(SizedEnv, env_config={"size": 5}) for _ in range(2))
        runner.config.env_config["size"] = 9
        runner.make_env()
        replacement.set_state(runner.get_state())
        assert replacement.foreach_env(lambda env: env.size) == [9]

    def test_settings_apply_when_the_envs_are_made(self, make_runner: MakeRunner) -> None:
        runner = make_runner(SizedEnv, env_config={"size": 5})
        runner.config.environment(env_reset_fn=lambda: {"task": 3})
        runner.sample(num_timesteps=4)
        assert runner.foreach_env(lambda env: env.task) == [0] and runner.get_state()["num_episodes"] is None
        runner.make_env()
        runner.sample(num_timesteps=4)
        assert runner.foreach_env(lambda env: env.task) == [3]

    def test_other_settings_cannot_change_in_a_runner(self, make_runner: MakeRunner) -> None:
        config = make_runner(SizedEnv).config
        with pytest.raises(
            AttributeError, match=r"'lr'.*in a runner only settings of \.environment\(\.\.\.\) can change"
        ):
            config.training(lr=0.5)

    def test_the_algorithm_keeps_its_config(self) -> None:
        config = PPOConfig().environment(SizedEnv, env_config={"size": 5}).env_runners(num_envs_per_env_runner=1)
        with config.build() as algo:
            algo.env_runner_group.foreach_env_runner(grow)
            assert algo.config.env_config == {"size": 5}
            assert algo.env_runner_group.foreach_env(lambda env: env.size) == [[8]]

    def test_another_env_must_fit_the_module(self, make_runner: MakeRunner) -> None:
        runner = make_runner(SizedEnv)
        runner.sample(num_timesteps=4)
        with pytest.raises(EnvError, match=r"actions of Discrete\(3\) .* made for .* Discrete\(2\)"):
            grow(runner, size=200)
        with pytest.raises(EnvError, match=r"made for"):  # it does not sample from the wrong env
            runner.sample(num_timesteps=4)
        grow(runner, size=10)
        assert runner.sample(num_timesteps=4).num_env_steps == 4

    def test_events_are_fired_for_the_new_envs(self, make_runner: MakeRunner) -> None:
        events: list[Any] = []
        note: Callable[..., None] = lambda env_context: events.append(env_context["size"])  # noqa: E731
        runner = make_runner(SizedEnv, env_config={"size": 5}, on_environment_created=note)
        grow(runner)
        assert events == [5, 8]


def test_a_failed_sub_env_is_replaced_by_one_of_the_changed_settings(make_runner: MakeRunner) -> None:
    class Failing(SizedEnv):
        def step(self, action: Any) -> Any:
            if self.size == 8 and self._episode == 0 and not failed:
                failed.append(self)
                raise OSError("the simulator is gone")
            return super().step(action)

    failed: list[Any] = []
    runner = make_runner(Failing, disable_env_checking=True, restart_failed_sub_environments=True)
    grow(runner)
    runner.sample(num_timesteps=4)
    assert runner.num_sub_env_restarts == 1 and runner.foreach_env(lambda env: env.size) == [8]


def test_sampling_waits_for_missed_calls() -> None:
    with started("local") as group:
        kill(group, 2)
        group.foreach_env(lambda env: env.set_task(3))
        deadline_s = time.monotonic() + 60
        while group.num_healthy_remote_workers < 2 and time.monotonic() < deadline_s:
            group.sample(SampleRequest(num_timesteps=4), Timers())
        assert see(group) == [[(4, 3)] * 2] * 2


class Saved(SizedEnv):
    """Continues from a state, in which the task is not."""

    def get_state(self) -> Any:
        return {name: value for name, value in super().get_state().items() if name != "task"}


class TestState:
    @pytest.mark.parametrize("env", [Saved, SizedEnv])
    def test_envs_that_restart_have_the_tasks_of_the_state_too(self, make_runner: MakeRunner, env: Any) -> None:
        runner, other = (make_runner(env, num_envs=2) for _ in range(2))
        for changed, task in ((runner, 1), (other, 5)):
            changed.set_tasks([task])
            changed.sample(num_timesteps=4)
        set_runner_state(runner, get_runner_state(other))
        assert runner.foreach_env(lambda env: env.task) == [5, 5] == runner.host.get_tasks()

    def test_envs_that_continue_have_the_tasks_of_the_state(self, make_runner: MakeRunner) -> None:
        settings = {"env_reset_fn": lambda training_iteration: {"task": training_iteration}, "num_envs": 2}
        runner, other = (make_runner(Saved, **settings) for _ in range(2))
        runner.collect(SampleRequest(num_timesteps=4, training_iteration=7))
        set_runner_state(other, get_runner_state(runner))
        assert other.foreach_env(lambda env: env.task) == [7, 7]

    def test_envs_are_made_with_the_settings_of_the_state(self, make_runner: MakeRunner) -> None:
        runner, other = (make_runner(SizedEnv, num_envs=2) for _ in range(2))
        grow(runner)
        set_runner_state(other, get_runner_state(runner))
        assert other.foreach_env(lambda env: env.size) == [8, 8]

    def test_a_new_env_config_holds_in_a_replacement_too(self) -> None:
        with started("local") as group:
            group.foreach_env_runner(grow)
            state = group.get_state()
        with started("local", env_config={"size": 6}) as group:
            group.set_state(state)
            kill(group, 1)  # before it has told its state
            await_all(group)
            assert see(group) == [[(6, 0)] * 2] * 2

    def test_a_runner_that_is_down_keeps_its_tasks_and_its_number_of_episodes(self) -> None:
        with started("local", env_reset_fn=lambda: None) as group:
            group.foreach_env(lambda env: env.set_task(6))
            group.sample(SampleRequest(num_timesteps=40), Timers())
            expected = group.foreach_env_runner(lambda runner: runner.host.get_num_episodes())
            assert min(expected[0]) > 1
            kill(group, 1)
            state = group.get_state()
            assert state["runners"][0]["env"]["envs"] is None
        for is_killed in (False, True):  # before it has told its state
            with started("local", env_reset_fn=lambda: None) as group:
                group.set_state(state)
                if is_killed:
                    kill(group, 1)
                    await_all(group)
                assert see(group) == [[(4, 6)] * 2] * 2
                assert group.foreach_env_runner(lambda runner: runner.host.get_num_episodes())[0] == expected[0]
