"""Links to other programs: the one door from the rooms to compat/, which knows their names, files and protocols."""

from __future__ import annotations

import importlib
from typing import Any


def load_link(name: str) -> Any:
    """Return the module `name` of compat/, such as `"sb3.files"`, which is imported when it is needed first."""
    return importlib.import_module(f"corral.compat.{name}")
