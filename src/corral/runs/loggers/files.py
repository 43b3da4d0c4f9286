"""Loggers that write files: one CSV row or one JSON line per result."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np

from corral.core.columns import describe
from corral.core.metrics.result import EARLY_MEANS, flat_result
from corral.core.result_values import classify
from corral.core.run_files import PROGRESS_FILE, RESULTS_FILE
from corral.errors import ConfigError
from corral.runs.loggers.base import Logger

LONGEST_TEXT = 200
"""Number of characters above which a text gets no column in a CSV file."""


class CSVLogger(Logger):
    """Writes `progress.csv`: a column for each number and short text of the result, a row for each iteration.

    A key that first appears later gets a column then: the file is rewritten under another name and moved into place,
    and earlier rows have no value in that column. To change what is written, override `row`.

    Attributes:
        file_name: Name of the file in the run directory.
    """

    def __init__(self, file_name: str = PROGRESS_FILE) -> None:
        """Store the name of the file in the run directory.

        Raises:
            ConfigError: The name is a path.
        """
        self.file_name = _checked_name(file_name)
        self._columns: list[str] = []
        self._file: FileIO | None = None

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        """Create the file."""
        self._path, self._columns = run_dir / self.file_name, []
        self._file = self._path.open("wb", buffering=0)

    def resume(self, run_dir: Path, config: dict[str, Any], training_iteration: int, num_env_steps: int) -> None:
        """Append to the file, without the rows of later iterations; rows that do not say which they are stay."""
        self._path = run_dir / self.file_name
        rows = list(_whole_rows(self._path))
        self._columns = rows[0] if rows else []
        kept = (
            row
            for row in rows[1:]
            if not _is_later(dict(zip(self._columns, row, strict=True)), training_iteration, num_env_steps)
        )
        with replaced(self._path) as file:
            csv.writer(file).writerows([*rows[:1], *kept])
        self._file = self._path.open("ab", buffering=0)

    def log_result(self, result: dict[str, Any]) -> None:
        """Append a row."""
        row = self.row(result)
        new = [key for key in row if key not in self._columns]
        if new:
            self._add_columns(new)
        assert self._file is not None, "log_result before open"
        text = StringIO(newline="")
        csv.DictWriter(text, self._columns).writerow(row)
        append_whole(self._file, text.getvalue())

    def row(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a result that are written, by column.

        Args:
            result: The nested result. Arrays, series and texts of more than 200 characters get no columns.
        """
        row = {}
        for path, value in flat_result(result).items():
            kind, series, data = classify(value)
            short = kind in ("none", "number") or (kind == "text" and len(data) <= LONGEST_TEXT)
            if short and not series:
                row[path] = data
        return row

    def _add_columns(self, new: list[str]) -> None:
        assert self._file is not None, "log_result before open"
        columns = [*self._columns, *new]
        # On a full disk the file stays as it was, and the next result tries again.
        with self._path.open(newline="", encoding="utf-8") as old, replaced(self._path) as out:
            writer = csv.DictWriter(out, columns)
            writer.writeheader()
            writer.writerows(csv.DictReader(old))
        self._file.close()
        self._columns = columns
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class JSONLinesLogger(Logger):
    """Writes `result.jsonl`: one line of JSON per result, without the config.

    NaN and infinity, which JSON does not have, become null. Images, videos and values with more than `max_entries`
    entries become a description, such as `uint8[84, 84, 3]`, so that lines stay short. To change what is
    written, override `line`.

    Attributes:
        file_name: Name of the file in the run directory.
    """

    def __init__(self, file_name: str = RESULTS_FILE, max_entries: int = 1000) -> None:
        """Store the name of the file.

        Args:
            file_name: Name of the file in the run directory.
            max_entries: Largest number of entries of arrays and lists that are written as lists.

        Raises:
            ConfigError: The name is a path.
        """
        self.file_name, self._max_entries = _checked_name(file_name), max_entries
        self._file: FileIO | None = None

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        """Create the file."""
        self._file = (run_dir / self.file_name).open("wb", buffering=0)

    def resume(self, run_dir: Path, config: dict[str, Any], training_iteration: int, num_env_steps: int) -> None:
        """Append to the file, without the lines of later iterations; lines that do not say which they are stay."""
        path = run_dir / self.file_name
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)  # the last line may have been cut off
        whole = [line for line in lines if _parsed(line) is not None]
        with replaced(path) as file:
            file.writelines(line for line in whole if not _is_later(_parsed(line), training_iteration, num_env_steps))
        self._file = path.open("ab", buffering=0)

    def log_result(self, result: dict[str, Any]) -> None:
        """Append a line."""
        assert self._file is not None, "log_result before open"
        append_whole(self._file, json.dumps(self.line(result), allow_nan=False) + "\n")

    def line(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the content of the line of a result, in types that JSON has; other values are text.

        Args:
            result: The nested result.
        """
        line = {str(key): self._plain(value) for key, value in result.items() if key != "config"}
        if EARLY_MEANS in result:
            line[EARLY_MEANS] = list(result[EARLY_MEANS])  # whole, since readers leave these numbers out
        return line

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): self._plain(part) for key, part in value.items()}
        kind, series, data = classify(value)
        if series or isinstance(data, (list, tuple)):
            return self._plain_list(data)
        if isinstance(data, np.ndarray):
            is_long = kind in ("image", "video") or data.size > self._max_entries
            return describe(data) if is_long else self._plain_list(data.tolist())
        if kind == "number":
            return data if math.isfinite(data) else None
        return data if kind in ("none", "text") else str(data)

    def _plain_list(self, values: Sequence[Any]) -> Any:
        """Return a list in types that JSON has, or a description if it has too many entries."""
        if len(values) > self._max_entries:
            return f"{type(values[0]).__name__}[{len(values)}]"
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if sum(array.size for array in arrays) > self._max_entries:
            return [describe(value) if isinstance(value, np.ndarray) else self._plain(value) for value in values]
        return [self._plain(value) for value in values]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _checked_name(file_name: str) -> str:
    if not file_name or Path(file_name).name != file_name:
        raise ConfigError(f"file_name={file_name!r} must be the name of a file, which is in the run directory.")
    return file_name


def append_whole(file: FileIO, text: str) -> None:
    """Append text to an unbuffered file: all of it or, on a full disk, none.

    Raises:
        OSError: It cannot be written.
    """
    end = file.seek(0, os.SEEK_END)
    left = memoryview(text.encode())
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with contextlib.suppress(OSError):  # it is no regular file
            file.truncate(end)
        raise


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[TextIOWrapper]:
    """Write a file under another name, and move it into place at the end of the block."""
    rewritten = path.with_name(f"{path.name}.new")
    try:
        with rewritten.open("w", newline="", encoding="utf-8") as file:
            yield file
        os.replace(rewritten, path)
    finally:
        rewritten.unlink(missing_ok=True)


def _whole_rows(path: Path) -> Iterator[list[str]]:
    """Yield the rows of a CSV file, the header first; a row that was cut off or damaged is left out."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines: Iterable[str] = (line for line in file if line.endswith(("\n", "\r")))
        num_columns = None
        for row in csv.reader(lines):
            num_columns = num_columns or len(row)
            if len(row) == num_columns:
                yield row


def _parsed(line: str) -> Any:
    """Return the value of a line of JSON, or `None` for a damaged one, as a power failure leaves it."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_later(row: Any, training_iteration: int, num_env_steps: int) -> bool:
    """Return whether a row is from an iteration after a checkpoint; its env steps tell it if no iteration is named."""
    last = {"training_iteration": training_iteration, "num_env_steps_sampled_lifetime": num_env_steps}
    for name in last if isinstance(row, Mapping) else ():
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a subclass writes what it likes
            return float(row[name]) > last[name]
    return False


def default_loggers() -> list[Logger]:
    """Return the loggers of a run for which the user gives none."""
    return [CSVLogger(), JSONLinesLogger()]
