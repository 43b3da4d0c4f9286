"""Run directories as tables: what a run has written so far, whatever state its files are in."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from corral.core.metrics.result import flat_result, without_early_means
from corral.core.paths import resolve_path
from corral.core.run_files import RESULTS_FILE, SET_ASIDE
from corral.errors import RunDirectoryError
from corral.runs.loggers.run import CONFIG_FILE
from corral.tools.report.result_columns import ResultColumns
from corral.tools.report.run_log import RunLog, read_log
from corral.tools.report.searches import dirs_of_best

SEARCH_DEPTH = 3
"""Levels of directories below a given one in which runs are found."""


@dataclass(frozen=True)
class RunFiles:
    """What the directory of a run holds.

    Attributes:
        path: Directory of the run.
        name: Short name, which no other run of a report has.
        config: Content of `config.yaml`, by group; empty if there is none.
        numbers: Numbers of the results by their paths, such as `env_runners/episode_return_mean`: each `[num_results]`,
            with NaN where a result has no such number. Bools are 0 and 1.
        texts: Texts of the results by their paths: each a list `[num_results]`, with `None` where there is none.
        log: What `run.log` says.
        problems: Sentences about files that are missing or damaged.
    """

    path: Path
    name: str
    config: dict[str, Any]
    numbers: dict[str, NDArray[np.float64]]
    texts: dict[str, list[str | None]]
    log: RunLog
    problems: tuple[str, ...]

    @property
    def num_results(self) -> int:
        """Number of results that could be read."""
        lengths = [*map(len, self.numbers.values()), *map(len, self.texts.values())]
        return max(lengths, default=0)

    def last(self, key: str) -> float:
        """Return the last number of a key that is not NaN, or NaN."""
        column = self.numbers.get(key, np.array([]))
        found = column[~np.isnan(column)]
        return float(found[-1]) if found.size else math.nan

    def setting(self, group: str, name: str) -> Any:
        """Return a setting of `config.yaml`, or `None`."""
        found = self.config.get(group)
        return found.get(name) if isinstance(found, Mapping) else None


def read_runs(paths: Sequence[str | Path]) -> list[RunFiles]:
    """Return the runs in the given directories.

    Args:
        paths: Directories of runs, or directories that hold directories of runs, up to three levels below. A run
            that is named twice is read once. Of a search, the runs of its best trials are read.

    Raises:
        RunDirectoryError: A path is no directory, or there is no run in it; or no path is given.
    """
    return RunsReader(paths).read()


class RunsReader:
    """Reads the runs in some directories, and each further time only what their results have grown by.

    Attributes:
        paths: The directories.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """Store the directories; see `read_runs`.

        Raises:
            RunDirectoryError: No path is given.
        """
        if not paths:
            raise RunDirectoryError("no run was given: name at least one directory of a run.")
        self.paths = [resolve_path(path, "a run") for path in paths]
        self._results: dict[Path, _Results] = {}

    def find(self) -> dict[str, Path]:
        """Return the directory of each run by its short name.

        Raises:
            RunDirectoryError: A path is no directory, or there is no run in it.
        """
        found = {run_dir.resolve(): run_dir for path in self.paths for run_dir in find_run_dirs(path)}
        return dict(zip(short_names([*found]), found.values(), strict=True))

    def read(self) -> list[RunFiles]:
        """Return the runs.

        Raises:
            RunDirectoryError: A path is no directory, or there is no run in it.
        """
        found = self.find()
        return [read_run(path, name, self._results.setdefault(path, _Results())) for name, path in found.items()]


def find_run_dirs(path: Path) -> list[Path]:
    """Return the directory of a run, or the directories of all runs inside a directory.

    Raises:
        RunDirectoryError: The path is no directory, or there is no run in it.
    """
    try:
        if not path.is_dir():
            what = "it is a file; name the directory that it is in" if path.exists() else "it does not exist"
            raise RunDirectoryError(f"{path} is not the directory of a run: {what}.")
        found = [*_search(path, SEARCH_DEPTH)]
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}.") from error
    if not found:
        raise RunDirectoryError(
            f"{path} is not the directory of a run: neither it nor a directory in it has {RESULTS_FILE} or "
            f"{CONFIG_FILE}."
        )
    return found


def _search(path: Path, depth: int) -> Iterator[Path]:
    if (path / RESULTS_FILE).is_file() or (path / CONFIG_FILE).is_file():
        yield path
    elif depth:
        for child in dirs_of_best(path) or sorted(path.iterdir()):
            is_open = child.is_dir() and not child.is_symlink() and os.access(child, os.R_OK | os.X_OK)
            if is_open and child.name != SET_ASIDE:
                yield from _search(child, depth - 1)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the paths below the directory that all of them are in."""
    above = os.path.commonpath([path.parent for path in paths])
    return [Path(os.path.relpath(path, above)).as_posix() for path in paths]


def read_run(path: Path, name: str | None = None, results: _Results | None = None) -> RunFiles:
    """Return what a run holds; a file that is missing or damaged becomes a problem of the run, and no error.

    Args:
        path: Directory of the run.
        name: Name of the run in a report; the name of the directory if left out.
        results: What was read of its results before.
    """
    problems: list[str] = []
    config = read_config(path / CONFIG_FILE, problems)
    columns = (results or _Results()).read(path / RESULTS_FILE, problems)
    log = read_log(path / "run.log", problems)
    return RunFiles(path, name or path.name, config, columns.numbers(), columns.texts(), log, tuple(problems))


def read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return the settings of a `config.yaml` by group; a file that cannot be read adds a problem, and is empty."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as error:
        problems.append(_why_unread(path, error))
        return {}
    if not isinstance(config, dict):
        problems.append(f"{path.name} holds no settings.")
        return {}
    return {str(group): settings for group, settings in config.items()}


class _Results:
    """The results of a run in their order, without those that a resumed run has superseded."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self, inode: int | None = None) -> None:
        self._columns, self._num_bytes, self._num_damaged, self._inode = ResultColumns(), 0, 0, inode

    def read(self, path: Path, problems: list[str]) -> ResultColumns:
        """Add what the file holds since the last time, and return all."""
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                # A run that continues rewrites the file; another run may have begun there.
                if stat.st_ino != self._inode or stat.st_size < self._num_bytes:
                    self._begin(stat.st_ino)
                file.seek(self._num_bytes)
                for line in file:
                    is_whole = line.endswith(b"\n")  # the last line may still be in writing
                    self._num_bytes += len(line) if is_whole else 0
                    if (result := _parsed(line)) is not None:
                        self._columns.append(result)
                    elif is_whole and line.strip():
                        self._num_damaged += 1
        except OSError as error:
            problems.append(_why_unread(path, error))
        else:
            if not self._columns.num_results:
                problems.append(f"{path.name} holds no result yet.")
        if self._num_damaged:
            lines = "1 line that is" if self._num_damaged == 1 else f"{self._num_damaged} lines that are"
            problems.append(f"{path.name} has {lines} damaged, and left out.")
        return self._columns


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the flat result in a line without early means, or `None` for a damaged line."""
    try:
        result = json.loads(line.decode(errors="replace"))
        return flat_result(without_early_means(result)) if isinstance(result, dict) else None
    except (ValueError, RecursionError):
        return None


def _why_unread(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"There is no {path.name}."
    return f"{path.name} cannot be read: {getattr(error, 'strerror', None) or 'it is damaged'}."
