"""The episode events of a runner of several agents, which join and leave the episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.episodes.multi_agent_episode import MultiAgentEpisode
from corral.episodes.multi_agent_rollout import MultiAgentRollout
from corral.episodes.rollout import Rollout
from corral.runners.episode_events import EpisodeEvents

if TYPE_CHECKING:
    from corral.runners.lanes import Lanes
    from corral.runners.multi_agent_stepping import MultiAgentStepping


class MultiAgentEvents(EpisodeEvents):
    """Keeps one `MultiAgentEpisode` for each sub-env, with a view of the lane of each agent.

    Args:
        stepping: Stepping of the runner that fires the events.
    """

    rollout_class = MultiAgentRollout

    def __init__(self, stepping: MultiAgentStepping) -> None:
        """Bind the arguments that never change."""
        super().__init__(stepping.runner)
        self._stepping = stepping
        self._viewed: dict[str, NDArray[np.bool_]] = {}  # by module, lanes whose agents are in an episode

    def episode(self, env_index: int) -> MultiAgentEpisode:
        """Return the current episode of a sub-env."""
        episode: MultiAgentEpisode = self._episodes[env_index]
        return episode

    def _small_columns(self, rollout: Rollout) -> dict[str, Rollout]:
        assert isinstance(rollout, MultiAgentRollout)
        return {module_id: part.without_large() for module_id, part in rollout.modules.items()}

    def _kept(self, chunk: Any) -> Any:
        chunk.read_complete_columns()
        return super()._kept(chunk)

    def _view(self, id_: str, env_index: int, rollout: Rollout) -> MultiAgentEpisode:
        return self._stepping.make_episode(id_, env_index, rollout)

    def create_all(self, rollout: Rollout) -> None:
        """Make new episodes for all sub-envs, before they are reset."""
        self._viewed = {}
        super().create_all(rollout)

    def start_all(self, rollout: Rollout) -> None:
        """Start all episodes, after the reset whose observations are in row 0."""
        self._view_agents(())
        super().start_all(rollout)

    def continue_all(self, rollout: Rollout, paused_s: float) -> None:
        """Continue the unfinished episodes as chunks in another rollout, `paused_s` seconds after the last one."""
        super().continue_all(rollout, paused_s)
        self._viewed = {}
        self._view_agents(())

    def fire_row(
        self, rollout: Rollout, t: int, done: NDArray[np.bool_], playing: NDArray[np.bool_] | None = None
    ) -> None:
        """Fire the events of one row; see `EpisodeEvents.fire_row`."""
        self._view_agents(rollout.broken_in(t))
        super().fire_row(rollout, t, done, playing)

    def _end(self, rollout: Rollout, t: int, env_index: int) -> None:
        """Fire the events of a step that ended its episode; the successor waits for the observations of its agents."""
        self._fire_end(env_index)
        self._create(env_index, rollout)
        self._waiting.add(env_index)

    def start_waiting(self, rollout: Rollout) -> None:
        """Start the episodes whose first observations came in the step that ended the ones before."""
        self._view_agents(())
        waiting, self._waiting = sorted(self._waiting), set()
        for env_index in waiting:
            self._start(env_index, rollout.num_rows, rollout)

    def _view_agents(self, broken: Sequence[int]) -> None:
        """Add views of agents that joined, and end the views of agents that ended, except in sub-envs that failed."""
        for module_id, lanes in self._stepping.lanes.items():
            viewed = self._viewed.get(module_id, np.zeros(0, np.bool_))
            viewed = np.append(viewed, np.zeros(len(lanes) - len(viewed), np.bool_))
            if not broken and np.array_equal(viewed, lanes.is_used):
                continue
            self._viewed[module_id] = lanes.is_used.copy()
            for lane in np.flatnonzero(viewed & (~lanes.is_used | np.isin(lanes.envs, broken))).tolist():
                self._end_agent(lanes, lane, lanes.envs[lane] in broken)
            for lane in np.flatnonzero(lanes.is_used & ~viewed & ~np.isin(lanes.envs, broken)).tolist():
                self._add_agent(module_id, lanes, lane)

    def _add_agent(self, module_id: str, lanes: Lanes, lane: int) -> None:
        rollout = lanes.rollout
        row = int(rollout.lane_rows[lane])
        agent = self._episodes[int(lanes.envs[lane])].add_view(rollout, lane, module_id, row)
        if row == 0 and rollout.carry is not None:
            agent.continue_from(int(rollout.carry.lengths[lane]), float(rollout.carry.returns[lane]))

    def _end_agent(self, lanes: Lanes, lane: int, is_broken: bool) -> None:
        """End the view of an agent; after its steps, a row of the lane holds only an observation."""
        stop = int(lanes.rollout.lane_rows[lane]) - 1
        agent = self._episodes[int(lanes.envs[lane])].agent_episodes[lanes.agents[lane]]
        ends = () if is_broken else (lanes.rollout.terminated, lanes.rollout.truncated)
        terminated, truncated = (bool(column[stop - 1, lane]) for column in ends) if ends else (False, False)
        agent.end(terminated, truncated, stop)

    def _break(self, rollout: Rollout, t: int, env_index: int) -> None:
        super()._break(rollout, t, env_index)
        for module_id, lanes in self._stepping.lanes.items():  # the agents of the env that replaced the failed one
            for lane in np.flatnonzero(lanes.is_used & (lanes.envs == env_index)).tolist():
                self._add_agent(module_id, lanes, lane)
