"""Episodes: views over one sub-env's columns, made only when somebody looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import Tree, map_tree
from corral.env.rollout import Rollout

Indices = int | slice | Sequence[int] | None


class SingleAgentEpisode:
    """One episode of one sub-env, or the chunk of it that lies in the current rollout.

    It holds no data: it reads the rollout's columns, and grows as they are written. An episode that spans several
    `sample()` calls is seen as chunks with the same `id_`; `len`, the getters and slices are the chunk's, while
    `get_return()` is that of the whole episode so far.

    Attributes:
        id_: The same for all chunks of an episode, and different for every episode of a run.
        env_index: Index of the sub-env.
        t_started: Env steps of the episode before this chunk.
        is_terminated: Whether its last step terminated it.
        is_truncated: Whether its last step truncated it.
        custom_data: For the user's own notes; carried over from chunk to chunk.
    """

    __slots__ = (
        "_return_before",
        "_rollout",
        "_start",
        "_stop",
        "custom_data",
        "env_index",
        "id_",
        "is_terminated",
        "is_truncated",
        "t_started",
    )

    def __init__(self, id_: str, env_index: int, rollout: Rollout) -> None:
        """Make an episode that has not started; the runner does."""
        self.id_ = id_
        self.env_index = env_index
        self.t_started = 0
        self.is_terminated = False
        self.is_truncated = False
        self.custom_data: dict[str, Any] = {}
        self._rollout = rollout
        self._start: int | None = None
        self._stop: int | None = None
        self._return_before = 0.0

    def start(self, row: int) -> None:
        """Note the row whose observation the reset gave."""
        self._start = row

    def end(self, terminated: bool, truncated: bool) -> None:
        """Note how the last step ended the episode."""
        self.is_terminated, self.is_truncated = terminated, truncated
        self._stop = self._rollout.num_rows

    def continued_in(self, rollout: Rollout) -> SingleAgentEpisode:
        """Return the next chunk, which starts with row 0 of another rollout."""
        chunk = SingleAgentEpisode(self.id_, self.env_index, rollout)
        chunk.custom_data = self.custom_data
        if self._start is not None:
            chunk.t_started = self.t
            chunk._return_before = self.get_return()
            chunk._start = 0
            self._stop = self._rollout.num_rows
        return chunk

    @property
    def is_done(self) -> bool:
        """Whether the episode is over, either way."""
        return self.is_terminated or self.is_truncated

    @property
    def is_reset(self) -> bool:
        """Whether the reset that starts the episode has happened."""
        return self._start is not None

    @property
    def t(self) -> int:
        """Env steps of the whole episode so far."""
        return self.t_started + len(self)

    def __len__(self) -> int:
        """Return the env steps in this chunk."""
        if self._start is None:
            return 0
        return (self._rollout.num_rows if self._stop is None else self._stop) - self._start

    def get_return(self) -> float:
        """Return the sum of rewards of the whole episode so far, earlier chunks included."""
        return self._return_before + float(self._rows("rewards").sum())

    def get_observations(self, indices: Indices = None) -> Tree:
        """Return observations `[len + 1, ...]`, or those at `indices`: an int, a slice or a list; -1 is the latest."""
        if self._start is None:
            raise IndexError(f"episode {self.id_} has not been reset yet: it holds no observation.")
        stop = self._start + len(self) + 1
        obs = map_tree(lambda column: column[self._start : stop, self.env_index], self._rollout.obs)
        if self.is_done:
            final = self._rollout.next_obs_at(stop - 2, self.env_index)
            obs = map_tree(lambda column, leaf: np.concatenate([column[:-1], leaf[None]]), obs, final)
        return obs if indices is None else map_tree(lambda column: column[indices], obs)

    def get_actions(self, indices: Indices = None) -> Any:
        """Return module actions `[len, ...]`, or those at `indices`."""
        return self._pick(self._rows("actions"), indices)

    def get_rewards(self, indices: Indices = None) -> Any:
        """Return rewards float64 `[len]`, or those at `indices`."""
        return self._pick(self._rows("rewards"), indices)

    def _rows(self, column: str) -> NDArray[Any]:
        start = self._start or 0
        rows: NDArray[Any] = getattr(self._rollout, column)[start : start + len(self), self.env_index]
        return rows

    @staticmethod
    def _pick(rows: NDArray[Any], indices: Indices) -> Any:
        return rows if indices is None else rows[indices]

    def __repr__(self) -> str:
        """Show what tells episodes apart."""
        state = "terminated" if self.is_terminated else "truncated" if self.is_truncated else "ongoing"
        return f"SingleAgentEpisode({self.id_}, env_index={self.env_index}, t={self.t}, {state})"
