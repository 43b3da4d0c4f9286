"""A guard process, which ends the process group of another process when that process has ended, for any reason.

A process that is killed cannot end the processes that it started, and no other process knows them. The guard is run as
a script, so that it costs little: it does not import this package or any other package.
"""

from __future__ import annotations

import os
import select
import signal
import sys


def guard_this_process() -> None:
    """Start a guard of this process and its later children; the guard is not among the processes that Ray ends.

    This process becomes the leader of a process group, if it is not one. The guard needs Linux; on other systems, none
    is started.
    """
    import subprocess  # imported here, because the guard itself does not need it

    if not hasattr(os, "pidfd_open"):
        return
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    subprocess.run(command, start_new_session=True, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def main(pid: int) -> None:
    """Fork a process that waits for the end of process `pid` and ends its group; return at once."""
    process = os.pidfd_open(pid)
    if os.fork():
        return
    select.select([process], [], [])
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # no process of the group is left


if __name__ == "__main__":
    main(int(sys.argv[1]))
