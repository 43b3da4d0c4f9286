"""Processes that are forked from a server are what new interpreters would be."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_workers import DEADLINE_S, Counter, is_running, pid, until

from corral.engines import make_engine
from corral.engines.base import Resources
from corral.errors import WorkerDiedError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux only")
Ask = Callable[[Callable[[Any], Any]], Any]


@pytest.fixture
def start() -> Iterator[Callable[[], Any]]:
    handles = []

    def start(num_cpus: float = 1.0) -> Any:
        handle = make_engine("process").start(Counter, resources=Resources(num_cpus=num_cpus))
        handles.append(handle)
        return handle

    yield start
    for handle in handles:
        handle.kill()


def ask(handle: Any, question: Callable[[Any], Any]) -> Any:
    return handle.call(question).result(DEADLINE_S)


def describe_process(worker: Any) -> dict[str, Any]:
    """Return what a process got from the one that started it."""
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGALRM)
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "CORRAL_CRASH_FD"},
        "path": sys.path,
        "directory": os.getcwd(),
        "signals": [type(signal.getsignal(number)).__name__ for number in handled],
        "leads its group": os.getpgrp() == os.getpid(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "output": [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)],
        "threads": [torch.get_num_threads(), threading.active_count()],
        "arguments": sys.argv,
        "main": vars(sys.modules["__main__"]).get("__file__"),
        "limit of files": os.sysconf("SC_OPEN_MAX"),
        "mask": os.umask(os.umask(0)),
    }


def test_a_forked_process_is_as_a_new_interpreter_is(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start()  # the server is older than what changes now
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORRAL_TEST", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    forked = ask(start(), describe_process)
    with monkeypatch.context() as patch:
        patch.setattr("corral.engines.process.fork_process", lambda *_: None)
        new = ask(start(), describe_process)
    assert forked["environment"]["CORRAL_TEST"] == "1"
    assert forked["directory"] == str(tmp_path)
    assert str(tmp_path) in forked["path"]
    assert {name for name in new if new[name] != forked[name]} <= {"path"}
    assert {*forked["path"]} == {*new["path"]}


def test_modules_are_there_before_the_worker_is(start: Any) -> None:
    start()
    handle = start()
    parent = ask(handle, lambda worker: os.getppid())
    assert parent != os.getpid()
    command = Path(f"/proc/{parent}/cmdline").read_text()
    assert "fork_server" in command
    assert f"{os.sep}torch" in Path(f"/proc/{parent}/maps").read_text()
    assert ask(start(), lambda worker: os.getppid()) == parent


def test_random_numbers_differ_between_processes(start: Any) -> None:
    def draw(worker: Any) -> tuple[float, float, float]:
        return random.random(), np.random.random(), torch.rand(()).item()

    drawn = [ask(start(), draw) for _ in range(2)]
    assert all(first != second for first, second in zip(*drawn, strict=True))


def test_a_process_with_other_threads_gets_another_server(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(worker: Any) -> tuple[int, int]:
        return torch.get_num_threads(), os.getppid()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one, server = ask(start(1), threads)
    two, other = ask(start(2), threads)
    assert (one, two) == (1, min(2, len(os.sched_getaffinity(0))))
    assert server != other


def test_how_a_process_ended_is_known(start: Any) -> None:
    for end, words in (
        (lambda worker: os._exit(7), "ended by itself with exit code 7"),
        (lambda worker: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    ):
        handle = start()
        with pytest.raises(WorkerDiedError, match=words):
            ask(handle, end)
        assert not handle.alive()


def test_workers_outlive_their_server_and_others_can_be_started(start: Any) -> None:
    handle = start()
    server = ask(handle, lambda worker: os.getppid())
    os.kill(server, signal.SIGKILL)
    until(lambda: not is_running(server))
    assert handle.call("add").result(DEADLINE_S) == 1
    other = start()
    assert ask(other, lambda worker: os.getppid()) != server
    process = ask(handle, pid)
    handle.kill()
    until(lambda: not is_running(process))
    assert not handle.alive()


def test_ended_processes_are_no_zombies(start: Any) -> None:
    handle = start()
    process = ask(handle, pid)
    handle.kill()
    until(lambda: not Path(f"/proc/{process}").exists())


DRIVER = """
import os, sys, time
from corral.engines import make_engine
sys.path.append({tests!r})
from engine_workers import Counter, pid
worker = make_engine("process").start(Counter)
ids = worker.call(lambda worker: (os.getpid(), os.getppid())).result(60)
print(*ids, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["time.sleep(600)", "sys.exit()", "os._exit(0)"])
def test_worker_and_server_end_with_the_driver(end: str) -> None:
    code = DRIVER.format(tests=str(Path(__file__).parent), end=end)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        ids = [int(word) for word in driver.stdout.readline().split()]
        assert len(ids) == 2
        if "sleep" in end:
            driver.send_signal(signal.SIGKILL)
    for process in ids:
        until(lambda process=process: not is_running(process))  # type: ignore[misc]


OUTPUT = """
import os, sys
from corral.engines import make_engine
sys.path.append({tests!r})
from engine_workers import Counter
engine = make_engine("process")
for name in ("first", "second"):
    file = os.open(f"{{sys.argv[1]}}/{{name}}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    engine.start(Counter).call(lambda worker, name=name: print(name, flush=True)).result(60)
"""


def test_a_process_writes_to_the_standard_output_that_the_driver_has_at_its_start(tmp_path: Path) -> None:
    code = OUTPUT.format(tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=DEADLINE_S)
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == ["first\n", "second\n"]


FORKING = """
import os, sys
from corral.engines import make_engine
sys.path.append({tests!r})
from engine_workers import Counter
def start():
    worker = make_engine("process").start(Counter)
    return worker, worker.call(lambda worker: os.getppid()).result(60)
worker, server = start()
child = os.fork()
if child == 0:
    other, other_server = start()
    print(other_server != server, flush=True)
    other.kill()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), worker.call("add").result(60))
"""


def test_a_fork_of_the_driver_starts_a_server_of_its_own() -> None:
    code = FORKING.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.split() == ["True", "0", "1"], done.stderr


def test_how_a_process_ended_is_not_known_without_its_server(start: Any) -> None:
    handle = start()
    server = ask(handle, lambda worker: os.getppid())
    os.kill(server, signal.SIGKILL)
    until(lambda: not is_running(server))
    with pytest.raises(WorkerDiedError, match="ended, and so has the server"):
        ask(handle, lambda worker: os._exit(7))


INTERRUPTED = """
import os, sys, threading, time, _thread
from corral.engines import make_engine
sys.path.append({tests!r})
from engine_workers import Counter
engine = make_engine("process")
first = engine.start(Counter)
threading.Timer({delay_s}, _thread.interrupt_main).start()
started = []
try:
    while True:
        started.append(engine.start(Counter))
        started.pop(0).kill()
except KeyboardInterrupt:
    pass
for worker in [first, *started, engine.start(Counter), engine.start(Counter)]:
    print(worker.call("add").result(60), worker.pid, flush=True)
    worker.kill()
"""


@pytest.mark.parametrize("delay_s", [0.3, 0.37, 0.44])
def test_an_interrupt_while_processes_start_confuses_nothing(delay_s: float) -> None:
    code = INTERRUPTED.format(tests=str(Path(__file__).parent), delay_s=delay_s)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) >= 3, done.stderr
    assert {line[0] for line in lines} == {"1"}
    assert len({line[1] for line in lines}) == len(lines)
