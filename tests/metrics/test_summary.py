"""A result as a text that fits on a screen."""

from __future__ import annotations

from typing import Any

import corral
from corral import PPOConfig


def ppo_result() -> dict[str, Any]:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=0)
    with config.training(train_batch_size_per_learner=256, num_epochs=1).build() as algo:
        return algo.train()


def test_a_summary_names_what_matters_and_fits_on_a_screen() -> None:
    result = ppo_result()
    mean = result["env_runners"]["episode_return_mean"]
    for number in range(100):
        result["env_runners"][f"a_metric_of_a_callback_with_a_name_that_is_long_{number}"] = 1.5
    text = corral.summary(result)
    lines = text.splitlines()
    assert len(lines) == 24 and max(map(len, lines)) <= 80
    assert lines[0].startswith(f"iteration 1, {result['num_env_steps_sampled_lifetime']} env steps, ")
    assert f"mean return {mean:.2f}" in text
    assert "total_loss" in text and "learning" in text
    assert lines[-1].startswith("... and ")


def test_a_summary_leaves_out_what_does_not_exist() -> None:
    nan = float("nan")
    text = corral.summary(
        {
            "training_iteration": 3,
            "num_env_steps_sampled_lifetime": 1234567,
            "env_runners": {"episode_return_mean": nan, "episode_return_min": nan, "episode_return_max": nan, "x": 2},
        }
    )
    assert text.splitlines()[0] == "iteration 3, 1,234,567 env steps"
    assert "nan" not in text and "return" not in text
    assert text.split()[-2:] == ["x", "2"]


def test_a_summary_shows_the_evaluation_with_its_interval() -> None:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=0).evaluation(evaluation_interval=1)
    with config.training(train_batch_size_per_learner=256, num_epochs=1).build() as algo:
        result = algo.train()
    found = result["evaluation"]["env_runners"]
    interval = f"95%: {found['episode_return_interval_low']:.2f} .. {found['episode_return_interval_high']:.2f}"
    (line,) = (line for line in corral.summary(result).splitlines() if line.startswith("evaluation: mean return"))
    assert line.startswith(f"evaluation: mean return {found['episode_return_mean']:.2f}")
    assert line.endswith(interval)
