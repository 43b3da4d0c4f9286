"""Metrics: reductions, keys, settings that contradict each other, and the iteration's timers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_cases import PERCENTS, SETTINGS

from at_least import all_of
from corral.core.metrics.logger import MetricsError, MetricsLogger
from corral.core.metrics.timers import PARTS, SIMULATORS, Timers, timer_results


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("mean", 2.0, 10.0),
        ("min", 1.0, 10.0),
        ("max", 3.0, 10.0),
        ("sum", 6.0, 10.0),
        ("lifetime_sum", 6.0, 16.0),
        ("window", 2.0, 5.0),
        ("window_min", 1.0, 2.0),
        ("window_max", 3.0, 10.0),
        ("window_sum", 6.0, 15.0),
        ("window_cleared", 2.0, 10.0),
        ("mean_kept", 2.0, 4.0),
        ("percentiles", {"p0": 1.0, "p50": 2.0, "p75": 2.5, "p100": 3.0}, dict.fromkeys(PERCENTS, 10.0)),
        ("window_percentiles", {"p25": 1.5}, {"p25": 2.5}),
        ("item", 3.0, 10.0),
        ("item_cleared", 3.0, 10.0),
        ("item_series", [1, 2, 3], [10.0]),
        ("window_item_series", [1, 2, 3], [2, 3, 10.0]),
        ("window_item_series_cleared", [1, 2, 3], [10.0]),
    ],
)
def test_values_that_stay_after_a_reduce(name: str, first: Any, second: Any) -> None:
    logger = MetricsLogger()
    for value in (1, 2, 3):
        logger.log_value("x", value, **SETTINGS[name])
    assert logger.peek("x") == first
    assert logger.reduce() == {"x": first}
    logger.log_value("x", 10.0)
    assert logger.reduce() == {"x": second}


@pytest.mark.parametrize(
    ("name", "empty"),
    [
        ("mean", math.nan),
        ("min", math.nan),
        ("max", math.nan),
        ("sum", 0.0),
        ("ema", math.nan),
        ("window", math.nan),
        ("window_sum", 0.0),
        ("percentiles", dict.fromkeys(PERCENTS, math.nan)),
        ("item", math.nan),
        ("item_series", []),
    ],
)
def test_a_key_without_values_stays_in_the_result(name: str, empty: Any) -> None:
    logger = MetricsLogger()
    logger.log_values("x", [], **SETTINGS[name])
    assert logger.reduce()["x"] == pytest.approx(empty, nan_ok=True)
    assert list(logger.reduce()) == ["x"]


def test_a_generator_gives_its_values_in_each_call() -> None:
    logger = MetricsLogger()
    for _ in range(2):  # the second call takes the short path
        logger.log_values("x", (float(value) for value in (1, 2)), reduce="sum")
    assert logger.peek("x") == 6


def test_the_default_is_a_moving_average_with_coefficient_one_percent() -> None:
    logger = MetricsLogger()
    logger.log_value("x", 100.0)
    assert logger.peek("x") == 100.0  # it starts at the first value, not at 0
    logger.log_value("x", 200.0)
    assert logger.peek("x") == pytest.approx(0.99 * 100 + 0.01 * 200)
    logger.reduce()
    assert logger.peek("x") == pytest.approx(101)


def test_a_window_without_reduce_is_the_mean_over_the_latest_values() -> None:
    logger = MetricsLogger()
    logger.log_values("x", [100.0, 1.0, 2.0, 6.0], window=3)
    assert logger.peek("x") == 3.0


@pytest.mark.parametrize(
    ("given_settings", "words"),
    [
        ({"reduce": "meen"}, ["'meen'", "Did you mean 'mean'"]),
        ({"window": 10, "ema_coeff": 0.1}, ["window=10", "ema_coeff=0.1"]),
        ({"window": 10, "reduce": "ema"}, ["window=10", "'ema'"]),
        ({"window": 10, "reduce": "lifetime_sum"}, ["window=10", "'lifetime_sum'"]),
        ({"window": 0}, ["window=0"]),
        ({"reduce": "mean", "ema_coeff": 0.1}, ["ema_coeff=0.1", "'mean'"]),
        ({"ema_coeff": 0.0}, ["ema_coeff=0.0"]),
        ({"ema_coeff": 1.5}, ["ema_coeff=1.5"]),
        ({"window": 2.5}, ["window=2.5", "whole number"]),
        ({"reduce": "item", "window": 2}, ["window=2", "'item'"]),
        ({"percentiles": [50]}, ["percentiles=[50]", "reduce='percentiles'"]),
        ({"reduce": "percentiles", "percentiles": [50, 101]}, ["percentiles=[50, 101]", "0 to 100"]),
        ({"reduce": "percentiles", "percentiles": []}, ["percentiles=[]"]),
        ({"reduce": "percentiles", "percentiles": 50}, ["percentiles=50"]),
        ({"reduce": "percentiles", "clear_on_reduce": False}, ["clear_on_reduce=False", "'percentiles'", "window"]),
        ({"reduce": "item_series", "clear_on_reduce": False}, ["clear_on_reduce=False", "'item_series'", "window"]),
        ({"reduce": "lifetime_sum", "clear_on_reduce": True}, ["clear_on_reduce=True", "'lifetime_sum'"]),
        ({"with_throughput": True}, ["with_throughput=True", "'ema'"]),
        ({"reduce": "mean", "with_throughput": True}, ["with_throughput=True", "'mean'", "'lifetime_sum'"]),
        ({"reduce": "sum", "window": 3, "with_throughput": True}, ["with_throughput=True", "window=3"]),
    ],
    ids=str,
)
def test_contradictions_are_refused_and_name_the_key(given_settings: dict[str, Any], words: list[str]) -> None:
    logger = MetricsLogger()
    with pytest.raises(MetricsError) as error:
        logger.log_value(("group", "x"), 1.0, **given_settings)
    assert all(word in str(error.value) for word in ["group/x", *words])
    assert logger.reduce() == {}


def test_a_key_keeps_the_settings_it_was_first_logged_with() -> None:
    logger = MetricsLogger()
    logger.log_value("x", 1.0, reduce="sum")
    logger.log_value("x", 1.0)
    logger.log_value("x", 1.0, reduce="sum")
    with pytest.raises(MetricsError, match="'x'"):
        logger.log_value("x", 1.0, reduce="mean")
    assert logger.peek("x") == 3.0


@pytest.mark.parametrize("keys", [("a", ("a", "b")), (("a", "b"), "a")], ids=["number_first", "group_first"])
def test_a_key_cannot_be_a_number_and_a_group(keys: tuple[Any, Any]) -> None:
    logger = MetricsLogger()
    logger.log_value(keys[0], 1.0)
    with pytest.raises(MetricsError, match="'a"):
        logger.log_value(keys[1], 2.0)
    assert logger.peek(keys[0]) == 1.0


def test_nested_keys_and_dicts_become_a_nested_result() -> None:
    logger = MetricsLogger()
    logger.log_value(("a", "b", "c"), 1, reduce="sum")
    logger.log_dict({"b": {"d": np.float32(2)}, "e": np.array(3)}, key="a", reduce="sum")
    logger.log_dict({"f": 4}, reduce="sum")
    assert logger.peek(("a", "b", "c")) == 1
    assert logger.reduce() == {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4}


def test_peek_of_an_unknown_key_gives_the_default_and_logs_nothing() -> None:
    logger = MetricsLogger()
    assert logger.peek("x", default=5.0) == 5.0
    assert math.isnan(logger.peek("x"))
    assert logger.peek() == {}


def test_log_time_logs_the_seconds_also_of_a_block_that_raises() -> None:
    logger = MetricsLogger()
    with logger.log_time(("timers", "x"), reduce="sum"):
        pass
    with pytest.raises(ZeroDivisionError), logger.log_time(("timers", "y"), reduce="sum"):
        raise ZeroDivisionError
    timers = logger.reduce()["timers"]
    assert set(timers) == {"x", "y"}
    assert all_of(seconds >= 0 for seconds in timers.values())


seconds_by_part = st.lists(st.floats(0, 100), min_size=len(PARTS), max_size=len(PARTS)).map(
    lambda seconds: dict(zip(PARTS, seconds, strict=True))
)


@given(seconds=seconds_by_part, iteration_s=st.floats(1e-3, 1e3))
def test_shares_sum_to_one_and_the_bottleneck_is_the_largest(seconds: dict[str, float], iteration_s: float) -> None:
    timers, bottleneck = timer_results(seconds, iteration_s)
    shares = {name: value for name, value in timers.items() if name.endswith("_share")}
    assert sum(shares.values()) == pytest.approx(1)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares.values())
    assert seconds[bottleneck["part"]] == max(seconds.values())
    assert bottleneck["share"] == timers[f"{bottleneck['part']}_share"]
    assert bottleneck["setting"] == PARTS[bottleneck["part"]]
    assert timers["iteration_s"] == iteration_s


def test_timers_add_up_and_start_again_at_zero() -> None:
    timers = Timers()
    timers.add({"learning": 1.5, "waiting": 1.0})
    timers.add({"learning": 0.5})
    taken = timers.take()
    assert (taken["learning"], taken["waiting"], taken["env_step"]) == (2.0, 1.0, 0.0)
    assert set(timers.take().values()) == {0.0}


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"num_single_steps": 0, "num_envs": 8}, "env_runners.num_envs_per_env_runner"),
        ({"num_single_steps": 1000, "num_envs": 8}, "env_runners.vectorization"),  # 1 ms per step
        ({"num_single_steps": 1000, "num_envs": 1}, "env_runners.num_env_runners"),
        ({"num_single_steps": 10_000, "num_envs": 8}, "env_runners.num_env_runners"),  # a process would take longer
    ],
)
def test_the_setting_for_slow_envs_goes_by_how_they_are_stepped(given: dict[str, Any], setting: str) -> None:
    seconds = {**dict.fromkeys(PARTS, 0.0), "env_step": 1.0}
    assert timer_results(seconds, 1.5, **given)[1] == {"part": "env_step", "share": 1 / 1.5, "setting": setting}
    seconds["learning"] = 2.0
    assert timer_results(seconds, 3.5, **given)[1]["setting"] == "training.minibatch_size"


def test_less_replay_makes_learning_from_a_buffer_faster() -> None:
    """Batches are whole by default: minibatches would be more updates, not fewer."""
    from corral import DQNConfig

    config = DQNConfig().environment("CartPole-v1").training(training_intensity=512, train_batch_size_per_learner=512)
    config.training(num_steps_sampled_before_learning_starts=0).reporting(min_sample_timesteps_per_iteration=50)
    with config.build() as algo:
        found = algo.train()["bottleneck"]
    assert (found["part"], found["setting"]) == ("learning", "training.training_intensity")
    assert "training_intensity" in DQNConfig.group_fields()["training"]


@pytest.mark.parametrize("part", ["env_step", "waiting"])
def test_no_setting_makes_simulators_faster_that_drive_themselves(part: str) -> None:
    seconds = {**dict.fromkeys(PARTS, 0.0), part: 1.0}
    assert timer_results(seconds, 1.5, is_served=True)[1]["setting"] == SIMULATORS


def test_settings_of_the_bottleneck_exist() -> None:
    from corral import DQNConfig, PPOConfig

    # A part that takes no time, because there is no buffer, is not a bottleneck.
    for config, parts in ((PPOConfig, PARTS.keys() - {"replay"}), (DQNConfig, PARTS.keys() - {"returns"})):
        for part in parts:
            group, _, name = PARTS[part].partition(".")
            assert not name or name in config.group_fields()[group]


def test_the_values_of_a_window_can_be_read() -> None:
    logger = MetricsLogger()
    logger.log_values(("runners", "return"), [1.0, 2.0, 3.0], window=2)
    logger.log_value("loss", 1.0)
    assert logger.peek_values(("runners", "return")) == [2.0, 3.0] == logger.peek_values(("runners", "return"))
    assert logger.peek(("runners", "return")) == 2.5
    assert logger.peek_values("loss") == logger.peek_values("nothing") == []
