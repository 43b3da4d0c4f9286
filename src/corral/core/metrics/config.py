"""The settings of iterations and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.core.settings import NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclass(kw_only=True)
class ReportingSettings:
    """Settings of iterations, their results, and the loggers that write them.

    Attributes:
        metrics_num_episodes_for_smoothing: Number of latest episodes in `episode_return_mean` and similar metrics.
        min_time_s_per_iteration: Seconds that an iteration takes at least, by repeating the training step.
        min_sample_timesteps_per_iteration: Number of env steps until which an iteration repeats the training step.
        loggers: What writes each result: for each logger a short name (`csv`, `json`, `images`, `tensorboard`, `wandb`,
            `mlflow`, `trackio`), a class or its import path, an instance, or a dict with `type` and the settings of the
            class. `None` is `csv` and `json`, and nothing in a loop of your own; see docs/loggers.md.
    """

    metrics_num_episodes_for_smoothing: PositiveInt = 100
    min_time_s_per_iteration: NonNegativeFloat = 0.0
    min_sample_timesteps_per_iteration: NonNegativeInt = 0
    loggers: list[Any] | None = None
