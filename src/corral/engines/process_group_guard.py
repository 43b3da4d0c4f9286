"""A guard process, which ends a process group when one of the processes that it watches has ended, for any reason.

A process that is killed cannot end the processes that it started, and no other process knows them. The processes that
it started cannot watch it themselves while they run C code that holds Python's global lock. The guard is run as a
script, so that it costs little: it does not import this package or any other package.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

_COMMAND = [sys.executable, "-I", "-S", __file__]

_guarded_group: int | None = None  # the process group of this process, if a guard ends it


def guard_this_process(parent: int | None = None) -> bool:
    """Start a guard that ends this process and its later children with `parent`; return whether there is a guard.

    This process becomes the leader of a process group, if it is not one. The guard is in another session and is no
    child of this process, so that Ray does not end it.

    The guard also ends the children when this process ends. It needs Linux 5.3.
    """
    global _guarded_group
    import subprocess  # imported here, because the guard itself does not need it

    if not hasattr(os, "pidfd_open"):
        return False
    group = os.getpid()
    if os.getpgrp() != group:
        os.setpgid(0, 0)
    watched = [group] if parent is None else [group, parent]
    done = subprocess.run(
        [*_COMMAND, str(group), *map(str, watched)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    if done.returncode == 0:
        _guarded_group = group
    return done.returncode == 0


def start_guarded_group() -> subprocess.Popen[bytes] | None:
    """Return a new guard, which leads a new process group and ends the group when this process ends.

    Returns:
        The guard, whose id is the id of the group; whoever started it ends it. `None` if this process is in a group
        that is guarded already, as a runner of an engine is, or if there can be no guard.
    """
    import subprocess

    if not hasattr(os, "pidfd_open") or os.getpgrp() == _guarded_group:
        return None
    return subprocess.Popen(
        [*_COMMAND, "0", str(os.getpid())], process_group=0, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def main(group: int, *watched: int) -> None:
    """End process group `group` when one of the processes `watched` has ended.

    Group 0 is the group of this process. For another group, fork a process that waits, and return at once.
    """
    try:
        processes = [os.pidfd_open(pid) for pid in watched]
    except ProcessLookupError:  # it has ended already
        processes = []
    if group and os.fork():
        return
    if processes:
        select.select(processes, [], [])
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # no process of the group is left


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
