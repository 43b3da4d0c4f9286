"""Envs that go wrong in the middle of a run: the error says which env, which sub-env, when and what."""

from __future__ import annotations

import traceback
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral.errors import CorralError, EnvError
from corral.testing import CountingEnv, FaultyEnv
from handmade import MakeRunner

VECTORIZATIONS = ["sync", "async"]
MODES = ["next_step", "same_step"]

# fault -> the words that the message must hold. All strike in sub-env 1, in its fourth step, which is row 4 with
# next-step autoreset (episodes of 3: row 3 is a reset) and row 3 with same-step autoreset.
FAULTS: dict[str, list[str]] = {
    "raise_step": ["raised in step(): ZeroDivisionError: the simulator divided by zero"],
    "nan_reward": ["reward is nan"],
    "nan_obs": ["observation holds NaN or infinity"],
    "shape": ["observation must have shape (2,), got (3,)"],
    "dtype": ["observation", "complex64", "float32"],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_step(make_runner: MakeRunner, fault: str, vectorization: str, mode: str) -> None:
    runner = make_runner(
        FaultyEnv, num_envs=2, vectorization=vectorization, autoreset_mode=mode, env_config={"fault": fault}
    )
    runner.sample(num_timesteps=4)
    with pytest.raises(EnvError) as caught:
        runner.sample(num_timesteps=20)
    row = 4 if mode == "next_step" else 3
    for word in ["env 'FaultyEnv'", "sub-env 1", f"step {row}:", *FAULTS[fault]]:
        assert word in str(caught.value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
@pytest.mark.parametrize("fault", ["nan_obs", "shape", "dtype"])
def test_a_fault_in_the_final_observation(make_runner: MakeRunner, fault: str, vectorization: str, mode: str) -> None:
    config = {"fault": fault, "at_step": 3}  # the last step of the first episode
    runner = make_runner(FaultyEnv, num_envs=2, vectorization=vectorization, autoreset_mode=mode, env_config=config)
    with pytest.raises(EnvError) as caught:
        runner.sample(num_timesteps=20)
    # The runner calls it final_obs where a same-step autoreset has put another observation in its place.
    for word in ["env 'FaultyEnv'", "sub-env 1", "step 2:", *FAULTS[fault]]:
        assert word in str(caught.value).replace("final_obs", "observation")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_a_reset_that_raises(make_runner: MakeRunner, vectorization: str, mode: str) -> None:
    config = {"fault": "raise_reset"}  # due from the fourth step on: at the end of the second episode
    runner = make_runner(FaultyEnv, num_envs=2, vectorization=vectorization, autoreset_mode=mode, env_config=config)
    with pytest.raises(EnvError) as caught:
        runner.sample(num_timesteps=40)
    row = 7 if mode == "next_step" else 5
    for word in ["env 'FaultyEnv', sub-env 1", f"step {row}:", "raised in reset(): OSError: the simulator is gone"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_the_first_reset_may_raise_too(make_runner: MakeRunner, vectorization: str) -> None:
    config = {"fault": "raise_reset", "at_step": 0}
    runner = make_runner(FaultyEnv, num_envs=2, vectorization=vectorization, env_config=config)
    with pytest.raises(EnvError, match=r"sub-env 1, step 0: raised in reset\(\): OSError: the simulator is gone"):
        runner.sample(num_timesteps=1)


@pytest.mark.parametrize(("fault", "cause"), [("raise_step", ZeroDivisionError), ("raise_reset", OSError)])
@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_the_original_exception_is_chained_with_its_traceback(
    make_runner: MakeRunner, vectorization: str, fault: str, cause: type[Exception]
) -> None:
    runner = make_runner(FaultyEnv, num_envs=2, vectorization=vectorization, env_config={"fault": fault})
    with pytest.raises(EnvError) as caught:
        runner.sample(num_timesteps=40)
    assert type(caught.value.__cause__) is cause
    shown = "".join(traceback.format_exception(caught.value))
    assert "corral/testing.py" in shown  # the line of the env that raised
    assert "the simulator" in shown


class SimulatorError(Exception):
    """An exception that cannot be made from its message alone, and so cannot be pickled."""

    def __init__(self, joint: str, code: int) -> None:
        super().__init__(f"joint {joint} failed with {code}")


class FragileEnv(CountingEnv):
    def step(self, action: int) -> Any:
        if self._t == 1:
            raise SimulatorError("elbow", 7)
        return super().step(action)


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_an_exception_with_arguments_of_its_own(make_runner: MakeRunner, vectorization: str) -> None:
    runner = make_runner(FragileEnv, num_envs=2, vectorization=vectorization)
    with pytest.raises(EnvError, match=r"sub-env 0, step 1: raised in step\(\): .*SimulatorError: joint elbow"):
        runner.sample(num_timesteps=9)


class BroadcastEnv(CountingEnv):
    """Gives an observation that NumPy would spread over the place of the right one."""

    def step(self, action: int) -> Any:
        obs, *rest = super().step(action)
        return (obs[:1] if self._t == 2 else obs, *rest)


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_a_shape_that_would_broadcast(make_runner: MakeRunner, vectorization: str) -> None:
    runner = make_runner(BroadcastEnv, num_envs=2, vectorization=vectorization)
    with pytest.raises(EnvError, match=r"sub-env 0, step 1: .*observation must have shape \(2,\), got \(1,\)"):
        runner.sample(num_timesteps=9)


class NestedEnv(gym.Env[Any, Any]):
    """A nested observation whose inner part leaves its space in the third step."""

    observation_space: Any = spaces.Dict(
        {"arm": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)))}
    )
    action_space: Any = spaces.Discrete(2)

    def __init__(self, wrong: Any) -> None:
        self._wrong = wrong

    def _obs(self) -> dict[str, Any]:
        return {"arm": self._wrong if self._t == 3 else (1, np.zeros(2, np.float32))}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._obs(), 0.0, False, self._t == 3, {}


