"""Stop criteria: names, aliases, and names that never appear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral import PPOConfig
from corral.algorithms.stopping import Below, StopCriteria
from corral.core.metrics.named_number import LATE_KEY_ITERATIONS
from corral.core.metrics.result import flat_result
from corral.errors import StopCriterionError
from corral.testing import CountingEnv
from small import small as small_run


def result(**changes: Any) -> dict[str, Any]:
    return {
        "env_runners": {"episode_return_mean": 100.0, "custom": {"height": 3.0}},
        "learners": {"default_policy": {"total_loss": float("nan")}},
        "training_iteration": 5,
        "num_env_steps_sampled_lifetime": 1000,
        "time_total_s": 60.0,
        "config": {"training": {"lr": 1e-3}},
        **changes,
    }


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("env_runners/episode_return_mean", 100),
        ("episode_return_mean", 99.5),
        ("custom/height", 3),
        ("training_iteration", 5),
        ("num_env_steps_sampled_lifetime", 1000),
        ("num_env_steps", 1000),
        ("time_s", 60),
        ("time_total_s", 60),
    ],
)
def test_a_number_that_reaches_its_limit_stops(name: str, limit: float) -> None:
    met = StopCriteria({name: limit}).met(result())
    assert met is not None and name in met
    assert StopCriteria({name: limit + 1}).met(result()) is None


def test_the_first_criterion_that_is_met_is_told() -> None:
    criteria = StopCriteria({"training_iteration": 6, "episode_return_mean": 50, "time_s": 1})
    met = criteria.met(result())
    assert met is not None and met.startswith("episode_return_mean=100 ")


def test_large_numbers_are_told_with_all_of_their_digits() -> None:
    numbers = result(num_env_steps_sampled_lifetime=1_000_490, mine=1234.56789)
    assert StopCriteria({"num_env_steps": 1_000_000}).met(numbers) == "num_env_steps=1,000,490 reached 1,000,000"
    assert StopCriteria({"mine": Below(2e6)}).met(numbers) == "mine=1,234.57 is below 2,000,000"
    assert StopCriteria({"mine": 0.5}).met(result(mine=2345678.9)) == "mine=2,345,679 reached 0.5"


def test_nan_does_not_stop() -> None:
    assert StopCriteria({"learners/default_policy/total_loss": -1e9}).met(result()) is None


@pytest.mark.parametrize("value", [np.float32(2.5), np.int64(3), np.float64(3)])
def test_numpy_numbers_count(value: Any) -> None:
    assert StopCriteria({"mine": 2}).met(result(mine=value)) is not None


@pytest.mark.parametrize("late_keys", [False, True])
def test_a_wrong_name_is_told_with_the_nearest(late_keys: bool) -> None:
    criteria = StopCriteria({"episode_return_men": 1}, late_keys=late_keys)
    for _ in range(LATE_KEY_ITERATIONS - 1 if late_keys else 0):
        assert criteria.met(result()) is None
    with pytest.raises(StopCriterionError) as error:
        criteria.met(result())
    assert "'episode_return_men'" in str(error.value)
    assert "episode_return_mean'?" in str(error.value)


def test_a_key_that_a_callback_logs_may_come_late() -> None:
    criteria = StopCriteria({"mine": 2}, late_keys=True)
    assert criteria.met(result()) is None
    assert criteria.met(result(mine=2)) is not None
    with pytest.raises(StopCriterionError):
        StopCriteria({"mine": 2}, late_keys=False).met(result())


def test_other_criteria_stop_a_run_before_a_late_key_comes() -> None:
    met = StopCriteria({"mine": 2, "training_iteration": 5}, late_keys=True).met(result())
    assert met is not None and met.startswith("training_iteration")


def test_a_wrong_name_is_told_though_another_criterion_is_met() -> None:
    with pytest.raises(StopCriterionError, match="'mine' does not appear"):
        StopCriteria({"training_iteration": 5, "mine": 2}).met(result())


@pytest.mark.parametrize("name", ["config/training/lr", "env_runners"])
def test_settings_and_groups_are_no_numbers(name: str) -> None:
    with pytest.raises(StopCriterionError, match="does not appear"):
        StopCriteria({name: 0}).met(result())


def test_text_is_no_number() -> None:
    with pytest.raises(StopCriterionError, match="is not a number"):
        StopCriteria({"bottleneck/part": 0}).met(result(bottleneck={"part": "learning"}))


def test_no_criterion_at_all_is_refused() -> None:
    with pytest.raises(StopCriterionError, match="no stop criterion"):
        StopCriteria({})


def test_flat_result_leaves_out_the_config_and_only_that() -> None:
    flat = flat_result({"a": {"b": {"c": 1}, "config": {"d": 2}}, "e": 3, "config": {"f": 4}})
    assert flat == {"a/b/c": 1, "a/config/d": 2, "e": 3}


@pytest.mark.parametrize("limit", [float("nan"), float("inf")])
def test_a_limit_that_is_never_reached_is_refused(limit: float) -> None:
    with pytest.raises(StopCriterionError, match="episode_return_mean"):
        StopCriteria({"episode_return_mean": limit})


@pytest.mark.parametrize(
    ("value", "met"),
    [(0.05, "entropy=0.05 is below 0.1"), (0.1, None), (0.2, None), (float("nan"), None), (np.float32(0.0), "=0 is")],
)
def test_a_number_below_its_limit_stops(value: Any, met: str | None) -> None:
    found = StopCriteria({"learners/default_policy/entropy": Below(0.1)}).met(
        result(learners={"default_policy": {"entropy": value}})
    )
    assert found is None if met is None else found is not None and met in found


def test_a_function_stops_and_receives_the_whole_result() -> None:
    def solved(result: dict[str, Any]) -> bool:
        mean: float = result["env_runners"]["episode_return_mean"]
        return mean * result["training_iteration"] >= 500

    for criteria in (StopCriteria(solved), StopCriteria({"solved": solved, "training_iteration": 99})):
        assert criteria.met(result()) == "solved(result) is true"
        assert criteria.met(result(training_iteration=4)) is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda result: None, "stop criterion 'mine' must return True or False, got None"),
        (lambda result: result["no"], "stop criterion 'mine' raised KeyError: 'no'"),
    ],
)
def test_a_function_that_gives_no_answer_is_told(function: Any, message: str) -> None:
    with pytest.raises(StopCriterionError, match=message):
        StopCriteria({"mine": function}).met(result())


@pytest.mark.parametrize("name", ["num_env_steps", "training_iteration", "time_s", "env_runners/num_episodes_lifetime"])
@pytest.mark.parametrize("criterion", [0, -3, Below(10)])
def test_a_limit_that_every_result_meets_is_refused(name: str, criterion: Any) -> None:
    with pytest.raises(StopCriterionError, match=f"'{name}': .* would end every run after its first iteration"):
        StopCriteria({name: criterion})


@pytest.mark.parametrize("criterion", ["450", True, None, [1]])
def test_other_values_are_no_criteria(criterion: Any) -> None:
    with pytest.raises(StopCriterionError, match=r"must be a number, Below\(number\) or a function"):
        StopCriteria({"episode_return_mean": criterion})


def test_a_misspelt_name_without_its_end_suggests_all_ends() -> None:
    ends = {f"episode_{name}_{how}": 1.0 for name in ("return", "len") for how in ("mean", "min", "max")}
    with pytest.raises(StopCriterionError) as error:
        StopCriteria({"episode_retrun": 1}).met(result(env_runners=ends))
    hint = str(error.value).partition("Did you mean ")[2]
    assert set(hint.replace(" or ", ", ").rstrip("?").split(", ")) == {
        f"'env_runners/episode_return_{how}'" for how in ("mean", "min", "max")
    }


class Watched(CountingEnv):
    """An env whose steps are counted over all of them."""

    num_steps = 0

    def step(self, action: int) -> Any:
        Watched.num_steps += 1
        return super().step(action)


def small(**settings: Any) -> PPOConfig:
    return small_run(Watched, **settings)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_env_step", "num_env_steps"),
        ("episode_retrun_mean", "env_runners/episode_return_mean"),
        ("total_loss", "learners/default_policy/total_loss"),
        ("learners/default_polcy/total_loss", "learners/default_policy/total_loss"),
        ("iterations", "training_iteration"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"num_env_runners": 2, "engine_name": "local"}], ids=["embedded", "runners"])
def test_a_misspelt_name_is_refused_before_a_step_with_a_hint_that_works(
    name: str, hint: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with small(**settings).build() as algo:
        before = Watched.num_steps
        with pytest.raises(StopCriterionError, match=f"'{name}' does not appear in the result.*{hint}"):
            algo.fit(stop={name: 1e9}, run_dir=tmp_path / "run", progress=False)
        assert Watched.num_steps == before and not (tmp_path / "run").exists()
        algo.fit(stop={hint: 1e9, "training_iteration": 1}, run_dir=tmp_path / "run", progress=False)


@pytest.mark.parametrize("name", ["engine", "bottleneck/part"])
def test_a_text_is_refused_before_a_step(name: str, tmp_path: Path) -> None:
    with small().build() as algo:
        before = Watched.num_steps
        with pytest.raises(StopCriterionError, match="which is not a number"):
            algo.fit(stop={name: 1}, run_dir=tmp_path / "run", progress=False)
        assert Watched.num_steps == before


def test_hints_are_numbers() -> None:
    with pytest.raises(StopCriterionError) as raised:
        StopCriteria({"engin": 0}).met(result(engine="embedded"))
    assert "'engine'" not in str(raised.value)


def test_every_number_of_a_result_may_be_a_criterion(tmp_path: Path) -> None:
    settings = {"evaluation_interval": 2, "evaluation_duration": 1}
    with small(**settings).build() as algo:
        numbers = [
            name
            for name, value in flat_result(algo.train()).items()
            if isinstance(value, (int, float)) and not name.endswith("_lifetime") and name != "time_total_s"
        ]
        stop = {**dict.fromkeys(numbers, 1e12), "num_env_steps": 1}
        result = algo.fit(stop=stop, run_dir=tmp_path / "run", progress=False)
    assert result["training_iteration"] == 1  # it had met one already


def test_keys_that_callbacks_log_are_not_refused(tmp_path: Path) -> None:
    def log(metrics_logger: Any) -> None:
        metrics_logger.log_value("mine", 3.0, window=1)

    with small().callbacks(on_train_result=log).build() as algo:
        assert algo.fit(stop={"mine": 3}, run_dir=tmp_path / "run", progress=False)["training_iteration"] == 1
