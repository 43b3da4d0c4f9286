"""Where recorded data comes from: each source gives the same parts, whole episodes of one module as rows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from corral.core.links import load_link
from corral.core.places import Place, place_of
from corral.core.tree import map_tree
from corral.data.episodes.episode import SingleAgentEpisode
from corral.data.offline.config import ArraysInMemory
from corral.data.offline.episode_rows import EpisodeRows, check_names, rows_of_steps
from corral.data.offline.parquet import Description, read_rows
from corral.data.offline.source import MINARI, ParquetPlace, Source, Spaces
from corral.data.replay import ReplayBuffer
from corral.errors import CheckpointError, DataError, nearest

D4RL_NAMES = {
    "observations": "obs",
    "next_observations": "next_obs",
    "terminals": "terminated",
    "timeouts": "truncated",
}
"""Names of columns here by their names in D4RL (Fu et al. 2020, arXiv:2004.07219) and datasets of its form."""

_STEP_COLUMNS = ("obs", "actions", "rewards", "terminated", "truncated", "next_obs", "starts", "episode_id", "t")


def open_source(given: Any) -> Source:
    """Return the source that the setting `input_` describes.

    Raises:
        DataError: There is no data, it is damaged, or it is of a form that is not known.
        MissingPackageError: A package that reads it is not installed.
    """
    if isinstance(given, (str, Path)):
        return _named_sources([str(given)])
    if isinstance(given, ArraysInMemory):
        return _arrays(given.columns)
    if isinstance(given, Mapping):
        return _state(given) if "layout" in given else _arrays(given)
    if isinstance(given, ReplayBuffer) and given.kind != "device":
        return _buffer(given)
    if hasattr(given, "iterate_episodes"):
        from corral.data.offline.minari_data import minari_source

        return minari_source(given)
    if isinstance(given, (list, tuple)) and given and all(isinstance(part, str) for part in given):
        return _named_sources(given)
    if callable(given) or isinstance(given, Iterable):
        return _iterated(given)
    raise DataError(
        f"offline_data: input_={given!r:.80} is no data that Corral reads: give a path, a dict of arrays, a replay "
        "buffer, episodes, or a function that returns an iterator over them."
    )


# Files.


def _named_sources(texts: Sequence[str]) -> Source:
    found = [_named_source(text) for text in texts]
    sources = [part for part in found if isinstance(part, Source)]
    # Episodes may begin in one table and end in another.
    if tables := [file for part in found if not isinstance(part, Source) for file in part]:
        sources.append(load_link("rllib.recorded_files").rllib_parquet_source(tables))
    return sources[0] if len(sources) == 1 else _join_sources(sources)


def _named_source(text: str) -> Source | list[ParquetPlace]:
    """Return the source that a text names, or the files of tables that Corral did not write."""
    if not text:
        raise DataError("offline_data: input_ is an empty text: give the path of the data.")
    if text.startswith(MINARI):
        from corral.data.offline.minari_data import load_minari

        return load_minari(text.removeprefix(MINARI))
    place, names = files_of(text)
    if not names:
        raise DataError(
            f"offline_data: {text} holds no .parquet and no .json files: give a directory of recorded data."
        )
    if names[0].endswith(".json"):
        found: Source = load_link("rllib.recorded_files").rllib_json_source(place, names)
        return found
    files = [ParquetPlace(place, name) for name in names]
    descriptions = [file.description() for file in files]
    lack = [file for file, each in zip(files, descriptions, strict=True) if each is None]
    if tables := [file for file in lack if not file.has_own_columns()]:
        if own := next((file for file in files if file not in tables), None):
            raise DataError(
                f"offline_data: {own.path} is a file of Corral, and {tables[0].path} is another table: put them into "
                "two directories, and give both as a list."
            )
        return files
    return _own_files(text, files, descriptions)


def files_of(text: str) -> tuple[Place, list[str]]:
    """Return the directory and the names of the files of a path: of a directory all files, in sorted order.

    Raises:
        DataError: There is nothing.
    """
    place = place_of(text)
    location = str(place.location)
    if not place.exists():
        raise DataError(f"offline_data: {location} does not exist.")
    if location.endswith((".parquet", ".json")) and not place.names():
        folder, _, name = location.rpartition("/")
        return place_of(folder or "."), [name]
    return place, _data_files(place)


def _data_files(place: Place, prefix: str = "") -> list[str]:
    """Return the names of data files in a directory and the directories in it; JSON only if there is no Parquet."""
    found: list[str] = []
    for name in place.names():
        if name.endswith((".parquet", ".json")):
            found.append(f"{prefix}{name}")
        elif not name.startswith(".") and (inside := place.child(name)).names():
            found += _data_files(inside, f"{prefix}{name}/")
    parquet = [name for name in found if name.endswith(".parquet")]
    return parquet or found


def _own_files(text: str, files: Sequence[ParquetPlace], descriptions: Sequence[Description | None]) -> Source:
    """Return the source of files that Corral wrote; a tool for tables may have written them again without spaces."""
    sources = []
    for file, description in zip(files, descriptions, strict=True):
        read = partial(file.use, partial(read_rows, place=file.path))
        known = None if description is None else dict.fromkeys(description.spaces, file.num_rows())
        # Each file is read when its turn comes.
        parts = partial(map, lambda read: read(), [read])
        sources.append(Source(parts, file.path, {} if description is None else description.spaces, known))
    return replace(_join_sources(sources), name=text)


def _join_sources(sources: Sequence[Source]) -> Source:
    """Return sources as one.

    Raises:
        DataError: Two of them have other spaces of one module.
    """
    found: dict[str, Spaces] = {}
    for source in sources:
        for module_id, both in source.spaces.items():
            if found.setdefault(module_id, both) != both:
                raise DataError(
                    f"{source.name} was recorded with the spaces {both} of module {module_id!r}, and other data with "
                    f"{found[module_id]}: give the data of one env."
                )
    counts = [source.num_rows for source in sources if source.num_rows is not None]
    return Source(
        lambda: itertools.chain.from_iterable(source.parts() for source in sources),
        ", ".join(source.name for source in sources),
        found,
        _total(counts) if len(counts) == len(sources) else None,
    )


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of numbers of rows by module id."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


# Memory.


def _arrays(columns: Mapping[str, Any], place: str = "the arrays") -> Source:
    rows = _rows_of_arrays(columns, place)
    return Source(lambda: iter([rows]), place, num_rows={rows.module_id: len(rows)})


def _rows_of_arrays(columns: Mapping[str, Any], place: str) -> EpisodeRows:
    """Return columns of steps by name as rows.

    Raises:
        DataError: A column is missing, there under two names, or has another length.
    """
    if both := [name for name in columns if D4RL_NAMES.get(name) in columns]:
        raise DataError(f"offline_data: {place} hold {both[0]!r} and {D4RL_NAMES[both[0]]!r}: leave one of them out.")
    columns = {D4RL_NAMES.get(name, name): column for name, column in columns.items()}
    for name in ("obs", "actions", "rewards"):
        if name not in columns:
            raise DataError(f"offline_data: {place} lack {name!r}. {nearest(name, columns)}")
    added = {name: column for name, column in columns.items() if name not in _STEP_COLUMNS or name == "t"}
    check_names(added, {*columns, *(("episode_id",) if "starts" in columns else ())}, place)
    if not columns.keys() & {"terminated", "truncated", "starts", "episode_id"}:
        raise DataError(
            f"offline_data: {place} do not say where episodes end: add 'terminated' and 'truncated', bool [S]."
        )
    given = {name: column for name, column in columns.items() if name in _STEP_COLUMNS}
    given.setdefault("terminated", np.zeros(len(given["rewards"]), np.bool_))
    return rows_of_steps(**given, added=added, place=place)


def _buffer(buffer: ReplayBuffer) -> Source:
    rows = _rows_of_buffer(buffer)
    return Source(lambda: iter(rows), "the replay buffer", num_rows=_count(rows))


def _state(state: Mapping[str, Any]) -> Source:
    """Return the source of the state of a replay buffer, as `ReplayBuffer.get_state` returns it.

    Raises:
        DataError: It holds nothing, or is damaged.
    """
    buffer = ReplayBuffer(
        int(state["capacity"]), num_runners=int(state["num_runners"]), frame_stack=int(state["frame_stack"])
    )
    try:
        buffer.set_state({**state, "type": buffer.kind})
    except CheckpointError as error:
        raise DataError(f"offline_data: {error}") from error
    return _buffer(buffer)


def _rows_of_buffer(buffer: ReplayBuffer) -> list[EpisodeRows]:
    """Return the steps of a replay buffer as episodes of one step or more; module actions stay module actions."""
    steps = buffer.get_steps()
    if not len(steps["rewards"]):
        raise DataError("offline_data: the replay buffer holds no steps.")
    rows = rows_of_steps(**steps, place="the replay buffer")
    rows.action_units = "module"
    return [rows]


def _iterated(given: Any) -> Source:
    """Return the source of an iterable, or of a function that returns one, of episodes or dicts of arrays.

    What can be iterated once only is kept in memory.
    """
    name = getattr(given, "__qualname__", type(given).__name__)
    if callable(given):
        return Source(lambda: _converted(given(), name), name)
    kept = list(_converted(given, name))
    if not kept:
        raise DataError(f"offline_data: {name} gives no episodes.")
    return Source(lambda: iter(kept), name, num_rows=_count(kept))


def _converted(parts: Iterable[Any], name: str) -> Iterator[EpisodeRows]:
    for index, part in enumerate(parts):
        place = f"{name}[{index}]"
        if isinstance(part, ArraysInMemory):  # as a config holds dicts of arrays
            part = part.columns
        if isinstance(part, EpisodeRows):
            yield part
        elif isinstance(part, SingleAgentEpisode):
            yield _rows_of_episode(part, place)
        elif isinstance(part, Mapping):
            yield _rows_of_arrays(part, place)
        else:
            raise DataError(
                f"offline_data: {place} is {part!r:.80}: give SingleAgentEpisode objects, or dicts of arrays."
            )


def _rows_of_episode(episode: SingleAgentEpisode, place: str) -> EpisodeRows:
    """Return one episode as rows; episodes hold module actions."""
    obs = episode.get_observations()
    if not len(episode):
        raise DataError(f"offline_data: {place} has no steps.")
    ends = np.arange(len(episode)) == len(episode) - 1
    rows = rows_of_steps(
        map_tree(lambda leaf: leaf[:-1], obs),
        episode.get_actions(),
        episode.get_rewards(),
        ends & episode.is_terminated,
        ends & (not episode.is_terminated),
        next_obs=map_tree(lambda leaf: leaf[1:], obs),
        place=place,
    )
    rows.action_units = "module"
    return rows


def _count(parts: Sequence[EpisodeRows]) -> dict[str, int]:
    return _total({rows.module_id: len(rows)} for rows in parts)
