"""The command `python -m corral.compat.rllib`: runs a script or module as Python does, with RLlib's names served.

python -m corral.compat.rllib script.py --its-options
python -m corral.compat.rllib -m package.module --its-options

With `--port` first, it runs until the first algorithm would be built, and prints the config of Corral as Python code.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from corral.compat.rllib import install
from corral.errors import NotServedError

USAGE = """usage: python -m corral.compat.rllib [--port] (script.py | -m module) [arguments of the script]

--port  run until the first algorithm would be built, and print the config of Corral as Python code;
        see docs/port-an-rllib-script.md. It stands before the script: what follows is for the script."""


def main(arguments: Sequence[str]) -> None:
    """Run the script or module that the arguments name.

    Exits as the script does: with its exit code, or with 1 and the traceback of its exception.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if is_port := list(arguments[:1]) == ["--port"]:
        arguments = arguments[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m") or list(arguments) == ["-m"]:
        sys.exit(USAGE)
    install()
    is_module = arguments[0] == "-m"
    sys.argv[:] = list(arguments[int(is_module) :])
    run = _run_module if is_module else _run_script
    try:
        (functools.partial(_port, run) if is_port else run)(sys.argv[0])
    except Exception as error:
        if isinstance(error, NotServedError) and not is_module:
            from corral.compat.rllib.table import find_hint

            with open(sys.argv[0], encoding="utf-8") as script:
                if hint := find_hint(script.read()):
                    error.add_note(hint)
        error.__traceback__ = _from_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.exit(1)


def _port(run: Callable[[str], None], path: str) -> None:
    """Run a script until its first algorithm, and print the native form; what the script prints goes to stderr."""
    from corral.compat.rllib.port import Ported, end_at_first_algorithm

    end_at_first_algorithm()
    found = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            run(path)
    except Ported as ported:
        found = ported
    if found is None:
        sys.exit(f"{path} built no algorithm, so there is nothing to port.")
    if found.error is not None:
        sys.exit(f"{path}: {found.error}")
    print(found.code, end="")


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(path: str) -> None:
    """Run a file as `__main__`, which stays the main module afterwards: exit functions and threads may need it."""
    if os.path.isdir(path) or not os.path.exists(path):
        sys.exit(f"{sys.executable}: can't open file {os.path.abspath(path)!r}: no such file")
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = SourceFileLoader("__main__", os.path.abspath(path))
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = path, loader
    vars(module).update(__builtins__=builtins, __cached__=None)
    code = loader.source_to_code(loader.get_data(path), path)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _from_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this file and of `runpy`."""
    here = (__file__, "<frozen runpy>", runpy.__file__)
    while traceback is not None and traceback.tb_next is not None and traceback.tb_frame.f_code.co_filename in here:
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    main(sys.argv[1:])
