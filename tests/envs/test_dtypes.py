"""Dtypes between env and module: floats arrive as float32, actions in the dtype of the action space."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import DQNConfig, PPOConfig, SACConfig
from corral.core.spaces import module_observation_space
from corral.errors import EnvError, ObservationError
from corral.modules.module import ActorCritic
from handmade import MakeRunner

DOUBLE = spaces.Box(-1.0, 1.0, (3,), np.float64)
NESTED = spaces.Dict({"half": spaces.Box(-1, 1, (2,), np.float16), "double": DOUBLE, "on": spaces.MultiBinary(2)})
try:
    INT32 = spaces.Discrete(3, start=2, dtype=np.int32)
except TypeError:  # Gymnasium 1.1 knows Discrete spaces of int64 only
    INT32 = spaces.Discrete(3, start=2)
ACTION_SPACES = {
    "discrete": INT32,
    "multi_discrete": spaces.MultiDiscrete([2, 3], dtype=np.int32, start=[-1, 4]),
    "multi_binary": spaces.MultiBinary(2),
    "box": spaces.Box(-1, 1, (2,), np.float64),
    "scalar": spaces.Box(-1, 1, ()),
}


class Strict(gym.Env[Any, Any]):
    """Refuses actions of another dtype than its action space; observations are random, of dtype `returns` if given."""

    def __init__(self, config: Any) -> None:
        self.observation_space, self.action_space = config["observation_space"], config["action_space"]
        self.returns = config.get("returns")

    def obs(self) -> Any:
        obs = self.observation_space.sample()
        return obs if self.returns is None else obs.astype(self.returns)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        space = self.action_space
        if action.dtype != space.dtype or not space.contains(space.dtype.type(action)[...]):
            raise TypeError(f"{action!r} of {action.dtype} is not in {space} of {space.dtype}")
        return self.obs(), 0.0, bool(self.np_random.random() < 0.2), False, {}


class Torch(ActorCritic):
    """A policy that torch computes, not NumPy, and that no dtype but float32 passes."""

    def policy(self, obs: Any) -> torch.Tensor:
        assert obs.dtype == torch.float32
        return super().policy(obs)


def small(cls: Any, observation_space: Any, action_space: Any, **runners: Any) -> Any:
    config = cls(seed=1).environment(
        Strict, env_config={"observation_space": observation_space, "action_space": action_space}
    )
    config.env_runners(**{"num_envs_per_env_runner": 2, **runners}).rl_module(model_config={"fcnet_hiddens": [8]})
    if cls is PPOConfig:
        return config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1)
    return config.training(num_steps_sampled_before_learning_starts=8, train_batch_size_per_learner=8).reporting(
        min_sample_timesteps_per_iteration=24
    )


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("cls", "actions"),
    [(PPOConfig, name) for name in ACTION_SPACES]
    + [(DQNConfig, "discrete"), (SACConfig, "discrete"), (SACConfig, "box"), (SACConfig, "scalar")],
)
def test_actions_have_the_dtype_of_the_space(cls: Any, actions: str, vectorization: str) -> None:
    space = ACTION_SPACES[actions]
    with small(cls, DOUBLE, space, vectorization=vectorization).build() as algo:
        algo.train()
        for explore in (False, True):
            assert algo.compute_single_action(DOUBLE.sample(), explore=explore).dtype == space.dtype
            batch = algo.compute_actions(np.stack([DOUBLE.sample()] * 3), explore=explore)
            assert batch.shape == (3, *space.shape) and batch.dtype == space.dtype


def test_floats_of_any_size_are_float32_in_columns_and_keep_their_bounds(make_runner: MakeRunner) -> None:
    runner = make_runner(Strict, env_config={"observation_space": NESTED, "action_space": ACTION_SPACES["discrete"]})
    rollout = runner.sample(num_timesteps=5)
    assert {key: column.dtype.name for key, column in rollout.obs.items()} == {
        "half": "float32",
        "double": "float32",
        "on": "int8",
    }
    assert runner.module.observation_space == rollout.observation_space == module_observation_space(NESTED)
    assert rollout.observation_space["double"] == spaces.Box(-1.0, 1.0, (3,), np.float32)
    huge = module_observation_space(spaces.Box(-np.finfo(np.float64).max, 1.0, (1,), np.float64))
    assert np.isneginf(huge.low).all()  # type: ignore[attr-defined]


def test_a_module_in_torch_gets_float32() -> None:
    config = small(PPOConfig, DOUBLE, ACTION_SPACES["discrete"]).rl_module(module_class=Torch)
    with config.build() as algo:
        algo.train()
        algo.compute_single_action(DOUBLE.sample())


@pytest.mark.parametrize("cls", [DQNConfig, SACConfig])
def test_replay_holds_float32_and_a_checkpoint_continues(cls: Any, tmp_path: Path) -> None:
    with small(cls, DOUBLE, ACTION_SPACES["discrete"]).build() as algo:
        algo.train()
        assert algo.local_replay_buffer.sample(4)["obs"].dtype == np.float32
        algo.save(tmp_path / "checkpoint")
        obs = DOUBLE.sample()
        action = algo.compute_single_action(obs, explore=False)
    with small(cls, DOUBLE, ACTION_SPACES["discrete"]).build() as restored:
        restored.restore_from_path(tmp_path / "checkpoint")
        assert restored.compute_single_action(obs, explore=False) == action
        restored.train()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_doubles_of_a_float32_space_are_cast_with_one_warning(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture, vectorization: str
) -> None:
    class Sloppy(Strict):  # a name of its own: the warning comes once in a process
        pass

    Sloppy.__name__ = f"Sloppy_{vectorization}"
    space = spaces.Box(-1, 1, (3,), np.float32)
    env_config = {"observation_space": space, "action_space": ACTION_SPACES["discrete"], "returns": np.float64}
    with caplog.at_level(logging.WARNING, "corral"):
        for _ in range(2):
            runner = make_runner(Sloppy, num_envs=2, vectorization=vectorization, env_config=env_config)
            assert runner.sample(num_timesteps=9).obs.dtype == np.float32
    told = [record.getMessage() for record in caplog.records if Sloppy.__name__ in record.getMessage()]
    assert len(told) == 1
    assert "observation must have dtype float32, got float64" in told[0] and "cast" in told[0]


BYTES = np.array([0, 255])


class Bytes(gym.Env[Any, Any]):
    """Returns integers of NumPy's own dtype where its space has bytes; its third step fails."""

    observation_space: Any = spaces.Dict({"screen": spaces.Box(0, 255, (2,), np.uint8)})
    action_space: Any = spaces.Discrete(2)
    t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return {"screen": BYTES}, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == 3:
            raise OSError("the simulator is gone")
        return {"screen": BYTES}, 0.0, False, False, {}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_integers_whose_values_fit_are_cast_in_a_dict_too(make_runner: MakeRunner, vectorization: str) -> None:
    runner = make_runner(Bytes, num_envs=2, vectorization=vectorization, restart_failed_sub_environments=True)
    screens = runner.sample(num_timesteps=9).obs["screen"]
    assert runner.num_sub_env_restarts > 0
    assert screens.dtype == np.uint8 and (screens == BYTES).all()


