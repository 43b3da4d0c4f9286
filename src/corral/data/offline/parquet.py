"""Recorded episodes in Parquet files: one row for each observation, and the spaces in the metadata of each file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

import corral
from corral.core.ids import DEFAULT_AGENT_ID
from corral.core.places import Place
from corral.core.space_descriptions import describe_space, described_space
from corral.core.tree import Tree, named_leaves
from corral.data.offline.episode_rows import EpisodeRows, as_flags
from corral.errors import DataError, MissingPackageError

METADATA_KEY = b"corral"
"""Key of the metadata of a file: a JSON object."""

FORMAT = 1
OWN_COLUMNS = ("episode_id", "t", "agent_id", "module_id", "rewards", "terminated", "truncated", "valid", "infos")
"""Names of the columns besides observations, actions and added columns."""

_PATH_MARK = "/"


@dataclass(frozen=True)
class Description:
    """What the metadata of a file says.

    Attributes:
        spaces: Observation space and action space by module id.
        env: Name of the env.
        algo: Name of the algorithm whose policy acted; empty if it is not known.
    """

    spaces: Mapping[str, tuple[spaces.Space[Any], spaces.Space[Any]]]
    env: str = ""
    algo: str = ""

    def of_module(self, module_id: str) -> Description:
        """Return the description of the episodes of one module."""
        return replace(self, spaces={module_id: self.spaces[module_id]})

    def to_json(self) -> bytes:
        """Return the description as JSON."""
        described = {
            module_id: {"observation_space": describe_space(obs), "action_space": describe_space(action)}
            for module_id, (obs, action) in self.spaces.items()
        }
        whole = {"format": FORMAT, "corral_version": corral.__version__, "env": self.env, "algo": self.algo}
        return json.dumps({**whole, "modules": described}).encode()

    @classmethod
    def from_json(cls, text: bytes, place: str) -> Description:
        """Return the description of a file.

        Raises:
            DataError: It is damaged, or of a later version.
        """
        try:
            whole = json.loads(text)
            if whole["format"] != FORMAT:
                raise DataError(
                    f"{place} has format {whole['format']}, and this version of Corral reads {FORMAT}: use the version "
                    f"that wrote it, {whole.get('corral_version')}."
                )
            found = {
                module_id: (described_space(part["observation_space"]), described_space(part["action_space"]))
                for module_id, part in whole["modules"].items()
            }
            return cls(found, str(whole["env"]), str(whole["algo"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{place}: the metadata is damaged: {error!r:.120}.") from error


def import_pyarrow() -> Any:
    """Return the package `pyarrow` with its module `parquet`.

    Raises:
        MissingPackageError: It is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackageError(
            "recorded data in Parquet files needs pyarrow: pip install 'corral[offline]'."
        ) from error
    return pyarrow


# Writing.


@dataclass(frozen=True)
class RecordedEpisode:
    """One whole episode of one agent.

    Attributes:
        rows: Its rows.
        episode_id: Its id.
        agent_id: Id of the agent.
    """

    rows: EpisodeRows
    episode_id: str
    agent_id: str = DEFAULT_AGENT_ID


def write_episodes(place: Place, name: str, episodes: Sequence[RecordedEpisode], description: Description) -> None:
    """Write episodes of one module to one Parquet file, which is whole as soon as it is there.

    Args:
        place: Directory.
        name: Name of the file.
        episodes: The episodes. A column that some of them lack has no values there.
        description: Spaces of the module.

    Raises:
        DataError: The file cannot be written, such as on a full disk.
    """
    pa = import_pyarrow()
    rows = EpisodeRows.join([episode.rows for episode in episodes])
    number = rows.episode_indices
    columns: dict[str, Any] = {
        "episode_id": _repeated(pa, [episode.episode_id for episode in episodes], number),
        "t": pa.array((np.arange(len(rows)) - rows.starts[number]).astype(np.int32)),
        "agent_id": _repeated(pa, [episode.agent_id for episode in episodes], number),
        "module_id": _repeated(pa, [rows.module_id], np.zeros(len(rows), np.int64)),
    }
    for column_name, tree in (("obs", rows.obs), ("actions", rows.actions)):
        columns |= {
            path: _as_arrow(pa, leaf, *([int(np.prod(leaf.shape[1:]))] if leaf.ndim > 1 else []))
            for path, leaf in named_leaves(tree, column_name)
        }
    columns |= {flag: pa.array(getattr(rows, flag)) for flag in ("rewards", "terminated", "truncated", "valid")}
    columns |= {added: _as_arrow(pa, column, *column.shape[1:]) for added, column in rows.added.items()}
    if any(rows.infos.values()):
        columns["infos"] = pa.array([_info_text(rows.infos.get(row)) for row in range(len(rows))], pa.string())
    table = pa.table(columns).replace_schema_metadata({METADATA_KEY: description.to_json()})
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, compression="zstd")
    try:
        place.replace(name, sink.getvalue())
    except OSError as error:
        raise DataError(f"{place.where(name)} cannot be written: {error.strerror or error}.") from error


def _repeated(pa: Any, names: list[str], number: NDArray[np.int64]) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(number.astype(np.int32)), pa.array(names, pa.string()))


def _as_arrow(pa: Any, column: NDArray[Any], *sizes: int) -> Any:
    """Return a column `[R, ...]`: numbers, or nested lists of these sizes; of flat lists a space says the shape."""
    array = pa.array(column.reshape(-1))
    for size in reversed(sizes):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _info_text(info: dict[str, Any] | None) -> str | None:
    return None if not info else json.dumps(_with_text_keys(info), default=_plain)


