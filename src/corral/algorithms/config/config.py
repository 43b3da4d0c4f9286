"""The config: typed groups of settings behind fluent setters.

Each group is a dataclass whose fields are its settings, with their types, defaults and meaning in one place. A config
holds all groups, so that every setting is also a plain attribute (`config.lr = 1e-3`). Classes and functions may be
given as import paths (`"package.module:Name"`), as in files.
"""

from __future__ import annotations

import copy as copy_module
import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from corral.algorithms.config.display import display, display_html
from corral.algorithms.config.settings import GROUPS
from corral.callbacks.config import CallbacksSettings
from corral.core.config import DebuggingSettings, EngineSettings, ExplorationSettings, FaultToleranceSettings
from corral.core.familiar_names import ALIASES, attribute_error, meaning_of
from corral.core.metrics.config import ReportingSettings
from corral.core.settings import check_names, check_setting
from corral.core.tree import copy_containers
from corral.data.offline.config import OfflineDataSettings
from corral.envs.config import EnvironmentSettings
from corral.errors import ConfigError, UnknownAttributeError, nearest
from corral.learners.config import LearnersSettings, TrainingSettings
from corral.modules.config import MultiAgentSettings, RLModuleSettings
from corral.runners.config import EnvRunnersSettings
from corral.runners.evaluation.config import EvaluationSettings
from corral.runs.checkpoint.config import CheckpointingSettings

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.algorithms.config.setter_types import (
        CheckpointingArgs,
        DebuggingArgs,
        EngineArgs,
        EnvironmentArgs,
        EnvRunnersArgs,
        EvaluationArgs,
        ExplorationArgs,
        FaultToleranceArgs,
        LearnersArgs,
        MultiAgentArgs,
        OfflineDataArgs,
        ReportingArgs,
        RLModuleArgs,
    )
    from corral.data.episodes.episode import SingleAgentEpisode
    from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
    from corral.envs.seats import Seats
    from corral.modules.spec import ModuleSpec
    from corral.modules.transforms.pipeline import Pipeline

# Settings that the setter of another group takes too.
ALSO_IN = {"exploration": ("explore",)}


