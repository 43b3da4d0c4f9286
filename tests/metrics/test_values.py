"""What can be logged: numbers, arrays, images, tensors, strings; bad values and where they were logged; what is new."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from metric_cases import SETTINGS, Clock, assert_same

from at_least import at_least
from corral.core.metrics.entry import FLUSH_AT
from corral.core.metrics.logger import MetricsError, MetricsLogger


def here(offset: int = 0) -> str:
    """Return `file.py:line` of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno + offset}"


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float32(2), np.int64(2), np.uint8(2), np.array(2), torch.tensor(2.0), torch.tensor(2)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", ["default", "mean", "max", "sum", "window", "lifetime_sum"])
def test_numbers_of_every_kind_become_floats(value: Any, name: str) -> None:
    logger = MetricsLogger()
    logger.log_value("x", value, **SETTINGS[name])
    assert_same(logger.peek("x"), 2.0)


def test_bools_and_gradients_are_numbers_too() -> None:
    logger = MetricsLogger()
    for won in (True, False, np.True_, torch.tensor(True)):
        logger.log_value("won", won, reduce="mean")
    logger.log_value("loss", torch.tensor(0.5, requires_grad=True) * 3, reduce="mean")
    logger.log_value("half", torch.tensor(0.5, dtype=torch.bfloat16), reduce="mean")
    assert logger.reduce() == {"won": 0.75, "loss": 1.5, "half": 0.5}


def test_a_number_beyond_the_largest_float_is_infinite() -> None:
    logger = MetricsLogger()
    for value in (1, 10**400, -(10**400)):  # the first call takes another way than the later ones
        logger.log_value("x", value, reduce="item_series", window=3)
        logger.log_value("y", value, reduce="max")
        logger.log_value("z", value, reduce="sum")
    assert logger.peek("y") == math.inf
    assert math.isnan(logger.peek("z"))


NAN_CASES = [name for name in SETTINGS if "item" not in name]


@pytest.mark.parametrize("name", NAN_CASES)
@pytest.mark.parametrize(
    "at", [slice(0, 1), slice(2, 3), slice(5, 6), slice(1, 5)], ids=["first", "mid", "last", "run"]
)
def test_nan_is_skipped_by_all_reductions_of_numbers(name: str, at: slice) -> None:
    logger, without = MetricsLogger(Clock()), MetricsLogger(Clock())
    values = np.arange(1.0, 7.0)
    values[at] = np.nan
    for number in values:
        logger.log_value("x", number, **SETTINGS[name])
    known = values[-3:] if "window" in SETTINGS[name] else values  # in a window a NaN keeps its place
    without.log_values("x", known[~np.isnan(known)], **SETTINGS[name])
    assert_same(logger.reduce(), without.reduce())


@pytest.mark.parametrize("name", [name for name in NAN_CASES if SETTINGS[name].get("reduce") != "percentiles"])
def test_nan_is_skipped_element_by_element(name: str) -> None:
    values = np.random.default_rng(0).normal(size=(7, 4))
    values[np.array([0, 2, 6, 3, 5]), np.array([0, 1, 1, 2, 0])] = np.nan
    values[:, 3] = np.nan
    logger, aggregated = MetricsLogger(Clock()), MetricsLogger(Clock())
    by_element = [MetricsLogger(Clock()) for _ in range(4)]
    settings = {"reduce": "ema"} if name == "default" else SETTINGS[name]
    for part in np.split(values, [3, 5]):
        logger.log_values("x", list(part), **settings)
        worker = MetricsLogger(Clock())
        worker.log_values("x", list(part), **settings)
        aggregated.aggregate([worker.take()])
        for i, one in enumerate(by_element):
            one.log_values("x", part[:, i], **settings)
    wanted = {"x": np.array([one.peek("x") for one in by_element])}
    for one in (logger, aggregated):
        assert_same({"x": one.peek("x")}, wanted)


@pytest.mark.parametrize("name", NAN_CASES)
def test_with_nan_alone_there_is_no_value(name: str) -> None:
    logger, empty = MetricsLogger(Clock()), MetricsLogger(Clock())
    logger.log_values("x", [math.nan] * 2, **SETTINGS[name])
    empty.log_values("x", [], **SETTINGS[name])
    assert_same(logger.reduce(), empty.reduce())


