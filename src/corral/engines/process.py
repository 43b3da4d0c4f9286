"""The process engine: each worker runs in its own process on this machine.

Each process starts a new interpreter. It is not forked, because torch's threads and locks do not survive a fork. It
does not import the main module again, so a script needs no `if __name__ == "__main__"`. The process that starts workers
has a thread per handle, which sends one call at a time and waits for the answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from corral.engines.actors import environment as coordination_environment
from corral.engines.base import TRAITS, Resources, require_on_this_machine
from corral.engines.call_limits import overdue_message
from corral.engines.forks import foreign_call
from corral.engines.own_commands import own_command
from corral.engines.serialization import Frames, pack, receive, send, unpack
from corral.engines.worker import CRASH_FD
from corral.engines.worker_logs import log_records
from corral.errors import WorkerDiedError

log = logging.getLogger("corral")

DEATH_CHECK_S = 0.5
EXIT_S = 5.0
REPORT_BYTES = 1 << 16


@dataclass(frozen=True)
class Packed:
    """A value that is packed once and sent with several calls."""

    frames: Frames


@dataclass
class _Call:
    """A call that waits to be sent, or waits for its answer."""

    message: list[Frames]
    future: Future[Any]
    timeout_s: float | None = None


class _OverdueError(Exception):
    """The worker has not answered in time."""


class _WatchedChannel:
    """The socket to the process of a worker. Its operations fail when the process has ended, or is overdue.

    The socket alone is not enough: it stays open if a process that the worker forked still has it.

    Args:
        channel: The socket.
        process: The process.

    Attributes:
        deadline_s: Clock reading (`time.monotonic`) after which the process is overdue.
    """

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        channel.settimeout(DEATH_CHECK_S)
        self._channel, self._process = channel, process
        self.deadline_s = math.inf

    def sendall(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self._try(self._channel.send, view) :]

    def recv_into(self, buffer: memoryview) -> int:
        return self._try(self._channel.recv_into, buffer)

    def _try(self, operation: Callable[[memoryview], int], view: memoryview) -> int:
        has_ended = False
        while True:
            try:
                return operation(view)
            except TimeoutError:
                if has_ended:  # and what it had sent before has been read
                    raise EOFError from None
                if time.monotonic() > self.deadline_s:
                    raise _OverdueError from None
                has_ended = self._process.poll() is not None


class ProcessHandle:
    """Handle of a worker in its own process."""

    def __init__(self, factory: Callable[[], Any], name: str, resources: Resources) -> None:
        """Start the process, and queue the factory for it."""
        first = [pack(name, "the name"), pack(factory, name)]
        self._name = name
        self._owner = os.getpid()
        self._problem: BaseException | None = None
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        self._crash_report = tempfile.TemporaryFile()  # not a pipe, whose writer may block
        environment = {
            **os.environ,
            **coordination_environment(),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            CRASH_FD: str(self._crash_report.fileno()),
        }
        # Several workers share the cores, so each worker gets as many threads as CPUs that it asked for.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, int(resources.num_cpus))))
        try:
            self._process = subprocess.Popen(
                own_command("corral.engines.worker", f"main({theirs.fileno()}, {os.getpid()})"),
                env=environment,
                pass_fds=(theirs.fileno(), self._crash_report.fileno()),
                stdin=subprocess.DEVNULL,
                # Ctrl-C in the terminal reaches only this process, and `killpg` ends all that the worker has started.
                process_group=0,
            )
        except BaseException:
            self._channel.close()
            self._crash_report.close()
            raise
        finally:
            theirs.close()
        self._watched = _WatchedChannel(self._channel, self._process)
        self._finalizer = weakref.finalize(self, _end, self._process, self._owner)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._calls.put(_Call(first, Future()))
        self._thread = threading.Thread(target=self._serve, name=f"calls of {name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def call(
        self, method: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future[Any]:
        """Queue a call, and return its future; see `WorkerHandle.call`."""
        if os.getpid() != self._owner:
            return foreign_call(self._name, self._owner)
        shared = {index: part.frames for index, part in enumerate(args) if isinstance(part, Packed)}
        plain = [None if index in shared else part for index, part in enumerate(args)]
        call = {"method": method, "args": plain, "kwargs": kwargs, "shared": list(shared)}
        frames = pack(call, f"{self._name}: the call's ")
        # Arrays are copied now, because the caller may write to them while the call waits in the queue.
        message = [[frames[0], *map(bytearray, frames[1:])], *shared.values()]
        future: Future[Any] = Future()
        with self._lock:
            if self._problem is None:
                self._calls.put(_Call(message, future, timeout_s))
                return future
        future.set_exception(self._problem)
        return future

    def alive(self) -> bool:
        """Return whether the worker can still answer calls."""
        return os.getpid() == self._owner and self._problem is None and self._process.poll() is None

    def kill(self) -> None:
        """End the process and all processes that it started; in a process forked since the start, do nothing."""
        if os.getpid() != self._owner:
            return
        self._give_up(WorkerDiedError(f"{self._name} was ended."))
        if threading.current_thread() is not self._thread:  # callbacks of futures run in this thread
            self._thread.join(EXIT_S)

    # The thread of the handle.

    def _serve(self) -> None:
        """Send one call after another, and set the future of each call."""
        is_factory = True
        while (call := self._calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            self._watched.deadline_s = math.inf if call.timeout_s is None else time.monotonic() + call.timeout_s
            try:
                send(self._watched, call.message)
                call.message = []
                answer = receive(self._watched)
            except (OSError, EOFError, _OverdueError) as error:
                problem = self._give_up(self._death(error, call))
                call.future.set_exception(problem)
                break
            try:
                succeeded, value = unpack(answer[0]), unpack(answer[1])
            except Exception as error:  # the answer cannot be unpickled in this process
                error.add_note(f"This is about what {self._name} returned.")
                call.future.set_exception(error)
                continue
            for logged in answer[2:]:
                log_records(unpack(logged), self._name)
            if succeeded:
                call.future.set_result(value)
            else:
                raised, raised.__cause__ = value
                call.future.set_exception(raised)
                if is_factory:
                    self._give_up(raised)
                    break
            is_factory = False
        self._fail_queued()
        self._channel.close()
        self._crash_report.close()

    def _death(self, error: BaseException, call: _Call) -> WorkerDiedError:
        """Return an error that says how the process ended, with its last output."""
        if isinstance(error, _OverdueError):
            assert call.timeout_s is not None  # else there is no deadline
            return WorkerDiedError(f"{self._name}: process {self._process.pid} {overdue_message(call.timeout_s)}.")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        code = self._process.returncode
        if code is None:
            how = f"stopped answering ({type(error).__name__})"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended by itself with exit code {code}"
        size = self._crash_report.seek(0, os.SEEK_END)
        self._crash_report.seek(max(0, size - REPORT_BYTES))  # the stack of the main thread is the last one
        if last_words := self._crash_report.read().decode(errors="replace").strip():
            how += f". Its last output:\n{last_words}"
        return WorkerDiedError(f"{self._name}: process {self._process.pid} {how}")

    def _give_up(self, problem: BaseException) -> BaseException:
        """End the process, and return the reason why no call can succeed; the first reason is kept."""
        with self._lock:
            if self._problem is None:
                self._problem = problem
                self._calls.put(None)
        self._finalizer()
        return self._problem

    def _fail_queued(self) -> None:
        assert self._problem is not None
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None and call.future.set_running_or_notify_cancel():
                call.future.set_exception(self._problem)


def _num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill a process and its whole group, and wait for the end of the process.

    The group exists as long as one of its processes runs, so this also works when the process itself has ended. A
    process that was forked from the owner runs this at its exit too, and must not end the owner's workers.
    """
    if os.getpid() != owner:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_S)


