"""RLlib's DreamerV3: its defaults and names, and scripts like its examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rllib_scripts import Run

from corral.compat.rllib.algorithm import DreamerV3, DreamerV3Config
from corral.compat.rllib.native import to_native
from corral.errors import ConfigError


def native_of(config: Any) -> Any:
    return to_native(config.environment("CartPole-v1"))


def test_it_begins_with_the_defaults_of_rllib() -> None:
    native = native_of(DreamerV3Config())
    expected = {
        "model_size": "XS",
        "training_intensity": 1024,
        "train_batch_size_per_learner": 1024,
        "model_config": {"max_seq_len": 64},
        "horizon": 15,
        "gamma": 0.997,
        "lambda_": 0.95,
        "entropy_coeff": 3e-4,
        "return_decay": 0.99,
        "world_model_lr": 1e-4,
        "actor_lr": 3e-5,
        "critic_lr": 3e-5,
        "grad_clip": {"world_model": 1000.0, "actor": 100.0, "critic": 100.0},
        "num_steps_sampled_before_learning_starts": 1024,
        "rollout_fragment_length": 1,
        "num_env_runners": 0,
        "metrics_num_episodes_for_smoothing": 1,
    }
    assert {name: getattr(native, name) for name in expected} == expected
    assert native.replay_config.capacity == 1_000_000 and native.replay_config.type == "uniform"


def test_its_names_become_those_of_corral() -> None:
    config = DreamerV3Config().training(
        model_size="nano",
        training_ratio=32,
        batch_size_B=8,
        batch_length_T=16,
        horizon_H=5,
        gae_lambda=0.9,
        entropy_scale=1e-3,
        return_normalization_decay=0.9,
        train_actor=False,
        world_model_lr=1e-3,
        critic_lr=1e-4,
        world_model_grad_clip_by_global_norm=10.0,
        replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 5000},
        model={"batch_size_B": 4},
    )
    config.learners(num_learners=2).reporting(report_images_and_videos=False, report_dream_data=False)
    native = native_of(config)
    expected = {
        "model_size": "nano",
        "training_intensity": 32,
        "train_batch_size_per_learner": 64,
        "model_config": {"max_seq_len": 16},
        "horizon": 5,
        "lambda_": 0.9,
        "entropy_coeff": 1e-3,
        "return_decay": 0.9,
        "world_model_lr": 1e-3,
        "actor_lr": 0.0,
        "critic_lr": 1e-4,
        "grad_clip": {"world_model": 10.0, "actor": 100.0, "critic": 100.0},
        "num_steps_sampled_before_learning_starts": 128,
    }
    assert {name: getattr(native, name) for name in expected} == expected
    assert native.replay_config.capacity == 5000
    assert config.batch_size_B_per_learner == 4 and config.total_train_batch_size == 128
    assert DreamerV3.get_default_config().model_size == "XS"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"symlog_obs": False}, "symlog_obs=False.*vectors are learned after symlog"),
        ({"use_float16": True}, "use_float16=True.*bfloat16"),
        ({"use_curiosity": True}, "use_curiosity=True"),
        ({"replay_buffer_config": {"capacity": 100, "shuffle": 1}}, "'shuffle' is not in Corral"),
    ],
)
def test_what_it_lacks_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        native_of(DreamerV3Config().training(**settings))
    with pytest.raises(ConfigError, match="the networks of DreamerV3 have `model_size` alone"):
        native_of(DreamerV3Config().rl_module(model_config={"fcnet_hiddens": [8]}))


def test_its_results_have_the_names_of_rllib() -> None:
    config = DreamerV3Config().environment("CartPole-v1")
    config.training(model_size="nano", batch_size_B=2, batch_length_T=8, horizon_H=2, training_ratio=8)
    config.reporting(min_sample_timesteps_per_iteration=30)
    with config.build_algo() as algo:
        learned = algo.train()["learners"]["default_policy"]
    names = ("total", "decoder", "reward", "continue", "dynamics", "representation")
    assert all(np.isfinite(learned[f"WORLD_MODEL_L_{name}"]) for name in names)
    assert np.isfinite([learned["ACTOR_L_total"], learned["CRITIC_L_total"]]).all()


@pytest.mark.parametrize("env", ["CartPole-v1", "FrozenLake-v1", "Pendulum-v1"])
def test_scripts_like_its_examples_run(run: Run, env: str) -> None:
    env_config = {"map_name": "4x4", "is_slippery": False} if env == "FrozenLake-v1" else {}
    done = run(
        f"""
from ray.rllib.algorithms.dreamerv3.dreamerv3 import DreamerV3Config
from ray.rllib.utils.test_utils import add_rllib_example_script_args, run_rllib_example_script_experiment

parser = add_rllib_example_script_args(default_iters=10000, default_reward=450.0, default_timesteps=100)
args = parser.parse_args()
rates = DreamerV3Config()
config = (
    DreamerV3Config()
    .environment({env!r}, env_config={env_config!r})
    .env_runners(remote_worker_envs=(args.num_learners and args.num_learners > 1))
    .reporting(
        metrics_num_episodes_for_smoothing=(args.num_learners or 1),
        report_images_and_videos=False,
        report_individual_batch_item_stats=False,
    )
    .training(model_size="nano", training_ratio=16, batch_size_B=4, batch_length_T=8, actor_lr=rates.actor_lr * 2)
)
if __name__ == "__main__":
    results = run_rllib_example_script_experiment(config, args)
    print(results["num_env_steps_sampled_lifetime"])
""",
        "--no-tune",
        with_ray=False,
    )
    assert int(done.stdout.split()[-1]) >= 100
