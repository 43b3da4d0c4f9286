"""Takes one measurement of Pong or HalfCheetah in this process and prints it as a JSON line (see `vector_envs.py`)."""

import sys
from time import perf_counter
from typing import Any

import measuring
from measuring import Fields, Options

STEPS_PER_ENV = 128
EPOCHS, MINIBATCH, LR = 4, 256, 2.5e-4
# Settings of `environment` and `env_runners` in Corral, by env and by what steps it.
CORRAL: dict[str, dict[str, dict[str, Any]]] = {
    "pong": {
        "ale_py": {"env": "ALE/Pong-v5", "env_config": {"preprocessing": True}},
        "envpool": {"env": "envpool:Pong-v5"},
        "sync": {"env": "ALE/Pong-v5", "env_config": {"preprocessing": True}, "vectorization": "sync"},
        "async": {"env": "ALE/Pong-v5", "env_config": {"preprocessing": True}, "vectorization": "async"},
    },
    "half_cheetah": {
        "envpool": {"env": "envpool:HalfCheetah-v5"},
        "sync": {"env": "HalfCheetah-v5", "vectorization": "sync"},
        "async": {"env": "HalfCheetah-v5", "vectorization": "async"},
    },
}


def corral_config(env: str, form: str, options: Options) -> Any:
    """Returns the config of PPO with one embedded runner; the nets are the defaults that both libraries share."""
    from corral import PPOConfig

    config = PPOConfig().copy(**CORRAL[env][form], num_envs_per_env_runner=options.num_envs, seed=options.seed)
    return config.training(
        lr=LR,
        train_batch_size_per_learner=STEPS_PER_ENV * options.num_envs,
        minibatch_size=MINIBATCH,
        num_epochs=EPOCHS,
        clip_param=0.1,
        entropy_coeff=0.01,
    )


def corral_sampling(env: str, form: str, options: Options) -> Fields:
    """Env steps per second of the embedded runner."""
    with corral_config(env, form, options).build() as algo:
        num_timesteps = STEPS_PER_ENV * options.num_envs
        return measuring.sampling_rate(
            lambda: int(algo.env_runner.sample(num_timesteps=num_timesteps).num_env_steps), options, perf_counter
        )


def corral_ppo(env: str, form: str, options: Options) -> Fields:
    """Trained env steps per second."""
    with corral_config(env, form, options).build() as algo:
        return measuring.training_rate(measuring.trainer(algo), options, perf_counter)


def sb3_model(env: str, form: str, options: Options) -> Any:
    """Returns PPO with the envs that SB3's own functions make, and the policy that SB3 recommends for them."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    cls = SubprocVecEnv if form == "async" else DummyVecEnv
    if env == "pong":
        envs: Any = make_atari_env("ale_py:PongNoFrameskip-v4", options.num_envs, seed=options.seed, vec_env_cls=cls)
        envs = VecFrameStack(envs, 4)
    else:
        envs = make_vec_env("HalfCheetah-v5", options.num_envs, seed=options.seed, vec_env_cls=cls)
    return PPO(
        "CnnPolicy" if env == "pong" else "MlpPolicy",
        envs,
        learning_rate=LR,
        n_steps=STEPS_PER_ENV,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        clip_range=0.1,
        ent_coef=0.01,
        max_grad_norm=0.5,
        seed=options.seed,
        device="cpu",
    )


def sb3_sampling(env: str, form: str, options: Options) -> Fields:
    """Env steps per second of `collect_rollouts`."""
    model = sb3_model(env, form, options)
    _, callback = model._setup_learn(total_timesteps=1_000_000_000)

    def sample() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=STEPS_PER_ENV)
        return STEPS_PER_ENV * options.num_envs

    try:
        return measuring.sampling_rate(sample, options, perf_counter)
    finally:
        model.env.close()


def sb3_ppo(env: str, form: str, options: Options) -> Fields:
    """Trained env steps per second."""
    model = sb3_model(env, form, options)

    def train() -> int:
        model.learn(total_timesteps=STEPS_PER_ENV * options.num_envs, reset_num_timesteps=False)
        return STEPS_PER_ENV * options.num_envs

    try:
        return measuring.training_rate(train, options, perf_counter)
    finally:
        model.env.close()


MEASURES = {
    ("corral", "sampling"): corral_sampling,
    ("corral", "ppo"): corral_ppo,
    ("sb3", "sampling"): sb3_sampling,
    ("sb3", "ppo"): sb3_ppo,
}

if __name__ == "__main__":
    system, kind, env, form = sys.argv.pop(1).split(":")
    measure = MEASURES[system, kind]
    measuring.run_measure(system, {kind: lambda options: measure(env, form, options)})