class ProcessEngine:
    """Starts each worker in its own process."""

    traits = TRAITS["process"]

    def require(self, resources: Sequence[Resources]) -> None:
        """Refuse resources that this machine does not have; log a warning if there are too few CPUs, which are shared.

        Raises:
            ConfigError: The message says what was requested, and what there is.
        """
        require_on_this_machine(resources)
        asked, there = sum(part.num_cpus for part in resources), _num_cpus()
        if asked > there:
            log.warning(
                "%d workers ask for %g CPUs, and this machine has %d: the workers share these CPUs.",
                len(resources),
                asked,
                there,
            )

    def start(
        self, factory: Callable[[], Any], *, name: str = "worker", resources: Resources | None = None
    ) -> ProcessHandle:
        """Start a process, and return its handle before the process has made the worker."""
        return ProcessHandle(factory, name, resources or Resources())

    def put(self, value: Any) -> Packed:
        """Return the packed value; arrays are copied, so later changes to the value have no effect."""
        frames = pack(value, "a shared value")
        return Packed([frames[0], *(bytearray(frame) for frame in frames[1:])])

    def describe_available(self) -> str:
        """Return a sentence about the CPUs that the processes share."""
        return f"This machine has {_num_cpus()} CPUs."

    def stop(self) -> None:
        """Do nothing: each process is ended by its handle."""
