"""How a runner samples envs of several agents that are in other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector.utils import create_empty_array
from numpy.typing import NDArray

from corral.core.action_masks import NO_LEGAL_ACTION
from corral.core.tree import Tree, map_tree
from corral.data.episodes.infos import Infos
from corral.data.episodes.rollout import Rollout
from corral.runners.multi_agent_stepping import MultiAgentStepping
from corral.runners.requests import SampleMode
from corral.runners.served_stepping import ServedStepping
from corral.runners.serving.messages import Entries

if TYPE_CHECKING:
    from corral.runners.serving.sessions import Session


class ServedMultiAgentStepping(ServedStepping):
    """Exchanges messages with clients whose envs have several agents.

    What a client reports of an env is a step of that sub-env, which `MultiAgentStepping` takes as if the other sub-envs
    had not been stepped. The rollout that is handed out has a clock for each sub-env: row t is its t-th step. After the
    last step of an episode comes a row that is not valid, as where an env resets itself; the rows after the last one of
    a sub-env are not valid either.

    Attributes:
        agents: Maps agents to modules, and writes the steps of each agent.
    """

    def _make_lanes(self) -> None:
        """Make the lanes of the modules whose agents the env has."""
        tools: dict[str, Any] = {"timers": self.timers, "metrics": self.metrics, "worker": self.worker}
        self.agents = MultiAgentStepping(self.config, self.host, self.actors, **tools)
        self.lanes = self.agents.lanes
        space: Any = self.host.env.single_observation_space
        self._seats = space.seats
        self._step: Any = create_empty_array(space, self.host.num_envs, np.zeros)
        shape = self.host.num_envs, len(self._seats.agents)
        self._wants, self._joined, self._ended = (np.zeros(shape, np.bool_) for _ in range(3))

    def set_modules(self) -> bool:
        """Use the actors as they are now, and return whether an episode lost one: its clients begin new episodes."""
        are_lost = self.agents.set_modules()
        for session in [*self._server.sessions.values()] if are_lost else ():
            self._server.lose(session)
        return are_lost

    def make_episode(self, id_: str, env_index: int, rollout: Rollout) -> Any:
        """Return a view of an episode that knows the modules of the agents that take part already."""
        return self.agents.make_episode(id_, env_index, rollout)

    # A rollout.

    def _allocate_whole(self) -> Rollout:
        """Return the rollout that is handed out, without rows."""
        whole = self.agents.allocate(0)
        whole.columns["row_times_s"] = np.zeros((0, self.host.num_envs))
        whole.lane_rows = np.zeros(self.host.num_envs, np.int64)
        return whole

    @staticmethod
    def _resize(whole: Rollout, num_rows: int) -> None:
        """Give the rollout that is handed out so many rows; new ones are zeros."""
        before = whole.num_rows
        whole.resize(num_rows)
        whole.num_rows = num_rows
        for column in whole.columns.values():
            column[before:] = 0

    def _enter(self, rollout: Rollout) -> None:
        """Begin the rollout that is handed out; the totals of earlier episodes do not count after a reset."""
        self._server.weights_version = rollout.weights_version
        self.agents.events = self.events
        rollout.written = whole = self._allocate_whole()
        self._resize(whole, rollout.capacity + 3)
        for name in ("carry", "continues", "episode_class", "weights_version", "worker_index"):
            setattr(whole, name, getattr(rollout, name))
        for lanes in () if rollout.continues else self.lanes.values():
            lanes.begin_counting()
        self.agents.resume(whole)

    # Actions.

    def _act(self, timestep: int, mode: SampleMode) -> None:
        """Choose the actions of the agents that wait for one."""
        for module_id, lanes in self.lanes.items():
            if np.count_nonzero(lanes.acts):
                self.agents.act(0, module_id, lanes, timestep, mode)

    def _send_actions(self, session: Session, seats: NDArray[np.int64]) -> None:
        """Answer a client that wants actions for the agents of some of its seats."""
        found: dict[str, tuple[NDArray[np.int64], Any]] = {}
        for index, agent in enumerate(self._seats.agents):
            acting = seats[self._wants[seats, index]]
            if len(acting):
                found[str(agent)] = acting, self.agents.actions_of(index, acting)
        self._server.answer_agents(session, found)

    def _send_policy(self, session: Session, timestep: int, mode: SampleMode) -> None:
        """Refuse a client that wants to act itself."""
        problem = "clients of several agents cannot act themselves: ask for actions, without acts_locally."
        self._server.cut_off(session, "policy", problem)

    # What clients report.

    def _problem_of(self, entries: Entries) -> str:
        """Return why a message cannot be used, or an empty text."""
        return self._problem_of_ends(entries) or self._problem_of_masks(entries)

    def _problem_of_ends(self, entries: Entries) -> str:
        """Return what is wrong with who is observed after the end of an agent, or an empty text."""
        said: Any = entries.obs
        steps, seats = ~entries.begins, entries.envs
        before = self._ended[seats] & steps[:, None]
        ends = before | (said["terminated"] | said["truncated"]).astype(np.bool_)
        again = before & (said["observed"].astype(np.bool_) | (said["rewards"] != 0))
        joined = (self._joined[seats] & steps[:, None]) | said["observed"].astype(np.bool_)
        if again.any():
            index, seat = np.argwhere(again)[0].tolist()
            what = "observed" if said["observed"][index, seat] else "given a reward"
            return f"steps.agents.{self._seats.agents[seat]}: has ended in entry {index}, and is {what} again."
        none_left = steps & ~entries.ends & joined.any(1) & (ends | ~joined).all(1)
        if none_left.any():
            place = f"steps.terminated[{int(np.flatnonzero(none_left)[0])}]"
            return f"{place}: all agents of the env have ended: say that the episode is terminated or truncated."
        return ""

    def _problem_of_masks(self, entries: Entries) -> str:
        """Return who has no legal action, or an empty text."""
        said: Any = entries.obs
        ended = (said["terminated"] | said["truncated"]).astype(np.bool_) | entries.ends[:, None]
        acts = said["observed"].astype(np.bool_) & ~ended
        for module_id, actor in self.actors.items():
            if not actor.has_action_mask:
                continue
            block = self.actors.blocks[module_id]
            obs = map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), said["obs"][block.name])
            stuck = actor.first_without_choice(obs, acts[:, block.start : block.stop].reshape(-1))
            if stuck is not None:
                index, place = divmod(stuck, len(block.agents))
                return f"steps.agents.{block.agents[place]}.obs: entry {index}: {NO_LEGAL_ACTION}."
        return ""

    def _apply_steps(self, rollout: Rollout, row: int, entries: Entries, mode: SampleMode) -> int:
        """Write the steps that a wave reports, and return their number."""
        number = super()._apply_steps(rollout, row, entries, mode)
        rollout.written.lane_rows[entries.envs[entries.ends]] += 1  # a row that is only a reset
        return number

    def _write_steps(self, rollout: Rollout, row: int, steps: Entries) -> None:
        """Write the steps of seats into both rollouts."""
        super()._write_steps(rollout, row, steps)
        whole, seats, over = rollout.written, steps.envs, steps.envs[steps.ends]
        if int(whole.lane_rows.max()) >= whole.num_rows:
            self._resize(whole, 2 * int(whole.lane_rows.max()) + 3)
        at = whole.lane_rows[seats], seats
        for name in ("rewards", "terminated", "truncated"):
            whole.columns[name][at] = rollout.columns[name][row, seats]
        whole.valid[at], whole.row_times_s[at] = rollout.columns["stepped"][row, seats], rollout.row_times_s[row]
        whole.lane_rows[seats] += 1
        self.agents.num_over[over] -= self._stale[over]  # `agents` counts all

    def _use(self, seats: NDArray[np.int64]) -> None:
        """Forget the agents of the episodes before."""
        self._joined[seats] = self._ended[seats] = False

    def _receive(self, rollout: Rollout, row: int, entries: Entries, mode: SampleMode) -> None:
        """Give what was said of the agents of some seats to the lanes."""
        step, seats, whole = self._step, entries.envs, rollout.written
        for name in ("observed", "rewards", "terminated", "truncated"):
            step[name][:] = 0
        said: Tree = entries.obs
        map_tree(lambda here, given: here.__setitem__(seats, given), step, said)
        terminated, truncated = (np.zeros(self.host.num_envs, np.bool_) for _ in range(2))
        terminated[seats], truncated[seats] = entries.terminated, entries.truncated
        if entries.infos is not None and mode.keeps_infos:
            for seat, info in zip(seats.tolist(), entries.infos, strict=True):
                if info:
                    whole.info_rows.setdefault(int(whole.lane_rows[seat]), Infos({})).of_lanes[seat] = info
        self.agents.receive(whole, step, terminated, truncated)
        observed, ends = (step["observed"] > 0)[seats], (step["terminated"] | step["truncated"]).astype(np.bool_)[seats]
        self._joined[seats] |= observed
        self._ended[seats] |= ends
        self._wants[seats] = observed & ~self._ended[seats]

    def _drop_seat(self, rollout: Rollout, seat: int) -> None:
        """Drop the open steps of the agents of a seat."""
        whole = rollout.written
        self.agents.drop(seat)
        self.agents.num_over[seat] -= self._stale[seat]
        if not self._stale[seat]:
            whole.broken.append((int(whole.lane_rows[seat]), seat))
        whole.lane_rows[seat] += 1

    def finish(self, rollout: Rollout, mode: SampleMode) -> Rollout:
        """Return the complete rollouts of the modules; the lanes keep the latest observations and the open steps."""
        whole: Rollout | None = rollout.written
        if whole is None:  # no step was asked for
            return self._allocate_whole()
        # One row at least, which does not count, also if nobody reported a step.
        self._resize(whole, max(1, int(whole.lane_rows.max())))
        counted = whole.valid.T.copy()  # in the order of time in each sub-env, as in the record
        whole.valid.T[counted] = rollout.valid.T[rollout.columns["stepped"].T]
        whole.num_env_steps = rollout.num_env_steps
        self.agents.finish(whole, mode)
        oldest = min(lanes.oldest_row for lanes in self.lanes.values())
        self.agents.open_infos = {}  # each sub-env has rows of its own
        for row, infos in whole.info_rows.items():
            for seat, info in infos.of_lanes.items():
                if (next_row := row - int(whole.lane_rows[seat])) >= oldest:
                    self.agents.open_infos.setdefault(next_row, Infos({})).of_lanes[seat] = info
        return whole
