"""The processes of a trial: who is there, who is left, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can get lost."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def reap() -> None:
    """Take the exit statuses of children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state and parent of a process, or `None` if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def is_alive(pid: int) -> bool:
    """Return whether a process is there, and is no zombie."""
    found = _stat(pid)
    return found is not None and found[0] not in "ZX"


def descendants(root: int) -> set[int]:
    """Return the living descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (found := _stat(int(entry))) is not None and found[0] not in "ZX":
            children.setdefault(found[1], []).append(int(entry))
    tree, waiting = set(), [root]
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if pid not in tree]
        tree |= set(new)
        waiting += new
    return tree


def recorded(record: Path) -> set[int]:
    """Return the processes in which an env of the record was."""
    return {int(file.name.partition(".")[0]) for file in record.glob("*.*-*") if "steps" not in file.name}


def newest_of(record: Path, name: str) -> int:
    """Return the process in which the newest env of a runner was, such as of `runner-1`; 0 if there is none alive."""
    files = sorted(record.glob(f"*.{name}"), key=lambda file: file.stat().st_mtime_ns)
    alive = [pid for file in files if is_alive(pid := int(file.name.partition(".")[0]))]
    return alive[-1] if alive else 0


def wait_until_gone(record: Path, spared: set[int], deadline_s: float) -> dict[int, str]:
    """Wait until all descendants and all processes of the record have ended; return those that have not, by name."""
    end_s, num_empty = time.monotonic() + deadline_s, 0
    while True:
        reap()
        left = (descendants(os.getpid()) | {pid for pid in recorded(record) if is_alive(pid)}) - spared - {os.getpid()}
        num_empty = 0 if left else num_empty + 1
        # A process may fork and end while /proc is read, so that one look could miss both.
        if num_empty == 3 or (left and time.monotonic() > end_s):
            return {pid: _command(pid) for pid in left}
        time.sleep(0.02)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:300]
    return "?"


def kill_all(pids: set[int]) -> None:
    """Kill processes that a trial left."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
