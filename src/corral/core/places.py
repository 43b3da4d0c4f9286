"""Where a checkpoint is stored: a directory of this machine, or any URL that fsspec knows.

Both kinds read, write, list and remove files by their names inside the checkpoint, such as `"data-0a1b/state.msgpack"`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from corral.core.paths import resolve_location
from corral.errors import CheckpointError

LOCK = ".lock"
LOCK_TIMEOUT_S = 600.0

Location = Path | str
"""The absolute path of a local directory, or the URL of another one."""


class LocalPlace:
    """A directory of this machine, or of a drive that is mounted there.

    Attributes:
        location: Absolute path of the directory.
    """

    def __init__(self, path: Path) -> None:
        """Store the path; nothing is read."""
        self.location: Location = path.absolute()
        self._path = path.absolute()

    def child(self, name: str) -> LocalPlace:
        """Return a directory inside this one."""
        return LocalPlace(self._path / name)

    def where(self, name: str) -> str:
        """Return the whole path of a file, for messages."""
        return str(self._path / name)

    def exists(self, name: str = "") -> bool:
        """Return whether there is a file or a directory of this name, or the directory itself."""
        return (self._path / name).exists()

    def names(self) -> list[str]:
        """Return the names of files and directories in the directory, sorted; none if it does not exist."""
        return sorted(entry.name for entry in self._path.iterdir()) if self._path.is_dir() else []

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """Open a file for reading, and yield it with its number of bytes.

        Raises:
            CheckpointError: It is no regular file, or a link leads to it.
            OSError: There is none, or it cannot be read.
        """
        file = self._path
        parts = name.split("/")
        for part in parts:
            file /= part
            _check_kind(file, os.lstat(file).st_mode, is_file=part is parts[-1])
        # Another program may have replaced it since: a FIFO does not block, and a link is not followed.
        flags = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
        with open(os.open(file, os.O_RDONLY | flags), "rb") as opened:
            status = os.fstat(opened.fileno())
            _check_kind(file, status.st_mode, is_file=True)
            yield opened, status.st_size

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Create the directory, and let no other process save to it during the block.

        Raises:
            CheckpointError: Another process saves to it for too long.
            OSError: The directory cannot be written.
        """
        is_new = not self._path.exists()
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise CheckpointError(f"{self._path} is no directory: choose another path for the checkpoint.") from None
        if is_new:
            _flush_directory(self._path.parent)
        if (self._path / LOCK).is_symlink():  # it would lead to a file that is then cut off
            raise CheckpointError(f"{self._path / LOCK} is a symbolic link. {_NO_FILE}")
        try:
            with FileLock(self._path / LOCK, timeout=LOCK_TIMEOUT_S).acquire(poll_interval=0.01):
                try:
                    yield
                except BaseException:
                    if is_new and self.names() in ([], [LOCK]):
                        shutil.rmtree(self._path, ignore_errors=True)  # on a full disk there would be more and more
                    raise
        except Timeout:
            raise CheckpointError(
                f"{self._path} cannot be written: another process has been saving to it for {LOCK_TIMEOUT_S:.0f} s."
            ) from None

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        """Write a file and flush it to the disk: after a power failure no file that is named may be empty."""
        file = self._path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as opened:
            for chunk in chunks:
                opened.write(chunk)
            opened.flush()
            os.fsync(opened.fileno())

    def replace(self, name: str, content: Any) -> None:
        """Write a file next to its name, and rename it when it has reached the disk: a file that is there is whole."""
        part = self._path / f"{name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as opened:  # a run that was killed may have left one
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(part, self._path / name)
        except BaseException:
            part.unlink(missing_ok=True)  # on a full disk it would take what room there is
            raise
        _flush_directory(part.parent)

    def commit(self, data: str, name: str, content: bytes) -> None:
        """Replace a file in one step, after all files of the directory `data` have reached the disk."""
        self.write(f"{data}/{name}", [content])
        for folder, _, _ in os.walk(self._path / data):
            _flush_directory(Path(folder))
        os.replace(self._path / data / name, self._path / name)
        _flush_directory(self._path)

    def remove(self, names: Iterable[str]) -> None:
        """Remove directories; what cannot be removed stays."""
        for name in names:
            shutil.rmtree(self._path / name, ignore_errors=True)


