"""Columns of time steps: the storage of rollouts and of episodes built by hand.

Time is axis 0 and lanes are axis 1. A lane holds the steps of one agent in one sub-env, one after the other; in a
rollout of single-agent envs the lanes are the sub-envs. A row is one index of axis 0: row t holds time step t of every
lane. The word row has this meaning everywhere in this folder; the data of a batch `[B, ...]` or of one episode are
entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.columns import check_column, check_new_column, describe, empty_column
from corral.core.tree import Tree, leaves, map_tree
from corral.data.episodes.infos import Infos, copy_info, has_info
from corral.errors import nearest

STANDARD_COLUMNS = frozenset(
    {
        *("obs", "actions", "rewards", "terminated", "truncated", "valid", "dist_inputs", "logp", "row_times_s"),
        *("states", "stored", "critic_obs"),
    }
)
"""Names of the columns that the library writes; user code added any other column."""

COLUMNS_OF_OBS = frozenset({"obs", "states", "stored", "critic_obs"})
"""Names of the columns with one row more, `[T + 1, L, ...]`: what the actions saw, and what the last step led to."""

NO_OUTPUTS = STANDARD_COLUMNS - {"dist_inputs", "logp"}
"""Names of the columns that are no extra model outputs of an episode."""

KEPT_BYTES_PER_ROW = 65_536
"""Size of a row of a column, over all lanes, up to which earlier chunks keep the column until the episode ends."""

_KEPT = STANDARD_COLUMNS - NO_OUTPUTS | {"obs", "actions"}
_FIRST_CAPACITY = 64


def column_attribute(name: str) -> Any:
    """Return a column as an attribute: `columns.rewards` is `columns["rewards"]`.

    Columns are read in every step of a sample, so no Python function reads them.
    """
    return property(attrgetter(f"_at.{name}"), lambda store, value: store.__setitem__(name, value))


def outcomes(num_rows: int, num_lanes: int) -> dict[str, Any]:
    """Return uninitialised columns of what steps led to: rewards, flags and times, for `num_rows` rows of lanes."""
    shape = num_rows, num_lanes
    flags = {name: np.empty(shape, np.bool_) for name in ("terminated", "truncated", "valid")}
    return {"rewards": np.empty(shape), **flags, "row_times_s": np.empty(num_rows)}


class StepColumns:
    """Named columns of time steps, with room to grow.

    Args:
        columns: Arrays or trees of arrays by name, `[T, L, ...]`; `obs` has one row more, `[T + 1, L, ...]`. Columns
            without the lane axis, such as `row_times_s` `[T]`, are allowed.
        num_rows: Rows that are written already.

    Attributes:
        obs: Tree of `[T + 1, L, ...]`: row t is what the action of row t saw, row T what the last step led to.
        actions: Module actions `[T, L, ...]`; see `ActionDistribution.to_env`.
        rewards: float64 `[T, L]`.
        columns: All columns by name, the columns that user code added included.
        final_obs: By (row, lane) of a step that ended its episode, the final observation that `obs` does not hold
            because a same-step autoreset overwrote it; in the order of time.
        info_rows: By row of `obs`, the infos that came with it.
        observation_space: Space of one observation, if known.
        action_space: Space of one module action, if known.
        num_rows: Rows written so far.
        lane_rows: Rows of each lane that are written, int64 `[L]`, where lanes have clocks of their own; `None` where
            all have `num_rows`.
    """

    lane_rows: Any

    obs = column_attribute("obs")
    actions = column_attribute("actions")
    rewards = column_attribute("rewards")

    __slots__ = (  # so that a misspelt column is refused, rather than kept as an attribute that nobody reads
        "__weakref__",
        "_at",  # the columns, which are its attributes
        "action_space",
        "final_obs",
        "info_rows",
        "lane_rows",
        "num_rows",
        "observation_space",
    )

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take columns with room for as many rows as `rewards` has."""
        self._at = SimpleNamespace(**columns)
        self.final_obs: dict[tuple[int, int], Tree] = {}
        self.info_rows: dict[int, Infos] = {}
        self.observation_space: spaces.Space[Any] | None = None
        self.action_space: spaces.Space[Any] | None = None
        self.num_rows, self.lane_rows = num_rows, None

    def _set_columns(self, columns: Mapping[str, Tree]) -> None:
        self._at = SimpleNamespace(**columns)

    columns: Any = property(attrgetter("_at.__dict__"), _set_columns)

    @classmethod
    def one_lane(cls, columns: Mapping[str, Tree], infos: Sequence[Mapping[str, Any]]) -> Self:
        """Return the storage of a single lane, every row of it written.

        Args:
            columns: By name, trees of `[T, ...]`, `obs` of `[T + 1, ...]`; `rewards` says what T is.
            infos: Info dicts of the observations, at most T + 1.
        """
        with_lane = {name: map_tree(lambda leaf: leaf[:, None], column) for name, column in columns.items()}
        store = cls(with_lane, num_rows=len(columns["rewards"]))
        store.info_rows = {row: Infos({0: copy_info(info)}) for row, info in enumerate(infos) if has_info(info)}
        return store

    # Columns.

    def __getitem__(self, name: str) -> Tree:
        """Return a column by name.

        Raises:
            KeyError: There is no such column; the nearest name is named.
        """
        if name not in self.columns:
            raise KeyError(f"the {type(self).__name__} has no column {name!r}. {nearest(str(name), self.columns)}")
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        """Say whether there is a column of this name."""
        return name in self.columns

    def __setitem__(self, name: str, value: Tree) -> None:
        """Replace a column by one of the same shape and dtype, or add one `[T, L, ...]`.

        Raises:
            ColumnError: The shape or dtype does not fit; both are named.
        """
        if name in self.columns:
            self.columns[name] = check_column(name, self.columns[name], value)
        else:
            self.columns[name] = check_new_column(name, value, (self.capacity, self.num_lanes))

    def add_column(self, name: str, like: NDArray[Any]) -> None:
        """Add a column without values, of the dtype and the entry shape `[...]` of `like` `[len, ...]`."""
        self.columns[name] = empty_column(like.dtype, (self.capacity, self.num_lanes, *like.shape[1:]))

    # Size.

    @property
    def capacity(self) -> int:
        """Number of rows that fit."""
        return len(self.rewards)

    @property
    def num_lanes(self) -> int:
        """Number of lanes L."""
        num_lanes: int = self.rewards.shape[1]
        return num_lanes

    def __len__(self) -> int:
        """Return the number of rows written so far."""
        return self.num_rows

    def num_rows_of(self, lane: int) -> int:
        """Return the number of rows of a lane written so far."""
        return self.num_rows if self.lane_rows is None else int(self.lane_rows[lane])

    def time_at(self, row: int, lane: int) -> float:
        """Return the clock reading at the end of a step."""
        return float(self.columns["row_times_s"][row if self.lane_rows is None else (row, lane)])

    def resize(self, capacity: int) -> None:
        """Give the columns room for `capacity` rows, and keep the rows written so far."""
        if capacity == len(self.rewards):
            return
        rows = min(self.num_rows, capacity)

        def resized(column: Any, extra: int) -> Any:
            if capacity + extra <= len(column):
                return column[: capacity + extra]
            shape = (capacity + extra, *column.shape[1:])
            larger = empty_column(column.dtype, shape) if isinstance(column, np.ndarray) else column.new_zeros(shape)
            larger[: rows + extra] = column[: rows + extra]
            return larger

        for name, column in self.columns.items():
            extra = int(name in COLUMNS_OF_OBS)
            if isinstance(column, np.ndarray):
                self.columns[name] = resized(column, extra)
            else:
                self.columns[name] = map_tree(lambda leaf, extra=extra: resized(leaf, extra), column)

    def without_large(self) -> StepColumns:
        """Return what episodes read of complete steps, without the large columns; the arrays are shared."""
        kept = StepColumns(self._small(), num_rows=self.num_rows)
        kept.info_rows = self.info_rows
        return kept

    def _small(self) -> dict[str, Tree]:
        most = KEPT_BYTES_PER_ROW * max(1, self.num_rows)
        return {
            name: column
            for name, column in self.columns.items()
            if name == "rewards"
            or ((name in _KEPT or name not in STANDARD_COLUMNS) and sum(leaf.nbytes for leaf in leaves(column)) <= most)
        }

    # Steps.

    def add_final_obs(self, row: int, lane: int, obs: Tree) -> None:
        """Keep the final observation of a step, whose place in `obs` a same-step autoreset took."""
        self.final_obs[row, lane] = map_tree(lambda column, leaf: np.array(leaf, column.dtype), self.obs, obs)

    def next_obs_at(self, row: int, lane: int) -> Tree:
        """Return the observation that a step led to: the final one if the step ended its episode."""
        if (row, lane) in self.final_obs:
            return self.final_obs[row, lane]
        return map_tree(lambda column: column[row + 1, lane], self.obs)

    def info_at(self, row: int, lane: int) -> dict[str, Any]:
        """Return the info that came with an observation."""
        infos = self.info_rows.get(row)
        return {} if infos is None else infos.at(lane)

    def next_info_at(self, row: int, lane: int) -> dict[str, Any]:
        """Return the info that a step gave."""
        infos = self.info_rows.get(row + 1)
        return {} if infos is None else infos.of_step(lane)

    def append_step(self, obs: Tree, step: Mapping[str, Tree], info: Mapping[str, Any] | None = None) -> None:
        """Write one more step into the storage of a single lane; nothing is written if anything does not fit.

        Args:
            obs: Observation that the step led to.
            step: Entries of the other columns by name.
            info: Info of the step.

        Raises:
            ValueError: A name, shape or dtype differs from the steps before.
            KeyError: The nesting differs.
        """
        row, before = self.num_rows, dict(self.columns)
        if row == 0:
            for name, value in step.items():
                if name not in self:
                    entry = map_tree(np.asarray, value)
                    self.columns[name] = map_tree(lambda e: np.empty((self.capacity, 1, *e.shape), e.dtype), entry)
        elif step.keys() != before.keys() - {"obs"}:
            raise ValueError(
                f"the steps before have {sorted(before.keys() - {'obs'})}, and this one has {sorted(step)}"
            )
        if row == self.capacity:
            self.resize(max(2 * row, _FIRST_CAPACITY))
        targets = [("obs", row + 1, obs), *((name, row, value) for name, value in step.items())]
        try:
            for write in (False, True):  # all is checked before anything is written
                for name, at, value in targets:
                    map_tree(partial(_write, name, at, write), self[name], value)
        except Exception:
            self.columns = before  # a first step that does not fit decides nothing about the next one
            raise
        self.num_rows = row + 1
        if info:
            self.info_rows[self.num_rows] = Infos({0: copy_info(info)})


def _write(name: str, row: int, write: bool, column: NDArray[Any], value: Any) -> None:
    array: NDArray[Any] = np.asarray(value)
    if array.shape != column.shape[2:] or not np.can_cast(array.dtype, column.dtype, "same_kind"):
        raise ValueError(f"{name} is {column.dtype}{list(column.shape[2:])}, got {describe(array)}")
    if write:
        column[row, 0] = array
