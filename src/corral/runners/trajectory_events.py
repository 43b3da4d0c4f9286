"""The trajectory event of a runner, fired when a rollout is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from corral.callbacks.dispatch import Dispatcher
from corral.core.ids import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from corral.core.tree import map_tree
from corral.episodes.rollout import Rollout
from corral.episodes.trajectories import TrajectoryBatch
from corral.modules.module import Module

if TYPE_CHECKING:
    from corral.runners.runner import EnvRunner


def postprocess_trajectories(rollout: Rollout, callbacks: Dispatcher, runner: EnvRunner, module: Module) -> None:
    """Fire `on_postprocess_trajectory` for each episode, or chunk, of a complete rollout: by sub-env, then by time."""
    copies = callbacks.wanted("on_postprocess_trajectory", "original_batches")
    for start, episode in rollout.chunks():
        batch = TrajectoryBatch(rollout, episode, start)
        original = {name: map_tree(np.copy, column) for name, column in batch.items()} if copies else {}
        callbacks.fire(
            "on_postprocess_trajectory",
            env_runner=runner,
            metrics_logger=runner.metrics,
            episode=episode,
            agent_id=DEFAULT_AGENT_ID,
            policy_id=DEFAULT_MODULE_ID,
            policies={DEFAULT_MODULE_ID: module},
            postprocessed_batch=batch,
            original_batches={DEFAULT_AGENT_ID: (module, original)},
        )
