"""Compute what needs the whole rollout: the log-probabilities of its actions, and the metrics of its episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from corral.episodes.rollout import EpisodeStatistics, Rollout
from corral.metrics.logger import MetricsLogger
from corral.modules.distributions import ActionDistribution


def fill_logp(rollout: Rollout, distribution: ActionDistribution, *, needed: bool) -> None:
    """Fill the column `logp`, where the exploration gave none, from the outputs of the policy.

    Args:
        rollout: Rollout that is complete except for this column.
        distribution: Distribution whose parameters the policy's outputs are.
        needed: Whether the algorithm learns from the column; otherwise entries that the exploration did not give are
            NaN.
    """
    given: NDArray[Any] | None = rollout.columns.get("logp")
    if not needed or not rollout.num_rows:
        if given is None:
            rollout.columns["logp"] = np.full(rollout.rewards.shape, np.nan, np.float32)
        return
    flat = rollout.dist_inputs.reshape(-1, distribution.num_inputs)
    actions = rollout.actions.reshape(-1, *distribution.action_shape)
    with torch.inference_mode():
        logp = distribution.logp(torch.from_numpy(flat), torch.from_numpy(actions)).numpy()
    logp = logp.reshape(rollout.rewards.shape)
    rollout.columns["logp"] = logp if given is None else np.where(np.isnan(given), logp, given)


def log_episodes(metrics: MetricsLogger, statistics: EpisodeStatistics, window: int) -> None:
    """Log the returns, lengths and durations of the episodes that ended; if none ended, only create the keys."""
    for name, values in (("return", statistics.returns), ("len", statistics.lengths)):
        for reduce in ("mean", "min", "max"):
            metrics.log_values(f"episode_{name}_{reduce}", values, reduce=reduce, window=window)
    metrics.log_values("episode_duration_sec_mean", statistics.durations_s, reduce="mean", window=window)
