"""The contract of engines, the same for all of them; see engines/base.py."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_workers import (
    DEADLINE_S,
    Counter,
    NotLoadable,
    Unpicklable,
    alarm_rings,
    crash_with_deep_stacks,
    double,
    exit_with_3,
    fork_a_sleeper,
    fork_and_leave,
    is_running,
    kill_yourself,
    pid,
    raise_stubborn,
    sleep,
    start_a_family,
    stop_yourself,
    until,
)

from corral.engines import Engine, Resources, WorkerHandle, make_engine
from corral.errors import ConfigError, SerializationError, WorkerDiedError

WITH_PROCESSES = ["process", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))]
with_processes = pytest.mark.parametrize("engine", WITH_PROCESSES, indirect=True)

pytestmark = pytest.mark.slow_on_ray

Start = Callable[..., WorkerHandle]


@pytest.fixture(params=["local", *WITH_PROCESSES])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "ray":
        request.getfixturevalue("ray_runtime")
    engine = make_engine(request.param)
    yield engine
    engine.stop()


@pytest.fixture
def start(engine: Engine) -> Iterator[Start]:
    """Start workers that share the cores, and end them when the test is over."""
    handles = []

    def start(factory: Callable[[], Any], name: str = "env runner 7", num_cpus: float = 0.5) -> WorkerHandle:
        handles.append(engine.start(factory, name=name, resources=Resources(num_cpus=num_cpus)))
        return handles[-1]

    yield start
    for handle in handles:
        handle.kill()


def result(future: Any) -> Any:
    return future.result(DEADLINE_S)


def raised(future: Any) -> BaseException:
    error: BaseException | None = future.exception(DEADLINE_S)
    assert error is not None
    return error


# Calls.


def test_a_worker_keeps_its_state(start: Start) -> None:
    handle = start(partial(Counter, 5))
    assert handle.alive()
    assert result(handle.call("add")) == 6
    assert result(handle.call("add", amount=10)) == 16
    assert handle.alive()


def test_workers_do_not_share_state(start: Start) -> None:
    first, second = start(Counter), start(partial(Counter, 100))
    assert [result(first.call("add")), result(second.call("add"))] == [1, 101]


def test_functions_and_closures_are_called_with_the_worker(start: Start) -> None:
    factor = 3

    class Local(Counter):
        def triple(self) -> int:
            return factor * self.count

    handle = start(lambda: Local(2))
    assert result(handle.call("triple")) == 6
    assert result(handle.call(lambda worker, add: worker.count * factor + add, 1)) == 7


def test_calls_run_in_the_order_in_which_they_were_made(start: Start) -> None:
    handle = start(Counter)
    futures = [handle.call("add") for _ in range(100)]
    assert [result(future) for future in futures] == list(range(1, 101))


def test_arguments_arrive_as_they_were_at_the_call(start: Start) -> None:
    handle = start(Counter)
    columns = {"obs": np.ones(1_000_000)}
    handle.call(sleep, 0.3)
    future = handle.call(lambda worker, columns: float(columns["obs"].sum()), columns)
    columns["obs"][:] = 0
    assert result(future) == 1_000_000


def test_a_callback_of_a_future_may_use_the_handle(start: Start) -> None:
    """Not so on Ray's own thread, where ending a worker waits forever."""
    handle, done = start(Counter), threading.Event()
    second: list[Any] = []

    def go_on(_: Any) -> None:
        second.append(handle.call("add"))
        handle.kill()
        done.set()

    handle.call("add").add_done_callback(go_on)
    assert done.wait(DEADLINE_S)
    assert not handle.alive()


