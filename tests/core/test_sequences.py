"""Sequences: where they begin, against a loop over steps, and their rows in another order."""

from __future__ import annotations

import numpy as np
import pytest

from corral.core.sequences import find_sequence_starts, rows_of_sequences, start_bounds


@pytest.mark.parametrize("max_seq_len", [1, 3, 20])
def test_sequences_begin_as_a_loop_over_steps_says(max_seq_len: int) -> None:
    rng = np.random.default_rng(max_seq_len)
    valid, done = rng.random((40, 5)) > 0.1, rng.random((40, 5)) > 0.8
    starts = find_sequence_starts(valid, done, max_seq_len)
    for lane in range(5):
        length, goes_on = 0, False
        for row in range(40):
            if not valid[row, lane]:
                goes_on = False
                continue
            begins = not goes_on or length == max_seq_len
            assert starts[row, lane] == begins
            length, goes_on = 1 if begins else length + 1, not done[row, lane]


def test_the_rows_of_a_sequence_stay_together_in_another_order() -> None:
    bounds = start_bounds(np.array([True, False, False, True, True, False]))
    assert bounds.tolist() == [0, 3, 4, 6]
    assert rows_of_sequences(bounds, np.array([2, 0, 1])).tolist() == [4, 5, 0, 1, 2, 3]
