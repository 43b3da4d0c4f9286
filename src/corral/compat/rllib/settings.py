"""The settings of RLlib's configs: their methods and defaults in RLlib 2.60, and what Corral does with each.

This table serves the configs, refuses what Corral lacks, and is the table in docs/rllib-migration.md. Names and
numbers are facts of RLlib's interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Setting:
    """A setting of RLlib.

    Attributes:
        default: Its default in RLlib.
        kind: `"same"`: Corral has a setting of the same meaning. `"adapted"`: its meaning is translated. `"ignored"`:
            it changes no result. `"refused"`: every value but the default is an error.
        note: Name of Corral's setting where it is another one, what is done, why it is harmless, or the remedy.
    """

    default: Any
    kind: Literal["same", "adapted", "ignored", "refused"]
    note: str = ""


def same(default: Any, native: str = "") -> Setting:
    """Return a setting that Corral has, under the same name or under another one."""
    return Setting(default, "same", native)


def adapted(default: Any, note: str) -> Setting:
    """Return a setting whose meaning is translated."""
    return Setting(default, "adapted", note)


def ignored(default: Any, why: str) -> Setting:
    """Return a setting that changes no result."""
    return Setting(default, "ignored", why)


def refused(default: Any, remedy: str) -> Setting:
    """Return a setting that Corral lacks."""
    return Setting(default, "refused", remedy)


_RAY = "Corral's engine places its processes itself"
_OLD_STACK = "it belonged to the older stack"
_OFFLINE = (
    "Corral evaluates on recorded data after training, with `corral evaluate RUN --data PATH` or "
    "`corral.estimate_return`; `validation_fraction` of `corral.BCConfig` reports the loss on other episodes"
)
_RAY_DATA = "Corral reads the data itself, once, and draws batches from all steps"
_STATE = "statistics of transforms are merged exactly in every round"

OFF_POLICY = ("DQN", "SAC", "TQC")
"""Algorithms that learn from what they sampled before."""

OFFLINE = ("BC", "MARWIL", "CQL", "IQL")
"""Algorithms that learn from recorded data alone."""

SETTINGS: dict[str, dict[str, Setting]] = {
    "environment": {
        "env": same(None),
        "env_config": same({}),
        "observation_space": adapted(
            None, "counts for recorded data without an env; else the space of the env is used"
        ),
        "action_space": adapted(None, "counts for recorded data without an env; else the space of the env is used"),
        "render_env": ignored(False, "rendering changes no result; `evaluation_num_videos` records episodes"),
        "clip_rewards": adapted(None, "a transform `ClipRewards`: True takes the sign, a number c clips to [-c, c]"),
        "normalize_actions": same(True),
        "clip_actions": same(False),
        "disable_env_checking": same(False),
        "is_atari": ignored(None, "Corral's default nets need no hint"),
        "action_mask_key": refused("action_mask", "name the key `action_mask` in the observations of the env"),
        "env_task_fn": same(None),
        "auto_wrap_old_gym_envs": ignored(True, "envs follow Gymnasium's interface"),
    },
    "env_runners": {
        "env_runner_cls": adapted(None, "the runner classes of RLlib are served by Corral's runner"),
        "num_env_runners": same(0),
        "create_local_env_runner": ignored(True, _RAY),
        "create_env_on_local_worker": ignored(False, _RAY),
        "num_envs_per_env_runner": same(1),
        "gym_env_vectorize_mode": adapted("sync", "`vectorization`: `sync` or `async`"),
        "num_cpus_per_env_runner": same(1),
        "num_gpus_per_env_runner": same(0),
        "custom_resources_per_env_runner": same({}),
        "validate_env_runners_after_construction": ignored(True, "Corral always validates its runners"),
        "sample_timeout_s": same(60.0),
        "max_requests_in_flight_per_env_runner": ignored(1, _RAY),
        "env_to_module_connector": adapted(
            None, "connectors that RLlib has built in become `transforms`, others a wrapper of the env"
        ),
        "module_to_env_connector": adapted(None, "a wrapper of the env changes actions"),
        "add_default_connectors_to_env_to_module_pipeline": adapted(
            True, "False needs `AddObservationsFromEpisodesToBatch` in the pipeline"
        ),
        "add_default_connectors_to_module_to_env_pipeline": refused(True, "leave the default connectors in"),
        "episode_lookback_horizon": adapted(1, "steps that connectors can look back beyond the start of a sample"),
        "merge_env_runner_states": ignored("training_only", _STATE),
        "broadcast_env_runner_states": ignored(True, _STATE),
        "use_env_runner_state_server": ignored(False, _STATE),
        "env_runner_state_server_max_concurrency": ignored(16, _STATE),
        "compress_observations": ignored(False, "columns of arrays are not compressed"),
        "rollout_fragment_length": adapted(200, "whole fragments are sampled until the train batch is reached"),
        "batch_mode": same("truncate_episodes"),
        "explore": same(True),
        "episodes_to_numpy": ignored(True, "episodes are views of arrays"),
        "use_worker_filter_stats": ignored(True, _STATE),
        "update_worker_filter_stats": ignored(True, _STATE),
        "exploration_config": same({}),
        "sample_collector": ignored(None, _OLD_STACK),
        "remote_worker_envs": adapted(False, "`vectorization='async'`: each sub-env in its own process"),
        "remote_env_batch_wait_ms": ignored(0, _OLD_STACK),
        "preprocessor_pref": ignored("deepmind", _OLD_STACK),
        "observation_filter": adapted("NoFilter", "`MeanStdFilter` is the transform `NormalizeObservations`"),
        "enable_tf1_exec_eagerly": ignored(False, _OLD_STACK),
        "sampler_perf_stats_ema_coef": ignored(None, _OLD_STACK),
        "enable_connectors": ignored(True, _OLD_STACK),
        "synchronize_filters": ignored(True, _STATE),
    },
    "training": {
        "gamma": same(0.99),
        "lr": same(0.001),
        "grad_clip": same(None),
        "grad_clip_by": same("global_norm"),
        "train_batch_size": adapted(32, "divided by the number of learners"),
        "train_batch_size_per_learner": adapted(None, "takes the place of `train_batch_size`"),
        "num_epochs": same(1),
        "minibatch_size": adapted(None, "at most the whole batch"),
        "shuffle_batch_per_epoch": same(False),
        "model": adapted({}, "the names that are in `model_config` too; `custom_model` is refused"),
        "optimizer": refused({}, "use Corral's settings `optimizer` and `optimizer_config`"),
        "learner_class": adapted(None, "a learner of Corral that calls its methods"),
        "learner_connector": adapted(None, "called with the episodes before returns are computed"),
        "add_default_connectors_to_learner_pipeline": refused(True, "leave the default connectors in"),
        "learner_config_dict": ignored({}, "read by the user's code"),
        "num_aggregator_actors_per_learner": ignored(0, _RAY),
        "max_requests_in_flight_per_aggregator_actor": ignored(3, _RAY),
        "max_requests_in_flight_per_sampler_worker": ignored(1, _RAY),
        "lr_schedule": adapted(None, "a schedule in `lr`"),
        "_enable_learner_api": ignored(True, _OLD_STACK),
    },
    "exploration": {
        "explore": same(True),
        "exploration_config": same({}),
    },
    "rl_module": {
        "model_config": adapted({}, "a dict or a `DefaultModelConfig`, translated to Corral's `model_config`"),
        "rl_module_spec": adapted(None, "the class and the settings of the module"),
        "algorithm_config_overrides_per_module": same({}),
        "_enable_rl_module_api": ignored(True, _OLD_STACK),
    },
    "learners": {
        "num_learners": same(0),
        "num_cpus_per_learner": adapted("auto", "`auto` is 1"),
        "num_gpus_per_learner": same(0),
        "custom_resources_per_learner": ignored({}, _RAY),
        "num_aggregator_actors_per_learner": ignored(0, _RAY),
        "max_requests_in_flight_per_aggregator_actor": ignored(3, _RAY),
        "local_gpu_idx": ignored(0, _RAY),
        "max_requests_in_flight_per_learner": ignored(3, _RAY),
    },
    "evaluation": {
        "evaluation_interval": same(None),
        "evaluation_duration": same(10),
        "evaluation_duration_unit": same("episodes"),
        "evaluation_auto_duration_min_env_steps_per_sample": ignored(100, "Corral chooses the pieces of a round"),
        "evaluation_auto_duration_max_env_steps_per_sample": ignored(2000, "Corral chooses the pieces of a round"),
        "evaluation_sample_timeout_s": same(120.0),
        "evaluation_parallel_to_training": same(False),
        "evaluation_unhealthy_workers_timeout_s": ignored(0.0, "a failed runner costs its own work only"),
        "evaluation_error_after_n_consecutive_skips": ignored(None, "a skipped round is in the result"),
        "evaluation_force_reset_envs_before_iteration": same(True),
        "evaluation_config": same(None),
        "off_policy_estimation_methods": refused({}, _OFFLINE),
        "ope_split_batch_by_episode": ignored(True, _OFFLINE),
        "evaluation_num_env_runners": same(0),
        "custom_evaluation_function": adapted(None, "called with RLlib's algorithm and runner group"),
        "always_attach_evaluation_results": ignored(True, "results of evaluation are always attached"),
        "enable_async_evaluation": same(False),
        "offline_evaluation_interval": refused(None, _OFFLINE),
        "num_offline_eval_runners": ignored(0, _OFFLINE),
        "offline_evaluation_type": ignored("eval_loss", _OFFLINE),
        "offline_eval_batch_size_per_runner": ignored(256, _OFFLINE),
        "num_gpus_per_offline_eval_runner": ignored(0, _OFFLINE),
        "offline_loss_for_module_fn": refused(None, _OFFLINE),
    },
    "multi_agent": {
        "policies": adapted({}, "sets, lists, dicts, `PolicySpec` and tuples; policy classes are refused"),
        "policy_map_capacity": ignored(100, "all modules stay in memory"),
        "policy_mapping_fn": adapted(None, "called with the agent's id, the episode and what else it takes"),
        "policies_to_train": adapted(None, "ids, or a function of the id"),
        "policy_states_are_swappable": ignored(False, _OLD_STACK),
        "observation_fn": refused(None, "change the observations in the env"),
        "count_steps_by": same("env_steps"),
        "algorithm_config_overrides_per_module": same({}),
        "replay_mode": ignored("independent", _OLD_STACK),
        "policy_map_cache": ignored(None, _OLD_STACK),
    },
    "fault_tolerance": {
        "restart_failed_env_runners": same(True),
        "ignore_env_runner_failures": same(False),
        "max_num_env_runner_restarts": same(1000),
        "delay_between_env_runner_restarts_s": same(60.0),
        "restart_failed_sub_environments": same(False),
        "num_consecutive_env_runner_failures_tolerance": same(100),
        "env_runner_health_probe_timeout_s": ignored(30.0, "the engine sees at once that a process ended"),
        "env_runner_restore_timeout_s": ignored(1800.0, "Corral's `start_timeout_s` limits each start"),
    },
    "reporting": {
        "keep_per_episode_custom_metrics": adapted(False, "True keeps the list of the values of all episodes"),
        "metrics_episode_collection_timeout_s": ignored(60.0, _OLD_STACK),
        "metrics_num_episodes_for_smoothing": same(100),
        "min_time_s_per_iteration": adapted(None, "`None` is 0"),
        "min_train_timesteps_per_iteration": refused(0, "use `min_sample_timesteps_per_iteration`"),
        "min_sample_timesteps_per_iteration": same(0),
        "log_gradients": ignored(False, "the norms of gradients are always in the result"),
        "custom_stats_cls_lookup": refused(None, "use a reduction of `log_value`"),
    },
    "debugging": {
        "log_level": adapted("WARN", "`WARN` is WARNING"),
        "log_sys_usage": ignored(True, "it changes no result"),
        "fake_sampler": refused(False, "use an env of your own"),
        "seed": same(None),
        "logger_config": ignored({}, "loggers of Corral are given to `fit`"),
        "logger_creator": ignored(None, "loggers of Corral are given to `fit`"),
    },
    "checkpointing": {
        "export_native_model_files": ignored(False, "`Algorithm.export_policy` exports a policy"),
        "checkpoint_trainable_policies_only": ignored(False, "checkpoints hold all modules"),
    },
    "resources": {
        "num_cpus_for_main_process": ignored(1, _RAY),
        "custom_resources_for_main_process": ignored({}, _RAY),
        "num_gpus": ignored(0, "the embedded learner uses a GPU where there is one"),
        "_fake_gpus": ignored(False, _RAY),
        "placement_strategy": ignored("PACK", _RAY),
        "num_cpus_for_local_worker": ignored(1, _RAY),
        "local_gpu_idx": ignored(0, _RAY),
        "simple_optimizer": ignored(False, _OLD_STACK),
    },
    "framework": {
        "framework_str": adapted("torch", "only torch"),
        "eager_tracing": ignored(True, "torch only"),
        "eager_max_retraces": ignored(20, "torch only"),
        "tf_session_args": ignored({}, "torch only"),
        "local_tf_session_args": ignored({}, "torch only"),
        "torch_compile_learner": same(False, "compile"),
        "torch_compile_learner_what_to_compile": ignored(None, "Corral compiles the loss"),
        "torch_compile_learner_dynamo_mode": ignored(None, "Corral compiles with the default mode"),
        "torch_compile_learner_dynamo_backend": ignored("inductor", "Corral compiles with the default backend"),
        "torch_compile_worker": ignored(False, "runners compute without torch where they can"),
        "torch_compile_worker_dynamo_backend": ignored("onnxrt", "runners compute without torch where they can"),
        "torch_compile_worker_dynamo_mode": ignored(None, "runners compute without torch where they can"),
        "torch_ddp_kwargs": ignored({}, "Corral averages gradients itself"),
        "torch_skip_nan_gradients": refused(False, "Corral raises for NaN; find where it comes from"),
    },
    "api_stack": {
        "enable_rl_module_and_learner": ignored(True, "ModelV2 and Policy are refused where they are imported"),
        "enable_env_runner_and_connector_v2": ignored(True, "callbacks may name the arguments of both stacks"),
    },
    "experimental": {
        "_validate_config": ignored(True, "Corral always validates"),
        "_use_msgpack_checkpoints": ignored(False, "checkpoints execute no code"),
        "_torch_grad_scaler_class": refused(None, "Corral learns in float32"),
        "_torch_lr_scheduler_classes": adapted(None, "Corral's `lr_scheduler`"),
        "_tf_policy_handles_more_than_one_loss": ignored(False, "torch only"),
        "_disable_preprocessor_api": ignored(False, _OLD_STACK),
        "_disable_action_flattening": ignored(False, _OLD_STACK),
        "_disable_initialize_loss_from_dummy_batch": ignored(False, _OLD_STACK),
        "_enable_new_api_stack": ignored(True, "callbacks may name the arguments of both stacks"),
    },
    "offline_data": {
        "input_": adapted(
            "sampler",
            "paths, globs, URLs, or what Corral's `input_` takes, for BC, MARWIL, CQL and IQL; for the others a "
            "function that returns a `PolicyServerInput`",
        ),
        "offline_data_class": refused(None, "Corral reads the data itself: give a `prelearner_class`"),
        "input_read_method": adapted(
            "read_parquet", "`read_parquet` or `read_json`; files say themselves what they hold"
        ),
        "input_read_method_kwargs": adapted({}, "what makes reading faster has no effect, the rest is refused"),
        "input_read_schema": adapted({}, "names of columns in tables"),
        "input_read_episodes": ignored(False, "files say themselves what they hold"),
        "input_read_sample_batches": ignored(False, "files say themselves what they hold"),
        "input_read_batch_size": ignored(None, _RAY_DATA),
        "input_filesystem": refused(None, "give a URL such as 's3://bucket/data'"),
        "input_filesystem_kwargs": refused({}, "give a URL, and its settings as fsspec reads them"),
        "input_compress_columns": ignored(["obs", "new_obs"], "packed columns are found by themselves"),
        "materialize_data": ignored(False, _RAY_DATA),
        "materialize_mapped_data": ignored(True, _RAY_DATA),
        "map_batches_kwargs": ignored({}, _RAY_DATA),
        "iter_batches_kwargs": ignored({}, _RAY_DATA),
        "ignore_final_observation": adapted(
            False, "the last steps of truncated episodes stay without `new_obs`; for BC"
        ),
        "prelearner_class": adapted(None, "a class whose `_map_to_episodes` makes episodes of columns"),
        "prelearner_buffer_class": refused(None, "batches are drawn evenly from all steps: leave it out"),
        "prelearner_buffer_kwargs": ignored({}, _RAY_DATA),
        "prelearner_module_synch_period": ignored(10, "values are always computed with the present weights"),
        "prelearner_use_recorded_module_states": refused(False, "sequences begin with the initial state: leave it out"),
        "dataset_num_iters_per_learner": adapted(None, "`num_updates_per_iteration`; `None` is one pass over the data"),
        "input_config": adapted({}, "`paths` for `input_='dataset'`"),
        "actions_in_input_normalized": ignored(False, "RLlib's newer stack does not read it: see `normalize_actions`"),
        "postprocess_inputs": ignored(False, _OLD_STACK),
        "shuffle_buffer_size": ignored(0, _RAY_DATA),
        "offline_sampling": ignored(False, _OLD_STACK),
        "output": adapted(None, "`output`, in Corral's form; evaluation rounds are recorded, too"),
        "output_config": ignored({}, _OLD_STACK),
        "output_compress_columns": ignored(["obs", "new_obs"], "the Parquet files are compressed as a whole"),
        "output_max_file_size": ignored(67108864, "`output_max_rows_per_file` bounds files"),
        "output_max_rows_per_file": adapted(None, "`None` is 100,000; an episode is never split"),
        "output_write_remaining_data": ignored(False, "all complete episodes are written"),
        "output_write_method": refused("write_parquet", "Corral writes Parquet files: leave it out"),
        "output_write_method_kwargs": ignored({}, "Corral writes the files itself"),
        "output_filesystem": refused(None, "give a URL such as 's3://bucket/data'"),
        "output_filesystem_kwargs": refused({}, "give a URL, and its settings as fsspec reads them"),
        "output_write_episodes": ignored(True, "files have a row for each observation, and hold whole episodes"),
    },
    "python_environment": {
        "extra_python_environs_for_driver": ignored({}, "environment variables of Ray's workers"),
        "extra_python_environs_for_worker": ignored({}, "environment variables of Ray's workers"),
    },
}
"""By method of the config, its settings in every algorithm."""

_OFF_POLICY = {
    "target_network_update_freq": same(500),
    "replay_buffer_config": adapted({}, "RLlib's buffer types become `uniform` or `prioritized`"),
    "store_buffer_in_checkpoints": same(False),
    "num_steps_sampled_before_learning_starts": same(1000),
    "training_intensity": same(None),
    "tau": same(1.0),
    "n_step": same(1),
}

_CIRCULAR = "use the circular buffer of `APPOConfig`, which learns from each batch several times"

_ASYNC = {
    "vtrace": refused(True, "V-trace weighs the steps of older weights: leave it on, or use `PPOConfig`"),
    "vtrace_clip_rho_threshold": adapted(1.0, "None clips nothing"),
    "vtrace_clip_pg_rho_threshold": adapted(1.0, "None clips nothing"),
    "broadcast_interval": same(1),
    "vf_loss_coeff": same(0.5),
    "entropy_coeff": same(0.01),
    "entropy_coeff_schedule": adapted(None, "a schedule in `entropy_coeff`"),
    "opt_type": adapted("adam", "`optimizer`: `adam` or `rmsprop`"),
    "decay": adapted(0.99, "`alpha` of RMSProp"),
    "momentum": adapted(0.0, "`momentum` of RMSProp"),
    "epsilon": adapted(0.1, "`eps` of RMSProp"),
    "_separate_vf_optimizer": refused(
        False, "register both optimizers in `configure_optimizers_for_module` of a learner class"
    ),
    "_lr_vf": ignored(0.0005, "RLlib reads it with `_separate_vf_optimizer` only"),
    "replay_proportion": refused(0.0, _CIRCULAR),
    "replay_buffer_num_slots": ignored(0, "RLlib reads it with `replay_proportion` only"),
    "minibatch_buffer_size": refused(1, _CIRCULAR),
    "num_multi_gpu_tower_stacks": ignored(1, _OLD_STACK),
    "num_gpu_loader_threads": ignored(8, "a learner moves its batch to its GPU itself"),
    "learner_queue_timeout": ignored(300, "`sample_timeout_s` limits how long a batch is waited for"),
    "timeout_s_sampler_manager": ignored(0.0, "samples are received as soon as they are there"),
    "timeout_s_aggregator_manager": ignored(0.0, "samples are received as soon as they are there"),
    "num_aggregation_workers": ignored(0, _RAY),
    "max_requests_in_flight_per_aggregator_worker": ignored(2, _RAY),
    "after_train_step": refused(None, "use `on_train_result`, or `after_gradient_based_update` of a learner class"),
    "_env_runners_only": refused(False, "call `algo.env_runner_group.sample(...)` to sample without learning"),
    "_skip_learners": refused(False, "call `algo.env_runner_group.sample(...)` to sample without learning"),
}

_MARWIL = {
    "bc_logstd_coeff": refused(
        0.0, "no distribution of RLlib has what it reads: use `entropy_coeff` of `corral.BCConfig`"
    ),
}

_SAC = {
    "twin_q": same(True),
    "q_model_config": refused({}, "use `rl_module(model_config=...)`"),
    "policy_model_config": refused({}, "use `rl_module(model_config=...)`"),
    "initial_alpha": same(1.0),
    "target_entropy": same("auto"),
    "actor_lr": same(3e-5),
    "critic_lr": same(3e-4),
    "alpha_lr": same(3e-4),
    "optimization_config": adapted({}, "the three learning rates"),
    "clip_actions": ignored(False, "actions of SAC are inside their bounds"),
    "_deterministic_loss": refused(False, "SAC draws its actions"),
    "_use_beta_distribution": refused(False, "SAC uses a squashed normal distribution"),
}

_NO_BUFFER = "recorded data needs no replay buffer"
_TARGETS = {
    "target_network_update_freq": adapted(
        0, "in batches of `train_batch_size`, at most one in each iteration, in which targets move once at its end"
    ),
    "tau": same(1.0),
}

TRAINING: dict[str, dict[str, Setting]] = {
    "IMPALA": {
        **_ASYNC,
        "learner_queue_size": same(3),
    },
    "APPO": {
        **_ASYNC,
        "use_critic": refused(True, "APPO always has a critic: leave it out"),
        "use_gae": ignored(True, "V-trace estimates the advantages; RLlib reads it without `vtrace` only"),
        "lambda_": ignored(1.0, "RLlib reads it without `vtrace` only; `corral.APPOConfig` has a lambda of V-trace"),
        "clip_param": same(0.4),
        "use_kl_loss": same(False),
        "kl_coeff": same(1.0),
        "kl_target": same(0.01),
        "target_worker_clipping": same(2.0),
        "target_network_update_freq": adapted(
            2, "in traversals of the circular buffer, which RLlib counts by its settings also without the buffer"
        ),
        "target_update_frequency": refused(None, "use `target_network_update_freq`"),
        "tau": same(1.0),
        "use_circular_buffer": same(True),
        "circular_buffer_num_batches": same(8),
        "circular_buffer_iterations_per_batch": same(2),
        "simple_queue_size": adapted(32, "`learner_queue_size`, without the circular buffer"),
        "learner_queue_size": ignored(16, "the circular buffer, or `simple_queue_size`, limits the batches that wait"),
    },
    "BC": {
        **_MARWIL,
        "beta": refused(0.0, "BC imitates all actions alike: use `MARWILConfig`"),
        "vf_coeff": ignored(1.0, "BC learns no values"),
        "moving_average_sqd_adv_norm_start": ignored(100.0, "BC weighs no actions"),
        "moving_average_sqd_adv_norm_update_rate": ignored(1e-8, "BC weighs no actions"),
        "lambda_": ignored(1.0, "BC learns no values"),
        "burnin_len": same(0, "burn_in_len"),
    },
    "DreamerV3": {
        "model_size": same("XS"),
        "training_ratio": same(1024, "training_intensity"),
        "batch_size_B": adapted(16, "`train_batch_size_per_learner` is its product with `batch_length_T`"),
        "batch_length_T": adapted(64, "`max_seq_len` of `model_config`"),
        "horizon_H": same(15, "horizon"),
        "gae_lambda": same(0.95, "lambda_"),
        "entropy_scale": same(3e-4, "entropy_coeff"),
        "return_normalization_decay": same(0.99, "return_decay"),
        "train_critic": adapted(True, "False sets `critic_lr` to 0"),
        "train_actor": adapted(True, "False sets `actor_lr` to 0"),
        "world_model_lr": same(1e-4),
        "actor_lr": same(3e-5),
        "critic_lr": same(3e-5),
        "lr": ignored(None, "the three learning rates count"),
        "world_model_grad_clip_by_global_norm": adapted(1000.0, "`grad_clip`, by group of parameters"),
        "actor_grad_clip_by_global_norm": adapted(100.0, "`grad_clip`, by group of parameters"),
        "critic_grad_clip_by_global_norm": adapted(100.0, "`grad_clip`, by group of parameters"),
        "replay_buffer_config": adapted({}, "`capacity`; sequences are drawn evenly"),
        "model": ignored({}, "RLlib's DreamerV3 does not read it"),
        "symlog_obs": refused("auto", "vectors are learned after symlog, and pictures without it"),
        "use_float16": refused(False, "use `.learners(precision='bfloat16')` of Corral"),
        "use_curiosity": refused(False, "RLlib refuses it too"),
        "intrinsic_rewards_scale": ignored(0.1, "RLlib reads it with `use_curiosity` only"),
        "gc_frequency_train_steps": ignored(100, "nothing has to be collected"),
        "report_individual_batch_item_stats": ignored(False, "results have means"),
        "report_dream_data": ignored(False, "results have numbers"),
        "report_images_and_videos": ignored(False, "`evaluation_num_videos` records episodes"),
    },
    "MARWIL": {
        **_MARWIL,
        "beta": same(1.0),
        "vf_coeff": same(1.0),
        "moving_average_sqd_adv_norm_start": same(100.0),
        "moving_average_sqd_adv_norm_update_rate": same(1e-8),
        "lambda_": refused(1.0, "value targets are the returns to the end of the episode: leave it out"),
        "burnin_len": refused(0, "Corral's MARWIL learns from single steps: leave it out"),
    },
    "PPO": {
        "use_critic": refused(True, "PPO without a critic is not built; see docs/write-an-algorithm.md"),
        "use_gae": refused(True, "use `lambda_=1.0` for returns without GAE"),
        "lambda_": same(1.0),
        "use_kl_loss": adapted(True, "False switches `kl_coeff` off"),
        "kl_coeff": same(0.2),
        "kl_target": same(0.01),
        "vf_loss_coeff": same(1.0),
        "entropy_coeff": same(0.0),
        "clip_param": same(0.3),
        "vf_clip_param": same(10.0, "vf_loss_clip"),
        "entropy_coeff_schedule": adapted(None, "a schedule in `entropy_coeff`"),
        "vf_share_layers": adapted(None, "`vf_share_layers` of `model_config`"),
    },
    "DQN": {
        **_OFF_POLICY,
        "epsilon": adapted([(0, 1.0), (10000, 0.05)], "the schedule of `EpsilonGreedy`"),
        "adam_epsilon": adapted(1e-8, "`eps` of Adam"),
        "num_atoms": same(1),
        "v_min": same(-10.0),
        "v_max": same(10.0),
        "noisy": same(False),
        "sigma0": same(0.5),
        "dueling": same(True),
        "hiddens": ignored([256], "RLlib 2.60 does not read it; use `head_fcnet_hiddens`"),
        "double_q": same(True),
        "before_learn_on_batch": refused(None, "use `on_learn_on_batch`"),
        "td_error_loss_fn": same("huber"),
        "categorical_distribution_temperature": refused(1.0, "use the exploration `SoftQ`"),
        "burn_in_len": same(0),
    },
    "SAC": {
        **_OFF_POLICY,
        **_SAC,
    },
    "TQC": {
        **_OFF_POLICY,
        **_SAC,
        "twin_q": ignored(True, "TQC has `n_critics`"),
        "n_quantiles": same(25, "num_quantiles"),
        "n_critics": same(2, "num_critics"),
        "top_quantiles_to_drop_per_net": same(2, "num_dropped_quantiles"),
    },
    "CQL": {
        **_SAC,
        **_TARGETS,
        "bc_iters": same(20_000, "num_imitation_updates"),
        "temperature": same(1.0, "cql_temperature"),
        "num_actions": same(10, "num_sampled_actions"),
        "lagrangian": same(False),
        "lagrangian_thresh": adapted(5.0, "`lagrangian_threshold`; it counts with `lagrangian` only"),
        "min_q_weight": adapted(
            5.0, "half of it is `cql_weight`: RLlib's critics minimise the squared error, and Corral's half of it"
        ),
        "deterministic_backup": same(True),
        "replay_buffer_config": ignored({}, _NO_BUFFER),
        "store_buffer_in_checkpoints": ignored(False, _NO_BUFFER),
        "num_steps_sampled_before_learning_starts": ignored(1000, _NO_BUFFER),
        "training_intensity": ignored(None, "`dataset_num_iters_per_learner` is the number of updates"),
        "n_step": ignored(1, "RLlib's CQL learns from single steps"),
        "min_train_timesteps_per_iteration": ignored(100, "`dataset_num_iters_per_learner` says what an iteration is"),
    },
    "IQL": {
        **_MARWIL,
        **_TARGETS,
        "beta": same(0.1),
        "expectile": same(0.8),
        "twin_q": same(True),
        "actor_lr": same(3e-4),
        "critic_lr": same(3e-4),
        "value_lr": same(3e-4),
        "lr": ignored(None, "the three learning rates count"),
        "vf_coeff": ignored(1.0, "each network has its own loss"),
        "moving_average_sqd_adv_norm_start": ignored(100.0, "advantages are not divided by their norm"),
        "moving_average_sqd_adv_norm_update_rate": ignored(1e-8, "advantages are not divided by their norm"),
        "lambda_": ignored(1.0, "IQL learns from single steps"),
        "burnin_len": ignored(0, "IQL learns from single steps"),
    },
}
"""By algorithm, what it adds to `training`."""

_ASYNC_DEFAULTS = {
    "num_env_runners": 2,
    "num_learners": 1,
    "rollout_fragment_length": 50,
    "train_batch_size": 500,
    "lr": 5e-4,
    "grad_clip": 40.0,
    "min_time_s_per_iteration": 10,
    "use_env_runner_state_server": True,
}

_MARWIL_DEFAULTS = {
    "lr": 1e-4,
    "train_batch_size": 2000,
    "postprocess_inputs": True,
    "materialize_data": True,
    "materialize_mapped_data": False,
}

_SAC_DEFAULTS = {
    "rollout_fragment_length": "auto",
    "lr": None,
    "train_batch_size_per_learner": 256,
    "train_batch_size": 256,
    "min_time_s_per_iteration": 1,
    "min_sample_timesteps_per_iteration": 100,
    "tau": 0.005,
    "replay_buffer_config": {
        "type": "PrioritizedEpisodeReplayBuffer",
        "capacity": 1_000_000,
        "alpha": 0.6,
        "beta": 0.4,
    },
    "target_network_update_freq": 0,
    "num_steps_sampled_before_learning_starts": 1500,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "MARWIL": _MARWIL_DEFAULTS,
    "IQL": {**_MARWIL_DEFAULTS, "lr": None},
    "SAC": _SAC_DEFAULTS,
    "TQC": _SAC_DEFAULTS,
    "CQL": {
        **_SAC_DEFAULTS,
        "lr": 3e-4,
        "actor_lr": 1e-4,
        "critic_lr": 1e-3,
        "alpha_lr": 1e-3,
        "min_sample_timesteps_per_iteration": 0,
        "replay_buffer_config": {
            "_enable_replay_buffer_api": True,
            "type": "MultiAgentPrioritizedReplayBuffer",
            "capacity": 1_000_000,
            "prioritized_replay": False,
            "prioritized_replay_alpha": 0.6,
            "prioritized_replay_beta": 0.4,
            "prioritized_replay_eps": 1e-6,
            "worker_side_prioritization": False,
        },
    },
    "BC": {
        **_MARWIL_DEFAULTS,
        "postprocess_inputs": False,
        "materialize_data": False,
        "materialize_mapped_data": True,
    },
    "DreamerV3": {
        "gamma": 0.997,
        "lr": None,
        "train_batch_size": None,
        "rollout_fragment_length": 1,
        "metrics_num_episodes_for_smoothing": 1,
        "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 1_000_000},
    },
    "IMPALA": _ASYNC_DEFAULTS,
    "APPO": {**_ASYNC_DEFAULTS, "replay_buffer_num_slots": 100},
    "PPO": {
        "num_env_runners": 2,
        "rollout_fragment_length": "auto",
        "lr": 5e-5,
        "train_batch_size": 4000,
        "num_epochs": 30,
        "minibatch_size": 128,
        "shuffle_batch_per_epoch": True,
    },
    "DQN": {
        "rollout_fragment_length": "auto",
        "lr": 5e-4,
        "grad_clip": 40.0,
        "evaluation_config": {"explore": False},
        "min_sample_timesteps_per_iteration": 1000,
        "replay_buffer_config": {
            "type": "PrioritizedEpisodeReplayBuffer",
            "capacity": 50_000,
            "alpha": 0.6,
            "beta": 0.4,
        },
    },
}
"""By algorithm, the defaults in which it differs from `SETTINGS` and `TRAINING`."""

IN_EVALUATION = frozenset(
    {
        *(
            "env",
            "env_config",
            "normalize_actions",
            "clip_actions",
            "disable_env_checking",
            "policy_mapping_fn",
            "seed",
        ),
        *("num_envs_per_env_runner", "gym_env_vectorize_mode", "remote_worker_envs", "num_cpus_per_env_runner"),
        *("num_gpus_per_env_runner", "custom_resources_per_env_runner", "env_to_module_connector"),
        *("add_default_connectors_to_env_to_module_pipeline", "module_to_env_connector", "episode_lookback_horizon"),
        *("explore", "exploration_config", "observation_filter", "epsilon"),
        *SETTINGS["fault_tolerance"],
    }
)
"""Settings of `evaluation_config` that evaluation runners read, callbacks excepted; RLlib ignores all others there."""

RENAMED = {
    "num_workers": "num_env_runners",
    "num_rollout_workers": "num_env_runners",
    "num_envs_per_worker": "num_envs_per_env_runner",
    "num_cpus_per_worker": "num_cpus_per_env_runner",
    "num_gpus_per_worker": "num_gpus_per_env_runner",
    "custom_resources_per_worker": "custom_resources_per_env_runner",
    "validate_workers_after_construction": "validate_env_runners_after_construction",
    "num_learner_workers": "num_learners",
    "num_cpus_per_learner_worker": "num_cpus_per_learner",
    "num_gpus_per_learner_worker": "num_gpus_per_learner",
    "num_sgd_iter": "num_epochs",
    "sgd_minibatch_size": "minibatch_size",
    "mini_batch_size": "minibatch_size",
    "mini_batch_size_per_learner": "minibatch_size",
    "lambda": "lambda_",
    "evaluation_num_workers": "evaluation_num_env_runners",
    "evaluation_num_episodes": "evaluation_duration",
    "custom_eval_function": "custom_evaluation_function",
    "ignore_worker_failures": "ignore_env_runner_failures",
    "recreate_failed_workers": "restart_failed_env_runners",
    "recreate_failed_env_runners": "restart_failed_env_runners",
    "max_num_worker_restarts": "max_num_env_runner_restarts",
    "delay_between_worker_restarts_s": "delay_between_env_runner_restarts_s",
    "num_consecutive_worker_failures_tolerance": "num_consecutive_env_runner_failures_tolerance",
    "worker_health_probe_timeout_s": "env_runner_health_probe_timeout_s",
    "worker_restore_timeout_s": "env_runner_restore_timeout_s",
    "synchronize_filter": "synchronize_filters",
    "timesteps_per_iteration": "min_sample_timesteps_per_iteration",
    "min_iter_time_s": "min_time_s_per_iteration",
    "min_time_s_per_reporting": "min_time_s_per_iteration",
    "metrics_smoothing_episodes": "metrics_num_episodes_for_smoothing",
    "optimization": "optimization_config",
    "create_env_on_driver": "create_env_on_local_worker",
    "input": "input_",
    "learning_starts": "num_steps_sampled_before_learning_starts",
    "framework": "framework_str",
    "model_config_dict": "model_config",
}
"""Older names of settings, by name."""
