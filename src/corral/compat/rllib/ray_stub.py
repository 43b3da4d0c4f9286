"""The small part of `ray` that most scripts need, for machines on which Ray is not installed.

`ray.init`, `ray.shutdown` and the registry of envs and algorithms work in this process. Anything else of Ray raises an
error that names the extra.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from corral.compat.rllib.table import EXTRA
from corral.errors import ConfigError, NotServedError

ENV_CREATOR = "env_creator"
TRAINABLE_CLASS = "trainable_class"


class _Registry:
    """Envs and algorithms by category and name, in this process."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], Any] = {}

    def register(self, category: str, key: str, value: Any) -> None:
        self._values[category, key] = value

    def unregister(self, category: str, key: str) -> None:
        self._values.pop((category, key), None)

    def contains(self, category: str, key: str) -> bool:
        return (category, key) in self._values

    def get(self, category: str, key: str) -> Any:
        """Return a registered value; a value that is registered by its import path is imported now."""
        value = self._values[category, key]
        return value.resolve() if hasattr(value, "resolve") else value


_global_registry = _Registry()


def register_env(name: str, env_creator: Callable[..., Any]) -> None:
    """Register a function `fn(env_config)` that makes an env."""
    if not callable(env_creator):
        raise TypeError(f"register_env: the second argument must be callable, got {env_creator!r}.")
    _global_registry.register(ENV_CREATOR, name, env_creator)


def register_trainable(name: str, trainable: Any, warn: bool = True) -> None:
    """Register an algorithm class."""
    _global_registry.register(TRAINABLE_CLASS, name, trainable)


def get_trainable_cls(trainable_name: str) -> Any:
    """Return the class of an algorithm, such as `"PPO"`.

    Raises:
        ConfigError: No class has this name.
    """
    if not _global_registry.contains(TRAINABLE_CLASS, trainable_name):
        pkgutil.resolve_name("ray.rllib:_register_all")()
    if not _global_registry.contains(TRAINABLE_CLASS, trainable_name):
        raise ConfigError(f"get_trainable_cls: there is no algorithm {trainable_name!r}.")
    return _global_registry.get(TRAINABLE_CLASS, trainable_name)


_is_initialized = False


def init(*args: Any, **kwargs: Any) -> None:
    """Note that `ray.init` was called; without Ray, nothing has to start."""
    global _is_initialized
    _is_initialized = True


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Note that `ray.shutdown` was called."""
    global _is_initialized
    _is_initialized = False


def is_initialized() -> bool:
    """Return whether `ray.init` was called."""
    return _is_initialized


def put(value: Any) -> Any:
    """Return the value: without Ray, a reference is the object itself."""
    return value


def get(refs: Any, *, timeout: float | None = None) -> Any:
    """Return the values of references made by `put`."""
    return refs


def cluster_resources() -> dict[str, float]:
    """Return the CPUs and GPUs of this machine."""
    import os

    import torch

    return {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}


def pretty_print(result: dict[str, Any]) -> str:
    """Return a result as YAML, without its config and without empty values."""
    import yaml

    from corral.compat.rllib.helpers import convert_numpy_to_python_primitives

    shown = {key: value for key, value in result.items() if key != "config" and value is not None}
    return yaml.safe_dump(convert_numpy_to_python_primitives(shown), default_flow_style=False)


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """Return the decorated object unchanged, with or without arguments of the decorator."""
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _decorator


def log_once(key: str) -> bool:
    """Return whether this is the first call with a key."""
    is_first = key not in _logged
    _logged.add(key)
    return is_first


_logged: set[str] = set()

_RESULT_KEYS = {
    "TRAINING_ITERATION": "training_iteration",
    "TIME_TOTAL_S": "time_total_s",
    "TIME_THIS_ITER_S": "time_this_iter_s",
    "TIMESTEPS_TOTAL": "timesteps_total",
    "TIMESTEPS_THIS_ITER": "timesteps_this_iter",
    "EPISODES_TOTAL": "episodes_total",
    "EPISODES_THIS_ITER": "episodes_this_iter",
    "EPISODE_REWARD_MEAN": "episode_reward_mean",
    "DONE": "done",
    "TRIAL_ID": "trial_id",
    "TIMESTAMP": "timestamp",
    "HOSTNAME": "hostname",
    "NODE_IP": "node_ip",
    "PID": "pid",
}

_REGISTRY = {
    "ENV_CREATOR": ENV_CREATOR,
    "TRAINABLE_CLASS": TRAINABLE_CLASS,
    "_global_registry": _global_registry,
    "get_trainable_cls": get_trainable_cls,
    "register_env": register_env,
    "register_trainable": register_trainable,
}

STUBS: dict[str, dict[str, Any]] = {
    "ray": {
        "__version__": "0",
        **{f.__name__: f for f in (init, shutdown, is_initialized, put, get, cluster_resources)},
    },
    "ray.air": {},
    "ray.air.constants": {"TRAINING_ITERATION": "training_iteration"},
    "ray.train": {"TRAINING_ITERATION": "training_iteration"},
    "ray.train.constants": {"TRAINING_ITERATION": "training_iteration"},
    "ray.tune": {name: _REGISTRY[name] for name in ("register_env", "register_trainable")},
    "ray.tune.logger": {"pretty_print": pretty_print},
    "ray.tune.registry": _REGISTRY,
    "ray.tune.result": _RESULT_KEYS,
    "ray.util": {"log_once": log_once},
    "ray.util.annotations": dict.fromkeys(("DeveloperAPI", "PublicAPI", "Deprecated"), _decorator),
}
"""Names of the stub, by module."""


class _StubModule(ModuleType):
    """A module of `ray` on a machine without Ray."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise AttributeError(_needs_ray(f"{self.__name__}.{name}"))


class StubFinder(MetaPathFinder, Loader):
    """Finds the stub of `ray`; it is the last finder, so that an installed Ray is found before it.

    Raises:
        NotServedError: The stub has no such module or name; the message names the extra.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_ray = fullname == "ray" or is_stub()
        if not is_ray or fullname.partition(".")[0] != "ray":
            return None
        if fullname not in STUBS:
            raise NotServedError(_needs_ray(fullname))
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(STUBS[module.__name__])
        if module.__name__ == "ray":  # these are there after `import ray`, as in Ray itself
            module.__path__ = []


def is_stub() -> bool:
    """Return whether `ray` is the stub in this process."""
    return isinstance(sys.modules.get("ray"), _StubModule)


def _needs_ray(path: str) -> str:
    return f"{path} needs Ray, which is not installed: {EXTRA}."
