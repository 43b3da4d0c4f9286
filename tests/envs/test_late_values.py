"""Rewards, flags and infos that are wrong after the first step: the check of the first step holds for every step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from corral import MultiAgentEnv, Policy, evaluate_policy
from corral.envs.seated_env import SeatedEnv
from corral.envs.sync_vector import SyncVectorEnv
from corral.errors import EnvError, SubEnvError
from corral.modules.module import ActorCritic
from corral.testing import CountingEnv
from corral.tools.playing.play import play_episodes
from handmade import MakeRunner

BOX, DISCRETE = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
OBS = np.zeros(2, np.float32)
MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}

FLAGS = ["False", [False], float("nan"), 0.5, np.array([False]), None, 1]
WRONG: list[tuple[str, Any]] = [
    *[(field, value) for field in ("terminated", "truncated") for value in FLAGS],
    *[("reward", value) for value in ("1.5", np.array([1.0]), None, 1j, np.array("1.5"))],
    *[("info", value) for value in (None, "none", [])],
]


class LateEnv(gym.Env[Any, Any]):
    """Episodes of 8 steps, whose fifth step has a wrong field."""

    observation_space: Any = BOX
    action_space: Any = DISCRETE

    def __init__(self, field: str = "", value: Any = None, render_mode: str | None = None) -> None:
        self._field, self._value, self.render_mode = field, value, render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return OBS, {}

    def step(self, action: Any) -> Any:
        self._t += 1
        found = {"obs": OBS, "reward": 1.0, "terminated": False, "truncated": self._t == 8, "info": {}}
        if self._t == 5 and self._field == "step()":
            return self._value
        return tuple((found | ({self._field: self._value} if self._t == 5 else {})).values())

    def render(self) -> Any:
        return np.zeros((32, 32, 3), np.uint8)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("field", "value"), [("terminated", "False"), ("reward", np.array([1.0]))])
def test_vector_envs_of_one_env_each(
    make_runner: MakeRunner, field: str, value: Any, vectorization: str, mode: str
) -> None:
    runner = make_runner(lambda: LateEnv(field, value), num_envs=2, vectorization=vectorization, autoreset_mode=mode)
    with pytest.raises(EnvError, match=rf"sub-env 0, step 4: .*{field} from step\(\) must be .*, got"):
        runner.sample(num_timesteps=20)


@pytest.mark.parametrize(
    ("field", "value"),
    [*WRONG, ("step()", (OBS, 1.0, False, {})), ("step()", [OBS, 1.0, False, False, {}])],
)
def test_every_value_that_does_not_fit(field: str, value: Any) -> None:
    env = SyncVectorEnv([lambda: LateEnv(field, value)])
    env.reset()
    for _ in range(4):
        env.step(np.zeros(1, int))
    with pytest.raises(SubEnvError) as caught:
        env.step(np.zeros(1, int))
    assert caught.value.env_index == 0 and caught.value.problem.startswith(field)


@pytest.mark.parametrize("reward", [2, np.float16(2), np.array(2.0), np.int8(2), True])
def test_numbers_of_all_types_are_rewards(reward: Any) -> None:
    env = SyncVectorEnv([lambda: LateEnv("reward", reward)] * 2)
    env.reset()
    rewards = [env.step(np.zeros(2, int))[1].tolist() for _ in range(5)]
    assert rewards == [[1.0, 1.0]] * 4 + [[float(reward)] * 2]


def test_a_wrong_flag_restarts_the_sub_env_as_an_exception_does(make_runner: MakeRunner) -> None:
    runner = make_runner(
        lambda: LateEnv("terminated", "False"), num_envs=1, vectorization="sync", restart_failed_sub_environments=True
    )
    rollout = runner.sample(num_timesteps=8)
    assert rollout.broken == [(4, 0)] and not rollout.done.any()


class LateVectorEnv(VectorEnv[Any, Any, Any]):
    """A user's own vector env of two sub-envs, whose fifth step has a wrong column."""

    def __init__(self, field: str = "", column: Any = None, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        self.num_envs, self._field, self._column = 2, field, column
        self.single_observation_space, self.single_action_space = BOX, DISCRETE
        self.observation_space, self.action_space = (batch_space(space, 2) for space in (BOX, DISCRETE))
        self.metadata = {"autoreset_mode": mode}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._t = 0
        return np.zeros((2, 2), np.float32), {}

    def step(self, actions: Any) -> Any:
        self._t += 1
        found = {"rewards": np.ones(2), "terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
        if self._t == 5 and self._field:
            found[self._field] = self._column
        return (np.zeros((2, 2), np.float32), *found.values(), {})


COLUMNS: list[tuple[str, Any]] = [
    ("terminated", np.array(["False", "False"])),
    ("terminated", np.array([np.nan, 0.0])),
    ("truncated", np.array([0.5, 0.0])),
    ("truncated", np.array([None, False])),
    ("truncated", np.zeros(1, bool)),
    ("terminated", False),
    ("rewards", np.array(["1.5", "2"])),
    ("rewards", np.ones((2, 1))),
    ("rewards", 1.0),
]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize(("field", "column"), COLUMNS)
def test_vector_envs_of_users(make_runner: MakeRunner, field: str, column: Any, mode: AutoresetMode) -> None:
    def late() -> LateVectorEnv:
        return LateVectorEnv(field, column, mode)

    runner = make_runner(late, num_envs=None)
    with pytest.raises(EnvError, match=rf"env 'late', step 4: .*{field} from step\(\) must"):
        runner.sample(num_timesteps=20)
    with pytest.raises(EnvError, match=rf"env 'LateVectorEnv', step 4: .*{field} from step\(\) must"):
        evaluate_policy(lambda obs: 0, LateVectorEnv(field, column), episodes=2)


def test_numbers_that_are_all_0_or_1_are_flags_of_a_vector_env(make_runner: MakeRunner) -> None:
    runner = make_runner(lambda: LateVectorEnv("terminated", np.array([0.0, 1.0])), num_envs=None)
    rollout = runner.sample(num_timesteps=20)
    assert np.argwhere(rollout.terminated).tolist() == [[4, 1]]


def test_the_first_step_of_a_vector_env_is_checked_as_well(make_runner: MakeRunner) -> None:
    class Early(LateVectorEnv):
        def step(self, actions: Any) -> Any:
            self._t = 4
            return super().step(actions)

    with pytest.raises(EnvError, match=r"env '<lambda>': terminated from step\(\) must be numbers, got <U5"):
        make_runner(lambda: Early("terminated", np.array(["False", "False"])), num_envs=None)


@pytest.mark.parametrize(("field", "value"), [("terminated", "False"), ("reward", "1.5")])
def test_evaluation_of_a_policy(field: str, value: Any) -> None:
    with pytest.raises(EnvError, match=rf"step 4: .*{field} from step\(\) must"):
        evaluate_policy(lambda obs: 0, LateEnv(field, value), episodes=2)


class Pair(MultiAgentEnv):
    """Two agents, whose fifth step has a wrong reward or flag."""

    def __init__(self, field: str, values: dict[Any, Any]) -> None:
        self.possible_agents = self.agents = ["a", "b"]
        self.observation_space, self.action_space = BOX, DISCRETE
        self._field, self._values = field, values

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._t = 0
        return dict.fromkeys("ab", OBS), {}

    def step(self, action_dict: dict[Any, Any]) -> Any:
        self._t += 1
        found: dict[str, Any] = {
            "rewards": dict.fromkeys("ab", 1.0),
            "terminateds": {"__all__": False},
            "truncateds": {"__all__": self._t == 8},
        }
        if self._t == 5:
            found[self._field] = found[self._field] | self._values
        return (dict.fromkeys("ab", OBS), *found.values(), {})


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("terminateds", {"a": "False", "b": "False"}, "terminateds must be bools by agent id"),
        ("truncateds", {"a": float("nan"), "b": False}, "truncateds must be bools by agent id"),
        ("terminateds", {"__all__": 0.5}, "terminateds must be bools by agent id"),
        ("terminateds", {"a": None, "b": None}, "terminateds must be bools by agent id"),
        ("terminateds", {"__all__": 0}, "terminateds must be bools by agent id"),
        ("truncateds", {"a": "", "b": ""}, "truncateds must be bools by agent id"),
        ("rewards", {"a": "1.5"}, "must be one finite number"),
        ("rewards", {"a": np.array([1.0]), "b": np.array([1.0])}, "must be one finite number"),
        ("rewards", {"a": 1j}, "must be one finite number"),
    ],
)
def test_several_agents_and_groups_of_them(field: str, values: dict[Any, Any], words: str, grouped: bool) -> None:
    env: Any = Pair(field, values)
    seated = SeatedEnv(env.with_agent_groups({"g": ["a", "b"]}) if grouped else env)
    seated.reset()
    actions = seated.action_space.sample()
    for _ in range(4):
        seated.step(actions)
    with pytest.raises(EnvError, match=words):
        seated.step(actions)