def test_series_and_items_show_nan() -> None:
    logger = MetricsLogger()
    logger.log_values("series", [1.0, math.nan], reduce="item_series")
    logger.log_values("item", [1.0, math.nan], reduce="item")
    assert repr(logger.reduce()) == "{'series': [1.0, nan], 'item': nan}"


@pytest.mark.parametrize("many", [10, 10 * FLUSH_AT + 1])
def test_a_number_at_a_time_gives_what_all_at_once_give(many: int) -> None:
    values = np.random.default_rng(0).normal(size=many)
    for given in SETTINGS.values():
        one, other = MetricsLogger(Clock()), MetricsLogger(Clock())
        for value in values:
            one.log_value("x", value, **given)
        other.log_values("x", values, **given)
        assert_same(one.reduce(), other.reduce())


def test_percentiles_match_numpy() -> None:
    values = np.random.default_rng(0).normal(size=1001)
    logger = MetricsLogger()
    logger.log_values("x", values, reduce="percentiles")
    logger.log_values("latest", values, reduce="percentiles", percentiles=[2.5, 50], window=100)
    result = logger.reduce()
    assert list(result["x"]) == ["p0", "p50", "p75", "p90", "p95", "p99", "p100"]
    assert list(result["x"].values()) == pytest.approx(np.percentile(values, [0, 50, 75, 90, 95, 99, 100]))
    assert list(result["latest"]) == ["p2.5", "p50"]
    assert list(result["latest"].values()) == pytest.approx(np.percentile(values[-100:], [2.5, 50]))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mean", [[2.0, 1.0]]),
        ("min", [[1.0, 0.0]]),
        ("max", [[3.0, 2.0]]),
        ("sum", [[6.0, 3.0], [0.0, 0.0]]),
        ("lifetime_sum", [[6.0, 3.0], [6.0, 3.0]]),
        ("window", [[2.0, 1.0], [2.0, 1.0]]),
        ("window_max", [[3.0, 2.0], [3.0, 2.0]]),
        ("ema", [[1.81, 0.81], [1.81, 0.81]]),
    ],
)
def test_arrays_are_reduced_element_by_element_in_float64(name: str, wanted: list[list[float]]) -> None:
    logger = MetricsLogger()
    for value in (1, 2, 3):
        logger.log_value("x", np.array([value, value - 1], np.uint8), **SETTINGS[name])
    for row in [*wanted, [math.nan, math.nan]][:2]:
        assert_same(logger.reduce(), {"x": np.array(row)})


