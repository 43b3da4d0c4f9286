"""Settings that change while an algorithm runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from corral import PPO, Algorithm, APPOConfig, IMPALAConfig, PPOConfig
from corral.algorithms.config.config import AlgorithmConfig
from corral.errors import ConfigError
from corral.testing import IdentityEnv


def config(**settings: Any) -> PPOConfig:
    config = PPOConfig().environment(IdentityEnv).env_runners(num_envs_per_env_runner=4)
    config.training(train_batch_size_per_learner=128, minibatch_size=32, num_epochs=2, lr=1e-3)
    return config.debugging(seed=0).copy(**settings)


def in_turn(base: type[AlgorithmConfig] = APPOConfig, **settings: Any) -> AlgorithmConfig:
    """IMPALA or APPO on the same env, with several updates per iteration and one runner in this process."""
    config = base().environment(IdentityEnv).env_runners(num_env_runners=0, num_envs_per_env_runner=4)
    config.env_runners(rollout_fragment_length=8).training(train_batch_size_per_learner=32, lr=0.02)
    return config.reporting(min_sample_timesteps_per_iteration=128).debugging(seed=0).copy(**settings)


def learner(result: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = result["learners"]["default_policy"]
    return metrics


def test_the_next_iteration_has_the_new_settings() -> None:
    with config().build() as algo:
        before = algo.config
        first = learner(algo.train())
        algo.reconfigure(lr=5e-4, entropy_coeff=[[0, 0.01], [10_000, 0.01]], num_epochs=3, minibatch_size=64)
        result = algo.train()
        second = learner(result)
        assert (first["default_optimizer_learning_rate"], first["num_gradient_steps"]) == (1e-3, 8)
        assert (second["default_optimizer_learning_rate"], second["num_gradient_steps"]) == (5e-4, 6)
        assert second["curr_entropy_coeff"] == 0.01
        assert result["config"]["training"]["lr"] == 5e-4 and result["training_iteration"] == 2
        assert before.lr == 1e-3 and algo.config.is_frozen
        algo.reconfigure(train_batch_size_per_learner=256)
        assert algo.train()["env_runners"]["num_env_steps_sampled"] >= 256


def test_fragments_follow_the_batch_size() -> None:
    with config(rollout_fragment_length=16).build() as algo:
        algo.train()
        with pytest.raises(ConfigError, match="rollout_fragment_length=16 does not divide"):
            algo.reconfigure(train_batch_size_per_learner=100)
        algo.reconfigure(train_batch_size_per_learner=192)
        assert algo.train()["env_runners"]["num_env_steps_sampled"] == 192


def test_a_batch_has_whole_rounds_which_may_exceed_it_by_a_tenth() -> None:
    made = config(rollout_fragment_length=16).training(train_batch_size_per_learner=176)
    with made.build() as algo:
        assert algo.sampler.num_env_steps_per_round == 64
        assert algo.train()["env_runners"]["num_env_steps_sampled"] == 192
        algo.reconfigure(train_batch_size_per_learner=175)
        assert algo.train()["env_runners"]["num_env_steps_sampled"] == 192
        with pytest.raises(ConfigError, match="exceed the batch of 174 by 18, more than a tenth"):
            algo.reconfigure(train_batch_size_per_learner=174)


def second(base: type[AlgorithmConfig], **changes: Any) -> dict[str, float]:
    """Return the learner's metrics of a second iteration, with settings changed before it."""
    made: AlgorithmConfig = config() if base is PPOConfig else in_turn(base)
    if base is APPOConfig:
        made.training(circular_buffer_num_batches=1, target_network_update_freq=1)
    with made.build() as algo:
        algo.train()
        algo.reconfigure(**changes)
        return learner(algo.train())


unchanged = functools.cache(second)


