"""Small helpers of `ray.rllib.utils` that scripts import: decorators, imports of frameworks, dicts, checks.

Torch is imported when a function needs it, so that a script can import these names without it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from corral.core.seeding import seed_everything
from corral.errors import ConfigError, EnvError, nearest, nearest_name

log = logging.getLogger("corral")

F = TypeVar("F")

DEPRECATED_VALUE = -1


class StepFailedRecreateEnvError(Exception):
    """An env raises it so that it is made again; with `restart_failed_sub_environments`, as after every error."""


class _NotProvided:
    """Stands for an argument that was not given."""

    def __repr__(self) -> str:
        return "NotProvided"

    def __reduce__(self) -> str:
        return "NotProvided"  # the same object in all processes


NotProvided = _NotProvided()

__all__ = [
    "DEPRECATED_VALUE",
    "Deprecated",
    "DeveloperAPI",
    "ExperimentalAPI",
    "LambdaDefaultDict",
    "MultiAgentEnvError",
    "NotProvided",
    "NotSerializable",
    "NullContextManager",
    "OldAPIStack",
    "OverrideToImplementCustomLogic",
    "OverrideToImplementCustomLogic_CallToSuperRecommended",
    "PublicAPI",
    "UnsupportedSpaceException",
    "add_mixins",
    "check",
    "check_compute_single_action",
    "check_train_results",
    "check_train_results_new_api_stack",
    "convert_numpy_to_python_primitives",
    "convert_old_gym_space_to_gymnasium_space",
    "convert_to_tensor",
    "deep_update",
    "deprecation_warning",
    "flatten_dict",
    "force_list",
    "force_tuple",
    "framework_iterator",
    "from_config",
    "get_activation_fn",
    "get_device",
    "get_variable",
    "is_overridden",
    "merge_dicts",
    "override",
    "try_import_gymnasium_and_gym",
    "try_import_jax",
    "try_import_open_spiel",
    "try_import_pyspiel",
    "try_import_tf",
    "try_import_tfp",
    "try_import_torch",
    "unflatten_dict",
    "update_global_seed_if_necessary",
]


# Errors.


class UnsupportedSpaceException(Exception):
    """An algorithm cannot use the observation or action space."""


class MultiAgentEnvError(Exception):
    """A multi-agent env breaks its contract."""


class NotSerializable(Exception):
    """An object cannot be written as JSON."""


# Decorators.


def override(parent_cls: type) -> Callable[[F], F]:
    """Return a decorator that checks that a method has the name of an attribute of a base class.

    Raises:
        NameError: `parent_cls` has no such attribute.
    """

    def check_name(method: F) -> F:
        name = getattr(method, "__name__", None)
        if name is not None and not hasattr(parent_cls, name):
            near = nearest_name(name, [known for known in dir(parent_cls) if not known.startswith("__")])
            raise NameError(
                f"@override({parent_cls.__name__}): Corral's {parent_cls.__name__} has no {name!r}, so nothing would "
                f"call it.{f' Did you mean {near!r}?' if near else ''}"
            )
        return method

    return check_name


def _mark(obj: Any = None, **kwargs: Any) -> Any:
    """Return the decorated object unchanged; with keyword arguments only, return the decorator."""
    return _mark if obj is None else obj


PublicAPI = DeveloperAPI = ExperimentalAPI = OldAPIStack = _mark


def OverrideToImplementCustomLogic(obj: F) -> F:
    """Return a method that subclasses are meant to replace, unchanged."""
    obj.__is_overridden__ = False  # type: ignore[attr-defined]
    return obj


OverrideToImplementCustomLogic_CallToSuperRecommended = OverrideToImplementCustomLogic


def is_overridden(obj: Any) -> bool:
    """Return whether a method is not the marked one of the base class."""
    return bool(getattr(obj, "__is_overridden__", True))


def deprecation_warning(
    old: str, new: str | None = None, *, help: str | None = None, error: bool | type[Exception] | None = None
) -> None:
    """Warn that something is deprecated, or raise if `error` is true or an exception class.

    Raises:
        ValueError: `error` is `True`.
    """
    text = f"{old} is deprecated." + (f" Use {new} instead." if new else "") + (f" {help}" if help else "")
    if error:
        raise (ValueError if error is True else error)(text)
    log.warning("%s", text)


def Deprecated(
    old: str | None = None, *, new: str | None = None, help: str | None = None, error: bool | type[Exception] = False
) -> Callable[[Any], Any]:
    """Return a decorator that warns, or raises, when the decorated function is called or the class is made."""

    def decorate(obj: Any) -> Any:
        name = old or obj.__name__
        if isinstance(obj, type):
            made = obj.__init__  # type: ignore[misc]

            def init(self: Any, *args: Any, **kwargs: Any) -> None:
                deprecation_warning(name, new, help=help, error=error)
                made(self, *args, **kwargs)

            obj.__init__ = init  # type: ignore[misc]
            return obj

        def call(*args: Any, **kwargs: Any) -> Any:
            deprecation_warning(name, new, help=help, error=error)
            return obj(*args, **kwargs)

        return call

    return decorate


# Frameworks.


def try_import_torch(error: bool = False) -> tuple[Any, Any]:
    """Return the modules `torch` and `torch.nn`."""
    import torch

    return torch, torch.nn


def try_import_tf(error: bool = False) -> tuple[None, None, None]:
    """Return three times `None`: Corral does not use TensorFlow.

    Raises:
        ImportError: `error` is true.
    """
    if error:
        raise ImportError("Corral does not use TensorFlow: use torch.")
    return None, None, None


def try_import_tfp(error: bool = False) -> None:
    """Return `None`: Corral does not use TensorFlow."""
    try_import_tf(error)


def try_import_jax(error: bool = False) -> tuple[None, None]:
    """Return two times `None`: Corral does not use JAX.

    Raises:
        ImportError: `error` is true.
    """
    if error:
        raise ImportError("Corral does not use JAX: use torch.")
    return None, None


def try_import_gymnasium_and_gym() -> tuple[Any, Any]:
    """Return the module `gymnasium`, and the module `gym` or `None`."""
    return importlib.import_module("gymnasium"), _module_or_none("gym")


def _gym_env_creator(env_context: Mapping[str, Any], env_descriptor: Any) -> Any:
    """Return an env: of a class that takes its settings, or by the name that Gymnasium knows.

    Raises:
        EnvError: Gymnasium knows no such env.
    """
    import gymnasium as gym

    try:
        if callable(env_descriptor):
            return env_descriptor(env_context)
        return gym.make(env_descriptor, **env_context)
    except gym.error.Error as error:
        raise EnvError(f"{env_descriptor!r}: {error}") from error


def try_import_pyspiel(error: bool = False) -> Any:
    """Return the module `pyspiel` of OpenSpiel, or `None`.

    Raises:
        ImportError: It is not installed, and `error` is true.
    """
    return _module_or_none("pyspiel", error)


def try_import_open_spiel(error: bool = False) -> Any:
    """Return the module `open_spiel`, or `None`.

    Raises:
        ImportError: It is not installed, and `error` is true.
    """
    return _module_or_none("open_spiel", error)


def _module_or_none(name: str, error: bool = False) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        if error:
            raise
        return None


def framework_iterator(config: Any = None, frameworks: Any = ("torch",), **kwargs: Any) -> Iterator[str]:
    """Yield `"torch"`, with the framework set in the config; other frameworks are left out."""
    if config is not None and hasattr(config, "framework"):
        config.framework("torch")
    yield "torch"


def convert_to_tensor(data: Any, framework: str = "torch", device: str | None = None) -> Any:
    """Return nested data as torch tensors."""
    from corral.compat.rllib.torch_helpers import convert_to_torch_tensor

    _require_torch(framework)
    return convert_to_torch_tensor(data, device=device)


def get_device(config: Any, num_gpus_requested: float = 1) -> Any:
    """Return the torch device for a config: a GPU if one is asked for and there, else the CPU."""
    import torch

    is_gpu = num_gpus_requested > 0 and torch.cuda.is_available()
    return torch.device(getattr(config, "local_gpu_idx", 0) if is_gpu else "cpu")


def get_variable(
    value: Any,
    framework: str = "torch",
    trainable: bool = False,
    torch_tensor: bool = False,
    device: str | None = None,
    dtype: Any = None,
    **kwargs: Any,
) -> Any:
    """Return a value as a torch tensor if `torch_tensor` is true, else unchanged.

    `dtype` is torch's or NumPy's; without it, floats become 32-bit ones, and arrays and tensors keep theirs.
    """
    import torch

    _require_torch(framework)
    if not torch_tensor:
        return value
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    tensor = torch.as_tensor(value, dtype=dtype, device=device)
    return tensor.requires_grad_(trainable) if tensor.is_floating_point() else tensor


def get_activation_fn(name: Any = None, framework: str = "torch") -> Any:
    """Return the torch class of an activation function, or `None` for a linear one.

    Args:
        name: Name such as `"relu"`, `"linear"`, or a class or function, which is returned.
        framework: Only `"torch"`.

    Raises:
        ConfigError: There is no activation function of this name.
    """
    from torch import nn

    _require_torch(framework)
    if callable(name) or name in (None, "linear"):
        return None if name == "linear" else name
    classes = {"relu": nn.ReLU, "tanh": nn.Tanh, "elu": nn.ELU, "swish": nn.SiLU, "silu": nn.SiLU, "gelu": nn.GELU}
    classes |= {"sigmoid": nn.Sigmoid, "leaky_relu": nn.LeakyReLU}
    if str(name).lower() not in classes:
        raise ConfigError(f"There is no activation function {name!r}. {nearest(str(name), classes)}")
    return classes[str(name).lower()]


def _require_torch(framework: str) -> None:
    if framework != "torch":
        raise ConfigError(f"framework={framework!r} is not there: Corral uses torch only.")


def update_global_seed_if_necessary(framework: str | None = None, seed: int | None = None) -> None:
    """Seed Python, NumPy and torch; do nothing without a seed."""
    if seed is not None:
        seed_everything(seed)


# Dicts, lists and objects from configs.


class LambdaDefaultDict(defaultdict[Any, Any]):
    """A dict that makes the value of a missing key with `fn(key)`."""

    def __init__(self, default_factory: Callable[[Any], Any], *args: Any, **kwargs: Any) -> None:
        """Keep the function.

        Raises:
            TypeError: It is not callable.
        """
        if not callable(default_factory):
            raise TypeError(f"LambdaDefaultDict: the first argument must be callable, got {default_factory!r}.")
        super().__init__(None, *args, **kwargs)
        self._make = default_factory

    def __missing__(self, key: Any) -> Any:
        self[key] = value = self._make(key)
        return value


class NullContextManager(contextlib.nullcontext[None]):
    """A context manager that does nothing."""


def force_list(elements: Any = None, to_tuple: bool = False) -> Any:
    """Return a list or tuple of the elements: empty for `None`, of one element for anything that is no collection."""
    if elements is None:
        found: list[Any] = []
    else:
        found = list(elements) if type(elements) in (list, set, tuple, deque) else [elements]
    return tuple(found) if to_tuple else found


force_tuple = partial(force_list, to_tuple=True)


def flatten_dict(nested: Any, sep: str = "/", env_steps: int = 0) -> dict[str, Any]:
    """Return a flat dict whose keys are the paths in a nested one; entries of lists and tuples are keyed by index."""
    found: dict[str, Any] = {}
    for key, value in nested.items() if isinstance(nested, Mapping) else enumerate(nested):
        if isinstance(value, (Mapping, list, tuple)):
            found |= {f"{key}{sep}{path}": leaf for path, leaf in flatten_dict(value, sep).items()}
        else:
            found[str(key)] = value
    return found


def unflatten_dict(flat: Mapping[str, Any], sep: str = "/") -> dict[str, Any]:
    """Return a nested dict from one whose keys are paths."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(sep)
        place = nested
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def deep_update(
    original: MutableMapping[str, Any],
    new_dict: Mapping[str, Any],
    new_keys_allowed: bool = False,
    allow_new_subkey_list: Sequence[str] | None = None,
    override_all_if_type_changes: Sequence[str] | None = None,
    override_all_key_list: Sequence[str] | None = None,
) -> MutableMapping[str, Any]:
    """Change a nested dict in place, and return it.

    Args:
        original: The dict to change.
        new_dict: New values; a dict in it changes the dict of the same key.
        new_keys_allowed: Whether keys may be added at all depths.
        allow_new_subkey_list: Keys whose dicts may get new keys.
        override_all_if_type_changes: Keys whose dicts are replaced if the value of `"type"` changes.
        override_all_key_list: Keys whose dicts are replaced.

    Raises:
        ConfigError: A key is new and may not be added.
    """
    for key, value in new_dict.items():
        if key not in original and not new_keys_allowed:
            raise ConfigError(f"Unknown key {key!r}. {nearest(key, map(str, original))}")
        old = original.get(key)
        changes_type = (
            isinstance(value, dict)
            and isinstance(old, dict)
            and value.get("type", old.get("type")) != old.get("type", value.get("type"))
        )
        replaces = key in (override_all_key_list or ()) or (
            key in (override_all_if_type_changes or ()) and changes_type
        )
        if isinstance(old, dict) and isinstance(value, dict) and not replaces:
            deep_update(old, value, new_keys_allowed or key in (allow_new_subkey_list or ()))
        else:
            original[key] = value
    return original


