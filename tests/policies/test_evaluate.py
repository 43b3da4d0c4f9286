"""Returns, lengths and intervals of policies, against envs whose returns are known."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from corral import Policy, PolicyEvaluation, PPOConfig, evaluate_policy, load_policy
from corral.errors import ConfigError, EnvError, ObservationError
from corral.modules.module import ActorCritic
from corral.policies.evaluate import student_t_quantile
from corral.testing import CountingEnv, IdentityEnv

TWO = spaces.Discrete(2)


def make_policy(observation_space: Any = CountingEnv.observation_space, action_space: Any = TWO) -> Policy:
    return Policy(ActorCritic(observation_space, action_space, {}))


# Degrees of freedom and the 97.5% quantile, from the tables of Fisher and Yates.
@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.70620474), (2, 4.30265273), (3, 3.18244631), (4, 2.77644511), (9, 2.26215716), (30, 2.04227246),
     (99, 1.98421695), (120, 1.97993041), (10_000, 1.96020124)],
)  # fmt: skip
def test_quantiles_of_students_t(degrees: int, quantile: float) -> None:
    assert student_t_quantile(0.975, degrees) == pytest.approx(quantile, rel=1e-7)


def test_the_interval_is_the_textbook_one() -> None:
    found = PolicyEvaluation((1.0, 2.0, 3.0, 6.0), (10, 20, 30, 60))
    assert found.episode_return_mean == 3.0
    assert found.episode_return_std == pytest.approx(math.sqrt(14 / 3))
    half = 3.18244631 * math.sqrt(14 / 3) / 2
    assert found.episode_return_interval == pytest.approx((3 - half, 3 + half))
    assert found.to_dict()["episode_len_mean"] == 30.0
    assert "3.00" in str(found)


def test_the_interval_covers_the_mean_in_95_of_100_evaluations() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for returns in rng.normal(7.0, 3.0, (2000, 5)):
        low, high = PolicyEvaluation(tuple(returns), (1,) * 5).episode_return_interval
        covered += low <= 7.0 <= high
    assert abs(covered / 2000 - 0.95) < 0.015  # three standard errors


def test_one_episode_has_no_deviation() -> None:
    found = evaluate_policy(make_policy(), CountingEnv, episodes=1)
    assert math.isnan(found.episode_return_std)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["episode_return_interval"] is None
    assert "two episodes" in str(found)


# The sub-env with index i plays episodes of 3 + i steps, with rewards 1, 2, 3, ...
@pytest.mark.parametrize("num_envs", [1, 2, 4])
def test_each_sub_env_plays_its_share(num_envs: int) -> None:
    found = evaluate_policy(
        make_policy(), CountingEnv, episodes=7, num_envs=num_envs, env_config={"stagger": True, "episode_length": 3}
    )
    expected = [3 + k % num_envs for k in range(7)]
    assert list(found.episode_lens) == expected
    assert list(found.episode_returns) == [length * (length + 1) / 2 for length in expected]


class SameStepVector(gym.vector.SyncVectorEnv):
    """Two `CountingEnv` with episodes of 3 and 5 steps, which are reset in the step that ends an episode."""

    def __init__(self) -> None:
        makes = [lambda length=length: CountingEnv({"episode_length": length}) for length in (3, 5)]
        super().__init__(makes, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("env", [SameStepVector, SameStepVector()], ids=["class", "instance"])
def test_a_vector_env_with_same_step_autoreset(env: Any) -> None:
    found = evaluate_policy(make_policy(), env, episodes=4)
    assert found.episode_lens == (3, 5, 3, 5)
    assert found.episode_returns == (6.0, 15.0, 6.0, 15.0)


class Watched(CountingEnv):
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_an_env_of_the_caller_stays_open() -> None:
    env = Watched()
    assert evaluate_policy(make_policy(), env, episodes=2).episode_lens == (3, 3)
    assert env.closed == 0
    with pytest.raises(ConfigError, match="num_envs do not apply"):
        evaluate_policy(make_policy(), env, num_envs=2)


def test_a_function_gets_one_observation_and_wrappers_apply() -> None:
    seen = []

    def act(obs: Any) -> Any:
        seen.append(obs)
        return obs

    config = {"space": "multi_discrete", "episode_length": 4}
    found = evaluate_policy(act, IdentityEnv, episodes=3, env_config=config)
    assert found.episode_returns == (4.0, 4.0, 4.0)
    assert {obs.shape for obs in seen} == {IdentityEnv(config).observation_space.shape}

    def doubled(env: Any) -> Any:
        return gym.wrappers.TransformReward(env, lambda reward: 2 * reward)

    found = evaluate_policy(act, IdentityEnv, episodes=1, env_config=config, wrappers=[doubled])
    assert found.episode_returns == (8.0,)


def test_the_seed_decides_and_native_vector_envs_are_used() -> None:
    policy = make_policy(gym.make("CartPole-v1").observation_space)
    first, again, other = (evaluate_policy(policy, "CartPole-v1", episodes=12, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def test_an_algorithm_is_evaluated_by_the_learners_weights(tmp_path: Path) -> None:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=0)
    with config.training(train_batch_size_per_learner=256, num_epochs=1).build() as algorithm:
        algorithm.train()
        found = evaluate_policy(algorithm, "CartPole-v1", episodes=4)
        assert found == evaluate_policy(load_policy(algorithm.save(tmp_path / "saved")), "CartPole-v1", episodes=4)
        act = partial(algorithm.compute_single_action, explore=False)
        assert evaluate_policy(act, "CartPole-v1", episodes=1) == evaluate_policy(algorithm, "CartPole-v1", episodes=1)
    with pytest.raises(ConfigError, match="observations of"):
        evaluate_policy(algorithm, "Pendulum-v1")


class Endless(CountingEnv):
    """An episode that never ends, or rewards of NaN."""

    def __init__(self, config: Any) -> None:
        super().__init__({"episode_length": config.get("episode_length", 10**9)})
        self.reward = config.get("reward")

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, reward if self.reward is None else self.reward, *rest


def test_what_cannot_be_evaluated_is_named() -> None:
    policy = make_policy()
    with pytest.raises(EnvError, match=r"Endless.*not ended after 50 steps.*TimeLimit"):
        evaluate_policy(policy, Endless, episodes=2, max_episode_steps=50)
    with pytest.raises(EnvError, match=r"rewards .* not all finite"):
        evaluate_policy(policy, Endless, episodes=2, env_config={"reward": math.nan, "episode_length": 3})
    with pytest.raises(ConfigError, match=r"observations of Box\(-1.0.*CartPole-v1.*Box\(\[-4.8"):
        evaluate_policy(policy, "CartPole-v1")
    with pytest.raises(ConfigError, match=r"actions of Discrete\(3\).*takes Discrete\(2\)"):
        evaluate_policy(make_policy(action_space=spaces.Discrete(3)), CountingEnv)
    for settings in ({"episodes": 0}, {"max_episode_steps": 0}, {"num_envs": -1}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            evaluate_policy(policy, CountingEnv, **settings)
    with pytest.raises(ConfigError, match="no policy"):
        evaluate_policy("CartPole-v1", CountingEnv)  # type: ignore[arg-type]


class Broken(CountingEnv):
    """Raises in the third step of an episode, or shows NaN there."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.raises = config["raises"]

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        if obs[1] == 2 and self.raises:
            raise RuntimeError("the motor is hot")
        return np.where(obs[1] == 2, np.nan, obs).astype(np.float32), *rest


def test_errors_of_the_env_name_the_env_and_the_step() -> None:
    with pytest.raises(EnvError, match=r"Broken.*step 1: raised in step\(\): RuntimeError: the motor is hot"):
        evaluate_policy(make_policy(), Broken, env_config={"raises": True})
    with pytest.raises(ObservationError, match="NaN"):
        evaluate_policy(make_policy(), Broken, env_config={"raises": False})


def test_statistics_of_training_that_are_missing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    wrappers = [gym.wrappers.NormalizeObservation, gym.wrappers.NormalizeReward]
    evaluate_policy(make_policy(), CountingEnv, episodes=1, wrappers=wrappers)
    assert "NormalizeReward and NormalizeObservation begins without the statistics of training" in caplog.text
    caplog.clear()
    evaluate_policy(make_policy(), wrappers[0](CountingEnv()), episodes=1)  # by who made the env
    evaluate_policy(make_policy(), CountingEnv, episodes=1)
    assert not caplog.text
