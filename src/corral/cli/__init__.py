"""The command line: `corral train`, `corral checkpoint info`, `corral events`."""

import contextlib
import sys

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def print_error(error: BaseException) -> None:
    """Print an error in one line to standard error, if that can be written."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"corral: {error}", file=sys.stderr)
