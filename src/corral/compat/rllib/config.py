"""RLlib's `AlgorithmConfig`: its methods, names and defaults, as an open object that `native.py` translates."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from corral.compat.rllib import whole_dicts
from corral.compat.rllib.helpers import NotProvided
from corral.compat.rllib.missing import REMEDIES, missing
from corral.compat.rllib.settings import DEFAULTS, OFF_POLICY, OFFLINE, RENAMED, SETTINGS, TRAINING, Setting
from corral.core.ids import DEFAULT_MODULE_ID
from corral.errors import ConfigError, nearest, nearest_name

log = logging.getLogger(__name__)

_NOT_GIVEN: Any = NotProvided

# Settings that take None as a value, although their default is another one. For all others None means "leave as is".
_NONE_IS_A_VALUE = {"lr", "grad_clip", "minibatch_size", "vf_clip_param", "kl_target", "training_intensity"} | {
    *("vtrace_clip_rho_threshold", "vtrace_clip_pg_rho_threshold", "min_sample_timesteps_per_iteration"),
    *(f"{group}_grad_clip_by_global_norm" for group in ("world_model", "actor", "critic")),
}

# Settings that are dicts, whose keys stay unless a later call gives them again; in the first ones at all depths.
_CHANGED_BY_KEY = {"env_config", "exploration_config", "replay_buffer_config"}
_JOINED = {"model", "learner_config_dict", "algorithm_config_overrides_per_module"}
_TYPED = {"exploration_config", "replay_buffer_config"}  # another "type" replaces the whole

_EVENTS = "callbacks_on_"
_FUNCTIONS = tuple(
    _EVENTS + event
    for event in (
        *("algorithm_init", "train_result", "evaluate_start", "evaluate_end", "evaluate_offline_start"),
        *("evaluate_offline_end", "checkpoint_loaded", "env_runners_recreated", "offline_eval_runners_recreated"),
        *("environment_created", "episode_created", "episode_start", "episode_step", "episode_end", "sample_end"),
    )
)
"""Settings of functions at events that each config of RLlib's newer stack has, `None` at first."""


