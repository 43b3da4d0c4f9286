"""The rollout of an env of tensors with several agents: one rollout of tensors for each module."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from corral.core.ids import AgentID
from corral.core.tree import Tree
from corral.episodes.lanes import LaneRollout, SeatCarry
from corral.episodes.multi_agent_episode import MultiAgentEpisode
from corral.episodes.multi_agent_rollout import MultiAgentRollout
from corral.episodes.rollout import Rollout
from corral.episodes.tensor_rollout import TensorRollout, empty_steps


class TensorLanes(TensorRollout):
    """The steps of the agents of one module as tensors: the lanes are its agents in sub-env 0, in sub-env 1, and so on.

    Attributes:
        lane_envs: Index of the sub-env of each lane, int64 `[L]`.
        lane_agents: Agent of each lane, a list of L ids.
        module_id: Id of the module.
    """

    __slots__ = ("lane_agents", "lane_envs", "module_id")

    lane_envs: NDArray[np.int64]
    lane_agents: list[AgentID]
    module_id: str

    def make_rollout(self, columns: dict[str, Tree]) -> Rollout:
        """Return a rollout of arrays with columns; its lanes have the rows of the env."""
        found = LaneRollout(columns, num_rows=self.num_rows)
        found.lane_envs, found.lane_agents, found.module_id = self.lane_envs, self.lane_agents, self.module_id
        found.lane_rows = np.full(self.num_envs, self.num_rows)
        found.obs_rows = np.repeat(np.arange(self.num_rows + 1)[:, None], self.num_envs, 1)
        return found


class TensorAgentsRollout(TensorRollout):
    """The env steps of one `sample()` call of an env of tensors with several agents; see `MultiAgentRollout`.

    Attributes:
        modules: Rollouts by module id.
        seat_carry: What the agents had when the rollout began.
        num_agent_steps: Steps of all agents, once the rollout is complete.
    """

    __slots__ = ("modules", "num_agent_steps", "seat_carry")

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take the columns of the env steps; the runner adds the rollouts of the modules."""
        super().__init__(columns, num_rows=num_rows)
        self.episode_class = MultiAgentEpisode
        self.modules: dict[str, TensorLanes] = {}
        self.seat_carry: SeatCarry | None = None
        self.num_agent_steps = 0

    @classmethod
    def of_steps(cls, num_rows: int, num_envs: int, device: torch.device) -> TensorAgentsRollout:
        """Return a rollout with uninitialised columns for `num_rows` env steps of N sub-envs."""
        return cls(empty_steps((num_rows, num_envs), device))

    def resize(self, capacity: int) -> None:
        """Give the columns of envs and modules room for `capacity` rows, and keep the rows written so far."""
        super().resize(capacity)
        for part in self.modules.values():
            part.num_rows = self.num_rows
            part.resize(capacity)

    def by_module(self) -> dict[str, Rollout]:
        """Return the rollouts of the modules, by module id."""
        return dict(self.modules)

    def make_rollout(self, columns: dict[str, Tree]) -> Rollout:
        """Return a rollout of arrays with columns and with the rollouts of the modules as arrays."""
        found = MultiAgentRollout(columns, num_rows=self.num_rows)
        found.seat_carry, found.num_agent_steps = self.seat_carry, self.num_agent_steps
        return found

    def to_arrays(self) -> Any:
        """Return the complete rollout with arrays as columns; each column is copied to the host once."""
        found: Any = super().to_arrays()
        found.set_modules({module_id: part.to_arrays() for module_id, part in self.modules.items()})
        return found
