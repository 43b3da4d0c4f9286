"""Recorded episodes as columns: the one form between files or arrays, and what learns from them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.columns import describe, empty_column
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.spaces import first_outside, module_observation_space, space_tree
from corral.core.tree import Tree, map_tree, named_leaves
from corral.data.episodes.rollout import Rollout
from corral.errors import DataError
from corral.modules.distributions import ActionDistribution

_AT_ONCE = 4096  # steps whose observations are compared at once

_COLUMNS = ("obs", "actions", "rewards", "terminated", "truncated", "valid", "added")
"""Attributes of rows that are columns, or trees or dicts of columns."""

_LOOKS_LIKE = {
    "terminated": "^(is)?(terminal|terminat|absorbing|dones?$)",
    "truncated": "trunc|timeout|timelimit|^(is)?(dones?|finished|last|final|cut|ends?|episodeends?)$",
    "next_obs": "^(next|new)(obs|state)|^(obs|observations?|states?)next$",
    "starts": "^(is)?(first|start|episodestarts?)$",
    "episode_id": "^(eps?|episode|traj|trajectory)(id|index|idx|number|num|no)?s?$",
}
"""Patterns of names, lower-case letters alone, that other programs give to columns, by their names here."""


@dataclass
class EpisodeRows:
    """Whole episodes of one module, one after the other.

    A row holds an observation and the action that was taken in it. The last row of each episode holds only its final
    observation: it is not valid, and its other entries are zeros.

    Attributes:
        obs: Observations as the env gave them, a tree of `[R, ...]`.
        actions: Actions, a tree of `[R, ...]`; see `action_units`.
        rewards: float64 `[R]`.
        terminated: bool `[R]`; True in the last step of an episode that terminated.
        truncated: bool `[R]`; True in the last step of any other episode.
        valid: bool `[R]`; False in the last row of each episode.
        module_id: Id of the module that chose the actions.
        added: Other columns by name, `[R, ...]`, such as `logp`.
        infos: Info dict that came with the observation of a row, by row.
        action_units: `"env"`: as the env received them. `"rllib"`: as RLlib records them, which has each Box with
            finite bounds in [-1, 1]. `"module"`: module actions, as in replay buffers and episodes.
        place: Where the rows come from, for messages.
        num_jumps: Number of episodes that end only because the next step begins in another observation.
        given_rows: Row in the data of each row, int64 `[R]`, for messages; `None` if they are the same.
        places: Place of each row, objects `[R]`, if they come from several; otherwise `None`.
    """

    obs: Tree
    actions: Tree
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    module_id: str = DEFAULT_MODULE_ID
    added: dict[str, NDArray[Any]] = field(default_factory=dict)
    infos: dict[int, dict[str, Any]] = field(default_factory=dict)
    action_units: Literal["env", "rllib", "module"] = "env"
    place: str = "the data"
    num_jumps: int = 0
    given_rows: NDArray[np.int64] | None = None
    places: NDArray[Any] | None = None

    def __len__(self) -> int:
        """Return the number of rows R."""
        return len(self.rewards)

    @property
    def num_steps(self) -> int:
        """Number of steps: the valid rows."""
        return int(np.count_nonzero(self.valid))

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self) - self.num_steps

    @property
    def starts(self) -> NDArray[np.int64]:
        """First row of each episode, int64 `[E]`."""
        ends = np.flatnonzero(~self.valid)
        return np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1]) if len(ends) else ends

    @property
    def episode_indices(self) -> NDArray[np.int64]:
        """Number of the episode of each row, from 0, int64 `[R]`."""
        indices: NDArray[np.int64] = np.cumsum(~self.valid) - ~self.valid
        return indices

    def take(self, rows: NDArray[Any] | slice) -> Self:
        """Return some of the rows, which must be whole episodes.

        Args:
            rows: Indices, a mask bool `[R]`, or a slice.
        """
        numbers = np.arange(len(self))[rows].tolist() if self.infos else []
        return replace(
            self,
            **{name: map_tree(lambda leaf: leaf[rows], getattr(self, name)) for name in _COLUMNS},
            infos={new: self.infos[old] for new, old in enumerate(numbers) if old in self.infos},
            given_rows=None if self.given_rows is None else self.given_rows[rows],
            places=None if self.places is None else self.places[rows],
        )

    def episodes(self) -> Iterator[Self]:
        """Yield each episode."""
        for start, stop in zip(self.starts, np.flatnonzero(~self.valid) + 1, strict=True):
            yield self.take(slice(start, stop))

    def returns(self) -> NDArray[np.float64]:
        """Return the sum of the rewards of each episode, float64 `[E]`."""
        starts = self.starts
        return np.add.reduceat(self.rewards * self.valid, starts) if len(starts) else np.zeros(0)

    @classmethod
    def join(cls, parts: Sequence[EpisodeRows]) -> EpisodeRows:
        """Return several parts of one module as one; where a part lacks an added column, there are no values."""
        if len(parts) == 1:
            return parts[0]
        blank = {name: column[:0] for part in parts for name, column in part.added.items()}
        wholes = []  # callbacks add columns at any time
        for part in parts:
            lacking = {name: empty_column(c.dtype, (len(part), *c.shape[1:])) for name, c in blank.items()}
            wholes.append(replace(part, added=lacking | part.added))
        offsets = np.cumsum([0, *map(len, parts)]).tolist()
        given_rows = [np.arange(len(part)) if part.given_rows is None else part.given_rows for part in parts]
        places = [part.place for part in parts]

        def joined(name: str) -> Tree:
            return map_tree(lambda *leaf: np.concatenate(leaf), *(getattr(part, name) for part in wholes))

        return replace(
            parts[0],
            **{name: joined(name) for name in _COLUMNS},
            num_jumps=sum(part.num_jumps for part in parts),
            given_rows=np.concatenate(given_rows),
            places=np.repeat(np.array(places, object), np.diff(offsets)) if len({*places}) > 1 else None,
            infos={i + row: info for i, part in zip(offsets, parts, strict=False) for row, info in part.infos.items()},
        )

    # For learning.

    def checked(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> Self:
        """Return the rows with the dtypes of spaces, after checking every entry.

        Args:
            observation_space: Space of one observation of the env.
            action_space: Space of one action of the env.

        Raises:
            DataError: A column has another form than its space, or an entry is outside of it, NaN or infinite; the
                message names the place, the row and the column.
        """
        obs = self._as_space("obs", self.obs, module_observation_space(observation_space), np.ones_like(self.valid))
        actions = self.actions
        if self.action_units != "module":
            actions = self._as_space("actions", actions, action_space, self.valid)
        with np.errstate(over="ignore"):
            finite = np.isfinite(self.rewards.astype(np.float32))  # as a replay buffer holds them
        if (bad := self.valid & ~finite).any():  # added columns may lack values, which are NaN
            row = int(bad.argmax())
            raise self.error(row, "rewards", f"is {self.rewards[row]}")
        return replace(self, obs=obs, actions=actions)

    def _as_space(self, name: str, tree: Tree, space: spaces.Space[Any], counts: NDArray[np.bool_]) -> Tree:
        """Return a column with the dtypes of a space; entries outside of `counts` may be anything."""

        def convert(path: str, leaf_space: Any, leaf: NDArray[Any]) -> NDArray[Any]:
            shape = tuple(leaf_space.shape or ())
            if leaf.shape[1:] != shape and _is_reshaped(leaf.shape[1:], shape):
                leaf = leaf.reshape(len(leaf), *shape)
            if leaf.shape[1:] != shape or leaf.dtype.kind not in "biuf":
                raise DataError(
                    f"{self.place}: the column {path!r} is {describe(leaf)}, and the space {leaf_space} needs "
                    f"{leaf_space.dtype}{[len(leaf), *shape]}: give the spaces of the env in which it was recorded."
                )
            chosen = leaf if counts.all() else leaf[counts]
            if (outside := first_outside(leaf_space, chosen)) is not None:
                row = int(np.flatnonzero(counts)[outside[0]])
                raise self.error(row, path, f"is {leaf[row]!s:.120}, which is not in {leaf_space}")
            with np.errstate(invalid="ignore", over="ignore"):  # of NaN in the entries that do not count
                converted = leaf.astype(leaf_space.dtype, copy=False)
            if converted is not leaf:  # a part of a number, or a larger one, is lost
                is_float = leaf_space.dtype.kind == "f"
                changed = ~np.isfinite(converted[counts]) if is_float else converted[counts] != chosen
                if changed.any():
                    row = int(np.flatnonzero(counts)[np.argwhere(changed)[0][0]])
                    raise self.error(row, path, f"is {leaf[row]!s:.120}, which is not in {leaf_space}")
            return converted

        wanted, given = dict(named_leaves(space_tree(space), name)), dict(named_leaves(tree, name))
        if wanted.keys() != given.keys():
            raise DataError(
                f"{self.place}: the data has the columns {sorted(given)}, and the space {space} needs "
                f"{sorted(wanted)}: give the spaces of the env that the data was recorded in."
            )
        found = iter([convert(path, leaf_space, given[path]) for path, leaf_space in wanted.items()])
        return map_tree(lambda _: next(found), space_tree(space))

    def error(self, row: int, column: str, problem: str) -> DataError:
        """Return an error about an entry, which names the place, the row and the column."""
        place = self.place if self.places is None else self.places[row]
        if (given := self.given_rows) is not None:
            if column.startswith("obs") and row and not self.valid[row] and given[row] == given[row - 1]:
                column = f"next_{column}"  # the observation after the step of the row before
            row = int(given[row])
        return DataError(f"{place}: row {row}, column {column!r} {problem}.")

    def module_actions(self, distribution: ActionDistribution) -> NDArray[Any]:
        """Return the actions as module actions `[R, ...]`.

        Raises:
            DataError: They are module actions already, and of another module.
        """
        if self.action_units == "rllib":
            return distribution.from_rllib(self.actions)
        if self.action_units == "env":
            return distribution.from_env(self.actions)
        actions: NDArray[Any] = np.asarray(self.actions)
        if actions.shape[1:] != distribution.action_shape or actions.dtype.kind != distribution.action_dtype.kind:
            raise DataError(
                f"{self.place}: 'actions' is {describe(actions)}, and the actions of the module are "
                f"{distribution.action_dtype}{list(distribution.action_shape)} each: give data of the same module."
            )
        return actions.astype(distribution.action_dtype, copy=False)

    def as_rollout(self, distribution: ActionDistribution) -> Rollout:
        """Return the rows as a rollout of one lane, `[R - 1, 1, ...]`, with module actions.

        The last row, which only holds the last observation, is row T of the observations.

        Args:
            distribution: Distribution of the module, which converts actions of the env to module actions.
        """
        rows = slice(0, len(self) - 1)
        columns: dict[str, Tree] = {
            "obs": map_tree(lambda leaf: leaf[:, None], self.obs),
            "actions": self.module_actions(distribution)[rows, None],
            **{name: getattr(self, name)[rows, None] for name in ("rewards", "terminated", "truncated", "valid")},
            **{name: column[rows, None] for name, column in self.added.items()},
        }
        rollout = Rollout(columns, num_rows=len(self) - 1)
        rollout.num_env_steps = self.num_steps
        return rollout


def rows_of_steps(
    obs: Tree,
    actions: Tree,
    rewards: Any,
    terminated: Any,
    truncated: Any = None,
    *,
    next_obs: Tree = None,
    starts: Any = None,
    episode_id: Any = None,
    t: Any = None,
    added: Mapping[str, Any] | None = None,
    module_id: str = DEFAULT_MODULE_ID,
    place: str = "the data",
) -> EpisodeRows:
    """Return steps in the order of time as rows.

    Episodes end where a step is terminated or truncated, before a step of `starts` or of another `episode_id`, where
    `next_obs` is not the observation of the next step, and with the last step. An episode that no flag ends counts as
    truncated. If `next_obs` is not known, the last step of a truncated episode has no observation to bootstrap from:
    it is left out, and its observation becomes the final one of the step before.

    Args:
        obs: Observations, a tree of `[S, ...]`.
        actions: Actions as the env received them, a tree of `[S, ...]`.
        rewards: Rewards `[S]`.
        terminated: Flags `[S]`, bool or 0 and 1.
        truncated: Flags `[S]`; `None` is False everywhere.
        next_obs: Observations that the steps led to, a tree of `[S, ...]`, or `None`.
        starts: Flags `[S]` of the first steps of episodes, or `None`.
        episode_id: Number or text of the episode of each step, `[S]`, or `None`.
        t: Numbers `[S]` that must increase in each episode, such as its steps from 0 on, or `None`.
        added: Other columns by name, `[S, ...]`.
        module_id: Id of the module that chose the actions.
        place: Where the steps come from, for messages.

    Raises:
        DataError: The columns have no steps, or not the same number of steps; a flag is neither bool nor 0 or 1;
            `next_obs` has another form than `obs`; `t` does not increase; or the steps of one `episode_id` are not one
            after another.
    """
    obs, actions = _arrays(obs, "obs", place), _arrays(actions, "actions", place)
    next_obs = None if next_obs is None else _arrays(next_obs, "next_obs", place)
    rewards = _arrays(rewards, "rewards", place)
    try:
        if rewards.dtype.kind not in "biufO":
            raise TypeError(f"it has the dtype {rewards.dtype}")
        rewards = rewards.astype(np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: column 'rewards' holds something else than numbers: {error}.") from error
    size = len(rewards)
    none = np.zeros(size, np.bool_)
    ended, cut, begins = (
        none if flags is None else as_flags(flags, name, place)
        for name, flags in (("terminated", terminated), ("truncated", truncated), ("starts", starts))
    )
    others = {name: np.asarray(column) for name, column in (added or {}).items()}
    columns = {
        **dict(named_leaves(obs, "obs")),
        **dict(named_leaves(actions, "actions")),
        **{"terminated": ended, "truncated": cut, "starts": begins},
        **({} if next_obs is None else dict(named_leaves(next_obs, "next_obs"))),
        **{name: np.asarray(column) for name, column in (("episode_id", episode_id), ("t", t)) if column is not None},
        **others,
    }
    for name, column in columns.items():
        if column.ndim == 0 or len(column) != size:
            raise DataError(
                f"{place}: column {name!r} is {describe(column)}, and 'rewards' has {size} entries: give one entry "
                "for each step."
            )
    if not size:
        raise DataError(f"{place}: there are no steps.")
    is_last = ended | cut
    is_last[:-1] |= (begins | _first_steps(episode_id, size, place))[1:]
    is_last[-1] = True
    jumps = none if next_obs is None else _jumps(obs, next_obs, place) & ~is_last
    is_last |= jumps
    _check_time(t, is_last, place)
    cut = is_last & ~ended
    keeps = np.ones(size, np.bool_)
    if next_obs is None:
        keeps = ~cut  # a step of one lone truncated episode disappears with it
    # Each episode gets one more row, after its last step.
    number: NDArray[np.int64] = np.cumsum(is_last) - is_last
    place_of_step = np.arange(size) + number
    num_rows = size + int(is_last.sum())
    lasts = np.flatnonzero(is_last)
    finals = place_of_step[lasts] + 1

    def spread(column: NDArray[Any]) -> NDArray[Any]:
        rows = np.zeros((num_rows, *column.shape[1:]), column.dtype)
        rows[place_of_step] = column
        return rows

    given_rows = spread(np.arange(size))
    given_rows[finals] = lasts

    def spread_obs(column: NDArray[Any], after: Any) -> NDArray[Any]:
        # An integer or a float32 does not hold what comes after, if that has another dtype.
        rows = spread(column if after is None else column.astype(np.result_type(column, after), copy=False))
        # After a terminated step nothing reads the observation.
        rows[finals] = column[lasts] if after is None else after[lasts]
        return rows

    after = map_tree(lambda leaf: None, obs) if next_obs is None else next_obs
    rows = EpisodeRows(
        obs=map_tree(spread_obs, obs, after),
        actions=map_tree(spread, actions),
        rewards=spread(rewards),
        terminated=spread(ended),
        truncated=spread(cut),
        valid=spread(np.ones(size, np.bool_)),
        module_id=module_id,
        added={name: spread(column) for name, column in others.items()},
        place=place,
        num_jumps=int(np.count_nonzero(jumps)),
        given_rows=given_rows,
    )
    return rows if keeps.all() else _without_last_steps(rows, place_of_step[~keeps])


def _first_steps(episode_id: Any, size: int, place: str) -> NDArray[np.bool_]:
    """Return which steps are the first ones of episodes by their ids, bool `[S]`; without ids, only the first step.

    Raises:
        DataError: The steps of an episode are not one after another.
    """
    begins: NDArray[np.bool_] = np.arange(size) == 0
    if episode_id is None:
        return begins
    ids = np.asarray(episode_id).reshape(-1)
    begins[1:] = ids[1:] != ids[:-1]
    firsts = np.flatnonzero(begins)
    _, known = np.unique(ids[firsts], return_index=True)
    if len(known) < len(firsts):
        row = int(firsts[np.setdiff1d(np.arange(len(firsts)), known)[0]])
        raise DataError(
            f"{place}: row {row}, column 'episode_id' is {ids[row]!s:.80}, and rows before it belong to this episode "
            "and then to another one: put the steps of each episode one after another, in the order of time."
        )
    return begins


def _check_time(given: Any, is_last: NDArray[np.bool_], place: str) -> None:
    """Refuse numbers that do not increase within an episode: its steps are in another order, or its end has no flag.

    Raises:
        DataError: The message names the row.
    """
    if given is None:
        return
    t = np.asarray(given).reshape(-1)
    if (wrong := np.flatnonzero((t[1:] <= t[:-1]) & ~is_last[:-1])).size:
        row = int(wrong[0]) + 1
        raise DataError(
            f"{place}: row {row}, column 't' is {t[row]!s:.80} after {t[row - 1]!s:.80}, and no episode ends between "
            "them: put the steps of each episode in the order of time, and mark its end."
        )


def _arrays(column: Tree, name: str, place: str) -> Any:
    """Return a column as a tree of arrays.

    Raises:
        DataError: Its entries have several shapes.
    """
    try:
        return map_tree(np.asarray, column)
    except ValueError as error:
        raise DataError(f"{place}: column {name!r} is no array: {error}") from error


def check_names(given: Collection[str], known: Collection[str], place: str) -> None:
    """Refuse a column that looks like one that is missing under another name: it would not be read as such.

    Args:
        given: Names of the columns that have no meaning of their own.
        known: Names, as here, of the columns that are there.
        place: Where they come from, for messages.

    Raises:
        DataError: The message names the column.
    """
    for name in given:
        text = re.sub("[^a-z]", "", name.lower())
        for column, pattern in _LOOKS_LIKE.items():
            spelled = difflib.get_close_matches(text, [column.replace("_", "")], cutoff=0.8)
            if column not in known and (spelled or re.search(pattern, text)):
                raise DataError(
                    f"{place}: the column {name!r} looks like {column!r}, which is missing: call it {column!r} if it "
                    "is, and leave it out if it is not."
                )


def as_flags(column: Any, name: str, place: str) -> NDArray[np.bool_]:
    """Return flags as bool `[S]`.

    Args:
        column: Flags `[S]` or `[S, 1]`, bool or the numbers 0 and 1.
        name: Name of the column, for messages.
        place: Where it comes from, for messages.

    Raises:
        DataError: An entry is something else, such as NaN or a text; the message names the row.
    """
    flags = np.asarray(column).reshape(-1)
    if flags.dtype.kind == "b":
        return flags
    if flags.dtype.kind in "iuf":
        is_flag = (flags == 0) | (flags == 1)
    else:  # texts, or objects, as tables with missing entries have them
        is_flag = np.array([isinstance(flag, (bool, np.bool_, Real)) and flag in (0, 1) for flag in flags], np.bool_)
    if not is_flag.all():
        row = int(is_flag.argmin())
        raise DataError(
            f"{place}: row {row}, column {name!r} is {flags[row]!s:.80}: flags are bool, or the numbers 0 and 1."
        )
    return flags.astype(np.bool_)


def _jumps(obs: Tree, next_obs: Tree, place: str) -> NDArray[np.bool_]:
    """Return which steps lead to another observation than the one of the next step, bool `[S]`.

    NaN equals NaN. Floats of two precisions are compared in the lower one. The last step does not jump.

    Raises:
        DataError: `next_obs` has another form than `obs`.
    """
    here, after = dict(named_leaves(obs)), dict(named_leaves(next_obs))
    forms = [{name: leaf.shape[1:] for name, leaf in leaves.items()} for leaves in (here, after)]
    if forms[0] != forms[1]:
        raise DataError(f"{place}: 'next_obs' has entries of the shapes {forms[1]}, and 'obs' of {forms[0]}.")
    for name, leaf in after.items():
        if leaf.dtype.kind not in "biuf" and here[name].dtype.kind in "biuf":
            raise DataError(f"{place}: 'next_obs' is {describe(leaf)}, and 'obs' {describe(here[name])}.")
    jumps = np.zeros(len(next(iter(here.values()))), np.bool_)
    for name, leaf in here.items():
        other = after[name]
        is_float = leaf.dtype.kind == other.dtype.kind == "f"
        dtype = min(leaf.dtype, other.dtype, key=lambda each: each.itemsize) if is_float else None
        for start in range(0, len(jumps) - 1, _AT_ONCE):  # images are large
            stop = min(start + _AT_ONCE, len(jumps) - 1)
            one, two = other[start:stop], leaf[start + 1 : stop + 1]
            if dtype is not None:
                with np.errstate(over="ignore"):
                    one, two = one.astype(dtype, copy=False), two.astype(dtype, copy=False)
            differs = one != two
            if dtype is not None:
                differs &= ~(np.isnan(one) & np.isnan(two))
            jumps[start:stop] |= differs.reshape(stop - start, -1).any(1)
    return jumps


def _without_last_steps(rows: EpisodeRows, dropped: NDArray[np.int64]) -> EpisodeRows:
    """Return rows in which the observation of each of these steps is the final one; the step is not valid.

    Raises:
        DataError: Nothing is left.
    """
    rows.valid[dropped] = False
    rows.truncated[dropped] = False
    has_step_before = np.zeros(len(dropped), np.bool_)
    has_step_before[dropped > 0] = rows.valid[dropped[dropped > 0] - 1]
    rows.truncated[dropped[has_step_before] - 1] = True
    rows.rewards[dropped] = 0
    kept = np.ones(len(rows), np.bool_)
    kept[dropped + 1] = False  # the copy of the last observation
    kept[dropped[~has_step_before]] = False  # an episode of one step
    if not kept.any():
        raise DataError(
            f"{rows.place}: each episode is one truncated step, and there is no 'next_obs' to bootstrap from: give "
            "'next_obs', or the ends of the episodes."
        )
    return rows.take(kept)


def _is_reshaped(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether entries of a shape are entries of another one, in the same order.

    They are if the entries are flat lists, or if axes of length 1 differ. Images whose channels come first are not.
    """
    is_flat = len(given) <= 1 and math.prod(given) == math.prod(wanted)
    return is_flat or [size for size in given if size != 1] == [size for size in wanted if size != 1]


def check_same_columns(first: EpisodeRows, other: EpisodeRows) -> None:
    """Refuse data whose parts have other observations or actions, or added columns of one name and other forms.

    Raises:
        DataError: The message names the place and the column.
    """

    def forms(rows: EpisodeRows) -> dict[str, str]:
        columns = [*named_leaves(rows.obs, "obs"), *named_leaves(rows.actions, "actions"), *rows.added.items()]
        return {name: f"{column.dtype}{list(column.shape[1:])}" for name, column in columns}

    one, two = forms(first), forms(other)
    for name in (*one, *two):
        lacks = name not in one or name not in two
        if one.get(name) != two.get(name) and not (lacks and name in {**first.added, **other.added}):
            raise DataError(
                f"{other.place}: column {name!r} is {two.get(name, 'missing')} for each row, and "
                f"{one.get(name, 'missing')} in {first.place}: all files must have the same columns."
            )
