"""RLlib's callbacks: its classes and functions, called at Corral's events with RLlib's arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.callbacks.callback import EVENTS as NATIVE_EVENTS
from corral.callbacks.callback import Callback
from corral.compat.rllib import metrics
from corral.core.ids import DEFAULT_MODULE_ID
from corral.errors import ConfigError, nearest

if TYPE_CHECKING:
    from corral.compat.rllib.config import AlgorithmConfig

_EPISODE = ("episode", "env_runner", "metrics_logger", "env", "rl_module", "env_index")
_OLD = {"worker": "env_runner", "base_env": "env", "policies": "rl_module"}

EVENTS: dict[str, tuple[str, ...]] = {
    "on_algorithm_init": ("algorithm", "metrics_logger"),
    "on_train_result": ("algorithm", "metrics_logger", "result"),
    "on_evaluate_start": ("algorithm", "metrics_logger"),
    "on_evaluate_end": ("algorithm", "metrics_logger", "evaluation_metrics"),
    "on_evaluate_offline_start": ("algorithm", "metrics_logger"),
    "on_evaluate_offline_end": ("algorithm", "metrics_logger", "evaluation_metrics"),
    "on_checkpoint_loaded": ("algorithm",),
    "on_env_runners_recreated": ("algorithm", "env_runner_group", "env_runner_indices", "is_evaluation"),
    "on_workers_recreated": ("algorithm", "worker_set", "worker_ids", "is_evaluation"),
    "on_offline_eval_runners_recreated": ("algorithm", "offline_eval_runner_group", "offline_eval_runner_indices"),
    "on_environment_created": ("env_runner", "metrics_logger", "env", "env_context"),
    "on_sub_environment_created": ("worker", "sub_environment", "env_context", "env_index"),
    "on_episode_created": _EPISODE,
    "on_episode_start": _EPISODE,
    "on_episode_step": _EPISODE,
    "on_episode_end": (*_EPISODE, "prev_episode_chunks"),
    "on_sample_end": ("env_runner", "metrics_logger", "samples"),
    "on_postprocess_trajectory": (
        *("worker", "episode", "agent_id", "policy_id", "policies", "postprocessed_batch", "original_batches"),
    ),
    "on_learn_on_batch": ("policy", "train_batch", "result"),
    "on_create_policy": ("policy_id", "policy"),
}
"""The arguments of each event of RLlib; callbacks may name some of them by older names too, see `_old_names`."""

NATIVE_NAMES = {"on_workers_recreated": "on_env_runners_recreated"}
"""Corral's names of events that have another one."""

NEVER = ("on_evaluate_offline_start", "on_evaluate_offline_end", "on_offline_eval_runners_recreated")
"""Events of offline learning, which never fire."""


class RLlibCallback:
    """Base class of callbacks: override the methods of the events to listen to."""

    def __init__(self, legacy_callbacks_dict: Any = None) -> None:
        """Take no settings.

        Raises:
            ConfigError: Functions of RLlib's oldest form are given.
        """
        if legacy_callbacks_dict:
            raise ConfigError("legacy_callbacks_dict: give the dict itself as the callbacks of the config.")


def _do_nothing(self: Any, *args: Any, **arguments: Any) -> None:
    """Do nothing, so that overriding methods may call it."""


for _event in EVENTS:
    setattr(RLlibCallback, _event, _do_nothing)

DefaultCallbacks = RLlibCallback


def make_multi_callbacks(callback_class_list: Sequence[Callable[[], Any]]) -> type[RLlibCallback]:
    """Return one class whose methods call the methods of all classes, in their order."""
    return type("MultiCallbacks", (RLlibCallback,), {"callback_classes": tuple(callback_class_list)})


MultiCallbacks = make_multi_callbacks
"""Older name of `make_multi_callbacks`, which was a class."""


_LEGACY: dict[str, tuple[str, dict[str, str]]] = {
    "on_episode_start": ("on_episode_start", {"env": "base_env", "policy": "policies", "episode": "episode"}),
    "on_episode_step": ("on_episode_step", {"env": "base_env", "episode": "episode"}),
    "on_episode_end": ("on_episode_end", {"env": "base_env", "policy": "policies", "episode": "episode"}),
    "on_sample_end": ("on_sample_end", {"worker": "worker", "samples": "samples"}),
    "on_train_result": ("on_train_result", {"trainer": "algorithm", "result": "result"}),
    "on_postprocess_traj": (
        "on_postprocess_trajectory",
        {
            **{"episode": "episode", "agent_id": "agent_id", "post_batch": "postprocessed_batch"},
            **{"pre_batch": "original_batches", "all_pre_batches": "original_batches"},
        },
    ),
}
"""By RLlib's oldest name of an event: its name, and the argument for each key of the dict `info`."""


def from_functions_of_info(functions: Mapping[str, Callable[[dict[str, Any]], Any]]) -> type[RLlibCallback]:
    """Return a class for functions in RLlib's oldest form: by event, a function of one dict.

    Raises:
        ConfigError: An event is unknown.
    """
    methods = {}
    for name, function in functions.items():
        if name not in _LEGACY:
            raise ConfigError(f"callbacks: unknown event {name!r}. {nearest(name, _LEGACY)}")
        methods[_LEGACY[name][0]] = _method_of_info(function, _LEGACY[name][1])
    return type("FunctionsOfInfo", (RLlibCallback,), methods)