@pytest.mark.parametrize("shape", [(4, 5, 3), (2, 4, 5, 3)], ids=["image", "video"])
def test_images_and_videos_stay_as_they_are(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    logger, aggregated = MetricsLogger(), MetricsLogger()
    buffer = image.copy()
    logger.log_value("latest", buffer)  # an array's default is item
    logger.log_value("all", buffer, reduce="item_series")
    buffer[:] = 0  # an env may use its buffer again
    logger.log_value("all", torch.arange(3))
    assert_same(logger.peek("latest"), image)
    logger.peek("latest")[:] = 0  # nor is what comes out the logger's own
    logger.peek("all")[0][:] = 0
    aggregated.aggregate([logger.take()])
    assert_same(aggregated.reduce(), {"latest": image, "all": [image, np.arange(3)]})
    assert_same(aggregated.reduce(), {"latest": image, "all": []})


def test_an_array_with_a_window_and_no_reduce_is_a_mean() -> None:
    logger = MetricsLogger()
    logger.log_values("x", np.array([[9.0, 9.0], [0.0, 1.0], [2.0, 3.0]]), window=2)
    assert_same(logger.peek("x"), np.array([1.0, 2.0]))


def test_an_item_takes_strings_and_keeps_the_kind_of_numbers() -> None:
    logger = MetricsLogger()
    for value in ("phase one", 3, True, 0.5, "phase two"):
        logger.log_value("x", value, reduce="item")
        assert_same(logger.reduce()["x"], value)
    assert logger.reduce() == {"x": "phase two"}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "NoneType"),
        ({}, "dict"),
        ([1.0], "list"),
        (object(), "object"),
        (Fraction(1, 2), "Fraction"),
        (1j, "complex"),
        (np.array(["a"]), "ndarray"),
        (np.array([None]), "ndarray"),
        ("text", "str"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("known", [False, True])
def test_other_values_are_refused_at_the_call(value: Any, kind: str, known: bool) -> None:
    logger = MetricsLogger()
    if known:
        logger.log_value(("a", "x"), 1.0)
    before = logger.peek()
    for log in (
        lambda: logger.log_value(("a", "x"), value),
        lambda: logger.log_values(("a", "x"), [1.0, value]),
    ):
        with pytest.raises(MetricsError) as error:
            log()
        assert "'a/x'" in str(error.value) and kind in str(error.value)
    assert logger.peek() == before


def test_arrays_do_not_go_with_percentiles() -> None:
    logger = MetricsLogger()
    with pytest.raises(MetricsError, match=r"'x'.*percentiles.*\[2\].*log_values"):
        logger.log_value("x", np.zeros(2), reduce="percentiles")
    assert logger.peek() == {}


@pytest.mark.parametrize("name", ["mean", "min", "sum", "lifetime_sum", "ema", "window"])
@pytest.mark.parametrize(
    ("values", "shapes"), [((np.zeros(2), np.zeros((2, 3))), ("[2]", "[2, 3]")), ((1.0, np.zeros(2)), ("[]", "[2]"))]
)
def test_two_shapes_under_one_key_are_refused(name: str, values: tuple[Any, Any], shapes: tuple[str, str]) -> None:
    logger = MetricsLogger()
    with pytest.raises(MetricsError):
        logger.log_values("x", values, **SETTINGS[name])
    assert logger.peek() == {}
    for first, second in (values, values[::-1]):
        logger.reset()
        logger.log_value("x", first, **SETTINGS[name])
        with pytest.raises(MetricsError, match="'x'") as error:
            logger.log_value("x", second)
        assert all(shape in str(error.value) for shape in at_least(1, shapes))
        assert_same(logger.peek("x"), first)


@pytest.mark.parametrize("key", [["a", "b"], 3, None, ("a", 3), ("a", ["b"]), ()], ids=repr)
def test_keys_of_another_kind_are_refused(key: Any) -> None:
    logger = MetricsLogger()
    with pytest.raises(MetricsError, match="key"):
        logger.log_value(key, 1.0)
    assert logger.reduce() == {}


def test_a_key_is_the_same_however_its_tuples_are_nested() -> None:
    logger = MetricsLogger()
    for key in (("a", "b", "c"), ("a", ("b", "c")), (("a",), (("b",), "c")), ("a", ("b", "c"))):
        logger.log_value(key, 1, reduce="sum")
    assert logger.peek(("a", ("b", "c"))) == 4
    assert logger.reduce() == {"a": {"b": {"c": 4}}}


def test_peek_of_a_group_gives_its_nested_dict() -> None:
    logger = MetricsLogger(Clock())
    logger.log_values(("a", "b", "c"), [1, 3], reduce="percentiles", percentiles=(0, 100))
    logger.log_value(("a", "d"), 2, reduce="sum", with_throughput=True)
    logger._clock.now += 4  # type: ignore[attr-defined]
    logger.log_value("e", 3, reduce="sum")
    assert logger.peek("a") == {"b": {"c": {"p0": 1, "p100": 3}}, "d": 2, "d_throughput": 0.5}
    assert logger.peek(("a", "b")) == {"c": {"p0": 1, "p100": 3}}
    assert logger.peek(("a", "b", "c", "p100")) == 3
    assert logger.peek(("a", "d_throughput")) == 0.5
    assert logger.peek() == logger.peek(()) == {"a": logger.peek("a"), "e": 3}
    assert logger.peek(("a", "x"), default=None) is None
    assert logger.peek(("e", "x"), default=None) is None


# Throughputs, and what is new.


def test_a_throughput_exists_from_the_start_and_restarts_with_each_reduce() -> None:
    clock = Clock(100.0)
    logger = MetricsLogger(clock)
    logger.log_value(("a", "steps"), 6, reduce="sum", with_throughput=True)
    logger.log_value("all", np.array([2.0, 4.0]), reduce="lifetime_sum", with_throughput=True)
    assert math.isnan(logger.peek(("a", "steps_throughput")))  # no time has passed
    clock.now += 2.0
    logger.log_value(("a", "steps"), 4)
    total = np.array([2.0, 4.0])
    wanted = {"a": {"steps": 10.0, "steps_throughput": 5.0}, "all": total, "all_throughput": total / 2}
    assert_same(logger.reduce(), wanted)
    clock.now += 1.0
    wanted = {"a": {"steps": 0.0, "steps_throughput": 0.0}, "all": total, "all_throughput": np.zeros(2)}
    assert_same(logger.reduce(), wanted)


def test_the_name_of_a_throughput_is_taken() -> None:
    logger = MetricsLogger()
    logger.log_value("x", 1, reduce="sum", with_throughput=True)
    for key in ("x_throughput", ("x_throughput", "y")):
        with pytest.raises(MetricsError, match="'x_throughput'"):
            logger.log_value(key, 1.0)
    logger.log_value("y_throughput", 1.0)
    with pytest.raises(MetricsError, match="'y_throughput'"):
        logger.log_value("y", 1, reduce="sum", with_throughput=True)
    assert set(logger.reduce()) == {"x", "x_throughput", "y_throughput"}


def test_peek_new_gives_whole_results_of_what_came_after_the_mark() -> None:
    clock = Clock()
    logger, worker = MetricsLogger(clock), MetricsLogger()
    logger.log_value("old", 1.0)
    logger.log_value("seen", 1, reduce="sum", with_throughput=True)
    worker.log_value("x", 1.0, window=2)
    assert set(logger.peek_new()) == {"old", "seen", "seen_throughput"}
    for _ in range(2):
        logger.reduce()
        logger.log_value("old", 1.0)
        logger.log_value("seen", 5)
        clock.now += 4.0
        logger.mark()
        assert logger.peek_new() == {}
        logger.log_value("seen", 3)
        logger.log_values("empty", [], reduce="item_series")
        logger.aggregate([worker.take()], key="env_runners")
        new = logger.peek_new()
        assert (new["seen"], new["seen_throughput"]) == (8, 2.0)
        assert new["env_runners"] == {"x": 1.0}
        assert logger.peek_new() == new
    assert "empty" not in new  # nothing new came for it the second time


def test_reset_forgets_all_keys() -> None:
    clock = Clock()
    logger = MetricsLogger(clock)
    logger.log_value(("x", "y"), 1.0, reduce="sum", with_throughput=True)
    clock.now = 10.0
    logger.reset()
    assert logger.reduce() == {} == logger.take()
    logger.log_value("x", 1.0, reduce="lifetime_sum", with_throughput=True)
    clock.now = 12.0
    assert logger.reduce() == {"x": 1.0, "x_throughput": 0.5}


# Two settings under one key.

LOGS: dict[str, Callable[[MetricsLogger], None]] = {
    "log_value": lambda logger: logger.log_value(("a", "b"), 1.0, reduce="sum"),
    "log_values": lambda logger: logger.log_values(("a", "b"), [1.0], reduce="sum"),
    "log_dict": lambda logger: logger.log_dict({"a": {"b": 1.0}}, reduce="sum"),
}


@pytest.mark.parametrize("method", LOGS)
def test_two_settings_under_one_key_are_refused_with_both_call_sites(method: str) -> None:
    logger = MetricsLogger()
    first = here(1)
    logger.log_value(("a", "b"), 1.0, window=50)
    logger.log_value(("a", "b"), 1.0, reduce="mean", window=50)  # the same in other words
    with pytest.raises(MetricsError) as error:
        LOGS[method](logger)
    line = LOGS[method].__code__.co_firstlineno
    assert str(error.value) == (
        f"metric 'a/b' was logged as mean over a window of 50 at {first}, and now as sum at {__file__}:{line}: "
        "give a key the same settings in all places."
    )
    assert logger.peek(("a", "b")) == 1.0


def test_the_call_site_of_log_time_is_its_with_statement() -> None:
    logger = MetricsLogger()
    with logger.log_time("x"):
        pass
    first = here(-2)
    with pytest.raises(MetricsError) as error:
        logger.log_value("x", 1.0, reduce="sum")
    assert f"ema with coefficient 0.01 at {first}, and now as sum at {here(-1)}: give" in str(error.value)


def test_the_call_site_outlives_a_state() -> None:
    logger, restored = MetricsLogger(), MetricsLogger()
    logger.log_value("x", 1.0, reduce="sum", with_throughput=True)
    first = here(-1)
    restored.set_state(logger.get_state())
    restored.log_value("x", 1.0, reduce="sum", with_throughput=True)
    with pytest.raises(MetricsError, match=r"sum with throughput at .* and now as sum at") as error:
        restored.log_value("x", 1.0, reduce="sum")
    assert first in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"window": 2}, 3.5),  # 3 and 4
        ({"window": 9}, 2.5),  # 1, 2, 3 and 4: the values of a longer window come as they are logged
        ({"reduce": "max", "window": 2}, 4.0),  # another reduction begins without values
        ({"reduce": "lifetime_sum"}, 4.0),
        ({}, 3.0),  # the settings of the checkpoint: 2, 3 and 4
    ],
)
def test_a_restored_key_takes_the_settings_of_the_code_that_continues(given: dict[str, Any], expected: float) -> None:
    """A user may change a window, or a config the smoothing of returns, and continue a run."""
    logger, restored, parent = MetricsLogger(), MetricsLogger(), MetricsLogger()
    for value in (1.0, 2.0, 3.0):
        logger.log_value("x", value, window=4 if given.get("window") == 9 else 3)
    state = logger.get_state()
    restored.set_state(state)
    restored.log_value("x", 4.0, **given)
    assert restored.peek("x") == expected
    with pytest.raises(MetricsError, match="give a key the same settings"):
        restored.log_value("x", 1.0, reduce="percentiles")
    # A worker that logs with new settings: the logger that aggregates its values was restored too.
    worker = MetricsLogger()
    worker.log_value("x", 4.0, **(given or {"window": 3}))
    parent.set_state(state)
    parent.aggregate([worker.take()])
    assert parent.peek("x") == expected


