"""Keyword arguments of the config's setters, so that editors complete them and type checkers know them.

Written by docs/generate.py; run `make docs` after a change of a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig

ScheduleArg = float | Sequence[Sequence[float]]
"""A number, or `[[num_env_steps, value], ...]` joined by straight lines."""

IdsArg = Set[str] | list[str] | tuple[str, ...]
"""Ids of modules; a string alone is not a set of ids."""


class EnvironmentArgs(TypedDict, total=False):
    """Settings of `.environment(...)`; see `EnvironmentSettings`."""

    observation_space: Any
    action_space: Any
    env_config: Mapping[str, Any]
    wrappers: Sequence[Any]
    env_task_fn: Any
    env_reset_fn: Any
    disable_env_checking: bool
    action_masks: bool | Literal["infos", "method"]
    normalize_actions: bool
    clip_actions: bool


class EnvRunnersArgs(TypedDict, total=False):
    """Settings of `.env_runners(...)`; see `EnvRunnersSettings`."""

    num_env_runners: int
    num_envs_per_env_runner: int | None
    rollout_fragment_length: int | Literal["auto"]
    vectorization: Literal["auto", "sync", "async"]
    autoreset_mode: Literal["next_step", "same_step"]
    explore: bool
    batch_mode: Literal["truncate_episodes", "complete_episodes"]
    sample_timeout_s: float
    straggler_factor: float | None
    sample_async: bool
    max_lag: int | None
    on_lag: Literal["drop", "wait"]
    transforms: Sequence[Any]
    episode_class: Any
    num_cpus_per_env_runner: float
    num_gpus_per_env_runner: float
    custom_resources_per_env_runner: Mapping[str, float]


class TrainingArgs(TypedDict, total=False):
    """Settings of `.training(...)`; see `TrainingSettings`."""

    lr: ScheduleArg
    gamma: float
    train_batch_size_per_learner: int
    minibatch_size: int | None
    num_epochs: int
    shuffle_batch_per_epoch: bool
    grad_clip: float | Mapping[str, float] | None
    grad_clip_by: Literal["global_norm", "norm", "value"]
    loss: Any
    optimizer: Any
    optimizer_config: Mapping[str, Any]
    lr_scheduler: Any


class ExplorationArgs(TypedDict, total=False):
    """Settings of `.exploration(...)`; see `ExplorationSettings`."""

    exploration_config: Mapping[str, Any]
    explore: bool


class RLModuleArgs(TypedDict, total=False):
    """Settings of `.rl_module(...)`; see `RLModuleSettings`."""

    model_config: Mapping[str, Any]
    load_from: str | None
    load_parts: Sequence[str]
    freeze_parts: Sequence[str]
    freeze: Sequence[str]


class LearnersArgs(TypedDict, total=False):
    """Settings of `.learners(...)`; see `LearnersSettings`."""

    num_learners: int
    num_cpus_per_learner: float
    num_gpus_per_learner: float
    device: str
    num_threads: int | Literal["auto"]
    learner_class: Any
    compile: bool | Literal["cuda_graphs"]
    precision: Literal["float32", "bfloat16"]


class EvaluationArgs(TypedDict, total=False):
    """Settings of `.evaluation(...)`; see `EvaluationSettings`."""

    evaluation_interval: int | None
    evaluation_duration: int | Literal["auto"]
    evaluation_duration_unit: Literal["episodes", "timesteps"]
    evaluation_num_env_runners: int
    evaluation_parallel_to_training: bool
    evaluation_force_reset_envs_before_iteration: bool
    evaluation_config: AlgorithmConfig | Mapping[str, Any]
    custom_evaluation_function: Any
    evaluation_sample_timeout_s: float
    enable_async_evaluation: bool
    on_evaluation_failure: Literal["skip", "raise"]
    evaluation_seeds: Sequence[int] | None
    evaluation_tasks: Sequence[Any] | Literal["training"] | None
    evaluation_num_videos: int
    in_evaluation: bool
    evaluation_num_workers: int
    custom_eval_function: Any


class MultiAgentArgs(TypedDict, total=False):
    """Settings of `.multi_agent(...)`; see `MultiAgentSettings`."""

    policies: IdsArg | Mapping[str, Mapping[str, Any] | None]
    policy_mapping_fn: Any
    policies_to_train: IdsArg | Callable[[str], bool] | str | None
    count_steps_by: Literal["env_steps", "agent_steps"]
    algorithm_config_overrides_per_module: Mapping[str, Mapping[str, Any]]
    shared_layers: Mapping[str, IdsArg | Sequence[Sequence[str]]]
    critic_sees: Literal["all"] | Callable[..., Any] | str | None


class OfflineDataArgs(TypedDict, total=False):
    """Settings of `.offline_data(...)`; see `OfflineDataSettings`."""

    input_: Any
    validation_fraction: float
    map_directory: str | None
    output: str | None
    output_max_rows_per_file: int
    output_infos: bool


class FaultToleranceArgs(TypedDict, total=False):
    """Settings of `.fault_tolerance(...)`; see `FaultToleranceSettings`."""

    restart_failed_env_runners: bool
    ignore_env_runner_failures: bool
    max_num_env_runner_restarts: int
    num_consecutive_env_runner_failures_tolerance: int
    delay_between_env_runner_restarts_s: float
    restart_failed_sub_environments: bool
    env_step_timeout_s: float | None
    worker_timeout_s: float | Literal["auto"] | None


class ReportingArgs(TypedDict, total=False):
    """Settings of `.reporting(...)`; see `ReportingSettings`."""

    metrics_num_episodes_for_smoothing: int
    min_time_s_per_iteration: float
    min_sample_timesteps_per_iteration: int
    loggers: Sequence[Any] | None


class CheckpointingArgs(TypedDict, total=False):
    """Settings of `.checkpointing(...)`; see `CheckpointingSettings`."""

    checkpoint_every_s: float | None
    checkpoint_every_iterations: int | None
    num_checkpoints_kept: int
    best_checkpoint_metric: str | None
    best_checkpoint_mode: Literal["max", "min"]


class DebuggingArgs(TypedDict, total=False):
    """Settings of `.debugging(...)`; see `DebuggingSettings`."""

    seed: int | None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class EngineArgs(TypedDict, total=False):
    """Settings of `.engine(...)`; see `EngineSettings`."""

    start_timeout_s: float


class ActorCriticSettingsArgs(TypedDict, total=False):
    """Settings of `.training(...)`; see `ActorCriticSettings`."""

    twin_q: bool
    actor_lr: ScheduleArg | None
    critic_lr: ScheduleArg | None


class CriticAtomSettingsArgs(ActorCriticSettingsArgs, total=False):
    """Settings of `.training(...)`; see `CriticAtomSettings`."""

    num_atoms: int | None
    v_min: float
    v_max: float


class SACSettingsArgs(CriticAtomSettingsArgs, total=False):
    """Settings of `.training(...)`; see `SACSettings`."""

    initial_alpha: float
    target_entropy: float | Literal["auto"]
    td_error_loss_fn: Literal["huber", "mse"]
    alpha_lr: ScheduleArg | None


class TD3SettingsArgs(CriticAtomSettingsArgs, total=False):
    """Settings of `.training(...)`; see `TD3Settings`."""

    policy_delay: int
    target_noise: float
    target_noise_clip: float


class IMPALATrainingArgs(TrainingArgs, total=False):
    """Settings of `.training(...)`; see `IMPALAConfig`."""

    lambda_: float
    vtrace_clip_rho_threshold: float
    vtrace_clip_c_threshold: float
    vtrace_clip_pg_rho_threshold: float
    vf_loss_coeff: float
    entropy_coeff: ScheduleArg
    broadcast_interval: int
    learner_queue_size: int
    use_circular_buffer: bool
    circular_buffer_num_batches: int
    circular_buffer_iterations_per_batch: int


class OffPolicyTrainingArgs(TrainingArgs, total=False):
    """Settings of `.training(...)`; see `OffPolicyConfig`."""

    replay_buffer_config: Mapping[str, Any]
    num_steps_sampled_before_learning_starts: int
    training_intensity: float | Literal["auto"] | None
    n_step: int | Sequence[int]
    burn_in_len: int
    target_network_update_freq: int
    tau: float | Literal["auto"]
    store_buffer_in_checkpoints: bool | Literal["auto"]
    num_offline_updates: int | None
    num_updates_per_iteration: int | None
    recorded_fraction: float
    imitation_coeff: ScheduleArg


class OfflineTrainingArgs(TrainingArgs, total=False):
    """Settings of `.training(...)`; see `OfflineConfig`."""

    num_updates_per_iteration: int | None


class PPOTrainingArgs(TrainingArgs, total=False):
    """Settings of `.training(...)`; see `PPOConfig`."""

    lambda_: float
    clip_param: ScheduleArg
    vf_clip_param: float | None
    vf_loss_clip: float | None
    vf_loss_coeff: float
    entropy_coeff: ScheduleArg
    kl_coeff: ScheduleArg
    kl_target: float | None
    kl_band: float
    kl_factors: Sequence[float]
    normalize_values: bool
    normalize_advantages: bool
    target_kl: float | None


class PQNTrainingArgs(TrainingArgs, total=False):
    """Settings of `.training(...)`; see `PQNConfig`."""

    lambda_: float


class APPOTrainingArgs(IMPALATrainingArgs, total=False):
    """Settings of `.training(...)`; see `APPOConfig`."""

    clip_param: float
    target_worker_clipping: float
    use_kl_loss: bool
    kl_coeff: float
    kl_target: float
    target_network_update_freq: float
    tau: float


class BCTrainingArgs(OfflineTrainingArgs, total=False):
    """Settings of `.training(...)`; see `BCConfig`."""

    entropy_coeff: ScheduleArg
    burn_in_len: int


class DQNTrainingArgs(OffPolicyTrainingArgs, total=False):
    """Settings of `.training(...)`; see `DQNConfig`."""

    double_q: bool
    dueling: bool
    noisy: bool
    sigma0: float
    num_atoms: int
    v_min: float
    v_max: float
    td_error_loss_fn: Literal["huber", "mse"]


class DreamerV3TrainingArgs(OffPolicyTrainingArgs, total=False):
    """Settings of `.training(...)`; see `DreamerV3Config`."""

    model_size: Literal["nano", "micro", "mini", "XXS", "XS", "S", "M", "L", "XL"]
    horizon: int
    lambda_: float
    entropy_coeff: float
    return_decay: float
    world_model_lr: ScheduleArg | None
    actor_lr: ScheduleArg | None
    critic_lr: ScheduleArg | None


class MARWILTrainingArgs(OfflineTrainingArgs, total=False):
    """Settings of `.training(...)`; see `MARWILConfig`."""

    beta: float
    vf_coeff: float
    max_advantage_weight: float
    moving_average_sqd_adv_norm_start: float | None
    moving_average_sqd_adv_norm_update_rate: float


class IQLTrainingArgs(ActorCriticSettingsArgs, OffPolicyTrainingArgs, total=False):
    """Settings of `.training(...)`; see `IQLConfig`."""

    expectile: float
    beta: float
    max_advantage_weight: float
    value_lr: ScheduleArg | None


class CQLTrainingArgs(SACSettingsArgs, OffPolicyTrainingArgs, total=False):
    """Settings of `.training(...)`; see `CQLConfig`."""

    cql_weight: float
    num_sampled_actions: int
    cql_temperature: float
    lagrangian: bool
    lagrangian_threshold: float
    deterministic_backup: bool
    num_imitation_updates: int


class CrossQTrainingArgs(SACSettingsArgs, OffPolicyTrainingArgs, total=False):
    """Settings of `.training(...)`; see `CrossQConfig`."""

    num_critics: int
    policy_delay: int


class DDPGTrainingArgs(TD3SettingsArgs, OffPolicyTrainingArgs, total=False):
    """Settings of `.training(...)`; see `DDPGConfig`."""


class SACTrainingArgs(SACSettingsArgs, OffPolicyTrainingArgs, total=False):
    """Settings of `.training(...)`; see `SACConfig`."""


class TD3TrainingArgs(TD3SettingsArgs, OffPolicyTrainingArgs, total=False):
    """Settings of `.training(...)`; see `TD3Config`."""


class TQCTrainingArgs(SACSettingsArgs, OffPolicyTrainingArgs, total=False):
    """Settings of `.training(...)`; see `TQCConfig`."""

    num_critics: int
    num_quantiles: int
    num_dropped_quantiles: int
