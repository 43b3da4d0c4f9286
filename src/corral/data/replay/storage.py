"""The columns of a replay buffer: rings of rows, in memory or in files that are mapped into memory."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from corral.core.paths import resolve_path
from corral.errors import CheckpointError, ConfigError


class Storage:
    """Makes the arrays of one buffer.

    Args:
        directory: Directory of the files of mapped arrays; `None` keeps arrays in memory.

    Raises:
        ConfigError: The directory does not exist.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Check the directory."""
        self.directory = None if directory is None else resolve_path(directory, "the replay buffer")
        self._left_behind: list[Path] = []  # files that could not be unlinked while they are mapped
        if self.directory is not None and not self.directory.is_dir():
            raise ConfigError(
                f"replay buffer: directory={str(self.directory)!r} is not a directory: make it first, on a disk with "
                "space for the whole buffer."
            )

    def require(self, num_bytes: int) -> None:
        """Check that the disk has space for files.

        Raises:
            ConfigError: The disk has too little space; both sizes are named.
        """
        if self.directory is None:
            return
        free = shutil.disk_usage(self.directory).free
        if num_bytes > free:
            raise ConfigError(
                f"replay buffer: its columns need {num_bytes / 2**20:,.1f} MiB, but the disk of "
                f"directory={str(self.directory)!r} has {free / 2**20:,.1f} MiB left: free space on it, choose another "
                "directory, or lower capacity."
            )

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array of zeros; without a directory, memory is taken only as it is written."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self.directory is None or not num_bytes:
            return np.zeros(shape, dtype)
        self.require(num_bytes)
        descriptor, name = tempfile.mkstemp(prefix="corral-replay-", dir=self.directory)
        try:
            _reserve(descriptor, num_bytes)
            mapped = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
            try:  # now, so that no file is left behind however the process ends
                os.unlink(name)
            except OSError:  # on systems that cannot unlink an open file
                self._left_behind.append(Path(name))
        # A plain array instead of an `np.memmap`, which takes one microsecond more per slice.
        return np.frombuffer(mapped, dtype).reshape(shape)

    def column(self, shape: tuple[int, ...], dtype: DTypeLike, *, on_host: bool = False) -> Column:
        """Return a column of zeros; `on_host` matters on a device only, and keeps it where Python reads it."""
        return Column(self.zeros(shape, dtype))

    def close(self) -> None:
        """Delete files that still exist; the arrays must not exist any more."""
        for path in self._left_behind:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._left_behind.clear()


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Set the length of a file and reserve its blocks if possible: a full disk would kill a process that writes."""
    if hasattr(os, "posix_fallocate"):
        with contextlib.suppress(OSError):
            os.posix_fallocate(descriptor, 0, num_bytes)
    if os.fstat(descriptor).st_size < num_bytes:
        os.ftruncate(descriptor, num_bytes)


class Column:
    """A ring of rows `[R, L, ...]` over L lanes, or `[R]`.

    Attributes:
        grid: Array of all entries, `[R, L, ...]`; on a device, a tensor.
        flat: View of it, `[R * L, ...]`.
        at: Function that returns entries `[...]` by flat indices, which are taken modulo R * L.
        dtype: Dtype of an entry, as NumPy has it.
    """

    __slots__ = ("at", "dtype", "flat", "grid")

    def __init__(self, grid: NDArray[Any]) -> None:
        """Store the array, which must be contiguous."""
        self.grid, self.dtype = grid, grid.dtype
        self.flat = grid.reshape(-1, *grid.shape[2:])
        self.at: Callable[[NDArray[np.int64]], NDArray[Any]] = partial(self.flat.take, axis=0, mode="wrap")

    def first_rows(self, num_rows: int, *, copy: bool = True) -> NDArray[Any]:
        """Return the first rows as an array: a copy, or a view."""
        return np.array(self.grid[:num_rows], copy=copy or None)

    def set_first_rows(self, rows: NDArray[Any]) -> None:
        """Write the first rows."""
        self.grid[: len(rows)] = rows


