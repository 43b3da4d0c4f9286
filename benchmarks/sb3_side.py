"""Takes one measurement of Stable-Baselines3 in this process and prints it as a JSON line (see `run.py`).

Envs are made by SB3's own `make_vec_env`, which steps them one after the other in this process (DummyVecEnv):
for an env as cheap as CartPole that is faster than its subprocess envs.
"""

import os
import warnings
from typing import Any

import measuring
from measuring import Fields, Options


def _silence() -> None:
    """Turns off the notices of SB3 and its libraries."""
    os.environ.update(PYTHONWARNINGS="ignore", TF_CPP_MIN_LOG_LEVEL="3", PYGAME_HIDE_SUPPORT_PROMPT="1")
    warnings.simplefilter("ignore")


def sampling(options: Options) -> Fields:
    """Env steps per second of `collect_rollouts`, whose policy is 64-64 tanh by default."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env(measuring.ENV, options.num_envs, seed=options.seed)
    steps_per_env = measuring.STEPS_PER_SAMPLE // options.num_envs
    model = PPO("MlpPolicy", envs, n_steps=steps_per_env, seed=options.seed, device="cpu")
    # What `learn` does before its loop: it resets the envs and prepares the callback.
    _, callback = model._setup_learn(total_timesteps=1_000_000_000)

    def sample() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=steps_per_env)
        return steps_per_env * options.num_envs

    return measuring.sampling_rate(sample, options)


def _train_one_iteration(model: Any) -> None:
    """Runs one iteration of SB3's own training loop: one rollout and the updates on it."""
    model.learn(total_timesteps=model.n_steps * model.n_envs, reset_num_timesteps=False)


def ppo(options: Options, policy_kwargs: dict[str, Any] | None = None, *, has_memory: bool = False) -> Fields:
    """Trained env steps per second of PPO at the hyperparameters that all systems share."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    algorithm, policy = PPO, "MlpPolicy"
    if has_memory:
        from sb3_contrib import RecurrentPPO

        algorithm, policy = RecurrentPPO, "MlpLstmPolicy"
    model = algorithm(
        policy,
        make_vec_env(measuring.ENV, 8, seed=options.seed),
        learning_rate=3e-4,
        n_steps=256,
        batch_size=256,
        n_epochs=4,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        max_grad_norm=0.5,
        ent_coef=0.0,
        policy_kwargs=policy_kwargs,
        seed=options.seed,
        device="cpu",
    )
    return measuring.training_rate(_iteration(model), options)


def ppo_wide(options: Options) -> Fields:
    """Trained env steps per second of PPO with nets of 512-512."""
    return ppo(options, {"net_arch": measuring.WIDE})


def ppo_memory(options: Options) -> Fields:
    """Trained env steps per second of sb3-contrib's RecurrentPPO, whose hidden layer comes after the LSTM."""
    return ppo(options, {"net_arch": [measuring.LSTM], "lstm_hidden_size": measuring.LSTM}, has_memory=True)


