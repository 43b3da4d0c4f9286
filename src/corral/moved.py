"""Names of earlier versions: import paths that lead to where modules are now, and methods of `Algorithm`."""

from __future__ import annotations

import importlib
import warnings
from functools import partial
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any

MOVED = {
    "checkpoint.places": "core.places",
    "evaluation.evaluator": "algorithms.evaluator",
    "policies.evaluate": "tools.playing.evaluate",
    "policies.play": "tools.playing.play",
    "testing.envs": "testing",
    "checkpoint": "runs.checkpoint",
    "cli": "tools.cli",
    "config": "algorithms.config",
    "curriculum": "callbacks.curriculum",
    "episodes": "data.episodes",
    "evaluation": "runners.evaluation",
    "loggers": "runs.loggers",
    "metrics": "core.metrics",
    "offline": "data.offline",
    "policies": "runs.policies",
    "replay": "data.replay",
    "report": "tools.report",
    "search": "tools.search",
    "serving": "runners.serving",
    "transforms": "modules.transforms",
    "tune": "compat.tune",
}
"""Old path of a module or package -> its path now, both within `corral`; a longer old path goes first."""


class MovedModules:
    """Finder and loader of modules by their old import paths, the last one that Python asks.

    A module of an old path is a view of the module that moved, with the same objects, so that no class exists twice.
    """

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of an old import path; `None` for any other name."""
        package, _, old = name.partition(".")
        for start, now in MOVED.items() if package == "corral" else ():
            if old == start or old.startswith(f"{start}."):
                moved = f"corral.{now}{old.removeprefix(start)}"
                # Each view counts as a package, so that Python asks for the modules in it.
                return ModuleSpec(name, cls, loader_state=moved, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """Return the view of the module that moved, with a warning that says where it is."""
        module: Any = ModuleType(spec.name)
        module.__path__ = []  # not the folder that moved, from which Python would load its modules a second time
        module.__getattr__ = partial(getattr, importlib.import_module(spec.loader_state))
        warnings.warn(f"{spec.name} is {spec.loader_state} now: use that name.", DeprecationWarning, stacklevel=2)
        view: ModuleType = module
        return view

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Do nothing: the module that moved has run."""


# Method of `Algorithm` in earlier versions -> the part that has it now, and its name there.
MOVED_METHODS = {
    "agent_policies": "acting.agent_policies",
    "count_dropped": "sampler.count_dropped",
    "exceptions_shown": "report.exceptions_shown",
    "get_transform_states": "modules.get_transform_states",
    "loss_of": "modules.loss_of",
    "make_module": "modules.make",
    "merge_statistics": "modules.merge_statistics",
    "reserve_metrics": "report.reserve_metrics",
    "resolve_module_id": "modules.resolve_id",
    "set_transform_states": "modules.set_transform_states",
    "take_changed_weights": "weights.take_changed",
    "trains": "modules.trains",
}


def moved_method(algorithm: Any, name: str) -> Any:
    """Return what a name of earlier versions of `Algorithm` means now, with a warning that gives its name."""
    now = MOVED_METHODS[name]
    warnings.warn(f"algorithm.{name} is algorithm.{now} now: use that name.", DeprecationWarning, stacklevel=3)
    return attrgetter(now)(algorithm)
