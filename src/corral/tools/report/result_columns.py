"""Results of a run as columns, which take far less memory than a dict per result."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITERATION = "training_iteration"


class ResultColumns:
    """Columns that grow by a row per result.

    Attributes:
        num_results: Number of rows.
    """

    def __init__(self) -> None:
        """Start without rows."""
        self.num_results = 0
        self._numbers: dict[str, array[float]] = {}
        self._texts: dict[str, list[str | None]] = {}

    def append(self, result: Mapping[str, Any]) -> None:
        """Add a row, and remove earlier rows of the same or a later iteration.

        A run that went back to a checkpoint writes these iterations again.

        Args:
            result: A flat result. Numbers and texts become columns, `None` is NaN, and other values are left out.
        """
        self._remove_from(result.get(ITERATION))
        before = self.num_results
        for key, value in result.items():
            if value is None or isinstance(value, (int, float)):  # a bool is an int
                column = self._numbers.get(key)
                if column is None:
                    column = self._numbers[key] = array("d")
                if len(column) < before:
                    column.extend([math.nan] * (before - len(column)))
                column.append(_finite(value))
            elif isinstance(value, str):
                texts = self._texts.setdefault(key, [])
                texts.extend([None] * (before - len(texts)))
                texts.append(sys.intern(value))
        self.num_results += 1

    def numbers(self) -> dict[str, NDArray[np.float64]]:
        """Return the numbers by key, each `[num_results]`, with NaN where a result has no such number."""
        found = {}
        for key, column in self._numbers.items():
            found[key] = np.full(self.num_results, math.nan)
            found[key][: len(column)] = column
        return found

    def texts(self) -> dict[str, list[str | None]]:
        """Return the texts by key, each `[num_results]`, with `None` where a result has no such text."""
        return {key: [*column, *[None] * (self.num_results - len(column))] for key, column in self._texts.items()}

    def _remove_from(self, iteration: Any) -> None:
        iterations, before = self._numbers.get(ITERATION, array("d")), self.num_results
        if isinstance(iteration, (int, float)) and len(iterations) == self.num_results:
            while self.num_results and iterations[self.num_results - 1] >= iteration:
                self.num_results -= 1
        if self.num_results == before:
            return
        for numbers in self._numbers.values():
            del numbers[self.num_results :]
        for texts in self._texts.values():
            del texts[self.num_results :]


def _finite(value: float | None) -> float:
    try:
        return math.nan if value is None or not math.isfinite(value) else float(value)
    except OverflowError:  # an integer that no float can hold
        return math.nan
