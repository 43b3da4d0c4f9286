"""Names of metrics that the library logs: user code is refused at its call, and no runner is restarted for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corral import DQNConfig, PPOConfig
from corral.algorithms.config.config import AlgorithmConfig
from corral.core.metrics.logger import MetricsError, MetricsLogger
from corral.errors import CallbackError
from corral.testing import CountingEnv
from handmade import MakeRunner

NAMES = (
    *(f"episode_{name}_{how}" for name in ("return", "len") for how in ("mean", "min", "max")),
    *("episode_duration_sec_mean", "num_episodes", "num_episodes_lifetime"),
    *("num_env_steps_sampled", "num_env_steps_sampled_lifetime"),
)


def config(num_env_runners: int, base: type[AlgorithmConfig] = PPOConfig, **events: Any) -> AlgorithmConfig:
    config = base().environment(CountingEnv, disable_env_checking=True).debugging(seed=0).engine("local")
    config.env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=2)
    return config.training(train_batch_size_per_learner=16, minibatch_size=None).callbacks(**events)


def test_the_names_match_the_result() -> None:
    with config(0).build() as algo:
        assert set(algo.train()["env_runners"]) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, {"reduce": "sum"}, {"reduce": "mean", "window": 100}], ids=repr)
def test_a_name_of_the_library_is_refused_at_the_call(
    make_runner: MakeRunner, name: str, settings: dict[str, Any]
) -> None:
    caught: list[str] = []

    def log_it(metrics_logger: MetricsLogger) -> None:
        with pytest.raises(MetricsError, match=rf"'{name}', logged at {__file__}:\d+: .* choose another name") as error:
            metrics_logger.log_value(name, 1e6, **settings)
        caught.append(str(error.value))

    runner = make_runner(on_environment_created=log_it, on_episode_end=log_it)
    runner.sample(num_timesteps=12)
    assert len(caught) > 2
    assert runner.metrics.peek(name) < 100


@pytest.mark.parametrize("num_env_runners", [0, 2])
@pytest.mark.parametrize("event", ["on_episode_step", "on_sample_end", "on_episode_end"])
def test_it_ends_the_run_and_restarts_no_runner(event: str, num_env_runners: int) -> None:
    def log_it(metrics_logger: MetricsLogger) -> None:
        metrics_logger.log_value("num_episodes", 1.0)

    name = "num_episodes" if num_env_runners else "env_runners/num_episodes"
    with config(num_env_runners, **{event: log_it}).build() as algo:
        with pytest.raises(CallbackError, match=rf"{event}: callback .*log_it.*'{name}', logged at {__file__}"):
            algo.train()
        assert algo.env_runner_group.num_remote_worker_restarts == 0
        assert not any(runner.restart_at_s for runner in algo.env_runner_group._runners.values())


def test_a_group_below_a_name_of_the_library_is_refused() -> None:
    def log_it(metrics_logger: MetricsLogger) -> None:
        metrics_logger.log_value(("num_episodes", "mine"), 1.0)

    with (
        pytest.raises(CallbackError, match=rf"'num_episodes/mine', logged at {__file__}"),
        config(1, on_environment_created=log_it).build() as algo,
    ):
        algo.train()


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_the_driver_s_logger_refuses_the_names_under_env_runners(num_env_runners: int) -> None:
    def log_it(metrics_logger: MetricsLogger) -> None:
        metrics_logger.log_value(("env_runners", "episode_return_mean"), 1.0)

    with (
        config(num_env_runners, on_train_result=log_it).build() as algo,
        pytest.raises(CallbackError, match=rf"'env_runners/episode_return_mean', logged at {__file__}"),
    ):
        algo.train()


@pytest.mark.parametrize(("num_env_runners", "error"), [(0, CallbackError), (1, MetricsError)])
def test_a_name_taken_on_the_driver_first_ends_the_run_with_its_place(
    num_env_runners: int, error: type[Exception]
) -> None:
    """With the embedded runner at the call, which is when the algorithm is built."""

    def log_it(metrics_logger: MetricsLogger) -> None:
        metrics_logger.log_value(("env_runners", "num_episodes"), 1.0, reduce="sum")

    with (
        pytest.raises(error, match=rf"'env_runners/num_episodes', logged at {__file__}"),
        config(num_env_runners, on_algorithm_init=log_it).build() as algo,
    ):
        algo.train()


@pytest.mark.parametrize("event", ["on_episode_start", "on_sample_end"])  # before and after the exploration logs them
def test_metrics_of_an_exploration_are_the_library_s_from_the_start(event: str) -> None:
    def log_it(metrics_logger: MetricsLogger) -> None:
        metrics_logger.log_value("epsilon", 1.0)

    with (
        config(0, DQNConfig, **{event: log_it}).build() as algo,
        pytest.raises(CallbackError, match=rf"'env_runners/epsilon', logged at {__file__}"),
    ):
        assert algo.env_runner is not None
        algo.env_runner.sample(num_timesteps=4)


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_a_metrics_error_of_an_exploration_ends_the_run(num_env_runners: int) -> None:
    from corral.exploration.epsilon import EpsilonGreedy

    class Colliding(EpsilonGreedy):
        def get_metrics(self, timestep: int) -> dict[str, float]:
            return {"epsilon": 1.0, "num_episodes": 2.0} if timestep else {"epsilon": 1.0}

    experiment = config(num_env_runners, DQNConfig).exploration(exploration_config={"type": Colliding})
    with experiment.build() as algo:
        with pytest.raises(MetricsError, match=r"'(env_runners/)?num_episodes' was logged as sum"):
            algo.train()
        assert algo.env_runner_group.num_remote_worker_restarts == 0


def test_what_a_checkpoint_restored_stays_reserved() -> None:
    with config(0).build() as one, config(0).build() as other:
        one.train()
        other.set_state(one.get_state())
        with pytest.raises(MetricsError, match="choose another name"):
            other.metrics.log_value(("env_runners", "num_episodes"), 1.0)
        assert other.train()["env_runners"]["num_env_steps_sampled_lifetime"] == 32


@pytest.mark.parametrize("base", [PPOConfig, DQNConfig])
@pytest.mark.parametrize("settings", [{}, {"reduce": "mean"}], ids=repr)
@pytest.mark.parametrize("event", ["on_learn_on_batch", "on_update_end"])
def test_a_name_of_the_learners_results_is_refused(
    base: type[AlgorithmConfig], event: str, settings: dict[str, Any]
) -> None:
    def log_it(metrics_logger: MetricsLogger) -> None:
        metrics_logger.log_value(("default_policy", "total_loss"), 1e6, **settings)

    experiment = config(0, base, **{event: log_it})
    if base is DQNConfig:
        experiment.training(num_steps_sampled_before_learning_starts=1)
    name = "learners/default_policy/total_loss"
    at = rf"'{name}', logged at {__file__}:\d+:"
    with experiment.build() as algo, pytest.raises((CallbackError, MetricsError), match=at):
        algo.train()


def test_a_name_of_the_learners_results_is_refused_before_the_first_update_too() -> None:
    def log_it(metrics_logger: MetricsLogger) -> None:
        metrics_logger.log_value(("learners", "default_policy", "policy_loss"), 1.0)

    with (
        pytest.raises(
            CallbackError, match=rf"MetricsError: metric 'learners/default_policy/policy_loss', logged at {__file__}:"
        ),
        config(0, on_algorithm_init=log_it).build() as algo,
    ):
        algo.train()


def test_learning_continues_from_a_checkpoint_with_the_learners_names() -> None:
    with config(0).build() as one, config(0).build() as other:
        one.train()
        other.set_state(one.get_state())
        assert "policy_loss" in other.train()["learners"]["default_policy"]


def test_callbacks_may_add_results_of_their_own() -> None:
    def add(result: dict[str, Any]) -> None:
        result["mine"], result["more"] = np.float32(3.0), np.array([1.0, 2.0])

    with config(0, on_update_end=add).build() as algo:
        learned = algo.train()["learners"]["default_policy"]
    assert learned["mine"] == 3.0
    assert learned["more"].tolist() == [1.0, 2.0]


def test_on_learn_on_batch_cannot_replace_a_number_of_the_learner() -> None:
    def replace(result: dict[str, Any]) -> None:
        result["total_loss"] = 1e6

    with (
        config(0, on_learn_on_batch=replace).build() as algo,
        pytest.raises(CallbackError, match=r"added 'total_loss' to `result`.*choose other names"),
    ):
        algo.train()
