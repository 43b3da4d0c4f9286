"""Named actors: the same in one process, from processes of their own, and with Ray."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forms import Form, InWorkers

from corral import coordination
from corral.errors import CoordinationError, SerializationError

pytestmark = pytest.mark.slow_on_ray


class Strange(Exception):
    """An exception of the user's that pickle takes apart and cannot put together."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Broken(Exception):
    """An exception of the user's."""


class Counter:
    """Counts, with a gap in which another call would do harm."""

    def __init__(self, count: int = 0) -> None:
        if count < 0:
            raise ValueError(f"count={count} is negative")
        self.count = count
        self.seen: list[Any] = []

    def inc(self, n: int = 1) -> int:
        count = self.count
        time.sleep(0)
        self.count = count + n
        return self.count

    def get(self) -> int:
        return self.count

    def note(self, *values: Any, **named: Any) -> list[Any]:
        self.seen.append((values, named))
        return self.seen

    def wait_for(self, path: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not Path(path).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def broken(self) -> None:
        raise Broken("as it should be")

    def strange(self) -> None:
        raise Strange(1, 2)

    def exit(self) -> None:
        raise SystemExit(3)

    def lock(self) -> Any:
        return threading.Lock()


def increment(name: str, times: int) -> None:
    counter = coordination.get(name)
    for _ in range(times):
        counter.call("inc", 1)


@pytest.mark.slow_cases("process")
def test_no_increment_of_ten_callers_is_lost(name: str, form: Form, in_workers: InWorkers) -> None:
    times = 100 if form == "ray" else 1000  # a call of a Ray actor takes about a millisecond
    counter = coordination.create(name, Counter)
    in_workers(increment, [(name, times)] * 10)
    assert counter.call("get") == 10 * times


def test_calls_of_one_caller_arrive_in_order(name: str, in_workers: InWorkers) -> None:
    coordination.create(name, Counter)

    def note(caller: int) -> None:
        for step in range(50):
            coordination.get(name).call("note", caller, step=step)

    in_workers(note, [(0,), (1,)])
    seen = coordination.get(name).call("note")[:-1]
    for caller in (0, 1):
        assert [named["step"] for values, named in seen if values == (caller,)] == list(range(50))


def test_a_slow_actor_does_not_hold_up_another(name: str, in_workers: InWorkers, tmp_path: Path) -> None:
    slow = coordination.create(name, Counter)
    coordination.create(f"{name}-2", Counter)
    release = tmp_path / "release"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slow.call, "wait_for", str(release), 30)
        in_workers(increment, [(f"{name}-2", 1)])
        assert not waiting.done()
        release.touch()
        assert waiting.result(10)


def test_a_handle_can_be_sent(name: str, in_workers: InWorkers) -> None:
    counter = coordination.create(name, Counter, count=3)
    assert pickle.loads(pickle.dumps(counter)) == counter
    assert in_workers(lambda handle: handle.call("inc", n=4), [(counter,)]) == [7]
    assert counter.call("get") == 7


def test_the_class_is_the_user_s_own_wherever_it_is_made(name: str, form: Form, in_workers: InWorkers) -> None:
    def make() -> int:
        coordination.create(name, Counter, 5)
        return int(coordination.get(name).call("inc"))

    assert in_workers(make, [()]) == [6]
    if form != "ray":  # a Ray actor ends with the worker that made it
        assert coordination.get(name).call("get") == 6


def outcome(name: str, method: str) -> tuple[str, str, str]:
    """Return type, message and notes of what a call raises, as its caller sees them."""
    try:
        coordination.get(name).call(method)
    except Broken as error:
        return "Broken", str(error), "".join(getattr(error, "__notes__", ()))
    except BaseException as error:
        return type(error).__name__, str(error), "".join(getattr(error, "__notes__", ()))
    return "", "", ""


def test_what_a_method_raises_reaches_its_caller(name: str, form: Form, in_workers: InWorkers) -> None:
    coordination.create(name, Counter)
    ((kind, message, notes),) = in_workers(outcome, [(name, "broken")])
    assert (kind, message) == ("Broken", "as it should be")
    if form != "local":
        assert f"actor {name!r}" in notes and "in broken" in notes
    with pytest.raises(Broken, match="as it should be"):
        coordination.get(name).call("broken")
    assert in_workers(outcome, [(name, "get")]) == [("", "", "")]


def test_an_exception_that_cannot_travel_keeps_its_name_and_message(
    name: str, form: Form, in_workers: InWorkers
) -> None:
    coordination.create(name, Counter)
    ((kind, message, notes),) = in_workers(outcome, [(name, "strange")])
    assert "1 and 2" in message
    assert "Strange" in kind + message
    if form != "local":
        assert "in strange" in notes + message