def _method_of_info(function: Callable[[dict[str, Any]], Any], keys: Mapping[str, str]) -> Callable[..., None]:
    def method(self: Any, **given: Any) -> None:
        info = {key: given[source] for key, source in keys.items()}
        if "pre_batch" in info:
            info["pre_batch"] = info["all_pre_batches"][info["agent_id"]]
        function(info)

    names = ["self", *dict.fromkeys(keys.values())]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


def single(factories: Sequence[Any]) -> list[Any]:
    """Return callback classes, and in place of a class of `make_multi_callbacks` each of its classes."""
    found = []
    for factory in factories:
        found += single(parts) if (parts := getattr(factory, "callback_classes", None)) else [factory]
    return found


def to_native(config: AlgorithmConfig) -> tuple[list[type[Callback]], dict[str, list[Callable[..., None]]]]:
    """Return Corral's callback classes and functions for the callbacks of a config.

    Raises:
        ConfigError: A callback takes an argument that its event does not have.
    """
    classes = [_adapt_class(factory) for factory in single(config.callbacks_class)]
    functions: dict[str, list[Callable[..., None]]] = {}
    for event, given in config.callback_functions.items():
        if event not in NEVER:
            adapted = [_Adapted(event, function) for function in given]
            functions.setdefault(NATIVE_NAMES.get(event, event), []).extend(adapted)
    listens = any(listens_to_episodes(cls) for cls in classes) or not functions.keys().isdisjoint(_NOTING)
    return ([*classes, _OldMetrics] if listens else classes), functions


def listens_to_episodes(cls: type) -> bool:
    """Return whether a class listens to an event at which it may note numbers of the older stack on episodes."""
    return any(event in vars(cls) for event in _NOTING)


_NOTING = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end", "on_postprocess_trajectory")


class _Adapted:
    """A function of the user, called with RLlib's arguments.

    Args:
        event: RLlib's name of the event.
        function: The function.
    """

    def __init__(self, event: str, function: Callable[..., Any]) -> None:
        """Resolve the names that the function takes."""
        self.event, self.function = event, function
        self.names = _accepted_names(event, function)
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, **arguments: Any) -> None:
        """Call the function with the arguments of Corral's event in RLlib's form."""
        self.function(**_adapt(self.event, self.names, arguments))


def _adapt_class(factory: Any) -> type[Callback]:
    """Return a class of Corral's for a class of the user's, or for what makes its instances."""
    user_class = factory
    while isinstance(user_class, functools.partial):
        user_class = user_class.func
    if not isinstance(user_class, type):
        user_class = type(factory())
    methods: dict[str, Any] = {}
    for event in EVENTS:
        method = getattr(user_class, event, None)
        if method is not None and method is not _do_nothing and event not in NEVER:
            methods[NATIVE_NAMES.get(event, event)] = _make_method(event, _accepted_names(event, method, bound=True))
    return type(user_class.__name__, (_AdaptedClass,), {"factory": staticmethod(factory), **methods})


class _AdaptedClass(Callback):
    """Base of Corral's classes for classes of the user's."""

    factory: Callable[[], Any]

    def __init__(self) -> None:
        """Make the user's instance."""
        self.user = type(self).factory()


def _make_method(event: str, names: Sequence[str] | None) -> Callable[..., None]:
    def call(self: _AdaptedClass, **arguments: Any) -> None:
        getattr(self.user, event)(**_adapt(event, names, arguments))

    call.__name__ = event
    return call


class _OldMetrics(Callback):
    """Reports the numbers that callbacks noted in `episode.custom_metrics` and `episode.hist_data`."""

    def on_sample_end(self, *, samples: Any, metrics_logger: Any, env_runner: Any, **kwargs: Any) -> None:
        config = env_runner.config
        window = None if config.in_evaluation else config.metrics_num_episodes_for_smoothing
        keeps_all = config.origin.keep_per_episode_custom_metrics
        for episode in samples.episodes():
            if episode.is_done:
                _report_notes(episode.custom_data, metrics_logger, window, keeps_all)


def _report_notes(notes: Mapping[str, Any], metrics_logger: Any, window: int | None, keeps_all: bool) -> None:
    """Log what callbacks noted on one episode, over as many episodes as the mean return."""
    for name, value in notes.get("custom_metrics", {}).items():
        values = np.atleast_1d(np.asarray(value, np.float64)).tolist()
        if keeps_all:
            known = [number for number in values if not np.isnan(number)]
            metrics_logger.log_values(("custom_metrics", name), known, reduce="item_series")
            continue
        for reduce in ("mean", "min", "max"):
            metrics_logger.log_values(("custom_metrics", f"{name}_{reduce}"), values, reduce=reduce, window=window)
    for name, values in notes.get("hist_data", {}).items():
        metrics_logger.log_values(("hist_stats", name), list(values), reduce="item_series")


