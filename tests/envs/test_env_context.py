"""What the factory of an env is called with: the `EnvContext`, or the keys of `env_config` by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest

import corral
from at_least import all_of
from corral import EnvContext, PPOConfig
from corral.envs.env_arguments import call_factory, check_env_config
from corral.envs.torch_envs import TorchCartPole
from corral.errors import ConfigError, EnvError
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
        assert all_of(isinstance(each, EnvContext) and each == env_config and each.worker_index == 0 for each in seen)


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
        config = PPOConfig().environment("CartPole-v1")
        config.env_runners(vectorization=vectorization, num_envs_per_env_runner=2)
        config.callbacks(on_environment_created=lambda env_context: seen.append(env_context.remote)).build().stop()
    assert seen == [False, True]


class Line(gym.Env[Any, Any]):
    """An env whose parameters all have defaults; it keeps what it was called with."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def __init__(self, length: int = 5, render_mode: str | None = None) -> None:
        self.given = {"length": length}


class Positional(Line):
    def __init__(self, length=5, width=3, /, *, height=1) -> None:  # type: ignore[no-untyped-def]
        self.given = {"length": length, "width": width, "height": height}


class Keywords(Line):
    def __init__(self, length: int = 5, **others: Any) -> None:
        self.given = {"length": length, **others}


class Required(Line):
    def __init__(self, length, width=3) -> None:  # type: ignore[no-untyped-def]
        self.given = {"length": length, "width": width}


class Short(Line):
    def __init__(self, c=None) -> None:  # type: ignore[no-untyped-def]
        self.given = {"c": c}


class Constants(Line):
    def __init__(self, c=3.0, g=9.8) -> None:  # type: ignore[no-untyped-def]
        self.given = {"c": c, "g": g}


class Both(Line):
    def __init__(self, config=None, length=5) -> None:  # type: ignore[no-untyped-def]
        self.given = {"config": config, "length": length}


class Batch(Line):
    def __init__(self, num_envs: int, device: str) -> None:
        self.given = {"num_envs": num_envs, "device": device}


class Star(Line):
    def __init__(self, *args: Any) -> None:
        self.given = {"args": args}


LENGTH = {"length": 7}


@pytest.mark.parametrize(
    ("factory", "env_config", "given"),
    [
        (Line, LENGTH, LENGTH),
        (Line, {}, {"length": 5}),
        (Positional, {"width": 4, "height": 2}, {"length": 5, "width": 4, "height": 2}),
        (Keywords, {**LENGTH, "depth": 2}, {**LENGTH, "depth": 2}),
        (Required, {**LENGTH, "width": 1}, {**LENGTH, "width": 1}),
        (Required, {"depth": 2}, {"length": {"depth": 2}, "width": 3}),  # RLlib's form: one required parameter
        (Short, LENGTH, {"c": LENGTH}),
        (Short, {}, {"c": {}}),
        (Constants, {"g": 1.6}, {"c": 3.0, "g": 1.6}),
        (lambda config="easy", length=5: Line(length), LENGTH, LENGTH),
        (Both, LENGTH, {"config": LENGTH, "length": 7}),
        (Star, LENGTH, {"args": (LENGTH,)}),
        (Batch, {}, {"num_envs": 4, "device": "cuda"}),
        (Batch, {"device": "cpu"}, {"num_envs": 4, "device": "cpu"}),
        (partial(Line, render_mode="human"), LENGTH, LENGTH),
        (partial(Required, 4), {"width": 2}, {"length": 4, "width": 2}),
        (partial(Both, config={"a": 1}), LENGTH, {"config": {"a": 1}, "length": 7}),
        (lambda length: Line(length), LENGTH, LENGTH),
        (lambda **given: Line(**given), LENGTH, LENGTH),
        (lambda _env_config: Line(**_env_config), LENGTH, LENGTH),
    ],
)
def test_what_an_env_is_called_with(factory: Any, env_config: dict[str, Any], given: dict[str, Any]) -> None:
    check_env_config(factory, env_config, "Line")
    of_runner = {"num_envs": 4, "device": "cuda"}
    assert call_factory(factory, EnvContext(env_config), "Line", of_batch=lambda: of_runner).given == given


def make_required(length: int) -> Line:
    return Line(length)


