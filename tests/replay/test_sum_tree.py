"""The sum tree against cumulative sums of all leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.data.replay.sum_tree import SumTree


@given(size=st.sampled_from([1, 5, 32, 33, 1024, 1025, 40_000]), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_finds_what_cumulative_sums_find(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = SumTree(size)
    for step in range(6):
        if step % 2:
            start, stop = sorted(rng.integers(0, size + 1, 2).tolist())
            tree.leaves[start:stop] = rng.random(stop - start) * (rng.random(stop - start) < 0.5)
            tree.update_range(start, stop)
        else:
            indices = rng.integers(0, size, 50)  # some of them twice
            tree.leaves[indices] = rng.random(50)
            tree.update(indices)
        sums = np.cumsum(tree.leaves)
        if not sums[-1]:
            continue
        fractions = rng.random(300)
        found, leaves = tree.find(fractions)
        expected = np.searchsorted(sums, fractions * sums[-1], "right")
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(leaves, tree.leaves[expected])


def test_rounding_errors_do_not_grow() -> None:
    """Large numbers come and go; in a tree that adds differences to its sums they would leave their errors behind."""
    rng, tree = np.random.default_rng(0), SumTree(3000)
    for _ in range(200):
        indices = rng.integers(0, 3000, 64)
        tree.leaves[indices] = rng.choice([1e12, 1e-3], 64)
        tree.update(indices)
    tree.leaves[...] = 0
    tree.leaves[7] = tree.leaves[2900] = 1e-3
    tree.update(np.arange(3000))
    found, leaves = tree.find(np.array([0.1, 0.49, 0.51, 0.9]))
    assert found.tolist() == [7, 7, 2900, 2900] and leaves.tolist() == [1e-3] * 4


@pytest.mark.parametrize("size", [100, 2000, 70_000])
def test_the_ends_are_within(size: int) -> None:
    tree = SumTree(size)
    tree.leaves[0] = tree.leaves[-1] = 1.0
    tree.update(np.array([0, size - 1]))
    found, _ = tree.find(np.array([0.0, 0.5 - 1e-12, 0.5, 1 - 2**-53]))
    assert found.tolist() == [0, 0, size - 1, size - 1]