def _with_text_keys(value: Any) -> Any:
    """Return nested dicts and lists whose keys are texts: JSON has no others, and envs use tuples and numbers, too."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(part) for key, part in value.items()}
    return [_with_text_keys(part) for part in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Return what JSON holds for a value in an info."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else repr(value)


# Reading.


def read_description(file: Any, place: str) -> Description | None:
    """Return what the metadata of a Parquet file says; `None` if Corral did not write it."""
    metadata = file.schema_arrow.metadata or {}
    return Description.from_json(metadata[METADATA_KEY], place) if METADATA_KEY in metadata else None


def read_rows(file: Any, place: str) -> EpisodeRows:
    """Return the episodes in a file that Corral wrote.

    Args:
        file: A `pyarrow.parquet.ParquetFile`.
        place: Its path or URL, for messages.

    Raises:
        DataError: A column is missing or has holes, or the file holds episodes of several modules.
    """
    table = file.read()
    if missing := [name for name in OWN_COLUMNS[:-1] if name not in table.column_names]:
        raise DataError(
            f"{place}: the columns {missing} are missing: record the data again, or, in a table of your own, leave out "
            "the column 'valid' and the rows in which it is False."
        )
    modules = table["module_id"].unique().to_pylist()
    if not len(table):
        raise DataError(f"{place} holds no episodes: remove the file.")
    if len(modules) != 1:
        raise DataError(f"{place} holds episodes of the modules {modules}: give a file for each module.")
    names = [name for name in table.column_names if name not in OWN_COLUMNS]
    columns = {name: as_numpy(table[name], name, place) for name in names}
    texts = enumerate(table["infos"].to_pylist()) if "infos" in table.column_names else ()
    # Other tools may have written other dtypes.
    terminated, truncated, valid = (
        as_flags(as_numpy(table[name], name, place), name, place) for name in ("terminated", "truncated", "valid")
    )
    rows = EpisodeRows(
        obs=_tree(columns, "obs"),
        actions=_tree(columns, "actions"),
        rewards=as_numpy(table["rewards"], "rewards", place).astype(np.float64),
        terminated=terminated,
        truncated=truncated & ~terminated,  # an env may set both
        valid=valid,
        module_id=modules[0],
        added={name: columns[name] for name in names if name.partition(_PATH_MARK)[0] not in ("obs", "actions")},
        infos={row: json.loads(text) for row, text in texts if text is not None},
        place=place,
    )
    _check_ends(rows, as_numpy(table["t"], "t", place))
    return rows


def _check_ends(rows: EpisodeRows, t: NDArray[Any]) -> None:
    """Refuse episodes that are not whole, from their first step to the row of their final observation.

    A file may have been cut, or a tool for tables may have left out rows, or changed their order.

    Raises:
        DataError: The message names the row.
    """
    ended = rows.terminated | rows.truncated
    follows_end = np.concatenate([[False], ended[:-1]])
    if (wrong := follows_end != ~rows.valid).any() or rows.valid[-1]:
        row = int(wrong.argmax()) if wrong.any() else len(rows) - 1
        raise rows.error(row, "valid", "must be False after the last step of each episode, and only there")
    if (wrong := t != np.arange(len(rows)) - rows.starts[rows.episode_indices]).any():
        row = int(wrong.argmax())
        raise rows.error(row, "t", f"is {t[row]}: the steps of an episode must follow each other, from 0 to its end")


def as_numpy(column: Any, name: str, place: str) -> NDArray[Any]:
    """Return a column of a table as an array `[R]`, or `[R, K]` for lists of one length.

    Raises:
        DataError: An entry is missing, or is something else than a number or a list of numbers.
    """
    import pyarrow as pa

    if column.null_count:
        row = column.is_null().to_numpy().argmax()
        raise DataError(f"{place}: row {row}, column {name!r} has no value.")
    chunk = column.combine_chunks()
    if isinstance(chunk, pa.ChunkedArray):  # of no rows, or of more than one chunk can hold
        chunk = pa.concat_arrays(chunk.chunks) if chunk.num_chunks else pa.array([], column.type)
    kind, lengths = chunk.type, []
    while pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if pa.types.is_fixed_size_list(kind):
            lengths.append(kind.list_size)
        else:
            sizes = np.unique(chunk.value_lengths().to_numpy())
            if len(sizes) > 1:
                raise DataError(f"{place}: column {name!r} has lists of {sizes[0]} and of {sizes[1]} entries.")
            lengths.append(int(sizes[0]) if len(sizes) else 0)
        chunk = chunk.flatten()
        kind = chunk.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(f"{place}: column {name!r} holds {kind}, and neither numbers nor lists of numbers.")
    flat: NDArray[Any] = chunk.to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), *lengths)


def _tree(columns: Mapping[str, NDArray[Any]], name: str) -> Tree:
    """Return the tree of columns such as `obs/camera/0`; entries of a Tuple have numbers."""
    if name in columns:
        return columns[name]
    prefix = f"{name}{_PATH_MARK}"
    keys = dict.fromkeys(
        path.removeprefix(prefix).partition(_PATH_MARK)[0] for path in columns if path.startswith(prefix)
    )
    tree = {key: _tree(columns, f"{prefix}{key}") for key in keys}
    if keys and all(key == str(index) for index, key in enumerate(keys)):
        return tuple(tree.values())
    return tree
