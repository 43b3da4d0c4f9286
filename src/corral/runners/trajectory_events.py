"""The trajectory event of a runner, fired when a rollout is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from corral.callbacks.dispatch import Dispatcher
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.tree import map_tree
from corral.episodes.rollout import Rollout
from corral.episodes.trajectories import TrajectoryBatch

if TYPE_CHECKING:
    from corral.runners.runner import EnvRunner

DEFAULT_AGENT_ID = "default_agent"


def postprocess_trajectories(rollout: Rollout, callbacks: Dispatcher, runner: EnvRunner) -> None:
    """Fire `on_postprocess_trajectory` for each agent of each episode, or chunk, of a complete rollout.

    The order is by sub-env, then by time, then by agent.
    """
    copies = callbacks.wanted("on_postprocess_trajectory", "original_batches")
    modules, rollouts = {name: actor.module for name, actor in runner.actors.items()}, rollout.by_module()
    for episode in rollout.episodes():
        agents = getattr(episode, "agent_episodes", {DEFAULT_AGENT_ID: episode})
        module_ids = {agent_id: part.module_id or DEFAULT_MODULE_ID for agent_id, part in agents.items()}
        batches = {agent_id: TrajectoryBatch(rollouts[module_ids[agent_id]], part) for agent_id, part in agents.items()}
        originals = {
            agent_id: (
                modules[module_ids[agent_id]],
                {name: map_tree(np.copy, column) for name, column in batch.items()} if copies else {},
            )
            for agent_id, batch in batches.items()
        }
        for agent_id, part in agents.items():
            callbacks.fire(
                "on_postprocess_trajectory",
                env_runner=runner,
                metrics_logger=runner.metrics,
                episode=episode,
                agent_id=agent_id,
                policy_id=module_ids[agent_id],
                policies=modules,
                # made now, so that it has columns that were added to the trajectories of other agents
                postprocessed_batch=TrajectoryBatch(rollouts[module_ids[agent_id]], part),
                original_batches=originals,
            )