class LateReset(LateEnv):
    """Episodes of 8 steps; what the second reset and later ones return is wrong."""

    def __init__(self, returned: Any) -> None:
        super().__init__("reward", 1.0)
        self._returned, self._num_resets = returned, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._num_resets += 1
        return (OBS, {}) if self._num_resets == 1 else self._returned


RESETS: list[tuple[Any, str]] = [
    *[((OBS, info), r"info from reset\(\) must be a dict, got") for info in (None, "none", [], [1])],
    *[(found, r"reset\(\) must return \(observation, info\), got") for found in (OBS, (OBS,), None, (OBS, {}, {}))],
]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize(("returned", "words"), RESETS)
def test_what_a_late_reset_returns(returned: Any, words: str, mode: str) -> None:
    env = SyncVectorEnv([lambda: LateReset(returned)] * 2, autoreset_mode=MODES[mode])
    env.reset()
    with pytest.raises(SubEnvError) as caught:
        for _ in range(9):
            env.step(np.zeros(2, int))
    assert caught.value.env_index == 0 and re.match(words, caught.value.problem)
    with pytest.raises(SubEnvError, match=words):
        env.reset()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_info_of_a_late_reset_in_each_vector_env(make_runner: MakeRunner, vectorization: str) -> None:
    runner = make_runner(lambda: LateReset((OBS, None)), num_envs=2, vectorization=vectorization)
    with pytest.raises(EnvError, match=r"sub-env 0, step 8: .*info from reset\(\) must be a dict, got NoneType None"):
        runner.sample(num_timesteps=20)


