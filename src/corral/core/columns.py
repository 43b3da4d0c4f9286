"""Checks of columns that user code changes or adds, and the batch of columns `[B, ...]` that user code sees.

The storage of a rollout's columns `[T, L, ...]` is `corral.data.episodes.step_columns.StepColumns`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import Tree, map_tree
from corral.errors import ColumnError


def describe(array: NDArray[Any]) -> str:
    """Return dtype and shape in words, such as `float32[128, 4]`."""
    return f"{array.dtype}{list(array.shape)}"


def check_column(name: str, old: Tree, new: Tree) -> Tree:
    """Return the new value of a column as arrays, if it may replace the old value.

    Args:
        name: Name of the column, for the message.
        old: The column so far: an array or a tree of arrays.
        new: The new value, with the same nesting, shapes and dtypes.

    Raises:
        ColumnError: The nesting, a shape or a dtype differs; both are named.
    """

    def check(before: NDArray[Any], after: Any) -> NDArray[Any]:
        array: NDArray[Any] = np.asarray(after)
        if array.shape != before.shape or array.dtype != before.dtype:
            raise ColumnError(
                f"column {name!r} is {describe(before)} and cannot become {describe(array)}: keep the shape, and "
                f"convert with .astype(np.{before.dtype})."
            )
        return array

    try:
        return map_tree(check, old, new)
    except (KeyError, IndexError, TypeError) as error:
        raise ColumnError(f"column {name!r} is nested, and the new value is nested differently: {error!r}.") from error


def check_new_column(name: str, column: Any, lengths: tuple[int, ...]) -> NDArray[Any]:
    """Return a new column as an array, if it may be added.

    Args:
        name: Name of the column, for the message.
        column: The new column.
        lengths: Lengths of the first axes of the columns that exist.

    Raises:
        ColumnError: Its first axes are not `lengths`, or it does not hold numbers that a tensor can hold.
    """
    array: NDArray[Any] = np.asarray(column)
    if array.shape[: len(lengths)] != lengths:
        raise ColumnError(
            f"column {name!r} is {describe(array)}, but the other columns start with {list(lengths)}: give it one "
            "entry for each of their entries."
        )
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8 or not array.dtype.isnative:
        raise ColumnError(
            f"column {name!r} is {describe(array)}: a column holds bools or numbers of at most 64 bits, in this "
            "machine's byte order."
        )
    return array


def empty_column(dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a column without values: NaN, or 0 where the dtype has no NaN."""
    return np.full(shape, np.nan if dtype.kind == "f" else 0, dtype)


class Columns(MutableMapping[str, Tree]):
    """A batch as user code sees it: a dict of columns whose first axes have the same length.

    A column may be changed in place, replaced by one of the same shape and dtype, or added. No column can be removed.

    Args:
        columns: Arrays or trees of arrays `[B, ...]`.
        length: Batch size B.
    """

    def __init__(self, columns: Mapping[str, Tree], length: int) -> None:
        """Take the columns without copying them."""
        self.columns, self.length = dict(columns), length

    def __getitem__(self, name: str) -> Tree:
        """Return a column."""
        return self.columns[name]

    def __setitem__(self, name: str, value: Tree) -> None:
        """Replace a column, or add one.

        Raises:
            ColumnError: Its shape or dtype does not fit; both are named.
        """
        if name in self.columns:
            self.columns[name] = check_column(name, self.columns[name], value)
        else:
            self.columns[name] = check_new_column(name, value, (self.length,))

    def __delitem__(self, name: str) -> None:
        raise ColumnError(f"column {name!r} cannot be removed from the batch: the loss may need it.")

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.columns)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self.columns)

    def __ior__(self, other: Mapping[str, Tree]) -> Self:
        """Replace and add columns, as `update` does."""
        self.update(other)
        return self

    def copy(self) -> dict[str, Tree]:
        """Return the columns as a plain dict; the arrays are the same."""
        return dict(self.columns)
