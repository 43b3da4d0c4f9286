"""Rounds without improvement: counted since the best round, over a resume and for each task, and a reason to stop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from corral import Callback, PPOConfig
from corral.callbacks.curriculum import ThresholdCurriculum
from corral.testing import CountingEnv
from small import small as small_run

COUNT, BEST = "num_rounds_without_improvement", "best_episode_return_mean"


class Scripted(Callback):
    """Reports given mean returns, one a round; the name of a round in place of a number says what it is."""

    def __init__(self, returns: list[Any]) -> None:
        self.returns = returns

    def on_evaluate_end(self, *, algorithm: Any, evaluation_metrics: dict[str, Any], **kwargs: Any) -> None:
        found = self.returns[algorithm.training_iteration - 1]
        if isinstance(found, str):
            evaluation_metrics[found], found = True, 1000.0
        evaluation_metrics["env_runners"]["episode_return_mean"] = found


def small(returns: list[Any]) -> PPOConfig:
    config = small_run(train_batch_size_per_learner=16, evaluation_interval=1, evaluation_duration=2)
    return config.callbacks(Scripted(returns)).engine("local")


def counted(returns: list[Any]) -> list[tuple[float, int]]:
    """Return the best return and the count of each round."""
    with small(returns).build() as algo:
        found = [algo.train()["evaluation"] for _ in returns]
    return [(metrics[BEST], metrics[COUNT]) for metrics in found]


def test_only_a_complete_round_that_is_better_begins_the_count_again() -> None:
    returns = [1.0, 1.0, 0.0, "truncated", 2.0, math.nan, "skipped", -1.0, 3.0]
    assert counted(returns) == [
        (1.0, 0),
        (1.0, 1),  # equal is not better
        (1.0, 2),
        (1.0, 2),
        (2.0, 0),
        (2.0, 1),
        (2.0, 1),
        (2.0, 2),
        (3.0, 0),
    ]


def test_rounds_without_a_return_are_no_improvement() -> None:
    (first, one), (second, two) = counted([math.nan, math.nan])
    assert math.isnan(first) and math.isnan(second) and (one, two) == (1, 2)


def test_a_run_ends_after_rounds_without_improvement_also_when_it_was_interrupted(tmp_path: Path) -> None:
    returns = [1.0, 3.0, 2.0, 2.0, 2.5, 9.0]
    stop = {f"evaluation/{COUNT}": 3, "training_iteration": 6}
    with small(returns).build() as algo:
        whole = algo.fit(stop=stop, run_dir=tmp_path / "whole", progress=False)
    assert whole["training_iteration"] == 5 and whole["evaluation"][BEST] == 3.0
    for iteration in (1, 3, 4):
        run_dir = tmp_path / f"interrupted-{iteration}"
        with small(returns).build() as algo:
            algo.fit(stop={"training_iteration": iteration}, run_dir=run_dir, progress=False)
        with small(returns).build() as algo:
            resumed = algo.fit(stop=stop, resume=run_dir, progress=False)
        assert resumed["training_iteration"] == 5 and resumed["evaluation"][COUNT] == 3


def test_a_round_that_is_not_due_counts_nothing() -> None:
    config = small([1.0, 0.0, 0.0, 0.0]).evaluation(evaluation_interval=2)
    with config.build() as algo:
        counts = [algo.train()["evaluation"][COUNT] for _ in range(4)]
    assert counts == [0, 0, 0, 1]


class Staged(CountingEnv):
    """An env with tasks 0, 1, 2."""

    task = 0

    def get_task(self) -> int:
        return self.task

    def set_task(self, task: int) -> None:
        self.task = task


@pytest.mark.parametrize(("tasks", "expected"), [("training", [0, 1, 0, 1]), ([0, 2], [0, 1, 2, 3])])
def test_the_count_begins_again_with_the_next_task_of_a_curriculum(tasks: Any, expected: list[int]) -> None:
    curriculum = ThresholdCurriculum([0, 1], 2, metric="training_iteration")
    config = small([5.0, 4.0, 1.0, 0.0]).environment(Staged).evaluation(evaluation_tasks=tasks)
    config.callbacks([Scripted([5.0, 4.0, 1.0, 0.0]), curriculum])
    with config.build() as algo:
        found = [algo.train()["evaluation"] for _ in range(4)]
    assert [metrics[COUNT] for metrics in found] == expected
