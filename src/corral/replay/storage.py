"""The columns of a replay buffer: rings of rows, in memory or in files that are mapped into memory."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from corral.core.paths import resolve_path
from corral.errors import ConfigError


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
    """A ring of rows `[R, L, ...]` over L lanes.

    Attributes:
        grid: Array of all entries, `[R, L, ...]`.
        flat: View of the array, `[R * L, ...]`.
        at: Function that returns entries `[...]` by flat indices, which are taken modulo R * L.
    """

    __slots__ = ("at", "flat", "grid")

    def __init__(self, grid: NDArray[Any]) -> None:
        """Store the array, which must be contiguous."""
        self.grid = grid
        self.flat = grid.reshape(-1, *grid.shape[2:])
        self.at: Callable[[NDArray[np.int64]], NDArray[Any]] = partial(self.flat.take, axis=0, mode="wrap")


def put_rows(columns: Iterable[tuple[Column, NDArray[Any]]], start: int, lanes: slice) -> None:
    """Write rows `[m, len(lanes), ...]`, m at most R, to columns of R rows, from row `start` modulo R on."""
    for column, rows in columns:
        grid = column.grid
        first = start % len(grid)
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
