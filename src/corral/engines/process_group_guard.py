"""A process that ends another one's process group when that one has ended, however it ended.

A process that is killed cannot end what it started, and nobody else knows of it. Run as a script, so that it costs
little: it imports neither this package nor any other.
"""

from __future__ import annotations

import os
import select
import signal
import sys


def guard_this_process() -> None:
    """Start a guard of this process and of what it will start, outside of the processes that Ray ends with it.

    This process becomes the leader of a process group, if it is none. Only Linux has what the guard needs; nothing is
    started elsewhere.
    """
    import subprocess  # the guard itself does without it

    if not hasattr(os, "pidfd_open"):
        return
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    subprocess.run(command, start_new_session=True, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def main(pid: int) -> None:
    """Return at once; a process of its own waits for the end of `pid`, and ends its group."""
    process = os.pidfd_open(pid)
    if os.fork():
        return
    select.select([process], [], [])
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it left nothing behind


if __name__ == "__main__":
    main(int(sys.argv[1]))