def merge_dicts(d1: Mapping[str, Any], d2: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested dict with copies of the values of the first and the values of the second, which win."""
    merged = copy.deepcopy(dict(d1))
    for key, value in d2.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = merge_dicts(merged[key], value) if both else value
    return merged


def add_mixins(base: type, mixins: Sequence[type], reversed: bool = False) -> type:
    """Return a class that derives from `base` and from the mixins, of which the last comes first in the order."""
    for mixin in mixins or ():
        base = type(base.__name__, (base, mixin) if reversed else (mixin, base), {})
    return base


def from_config(cls: Any, config: Any = None, **kwargs: Any) -> Any:
    """Return an object made from a config.

    Args:
        cls: Class of the object when the config names none; a dict or name here is the config.
        config: A dict, whose `"type"` is a class, a callable or an import path and whose other keys are keyword
            arguments; or the type alone; or an object of `cls`, which is returned; or `None`.
        **kwargs: Keyword arguments that win over the keys of the config. `_args` holds positional arguments.

    Raises:
        ConfigError: Nothing says what to make, or the import path leads nowhere.
    """
    if config is None and isinstance(cls, (dict, str)):
        cls, config = None, cls
    if isinstance(cls, type) and isinstance(config, cls):
        return config
    settings = {**config, **kwargs} if isinstance(config, dict) else {"type": config, **kwargs}
    kind = settings.pop("type", None) or cls
    args = force_list(settings.pop("_args", None))
    if isinstance(kind, str):
        module, _, name = kind.replace(":", ".").rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"from_config: type {kind!r} cannot be imported: {error}.") from error
    if not callable(kind):
        raise ConfigError(f"from_config: the config has no type that can be called: {config!r}.")
    return kind(*args, **settings)


def convert_numpy_to_python_primitives(obj: Any) -> Any:
    """Return nested data with numbers and lists of Python in the place of arrays and numbers of NumPy."""
    if isinstance(obj, np.generic):
        return obj.item()
    if isinstance(obj, np.ndarray):
        return obj.tolist()
    if isinstance(obj, dict):
        return {key: convert_numpy_to_python_primitives(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return type(obj)(convert_numpy_to_python_primitives(value) for value in obj)
    return obj


def convert_old_gym_space_to_gymnasium_space(space: Any) -> Any:
    """Return a Gymnasium space for a space of the older gym."""
    import gymnasium as gym

    if isinstance(space, gym.Space):
        return space
    parts = getattr(space, "spaces", None)
    if parts is not None:
        made = [
            convert_old_gym_space_to_gymnasium_space(part)
            for part in (parts.values() if isinstance(parts, dict) else parts)
        ]
        return (
            gym.spaces.Dict(dict(zip(parts, made, strict=True))) if isinstance(parts, dict) else gym.spaces.Tuple(made)
        )
    kind = type(space).__name__
    arguments = {
        "Box": ("low", "high", "shape", "dtype"),
        "Discrete": ("n", "start"),
        "MultiDiscrete": ("nvec",),
        "MultiBinary": ("n",),
    }
    if kind not in arguments:
        raise UnsupportedSpaceException(f"The space {space!r} has no counterpart in Gymnasium.")
    given = {name: getattr(space, name) for name in arguments[kind] if hasattr(space, name)}
    return getattr(gym.spaces, kind)(**given)


# Checks that tests use.


def check(
    x: Any, y: Any, decimals: int = 5, atol: float | None = None, rtol: float | None = None, false: bool = False
) -> None:
    """Compare two nested values; numbers and arrays may differ a little.

    Args:
        x: What was computed: numbers, arrays, tensors, strings, or dicts, lists and tuples of them.
        y: What was expected, of the same structure.
        decimals: Number of decimals in which numbers must agree.
        atol: Absolute tolerance, in the place of `decimals`.
        rtol: Relative tolerance, in the place of `decimals`.
        false: Whether all values must differ.

    Raises:
        AssertionError: The structures differ, or the values do not compare as they must.
    """
    compare = partial(check, decimals=decimals, atol=atol, rtol=rtol, false=false)
    if isinstance(x, Mapping):
        assert isinstance(y, Mapping), f"{y!r} is no dict, unlike {x!r}"
        assert x.keys() == y.keys(), f"the keys {sorted(map(str, x))} and {sorted(map(str, y))} differ"
        for key in x:
            compare(x[key], y[key])
    elif isinstance(x, (tuple, list)):
        assert isinstance(y, (tuple, list)), f"{y!r} is no list, unlike {x!r}"
        assert len(x) == len(y), f"the lengths {len(x)} and {len(y)} differ"
        for one, other in zip(x, y, strict=True):
            compare(one, other)
    else:
        are_equal = _are_equal(_plain(x), _plain(y), decimals, atol, rtol)
        assert are_equal != false, f"{x!r} {'equals' if false else 'differs from'} {y!r}"


def _plain(value: Any) -> Any:
    """Return a tensor as an array, and a statistic as its value."""
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return value.peek() if hasattr(value, "peek") else value


def _are_equal(x: Any, y: Any, decimals: int, atol: float | None, rtol: float | None) -> bool:
    if isinstance(x, (bool, np.bool_)):
        return bool(x) is bool(y)
    if x is None or y is None or isinstance(x, (str, bytes)) or (isinstance(x, int) and isinstance(y, int)):
        return bool(x == y)
    first, second = np.asarray(x), np.asarray(y)
    try:
        if first.dtype.kind in "OSU":
            np.testing.assert_array_equal(first, second)
        elif atol is None and rtol is None:
            np.testing.assert_almost_equal(first, second, decimal=decimals)
        else:
            np.testing.assert_allclose(first, second, atol=atol or 0.0, rtol=1e-7 if rtol is None else rtol)
    except AssertionError:
        return False
    return True


def check_train_results_new_api_stack(train_results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that a result of `train()` has the groups that RLlib's results have, and return it.

    Raises:
        AssertionError: A group is missing, the config is no dict, or a minimum or maximum is no number.
    """
    for key in ("env_runners", "fault_tolerance", "learners", "timers", "training_iteration", "config"):
        assert key in train_results, f"the result has no {key!r}: {sorted(train_results)}"
    assert isinstance(train_results["config"], dict), "the config of the result is no dict"
    for module_id, metrics in train_results["learners"].items():
        for key, value in metrics.items() if module_id != "__all_modules__" else ():
            assert not key.endswith(("_min", "_max")) or np.isscalar(value), f"{key!r} is no number: {value!r}"
    return train_results


check_train_results = check_train_results_new_api_stack


def check_compute_single_action(algorithm: Any, include_state: bool = False, **kwargs: Any) -> None:
    """Check that an algorithm computes actions of its action space, with and without exploration.

    Raises:
        AssertionError: An action is outside of the action space.
    """
    module = algorithm.get_module()
    observation = module.observation_space.sample()
    for explore in (True, False):
        action = algorithm.compute_single_action(observation, explore=explore)
        action = action[0] if isinstance(action, tuple) and include_state else action
        assert algorithm.config.action_space is None or algorithm.config.action_space.contains(action), repr(action)
