"""What becomes of methods of RLlib's `Algorithm` that a class of a script overrides: none is dropped silently.

Each public method of RLlib's class is in one of three tables: Corral calls it where RLlib does, only scripts call it,
or a class that overrides it is refused when its algorithm is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from corral.compat.rllib.missing import REMEDIES
from corral.errors import ConfigError
from corral.exploration.build import exploration_class

CALLED = frozenset(
    "setup train step training_step evaluate _before_evaluate log_result restore_env_runners save save_checkpoint "
    "save_to_path restore load_checkpoint restore_from_path get_state set_state stop cleanup validate_env reset_config "
    "get_default_config default_resource_request".split()
)
"""Methods that are called where RLlib calls them, and whose result is used."""

BY_SCRIPTS = frozenset(
    "from_checkpoint from_state add_module remove_module get_module add_policy remove_policy get_policy get_weights "
    "set_weights compute_actions compute_single_action get_config iteration training_iteration logdir env_runner "
    "eval_env_runner workers evaluation_workers metrics config env_runner_group eval_env_runner_group learner_group "
    "export_model export_policy_model export_policy_checkpoint resource_help is_actor get_current_ip_pid".split()
)
"""Methods and properties that only scripts use, which get the ones of their own class."""

_STATE = "override get_state and set_state, whose parts are in checkpoints"
_LOOP = "Corral has a loop of its own: override step, training_step, evaluate or log_result"
_EVALUATION = "override evaluate, or use .evaluation(custom_evaluation_function=...)"
_OFFLINE = "evaluation plays in envs: override evaluate, or call corral.estimate_return(algo.native, data)"
_RESULT = "add to the result in step, log_result or on_train_result"
_TRIALS = "trials of Tune have names, files and resources of their own: leave it out"
_PRIVATE = "Corral has no such step: override a public method, such as training_step, evaluate, step or setup"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("__getstate__", "__setstate__"), _STATE),
    **dict.fromkeys(("get_metadata", "get_ctor_args_and_kwargs", "get_checkpointable_components"), _STATE),
    **dict.fromkeys(("evaluate_offline", "restore_offline_eval_runners", "offline_data"), _OFFLINE),
    "restore_workers": "override restore_env_runners",
    "get_default_policy_class": REMEDIES["Algorithm"]["get_default_policy_class"],
    "merge_algorithm_configs": "override update_from_dict of the config class",
    "merge_trainer_configs": "override update_from_dict of the config class",
    "validate_config": "override validate of the config class",
    "execution_plan": "override training_step",
    "train_buffered": "override train",
    "reset": "override reset_config",
    "get_auto_filled_metrics": _RESULT,
    **dict.fromkeys(("trial_id", "trial_name", "trial_resources"), _TRIALS),
    "_export_model": "override export_model",
    **dict.fromkeys(("_init", "_setup"), "override setup"),
    "_train": "override step",
    "_save": "override save_checkpoint",
    "_restore": "override load_checkpoint",
    "_stop": "override cleanup",
    "_log_result": "override log_result",
    "_reset": "override reset_config",
    **dict.fromkeys(
        "_run_one_training_iteration _run_one_training_iteration_old_api_stack _compile_iteration_results "
        "_compile_iteration_results_old_api_stack _run_one_training_iteration_and_evaluation_in_parallel".split(),
        _LOOP,
    ),
    **dict.fromkeys(
        "_run_one_evaluation _run_one_offline_evaluation _run_offline_evaluation_old_api_stack "
        "_evaluate_with_custom_eval_function _evaluate_on_local_env_runner _evaluate_with_auto_duration "
        "_evaluate_with_fixed_duration _evaluate_offline_on_local_runner _evaluate_offline_with_fixed_duration "
        "_should_create_evaluation_env_runners _should_create_offline_evaluation_runners "
        "_maybe_wait_for_eval_env_runner_recovery".split(),
        _EVALUATION,
    ),
    **dict.fromkeys(
        "_checkpoint_info_to_algorithm_state _check_component _get_subcomponents _restore_all_subcomponents_from_path "
        "_report_class_trainable_checkpoint".split(),
        "override save_checkpoint and load_checkpoint",
    ),
    **dict.fromkeys(
        "_set_up_metrics _remote_worker_ids_for_metrics _get_env_id_and_creator _sync_filters_if_needed "
        "_make_on_env_runners_recreated_callbacks _record_usage _create_local_replay_buffer_if_necessary "
        "_setup_logdir _open_logfiles _close_logfiles _implements_method _sync_weights_to_workers "
        "_kwargs_for_execution_plan try_recover_from_step_attempt on_worker_failures".split(),
        _PRIVATE,
    ),
}
"""By name of a method that Corral calls nowhere, what to override in its place; also names of older versions."""

REFUSED_OF_EXPLORATIONS: Mapping[str, str] = {
    "before_compute_actions": "override begin_episodes, which is called before each row of actions",
    "on_episode_start": "override begin_episodes, or use a callback",
    "on_episode_end": "override begin_episodes, or use a callback",
    "postprocess_trajectory": "override learn, which may change the rewards, or use a callback",
    "get_exploration_optimizer": "override learn, in which the exploration steps its own optimizer",
    **dict.fromkeys(
        ("_get_torch_exploration_action", "_get_tf_exploration_action_op"), "override get_exploration_action"
    ),
}
"""By name of a method of RLlib's `Exploration` that Corral calls nowhere, what to do in its place."""

