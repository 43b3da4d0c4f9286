"""Metrics of many workers are the same as of one logger with all their values; a logger continues from its state."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_cases import SETTINGS, Clock, assert_same, at_once

from corral.core.metrics.logger import MetricsError, MetricsLogger

KEY = ("a", "b")
CASES = [
    *((name, "numbers") for name in SETTINGS),
    *((name, "arrays") for name, given in SETTINGS.items() if given.get("reduce") != "percentiles"),
]
Rounds = list[list[list[Any]]]


@st.composite
def rounds_of(draw: st.DrawFn, kind: str) -> Rounds:
    """Rounds of workers of values; some workers have nothing to say in a round."""
    workers = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.lists(st.integers(0, 7), min_size=workers, max_size=workers), min_size=1, max_size=4))
    rng = random.Random(draw(st.integers(0, 1000)))

    def value() -> Any:
        if kind == "arrays":
            return np.array([rng.uniform(-1e3, 1e3), rng.choice([rng.uniform(-1, 1), float("nan")])])
        numbers = [rng.uniform(-1e3, 1e3), rng.uniform(-1, 1), rng.randint(-5, 5), rng.random() < 0.5, float("nan")]
        return rng.choice(numbers)

    return [[[value() for _ in range(size)] for size in row] for row in sizes]


def given_settings(name: str, kind: str) -> dict[str, Any]:
    return {"reduce": "ema"} if (name, kind) == ("default", "arrays") else SETTINGS[name]


@pytest.mark.parametrize("together", [True, False], ids=["one_call", "a_call_each"])
@pytest.mark.parametrize(("name", "kind"), CASES)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_aggregating_workers_gives_what_one_logger_of_all_values_gives(
    name: str, kind: str, together: bool, data: st.DataObject
) -> None:
    rounds = data.draw(rounds_of(kind))
    clock, given = Clock(), given_settings(name, kind)
    workers = [MetricsLogger(Clock()) for _ in rounds[0]]
    aggregated, reference = MetricsLogger(clock), MetricsLogger(clock)
    for values_of_workers in rounds:
        for worker, values in zip(workers, values_of_workers, strict=True):
            worker.log_values(KEY, values, **given)
        parts = [pickle.loads(pickle.dumps(worker.take())) for worker in workers]
        if together:
            aggregated.aggregate(parts, key="env_runners")
            reference.log_values(KEY, at_once(name, values_of_workers), **given)
        else:
            for part, values in zip(parts, values_of_workers, strict=True):
                aggregated.aggregate([part], key="env_runners")
                reference.log_values(KEY, values, **given)
        clock.now += 2.0
        assert_same(aggregated.peek(("env_runners", *KEY)), reference.peek(KEY))
        assert_same(aggregated.reduce()["env_runners"], reference.reduce())


@pytest.mark.parametrize(("name", "kind"), CASES)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_aggregating_in_two_stages_gives_what_one_logger_gives(name: str, kind: str, data: st.DataObject) -> None:
    given = given_settings(name, kind)
    aggregated, between, reference = MetricsLogger(Clock()), MetricsLogger(Clock()), MetricsLogger(Clock())
    for first, *others in data.draw(rounds_of(kind)):
        workers = []
        for values in (first, *others):
            workers.append(MetricsLogger())
            workers[-1].log_values(KEY, values, **given)
        between.aggregate([worker.take() for worker in workers[1:]])
        aggregated.aggregate([workers[0].take(), between.take()])
        reference.log_values(KEY, at_once(name, [first, at_once(name, others)]), **given)
        assert_same(aggregated.reduce(), reference.reduce())


@pytest.mark.parametrize(("name", "kind"), CASES)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_peeking_at_a_worker_does_not_change_what_is_aggregated(name: str, kind: str, data: st.DataObject) -> None:
    given = given_settings(name, kind)
    looked, worker = MetricsLogger(Clock()), MetricsLogger(Clock())
    aggregated = [MetricsLogger(Clock()) for _ in range(2)]
    for pieces in data.draw(rounds_of(kind)):
        for values in pieces:
            for logger in (looked, worker):
                logger.log_values(KEY, values, **given)
            looked.peek()
        for logger, part in zip(aggregated, (looked.take(), worker.take()), strict=True):
            logger.aggregate([part])
        assert_same(aggregated[0].reduce(), aggregated[1].reduce())


@pytest.mark.parametrize(("name", "kind"), CASES)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_a_worker_that_is_taken_shows_what_a_logger_that_is_reduced_shows(
    name: str, kind: str, data: st.DataObject
) -> None:
    """What counts since the last result, such as a `sum`, counts in a runner since it sent its metrics."""
    given = given_settings(name, kind)
    worker, reference = MetricsLogger(Clock()), MetricsLogger(Clock())
    for values, *_ in data.draw(rounds_of(kind)):
        for logger in (worker, reference):
            logger.log_values(KEY, values, **given)
            logger._clock.now += 2.0  # type: ignore[attr-defined]
        assert_same(worker.peek(), reference.peek())
        worker.take()
        reference.reduce()
        assert_same(worker.peek(), reference.peek())


def is_plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(type(key) is str and is_plain(value) for key, value in state.items())
    if isinstance(state, list):
        return all(map(is_plain, state))
    return type(state) in (bool, int, float, str, np.ndarray)


@pytest.mark.parametrize(("name", "kind"), CASES)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_logger_continues_from_its_state(name: str, kind: str, data: st.DataObject) -> None:
    given = given_settings(name, kind)
    before, after = (data.draw(rounds_of(kind)) for _ in range(2))
    original = MetricsLogger(Clock())
    for (values, *_), stage in zip(before, data.draw(st.lists(st.sampled_from(["", "take", "reduce"]))), strict=False):
        original.log_values(KEY, values, **given)
        if stage:
            getattr(original, stage)()
    original._clock.now += 3.0  # type: ignore[attr-defined]
    state = original.get_state()
    assert is_plain(state)
    restored = MetricsLogger(Clock(100.0))  # another process, another clock
    restored.log_value("forgotten", 1.0)
    restored.set_state(pickle.loads(pickle.dumps(state)))
    assert_same(restored.peek(), original.peek(), rel=0)
    for values, *_ in after:
        for logger in (original, restored):
            logger.log_values(KEY, values, **given)
            logger._clock.now += 0.5  # type: ignore[attr-defined]
        assert_same(restored.peek(), original.peek(), rel=0)
    aggregated = [MetricsLogger(Clock()) for _ in range(2)]
    for logger, part in zip(aggregated, (original.take(), restored.take()), strict=True):
        logger.aggregate([part])
    assert_same(aggregated[1].peek(), aggregated[0].peek(), rel=0)
    assert_same(restored.peek_new(), original.peek_new(), rel=0)
    assert_same(restored.reduce(), original.reduce(), rel=0)
    assert_same(restored.reduce(), original.reduce(), rel=0)


def test_a_state_does_not_change_with_the_loggers_that_it_came_from_and_went_to() -> None:
    logger = MetricsLogger()
    logger.log_values("x", [1.0, 2.0], reduce="item_series", window=5)
    logger.log_value("y", np.zeros(2), reduce="sum")
    state = logger.get_state()
    restored = MetricsLogger()
    restored.set_state(state)
    for one in (logger, restored):
        one.log_value("x", 3.0)
        one.log_value("y", np.ones(2))
    again = MetricsLogger()
    again.set_state(state)
    assert_same(again.peek(), {"x": [1.0, 2.0], "y": np.zeros(2)})


def test_a_window_over_workers_holds_the_latest_of_each() -> None:
    workers = [MetricsLogger(), MetricsLogger()]
    for worker, value in zip(workers, (0.0, 1.0), strict=True):
        worker.log_values("return", [value] * 100, window=100)
    aggregated = MetricsLogger()
    aggregated.aggregate([worker.take() for worker in workers])
    assert aggregated.peek("return") == 0.5  # and not 1, the mean of the worker that came last


def test_a_worker_with_ten_times_the_values_has_ten_times_the_room_in_a_window() -> None:
    workers = [MetricsLogger(), MetricsLogger()]
    workers[0].log_values("return", [0.0] * 1000, window=110)
    workers[1].log_values("return", [1.0] * 100, window=110)
    aggregated = MetricsLogger()
    aggregated.aggregate([worker.take() for worker in workers])
    assert aggregated.peek("return") == pytest.approx(1 / 11)


def test_an_item_comes_from_the_last_worker_with_a_new_item() -> None:
    workers, aggregated = [MetricsLogger() for _ in range(3)], MetricsLogger()
    for index in (0, 1):
        workers[index].log_value("name", f"worker {index}", reduce="item")
    aggregated.aggregate([worker.take() for worker in workers])
    assert aggregated.reduce() == {"name": "worker 1"}
    workers[0].log_value("name", "again")
    aggregated.aggregate([worker.take() for worker in workers])
    assert aggregated.reduce() == {"name": "again"}
    aggregated.aggregate([worker.take() for worker in workers])
    assert aggregated.reduce() == {"name": "again"}
    assert workers[1].peek("name") == "worker 1"


def test_a_throughput_is_per_second_of_the_logger_that_reduces() -> None:
    clocks = [Clock(7.0), Clock(70.0)]
    workers, clock = [MetricsLogger(clock) for clock in clocks], Clock(1000.0)
    aggregated = MetricsLogger(clock)
    for total in (40, 80):
        for worker, steps in zip(workers, (30, 10), strict=True):
            worker.log_value("steps", steps, reduce="lifetime_sum", with_throughput=True)
        clock.now += 4.0
        aggregated.aggregate([worker.take() for worker in workers], key="env_runners")
        assert aggregated.peek(("env_runners", "steps_throughput")) == 10.0
        assert aggregated.reduce() == {"env_runners": {"steps": total, "steps_throughput": 10.0}}
    clocks[0].now += 5.0
    workers[0].log_value("steps", 60)
    assert workers[0].peek("steps_throughput") == 12.0  # in the worker, since it was last taken


@pytest.mark.parametrize("together", [True, False])
def test_aggregating_keys_that_are_reduced_otherwise_is_refused_and_names_both_call_sites(together: bool) -> None:
    workers, aggregated = [MetricsLogger(), MetricsLogger()], MetricsLogger()
    workers[0].log_value(("a", "x"), 1.0, reduce="mean", window=50)
    workers[1].log_value(("a", "x"), 1.0, reduce="sum")
    parts = [worker.take() for worker in workers]
    sites = [part["a", "x"].site for part in parts]
    assert all(site.startswith(f"{__file__}:") for site in sites)
    assert len(set(sites)) == 2
    with pytest.raises(MetricsError) as error:
        for group in [parts] if together else [parts[:1], parts[1:]]:
            aggregated.aggregate(group, key="env_runners")
    assert str(error.value) == (
        f"metric 'env_runners/a/x' was logged as mean over a window of 50 at {sites[0]}, and now as sum at {sites[1]}: "
        "give a key the same settings in all places."
    )


def test_aggregating_arrays_of_two_shapes_is_refused_and_names_both() -> None:
    workers, aggregated = [MetricsLogger(), MetricsLogger()], MetricsLogger()
    for worker, size in zip(workers, (2, 3), strict=True):
        worker.log_value("x", np.zeros(size), reduce="mean")
    with pytest.raises(MetricsError, match=r"'x'.*\[2\].*\[3\]"):
        aggregated.aggregate([worker.take() for worker in workers])


def test_aggregating_a_key_below_a_number_is_refused() -> None:
    worker, aggregated = MetricsLogger(), MetricsLogger()
    worker.log_value("x", 1.0)
    aggregated.log_value("env_runners", 1.0)
    with pytest.raises(MetricsError, match="'env_runners/x'"):
        aggregated.aggregate([worker.take()], key="env_runners")
