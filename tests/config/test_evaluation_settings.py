"""Settings of the group `evaluation`: names, other names, and what a config as `evaluation_config` means."""

from __future__ import annotations

from typing import Any

import pytest

from corral import PPOConfig
from corral.errors import ConfigError


def test_the_setters_and_files_take_the_older_names() -> None:
    config = PPOConfig().evaluation(evaluation_num_workers=2, custom_eval_function="corral.testing:DeepSea")
    assert config.evaluation_num_env_runners == 2 and config.custom_evaluation_function.__name__ == "DeepSea"
    assert PPOConfig.from_dict({"evaluation": {"evaluation_num_workers": 3}}).evaluation_num_env_runners == 3
    assert PPOConfig().set_path("evaluation.evaluation_num_workers", "4").evaluation_num_env_runners == 4


def test_both_names_of_a_setting_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="evaluation_num_workers is another name of evaluation_num_env_runners"):
        PPOConfig().evaluation(evaluation_num_workers=2, evaluation_num_env_runners=2)


def test_a_config_as_evaluation_config_counts_where_it_differs_from_the_defaults() -> None:
    other = PPOConfig().env_runners(explore=False).environment("CartPole-v1", env_config={"size": 3})
    config = PPOConfig().evaluation(evaluation_config=other)
    assert config.evaluation_config == {"explore": False, "env": "CartPole-v1", "env_config": {"size": 3}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation_interval": 0}, "evaluation_interval=0 must be at least 1"),
        ({"evaluation_duration": "long"}, "evaluation_duration='long' must be"),
        ({"evaluation_sample_timeout_s": 0}, "must be positive"),
        ({"evaluation_seeds": [1, -1]}, "-1 must be at least 0"),
        ({"evaluation_intervall": 1}, "'evaluation_interval'"),
    ],
)
def test_wrong_values_are_refused_at_the_call(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig().evaluation(**settings)


def test_seeds_may_be_a_range() -> None:
    assert PPOConfig().evaluation(evaluation_seeds=range(3)).evaluation_seeds == [0, 1, 2]


def test_parallel_evaluation_without_an_interval_is_said_once_to_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = PPOConfig().environment("CartPole-v1").evaluation(evaluation_parallel_to_training=True)
    with caplog.at_level("WARNING", "corral"):
        config.validate()  # as the command line does
        config.build().stop()
    assert caplog.text.count("no effect without evaluation_interval") == 1
