"""The infos of steps among the columns of `on_learn_on_batch`.

Batches hold numbers, so rollouts get a column of keys, and the infos wait in this process until the batch is shown.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.errors import ColumnError

COLUMN = "rllib_infos"
"""Column of keys of infos, int64; 0 is an empty info."""

_keys = itertools.count(1)
_waiting: dict[int, Mapping[str, Any]] = {}


class BatchInfos:
    """Keeps the infos of one algorithm's latest batches.

    Args:
        num_batches: Number of batches to keep; asynchronous algorithms learn from older ones, too.
    """

    def __init__(self, num_batches: int) -> None:
        """Keep none yet."""
        self._batches: deque[list[int]] = deque()
        self._num_batches = num_batches

    def add(self, rollouts: Sequence[Any]) -> None:
        """Give the rollouts of a batch their columns of keys, and forget the oldest batch."""
        added: list[int] = []
        for rollout in rollouts:
            keys = np.zeros(rollout.rewards.shape, np.int64)
            for row, lane, info in rollout.step_infos():
                if info:
                    keys[row, lane] = key = next(_keys)
                    _waiting[key] = info
                    added.append(key)
            rollout[COLUMN] = keys
        self._batches.append(added)
        while len(self._batches) > self._num_batches:
            self.drop()

    def drop(self) -> None:
        """Forget the infos of the oldest batch."""
        for key in self._batches.popleft():
            del _waiting[key]

    def clear(self) -> None:
        """Forget all infos."""
        while self._batches:
            self.drop()


def find_infos(keys: NDArray[np.int64]) -> NDArray[Any]:
    """Return the infos of a column of keys, an array of dicts.

    Raises:
        ColumnError: An info was forgotten.
    """
    found = np.empty(len(keys), object)
    for index, key in enumerate(np.asarray(keys).tolist()):
        if key and key not in _waiting:
            raise ColumnError("infos: the batch is so old that its infos are forgotten: note them in a column.")
        found[index] = dict(_waiting[key]) if key else {}
    return found
