"""Tasks in a fixed order: the next one follows when a metric has reached its threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corral.callbacks.callback import Callback
from corral.curriculum.shares import log_shares
from corral.errors import ConfigError, nearest
from corral.metrics.named_number import check_is_measured
from corral.metrics.result import flat_result


class ThresholdCurriculum(Callback):
    """Trains on tasks in order; when a metric has reached its threshold, all sub-envs get the next task.

    An iteration counts only if its metric is about the task in force. A metric of the training episodes, such as
    `env_runners/episode_return_mean`, counts when it averages only episodes that began after the last change. A
    metric of an evaluation counts once per round, and only if the round is fresh. Give an instance to
    `.callbacks(...)`. The result has `curriculum/task_index`, and under `curriculum/task_share` the share of sub-envs
    for each task.

    Args:
        tasks: Tasks from easy to hard; `set_task` of the envs receives them.
        thresholds: Value from which a task counts as learned: one for all tasks, or one for each task except the last.
        metric: Name of the metric in the result, such as `evaluation/env_runners/episode_return_mean`.
        patience: Number of iterations in a row in which the metric must reach the threshold.

    Raises:
        ConfigError: There is no task, the number of thresholds is wrong, or the patience is below 1. Later, as the
            cause of a `CallbackError`: the result has no such metric.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        thresholds: float | Sequence[float],
        *,
        metric: str = "env_runners/episode_return_mean",
        patience: int = 1,
    ) -> None:
        """Begin with the first task."""
        self.tasks, self.metric, self.patience = list(tasks), metric, patience
        several, num_changes = np.ndim(thresholds) > 0, len(self.tasks) - 1
        self.thresholds = np.ravel(thresholds).tolist() * (1 if several else num_changes)
        if not self.tasks or patience < 1 or (several and len(self.thresholds) != num_changes):
            raise ConfigError(
                f"ThresholdCurriculum: {len(self.tasks)} tasks need as many thresholds less one, or one number, and a "
                f"patience of at least 1; got {thresholds!r} and patience={patience}."
            )
        self._begin()

    def _begin(self) -> None:
        self.index, self.num_reached, self.num_episodes_before = 0, 0, 0

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Set the first task; an algorithm that was built before with this instance does not count."""
        check_is_measured(self.metric, "ThresholdCurriculum: metric", algorithm.config, ConfigError)
        self._begin()
        self._set_task(algorithm)

    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Set the task of the checkpoint."""
        self._set_task(algorithm)

    def on_train_result(self, *, algorithm: Any, metrics_logger: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Compare the metric with the threshold, and set the next task if it is time.

        Raises:
            ConfigError: The result has no such metric.
        """
        metrics = flat_result(result)
        if self.metric not in metrics:
            raise ConfigError(f"ThresholdCurriculum: no metric {self.metric!r}. {nearest(self.metric, metrics)}")
        num_episodes = metrics["env_runners/num_episodes_lifetime"]
        if self.index < len(self.tasks) - 1 and self._counts(metrics, num_episodes, algorithm):
            reached = metrics[self.metric] >= self.thresholds[self.index]
            self.num_reached = self.num_reached + 1 if reached else 0
            if self.num_reached >= self.patience:
                self.index, self.num_reached, self.num_episodes_before = self.index + 1, 0, num_episodes
                self._set_task(algorithm)
        metrics_logger.log_value(("curriculum", "task_index"), self.index, window=1)
        log_shares(metrics_logger, self.tasks, [float(i == self.index) for i in range(len(self.tasks))])

    def _counts(self, metrics: Mapping[str, Any], num_episodes: float, algorithm: Any) -> bool:
        """Return whether the metric is about the task in force."""
        if self.metric.startswith("evaluation/"):
            return bool(metrics["evaluation/fresh"])
        if self.index == 0 or not self.metric.startswith("env_runners/episode_"):
            return True
        config = algorithm.config  # one episode of each sub-env began with the task before
        num_old = algorithm.env_runner_group.num_envs * max(1, config.num_env_runners)
        num_new = num_episodes - self.num_episodes_before - num_old
        return bool(num_new >= config.metrics_num_episodes_for_smoothing)

    def _set_task(self, algorithm: Any) -> None:
        algorithm.env_runner_group.foreach_env_runner("set_tasks", kwargs={"tasks": [self.tasks[self.index]]})

    def get_state(self) -> dict[str, Any]:
        """Return the index of the task and the counts."""
        return {name: getattr(self, name) for name in ("index", "num_reached", "num_episodes_before")}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`.

        Raises:
            ConfigError: There is no task with the index of the state.
        """
        if state["index"] >= len(self.tasks):
            raise ConfigError(
                f"ThresholdCurriculum: the state is at the task with index {state['index']}, and there are "
                f"{len(self.tasks)} tasks: give the tasks of the run, and further ones after them."
            )
        vars(self).update(state)