def test_no_two_reductions_read_the_same() -> None:
    from corral.core.metrics.reduction_settings import Settings, make_reduction

    reductions = {make_reduction(("x",), Settings(**given), "ema") for given in SETTINGS.values()}
    assert len({str(reduction) for reduction in reductions}) == len(reductions)


# Two keys with one name in files.

TWO_KEYS = [("a/b", ("a", "b")), (("a", "b/c"), ("a/b", "c")), ("a/b/c", ("a", "b", "c"))]


@pytest.mark.parametrize(("one", "other"), [*TWO_KEYS, *(keys[::-1] for keys in TWO_KEYS)], ids=repr)
def test_two_keys_of_one_column_are_refused_with_both_places(one: Any, other: Any) -> None:
    logger = MetricsLogger()
    logger.log_value(one, 1.0)
    first = here(-1)
    with pytest.raises(MetricsError) as error:
        logger.log_value(other, 2.0)
    assert first in str(error.value) and here(-1) in str(error.value) and "one name in files" in str(error.value)
    logger.log_value(one, 1.0)
    worker = MetricsLogger()
    worker.log_value(other, 2.0)
    with pytest.raises(MetricsError, match="one name in files"):
        logger.aggregate([worker.take()])


def test_the_columns_of_throughputs_and_percentiles_are_taken_too() -> None:
    logger = MetricsLogger()
    logger.log_value(("a", "steps"), 1.0, reduce="sum", with_throughput=True)
    logger.log_value("x", 1.0, reduce="percentiles", percentiles=[50])
    for key in ("a/steps_throughput", "x/p50"):
        with pytest.raises(MetricsError, match="one name in files"):
            logger.log_value(key, 1.0)
    logger.log_value("x/p60", 1.0)


def test_a_name_with_a_slash_is_a_name() -> None:
    logger = MetricsLogger(reserved={"timers"})
    logger.log_value("loss/policy", 1.0)
    logger.log_value("loss", 2.0)
    assert logger.reduce() == {"loss/policy": 1.0, "loss": 2.0}
    with pytest.raises(MetricsError, match="'timers' for something else"):
        logger.log_value("timers/iteration_s", 1.0)
