"""The recipes of `docs/from-data-to-env.md`: policies that begin as clones stay good while they learn in the env."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import (
    Algorithm,
    DQNConfig,
    IQLConfig,
    MARWILConfig,
    PPOConfig,
    SACConfig,
    TD3Config,
    evaluate_policy,
)

pytestmark = pytest.mark.slow

SEEDS = range(5000, 5020)
TEACHERS: dict[str, tuple[Any, int]] = {
    "CartPole-v1": (lambda: PPOConfig(), 40_000),
    "Acrobot-v1": (lambda: PPOConfig().training(entropy_coeff=0.01), 80_000),
    "Pendulum-v1": (lambda: SACConfig().training(lr=1e-3), 8_000),
    "InvertedPendulum-v5": (lambda: SACConfig().training(lr=1e-3), 8_000),
}
RECIPES: dict[str, Any] = {
    "DQN": lambda: DQNConfig().training(imitation_coeff=[[0, 3.0], [5000, 0.0]]),
    "SAC": lambda: SACConfig().training(
        imitation_coeff=[[0, 2.0], [2000, 2.0], [6000, 0.2]], initial_alpha=0.1, lr=1e-3, gamma=0.95
    ),
    # Imitation keeps the entropy of Discrete actions below its target, so the temperature must not adapt.
    "SAC of Discrete actions": lambda: RECIPES["SAC"]().training(alpha_lr=0),
    "TD3": lambda: TD3Config().training(imitation_coeff=[[0, 10.0], [2000, 10.0], [6000, 0.2]]),
    # The recorded actions are small parts of their bounds, and so are the squared distances.
    "TD3 of small actions": lambda: TD3Config().training(
        imitation_coeff=[[0, 100.0], [2000, 100.0], [6000, 30.0]], gamma=0.95
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives the recorded episodes of a trained policy of an env."""

    @functools.cache
    def record(env: str) -> Path:
        make_config, num_env_steps = TEACHERS[env]
        path = tmp_path_factory.mktemp("data")
        with make_config().environment(env).debugging(seed=0).build() as teacher:
            while teacher.num_env_steps_sampled_lifetime < num_env_steps:
                teacher.train()
            teacher.record(path, num_episodes=30, explore=False, seed=1)
        return path

    return record


@functools.cache
def random_return(env: str) -> float:
    made, returns = gym.make(env), []
    made.action_space.seed(0)
    for seed in SEEDS:
        made.reset(seed=seed)
        total, is_over = 0.0, False
        while not is_over:
            _, reward, terminated, truncated, _ = made.step(made.action_space.sample())
            total, is_over = total + float(reward), terminated or truncated
        returns.append(total)
    made.close()
    return float(np.mean(returns))


def played(algorithm: Algorithm, env: str) -> float:
    return float(evaluate_policy(algorithm, env, seeds=SEEDS).episode_return_mean)


def assert_stays_good(clone: float, later: list[float], env: str) -> None:
    """Check that no return is below half of the clone's, where 0 is what random actions reach."""
    floor = random_return(env)
    assert clone > floor
    assert min(later) - floor >= 0.5 * (clone - floor), (clone, later)


@pytest.mark.parametrize(
    ("recipe", "env"),
    [
        ("DQN", "CartPole-v1"),
        ("DQN", "Acrobot-v1"),
        ("SAC", "Pendulum-v1"),
        ("SAC of Discrete actions", "CartPole-v1"),
        ("TD3", "Pendulum-v1"),
        ("TD3 of small actions", "InvertedPendulum-v5"),
    ],
)
def test_a_policy_that_imitates_at_first_stays_good_in_the_env(data: Any, recipe: str, env: str) -> None:
    config = RECIPES[recipe]().environment(env).offline_data(input_=data(env)).debugging(seed=0)
    config.training(num_offline_updates=4000, num_updates_per_iteration=4000)
    with config.build() as algorithm:
        algorithm.train()
        assert algorithm.num_env_steps_sampled_lifetime == 0
        clone, later = played(algorithm, env), []
        while algorithm.num_env_steps_sampled_lifetime < 6000:
            algorithm.train()
            later.append(played(algorithm, env))
    assert_stays_good(clone, later, env)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_ppo_stays_good_with_the_policy_and_the_values_of_a_clone(data: Any, env: str, tmp_path: Path) -> None:
    config = MARWILConfig().environment(env).offline_data(input_=data(env)).training(beta=0.0).debugging(seed=0)
    with config.build() as cloning:
        for _ in range(5):
            cloning.train()
        clone, path = played(cloning, env), cloning.save(tmp_path / "clone")
    later = []
    ppo = PPOConfig().environment(env).rl_module(load_from=path).training(lr=3e-5).debugging(seed=0)
    with ppo.build() as algorithm:
        for _ in range(10):
            algorithm.train()
            later.append(played(algorithm, env))
    assert_stays_good(clone, later, env)


def test_iql_gets_better_in_the_env_than_its_data(tmp_path: Path) -> None:
    """The episodes are of a policy at a third of the largest return, 500."""
    with PPOConfig().environment("CartPole-v1").debugging(seed=0).build() as teacher:
        while played(teacher, "CartPole-v1") < 150:
            teacher.train()
        teacher.record(tmp_path, num_episodes=50, explore=True, seed=1)
    config = IQLConfig().environment("CartPole-v1").offline_data(input_=tmp_path).debugging(seed=0)
    config.training(num_offline_updates=2000, num_updates_per_iteration=2000, lr=1e-3)
    with config.build() as algorithm:
        algorithm.train()
        before, later = played(algorithm, "CartPole-v1"), []
        while algorithm.num_env_steps_sampled_lifetime < 10_000:
            algorithm.train()
            later.append(played(algorithm, "CartPole-v1"))
    assert_stays_good(before, later, "CartPole-v1")
    assert max(later[-3:]) >= min(450.0, 1.5 * before), (before, later)