class AlgorithmConfig:
    """The settings of an experiment, as RLlib has them.

    Any attribute may be set, as in RLlib; settings are attributes and keys alike (`config.lr`, `config["lr"]`).

    Args:
        algo_class: Algorithm class that `build_algo` builds.
    """

    ALGORITHM: ClassVar[str] = ""
    """Name of the algorithm whose settings and defaults the config has; see `settings.py`."""

    def __init__(self, algo_class: Any = None) -> None:
        """Set all defaults."""
        values = vars(self)
        for name, setting in self._settings().items():
            values[name] = copy.deepcopy(setting.default)
        values.update(copy.deepcopy(DEFAULTS.get(self.ALGORITHM, {})))
        values.update(algo_class=algo_class, callbacks_class=[], in_evaluation=False, _is_frozen=False)
        # Tune refuses to restore trials with settings whose names the first config did not have.
        values.update(dict.fromkeys(_FUNCTIONS))
        values["_overrides_of_modules"] = {}

    @classmethod
    def _settings(cls) -> dict[str, Setting]:
        """Return all settings by name."""
        known = {name: setting for settings in SETTINGS.values() for name, setting in settings.items()}
        return {**known, **TRAINING.get(cls.ALGORITHM, {})}

    @classmethod
    def _settings_of(cls, method: str) -> dict[str, Setting]:
        added = TRAINING.get(cls.ALGORITHM, {}) if method == "training" else {}
        return {**SETTINGS[method], **added}

    # The methods of RLlib's configs. Their settings are in `settings.py`.

    def environment(self, env: Any = _NOT_GIVEN, **settings: Any) -> Self:
        """Set the env, and return the config."""
        return self._set("environment", settings if env is _NOT_GIVEN else {"env": env, **settings})

    def env_runners(self, **settings: Any) -> Self:
        """Set how to sample, and return the config."""
        return self._set("env_runners", settings)

    def rollouts(self, **settings: Any) -> Self:
        """Set how to sample, and return the config: an older name of `env_runners` and `fault_tolerance`."""
        return self._set("env_runners", settings)

    def training(self, **settings: Any) -> Self:
        """Set how to learn, and return the config."""
        return self._set("training", settings)

    def exploration(self, **settings: Any) -> Self:
        """Set how to explore, and return the config."""
        return self._set("exploration", settings)

    def rl_module(self, **settings: Any) -> Self:
        """Set the module, and return the config."""
        return self._set("rl_module", settings)

    def learners(self, **settings: Any) -> Self:
        """Set the learners, and return the config."""
        return self._set("learners", settings)

    def evaluation(self, **settings: Any) -> Self:
        """Set how to evaluate, and return the config."""
        return self._set("evaluation", settings)

    def multi_agent(self, **settings: Any) -> Self:
        """Set the modules of several agents, and return the config.

        Raises:
            ValueError: A value is of a type that RLlib refuses.
        """
        from corral.compat.rllib.policies import check_settings

        check_settings(settings)
        return self._set("multi_agent", settings)

    def fault_tolerance(self, **settings: Any) -> Self:
        """Set what happens when a runner fails, and return the config."""
        return self._set("fault_tolerance", settings)

    def reporting(self, **settings: Any) -> Self:
        """Set what an iteration is, and return the config."""
        return self._set("reporting", settings)

    def debugging(self, **settings: Any) -> Self:
        """Set seed and log level, and return the config."""
        return self._set("debugging", settings)

    def checkpointing(self, **settings: Any) -> Self:
        """Set what checkpoints hold, and return the config."""
        return self._set("checkpointing", settings)

    def resources(self, **settings: Any) -> Self:
        """Set resources of Ray, and return the config."""
        return self._set("resources", settings)

    def framework(self, framework: Any = _NOT_GIVEN, **settings: Any) -> Self:
        """Set the framework, which must be torch, and return the config."""
        return self._set("framework", settings if framework is _NOT_GIVEN else {"framework": framework, **settings})

    def api_stack(
        self, enable_rl_module_and_learner: Any = _NOT_GIVEN, enable_env_runner_and_connector_v2: Any = _NOT_GIVEN
    ) -> Self:
        """Set which of RLlib's stacks a script is written for, and return the config."""
        given = {
            "enable_rl_module_and_learner": enable_rl_module_and_learner,
            "enable_env_runner_and_connector_v2": enable_env_runner_and_connector_v2,
        }
        return self._set("api_stack", {name: value for name, value in given.items() if value is not _NOT_GIVEN})

    def experimental(self, **settings: Any) -> Self:
        """Set experimental settings of RLlib, and return the config."""
        return self._set("experimental", settings)

    def offline_data(self, **settings: Any) -> Self:
        """Set the recorded data to learn from, and what is recorded, and return the config.

        Raises:
            ValueError: The class of a prelearner is none.
        """
        if settings.get("prelearner_class") is not None:
            from corral.compat.rllib.recorded_data import check_prelearner

            check_prelearner(settings["prelearner_class"])
        return self._set("offline_data", settings)

    def python_environment(self, **settings: Any) -> Self:
        """Set environment variables of Ray's workers, and return the config."""
        return self._set("python_environment", settings)

    def callbacks(self, callbacks_class: Any = _NOT_GIVEN, **functions: Any) -> Self:
        """Set what runs at events, and return the config; an argument replaces its value of earlier calls, as in RLlib.

        Args:
            callbacks_class: A callback class, a `functools.partial` of one, or a list of them; `None` is none. A dict
                holds functions in RLlib's oldest form, `fn(info)`, by event.
            **functions: By event, a callable or a list of callables.

        Raises:
            ConfigError: An event is unknown.
            ValueError: The class is not callable.
        """
        from corral.compat.rllib.callbacks import EVENTS, from_functions_of_info

        self._refuse_frozen("callbacks_class")
        if isinstance(callbacks_class, Mapping):
            callbacks_class = from_functions_of_info(callbacks_class)
        if callbacks_class is not _NOT_GIVEN:
            given = callbacks_class if isinstance(callbacks_class, (list, tuple)) else [callbacks_class]
            classes = [] if callbacks_class is None else list(given)
            for each in classes:
                if not callable(each):
                    raise ValueError(f"callbacks: {each!r} is no callback class: give a subclass of RLlibCallback.")
            vars(self)["callbacks_class"] = classes
        for event, given in functions.items():
            if event not in EVENTS:
                raise ConfigError(f"callbacks: unknown event {event!r}. {nearest(event, EVENTS)}")
            vars(self)[f"callbacks_{event}"] = None if given is None else _listed(given)
        return self

    @property
    def callback_functions(self) -> dict[str, list[Callable[..., Any]]]:
        """The callables of `callbacks`, by event."""
        prefix = "callbacks_"
        return {
            name.removeprefix(prefix): _listed(value)
            for name, value in vars(self).items()
            if name.startswith(_EVENTS) and value is not None
        }

    def _set(self, method: str, settings: Mapping[str, Any]) -> Self:
        known = self._settings_of(method)
        for given, value in settings.items():
            name = RENAMED.get(given, given)
            setting = known.get(name) or self._settings().get(name)
            if setting is None:
                raise ConfigError(f"{method}: unknown setting {given!r}. {nearest(given, known)}")
            self._store(name, setting, value)
        return self

    def _store(self, name: str, setting: Setting, value: Any) -> None:
        self._refuse_frozen(name)
        if value is NotProvided:
            return
        if value is None and setting.default is not None and name not in _NONE_IS_A_VALUE:
            return
        if name in _CHANGED_BY_KEY:
            value = _changed({name: vars(self)[name]}, {name: value})[name]
        if name == "evaluation_config" and isinstance(value, Mapping):
            value = _changed(vars(self)["evaluation_config"], value)
        if name in ("model_config", "rl_module_spec") and value is not None:
            is_form = name == "model_config" and dataclasses.is_dataclass(value)
            value = dataclasses.asdict(value) if is_form else copy.copy(value)
        if name == "algorithm_config_overrides_per_module":
            value = {module_id: _as_overrides(part) for module_id, part in value.items()}
        if name in _JOINED:
            value = {**vars(self)[name], **value}
        vars(self)[name] = value

    # Attributes and keys.

    def __setattr__(self, name: str, value: Any) -> None:
        """Set any attribute, as RLlib allows.

        Raises:
            AttributeError: The config is frozen.
        """
        self._refuse_frozen(name)
        name = RENAMED.get(name, name)
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            vars(self)[name] = value

    def __getattr__(self, name: str) -> Any:
        if name in RENAMED and RENAMED[name] in vars(self):
            return vars(self)[RENAMED[name]]
        if name.startswith("__"):
            raise AttributeError(name)
        if name in REMEDIES["AlgorithmConfig"]:
            raise missing("AlgorithmConfig", name)
        close = nearest_name(name, [known for known in vars(self) if not known.startswith("_")])
        hint = "" if close is None else f" Did you mean {close!r}?"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hint}")

    def _refuse_frozen(self, name: str) -> None:
        if vars(self).get("_is_frozen"):
            raise AttributeError(f"Cannot set attribute ({name}) of an already frozen AlgorithmConfig; change a copy.")
        if vars(self).get("_is_of_runner") and RENAMED.get(name, name) not in SETTINGS["environment"]:
            raise ConfigError(
                f"{name}: the config of a runner changes its env, when make_env() is called; all else stays as the "
                "algorithm was built. A policy_mapping_fn can be given to algorithm.add_module and remove_module."
            )

    def __getitem__(self, key: str) -> Any:
        """Return a setting, as `config["lr"]`."""
        try:
            return getattr(self, RENAMED.get(key, key))  # "framework" is the name of a method, too
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a setting, as `config["lr"] = 0.001`."""
        self.update_from_dict({key: value})

    def __contains__(self, key: str) -> bool:
        """Return whether there is a setting or attribute of this name."""
        return hasattr(self, key)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the settings."""
        return iter(self.to_dict())

    def keys(self) -> Any:
        """Return the names of the settings."""
        return self.to_dict().keys()

    def values(self) -> Any:
        """Return the values of the settings."""
        return self.to_dict().values()

    def items(self) -> Any:
        """Return pairs of names and values."""
        return self.to_dict().items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting, or a default."""
        return getattr(self, RENAMED.get(key, key), default)

    def pop(self, key: str, default: Any = None) -> Any:
        """Return a setting, which stays there, as in RLlib."""
        return self.get(key, default)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings in one flat dict, with `lambda` for `lambda_`."""
        found = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "algo_class"}
        if "lambda_" in found:
            found["lambda"] = found.pop("lambda_")
        copied: dict[str, Any] = _copied(found)
        return copied

    def update_from_dict(self, settings: Mapping[str, Any]) -> Self:
        """Change settings by name, older names included, and return the config.

        Raises:
            ConfigError: A name is unknown, or of RLlib's older stack only.
        """
        for key, value in whole_dicts.to_settings(settings).items():
            name, known = RENAMED.get(key, key), self._settings()
            if name == "multiagent":
                self.multi_agent(**value)
            elif name in ("callbacks", "callbacks_class"):
                self.callbacks(value)
            elif name in known:
                self._store(name, known[name], value)
            elif name.startswith(_EVENTS) or name in vars(self) or not callable(getattr(type(self), name, len)):
                setattr(self, name, value)  # a subclass may have settings as class attributes
            else:
                raise ConfigError(f"config: unknown setting {key!r}. {nearest(key, known)}")
        return self

    update = update_from_dict

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Return a config with settings by name."""
        return cls().update_from_dict(settings)

    @classmethod
    def overrides(cls, **settings: Any) -> dict[str, Any]:
        """Return settings as a dict, after checking their names.

        The name of a method, such as `exploration`, is left out with a warning: RLlib takes it, and it changes nothing.

        Raises:
            KeyError: A name is unknown.
        """
        from corral.compat.rllib.callbacks import EVENTS

        known = {**vars(cls()), **dict.fromkeys(["callbacks", *(f"callbacks_{event}" for event in EVENTS)])}
        found = {}
        for given, value in settings.items():
            name = RENAMED.get(given, given)
            if name in known:
                found[name] = value
            elif callable(getattr(cls, given, None)):
                log.warning("overrides(%s=%r): it is a method, not a setting, and is left out.", given, value)
            else:
                raise KeyError(f"{given!r} is no setting of {cls.__name__}. {nearest(given, known)}")
        return found

    def _with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy in which whole values take the place of the ones here, dicts too."""
        other = self.copy(copy_frozen=False)
        vars(other).update(values)
        return other

    def copy(self, copy_frozen: bool | None = None) -> Self:
        """Return a copy: frozen as this config is, or as `copy_frozen` says."""
        other = copy.copy(self)
        vars(other).update(_copied(vars(self)))
        if copy_frozen is not None:
            vars(other)["_is_frozen"] = copy_frozen
        vars(other)["_is_of_runner"] = False
        return other

    def copy_for_runner(self) -> Self:
        """Return a copy in which only settings of the env can change: a runner reads no others again."""
        other = self.copy(copy_frozen=False)
        vars(other)["_is_of_runner"] = True
        return other

    def freeze(self) -> Self:
        """Refuse all further changes."""
        vars(self)["_is_frozen"] = True
        return self

    @property
    def is_frozen(self) -> bool:
        """Whether `freeze` was called."""
        return bool(vars(self)["_is_frozen"])

    # What RLlib computes from settings.

    @property
    def total_train_batch_size(self) -> int:
        """Env steps in a batch, over all learners."""
        if (each := vars(self).get("train_batch_size_per_learner")) is not None:
            return int(each * max(1, self.num_learners))
        return int(self.train_batch_size)

    def get_rollout_fragment_length(self, worker_index: int = 0) -> int:
        """Return the env steps of each sub-env of a runner in one sample.

        Args:
            worker_index: Index of the runner, from 1; with `"auto"` the first ones may take one step more. Algorithms
                with a replay buffer take `n_step` steps then.
        """
        if self.rollout_fragment_length != "auto":
            return int(self.rollout_fragment_length)
        if self.ALGORITHM in OFF_POLICY:
            return int(self.n_step if isinstance(self.n_step, int) else max(self.n_step))
        num_envs, num_runners = int(self.num_envs_per_env_runner), max(1, int(self.num_env_runners))
        each = self.total_train_batch_size / (num_envs * num_runners)
        rest = self.total_train_batch_size - math.floor(each) * num_envs * num_runners
        return math.ceil(each) if (worker_index - 1) * num_envs < rest else math.floor(each)

    @property
    def is_multi_agent(self) -> bool:
        """Whether modules are set for several agents, or one module with another id."""
        return bool(set(self.policies or ()) - {DEFAULT_MODULE_ID})

    @property
    def is_atari(self) -> bool:
        """Whether the env is an Atari game by its id."""
        given = vars(self).get("is_atari")
        return bool(given if given is not None else isinstance(self.env, str) and "ALE/" in self.env)

    @is_atari.setter
    def is_atari(self, value: bool | None) -> None:
        vars(self)["is_atari"] = value

    @property
    def rl_module_spec(self) -> Any:
        """The spec of the module: the given one, or the default of the algorithm."""
        given = vars(self)["rl_module_spec"]
        if given is not None:
            return given
        if getattr(default := self.get_default_rl_module_spec(), "rl_module_specs", True) in (None, {}):
            raise ConfigError(
                f"{type(self).__name__}: Module_specs cannot be None: get_default_rl_module_spec names no modules."
            )
        return default

    @rl_module_spec.setter
    def rl_module_spec(self, value: Any) -> None:
        vars(self)["rl_module_spec"] = value

    @property
    def learner_class(self) -> Any:
        """The learner class: the given one, or the default of the algorithm."""
        given = vars(self)["learner_class"]
        return self.get_default_learner_class() if given is None else given

    @learner_class.setter
    def learner_class(self, value: Any) -> None:
        vars(self)["learner_class"] = value

    def get_default_rl_module_spec(self) -> Any:
        """Return the spec of the default module; subclasses may return their own."""
        from corral.compat.rllib.adapted_modules import DefaultRLModule
        from corral.compat.rllib.default_modules import DEFAULTS
        from corral.compat.rllib.modules import RLModuleSpec

        return RLModuleSpec(module_class=DEFAULTS.get(self.ALGORITHM, DefaultRLModule))

    def get_default_learner_class(self) -> Any:
        """Return the learner class of the algorithm; subclasses may return their own."""
        from corral.compat.rllib.learner import DEFAULTS, TorchLearner

        return DEFAULTS.get(self.ALGORITHM, TorchLearner)

    def get_config_for_module(self, module_id: str) -> Self:
        """Return the config with the settings of one module; the config itself if the module has none of its own."""
        own = self.algorithm_config_overrides_per_module.get(module_id)
        return self.copy(copy_frozen=False).update_from_dict(own) if own else self

    @property
    def _per_module_overrides(self) -> dict[str, Any]:
        """The config of each module that has settings of its own."""
        return {name: self.get_config_for_module(name) for name in self.algorithm_config_overrides_per_module}

    def get_multi_rl_module_spec(
        self,
        *,
        env: Any = None,
        spaces: Mapping[str, Any] | None = None,
        inference_only: bool = False,
        policy_dict: Mapping[str, Any] | None = None,
        single_agent_rl_module_spec: Any = None,
    ) -> Any:
        """Return one spec for all modules, which is new.

        Args:
            env: Env that has the spaces.
            spaces: Pairs of spaces by module id, in place of the spaces of the env.
            inference_only: Whether the modules only act; then the ones of learners are left out.
            policy_dict: What describes each policy by its id, in place of the setting `policies`.
            single_agent_rl_module_spec: Spec of the modules for which the config has none.
        """
        from corral.compat.rllib.modules import multi_rl_module_spec

        if policy_dict is None:
            policy_dict = self.policies if isinstance(self.policies, Mapping) else dict.fromkeys(self.policies)
        return multi_rl_module_spec(
            given=vars(self)["rl_module_spec"],
            default=self.get_default_rl_module_spec(),
            of_modules=single_agent_rl_module_spec,
            policies=policy_dict or {DEFAULT_MODULE_ID: None},
            spaces=spaces or {},
            env=env,
            inference_only=inference_only,
        )

    def get_rl_module_spec(
        self, env: Any = None, spaces: Mapping[str, Any] | None = None, inference_only: bool = False
    ) -> Any:
        """Return the spec of the only module, with its spaces; see `get_multi_rl_module_spec`."""
        whole = self.get_multi_rl_module_spec(env=env, spaces=spaces, inference_only=inference_only)
        if len(whole.rl_module_specs) != 1:
            raise ConfigError("get_rl_module_spec: there are several modules: use get_multi_rl_module_spec.")
        return next(iter(whole.rl_module_specs.values()))

    def get_multi_agent_setup(
        self,
        *,
        policies: Any = None,
        env: Any = None,
        spaces: Mapping[str, Any] | None = None,
        default_policy_class: Any = None,
    ) -> tuple[dict[str, Any], Callable[..., bool]]:
        """Return a `PolicySpec` with spaces for each policy, and a function that says whether a policy learns.

        Args:
            policies: Policies in place of the setting.
            env: Env that has the spaces.
            spaces: Pairs of spaces by policy, and of the env by `"__env__"`.
            default_policy_class: Class to name in specs that name none.

        Raises:
            ValueError: A policy has no spaces, or different ones for its agents.
        """
        from corral.compat.rllib.policies import full_specs

        given = policies or self.policies or {DEFAULT_MODULE_ID: None}
        if isinstance(given, (set, frozenset)):
            given = sorted(given)  # the order of a set differs from process to process
        specs = full_specs(given, self.policy_mapping_fn, env, spaces or {}, default_policy_class)
        chosen = self.policies_to_train

        def is_trained(policy_id: str, batch: Any = None) -> bool:
            return bool(chosen(policy_id, batch)) if callable(chosen) else chosen is None or policy_id in chosen

        return specs, is_trained

    @property
    def is_online(self) -> bool:
        """Whether the algorithm learns from envs."""
        return self.ALGORITHM not in OFFLINE

    @property
    def is_offline(self) -> bool:
        """Whether the config names recorded data."""
        given = self.input_[0] if isinstance(self.input_, list) and self.input_ else self.input_
        return isinstance(given, str) and given not in ("", "sampler")

    @property
    def uses_new_env_runners(self) -> bool:
        """True: runners return episodes."""
        return True

    @property
    def multiagent(self) -> dict[str, Any]:
        """The settings of several agents by name."""
        return {name: getattr(self, name) for name in SETTINGS["multi_agent"]}

    def get_evaluation_config_object(self) -> AlgorithmConfig | None:
        """Return the config of the evaluation runners, or `None` if this is one.

        A config as `evaluation_config` is used as it is; an env and policies that it does not have are the ones of
        training.
        """
        if self.in_evaluation:
            return None
        own = self.evaluation_config
        if not isinstance(own, AlgorithmConfig):
            config: AlgorithmConfig = self.copy(copy_frozen=False).update_from_dict(own or {})
        else:
            config = own.copy(copy_frozen=False)
            if config.env is None:
                config.environment(self.env, env_config={**self.env_config, **own.env_config})
            if not config.policies:
                policies = {name: getattr(self, name) for name in ("policies", "policies_to_train")}
                config.multi_agent(**policies, policy_mapping_fn=own.policy_mapping_fn or self.policy_mapping_fn)
        whole = self.evaluation_duration_unit == "episodes"
        vars(config).update(
            in_evaluation=True,
            evaluation_config=None,
            num_env_runners=self.evaluation_num_env_runners,
            batch_mode="complete_episodes" if whole else "truncate_episodes",
        )
        return config

    # Building.

    def validate(self) -> None:
        """Refuse contradictions, and settings that Corral lacks.

        Raises:
            ConfigError: Names the settings.
        """
        from corral.compat.rllib.native import to_native

        to_native(self).validate()

    def build_algo(self, env: Any = None, logger_creator: Any = None, use_copy: bool = True) -> Any:
        """Return the algorithm.

        Args:
            env: Env, in place of the setting.
            logger_creator: Not used; loggers of Corral are given to `fit`.
            use_copy: Whether the algorithm gets a copy of the config.

        Raises:
            ConfigError: A setting contradicts another one, or Corral lacks it.
        """
        config = self.copy(copy_frozen=False) if use_copy else self
        if env is not None:
            config.environment(env)
        if config.algo_class is None:
            raise ConfigError("AlgorithmConfig: no algorithm: use PPOConfig(), or AlgorithmConfig(algo_class=PPO).")
        return config.algo_class(config=config)

    build = build_algo

    def build_env_to_module_connector(self, env: Any = None, spaces: Any = None, device: Any = None) -> Any:
        """Return the pipeline from env to module, for the spaces of an env; its connectors are new ones."""
        return _pipelines().env_to_module_pipeline(self, env, spaces, device)

    def build_module_to_env_connector(self, env: Any = None, spaces: Any = None) -> Any:
        """Return the pipeline from module to env, for the spaces of an env; its connectors are new ones."""
        return _pipelines().module_to_env_pipeline(self, env, spaces)

    def build_learner_connector(
        self, input_observation_space: Any = None, input_action_space: Any = None, device: Any = None
    ) -> Any:
        """Return the pipeline of learners; its connectors are new ones."""
        return _pipelines().learner_pipeline(self, input_observation_space, input_action_space)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def _pipelines() -> Any:
    return importlib.import_module(f"{__package__}.pipelines")


def _listed(given: Any) -> list[Any]:
    """Return the callables for one event, which may be one, several or `None`."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _copied(value: Any) -> Any:
    """Return a copy of dicts, of the dicts in them, and of lists; other objects are kept as they are."""
    if type(value) is dict:
        return {name: _copied(part) for name, part in value.items()}
    return value.copy() if type(value) is list else value


def _changed(settings: Any, changes: Mapping[str, Any]) -> Any:
    """Return settings after changes; dicts in them are changed key by key, as RLlib does."""
    if isinstance(settings, AlgorithmConfig):
        return settings.copy(copy_frozen=False).update_from_dict(changes)
    found = dict(settings or {})
    for name, value in changes.items():
        old = found.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            is_other = name in _TYPED and value.get("type", old.get("type")) != old.get("type", value.get("type"))
            value = dict(value) if is_other else _changed(old, value)
        found[name] = value
    return found


def _as_overrides(given: Any) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = given.to_dict() if isinstance(given, AlgorithmConfig) else given
    return settings
