"""Views of a logger: a part of the same process logs under a group of its keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corral import PPOConfig
from corral.core.metrics.logger import MetricsError, MetricsLogger
from corral.testing import CountingEnv


def test_a_logger_and_its_view_show_the_same_values() -> None:
    logger = MetricsLogger()
    view = logger.view("env_runners")
    view.log_value("won", 2, reduce="sum", with_throughput=True)
    logger.log_value(("env_runners", "won"), 3)
    view.log_values(("deep", "returns"), [1.0, 5.0], window=2)
    view.log_dict({"a": {"b": 4}}, reduce="max")
    assert view.peek("won") == logger.peek(("env_runners", "won")) == 5
    assert view.peek_values(("deep", "returns")) == [1, 5]
    assert view.peek("unknown", None) is None
    assert {name for name in view.peek()} == {"won", "won_throughput", "deep", "a"}
    assert logger.reduce()["env_runners"]["a"] == {"b": 4}
    assert view.peek("won") == 0
    assert np.isnan(view.peek(("a", "b")))


def test_reducing_a_view_forgets_its_own_values() -> None:
    logger = MetricsLogger()
    view = logger.view("learners")
    logger.log_value("mine", 1, reduce="sum")
    view.log_value("its", 1, reduce="sum")
    assert view.reduce() == {"its": 1}
    assert logger.peek() == {"mine": 1, "learners": {"its": 0}}


def test_a_view_without_keys_has_an_empty_dict_of_results() -> None:
    logger = MetricsLogger()
    logger.log_value("mine", 1)
    view = logger.view("learners")
    assert view.peek() == view.reduce() == {}
    assert np.isnan(view.peek("unknown"))


def test_names_are_taken_in_both() -> None:
    logger = MetricsLogger(reserved=("config",))
    view = logger.view("env_runners")
    view.log_reserved({"steps": [1]}, "sum")
    view.log_value("config", 1)  # env_runners/config, which is nobody's
    with pytest.raises(MetricsError, match=r"'env_runners/steps', logged at .*test_views.py"):
        logger.log_value(("env_runners", "steps"), 1)
    with pytest.raises(MetricsError, match="'env_runners/steps/more'"):
        view.log_value(("steps", "more"), 1)


def test_a_logger_that_becomes_a_view_brings_its_values() -> None:
    logger, own = MetricsLogger(), MetricsLogger()
    logger.log_value(("learners", "rows"), 1, reduce="sum")
    own.log_value("rows", 2, reduce="sum")
    own.become_view(logger, "learners")
    own.log_value("rows", 4, reduce="sum")
    assert logger.peek() == {"learners": {"rows": 7}}
    assert own.take() == {}


def test_a_view_has_no_state_and_adds_what_a_state_had_not_handed_over() -> None:
    own, logger = MetricsLogger(), MetricsLogger()
    own.log_value("steps", 8, reduce="lifetime_sum")
    own.take()
    own.log_value("steps", 2, reduce="lifetime_sum")
    view = logger.view("env_runners")
    view.log_value("steps", 5, reduce="lifetime_sum")
    view.set_state(own.get_state())
    assert logger.peek(("env_runners", "steps")) == 7
    assert view.get_state()["keys"] == []


def test_views_continue_after_the_logger_forgot_its_keys() -> None:
    logger, other = MetricsLogger(), MetricsLogger()
    view = logger.view("env_runners")
    view.log_value("steps", 5, reduce="sum")
    other.log_value(("env_runners", "steps"), 1, reduce="sum")
    logger.set_state(other.get_state())
    view.log_value("steps", 2, reduce="sum")
    assert logger.peek(("env_runners", "steps")) == 3
    logger.reset()
    view.log_value("steps", 4)
    assert logger.peek() == {"env_runners": {"steps": 4}}


def config(num_env_runners: int, **events: Any) -> PPOConfig:
    config = PPOConfig().environment(CountingEnv, disable_env_checking=True).debugging(seed=0).engine("local")
    config.env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=2)
    return config.training(train_batch_size_per_learner=16, minibatch_size=None).callbacks(**events)


def count_batches(metrics_logger: MetricsLogger) -> None:
    metrics_logger.log_value("batches", 1, reduce="lifetime_sum")


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("after", [0, 1])
def test_metrics_continue_with_the_runner_elsewhere(before: int, after: int) -> None:
    """Also steps that nobody has collected when the state is saved."""
    events = {"on_learn_on_batch": count_batches, "on_sample_end": count_batches}
    with config(before, **events).build() as one, config(after, **events).build() as other:
        one.train()
        one.env_runner_group.foreach_env_runner(lambda runner: runner.sample(num_timesteps=4) and None)
        other.set_state(one.get_state())
        result = other.train()
        assert result["env_runners"]["num_env_steps_sampled_lifetime"] == 16 + 4 + 16
        assert result["env_runners"]["num_env_steps_sampled"] == 4 + 16
        assert result["env_runners"]["batches"] == 3
        assert result["learners"]["batches"] == 2


def test_a_callback_of_the_algorithm_sees_what_the_embedded_runner_logged() -> None:
    seen = []

    def look(metrics_logger: MetricsLogger) -> None:
        seen.append(metrics_logger.peek(("env_runners", "batches"), 0))

    with config(0, on_sample_end=count_batches, on_train_result=look).build() as algo:
        algo.env_runner_group.foreach_env_runner(lambda runner: runner.sample(num_timesteps=4) and None)
        assert algo.metrics.peek(("env_runners", "batches")) == 1
        algo.train()
    assert seen == [2]
