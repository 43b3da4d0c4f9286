"""The batch that `on_postprocess_trajectory` is given: the columns of one episode, or chunk of it, in a rollout."""

from __future__ import annotations

import numpy as np

from corral.core.columns import Columns, check_column, check_new_column
from corral.core.tree import Tree, map_tree
from corral.data.episodes.episode import SingleAgentEpisode
from corral.data.episodes.rollout import Rollout
from corral.data.episodes.step_columns import STANDARD_COLUMNS
from corral.errors import ColumnError, nearest

_READ_ONLY = ("next_obs", "infos")
# `valid` is True throughout, times belong to all sub-envs, and modules and transforms made the others.
_HIDDEN = frozenset({"valid", "row_times_s", "states", "stored"})


class TrajectoryBatch(Columns):
    """The columns of one trajectory `[len, ...]`, as views: what is written into them is in the rollout.

    They are `obs`, `actions`, `rewards`, `terminated`, `truncated`, `dist_inputs`, `logp` and the columns that user
    code added. Two more can only be read: `next_obs`, the observation that each step led to, and `infos`, a list with
    the info dict of each step.
    """

    def __init__(self, rollout: Rollout, episode: SingleAgentEpisode) -> None:
        """Take views of the rows of an episode of the rollout."""
        self._rollout, self._episode = rollout, episode
        start, lane = episode.place
        self._rows = slice(start, start + len(episode)), lane
        super().__init__({name: self._view(name) for name in rollout.columns if name not in _HIDDEN}, len(episode))

    def _view(self, name: str) -> Tree:
        return map_tree(lambda column: column[self._rows], self._rollout[name])

    def __getitem__(self, name: str) -> Tree:
        """Return a column; `next_obs` and `infos` are put together on request."""
        if name == "next_obs":
            return self._episode.get_observations(slice(1, None))
        if name == "infos":
            return self._episode.get_infos(slice(1, None))
        if name not in self.columns:
            raise KeyError(f"no column {name!r}. {nearest(name, [*self.columns, *_READ_ONLY])}")
        return self.columns[name]

    def __setitem__(self, name: str, value: Tree) -> None:
        """Write a column into the rollout, or add one to it, which has no values for the other trajectories.

        Raises:
            ColumnError: Its shape or dtype does not fit (both are named), or it cannot be written here.
        """
        if name in self.columns:
            map_tree(np.copyto, self.columns[name], check_column(name, self.columns[name], value))
            return
        if name in STANDARD_COLUMNS or name in _READ_ONLY:
            raise ColumnError(
                f"column {name!r} cannot be written for one trajectory; write it in on_sample_end, in the rollout."
            )
        column = check_new_column(name, value, (self.length,))
        self._rollout.add_column(name, column)
        self.columns[name] = self._view(name)
        np.copyto(self.columns[name], column)
