"""What the check at start says about envs that are not what their spaces say."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral.envs.checks import check_env
from corral.envs.vector import EnvContext, make_vector_env
from corral.errors import EnvError
from corral.testing import CountingEnv

BOX = spaces.Box(-1, 1, (2,), np.float32)
OBS = np.zeros(2, np.float32)
DICT = spaces.Dict({"a": BOX, "b": spaces.Tuple((spaces.Discrete(3), BOX))})


class BrokenEnv(gym.Env[Any, Any]):
    """Right in everything but what it is told to give."""

    def __init__(self, **given: Any) -> None:
        for name in ("observation_space", "action_space"):
            space = given.get(name, {"observation_space": BOX, "action_space": spaces.Discrete(2)}[name])
            if space is not None:
                setattr(self, name, space)
        obs = given.get("obs", OBS)
        self._reset = given.get("reset", (given.get("reset_obs", obs), given.get("reset_info", {})))
        self._step = given.get(
            "step",
            (
                obs,
                given.get("reward", 1.0),
                given.get("terminated", False),
                given.get("truncated", False),
                given.get("info", {}),
            ),
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._reset

    def step(self, action: Any) -> Any:
        if isinstance(self._step, Exception):
            raise self._step
        return self._step


MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no observation space": ({"observation_space": None}, ["observation_space must be a gymnasium space"]),
    "no action space": ({"action_space": None}, ["action_space must be a gymnasium space"]),
    "a space of another kind": (
        {"observation_space": spaces.Text(3)},
        ["unsupported observation space Text", "at observation_space;"],
    ),
    "a nested space of another kind": (
        {"observation_space": spaces.Dict({"a": spaces.Tuple((BOX, spaces.Text(3)))})},
        ["unsupported observation space Text", "observation_space/a/1"],
    ),
    "a text in a Dict action space": (
        {"action_space": spaces.Dict({"move": spaces.Text(2)})},
        ["unsupported action space Text", "at action_space/move", "use Discrete, MultiDiscrete, MultiBinary, a float"],
    ),
    "an integer Box action space": ({"action_space": spaces.Box(0, 5, (2,), np.int32)}, ["unsupported action space"]),
    "shape in reset": ({"reset_obs": np.zeros(3, np.float32)}, ["observation must have shape (2,), got (3,)", "reset"]),
    "shape in step": (
        {"obs": np.zeros((2, 1), np.float32), "reset_obs": OBS},
        ["observation must have shape (2,), got (2, 1)", "step"],
    ),
    "dtype": (
        {"obs": np.zeros(2, np.complex64)},
        ["observation must have dtype float32, got complex64", ".astype(float32)"],
    ),
    "object": ({"obs": None}, ["observation"]),
    "ragged": ({"obs": [[1.0], [1.0, 2.0]]}, ["observation must be an array"]),
    "NaN": ({"obs": np.array([0, np.nan], np.float32)}, ["observation holds NaN or infinity"]),
    "beyond float32": ({"obs": np.array([0.0, 1e39])}, ["observation holds a number that is too large for float32"]),
    "outside Discrete": ({"observation_space": spaces.Discrete(3), "obs": 3}, ["observation is outside Discrete(3)"]),
    "float for Discrete": (
        {"observation_space": spaces.Discrete(3), "obs": 1.5},
        ["observation must have dtype int64"],
    ),
    "missing key": (
        {"observation_space": DICT, "obs": {"a": OBS}},
        ["observation must be a dict with keys ['a', 'b'], got keys ['a']"],
    ),
    "no dict": ({"observation_space": DICT, "obs": OBS}, ["observation must be a dict", "got ndarray"]),
    "short tuple": (
        {"observation_space": DICT, "obs": {"a": OBS, "b": (1,)}},
        ["observation/b must be a tuple of 2"],
    ),
    "nested dtype": (
        {"observation_space": DICT, "obs": {"a": OBS, "b": (1, np.zeros(2, np.complex64))}},
        ["observation/b/1 must have dtype float32, got complex64"],
    ),
    "reward is an array": ({"reward": np.ones(2)}, ["reward from step() must be one number, got ndarray"]),
    "reward is text": ({"reward": "1"}, ["reward from step() must be one number, got str '1'"]),
    "reward is None": ({"reward": None}, ["reward from step() must be one number, got NoneType"]),
    "terminated is a number": ({"terminated": 1}, ["terminated from step() must be a bool, got int 1"]),
    "truncated is None": ({"truncated": None}, ["truncated from step() must be a bool, got NoneType"]),
    "info of reset": ({"reset_info": None}, ["info from reset() must be a dict, got NoneType"]),
    "info of step": ({"info": [1]}, ["info from step() must be a dict, got list"]),
    "reset without info": ({"reset": OBS}, ["reset() must return (observation, info), got ndarray"]),
    "step of old Gym": (
        {"step": (OBS, 1.0, False, {})},
        ["step() must return (observation, reward, terminated, truncated, info), got tuple"],
    ),
}


@pytest.mark.parametrize(("given", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_an_error_that_names_env_and_field(given: dict[str, Any], words: list[str]) -> None:
    def broken_env() -> BrokenEnv:
        return BrokenEnv(**given)

    with pytest.raises(EnvError) as caught:
        make_vector_env(broken_env, EnvContext({}), num_envs=1)
    for word in ["env 'broken_env'", *words]:
        assert word in str(caught.value)


def test_what_an_env_raises_is_chained() -> None:
    problem = KeyError("no such joint")
    with pytest.raises(
        EnvError, match=r"env 'Broken' raised in its first step\(\): KeyError: 'no such joint'"
    ) as caught:
        check_env(BrokenEnv(step=problem), "Broken")
    assert caught.value.__cause__ is problem


GOOD: dict[str, dict[str, Any]] = {
    "as declared": {},
    "numpy scalars": {"reward": np.float32(1), "terminated": np.True_, "truncated": np.False_},
    "integer reward": {"reward": 1},
    "reward in a 0-d array": {"reward": np.array(1.0)},
    "plain list": {"obs": [0.0, 0.5]},
    "narrower dtype": {"obs": np.zeros(2, np.float16)},
    "narrower integer": {"observation_space": spaces.Discrete(3), "obs": np.int32(2)},
    "python integer": {"observation_space": spaces.Discrete(3, start=-1), "obs": -1},
    "nested": {"observation_space": DICT, "obs": {"b": (2, OBS), "a": OBS}},
    "over the bounds of a Box": {"obs": np.full(2, 1.5, np.float32)},
}


@pytest.mark.parametrize("given", GOOD.values(), ids=GOOD)
def test_correct_envs_pass_the_checks(given: dict[str, Any]) -> None:
    check_env(BrokenEnv(**given), "Fine")
    env = make_vector_env(lambda: BrokenEnv(**given), EnvContext({}), num_envs=2)
    env.reset(seed=0)
    assert env.step(np.zeros(2, int))[1].tolist() == [1, 1]
    env.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("check", [False, True])
def test_precision_is_cut_to_the_precision_of_the_space(vectorization: str, nested: bool, check: bool) -> None:
    given: dict[str, Any] = {"obs": np.full(2, 0.1)}
    if nested:
        given = {"obs": {"a": np.full(2, 0.1)}, "observation_space": spaces.Dict({"a": BOX})}
    env = make_vector_env(
        lambda: BrokenEnv(**given), EnvContext({}), num_envs=2, vectorization=vectorization, check=check
    )
    obs, _ = env.reset()
    column = obs["a"] if nested else obs
    assert column.dtype == np.float32
    assert column.tolist() == [[np.float32(0.1)] * 2] * 2
    env.close()


class BrokenVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """A ready vector env whose columns have a shape or dtype that is not theirs."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    num_envs = 2
    single_observation_space: Any = BOX
    single_action_space: Any = spaces.Discrete(2)
    observation_space: Any = spaces.Box(-1, 1, (2, 2), np.float32)
    action_space: Any = spaces.MultiDiscrete([2, 2])

    def __init__(self, field: str, value: Any) -> None:
        self._given = {"obs": np.zeros((2, 2), np.float32), "rewards": np.zeros(2), "terminated": np.zeros(2, bool)}
        self._given[field] = value

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((2, 2), np.float32), {}

    def step(self, actions: Any) -> Any:
        return self._given["obs"], self._given["rewards"], self._given["terminated"], np.zeros(2, bool), {}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("obs", np.zeros((2, 3), np.float32), r"observation must have shape \(2, 2\), got \(2, 3\)"),
        ("rewards", np.zeros((2, 1)), r"rewards from step\(\) must have shape \(2,\), got \(2, 1\)"),
        ("terminated", False, r"terminated from step\(\) must have shape \(2,\), got \(\)"),
    ],
)
def test_a_ready_vector_env_is_checked_too(field: str, value: Any, words: str) -> None:
    def broken_vector() -> BrokenVectorEnv:
        return BrokenVectorEnv(field, value)

    with pytest.raises(EnvError, match=rf"env 'broken_vector': {words}"):
        make_vector_env(broken_vector, EnvContext({}), num_envs=None)


