"""What an evaluation knows of an episode: plain data, which travel from the runners instead of columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from corral.data.episodes.rollout import Rollout
from corral.envs.episode_resets import EpisodeReset
from corral.envs.videos import Video
from corral.runners.runner import EnvRunner


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that was played to its end.

    Attributes:
        episode_return: Sum of its rewards, without discount.
        episode_len: Its env steps.
        duration_s: Seconds from its reset to its last step.
        worker_index: Index of the runner that played it; 0 is the embedded runner.
        env_index: Index of its sub-env in the runner.
        seed: Seed of its reset, if the round gave one.
        task: Task of its reset, if the round gave one.
        video: Its video, if the round asked for one.
    """

    episode_return: float
    episode_len: int
    duration_s: float
    worker_index: int = 0
    env_index: int = 0
    seed: int | None = None
    task: Any = None
    video: Video | None = None


@dataclass(frozen=True)
class PlayedEpisodes:
    """What a runner answers to a request of an evaluation, instead of a rollout.

    Attributes:
        episodes: The episodes that ended, in the order of their ends.
        positions: For each of them, which of the requested episodes it is, from 0: with N sub-envs, sub-env i plays
            numbers i, i + N, ...
        num_unfinished: Episodes whose last step is not among the steps.
        num_env_steps: Env steps, also of unfinished episodes.
        weights_version: Version of the weights that chose the actions.
        lens_before: For each sub-env, the env steps that its unfinished episode had before these steps.
    """

    episodes: tuple[PlayedEpisode, ...]
    positions: tuple[int, ...]
    num_unfinished: int
    num_env_steps: int
    weights_version: int
    lens_before: tuple[int, ...] = ()


def episode_resets(seeds: Sequence[int] | None, tasks: Sequence[Any] | None) -> list[EpisodeReset] | None:
    """Return the reset arguments of the episodes of a round, or `None` without seeds and tasks.

    Args:
        seeds: Seeds, one for each episode.
        tasks: Tasks, in turn.
    """
    if seeds is None:
        return None if tasks is None else [EpisodeReset(task=task) for task in tasks]
    return [EpisodeReset(seed=seed, task=tasks[i % len(tasks)] if tasks else None) for i, seed in enumerate(seeds)]


def describe_by_task(episodes: Sequence[PlayedEpisode], tasks: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Return mean return and number of episodes for each task, by the text of the task; NaN without an episode."""
    returns: dict[str, list[float]] = {task_name(task): [] for task in tasks}
    for episode in episodes:
        returns[task_name(episode.task)].append(episode.episode_return)
    return {
        name: {"episode_return_mean": fmean(found) if found else math.nan, "num_episodes": len(found)}
        for name, found in returns.items()
    }


def task_name(task: Any) -> str:
    """Return the text of a task for the paths of a result, in which a slash separates names."""
    return str(task).replace("/", "|")


def describe_episodes(runner: EnvRunner, rollout: Rollout) -> PlayedEpisodes:
    """Return what an evaluation needs of a rollout that a runner has just made; a `digest` of `SampleRequest`."""
    found = runner.last_statistics
    envs = found.env_indices.tolist()
    counts = [0] * runner.num_envs
    positions = []
    for i in envs:
        positions.append(i + counts[i] * runner.num_envs)
        counts[i] += 1
    columns = found.returns.tolist(), found.lengths.tolist(), found.durations_s.tolist(), envs
    episodes = [
        PlayedEpisode(total, length, duration_s, runner.worker_index, i)
        for total, length, duration_s, i in zip(*columns, strict=True)
    ]
    num_unfinished = int(np.count_nonzero((rollout.valid & ~rollout.done)[-1:]))
    assert rollout.carry is not None  # a runner's rollouts have one
    return PlayedEpisodes(
        *(tuple(episodes), tuple(positions), num_unfinished, rollout.num_env_steps, rollout.weights_version),
        lens_before=tuple(rollout.carry.lengths.tolist()) if rollout.continues else (0,) * runner.num_envs,
    )


def describe_with_videos(runner: EnvRunner, rollout: Rollout) -> PlayedEpisodes:
    """Return `describe_episodes`, with the videos of the episodes that were recorded."""
    played = describe_episodes(runner, rollout)
    if runner.host.is_broken:
        return played
    videos = {
        env_index + place * runner.num_envs: video
        for env_index, found in enumerate(runner.host.take_videos())
        for place, video in found.items()
    }
    pairs = zip(played.episodes, played.positions, strict=True)
    return replace(played, episodes=tuple(replace(episode, video=videos.get(place)) for episode, place in pairs))
