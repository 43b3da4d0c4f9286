"""Results as files: one CSV row and one JSON line each."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from corral.loggers.base import Logger
from corral.metrics.result import flat_result


class CSVLogger(Logger):
    """`progress.csv`: a column for each number of the result, a row for each iteration.

    A key that first appears later gets a column then: the file is rewritten beside and moved into place, with the
    earlier rows empty there.
    """

    def __init__(self, file_name: str = "progress.csv") -> None:
        """Name the file."""
        self._file_name = file_name
        self._columns: list[str] = []
        self._file: TextIOWrapper | None = None

    def open(self, run_dir: Path) -> None:
        """Start the file."""
        self._path = run_dir / self._file_name
        self._file = self._path.open("w", newline="", encoding="utf-8")

    def log_result(self, result: dict[str, Any]) -> None:
        """Append a row and flush it."""
        row = flat_result(result)
        new = [key for key in row if key not in self._columns]
        if new:
            self._add_columns(new)
        assert self._file is not None, "log_result before open"
        csv.DictWriter(self._file, self._columns).writerow(row)
        self._file.flush()

    def _add_columns(self, new: list[str]) -> None:
        assert self._file is not None, "log_result before open"
        self._file.close()
        self._columns = [*self._columns, *new]
        beside = self._path.with_suffix(".csv.new")
        with (
            self._path.open(newline="", encoding="utf-8") as old,
            beside.open("w", newline="", encoding="utf-8") as out,
        ):
            writer = csv.DictWriter(out, self._columns)
            writer.writeheader()
            writer.writerows(csv.DictReader(old))
        os.replace(beside, self._path)
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class JSONLinesLogger(Logger):
    """`result.jsonl`: each result whole but for the config, a line of JSON each.

    NaN and infinity, which JSON lacks, become null.
    """

    def __init__(self, file_name: str = "result.jsonl") -> None:
        """Name the file."""
        self._file_name = file_name
        self._file: TextIOWrapper | None = None

    def open(self, run_dir: Path) -> None:
        """Start the file."""
        self._file = (run_dir / self._file_name).open("w", encoding="utf-8")

    def log_result(self, result: dict[str, Any]) -> None:
        """Append a line and flush it."""
        assert self._file is not None, "log_result before open"
        line = {key: value for key, value in result.items() if key != "config"}
        self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _plain(value: Any) -> Any:
    """Turn a value into what JSON knows: NumPy numbers and arrays too, and anything else as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def default_loggers() -> list[Logger]:
    """Return the loggers of a run that names none."""
    return [CSVLogger(), JSONLinesLogger()]
