"""Where a command finds modules: Python's own, and the user's in the working directory."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def import_from_working_directory() -> None:
    """Let imports find the user's modules in the working directory, in the same order however Corral was started.

    First Python's standard library, then the working directory, then PYTHONPATH and the installed packages: a file such
    as `random.py` breaks nothing that imports `random`. Modules next to a console script are not found: the script is
    in a folder of programs.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the folder was removed
        return
    library = os.path.dirname(os.__file__)
    first = [place for place in sys.path if place in (library, os.path.join(library, "lib-dynload"))]
    dropped = {"", here, _folder_of_programs()}
    rest = [place for place in sys.path if place not in first and place not in dropped]
    sys.path[:] = [*first, here, *rest]


def _folder_of_programs() -> str | None:
    """Return the folder of the console script that this process runs, or `None`."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return None if file is None or file.endswith(".py") else os.path.dirname(os.path.realpath(file))


def hidden_modules() -> str:
    """Return a sentence about files of the working directory that have the names of other modules, or `""`."""
    files = [file.name for file in sorted(Path().glob("*.py")) if _is_hidden(file)]
    return f" Rename {' and '.join(files)}: another module has the same name." if files else ""


def _is_hidden(file: Path) -> bool:
    """Return whether there is another module with the name of a file."""
    if file.stem in sys.builtin_module_names:
        return True
    here = file.parent.resolve()
    found = [getattr(sys.modules.get(file.stem), "__spec__", None)]
    found.append(PathFinder.find_spec(file.stem, [place for place in sys.path if Path(place).resolve() != here]))
    return any(spec is not None and spec.origin and Path(spec.origin).resolve() != file.resolve() for spec in found)
