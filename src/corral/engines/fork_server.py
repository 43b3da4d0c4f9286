"""A process that has imported torch and Corral once, and forks the processes of workers.

An import of torch takes seconds where many workers start at the same time, or where files are on a network. A fork
takes milliseconds, and workers share the memory of what was imported. The server only imports modules before it forks,
so it has no threads or locks that a fork could lose; the process of the user is never forked. This is for Linux: a
forked process is no child of the process that asked for it, which needs a pidfd (Linux 5.3) to wait for its end.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import operator
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

EXIT_S = 5.0
# What torch, NumPy and the interpreter read once. A worker with other values needs another server.
READ_AT_IMPORT = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "TORCH", "PYTORCH_", "CUDA_", "LD_")
UNKNOWN = 1 << 16
"""Exit code of a process whose server has ended; no process has it."""

_HEADER_BYTES = 8
_MAX_FDS = 8


@dataclass(frozen=True)
class Start:
    """What a forked process is to be like.

    Attributes:
        function: Import path of the function that it calls, which never returns.
        arguments: Arguments of the function.
        environment: Its environment variables.
        path: Its `sys.path`.
        directory: Its working directory.
    """

    function: str
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    path: list[str]
    directory: str


class ForkedProcess:
    """A process that a server forked, with the methods of `subprocess.Popen` that the engine needs.

    Attributes:
        pid: Id of the process; no other process gets it before `poll` or `wait` has seen the end of this one.
        returncode: Exit code, or minus the number of the signal that ended it; `None` as long as it runs, and `UNKNOWN`
            if the server ended before it could say.
    """

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._pidfd)

    def poll(self) -> int | None:
        """Return `returncode`, without waiting."""
        return self._end_within(0.0)

    def wait(self, timeout: float) -> int:
        """Return `returncode` once the process has ended.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        if self._end_within(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def _end_within(self, timeout_s: float) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(1000 * timeout_s):
                with self._lock:
                    if self.returncode is None:
                        self.returncode = self._server.reap(self.pid)
        return self.returncode


class ForkServer:
    """The server of this process.

    Args:
        environment: Environment variables of the server.
        modules: Names of the modules that it imports; one that cannot be imported is left out.
    """

    def __init__(self, environment: dict[str, str], modules: list[str]) -> None:
        """Start the server; it imports while the caller continues."""
        self.imported_with = _read_at_import(environment)
        self._lock = threading.RLock()
        self._is_asking = False
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-c"),
                        f"from corral.engines.fork_server import main; main({theirs.fileno()}, {os.getpid()})",
                    ],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C in a terminal does not reach it
                )
            except BaseException:
                self._channel.close()
                raise
        self._finalizer = weakref.finalize(self, _end_server, self._process, self._channel, os.getpid())
        self._send(modules)

    def fits(self, environment: dict[str, str]) -> bool:
        """Return whether workers with these environment variables can be forked from this server."""
        return self.imported_with == _read_at_import(environment)

    def start(self, start: Start, fds: list[int]) -> ForkedProcess:
        """Fork a process, which leads a process group, and gets the files `fds` as further arguments.

        Args:
            start: What it is to be like.
            fds: Standard output, standard error, and files for its function.

        Raises:
            OSError: It cannot be forked, or the server has ended.
        """
        pid = self._ask(start, fds)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return ForkedProcess(pid, self)

    def reap(self, pid: int) -> int:
        """Return the exit code of a forked process that has ended; `UNKNOWN` if the server has ended."""
        try:
            return self._ask(pid)
        except OSError:
            return UNKNOWN

    def _ask(self, request: Any, fds: list[int] | None = None) -> int:
        with self._lock:
            if self._is_asking:  # garbage collection in the middle of a request came here again
                raise BrokenPipeError("the server is busy")
            self._is_asking = True
            try:
                self._send(request, fds)
                answer = self._channel.recv(_HEADER_BYTES, socket.MSG_WAITALL)
                if len(answer) < _HEADER_BYTES:
                    raise BrokenPipeError("the server has ended")
                self._is_asking = False
            finally:
                if self._is_asking:  # such as by Ctrl-C: the answer to this request must not be taken for another one
                    self._channel.close()
        return int.from_bytes(answer, "big", signed=True)

    def _send(self, request: Any, fds: list[int] | None = None) -> None:
        content = pickle.dumps(request)
        socket.send_fds(self._channel, [len(content).to_bytes(_HEADER_BYTES, "big")], fds or [])
        self._channel.sendall(content)


