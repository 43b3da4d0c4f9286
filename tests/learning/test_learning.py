"""PPO learns what it should, over several seeds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral import PPOConfig
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.registry import config_from_dict
from corral.testing import IDENTITY_ACTION_SPACES, IdentityEnv, TimeLimitCorridor
from corral.tools.cli.experiment import read_experiment


def train_to(algorithm: Algorithm, mean_return: float, max_env_steps: int) -> float:
    """Train until the mean return is reached or the env steps are used up; return the best mean return seen."""
    best = -np.inf
    while best < mean_return and algorithm.num_env_steps_sampled_lifetime < max_env_steps:
        best = np.fmax(best, algorithm.train()["env_runners"]["episode_return_mean"])
    return float(best)


def greedy_return(algorithm: Algorithm, num_episodes: int) -> float:
    """Play episodes with the most likely actions and return the mean return."""
    assert algorithm.env_runner is not None
    rollout = algorithm.env_runner.sample(num_episodes=num_episodes, explore=False)
    return float(rollout.rewards[rollout.valid].sum()) / num_episodes


@pytest.mark.slow  # the README trains with this file, with one seed
@pytest.mark.parametrize("seed", range(5))
def test_cartpole_reaches_450_with_the_settings_of_its_file(seed: int) -> None:
    settings = read_experiment(Path("examples/cartpole.yaml"))
    stop = settings.pop("stop")
    with config_from_dict(settings).debugging(seed=seed).build() as algorithm:
        assert train_to(algorithm, stop["episode_return_mean"], 200_000) >= 450


@pytest.mark.slow  # the README's first command is the same run, with one seed
@pytest.mark.parametrize("seed", range(5))
def test_cartpole_reaches_450_with_the_defaults(seed: int) -> None:
    with PPOConfig().environment("CartPole-v1").debugging(seed=seed).build() as algorithm:
        assert train_to(algorithm, 450, 200_000) >= 450


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("action_bounds", ["clip", "squash"])
def test_pendulum_improves_from_minus_1200_to_minus_350(seed: int, action_bounds: str) -> None:
    config = (
        PPOConfig()
        .environment("Pendulum-v1")
        .training(gamma=0.9, lr=1e-3, minibatch_size=256)
        .rl_module(model_config={"action_bounds": action_bounds})
        .debugging(seed=seed)
    )
    with config.build() as algorithm:
        assert greedy_return(algorithm, 20) < -900
        assert train_to(algorithm, -350, 120_000) >= -350


# The names of the spaces that other ones cover; test_algorithm_contract.py has PPO with Discrete actions.
SLOW_SPACES = ("discrete", "box_uneven", "box_unbounded", "discrete_from_minus_2", "multi_binary", "multi_discrete_2d")


@pytest.mark.slow_cases("box")
@pytest.mark.parametrize(
    "space",
    [pytest.param(space, marks=pytest.mark.slow if space in SLOW_SPACES else ()) for space in IDENTITY_ACTION_SPACES],
)
def test_identity_is_solved_in_every_action_space(space: str) -> None:
    config = (
        PPOConfig()
        .environment(IdentityEnv, env_config={"space": space})
        .training(gamma=0.0, lr=3e-3, train_batch_size_per_learner=512, minibatch_size=128)
        .rl_module(model_config={"initial_log_std": -1.0} if space.startswith("box") else {})
        .debugging(seed=1)
    )
    with config.build() as algorithm:
        assert train_to(algorithm, 15.0, 60_000) >= 15.0  # of 16


@pytest.mark.parametrize("autoreset_mode", ["next_step", pytest.param("same_step", marks=pytest.mark.slow)])
def test_time_limit_is_no_termination(autoreset_mode: str) -> None:
    # With reward 1 per step forever, the value is 1 / (1 - gamma) = 10; taken for a termination it would be below 5.
    config = (
        PPOConfig()
        .environment(TimeLimitCorridor)
        .env_runners(autoreset_mode=autoreset_mode)
        .training(gamma=0.9, lr=1e-2, train_batch_size_per_learner=512, minibatch_size=256, num_epochs=8)
        .debugging(seed=0)
    )
    with config.build() as algorithm:
        for _ in range(20):
            algorithm.train()
        value = algorithm.learner_group.values("default_policy", np.ones((1, 1), np.float32))
    assert value == pytest.approx(10, abs=0.5)


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    """Drop what a clock gave, and the config, which holds the seed."""
    dropped = ("timers", "bottleneck", "time_total_s", "runner_group", "config")
    kept = {key: value for key, value in result.items() if key not in dropped}
    kept["env_runners"] = {key: value for key, value in kept["env_runners"].items() if "duration" not in key}
    return kept


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {"num_envs_per_env_runner": 8}),
        ("CartPole-v1", {"num_envs_per_env_runner": 2, "num_env_runners": 2}),
        ("Pendulum-v1", {"num_envs_per_env_runner": 3, "autoreset_mode": "same_step"}),
    ],
)
def test_same_seed_same_results(env: str, settings: dict[str, Any]) -> None:
    def results(seed: int) -> list[str]:
        config = (
            PPOConfig()
            .environment(env)
            .env_runners(**settings)
            .engine("local")
            .training(train_batch_size_per_learner=120, minibatch_size=60, num_epochs=2)
            .debugging(seed=seed)
        )
        with config.build() as algorithm:
            return [repr(without_times(algorithm.train())) for _ in range(3)]

    assert results(7) == results(7)
    assert results(7) != results(8)
