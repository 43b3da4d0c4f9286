"""Callbacks of episode events receive the sub-env in which their episode is played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from at_least import all_of
from corral import Callback, PPOConfig
from corral.errors import ConfigError
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv
from faulty import TroubleEnv
from handmade import MakeRunner

EVENTS = ("created", "start", "step", "end")


class OwnState(Callback):
    """Compares the episode with the state of its sub-env."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, bool]] = []

    def note(self, event: str, episode: Any, sub_environment: Any, env_index: int) -> None:
        agrees = np.allclose(sub_environment.unwrapped.state, episode.get_observations(-1))
        self.seen.append((event, env_index, agrees))

    def on_episode_start(self, *, episode: Any, sub_environment: Any, env_index: int, **kwargs: Any) -> None:
        self.note("start", episode, sub_environment, env_index)

    def on_episode_step(self, *, episode: Any, sub_environment: Any, env_index: int, **kwargs: Any) -> None:
        self.note("step", episode, sub_environment, env_index)

    def on_episode_end(self, *, episode: Any, sub_environment: Any, env_index: int, **kwargs: Any) -> None:
        self.note("end", episode, sub_environment, env_index)


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_each_of_16_sub_envs_is_the_one_of_its_episode(num_env_runners: int) -> None:
    own = OwnState()
    config = PPOConfig().environment("CartPole-v1").engine(engine_name="local")
    config = config.env_runners(num_envs_per_env_runner=16, num_env_runners=num_env_runners)
    config = config.training(train_batch_size_per_learner=1600, num_epochs=1).callbacks(own).debugging(seed=0)
    with config.build() as algo:
        algo.train()
    assert {env_index for _, env_index, _ in own.seen} == set(range(16))
    assert {event for event, _, _ in own.seen} == {"start", "step", "end"}
    assert all_of(agrees for _, _, agrees in own.seen)


def takes_it(seen: list[Any]) -> dict[str, Callable[..., None]]:
    def noting(event: str) -> Callable[..., None]:
        return lambda sub_environment, env_index: seen.append((event, env_index, sub_environment))

    return {f"on_episode_{event}": noting(event) for event in EVENTS}


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_replaced_sub_env_is_the_one_of_the_episodes_that_follow(make_runner: MakeRunner, mode: str) -> None:
    seen: list[Any] = []
    runner = make_runner(
        TroubleEnv,
        num_envs=2,
        env_config={"counts": {}, "step_faults": [2], "reset_faults": [3], "episode_length": 3, "vector_index": 1},
        autoreset_mode=mode,
        disable_env_checking=True,
        restart_failed_sub_environments=True,
        **takes_it(seen),
    )
    made = [runner.env.envs[1]]  # type: ignore[attr-defined]
    for _ in range(8):
        runner.sample(num_timesteps=2)
        if made[-1] is not (now := runner.env.envs[1]):  # type: ignore[attr-defined]
            made.append(now)
    assert len(made) == 3  # one failed in step, one in reset
    events = [(event, made.index(env)) for event, env_index, env in seen if env_index == 1]
    first = [("created", 0), ("start", 0), ("step", 0), ("created", 1), ("start", 1)]
    # The reset that fails comes after on_episode_created, or with the step that ends the episode before.
    created = ("created", 1 if mode == "next_step" else 2)
    second = [("step", 1), ("step", 1), ("step", 1), ("end", 1), created, ("start", 2), ("step", 2)]
    assert events[: len(first + second)] == first + second
    assert {env for _, env_index, env in seen if env_index == 0} == {runner.env.envs[0]}  # type: ignore[attr-defined]


