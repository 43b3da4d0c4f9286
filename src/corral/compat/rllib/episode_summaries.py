"""What `ray.rllib.evaluation.metrics` of the older API offers: ended episodes of runners, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class RolloutMetrics(NamedTuple):
    """An episode that has ended.

    Attributes:
        episode_length: Number of env steps.
        episode_reward: Return of the episode.
    """

    episode_length: int = 0
    episode_reward: float = 0.0


def collect_episodes(
    workers: Any, remote_worker_ids: Sequence[int] | None = None, timeout_seconds: float = 180.0
) -> list[RolloutMetrics]:
    """Return the episodes that have ended in the runners of a group since the last call, at most 100 of each runner.

    Means of a later result lack the episodes of runners in other processes that were returned here.

    Args:
        workers: A group of env runners.
        remote_worker_ids: Runners to ask; by default all, and the embedded one.
        timeout_seconds: Seconds to wait for an answer.
    """
    answers = workers.foreach_env_runner(
        _ended, remote_worker_ids=remote_worker_ids, timeout_seconds=timeout_seconds, local_env_runner=True
    )
    return [RolloutMetrics(int(length), float(value)) for answer in answers for length, value in answer]


def _ended(env_runner: Any) -> list[tuple[float, float]]:
    """Return the lengths and returns of the episodes that have ended in a runner."""
    taken = (env_runner.metrics.take_values(name) for name in ("episode_len_mean", "episode_return_mean"))
    return list(zip(*taken, strict=True))


def summarize_episodes(
    episodes: Sequence[RolloutMetrics],
    new_episodes: Sequence[RolloutMetrics] | None = None,
    keep_custom_metrics: bool = False,
) -> dict[str, Any]:
    """Return the mean, minimum and maximum of the returns of episodes, and their mean length; NaN without episodes.

    Args:
        episodes: Episodes to summarise.
        new_episodes: Episodes that ended in this iteration; by default all.
        keep_custom_metrics: Changes nothing: callbacks log their numbers in the metrics logger.
    """
    returns = [episode.episode_reward for episode in episodes]
    lengths = [episode.episode_length for episode in episodes]
    reductions: dict[str, Any] = {"mean": np.mean, "min": np.min, "max": np.max}
    numbers = {name: float(fn(returns)) if returns else float("nan") for name, fn in reductions.items()}
    return {
        **{f"episode_reward_{name}": value for name, value in numbers.items()},
        **{f"episode_return_{name}": value for name, value in numbers.items()},
        "episode_len_mean": float(np.mean(lengths)) if lengths else float("nan"),
        "episodes_this_iter": len(episodes if new_episodes is None else new_episodes),
        "custom_metrics": {},
        "hist_stats": {"episode_reward": returns, "episode_lengths": lengths},
    }
