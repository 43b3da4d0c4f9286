"""Tasks in a fixed order: the next one follows when a metric has reached its threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.callbacks.callback import Callback
from corral.callbacks.curriculum.shares import log_shares
from corral.core.metrics.named_number import check_is_measured
from corral.core.metrics.result import EARLY_MEANS, NO_IMPROVEMENT, flat_result, without_early_means
from corral.errors import ConfigError, nearest

if TYPE_CHECKING:
    from corral.core.metrics.entry import Entry

STATE = ("index", "num_reached", "num_episodes_before", "num_values_before", "over_before", "num_due", "first_counts")

MEMORY_OF_AVERAGE = 3.0
"""Values, times the weight of a new one, after which a moving average holds 5% of what it was."""


OF_ROUND = ("evaluation/env_runners/", *(f"evaluation/{name}" for name in NO_IMPROVEMENT))
"""Beginnings of the names of the numbers that say how well the task of a round is played."""


class ThresholdCurriculum(Callback):
    """Trains on tasks in order; when a metric has reached its threshold, all sub-envs get the next task.

    An iteration counts only if its metric is about the task in force. A statistic of training episodes, such as
    `env_runners/episode_return_mean`, the return of a module or of an agent, or what callbacks log, counts when it has
    only values of episodes that began after the last change: its window is full of them; a moving average has nearly
    forgotten the others; what counts for one iteration is of an iteration after these episodes. Early means (see
    docs/metrics.md) never count. A metric of an evaluation counts once per round, and only if the round is fresh. Give
    an instance to `.callbacks(...)`. The result has `curriculum/task_index`, and under `curriculum/task_share` the
    share of sub-envs for each task.

    Until their windows have only episodes of the task in force, statistics of training episodes are early means: they
    meet no stop criterion and choose no best checkpoint, which is one of the task in force.

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
                f"ThresholdCurriculum: {len(self.tasks)} tasks need {len(self.tasks) - 1} thresholds, or one number "
                f"for all, and a patience of at least 1; got {thresholds!r} and patience={patience}."
            )
        self._begin()

    def _begin(self) -> None:
        self.index, self.num_reached, self.num_episodes_before = 0, 0, 0
        self.num_values_before = 0  # of the metric, before the task in force
        self.over_before: dict[int, list[int]] = {}  # episodes of each sub-env that were over then, by runner
        # Episodes that results count when they hold all fragments that ended the episodes of the task before; `None`
        # until these are sampled.
        self.num_due: int | None = None
        # Values and episodes that there were when all episodes were about the task in force; `None` until then.
        self.first_counts: list[int] | None = None
        self.is_round_old = False  # whether the latest round of evaluation played the task before

    def on_algorithm_init(self, *, algorithm: Any, metrics_logger: Any, **kwargs: Any) -> None:
        """Set the first task; an algorithm that was built before with this instance does not count."""
        check_is_measured(self.metric, "ThresholdCurriculum: metric", algorithm.config, ConfigError)
        self._begin()
        self._set_task(algorithm)
        self._log_index(metrics_logger)

    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Set the task of the checkpoint."""
        self._set_task(algorithm)

    def on_train_result(self, *, algorithm: Any, metrics_logger: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Compare the metric with the threshold, and set the next task if it is time.

        Raises:
            ConfigError: The result has no such metric.
        """
        metrics = flat_result(without_early_means(result))
        if self.metric not in metrics:
            raise ConfigError(f"ThresholdCurriculum: no metric {self.metric!r}. {nearest(self.metric, metrics)}")
        num_episodes = metrics["env_runners/num_episodes_lifetime"]
        self.is_round_old = self.is_round_old and not metrics.get("evaluation/fresh")
        if self.index < len(self.tasks) - 1 and self._counts(metrics, num_episodes, algorithm):
            reached = metrics[self.metric] >= self.thresholds[self.index]
            self.num_reached = self.num_reached + 1 if reached else 0
            if self.num_reached >= self.patience:
                self.index, self.num_reached = self.index + 1, 0
                self._set_task(algorithm)
                self.num_episodes_before = num_episodes + _num_in_flight(algorithm, "num_episodes")
                if (entry := self._entry(algorithm)) is not None:
                    self.num_values_before, self.num_due, self.first_counts = entry.num_values, None, None
                    if entry.reduction.window is not None:
                        self.num_values_before += _num_in_flight(algorithm, *entry.path[1:])
                    self.over_before = algorithm.env_runner_group.num_episodes_over
                self.is_round_old = algorithm.config.evaluation_tasks == "training"
        names = [] if self._are_episodes_new(num_episodes, algorithm) else algorithm.metrics.names_of_episodes()
        names = [name for name in names if not name.startswith("curriculum/")]
        if self.is_round_old:
            names += [name for name in metrics if name.startswith(OF_ROUND)]
        if names:
            result[EARLY_MEANS] = [*dict.fromkeys((*result.get(EARLY_MEANS, ()), *names))]
        self._log_index(metrics_logger)
        log_shares(metrics_logger, self.tasks, [float(i == self.index) for i in range(len(self.tasks))])

    def _log_index(self, metrics_logger: Any) -> None:
        metrics_logger.log_value(("curriculum", "task_index"), self.index, window=1)

    def _counts(self, metrics: Mapping[str, Any], num_episodes: float, algorithm: Any) -> bool:
        """Return whether the metric is about the task in force."""
        if self.metric.startswith("evaluation/"):
            return bool(metrics["evaluation/fresh"])
        if self.index == 0:
            return True
        are_episodes_new = self._are_episodes_new(num_episodes, algorithm)
        if self.metric.startswith("env_runners/episode_"):
            return are_episodes_new
        if (entry := self._entry(algorithm)) is None:
            return True
        if entry.is_reserved:  # one value per episode, as the returns of modules and agents
            num_old = self._num_old(algorithm)
            return bool(entry.num_values - self.num_values_before - num_old >= (entry.reduction.window or 0))
        if self.num_due is None and (are_episodes_new or self._are_all_over(algorithm)):
            self.num_due = int(num_episodes) + _num_in_flight(algorithm, "num_episodes")
        return self._counts_values(entry, num_episodes)

    def _num_old(self, algorithm: Any) -> int:
        """Return the number of episodes that were running at the last change: one of each sub-env."""
        return int(algorithm.env_runner_group.num_envs * max(1, algorithm.config.num_env_runners))

    def _are_episodes_new(self, num_episodes: float, algorithm: Any) -> bool:
        """Return whether windows of episodes have only such that began with the task in force."""
        num_new = num_episodes - self.num_episodes_before - self._num_old(algorithm)
        return self.index == 0 or bool(num_new >= algorithm.config.metrics_num_episodes_for_smoothing)

    def _entry(self, algorithm: Any) -> Entry | None:
        """Return the key of the logger that has the metric, if it may be a statistic of training episodes."""
        entry = algorithm.metrics.find(self.metric)
        return entry if entry is not None and entry.may_be_of_episodes else None

    def _are_all_over(self, algorithm: Any) -> bool:
        """Return whether all episodes are over that began before the task in force."""
        for index, counts in algorithm.env_runner_group.num_episodes_over.items():
            before = self.over_before.get(index, [])
            if len(before) != len(counts):  # of a checkpoint with other runners, whose counts do not continue
                before = [0] * len(counts)
            if any(now <= then for then, now in zip(before, counts, strict=True)):
                return False
        return True

    def _counts_values(self, entry: Entry, num_episodes: float) -> bool:
        """Return whether what callbacks log is about the task in force.

        Args:
            entry: Key of the metric.
            num_episodes: Episodes so far.
        """
        if self.first_counts is None:
            if self.num_due is not None and num_episodes >= self.num_due:
                self.first_counts = [entry.num_values, int(num_episodes)]
            return False
        num_values, num_before = self.first_counts
        if entry.reduction.ema_coeff is not None:
            return num_episodes - num_before >= MEMORY_OF_AVERAGE / entry.reduction.ema_coeff
        window = None if entry.reduction.clear_on_reduce else entry.reduction.window
        return window is None or entry.num_values - num_values >= window

    def _set_task(self, algorithm: Any) -> None:
        algorithm.env_runner_group.foreach_env_runner("set_tasks", kwargs={"tasks": [self.tasks[self.index]]})

    def get_state(self) -> dict[str, Any]:
        """Return the index of the task and the counts."""
        state = {name: getattr(self, name) for name in STATE}
        return {**state, "is_round_old": True} if self.is_round_old else state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`.

        Raises:
            ConfigError: There is no task with the index of the state.
        """
        if state["index"] >= len(self.tasks):
            raise ConfigError(
                f"ThresholdCurriculum: the state is at the task with index {state['index']}, but there are only "
                f"{len(self.tasks)} tasks: give the tasks of the run, and new tasks only after them."
            )
        vars(self).update({"is_round_old": False, "num_due": None, **state})


def _num_in_flight(algorithm: Any, *path: str) -> int:
    """Return the episodes, or the values of a key with a window, of sampled fragments that no result counts yet.

    Runners that sample ahead have such fragments when they get the next task.
    """
    parts = algorithm.env_runner_group.mail.parts_in_flight()
    return sum(int(part[path].data[0]) for part in parts if path in part)
