"""The settings of the checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from corral.core.settings import Need, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(kw_only=True)
class CheckpointingSettings:
    """Settings of the checkpoints that `fit` and the command line keep in the directory of a run.

    Attributes:
        checkpoint_every_s: Seconds between two checkpoints; `None` writes none by time. None is written by time before
            50 times the duration of the last one has passed, so that writing takes at most 2% of the time.
        checkpoint_every_iterations: Iterations between two checkpoints, whatever time writing takes; `None` writes none
            by iterations.
        num_checkpoints_kept: Number of latest checkpoints that stay in the directory. One is also written at the end of
            the run, however it ends. 0 writes none of these.
        best_checkpoint_metric: Number of the result by which the best checkpoint is chosen; `None` keeps no best one.
            `"auto"` is `"evaluation/env_runners/episode_return_mean"` if `evaluation_interval` is set without a custom
            function, else `"env_runners/episode_return_mean"`, and none where nothing is sampled. Of evaluation, only
            complete rounds count.
        best_checkpoint_mode: Whether the largest or the smallest number is the best.
    """

    checkpoint_every_s: PositiveFloat | None = 60.0
    checkpoint_every_iterations: PositiveInt | None = None
    num_checkpoints_kept: NonNegativeInt = 2
    best_checkpoint_metric: str | None = "auto"
    best_checkpoint_mode: Annotated[
        Literal["max", "min"], Need("best_checkpoint_metric", lambda config: config.best_checkpoint_metric is not None)
    ] = "max"
