"""The files of a checkpoint.

    metadata.json         what the checkpoint is, with the name of its data directory, and size and SHA-256 of each file
    data-<hex>/
        config.json       the resolved config
        policies.json     by module id, what builds the module and the env actions again
        state.msgpack     everything else that training continues from; see `corral.runs.checkpoint.codec`
        modules/<module_id>.safetensors
        arrays/<name>.npy
    .lock                 held by the process that saves

`metadata.json` is replaced in one step, after everything that it names is on the disk. A reader therefore finds the old
checkpoint or the new one, whole, and files of the user in the directory stay. A reader ignores files that it does not
know, so that a later version may add some.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import mmap
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from corral.core.interrupts import interruptible
from corral.core.places import LocalPlace, Location, Place, place_of
from corral.errors import CheckpointError
from corral.runs.checkpoint.codec import decode, describe_dtype, described_dtype, encode, size_of

FORMAT = "corral checkpoint"
FORMAT_VERSION = 1
METADATA, CONFIG, POLICIES, STATE = "metadata.json", "config.json", "policies.json", "state.msgpack"
MODULES, TENSORS = "modules/", ".safetensors"
ARRAYS, NPY = "arrays/", ".npy"
DATA = re.compile(r"data-[0-9a-f]{32}")

CHUNK_BYTES = 2**22
_MAX_JSON_BYTES = 2**26
_MAX_ROUNDS = 100  # how often a reader starts again because a saver replaced the checkpoint

T = TypeVar("T")
Weights = Mapping[str, Mapping[str, NDArray[Any]]]
"""Arrays by module id and parameter name."""


class Checkpoint(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        path: Absolute path of the checkpoint, or its URL.
        metadata: `format_version`, `corral_version`, `algo`, `time`, and the other metadata given to
            `write_checkpoint`.
        config: Settings by group, in plain types; classes and functions are import paths.
        policies: By module id, what was given to `write_checkpoint`.
        state: State that training continues from; empty if it was not read.
        weights: Arrays by module id and parameter name.
        arrays: Large arrays by name, read-only and mapped into memory; empty if they were not read.
    """

    path: Location
    metadata: dict[str, Any]
    config: dict[str, Any]
    policies: dict[str, Any]
    state: dict[str, Any]
    weights: dict[str, dict[str, NDArray[Any]]]
    arrays: dict[str, NDArray[Any]]


# Writing.


