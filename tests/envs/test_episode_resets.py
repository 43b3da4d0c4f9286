"""Reset arguments of each episode: from a request, or from `env_reset_fn`, in sub-envs of every kind."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from at_least import all_of, at_least
from corral import PPOConfig, SampleRequest
from corral.envs.episode_resets import EpisodeReset, EpisodeResets
from corral.errors import CallbackError, ConfigError, EnvError, SampleError
from corral.testing import CountingEnv
from handmade import MakeRunner

VECTORIZATIONS = ["sync", "async"]
MODES = ["next_step", "same_step"]


class NotedEnv(CountingEnv):
    """Notes how each reset was called, with the task then; `fails` are steps of its lifetime that raise."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.index = getattr(config, "vector_index", 0)
        self.noted: list[Any] = []
        self._fails = (config or {}).get("fails", ())
        self._counts = (config or {}).get("counts", {})
        self.task = "easy"

    def get_task(self) -> Any:
        return self.task

    def set_task(self, task: Any) -> None:
        self.task = task

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.noted.append((seed, options, self.task))
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        self._counts[self.index] = self._counts.get(self.index, 0) + 1
        if self.index == 0 and self._counts[0] in self._fails:
            raise OSError("the simulator is gone")
        return super().step(action)


def noted(runner: Any) -> list[list[Any]]:
    """Return what each sub-env noted."""
    found: list[list[Any]] = runner.foreach_env(lambda env: env.noted)
    return found


def five(**others: Any) -> tuple[EpisodeReset, ...]:
    return tuple(EpisodeReset(seed=100 + k, options={"level": k}, task=f"task {k}", **others) for k in range(5))


def fixed(episode_index: int, env_index: int) -> dict[str, Any]:
    return {"seed": 10 * env_index + episode_index}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_each_episode_of_a_request_has_its_own_arguments(
    make_runner: MakeRunner, vectorization: str, mode: str
) -> None:
    runner = make_runner(
        NotedEnv,
        num_envs=2,
        vectorization=vectorization,
        autoreset_mode=mode,
        disable_env_checking=True,
        env_reset_fn=lambda: None,
    )
    rollout = runner.collect(SampleRequest(num_episodes=5, resets=five()))
    assert len(rollout.episodes()) == 5
    expected = [(100 + k, {"level": k}, f"task {k}") for k in range(5)]
    first, second = noted(runner)
    assert first[:3] == expected[0::2] and second[:2] == expected[1::2]
    runner.collect(SampleRequest(num_episodes=2))
    assert all(reset[:2] == (None, None) for reset in [*noted(runner)[0][3:], *noted(runner)[1][3:]])


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_an_episode_that_breaks_is_played_again_with_its_own_arguments(
    make_runner: MakeRunner, vectorization: str, mode: str
) -> None:
    runner = make_runner(
        NotedEnv,
        num_envs=2,
        vectorization=vectorization,
        autoreset_mode=mode,
        # It fails in the second step of the second episode of sub-env 0.
        env_config={"episode_length": 3, "fails": [5], "counts": {}},
        disable_env_checking=True,
        restart_failed_sub_environments=True,
        env_reset_fn=lambda: None,
    )
    rollout = runner.collect(SampleRequest(num_episodes=5, resets=five()))
    assert len(rollout.episodes()) == 5 and runner.num_sub_env_restarts == 1
    assert noted(runner)[0][:2] == [(102, {"level": 2}, "task 2"), (104, {"level": 4}, "task 4")]  # of the new sub-env


def test_arguments_left_by_a_sample_that_failed_are_dropped(make_runner: MakeRunner) -> None:
    runner = make_runner(
        NotedEnv, env_config={"fails": [2], "counts": {}}, disable_env_checking=True, env_reset_fn=lambda: None
    )
    with pytest.raises(EnvError, match="simulator is gone"):
        runner.collect(SampleRequest(num_episodes=5, resets=five()))
    runner.collect(SampleRequest(num_episodes=1))
    assert noted(runner)[0][1][:2] == (None, None)


def test_a_request_needs_one_reset_for_each_episode_and_one_runner() -> None:
    with pytest.raises(SampleError, match="5 resets for num_episodes=4"):
        SampleRequest(num_episodes=4, resets=five())
    with pytest.raises(SampleError, match="5 resets for num_episodes=None"):
        SampleRequest(num_timesteps=4, resets=five())
    with pytest.raises(SampleError, match="5 resets for num_episodes=2"):
        SampleRequest(num_episodes=5, resets=five()).part(2, 0)


def test_a_runner_whose_config_chooses_no_resets_refuses_them(make_runner: MakeRunner) -> None:
    with pytest.raises(SampleError, match=r"set env_reset_fn"):
        make_runner(NotedEnv).collect(SampleRequest(num_episodes=5, resets=five()))