class Counted(gym.Wrapper[Any, Any, Any, Any]):
    """Counts resets and steps, as wrappers that record videos or statistics do, and how many of its kind are open."""

    num_open = 0

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.num_resets = self.num_steps = 0
        Counted.num_open += 1

    def reset(self, **kwargs: Any) -> Any:
        self.num_resets += 1
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        return super().step(action)

    def close(self) -> None:
        Counted.num_open -= 1
        super().close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_check_leaves_no_step_in_any_sub_env(vectorization: str, num_envs: int) -> None:
    Counted.num_open = 0
    made = make_vector_env(
        CountingEnv, EnvContext({}), num_envs=num_envs, vectorization=vectorization, wrappers=[Counted]
    )
    try:
        assert made.get_attr("num_resets") == made.get_attr("num_steps") == (0,) * num_envs
        assert Counted.num_open == (num_envs if vectorization == "sync" else 0)
        made.reset(seed=0)
        made.step(np.zeros(num_envs, np.int64))
        assert made.get_attr("num_resets") == made.get_attr("num_steps") == (1,) * num_envs
    finally:
        made.close()
    assert Counted.num_open == 0


def test_nor_in_a_vector_env_of_a_factory() -> None:
    def factory(env_config: EnvContext) -> Any:
        return gym.vector.SyncVectorEnv([lambda: Counted(CountingEnv())] * 2)

    made = make_vector_env(factory, EnvContext({}), num_envs=None)
    assert made.get_attr("num_steps") == (0, 0)
    made.close()


def test_the_check_draws_nothing_from_the_action_space_of_the_env() -> None:
    env, same = BrokenEnv(action_space=spaces.Discrete(1000, seed=3)), spaces.Discrete(1000, seed=3)
    check_env(env, "BrokenEnv")
    assert [env.action_space.sample() for _ in range(5)] == [same.sample() for _ in range(5)]


@pytest.mark.parametrize(
    ("offset", "dtype", "warns"), [(1e8, np.float64, True), (1e8, np.float32, True), (1e5, np.float64, False)]
)
def test_observations_that_float32_cannot_tell_apart_warn(
    offset: float, dtype: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Timestamps(gym.Env[Any, Any]):
        observation_space = spaces.Box(-np.inf, np.inf, (2,), dtype)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return np.array([offset, -1.0], dtype), {}

        def step(self, action: Any) -> Any:
            return np.array([offset, 0.0], dtype), 0.0, False, False, {}

    check_env(Timestamps(), f"Timestamps{offset}{np.dtype(dtype)}")
    assert ("only in steps of 8" in caplog.text) is warns
