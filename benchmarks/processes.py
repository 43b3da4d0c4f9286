"""Runs a measuring script in a session of its own, times its line and leaves no process behind."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import IO, Any

STDERR_LINES = 15
# Time that a script gets, once its line is out, to shut down what it has started.
EXIT_SECONDS = 30.0

_leaders: set[int] = set()  # process ids of the scripts that run


@dataclass(frozen=True)
class Outcome:
    """What came of a script: its JSON line and the seconds until it arrived, or what went wrong.

    Attributes:
        line: What the script printed.
        wall_seconds: From the start of the script.
        cpu_seconds: Sum over the script and the processes that it started, also those that it has waited for.
        error: What went wrong, or None.
    """

    line: dict[str, Any] | None
    wall_seconds: float | None
    cpu_seconds: float | None
    error: str | None


def run_script(command: Sequence[str], timeout: float, working_directory: Path) -> Outcome:
    """Runs a command until it has printed a JSON line and ended, or kills it after the timeout."""
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        start = perf_counter()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                errors="replace",
                cwd=working_directory,
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(None, None, None, f"could not be started: {error.strerror}")
        _leaders.add(process.pid)
        lines, reader = _start_reader(process)
        try:
            found = _await_line(lines, timeout)
            if found is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(EXIT_SECONDS)
                line, arrival, cpu_seconds = found
                return Outcome(line, arrival - start, cpu_seconds, None)
            ended = process.poll()
        finally:
            kill_session(process.pid)
            process.wait()
            _leaders.discard(process.pid)
            reader.join()
            if process.stdout is not None:
                process.stdout.close()
        what = f"killed after {timeout:g} s" if ended is None else f"ended with status {ended} and no result"
        return Outcome(None, None, None, f"{what}\n{_tail(stderr)}".strip())


def exit_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, so that scripts are killed."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, leave)


def kill_scripts() -> None:
    """Kills what `run_script` runs, in all threads."""
    for leader in [*_leaders]:
        kill_session(leader)


def kill_session(leader: int) -> None:
    """Kills every process of a session.

    Its process group is not enough: Ray gives each of its workers a group of its own. They stay in the
    session, which Linux shows in /proc; elsewhere only the group is killed.
    """
    for pid in _stat_fields_of_session(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _stat_fields_of_session(leader: int) -> dict[int, list[str]]:
    """Returns the fields of /proc/PID/stat from the state on, by process, of those whose session id is `leader`."""
    fields_by_pid = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the name in brackets, which may hold anything: state, parent, group, session.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                fields_by_pid[int(stat.parent.name)] = fields
    return fields_by_pid


def _cpu_seconds_of_session(leader: int) -> float:
    """Returns the CPU seconds so far of the processes of a session, and of their children that have ended."""
    # utime, stime, cutime, cstime
    ticks = sum(int(value) for fields in _stat_fields_of_session(leader).values() for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


_Line = tuple[dict[str, Any], float, float] | None
"""A JSON object, when it came, and the CPU seconds of the session until then; or None at the end of the output."""


def _start_reader(process: "subprocess.Popen[str]") -> tuple["queue.Queue[_Line]", threading.Thread]:
    """Starts to read a process's output, so that its first JSON object is timed when it comes."""
    lines: queue.Queue[_Line] = queue.Queue()

    def read() -> None:
        for text in process.stdout or ():
            arrival = perf_counter()
            with contextlib.suppress(ValueError):
                parsed = json.loads(text)
                if isinstance(parsed, dict):
                    lines.put((parsed, arrival, _cpu_seconds_of_session(process.pid)))
        process.wait()
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return lines, reader


def _await_line(lines: "queue.Queue[_Line]", timeout: float) -> _Line:
    """Returns the first JSON object that the process prints with its times, or None without one."""
    try:
        return lines.get(timeout=timeout)
    except queue.Empty:
        return None


def _tail(stderr: IO[str]) -> str:
    """Returns the last lines that a script wrote to stderr, without the folders of this machine."""
    stderr.seek(0)
    lines = stderr.read().rstrip().splitlines()[-STDERR_LINES:]
    return re.sub(r"/[^\s\"']*/(?=[^\s\"'/])", "", "\n".join(lines))