@with_processes
def test_start_returns_before_the_factory_has_run(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "go"

    def factory() -> Counter:
        until(path.exists)
        return Counter()

    handle = start(factory)
    future = handle.call("add")
    assert not future.done()
    path.touch()
    assert result(future) == 1


@with_processes
def test_calls_run_on_the_main_thread_where_timers_interrupt(start: Start) -> None:
    handle = start(Counter)
    assert result(handle.call(lambda _: threading.current_thread() is threading.main_thread()))
    assert result(handle.call(alarm_rings))


@with_processes
@pytest.mark.parametrize(
    ("num_cpus", "num_threads"), [pytest.param(0.5, 1, marks=pytest.mark.slow), (1.0, 1), (2.0, 2)]
)
def test_a_worker_has_as_many_threads_as_it_asked_for_cores(
    num_cpus: float, num_threads: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # with which a user would have the last word

    def found(worker: Any) -> int:
        import torch

        return torch.get_num_threads()

    assert result(start(Counter, num_cpus=num_cpus).call(found)) == num_threads


@pytest.mark.parametrize("engine", ["process"], indirect=True)
def test_the_user_has_the_last_word_on_threads(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert result(start(Counter, num_cpus=1.0).call(lambda _: os.environ["OMP_NUM_THREADS"])) == "3"


# Large values.


@pytest.mark.slow_cases("local")
def test_large_arrays_arrive_intact_and_can_be_written_to(start: Start) -> None:
    handle = start(Counter)
    rng = np.random.default_rng(0)
    sent = {
        "obs": rng.integers(0, 100, (8, 1024, 1024), dtype=np.uint8),  # more than a socket takes at once
        "rewards": np.asfortranarray(rng.normal(size=(300, 400))),
        "none": np.zeros((0, 3), np.float32),
    }
    copies = {name: column.copy(order="K") for name, column in sent.items()}
    got = result(handle.call(double, copies))
    for name, column in sent.items():
        np.testing.assert_array_equal(got[name], 2 * column)
        assert got[name].dtype == column.dtype
        got[name] += 1


def test_a_shared_value_goes_to_several_calls_as_it_was(engine: Engine, start: Start) -> None:
    workers = [start(Counter), start(Counter)]
    weights = {"kernel": np.arange(300_000.0), "step": 3}
    shared = engine.put(weights)
    weights["kernel"][:] = -1  # type: ignore[index]
    futures = [
        worker.call(lambda _, factor, given: factor * given["kernel"].sum() + given["step"], 2, shared)
        for worker in [*workers, *workers]
    ]
    assert [result(future) for future in futures] == 4 * [2 * np.arange(300_000.0).sum() + 3]


# Exceptions.


def test_an_exception_keeps_its_type_cause_and_traceback(start: Start) -> None:
    handle = start(Counter)
    error = raised(handle.call("explode"))
    assert type(error) is ValueError
    assert error.args == ("the counter exploded",)
    assert type(error.__cause__) is KeyError
    report = "".join(traceback.format_exception(error))
    assert "in explode" in report and "engine_workers.py" in report
    assert result(handle.call("add")) == 1  # it continues


@with_processes
def test_an_exception_that_cannot_be_pickled_is_described(start: Start) -> None:
    handle = start(Counter)
    error = raised(handle.call(raise_stubborn))
    assert type(error) is RuntimeError
    assert "StubbornError: it failed because it had to" in str(error)
    assert "in raise_stubborn" in "".join(traceback.format_exception(error))
    assert "env runner 7" in "".join(error.__notes__)
    assert result(handle.call("add")) == 1


def test_an_unknown_method_is_an_attribute_error(start: Start) -> None:
    assert isinstance(raised(start(Counter).call("subtract")), AttributeError)


def test_every_call_raises_the_error_of_the_factory(start: Start) -> None:
    def factory() -> Counter:
        raise FileNotFoundError("the env's file is missing")

    calls: list[int] = []
    handle = start(factory)
    early = [handle.call("add"), handle.call(lambda worker: calls.append(1))]
    errors = [raised(future) for future in early]
    assert not handle.alive()
    errors.append(raised(handle.call("add")))
    assert {type(error) for error in errors} == {FileNotFoundError}
    assert "the env's file is missing" in str(errors[-1])
    assert "in factory" in "".join(traceback.format_exception(errors[0]))
    assert calls == []


# What cannot be pickled.


@with_processes
def test_a_factory_that_cannot_be_pickled_is_refused_at_once(start: Start) -> None:
    with pytest.raises(SerializationError, match=r"env runner 7\.guard \(_thread\.lock\)"):
        start(Unpicklable())
    with pytest.raises(SerializationError, match=r"env_config\['tools'\]\[1\]\.guard"):
        start(partial(lambda env_config: Counter(), {"tools": [1, Unpicklable()]}))


@with_processes
def test_an_argument_that_cannot_be_pickled_is_refused_at_once(engine: Engine, start: Start) -> None:
    handle = start(Counter)
    with pytest.raises(SerializationError, match=r"env runner 7.*\['args'\]\[1\]\.guard"):
        handle.call(sleep, 0, Unpicklable())
    with pytest.raises(SerializationError, match=r"env runner 7.*\['amount'\]\.guard"):
        handle.call("add", amount=Unpicklable())
    with pytest.raises(SerializationError, match=r"\['weights'\]\.guard"):
        engine.put({"weights": Unpicklable()})
    assert result(handle.call("add")) == 1


@with_processes
def test_a_result_that_cannot_be_pickled_is_named(start: Start) -> None:
    handle = start(Counter)
    error = raised(handle.call(lambda worker: {"made": Unpicklable()}))
    assert type(error) is SerializationError
    assert "what env runner 7 returned['made'].guard" in str(error)
    assert handle.alive()
    assert result(handle.call("add")) == 1


@with_processes
def test_what_cannot_be_unpickled_fails_its_call_only(start: Start) -> None:
    handle = start(Counter)
    error = raised(handle.call("add", NotLoadable()))
    assert type(error) is ZeroDivisionError
    assert "env runner 7" in "".join(error.__notes__)
    error = raised(handle.call(lambda worker: NotLoadable()))
    assert type(error) is ZeroDivisionError
    assert "env runner 7" in "".join(error.__notes__)
    assert result(handle.call("add")) == 1


@with_processes
def test_a_factory_that_cannot_be_unpickled_fails_every_call(start: Start) -> None:
    handle = start(partial(Counter, NotLoadable()))
    assert type(raised(handle.call("add"))) is ZeroDivisionError
    assert not handle.alive()
    assert type(raised(handle.call("add"))) is ZeroDivisionError


# Ends.


def test_kill_fails_further_calls(start: Start) -> None:
    handle = start(Counter)
    assert result(handle.call("add")) == 1
    handle.kill()
    assert not handle.alive()
    error = raised(handle.call("add"))
    assert type(error) is WorkerDiedError
    assert str(error).startswith("env runner 7")
    handle.kill()  # twice does no harm


@with_processes
def test_kill_ends_a_worker_that_hangs_and_fails_its_calls(start: Start) -> None:
    handle = start(Counter)
    process = result(handle.call(pid))
    futures = [handle.call(sleep, 600), handle.call("add")]
    handle.kill()
    assert {type(raised(future)) for future in futures} == {WorkerDiedError}
    until(lambda: not is_running(process))


@with_processes
def test_kill_ends_a_worker_that_has_not_started(start: Start) -> None:
    handle = start(Counter)
    future = handle.call("add")
    handle.kill()
    assert type(raised(future)) is WorkerDiedError


# Processes that workers, or the driver, fork.


@with_processes
@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("raise", 1), ("return", 0)])
def test_a_forked_process_ends_instead_of_acting_as_a_second_worker(start: Start, how: str, code: int) -> None:
    handle = start(Counter)
    process = result(handle.call(pid))
    assert result(handle.call(fork_and_leave, how)) == code
    assert [result(handle.call("add")) for _ in range(3)] == [1, 2, 3]
    assert result(handle.call(pid)) == process


@pytest.mark.parametrize("engine", ["process"], indirect=True)
def test_a_death_is_noticed_while_a_call_is_sent_and_a_forked_process_has_the_socket(start: Start) -> None:
    handle = start(Counter)
    process, sleeper = result(handle.call(pid)), result(handle.call(fork_a_sleeper))
    os.kill(process, signal.SIGSTOP)
    call = handle.call(double, {"rewards": np.ones(4_000_000)})  # more than fits into the socket
    os.kill(process, signal.SIGKILL)
    try:
        assert "was killed by SIGKILL" in str(raised(call))
    finally:
        os.kill(sleeper, signal.SIGKILL)


FORKING_DRIVER = """
import os, sys
from corral.engines import make_engine
engine = make_engine("process")
worker = engine.start(lambda: [1, 2], name="worker")
process = worker.call(lambda w: os.getpid()).result(60)
child = os.fork()
if not child:
    print(worker.alive(), type(worker.call("count", 1).exception(60)).__name__, flush=True)
    worker.kill()
    engine.stop()
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(worker.alive(), worker.call(lambda w: os.getpid()).result(60) == process)
worker.kill()
"""


def test_a_process_forked_from_the_driver_leaves_the_workers_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING_DRIVER], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.splitlines() == ["False WorkerDiedError", "3", "True True"], done.stderr