def _accepted_names(event: str, function: Callable[..., Any], *, bound: bool = False) -> list[str] | None:
    """Return the arguments of an event that a callable takes; `None` is all of them.

    Raises:
        ConfigError: It requires an argument that the event does not have.
    """
    known = [*EVENTS[event], *_old_names(event)]
    parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.name in names
        if required and parameter.name not in known:
            raise ConfigError(
                f"{event}: {getattr(function, '__qualname__', function)} takes {parameter.name!r}, which the event "
                f"does not have. {nearest(parameter.name, known)} Its arguments are: {', '.join(known)}."
            )
    taken = [name for name in names if name in known]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return list(dict.fromkeys([*EVENTS[event], *taken])) if takes_all else taken


def _old_names(event: str) -> list[str]:
    """Return the older names, and names of both stacks, that a callable of an event may name."""
    old = [old for old, new in _OLD.items() if new in EVENTS[event]]
    more = {
        "on_sample_end": ["worker"],
        "on_sub_environment_created": ["env_runner", "metrics_logger"],
        "on_postprocess_trajectory": ["env_runner", "metrics_logger"],
        "on_learn_on_batch": ["metrics_logger", "learner"],
        "on_train_result": ["trainer"],
        "on_algorithm_init": ["trainer"],
    }
    return [*old, *more.get(event, [])]


_ALIASES = {**_OLD, "trainer": "algorithm", "worker_set": "env_runner_group", "worker_ids": "env_runner_indices"}


def _adapt(event: str, names: Sequence[str] | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of Corral's event by RLlib's names, each in RLlib's form."""
    if event == "on_train_result":
        _view_result(arguments["result"], arguments["algorithm"])
    found = {}
    for name in names if names is not None else EVENTS[event]:
        native = name if name in arguments else _ALIASES.get(name, name)
        if native in arguments:
            adapt = _FORMS.get(f"{event}.{name}") or _FORMS.get(name)
            found[name] = arguments[native] if adapt is None else adapt(arguments[native])
    if "postprocessed_batch" in found:
        found["postprocessed_batch"] = _view_postprocessed(arguments)
    if "policies" in found and "env_runner" in arguments:
        found["policies"] = _view_runner(arguments["env_runner"]).policy_map  # they know the exploration of the runner
    return found


def _view_runner(runner: Any) -> Any:
    from corral.compat.rllib.runners import view_runner

    return view_runner(runner)


def _view_group(group: Any) -> Any:
    from corral.compat.rllib.runners import view_group

    return view_group(group)


def _view_algorithm(algorithm: Any) -> Any:
    return algorithm.view


def _view_samples(samples: Any) -> list[Any]:
    from corral.compat.rllib.column_views import Samples

    return Samples(samples)


def _view_columns(columns: Any) -> Any:
    from corral.compat.rllib.column_views import ColumnView

    return ColumnView(columns)


def _view_postprocessed(arguments: Mapping[str, Any]) -> Any:
    from corral.compat.rllib.column_views import view_postprocessed

    return view_postprocessed(arguments)


def _view_originals(originals: Any) -> Any:
    from corral.compat.rllib.column_views import view_originals

    return view_originals(originals)


def _view_agent(agent_id: Any) -> Any:
    from corral.compat.rllib.column_views import view_agent

    return view_agent(agent_id)


def _view_policy(module: Any) -> Any:
    from corral.compat.rllib.policy_views import view_policy

    return view_policy(module)


def _view_result(result: dict[str, Any], algorithm: Any) -> dict[str, Any]:
    from corral.compat.rllib.results import add_rllib_keys

    return add_rllib_keys(result, algorithm=algorithm)


def _view_base_env(env: Any) -> Any:
    from corral.compat.rllib.runners import BaseEnv

    return BaseEnv(env)


def _view_modules(modules: Any) -> Any:
    from corral.compat.rllib.adapted_modules import view_module
    from corral.compat.rllib.modules import MultiRLModule

    if not isinstance(modules, dict):
        return view_module(modules)
    return MultiRLModule({module_id: view_module(module) for module_id, module in modules.items()})


def _view_policies(modules: Any) -> Any:
    modules = modules if isinstance(modules, dict) else {DEFAULT_MODULE_ID: modules}
    return {module_id: _view_policy(module) for module_id, module in modules.items()}


_FORMS: dict[str, Callable[[Any], Any]] = {
    "algorithm": _view_algorithm,
    "trainer": _view_algorithm,
    "env_runner": _view_runner,
    "worker": _view_runner,
    "env_runner_group": _view_group,
    "worker_set": _view_group,
    "base_env": _view_base_env,
    "metrics_logger": metrics.as_rllib,
    "samples": _view_samples,
    "train_batch": _view_columns,
    "original_batches": _view_originals,
    "agent_id": _view_agent,
    "policy": _view_policy,
    "on_learn_on_batch.result": lambda result: result.setdefault("custom_metrics", {}),
    "policies": _view_policies,
    "rl_module": _view_modules,
}
"""By RLlib's name of an argument, or by event and name, what brings Corral's into RLlib's form."""

assert set(EVENTS) - set(NEVER) <= {*NATIVE_EVENTS, *NATIVE_NAMES}
