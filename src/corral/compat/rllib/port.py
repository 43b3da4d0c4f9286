"""The config of Corral for an experiment of RLlib, as Python code that needs no RLlib.

`python -m corral.compat.rllib --port script.py` runs a script until it builds its first algorithm, or gives one to Ray
Tune, and prints this code.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

import corral
from corral.algorithms.config.config import AlgorithmConfig as NativeConfig
from corral.algorithms.config.display import changed_arguments
from corral.algorithms.config.settings import GROUPS
from corral.algorithms.config.without_effect import find_useless, network_settings, without_unused_settings
from corral.callbacks.callback import EVENTS
from corral.callbacks.dispatch import accepted_arguments
from corral.compat.rllib.adapted_modules import AdaptedMemoryModule, AdaptedModule, AdaptedPart, AdaptedRules
from corral.compat.rllib.algorithm import CONFIGS, Algorithm
from corral.compat.rllib.callbacks import RLlibCallback, _Adapted, _AdaptedClass, _OldMetrics
from corral.compat.rllib.config import AlgorithmConfig
from corral.compat.rllib.env_connectors import Connect, ConnectorEvents
from corral.compat.rllib.learner_connectors import LearnerConnectorEvents
from corral.compat.rllib.native import algorithm_name, to_native
from corral.compat.rllib.own_algorithm import RestoreEvents, ValidateEvents
from corral.compat.rllib.own_learner import OwnLearner
from corral.compat.rllib.script_source import NotPortable, Script, unwrapped
from corral.compat.rllib.tune_hook import HOOKS
from corral.core.scripts import read_names
from corral.core.settings import default_of, find_unused, found_by_name, same_value
from corral.engines import make_engine
from corral.errors import ConfigError, CorralError
from corral.modules.q_module import NORMALIZED_NETWORK
from corral.modules.spec import ModuleSpec
from corral.modules.transforms.settings import describe_transform
from corral.modules.transforms.transform import Transform
from corral.runners.runner_group import EnvRunnerGroup

PAGE = "docs/port-an-rllib-script.md"
WIDTH = 88

_ADAPTED_MODULES = (AdaptedModule, AdaptedMemoryModule, AdaptedRules, AdaptedPart)
_NATIVE_PATHS = {
    "episode_reward_mean": "env_runners/episode_return_mean",
    "env_runners/episode_reward_mean": "env_runners/episode_return_mean",
    "timesteps_total": "num_env_steps_sampled_lifetime",
    "env_runners/num_env_steps_sampled_lifetime": "num_env_steps_sampled_lifetime",
}
"""Corral's paths in a result of numbers at which experiments end."""
_OF_RLLIB = {"callbacks_class", "episode_class", "log_level"}
"""Settings that hold objects for RLlib's interface, or that only serve it."""
_REPLACED = (_OldMetrics, ConnectorEvents, LearnerConnectorEvents, RestoreEvents, ValidateEvents)
"""Callbacks of the translation itself. What they serve is named where the user gave it."""


def port(config: AlgorithmConfig, script: str | None = None, stop: Mapping[str, float] | None = None) -> str:
    """Return a Python file that makes the native config of an experiment of RLlib, and trains.

    What has no native form is left out, and listed with its remedy in the docstring at the top.

    Args:
        config: RLlib's config.
        script: File that made it, from which definitions are copied; `None` copies none.
        stop: Values at which Ray Tune would have ended the run, by path in the result.

    Raises:
        ConfigError: The algorithm is one of the script itself, with a training step but no algorithm of RLlib below it.
    """
    if not isinstance(config, AlgorithmConfig):
        raise ConfigError(
            f"port: {config!r:.80} is no config of RLlib: give one, such as PPOConfig().environment(...)."
        )
    name = algorithm_name(config)
    if not name:
        raise ConfigError(
            f"{config.algo_class.__name__} is an algorithm of its own: write its config and its training_step as "
            "docs/write-an-algorithm.md shows; the rest of the settings can be ported with PPOConfig in its place."
        )
    writer = _Writer(Script(script))
    searched = writer.take_first_values(config)
    cls = config.algo_class
    if cls is not None and not cls.__module__.startswith("corral.compat."):
        writer.leave_out(f"algorithm class {cls.__name__}", "write an algorithm", "your-own-training-step")
    if searched.learner_connector is not None:
        writer.leave_out("learner connector", "listen to on_postprocess_trajectory or on_sample_end", "connectors")
    native = _without_useless_settings(to_native(searched))
    calls = [f"{type(native).__name__}()", *filter(None, (writer.setter(native, group) for group in GROUPS))]
    if isinstance(native.env, str):
        writer.add_registrations(native.env)
    return writer.file(type(native).__name__, calls, stop)