class UrlPlace:
    """A directory that fsspec reaches, such as `s3://bucket/run` or `memory://run`.

    It has no lock and no flush: an object store shows a file when it is complete.

    Attributes:
        location: URL of the directory.
    """

    def __init__(self, url: str) -> None:
        """Connect to the file system.

        Raises:
            CheckpointError: fsspec does not know the protocol, or needs another package for it.
        """
        from fsspec.core import url_to_fs

        self.location: Location = url.rstrip("/")
        try:
            self._files, self._root = url_to_fs(self.location)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{url} cannot be opened: {error}.") from error

    def child(self, name: str) -> UrlPlace:
        """Return a directory inside this one."""
        return UrlPlace(f"{self.location}/{name}")

    def where(self, name: str) -> str:
        """Return the whole URL of a file, for messages."""
        return f"{self.location}/{name}"

    def exists(self, name: str = "") -> bool:
        """Return whether there is a file or a directory of this name, or the directory itself."""
        self._files.invalidate_cache()
        return bool(self._files.exists(f"{self._root}/{name}".rstrip("/")))

    def names(self) -> list[str]:
        """Return the names of files and directories in the directory, sorted; none if it does not exist."""
        self._files.invalidate_cache()
        try:
            return sorted(entry.rstrip("/").rpartition("/")[2] for entry in self._files.ls(self._root, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """Open a file for reading, and yield it with its number of bytes.

        Raises:
            CheckpointError: It is no file.
            OSError: There is none, or it cannot be read.
        """
        self._files.invalidate_cache()
        described = self._files.info(f"{self._root}/{name}")
        if described["type"] != "file":
            raise CheckpointError(f"{self.where(name)} is no file. {_NO_FILE}")
        with self._files.open(f"{self._root}/{name}", "rb") as opened:
            yield opened, int(described["size"])

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Do nothing: an object store has neither directories nor locks."""
        yield

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        """Write a file."""
        self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
        with self._files.open(f"{self._root}/{name}", "wb") as opened:
            for chunk in chunks:
                opened.write(chunk)

    def replace(self, name: str, content: Any) -> None:
        """Write a file next to its name, and rename it when it is complete."""
        self.write(f"{name}.part", [content])
        self._files.mv(f"{self._root}/{name}.part", f"{self._root}/{name}")

    def commit(self, data: str, name: str, content: bytes) -> None:
        """Replace a file; an object store does so in one step. `data` is complete before."""
        self._files.pipe_file(f"{self._root}/{name}", content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove directories; what cannot be removed stays."""
        for name in names:
            with contextlib.suppress(Exception):  # each file system has its own errors
                self._files.rm(f"{self._root}/{name}", recursive=True)


Place = LocalPlace | UrlPlace


def place_of(path: Location) -> Place:
    """Return where a path or a URL leads; see `resolve_location`."""
    found = resolve_location(path)
    return UrlPlace(found) if isinstance(found, str) else LocalPlace(found)


_NO_FILE = "A checkpoint holds only regular files, and neither links nor devices: take it from where it was saved."


def _check_kind(file: Path, mode: int, *, is_file: bool) -> None:
    if not (stat.S_ISREG(mode) if is_file else stat.S_ISDIR(mode)):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file" if is_file else "no directory"
        raise CheckpointError(f"{file} is {kind}. {_NO_FILE}")


def _flush_directory(path: Path) -> None:
    """Flush the names in a directory to the disk, where the operating system can."""
    if os.name == "posix":
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
