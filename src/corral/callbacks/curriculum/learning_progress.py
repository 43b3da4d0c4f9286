"""Tasks drawn by learning progress: those whose returns change, up or down, are trained most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.callbacks.callback import Callback
from corral.callbacks.curriculum.shares import log_shares
from corral.core.metrics.result import without_early_means
from corral.core.plain import is_same
from corral.data.episodes.rollout import episode_statistics
from corral.errors import ConfigError


class LearningProgressSampler(Callback):
    """Draws a task for each sub-env in each iteration, with probabilities by learning progress.

    The learning progress of a task is the distance between a fast and a slow exponential average of its returns
    (Kanitscheider et al. 2021, arXiv:2106.14876). A task that is learned, or still too hard, has little progress, and a
    task that is being forgotten has much. Tasks are drawn in proportion to it, and with a small probability evenly. A
    task that has not been tried counts as much as the task with the most progress.

    Give an instance to `.callbacks(...)`. The result has the probabilities as `curriculum/task_share/<task>`, and
    returns by task as `env_runners/by_task/<task>/episode_return_mean`.

    Args:
        tasks: Tasks, in any order; `set_task` of the envs receives them, and `get_task` returns them.
        fast: Weight of the latest iteration in the fast average.
        slow: Weight of the latest iteration in the slow average.
        even: Probability with which a task is drawn evenly.
        seed: Seed of the draws.

    Raises:
        ConfigError: There is no task, or not `0 < slow < fast <= 1` and `0 <= even <= 1`.
    """

    def __init__(
        self, tasks: Sequence[Any], *, fast: float = 0.3, slow: float = 0.03, even: float = 0.2, seed: int = 0
    ) -> None:
        """Begin with even probabilities."""
        self.tasks, self.fast, self.slow, self.even, self.seed = list(tasks), fast, slow, even, seed
        if not self.tasks or not (0 < slow < fast <= 1 and 0 <= even <= 1):
            raise ConfigError(
                "LearningProgressSampler: give at least one task, 0 < slow < fast <= 1 and 0 <= even <= 1; got "
                f"{len(self.tasks)} tasks, slow={slow}, fast={fast} and even={even}."
            )
        self.names = [str(task) for task in self.tasks]
        self._begin()

    def _begin(self) -> None:
        self.averages = np.full((2, len(self.tasks)), np.nan)  # fast and slow
        self.num_draws = 0
        self.playing: dict[int, list[int]] = {}  # by runner: the task of the running episode of each sub-env

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Probability of each task, float64 `[number of tasks]`."""
        progress = np.abs(self.averages[0] - self.averages[1])
        most = np.nanmax(progress, initial=0.0)
        progress = np.where(np.isnan(progress), most, progress)
        even = np.full(len(self.tasks), 1 / len(self.tasks))
        return even if most == 0 else (1 - self.even) * progress / progress.sum() + self.even * even

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Draw the first tasks; an algorithm that was built before with this instance does not count."""
        self._begin()
        self._draw(algorithm)

    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Draw the tasks of the checkpoint again."""
        self._draw(algorithm)

    def on_sample_end(self, *, env_runner: Any, metrics_logger: Any, samples: Any, **kwargs: Any) -> None:
        """Log the returns of the episodes that ended, by the task with which they began."""
        if env_runner.config.in_evaluation:
            return
        now = [self._index_of(task) for task in env_runner.host.get_tasks()]
        playing = list(now)
        if samples.continues and samples.num_rows:  # a sub-env that the first row only reset began an episode there
            before = self.playing.get(env_runner.worker_index, now)
            playing = np.where(samples.valid[0], before, now).tolist()
        for row, env_index in samples.broken:  # the sub-env was replaced, and began an episode
            if not samples.done[:row, env_index].any():
                playing[env_index] = now[env_index]
        returns: list[list[float]] = [[] for _ in self.tasks]
        ended, _ = episode_statistics(samples, samples.carry)
        for env_index, episode_return in zip(ended.env_indices.tolist(), ended.returns.tolist(), strict=True):
            returns[playing[env_index]].append(episode_return)
            playing[env_index] = now[env_index]
        self.playing[env_runner.worker_index] = playing
        for name, values in zip(self.names, returns, strict=True):
            key = "by_task", name
            metrics_logger.log_values((*key, "episode_return_mean"), values, reduce="mean", clear_on_reduce=True)
            metrics_logger.log_values((*key, "num_episodes"), [len(values)], reduce="sum")

    def on_train_result(self, *, algorithm: Any, metrics_logger: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Update the averages, and draw the next tasks."""
        by_task = without_early_means(result)["env_runners"]["by_task"]
        for i, name in enumerate(self.names):
            if by_task[name]["num_episodes"] > 0 and not np.isnan(mean := by_task[name]["episode_return_mean"]):
                before = np.where(np.isnan(self.averages[:, i]), mean, self.averages[:, i])
                self.averages[:, i] = before + np.array([self.fast, self.slow]) * (mean - before)
        log_shares(metrics_logger, self.tasks, self.probabilities.tolist())
        self.num_draws += 1
        self._draw(algorithm)

    def _draw(self, algorithm: Any) -> None:
        """Draw a task for every sub-env, in its runner, so that a runner that restarts draws the same ones."""
        tasks, probabilities, seeds = self.tasks, self.probabilities, (self.seed, self.num_draws)

        def draw(env_runner: Any) -> None:
            rng = np.random.default_rng((*seeds, env_runner.worker_index))
            drawn = rng.choice(len(tasks), size=env_runner.num_envs, p=probabilities)
            env_runner.set_tasks([tasks[i] for i in drawn])

        algorithm.env_runner_group.foreach_env_runner(draw)

    def _index_of(self, task: Any) -> int:
        for index, known in enumerate(self.tasks):
            if is_same(task, known):
                return index
        raise ConfigError(f"LearningProgressSampler: get_task() returned {task!r:.80}, which is not one of its tasks.")

    def get_state(self) -> dict[str, Any]:
        """Return the averages, the number of draws, and the tasks of running episodes."""
        playing = {index: list(tasks) for index, tasks in self.playing.items()}
        averages = self.averages.copy()
        return {"tasks": list(self.names), "averages": averages, "num_draws": self.num_draws, "playing": playing}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`.

        Raises:
            ConfigError: The state is of other tasks.
        """
        if state["tasks"] != self.names:
            raise ConfigError(f"LearningProgressSampler: the state is of the tasks {state['tasks']}, not {self.names}.")
        self.averages, self.num_draws = state["averages"].copy(), state["num_draws"]
        self.playing = {index: list(tasks) for index, tasks in state["playing"].items()}
