"""Commands of the Python processes that Corral starts, which import Corral itself from where this process has it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
"""Folder in which this package is."""


def own_command(module: str, call: str = "main()") -> list[str]:
    """Return the command of a Python process that calls a function of one of Corral's modules.

    Python's `-m` would look into the working directory first, and could find the user's `corral.py` or `random.py`.

    Args:
        module: Name of the module.
        call: The call, in Python. What it returns is the exit status.
    """
    imports = f"import sys; sys.path.insert(0, {ROOT!r}); import corral; del sys.path[0]; import {module} as own"
    return [sys.executable, "-P", "-c", f"{imports}; sys.exit(own.{call})"]