def write_checkpoint(
    path: Location,
    *,
    state: Mapping[str, Any],
    weights: Weights,
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
    policies: Mapping[str, Mapping[str, Any]] | None = None,
    arrays: Mapping[str, NDArray[Any]] | None = None,
    is_free: bool = False,
) -> Location:
    """Write a checkpoint, and return its absolute path or URL; a partial checkpoint is never seen.

    Args:
        path: A directory, or a URL for fsspec, such as `"s3://bucket/run"`. A checkpoint that is there is replaced;
            other files in the directory stay.
        state: Nested plain data; see `corral.runs.checkpoint.codec.encode`.
        weights: Arrays by module id and parameter name.
        config: Settings by group, in types that JSON holds.
        metadata: Further entries of `metadata.json`, in types that JSON holds.
        policies: By module id, what builds a policy again, in types that JSON holds.
        arrays: Large arrays by name, without fields and objects. They are written in parts and never copied whole, so
            that they may be memory maps larger than the memory.
        is_free: Whether `check_free` has passed; files that were written since then stay.

    Raises:
        CheckpointError: Something holds a type that cannot be saved, the path holds something else, or another process
            saves to it for too long.
        OSError: The files cannot be written, such as on a full disk. A checkpoint that was there is unchanged.
    """
    place = place_of(path)
    if not is_free:
        check_free(place)
    contents: dict[str, Iterable[Any]] = {
        CONFIG: [_json(config, "the config")],
        POLICIES: [_json(policies or {}, "the description of the policies")],
        STATE: [encode(dict(state))],
        **{f"{MODULES}{quote(name, safe='')}{TENSORS}": [_tensors(name, part)] for name, part in weights.items()},
        **{f"{ARRAYS}{quote(name, safe='')}{NPY}": _npy(name, array) for name, array in (arrays or {}).items()},
    }
    described = {"format": FORMAT, "format_version": FORMAT_VERSION, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    described |= json.loads(_json(metadata, "the metadata"))
    try:
        with place.saving():
            _save(place, contents, described)
    except OSError as error:
        error.add_note(f"The checkpoint {place.location} was not written; a checkpoint that was there is unchanged.")
        raise
    return place.location


def _save(place: Place, contents: Mapping[str, Iterable[Any]], described: dict[str, Any]) -> None:
    """Write the files, then the metadata that names them; remove what the metadata does not name."""
    data = f"data-{uuid.uuid4().hex}"
    # Under the lock all the other ones are left over from savers that were killed. A URL has no lock.
    others = set(filter(DATA.fullmatch, place.names())) if isinstance(place, LocalPlace) else _named_data(place)
    _remove_unnamed(place, others)
    try:
        files = {name: _write(place, f"{data}/{name}", chunks) for name, chunks in contents.items()}
        described = {**described, "data": data, "files": files}
        described["sha256"] = _digest(described)
        place.commit(data, METADATA, json.dumps(described, indent=1).encode())
    finally:
        _remove_unnamed(place, {*others, data})


def _remove_unnamed(place: Place, directories: set[str]) -> None:
    """Remove data directories, except for the one that `metadata.json` names; none of them if it cannot be read."""
    if not place.exists(METADATA):
        place.remove(directories)
    elif named := _named_data(place):
        place.remove(directories - named)


def _named_data(place: Place) -> set[str]:
    """Return the name of the data directory that `metadata.json` names; nothing if it cannot be read."""
    with contextlib.suppress(Exception):
        return {str(json.loads(_read(place, METADATA, _MAX_JSON_BYTES))["data"])}
    return set()


def _json(value: Any, subject: str) -> bytes:
    try:
        return json.dumps(value, indent=1).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{subject} cannot be saved as JSON: {error}.") from error


def _tensors(module_id: str, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    try:
        # In C order: safetensors writes the memory as it is.
        packed: bytes = save_tensors({name: np.asarray(array, order="C") for name, array in arrays.items()})
    except (KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the weights of module {module_id!r} cannot be saved: {error!r}.") from error
    return packed


def _npy(name: str, array: NDArray[Any]) -> Iterator[Any]:
    """Return the parts of an array's `.npy` file."""
    try:
        described = describe_dtype(array.dtype)
    except TypeError:
        described = []
    if not isinstance(described, str):
        raise CheckpointError(
            f"the array {name!r} cannot be saved: its dtype is {array.dtype}, with objects or fields."
        )
    return _npy_parts(described, array)


def _npy_parts(described: str, array: NDArray[Any]) -> Iterator[Any]:
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": described, "fortran_order": False, "shape": array.shape})
    yield header.getvalue()
    rows = np.asarray(array).reshape((1,) if array.ndim == 0 else array.shape)
    num_rows = max(1, CHUNK_BYTES // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), num_rows):
        yield np.ascontiguousarray(rows[start : start + num_rows]).reshape(-1).view(np.uint8)


def _write(place: Place, name: str, chunks: Iterable[Any]) -> dict[str, Any]:
    """Write a file, and return its entry in `metadata.json`."""
    digest, num_bytes = hashlib.sha256(), 0

    def counted() -> Iterator[Any]:
        nonlocal num_bytes
        for chunk in chunks:
            digest.update(chunk)
            num_bytes += len(chunk)
            yield chunk

    place.write(name, counted())
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _digest(metadata: Mapping[str, Any]) -> str:
    entries = {name: value for name, value in metadata.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def check_free(place: Place) -> None:
    """Refuse a directory with files of something else, which the files of a checkpoint would be mixed with.

    What a saver that was killed has left there is no reason, and files that were put next to a checkpoint are none.
    """
    names = place.names()
    others = [name for name in names if not (name.startswith(".") or DATA.fullmatch(name))]
    if METADATA in names:
        with contextlib.suppress(CheckpointError, OSError):
            is_ours = FORMAT.encode() in _read(place, METADATA, _MAX_JSON_BYTES)
            others = [] if is_ours else [METADATA]
    if others:
        raise CheckpointError(
            f"{place.location} is not a checkpoint, and holds other files, such as {others[0]}: choose "
            "another directory."
        )


# Reading.


def read_checkpoint(path: Location, *, with_state: bool = True) -> Checkpoint:
    """Return a checkpoint; no code in it is run, and nothing that it names is imported.

    Args:
        path: Its directory, or its URL.
        with_state: Whether to read `state` and `arrays` too, which a policy in use does not need.

    Raises:
        CheckpointError: There is no checkpoint, it has another format version, or a file is missing or damaged; the
            message names the file.
    """
    place = place_of(path)
    return read_consistently(place, lambda metadata: _read_all(place, metadata, with_state))


def read_consistently(place: Place, read: Callable[[dict[str, Any]], T]) -> T:
    """Return what a function reads from the files that the metadata names; start again if a saver replaced them.

    Args:
        place: Where the checkpoint is stored.
        read: Function of the metadata.

    Raises:
        CheckpointError: There is no checkpoint, or a file that it names cannot be read.
    """
    metadata = read_metadata(place)
    for _ in range(_MAX_ROUNDS):
        try:
            return read(metadata)
        except OSError as error:
            before, metadata = metadata, read_metadata(place)
            if metadata["data"] == before["data"]:
                raise CheckpointError(
                    f"{error.filename} cannot be read: {error.strerror or error}; the checkpoint is incomplete. Take "
                    "another checkpoint."
                ) from error
    raise CheckpointError(f"{place.location} cannot be read: other processes replace it all the time.")


@interruptible
def _read_all(place: Place, metadata: dict[str, Any], with_state: bool) -> Checkpoint:
    state: dict[str, Any] = {}
    weights, arrays = {}, {}
    config, policies = (read_json(place, metadata, name) for name in (CONFIG, POLICIES))
    for name in metadata["files"]:
        file = f"{metadata['data']}/{name}"
        with _naming(place, file):
            if (module_id := _inside(name, MODULES, TENSORS)) is not None:
                weights[module_id] = load_tensors(_read_listed(place, metadata, name))
            elif with_state and (array_name := _inside(name, ARRAYS, NPY)) is not None:
                arrays[array_name] = _map_array(place, metadata, name)
            elif with_state and name == STATE:
                state = dict(decode(_read_listed(place, metadata, name)))
    return Checkpoint(place.location, metadata, config, policies, state, weights, arrays)


def read_json(place: Place, metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the content of `config.json` or `policies.json`.

    Raises:
        CheckpointError: The file is damaged.
        OSError: The file cannot be read.
    """
    with _naming(place, f"{metadata['data']}/{name}"):
        return dict(json.loads(_read_listed(place, metadata, name, _MAX_JSON_BYTES)))


def _inside(name: str, folder: str, suffix: str) -> str | None:
    """Return the unquoted name of a file in a folder; `None` for a file that is elsewhere."""
    inner = name.removeprefix(folder).removesuffix(suffix)
    return unquote(inner) if name == f"{folder}{inner}{suffix}" and re.fullmatch(r"[\w.~%-]*", inner, re.A) else None


def read_metadata(place: Place) -> dict[str, Any]:
    """Return the content of `metadata.json`, with `data` and `files`.

    Raises:
        CheckpointError: There is no checkpoint, it has another format version, or the file is damaged.
    """
    file = place.where(METADATA)
    try:
        with _naming(place, METADATA):
            metadata = json.loads(_read(place, METADATA, _MAX_JSON_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{place.location} is not a checkpoint: {why_none(place)}.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a file of a checkpoint: it does not name the format {FORMAT!r}.")
    version = metadata.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        writer = metadata.get("corral_version", "unknown")
        raise CheckpointError(
            f"{file} has format version {version!r:.80}, written by Corral {writer!r:.80}; this Corral reads version "
            f"{FORMAT_VERSION}: install the Corral that wrote it."
        )
    if metadata.get("sha256") != _digest(metadata):
        raise CheckpointError(f"{file} was changed after it was written: its SHA-256 differs. Take another checkpoint.")
    if problem := _problem_of(metadata):
        raise CheckpointError(f"{file} is damaged: {problem}.")
    return metadata


def _problem_of(metadata: Mapping[str, Any]) -> str | None:
    """Return what is wrong with `data` and `files`."""
    data, files = metadata.get("data"), metadata.get("files")
    if not isinstance(data, str) or not DATA.fullmatch(data):
        return "it names no data directory"
    if not isinstance(files, dict):
        return "it does not list the checkpoint's files"
    for name, entry in files.items():
        if not isinstance(entry, dict) or type(entry.get("num_bytes")) is not int or "sha256" not in entry:
            return f"it does not say size and SHA-256 of {name!r:.80}"
    missing = [name for name in (CONFIG, POLICIES, STATE) if name not in files]
    return f"it does not list {missing[0]}" if missing else None


def why_none(place: Place) -> str:
    """Return why a place is not a checkpoint, as the end of a sentence."""
    if place.names():
        return f"it has no {METADATA}"
    if isinstance(place, LocalPlace) and Path(place.location).is_file():
        of_sb3 = "; corral.from_sb3 reads models of Stable-Baselines3" if str(place.location).endswith(".zip") else ""
        return f"it is a file, and a checkpoint is a directory{of_sb3}"
    return f"it is empty, without {METADATA}" if place.exists() else "it does not exist"


def _read_listed(place: Place, metadata: Mapping[str, Any], name: str, max_bytes: int | None = None) -> bytes:
    """Return the content of a file of the data directory, which must be the content that was written."""
    file, entry = f"{metadata['data']}/{name}", metadata["files"][name]
    data = _read(place, file, _memory_bytes() if max_bytes is None else max_bytes, entry["num_bytes"])
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise _changed(place, file)
    return data


def _read(place: Place, name: str, max_bytes: int, num_bytes: int | None = None) -> bytes:
    """Return the content of a file, after its size was checked."""
    with open_listed(place, name, num_bytes) as (file, size):
        if size > max_bytes:
            raise CheckpointError(
                f"{place.where(name)} has {size} bytes, and at most {max_bytes} are read: take another checkpoint."
            )
        return file.read(size)


@contextlib.contextmanager
def open_listed(place: Place, name: str, num_bytes: int | None) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file for reading, and yield it with its size; refuse another size than was written.

    Raises:
        CheckpointError: It has another size, or is no regular file.
        OSError: It cannot be read; `filename` is set.
    """
    try:
        with place.open(name) as (file, size):
            if num_bytes not in (None, size):
                raise CheckpointError(
                    f"{place.where(name)} has {size} bytes and was written with {num_bytes}: it was cut off or "
                    "changed. Take another checkpoint."
                )
            yield file, size
    except OSError as error:
        error.filename = place.where(name)
        raise


def _changed(place: Place, name: str) -> CheckpointError:
    return CheckpointError(
        f"{place.where(name)} was changed after it was written: its SHA-256 differs. Take another checkpoint."
    )


# What `_npy` writes. NumPy reads a header as Python code, which may be nested until the interpreter ends.
_NPY_HEADER = re.compile(rb"\{'descr': '([^']+)', 'fortran_order': False, 'shape': \((\d*(?:, ?\d+)*),?\), \} *\n")
_NPY_MAGIC = b"\x93NUMPY\x01\x00"


@interruptible
def _map_array(place: Place, metadata: Mapping[str, Any], name: str) -> NDArray[Any]:
    """Return a file's array as a read-only memory map; a remote file is copied to a temporary file first."""
    file, entry = f"{metadata['data']}/{name}", metadata["files"][name]
    with open_listed(place, file, entry["num_bytes"]) as (opened, size), contextlib.ExitStack() as stack:
        copy = None if isinstance(place, LocalPlace) else stack.enter_context(tempfile.TemporaryFile())
        digest = hashlib.sha256()
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
            if copy is not None:
                copy.write(chunk)
        if digest.hexdigest() != entry["sha256"]:
            raise _changed(place, file)
        source = opened if copy is None else copy
        source.flush()
        mapped = mmap.mmap(source.fileno(), size, access=mmap.ACCESS_READ)
    start = 10 + int.from_bytes(mapped[8:10], "little")
    header = _NPY_HEADER.fullmatch(mapped[10:start])
    if mapped[:8] != _NPY_MAGIC or header is None:
        raise ValueError("it has no header of an array")
    dtype = described_dtype(header[1].decode())
    shape = tuple(int(part) for part in header[2].split(b",") if part.strip())
    if size_of(dtype, shape) != size - start:
        raise ValueError(f"an array of shape {shape} and dtype {dtype} has {size - start} bytes")
    return np.ndarray(shape, dtype, buffer=mapped, offset=start)


def _memory_bytes() -> int:
    """Return the size of the machine's memory, where the operating system says it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


@contextlib.contextmanager
def _naming(place: Place, name: str) -> Iterator[None]:
    """Name the file in errors about its content: the libraries that parse it have many kinds of them."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{place.where(name)} is damaged: {type(error).__name__}: {error!s:.200}. Take another checkpoint."
        ) from error
