"""Returns, lengths and intervals of policies, against envs whose returns are known."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from corral import Policy, PolicyEvaluation, PPOConfig, evaluate_policy, load_policy
from corral.errors import ConfigError, EnvError, EnvTimeoutError, ObservationError
from corral.modules.module import ActorCritic
from corral.runners.evaluation.statistics import summarize_episodes
from corral.testing import CountingEnv, FaultyEnv, IdentityEnv

TWO = spaces.Discrete(2)


def make_policy(observation_space: Any = CountingEnv.observation_space, action_space: Any = TWO) -> Policy:
    torch.manual_seed(0)
    return Policy(ActorCritic(observation_space, action_space, {}))


def test_the_statistics_match_evaluation_during_training() -> None:
    found = PolicyEvaluation((1.0, 2.0, 3.0, 6.0, 8.0), (10, 20, 30, 60, 80))
    expected = summarize_episodes(found.episode_returns, found.episode_lens)
    assert {name: value for name, value in found.to_dict().items() if name in expected} == expected
    low, high = found.episode_return_interval
    assert (low, high) == (expected["episode_return_interval_low"], expected["episode_return_interval_high"])
    assert (found.episode_return_mean, found.episode_return_median, found.episode_len_mean) == (4.0, 3.0, 40.0)
    assert found.episode_return_iqm == pytest.approx(11 / 3)
    assert found.episode_return_std == pytest.approx(math.sqrt(34 / 4))
    lines = dict(line.split("  ", maxsplit=1) for line in str(found).splitlines())
    assert lines["interquartile mean"].strip() == "3.67"
    assert lines["95% interval"].strip() == f"{low:.2f} to {high:.2f} (bootstrap)"


def test_what_one_episode_does_not_have_is_null_in_json() -> None:
    found = evaluate_policy(make_policy(), CountingEnv, episodes=1)
    assert math.isnan(found.episode_return_std)
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (written["episode_return_std"], written["episode_return_interval_low"]) == (None, None)
    assert "needs five episodes" in str(found)
    assert "needs two episodes" in str(found)


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


class Nested(CountingEnv):
    """Env whose actions are pairs of a number and a vector."""

    action_space: Any = spaces.Tuple((spaces.Discrete(3), spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float32))))

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return super().step(0)


def test_a_function_may_return_actions_of_several_parts() -> None:
    def act(obs: Any) -> Any:
        return 2, {"x": np.ones(2, np.float32)}

    found = evaluate_policy(act, Nested, episodes=3, num_envs=2, env_config={"episode_length": 4})
    assert found.episode_lens == (4, 4, 4)
    with pytest.raises(ConfigError, match=r"evaluate_policy: .* returned 2, which is no action of Tuple\("):
        evaluate_policy(lambda obs: 2, Nested, episodes=1)


def test_the_seed_decides_and_native_vector_envs_are_used() -> None:
    policy = make_policy(gym.make("CartPole-v1").observation_space)
    first, again, other = (evaluate_policy(policy, "CartPole-v1", episodes=12, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_same_seeds_begin_the_same_episodes(num_envs: int) -> None:
    policy = make_policy(gym.make("CartPole-v1").observation_space)
    seeds = [7, 3, 7, 11, 5]
    one_by_one = [evaluate_policy(policy, "CartPole-v1", episodes=1, seed=seed).episode_lens[0] for seed in seeds]
    found = evaluate_policy(policy, "CartPole-v1", seeds=seeds, num_envs=num_envs)
    assert list(found.episode_lens) == one_by_one
    assert evaluate_policy(policy, gym.make("CartPole-v1"), seeds=seeds) == found
    assert len(set(one_by_one)) > 1


def test_seeds_that_cannot_be_used_are_refused() -> None:
    for settings in ({"seeds": []}, {"seeds": [1, 2], "episodes": 3}, {"seeds": [-1]}):
        with pytest.raises(ConfigError, match=r"episodes|at least 0"):
            evaluate_policy(make_policy(), CountingEnv, **settings)  # type: ignore[arg-type]
    for env in (SameStepVector, SameStepVector()):
        with pytest.raises(ConfigError, match="SameStepVector"):
            evaluate_policy(make_policy(), env, seeds=[1])


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


class Stuck(CountingEnv):
    """An env whose sub-env 1 hangs in its fifth step."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.steps_left = 5 if getattr(config, "vector_index", 0) == 1 else -1

    def step(self, action: int) -> Any:
        self.steps_left -= 1
        while self.steps_left == 0:
            time.sleep(0.1)
        return super().step(action)


@pytest.mark.parametrize("env", [FaultyEnv, Stuck])
def test_other_episodes_replace_those_that_a_failure_ended(env: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = evaluate_policy(
        make_policy(),
        env,
        episodes=6,
        num_envs=2,
        env_config={"episode_length": 3},
        env_step_timeout_s=0.3,
        restart_failed_sub_environments=True,
    )
    assert found.episode_lens == (3,) * 6 and found.episode_returns == (6.0,) * 6
    assert "sub-env 1" in caplog.text and "It was restarted" in caplog.text


def test_a_failure_is_an_error_where_nothing_is_restarted() -> None:
    restarted = {"env_step_timeout_s": 0.3, "restart_failed_sub_environments": True}
    short = {"episode_length": 3}
    with pytest.raises(EnvTimeoutError, match=r"sub-env 1, step 5: step\(\) took longer than env_step_timeout_s=0.3"):
        evaluate_policy(make_policy(), Stuck, episodes=4, num_envs=2, env_step_timeout_s=0.3)
    with pytest.raises(EnvError, match="divided by zero"):  # the seeds of its other episodes are lost with a sub-env
        evaluate_policy(make_policy(), FaultyEnv, seeds=range(6), num_envs=2, env_config=short, **restarted)
    breaking = {"at_step": 2, "vector_index": 0, "episode_length": 3}
    with pytest.raises(EnvError, match="divided by zero"):  # it breaks all episodes
        evaluate_policy(make_policy(), FaultyEnv, episodes=1, env_config=breaking, **restarted)