def test_a_wrong_late_reset_restarts_the_sub_env(make_runner: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(
        lambda: LateReset((OBS, None)), num_envs=1, vectorization="sync", restart_failed_sub_environments=True
    )
    assert runner.sample(num_timesteps=20).num_env_steps >= 18
    assert "failed in reset(): info from reset() must be a dict, got NoneType None. It was restarted." in caplog.text


@pytest.mark.parametrize("infos", [None, [{}, {}], "none"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_infos_of_vector_envs_of_users(make_runner: MakeRunner, infos: Any, mode: AutoresetMode) -> None:
    class Late(LateVectorEnv):
        def step(self, actions: Any) -> Any:
            *found, _ = super().step(actions)
            return *found, infos if self._t == 5 else {}

    runner = make_runner(lambda: Late(mode=mode), num_envs=None)
    with pytest.raises(EnvError, match=r"step 4: .*infos from step\(\) must be a dict"):
        runner.sample(num_timesteps=20)


@pytest.mark.parametrize("obs", [np.zeros((2, 1), np.float32), np.zeros((2, 2), complex), np.zeros(2), None])
def test_observations_of_late_resets_by_a_mask(make_runner: MakeRunner, obs: Any) -> None:
    class Late(LateVectorEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            found = super().reset(seed=seed)
            self._t = 3
            return (obs, {}) if self._is_late else found

        def step(self, actions: Any) -> Any:
            self._is_late = self._t == 4  # the sub-envs are reset after the second step
            return super().step(actions)

        _is_late = False

    runner = make_runner(lambda: Late("truncated", np.ones(2, bool), AutoresetMode.DISABLED), num_envs=None)
    with pytest.raises(EnvError, match=r"step 1: .*observation must have .* \(from reset\(\)\)"):
        runner.sample(num_timesteps=20)


@pytest.mark.parametrize("final", [None, np.zeros((2, 3), np.float32), np.zeros((1, 2), np.float32), [OBS, "x"]])
def test_final_observations_of_vector_envs_of_users(make_runner: MakeRunner, final: Any) -> None:
    class Late(LateVectorEnv):
        def step(self, actions: Any) -> Any:
            *found, _ = super().step(actions)
            return *found, {"final_obs": final, "_final_obs": np.ones(2, bool)}

    runner = make_runner(lambda: Late("truncated", np.ones(2, bool), AutoresetMode.SAME_STEP), num_envs=None)
    with pytest.raises(EnvError, match=r"env '<lambda>'.*final_obs"):
        runner.sample(num_timesteps=20)


@pytest.mark.parametrize("value", [2, -1])
def test_binary_observations_have_bounds(make_runner: MakeRunner, value: int) -> None:
    class Late(LateEnv):
        observation_space = spaces.MultiBinary(2)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed)
            return np.zeros(2, np.int8), {}

        def step(self, action: Any) -> Any:
            found = super().step(action)
            return np.full(2, value if self._t == 5 else 1, np.int8), *found[1:]

    runner = make_runner(lambda: Late("reward", 1.0), num_envs=1, vectorization="sync")
    with pytest.raises(EnvError, match=r"step 4: observation is outside MultiBinary"):
        runner.sample(num_timesteps=20)


@pytest.mark.parametrize("obs", [np.full(2, np.nan, np.float32), np.zeros(3, np.float32), np.array(["1", "2"])])
def test_observations_that_a_function_is_given(obs: Any) -> None:
    with pytest.raises(EnvError, match="observation"):
        evaluate_policy(lambda obs: 0, LateEnv("obs", obs), episodes=2)


def test_an_env_that_is_played(tmp_path: Path) -> None:
    def late(render_mode: str) -> LateEnv:
        return LateEnv("reward", "1.5", render_mode)

    played = play_episodes(Policy(ActorCritic(BOX, DISCRETE, {})), late, record=tmp_path, file_format="gif")
    with pytest.raises(EnvError, match=r"step 4: raised in step\(\): reward from step\(\) must be one number, got str"):
        list(played)


def test_an_env_that_is_right_trains_as_before(make_runner: MakeRunner) -> None:
    rollout = make_runner(CountingEnv, num_envs=2, vectorization="sync").sample(num_timesteps=12)
    assert rollout.rewards.dtype == np.float64 and rollout.terminated.dtype == rollout.truncated.dtype == np.bool_
