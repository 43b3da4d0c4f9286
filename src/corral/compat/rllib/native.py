"""Translates a config of RLlib into a config of Corral."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from corral.algorithms.appo import APPOConfig
from corral.algorithms.bc import BCConfig
from corral.algorithms.config.config import AlgorithmConfig as NativeConfig
from corral.algorithms.cql import CQLConfig
from corral.algorithms.dqn import DQNConfig
from corral.algorithms.dreamerv3 import DreamerV3Config
from corral.algorithms.impala import IMPALAConfig
from corral.algorithms.iql import IQLConfig
from corral.algorithms.marwil import MARWILConfig
from corral.algorithms.ppo import PPOConfig
from corral.algorithms.sac import SACConfig
from corral.algorithms.tqc import TQCConfig
from corral.compat.rllib import callbacks
from corral.compat.rllib.adapted_modules import AdaptedPart, loading_settings, to_module_settings
from corral.compat.rllib.connectors import ConnectorV2, to_transforms
from corral.compat.rllib.env_connectors import Connect, ConnectorEvents, LazyEnv, connectors_for
from corral.compat.rllib.envs import env_settings
from corral.compat.rllib.episodes import MultiAgentEpisode, SingleAgentEpisode
from corral.compat.rllib.learner import DEFAULTS, Learner, TorchLearner, steps_by_hand
from corral.compat.rllib.learner_connectors import LearnerConnectorEvents
from corral.compat.rllib.model_config import to_model_config
from corral.compat.rllib.modules import MultiRLModuleSpec, RLModuleSpec, SelfSupervisedLossAPI
from corral.compat.rllib.overrides import check_exploration_class, overrides
from corral.compat.rllib.own_algorithm import OwnConfig, own_events
from corral.compat.rllib.own_learner import OwnLearner
from corral.compat.rllib.policy_servers import served_settings
from corral.compat.rllib.recorded_data import input_of, output_of, play_and_record, records_evaluation
from corral.compat.rllib.runners import EnvRunner, view_group
from corral.compat.rllib.settings import DEFAULTS as OF_RLLIB
from corral.compat.rllib.settings import IN_EVALUATION, OFF_POLICY, OFFLINE, SETTINGS, TRAINING
from corral.core.config import SAMPLES
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.settings import needs_of, same_value
from corral.errors import ConfigError
from corral.exploration.epsilon import EpsilonGreedy
from corral.modules.transforms.observations import NormalizeObservations
from corral.modules.transforms.rewards import ClipRewards

if TYPE_CHECKING:
    from corral.compat.rllib.config import AlgorithmConfig

_CLASSES: dict[str, type[NativeConfig]] = {
    "PPO": PPOConfig,
    "APPO": APPOConfig,
    "IMPALA": IMPALAConfig,
    "DQN": DQNConfig,
    "SAC": SACConfig,
    "TQC": TQCConfig,
    "MARWIL": MARWILConfig,
    "BC": BCConfig,
    "CQL": CQLConfig,
    "IQL": IQLConfig,
    "DreamerV3": DreamerV3Config,
    "": OwnConfig,
}
_NO_LIMIT = 1e9  # of importance weights
_ADAM_OF_CRITICS = {"eps": 1e-7}
_ASYNC = ("APPO", "IMPALA")
_RATES = {"SAC": ("actor_lr", "critic_lr", "alpha_lr"), "IQL": ("actor_lr", "critic_lr", "value_lr")}
_RATES["CQL"] = _RATES["TQC"] = _RATES["SAC"]
_NAMES_OF_RATES = {name: f"{first}, {second} and {third}" for name, (first, second, third) in _RATES.items()}

# Settings of the same meaning that are translated with others, or whose default leaves Corral's.
_NOT_COPIED = {"env", "env_config", "env_task_fn", "evaluation_config", "exploration_config", "lr"} | {
    *("kl_coeff", "kl_target", "delay_between_env_runner_restarts_s", "algorithm_config_overrides_per_module"),
    *("replay_buffer_config", "rollout_fragment_length"),
}

_NEEDS_SAMPLING = {"gamma", *(name for name, needs in needs_of(NativeConfig).items() if SAMPLES in needs)}
"""Settings that have no meaning for an algorithm that samples nothing, and `gamma`, which BC does not read."""

_OF_ENV = {"env", "env_config", "env_task_fn", "wrappers", "transforms"}  # the same for all modules


def to_native(config: AlgorithmConfig) -> NativeConfig:
    """Return the config of Corral, which keeps RLlib's as its `origin`.

    Raises:
        ConfigError: A setting has a value that Corral lacks.
    """
    name = algorithm_name(config)
    refuse_unserved(config)
    settings = to_settings(config, name)
    learner_settings = _learner_settings(config)
    native = _CLASSES[name](**settings, **learner_settings)
    classes, functions = callbacks.to_native(config)
    own: list[Any] = own_events(config.algo_class)
    own += [LearnerConnectorEvents] if config.learner_connector is not None or learner_settings else []
    native.callbacks([*_connector_events(settings), *own, *classes], **functions)  # type: ignore[arg-type]
    native.evaluation(
        evaluation_config=_evaluation_settings(config, name, settings),
        custom_evaluation_function=_evaluation_function(config),
    )
    if config.policies and config.is_multi_agent:
        native.multi_agent(**_multi_agent_settings(config, name, settings))
    return native.with_origin(config)


def algorithm_name(config: AlgorithmConfig) -> str:
    """Return the name of the algorithm of a config.

    Raises:
        ConfigError: Corral has no such algorithm.
    """
    name = config.ALGORITHM or getattr(config.algo_class, "ALGORITHM", "")
    if name not in _CLASSES or not (name or overrides(config.algo_class, "training_step")):
        raise ConfigError(
            f"{type(config).__name__}: Corral serves RLlib's {', '.join(filter(None, _CLASSES))}, and subclasses of "
            "Algorithm that define training_step."
        )
    return name


def refuse_unserved(config: AlgorithmConfig) -> None:
    """Raise for a setting that Corral lacks, unless it has its default.

    Raises:
        ConfigError: Names the setting, its value and the remedy.
    """
    known = {
        **{name: s for group in SETTINGS.values() for name, s in group.items()},
        **TRAINING.get(config.ALGORITHM, {}),
    }
    for name, setting in known.items():
        value = vars(config).get(name, setting.default)
        if setting.kind == "refused" and not same_value(value, setting.default):
            raise ConfigError(f"{name}={value!r:.80}: this setting of RLlib is not in Corral: {setting.note}.")
    runner_class = config.env_runner_cls
    if runner_class is not None and not (isinstance(runner_class, type) and issubclass(runner_class, EnvRunner)):
        raise ConfigError(
            f"env_runner_cls={runner_class!r:.80}: Corral has one runner: use callbacks, or a vector env."
        )
    if config.framework_str not in ("torch", None):
        raise ConfigError(f"framework={config.framework_str!r}: Corral learns with torch: use framework('torch').")


def to_settings(config: AlgorithmConfig, name: str) -> dict[str, Any]:
    """Return Corral's settings by name, without the settings of callbacks, evaluation and several agents."""
    known = {**{key: s for group in SETTINGS.values() for key, s in group.items()}, **TRAINING.get(name, {})}
    settings = {
        setting.note or key: vars(config)[key]
        for key, setting in known.items()
        if setting.kind == "same" and key not in _NOT_COPIED and key in vars(config)
    }
    settings["episode_class"] = MultiAgentEpisode if config.is_multi_agent else SingleAgentEpisode
    settings |= env_settings(config) | _sampling_settings(config, name) | _learning_settings(config)
    if name in OFFLINE:  # nothing is sampled
        settings = {key: value for key, value in settings.items() if key not in _NEEDS_SAMPLING}
    else:
        settings |= output_of(config) | (served := served_settings(config))
        if not served and config.input_ not in ("sampler", None):
            raise ConfigError(
                f"input_={config.input_!r:.80}: {name or 'this algorithm'} learns from an env: use BCConfig, "
                "MARWILConfig, CQLConfig or IQLConfig for recorded data, give a function that returns a "
                "PolicyServerInput to simulators that drive themselves, or leave it out."
            )
    if name:
        settings |= _TRAINING_SETTINGS[name](config)
    spec = config.rl_module_spec
    if isinstance(spec, MultiRLModuleSpec) and not config.is_multi_agent:
        spec = spec.spec_of(DEFAULT_MODULE_ID)
    own = to_module_settings(spec) if isinstance(spec, RLModuleSpec) else None
    settings |= own or {"model_config": to_model_config(config)}
    if isinstance(spec, RLModuleSpec) and not config.is_multi_agent:
        settings |= loading_settings(spec)
    return settings