NESTED = {
    "outside": ((5, np.zeros(2, np.float32)), "arm/0 is outside Discrete(3)"),
    "NaN": ((1, np.full(2, np.nan, np.float32)), "arm/1 holds NaN or infinity"),
    "shape": ((1, np.zeros(1, np.float32)), "arm/1 must have shape (2,), got (1,)"),
    "missing": ((1,), "arm must be a tuple of 2"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
@pytest.mark.parametrize(("wrong", "words"), NESTED.values(), ids=NESTED)
def test_a_nested_part_is_named_by_its_path(
    make_runner: MakeRunner, wrong: Any, words: str, vectorization: str, mode: str
) -> None:
    runner = make_runner(lambda: NestedEnv(wrong), num_envs=2, vectorization=vectorization, autoreset_mode=mode)
    with pytest.raises(EnvError) as caught:
        runner.sample(num_timesteps=20)
    for word in ["sub-env 0, step 2:", words]:
        assert word in str(caught.value)


class BadStartEnv(CountingEnv):
    """Gives NaN in the first reset of all but the first sub-env."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._bad = config.vector_index == 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset(seed=seed, options=options)
        return (obs * np.float32("nan") if self._bad else obs), info


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_nan_from_the_first_reset(make_runner: MakeRunner, vectorization: str) -> None:
    runner = make_runner(BadStartEnv, num_envs=2, vectorization=vectorization)
    with pytest.raises(EnvError, match=r"'BadStartEnv', sub-env 1, step 0: observation holds NaN"):
        runner.sample(num_timesteps=1)


def test_a_nan_that_is_the_last_thing_before_an_exception_is_the_explanation(make_runner: MakeRunner) -> None:
    class Chained(CountingEnv):
        def step(self, action: int) -> Any:
            obs, reward, *rest = super().step(action)
            if self._t == 3:
                raise RuntimeError("solver diverged")
            return (obs, np.nan if self._t == 2 else reward, *rest)

    runner = make_runner(Chained, disable_env_checking=True)
    with pytest.raises(EnvError, match=r"sub-env 0, step 1: reward is nan"):
        runner.sample(num_timesteps=9)


@pytest.mark.parametrize("fault", ["nan_reward", "nan_obs", "shape"])
def test_sampling_can_continue_with_new_episodes(make_runner: MakeRunner, fault: str) -> None:
    ends: list[int] = []

    class OnceFaulty(FaultyEnv):
        def _due(self) -> bool:
            return self._faulty and self._steps == 4

    runner = make_runner(
        OnceFaulty, num_envs=2, env_config={"fault": fault}, on_episode_end=lambda episode: ends.append(episode.t)
    )
    with pytest.raises(EnvError):
        runner.sample(num_timesteps=20)
    ends.clear()
    rollout = runner.sample(num_timesteps=12)
    assert rollout.obs[0, :, 1].tolist() == [0, 0]
    assert rollout.num_env_steps == 12
    assert ends == [3, 3, 3, 3]


class TextActionEnv(CountingEnv):
    action_space: Any = spaces.Dict({"move": spaces.Text(2)})


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("checked", [True, False])
def test_a_text_in_an_action_space_is_refused(make_runner: MakeRunner, num_envs: int, checked: bool) -> None:
    # Without the check at start it is the module that cannot be built.
    with pytest.raises(CorralError, match=r"[Uu]nsupported action space Text"):
        make_runner(TextActionEnv, num_envs=num_envs, disable_env_checking=not checked)


def test_a_ready_vector_env_without_final_observations(make_runner: MakeRunner) -> None:
    class Forgetful(gym.vector.SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *values, infos = super().step(actions)
            infos.pop("final_obs", None)
            return (*values, infos)

    def forgetful() -> Forgetful:
        return Forgetful([CountingEnv] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    runner = make_runner(forgetful, num_envs=None)
    with pytest.raises(EnvError, match=r"env 'forgetful': sub-env 0 ended .* infos has no 'final_obs'"):
        runner.sample(num_timesteps=9)
