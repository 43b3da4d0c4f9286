"""Messages that say what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from small_configs import small_config

from corral import PPO, DQNConfig, SACConfig, TD3Config, load_policy
from corral.errors import CheckpointError, ConfigError, LossError
from corral.testing import CountingEnv
from small import small


@pytest.fixture(scope="module")
def algorithm() -> Any:
    with small().build() as built:
        yield built


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda algorithm: algorithm.fit(10_000), r"fit\(stop={'num_env_steps': 10_000}\)"),
        (lambda algorithm: algorithm.fit(total_timesteps=5), r"fit\(stop={'num_env_steps': 5}\)"),
        (lambda algorithm: algorithm.fit({"num_env_steps": 5}), r"by name, as in fit\(stop=...\)"),
        (lambda algorithm: algorithm.fit(progress_bar=True), "unknown argument 'progress_bar'. Write progress='panel'"),
        (lambda algorithm: algorithm.fit(stops={}), "unknown argument 'stops'. Did you mean 'stop'"),
        (lambda _: small().training(lr=lambda progress: 1.0), "a number or a schedule over env steps, such as"),
        (lambda _: small().training(lr="lin_3e-4"), "a number or a schedule over env steps, such as"),
        (lambda _: small().training(optimize_memory_usage=True), "a replay buffer stores each observation once"),
        (
            lambda _: (
                DQNConfig()
                .environment(CountingEnv)
                .training(replay_buffer_config={"optimize_memory_usage": True})
                .build()
            ),
            "a replay buffer stores each observation once",
        ),
        (lambda _: small().reporting(progress_bar=True), r"fit\(progress='panel'\)"),
    ],
)
def test_names_of_other_libraries_are_explained(algorithm: Any, call: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(algorithm)


class Acting(CountingEnv):
    """An env with the actions of its config."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.action_space = config["space"]


@pytest.mark.parametrize(
    ("algo", "space", "remedy"),
    [
        (DQNConfig, gym.spaces.MultiBinary(3), "use PPO"),
        (DQNConfig, gym.spaces.Box(-1, 1, (2,), np.float32), "use SAC, TD3 or PPO"),
        (SACConfig, gym.spaces.MultiBinary(3), "use PPO"),
        (
            SACConfig,
            gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "give them such bounds with a wrapper, or use PPO",
        ),
        (TD3Config, gym.spaces.Discrete(3), "use DQN, SAC or PPO"),
    ],
)
def test_a_remedy_works(algo: Any, space: Any, remedy: str) -> None:
    config = algo().environment(Acting, env_config={"space": space}, disable_env_checking=True)
    with pytest.raises(ConfigError, match=f": {remedy}\\.$"):
        config.build()


@pytest.mark.parametrize(
    ("algo", "training", "message"),
    [
        ("PPO", {"target_kl": 0.01}, "target_kl ends the epochs by 'mean_kl', which the loss did not report: return"),
        ("DreamerV3", {}, r"learners/default_policy: the loss did not report \['return_low', 'return_high'\], with"),
    ],
)
def test_what_an_algorithm_reads_of_a_loss_is_named(algo: str, training: dict[str, Any], message: str) -> None:
    def bare(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        loss, reported, _ = default_loss(module, batch, coefficients)
        return loss, {name: value for name, value in reported.items() if name == "td_error"}

    with small_config(algo, loss=bare, **training).build() as built, pytest.raises(LossError, match=message):
        for _ in range(3):
            built.train()


def test_a_run_is_a_checkpoint_and_a_folder_of_runs_names_them(algorithm: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        algorithm.fit(
            stop={"training_iteration": algorithm.training_iteration + 1}, run_dir=tmp_path / name, progress=False
        )
    with PPO.from_checkpoint(tmp_path / "second") as restored:
        assert restored.training_iteration == algorithm.training_iteration
    with pytest.raises(CheckpointError, match="holds the runs first, second: name one of them"):
        load_policy(tmp_path)