def ppo_images(options: Options) -> Fields:
    """Trained env steps per second of PPO on images, with SB3's CnnPolicy."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    from image_env import ImageEnv

    model = PPO(
        "CnnPolicy",
        make_vec_env(ImageEnv, 8, seed=options.seed),
        learning_rate=2.5e-4,
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        max_grad_norm=0.5,
        seed=options.seed,
        device="cpu",
    )
    return measuring.training_rate(_iteration(model), options)


def _iteration(model: Any) -> Any:
    """Returns a function that trains for one iteration and says how many env steps that were."""

    def train() -> int:
        before = int(model.num_timesteps)
        _train_one_iteration(model)
        return int(model.num_timesteps) - before

    return train


def dqn(options: Options) -> Fields:
    """Env steps per second of DQN at the hyperparameters that all systems share, 1000 env steps at a time."""
    from stable_baselines3 import DQN

    model = DQN(
        "MlpPolicy",
        measuring.ENV,
        learning_rate=5e-4,
        buffer_size=50_000,
        learning_starts=500,
        batch_size=32,
        tau=1.0,
        gamma=0.99,
        train_freq=4,
        gradient_steps=1,
        target_update_interval=500,
        exploration_fraction=1e-5,  # of the steps of a call: epsilon has fallen at once, which saves random actions
        exploration_final_eps=0.02,
        max_grad_norm=10,
        seed=options.seed,
        device="cpu",
    )
    return measuring.training_rate(_learner(model, 1000), options)


def sac(options: Options) -> Fields:
    """Env steps per second of SAC at the hyperparameters that all systems share, 200 env steps at a time."""
    from stable_baselines3 import SAC

    model = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=3e-4,
        buffer_size=100_000,
        learning_starts=100,
        batch_size=256,
        tau=0.005,
        gamma=0.99,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]},
        seed=options.seed,
        device="cpu",
    )
    return measuring.training_rate(_learner(model, 200), options)


def _td3(options: Options) -> Any:
    """Returns TD3 at the hyperparameters that all systems share."""
    import numpy as np
    from stable_baselines3 import TD3
    from stable_baselines3.common.noise import NormalActionNoise

    return TD3(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=1e-3,
        buffer_size=100_000,
        learning_starts=500,
        batch_size=256,
        tau=0.005,
        gamma=0.99,
        train_freq=1,
        gradient_steps=1,
        action_noise=NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)),
        policy_delay=2,
        target_policy_noise=0.2,
        target_noise_clip=0.5,
        policy_kwargs={"net_arch": [256, 256]},
        seed=options.seed,
        device="cpu",
    )


def td3(options: Options) -> Fields:
    """Env steps per second of TD3, 500 env steps at a time."""
    return measuring.training_rate(_learner(_td3(options), 500), options)


def td3_return(options: Options) -> Fields:
    """Mean return of 20 greedy episodes after 10,000 env steps."""
    from stable_baselines3.common.evaluation import evaluate_policy

    model = _td3(options)
    model.learn(total_timesteps=measuring.TD3_STEPS)
    mean_return, _ = evaluate_policy(model, model.get_env(), n_eval_episodes=20)
    return {"mean_return": float(mean_return)}


def _learner(model: Any, num_steps: int) -> Any:
    """Returns a function that learns for so many env steps and says how many that were."""

    def train() -> int:
        before = int(model.num_timesteps)
        model.learn(total_timesteps=num_steps, reset_num_timesteps=False)
        return int(model.num_timesteps) - before

    return train


def time_to_450(options: Options) -> Fields:
    """Trains PPO with SB3's defaults (one env) until ep_rew_mean, the mean of 100 episodes, reaches 450."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.utils import safe_mean

    model = PPO("MlpPolicy", measuring.ENV, seed=options.seed)

    def train() -> tuple[float, int]:
        _train_one_iteration(model)
        mean = safe_mean([episode["r"] for episode in model.ep_info_buffer or ()])
        return float(mean), int(model.num_timesteps)

    return measuring.train_until_target(train, options)


def import_package(options: Options) -> Fields:
    """Seconds that `import stable_baselines3` takes."""
    del options

    def do_import() -> None:
        import stable_baselines3  # noqa: F401

    return measuring.time_import(do_import)


def import_ppo(options: Options) -> Fields:
    """Seconds until PPO can be used, for what `import stable_baselines3` may have put off."""
    del options

    def do_import() -> None:
        from stable_baselines3 import PPO  # noqa: F401

    return measuring.time_import(do_import)


if __name__ == "__main__":
    _silence()
    measuring.run_measure(
        "sb3",
        {
            "sampling": sampling,
            "ppo": ppo,
            "ppo_wide": ppo_wide,
            "ppo_memory": ppo_memory,
            "ppo_images": ppo_images,
            "dqn": dqn,
            "sac": sac,
            "td3": td3,
            "td3_return": td3_return,
            "time_to_450": time_to_450,
            "import": import_package,
            "import_ppo": import_ppo,
        },
    )
