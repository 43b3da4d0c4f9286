"""The best checkpoint by evaluated return holds the weights that were evaluated."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest

from corral import Callback, PPOConfig, evaluate_policy, load_policy
from corral.algorithms.run_checkpoints import best_metric
from corral.core.metrics.result import flat_result, without_early_means
from corral.errors import CorralError
from corral.runs.checkpoint import read_checkpoint
from corral.runs.loggers.run_summary import last_numbers
from corral.testing import CountingEnv
from small import small as small_run

SEEDS = [3, 1, 4, 15]


def small(env: Any = CountingEnv, **evaluation: Any) -> PPOConfig:
    learns = {"train_batch_size_per_learner": 64, "num_epochs": 2, "lr": 0.05, "seed": 3}
    return small_run(env, **learns, engine_name="local", **{"evaluation_interval": 1, **evaluation})


def fit(config: PPOConfig, run_dir: Path, iterations: int) -> list[dict[str, Any]]:
    """Return the evaluations of a run, one per iteration."""
    found: list[dict[str, Any]] = []
    config.callbacks(on_train_result=lambda result: found.append(dict(result["evaluation"])))
    with config.build() as algo:
        algo.fit(stop={"training_iteration": iterations}, run_dir=run_dir, progress=False)
    return found


def best(run_dir: Path) -> Any:
    """Return the iteration of the best checkpoint and the number for which it was chosen."""
    metadata = read_checkpoint(run_dir / "checkpoints" / "best", with_state=False).metadata
    return metadata["training_iteration"], metadata["best"]["value"]


@pytest.mark.parametrize("parallel", [False, True])
def test_the_best_checkpoint_plays_the_best_round_again(
    parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.algorithms.run_checkpoints.COPY_PAUSE", 0)
    config = small("CartPole-v1", evaluation_seeds=SEEDS, evaluation_config={"explore": False})
    config.evaluation(evaluation_parallel_to_training=parallel)
    returns = [found["env_runners"]["episode_returns"] for found in fit(config, tmp_path / "run", 6)]
    means = [sum(found) / len(found) for found in returns]
    assert len(set(means)) > 3  # the weights change what is played
    expected = means.index(max(means))
    assert best(tmp_path / "run") == (expected if parallel else expected + 1, max(means))
    policy = load_policy(tmp_path / "run" / "checkpoints" / "best")
    assert list(evaluate_policy(policy, "CartPole-v1", seeds=SEEDS).episode_returns) == returns[expected]


class Rising(Callback):
    """Reports 1, 2, 3, ... as the return of each round."""

    def __init__(self) -> None:
        self.count = 0

    def on_evaluate_end(self, *, evaluation_metrics: dict[str, Any], **kwargs: Any) -> None:
        self.count += 1
        evaluation_metrics["env_runners"]["episode_return_mean"] = evaluation_metrics["score"] = float(self.count)
        evaluation_metrics["truncated"] = self.count == 3


@pytest.mark.parametrize(("iterations", "chosen"), [(4, (4, 2.0)), (5, (2, 1.0))])
def test_a_number_of_an_earlier_round_does_not_choose(
    iterations: int, chosen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first copy is allowed, and one at the end for the last state."""
    monkeypatch.setattr("corral.algorithms.run_checkpoints.COPY_PAUSE", math.inf)
    fit(small(evaluation_interval=2).callbacks(Rising), tmp_path / "run", iterations)
    assert best(tmp_path / "run") == chosen


@pytest.mark.parametrize("metric", [None, "evaluation/score"])
def test_a_truncated_round_does_not_choose(metric: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.algorithms.run_checkpoints.COPY_PAUSE", 0)
    config = small().callbacks(Rising)
    if metric is not None:
        config.checkpointing(best_checkpoint_metric=metric)
    fit(config, tmp_path / "run", 3)
    assert best(tmp_path / "run") == (2, 2.0)


EVALUATED = "evaluation/env_runners/episode_return_mean"


class Endless(CountingEnv):
    """Episodes of 2 steps; in evaluation, sub-env 1 never ends its episode, and waits in its fifth step."""

    def __init__(self, context: Any) -> None:
        self._blocks = bool(context.get("blocks") and context.vector_index)
        super().__init__({"episode_length": 1000 if self._blocks else 2})

    def step(self, action: int) -> Any:
        found = super().step(action)
        if self._blocks and self._t == 5:
            threading.Event().wait()  # until the time limit interrupts it
        return found


def test_no_decision_is_taken_by_a_truncated_round(tmp_path: Path) -> None:
    """The short episodes have ended when the time limit ends the round, and the long one counts nowhere."""
    config = small(Endless, evaluation_duration=2, evaluation_sample_timeout_s=0.3, evaluation_interval=2)
    config.evaluation(evaluation_config={"env_config": {"blocks": True}}).environment(disable_env_checking=True)
    with config.build() as algo:
        result = algo.fit(stop={EVALUATED: 0.5, "training_iteration": 3}, run_dir=tmp_path / "run", progress=False)
    assert result["evaluation"]["truncated"] and not result["evaluation"]["fresh"]
    assert result["evaluation"]["env_runners"]["episode_return_mean"] > 0.5
    assert result["training_iteration"] == 3 and EVALUATED in result["early_means"]
    assert "evaluation/env_runners/num_episodes" not in result["early_means"]
    assert math.isnan(flat_result(without_early_means(result))[EVALUATED])
    assert math.isnan(last_numbers(tmp_path / "run").evaluated_return)
    assert best(tmp_path / "run") == (3, None)


def test_auto_is_the_evaluated_return_if_there_is_one() -> None:
    evaluated, trained = "evaluation/env_runners/episode_return_mean", "env_runners/episode_return_mean"
    assert best_metric(PPOConfig()) == trained
    assert best_metric(small()) == evaluated
    assert best_metric(small(custom_evaluation_function=lambda algorithm, env_runner_group: {})) == trained
    assert best_metric(small().checkpointing(best_checkpoint_metric="episode_len_mean")) == "episode_len_mean"
    assert best_metric(small().checkpointing(best_checkpoint_metric=None)) is None


def test_a_number_of_a_custom_function_may_first_come_with_a_late_round(tmp_path: Path) -> None:
    config = small(evaluation_interval=4, custom_evaluation_function=lambda algorithm, env_runner_group: {"score": 7.0})
    config.checkpointing(best_checkpoint_metric="evaluation/score")
    with config.build() as algo:
        result = algo.fit(stop={"evaluation/score": 7.0}, run_dir=tmp_path / "run", progress=False)
    assert result["training_iteration"] == 4
    assert best(tmp_path / "run") == (4, 7.0)


@pytest.mark.parametrize("what", ["best_checkpoint_metric", "stop criterion"])
def test_a_number_of_evaluation_without_evaluation_is_refused_before_a_file_is_written(
    what: str, tmp_path: Path
) -> None:
    name, config = "evaluation/env_runners/episode_return_mean", small(evaluation_interval=None)
    if what == "best_checkpoint_metric":
        config.checkpointing(best_checkpoint_metric=name)
    stop = {name: 3.0} if what == "stop criterion" else {"training_iteration": 1}
    with (
        config.build() as algo,
        pytest.raises(CorralError, match=rf"{what} '{name}' .*: set evaluation\(evaluation_int"),
    ):
        algo.fit(stop=stop, run_dir=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
