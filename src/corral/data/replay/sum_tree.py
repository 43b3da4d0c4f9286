"""A sum tree in NumPy: it draws in proportion to priorities, without a Python loop over items."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

FAN_OUT = 32
MAX_TOP = 1024  # number of nodes that are searched directly; 1,000,000 leaves are two levels below such a top level


class SumTree:
    """Numbers, the sums of groups of these numbers, the sums of groups of these sums, and so on.

    A parent is always computed again as the sum of its children. Rounding errors do not accumulate, and an index may be
    given twice.

    Attributes:
        leaves: Numbers that are not negative, float64 `[num_leaves]`; a view. After writing to it, call `update` or
            `update_range`.
    """

    def __init__(self, num_leaves: int) -> None:
        """Make a tree of zeros."""
        size = -(-num_leaves // FAN_OUT) * FAN_OUT
        self._levels = [np.zeros(size)]
        while len(self._levels[-1]) > MAX_TOP:
            size = len(self._levels[-1]) // FAN_OUT
            self._levels.append(np.zeros(-(-size // FAN_OUT) * FAN_OUT))
        # From the leaves up: a level as groups of children, and the level of their parents.
        self._below = [
            (children.reshape(-1, FAN_OUT), parents) for children, parents in itertools.pairwise(self._levels)
        ]
        self.leaves = self._levels[0][:num_leaves]
        self._starts = np.zeros(0, np.int64)  # index of the first child of each of M consecutive groups

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tree takes."""
        return sum(level.nbytes for level in self._levels)

    def update(self, indices: NDArray[np.int64]) -> None:
        """Compute the sums above leaves that were written, with indices `[M]`."""
        nodes = indices
        for groups, parents in self._below:
            nodes = nodes // FAN_OUT
            parents[nodes] = groups.take(nodes, 0).sum(1)

    def update_range(self, start: int, stop: int) -> None:
        """Compute the sums above the leaves from `start` to `stop`, which were written."""
        for groups, parents in self._below:
            start, stop = start // FAN_OUT, -(-stop // FAN_OUT)
            parents[start:stop] = groups[start:stop].sum(1)

    def find(self, fractions: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the leaves at which the cumulative sum of all leaves reaches given fractions of the total.

        Args:
            fractions: Fractions in [0, 1), `[M]`.

        Returns:
            Indices of leaves and the leaves, `[M]` each. In rare cases rounding leads to a leaf next to the right one,
            which may be 0.
        """
        if len(self._starts) != len(fractions):
            self._starts = np.arange(0, len(fractions) * FAN_OUT, FAN_OUT)
        top = self._levels[-1]
        sums = top.cumsum()
        rest = fractions * sums[-1]
        nodes = np.minimum(sums.searchsorted(rest, "right"), len(top) - 1)
        found = top.take(nodes)
        rest -= sums.take(nodes) - found
        for groups, _ in reversed(self._below):
            children = groups.take(nodes, 0)
            sums = children.cumsum(1)
            child = (sums > rest[:, None]).argmax(1)
            at = self._starts + child
            found = children.take(at)
            rest -= sums.take(at) - found
            nodes *= FAN_OUT
            nodes += child
        return nodes, found
