"""Settings of parts that are off are refused, or warned of where a part may be off on purpose."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import APPOConfig, DDPGConfig, DQNConfig, IMPALAConfig, PPOConfig, PQNConfig, SACConfig, TD3Config
from corral.algorithms.config.without_effect import warn_of_settings_without_effect
from corral.algorithms.registry import ALGORITHMS, config_class
from corral.core.settings import Need, PositiveInt, check_setting, find_unused, needs_of, never
from corral.errors import ConfigError

CONFIGS: dict[str, Any] = {
    **{"PPO": PPOConfig, "APPO": APPOConfig, "IMPALA": IMPALAConfig, "DQN": DQNConfig},
    **{"SAC": SACConfig, "TD3": TD3Config, "DDPG": DDPGConfig},
}


@pytest.mark.parametrize(
    ("algo", "settings", "message"),
    [
        ("DQN", {"v_min": -5}, r"v_min=-5.0 has no effect without num_atoms above 1"),
        ("DQN", {"v_max": 5}, r"v_max=5.0 has no effect without num_atoms above 1"),
        ("DQN", {"sigma0": 0.1}, r"sigma0=0.1 has no effect without noisy=True"),
        (
            "DQN",
            {"num_atoms": 51, "td_error_loss_fn": "mse"},
            r"td_error_loss_fn='mse' has no effect without num_atoms",
        ),
        ("DDPG", {"target_noise_clip": 0.1}, r"target_noise_clip=0.1 has no effect without target_noise above 0"),
        ("SAC", {"grad_clip_by": "value"}, r"grad_clip_by='value' has no effect without grad_clip"),
        (
            "SAC",
            {"shuffle_batch_per_epoch": False},
            r"shuffle_batch_per_epoch=False has no effect without minibatch_size",
        ),
        ("SAC", {"alpha_lr": 0, "target_entropy": -1}, r"target_entropy=-1.0 has no effect without alpha_lr above 0"),
        ("PPO", {"vf_loss_coeff": 0, "vf_clip_param": 0.1}, r"vf_clip_param=0.1 has no effect without vf_loss_coeff"),
        ("PPO", {"num_epochs": 1, "target_kl": 0.1}, r"target_kl=0.1 has no effect without num_epochs above 1"),
        ("APPO", {"kl_coeff": 0.5}, r"kl_coeff=0.5 has no effect without use_kl_loss=True"),
        ("APPO", {"learner_queue_size": 5}, r"learner_queue_size=5 has no effect without .* no circular buffer"),
        (
            "IMPALA",
            {"circular_buffer_num_batches": 5},
            r"circular_buffer_num_batches=5 has no effect without use_circular_buffer=True",
        ),
    ],
)
def test_a_setting_of_a_part_that_is_off_is_refused(algo: str, settings: dict[str, Any], message: str) -> None:
    env = "Pendulum-v1" if algo in ("TD3", "DDPG") else "CartPole-v1"
    with pytest.raises(ConfigError, match=message):
        CONFIGS[algo]().environment(env).training(**settings).validate()


@pytest.mark.parametrize(
    ("model_config", "message"),
    [
        ({"head_activation": "relu"}, "head_activation='relu' has no effect without head_hiddens"),
        (
            {"fcnet_hiddens": [], "fcnet_activation": "relu"},
            "fcnet_activation='relu' has no effect without hidden layers",
        ),
        ({"fcnet_kernel_initializer_kwargs": {"a": 1}}, "without a function as fcnet_kernel_initializer"),
        ({"gru_cell_size": 8}, "gru_cell_size=8 has no effect without use_gru=True"),
    ],
)
def test_a_setting_of_layers_that_are_off_is_refused(model_config: dict[str, Any], message: str) -> None:
    config = PPOConfig().environment("CartPole-v1").rl_module(model_config=model_config)
    with pytest.raises(ConfigError, match=f"model_config: .*{message}"):
        config.validate()


@pytest.mark.parametrize(
    ("algo", "model_config", "message"),
    [
        ("PPO", {"initial_log_std": -1.0}, "initial_log_std=-1.0 has no effect without Box actions"),
        ("PPO", {"free_log_std": False}, "free_log_std=False has no effect without Box actions alone"),
        ("PPO", {"conv_activation": "tanh"}, "conv_activation='tanh' has no effect without an image"),
        ("SAC", {"log_std_bounds": [-1, 1]}, r"log_std_bounds=.* has no effect without Box actions"),
    ],
)
def test_a_setting_for_other_spaces_is_refused_when_the_env_is_known(
    algo: str, model_config: dict[str, Any], message: str
) -> None:
    config = CONFIGS[algo]().environment("CartPole-v1").rl_module(model_config=model_config)
    config.validate()
    with pytest.raises(ConfigError, match=f"^model_config: {message}.*: leave it out\\.$"):
        config.build()


class Picture(gym.Env[Any, Any]):
    observation_space = spaces.Box(0, 255, (20, 20, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, **arguments: Any) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, True, False, {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("fcnet_activation", "tanh"), ("fcnet_kernel_initializer", "xavier_uniform_"), ("use_layernorm", True)],
)
def test_settings_of_hidden_layers_need_an_algorithm_that_has_them_for_pictures(name: str, value: Any) -> None:
    """PQN has normalised layers after the convolutions; DQN, whose targets keep the values bounded, has not."""
    with PQNConfig().environment(Picture).rl_module(model_config={name: value}).build() as algo:
        assert [type(part).__name__ for part in algo.get_module().modules()].count("LayerNorm") == 2
    with pytest.raises(ConfigError, match=f"{name}=.* has no effect without fcnet_hiddens"):
        DQNConfig().environment(Picture).rl_module(model_config={name: value}).build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalize_actions": False}, "normalize_actions=False has no effect without Box actions"),
        ({"action_masks": False}, "action_masks=False has no effect without a mask"),
        ({"sample_timeout_s": 5}, "sample_timeout_s=5.0 has no effect without env runners of the engine"),
        ({"max_num_env_runner_restarts": 5}, "max_num_env_runner_restarts=5 has no effect without env runners"),
        ({"on_error": "log"}, "on_error='log' has no effect without callbacks"),
        (
            {"explore": False, "exploration_config": {"random_timesteps": 9}},
            "exploration_config={'random_timesteps': 9} has no effect without explore=True",
        ),
    ],
)
def test_a_setting_that_waits_for_an_env_or_for_runners_is_warned_of(
    settings: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "corral"):
        PPOConfig().environment("CartPole-v1").copy(**settings).build().stop()
    assert [record for record in caplog.messages if message in record]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_unit_of_batch_sizes_is_warned_of_where_batches_count_steps_of_the_module(
    algo: str, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = config_class(algo)().environment("CartPole-v1")
    config.multi_agent(policies={"one"}, count_steps_by="agent_steps")
    with caplog.at_level(logging.WARNING, "corral"):
        warn_of_settings_without_effect(config)
    named = [message for message in caplog.messages if message.startswith("count_steps_by='agent_steps'")]
    assert len(named) == (algo not in ("PPO", "APPO", "IMPALA", "PQN"))


@pytest.mark.parametrize(
    ("algo", "settings", "num_runners"),
    [
        ("IMPALA", {"max_lag": 5}, 0),
        ("IMPALA", {"learner_queue_size": 5}, 0),
        ("IMPALA", {"use_circular_buffer": True, "circular_buffer_num_batches": 5}, 0),
        ("PPO", {"max_lag": 5}, 2),  # without sample_async
        ("PPO", {"on_lag": "wait", "sample_async": True}, 2),  # without max_lag
        ("APPO", {"circular_buffer_num_batches": 5}, None),  # which is the period of its target policy too
        ("IMPALA", {"max_lag": 5, "learner_queue_size": 5}, None),
    ],
)
def test_a_limit_of_batches_that_wait_needs_runners(
    algo: str, settings: dict[str, Any], num_runners: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIGS[algo]().environment("CartPole-v1").copy(**settings)
    if num_runners is not None:
        config.env_runners(num_env_runners=num_runners)
    with caplog.at_level(logging.WARNING, "corral"):
        warn_of_settings_without_effect(config)
    named = [message for message in caplog.messages if f"{[*settings][-1 if num_runners == 0 else 0]}=" in message]
    assert len(named) == (num_runners is not None)


def test_an_exploration_that_only_evaluation_uses_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = (
        DQNConfig().environment("CartPole-v1").exploration(explore=False, exploration_config={"final_epsilon": 0.5})
    )
    config.evaluation(evaluation_config={"explore": True}).build().stop()
    assert "exploration_config" not in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["num_gpus_per_learner", "num_gpus_per_env_runner"])
def test_gpus_that_are_not_there_are_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    PPOConfig().environment("CartPole-v1").copy(**{name: 1}).build().stop()
    assert f"{name}=1 has no effect: torch finds no GPU" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TD3Config(lr=0.1, actor_lr=0.1, critic_lr=0.1), "lr=0.1 has no effect: actor_lr, critic_lr are given"),
        (
            TD3Config(exploration_config={"scale_timesteps": 5}),
            "scale_timesteps has no effect: initial_scale and final",
        ),
        (
            TD3Config(exploration_config={"type": "PerWorkerGaussianNoise", "final_scale": 0.5}),
            "final_scale has no effect",
        ),
        (TD3Config(exploration_config={"type": "RE3", "rho": 0.5}), "rho=0.5 has no effect without beta_schedule"),
    ],
)
def test_a_rate_or_a_schedule_without_effect_is_warned_of(
    config: TD3Config, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    config.environment("Pendulum-v1").env_runners(num_envs_per_env_runner=2).build().stop()
    assert message in caplog.text


def test_a_part_of_one_module_is_enough() -> None:
    config = DQNConfig().environment("CartPole-v1").training(v_max=100.0).multi_agent(policies={"a", "b"})
    config.multi_agent(algorithm_config_overrides_per_module={"a": {"num_atoms": 11}})
    config.validate()
    config.multi_agent(algorithm_config_overrides_per_module={"a": {"num_atoms": 11}, "b": {"sigma0": 0.1}})
    with pytest.raises(ConfigError, match=r"module 'b': .*sigma0=0.1 has no effect without noisy=True"):
        config.validate()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_each_need_answers_for_the_defaults_of_each_algorithm(algo: str) -> None:
    config = config_class(algo)()
    needs = [need for found in needs_of(type(config)).values() for need in found]
    assert len(needs) > 30
    assert {bool(need.is_met(config)) for need in needs} == {True, False}


def test_a_need_of_a_subclass_replaces_the_need_of_its_base_and_keeps_the_bounds() -> None:
    @dataclass(kw_only=True)
    class Base:
        on: bool = False
        size: Annotated[PositiveInt, Need("on=True", attrgetter("on"))] = 1

    @dataclass(kw_only=True)
    class Never(Base):
        size: Annotated[int, Need("Base", never)] = 2

    assert [find_unused(each) for each in (Base(), Base(on=True, size=3))] == [{}, {}]
    assert find_unused(Base(size=3))["size"].text == "on=True"
    assert find_unused(Never(on=True, size=3))["size"].text == "Base"
    with pytest.raises(ConfigError, match="size=0 must be at least 1"):
        check_setting(Never, "size", 0)