def _without_useless_settings(native: NativeConfig) -> NativeConfig:
    """Return the config without settings that have no effect, which Corral refuses or warns of; makes the env once."""
    native = without_unused_settings(native, groups=GROUPS)
    engine = make_engine("local")
    runners = EnvRunnerGroup(native.copy(num_env_runners=0).freeze(), engine)
    try:
        specs = runners.module_specs
    finally:
        runners.stop()
        engine.stop()
    policies: Any = native.policies
    if isinstance(policies, Mapping):
        own = {
            module_id: {"model_config": _shortened(policy["model_config"], native, {module_id: specs[module_id]})}
            for module_id, policy in policies.items()
            if isinstance(policy, Mapping) and "model_config" in policy and module_id in specs
        }
        policies = {module_id: {**(policy or {}), **own.get(module_id, {})} for module_id, policy in policies.items()}
    return native.copy(model_config=_shortened(native.model_config, native, specs), policies=policies)


def _shortened(settings: Mapping[str, Any], native: NativeConfig, specs: Mapping[str, ModuleSpec]) -> dict[str, Any]:
    """Return settings of default modules, without those that have no effect, or that have their default."""
    useless = {*find_useless(native, specs)}
    configs = [native.for_module(module_id) for module_id in specs]
    networks = [network_settings(config) for config in configs]
    if any(network is None for network in networks):  # a module of the user, which reads what it likes
        return dict(settings)
    useless |= set.intersection(*({*find_unused(network)} for network in networks))
    defaults = {field.name: default_of(field) for network in networks for field in dataclasses.fields(network)}  # type: ignore[arg-type]
    if any(config.module_settings.get("is_normalized") for config in configs):  # RLlib's networks are not
        defaults |= NORMALIZED_NETWORK
    return {
        name: value
        for name, value in settings.items()
        if name not in useless and not (name in defaults and same_value(value, defaults[name]))
    }


