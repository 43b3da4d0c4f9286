"""The configs that Corral is measured with. Nothing heavy is imported before a function is called."""

from typing import Any

import measuring
from measuring import Options


def net_config(hiddens: list[int]) -> dict[str, Any]:
    """Returns the settings of separate policy and value nets with tanh, as all systems have them."""
    return {"fcnet_hiddens": hiddens, "fcnet_activation": "tanh", "vf_share_layers": False}


def config(options: Options, num_envs: int) -> Any:
    """Returns a PPO config with the embedded env runner and the net that all systems are measured with."""
    from corral import PPOConfig

    return (
        PPOConfig()
        .environment(measuring.ENV)
        .env_runners(num_envs_per_env_runner=num_envs)
        .rl_module(model_config=net_config(measuring.HIDDEN))
        .debugging(seed=options.seed)
    )


def ppo_config(options: Options) -> Any:
    """Returns that config with 8 envs per runner and the hyperparameters that all systems share."""
    return config(options, num_envs=8).training(
        lr=3e-4,
        train_batch_size_per_learner=2048,
        minibatch_size=256,
        num_epochs=4,
        gamma=0.99,
        lambda_=0.95,
        clip_param=0.2,
        grad_clip=0.5,
        entropy_coeff=0.0,
    )


def dqn_config(options: Options) -> Any:
    """Returns the config of DQN with the hyperparameters that all systems share."""
    from corral import DQNConfig

    return (
        DQNConfig()
        .environment(measuring.ENV)
        .rl_module(model_config={"fcnet_hiddens": measuring.HIDDEN, "fcnet_activation": "relu", "use_layernorm": False})
        .training(
            lr=5e-4,
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=500,
            replay_buffer_config={"capacity": 50_000},
            target_network_update_freq=500,
            tau=1.0,
            n_step=1,
            double_q=False,
            dueling=False,
            grad_clip=10.0,
            gamma=0.99,
        )
        .env_runners(rollout_fragment_length=4)
        .exploration(exploration_config={"initial_epsilon": 1.0, "final_epsilon": 0.02, "epsilon_timesteps": 10_000})
        .debugging(seed=options.seed)
    )
