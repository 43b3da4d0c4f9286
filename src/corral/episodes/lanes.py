"""Rollouts of several agents: one of the env steps, and one for each module, whose columns are agents' own steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.ids import AgentID
from corral.core.tree import Tree
from corral.episodes.rollout import Rollout


class LaneRollout(Rollout):
    """The steps of the agents of one module, with time T on axis 0 and the lanes L on axis 1.

    A lane is the seat of one agent in one sub-env. Row t of a lane is the t-th step of that agent in this rollout, so
    lanes have clocks of their own: row t of two lanes may be different env steps. Rewards that an agent got before it
    acted again are added to its last step. After the end of an agent's episode comes one row that is not valid, whose
    `obs` is the final observation. The rows after the last step of a lane are not valid either.

    A step whose outcome is not known when the rollout ends, because the agent waits for its next turn, is not in this
    rollout: it is the first step of its lane in the next one.

    Attributes:
        lane_envs: Index of the sub-env of each lane, int64 `[L]`.
        lane_agents: Agent of each lane, a list of L ids.
        env_rows: Row of the rollout of the env steps in which each action was taken, int64 `[T, L]`; -1 where no step
            counts, and for a first step whose action was taken in the rollout before.
    """

    __slots__ = ("env_rows", "lane_agents", "lane_envs")

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take columns with room for as many rows as `rewards` has; the runner sets what belongs to the lanes."""
        super().__init__(columns, num_rows=num_rows)
        num_lanes = self.num_lanes
        self.lane_envs: NDArray[np.int64] = np.zeros(num_lanes, np.int64)
        self.lane_agents: list[AgentID] = []
        self.env_rows: NDArray[np.int64] = np.full((num_rows, num_lanes), -1)


class MultiAgentRollout(Rollout):
    """The env steps of one `sample()` call of an env with several agents, and the rollouts of their modules.

    The columns belong to the env: `rewards` (the sum over the agents), `terminated` and `truncated` (of the whole
    episode), `valid` and `row_times_s`. Observations and actions are in the rollouts of the modules.

    Attributes:
        modules: Rollouts by module id; a module that took no step has none.
        num_agent_steps: Steps of all agents, once the rollout is complete: the valid entries of all modules.
    """

    __slots__ = ("modules", "num_agent_steps")

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take the columns of the env steps; the runner adds the rollouts of the modules."""
        super().__init__(columns, num_rows=num_rows)
        self.modules: dict[str, LaneRollout] = {}
        self.num_agent_steps = 0

    @classmethod
    def of_steps(cls, num_rows: int, num_envs: int) -> MultiAgentRollout:
        """Return a rollout with uninitialised columns for `num_rows` env steps of N sub-envs."""
        shape = (num_rows, num_envs)
        names = ("terminated", "truncated", "valid")
        columns: dict[str, Any] = {name: np.empty(shape, np.bool_) for name in names}
        return cls({"rewards": np.empty(shape), **columns, "row_times_s": np.empty(num_rows)})

    def by_module(self) -> dict[str, Rollout]:
        """Return the rollouts of the modules, by module id."""
        return dict(self.modules)


def count_agent_steps(rollouts: Sequence[Rollout]) -> int:
    """Return the steps of all agents in rollouts; with a single agent, the env steps."""
    return sum(getattr(rollout, "num_agent_steps", rollout.num_env_steps) for rollout in rollouts)