def _sampling_settings(config: AlgorithmConfig, name: str) -> dict[str, Any]:
    mode = str(getattr(config.gym_env_vectorize_mode, "value", config.gym_env_vectorize_mode)).lower()
    is_async = config.remote_worker_envs or mode == "async"
    own, built_in = _connectors(config)
    if name in OFFLINE and (own or config.learner_connector is not None):
        raise ConfigError(
            f"{name}: recorded steps pass no connectors of your own: change columns in a prelearner_class, or use a "
            "connector that RLlib has built in, as env_to_module_connector."
        )
    if (own or config.module_to_env_connector is not None) and is_async:
        raise ConfigError(
            "gym_env_vectorize_mode='async': connectors of your own need sub-envs in the process of the runner: leave "
            "it out."
        )
    transforms: list[Any] = to_transforms(built_in)
    if config.observation_filter == "MeanStdFilter":
        transforms.append("NormalizeObservations")
    if not name and any(
        each == "NormalizeObservations" or isinstance(each, NormalizeObservations) for each in transforms
    ):
        raise ConfigError(
            "MeanStdFilter: its statistics are merged where Corral's algorithms sample, and training_step samples "
            "itself: normalise in a wrapper of the env, or derive from PPO."
        )
    if config.clip_rewards:
        transforms.append(ClipRewards("sign" if config.clip_rewards is True else float(config.clip_rewards)))
    settings: dict[str, Any] = {
        "wrappers": [Connect(config)] if own or config.module_to_env_connector is not None else [],
        "vectorization": "async" if is_async else "sync",
        "transforms": transforms,
        "min_time_s_per_iteration": config.min_time_s_per_iteration or 0.0,
        "min_sample_timesteps_per_iteration": config.min_sample_timesteps_per_iteration or 0,
        "log_level": {"WARN": "WARNING"}.get(config.log_level, config.log_level),
        "num_cpus_per_learner": 1 if config.num_cpus_per_learner == "auto" else config.num_cpus_per_learner,
    }
    if config.exploration_config:
        settings["exploration_config"] = given = dict(config.exploration_config)
        cls: Any = check_exploration_class(given["type"]) if "type" in given else EpsilonGreedy
        # `EpsilonGreedy` itself only changes the exploration of DQN, in which epsilon falls in 10,000 steps.
        if cls is not EpsilonGreedy and cls.__init__ is EpsilonGreedy.__init__ and "epsilon_schedule" not in given:
            given.setdefault("epsilon_timesteps", 100_000)
    if (
        config.delay_between_env_runner_restarts_s
        != SETTINGS["fault_tolerance"]["delay_between_env_runner_restarts_s"].default
    ):
        settings["delay_between_env_runner_restarts_s"] = config.delay_between_env_runner_restarts_s
    if _cpus_are_short(config):
        settings |= {"num_cpus_per_env_runner": 0, "num_cpus_per_learner": 0}
    return settings | _batch_settings(config, name)


def _cpus_are_short(config: AlgorithmConfig) -> bool:
    """Return whether Ray runs with fewer CPUs than the workers ask for; they then share what there is."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    each = config.num_cpus_per_env_runner
    wanted = each * (config.num_env_runners + config.evaluation_num_env_runners) + config.num_learners
    return bool(wanted > ray.cluster_resources().get("CPU", wanted))


_found: WeakKeyDictionary[AlgorithmConfig, tuple[Any, ...]] = WeakKeyDictionary()
"""By config: function of connectors, env, and what `_connectors` found; the function may need an env each time."""


def _connectors(config: AlgorithmConfig) -> tuple[list[ConnectorV2], list[ConnectorV2]]:
    """Return the connectors that a wrapper of the env calls, and the ones after them that become transforms."""
    if config.env_to_module_connector is None:
        return [], []
    known: tuple[list[ConnectorV2], list[ConnectorV2]] | None
    function, env, known = _found.get(config, (None, None, None))
    if known is None or function is not config.env_to_module_connector or env is not config.env:
        lazy = LazyEnv(env_settings(config), bool(config.is_multi_agent))
        try:
            known = connectors_for(config, lazy)
        finally:
            lazy.close()
        _found[config] = config.env_to_module_connector, config.env, known
    own, built_in = known
    return own, built_in


def _batch_settings(config: AlgorithmConfig, name: str) -> dict[str, Any]:
    """Return the sizes of fragments and batches: as RLlib, whole fragments until the batch is reached."""
    learners, total, length = max(1, config.num_learners), config.total_train_batch_size, config.rollout_fragment_length
    if name in OFF_POLICY:
        length = config.get_rollout_fragment_length()
    elif length != "auto" and name not in (*_ASYNC, *OFFLINE, "DreamerV3"):  # whose batches are no whole fragments
        in_round = length * config.num_envs_per_env_runner * max(1, config.num_env_runners)
        total = math.ceil(total / in_round) * in_round
    each = math.ceil(total / learners)
    minibatch = config.minibatch_size
    return {
        "rollout_fragment_length": length,
        "train_batch_size_per_learner": each,
        "minibatch_size": minibatch if minibatch is None else min(minibatch, each),
    }


def _learning_settings(config: AlgorithmConfig) -> dict[str, Any]:
    schedulers = config._torch_lr_scheduler_classes
    settings: dict[str, Any] = {"lr": config.lr_schedule or config.lr}
    if schedulers:
        settings["lr_scheduler"] = _chain_schedulers(schedulers) if isinstance(schedulers, list) else schedulers
    return settings


def _learner_settings(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the learner that calls the learner class of a config, if Corral's own learner would not do the same.

    Raises:
        ConfigError: It is no learner class, or it steps all modules together in several learners.
    """
    cls, spec = config.learner_class, config.rl_module_spec
    if not (isinstance(cls, type) and issubclass(cls, Learner)):
        raise ConfigError(f"learner_class={cls!r:.80} is no subclass of TorchLearner.")
    is_joint = isinstance(spec, MultiRLModuleSpec) and spec.is_joint
    if (is_joint or steps_by_hand(cls)) and config.num_learners > 1:
        raise ConfigError(
            f"learner_class: {cls.__name__} steps all modules together, which one learner can do: use num_learners=0 "
            "or 1, or override compute_loss_for_module and configure_optimizers_for_module only."
        )
    changes_steps = cls.configure_optimizers_for_module is not Learner.configure_optimizers_for_module
    rates = _NAMES_OF_RATES.get(config.ALGORITHM)
    if rates is not None and (is_joint or steps_by_hand(cls) or changes_steps):
        raise ConfigError(
            f"learner_class: {cls.__name__} changes the steps of {config.ALGORITHM}, whose networks have settings of "
            f"their own: set {rates}, and override compute_loss_for_module only."
        )
    own_losses = any(
        isinstance(each.module_class, type) and issubclass(each.module_class, SelfSupervisedLossAPI)
        for each in _specs_of(spec)
    )
    if cls in (Learner, TorchLearner, *DEFAULTS.values()) and not own_losses and not is_joint and config.ALGORITHM:
        return {}
    return {"learner_class": functools.partial(OwnLearner, cls, config)}


def _specs_of(spec: Any) -> list[RLModuleSpec]:
    parts = getattr(spec, "rl_module_specs", spec)
    return list(parts.values()) if isinstance(parts, Mapping) else [parts]


def _chain_schedulers(classes: list[Any]) -> Any:
    return classes[0] if len(classes) == 1 else _Chained(tuple(classes))


@dataclass(frozen=True)
class _Chained:
    """Makes a scheduler that steps schedulers of some classes one after another."""

    classes: tuple[Any, ...]

    def __call__(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ChainedScheduler([make(optimizer) for make in self.classes])


def _ppo_settings(config: AlgorithmConfig) -> dict[str, Any]:
    settings = {"kl_coeff": 0.0, "entropy_coeff": config.entropy_coeff_schedule or config.entropy_coeff}
    if config.use_kl_loss and config.kl_coeff:
        settings["kl_coeff"] = config.kl_coeff
        if config.kl_target is not None:
            settings |= {"kl_target": config.kl_target, "kl_band": 2.0, "kl_factors": (1.5, 0.5)}
    return settings


def _off_policy_settings(config: AlgorithmConfig) -> dict[str, Any]:
    n_step = config.n_step
    if isinstance(n_step, (list, tuple)):  # RLlib never draws the upper end
        n_step = (n_step[0], max(n_step[0], n_step[1] - 1))
    return {"replay_buffer_config": _buffer_settings(config), "n_step": n_step}


def _buffer_settings(config: AlgorithmConfig) -> dict[str, Any]:
    given = dict(config.replay_buffer_config)
    kind = given.get("type", "")
    kind = (kind if isinstance(kind, str) else kind.__name__).lower()
    is_prioritized = "prioritized" in kind
    renamed = {
        "prioritized_replay_alpha": "alpha",
        "prioritized_replay_beta": "beta",
        "prioritized_replay_eps": "epsilon",
    }
    harmless = {"type", "storage_unit", "num_shards", "metrics_num_episodes_for_smoothing", "replay_sequence_length"}
    found: dict[str, Any] = {"type": "prioritized" if is_prioritized else "uniform"}
    for name, value in given.items():
        native = renamed.get(name, name)
        if name in harmless or (native in ("alpha", "beta", "epsilon") and not is_prioritized):
            continue
        if native not in ("capacity", "alpha", "beta", "epsilon"):
            raise ConfigError(f"replay_buffer_config: {name!r} is not in Corral: leave it out.")
        found[native] = value
    if is_prioritized:
        found.setdefault("epsilon", 1e-12)
        if "episode" in kind:
            found.setdefault("alpha", 1.0)  # the default of RLlib's buffers of episodes
    return found


def _dreamer_settings(config: AlgorithmConfig) -> dict[str, Any]:
    groups = ("world_model", "actor", "critic")
    limits = {name: config.get(f"{name}_grad_clip_by_global_norm") for name in groups}
    settings = {
        "lr": DreamerV3Config.lr,
        "grad_clip": {name: limit for name, limit in limits.items() if limit is not None},
        "replay_buffer_config": _buffer_settings(config),
        # Uniform actions until there is a batch.
        "num_steps_sampled_before_learning_starts": config.total_train_batch_size,
    }
    return settings | {f"{name}_lr": 0.0 for name in groups[1:] if not config.get(f"train_{name}")}


def _dqn_settings(config: AlgorithmConfig) -> dict[str, Any]:
    settings = _off_policy_settings(config)
    if not config.exploration_config and not config.noisy:
        schedule = config.epsilon
        schedule = schedule if isinstance(schedule, (int, float)) else [list(point) for point in schedule]
        settings["exploration_config"] = {"type": "EpsilonGreedy", "epsilon_schedule": schedule}
    if config.adam_epsilon != TRAINING["DQN"]["adam_epsilon"].default:
        settings["optimizer_config"] = {"eps": config.adam_epsilon}
    return settings


def _sac_settings(config: AlgorithmConfig) -> dict[str, Any]:
    settings = {**_off_policy_settings(config), **_sac_learning_settings(config)}
    if config.ALGORITHM == "SAC":
        settings["td_error_loss_fn"] = "huber"
    kind = config.exploration_config.get("type", "StochasticSampling")
    if kind == "StochasticSampling":  # RLlib samples the policy before learning starts, too
        settings["exploration_config"] = {"type": kind, "random_timesteps": 0, **config.exploration_config}
    return settings


def _sac_learning_settings(config: AlgorithmConfig) -> dict[str, Any]:
    old = {"actor_lr": "actor_learning_rate", "critic_lr": "critic_learning_rate", "alpha_lr": "entropy_learning_rate"}
    settings: dict[str, Any] = {
        name: config.optimization_config[key] for name, key in old.items() if key in config.optimization_config
    }
    if config.lr not in (None, OF_RLLIB[config.ALGORITHM]["lr"]):  # CQL has a default that it does not read
        raise ConfigError(
            f"lr={config.lr!r:.60}: {config.ALGORITHM} has {_NAMES_OF_RATES[config.ALGORITHM]}: set these, and lr=None."
        )
    return {**settings, "lr": NativeConfig.lr, "optimizer_config": _ADAM_OF_CRITICS}


def _impala_settings(config: AlgorithmConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"entropy_coeff": config.entropy_coeff_schedule or config.entropy_coeff}
    for name in ("vtrace_clip_rho_threshold", "vtrace_clip_pg_rho_threshold"):
        settings[name] = _NO_LIMIT if (threshold := vars(config)[name]) is None else threshold
    if config.opt_type == "rmsprop":
        settings["optimizer"] = "rmsprop"
        settings["optimizer_config"] = {"alpha": config.decay, "momentum": config.momentum, "eps": config.epsilon}
    elif config.opt_type != "adam":
        raise ConfigError(f"opt_type={config.opt_type!r:.60}: use 'adam' or 'rmsprop'.")
    return settings


def _appo_settings(config: AlgorithmConfig) -> dict[str, Any]:
    settings = _impala_settings(config)
    every = config.target_network_update_freq
    if not config.use_circular_buffer:
        settings["learner_queue_size"] = config.simple_queue_size
        every *= config.circular_buffer_num_batches * config.circular_buffer_iterations_per_batch
    return settings | {
        "target_network_update_freq": every,
        "kl_coeff": config.kl_coeff,
        "kl_target": config.kl_target,
    }


def _bc_settings(config: AlgorithmConfig) -> dict[str, Any]:
    return {**_data_settings(config), "lr": _lr_over_data(config, "lr", config.lr_schedule or config.lr)}


def _lr_over_data(config: AlgorithmConfig, name: str, lr: Any) -> Any:
    """Return a learning rate; a schedule over timesteps, which RLlib counts as one batch in each iteration.

    Raises:
        ConfigError: It is a schedule, and the number of updates in an iteration is not known.
    """
    if not isinstance(lr, (list, tuple)):
        return lr
    num_updates = config.dataset_num_iters_per_learner
    if num_updates is None:
        raise ConfigError(
            f"{name}={lr!r:.80}: a schedule needs the number of updates in an iteration: set "
            "offline_data(dataset_num_iters_per_learner=...)."
        )
    return [[timestep * num_updates, value] for timestep, value in lr]  # Corral counts all that is drawn


def _data_settings(config: AlgorithmConfig) -> dict[str, Any]:
    settings = {"input_": input_of(config), "num_updates_per_iteration": config.dataset_num_iters_per_learner}
    if config.env is None:
        settings |= {"observation_space": config.observation_space, "action_space": config.action_space}
    return settings


def _marwil_settings(config: AlgorithmConfig) -> dict[str, Any]:
    return {**_bc_settings(config), "gamma": config.gamma, "max_advantage_weight": _NO_LIMIT}


def _critic_settings(config: AlgorithmConfig, rates: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of CQL and IQL that are translated alike, given the learning rates by name."""
    every = config.target_network_update_freq
    if every > config.total_train_batch_size:
        num_updates = config.dataset_num_iters_per_learner
        if num_updates is None:
            raise ConfigError(
                f"target_network_update_freq={every}: more than a batch needs the number of updates in an iteration: "
                "set offline_data(dataset_num_iters_per_learner=...)."
            )
        every *= num_updates  # as the timesteps of schedules
    return {
        **_data_settings(config),
        **{name: _lr_over_data(config, name, lr) for name, lr in rates.items()},
        "gamma": config.gamma,
        "lr": NativeConfig.lr,
        "optimizer_config": _ADAM_OF_CRITICS,
        "target_network_update_freq": every,
        "num_offline_updates": None,
    }


def _cql_settings(config: AlgorithmConfig) -> dict[str, Any]:
    learning = _sac_learning_settings(config)
    rates = {name: learning.get(name, config.get(name)) for name in _RATES["CQL"]}
    settings = {**_critic_settings(config, rates), "cql_weight": config.min_q_weight / 2}
    if config.lagrangian:
        settings["lagrangian_threshold"] = config.lagrangian_thresh
    return settings


def _iql_settings(config: AlgorithmConfig) -> dict[str, Any]:
    if config.beta <= 0:
        raise ConfigError(f"`beta`={config.beta!r:.60}: IQL weighs actions by their advantages: set it above 0.")
    return _critic_settings(config, {name: config.get(name) for name in _RATES["IQL"]})


_TRAINING_SETTINGS: dict[str, Callable[[AlgorithmConfig], dict[str, Any]]] = {
    "PPO": _ppo_settings,
    "APPO": _appo_settings,
    "IMPALA": _impala_settings,
    "DQN": _dqn_settings,
    "SAC": _sac_settings,
    "TQC": _sac_settings,
    "MARWIL": _marwil_settings,
    "BC": _bc_settings,
    "CQL": _cql_settings,
    "IQL": _iql_settings,
    "DreamerV3": _dreamer_settings,
}


def _connector_events(settings: Mapping[str, Any]) -> list[Any]:
    return [ConnectorEvents] if settings["wrappers"] else []


def _evaluation_settings(config: AlgorithmConfig, name: str, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which evaluation differs from training; what has no effect there is left out.

    Those are among them that RLlib takes from training, and Corral does not.
    """
    of_training: dict[str, Any] = {"explore": training["explore"]}
    if getattr(training["env"], "IS_EXTERNAL", False) and config.env is not None:  # evaluation plays here
        of_training |= env_settings(config)
    if (num_envs := config.num_envs_per_env_runner) > 1:
        of_training["num_envs_per_env_runner"] = num_envs
    evaluated = config.get_evaluation_config_object() if config.evaluation_config else None
    if evaluated is None:
        return of_training
    given = {key: vars(evaluated)[key] for key in sorted(IN_EVALUATION) if key in vars(evaluated)}
    read = config._with_values(given)
    settings = to_settings(read, name)
    found = {
        key: value for key, value in settings.items() if key not in training or not same_value(value, training[key])
    }
    if read.policy_mapping_fn is not config.policy_mapping_fn:
        found["policy_mapping_fn"] = evaluated.policy_mapping_fn
    has_own = (evaluated.callbacks_class, evaluated.callback_functions) != (
        config.callbacks_class,
        config.callback_functions,
    )
    if has_own or bool(settings["wrappers"]) != bool(training["wrappers"]):
        classes, functions = callbacks.to_native(evaluated)
        found |= {"callbacks_class": [*_connector_events(settings), *classes], "callback_functions": functions}
    return of_training | found


def _multi_agent_settings(config: AlgorithmConfig, name: str, training: Mapping[str, Any]) -> dict[str, Any]:
    # The order of a set of strings changes from one process to the next, and the seeds of modules go by their order.
    ids = sorted(config.policies) if isinstance(config.policies, (set, frozenset)) else config.policies
    parts = {module_id: settings_of_policy(config, module_id, name, training) for module_id in ids}
    settings: dict[str, Any] = {
        "policies": {module_id: policy for module_id, (policy, _) in parts.items()},
        "algorithm_config_overrides_per_module": {module_id: own for module_id, (_, own) in parts.items() if own},
    }
    if config.policy_mapping_fn is not None:
        settings["policy_mapping_fn"] = config.policy_mapping_fn
    if config.policies_to_train is not None:
        settings["policies_to_train"] = to_train(config.policies_to_train)
    if isinstance(config.rl_module_spec, MultiRLModuleSpec) and config.rl_module_spec.is_joint and len(parts) > 1:
        settings["shared_layers"] = {"parts": [list(parts)]}
    return settings


def to_train(chosen: Any) -> Any:
    """Return `policies_to_train` for Corral: functions of RLlib take the id and a batch, which is `None` here."""
    if not callable(chosen):
        return chosen
    try:
        inspect.signature(chosen).bind("module_id", None)
    except (TypeError, ValueError):
        return chosen  # it takes the id only
    return functools.partial(_call_without_batch, chosen)


def _call_without_batch(function: Callable[..., Any], module_id: str) -> Any:
    return function(module_id, None)


def settings_of_policy(
    config: AlgorithmConfig, module_id: str, name: str, training: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a module in `policies`, and the settings of `training` in which it differs.

    Args:
        config: RLlib's config, whose `policies` have the module.
        module_id: Id of the module.
        name: Name of the algorithm.
        training: What `to_settings` returned for the config.
    """
    given = config.policies[module_id] if isinstance(config.policies, Mapping) else None
    policy: dict[str, Any] = {}
    own = dict(config.algorithm_config_overrides_per_module.get(module_id, {}))
    if given is not None:
        cls, observation_space, action_space, settings = _parts_of(given)
        if cls is not None:
            raise ConfigError(
                f"policies: {module_id!r} has the policy class {cls!r}: Corral has no Policy classes; use an RLModule."
            )
        own = {**(settings or {}), **own}
        spaces = {"observation_space": observation_space, "action_space": action_space}
        policy = {key: value for key, value in spaces.items() if value is not None}
    if isinstance(config.rl_module_spec, MultiRLModuleSpec) and config.rl_module_spec.is_joint:
        policy |= {
            "module_class": AdaptedPart,
            "model_config": {"rl_module_id": module_id, "rl_multi_spec": config.rl_module_spec},
        }
    elif isinstance(config.rl_module_spec, MultiRLModuleSpec):
        policy |= _settings_of_spec(config.rl_module_spec.spec_of(module_id), config)
    differs: dict[str, Any] = {}
    if own:
        changed = to_settings(config.copy(copy_frozen=False).update_from_dict(own), name)
        differs = {
            key: value for key, value in changed.items() if key not in _OF_ENV and not same_value(value, training[key])
        }
        if "model_config" in differs:
            policy["model_config"] = differs.pop("model_config")
    built_in = _connectors(config)[1]
    for_module = to_transforms(built_in, module_id, config.policy_mapping_fn)
    if len(for_module) != len(to_transforms(built_in)):
        differs["transforms"] = for_module
    return policy, differs


def _settings_of_spec(spec: RLModuleSpec, config: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings of one module of several."""
    spaces = {"observation_space": spec.observation_space, "action_space": spec.action_space}
    settings = {key: value for key, value in spaces.items() if value is not None}
    settings |= loading_settings(spec)
    if (own := to_module_settings(spec)) is not None:
        return settings | own
    if spec.model_config is not None:
        settings["model_config"] = to_model_config(
            config.copy(copy_frozen=False).rl_module(model_config=spec.model_config)
        )
    return settings


def _parts_of(spec: Any) -> tuple[Any, Any, Any, Any]:
    """Return class, spaces and settings of what describes a policy: a tuple, a `PolicySpec`, or a dict of settings."""
    if isinstance(spec, (tuple, list)):
        policy_class, observation_space, action_space, settings = spec
    elif isinstance(spec, Mapping):
        return None, None, None, spec
    else:
        policy_class, observation_space, action_space = spec.policy_class, spec.observation_space, spec.action_space
        settings = spec.config
    settings = settings.to_dict() if hasattr(settings, "to_dict") else settings
    return policy_class, observation_space, action_space, settings


def _evaluation_function(config: AlgorithmConfig) -> Callable[..., Any] | None:
    if config.custom_evaluation_function:
        return functools.partial(_evaluate, config.custom_evaluation_function)
    return play_and_record if records_evaluation(config) else None


def _evaluate(function: Callable[..., Any], algorithm: Any, env_runner_group: Any) -> Any:
    """Call a custom evaluation function with RLlib's objects."""
    return function(algorithm.view, view_group(env_runner_group, algorithm))
