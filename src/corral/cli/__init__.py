"""The command line: `corral train`, `corral checkpoint info`, `corral events`."""

import contextlib
import signal
import sys

EXIT_ERROR, EXIT_USAGE = 1, 2


def interrupted_status(error: KeyboardInterrupt) -> int:
    """Return the exit status of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + int(getattr(error, "number", signal.SIGINT))


def print_error(error: BaseException) -> None:
    """Print an error in one line to standard error, if that can be written."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"corral: {error}", file=sys.stderr)