Where = int | tuple[NDArray[np.bool_], NDArray[np.int64]]
"""Where rows go: to consecutive rows from a position on, or a mask of the entries and their flat indices."""


def put_rows(columns: Iterable[tuple[Column, NDArray[Any]]], where: Where, lanes: slice) -> None:
    """Write rows `[m, len(lanes), ...]`, m at most R, to columns of R rows; positions are taken modulo R."""
    if isinstance(where, tuple):
        mask, flat = where
        for column, rows in columns:
            column.flat[flat] = rows[mask]
        return
    for column, rows in columns:
        grid = column.grid
        first = where % len(grid)
        until_end = len(grid) - first
        if len(rows) <= until_end:
            grid[first : first + len(rows), lanes] = rows
        else:
            grid[first:, lanes] = rows[:until_end]
            grid[: len(rows) - until_end, lanes] = rows[until_end:]


def spans(start: int, stop: int, size: int) -> list[slice]:
    """Return the one or two slices of a ring of `size` rows that hold the rows from `start` to `stop`."""
    length = min(stop - start, size)
    start %= size
    if start + length <= size:
        return [slice(start, start + length)]
    return [slice(start, size), slice(0, start + length - size)]


# States. The columns of a buffer are nested in dicts and lists; in its state arrays are in their places.


def columns_in(nested: Any) -> Iterator[Column]:
    """Yield the columns in nested dicts and lists."""
    if isinstance(nested, Column):
        yield nested
    else:
        for part in nested.values() if isinstance(nested, dict) else nested:
            yield from columns_in(part)


def arrays_of(nested: Any, num_rows: int, *, copy: bool) -> Any:
    """Return nested columns with arrays of their first rows in their places: copies, or views."""
    if isinstance(nested, Column):
        return nested.first_rows(num_rows, copy=copy)
    if isinstance(nested, dict):
        return {name: arrays_of(part, num_rows, copy=copy) for name, part in nested.items()}
    return [arrays_of(part, num_rows, copy=copy) for part in nested]


def with_arrays(nested: Any, state: Any, num_rows: int) -> list[tuple[Column, NDArray[Any]]]:
    """Return each of nested columns with its first rows from a state; nothing is written.

    Raises:
        CheckpointError: An array has another shape.
        KeyError: A column is missing; ValueError if it is one of a list.
    """
    if isinstance(nested, Column):
        return [(nested, array_of(state, nested.dtype, (num_rows, *nested.grid.shape[1:])))]
    if isinstance(nested, dict):
        parts = [(part, state[name]) for name, part in nested.items()]
    else:
        parts = list(zip(nested, state, strict=True))
    return [pair for part, given in parts for pair in with_arrays(part, given, num_rows)]


@dataclass
class Loaded:
    """What a part of a buffer is restored to, after all of its state was checked.

    Attributes:
        part: The part.
        values: Attributes of the part by name.
        pairs: Columns, each with its first rows.
    """

    part: Any
    values: dict[str, Any]
    pairs: list[tuple[Column, NDArray[Any]]]

    def restore(self) -> None:
        """Set the attributes, and write the columns."""
        for name, value in self.values.items():
            setattr(self.part, name, value)
        for column, rows in self.pairs:
            column.set_first_rows(rows)


def array_of(data: Any, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array of a state, which a file format may have turned into nested lists.

    Raises:
        CheckpointError: The array has another shape.
    """
    array = np.asarray(data, dtype)
    if array.size == 0 and 0 in shape:  # nested lists do not keep the axes after an axis of length 0
        return np.zeros(shape, dtype)
    if array.shape != shape:
        raise CheckpointError(
            f"the state of the replay buffer is damaged: a column has shape {list(array.shape)} instead of "
            f"{list(shape)}."
        )
    return array
