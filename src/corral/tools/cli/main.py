"""The command `corral`."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from corral.core.import_places import hidden_modules, import_from_working_directory
from corral.core.interrupts import ending_signals_raised
from corral.core.text import LineFormatter
from corral.tools.cli.exit_status import EXIT_ERROR, OWN_ERRORS, interrupted_status, print_error, status_of
from corral.tools.cli.parser import make_parser

PRINTS_AT_END = ("checkpoint", "config", "evaluate", "events", "completion", "export", "list", "plot", "report")
"""Commands that are over when they have printed: what nobody reads is no error of theirs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: What follows `corral`; `None` is what the process was started with.

    Returns:
        One of `EXIT_STATUSES`.
    """
    options = make_parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode gets other characters, and no error
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    if logging.lastResort is not None:  # shows warnings before there is a run.log
        logging.lastResort.setFormatter(LineFormatter())
    import_from_working_directory()
    try:
        with ending_signals_raised(at_once=options.command in PRINTS_AT_END and options.command != "evaluate"):
            module, _, function = options.run.partition(":")
            return int(getattr(importlib.import_module(module), function)(options))
    except KeyboardInterrupt as error:
        return interrupted_status(error)
    except OWN_ERRORS as error:
        print_error(error)
        return status_of(error)
    except (BrokenPipeError, SystemExit) as error:
        return _status_where_it_ended(error, options.command)
    except Exception as error:
        if hidden := hidden_modules():
            error.add_note(f"corral:{hidden}")
        raise
    finally:
        _drop_unwritable_output()


def _status_where_it_ended(error: BrokenPipeError | SystemExit, command: str) -> int:
    """Return the exit status of a command that a closed pipe or `sys.exit()` ended."""
    if command in PRINTS_AT_END and isinstance(error.__context__ or error, BrokenPipeError):
        return 0  # who reads has what they want, as in `corral list envs | head`; Rich makes a SystemExit of it
    if isinstance(error, BrokenPipeError):
        raise error
    traceback.print_exception(error)  # Python prints none, and the status would say that it succeeded
    print_error("code of the env, a callback or another class of yours ended the process, as sys.exit() does.")
    return error.code if isinstance(error.code, int) and error.code else EXIT_ERROR


def _drop_unwritable_output() -> None:
    """Drop what standard output cannot write, such as to a closed pipe: Python would fail with it at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