FORKED_IN_A_CALL = """
import os, sys
from corral.engines.forks import forks_end_here
print("parent", flush=True)
with forks_end_here():
    child = os.fork()
    if not child:
        print("child")  # into a pipe, and so into a buffer
        {end}
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no licence')", 1, "no licence"),
        ("raise LookupError('no simulator')", 1, "LookupError: no simulator"),
    ],
)
def test_what_a_forked_process_prints_and_how_it_ended_can_be_seen(end: str, code: int, error: str) -> None:
    script = FORKED_IN_A_CALL.format(end=end)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=buffered, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.splitlines() == ["parent", "child", str(code)]
    assert done.stderr.strip().endswith(error) and bool(done.stderr) == bool(error)


# The report of a crash.


@pytest.mark.parametrize("engine", ["process"], indirect=True)
def test_a_long_crash_report_does_not_block_the_process_that_ends(start: Start) -> None:
    handle = start(Counter)
    error = raised(handle.call(crash_with_deep_stacks, 20))
    assert type(error) is WorkerDiedError and "killed by SIGSEGV" in str(error)
    assert len(str(error)) > 50_000 and "crash_with_deep_stacks" in str(error)


# Workers that take too long.


@with_processes
def test_a_worker_that_does_not_answer_in_time_is_killed(start: Start) -> None:
    handle = start(Counter)
    process = result(handle.call(pid))
    late, queued = handle.call(stop_yourself, timeout_s=0.3), handle.call("add")
    error = raised(late)
    assert type(error) is WorkerDiedError and "did not answer within 0.3 s" in str(error)
    assert type(raised(queued)) is WorkerDiedError
    assert not handle.alive()
    until(lambda: not is_running(process))


@with_processes
def test_the_time_of_a_call_begins_with_the_answer_to_the_one_before(start: Start) -> None:
    handle = start(Counter)
    result(handle.call("add"))
    futures = [handle.call(sleep, 1.5), handle.call("add", timeout_s=1.0)]
    assert [result(future) for future in futures] == [None, 2]
    futures = [handle.call(sleep, 0.6, timeout_s=1.5) for _ in range(3)]
    assert [result(future) for future in futures] == [None] * 3


@with_processes
def test_the_limit_of_a_call_is_no_limit_for_later_calls(start: Start) -> None:
    handle = start(Counter)
    assert result(handle.call("add", timeout_s=0.5)) == 1
    assert result(handle.call(sleep, 1.5)) is None
    assert result(handle.call("add")) == 2


@with_processes
def test_a_call_that_cannot_even_be_sent_is_overdue(start: Start) -> None:
    handle = start(Counter)
    process = result(handle.call(pid))
    os.kill(process, signal.SIGSTOP)
    error = raised(handle.call(double, {"rewards": np.ones(4_000_000)}, timeout_s=0.3))
    assert "did not answer within 0.3 s" in str(error)
    until(lambda: not is_running(process))


@with_processes
@pytest.mark.parametrize("end", ["kill", "signal", "itself"])
def test_nothing_that_a_worker_started_outlives_it(start: Start, end: str) -> None:
    handle = start(Counter)
    processes = [result(handle.call(pid)), *result(handle.call(start_a_family))]
    assert len(processes) == 5 and all(map(is_running, processes))
    if end == "kill":
        handle.kill()
    elif end == "signal":
        os.kill(processes[0], signal.SIGKILL)
    else:
        handle.call(kill_yourself)
    assert type(raised(handle.call("add"))) is WorkerDiedError
    until(lambda: not any(map(is_running, processes)))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there is no guard on this system")
@pytest.mark.parametrize("engine", ["process"], indirect=True)
def test_what_an_idle_worker_started_ends_with_it_before_anybody_asks(start: Start) -> None:
    handle = start(Counter)
    processes = [result(handle.call(pid)), *result(handle.call(start_a_family))]
    os.kill(processes[0], signal.SIGKILL)
    until(lambda: not any(map(is_running, processes)))


@with_processes
def test_a_worker_that_is_killed_from_outside_is_dead(start: Start) -> None:
    handle = start(Counter)
    process = result(handle.call(pid))
    running, queued = handle.call(sleep, 600), handle.call("add")
    os.kill(process, signal.SIGKILL)
    for error in (raised(running), raised(queued), raised(handle.call("add"))):
        assert type(error) is WorkerDiedError
        assert str(error).startswith("env runner 7") and str(process) in str(error) and "killed" in str(error)
    assert not handle.alive()


@with_processes
def test_an_idle_worker_that_is_killed_is_dead_for_the_next_call(start: Start) -> None:
    handle = start(Counter)
    process = result(handle.call(pid))
    os.kill(process, signal.SIGKILL)
    assert type(raised(handle.call("add"))) is WorkerDiedError
    assert not handle.alive()


@with_processes
@pytest.mark.parametrize("end", [kill_yourself, exit_with_3])
def test_a_worker_that_ends_within_a_call_is_dead(start: Start, end: Callable[..., None]) -> None:
    handle = start(Counter)
    process = result(handle.call(pid))
    error = raised(handle.call(end))
    assert type(error) is WorkerDiedError
    assert str(error).startswith("env runner 7") and str(process) in str(error)
    assert not handle.alive()


@with_processes
def test_a_worker_that_is_dead_can_be_replaced(start: Start) -> None:
    raised(start(Counter).call(kill_yourself))
    assert result(start(Counter).call("add")) == 1


# Where workers find the code.

SCRIPT = """
import os, sys
from corral.engines import make_engine

