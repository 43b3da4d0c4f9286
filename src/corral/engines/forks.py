"""The end of processes that user code forks, such as an env that forks a simulator.

A forked process is a copy of its parent, with the parent's call stack. If it returned through that stack, it would act
as a second worker on the same socket, or as a second driver.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from corral.errors import WorkerDiedError


@contextmanager
def forks_end_here() -> Iterator[None]:
    """End every process that was forked in the `with` block where it would leave the block.

    Its exit code is the code of its `SystemExit`, 0 if it returned, and 1 if it raised something else. The exit
    handlers do not run: they belong to the parent.
    """
    owner = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != owner:
            _exit(error)
        raise
    if os.getpid() != owner:
        _exit(SystemExit())


def _exit(error: BaseException) -> None:
    code = 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif error.code is None or isinstance(error.code, int):
        code = error.code or 0
    else:
        print(error.code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it may be closed
            stream.flush()
    os._exit(code & 0xFF)


def foreign_call(name: str, owner: int) -> Future[Any]:
    """Return the failed future of a call that a process forked from the owner of a worker makes."""
    future: Future[Any] = Future()
    future.set_exception(
        WorkerDiedError(
            f"{name} was started by process {owner}, and process {os.getpid()}, forked from it, cannot use it."
        )
    )
    return future
