"""The main function of a process of the process engine: it runs the calls of one worker, one after another."""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from corral.engines.local import call_method, make_worker
from corral.engines.process_group_guard import guard_this_process
from corral.engines.serialization import Frames, pack, portable_error, receive, send, unpack
from corral.engines.worker_logs import WorkerLog
from corral.engines.worker_setup import set_up_worker

# Variable with the descriptor of the file to which a crashing process writes. The parent puts this output into the
# error; see `process.py`.
CRASH_FD = "CORRAL_CRASH_FD"

PARENT_CHECK_S = 1.0


def main(channel_fd: int, parent: int) -> None:
    """Serve the calls from a socket until the process at the other end, `parent`, closes the socket or ends."""
    faulthandler.enable(int(os.environ[CRASH_FD]))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a file too: what is in the buffer at the end is lost
    _end_with_parent(parent)
    # Job schedulers send these to all processes; the parent ends its workers, after it has saved their state. They get
    # a handler, since programs that an env starts would inherit that a signal is ignored.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with socket.socket(fileno=channel_fd) as channel:
        try:
            _serve(channel)
        except (EOFError, OSError):  # the other side is gone
            pass
    # Not an ordinary exit: threads and processes that the worker left running must not keep this process alive.
    os.killpg(0, signal.SIGKILL)


def _serve(channel: socket.socket) -> None:
    """Make the worker from the first message, then answer one call after another."""
    first = receive(channel)
    name, where = "", "a worker"
    worker: Any = None
    logs = WorkerLog()
    try:
        name = unpack(first[0])
        where = f"{name} (process {os.getpid()})"
        logs.install()
        set_up_worker()
        worker = make_worker(unpack(first[1]))
        answer = _success(None, name)
    except BaseException as error:
        answer = _failure(error, where)
    del first
    send(channel, answer + _packed_logs(logs))
    while True:
        request = receive(channel)
        try:
            call = unpack(request[0])
            for position, frames in zip(call["shared"], request[1:], strict=True):
                call["args"][position] = unpack(frames)
            del request
            answer = _success(call_method(worker, call["method"], call["args"], call["kwargs"]), name)
        except BaseException as error:
            answer = _failure(error, where)
        send(channel, answer + _packed_logs(logs))


def _packed_logs(logs: WorkerLog) -> list[Frames]:
    return [pack(records, "what was logged")] if (records := logs.take()) else []


def _success(result: Any, name: str) -> list[Frames]:
    return [pack(True, ""), pack(result, f"what {name} returned")]


def _failure(error: BaseException, where: str) -> list[Frames]:
    return [pack(False, ""), pack(portable_error(error, where), f"an exception in {where}")]


def _end_with_parent(parent: int) -> None:
    """End this process and all processes that it started soon after its parent died, whatever this process is doing.

    The id of the parent is an argument, because the parent may die before this process calls `os.getppid`. Where there
    is no guard, a thread has to do, which cannot run while C code holds Python's global lock.
    """
    if guard_this_process(parent):
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
