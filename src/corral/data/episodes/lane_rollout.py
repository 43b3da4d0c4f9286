"""The rollout of one module, whose columns are steps of agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.ids import AgentID
from corral.core.tree import Tree
from corral.data.episodes.infos import Infos
from corral.data.episodes.rollout import Rollout


class LaneRollout(Rollout):
    """The steps of the agents of one module, with time T on axis 0 and the lanes L on axis 1.

    A lane is the seat of one agent in one sub-env. Row t of a lane is the t-th step of that agent in this rollout, so
    lanes have clocks of their own: row t of two lanes may be different env steps. Rewards that an agent got before it
    acted again are added to its last step. After the end of an agent's episode comes one row that is not valid, whose
    `obs` is the final observation. The rows after the last step of a lane are not valid either.

    Lanes may also be the sub-envs themselves, with one agent, which clients of a policy server play at their own pace.
    The rollout of the env steps then holds no modules.

    A step whose outcome is not known when the rollout ends, because the agent waits for its next turn, is not in this
    rollout: it is the first step of its lane in the next one.

    Attributes:
        lane_envs: Index of the sub-env of each lane, int64 `[L]`.
        lane_agents: Agent of each lane, a list of L ids.
        obs_rows: Row of `parent` whose actions saw the observation, int64 `[T + 1, L]`; negative if the observation
            came in an earlier rollout: -1 is the last row before this one.
        waits: Whether the agent of a lane has begun a step that is not over, while the rollout is written, bool `[L]`.
        parent: Rollout of the env steps.
        module_id: Id of the module, once the rollout is complete.
    """

    __slots__ = ("lane_agents", "lane_envs", "module_id", "obs_rows", "parent", "waits")

    parent: Any

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take columns with room for as many rows as `rewards` has; the runner sets what belongs to the lanes."""
        super().__init__(columns, num_rows=num_rows)
        num_lanes = self.num_lanes
        self.lane_envs: NDArray[np.int64] = np.zeros(num_lanes, np.int64)
        self.lane_agents: list[AgentID] = []
        self.lane_rows = np.zeros(num_lanes, np.int64)
        self.obs_rows: NDArray[np.int64] = np.full((self.capacity + 1, num_lanes), -1)
        self.waits: NDArray[np.bool_] = np.zeros(num_lanes, np.bool_)
        self.module_id = ""

    def latest_steps(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the row of the latest step of each lane, and whether its action was taken in this rollout."""
        begun = self.valid & (self.obs_rows[: len(self.valid)] >= 0)
        return np.maximum(len(begun) - 1 - begun[::-1].argmax(0), 0), begun.any(0)

    def without_large(self) -> LaneRollout:
        """Return what episodes read of complete steps, without the large columns; the arrays are shared."""
        kept = type(self)(self._small(), num_rows=self.num_rows)
        for name in ("lane_agents", "lane_envs", "lane_rows", "module_id", "obs_rows", "parent", "waits"):
            setattr(kept, name, getattr(self, name))
        return kept

    def time_at(self, row: int, lane: int) -> float:
        """Return the clock reading at the end of the env step that ended a step."""
        time_s: float = self.parent.time_at(int(self.obs_rows[row + 1, lane]) - 1, int(self.lane_envs[lane]))
        return time_s

    def info_at(self, row: int, lane: int) -> dict[str, Any]:
        """Return the info that came with an observation."""
        return self._info_of(row, lane, Infos.at)

    def _info_of(self, row: int, lane: int, choose: Callable[[Infos, int], Any]) -> dict[str, Any]:
        infos = self.parent.info_rows.get(int(self.obs_rows[row, lane]))
        found = {} if infos is None else choose(infos, int(self.lane_envs[lane]))
        if not hasattr(self.parent, "modules"):
            return dict(found)
        return dict(found.get("agents", {}).get(self.lane_agents[lane], {}))

    def next_info_at(self, row: int, lane: int) -> dict[str, Any]:
        """Return the info that came with the observation after a step."""
        return self._info_of(row + 1, lane, Infos.of_step)

    def step_infos(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        for row, lane in np.argwhere(self.valid).tolist() if self.parent.info_rows else ():
            yield row, lane, self.next_info_at(row, lane)

    def chunks(self) -> list[tuple[int, Any]]:
        """Return the episodes of the agents, or chunks of them, each in a pair with its first row."""
        if not hasattr(self.parent, "modules"):
            return super().chunks()
        episodes = [episode for _, episode in self.parent.with_modules({self.module_id: self}).chunks()]
        agents = [agent for episode in episodes for agent in episode.agent_episodes.values()]
        return [(agent.place[0], agent) for agent in agents]


@dataclass
class SeatCarry:
    """What the agents of the unfinished episodes had when a rollout began.

    Attributes:
        agents: Ids of all agents, A of them.
        returns: Sums of rewards so far, float64 `[N, A]`.
        module_ids: Ids of their modules, `None` for an agent that was not observed yet, objects `[N, A]`.
    """

    agents: Sequence[AgentID]
    returns: NDArray[np.float64]
    module_ids: NDArray[Any]


def count_agent_steps(rollouts: Sequence[Rollout]) -> int:
    """Return the steps of all agents in rollouts; with a single agent, the env steps."""
    return sum(getattr(rollout, "num_agent_steps", rollout.num_env_steps) for rollout in rollouts)
