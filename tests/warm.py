"""Commands and workers in processes that have torch from their beginning: to import it takes longer than most tests.

A server imports torch once, and forks for each of them. Tests that are about processes themselves, such as tests of the
process engine, of pipes, and of signals to a command line, start new interpreters.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import multiprocessing.reduction
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "gymnasium", "yaml", "corral.tools.cli.main", "corral.algorithms.ppo"])


def _begin() -> None:
    """Forget what a process of `multiprocessing` has, and a new interpreter has not; do not wait for the disk.

    What the server imported is kept away from the garbage collector, which would copy its memory too.
    """
    gc.freeze()
    os.fsync = lambda fd: None
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process().daemon = False


def _main(command: Sequence[str], start: Mapping[str, Any], outputs: Sequence[str]) -> None:
    """Become a process that began with a command: `[python, -c, code, ...]`, `-m module`, or the path of a script."""
    _begin()
    if start["start_new_session"]:
        os.setsid()
    os.chdir(start["cwd"])
    os.environ.clear()
    os.environ.update(start["env"])
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
    kind, *arguments = command[1:] if command[0] == sys.executable else command
    what = arguments.pop(0) if kind in ("-c", "-m") else kind
    first = {"-c": "", "-m": start["cwd"]}.get(kind, str(Path(what).parent))
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    of_pytest = (str(ROOT / "tests"), str(ROOT / "benchmarks"))
    sys.path[:] = [first, *own, *(path for path in sys.path if path not in own and not path.startswith(of_pytest))]
    sys.argv = ["-c" if kind == "-c" else what, *arguments]
    exec(start["before"], {})
    try:
        if kind == "-c":
            exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
        elif kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(what, run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _make_file(owner: Any) -> str:
    """Make an empty file that is there as long as its owner, and return its name."""
    descriptor, name = tempfile.mkstemp()
    os.close(descriptor)
    weakref.finalize(owner, Path(name).unlink, missing_ok=True)
    return name


class Popen:
    """A process that runs a command, with the methods of `subprocess.Popen` for text from pipes.

    Args:
        command: Arguments of the process.
        cwd: Working directory.
        env: Environment.
        start_new_session: Whether it leads a group of processes of its own.
        before: Code that it runs before the command.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        before: str = "",
    ) -> None:
        self.args = [*map(str, command)]
        self._outputs = [_make_file(self) for _ in range(2)]
        start = {"cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env), "before": before}
        start["start_new_session"] = start_new_session
        self._process = _CONTEXT.Process(target=_main, args=(self.args, start, self._outputs), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return what it printed."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.printed()

    def printed(self) -> tuple[str, str]:
        """Return what it printed so far, and its errors."""
        output, errors = (Path(name).read_text(encoding="utf-8") for name in self._outputs)
        return output, errors


def run(command: Sequence[str], *, timeout: float = 120, **start: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; further arguments are arguments of `Popen`."""
    process = Popen(command, **start)
    try:
        output, errors = process.communicate(timeout)
        assert process.returncode is not None
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    finally:
        process.kill()


class _Descriptor:
    """A file descriptor that a process is given."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (multiprocessing.reduction.DupFd(self.number),)


def _received(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number


def _work(environment: Mapping[str, str], parent: int, channel: int, crash_report: int) -> None:
    """Become a worker of the process engine, which ends with the process that asked for it."""
    _begin()
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)

    import numpy as np

    from corral.engines.worker import CRASH_FD, main

    np.random.seed()  # else all workers had the state of the server
    os.environ[CRASH_FD] = str(crash_report)
    main(channel, parent)


class Worker:
    """A process of the process engine, started with the arguments of `subprocess.Popen` that the engine gives."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> None:
        given = (dict(env), os.getpid(), *map(_Descriptor, pass_fds))
        self.args = command
        self._process = _CONTEXT.Process(target=_work, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode
