"""How the command line ends: one exit status for each kind of failure."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import NamedTuple

from corral.core.text import printable
from corral.errors import (
    CheckpointError,
    ConfigError,
    CorralError,
    EnvError,
    LossError,
    MissingPackageError,
    RunDirectoryError,
    StopCriterionError,
    WorkerDiedError,
)

EXIT_ERROR, EXIT_USAGE = 1, 2
OWN_ERRORS = (CorralError, FileExistsError)
"""Errors whose message says everything, so that no traceback is printed."""


class Failure(NamedTuple):
    """A kind of failure.

    Attributes:
        status: Exit status.
        errors: Classes of the exceptions.
        meaning: What happened, for the documentation.
    """

    status: int
    errors: tuple[type[BaseException], ...]
    meaning: str


FAILURES = (
    Failure(
        EXIT_USAGE,
        (ConfigError, StopCriterionError),
        "wrong usage: an unknown name, a value out of bounds, a contradiction, no stop criterion, or one that is not "
        "in the result",
    ),
    Failure(3, (EnvError,), "the env failed: it cannot be made, raised, hung, or returned NaN or a value of no space"),
    Failure(4, (LossError,), "learning failed: a loss became NaN or infinite"),
    Failure(5, (WorkerDiedError,), "a worker was lost: its process ended or hung, and it was not replaced"),
    Failure(
        6,
        (RunDirectoryError, FileExistsError),
        "the run directory cannot be used: it cannot be written, was removed, holds a run already, or holds no run to "
        "continue",
    ),
    Failure(7, (CheckpointError,), "a checkpoint is missing or damaged, does not fit, or cannot be written"),
    Failure(8, (MissingPackageError,), "a package is not installed; the message has the command that installs it"),
)
"""The kinds of failures; an error belongs to the kind of its nearest class."""

EXIT_STATUSES = {
    0: "a stop criterion was met",
    EXIT_ERROR: "another error, such as a callback that raised; a traceback shows an error of unknown kind",
    **{failure.status: failure.meaning for failure in FAILURES},
    128 + signal.SIGINT: "interrupted (Ctrl-C)",
    128 + signal.SIGTERM: "ended by SIGTERM",
    128 + 1: "ended by SIGHUP",
}
"""What each exit status of `corral` means."""


def status_of(error: BaseException) -> int:
    """Return the exit status for an error that ends the command."""
    if isinstance(error, KeyboardInterrupt):
        return interrupted_status(error)
    found = {kind: failure.status for failure in FAILURES for kind in failure.errors}
    return next((found[kind] for kind in type(error).__mro__ if kind in found), EXIT_ERROR)


def interrupted_status(error: KeyboardInterrupt) -> int:
    """Return the exit status of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + int(getattr(error, "number", signal.SIGINT))


def print_error(error: BaseException | str) -> None:
    """Print an error in one line to standard error, if that can be written."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(printable(f"corral: {error}", newline="\n"), file=sys.stderr)