_server: ForkServer | None = None
_making = threading.Lock()


def _forget_server() -> None:
    """In a process that was forked from this one: it gets a server of its own."""
    global _server, _making
    _server, _making = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_server)


def fork_process(start: Start, fds: list[int]) -> ForkedProcess | None:
    """Return a process that is forked from the server of this process; `None` where that is not possible.

    The first call starts the server, which ends with this process.

    Args:
        start: What the process is to be like.
        fds: Standard output, standard error, and files for its function.
    """
    global _server
    if not _has_pidfds():
        return None
    with _making:
        for is_new in (False, True):
            if is_new or _server is None or not _server.fits(start.environment):
                _server = ForkServer(start.environment, _modules())
            try:
                return _server.start(start, fds)
            except OSError:
                if is_new:
                    return None
    raise AssertionError


@functools.cache
def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, or an old kernel
        return False
    return True


def _modules() -> list[str]:
    """Return the modules of Corral and the libraries that this process has imported: workers will need most of them."""
    return [name for name in sys.modules if name.partition(".")[0] == "corral" or name in ("torch", "gymnasium")]


def _read_at_import(environment: dict[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    found.pop("PYTHONPATH", None)  # a forked process gets its own path
    return found


def _end_server(process: subprocess.Popen[bytes], channel: socket.socket, owner: int) -> None:
    """End the server by closing its socket; in a process forked since the start, do nothing."""
    if os.getpid() != owner:
        return
    channel.close()
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# The process of the server.


def main(channel_fd: int, driver: int) -> None:
    """Import what the first message names, then fork and reap processes until `driver` closes the socket or ends."""
    # Job schedulers send these to all processes of a job; the driver ends the server.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        driver_fd = os.pidfd_open(driver)
    except ProcessLookupError:
        return
    with socket.socket(fileno=channel_fd) as channel, contextlib.suppress(EOFError, OSError):
        for name in _next_request(channel)[0]:
            with contextlib.suppress(Exception):  # a worker that needs the module gets the error
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # forked processes share this memory until it is written
        while driver_fd not in select.select([channel_fd, driver_fd], [], [])[0]:
            request, fds = _next_request(channel)
            if isinstance(request, int):
                answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
            else:
                answer = _fork(request, fds, [channel_fd, driver_fd])
            channel.sendall(answer.to_bytes(_HEADER_BYTES, "big", signed=True))
    os._exit(0)  # at once: nothing is left to clean up, and unloading torch takes time


def _next_request(channel: socket.socket) -> tuple[Any, list[int]]:
    header, fds, _, _ = socket.recv_fds(channel, _HEADER_BYTES, _MAX_FDS)
    if len(header) < _HEADER_BYTES:
        raise EOFError
    content = channel.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
    return pickle.loads(content), list(fds)


def _fork(start: Start, fds: list[int], own_fds: list[int]) -> int:
    """Fork a process, and return its id, or minus the number of the error."""
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid == 0:
        _become(start, fds, own_fds)
    if pid > 0:
        with contextlib.suppress(OSError):  # the process does it too; whoever comes first
            os.setpgid(pid, pid)
    for fd in fds:
        os.close(fd)
    return pid


def _become(start: Start, fds: list[int], own_fds: list[int]) -> NoReturn:
    """Make this process what a new interpreter would be, and call its function."""
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for fd in own_fds:
            os.close(fd)
        for number, fd in enumerate(fds[:2], start=1):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(start.environment)
        os.chdir(start.directory)
        sys.path[:] = start.path
        importlib.invalidate_caches()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for name, draw_seed in (("numpy", "random.seed"), ("torch", "seed")):  # `random` draws a new seed by itself
            if name in sys.modules:
                operator.attrgetter(draw_seed)(sys.modules[name])()
        module, _, name = start.function.partition(":")
        getattr(importlib.import_module(module), name)(*fds[2:], *start.arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
