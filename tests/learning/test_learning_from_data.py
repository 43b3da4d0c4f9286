"""BC clones trained policies from 50 recorded episodes, and MARWIL finds the good half of mixed data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import Algorithm, BCConfig, IQLConfig, MARWILConfig, evaluate_policy
from corral.algorithms.registry import config_from_dict
from corral.algorithms.tuned_settings import tuned_settings
from corral.offline.episode_rows import EpisodeRows, rows_of_steps
from corral.offline.sources import open_source

pytestmark = pytest.mark.slow

SEEDS = range(5000, 5100)
TEACHERS = {"CartPole-v1": ("PPO", 100_000), "Pendulum-v1": ("SAC", 10_000)}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """By env, 50 recorded episodes of a trained policy, and its mean return from `SEEDS`."""
    found = {}
    for env, (algo, num_env_steps) in TEACHERS.items():
        settings = tuned_settings(env, algo)
        del settings["stop"]
        path = tmp_path_factory.mktemp(algo)
        with config_from_dict(settings).debugging(seed=0).build() as teacher:
            while teacher.num_env_steps_sampled_lifetime < num_env_steps:
                teacher.train()
            teacher.record(path, num_episodes=50, explore=False, seed=1)
            found[env] = path, mean_return(teacher, env)
    return found


def mean_return(algorithm: Algorithm, env: str) -> float:
    return float(evaluate_policy(algorithm, env, seeds=SEEDS).episode_return_mean)


def learned(config: Any, env: str, num_iterations: int) -> float:
    with config.build() as algorithm:
        for _ in range(num_iterations):
            algorithm.train()
        return mean_return(algorithm, env)


@pytest.mark.parametrize(("env", "num_iterations"), [("CartPole-v1", 3), ("Pendulum-v1", 12)])
@pytest.mark.parametrize("seed", range(5))
def test_a_clone_is_within_2_percent_of_its_teacher(
    recorded: dict[str, tuple[Path, float]], env: str, num_iterations: int, seed: int
) -> None:
    """A clone of Pendulum's teacher needs its layers and tanh, for actions at the bounds, and a rate that falls."""
    path, teacher = recorded[env]
    config = BCConfig().offline_data(input_=path).debugging(seed=seed)
    if env == "Pendulum-v1":
        config.rl_module(model_config={"fcnet_hiddens": [256, 256], "action_bounds": "squash"})
        config.training(lr=[[0, 1e-3], [num_iterations * 256_000, 1e-5]])
    assert learned(config, env, num_iterations) >= teacher - 0.02 * abs(teacher)


def random_episodes(env: str, num_episodes: int) -> EpisodeRows:
    made, columns = gym.make(env), {name: list[Any]() for name in ("obs", "actions", "rewards", "ends", "next_obs")}
    made.action_space.seed(0)
    for seed in range(num_episodes):
        obs, _ = made.reset(seed=seed)
        is_over = False
        while not is_over:
            action = made.action_space.sample()
            after, reward, terminated, truncated, _ = made.step(action)
            is_over = terminated or truncated
            for name, value in zip(columns, (obs, action, reward, is_over, after), strict=True):
                columns[name].append(value)
            obs = after
    made.close()
    stacked = {name: np.array(values) for name, values in columns.items()}
    ends = stacked.pop("ends")
    return rows_of_steps(**stacked, terminated=np.zeros(len(ends), np.bool_), truncated=ends)


@pytest.mark.parametrize("algo", ["MARWIL", "IQL"])
@pytest.mark.parametrize("seed", range(5))
def test_the_good_half_of_mixed_data_is_imitated(recorded: dict[str, tuple[Path, float]], seed: int, algo: str) -> None:
    """Returns of Pendulum are negative, so what counts is how far a policy comes from the random one."""
    path, _ = recorded["Pendulum-v1"]
    bad = random_episodes("Pendulum-v1", 50)

    def mixed() -> Iterator[EpisodeRows]:
        yield bad
        yield from open_source(str(path)).parts()

    config = MARWILConfig() if algo == "MARWIL" else IQLConfig().training(lr=1e-3, num_updates_per_iteration=1000)
    config.training(gamma=0.95)
    cloned, weighted = (
        learned(each.environment("Pendulum-v1").offline_data(input_=mixed).debugging(seed=seed), "Pendulum-v1", 5)
        for each in (BCConfig(), config)
    )
    at_random = float(bad.returns().mean())
    assert weighted - at_random >= 1.5 * (cloned - at_random)
    assert weighted - at_random >= 500
