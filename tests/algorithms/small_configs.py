"""The small configs of all algorithms: they learn `IdentityEnv` within some seconds."""

from __future__ import annotations

from typing import Any

from corral.algorithms.registry import config_class
from corral.testing import IdentityEnv

OFF_POLICY: dict[str, Any] = {
    "gamma": 0.0,
    "lr": 5e-3,
    "train_batch_size_per_learner": 64,
    "num_steps_sampled_before_learning_starts": 100,
    "replay_buffer_config": {"capacity": 10_000},
}
ON_POLICY = ("PPO", "APPO", "IMPALA", "PQN")  # and so on what they sample, without replay
IN_TURN: dict[str, Any] = {"gamma": 0.0, "lr": 5e-3, "train_batch_size_per_learner": 128}
TRAINING: dict[str, dict[str, Any]] = {
    "PPO": {"gamma": 0.0, "lr": 3e-3, "train_batch_size_per_learner": 256, "minibatch_size": 128},
    "PQN": {"gamma": 0.0, "lr": 5e-3, "train_batch_size_per_learner": 256, "minibatch_size": 64},
    "APPO": {**IN_TURN, "circular_buffer_num_batches": 1},
    "IMPALA": {**IN_TURN, "lr": 1e-2},
    "DQN": {
        "num_steps_sampled_before_learning_starts": 64,
        "train_batch_size_per_learner": 32,
        "n_step": 1,
        "lr": 5e-3,
        "gamma": 0.5,
        "target_network_update_freq": 100,
        "tau": 1.0,
    },
    "SAC": {**OFF_POLICY, "lr": 3e-3},
    "TQC": {**OFF_POLICY, "lr": 3e-3},
    "CrossQ": {**OFF_POLICY, "lr": 3e-3},
    "TD3": OFF_POLICY,
    "DDPG": OFF_POLICY,
    "DreamerV3": {
        **OFF_POLICY,
        "model_size": "nano",
        "horizon": 2,
        "actor_lr": 3e-3,
        "critic_lr": 3e-3,
        "training_intensity": 64.0,
    },
}


def small_config(algo: str, space: Any = None, **training: Any) -> Any:
    """Return the config of a run of seconds; `space` names the action space of the env."""
    config: Any = config_class(algo)().training(**{**TRAINING[algo], **training})
    if space is None:
        space = "discrete" if algo in (*ON_POLICY, "DQN", "DreamerV3") else "box"
    config.environment(IdentityEnv, env_config={"space": space}).debugging(seed=1)
    if algo == "DQN":
        config.environment(env_config={"space": space, "episode_length": 8}).debugging(seed=0)
        config.exploration(exploration_config={"epsilon_timesteps": 500})
    if algo in ("APPO", "IMPALA"):
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=8, rollout_fragment_length=16)
    if algo == "PQN":
        config.exploration(exploration_config={"epsilon_timesteps": 500})
    elif algo != "PPO":
        config.reporting(min_sample_timesteps_per_iteration=100 if algo == "DQN" else 50)
    if algo == "CrossQ":
        return config.rl_module(model_config={"fcnet_hiddens": [32, 32], "critic_hiddens": [32, 32]})
    if algo == "DreamerV3":
        return config.rl_module(model_config={"max_seq_len": 16})
    return config.rl_module(model_config={"fcnet_hiddens": [16, 16] if algo == "DQN" else [32, 32]})
