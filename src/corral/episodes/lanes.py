"""Rollouts of several agents: one of the env steps, and one for each module, whose columns are agents' own steps."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.ids import AgentID
from corral.core.tree import Tree
from corral.episodes.multi_agent_episode import MultiAgentEpisode
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
        lane_rows: Rows of each lane that are written, int64 `[L]`.
        obs_rows: Row of `parent` whose actions saw the observation, int64 `[T + 1, L]`; negative if the observation
            came in an earlier rollout: -1 is the last row before this one.
        waits: Whether the agent of a lane has begun a step that is not over, while the rollout is written, bool `[L]`.
        parent: Rollout of the env steps.
    """

    __slots__ = ("lane_agents", "lane_envs", "lane_rows", "obs_rows", "parent", "waits")

    parent: MultiAgentRollout

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take columns with room for as many rows as `rewards` has; the runner sets what belongs to the lanes."""
        super().__init__(columns, num_rows=num_rows)
        num_lanes = self.num_lanes
        self.lane_envs: NDArray[np.int64] = np.zeros(num_lanes, np.int64)
        self.lane_agents: list[AgentID] = []
        self.lane_rows: NDArray[np.int64] = np.zeros(num_lanes, np.int64)
        self.obs_rows: NDArray[np.int64] = np.full((self.capacity + 1, num_lanes), -1)
        self.waits: NDArray[np.bool_] = np.zeros(num_lanes, np.bool_)

    @property
    def env_rows(self) -> NDArray[np.int64]:
        """Row of `parent` in which each action was taken, int64 `[T, L]`; -1 where no step counts, or taken before."""
        return np.where(self.valid, np.maximum(self.obs_rows[: len(self.valid)], -1), -1)

    def num_rows_of(self, lane: int) -> int:
        """Return the number of rows of a lane written so far."""
        return int(self.lane_rows[lane])

    def time_at(self, row: int, lane: int) -> float:
        """Return the clock reading at the end of the env step that ended a step."""
        return float(self.parent.row_times_s[self.obs_rows[row + 1, lane] - 1])

    def info_at(self, row: int, lane: int) -> dict[str, Any]:
        """Return the info that came with an observation."""
        infos = self.parent.info_rows.get(int(self.obs_rows[row, lane]))
        found = {} if infos is None else infos.at(int(self.lane_envs[lane]))
        return dict(found.get("agents", {}).get(self.lane_agents[lane], {}))

    def next_info_at(self, row: int, lane: int) -> dict[str, Any]:
        """Return the info that came with the observation after a step."""
        return self.info_at(row + 1, lane)

    def _step_infos(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        for row, lane in np.argwhere(self.valid).tolist() if self.parent.info_rows else ():
            yield row, lane, self.next_info_at(row, lane)

    def chunks(self) -> list[tuple[int, Any]]:
        """Return the episodes of the agents, or chunks of them, each in a pair with its first row."""
        module_ids = [module_id for module_id, part in self.parent.modules.items() if part is self]
        episodes = [episode for _, episode in self.parent.chunks()]
        agents = [agent for episode in episodes for agent in episode.agent_episodes.values()]
        return [(agent.place[0], agent) for agent in agents if agent.module_id in module_ids]


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


class MultiAgentRollout(Rollout):
    """The env steps of one `sample()` call of an env with several agents, and the rollouts of their modules.

    The columns belong to the env: `rewards` (the sum over the agents), `terminated` and `truncated` (of the whole
    episode), `valid` and `row_times_s`. Observations and actions are in the rollouts of the modules.

    Attributes:
        modules: Rollouts by module id; a module that took no step has none.
        seat_carry: What the agents had when the rollout began; `None` if no runner made it.
        num_agent_steps: Steps of all agents, once the rollout is complete: the valid entries of all modules.
    """

    __slots__ = ("modules", "num_agent_steps", "seat_carry")

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take the columns of the env steps; the runner adds the rollouts of the modules."""
        super().__init__(columns, num_rows=num_rows)
        self.modules: dict[str, LaneRollout] = {}
        self.num_agent_steps = 0
        self.seat_carry: SeatCarry | None = None

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

    def without_infos(self) -> Rollout:
        """Return the rollout without infos and notes of callbacks, which may be large; the columns are shared."""
        bare = super().without_infos()
        assert isinstance(bare, MultiAgentRollout)
        bare.modules = {module_id: copy.copy(part) for module_id, part in self.modules.items()}
        for part in bare.modules.values():
            part.parent, part.info_rows = bare, bare.info_rows
        return bare

    # Episodes.

    def _view(self, id_: str, env_index: int) -> Any:
        return MultiAgentEpisode.view(id_, env_index, self)

    def chunks(self) -> list[tuple[int, Any]]:
        """Return the episodes as `episodes` does, each in a pair with its first row."""
        found = super().chunks()
        of_env: dict[int, list[tuple[int, MultiAgentEpisode]]] = {}
        for start, episode in found:
            of_env.setdefault(episode.env_index, []).append((start, episode))
        for module_id, part in self.modules.items():
            carry = part.carry
            for lane, start, stop, _ in part.spans():
                last_row = int(part.obs_rows[stop, lane]) - 1
                starts = of_env[int(part.lane_envs[lane])]
                episode = starts[bisect_right(starts, last_row, key=lambda pair: pair[0]) - 1][1]
                agent = episode.add_view(part, lane, module_id, start)
                if start == 0 and carry is not None:
                    agent.continue_from(int(carry.lengths[lane]), float(carry.returns[lane]))
                agent.end(bool(part.terminated[stop - 1, lane]), bool(part.truncated[stop - 1, lane]), stop)
        return found


def count_agent_steps(rollouts: Sequence[Rollout]) -> int:
    """Return the steps of all agents in rollouts; with a single agent, the env steps."""
    return sum(getattr(rollout, "num_agent_steps", rollout.num_env_steps) for rollout in rollouts)
