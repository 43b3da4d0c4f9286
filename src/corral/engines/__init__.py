"""Engines, which start workers. No other package starts processes for workers."""

from __future__ import annotations

import importlib.util
import os
import sys

from corral.engines.base import Engine, Resources, WorkerHandle
from corral.errors import MissingPackageError

__all__ = ["Engine", "Resources", "WorkerHandle", "engine_for", "make_engine"]


def engine_for(setting: str) -> str:
    """Return the name of the engine for the setting `engine_name`: `"auto"` is Ray if Ray is in use, else processes.

    Ray is in use if it is initialised in this process, or if it is installed and RAY_ADDRESS is set.
    """
    if setting != "auto":
        return setting
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return "ray"
    return "ray" if os.environ.get("RAY_ADDRESS") and importlib.util.find_spec("ray") is not None else "process"


def make_engine(setting: str) -> Engine:
    """Return the engine for the setting `engine_name`.

    Raises:
        ConfigError: The engine is Ray, and Ray is not installed.
    """
    name = engine_for(setting)
    if name == "local":
        from corral.engines.local import LocalEngine

        return LocalEngine()
    if name == "process":
        from corral.engines.process import ProcessEngine

        return ProcessEngine()
    try:
        from corral.engines.ray import RayEngine
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise MissingPackageError(
            "engine_name='ray' needs Ray, which is not installed: pip install 'corral[ray]', or set "
            "engine_name='process'."
        ) from error
    return RayEngine()