def test_an_unknown_name_is_answered_with_the_nearest(name: str, in_workers: InWorkers) -> None:
    coordination.create(name, Counter)

    def problem(wrong: str) -> str:
        try:
            coordination.get(wrong)
        except CoordinationError as error:
            return str(error)
        return ""

    assert f"no actor is named '{name}x'. Did you mean {name!r}?" in in_workers(problem, [(f"{name}x",)])[0]
    assert name in problem("nothing like it")
    coordination.remove(name)
    with pytest.raises(CoordinationError, match=f"no actor is named {name!r}"):
        coordination.remove(name)
    with pytest.raises(CoordinationError, match=f"no actor is named {name!r}"):
        coordination.ActorHandle(name).call("get")


def test_an_unknown_method_is_answered_with_the_nearest(name: str, in_workers: InWorkers) -> None:
    coordination.create(name, Counter)
    ((kind, message, _),) = in_workers(outcome, [(name, "gett")])
    assert (kind, message) == ("CoordinationError", f"actor {name!r} has no method 'gett'. Did you mean 'get'?")
    with pytest.raises(CoordinationError, match="Did you mean 'get'"):
        coordination.get(name).call("gett")


def test_a_name_is_given_once_until_it_is_removed(name: str, in_workers: InWorkers) -> None:
    def make(count: int) -> str:
        try:
            coordination.create(name, Counter, count)
        except CoordinationError as error:
            return str(error)
        return "made"

    assert make(1) == "made"
    (problem,) = in_workers(make, [(2,)])
    assert f"create({name!r})" in problem and "coordination.remove" in problem and "coordination.get" in problem
    assert make(3) == problem
    assert coordination.get(name).call("get") == 1
    coordination.remove(name)
    assert make(4) == "made"
    assert coordination.get(name).call("get") == 4


def test_one_of_many_makes_the_actor(name: str, form: Form, in_workers: InWorkers) -> None:
    def make() -> bool:
        try:
            coordination.create(name, Counter)
        except CoordinationError:
            return False
        return True

    assert sorted(in_workers(make, [()] * 4)) == [False, False, False, True]


def test_a_constructor_that_raises_leaves_the_name_free(name: str, in_workers: InWorkers) -> None:
    def make(count: int) -> str:
        try:
            coordination.create(name, Counter, count)
        except CoordinationError as error:
            return str(error)
        return "made"

    assert in_workers(make, [(-1,)]) == [f"create({name!r}): the constructor raised ValueError: count=-1 is negative"]
    assert make(-1).endswith("ValueError: count=-1 is negative")
    assert make(2) == "made"


def test_arguments_and_results_are_copies(name: str, form: Form) -> None:
    actor, given = coordination.create(name, Counter), [1]
    actor.call("note", given)
    given.append(2)
    actor.call("note").append("not in the actor's list")
    assert actor.call("note") == [(([1],), {}), ((), {}), ((), {})]


def test_what_cannot_be_copied_is_named(name: str, in_workers: InWorkers) -> None:
    coordination.create(name, Counter)

    def problem() -> str:
        try:
            coordination.get(name).call("note", {"good": 1, "bad": threading.Lock()})
        except SerializationError as error:
            return str(error)
        return ""

    for message in (problem(), *in_workers(problem, [()])):
        assert "['bad']" in message and "lock" in message and name in message


def test_what_cannot_be_returned_is_an_error(name: str, form: Form, in_workers: InWorkers) -> None:
    coordination.create(name, Counter)
    ((kind, message, _),) = in_workers(outcome, [(name, "lock")])
    assert kind == ("TypeError" if form == "ray" else "SerializationError")
    assert "lock" in message
    assert coordination.get(name).call("get") == 0


def test_a_name_is_a_text_and_an_actor_is_made_of_a_class(name: str) -> None:
    with pytest.raises(CoordinationError, match="must be a non-empty str"):
        coordination.create("", Counter)
    with pytest.raises(CoordinationError, match="expected a class, got function"):
        coordination.create(name, lambda: Counter())  # type: ignore[arg-type]


def test_an_actor_may_call_itself_by_name(name: str) -> None:
    class Recursive:
        def down(self, n: int) -> int:
            return 0 if n == 0 else 1 + int(coordination.get(name).call("down", n - 1))

    assert coordination.create(name, Recursive).call("down", 3) == 3


def test_an_actor_lives_without_a_handle(name: str, form: Form) -> None:
    coordination.create(name, Counter, 9)
    gc.collect()
    assert coordination.get(name).call("get") == 9


def test_calls_that_nobody_waits_for_run_in_order(name: str) -> None:
    counter = coordination.create(name, Counter)
    arguments = [1]
    futures = [counter.call_async("inc", number) for number in range(1, 6)]
    assert [future.result(timeout=60) for future in futures] == [1, 3, 6, 10, 15]
    with pytest.raises(Broken, match="as it should be"):
        counter.call_async("broken").result(timeout=60)
    assert arguments == [1] and counter.call("inc", 0) == 15
