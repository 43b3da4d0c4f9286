"""What updates report: it waits, is reduced together, and extremes stay extremes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from corral import DQNConfig
from corral.callbacks.callback import Callback
from corral.core.metrics.logger import MetricsError, MetricsLogger

GROUP = ("learners", "m")


@pytest.mark.parametrize("num_updates", [1, 3, 700])
def test_updates_give_the_numbers_that_single_values_give(num_updates: int) -> None:
    rng = np.random.default_rng(0)
    updates = [
        {"loss": float(rng.normal()), "qf_min": float(rng.normal()), "qf_max": float(rng.normal())}
        | ({"rare": float(i)} if i % 3 == 0 else {})
        for i in range(num_updates)
    ]
    logger, single = MetricsLogger(), MetricsLogger()
    for update in updates:
        logger.log_update(GROUP, update)
        for name, value in update.items():
            reduce = {"qf_min": "min", "qf_max": "max"}.get(name, "mean")
            single.log_value((*GROUP, name), value, reduce=reduce)
    assert logger.peek((*GROUP, "rare")) == pytest.approx(np.mean([u["rare"] for u in updates if "rare" in u]))
    found, expected = logger.reduce(), single.reduce()
    for name in expected["learners"]["m"]:
        assert found["learners"]["m"][name] == pytest.approx(expected["learners"]["m"][name], rel=1e-12), name
    assert np.isnan(logger.peek((*GROUP, "loss")))  # a reduce forgets them


def test_updates_that_wait_are_in_a_state_and_in_parts() -> None:
    logger = MetricsLogger()
    logger.log_update(GROUP, {"loss": 1.0})
    logger.log_update(GROUP, {"loss": 3.0})
    restored, other = MetricsLogger(), MetricsLogger()
    restored.set_state(logger.get_state())
    assert restored.peek((*GROUP, "loss")) == 2
    other.aggregate([logger.take()])
    assert other.peek((*GROUP, "loss")) == 2


def test_an_update_is_logged_as_it_was_when_it_was_logged() -> None:
    logger, numbers = MetricsLogger(), {"loss": 1.0}
    logger.log_update(GROUP, numbers)
    numbers["loss"] = 5.0
    assert logger.peek((*GROUP, "loss")) == 1


def test_what_callbacks_add_may_be_tensors_and_arrays() -> None:
    logger = MetricsLogger()
    for i in (1, 2):
        results: dict[str, Any] = {"loss": np.float32(i), "kl": torch.tensor(i), "hist": np.array([i, 0])}
        logger.log_update(GROUP, results | {"nested": {"n": i}})
    result = logger.reduce()["learners"]["m"]
    assert (result["loss"], result["kl"], result["nested"]) == (1.5, 1.5, {"n": 1.5})
    assert result["hist"].tolist() == [1.5, 0]


def test_no_user_logs_under_the_name_of_such_a_number() -> None:
    logger = MetricsLogger()
    logger.log_value((*GROUP, "loss"), 1)
    logger.log_update(GROUP, {"loss": 1.0})
    with pytest.raises(MetricsError, match="the library logs"):
        logger.reduce()
    logger = MetricsLogger()
    logger.log_update(GROUP, {"loss": 1.0})
    logger.peek()
    with pytest.raises(MetricsError, match="the library logs"):
        logger.log_value((*GROUP, "loss"), 1)


def test_an_own_key_of_an_older_version_continues_with_the_reduction_of_this_one() -> None:
    old = MetricsLogger()
    old.log_reserved({(*GROUP, "qf_min"): []})
    logger = MetricsLogger()
    logger.set_state(old.get_state())
    logger.log_update(GROUP, {"qf_min": 2.0})
    logger.log_update(GROUP, {"qf_min": -1.0})
    assert logger.peek((*GROUP, "qf_min")) == -1


@pytest.mark.parametrize("item", [["a"], []])
def test_a_sum_and_an_item_of_an_older_version_continue(item: list[str]) -> None:
    new = MetricsLogger()
    new.log_value("steps", 2, reduce="lifetime_sum")
    new.log_value("task", "b", reduce="item")
    state = new.get_state()
    steps, task = state["keys"]
    steps["reducer"] = {"_all": [5.0], "_new": [1.0]}
    task["reducer"] = {"_item": item, "_is_new": bool(item)}
    logger, driver = MetricsLogger(), MetricsLogger()
    logger.set_state(state)
    assert logger.peek("steps") == 5
    assert logger.peek("task", None) == (item[0] if item else pytest.approx(float("nan"), nan_ok=True))
    driver.aggregate([logger.take()])
    assert driver.peek("steps") == 1
    logger.log_value("steps", 2, reduce="lifetime_sum")
    assert logger.peek("steps") == 7


class _Records(Callback):
    updates: list[dict[str, float]] = []  # noqa: RUF012

    def on_update_end(self, *, result: dict[str, Any], **kwargs: Any) -> None:
        self.updates.append(dict(result))


def test_the_extremes_of_an_iteration_are_extremes_over_its_updates() -> None:
    _Records.updates = []
    config = DQNConfig().environment("CartPole-v1").debugging(seed=0).callbacks(_Records)
    config.training(num_steps_sampled_before_learning_starts=40, train_batch_size_per_learner=8)
    config.reporting(min_sample_timesteps_per_iteration=100)
    with config.build() as algo:
        result = algo.train()["learners"]["default_policy"]
    updates = _Records.updates
    assert len(updates) > 3
    assert result["qf_min"] == min(update["qf_min"] for update in updates)
    assert result["qf_max"] == max(update["qf_max"] for update in updates)
    assert result["qf_mean"] == pytest.approx(np.mean([update["qf_mean"] for update in updates]), rel=1e-12)
