"""Thompson sampling and upper confidence bounds: the posterior in closed form, and who has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explorers import FOUR, STATE, Explorer, SamplingConfig, rollout_of
from gymnasium import spaces

from corral.testing import IdentityEnv

KINDS = ["ThompsonSampling", "UpperConfidenceBound"]


def data(seed: int = 0, rows: int = 50, envs: int = 4) -> Any:
    rng = np.random.default_rng(seed)
    obs = rng.uniform(-1, 1, (rows + 1, envs, 3)).astype(np.float32)
    arms, rewards = rng.integers(0, 3, (rows, envs)), rng.normal(size=(rows, envs))
    return rollout_of(obs, arms, valid=rng.random((rows, envs)) < 0.8), rewards  # the last arm is never taken


def learned(kind: str, **settings: Any) -> tuple[Explorer, Any, Any, Any]:
    explorer = Explorer(kind, **settings)
    xs, arms, ys = [], [], []
    for seed in range(2):
        rollout, rewards = data(seed)
        rollout.rewards = rewards
        explorer.exploration.learn([rollout], timestep=0)
        xs.append(rollout.obs[:-1][rollout.valid])
        arms.append(rollout.actions[rollout.valid])
        ys.append(rewards[rollout.valid])
    x = np.concatenate(xs)
    return explorer, np.concatenate([x, np.ones((len(x), 1))], -1), np.concatenate(arms), np.concatenate(ys)


def ridge(x: Any, y: Any, lambda_: float) -> tuple[Any, Any]:
    covariance = np.linalg.inv(lambda_ * np.eye(4) + x.T @ x)
    return covariance @ x.T @ y, covariance


@pytest.mark.parametrize("kind", KINDS)
def test_the_posterior_is_ridge_regression(kind: str) -> None:
    explorer, x, arms, y = learned(kind, lambda_=2.0)
    for arm in range(4):
        weights, covariance = ridge(x[arms == arm], y[arms == arm], 2.0)
        assert explorer.exploration.weights[arm] == pytest.approx(weights)
        assert explorer.exploration.covariance[arm] == pytest.approx(covariance)
    assert np.all(explorer.exploration.weights[3] == 0)


def queries() -> tuple[Any, Any]:
    obs = np.random.default_rng(5).uniform(-1, 1, (6, 3)).astype(np.float32)
    return obs, np.concatenate([obs, np.ones((6, 1))], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_square_below_zero_by_rounding_hides_no_arm(kind: str) -> None:
    bandit = Explorer(kind).exploration
    bandit.covariance[0] = -1e-9 * np.eye(4)
    deviations = bandit.deviations(queries()[1])
    assert np.all(deviations[:, 0] == 0) and np.all(deviations[:, 1:] > 0)


def test_thompson_sampling_draws_from_the_posterior() -> None:
    explorer, x, arms, y = learned("ThompsonSampling", alpha=0.7)
    _, features = queries()
    rng = np.random.default_rng(0)
    drawn = np.array([explorer.exploration.scores(features, rng) for _ in range(20_000)])
    for arm in range(4):
        weights, covariance = ridge(x[arms == arm], y[arms == arm], 1.0)
        by_weights = rng.multivariate_normal(weights, 0.49 * covariance, 20_000) @ features.T
        assert drawn[:, :, arm].mean(0) == pytest.approx(features @ weights, abs=0.03)
        assert drawn[:, :, arm].std(0) == pytest.approx(by_weights.std(0), rel=0.03)


def test_the_upper_bound_matches_linucb() -> None:
    explorer, x, arms, y = learned("UpperConfidenceBound", alpha=0.7)
    obs, features = queries()
    expected = np.empty((6, 4))
    for arm in range(4):
        weights, covariance = ridge(x[arms == arm], y[arms == arm], 1.0)
        expected[:, arm] = features @ weights + 0.7 * np.sqrt(np.diag(features @ covariance @ features.T))
    assert explorer.exploration.scores(features, np.random.default_rng(0)) == pytest.approx(expected)
    assert np.array_equal(explorer.choose(np.zeros((6, 4)), obs=obs)[0], expected.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_without_exploring_the_arm_of_the_best_expected_reward_is_taken(kind: str) -> None:
    explorer, *_ = learned(kind, alpha=100.0)
    obs, features = queries()
    best = (features @ explorer.exploration.weights.T).argmax(-1)
    for _ in range(20):
        assert np.array_equal(explorer.choose(np.zeros((6, 4)), obs=obs, explore=False)[0], best)
    assert not np.array_equal(explorer.choose(np.zeros((6, 4)), obs=obs)[0], best)


@pytest.mark.parametrize("kind", KINDS)
def test_an_alpha_of_zero_is_greedy(kind: str) -> None:
    explorer, *_ = learned(kind, alpha=0.0)
    obs, features = queries()
    best = (features @ explorer.exploration.weights.T).argmax(-1)
    assert np.array_equal(explorer.choose(np.zeros((6, 4)), obs=obs)[0], best)


def test_untried_arms_are_chosen_equally_often() -> None:
    explorer = Explorer("UpperConfidenceBound")
    arms, _ = explorer.choose(np.zeros((8000, 4)), obs=np.zeros((8000, 3), np.float32))
    assert np.bincount(arms) / 8000 == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    ("space", "obs", "expected"),
    [
        (spaces.Discrete(3, start=5), [5, 7], [[1, 0, 0, 1], [0, 0, 1, 1]]),
        (spaces.MultiDiscrete([2, 3]), [[1, 0], [0, 2]], [[0, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1]]),
        (spaces.MultiBinary(2), [[1, 0], [1, 1]], [[1, 0, 1], [1, 1, 1]]),
        (spaces.Box(0, 255, (1, 2), np.uint8), [[[255, 0]], [[51, 102]]], [[1, 0, 1], [0.2, 0.4, 1]]),
        (spaces.Dict(b=spaces.Discrete(2), a=STATE), {"a": [[1, 2, 3]], "b": [1]}, [[0, 1, 1, 2, 3, 1]]),
    ],
)
def test_features(space: spaces.Space[Any], obs: Any, expected: Any) -> None:
    explorer = Explorer("ThompsonSampling", observation_space=space)
    arrays = {k: np.asarray(v) for k, v in obs.items()} if isinstance(obs, dict) else np.asarray(obs, space.dtype)
    assert explorer.exploration.features(arrays) == pytest.approx(np.array(expected, float))


def config_of(kind: str) -> SamplingConfig:
    config = SamplingConfig().environment(IdentityEnv, env_config={"episode_length": 1}).debugging(seed=0)
    return config.exploration(exploration_config={"type": kind}).training(train_batch_size_per_learner=64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_posterior_reaches_the_runner_though_no_learner_took_a_step(kind: str) -> None:
    with config_of(kind).build() as algo:
        for _ in range(3):
            result = algo.train()
            runner: Any = algo.env_runner
            assert np.array_equal(runner.exploration.precision, algo.exploration.precision)  # type: ignore[attr-defined]
        assert algo.learner_group.weights_version == 0
        assert result["exploration"]["bandit_squared_error"] >= 0
        assert runner.exploration.precision.sum() > 3 * 64
        assert runner.exploration.sums.sum() > 0
        assert [algo.compute_single_action(obs, explore=False) for obs in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_the_posterior(kind: str, tmp_path: Path) -> None:
    with config_of(kind).build() as algo, config_of(kind).build() as other:
        for _ in range(2):
            algo.train()
        assert algo.env_runner.exploration.get_state() == {}  # type: ignore[union-attr]
        other.restore_from_path(algo.save(tmp_path / "checkpoint"))
        for exploration in (other.exploration, other.env_runner.exploration):  # type: ignore[union-attr]
            assert np.array_equal(exploration.weights, algo.exploration.weights)  # type: ignore[attr-defined]
    assert FOUR.n == other.exploration.num_arms  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_only_restored_can_be_saved_again(kind: str, tmp_path: Path) -> None:
    with config_of(kind).build() as algo, config_of(kind).build() as second, config_of(kind).build() as third:
        algo.train()
        second.restore_from_path(algo.save(tmp_path / "first"))
        third.restore_from_path(second.save(tmp_path / "second"))
        assert np.array_equal(third.exploration.weights, algo.exploration.weights)  # type: ignore[attr-defined]
        assert np.array_equal(third.env_runner.exploration.weights, algo.exploration.weights)  # type: ignore


@pytest.mark.slow
def test_runners_in_processes_get_the_posterior() -> None:
    config = config_of("UpperConfidenceBound").env_runners(num_env_runners=2).engine("process")
    with config.build() as algo:
        for _ in range(2):
            algo.train()
        found = algo.env_runner_group.foreach_env_runner(lambda runner: runner.exploration.precision)
        assert len(found) == 2
        assert all(np.array_equal(precision, algo.exploration.precision) for precision in found)  # type: ignore[attr-defined]
