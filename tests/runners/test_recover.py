"""What a runner does for those who look after it: recover, state, single sub-envs, seeds, and steps that were lost."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from corral import PPOConfig
from corral.errors import CallbackError, EnvError, EnvTimeoutError, SubEnvError, WorkerDiedError
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv, FaultyEnv
from faulty import TroubleEnv, hang
from handmade import MakeRunner

VECTORIZATIONS = ["sync", "async"]
MODES = ["next_step", "same_step"]


def make_trouble(make_runner: MakeRunner, **settings: Any) -> EnvRunner:
    config = {"counts": {}, **settings.pop("env_config", {})}
    return make_runner(TroubleEnv, env_config=config, disable_env_checking=True, **settings)


class TestRecover:
    @pytest.mark.parametrize("how", ["raise", "sleep", "SIGKILL", "SIGSTOP"])
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_after_a_failure_it_continues(self, make_runner: MakeRunner, vectorization: str, how: str) -> None:
        if vectorization == "sync" and how.startswith("SIG"):
            pytest.skip("that would be this process")
        runner = make_trouble(
            make_runner,
            num_envs=2,
            vectorization=vectorization,
            env_step_timeout_s=0.2,
            env_config={"how": how, "step_faults": [6], "vector_index": 1},
        )
        before = runner.sample(num_timesteps=8)
        runner.foreach_env(lambda env: env.set_task(env.index + 3))
        old = getattr(runner.env.unwrapped, "processes", [])
        with pytest.raises(EnvError):
            runner.sample(num_timesteps=20)
        start = time.monotonic()
        runner.recover()
        assert time.monotonic() - start < 20
        assert not any(process.is_alive() for process in old)
        # In a process of its own the new sub-env counts from where its parent does: at the start.
        after = runner.sample(num_timesteps=6)
        assert after.obs[0].tolist() == [[0, 0], [0, 0]]
        assert {e.id_ for e in before}.isdisjoint({e.id_ for e in after})
        assert runner.foreach_env(lambda env: env.task) == [3, 4]
        assert runner.metrics.peek("num_env_steps_sampled_lifetime") == before.num_env_steps + after.num_env_steps
        assert runner.metrics.peek("num_episodes_lifetime") == sum(
            int((r.done & r.valid).sum()) for r in (before, after)
        )

    def test_announces_the_new_env(self, make_runner: MakeRunner) -> None:
        envs: list[Any] = []
        runner = make_runner(on_environment_created=lambda env: envs.append(env))
        runner.sample(num_timesteps=2)
        runner.recover()
        assert len(envs) == 2
        assert envs[1] is runner.env
        assert envs[0] is not runner.env

    @pytest.mark.slow
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_does_not_wait_for_an_env_that_cannot_be_closed(self, make_runner: MakeRunner, vectorization: str) -> None:
        here = os.getpid()

        class Unclosable(TroubleEnv):
            hangs = True

            def close(self) -> None:
                if self.hangs and (vectorization == "sync" or os.getpid() != here):
                    hang("sleep")

        runner = make_runner(
            Unclosable,
            num_envs=2,
            vectorization=vectorization,
            env_config={"counts": {}, "step_faults": [2]},
            disable_env_checking=True,
        )
        with pytest.raises(EnvError):
            runner.sample(num_timesteps=9)
        start = time.monotonic()
        try:
            runner.recover()
            assert time.monotonic() - start < 30
        finally:
            Unclosable.hangs = False
            if vectorization == "async":  # these have a `hangs` of their own
                runner.env.close(timeout=0.1)

    def test_closes_every_sub_env_though_one_cannot_be_closed(self, make_runner: MakeRunner) -> None:
        class Unclosable(TroubleEnv):
            raises = True

            def close(self) -> None:
                super().close()
                if self.index == 1 and self.raises:
                    raise OSError("it is stuck")

        log: list[Any] = []
        runner = make_runner(Unclosable, num_envs=3, env_config={"counts": {}, "log": log}, disable_env_checking=True)
        runner.recover()
        assert sorted(index for what, index in log if what == "closed") == [0, 1, 2]
        Unclosable.raises = False

    def test_an_env_that_cannot_be_made_leaves_a_runner_that_can_be_stopped(self, make_runner: MakeRunner) -> None:
        runner = make_trouble(make_runner, env_config={"make_faults": [2]})
        with pytest.raises(EnvError, match="fault 2 in make"):
            runner.recover()
        runner.stop()
        runner.recover()
        assert runner.sample(num_timesteps=2).num_env_steps == 2

    def test_after_an_error_in_a_callback(self, make_runner: MakeRunner) -> None:
        failed: list[int] = []

        def fail(episode: Any) -> None:
            if episode.t == 2 and not failed:
                failed.append(1)
                raise KeyError("mine")

        runner = make_runner(on_episode_step=fail)
        with pytest.raises(CallbackError):
            runner.sample(num_timesteps=5)
        runner.recover()
        assert [len(episode) for episode in runner.sample(num_timesteps=6)] == [3, 3]


class TestStepsLost:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_are_the_ones_that_the_sub_envs_took(self, make_runner: MakeRunner, vectorization: str, mode: str) -> None:
        runner = make_runner(
            FaultyEnv, num_envs=2, vectorization=vectorization, autoreset_mode=mode, env_config={"at_step": 9}
        )
        runner.sample(num_timesteps=4)
        with pytest.raises(EnvError) as caught:
            runner.sample(num_timesteps=100)
        # Sub-env 1 took 8 steps, and the other 9: it goes first, or takes its step in a process of its own.
        assert caught.value.num_env_steps_lost == 8 + 9 - 4  # type: ignore[attr-defined]

    def test_in_a_callback(self, make_runner: MakeRunner) -> None:
        def fail(episode: Any) -> None:
            if episode.id_.endswith("1") and episode.t == 2:
                raise KeyError("mine")

        with pytest.raises(CallbackError) as caught:
            make_runner(on_episode_step=fail).sample(num_timesteps=9)
        assert caught.value.num_env_steps_lost == 5  # type: ignore[attr-defined]

    def test_in_the_first_reset(self, make_runner: MakeRunner) -> None:
        with pytest.raises(EnvError) as caught:
            make_trouble(make_runner, env_config={"reset_faults": [1]}).sample(num_timesteps=9)
        assert caught.value.num_env_steps_lost == 0  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        "error",
        [
            EnvError("a"),
            EnvTimeoutError("a"),
            CallbackError("a"),
            WorkerDiedError("a"),
            SubEnvError(3, "step", "a"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_survive_the_way_to_another_process(self, error: Exception) -> None:
        error.num_env_steps_lost = 7  # type: ignore[attr-defined]
        error.add_note("where it was")
        copy = cloudpickle.loads(cloudpickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert (copy.num_env_steps_lost, copy.__notes__) == (7, ["where it was"])


class TestForeachEnv:
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_reaches_every_sub_env_under_its_wrappers(self, make_runner: MakeRunner, vectorization: str) -> None:
        runner = make_trouble(
            make_runner,
            num_envs=3,
            vectorization=vectorization,
            wrappers=[lambda env: gym.wrappers.TimeLimit(env, 50)],
        )
        offset = 10
        assert runner.foreach_env(lambda env: (type(env).__name__, env.unwrapped.index + offset)) == [
            ("TimeLimit", 10),
            ("TimeLimit", 11),
            ("TimeLimit", 12),
        ]
        runner.foreach_env(lambda env: env.unwrapped.set_task(env.unwrapped.index))
        runner.sample(num_timesteps=9)
        assert runner.foreach_env(lambda env: env.unwrapped.get_task()) == [0, 1, 2]

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_what_the_function_raises_comes_back_and_costs_nothing(
        self, make_runner: MakeRunner, vectorization: str
    ) -> None:
        runner = make_runner(num_envs=2, vectorization=vectorization)
        runner.sample(num_timesteps=2)
        with pytest.raises(ZeroDivisionError):
            runner.foreach_env(lambda env: 1 / 0)
        assert runner.sample(num_timesteps=2).obs[0].tolist() == [[0, 1], [0, 1]]

    def test_what_cannot_come_back_is_an_error_and_costs_nothing(self, make_runner: MakeRunner) -> None:
        runner = make_runner(num_envs=2, vectorization="async")
        with pytest.raises(Exception, match="pickle"):
            runner.foreach_env(lambda env: threading.Lock())
        assert runner.sample(num_timesteps=2).num_env_steps == 2

    def test_a_native_vector_env_has_none(self, make_runner: MakeRunner) -> None:
        runner = make_runner("CartPole-v1", num_envs=2)
        with pytest.raises(EnvError, match=r"'CartPole-v1' is a CartPoleVectorEnv, which has no sub-envs.*'sync'"):
            runner.foreach_env(lambda env: env)


class TestState:
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_a_replacement_continues_with_the_state(self, make_runner: MakeRunner, vectorization: str) -> None:
        one, other = (
            make_trouble(make_runner, num_envs=2, vectorization=vectorization, worker_index=1) for _ in range(2)
        )
        one.foreach_env(lambda env: env.set_task(env.index + 1))
        one.sample(num_timesteps=6)
        state = cloudpickle.loads(cloudpickle.dumps(one.get_state()))
        envs = {"environment": {}, "tasks": [1, 2], "num_episodes": None, "num_episodes_over": [1, 1]}
        assert state == {"weights_version": 0, "num_env_steps_sampled_lifetime": 6, "exploration": {}, **envs}
        other.set_state(state)
        other.sample(num_timesteps=2)
        assert other.get_state()["tasks"] == [1, 2]
        assert other.num_env_steps_sampled_lifetime == 8
        assert other.metrics.peek("num_env_steps_sampled_lifetime") == 2  # it hands over its own alone

    def test_without_tasks_there_are_none(self, make_runner: MakeRunner) -> None:
        for runner in (make_runner(num_envs=2), make_runner("CartPole-v1", num_envs=2)):
            assert runner.get_state()["tasks"] is None
            runner.set_state({})

    def test_an_evaluation_runner_draws_other_numbers_than_the_training_runner_of_its_index(self) -> None:
        config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2).debugging(seed=3)
        training, evaluation, again = (
            EnvRunner(made, 1).sample(num_timesteps=64, random_actions=True)
            for made in (config, config.for_evaluation(), config.for_evaluation())
        )
        np.testing.assert_array_equal(evaluation.actions, again.actions)
        assert (training.obs[0] != evaluation.obs[0]).all()
        assert (training.actions[:16] != evaluation.actions[:16]).any()

    def test_a_replacement_draws_other_numbers(self) -> None:
        config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2).debugging(seed=3)
        first, again, second, third = (
            EnvRunner(config, 1, num_restarts=n).sample(num_timesteps=6) for n in (0, 0, 1, 2)
        )
        np.testing.assert_array_equal(first.obs, again.obs)
        for other in (second, third):
            assert (first.obs[0] != other.obs[0]).all()
        assert (second.obs[0] != third.obs[0]).all()
        ids = [{episode.id_ for episode in rollout} for rollout in (first, second, third)]
        assert not set.intersection(*ids)


def test_the_counting_env_needs_no_tasks() -> None:
    assert not hasattr(CountingEnv, "get_task")  # so that it stands for the envs without them
