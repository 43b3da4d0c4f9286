"""The shares of tasks in training, as metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def log_shares(metrics_logger: Any, tasks: Sequence[Any], shares: Sequence[float]) -> None:
    """Log the expected share of sub-envs for each task, as `curriculum/task_share/<task>`."""
    for task, share in zip(tasks, shares, strict=True):
        metrics_logger.log_value(("curriculum", "task_share", str(task)), share, window=1)