def test_a_new_vector_env_and_a_restored_runner_give_their_own_sub_envs(make_runner: MakeRunner) -> None:
    seen: list[Any] = []
    runner, other = (make_runner(CountingEnv, num_envs=2, **takes_it(seen)) for _ in range(2))
    runner.sample(num_timesteps=4)
    other.set_state(runner.get_state())
    for changed in (other, runner):
        if changed is runner:
            runner.make_env()
        seen.clear()
        changed.sample(num_timesteps=2)
        assert {id(env) for _, _, env in seen} == {id(env) for env in changed.env.envs}  # type: ignore[attr-defined]


def cartpole(**settings: Any) -> PPOConfig:
    return PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2, **settings)


class Names(Callback):
    def on_episode_step(self, *, sub_environment: Any, **kwargs: Any) -> None: ...


class TakesAll(Callback):
    sub_envs: list[Any]

    def __init__(self) -> None:
        self.sub_envs = []

    def on_episode_step(self, **kwargs: Any) -> None:
        self.sub_envs.append(kwargs["sub_environment"])


@pytest.mark.parametrize(
    ("callbacks", "kind"),
    [
        ({"callbacks_class": Names}, "SyncVectorEnv"),
        ({"callbacks_class": Names()}, "SyncVectorEnv"),
        ({"on_episode_end": lambda sub_environment, **kwargs: None}, "SyncVectorEnv"),
        ({"on_episode_created": lambda episode, sub_environment=None: None}, "SyncVectorEnv"),
        ({"on_episode_end": lambda **kwargs: None}, "CartPoleVectorEnv"),
        ({"on_episode_end": lambda env, env_index: None}, "CartPoleVectorEnv"),
    ],
)
def test_auto_steps_sub_envs_one_by_one_for_a_callback_that_names_them(callbacks: Any, kind: str) -> None:
    runner = EnvRunner(cartpole().callbacks(**callbacks))
    assert type(runner.env.unwrapped).__name__ == kind
    runner.stop()


@pytest.mark.parametrize("vectorization", ["auto", "async"])
def test_a_callback_that_takes_all_arguments_gets_none_where_there_is_no_sub_env(
    make_runner: MakeRunner, vectorization: str
) -> None:
    callback = TakesAll()
    runner = make_runner("CartPole-v1", num_envs=2, vectorization=vectorization, callbacks_class=callback)
    runner.sample(num_timesteps=4)
    assert callback.sub_envs == [None] * 4


def test_async_is_refused_for_a_callback_that_names_them() -> None:
    for callbacks in ({"callbacks_class": Names}, {"on_episode_start": lambda sub_environment: None}):
        with pytest.raises(ConfigError, match=r"vectorization='async'.*on_episode_st.*sub_environment"):
            cartpole(vectorization="async").callbacks(**callbacks).validate()  # type: ignore[arg-type]
    cartpole(vectorization="async").callbacks(TakesAll).validate()


def test_a_vector_env_without_them_says_so(caplog: pytest.LogCaptureFixture) -> None:
    native = PPOConfig().environment(lambda: CartPoleVectorEnv(num_envs=2), disable_env_checking=True)
    EnvRunner(native.callbacks(Names)).stop()
    assert "sub_environment is None" in caplog.text


@pytest.mark.parametrize(
    ("vectorization", "remedy"),
    [("auto", r"CartPole-v1.*vectorization='sync'.*sub_environment"), ("async", r"foreach_env")],
)
def test_the_envs_of_a_vector_env_without_them_say_what_to_do(
    make_runner: MakeRunner, vectorization: str, remedy: str
) -> None:
    env = make_runner("CartPole-v1", num_envs=2, vectorization=vectorization).env
    assert not hasattr(env, "envs")
    with pytest.raises(AttributeError, match=remedy):
        env.envs  # type: ignore[attr-defined]  # noqa: B018
    if vectorization == "auto":
        assert isinstance(env, CartPoleVectorEnv)
        env.envs = 3  # type: ignore[attr-defined]  # an env's own attribute counts
        assert env.envs == 3  # type: ignore[attr-defined]
    assert not hasattr(CartPoleVectorEnv, "envs")
