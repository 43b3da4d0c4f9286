"""What each worker process calls before it unpickles anything: the functions that an environment variable names.

A package can so register envs, or prepare imports, in processes that do not run the user's script.
"""

from __future__ import annotations

import os
import pkgutil

from corral.errors import ConfigError

WORKER_SETUP = "CORRAL_WORKER_SETUP"
"""Variable with import paths of functions, such as `my_package.envs:register`, separated by commas."""


def set_up_worker(functions: str | None = None) -> None:
    """Call the functions of `CORRAL_WORKER_SETUP` without arguments, in their order.

    Args:
        functions: Value of the variable in the process that started this one. It replaces the value here, which is not
            inherited on another machine.

    Raises:
        ConfigError: A function cannot be imported.
    """
    if functions is not None:
        os.environ[WORKER_SETUP] = functions
    for path in filter(None, os.environ.get(WORKER_SETUP, "").split(",")):
        try:
            function = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{WORKER_SETUP} names {path!r}, which this process cannot import: {error}.") from error
        function()
