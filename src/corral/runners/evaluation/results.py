"""The metrics of evaluation rounds: what a round played, as the result shows it."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.core.metrics.result import flat_result
from corral.envs.vector import env_name
from corral.errors import ConfigError
from corral.runners.evaluation.episodes import describe_by_task, task_name
from corral.runners.evaluation.rounds import Round
from corral.runners.evaluation.statistics import summarize_episodes

if TYPE_CHECKING:
    from corral.runners.evaluation.config import EvaluationConfig
    from corral.runners.runner_group import EnvRunnerGroup

log = logging.getLogger("corral")
NAN = float("nan")

VIDEOS = "videos"
"""Directory of the videos in the directory of a run."""

LIFETIME = "_lifetime"
"""End of the names of counts of runners over their lifetimes, which the result of a round does not repeat."""

# What only training counts among the metrics of its runners.
_OF_TRAINING = ("num_env_steps_dropped",)


def describe_round(played: Round, settings: EvaluationConfig) -> dict[str, Any]:
    """Return the statistics of the episodes of a round, and of each of them the return and the length.

    The seeds of the episodes are there, too, if the settings fix them.
    """
    returns = [episode.episode_return for episode in played.episodes]
    lens = [episode.episode_len for episode in played.episodes]
    durations_s = [episode.duration_s for episode in played.episodes]
    found = {
        **summarize_episodes(returns, lens),
        "episode_duration_sec_mean": statistics.fmean(durations_s) if durations_s else NAN,
        "num_episodes": len(returns),
        "num_env_steps_sampled": played.num_env_steps,
        "episode_returns": returns,
        "episode_lens": lens,
    }
    if settings.evaluation_seeds is not None:
        found["episode_seeds"] = [episode.seed for episode in played.episodes]
    return found


def by_task(played: Round | None, settings: EvaluationConfig) -> dict[str, Any]:
    """Return the part of the metrics by task; `None` is before the first round."""
    tasks = settings.evaluation_tasks
    if not isinstance(tasks, list):
        return {}
    if played is None:
        return {"by_task": {task_name(task): {"episode_return_mean": NAN, "num_episodes": NAN} for task in tasks}}
    return {"by_task": describe_by_task(played.episodes, tasks)}


def means_of(metrics: Mapping[str, Any]) -> list[str]:
    """Return the names of the statistics of episodes in the metrics of a round."""
    parts = {name: metrics[name] for name in ("env_runners", "by_task") if name in metrics}
    return [
        f"evaluation/{name}"
        for name, value in flat_result(parts).items()
        if isinstance(value, Real) and not name.rpartition("/")[2].startswith("num_")
    ]


def without_values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of nested dicts with NaN, without what is counted since the beginning."""
    return {
        name: without_values(value) if isinstance(value, dict) else NAN
        for name, value in metrics.items()
        if not name.endswith(LIFETIME) and name not in _OF_TRAINING
    }


def keep_videos(played: Round, run_dir: Path | None, training_iteration: int) -> list[Any]:
    """Write the videos of a round into the directory of the run, if there is one; return the small copies."""
    found = [(number, episode.video) for number, episode in enumerate(played.episodes) if episode.video is not None]
    if run_dir is not None:
        try:
            (run_dir / VIDEOS).mkdir(exist_ok=True)
            for number, video in found:
                path = run_dir / VIDEOS / f"iteration-{training_iteration:06d}-episode-{number}.mp4"
                path.write_bytes(video.mp4)
        except OSError as error:
            log.warning("The videos of the evaluation cannot be written in %s: %s.", run_dir, error)
    return [video.preview for _, video in found]


def require_images(group: EnvRunnerGroup, config: EvaluationConfig) -> None:
    """Refuse envs that give no images for videos.

    Raises:
        ConfigError: There is one.
    """
    modes = set(chain.from_iterable(group.foreach_env(_render_mode)))
    if modes != {"rgb_array"}:
        raise without_images(config, f"its render_mode is {next(iter(modes - {'rgb_array'}))!r}")


def without_images(config: EvaluationConfig, why: str) -> ConfigError:
    """Return the error for an env that gives no images for videos."""
    return ConfigError(
        f"evaluation_num_videos={config.evaluation_num_videos}: env {env_name(config.env)!r} must take "
        f"render_mode='rgb_array', as a keyword argument or as a key of its env_config: {why}."
    )


def _render_mode(env: Any) -> Any:
    return env.render_mode