@pytest.mark.parametrize(
    ("factory", "key", "message"),
    [
        (Line, "longth", r"its parameters are length, render_mode\. Did you mean 'length'\?$"),
        (Line, "colour", r"its parameters are length, render_mode\. To receive the whole env_config, call"),
        (Required, "longth", r"its parameters are length, width\. Did you mean 'length'\?$"),
        (make_required, "depth", r"its parameters are length\."),  # an int is no env_config
        (Positional, "heights", r"Did you mean 'height'\?$"),
        (partial(Line, render_mode="human"), "longth", r"Did you mean 'length'\?$"),
        (partial(Required, 4), "widths", r"its parameters are width\. Did you mean 'width'\?$"),
        (lambda: Line(), "length", r"it has no parameters\.$"),
        (lambda **given: Line(**given), "longth", r"Line.__init__\(\) has no such parameter"),
        (corral.make_multi_agent(Line), "longth", r"Did you mean 'length'\?$"),
        (TorchCartPole, "num_env", r"Did you mean 'num_envs'\?$"),
        ("CartPole-v1", "sutton_barto_rewrd", r"Did you mean 'sutton_barto_reward'\?$"),
        ("CartPole-v1", "max_episode_step", r"Did you mean 'max_episode_steps'\?$"),
    ],
)
@pytest.mark.parametrize("num_envs", [1, 2])  # with two sub-envs, ids have a native vector env
def test_a_key_that_the_env_does_not_take_is_refused(factory: Any, key: str, message: str, num_envs: int) -> None:
    config = PPOConfig().environment(factory, env_config={key: 7}).env_runners(num_envs_per_env_runner=num_envs)
    if getattr(factory, "copied_env", None):
        config.multi_agent(policies={"main"})
    with pytest.raises(ConfigError, match=rf"env_config\['{key}'\] does not apply to env .*: .*{message}"):
        config.build()


class PassesOn(Line):
    def __init__(self, width: int = 5) -> None:
        make_required(width=width)  # type: ignore[call-arg]


@pytest.mark.parametrize("env", [PassesOn, "PassesOn-v0"])
def test_what_refuses_a_parameter_inside_the_env_is_named(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gym.registry, "PassesOn-v0", gym.envs.registration.EnvSpec("PassesOn-v0", PassesOn))
    with pytest.raises(EnvError, match=r"\{'width': 7\}: TypeError: make_required\(\) got an unexpected keyword"):
        make(env, {"width": 7})
    with pytest.raises(ConfigError, match=r"its parameters are width(, max_episode_steps)?\."):  # not of `Line`
        make(env, {"length": 7})


def test_wrong_keys_are_known_before_anything_starts() -> None:
    config = PPOConfig().environment(Line, env_config={"longth": 7}).env_runners(num_env_runners=2)
    with pytest.raises(ConfigError, match="Did you mean 'length'"):
        config.validate()
    with pytest.raises(ConfigError, match="'make' needs 'length' and 'width', which env_config"):
        check_env_config(lambda length, width, depth: Line(), {"depth": 2}, "make")
    config = PPOConfig().environment(Line).evaluation(evaluation_interval=1, evaluation_config={"env_config": {"x": 1}})
    with pytest.raises(ConfigError, match=r"env_config\['x'\] does not apply to env 'Line'"):
        config.validate()


def test_a_key_that_kwargs_take_may_be_a_mistake(caplog: pytest.LogCaptureFixture) -> None:
    def counting(length: int = 5, **others: Any) -> CountingEnv:
        return CountingEnv()

    make(counting, {"longth": 7}, num_envs_per_env_runner=3)
    text = "env 'counting' receives env_config['longth'] in its **kwargs. Did you mean its parameter 'length'?"
    assert [record.getMessage() for record in caplog.records] == [text]
    caplog.clear()
    call_factory(Keywords, EnvContext({**LENGTH, "depth": 7}), "Keywords")
    assert not caplog.records


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_what_the_checked_env_takes_out_of_a_nested_setting_is_there_for_the_first_one(vectorization: str) -> None:
    class TakesOut(CountingEnv):
        def __init__(self, config: Any) -> None:
            super().__init__({"episode_length": config["episode"].pop("length", 100)})

    config = PPOConfig().environment(TakesOut, env_config={"episode": {"length": 1}})
    config.env_runners(num_envs_per_env_runner=1, vectorization=vectorization)
    with config.build() as algo:
        assert algo.env_runner is not None
        assert algo.env_runner.sample(num_timesteps=4).terminated.sum() == 4
        assert algo.config.env_config == {"episode": {"length": 1}}  # of which evaluation and checkpoints have copies
