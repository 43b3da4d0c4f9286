"""The events of a runner that are fired when a rollout is complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from corral.callbacks.dispatch import Dispatcher
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.metrics.logger import MetricsLogger
from corral.core.tree import map_tree
from corral.data.episodes.rollout import Rollout
from corral.data.episodes.trajectories import TrajectoryBatch
from corral.runners.actor import Actor

DEFAULT_AGENT_ID = "default_agent"


def show_sample(
    rollout: Rollout, callbacks: Dispatcher, actors: Mapping[str, Actor], *, env_runner: Any, metrics: MetricsLogger
) -> None:
    """Fire the events of a complete rollout, whose callbacks may change it.

    Raises:
        CallbackError: One of them raised, or wrote an action outside the action space.
    """
    if callbacks.subscribed("on_postprocess_trajectory"):
        postprocess_trajectories(rollout, callbacks, actors, env_runner=env_runner, metrics=metrics)
        check_actions(rollout, callbacks, actors, "on_postprocess_trajectory")
    callbacks.fire("on_sample_end", env_runner=env_runner, metrics_logger=metrics, samples=rollout)
    check_actions(rollout, callbacks, actors, "on_sample_end")


def check_actions(rollout: Rollout, callbacks: Dispatcher, actors: Mapping[str, Actor], event: str) -> None:
    """Refuse actions in a complete rollout that only a callback of an event can have written.

    Raises:
        CallbackError: An action of a valid step is outside the action space.
    """
    if callbacks.subscribed(event):
        for module_id, part in rollout.by_module().items():
            callbacks.check_actions(part.valid_rows(part.actions), actors[module_id].action_space, event)


def postprocess_trajectories(
    rollout: Rollout, callbacks: Dispatcher, actors: Mapping[str, Actor], *, env_runner: Any, metrics: MetricsLogger
) -> None:
    """Fire `on_postprocess_trajectory` for each agent of each episode, or chunk, of a complete rollout.

    The order is by sub-env, then by time, then by agent.
    """
    copies = callbacks.wanted("on_postprocess_trajectory", "original_batches")
    modules, rollouts = {name: actor.module for name, actor in actors.items()}, rollout.by_module()
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
                env_runner=env_runner,
                metrics_logger=metrics,
                episode=episode,
                agent_id=agent_id,
                policy_id=module_ids[agent_id],
                policies=modules,
                # made now, so that it has columns that were added to the trajectories of other agents
                postprocessed_batch=TrajectoryBatch(rollouts[module_ids[agent_id]], part),
                original_batches=originals,
            )