OF_PPO: list[dict[str, Any]] = [
    *({"gamma": 0.5}, {"lambda_": 0.0}, {"clip_param": 0.01}, {"vf_clip_param": 1e-3}, {"vf_loss_clip": 1e-3}),
    *({"vf_loss_coeff": 0.1}, {"kl_coeff": 1.0}, {"grad_clip": 1e-3}, {"grad_clip": 1e-3, "grad_clip_by": "value"}),
    *({"normalize_advantages": False}, {"shuffle_batch_per_epoch": False}),
]
IN_TURN: list[dict[str, Any]] = [
    *({"gamma": 0.5}, {"lambda_": 0.0}, {"vf_loss_coeff": 0.1}, {"grad_clip": 1e-3}, {"entropy_coeff": 1.0}),
    *({"vtrace_clip_rho_threshold": 0.1}, {"vtrace_clip_pg_rho_threshold": 0.1}, {"vtrace_clip_c_threshold": 0.1}),
    *({"use_circular_buffer": True, "circular_buffer_iterations_per_batch": 3}, {"broadcast_interval": 4}),
    {"train_batch_size_per_learner": 64},
]


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        *((PPOConfig, changes) for changes in OF_PPO),
        *((IMPALAConfig, changes) for changes in IN_TURN),
        *((APPOConfig, changes) for changes in IN_TURN),
        *((APPOConfig, {name: 0.01}) for name in ("clip_param", "target_worker_clipping", "tau")),
        (APPOConfig, {"use_kl_loss": True, "kl_coeff": 5.0}),
        (APPOConfig, {"use_kl_loss": True, "kl_target": 1e-9}),
        (APPOConfig, {"target_network_update_freq": 5}),
        (APPOConfig, {"circular_buffer_num_batches": 3}),
    ],
    ids=str,
)
def test_every_setting_reaches_the_next_updates(base: type[AlgorithmConfig], changes: dict[str, Any]) -> None:
    assert second(base, **changes)["policy_loss"] != unchanged(base)["policy_loss"]


@pytest.mark.parametrize("base", [PPOConfig, IMPALAConfig, APPOConfig])
def test_no_change_changes_nothing(base: type[AlgorithmConfig]) -> None:
    assert second(base, lr=1e-3 if base is PPOConfig else 0.02, gamma=0.99) == unchanged(base)


def test_an_adaptive_coefficient_starts_again_where_it_was_set() -> None:
    with config(kl_coeff=0.2, kl_target=1e-6).build() as algo:
        for _ in range(3):
            algo.train()
        algo.reconfigure(lr=1e-4)
        assert learner(algo.train())["curr_kl_coeff"] == 0.2 * 2**3
        algo.reconfigure(kl_coeff=0.5)
        assert learner(algo.train())["curr_kl_coeff"] == 0.5


def test_the_weight_of_a_penalty_starts_again_where_it_was_set(tmp_path: Path) -> None:
    config = in_turn(use_kl_loss=True, kl_target=100.0, kl_coeff=0.5, min_sample_timesteps_per_iteration=32)
    config.training(circular_buffer_iterations_per_batch=1)
    with config.build() as algo:
        for _ in range(3):  # one update each, after which the weight is halved
            algo.train()
        algo.reconfigure(lr=1e-4)
        assert learner(algo.train())["curr_kl_coeff"] == 0.5 / 2**3
        algo.save(tmp_path / "saved")
        algo.reconfigure(kl_coeff=8.0)
        assert learner(algo.train())["curr_kl_coeff"] == 8.0
    for given, expected in ((0.5, 0.5 / 2**4), (8.0, 8.0)):
        with Algorithm.from_checkpoint(tmp_path / "saved", kl_coeff=given) as restored:
            assert learner(restored.train())["curr_kl_coeff"] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lrr": 1.0}, "unknown setting 'lrr'. Did you mean 'lr'?"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"lr": 1e-4, "optimizer": "sgd"}, "reconfigure: optimizer can only be set before building"),
        ({"optimizer_config": {"eps": 1e-5}}, "reconfigure: optimizer_config can only"),
        ({"normalize_values": True}, "reconfigure: normalize_values can only"),
        ({"env": "CartPole-v1", "model_config": {"fcnet_hiddens": [8]}}, "reconfigure: env, model_config can only"),
        ({"num_env_runners": 2}, "reconfigure: num_env_runners can only .* restore_from_path"),
        ({"minibatch_size": 1000}, "minibatch_size=1000 is larger than train_batch_size_per_learner=128"),
    ],
)
def test_what_cannot_change_is_named_and_nothing_has_changed(changes: dict[str, Any], message: str) -> None:
    with config().build() as algo:
        before = algo.config
        with pytest.raises(ConfigError, match=message):
            algo.reconfigure(**changes)
        assert algo.config is before
        assert learner(algo.train())["default_optimizer_learning_rate"] == 1e-3


def test_an_algorithm_says_what_only_building_applies() -> None:
    class Custom(PPO):
        FIXED_SETTINGS = PPO.FIXED_SETTINGS | {"gamma"}

    with Custom(config()) as algo, pytest.raises(ConfigError, match="reconfigure: gamma can only"):
        algo.reconfigure(gamma=0.5)