@dataclass(kw_only=True)
class AlgorithmConfig(
    CheckpointingSettings,
    OfflineDataSettings,
    EngineSettings,
    FaultToleranceSettings,
    EnvironmentSettings,
    DebuggingSettings,
    ExplorationSettings,
    ReportingSettings,
    MultiAgentSettings,
    CallbacksSettings,
    RLModuleSettings,
    EnvRunnersSettings,
    EvaluationSettings,
    LearnersSettings,
    TrainingSettings,
):
    """All settings of an experiment.

    A setter changes only the settings that it receives and returns the config, so that calls chain. An unknown name, a
    wrong type or a value out of bounds raises at the call. Contradictions raise in `validate()`, which `build()` calls
    first.

    A subclass with settings of its own is a dataclass too, with a type for each setting; the settings belong to
    `.training(...)`.
    """

    def __init_subclass__(cls) -> None:
        """Keep `__repr__`, which the decorator `dataclass` would replace in each subclass."""
        super().__init_subclass__()
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    # What the algorithm is: each algorithm's config says how it differs.

    ON_POLICY: typing.ClassVar[bool] = True
    """Whether the algorithm learns only from actions of its current policy, and so from their log-likelihood."""
    SAMPLES_BATCHES: typing.ClassVar[bool] = True
    """Whether what an iteration samples is its batch; otherwise batches are drawn from replay or recorded data."""
    LEARNS_FROM_DATA: typing.ClassVar[bool] = False
    """Whether the algorithm can learn from recorded data."""

    @property
    def samples(self) -> bool:
        """Whether the algorithm samples from an env; otherwise it learns from recorded data, and may play in an env."""
        return True

    @property
    def algo_class(self) -> type[Any]:
        """The algorithm class that a config builds; the config class of each algorithm names it.

        Raises:
            ConfigError: This is an `AlgorithmConfig`, which belongs to no algorithm.
        """
        raise ConfigError("AlgorithmConfig describes no algorithm: use PPOConfig, or another algorithm's config.")

    @property
    def algo_name(self) -> str:
        """The name of the algorithm's class, such as `PPO`, for titles and run directories."""
        return self.algo_class.__name__

    # Setters. Each takes the settings of its group by name; the dataclass of the group documents them. The types of the
    # settings are in `corral.algorithms.config.setter_types`, which is generated from these dataclasses.

    # The default of arguments for which `None` is a value.
    _NOT_GIVEN: typing.ClassVar[Any] = object()

    def environment(self, env: Any = _NOT_GIVEN, **settings: Unpack[EnvironmentArgs]) -> Self:
        """Set the env and how it is made, and return the config; see `EnvironmentSettings`."""
        return self._set("environment", _with_main("env", env, settings))

    def env_runners(self, **settings: Unpack[EnvRunnersArgs]) -> Self:
        """Set how to sample, and return the config; see `EnvRunnersSettings`."""
        return self._set("env_runners", settings)

    if TYPE_CHECKING:
        # In a config class of the user any setting type-checks. The built-in algorithms name theirs.
        def training(self, *no_args: Any, **settings: Any) -> Self:
            """Set how to learn, and return the config; see `TrainingSettings` and the algorithm's own settings."""
            raise AssertionError
    else:

        def training(self, **settings: Any) -> Self:
            """Set how to learn, and return the config; see `TrainingSettings` and the algorithm's own settings."""
            return self._set("training", settings)

    def exploration(self, **settings: Unpack[ExplorationArgs]) -> Self:
        """Set how and whether to explore, and return the config; see `ExplorationSettings`."""
        return self._set("exploration", settings)

    def rl_module(self, module_class: Any = _NOT_GIVEN, **settings: Unpack[RLModuleArgs]) -> Self:
        """Set the network, and return the config; see `RLModuleSettings`."""
        return self._set("rl_module", _with_main("module_class", module_class, settings))

    def learners(self, **settings: Unpack[LearnersArgs]) -> Self:
        """Set the number of learners and their resources, and return the config; see `LearnersSettings`."""
        return self._set("learners", settings)

    def evaluation(self, **settings: Unpack[EvaluationArgs]) -> Self:
        """Set how to evaluate, and return the config; see `EvaluationSettings`."""
        return self._set("evaluation", settings)

    def multi_agent(self, **settings: Unpack[MultiAgentArgs]) -> Self:
        """Set the modules of several agents and their mapping, and return the config; see `MultiAgentSettings`."""
        return self._set("multi_agent", settings)

    def offline_data(self, **settings: Unpack[OfflineDataArgs]) -> Self:
        """Set the recorded data to learn from and what to record, and return the config; see `OfflineDataSettings`."""
        return self._set("offline_data", settings)

    def fault_tolerance(self, **settings: Unpack[FaultToleranceArgs]) -> Self:
        """Set what happens when a runner or an env fails, and return the config; see `FaultToleranceSettings`."""
        return self._set("fault_tolerance", settings)

    def reporting(self, **settings: Unpack[ReportingArgs]) -> Self:
        """Set iterations, their results and loggers, and return the config; see `ReportingSettings`."""
        return self._set("reporting", settings)

    def checkpointing(self, **settings: Unpack[CheckpointingArgs]) -> Self:
        """Set which checkpoints a run keeps, and return the config; see `CheckpointingSettings`."""
        return self._set("checkpointing", settings)

    def debugging(self, **settings: Unpack[DebuggingArgs]) -> Self:
        """Set seed and log level, and return the config; see `DebuggingSettings`."""
        return self._set("debugging", settings)

    def engine(
        self, engine_name: Literal["auto", "local", "process", "ray"] = _NOT_GIVEN, **settings: Unpack[EngineArgs]
    ) -> Self:
        """Set where runners and learners run, and return the config; see `EngineSettings`."""
        return self._set("engine", _with_main("engine_name", engine_name, settings))

    def callbacks(
        self, callbacks_class: Any = _NOT_GIVEN, *, on_error: Literal["raise", "log"] = _NOT_GIVEN, **functions: Any
    ) -> Self:
        """Set the code to run at events, and return the config; an argument replaces its value of earlier calls.

        Args:
            callbacks_class: A `Callback` subclass or instance, its import path, or a list of them. `None` removes all
                earlier callbacks, functions included.
            **functions: By event name, a callable, its import path, or a list of them; `None` removes the callables
                of the event. Callables take any subset of the event's arguments by name. Classes run first, in list
                order, then callables, in list order.
            on_error: See `CallbacksSettings`.

        Raises:
            ConfigError: An event is unknown, something is not callable or cannot be imported, or a callable takes an
                argument that its event does not have.
        """
        removes_all = callbacks_class is None
        classes = [] if removes_all or callbacks_class is self._NOT_GIVEN else _listed(callbacks_class)
        kept = self.callbacks_class if callbacks_class is self._NOT_GIVEN else []
        by_event = {} if removes_all else {n: f for n, f in self.callback_functions.items() if n not in functions}
        self._set_callbacks(kept, by_event, classes, {n: [] if f is None else _listed(f) for n, f in functions.items()})
        if on_error is not self._NOT_GIVEN:
            self.on_error = on_error
        return self

    def add_callbacks(self, callbacks_class: Any = _NOT_GIVEN, **functions: Any) -> Self:
        """Add code to run at events, after the code of earlier calls, and return the config; see `callbacks`.

        Args:
            callbacks_class: A `Callback` subclass or instance, its import path, or a list of them.
            **functions: By event name, a callable, its import path, or a list of them.

        Raises:
            ConfigError: As `callbacks`.
        """
        classes = [] if callbacks_class is self._NOT_GIVEN else _listed(callbacks_class)
        added = {name: _listed(given) for name, given in functions.items()}
        return self._set_callbacks(self.callbacks_class, self.callback_functions, classes, added)

    def _set_callbacks(
        self,
        classes: list[Any],
        by_event: Mapping[str, list[Any]],
        added_classes: list[Any],
        added_by_event: Mapping[str, list[Any]],
    ) -> Self:
        from corral.callbacks.dispatch import check_callbacks, single

        classes, by_event = list(classes), {name: list(callables) for name, callables in by_event.items()}
        for entry in _checked(type(self), "callbacks_class", added_classes):
            unfolded = list(single([entry]))  # so that a file names the classes of make_multi_callbacks
            classes += [entry] if any(part is entry for part in unfolded) else unfolded
        for name, callables in _checked(type(self), "callback_functions", added_by_event).items():
            by_event[name] = [*by_event.get(name, []), *callables]
        check_callbacks(classes, by_event)
        self.callbacks_class = classes
        self.callback_functions = {name: callables for name, callables in by_event.items() if callables}
        return self

    def _set(self, group: str, settings: Mapping[str, object]) -> Self:
        known = (*self.group_fields()[group], *ALSO_IN.get(group, ()))
        aliases = ALIASES.get(group, {})
        for alias, name in aliases.items():
            if alias in settings and name in settings:
                raise ConfigError(f"{group}: {alias} is another name of {name}: give one of them.")
        settings = {aliases.get(name, name): value for name, value in settings.items()}
        events: dict[str, Any] = {}
        if group == "callbacks":  # files and the command line name events as the setter does
            events = {name: settings.pop(name) for name in [*settings] if name.startswith("on_") and name not in known}
        for name in settings:
            if name not in known and name in self._fields():
                raise ConfigError(f"{group}: unknown setting {name!r}. It belongs to .{self._fields()[name]}(...).")
        self._check_names(group, settings, known)
        for name, value in settings.items():
            setattr(self, name, value)
        return self.callbacks(**events) if events else self

    @classmethod
    def _check_names(cls, place: str, settings: Mapping[str, object], known: Collection[str]) -> None:
        """Refuse names that are not known; names of other libraries with what Corral calls them."""
        for name in settings:
            if name not in known and (hint := cls.meaning_of(name)) is not None:
                raise ConfigError(f"{place}: unknown setting {name!r}. {hint}")
        check_names(place, settings, known)

    @classmethod
    def meaning_of(cls, name: object) -> str | None:
        """Return a sentence with the setting that another library calls so, or `None` if none is known."""
        return meaning_of(
            name, "SETTINGS", [f"{group}.{known}" for known, group in cls._fields().items()], cls.__name__
        )

    # Attributes.

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse unknown settings before `__init__` does, with a hint.

        Raises:
            ConfigError: A name is unknown.
        """
        cls._check_names(cls.__name__, settings, cls._fields())
        return super().__new__(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property that raised; raise its error again
            raise attribute_error(self, name, "CONFIG_METHODS")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a setting, after checking its name and value.

        Raises:
            UnknownAttributeError: The name is unknown.
            AttributeError: The config is frozen.
            ConfigError: The value has the wrong type or is out of bounds.
        """
        fields, open_group = type(self)._fields(), self.__dict__.get("_frozen")
        if self.is_frozen and fields.get(name) != open_group:
            remedy = (
                "change a copy()."
                if open_group is None
                else f"in a runner only settings of .{open_group}(...) can change, because everything else was "
                "built with them already."
            )
            raise AttributeError(f"Cannot set attribute {name!r} of an already frozen {type(self).__name__}; {remedy}")
        if name not in fields:
            hint = self.meaning_of(name) or nearest(name, fields)
            raise UnknownAttributeError(f"{type(self).__name__} has no setting {name!r}. {hint}")
        object.__setattr__(self, name, _checked(type(self), name, value))

    @property
    def is_frozen(self) -> bool:
        """Whether `freeze()` was called."""
        return "_frozen" in self.__dict__

    def freeze(self, *, except_group: str | None = None) -> Self:
        """Refuse all further changes, except to one group if it is given, and return the config."""
        self.__dict__["_frozen"] = except_group
        return self

    @property
    def origin(self) -> Any:
        """What `with_origin` set; runners and learners have it in their configs too, in other processes as a copy."""
        return self.__dict__.get("_origin")

    def keep_networks_of(self, policies: Mapping[str, Any]) -> None:
        """Keep the networks that the modules of a checkpoint have, where later versions have others by default.

        Args:
            policies: Descriptions of the policies of the checkpoint, by module id.
        """

    def with_origin(self, origin: Any) -> Self:
        """Set what this config was translated from, which copies keep, and return the config; it is no setting."""
        self.__dict__["_origin"] = origin
        return self

    def copy(self, **changes: Any) -> Self:
        """Return an unfrozen copy, with settings changed by their plain names."""
        other = copy_module.copy(self)
        other.__dict__.pop("_frozen", None)
        for name, value in self._values().items():
            other.__dict__[name] = copy_containers(value)
        for name, value in self.overrides(**changes).items():
            setattr(other, name, value)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, and the specs of registered envs, which other processes do not have."""
        from corral.envs.registration import registered_envs

        envs = registered_envs([self.env, self.evaluation_config.get("env")])
        return {**self.__dict__, "_registered_envs": envs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the settings, and register the envs in this process."""
        from corral.envs.registration import register_envs

        register_envs(state["_registered_envs"])
        self.__dict__.update({name: value for name, value in state.items() if name != "_registered_envs"})

    @classmethod
    def overrides(cls, **settings: Any) -> dict[str, Any]:
        """Return settings as a dict, after checking names and values: a part of a config, such as `evaluation_config`.

        Raises:
            ConfigError: A name is unknown, or a value has the wrong type or is out of bounds.
        """
        cls._check_names("overrides", settings, cls._fields())
        return {name: _checked(cls, name, value) for name, value in settings.items()}

    # Dictionaries.

    @classmethod
    @functools.cache
    def _fields(cls) -> dict[str, str]:
        """Return the group of each setting; what an algorithm's own config adds belongs to `training`.

        Raises:
            ConfigError: A subclass sets defaults that Python ignores.
        """
        _check_subclass(cls)
        homes = {f.name: group for group, owner in GROUPS.items() for f in dataclasses.fields(owner)}
        return {f.name: homes.get(f.name, "training") for f in dataclasses.fields(cls)}

    @classmethod
    @functools.cache
    def group_fields(cls) -> dict[str, list[str]]:
        """Return the names of the settings of each group."""
        return {group: [name for name, home in cls._fields().items() if home == group] for group in GROUPS}

    def __repr__(self) -> str:
        """Return the calls that make this config: its class and what differs from the defaults, by group."""
        return display(self)

    def _repr_html_(self) -> str:
        return display_html(self)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self)._fields()}

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by group, for `from_dict`; the dicts and lists are copies.

        Returns:
            `{"algo": name, group: {setting: value}}`. The name is the short name of a built-in algorithm, or the import
            path of this config's class.
        """
        from corral.algorithms.registry import name_of

        groups = {
            group: {name: copy_containers(getattr(self, name)) for name in names}
            for group, names in self.group_fields().items()
        }
        return {"algo": name_of(type(self)), **groups}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Return a config with the settings that `to_dict` returned, or any part of them.

        Raises:
            ConfigError: A group or setting is unknown, or `algo` names another config class.
        """
        from corral.algorithms.registry import config_class, name_of

        config = cls()
        for group, values in settings.items():
            if group == "algo":
                if values != name_of(cls) and config_class(values) is not cls:
                    raise ConfigError(f"{cls.__name__}.from_dict: the settings are for algo {values!r}.")
            elif group not in GROUPS:
                hint = meaning_of(group, "CONFIG_METHODS", GROUPS, cls.__name__) or cls.meaning_of(group)
                hint = hint or nearest(group, [*GROUPS, "algo"])
                raise ConfigError(f"config: unknown group {group!r}. {hint}")
            elif not isinstance(values, Mapping):
                raise ConfigError(f"config: group {group!r} must hold settings by name, got {values!r}.")
            else:
                config._set(group, values)
        return config

    def set_path(self, path: str, value: Any) -> Self:
        """Set one setting by `"group.name"`, as the command line does, and return the config.

        `"group.name.key"` sets one key of a dict, and `"group.name.key.key"` one key of a dict in it. Dicts that are
        not there yet are made. A key of the dict that contains dots itself is found as a whole.

        Raises:
            ConfigError: No setting has this path, or a value on the way is not a dict.
        """
        if "." in path and "" in path.split("."):
            raise ConfigError(f"config: {path!r} has a dot without a name next to it: write group.name.")
        group, _, name = path.partition(".")
        name, _, key = name.partition(".")
        if group not in GROUPS:
            paths = [f"{g}.{n}" for g, names in self.group_fields().items() for n in names]
            hint = self.meaning_of(path.rpartition(".")[2]) or nearest(path, paths)
            raise ConfigError(f"config: unknown setting {path!r}. {hint}")
        if not name:
            first = self.group_fields()[group][0]
            raise ConfigError(f"config: {path!r} is a group of settings: name one of them, such as {path}.{first}.")
        if key and name in self.group_fields()[group]:
            try:
                value = _with_key(getattr(self, name), name, key, value)
            except ValueError as error:
                raise ConfigError(f"config: {path!r}: {error}") from None
        return self._set(group, {name: value})

    def for_workers(self) -> Self:
        """Return what runners and learners are made from: loggers and recorded data stay with the algorithm.

        An env in this process may change what is inside of its `env_config`, so that it is always a copy.
        """
        return self.copy(loggers=None, input_=None).freeze()

    # What rooms read of several groups.

    @property
    def all_wrappers(self) -> list[Any]:
        """The wrappers of each sub-env, and one that blanks what transforms leave out and nothing can read."""
        if not any(getattr(each, "left_out", ()) for each in self.transforms):
            return super().all_wrappers
        from corral.envs.unread_parts import unread_wrappers

        return [*super().all_wrappers, *unread_wrappers(self.transforms)]

    def for_runner(self) -> Self:
        """Return a runner's own copy, in which only settings of the env can change; see `EnvRunner.make_env`."""
        other = copy_module.copy(self)
        other.__dict__["env_config"] = dict(self.env_config)
        return other.freeze(except_group="environment")

    @property
    def default_episode_class(self) -> type[SingleAgentEpisode] | type[MultiAgentEpisode]:
        """The class of episodes for `episode_class=None`, from which all others derive."""
        from corral.data.episodes.episode import SingleAgentEpisode
        from corral.data.episodes.multi_agent_episode import MultiAgentEpisode

        return MultiAgentEpisode if self.is_multi_agent else SingleAgentEpisode

    def module_spec(self, observation_space: Any, action_space: Any) -> ModuleSpec:
        """Return the spec of the module for these spaces; `spec.build()` makes a module."""
        from corral.modules.spec import ModuleSpec
        from corral.modules.transforms.pipeline import Pipeline

        pipeline = Pipeline.build(self.transforms, observation_space, action_space, gamma=self.gamma)
        if self.model_config.get("architecture") is not None:
            pipeline = self._with_transforms_of_architecture(pipeline, (observation_space, action_space))
        return ModuleSpec(
            self.module_class or self.default_module_class,
            observation_space,
            action_space,
            {
                **self.model_config,
                **self.module_settings,
                **({} if self.action_masks else {"action_masks": False}),
                **self._action_settings(action_space),
            },
            self.seed or 0,
            pipeline,
        )

    def _with_transforms_of_architecture(self, pipeline: Pipeline | None, spaces: tuple[Any, Any]) -> Pipeline | None:
        """Return the transforms of a module with those that the architecture of its network adds."""
        from corral.modules.transforms.architectures import architecture_transforms
        from corral.modules.transforms.pipeline import Pipeline

        if not hasattr(getattr(self.module_class or self.default_module_class, "CONFIG", None), "architecture"):
            return pipeline  # a module of the user's own, in which the setting may have another meaning
        space = spaces[0] if pipeline is None else pipeline.module_space
        added = architecture_transforms(self.model_config["architecture"], self.transforms, space)
        return Pipeline.build([*self.transforms, *added], *spaces, gamma=self.gamma)

    def _action_settings(self, action_space: Any) -> dict[str, Any]:
        """Return the settings of a module that `normalize_actions` and `clip_actions` stand for."""
        from gymnasium.spaces import Box

        from corral.core.spaces import space_tree
        from corral.core.tree import leaves

        if self.normalize_actions or not any(isinstance(leaf, Box) for leaf in leaves(space_tree(action_space))):
            return {}
        return {"action_bounds": "clip_unscaled" if self.clip_actions else "none"}

    def module_specs(
        self, observation_space: Any, action_space: Any, known: Mapping[str, ModuleSpec] | None = None
    ) -> dict[str, ModuleSpec]:
        """Return the specs of all modules by module id, for the spaces of an env as its vector env has them.

        Modules that no agent is mapped to have the spec in `known`, if there is one.

        Raises:
            ConfigError: The spaces of a module with several agents are not known, or not the spaces of its agents.
        """
        if self.is_multi_agent:
            return self._specs_of_agents(observation_space.seats, known or {})
        return {self.module_ids[0]: self.module_spec(observation_space, action_space)}

    def _specs_of_agents(self, seats: Seats, known: Mapping[str, ModuleSpec]) -> dict[str, ModuleSpec]:
        from corral.modules.heuristic import HeuristicModule
        from corral.runners.mapping import NUM_TRIALS, agents_of_modules, block_of_module

        specs = {}
        for module_id, agents in agents_of_modules(self, seats).items():
            given = self.policies[module_id]
            block = block_of_module(self, seats, module_id, agents)
            observation_space = given.get("observation_space", None if block is None else block.observation_space)
            action_space = given.get("action_space", None if block is None else block.action_space)
            if (observation_space is None or action_space is None) and module_id in known:
                specs[module_id] = known[module_id]
                continue
            if observation_space is None or action_space is None:
                raise ConfigError(
                    f"multi_agent: no agent was mapped to module {module_id!r} in {NUM_TRIALS} trials, and the agents "
                    f"have several kinds of spaces: give its spaces, policies={{{module_id!r}: {{'observation_space': "
                    "..., 'action_space': ...}}."
                )
            specs[module_id] = spec = self._spec_of_module(module_id, observation_space, action_space)
            if self.critic_sees is not None and not issubclass(spec.module_class, HeuristicModule):
                from corral.runners.central_critic import critic_space

                those = agents or (seats.agents if block is None else block.agents)
                specs[module_id] = dataclasses.replace(spec, critic_space=critic_space(self.critic_sees, seats, those))
        return specs

    def _spec_of_module(self, module_id: str, observation_space: Any, action_space: Any) -> ModuleSpec:
        """Return the spec of one of several modules, with a seed of its own; else modules begin alike."""
        from corral.core.seeding import module_seed
        from corral.core.spaces import module_observation_space

        spec = self.for_module(module_id).module_spec(module_observation_space(observation_space), action_space)
        return dataclasses.replace(spec, seed=module_seed(self.seed, module_id))

    def module_specs_of_spaces(self, spaces: Mapping[str, tuple[Any, Any]]) -> dict[str, ModuleSpec]:
        """Return the specs of all modules by module id, without an env.

        Args:
            spaces: Observation space and action space by module id. Spaces in `policies` come first.

        Raises:
            ConfigError: The spaces of a module are not known.
        """
        from corral.core.spaces import module_observation_space

        specs = {}
        for module_id in self.module_ids:
            given = self.policies.get(module_id, {})
            known = spaces.get(module_id, (None, None))
            observation_space, action_space = (
                given.get(name) or found
                for name, found in zip(("observation_space", "action_space"), known, strict=True)
            )
            if observation_space is None or action_space is None:
                where = f"multi_agent(policies={{{module_id!r}: {{'observation_space': ..., 'action_space': ...}}}})"
                raise ConfigError(
                    "the spaces of the "
                    + (f"module {module_id!r}" if self.is_multi_agent else "module")
                    + " are not known, because the data does not hold them: give an env, or "
                    + (where if self.is_multi_agent else "environment(observation_space=..., action_space=...)")
                    + "."
                )
            if self.is_multi_agent:
                specs[module_id] = self._spec_of_module(module_id, observation_space, action_space)
            else:
                specs[module_id] = self.module_spec(module_observation_space(observation_space), action_space)
        return specs

    def for_evaluation(self) -> Self:
        """Return a copy for evaluation runners: their number, the settings of `evaluation_config`, `in_evaluation`.

        The tasks of training are not the tasks of evaluation: `env_task_fn` does not apply, and `env_reset_fn` only
        with `evaluation_tasks="training"`, unless `evaluation_config` has one. `evaluation_duration_unit` takes the
        place of `batch_mode`. With videos, the envs render images. The runners do not explore, unless
        `evaluation_config` says how or that they do.
        """
        alone: dict[str, Any] = {"env_task_fn": None, "batch_mode": "truncate_episodes", "loggers": None}
        alone["explore"] = "exploration_config" in self.evaluation_config
        num_envs = self.num_envs_per_env_runner or self.DEFAULT_NUM_ENVS
        if (most := self._episodes_per_runner) is not None and most < num_envs:
            alone["num_envs_per_env_runner"], num_envs = None, most  # an env may give a number itself
        if self.evaluation_tasks != "training":
            alone["env_reset_fn"] = None
        if "exploration_config" in self.evaluation_config:  # it is for all modules
            alone["algorithm_config_overrides_per_module"] = {
                module_id: {name: value for name, value in given.items() if name != "exploration_config"}
                for module_id, given in self.algorithm_config_overrides_per_module.items()
            }
        number = {"num_env_runners": self.evaluation_num_env_runners, "in_evaluation": True}
        config = self.copy(**{**alone, **self.evaluation_config, **number})
        config.__dict__["_default_num_envs"] = num_envs
        if self.evaluation_num_videos:
            config.env_config = {"render_mode": "rgb_array", **config.env_config}
        return config

    @property
    def _episodes_per_runner(self) -> int | None:
        """The most episodes of a round that one runner plays; `None` if that is not known."""
        if self.evaluation_seeds is not None:
            num_episodes = len(self.evaluation_seeds)
        elif self.evaluation_duration == "auto" or self.evaluation_duration_unit != "episodes":
            return None
        else:
            num_episodes = self.evaluation_duration
        is_custom = self.custom_evaluation_function is not None
        return None if is_custom else math.ceil(num_episodes / max(1, self.evaluation_num_env_runners))

    @property
    def default_num_envs(self) -> int:
        """The number of sub-envs N if `num_envs_per_env_runner` is `None` and the env does not give a number."""
        return int(self.__dict__.get("_default_num_envs", self.DEFAULT_NUM_ENVS))

    @property
    def chooses_resets(self) -> bool:
        """Whether the arguments of each reset are chosen, so that sub-envs have the wrapper `EpisodeResets`."""
        given = self.evaluation_seeds is not None or self.evaluation_tasks is not None or self.evaluation_num_videos
        return self.env_reset_fn is not None or bool(self.in_evaluation and given)

    # Building.

    def build(self) -> Algorithm:
        """Validate a copy of this config, freeze it, and return the algorithm that is built from it.

        Raises:
            ConfigError: Settings contradict each other.
            EnvError: The env cannot be made, or does not match its spaces.
        """
        algorithm: Algorithm = self.algo_class(self)
        return algorithm

    def validate(self) -> None:
        """Refuse contradictions before anything starts.

        Raises:
            ConfigError: Settings contradict each other; the message names both.
        """
        from corral.algorithms.config.validation import validate

        validate(self)
        for owner in reversed(type(self).__mro__):
            if "check_settings" in vars(owner):
                vars(owner)["check_settings"](self)


