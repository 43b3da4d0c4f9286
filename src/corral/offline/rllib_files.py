"""Recorded data of RLlib: episodes packed with msgpack, and tables with a row for each step.

The forms are those of `ray.rllib.offline` of Ray 2.60: `output_write_episodes=True` writes a column `item` with one
episode per row, and False writes columns such as `obs`, `new_obs`, `terminateds` and `eps_id`. JSON files of earlier
versions hold a batch of steps in each line. Packed columns are base64 of an LZ4 frame of a pickle; only arrays are
read from them, and no code is run.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgpack
import numpy as np

from corral.checkpoint.places import Place
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.tree import Tree, map_tree
from corral.errors import DataError, MissingPackageError
from corral.offline.episode_rows import EpisodeRows, rows_of_steps
from corral.offline.parquet import as_numpy
from corral.offline.source import ParquetPlace, Source

ITEM = "item"
"""Name of the column of packed episodes."""

PACKED = "BCJN"  # base64 of the first bytes of an LZ4 frame
NAMES = {
    "new_obs": "next_obs",
    "terminateds": "terminated",
    "truncateds": "truncated",
    "dones": "terminated",
    "action_logp": "logp",
}
"""Names of columns here by their names in RLlib."""

_KEPT = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated", "logp")
_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
_CLASSES = ("ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer")


# Parquet.


def rllib_parquet_source(files: Sequence[ParquetPlace], schema: Mapping[str, str] | None = None) -> Source:
    """Return the source of Parquet files that RLlib wrote.

    Args:
        files: The files.
        schema: Names of the columns in the files, by their names in RLlib, where they differ.

    Raises:
        DataError: The files have neither packed episodes nor columns of steps.
    """
    name = ", ".join(dict.fromkeys(file.place.where("") for file in files))

    def parts() -> Iterator[EpisodeRows]:
        for file in files:
            yield from file.use(partial(_parts_of_file, place=file.path, schema=schema or {}))

    return Source(parts, name)


def _parts_of_file(file: Any, place: str, schema: Mapping[str, str]) -> list[EpisodeRows]:
    table = file.read()
    if ITEM in table.column_names:
        return list(_join_chunks(_unpacked_episode(item.as_py(), place) for item in table[ITEM]))
    columns: dict[str, Tree] = {}
    in_file = {schema.get(name, name): NAMES.get(name, name) for name in (*_KEPT, *NAMES, "eps_id", "module_id")}
    for theirs in table.column_names:
        if (ours := in_file.get(theirs)) is not None:
            columns.setdefault(ours, _column(table[theirs], theirs, place))
    return list(_rows_of_columns(columns, place))


def _column(column: Any, name: str, place: str) -> Tree:
    """Return a column of steps; packed entries are unpacked."""
    import pyarrow as pa

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_binary(column.type):
        texts = column.to_pylist()
        if name in ("eps_id", "agent_id", "module_id"):
            return np.array([str(text) for text in texts])
        return _stacked([_unpack(text, f"{place}: column {name!r}") for text in texts])
    if isinstance(column.type, pa.ExtensionType):  # an array of fixed shape, as Ray Data writes it
        return np.stack([np.asarray(entry) for entry in column.combine_chunks().to_numpy_ndarray()])
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.bool_)
    return as_numpy(column, name, place)


def _rows_of_columns(columns: dict[str, Tree], place: str) -> Iterator[EpisodeRows]:
    for name in ("obs", "actions", "rewards"):
        if name not in columns:
            raise DataError(
                f"{place}: there is no column {name!r} and no column {ITEM!r}: Corral reads Parquet files that it or "
                "RLlib wrote."
            )
    starts, ids = None, columns.pop("eps_id", None)
    if ids is not None:  # chunks of several episodes may take turns
        number = np.unique(ids, return_inverse=True)[1].reshape(-1)
        order = np.argsort(number, kind="stable")
        columns = {name: map_tree(lambda leaf: leaf[order], column) for name, column in columns.items()}
        starts = np.concatenate([[True], number[order][1:] != number[order][:-1]])
    size = len(columns["rewards"])
    terminated = columns.get("terminated", np.zeros(size, np.bool_))
    logp = {"logp": columns["logp"]} if "logp" in columns else {}
    modules = columns.get("module_id")
    rows = rows_of_steps(
        columns["obs"],
        columns["actions"],
        columns["rewards"],
        terminated,
        columns.get("truncated"),
        next_obs=columns.get("next_obs"),
        starts=starts,
        added=logp,
        module_id=DEFAULT_MODULE_ID if modules is None or str(modules[0]) == "None" else str(modules[0]),
        place=place,
    )
    rows.action_units = "unit"
    yield rows


# Packed episodes.


def _unpacked_episode(packed: bytes, place: str) -> dict[str, Any]:
    """Return the state of one `SingleAgentEpisode` of RLlib.

    Raises:
        DataError: It is no packed episode.
    """
    try:
        state = msgpack.unpackb(packed, object_hook=_decode_array, strict_map_key=False)
        return {str(name): part for name, part in state.items()}
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise DataError(f"{place}: column {ITEM!r} holds no episodes packed by RLlib: {error!r:.120}") from error


def _decode_array(value: Any) -> Any:
    """Return an array or a number for what `msgpack_numpy` makes of it; see its documentation for the keys."""
    if b"nd" not in value and "nd" not in value:
        return value
    part = {(key.decode() if isinstance(key, bytes) else key): entry for key, entry in value.items()}
    kind = part["type"].decode() if isinstance(part["type"], bytes) else part["type"]
    if part["nd"] is True:
        return np.frombuffer(part["data"], np.dtype(kind)).reshape(part["shape"])
    return np.frombuffer(part["data"], np.dtype(kind))[0]


def _join_chunks(states: Iterable[Mapping[str, Any]]) -> Iterator[EpisodeRows]:
    """Yield the steps of packed episodes; the chunks of an episode, which others may stand between, are joined."""
    by_id: dict[Any, dict[str, list[Any]]] = {}
    for index, state in enumerate(states):
        chunk = _steps_of(state)
        if not chunk["rewards"]:
            continue
        known = by_id.setdefault(state.get("id_", index), {name: [] for name in chunk})
        for name, entries in chunk.items():
            known[name] += entries
    if not by_id:
        return
    episodes = list(by_id.values())
    joined = {name: [entry for episode in episodes for entry in episode[name]] for name in episodes[0]}
    firsts = np.cumsum([0, *(len(episode["rewards"]) for episode in episodes)])[:-1]
    starts = np.zeros(len(joined["rewards"]), np.bool_)
    starts[firsts] = True
    logp = np.array(joined.pop("logp"), np.float32)
    rows = rows_of_steps(
        _stacked(joined.pop("obs")),
        _stacked(joined.pop("actions")),
        next_obs=_stacked(joined.pop("next_obs")),
        rewards=joined["rewards"],
        terminated=joined["terminated"],
        truncated=joined["truncated"],
        starts=starts,
        added={} if np.isnan(logp).all() else {"logp": logp},
    )
    rows.action_units = "unit"
    yield rows


def _steps_of(state: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the steps of one chunk by column."""
    obs, actions, rewards = (_entries(state[name]) for name in ("observations", "actions", "rewards"))
    size = len(rewards)
    logp = _entries((state.get("extra_model_outputs") or {}).get("action_logp", []))
    return {
        "obs": obs[:size],
        "next_obs": obs[1 : size + 1],
        "actions": actions,
        "rewards": rewards,
        "terminated": [False] * (size - 1) + [bool(state.get("is_terminated"))],
        "truncated": [False] * (size - 1) + [bool(state.get("is_truncated"))],
        "logp": logp if len(logp) == size else [np.nan] * size,
    }


