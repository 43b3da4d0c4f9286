"""The installed command `corral`, as users start it: `python -m corral` finds modules in other places."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def corral_command(*arguments: str) -> list[str]:
    """Return a command line of the script `corral` of the environment that runs the tests."""
    script = Path(sysconfig.get_path("scripts"), "corral")
    assert script.is_file(), f"there is no {script}: install Corral here, with pip install --no-deps --editable ."
    return [str(script), *arguments]