def _with_main(name: str, value: Any, settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings with the setting that was given without its name."""
    return settings if value is AlgorithmConfig._NOT_GIVEN else {name: value, **settings}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_subclass(cls: type) -> None:
    """Refuse defaults in the body of a subclass that are not fields, since no instance would have them.

    Raises:
        ConfigError: Names the class, the settings and the remedy.
    """
    known = {field.name for field in dataclasses.fields(cls)}
    for owner in cls.__mro__:
        if not issubclass(owner, AlgorithmConfig):
            continue
        fields = vars(owner).get("__dataclass_fields__", {})
        annotated = {name for name, hint in inspect.get_annotations(owner).items() if "ClassVar" not in str(hint)}
        shadowing = {
            name
            for name in known & vars(owner).keys()
            if name not in fields or fields[name].default is not vars(owner)[name]
        }
        if ignored := sorted(annotated - fields.keys() | shadowing):
            raise ConfigError(
                f"{owner.__name__}: Python ignores the settings {', '.join(ignored)}, since they are not fields of a "
                f"dataclass: write @dataclass(kw_only=True) above `class {owner.__name__}`, and give each setting a "
                "type, such as `lr: float = 0.1`."
            )


def _with_key(values: Any, name: str, path: str, value: Any) -> dict[str, Any]:
    """Return a copy of a dict with a value at a path of keys; the name of the dict is for the message.

    Raises:
        ValueError: A value on the way is not a dict.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{name}={values!r:.80} is not a dict, so it has no key {path!r}.")
    key, _, rest = path.partition(".")
    if not rest or path in values:
        return {**values, path: value}
    return {**values, key: _with_key(values.get(key, {}), f"{name}.{key}", rest, value)}


@functools.cache
def _defaults(cls: type) -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}


def _checked(cls: type, name: str, value: Any) -> Any:
    """Return the value converted to the setting's type, as `"3e-3"` from a shell to a float."""
    if value is _defaults(cls).get(name, dataclasses.MISSING):
        return value
    return check_setting(cls, name, value)