_UNDER_TUNE = {"save": "save_checkpoint", "restore": "load_checkpoint"}

_originals: dict[str, Any] = {}
"""The attributes of the base class as Corral defines them, before any script assigns others."""


def note_originals(base: type) -> None:
    """Keep the attributes of the base class of all algorithms."""
    _originals.update(vars(base))


def overrides(algorithm: Any, *names: str) -> bool:
    """Return whether an algorithm of RLlib, or a class of them, has a method of its own in place of the base class's.

    Args:
        algorithm: The algorithm or class, or `None`; a method may also be assigned to an object.
        *names: Names of methods, of which one is enough.
    """
    if algorithm is None:
        return False
    return any(
        inspect.getattr_static(algorithm, name, None) is not _originals.get(name, vars(object).get(name))
        for name in names
    )


def check_overrides(cls: type, config: Any) -> None:
    """Refuse a class with a method that would not be called, or not as RLlib calls it.

    Args:
        cls: Class of the algorithm.
        config: RLlib's config.

    Raises:
        ConfigError: Names the class, the method and the remedy.
    """
    refused = dict(REFUSED)
    if getattr(config, "evaluation_parallel_to_training", False):
        refused |= dict.fromkeys(
            ("evaluate", "_before_evaluate"),
            "evaluation_parallel_to_training=True plays rounds while training runs: leave it out, or use "
            ".evaluation(custom_evaluation_function=...)",
        )
    for name, remedy in refused.items():
        if overrides(cls, name):
            raise ConfigError(f"{cls.__name__}.{name}: Corral does not call this method: {remedy}.")
    if overrides(cls, "validate_env"):
        if inspect.isfunction(inspect.getattr_static(cls, "validate_env")):
            raise ConfigError(f"{cls.__name__}.validate_env: runners call it without an algorithm: add @staticmethod.")
        mode = getattr(config.gym_env_vectorize_mode, "value", config.gym_env_vectorize_mode)
        if config.remote_worker_envs or str(mode).lower() == "async":
            raise ConfigError(
                f"{cls.__name__}.validate_env: it needs the sub-envs in the processes of runners: leave "
                "gym_env_vectorize_mode='async' out."
            )


def check_exploration_class(kind: Any) -> type:
    """Return the exploration class of a script; refuse one with a method that would not be called.

    Args:
        kind: The key `type` of an `exploration_config`.

    Raises:
        ConfigError: Names the class, the method and the remedy, or the type is unknown.
    """
    cls = exploration_class(kind)
    for name, remedy in REFUSED_OF_EXPLORATIONS.items():
        if hasattr(cls, name):
            raise ConfigError(f"exploration {cls.__name__}.{name}: Corral does not call this method: {remedy}.")
    return cls


def check_for_tune(cls: type) -> None:
    """Refuse a class whose trials would not call one of its methods.

    Raises:
        ConfigError: Names the class, the method and the remedy.
    """
    for name, instead in _UNDER_TUNE.items():
        if overrides(cls, name):
            raise ConfigError(f"{cls.__name__}.{name}: trials of Tune call {instead}: override that method.")
