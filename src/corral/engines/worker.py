"""What runs in a process of the process engine: one worker, and its calls one after another."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from typing import Any

from corral.engines.local import call_method
from corral.engines.serialization import Frames, pack, portable_error, receive, send, unpack

# Where a crashing process writes its last words, which the other side puts into the error; see `process.py`.
CRASH_FD = "CORRAL_CRASH_FD"

PARENT_CHECK_S = 1.0


def main(channel_fd: int, parent: int) -> None:
    """Serve the calls that come through a socket until the other side, the process `parent`, closes it or ends."""
    faulthandler.enable(int(os.environ[CRASH_FD]))
    _end_with_parent(parent)
    with socket.socket(fileno=channel_fd) as channel:
        try:
            _serve(channel)
        except (EOFError, OSError):  # the other side is gone
            pass
    # Not an ordinary exit: threads and processes that the worker left running must not keep this process.
    os.killpg(0, signal.SIGKILL)


def _serve(channel: socket.socket) -> None:
    """Make the worker from the first message, then answer one call after another."""
    first = receive(channel)
    name, where = "", "a worker"
    worker: Any = None
    try:
        name = unpack(first[0])
        where = f"{name} (process {os.getpid()})"
        worker = unpack(first[1])()
        answer = _success(None, name)
    except BaseException as error:
        answer = _failure(error, where)
    del first
    send(channel, answer)
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
        send(channel, answer)


def _success(result: Any, name: str) -> list[Frames]:
    return [pack(True, ""), pack(result, f"what {name} returned")]


def _failure(error: BaseException, where: str) -> list[Frames]:
    return [pack(False, ""), pack(portable_error(error, where), f"an exception in {where}")]


def _end_with_parent(parent: int) -> None:
    """End this process and all that it started soon after its parent died, whatever it is busy with.

    The parent is told rather than asked for: it may have died before this process could ask.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
