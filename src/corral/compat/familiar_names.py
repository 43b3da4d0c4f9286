"""Names that users of RLlib, Stable-Baselines3, CleanRL and Tianshou know, and what Corral calls them.

`corral.core.familiar_names` looks names up in these tables. A meaning without a path or name says what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from corral.core.familiar_names import Meanings


def _same(path: str) -> Meanings:
    return ((path, ""),)


_TOTAL_BATCH = "it counts the env steps of all sub-envs together: the steps of each sub-env times their number"
_SCHEDULE = "a schedule is a list [[env step, value], ...]"
_HINDSIGHT = "for replay_buffer_config type 'hindsight'"
_PRIORITIZED = "for replay_buffer_config type 'prioritized'"

SETTINGS: Mapping[str, Meanings] = {
    # The batch and the passes over it.
    "train_batch_size": (("training.train_batch_size_per_learner", "the total divided by the number of learners"),),
    "n_steps": (
        ("training.train_batch_size_per_learner", f"for PPO; {_TOTAL_BATCH}"),
        ("training.n_step", "for the n-step returns of DQN, SAC and TD3"),
    ),
    "num_steps": (("training.train_batch_size_per_learner", _TOTAL_BATCH),),
    "step_per_collect": (("training.train_batch_size_per_learner", "for PPO"),),
    "batch_size": (
        ("training.minibatch_size", "for PPO"),
        ("training.train_batch_size_per_learner", "for DQN, SAC and TD3"),
    ),
    "sgd_minibatch_size": _same("training.minibatch_size"),
    "mini_batch_size_per_learner": _same("training.minibatch_size"),
    "num_minibatches": (("training.minibatch_size", "the env steps in a minibatch, not the number of minibatches"),),
    **dict.fromkeys(("num_sgd_iter", "n_epochs", "update_epochs", "repeat_per_collect"), _same("training.num_epochs")),
    "shuffle_sequences": _same("training.shuffle_batch_per_epoch"),
    # Learning rates and optimizers.
    "learning_rate": (("training.lr", _SCHEDULE),),
    "lr_schedule": (("training.lr", _SCHEDULE),),
    "policy_lr": _same("training.actor_lr"),
    "q_lr": _same("training.critic_lr"),
    "optimizer_class": _same("training.optimizer"),
    "optimizer_kwargs": _same("training.optimizer_config"),
    "adam_epsilon": (("training.optimizer_config.eps", ""),),
    "max_grad_norm": (("training.grad_clip", "the norm of all gradients while grad_clip_by is 'global_norm'"),),
    # Losses.
    **dict.fromkeys(("gae_lambda", "lambda", "lam"), _same("training.lambda_")),
    **dict.fromkeys(("clip_range", "clip_coef", "eps_clip"), _same("training.clip_param")),
    "clip_range_vf": _same("training.vf_clip_param"),
    "clip_vloss": (("training.vf_clip_param", "a distance; None means no clipping"),),
    "vf_coef": (("training.vf_loss_coeff", "CleanRL multiplies half the squared error by it"),),
    "ent_coef": (
        ("training.entropy_coeff", "for PPO"),
        ("training.initial_alpha", "for SAC, which learns the temperature from there unless alpha_lr is 0"),
    ),
    "entropy_coeff_schedule": (("training.entropy_coeff", _SCHEDULE),),
    **dict.fromkeys(
        ("normalize_advantage", "norm_adv"),
        (("training.normalize_advantages", "over the whole batch, not over each minibatch"),),
    ),
    "use_kl_loss": (("training.kl_coeff", "0 means no KL penalty"),),
    "use_critic": (("", "the critic is always used: leave this out"),),
    "use_gae": (("training.lambda_", "1 means returns without generalized advantage estimation"),),
    "alpha": (("training.initial_alpha", "SAC learns the temperature from there unless alpha_lr is 0"),),
    **dict.fromkeys(("target_policy_noise", "policy_noise"), _same("training.target_noise")),
    "noise_clip": _same("training.target_noise_clip"),
    **dict.fromkeys(("policy_freq", "policy_frequency"), _same("training.policy_delay")),
    "autotune": (("training.alpha_lr", "0 keeps the temperature of SAC at initial_alpha"),),
    # Replay and targets.
    "buffer_size": (("training.replay_buffer_config.capacity", ""),),
    "replay_buffer_class": (("training.replay_buffer_config.type", "'uniform', 'prioritized' or 'hindsight'"),),
    "n_sampled_goal": (("training.replay_buffer_config.num_goals", _HINDSIGHT),),
    "goal_selection_strategy": (("training.replay_buffer_config.goal_strategy", _HINDSIGHT),),
    "replay_buffer_kwargs": (("training.replay_buffer_config", "its keys have other names: type, capacity, ..."),),
    "prioritized_replay": (("training.replay_buffer_config.type", "'uniform' or 'prioritized'"),),
    "prioritized_replay_alpha": (("training.replay_buffer_config.alpha", _PRIORITIZED),),
    "prioritized_replay_beta": (("training.replay_buffer_config.beta", _PRIORITIZED),),
    "prioritized_replay_eps": (("training.replay_buffer_config.epsilon", _PRIORITIZED),),
    "learning_starts": _same("training.num_steps_sampled_before_learning_starts"),
    "train_freq": (("env_runners.rollout_fragment_length", "the steps of each sub-env between updates"),),
    "train_frequency": (("env_runners.rollout_fragment_length", "the steps of each sub-env between updates"),),
    "gradient_steps": (
        ("training.training_intensity", "steps trained on per env step sampled: updates times batch per env step"),
    ),
    "update_per_step": (
        ("training.training_intensity", "steps trained on per env step sampled: updates times batch per env step"),
    ),
    "target_update_interval": _same("training.target_network_update_freq"),
    "target_network_frequency": _same("training.target_network_update_freq"),
    "target_update_freq": (("training.target_network_update_freq", "in env steps, not in gradient steps"),),
    "double_dqn": _same("training.double_q"),
    # Exploration.
    **dict.fromkeys(
        ("exploration_initial_eps", "start_e", "initial_epsilon"),
        _same("exploration.exploration_config.initial_epsilon"),
    ),
    **dict.fromkeys(
        ("exploration_final_eps", "end_e", "eps_train", "final_epsilon"),
        _same("exploration.exploration_config.final_epsilon"),
    ),
    "exploration_fraction": (
        ("exploration.exploration_config.epsilon_timesteps", "in env steps, not as a fraction of the run"),
    ),
    "epsilon_timesteps": _same("exploration.exploration_config.epsilon_timesteps"),
    "epsilon": (("exploration.exploration_config.epsilon_schedule", _SCHEDULE),),
    "action_noise": (("exploration.exploration_config.type", "such as 'GaussianNoise'"),),
    "use_sde": (("", "there is no state-dependent exploration: leave this out"),),
    # The network.
    "policy": (("rl_module.module_class", "a network of your own; without it, the default network fits the spaces"),),
    "policy_kwargs": (("rl_module.model_config", "net_arch is fcnet_hiddens, activation_fn is fcnet_activation"),),
    "features_extractor_class": (("rl_module.model_config.features_extractor", ""),),
    "features_extractor_kwargs": (("rl_module.model_config.features_extractor_config", ""),),
    "model": _same("rl_module.model_config"),
    "model_config_dict": _same("rl_module.model_config"),
    "rl_module_spec": (("rl_module.module_class", "a corral.Module subclass; its settings are in model_config"),),
    **dict.fromkeys(
        ("net_arch", "hiddens", "hidden_sizes", "fcnet_hiddens"),
        (("rl_module.model_config.fcnet_hiddens", "a list of widths"),),
    ),
    **dict.fromkeys(
        ("activation_fn", "fcnet_activation"),
        (("rl_module.model_config.fcnet_activation", "a name, such as 'relu'"),),
    ),
    "conv_filters": _same("rl_module.model_config.conv_filters"),
    **{
        name: _same(f"rl_module.model_config.{name}")
        for name in ("use_lstm", "use_gru", "lstm_cell_size", "max_seq_len")
    },
    "lstm_hidden_size": _same("rl_module.model_config.lstm_cell_size"),
    "vf_share_layers": _same("rl_module.model_config.vf_share_layers"),
    "log_std_init": _same("rl_module.model_config.initial_log_std"),
    # Envs and runners.
    "env_id": _same("environment.env"),
    **dict.fromkeys(
        ("n_envs", "num_envs", "num_envs_per_worker", "training_num"),
        (("env_runners.num_envs_per_env_runner", "the sub-envs of each runner"),),
    ),
    **dict.fromkeys(
        ("num_workers", "num_rollout_workers"),
        (("env_runners.num_env_runners", "0 embeds one runner in this process"),),
    ),
    "num_cpus_per_worker": _same("env_runners.num_cpus_per_env_runner"),
    "num_gpus_per_worker": _same("env_runners.num_gpus_per_env_runner"),
    "custom_resources_per_worker": _same("env_runners.custom_resources_per_env_runner"),
    **dict.fromkeys(
        ("remote_worker_envs", "gym_env_vectorize_mode", "vec_env_cls"),
        (("env_runners.vectorization", "'sync', or 'async' for one process per sub-env"),),
    ),
    "observation_filter": (("env_runners.transforms", "such as [NormalizeObservations()]"),),
    "clip_rewards": (("environment.wrappers", "such as a gymnasium.wrappers.TransformReward that clips"),),
    "horizon": (("environment.wrappers", "gymnasium.wrappers.TimeLimit ends long episodes"),),
    # Learners, faults, reports.
    "num_learner_workers": _same("learners.num_learners"),
    "num_gpus_per_learner_worker": _same("learners.num_gpus_per_learner"),
    "num_cpus_per_learner_worker": _same("learners.num_cpus_per_learner"),
    "num_gpus": (("learners.num_gpus_per_learner", "for each learner on Ray; device='auto' uses a GPU here"),),
    **dict.fromkeys(
        ("recreate_failed_workers", "recreate_failed_env_runners"), _same("fault_tolerance.restart_failed_env_runners")
    ),
    "ignore_worker_failures": _same("fault_tolerance.ignore_env_runner_failures"),
    "max_num_worker_restarts": _same("fault_tolerance.max_num_env_runner_restarts"),
    "delay_between_worker_restarts_s": _same("fault_tolerance.delay_between_env_runner_restarts_s"),
    "num_consecutive_worker_failures_tolerance": _same("fault_tolerance.num_consecutive_env_runner_failures_tolerance"),
    **dict.fromkeys(("worker_restore_timeout_s", "env_runner_restore_timeout_s"), _same("engine.start_timeout_s")),
    **dict.fromkeys(
        ("stats_window_size", "metrics_smoothing_episodes"), _same("reporting.metrics_num_episodes_for_smoothing")
    ),
    "timesteps_per_iteration": _same("reporting.min_sample_timesteps_per_iteration"),
    "min_train_timesteps_per_iteration": (
        ("reporting.min_sample_timesteps_per_iteration", "it counts env steps sampled, not steps trained on"),
    ),
    **dict.fromkeys(
        ("checkpoint_freq", "checkpoint_frequency", "save_freq"), _same("checkpointing.checkpoint_every_iterations")
    ),
    **dict.fromkeys(("num_to_keep", "keep_checkpoints_num"), _same("checkpointing.num_checkpoints_kept")),
    # Evaluation.
    "evaluation_num_workers": _same("evaluation.evaluation_num_env_runners"),
    "custom_eval_function": _same("evaluation.custom_evaluation_function"),
    "evaluation_num_episodes": _same("evaluation.evaluation_duration"),
    **dict.fromkeys(
        ("eval_freq", "eval_every"),
        (("evaluation.evaluation_interval", "in iterations, not in env steps"),),
    ),
    "n_eval_episodes": _same("evaluation.evaluation_duration"),
    "episode_per_test": _same("evaluation.evaluation_duration"),
    "test_num": (("evaluation.evaluation_config", "the key num_envs_per_env_runner"),),
    "eval_env": (("evaluation.evaluation_config", "the keys env and env_config"),),
    "always_attach_evaluation_results": (("", "results always have the latest evaluation: leave this out"),),
    "checkpoint_score_attribute": _same("checkpointing.best_checkpoint_metric"),
    "verbose": (("debugging.log_level", "a name: 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),),
    "callbacks": _same("callbacks.callbacks_class"),
    "total_timesteps": (("", "give it to Algorithm.fit: fit(stop={'num_env_steps': ...})"),),
    "progress_bar": (("", "give it to Algorithm.fit: fit(progress='panel'), or 'lines', 'last' or False"),),
    "optimize_memory_usage": (
        ("", "a replay buffer stores each observation once, and frames of the transform FrameStack once: leave it out"),
    ),
    "tensorboard_log": (("reporting.loggers", "as ['csv', 'tensorboard']; files are in the run directory"),),
    **dict.fromkeys(("framework", "framework_str"), (("", "torch is always used: leave this out"),)),
}
"""Settings, by the name in another library. A path is `group.name`, or `group.name.key` for a key of a dict."""

RESULTS: Mapping[str, Meanings] = {
    "episode_reward_mean": _same("env_runners/episode_return_mean"),
    "episode_reward_min": _same("env_runners/episode_return_min"),
    "episode_reward_max": _same("env_runners/episode_return_max"),
    "rollout/ep_rew_mean": _same("env_runners/episode_return_mean"),
    "rollout/ep_len_mean": _same("env_runners/episode_len_mean"),
    "ep_rew_mean": _same("env_runners/episode_return_mean"),
    "ep_len_mean": _same("env_runners/episode_len_mean"),
    "episodes_total": _same("env_runners/num_episodes_lifetime"),
    "timesteps_total": _same("num_env_steps_sampled_lifetime"),
    "total_timesteps": _same("num_env_steps_sampled_lifetime"),
    "evaluation/episode_reward_mean": _same("evaluation/env_runners/episode_return_mean"),
    "evaluation/episode_return_mean": _same("evaluation/env_runners/episode_return_mean"),
    "eval/mean_reward": _same("evaluation/env_runners/episode_return_mean"),
    "eval/mean_ep_length": _same("evaluation/env_runners/episode_len_mean"),
    "reward": _same("env_runners/episode_return_mean"),
    "mean_reward": _same("env_runners/episode_return_mean"),
    "return": _same("env_runners/episode_return_mean"),
    "iteration": _same("training_iteration"),
    "iterations": _same("training_iteration"),
    "steps": _same("num_env_steps_sampled_lifetime"),
    "timesteps": _same("num_env_steps_sampled_lifetime"),
    "time_this_iter_s": (("time_total_s", "since the first iteration"),),
}
"""Numbers of the result, by the name in another library."""

CONFIG_METHODS: Mapping[str, Meanings] = {
    "rollouts": (("env_runners", "num_rollout_workers is num_env_runners"),),
    "resources": (
        ("learners", "num_gpus is num_gpus_per_learner"),
        ("env_runners", "num_cpus_per_worker is num_cpus_per_env_runner"),
    ),
    "build_algo": _same("build"),
    "update_from_dict": (("set_path", "for one setting, or copy(**settings) for several"),),
    "get_evaluation_config_object": _same("for_evaluation"),
    "get": (("to_dict", "a setting is an attribute too, as in config.lr"),),
    "framework": (("", "torch is always used: leave this out"),),
    "api_stack": (("", "there is only one: leave this out"),),
    "experimental": (("", "there are no such settings: leave this out"),),
}
"""Methods of a config, by the name in another library."""

ALGORITHM_METHODS: Mapping[str, Meanings] = {
    "learn": (("fit", "as in fit(stop={'num_env_steps': 100_000})"),),
    "predict": (
        (
            "compute_single_action",
            "for one observation; it returns the action alone, and explore=False is the best one",
        ),
        ("compute_actions", "for a batch"),
    ),
    "compute_action": _same("compute_single_action"),
    "load": (("from_checkpoint", "a class method, which needs no env"),),
    "restore": _same("restore_from_path"),
    "save_checkpoint": _same("save"),
    "get_policy": (("get_module", "a torch module"),),
    "policy": (("get_module", "a method, which returns a torch module"),),
    "get_weights": (("get_module", "get_module().state_dict()"),),
    "set_weights": (("restore_from_path", "or change the module in the event on_create_policy"),),
    "workers": _same("env_runner_group"),
    "evaluation_workers": _same("eval_env_runner_group"),
    "get_env": (("env_runner", "its attribute env is the vector env"),),
    "logger": (("metrics", "a MetricsLogger"),),
    "iteration": _same("training_iteration"),
    "num_timesteps": _same("num_env_steps_sampled_lifetime"),
    "get_config": _same("config"),
    **dict.fromkeys(
        ("local_replay_buffer", "replay_buffers", "replay_buffer"),
        (("", "only algorithms such as DQN and SAC have a replay buffer, and this one has none"),),
    ),
    "get_default_config": (("", "call the config class, such as PPOConfig()"),),
}
"""Attributes of an algorithm, by the name in another library."""

EVENTS: Mapping[str, Meanings] = {
    "on_trainer_init": _same("on_algorithm_init"),
    "on_workers_recreated": (("on_env_runners_recreated", "worker_ids are env_runner_indices"),),
    **dict.fromkeys(
        ("on_training_start", "_on_training_start", "on_train_start"),
        (("on_algorithm_init", "it fires once, before the first iteration"),),
    ),
    **dict.fromkeys(
        ("on_training_end", "_on_training_end", "on_train_end"),
        (("on_algorithm_stop", "it fires once, when the algorithm is stopped"),),
    ),
    **dict.fromkeys(
        ("on_step", "_on_step"),
        (("on_episode_step", "it fires for each step of each sub-env; its return value does not end the run"),),
    ),
    **dict.fromkeys(("on_rollout_end", "_on_rollout_end"), _same("on_sample_end")),
    "on_train_batch_end": _same("on_update_end"),
    **dict.fromkeys(("on_result", "on_trial_result", "on_iteration_end"), _same("on_train_result")),
    "on_eval_start": _same("on_evaluate_start"),
    "on_eval_end": _same("on_evaluate_end"),
}
"""Events of callbacks, by the name in another library."""

EVENT_ARGUMENTS: Mapping[str, Meanings] = {
    "worker": _same("env_runner"),
    "base_env": (("env", "the vector env itself"),),
    "trainer": _same("algorithm"),
    "policies": (("rl_module", "the module of the only policy"),),
    **dict.fromkeys(("worker_set", "workers"), _same("env_runner_group")),
    "worker_ids": _same("env_runner_indices"),
    "train_results": _same("result"),
}
"""Arguments of events, by the name in another library."""
