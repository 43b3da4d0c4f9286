"""What Ray calls in `ray.init`, so that its workers serve `ray.rllib` too."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

SETUP = "corral.compat.rllib.install"


def add_setup(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Return a runtime environment whose workers install the finder before they unpickle anything.

    Ray calls this function because the environment variable `RAY_RUNTIME_ENV_HOOK` names it. A setup function that the
    user has given runs afterwards.
    """
    runtime_env = dict(runtime_env or {})
    given = runtime_env.get("worker_process_setup_hook")
    if given != SETUP:
        runtime_env["worker_process_setup_hook"] = SETUP if given is None else _Both(given)
    return runtime_env


class _Both:
    """Setup function that installs the finder, and calls the user's function."""

    def __init__(self, given: str | Callable[[], Any]) -> None:
        self.given = given
        self.__name__ = getattr(given, "__name__", str(given))

    def __call__(self) -> None:
        from corral.compat.rllib.finder import install

        install()
        (pkgutil.resolve_name(self.given) if isinstance(self.given, str) else self.given)()
