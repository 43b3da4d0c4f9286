"""A sum tree in NumPy: draws in proportion to priorities, without a Python step per item."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

FAN_OUT = 32
MAX_TOP = 1024  # nodes that are searched directly; 1,000,000 leaves are two levels below such a top


class SumTree:
    """Numbers, and the sums of groups of them, and so on up to a few.

    A parent is always computed anew as the sum of its children, so rounding errors do not grow, and an index that is
    given twice does no harm.

    Attributes:
        leaves: The numbers, float64 `[num_leaves]`, none negative; a view to write to, followed by `update` or
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
        self._starts = np.zeros(0, np.int64)  # of each of M groups of children side by side

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(level.nbytes for level in self._levels)

    def update(self, indices: NDArray[np.int64]) -> None:
        """Compute the parents of leaves that were written, `[M]`."""
        nodes = indices
        for groups, parents in self._below:
            nodes = nodes // FAN_OUT
            parents[nodes] = groups.take(nodes, 0).sum(1)

    def update_range(self, start: int, stop: int) -> None:
        """Compute the parents of leaves that were written, from `start` to `stop`."""
        for groups, parents in self._below:
            start, stop = start // FAN_OUT, -(-stop // FAN_OUT)
            parents[start:stop] = groups[start:stop].sum(1)

    def find(self, fractions: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the leaves on which fractions of their sum fall if all leaves lie end to end.

        Args:
            fractions: From 0 to below 1, `[M]`.

        Returns:
            Indices and leaves, `[M]` each. Rounding may, once in a great while, lead to a leaf beside the right one,
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
