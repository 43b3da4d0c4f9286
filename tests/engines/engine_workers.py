"""Workers, and what the tests of engines do to them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

DEADLINE_S = 60.0


class Counter:
    """Keeps state."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    def explode(self) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("the counter exploded") from error


class Unpicklable:
    """Has an attribute that cannot be pickled; it makes a counter when it is called."""

    def __init__(self) -> None:
        self.guard = threading.Lock()

    def __call__(self) -> Counter:
        return Counter()


class StubbornError(Exception):
    """Cannot be made again from its args."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


def _refuse() -> None:
    raise ZeroDivisionError("not here")


class NotLoadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _refuse, ()


def raise_stubborn(worker: Any) -> None:
    raise StubbornError("it failed", "it had to")


def pid(worker: Any) -> int:
    return os.getpid()


def sleep(worker: Any, seconds: float) -> None:
    time.sleep(seconds)


def kill_yourself(worker: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_yourself(worker: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fork_and_leave(worker: Any, how: str) -> int | None:
    """Fork a child that leaves this function in a way of its own, and return the child's exit code."""
    child = os.fork()
    if not child:
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            raise LookupError("in the forked process")
        return None
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_a_sleeper(worker: Any) -> int:
    """Fork a child that has this process's files, and is in no group that ends with it; return its id."""
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    return child


def exit_with_3(worker: Any) -> None:
    os._exit(3)


def crash_with_deep_stacks(worker: Any, num_threads: int) -> None:
    """Crash while many threads are deep in Python code, so that the report of their stacks is long."""
    ready = threading.Barrier(num_threads + 1)

    def descend_into_a_function_with_a_long_name(depth: int) -> None:
        if depth:
            descend_into_a_function_with_a_long_name(depth - 1)
        else:
            ready.wait()
            time.sleep(600)

    for _ in range(num_threads):
        threading.Thread(target=descend_into_a_function_with_a_long_name, args=[150], daemon=True).start()
    ready.wait()
    os.kill(os.getpid(), signal.SIGSEGV)


def log_things(worker: Any, text: str, times: int = 1) -> None:
    """Log a warning with a traceback and an info of another library."""
    for _ in range(times):
        try:
            raise ZeroDivisionError(text)
        except ZeroDivisionError:
            logging.getLogger("corral").warning("in a worker: %s", text, exc_info=True)
    logging.getLogger("some.library").error("an error of a library")


def announce(worker: Any, *words: Any) -> None:
    print(*words)


def warn_of(worker: Any, text: str) -> None:
    """Give a warning of Python."""
    warnings.warn(text, stacklevel=1)


def double(worker: Any, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Double columns in place, and return them."""
    for column in columns.values():
        column *= 2
    return columns


def alarm_rings(worker: Any) -> bool:
    """Say whether a timer interrupts this call, as the time limit of an env's step has to."""
    rung = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: rung.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        return rung.wait(DEADLINE_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def start_a_family(worker: Any) -> list[int]:
    """Start processes in each way there is, one of them with a child, and return all their ids."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    family = [parent.pid, int(parent.stdout.readline())]
    for method in ("fork", "spawn"):
        # As Gymnasium's AsyncVectorEnv starts its envs.
        process = multiprocessing.get_context(method).Process(target=time.sleep, args=(600,), daemon=True)
        process.start()
        assert process.pid is not None
        family.append(process.pid)
    return family


def is_running(process: int) -> bool:
    """Say whether a process is there, and no zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: It did not come.
    """
    for _ in polls():
        if condition():
            return


def polls() -> Iterator[None]:
    """Yield every few milliseconds until the deadline, then raise TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        yield
        time.sleep(0.01)
    raise TimeoutError