class _Writer:
    """Writes values as Python code, and notes what this code needs and what was left out."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._imports: dict[str, None] = {}
        self._names: dict[str, None] = {}
        self._readers = ""
        self._copied: dict[str, None] = {}
        self._left_out: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._registrations: list[str] = []

    def leave_out(self, what: str, remedy: str, anchor: str) -> None:
        """Note something that has no native form."""
        self._left_out[f"{what}: {remedy}; {PAGE}#{anchor}"] = None

    def take_first_values(self, config: AlgorithmConfig) -> AlgorithmConfig:
        """Return a config without the search spaces of Ray Tune: each has its first value, or a drawn one."""
        changed = config.copy(copy_frozen=False)
        for name, value in list(vars(changed).items()):
            setattr(changed, name, self._first_value(name, value))
        return changed

    def _first_value(self, path: str, value: Any) -> Any:
        if isinstance(value, dict) and value.keys() == {"grid_search"}:
            self._notes[f"{path} is the first of {value['grid_search']!r:.200}, which Tune tries one by one"] = None
            return value["grid_search"][0]
        if type(value).__module__ == "ray.tune.search.sample":
            drawn = value.sample()
            self._notes[f"{path} is drawn from a search space of Tune"] = None
            return drawn
        if type(value) is dict:
            return {key: self._first_value(f"{path}.{key}", part) for key, part in value.items()}
        return value

    def add_registrations(self, env: str) -> None:
        """Copy the statements that register an env, if the script has some."""
        for source in self.script.registrations(env):
            try:
                self._need(read_names(source), source)
            except NotPortable as problem:
                self.leave_out(f"the registration of {env}", f"{problem}", "what-has-no-native-form")
            else:
                self._registrations.append(source)

    def setter(self, native: Any, group: str) -> str:
        """Return the call of a group's setter; "" if all settings have their defaults."""
        arguments = []
        for name, value in changed_arguments(native, group):
            path = f"{group}.{name}" if name else group
            if group == "callbacks":
                arguments += self._callbacks(name, value)
                continue
            if self._is_of_rllib(name or group, value) or (name == "evaluation_config" and not evaluates(native)):
                continue
            try:
                arguments.append((f"{name}=" if name else "", self._form(name, value, path)))
            except NotPortable as problem:
                self.leave_out(path, f"{problem}", "what-has-no-native-form")
        if not arguments:
            return ""
        line = f".{group}({', '.join(start + self.write(form) for start, form in arguments)})"
        if len(line) + 4 <= WIDTH:
            return line
        body = "".join(f"        {start}{self.write(form, 8, len(start) + 1)},\n" for start, form in arguments)
        return f".{group}(\n{body}    )"

    def _is_of_rllib(self, name: str, value: Any) -> bool:
        """Return whether a setting serves RLlib's interface only, after noting what the user gave there."""
        if name == "learner_class" and unwrapped(value) is OwnLearner:
            cls = value.args[0]
            self.leave_out(f"learner class {cls.__name__}", "give its loss as a function", "losses-and-learners")
            return True
        if name == "rl_module" and value in _ADAPTED_MODULES:
            return True  # noted with its settings
        if name == "model_config" and "rl_module_class" in value:
            what = f"RLModule {value['rl_module_class'].__name__} with model_config={value['rl_model_config']!r:.200}"
            self.leave_out(what, "write a corral.Module", "modules")
            return True
        if name == "wrappers":
            for each in value:
                if isinstance(each, Connect):
                    self.leave_out("connectors", "write transforms, or wrappers of the env", "connectors")
            return all(isinstance(each, Connect) for each in value)
        return name in _OF_RLLIB

    def _form(self, name: str, value: Any, path: str) -> Any:
        """Return the value of a setting as trees of code: strings in place of what is no container.

        Raises:
            NotPortable: It has no form in Python code.
        """
        if name == "policies_to_train" and isinstance(value, functools.partial):
            return f"lambda module_id: ({self._function(value.args[0])})(module_id, None)"
        if name in ("env_task_fn", "custom_evaluation_function") and isinstance(value, functools.partial):
            value = value.args[0]
            self._notes[f"{path} gets Corral's objects; {PAGE}#callbacks"] = None
        return self._tree(value, path)

    def _tree(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping) and not isinstance(value, spaces.Space):
            found = {}
            for key, part in value.items():
                try:
                    found[self.write(self._tree(key, path))] = self._entry(key, part, f"{path}.{key}")
                except NotPortable as problem:
                    self.leave_out(f"{path}.{key}", f"{problem}", "what-has-no-native-form")
            return {key: part for key, part in found.items() if part is not None}
        if type(value) in (list, tuple):
            return type(value)(self._tree(part, path) for part in value)
        if isinstance(value, (set, frozenset)):
            return (
                f"{{{', '.join(sorted(self.write(self._tree(part, path)) for part in value))}}}" if value else "set()"
            )
        if isinstance(value, Transform):
            return self._transform(value, path)
        return self._leaf(value)

    def _transform(self, transform: Transform, path: str) -> Any:
        cls, settings = type(transform), describe_transform(transform)
        if (name := settings.pop("type")) not in corral.__all__:
            return self._tree({"type": name, **settings}, path)
        self._imports[f"from corral import {name}"] = None
        defaults = {key: parameter.default for key, parameter in inspect.signature(cls).parameters.items()}
        given = {key: value for key, value in settings.items() if not same_value(value, defaults.get(key))}
        return f"{name}({', '.join(f'{key}={self.write(self._tree(value, path))}' for key, value in given.items())})"

    def _entry(self, key: Any, value: Any, path: str) -> Any:
        """Return one entry of a dict; `None` if it serves RLlib's interface only."""
        if key in ("callbacks_class", "callback_functions"):
            raise NotPortable("other callbacks in evaluation")
        if isinstance(key, str) and self._is_of_rllib("rl_module" if key == "module_class" else key, value):
            return None
        return self._form(key, value, path) if isinstance(key, str) else self._tree(value, path)

    def _leaf(self, value: Any) -> str:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, str):
            return _quoted(value)
        if value is None or isinstance(value, (bool, int, float)):
            return repr(value)
        if isinstance(value, spaces.Space):
            return self._space(value)
        if isinstance(value, functools.partial):
            self._imports["import functools"] = None
            given = [*map(self._leaf, value.args), *(f"{name}={self._leaf(v)}" for name, v in value.keywords.items())]
            return f"functools.partial({', '.join([self._function(value.func), *given])})"
        if (copied := getattr(value, "copied_env", None)) is not None:
            self._imports["from corral import make_multi_agent"] = None
            return f"make_multi_agent({self._leaf(copied)})"
        if name := self._name_of_object(value):
            self._need([name])
            return name
        if hasattr(value, "__qualname__"):
            return self._function(value)
        raise NotPortable(f"an instance of {type(value).__name__}: write it by hand")

    def _name_of_object(self, value: Any) -> str:
        """Return the name that the script gives to something which no import path finds; "" if it has none."""
        is_function = hasattr(value, "__qualname__")
        if is_function and (found_by_name(value) or value.__qualname__.endswith("<lambda>")):
            return ""
        return next((name for name, known in vars(sys.modules["__main__"]).items() if known is value), "")

    def _space(self, space: Any) -> str:
        self._imports["import gymnasium as gym"] = None
        if isinstance(space, spaces.Discrete) and space.start == 0:
            return f"gym.spaces.Discrete({space.n})"
        if isinstance(space, spaces.Box) and len(set(space.low.flat)) == len(set(space.high.flat)) == 1:
            low, high = (self._leaf(bound.flat[0].item()) for bound in (space.low, space.high))
            return f'gym.spaces.Box({low}, {high}, {space.shape}, "{space.dtype}")'
        raise NotPortable(f"a space {type(space).__name__}: write it by hand")

    def _function(self, function: Any) -> str:
        """Return the name of a function or class, and note where it comes from; a lambda's own source.

        Raises:
            NotPortable: It is of RLlib's interface, or was defined while the script ran.
        """
        name: str = function.__qualname__
        module: str = function.__module__
        if name.endswith("<lambda>") and module == "__main__":
            source = self.script.lambda_source(function)
            self._need(read_names(source), source)
            return source
        if "<" in name:
            raise NotPortable(f"{name}, defined while the script runs: define it at the top level")
        top = name.partition(".")[0]
        if module == "__main__":
            self._need([top])
        elif module.startswith("ray.rllib.examples"):
            self._copied |= dict.fromkeys(Script(sys.modules[module].__file__).definitions([top]))
        elif module.startswith(("corral.compat", "ray.rllib")):
            raise NotPortable(f"{name} is of RLlib")
        elif module != "builtins":
            self._imports[f"from {module} import {top}"] = None
        return name

    def _need(self, names: Iterable[str], reader: str = "") -> None:
        """Copy the definitions of names of the script, if it has them.

        Args:
            names: The names.
            reader: Source that reads them, if the script does not define it at its top level.

        Raises:
            NotPortable: One of them is of RLlib only.
        """
        known = dict.fromkeys(name for name in names if name not in _BUILTINS)
        self.script.definitions(known, reader)
        self._names |= known
        self._readers += f"{reader}\n"

    def _callbacks(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Return the argument of `callbacks` for classes, or for the functions of one event."""
        forms = []
        for each in value if isinstance(value, list) else [value]:
            if each in _REPLACED:
                continue
            try:
                forms.append(self._callback(name, each))
            except (NotPortable, ConfigError) as problem:
                self.leave_out(_name_of(each), f"{problem}", "callbacks")
        start = f"{name}=" if name not in ("", "callbacks_class") else ""
        if not forms:
            return []
        self._notes[f"callbacks get Corral's objects; an episode that ends is whole; {PAGE}#callbacks"] = None
        return [(start, forms[0] if len(forms) == 1 else forms)]

    def _callback(self, event: str, given: Any) -> str:
        if isinstance(given, type) and issubclass(given, _AdaptedClass):
            factory = given.factory
            cls = unwrapped(factory)
            for name, known in EVENTS.items():
                method = getattr(cls, name, None)
                if method is not None and method is not getattr(RLlibCallback, name, None):
                    accepted_arguments(method.__get__(cls, cls), known)
            return self._leaf(factory)
        if isinstance(given, _Adapted):
            accepted_arguments(given.function, EVENTS[event])
            return self._function(given.function)
        return self._leaf(given)

    def write(self, form: Any, indent: int = 0, used: int = 0) -> str:
        """Return a tree of code as text, on one line, or with one entry per line where this is longer than `WIDTH`.

        Args:
            form: Tree of dicts, lists and tuples with code as keys and leaves.
            indent: Columns in front of the line; 0 is one line in any case.
            used: Columns of the line that are taken.
        """
        if isinstance(form, str):
            return form
        ends, items = "[]", [("", part) for part in form]
        if isinstance(form, dict):
            ends, items = "{}", [(f"{key}: ", part) for key, part in form.items()]
        elif isinstance(form, tuple):
            ends = "()"
        comma = "," if isinstance(form, tuple) and len(items) == 1 else ""
        line = ends[0] + ", ".join(start + self.write(part) for start, part in items) + comma + ends[1]
        if not indent or indent + used + len(line) <= WIDTH:
            return line
        inner = indent + 4
        body = "".join(f"{' ' * inner}{start}{self.write(part, inner, len(start) + 1)},\n" for start, part in items)
        return f"{ends[0]}\n{body}{' ' * indent}{ends[1]}"

    def file(self, config_class: str, calls: list[str], stop: Mapping[str, float] | None) -> str:
        """Return the whole file."""
        about = [f"The experiment of {self.script.name}, without RLlib."]
        about += [
            "",
            "It has the config of the first algorithm. The loop of the script, and what follows, is yours to copy.",
        ]
        if self._left_out:
            about += ["", "Left out, because it has no native form:", *(f"- {line}" for line in self._left_out)]
        if self._notes:
            about += ["", "Read once more:", *(f"- {line}" for line in self._notes)]
        head = '"""' + "\n".join(about) + ("\n" if len(about) > 1 else "") + '"""'
        copied = list(dict.fromkeys([*self._copied, *self.script.definitions(self._names, self._readers)]))
        if any("argparse." in source for source in copied):
            self._imports["import argparse"] = None
        imports = _merged({*self._imports, *filter(_is_import, copied), f"from corral import {config_class}"})
        body = [source for source in copied if not _is_import(source)] + self._registrations
        config = "config = (\n    " + "\n    ".join(calls) + "\n)"
        run = ['if __name__ == "__main__":', "    with config.build() as algo:"]
        if stop:
            run.append(f"        algo.fit(stop={self.write(self._tree(dict(stop), 'stop'), 8, 14)})")
        else:
            run += [f"        result = algo.train()  # the loop of {self.script.name} belongs here"]
            run += ['        print(result["env_runners"]["episode_return_mean"])']
        parts = [head, "\n".join(imports), *(f"\n{source}" for source in body), f"{chr(10) if body else ''}{config}"]
        return "\n\n".join(part for part in [*parts, "\n".join(run)]) + "\n"


def evaluates(native: NativeConfig) -> bool:
    """Return whether there are evaluation rounds; RLlib has no runners for them otherwise."""
    return bool(native.evaluation_interval or native.evaluation_num_env_runners)


_BUILTINS = frozenset(dir(__import__("builtins")))


def _is_import(source: str) -> bool:
    return source.startswith(("import ", "from "))


def _merged(imports: Iterable[str]) -> list[str]:
    """Return lines of imports in order, one for all names of the same module."""
    names: dict[str, set[str]] = {}
    for line in imports:
        start, _, name = line.partition(" import ")
        names.setdefault(start, set()).update({name} - {""})
    lines = [f"{start} import {', '.join(sorted(found))}" if found else start for start, found in names.items()]
    return sorted(lines, key=_import_order)


def _import_order(line: str) -> tuple[int, int, str]:
    module = line.split()[1].partition(".")[0]
    if module == "__future__":
        return 0, 0, line
    return (1 if module in sys.stdlib_module_names else 2), line.startswith("from "), line


def _quoted(text: str) -> str:
    """Return a string as code with double quotes, as in all examples."""
    code = repr(text)
    return f'"{code[1:-1]}"' if code[0] == "'" and '"' not in text else code


def _name_of(callback: Any) -> str:
    if isinstance(callback, _Adapted):
        return f"{callback.event}: {callback.__name__}"
    return getattr(callback, "__name__", type(callback).__name__)


class Ported(BaseException):
    """Ends a script at its first algorithm. It is no `Exception`, so that a script does not catch it.

    Attributes:
        code: The printed file; `None` if there is none.
        error: Why there is none.
    """

    def __init__(self, config: Callable[[], AlgorithmConfig], stop: Mapping[str, float] | None = None) -> None:
        """Port the config at once: what the script does at its end may remove the envs that it registered."""
        super().__init__()
        self.code: str | None = None
        self.error: CorralError | None = None
        try:
            self.code = port(config(), getattr(sys.modules["__main__"], "__file__", None), stop)
        except CorralError as error:
            self.error = error


def end_at_first_algorithm() -> None:
    """Let this process raise `Ported` where an algorithm would be built, or trials of Ray Tune would start."""

    def setup(self: Algorithm, config: AlgorithmConfig) -> None:
        raise Ported(lambda: config)

    Algorithm.setup = setup  # type: ignore[method-assign]
    HOOKS["ray.tune.tuner"] = _hook_tuner
    take_configs = HOOKS["ray.tune.tune"]

    def hook_run(module: Any) -> None:
        take_configs(module)
        module.run = _run

    HOOKS["ray.tune.tune"] = hook_run


def _hook_tuner(module: Any) -> None:
    def start(
        self: Any, trainable: Any = None, *, param_space: Any = None, run_config: Any = None, **rest: Any
    ) -> None:
        self.given = trainable, param_space, getattr(run_config, "stop", None)

    def fit(self: Any) -> None:
        _end_at_trials(*self.given)

    module.Tuner.__init__, module.Tuner.fit = start, fit


def _run(run_or_experiment: Any, *, config: Any = None, stop: Any = None, **rest: Any) -> None:
    _end_at_trials(run_or_experiment, config, stop)


def _end_at_trials(trainable: Any, space: Any, stop: Any) -> None:
    """Raise `Ported` with the config of the first trial.

    Raises:
        ConfigError: The trials train no algorithm of RLlib.
    """
    default = _default_config(trainable)
    if default is None and callable(trainable):
        trainable({} if space is None else space)  # it builds its algorithm itself
    if default is None:
        raise ConfigError(f"{trainable!r:.80}: trials of this trainable build no algorithm of RLlib.")
    known: Mapping[str, float] = stop if isinstance(stop, Mapping) else {}
    raise Ported(
        lambda: space if isinstance(space, AlgorithmConfig) else default.update_from_dict(space or {}),
        {
            _NATIVE_PATHS.get(path, path).replace("_episode_returns_mean/", "_episode_return_mean/"): value
            for path, value in known.items()
        },
    )


def _default_config(trainable: Any) -> Any:
    """Return the default config of an algorithm class, a name or a trainable of Tune; `None` for anything else."""
    if isinstance(trainable, str):
        return CONFIGS[trainable]() if trainable in CONFIGS else None
    cls = getattr(trainable, "algorithm_class", trainable)
    return cls.get_default_config() if isinstance(cls, type) and issubclass(cls, Algorithm) else None
