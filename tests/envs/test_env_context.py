"""What the factory of an env is called with: the `EnvContext`, or the keys of `env_config` by name."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

from corral import EnvContext, PPOConfig
from corral.testing import CountingEnv


def make(factory: Any, env_config: dict[str, Any], **settings: Any) -> None:
    PPOConfig().environment(factory, env_config=env_config).env_runners(**settings).build().stop()


@pytest.mark.parametrize("env_config", [{}, {"level": 3}])
def test_a_constructor_gets_the_context_whatever_its_parameter_is_called(env_config: dict[str, Any]) -> None:
    seen: list[Any] = []

    def annotated(options: EnvContext | None = None) -> gym.Env[Any, Any]:
        seen.append(options)
        return CountingEnv()

    def defaulted(settings: Any = {}) -> gym.Env[Any, Any]:  # noqa: B006
        seen.append(settings)
        return CountingEnv()

    def required(world: Any) -> gym.Env[Any, Any]:
        seen.append(world)
        return CountingEnv()

    for factory in (annotated, defaulted, required):
        seen.clear()
        make(factory, env_config)
        assert all(isinstance(each, EnvContext) and each == env_config and each.worker_index == 0 for each in seen)


def test_a_context_comes_with_the_other_required_arguments() -> None:
    seen: list[Any] = []

    def two(world: Any, level: int) -> gym.Env[Any, Any]:
        seen.append((world, level))
        return CountingEnv()

    make(two, {"level": 3})
    assert isinstance(seen[0][0], EnvContext) and seen[0][1] == 3


def test_a_constructor_that_takes_the_keys_gets_them_by_name() -> None:
    seen: list[Any] = []

    def by_name(size: int = 1, seed: int | None = None) -> gym.Env[Any, Any]:
        seen.append((size, seed))
        return CountingEnv()

    make(by_name, {"size": 4})
    make(by_name, {})
    assert set(seen) == {(4, None), (1, None)}


def test_a_context_says_whether_sub_envs_have_processes() -> None:
    seen: list[bool] = []
    for vectorization in ("sync", "async"):
        config = PPOConfig().environment("CartPole-v1").env_runners(vectorization=vectorization)
        config.callbacks(on_environment_created=lambda env_context: seen.append(env_context.remote)).build().stop()
    assert seen == [False, True]
