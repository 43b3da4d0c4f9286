"""Prioritised draws against the formulas of the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from streams import Stream

from corral.data.replay import PrioritizedReplayBuffer
from corral.errors import ConfigError


def filled(num_rows: int = 10, num_envs: int = 4, **settings: Any) -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBuffer(200, **{"seed": 0, "epsilon": 1e-6, **settings})
    buffer.add(Stream(num_envs, end_rate=0.0).next(num_rows))
    return buffer


def all_indices(buffer: PrioritizedReplayBuffer) -> NDArray[np.int64]:
    found = np.unique(buffer.sample(100 * len(buffer))["indices"])
    assert len(found) == len(buffer)
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_draws_and_weights_follow_the_formulas(alpha: float, beta: float) -> None:
    buffer = filled(alpha=alpha)
    indices = all_indices(buffer)
    priorities = np.random.default_rng(1).uniform(0.2, 3.0, len(indices))
    buffer.update_priorities(indices, priorities)
    expected = (priorities + 1e-6) ** alpha / ((priorities + 1e-6) ** alpha).sum()
    batch = buffer.sample(20_000, beta=beta)
    places = np.searchsorted(indices, batch["indices"])
    counts = np.bincount(places, minlength=len(indices))
    # A stratified draw hits each within two of its share.
    assert abs(counts - 20_000 * expected).max() <= 2
    weights = (len(buffer) * expected) ** -beta
    np.testing.assert_allclose(batch["weights"], (weights / weights.max())[places], rtol=1e-5)
    assert batch["weights"].dtype == np.float32


def test_small_batches_are_as_uneven_as_large_ones() -> None:
    buffer = filled()
    indices = all_indices(buffer)
    priorities = np.arange(1.0, len(indices) + 1)
    buffer.update_priorities(indices, priorities)
    drawn = np.concatenate([buffer.sample(5)["indices"] for _ in range(4000)])
    counts = np.bincount(np.searchsorted(indices, drawn), minlength=len(indices))
    expected = 20_000 * priorities**0.6 / (priorities**0.6).sum()
    assert ((counts - expected) ** 2 / expected).sum() < len(indices) + 5 * np.sqrt(2 * len(indices))  # chi-square


def test_weights_are_divided_by_the_largest_of_the_batch() -> None:
    buffer = filled(2, 1, alpha=1.0)
    low, high = all_indices(buffer)
    buffer.update_priorities([low, high], [1.0 - 1e-6, 3.0 - 1e-6])
    batch = buffer.sample(8, beta=1.0)
    assert batch["indices"].tolist() == [low] * 2 + [high] * 6
    np.testing.assert_allclose(batch["weights"], [1.0] * 2 + [1 / 3] * 6, rtol=1e-6)


def test_new_transitions_have_the_largest_priority_so_far() -> None:
    stream = Stream(1, end_rate=0.0)
    buffer = PrioritizedReplayBuffer(100, alpha=1.0, seed=0)
    buffer.add(stream.next(2))
    buffer.update_priorities(all_indices(buffer), [7.0, 0.5])
    buffer.update_priorities(all_indices(buffer)[:1], [0.5])  # the largest has been, and stays
    buffer.add(stream.next(1))
    newest = buffer.sample(8000)["obs"][:, 2] == 3
    assert newest.mean() == pytest.approx(7 / 8, abs=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.1])
def test_bad_priorities_are_refused_and_change_nothing(bad: float) -> None:
    buffer, other = filled(), filled()
    indices = buffer.sample(5)["indices"]
    other.sample(5)
    with pytest.raises(ValueError, match=rf"priority of index {indices[3]} is {bad}"):
        buffer.update_priorities(indices, [9.0, 1.0, 2.0, bad, bad])
    assert buffer.max_priority == 1.0
    np.testing.assert_array_equal(buffer.sample(50)["indices"], other.sample(50)["indices"])


def test_misshapen_priorities_are_refused() -> None:
    buffer = filled()
    with pytest.raises(ValueError, match=r"int64\[2\] and priorities float64\[1\]"):
        buffer.update_priorities(np.arange(2), [1.0])
    with pytest.raises(ValueError, match="one integer index"):
        buffer.update_priorities(np.zeros(1), [1.0])
    buffer.update_priorities(np.zeros(0, np.int64), [])


@pytest.mark.parametrize("rows", [[3], [3, 3, 3], [5, 1, 3]])  # that each runner adds in each round
def test_indices_of_overwritten_transitions_touch_no_other(rows: list[int]) -> None:
    num_runners = len(rows)
    streams = [Stream(2, worker_index=i, end_rate=0.1) for i in range(num_runners)]
    buffer = PrioritizedReplayBuffer(20 * num_runners, num_runners=num_runners, alpha=1.0, seed=0)
    seen: dict[int, bytes] = {}
    for _ in range(12):
        buffer.add([stream.next(num_rows) for stream, num_rows in zip(streams, rows, strict=True)])
        batch = buffer.sample(1000)
        for index, obs in zip(batch["indices"].tolist(), batch["obs"], strict=True):
            assert seen.setdefault(index, obs.tobytes()) == obs.tobytes()  # never used for another transition
    stale = np.array(sorted(set(seen) - set(batch["indices"].tolist())))
    assert len(stale) > 20
    buffer.update_priorities(stale, np.full(len(stale), 1e6))
    assert buffer.max_priority == 1.0
    assert (buffer.sample(1000, beta=1.0)["weights"] == 1).all()
    kept = buffer.sample(1)["indices"]
    buffer.update_priorities(np.concatenate([stale, kept]), np.full(len(stale) + 1, 1e6))
    assert (buffer.sample(100)["indices"] == kept).all()


def test_a_priority_of_zero_is_still_drawn() -> None:
    buffer = filled(2, 1, alpha=1.0, epsilon=0.5)
    low, high = all_indices(buffer)
    buffer.update_priorities([low, high], [0.0, 1.0])
    assert (buffer.sample(4000)["indices"] == low).mean() == pytest.approx(0.25, abs=1e-3)


def test_extreme_priorities_stay_finite() -> None:
    buffer = filled(2, 1, alpha=4.0)
    indices = all_indices(buffer)
    buffer.update_priorities(indices, [0.0, 1e300])
    batch = buffer.sample(10, beta=1.0)
    assert np.isfinite(batch["weights"]).all() and (batch["indices"] == indices[1]).all()


def test_duplicates_take_the_last_priority() -> None:
    buffer = filled(2, 1, alpha=1.0)
    low, high = all_indices(buffer)
    buffer.update_priorities([low, high, low], [100.0, 3.0, 1.0])
    assert (buffer.sample(4000)["indices"] == low).mean() == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"alpha": -0.1}, "alpha=-0.1"), ({"alpha": np.nan}, "alpha=nan"), ({"epsilon": 0.0}, "epsilon=0")],
)
def test_bad_settings_are_refused(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PrioritizedReplayBuffer(10, **settings)
