"""Checks of a whole config: contradictions between settings, found before any process starts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from corral.algorithms.config.without_effect import (
    memory_class,
    network_settings,
    refuse_settings_without_effect,
    warn_of_settings_without_effect,
    without_unused_settings,
)
from corral.callbacks.dispatch import check_callbacks, events_with_sub_envs
from corral.core.paths import resolve_path
from corral.core.settings import LARGEST_SEED, check_called, check_values, same_value
from corral.envs.env_arguments import check_env_config
from corral.envs.episode_resets import RESET_FN_ARGUMENTS, reset_fn_arguments
from corral.envs.vector import env_name, resolve_env
from corral.errors import ConfigError, nearest, nearest_name
from corral.exploration import check_exploration, exploration_class
from corral.exploration.build import resolved
from corral.modules.config import MultiAgentSettings
from corral.modules.heuristic import HeuristicModule
from corral.modules.module import Module
from corral.runs.loggers.named import check_loggers

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig

log = logging.getLogger("corral")

ConfigT = TypeVar("ConfigT", bound="AlgorithmConfig")


def validate(config: AlgorithmConfig) -> None:
    """Refuse a config that cannot work.

    Raises:
        ConfigError: The message names the setting, or both settings of a contradiction, and the remedy.
    """
    if config.input_ is not None or not config.samples:
        _check_recorded_data(config)
    if config.env is None and config.samples:
        raise ConfigError(
            "environment: no env was given: call .environment('CartPole-v1'), or give --env CartPole-v1 on the command "
            "line."
        )
    check_loggers(config.loggers, "reporting: loggers")
    check_values(config)  # a subclass may have bad defaults, and lists may have been changed in place
    if callable(config.policies_to_train):
        check_called("policies_to_train", config.policies_to_train, "module_id")
    if config.seed is not None and config.seed > LARGEST_SEED:
        raise ConfigError(f"debugging: seed={config.seed} must be at most {LARGEST_SEED}.")
    _validate_batch(config)
    _validate_module(config)
    _validate_sampling(config)
    _validate_evaluation(config)
    _validate_modules(config)
    refuse_settings_without_effect(config)


def _check_recorded_data(config: AlgorithmConfig) -> None:
    """Refuse contradictions in the settings of a config with recorded data, or of one that needs it.

    Raises:
        ConfigError: The message names the setting and the remedy.
    """
    if config.input_ is None:
        raise ConfigError(
            f"offline_data: {config.algo_name} learns from recorded data, and none was given: call "
            ".offline_data(input_='path/of/the/data'), or give --data PATH on the command line."
        )
    if not config.LEARNS_FROM_DATA:
        raise ConfigError(
            f"offline_data: input_={config.input_!r:.80}: {config.algo_name} does not learn from recorded data: use "
            "IQL, CQL, BC, MARWIL or an algorithm with a replay buffer, or leave it out."
        )
    if config.map_directory is not None and not resolve_path(config.map_directory, "map_directory").is_dir():
        raise ConfigError(
            f"offline_data: map_directory={config.map_directory!r} is not a directory: make it first, on a disk with "
            "space for all columns."
        )
    if config.samples:
        return
    if config.env is None and (config.evaluation_interval is not None and "env" not in config.evaluation_config):
        raise ConfigError(
            "evaluation_interval: evaluation rounds play in an env, and none was given: call .environment(...), or "
            "leave it out."
        )
    if config.output is not None:
        raise ConfigError(
            f"offline_data: output={config.output!r}: {config.algo_name} samples nothing that could be recorded: leave "
            "it out. `corral record RUN` records episodes of a policy."
        )


def _validate_sampling(config: AlgorithmConfig) -> None:
    """Refuse settings of runners that contradict each other: in training, or in evaluation."""
    if config.env is not None and callable(made := resolve_env(config.env)):
        check_env_config(made, config.env_config, env_name(config.env))
    check_callbacks(config.callbacks_class, config.callback_functions)  # a file or an attribute may have set callbacks
    needing = events_with_sub_envs(config.callbacks_class, config.callback_functions)
    if config.vectorization == "async" and needing:
        raise ConfigError(
            f"vectorization='async' runs each sub-env in another process, so that callbacks of {', '.join(needing)} "
            "cannot receive sub_environment: change the sub-envs with environment(wrappers=[...]), or use "
            "vectorization='sync'."
        )
    check_exploration(config)
    base, own = config.default_episode_class, config.episode_class
    if own is not None and not (inspect.isclass(own) and issubclass(own, base)):
        raise ConfigError(f"env_runners: episode_class={own!r:.80} must be a subclass of corral.{base.__name__}.")
    _validate_env_functions(config)
    _validate_actions(config)
    check_called("policy_mapping_fn", config.policy_mapping_fn, "agent_id", "episode")
    if callable(config.critic_sees):
        check_called("critic_sees", config.critic_sees, "agent_id", "observations", "actions", "present")
    if not config.is_multi_agent:
        _refuse_settings_of_agents(config)


# Settings that evaluation_config can change, by group, because evaluation runners read them; `()` is the whole group.
_OF_EVALUATION: Mapping[str, tuple[str, ...]] = {
    "environment": ("env", "env_config", "wrappers", "env_reset_fn", "disable_env_checking"),
    "env_runners": (
        *("num_envs_per_env_runner", "vectorization", "autoreset_mode", "explore", "num_cpus_per_env_runner"),
        *("num_gpus_per_env_runner", "custom_resources_per_env_runner", "episode_class"),
    ),
    "exploration": (),
    "callbacks": (),
    "multi_agent": ("policy_mapping_fn",),
    "fault_tolerance": (),
    "learners": ("num_threads",),
    "debugging": ("seed",),
    "engine": ("start_timeout_s",),
}

# What to do with other settings, by setting or by group.
_INSTEAD = {
    "env_task_fn": "set evaluation(evaluation_tasks=...), or an env_reset_fn",
    "num_env_runners": "set evaluation(evaluation_num_env_runners=...)",
    "sample_timeout_s": "set evaluation(evaluation_sample_timeout_s=...)",
    "batch_mode": "evaluation plays whole episodes: set evaluation(evaluation_duration_unit=...)",
    "transforms": "evaluation uses the transforms of the algorithm with their statistics: leave it out",
    "engine_name": "evaluation runners run on the engine of the algorithm: leave it out",
    "rl_module": "evaluation runners have the module that is trained: leave it out",
    "evaluation": "set it with .evaluation(...)",
}


def _validate_evaluation(config: AlgorithmConfig) -> None:
    """Refuse overrides that evaluation runners never read, or that contradict each other."""
    homes = {name: group for group, names in config.group_fields().items() for name in names}
    for name, value in config.overrides(**config.evaluation_config).items():
        group = homes[name]
        known = name in (_OF_EVALUATION.get(group, (None,)) or (name,))
        if not known and not same_value(value, getattr(config, name)):
            instead = _INSTEAD.get(name) or _INSTEAD.get(group) or "leave it out"
            raise ConfigError(
                f"evaluation_config: {name}={value!r:.80} has no effect on evaluation runners: {instead}."
            )
    if config.evaluation_config:
        try:
            _validate_sampling(config.for_evaluation())
        except ConfigError as error:
            raise ConfigError(f"evaluation_config: {error}") from error


def _validate_env_functions(config: AlgorithmConfig) -> None:
    for name in ("env_task_fn", "env_reset_fn"):
        function = getattr(config, name)
        if function is not None and not callable(function):
            raise ConfigError(f"environment: {name} must be a function, got {function!r}.")
    if config.env_reset_fn is not None:
        reset_fn_arguments(config.env_reset_fn)
    if config.env_task_fn is not None:
        try:
            inspect.signature(config.env_task_fn).bind({}, None, None)
        except ValueError as error:
            raise ConfigError(
                f"env_task_fn: the signature of {config.env_task_fn!r} is unknown ({error}): wrap it in a lambda."
            ) from error
        except TypeError as error:
            raise ConfigError(
                f"environment: env_task_fn is called as fn(train_results, task_settable_env, env_ctx), and {error}."
            ) from None


def _validate_actions(config: AlgorithmConfig) -> None:
    """Refuse settings of actions that contradict each other, and settings of modules that others stand for."""
    for name, instead in (("critic_space", "multi_agent(critic_sees=...)"), ("normalize_values", "training(...)")):
        if name in config.model_config:
            raise ConfigError(f"model_config: {name} is not set here, but by .{instead}: leave it out.")
    given = config.model_config.get("action_bounds")
    if given is not None and not config.normalize_actions:
        raise ConfigError(
            f"normalize_actions=False contradicts model_config={{'action_bounds': {given!r}}}, which maps actions to "
            "the bounds: leave one of them out."
        )


def warn_of_mistakes(config: AlgorithmConfig) -> None:
    """Warn of settings that are allowed and most likely a mistake."""
    warn_of_settings_without_effect(config)
    names = () if config.env_reset_fn is None else inspect.signature(config.env_reset_fn).parameters
    for name in names:
        near = nearest_name(name, RESET_FN_ARGUMENTS)
        if name not in RESET_FN_ARGUMENTS and near is not None:
            log.warning(
                "env_reset_fn: there is no argument %r, so this parameter keeps its default. Did you mean %r?",
                name,
                near,
            )


# Groups of the settings that can differ for a module, and the settings in them that are the same for all modules.
_OF_MODULES = ("training", "exploration", "rl_module")
_ALSO_OF_MODULES = frozenset({"transforms"})
_SHARED = frozenset(
    "store_buffer_in_checkpoints num_offline_updates num_updates_per_iteration broadcast_interval learner_queue_size "
    "use_circular_buffer circular_buffer_num_batches circular_buffer_iterations_per_batch".split()
)


def _validate_modules(config: AlgorithmConfig) -> None:
    """Refuse modules that do not exist, and settings of modules that contradict each other or differ in vain."""
    overrides = config.algorithm_config_overrides_per_module
    if not config.is_multi_agent:
        return
    chosen = config.policies_to_train
    named = [*overrides, *(chosen if isinstance(chosen, (list, tuple)) else ())]
    for module_id in named:
        if module_id not in config.policies:
            raise ConfigError(f"multi_agent: there is no module {module_id!r}. {nearest(module_id, config.policies)}")
    for module_id in config.policies:
        try:
            _validate_overrides_of_module(config, overrides.get(module_id, {}))
            _validate_module_alone(config, module_id)
        except ConfigError as error:
            raise ConfigError(f"module {module_id!r}: {error}") from error


def _refuse_settings_of_agents(config: AlgorithmConfig) -> None:
    """Refuse settings of several agents without modules for them."""
    for name, unset in vars(MultiAgentSettings()).items():
        if (value := getattr(config, name)) != unset:
            raise ConfigError(f"multi_agent: {name}={value!r:.80} needs policies={{...}}, the ids of the modules.")


def _validate_overrides_of_module(config: AlgorithmConfig, settings: Mapping[str, Any]) -> None:
    homes = {name: group for group, names in config.group_fields().items() for name in names}
    shared = _SHARED | ({"train_batch_size_per_learner"} if config.SAMPLES_BATCHES else set())
    for name, value in config.overrides(**settings).items():
        if (homes[name] not in _OF_MODULES and name not in _ALSO_OF_MODULES) or name in shared:
            raise ConfigError(
                f"algorithm_config_overrides_per_module: {name}={value!r:.80} is the same for all modules: set it "
                f"with .{homes[name]}({name}=...)."
            )


def _validate_module_alone(config: AlgorithmConfig, module_id: str) -> None:
    """Validate the config of one module, if it has settings of its own."""
    given, own = config.policies[module_id], config.for_module(module_id)
    is_named = isinstance(config.policies_to_train, (list, tuple)) and module_id in config.policies_to_train
    if is_named and not _has_network(own):
        raise ConfigError(
            f"{own.module_class.__name__} chooses actions by rules, so it cannot learn: leave the module out of "
            "policies_to_train."
        )
    of_module = config.group_fields()["rl_module"]
    if not _has_network(own) and (vain := sorted(given.keys() & {"load_from", "load_parts", "freeze_parts"})):
        raise ConfigError(
            f"{own.module_class.__name__} has no weights, so {', '.join(vain)} of module {module_id!r} has no effect: "
            "leave it out."
        )
    for name, value in config.algorithm_config_overrides_per_module.get(module_id, {}).items():
        if name not in (*of_module, "transforms") and not _has_network(own):
            raise ConfigError(
                f"{own.module_class.__name__} chooses actions by rules, so algorithm_config_overrides_per_module: "
                f"{name}={value!r:.80} has no effect: leave it out."
            )
    if given or module_id in config.algorithm_config_overrides_per_module:
        learns = _has_network(own) and config.trains(module_id)
        alone: dict[str, Any] = {"policies": {module_id: {}}, "policies_to_train": [module_id] if learns else []}
        alone |= {"policy_mapping_fn": None, "algorithm_config_overrides_per_module": {}, "shared_layers": {}}
        keep = given.keys() | config.algorithm_config_overrides_per_module.get(module_id, {}).keys()
        without_unused_settings(own, keep).copy(**alone).validate()


def _has_network(config: AlgorithmConfig) -> bool:
    return not (inspect.isclass(config.module_class) and issubclass(config.module_class, HeuristicModule))


def _validate_batch(config: AlgorithmConfig) -> None:
    batch, minibatch = config.train_batch_size_per_learner, config.minibatch_size
    # A sampled batch of several agents counts other steps than the batch of one module, which is cut into minibatches.
    are_comparable = not (config.SAMPLES_BATCHES and config.is_multi_agent)
    if minibatch is not None and minibatch > batch and are_comparable:
        raise ConfigError(
            f"minibatch_size={minibatch} is larger than train_batch_size_per_learner={batch}: lower the first or raise "
            "the second."
        )
    if config.num_envs_per_env_runner is not None or isinstance(config.env, str):
        num_env_steps_per_round(config, config.num_envs_per_env_runner or config.DEFAULT_NUM_ENVS)


# Whole rounds may make the batch of an on-policy algorithm larger by this share, as in RLlib.
LARGEST_EXCESS = 0.1


def num_env_steps_per_round(config: AlgorithmConfig, num_envs: int) -> int | None:
    """Return the number of env steps that all runners sample in one round, or `None` if a round is the whole batch.

    Off-policy algorithms accept any number; with `rollout_fragment_length="auto"` a round is one step of each sub-env.
    So does asynchronous sampling, whose batches are made of the fragments that arrive first.

    Args:
        config: Config of the algorithm.
        num_envs: Number of sub-envs of a runner; for a factory that returns a ready `VectorEnv`, it is only known after
            the factory was called.

    Raises:
        ConfigError: Whole rounds exceed the batch of an on-policy algorithm, which counts env steps, by more than a
            tenth.
    """
    fragment, runners = config.rollout_fragment_length, max(1, config.num_env_runners)
    if fragment == "auto":
        return None if config.SAMPLES_BATCHES else num_envs * runners
    steps = fragment * num_envs * runners
    counts_agents = config.is_multi_agent and config.count_steps_by == "agent_steps"
    excess = -config.total_train_batch_size % steps
    if (
        config.SAMPLES_BATCHES
        and not (counts_agents or config.sample_async)
        and excess > LARGEST_EXCESS * config.total_train_batch_size
    ):
        raise ConfigError(
            f"rollout_fragment_length={fragment} does not divide train_batch_size_per_learner="
            f"{config.train_batch_size_per_learner}: {runners} runner(s) of {num_envs} env(s) sample {steps} steps per "
            f"round, and whole rounds exceed the batch of {config.total_train_batch_size} by {excess}, more than a "
            f"tenth. Use a multiple of {steps} as the batch size, or rollout_fragment_length='auto'."
        )
    return steps


def reconfigured(config: ConfigT, settings: Mapping[str, Any], *, fixed: Collection[str]) -> ConfigT:
    """Return a checked copy of a config with changed settings of the group `training`.

    Args:
        config: Config of an algorithm that was built.
        settings: New values, by name of the setting.
        fixed: Settings of `training` that cannot change after building.

    Raises:
        ConfigError: A setting is unknown, has the wrong type, contradicts another setting, or cannot change after
            building.
    """
    changed = config.copy(**settings)
    rates = {name for name in settings if name == "lr" or name.endswith("_lr")} if config.lr_scheduler else set()
    changeable = set(config.group_fields()["training"]) - set(fixed) - rates
    if refused := sorted(set(settings) - changeable):
        raise ConfigError(
            f"reconfigure: {', '.join(refused)} can only be set before building. Settings that can change afterwards: "
            f"{', '.join(sorted(changeable))}. For others, save(), build another algorithm, and restore_from_path()."
        )
    changed.validate()
    return changed


def _validate_module(config: AlgorithmConfig) -> None:
    base, module_class = config.default_module_class, config.module_class or config.default_module_class
    learns = _has_network(config) and any(map(config.trains, config.module_ids))
    # The base that a user's class needs is the next class that names its methods; `Module` for most algorithms.
    bases = (each for each in base.__mro__ if issubclass(each, Module) and "MUST_DEFINE" in vars(each))
    own: type[Module] = next(bases) if learns else Module
    if not _has_network(config):
        own = HeuristicModule
        if not config.is_multi_agent:
            raise ConfigError(
                f"rl_module: {module_class.__name__} chooses actions by rules and cannot learn: give it to a module of "
                "an env with several agents, with .multi_agent(policies={...})."
            )
    if not (inspect.isclass(module_class) and issubclass(module_class, own)):
        name = "corral.Module" if own is Module else f"{own.__module__}.{own.__name__}"
        raise ConfigError(f"rl_module: module_class must be a subclass of {name}, got {module_class!r}.")
    for method in own.MUST_DEFINE:
        if getattr(module_class, method) is getattr(own, method, None):
            arguments = ", ".join(inspect.signature(getattr(own, method)).parameters)
            raise ConfigError(f"rl_module: {module_class.__name__} must define {method}({arguments}).")
    if learns:
        _validate_memory(config, module_class, base)
    network_settings(config)


def _validate_memory(config: AlgorithmConfig, module_class: type[Module], base: type[Module]) -> None:
    """Refuse a module with memory where an algorithm or a setting has no form for it, and settings without effect."""
    settings = config.model_config
    asked = [name for name in ("use_lstm", "use_gru") if settings.get(name) and module_class is base]
    if not asked and not module_class.has_memory():
        length, burn_in = settings.get("max_seq_len"), getattr(config, "burn_in_len", 0)
        for name, value in (("max_seq_len", length if module_class is base else None), ("burn_in_len", burn_in)):
            if value:
                raise ConfigError(
                    f"{name}={value} has no effect on a module without memory: set use_lstm=True or use_gru=True in "
                    "model_config, or leave it out."
                )
        return
    what = f"model_config: {asked[0]}=True" if asked else f"{module_class.__name__} defines initial_state(), which"
    if not config.LEARNS_SEQUENCES:
        raise ConfigError(
            f"rl_module: {what} gives the module memory, and {config.algo_name} cannot train modules with memory: use "
            "PPO, DQN or SAC, or a module without memory, for example on observations that hold the latest frames."
        )
    with_memory = memory_class(base)
    if with_memory is not None and not issubclass(module_class, with_memory):
        raise ConfigError(
            f"rl_module: {what} gives the module memory: for {config.algo_name} it must be a subclass of "
            f"{with_memory.__module__}.{with_memory.__name__}."
        )
    if (kind := getattr(config, "replay_buffer_config", {}).get("type", "uniform")) != "uniform":
        raise ConfigError(
            f"replay_buffer_config: type={kind!r} draws single steps, and {what} gives the module memory, which learns "
            "from sequences: set type='uniform'."
        )
    kind = exploration_class(resolved(config.exploration_config, config.default_exploration)["type"])
    if not kind.with_memory:
        raise ConfigError(
            f"exploration_config: {kind.__name__} has no form for modules with memory, and "
            f"{what.removesuffix(', which')}: use another type."
        )
