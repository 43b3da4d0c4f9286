"""Columns by name that user code may change, but not to another shape or dtype."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import Tree, map_tree
from corral.errors import ColumnError


def describe(array: NDArray[Any]) -> str:
    """Return dtype and shape in words, such as `float32 [128, 4]`."""
    return f"{array.dtype} {list(array.shape)}"


def checked(name: str, old: Tree, new: Tree) -> Tree:
    """Return what replaces a column, as arrays.

    Args:
        name: Of the column, for the message.
        old: The column: an array or a tree of arrays.
        new: Of the same nesting, shapes and dtypes.

    Raises:
        ColumnError: The nesting, a shape or a dtype differs; both are named.
    """

    def check(before: NDArray[Any], after: Any) -> NDArray[Any]:
        array: NDArray[Any] = np.asarray(after)
        if array.shape != before.shape or array.dtype != before.dtype:
            raise ColumnError(
                f"column {name!r} is {describe(before)} and cannot become {describe(array)}: keep the length, and "
                f"convert with .astype(np.{before.dtype})."
            )
        return array

    try:
        return map_tree(check, old, new)
    except (KeyError, IndexError, TypeError) as error:
        raise ColumnError(f"column {name!r} is nested, and the new value is nested otherwise: {error!r}.") from error


def checked_new(name: str, column: Any, lengths: tuple[int, ...]) -> NDArray[Any]:
    """Return a column that was not there before, as an array.

    Raises:
        ColumnError: Its first axes are not `lengths`, or it holds no numbers.
    """
    array: NDArray[Any] = np.asarray(column)
    if array.shape[: len(lengths)] != lengths:
        raise ColumnError(
            f"column {name!r} is {describe(array)}, but the columns beside it start with {list(lengths)}: give it one "
            "entry for each of theirs."
        )
    if array.dtype.kind not in "biuf":
        raise ColumnError(f"column {name!r} is {describe(array)}: a column holds numbers or bools.")
    return array


class Columns(UserDict[str, Tree]):
    """A batch as user code sees it: a dict of columns whose first axis has one length.

    A column may be changed in place, replaced by one of the same shape and dtype, or added; none can be taken away.

    Args:
        columns: Arrays or trees of arrays `[B, ...]`.
        length: B.
    """

    def __init__(self, columns: Mapping[str, Tree], length: int) -> None:
        """Take the columns without copying them."""
        super().__init__()
        self.data = dict(columns)
        self.length = length

    def __setitem__(self, name: str, value: Tree) -> None:
        """Replace a column, or add one.

        Raises:
            ColumnError: Its shape or dtype does not fit; both are named.
        """
        if name in self.data:
            self.data[name] = checked(name, self.data[name], value)
        else:
            self.data[name] = checked_new(name, value, (self.length,))

    def __delitem__(self, name: str) -> None:
        raise ColumnError(f"column {name!r} cannot be taken out of the batch: the loss may need it.")
