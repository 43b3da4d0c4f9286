"""The directory of a checkpoint.

    metadata.json     format and version, algorithm, iteration, settings that no file can name, sizes and CRC-32
    config.yaml       the resolved config, as a run directory has it
    state.msgpack     everything that training continues from, except the weights; see `corral.checkpoint.codec`
    modules/<module_id>.safetensors

A reader ignores files that it does not know, so that the directory may hold more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from corral.checkpoint.codec import decode, encode
from corral.errors import CheckpointError

FORMAT = "corral checkpoint"
FORMAT_VERSION = 1
METADATA, CONFIG, STATE, MODULES = "metadata.json", "config.yaml", "state.msgpack", "modules"
SUFFIX = ".safetensors"
_KNOWN = re.compile(rf"{re.escape(STATE)}|{re.escape(CONFIG)}|{MODULES}/[^/]+{re.escape(SUFFIX)}")

Weights = Mapping[str, Mapping[str, NDArray[Any]]]
"""Arrays by module id and parameter name."""


class Checkpoint(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        path: Directory of the checkpoint.
        metadata: `format_version`, `corral_version`, `algo`, `time`, and the other metadata given to
            `write_checkpoint`.
        config: Settings by group, in plain types; classes and functions are import paths.
        state: State that training continues from.
        weights: Arrays by module id and parameter name.
    """

    path: Path
    metadata: dict[str, Any]
    config: dict[str, Any]
    state: dict[str, Any]
    weights: dict[str, dict[str, NDArray[Any]]]


def write_checkpoint(
    path: str | Path,
    *,
    state: Mapping[str, Any],
    weights: Weights,
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> Path:
    """Write a checkpoint under another name and rename it into place, so that a partial checkpoint never exists.

    Args:
        path: The directory. A checkpoint that already has this path is replaced.
        state: Nested plain data; see `corral.checkpoint.codec.encode`.
        weights: Arrays by module id and parameter name.
        config: Settings by group, in types that YAML holds.
        metadata: Further entries of `metadata.json`, in types that JSON holds.

    Raises:
        CheckpointError: The state holds a type that cannot be saved, or the path holds something else.
        OSError: The files cannot be written, such as on a full disk. A checkpoint that was there is unchanged.
    """
    path = Path(path).absolute()
    _check_free(path)
    files = {
        STATE: encode(dict(state)),
        CONFIG: yaml.safe_dump(dict(config), sort_keys=False).encode(),
        **{f"{MODULES}/{quote(name, safe='')}{SUFFIX}": _tensors(name, arrays) for name, arrays in weights.items()},
    }
    described = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **metadata,
        "files": {name: {"num_bytes": len(data), "crc32": zlib.crc32(data)} for name, data in files.items()},
    }
    files[METADATA] = json.dumps(described, indent=1).encode()
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            _write(temporary / name, data)
        _into_place(temporary, path)
    except OSError as error:
        error.add_note(f"The checkpoint {path} was not written; a checkpoint that was there is unchanged.")
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _tensors(module_id: str, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    try:
        # Copies in C order: safetensors writes the memory as it is.
        packed: bytes = save_tensors({name: array.copy(order="C") for name, array in arrays.items()})
    except (KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the weights of module {module_id!r} cannot be saved: {error!r}.") from error
    return packed


def _write(file: Path, data: bytes) -> None:
    """Write a file and flush it to the disk: after a power failure the renamed directory must not hold empty files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def _check_free(path: Path) -> None:
    """Refuse to replace anything except a checkpoint or an empty directory."""
    if path.is_dir() and ((path / METADATA).is_file() or not any(path.iterdir())):
        return
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} is not a checkpoint, and would be replaced: choose another directory.")


def _into_place(temporary: Path, path: Path) -> None:
    if not path.exists():
        temporary.rename(path)
        return
    old = path.with_name(f".{path.name}.{uuid.uuid4().hex}.old")
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return a checkpoint; no code in it is run, and nothing that it names is imported.

    Raises:
        CheckpointError: There is no checkpoint, it has another format version, or a file is missing or damaged; the
            message names the file.
    """
    path = Path(path).absolute()
    metadata = _read_metadata(path)
    listed = metadata["files"]
    files = {name: _read_file(path, name, listed[name]) for name in listed if _KNOWN.fullmatch(name)}
    for name in (STATE, CONFIG):
        if name not in files:
            raise CheckpointError(f"{path / METADATA} is damaged: it does not list {name}.")
    with _naming(path / STATE):
        state = dict(decode(files[STATE]))
    with _naming(path / CONFIG):
        config = dict(yaml.safe_load(files[CONFIG]))
    weights = {}
    for name, data in files.items():
        if name not in (STATE, CONFIG):
            with _naming(path / name):
                arrays = load_tensors(data)
            weights[unquote(name.removeprefix(f"{MODULES}/").removesuffix(SUFFIX))] = arrays
    return Checkpoint(path, metadata, config, state, weights)


def _read_metadata(path: Path) -> dict[str, Any]:
    file = path / METADATA
    try:
        metadata = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is not a checkpoint: {_missing(path)}.") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}.") from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a file of a checkpoint: it does not say format {FORMAT!r}.")
    version = metadata.get("format_version")
    if version != FORMAT_VERSION:
        writer = metadata.get("corral_version", "unknown")
        raise CheckpointError(
            f"{file} has format version {version!r}, written by Corral {writer}; this Corral reads version "
            f"{FORMAT_VERSION}."
        )
    files = metadata.get("files")
    if not isinstance(files, dict) or not all(isinstance(described, dict) for described in files.values()):
        raise CheckpointError(f"{file} is damaged: it does not list the checkpoint's files.")
    return metadata


def _missing(path: Path) -> str:
    if path.is_dir():
        return f"it has no {METADATA}"
    if path.exists():
        return "it is a file, and a checkpoint is a directory"
    # A process that ended between the two renames of a replacement leaves the checkpoint under its other name.
    old = sorted(path.parent.glob(f".{path.name}.*.old"))
    return f"it does not exist, but {old[-1]} does: rename it" if old else "it does not exist"


def _read_file(path: Path, name: str, described: Mapping[str, Any]) -> bytes:
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path / name} cannot be read: {error.strerror}; the checkpoint is incomplete."
        ) from error
    if len(data) != described.get("num_bytes"):
        raise CheckpointError(
            f"{path / name} has {len(data)} bytes and was written with {described.get('num_bytes')}: it was cut off or "
            "changed."
        )
    if zlib.crc32(data) != described.get("crc32"):
        raise CheckpointError(f"{path / name} was changed after it was written: its CRC-32 differs.")
    return data


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Name the file in errors about its content."""
    try:
        yield
    except (ValueError, TypeError, EOFError, MemoryError, yaml.YAMLError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error
