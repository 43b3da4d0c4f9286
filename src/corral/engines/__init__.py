"""Engines: where workers run. The only rooms that know of processes."""

from corral.engines.base import Engine
from corral.engines.local import LocalEngine


def make_engine(name: str) -> Engine:
    """Return the engine of the setting `engine_name`; `"auto"` is the local one."""
    assert name in ("auto", "local"), name  # the config refuses other names
    return LocalEngine()
