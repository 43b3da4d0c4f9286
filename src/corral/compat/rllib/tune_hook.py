"""Lets Ray Tune take RLlib's algorithm classes and configs: installed with the finder, active when Tune is imported.

Tune asks whether a class derives from its `Trainable`, and whether a config derives from its `_Config`. Algorithms are
views, and configs are light, so neither derives from a class of Tune.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from corral.compat.rllib.ray_stub import is_stub


def _take_algorithms(registry: Any) -> None:
    """Let `register_trainable` take algorithm classes: it registers their trainables."""
    register = registry.register_trainable

    @functools.wraps(register)
    def register_trainable(name: str, trainable: Any, *args: Any, **settings: Any) -> Any:
        if isinstance(trainable, type) and issubclass(trainable, _served("algorithm").Algorithm):
            trainable = _served("tune").make_trainable(trainable)
        elif inspect.isfunction(trainable) and list(inspect.signature(trainable).parameters) == ["config", "reporter"]:
            trainable = _with_reporter(trainable)
        return register(name, trainable, *args, **settings)

    registry.register_trainable = register_trainable


def _with_reporter(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function of the config alone for `function(config, reporter)`, which older versions of Tune took."""

    def run(config: Any) -> Any:
        def report(**metrics: Any) -> None:
            importlib.import_module("ray.tune").report(metrics)

        return function(config, report)

    run.__name__ = function.__name__
    vars(run).update(vars(function))  # `tune.with_resources` keeps the resources there
    return run


def _drop_empty_bundles(module: Any) -> None:
    """Let `PlacementGroupFactory` take bundles that ask for nothing, such as `{"GPU": 0}`, and leave them out."""
    init = module.PlacementGroupFactory.__init__

    @functools.wraps(init)
    def drop_and_init(self: Any, bundles: Any, *args: Any, **settings: Any) -> None:
        first, *others = bundles
        init(self, [first, *(bundle for bundle in others if any(bundle.values()))], *args, **settings)

    module.PlacementGroupFactory.__init__ = drop_and_init


def _report_to_tune(train: Any) -> None:
    """Let functions that Tune runs report with `train.report`, as older versions do."""
    report = train.report

    @functools.wraps(report)
    def report_metrics(metrics: Any, checkpoint: Any = None, **settings: Any) -> Any:
        utils = importlib.import_module("ray.tune.trainable.trainable_fn_utils")
        return (utils.report if utils._in_tune_session() else report)(metrics, checkpoint=checkpoint, **settings)

    train.report = report_metrics


def _take_configs(module: Any) -> None:
    """Let `tune.Tuner(param_space=config)` take configs."""
    module._Config.register(_served("config").AlgorithmConfig)


def _served(name: str) -> Any:
    """Return a module of this package, imported when Ray needs it: installing must stay light."""
    return importlib.import_module(f"{__package__}.{name}")


HOOKS: dict[str, Callable[[Any], None]] = {
    "ray.train": _report_to_tune,
    "ray.tune.execution.placement_groups": _drop_empty_bundles,
    "ray.tune.registry": _take_algorithms,
    "ray.tune.tune": _take_configs,
}
"""Functions that are called with a module of Ray once it was imported."""


class TuneHook(MetaPathFinder):
    """Finds modules of Ray as other finders do, and calls their hook after the import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in HOOKS or is_stub():
            return None
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(fullname, path, target)
            if found is not None and found.loader is not None:
                found.loader = _HookedLoader(found.loader, HOOKS[fullname])
                return found
        return None


class _HookedLoader(Loader):
    """A loader that calls a function with the module that another loader has executed."""

    def __init__(self, loader: Loader, hook: Callable[[Any], None]) -> None:
        self._loader, self._hook = loader, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._hook(module)


def hook_tune() -> None:
    """Install the hook, and call the functions of modules that are imported already."""
    sys.meta_path.insert(0, TuneHook())
    for name, hook in HOOKS.items():
        if name in sys.modules:
            hook(sys.modules[name])
