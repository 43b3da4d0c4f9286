"""Cuts columns with time on axis 0 into sequences for modules with memory; pure functions on arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def find_sequence_starts(valid: NDArray[np.bool_], done: NDArray[np.bool_], max_seq_len: int) -> NDArray[np.bool_]:
    """Return where sequences of consecutive steps begin, bool `[T, N]`; only entries of valid steps have a meaning.

    A sequence begins with the first step of a fragment, of an episode, and after a step that is not valid, and again
    after each `max_seq_len` steps. So no sequence crosses the beginning of an episode.

    Args:
        valid: `[T, N]`; False where no env step was taken.
        done: `[T, N]`; where a step terminated or truncated its episode.
        max_seq_len: Longest sequence, in steps.
    """
    continues = np.zeros_like(valid)  # whether a step continues the episode of the step in the row before it
    continues[1:] = valid[:-1] & ~done[:-1]
    rows = np.arange(len(valid))[:, None]
    begun = np.maximum.accumulate(np.where(continues, 0, rows), axis=0)
    starts: NDArray[np.bool_] = (rows - begun) % max_seq_len == 0
    return starts


def start_bounds(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the first row of each of S sequences or other units, and the number of rows, int64 `[S + 1]`.

    Args:
        starts: Whether a row is the first one of its sequence, bool `[M]`; the rows of a sequence are adjacent.
    """
    return np.append(np.flatnonzero(starts), len(starts))


def rows_of_sequences(bounds: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows `[M]` of sequences that are put into another order.

    Args:
        bounds: Bounds of the sequences; see `start_bounds`.
        order: Indices of the sequences in the new order, `[S]`.
    """
    lengths = np.diff(bounds)[order]
    shifts = bounds[:-1][order] - np.append(0, np.cumsum(lengths)[:-1])
    rows: NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(shifts, lengths)
    return rows
