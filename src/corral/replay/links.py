"""Where the next and the earlier rows of a lane are: in a grid of lanes in step, or by links in one ring of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.errors import CheckpointError
from corral.replay.storage import Storage

Positions = NDArray[np.int64]
LaneKey = tuple[int, int, str | int]
"""Index of the runner, index of the sub-env, and id of the agent."""


class GridLinks:
    """Lanes in step, side by side: the next row of a lane is L entries further in the flat ring."""

    def __init__(self, num_lanes: int) -> None:
        """Keep the number of lanes L."""
        self.num_lanes = num_lanes

    def after(self, flat: Positions) -> Positions:
        """Return the entries after entries, `[B]`."""
        return flat + self.num_lanes

    def before(self, flat: Positions) -> Positions:
        """Return the entries before entries, `[B]`; an entry without one may be its own."""
        return flat - self.num_lanes

    def window(self, flat: Positions, num_steps: int) -> Positions:
        """Return the entries and the entries after them, `[num_steps, B]`."""
        return flat + (np.arange(num_steps) * self.num_lanes)[:, None]

    def stack(self, flat: Positions, ages: NDArray[Any], num_frames: int) -> Positions:
        """Return the entries that hold the frames of stacks, `[B, num_frames]`, the newest last.

        Args:
            flat: Entries of the stacks, `[B]`.
            ages: Number of older frames of each stack that are in earlier entries, `[B]`.
            num_frames: Frames of a stack.
        """
        back = np.arange(num_frames - 1, -1, -1)
        rows: Positions = flat[:, None] - np.minimum(back, ages[:, None]) * self.num_lanes
        return rows


class LaneLinks(GridLinks):
    """Lanes with clocks of their own, mixed in one ring of R rows: each row is linked to its neighbours in its lane.

    Positions count all rows that were ever written; the row of a position is its remainder by R. Links lead to rows
    that were written later, and the oldest rows are overwritten first, so a link to a next row never leads astray.

    Attributes:
        next: Position of the next row of the lane, int64 `[R]`; at the end of a lane, the row's own.
        previous: Position of the row before, int64 `[R]`; at the beginning of a lane, the row's own.
        tails: Position of the newest row of each lane, which holds only an observation, by key.
    """

    def __init__(self, num_rows: int, storage: Storage) -> None:
        """Make the links of an empty ring."""
        super().__init__(1)
        self.num_rows = num_rows
        self.next, self.previous = (storage.zeros((num_rows,), np.int64) for _ in range(2))
        self.tails: dict[LaneKey, int] = {}

    def after(self, flat: Positions) -> Positions:
        """Return the positions of the next rows, `[B]`."""
        found: Positions = self.next.take(flat, mode="wrap")
        return found

    def before(self, flat: Positions) -> Positions:
        """Return the positions of the rows before, `[B]`; at the beginning of a lane, the row's own."""
        found: Positions = self.previous.take(flat, mode="wrap")
        return found

    def window(self, flat: Positions, num_steps: int) -> Positions:
        """Return the rows and the rows after them, `[num_steps, B]`."""
        steps = np.empty((num_steps, len(flat)), np.int64)
        steps[0] = flat
        for step in range(1, num_steps):
            steps[step] = self.after(steps[step - 1])
        return steps

    def stack(self, flat: Positions, ages: NDArray[Any], num_frames: int) -> Positions:
        """Return the rows that hold the frames of stacks, `[B, num_frames]`; see `GridLinks.stack`."""
        rows = np.empty((len(flat), num_frames), np.int64)
        rows[:, -1] = current = flat
        for age in range(1, num_frames):
            current = np.where(ages >= age, self.previous.take(current, mode="wrap"), current)
            rows[:, -1 - age] = current
        return rows

    def connect(self, positions: Positions, present: NDArray[np.bool_], joined: NDArray[np.bool_]) -> None:
        """Link rows that were written.

        Args:
            positions: Position of each row of each lane, `[M, L]`.
            present: Which of them are rows, bool `[M, L]`; the rows of a lane are consecutive.
            joined: Whether the first row of a lane was there before, bool `[L]`.
        """
        both = present[:-1] & present[1:]
        firsts, lasts = present.copy(), present.copy()
        firsts[1:] &= ~present[:-1]
        lasts[:-1] &= ~present[1:]
        earlier, later = positions[:-1][both], positions[1:][both]
        begins, ends = positions[firsts & ~joined], positions[lasts]
        self.previous[begins % self.num_rows], self.next[ends % self.num_rows] = begins, ends
        self.next[earlier % self.num_rows], self.previous[later % self.num_rows] = later, earlier

    # State.

    def get_state(self, num_rows: int, *, copy: bool = True) -> dict[str, Any]:
        """Return the links of the first rows as plain data: copies, or views."""
        return {
            "num_rows": self.num_rows,
            "next": np.array(self.next[:num_rows], copy=copy or None),
            "previous": np.array(self.previous[:num_rows], copy=copy or None),
            "tails": [[*key, position] for key, position in self.tails.items()],
        }

    def checked_state(self, state: dict[str, Any], num_rows: int) -> dict[str, Any]:
        """Return a state with its parts as arrays and as keys, and change nothing.

        Raises:
            CheckpointError: The state is of a ring of another size, or damaged.
        """
        links = {name: np.asarray(state[name], np.int64) for name in ("next", "previous")}
        if state["num_rows"] != self.num_rows or any(part.shape != (num_rows,) for part in links.values()):
            raise CheckpointError(
                f"the state is from a replay buffer of {state['num_rows']} rows, and this one has {self.num_rows}: use "
                "the environment and the number of envs that it was made with, or continue without the state."
            )
        tails = {(int(runner), int(env), agent): int(position) for runner, env, agent, position in state["tails"]}
        return {**links, "tails": tails}

    def set_state(self, state: dict[str, Any], num_rows: int) -> None:
        """Restore a state that `checked_state` returned."""
        self.next[:num_rows], self.previous[:num_rows] = state["next"], state["previous"]
        self.tails = state["tails"]


def lane_keys(worker_index: int, lane_envs: Positions, lane_agents: Sequence[str | int]) -> list[LaneKey]:
    """Return the key of each lane of a rollout."""
    return [(worker_index, env, agent) for env, agent in zip(lane_envs.tolist(), lane_agents, strict=True)]
