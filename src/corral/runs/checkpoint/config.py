"""The settings of the checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from corral.core.settings import Need, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(kw_only=True)
class CheckpointingSettings:
    """Settings of the checkpoints that `fit` and the command line keep in the directory of a run.

    Attributes:
        checkpoint_every_s: Seconds between two checkpoints, or 50 times the duration of writing one if this is longer;
            `None` writes none by time.
        checkpoint_every_iterations: Iterations between two checkpoints; `None` writes none by iterations.
        num_checkpoints_kept: Number of latest checkpoints that stay in the directory, one of them from the end of the
            run; 0 writes none of these.
        best_checkpoint_metric: Number of the result by which the best checkpoint is chosen; `None` keeps no best one.
            `"auto"` is the mean return of evaluation if `evaluation_interval` is set without a custom function,
            otherwise of training. Of evaluation, only complete rounds count.
        best_checkpoint_mode: Whether the largest or the smallest number is the best.
    """

    checkpoint_every_s: PositiveFloat | None = 60.0
    checkpoint_every_iterations: PositiveInt | None = None
    num_checkpoints_kept: NonNegativeInt = 2
    best_checkpoint_metric: str | None = "auto"
    best_checkpoint_mode: Annotated[
        Literal["max", "min"], Need("best_checkpoint_metric", lambda config: config.best_checkpoint_metric is not None)
    ] = "max"