class ManyBytes(gym.vector.VectorEnv[Any, Any, Any]):
    """Returns such integers for two sub-envs, and other ones in a later reset."""

    num_envs, metadata = 2, {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Box(0, 255, (2,), np.uint8)
    single_action_space = spaces.Discrete(2)
    later: Any = np.array([BYTES, BYTES])

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return (self.later if seed is None else np.array([BYTES, BYTES])), {}

    def step(self, actions: Any) -> Any:
        return np.array([BYTES, BYTES]), np.zeros(2), np.zeros(2, np.bool_), np.zeros(2, np.bool_), {}


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_integers_of_a_vector_env_are_not_wrapped_around(make_runner: MakeRunner, dtype: Any) -> None:
    space = spaces.Box(0, 120 if dtype == np.int8 else 255, (2,), dtype)
    last = int(np.iinfo(dtype).max)

    class Vector(gym.vector.VectorEnv[Any, Any, Any]):
        metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        single_observation_space, single_action_space, num_envs = space, spaces.Discrete(2), 2

        def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            self.t = last - 3
            return np.full((2, 2), self.t), {}

        def step(self, actions: Any) -> Any:
            self.t += 1
            no = np.zeros(2, bool)
            return np.full((2, 2), self.t), np.zeros(2), no, no, {}

    runner = make_runner(lambda config: Vector(), num_envs=None)
    assert runner.sample(num_timesteps=6).obs[:, 0, 0].tolist() == list(range(last - 3, last + 1))
    with pytest.raises(EnvError, match=rf"must be integers of {np.dtype(dtype)}, got int64 from {last + 1} to"):
        runner.sample(num_timesteps=2)


@pytest.mark.parametrize("later", [np.array([BYTES, BYTES]) + 1, np.array([BYTES])])
def test_observations_of_a_later_reset_that_do_not_fit_are_refused_with_the_env(
    make_runner: MakeRunner, later: Any
) -> None:
    class Late(ManyBytes):
        pass

    Late.later = later
    runner = make_runner(lambda: Late(), num_envs=None)
    runner.sample(num_timesteps=4)
    with pytest.raises(EnvError, match=r"env '<lambda>', step 2: raised in reset\(\): \w+: .*(shape|uint8)"):
        runner.sample(num_timesteps=4, force_reset=True)


@pytest.mark.parametrize("cls", [PPOConfig, DQNConfig, SACConfig])
def test_a_wrong_observation_for_an_action_is_named(cls: Any) -> None:
    nested = spaces.Dict({"a": DOUBLE, "b": spaces.Discrete(3)})
    with small(cls, nested, ACTION_SPACES["discrete"]).build() as algo:
        good = {"a": np.zeros(3), "b": 1}
        algo.compute_single_action(good)
        algo.compute_actions({"a": np.zeros((2, 3)), "b": np.array([0, 2])})
        for wrong, message in [
            (good | {"a": np.zeros(4)}, r"observation/a must have shape \(3,\), got \(4,\)"),
            (good | {"a": np.zeros((1, 3))}, r"got \(1, 3\) .*compute_actions takes a batch"),
            (good | {"a": np.array([0, np.nan, 0])}, "observation/a holds NaN"),
            (good | {"a": np.array([0, np.inf, 0])}, "observation/a holds NaN or infinity"),
            (good | {"a": None}, "observation/a must have"),
            (good | {"a": ["x", "y", "z"]}, "observation/a must have dtype float32"),
            (good | {"b": 3}, "observation/b is outside"),
            (good | {"b": 0.5}, "observation/b must have dtype int64"),
            ({"a": np.zeros(3)}, r"dict with keys \['a', 'b'\], got keys \['a'\]"),
            (good | {"c": 1}, "got keys"),
            (np.zeros(3), "must be a dict"),
        ]:
            with pytest.raises(ObservationError, match=message):
                algo.compute_single_action(wrong)
        for wrong, message in [
            (good, r"observation/a must have shape"),
            ({"a": np.zeros((2, 3)), "b": np.array([0])}, r"observation/b must have shape \(2,\), got \(1,\)"),
            ({"a": np.full((2, 3), np.nan), "b": np.array([0, 0])}, "NaN"),
        ]:
            with pytest.raises(ObservationError, match=message):
                algo.compute_actions(wrong)