def test_the_function_is_given_what_it_asks_for(make_runner: MakeRunner) -> None:
    asked: list[Any] = []

    def choose(
        *, episode_index: int, training_iteration: int, env_context: Any, worker_index: int, env_index: int
    ) -> Any:
        asked.append((episode_index, training_iteration, worker_index, env_index, env_context["episode_length"]))

    runner = make_runner(
        NotedEnv,
        num_envs=2,
        worker_index=3,
        env_config={"episode_length": 4},
        disable_env_checking=True,
        env_reset_fn=choose,
    )
    runner.collect(SampleRequest(num_timesteps=2, training_iteration=7))
    runner.collect(SampleRequest(num_timesteps=8, training_iteration=8))
    assert asked == [(0, 7, 3, 0, 4), (0, 7, 3, 1, 4), (1, 8, 3, 0, 4), (1, 8, 3, 1, 4)]


def test_what_an_env_takes_out_of_its_options_is_there_in_the_next_episode(make_runner: MakeRunner) -> None:
    options, taken = {"start": {"x": 3}}, list[Any]()

    class TakesOut(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            taken.append(options["start"].pop("x", None))
            return super().reset(seed=seed)

    settings = {"env_config": {"episode_length": 1}, "disable_env_checking": True}
    make_runner(TakesOut, env_reset_fn=lambda: {"options": options}, **settings).sample(num_timesteps=3)
    assert at_least(3, taken) == [3] * len(taken) and options == {"start": {"x": 3}}


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_the_function_chooses_seed_options_and_task(make_runner: MakeRunner, vectorization: str) -> None:
    runner = make_runner(
        NotedEnv,
        num_envs=2,
        vectorization=vectorization,
        disable_env_checking=True,
        env_reset_fn=lambda episode_index, env_index, training_iteration: {
            "seed": np.int64(10 * env_index + episode_index),  # Gymnasium itself takes no integers of NumPy
            "options": {"iteration": training_iteration},
            "task": episode_index,
        },
    )
    runner.collect(SampleRequest(num_timesteps=9, training_iteration=2))
    first, second = noted(runner)
    assert first == [(k, {"iteration": 2}, k) for k in range(2)]
    assert second == [(10 + k, {"iteration": 2}, k) for k in range(2)]


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_an_episode_that_breaks_has_the_index_of_the_one_that_it_replaces(
    make_runner: MakeRunner, vectorization: str
) -> None:
    runner = make_runner(
        NotedEnv,
        vectorization=vectorization,
        env_config={"fails": [5], "counts": {}},
        disable_env_checking=True,
        restart_failed_sub_environments=True,
        env_reset_fn=fixed,
    )
    runner.sample(num_timesteps=11)
    assert runner.num_sub_env_restarts == 1
    assert [seed for seed, *_ in noted(runner)[0]] == [1, 2, 3]


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_a_replaced_sub_env_knows_the_iteration(make_runner: MakeRunner, vectorization: str) -> None:
    runner = make_runner(
        NotedEnv,
        vectorization=vectorization,
        env_config={"fails": [5], "counts": {}},
        disable_env_checking=True,
        restart_failed_sub_environments=True,
        env_reset_fn=lambda training_iteration: {"options": {"iteration": training_iteration}},
    )
    runner.collect(SampleRequest(num_timesteps=11, training_iteration=7))
    assert runner.num_sub_env_restarts == 1
    assert [options for _, options, _ in noted(runner)[0]] == [{"iteration": 7}] * 3


def test_a_native_vector_env_gives_way_to_single_envs(make_runner: MakeRunner) -> None:
    runner = make_runner("CartPole-v1", num_envs=2, env_reset_fn=fixed)
    rollout = runner.sample(num_timesteps=2)
    expected = [gym.make("CartPole-v1").reset(seed=seed)[0] for seed in (0, 10)]
    np.testing.assert_array_equal(rollout.obs[0], expected)


def test_a_ready_vector_env_that_resets_itself_is_refused(make_runner: MakeRunner) -> None:
    with pytest.raises(ConfigError, match="env 'make', whose factory returned a VectorEnv: it resets its sub-envs"):

        def make(config: Any) -> Any:
            return gym.make_vec("CartPole-v1", num_envs=2)

        make_runner(make, num_envs=None, env_reset_fn=fixed)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3, "must return a dict with any of seed, options, task, or None; got 3"),
        ({"sead": 3}, "key 'sead'. Did you mean 'seed'"),
        ({"seed": -1}, "integer of at least 0, got -1"),
        ({"seed": 1.5}, "integer of at least 0, got 1.5"),
        ({"options": 3}, "options of a reset must be a dict, got 3"),
    ],
)
def test_what_the_function_may_return(make_runner: MakeRunner, returned: Any, message: str) -> None:
    runner = make_runner(NotedEnv, disable_env_checking=True, env_reset_fn=lambda: returned)
    with pytest.raises(CallbackError, match=f"env_reset_fn, episode 0 of sub-env 0: ConfigError: .*{message}"):
        runner.sample(num_timesteps=1)


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_an_error_of_the_function_is_no_failure_of_the_env(make_runner: MakeRunner, vectorization: str) -> None:
    runner = make_runner(
        NotedEnv,
        vectorization=vectorization,
        disable_env_checking=True,
        restart_failed_sub_environments=True,
        env_reset_fn=lambda episode_index: {"seed": 1 // (1 - episode_index)},
    )
    with pytest.raises(CallbackError, match="env_reset_fn, episode 1 of sub-env 0: ZeroDivisionError"):
        runner.sample(num_timesteps=9)


def test_a_task_for_an_env_without_tasks_is_an_error(make_runner: MakeRunner) -> None:
    runner = make_runner(CountingEnv, env_reset_fn=lambda: {"task": 3})
    with pytest.raises(EnvError, match="has the task 3, and CountingEnv has no methods get_task and set_task"):
        runner.sample(num_timesteps=1)


@pytest.mark.parametrize("wrong", [lambda episode: None, lambda env_index, /: None, 3], ids=["name", "position", "int"])
def test_a_function_of_other_arguments_is_refused_at_build(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="env_reset_fn"):
        PPOConfig().environment(NotedEnv, env_reset_fn=wrong).validate()


@pytest.mark.parametrize("name", ["env_reset_fn", "env_task_fn"])
def test_a_function_of_unknown_signature_is_refused_at_build(name: str) -> None:
    settings: dict[str, Any] = {name: dict}
    with pytest.raises(ConfigError, match=f"{name}: the signature of <class 'dict'> is unknown.*: wrap it in a lambda"):
        PPOConfig().environment(NotedEnv, **settings).validate()


def test_a_default_whose_name_is_nearly_an_argument_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    make = partial(PPOConfig().environment("CartPole-v1").copy)
    make().environment(env_reset_fn=lambda episode_index, scale=2: None).build().stop()
    assert not caplog.messages
    make().environment(env_reset_fn=lambda episode_indx=0: None).build().stop()
    (message,) = caplog.messages
    assert "env_reset_fn: there is no argument 'episode_indx', so this parameter keeps its default." in message
    assert "Did you mean 'episode_index'?" in message


def test_the_wrapper_has_the_attributes_of_the_env() -> None:
    wrapped = EpisodeResets(NotedEnv())
    wrapped.set_task("hard")
    assert wrapped.task == "hard" and wrapped.unwrapped.task == "hard"
    with pytest.raises(AttributeError, match="nothing"):
        wrapped.nothing  # noqa: B018


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_episodes_are_counted_on_in_a_replaced_runner_and_after_a_failure(
    make_runner: MakeRunner, vectorization: str
) -> None:
    settings = {"vectorization": vectorization, "disable_env_checking": True, "env_reset_fn": fixed}
    runner, replacement = (
        make_runner(NotedEnv, num_envs=2, env_config={"fails": [8], "counts": {}}, **settings) for _ in range(2)
    )
    runner.sample(num_timesteps=12)
    counts = runner.get_state()["num_episodes"]
    assert min(counts) >= 2
    replacement.set_state(runner.get_state())
    replacement.sample(num_timesteps=2)
    assert [seeds[0][0] for seeds in noted(replacement)] == [counts[0], 10 + counts[1]]
    with pytest.raises(EnvError, match="simulator is gone"):
        runner.sample(num_timesteps=20)
    runner.sample(num_timesteps=2)
    assert [seeds[-1][0] % 10 >= count for seeds, count in zip(noted(runner), counts, strict=True)] == [True, True]


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_user_code_is_given_the_env_that_it_made(make_runner: MakeRunner, vectorization: str) -> None:
    given: list[Any] = []

    def choose(train_results: Any, task_settable_env: Any, env_ctx: Any) -> Any:
        task_settable_env.noted = [type(task_settable_env).__name__]

    callbacks: dict[str, Any] = (
        {}
        if vectorization == "async"
        else {
            "on_sub_environment_created": lambda sub_environment: given.append(sub_environment),
            "on_episode_start": lambda sub_environment: given.append(sub_environment),
        }
    )
    runner = make_runner(
        NotedEnv,
        num_envs=2,
        vectorization=vectorization,
        disable_env_checking=True,
        env_task_fn=choose,
        env_reset_fn=lambda: None,
        **callbacks,
    )
    runner.sample(num_timesteps=2)
    assert all_of((type(env) is NotedEnv for env in given), least=2 * len(callbacks))
    runner.choose_tasks({})
    assert noted(runner) == [["NotedEnv"]] * 2
    runner.foreach_env(lambda env: setattr(env, "task", "hard"))
    assert runner.host.get_tasks() == ["hard"] * 2
    runner.env.set_attr("task", ["soft", "loose"])  # type: ignore[attr-defined]
    assert runner.host.get_tasks() == ["soft", "loose"]
