"""Rollouts of envs that are in other programs, each of which has a clock of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.data.episodes.multi_agent_rollout import MultiAgentRollout
from corral.data.episodes.rollout import Rollout
from corral.data.episodes.step_columns import outcomes


class ServedMultiAgentRollout(MultiAgentRollout):
    """The env steps of several agents whose envs are in clients of a policy server, with the rollouts of their modules.

    Row t of a sub-env is its t-th step in this rollout. After the last step of an episode comes a row that is not
    valid, as where an env resets itself; the rows after the last one of a sub-env are not valid either.

    Attributes:
        clock: Rows of each sub-env that are written, int64 `[N]`.
        exchanges: Row of `ServedSteps` in which each step was reported, int64 `[T, N]`; -1 where there is none.
        episodes_over: Number of episodes of each sub-env that are over, int64 `[N]`.
    """

    __slots__ = ("clock", "episodes_over", "exchanges")

    def __init__(self, num_rows: int, num_envs: int) -> None:
        """Make columns of zeros for `num_rows` rows."""
        own_clocks = {"row_times_s": np.zeros((num_rows, num_envs))}
        super().__init__({**outcomes(num_rows, num_envs, np.zeros), **own_clocks})
        self.clock, self.episodes_over = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self.exchanges = np.full((num_rows, num_envs), -1)

    def num_rows_of(self, lane: int) -> int:
        """Return the number of rows of a sub-env written so far."""
        return int(self.clock[lane])

    def time_at(self, row: int, lane: int) -> float:
        """Return the clock reading at the end of a step of a sub-env."""
        return float(self.row_times_s[row, lane])

    def write(self, steps: ServedSteps, exchange: int, envs: NDArray[np.int64]) -> None:
        """Write the steps of some sub-envs, which were reported in a row of `ServedSteps`."""
        self._make_room()
        at = self.clock[envs], envs
        for name in ("rewards", "terminated", "truncated"):
            self.columns[name][at] = steps.columns[name][exchange, envs]
        self.row_times_s[at], self.exchanges[at] = steps.row_times_s[exchange], exchange
        self.clock[envs] += 1

    def skip(self, envs: Any) -> None:
        """Leave out a row of some sub-envs, in which an episode is over and the next one begins."""
        self._make_room()
        self.clock[envs] += 1

    def _make_room(self) -> None:
        if int(self.clock.max()) + 3 > self.capacity:
            self._grow(2 * self.capacity + 3)

    def _grow(self, capacity: int) -> None:
        written, self.num_rows = self.num_rows, self.capacity  # all rows are kept, which are zeros at first
        before = self.capacity
        super().resize(capacity)
        self.num_rows = written
        for column in self.columns.values():
            column[before:] = 0
        self.exchanges = np.append(self.exchanges, np.full((capacity - before, self.num_envs), -1), 0)

    def complete(self, valid: NDArray[np.bool_]) -> None:
        """End the rollout; it has a row, which does not count, also if nobody reported a step.

        Args:
            valid: Which steps count, by their rows of `ServedSteps`, bool `[E, N]`.
        """
        self.num_rows = max(1, int(self.clock.max()))
        self.resize(self.num_rows)
        self.exchanges = self.exchanges[: self.num_rows]
        rows, envs = (self.exchanges >= 0).nonzero()
        self.columns["valid"] = counted = np.zeros_like(self.columns["valid"])
        counted[rows, envs] = valid[self.exchanges[rows, envs], envs]


class ServedSteps(Rollout):
    """What happened in the seats in each exchange of messages, `[T, N]`: in a row, some seats take a step.

    Statistics of episodes are computed from it, and it says which steps count.

    Attributes:
        stepped: Whether a step of a seat was over in a row, bool `[T, N]`.
        counted: Whether it belongs to an episode that counts, bool `[T, N]`.
        begun: Row and seat of each episode that began, in the order of time.
        unfinished: Whether an episode that counts is played in a seat now, bool `[N]`.
        written: The rollout that is handed out, whose rows episodes read while they are written.
    """

    __slots__ = ("begun", "unfinished", "written")

    unfinished: NDArray[np.bool_]
    written: Any

    def __init__(self, num_rows: int, num_seats: int) -> None:
        """Make columns of zeros for `num_rows` rows."""
        more = {name: np.zeros((num_rows, num_seats), np.bool_) for name in ("stepped", "counted")}
        super().__init__({**outcomes(num_rows, num_seats, np.zeros), **more})
        self.begun: list[tuple[int, int]] = []

    def resize(self, capacity: int) -> None:
        """Give the columns room for `capacity` rows; rows that are not written are zeros."""
        super().resize(capacity)
        for name, column in self.columns.items():
            if name != "obs":
                column[self.num_rows :] = 0

    def resets_in(self, row: int) -> NDArray[np.bool_]:
        """Return that no row only resets a seat, bool `[N]`."""
        return np.zeros(self.num_envs, np.bool_)

    def steps_from(self, row: int) -> NDArray[np.bool_]:
        """Return where a step that counts was over in the rows from `row` on that are written, bool `[K, N]`."""
        steps: NDArray[np.bool_] = (self["stepped"] & self["counted"])[row : self.num_rows]
        return steps

    def unfinished_in(self, row: int) -> NDArray[np.bool_]:
        """Return where an episode that counts continues after the last row, bool `[N]`."""
        return self.unfinished.copy()

    def drop_episode(self, row: int, lane: int) -> None:
        """Mark the steps of the episode that broke in a row as not valid."""
        over = [*np.flatnonzero(self.done[:row, lane]).tolist(), *(t for t, i in self.broken if i == lane and t < row)]
        self.valid[max(over, default=-1) + 1 : row, lane] = False

    def times(self) -> Rollout:
        """Return what the rollout of the lanes needs of this: the times of the rows, and the infos."""
        found = Rollout({"row_times_s": self.row_times_s}, num_rows=self.num_rows)
        found.info_rows = self.info_rows
        return found