def _entries(value: Any) -> list[Any]:
    """Return the entries of an `InfiniteLookbackBuffer`, without those of earlier chunks, or of a list."""
    if isinstance(value, Mapping):
        return list(value["data"])[int(value.get("lookback", 0)) :]
    return list(value)


def _stacked(entries: Sequence[Any]) -> Tree:
    first = entries[0]
    if isinstance(first, Mapping):
        return {key: _stacked([entry[key] for entry in entries]) for key in first}
    if isinstance(first, tuple):
        return tuple(_stacked([entry[index] for entry in entries]) for index in range(len(first)))
    return np.stack([np.asarray(entry) for entry in entries])


# JSON files, and packed columns.


def rllib_json_source(place: Place, names: Sequence[str]) -> Source:
    """Return the source of JSON files that earlier versions of RLlib wrote: a batch of steps in each line."""

    def parts() -> Iterator[EpisodeRows]:
        for name in names:
            with place.open(name) as (opened, _):
                for number, line in enumerate(io.TextIOWrapper(opened, "utf-8")):
                    where = f"{place.where(name)}, line {number + 1}"
                    if line.strip():
                        yield from _rows_of_line(line, where)

    return Source(parts, place.where(""))


def _rows_of_line(line: str, where: str) -> Iterator[EpisodeRows]:
    try:
        batch = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    if not isinstance(batch, dict) or batch.get("type") not in ("SampleBatch", None):
        raise DataError(f"{where}: Corral reads batches of one policy, and this is {batch.get('type')!r:.60}.")
    columns = {}
    for name in (*_KEPT, *NAMES, "eps_id"):
        if name in batch and (ours := NAMES.get(name, name)) not in columns:
            given = batch[name]
            columns[ours] = np.asarray(_unpack(given, f"{where}: {name!r}") if isinstance(given, str) else given)
    yield from _rows_of_columns(columns, where)


def _unpack(text: Any, where: str) -> Any:
    """Return what RLlib packed: base64 of an LZ4 frame of a pickle of arrays.

    Raises:
        DataError: It is something else, or the pickle holds more than arrays.
        MissingPackageError: lz4 is not installed.
    """
    try:
        import lz4.frame
    except ImportError as error:
        raise MissingPackageError(f"{where} is packed with LZ4: run `pip install lz4`.") from error
    try:
        data = lz4.frame.decompress(base64.b64decode(text))
        return _ArrayUnpickler(io.BytesIO(data)).load()
    except (ValueError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"{where} cannot be unpacked: {error!s:.200}") from error


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays, and refuses everything else: a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of NumPy that makes arrays.

        Raises:
            UnpicklingError: It is another one.
        """
        if module in _MODULES and name in _CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, and only arrays are read from recorded data")
