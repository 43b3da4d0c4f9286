"""A logger's memory does not grow with what is logged."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from metric_cases import SETTINGS

from corral.core.metrics.logger import MetricsLogger

NUM_VALUES = 1_000_000
GROWS_WITHOUT_REDUCES = ("percentiles", "item_series")  # they are of all values since the last reduce


def growth(work: Callable[[int], None]) -> int:
    """Return the bytes by which the memory grew at most over what it held after a first piece of the work."""
    tracemalloc.start()
    try:
        work(30_000)  # with its reduces, and what they import
        start, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work(NUM_VALUES)
        return tracemalloc.get_traced_memory()[1] - start
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("reduces", [True, False], ids=["with_reduces", "without"])
def test_a_million_values_take_no_memory(reduces: bool) -> None:
    names = [name for name in SETTINGS if reduces or name not in GROWS_WITHOUT_REDUCES]
    logger = MetricsLogger()

    def work(num_values: int) -> None:
        for i in range(num_values // len(names)):
            for name in names:
                logger.log_value(name, float(i), **SETTINGS[name])
            if reduces and i % 1000 == 999:
                logger.reduce()

    # What waits for its reducer takes up to 8 kB a key; a million floats would take 30 MB.
    assert growth(work) < 15_000 * len(names)


@pytest.mark.slow
def test_a_hundred_thousand_episodes_take_no_memory() -> None:
    worker, aggregated = MetricsLogger(), MetricsLogger()

    def work(num_values: int) -> None:
        for i in range(num_values // 1000):
            episodes = np.arange(100.0) + i
            for reduce in ("mean", "min", "max"):
                worker.log_values(f"episode_return_{reduce}", episodes, reduce=reduce, window=100)
            worker.log_value("num_episodes_lifetime", 100, reduce="lifetime_sum", with_throughput=True)
            worker.log_values("returns", episodes, reduce="percentiles")
            worker.log_values("lengths", episodes, reduce="item_series")
            aggregated.aggregate([worker.take()], key="env_runners")
            aggregated.reduce()

    assert growth(work) < 150_000
