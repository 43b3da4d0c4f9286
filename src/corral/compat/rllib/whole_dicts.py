"""What the `to_dict()` of RLlib 2.60 has in addition to the settings: accepted at its default only.

Names and numbers are facts of RLlib's interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.core.settings import same_value
from corral.errors import ConfigError

REMOVED = -1
"""The value of settings that RLlib has removed."""

_REMOVED_NAMES = frozenset(
    (
        *("_disable_execution_plan_api", "_enable_rl_module_api", "custom_async_evaluation_function"),
        *("sgd_minibatch_size", "worker_cls", "env_task_fn", "enable_connectors", "simple_optimizer"),
        *("policy_map_cache", "synchronize_filters", "enable_async_evaluation", "auto_wrap_old_gym_envs"),
        *("always_attach_evaluation_results", "vf_share_layers", "use_state_preprocessor"),
        *("worker_side_prioritization",),
    )
)

_SECOND_NAMES = {
    "_per_module_overrides": "algorithm_config_overrides_per_module",
    "_env_to_module_connector": "env_to_module_connector",
    "_module_to_env_connector": "module_to_env_connector",
    "_learner_connector": "learner_connector",
    "_learner_class": "learner_class",
    "_rl_module_spec": "rl_module_spec",
    "_model_config": "model_config",
    "_is_atari": "is_atari",
    "_train_batch_size_per_learner": "train_batch_size_per_learner",
}
"""Attributes behind the properties of RLlib's config, by the names of the settings."""

_OFFLINE: dict[str, Any] = {
    "broadcast_offline_eval_runner_states": False,
    "custom_resources_per_offline_eval_runner": {},
    "dataset_num_iters_per_eval_runner": 1,
    "ignore_offline_eval_runner_failures": False,
    "input_spaces_jsonable": True,
    "max_num_offline_eval_runner_restarts": 1000,
    "max_requests_in_flight_per_offline_eval_runner": 1,
    "num_cpus_per_offline_eval_runner": 1,
    "offline_eval_rl_module_inference_only": False,
    "offline_eval_runner_class": None,
    "offline_eval_runner_health_probe_timeout_s": 30.0,
    "offline_eval_runner_restore_timeout_s": 1800.0,
    "offline_evaluation_duration": 1,
    "offline_evaluation_parallel_to_training": False,
    "offline_evaluation_timeout_s": 120.0,
    "restart_failed_offline_eval_runners": True,
    "validate_offline_eval_runners_after_construction": True,
}

_OTHERS: dict[str, Any] = {
    "_dont_auto_sync_env_runner_states": False,
    "replay_sequence_length": None,
}

_WITHOUT_EFFECT = {"_is_online", "_prior_exploration_config", "sync_filters_on_rollout_workers_timeout_s"} | {
    "_set_off_policy_estimation_methods"
}

_STATISTICS = {"mean", "ema", "min", "max", "sum", "lifetime_sum", "percentiles", "item", "item_series"}

_MODEL: dict[str, Any] = {
    "fcnet_hiddens": [256, 256],
    "fcnet_activation": "tanh",
    "conv_activation": "relu",
    "post_fcnet_hiddens": [],
    "post_fcnet_activation": "relu",
    "free_log_std": False,
    "log_std_clip_param": 20.0,
    "no_final_linear": False,
    "vf_share_layers": True,
    "use_lstm": False,
    "max_seq_len": 20,
    "lstm_cell_size": 256,
    "lstm_use_prev_action": False,
    "lstm_use_prev_reward": False,
    "_time_major": False,
    "use_attention": False,
    "attention_num_transformer_units": 1,
    "attention_dim": 64,
    "attention_num_heads": 1,
    "attention_head_dim": 32,
    "attention_memory_inference": 50,
    "attention_memory_training": 50,
    "attention_position_wise_mlp_dim": 32,
    "attention_init_gru_gate_bias": 2.0,
    "attention_use_n_prev_actions": 0,
    "attention_use_n_prev_rewards": 0,
    "always_check_shapes": False,
    "lstm_use_prev_action_reward": REMOVED,
    "_use_default_native_models": REMOVED,
    "_disable_action_flattening": False,
}
"""The whole `model` dict; what is not here has the default `None`, or is ignored with any value."""

_SAC_MODEL: dict[str, Any] = {
    "fcnet_hiddens": [256, 256],
    "fcnet_activation": "relu",
    "post_fcnet_hiddens": [],
    "post_fcnet_activation": None,
    "custom_model": None,
    "custom_model_config": {},
}
_SAC_LEARNING_RATES = {"actor_learning_rate": 3e-4, "critic_learning_rate": 3e-4, "entropy_learning_rate": 3e-4}


def to_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of settings without what RLlib's `to_dict()` adds, and by the names of the settings.

    Args:
        given: Settings by name.

    Raises:
        ConfigError: A name that is not in Corral has another value than RLlib's default.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _WITHOUT_EFFECT or (name in _REMOVED_NAMES and _is_removed(value)):
            continue
        if name in _OFFLINE or name in _OTHERS or name in ("stats_cls_lookup", *_REMOVED_NAMES - _KNOWN_STILL):
            _refuse_other_value(name, value)
        elif name in _SECOND_NAMES:
            if value is not None and not same_value(value, {}):  # of two names the public one counts
                found.setdefault(_SECOND_NAMES[name], given.get(_SECOND_NAMES[name]) or value)
        elif name == "model" and "no_final_linear" in (value or {}):
            found[name] = {key: part for key, part in value.items() if not same_value(part, _MODEL.get(key))}
        elif name in ("q_model_config", "policy_model_config") and same_value(value, _SAC_MODEL):
            continue
        elif name == "optimization" and same_value(value, _SAC_LEARNING_RATES):  # not read: `actor_lr` and others are
            continue
        elif name.startswith("callbacks_on_") and value is None:
            continue
        else:
            found[name] = value
    return found


_KNOWN_STILL = frozenset(
    (
        *("_enable_rl_module_api", "sgd_minibatch_size", "env_task_fn", "enable_connectors", "simple_optimizer"),
        *("policy_map_cache", "synchronize_filters", "enable_async_evaluation", "auto_wrap_old_gym_envs"),
        *("always_attach_evaluation_results", "vf_share_layers"),
    )
)
"""Removed by RLlib, but settings of older versions that Corral serves."""


def _is_removed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == REMOVED


def _refuse_other_value(name: str, value: Any) -> None:
    if name == "stats_cls_lookup":
        is_default = isinstance(value, Mapping) and set(value) == _STATISTICS
        remedy = "use a reduction of `log_value`"
    elif name in _OFFLINE:
        default = _OFFLINE[name]
        is_default = same_value(value, default)
        remedy = "Corral does not evaluate a policy on recorded data yet"
    else:
        is_default = name in _OTHERS and same_value(value, _OTHERS[name])
        remedy = "leave it out"
    if not is_default:
        raise ConfigError(f"{name}={value!r:.80}: this setting of RLlib is not in Corral: {remedy}.")
