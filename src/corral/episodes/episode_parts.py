"""Parts of episodes, and episodes of parts: slices, the next chunk, chunks joined, and state as plain data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.tree import Tree, leaves, map_tree
from corral.episodes.rollout import Rollout
from corral.errors import EpisodeError

if TYPE_CHECKING:
    from corral.episodes.episode import SingleAgentEpisode

Episode = TypeVar("Episode", bound="SingleAgentEpisode")


_FIRST_CAPACITY = 64


def stacked(given: Mapping[str, Sequence[Any] | None], infos: Sequence[Any] | None) -> dict[str, Tree]:
    """Turn what the steps of an episode were built from into columns of their own.

    Args:
        given: `obs`, `actions`, `rewards` and extra outputs: one entry for each step, one more in `obs`.
        infos: One for each observation, or `None`.

    Returns:
        Columns `[R, ...]`, `obs` `[R + 1, ...]`; none at all without an observation.

    Raises:
        EpisodeError: The lengths do not fit together.
    """
    lengths = {name: 0 if values is None else len(values) for name, values in given.items()}
    num_steps = lengths.get("actions", 0)
    fit = all(length == num_steps for name, length in lengths.items() if name != "obs")
    if not fit or (lengths["obs"] != num_steps + 1 and any(lengths.values())):
        raise EpisodeError(
            "an episode of n steps has n actions, rewards and extra outputs, and n + 1 observations; got "
            f"{', '.join(f'{length} {name}' for name, length in lengths.items())}."
        )
    if infos is not None and len(infos) != lengths["obs"]:
        raise EpisodeError(f"an episode has an info for each observation; got {len(infos)} for {lengths['obs']}.")
    if not lengths["obs"]:
        return {}
    columns = {name: _stack(name, values) for name, values in given.items() if values is not None and len(values)}
    columns["rewards"] = np.array(columns.get("rewards", ()), np.float64)
    return columns


def _stack(name: str, values: Sequence[Tree]) -> Tree:
    try:
        return map_tree(lambda *leaf: np.stack([np.asarray(part) for part in leaf]), *values)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise EpisodeError(f"the entries of {name!r} differ in shape or nesting: {error}") from error


def append(rollout: Rollout, observation: Tree, step: Mapping[str, Tree]) -> None:
    """Write one more row into the columns of an episode built by hand; nothing is written if anything does not fit.

    Args:
        rollout: Of one sub-env.
        observation: That the step led to.
        step: The other columns' entries by name.

    Raises:
        ValueError: A name, shape or dtype differs from those of the rows before.
        KeyError: The nesting does.
    """
    row, before = rollout.num_rows, dict(rollout.columns)
    if row == 0:
        for name, value in step.items():
            if name not in rollout:
                rollout.columns[name] = map_tree(lambda leaf: _room_like(leaf, rollout.capacity), value)
    elif step.keys() != before.keys() - {"obs"}:
        raise ValueError(f"the steps before have {sorted(before.keys() - {'obs'})}, and this one has {sorted(step)}")
    if row == rollout.capacity:
        rollout.resize(max(2 * row, _FIRST_CAPACITY))
    targets = [("obs", row + 1, observation), *((name, row, value) for name, value in step.items())]
    try:
        for write in (False, True):  # all is checked before anything is written
            for name, at, value in targets:
                map_tree(partial(_write, name, at, write), rollout[name], value)
    except Exception:
        rollout.columns = before  # a first step that does not fit decides nothing about the next one
        raise
    rollout.num_rows = row + 1


def _room_like(entry: Any, capacity: int) -> NDArray[Any]:
    return np.empty((capacity, 1, *np.shape(entry)), np.asarray(entry).dtype)


def _write(name: str, row: int, write: bool, column: NDArray[Any], value: Any) -> None:
    array: NDArray[Any] = np.asarray(value)
    if array.shape != column.shape[2:] or not np.can_cast(array.dtype, column.dtype, "same_kind"):
        raise ValueError(f"{name} is {column.dtype}{list(column.shape[2:])}, got {describe(array)}")
    if write:
        column[row, 0] = array


def _part_of(episode: SingleAgentEpisode, first: int, start: int, stop: int) -> SingleAgentEpisode:
    """Return the steps from `start` to `stop` of an episode, with those from `first` on as lookback.

    All three count from the oldest step that the episode holds, lookback included.
    """
    part = type(episode)(episode.id_, observation_space=episode.observation_space, action_space=episode.action_space)
    columns = {
        name: map_tree(lambda leaf, extra=name == "obs": leaf[first : stop + extra].copy(), column)
        for name, column in episode.all_columns().items()
    }
    part.adopt(columns, episode.all_infos()[first : stop + 1], start - first)
    part.env_index = episode.env_index
    part.notes = copy.deepcopy(episode.notes)
    return part


def slice_episode(episode: SingleAgentEpisode, slice_: slice, len_lookback_buffer: int | None) -> SingleAgentEpisode:
    """See `SingleAgentEpisode.slice`."""
    if slice_.step not in (None, 1):
        raise EpisodeError(f"a slice of an episode has no step width, got {slice_}.")
    episode.validate()
    start, stop, _ = slice_.indices(len(episode))
    stop = max(start, stop)
    lookback = episode.len_lookback
    kept = lookback if len_lookback_buffer is None else len_lookback_buffer
    if kept < 0:
        raise EpisodeError(f"len_lookback_buffer={kept} cannot be negative.")
    part = _part_of(episode, max(0, lookback + start - kept), lookback + start, lookback + stop)
    part.t_started = episode.t_started + start
    if stop == len(episode):
        part.is_terminated, part.is_truncated = episode.is_terminated, episode.is_truncated
    return part


def cut_episode(episode: SingleAgentEpisode, len_lookback_buffer: int) -> SingleAgentEpisode:
    """See `SingleAgentEpisode.cut`."""
    if episode.is_done:
        raise EpisodeError(f"episode {episode.id_} is over: no chunk comes next.")
    if len_lookback_buffer < 0:
        raise EpisodeError(f"len_lookback_buffer={len_lookback_buffer} cannot be negative.")
    if not episode.is_reset:
        return type(episode).from_state(episode.get_state())
    stop = episode.len_lookback + len(episode)
    chunk = _part_of(episode, max(0, stop - len_lookback_buffer), stop, stop)
    chunk.continue_from(episode.t, episode.get_return())
    return chunk


def concat_episodes(episode: SingleAgentEpisode, other: SingleAgentEpisode) -> None:
    """See `SingleAgentEpisode.concat_episode`."""
    if other.id_ != episode.id_:
        raise EpisodeError(f"episode {other.id_} is no part of episode {episode.id_}.")
    if episode.is_done:
        raise EpisodeError(f"episode {episode.id_} is over: nothing comes after it.")
    episode.validate()
    other.validate()
    if other.t_started != episode.t:
        raise EpisodeError(
            f"episode {episode.id_} goes on at t={episode.t}, but the chunk begins at {other.t_started}."
        )
    mine, theirs, skip = episode.all_columns(), other.all_columns(), other.len_lookback
    # The chunk's first observation is the last one here; its info may say more, and stays.
    if not all(leaves(map_tree(lambda a, b: np.array_equal(a[-1], b[skip]), mine["obs"], theirs["obs"]))):
        raise EpisodeError(f"episode {episode.id_} has another last observation than the chunk's first one.")
    if len(other):
        if len(mine["rewards"]) and not (episode.owns_data and other.owns_data):
            shared = mine.keys() & theirs.keys()  # a complete rollout has more columns than one that is being written
            mine, theirs = ({name: part[name] for name in shared} for part in (mine, theirs))
        if len(mine["rewards"]) and mine.keys() != theirs.keys():
            raise EpisodeError(f"episode {episode.id_} has {sorted(mine)} at each step, the chunk {sorted(theirs)}.")
        columns = {}
        for name, column in theirs.items():
            fresh = map_tree(lambda leaf, start=skip + (name == "obs"): leaf[start:].copy(), column)
            columns[name] = map_tree(lambda *parts: np.concatenate(parts), mine[name], fresh) if name in mine else fresh
        infos = [*episode.all_infos()[:-1], *other.all_infos()[skip:]]
        episode.adopt(columns, infos, episode.len_lookback)
    episode.is_terminated, episode.is_truncated = other.is_terminated, other.is_truncated
    custom, temporary = copy.deepcopy(other.notes)
    episode.notes[0].update(custom)
    episode.notes[1].update(temporary)  # the chunk's lists go on from those here


_PLAIN = ("id_", "env_index", "t_started", "return_before", "is_terminated", "is_truncated")


def episode_state(episode: SingleAgentEpisode) -> dict[str, Any]:
    """See `SingleAgentEpisode.get_state`."""
    state = {name: getattr(episode, name) for name in _PLAIN}
    if episode.is_reset:
        state["columns"] = {name: map_tree(np.copy, column) for name, column in episode.all_columns().items()}
        state["infos"] = episode.all_infos()
        state["len_lookback"] = episode.len_lookback
    return state | {
        "custom_data": copy.deepcopy(episode.notes[0]),
        "temporary_data": copy.deepcopy(episode.notes[1]),
    }


def episode_from_state(episode: Episode, state: Mapping[str, Any]) -> Episode:
    """Fill an empty episode; see `SingleAgentEpisode.from_state`."""
    if "columns" in state:
        columns = {name: map_tree(np.copy, column) for name, column in state["columns"].items()}
        episode.adopt(columns, state["infos"], state["len_lookback"])
    for name in _PLAIN:
        setattr(episode, name, state[name])
    episode.notes = (copy.deepcopy(state["custom_data"]), copy.deepcopy(state["temporary_data"]))
    return episode
