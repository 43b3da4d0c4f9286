"""One env object behind a factory: refused where several would step it, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.wrappers import TimeLimit

from corral import PPOConfig, evaluate_policy, make_multi_agent
from corral.envs.torch_envs import TorchCartPole
from corral.errors import ConfigError
from corral.testing import CountingEnv
from small import small

REMEDY = r"Make a new env in each call, as in lambda env_config: gymnasium.make\('CartPole-v1'\)"


def config(env: Any, num_envs: int | None = None, **settings: Any) -> PPOConfig:
    return small(env, num_envs_per_env_runner=num_envs, **settings)


@pytest.fixture
def cart_pole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


@pytest.mark.parametrize("vectorization", ["auto", "sync"])
def test_sub_envs_that_are_one_object_are_refused(vectorization: str, cart_pole: Any) -> None:
    for factory in (lambda ctx: cart_pole, lambda: cart_pole, lambda ctx: TimeLimit(cart_pole, 20)):
        with pytest.raises(ConfigError, match=f"same env object again.* {REMEDY}"):
            config(factory, 4, vectorization=vectorization).build()
    with pytest.raises(ConfigError, match=REMEDY):
        config(lambda ctx: cart_pole, 2).environment(wrappers=[lambda env: TimeLimit(env, 20)]).build()


def test_an_env_without_an_id_is_named_by_its_class() -> None:
    env = CountingEnv()
    with pytest.raises(ConfigError, match=r"as in lambda env_config: CountingEnv\(\.\.\.\)"):
        config(lambda ctx: env, 2).build()


def test_evaluation_and_training_cannot_have_one_env(cart_pole: Any) -> None:
    made = config(lambda ctx: cart_pole, 1).evaluation(evaluation_interval=1, evaluation_duration=2)
    with pytest.raises(ConfigError, match=f"in use in this process already.* {REMEDY}"):
        made.evaluation(evaluation_config={"num_envs_per_env_runner": 1}).build()


def vector_env() -> Any:
    return gym.vector.SyncVectorEnv([CountingEnv] * 4)


def always(made: Any) -> Callable[[], Any]:
    return lambda: made


def around_one_sub_env() -> Callable[[], Any]:
    sub_env = CountingEnv()
    return lambda: gym.vector.SyncVectorEnv([lambda: sub_env])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: always(vector_env()), id="vector_env"),
        pytest.param(lambda: always(gym.wrappers.vector.ClipReward(vector_env(), 0, 1)), id="wrapped"),
        pytest.param(around_one_sub_env, id="sub_env"),
        pytest.param(lambda: always(TorchCartPole(4)), id="tensors"),
    ],
)
def test_evaluation_and_training_cannot_have_one_vector_env(make: Any) -> None:
    """Not even after the check at build has closed it: the factory returned it again."""
    factory = make()
    for _ in range(2):
        with pytest.raises(ConfigError, match="in use in this process already"):
            config(factory).evaluation(evaluation_interval=1, evaluation_duration=2).build()
    with config(factory).build() as algo, pytest.raises(ConfigError, match="in use in this process already"):
        evaluate_policy(algo, factory, episodes=1)


def test_sub_envs_of_a_vector_env_that_are_one_object_are_refused() -> None:
    env = CountingEnv()
    with pytest.raises(ConfigError, match="two sub-envs of its vector env are the same object"):
        config(lambda: gym.vector.SyncVectorEnv([lambda: env] * 2)).build()


def test_an_env_of_an_open_algorithm_cannot_be_evaluated_in(cart_pole: Any) -> None:
    with config(lambda ctx: cart_pole, 1).build() as algo:
        with pytest.raises(ConfigError, match="in use in this process already"):
            evaluate_policy(algo, lambda: cart_pole, episodes=1)
        assert algo.train()["env_runners"]["episode_len_mean"] > 5  # it was neither closed nor reset
    assert len(evaluate_policy(lambda obs: 0, cart_pole, episodes=2).episode_returns) == 2


def test_evaluate_policy_says_that_it_takes_the_env_itself(cart_pole: Any) -> None:
    with config("CartPole-v1", 2).build() as algo:
        with pytest.raises(ConfigError, match=r"evaluate_policy\(policy, env\)"):
            evaluate_policy(algo, lambda: cart_pole, episodes=4)
        assert len(evaluate_policy(algo, cart_pole, episodes=4).episode_returns) == 4


def test_agents_need_envs_of_their_own(cart_pole: Any) -> None:
    copies = make_multi_agent(lambda ctx: cart_pole)
    made = config(copies, 1).multi_agent(policies={"main"}).environment(env_config={"num_agents": 2})
    with pytest.raises(ConfigError, match=REMEDY):
        made.build()


def test_one_sub_env_alone_may_be_one_object_and_be_built_again_after_it_was_closed(cart_pole: Any) -> None:
    for _ in range(2):
        with config(lambda ctx: cart_pole, 1).build() as algo:
            assert algo.train()["env_runners"]["episode_len_mean"] > 5


def test_an_env_that_is_made_already_is_refused_with_what_to_write(cart_pole: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"factory, got TimeLimit.*write \.environment\(lambda env_config: gymnasium.make\('CartPole-v1'\)\)",
    ):
        config(cart_pole, 2).build()