def main():
    engine = make_engine(sys.argv[1])
    sys.path.insert(0, sys.argv[2])
    from side_module import Base

    class Mine(Base):
        def __init__(self, tools):
            self.tools = tools

    worker = engine.start(lambda: Mine(Tools()), name="worker")
    print(worker.call("greet").result(60), worker.call(lambda w: w.tools.name).result(60), flush=True)
    assert worker.call(lambda w: os.getcwd()).result(60) == os.getcwd()
    worker.kill()
    engine.stop()

class Tools:
    name = "tools of main"

main()
"""


@pytest.mark.parametrize("engine", ["local", *WITH_PROCESSES])
def test_workers_find_the_main_modules_classes_and_the_paths(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The script has no `if __name__ == "__main__"`, and the path is added after Ray has started."""
    environment = dict(os.environ)
    if engine == "ray":
        ray = request.getfixturevalue("ray_runtime")
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "side_module.py").write_text("class Base:\n    def greet(self):\n        return 'hello'\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", engine, str(tmp_path / "modules")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout == "hello tools of main\n", done.stderr
    assert done.stderr == ""


# Functions that workers call first.


@with_processes
def test_workers_call_the_setup_functions_before_they_unpickle_the_factory(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worker can unpickle the factory only after the setup has made its module importable.
    (tmp_path / "setup_of_workers.py").write_text(
        "import sys, types\n"
        "def make_module():\n"
        "    module = sys.modules['made_by_setup'] = types.ModuleType('made_by_setup')\n"
        "    exec('class Made:\\n    def answer(self):\\n        return 42', vars(module))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    setup = importlib.import_module("setup_of_workers")
    setup.make_module()
    monkeypatch.delitem(sys.modules, "setup_of_workers")
    monkeypatch.setenv("CORRAL_WORKER_SETUP", "setup_of_workers:make_module")
    made = sys.modules["made_by_setup"]
    assert start(made.Made).call("answer").result(DEADLINE_S) == 42
    monkeypatch.delitem(sys.modules, "made_by_setup")


def test_a_setup_function_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_WORKER_SETUP", "no_such_module:register")
    handle = make_engine("process").start(Counter, name="env runner 1")
    try:
        with pytest.raises(ConfigError, match="CORRAL_WORKER_SETUP names 'no_such_module:register'"):
            handle.call("add", 1).result(DEADLINE_S)
    finally:
        handle.kill()
