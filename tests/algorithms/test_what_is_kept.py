"""What a restored run continues with: the rows of docs/checkpoints.md that test_exact_resume leaves out."""

from __future__ import annotations

import logging
import random
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from corral import Algorithm, AlgorithmConfig, Callback
from corral.envs.env_state import WRAPPERS, get_env_state, set_env_state
from corral.envs.replay import OVER_EPISODES
from corral.errors import CheckpointError, CorralError
from corral.exploration.epsilon import EpsilonGreedy
from corral.runs.checkpoint import codec
from corral.testing import (
    BitFlippingEnv,
    CountingEnv,
    DeepSea,
    FaultyEnv,
    FindSquare,
    IdentityEnv,
    PoorHabit,
    ReachEnv,
    TimeLimitCorridor,
)
from exact_runs import Drift, StatefulDrift, differences, make_config, play, without_times

LOCAL: dict[str, Any] = {"engine_name": "local"}


def saved(config: AlgorithmConfig, num_iterations: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state after some iterations, as a file gives it back, and what the same run did after that."""
    with config.build() as algo:
        for _ in range(num_iterations):
            algo.train()
        return codec.decode(codec.encode(algo.get_state())), play(algo)


def continued(config: AlgorithmConfig, state: dict[str, Any]) -> dict[str, Any]:
    """What a new algorithm does after it was given a state."""
    with config.build() as algo:
        algo.set_state(state)
        return play(algo)


def restored(config: AlgorithmConfig, state: dict[str, Any]) -> dict[str, Any]:
    """`result["restored"]` after one iteration."""
    with config.build() as algo:
        assert np.isnan(algo.report.result()["restored"]["training_iteration"])
        algo.set_state(state)
        result: dict[str, Any] = algo.train()
        assert result["time_total_s"] > state["attributes"]["time_total_s"] > 0
        found: dict[str, Any] = result["restored"]
        return found


# Envs.


class UnknownWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that holds what no file can hold."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.lock = threading.Lock()


class LockedDrift(Drift):
    """An env that holds what no file can hold."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.lock = threading.Lock()


class CountedDrift(Drift):
    """An env whose observations depend on the number of its episodes, which a new env does not know."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs + np.float32(self._episodes), *rest


class Answering(UnknownWrapper):
    """A wrapper that answers for an env without a state."""

    def get_state(self) -> Any:
        return [self.env.unwrapped._episodes, self.env.unwrapped._place]

    def set_state(self, state: Any) -> None:
        self.env.unwrapped._episodes, self.env.unwrapped._place = state


def answering(env: Any) -> Any:
    return gym.wrappers.TimeLimit(Answering(env), 25)


def unknown(env: Any) -> Any:
    return UnknownWrapper(gym.wrappers.TimeLimit(env, 25))


def test_a_wrapper_with_a_state_answers_for_the_env_inside() -> None:
    config = make_config("PPO", env=Drift, wrappers=[answering])
    state, expected = saved(config)
    assert differences(expected, continued(config, state)) == []
    assert restored(config, state) == {
        **{"training_iteration": 2, "num_envs_continued": 3, "num_envs_restarted": 0},
        **{"continued": "runner 0, sub-envs 0 to 2", "restarted": ""},
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"autoreset_mode": "same_step"},
        {"vectorization": "async", "num_envs_per_env_runner": 2},
        {"num_env_runners": 2, **LOCAL},
        {"env": LockedDrift, "wrappers": [unknown], "disable_env_checking": True},
    ],
)
def test_an_env_without_methods_plays_its_episode_again(settings: dict[str, Any]) -> None:
    config = make_config("PPO", **{"env": Drift, **settings})
    state, expected = saved(config)
    assert differences(expected, continued(config, state)) == []
    assert restored(config, state)["restarted"] == ""


@pytest.mark.parametrize(
    ("settings", "in_the_way"),
    [
        (
            {"env": CountedDrift},
            "s 0 to 2: the steps of its episode led to another observation when they were played again",
        ),
        (
            {"env": CountedDrift, "vectorization": "async", "num_envs_per_env_runner": 2},
            "s 0 to 1: the steps of its episode led to another observation when they were played again",
        ),
    ],
)
def test_any_other_env_restarts_and_draws_on(
    settings: dict[str, Any], in_the_way: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config("PPO", **settings)
    state, _ = saved(config)
    first = continued(config, state)
    assert differences(first, continued(config, state)) == []
    num_envs = config.num_envs_per_env_runner
    found = restored(config, state)
    assert (found["num_envs_continued"], found["num_envs_restarted"]) == (0, num_envs)
    assert found["continued"] == "" and found["restarted"] == f"runner 0, sub-env{in_the_way}"
    assert found["restarted"] in caplog.text
    with config.build() as algo:
        algo.set_state(state)
        assert algo.env_runner is not None
        rollout = algo.env_runner.sample(num_timesteps=6)
        assert not rollout.continues
        first_obs = rollout.obs[0]
    with config.build() as algo:  # the run's beginning
        assert algo.env_runner is not None
        assert not np.any(algo.env_runner.sample(num_timesteps=6).obs[0] == first_obs)
    if settings == {"env": CountedDrift}:  # the first numbers come from the saved generator
        [env] = state["runners"]["runners"][0]["env"]["envs"][:1]
        rng = np.random.Generator(np.random.PCG64())
        [rng.bit_generator.state] = env["kept"]["generators"]
        assert np.array_equal(rng.normal(size=3).astype(np.float32), first_obs[0])


class WholeVector(SyncVectorEnv):
    """A vector env of its own, which can be saved as a whole."""

    def __init__(self) -> None:
        super().__init__([StatefulDrift] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)

    def get_state(self) -> Any:
        return [self._autoreset_envs, [[get_env_state(env), env.get_state()] for env in self.envs]]

    def set_state(self, state: Any) -> None:
        self._autoreset_envs = state[0].copy()
        for env, (whole, _) in zip(self.envs, state[1], strict=True):
            set_env_state(env, whole)


def make_whole(config: Any) -> WholeVector:
    return WholeVector()


def test_a_vector_env_with_a_state_is_kept_whole() -> None:
    config = make_config("PPO", env=make_whole, env_config={}, wrappers=[], num_envs_per_env_runner=None)
    state, expected = saved(config)
    assert differences(expected, continued(config, state)) == []
    assert restored(config, state)["num_envs_continued"] == 3


class Opaque(StatefulDrift):
    """An env whose state no file can hold."""

    def get_state(self) -> dict[str, Any]:
        return {"world": {"rng": self.np_random}}


class Raising(StatefulDrift):
    """An env whose `get_state` raises."""

    def get_state(self) -> dict[str, Any]:
        raise OSError("the simulator is gone")


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (Opaque, r"get_state\(\) of Opaque returned a state with numpy\..*Generator .* at \['world'\]"),
        (Raising, "OSError: the simulator is gone"),
    ],
)
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_state_that_cannot_be_had_costs_the_episode_only(
    env: Any, reason: str, vectorization: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config("PPO", env=env, vectorization=vectorization, num_envs_per_env_runner=1)
    state, _ = saved(config)
    [text] = {record.message for record in caplog.records}
    assert re.search(f"env '{env.__name__}' will begin its episode again .*{reason}", text) and "Traceback" in text
    found = restored(config, state)
    assert found["num_envs_restarted"] == 1 and re.search(reason, found["restarted"])


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        (CountingEnv, {"episode_length": 5, "ends": "alternate"}),
        (IdentityEnv, {"episode_length": 5}),
        (IdentityEnv, {"episode_length": 5, "space": "box"}),
        (TimeLimitCorridor, {"episode_length": 7}),
        (BitFlippingEnv, {"num_bits": 3}),
        (ReachEnv, {}),
        (BitFlippingEnv, {"num_bits": 3, "space": "box"}),
        (DeepSea, {"size": 4}),
        (PoorHabit, {"episode_length": 3}),
        (FindSquare, {"side": 14, "episode_length": 5}),
        (FaultyEnv, {"at_step": 10**6, "episode_length": 5}),
    ],
)
def test_the_small_envs_continue(env: Any, settings: dict[str, Any]) -> None:
    def played(made: Any, rng: np.random.Generator, num_steps: int) -> list[Any]:
        steps: list[Any] = []
        for _ in range(num_steps):
            actions = made.action_space
            actions.seed(int(rng.integers(1000)))
            obs, reward, terminated, truncated, _ = made.step(actions.sample())
            steps.append([obs, reward, terminated, truncated])
            if terminated or truncated:
                steps.append(made.reset()[0])
        return steps

    one, other = env(settings), env(settings)
    one.reset(seed=4)
    played(one, np.random.default_rng(1), 8)
    state = codec.decode(codec.encode(get_env_state(one)))
    other.reset(seed=9)
    set_env_state(other, state)
    assert differences(played(one, np.random.default_rng(2), 20), played(other, np.random.default_rng(2), 20)) == []


def wrapped(env: Any) -> Any:
    """Wrappers of Gymnasium that have a state of their own."""
    env = gym.wrappers.TimeLimit(env, 25)
    env = gym.wrappers.StickyAction(env, 0.5)
    env = gym.wrappers.MaxAndSkipObservation(env, skip=2)
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.DelayObservation(env, delay=2)
    env = gym.wrappers.NormalizeReward(env)
    env = gym.wrappers.TimeAwareObservation(env)
    env = gym.wrappers.FrameStackObservation(env, 3, padding_type="reset")
    env = gym.wrappers.RecordEpisodeStatistics(env)
    return gym.wrappers.FlattenObservation(env)


@pytest.mark.parametrize("env", [StatefulDrift, Drift, CountedDrift])
def test_wrappers_of_gymnasium_keep_their_state(env: Any) -> None:
    config = make_config("PPO", env=env, wrappers=[wrapped])
    state, expected = saved(config, 3)
    one = state["runners"]["runners"][0]["env"]["envs"][0]
    kept = dict(map(tuple, one["kept"]["wrappers"]))
    assert kept.keys() == OVER_EPISODES.keys()
    if env is StatefulDrift:
        around = dict(map(tuple, one["wrappers"]))
        assert all(around[name].keys() == set(WRAPPERS[name]) for name in around) and len(around) == 10
    if env is not CountedDrift:
        assert differences(expected, continued(config, state)) == []
        return
    with config.build() as algo:
        algo.set_state(state)
        assert algo.env_runner is not None
        algo.env_runner.sample(num_timesteps=3)
        counts = algo.env_runner.foreach_env(lambda env: env.get_wrapper_attr("obs_rms").count)
        assert len(counts) == 3 and all(count > kept["NormalizeObservation"]["obs_rms.count"] for count in counts[:1])


# Episodes and callbacks.


class Noting(Callback):
    """Notes everything that it sees of episodes, and counts them."""

    seen: list[Any]
    num_ended = 0

    def __init__(self) -> None:
        self.seen = []

    def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
        episode.custom_data["started_as"] = self.num_ended

    def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
        episode.add_temporary_timestep_data("times", episode.t)

    def on_episode_end(
        self, *, episode: Any, prev_episode_chunks: Any, env_runner: Any, metrics_logger: Any, **kwargs: Any
    ) -> None:
        self.num_ended += 1
        chunks = [*prev_episode_chunks, episode]
        self.seen.append([episode.id_, episode.t, episode.get_return(), dict(episode.custom_data)])
        self.seen.append(episode.get_temporary_timestep_data("times"))
        self.seen.append([chunk.get_rewards() for chunk in chunks])
        self.seen.append([chunk.get_infos(-1) for chunk in chunks])
        metrics_logger.log_value("num_ended", self.num_ended, reduce="max")

    def get_state(self) -> dict[str, Any]:
        return {"num_ended": self.num_ended}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.num_ended = state["num_ended"]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_unfinished_episodes_and_callbacks_continue(mode: str) -> None:
    def seen(algo: Algorithm) -> list[Any]:
        [found] = algo.env_runner_group.foreach_env_runner(lambda runner: runner.callbacks.instances[0].seen)
        return list(found)

    settings: dict[str, Any] = {"env_config": {"mean_length": 60}, "wrappers": [], "autoreset_mode": mode}
    config = make_config("PPO", callbacks_class=[Noting], **settings)
    with config.build() as algo:
        for _ in range(3):
            algo.train()
        state, before = codec.decode(codec.encode(algo.get_state())), len(seen(algo))
        algo.train()
        expected = seen(algo)[before:]
    with config.build() as algo:
        algo.set_state(state)
        algo.train()
        assert len(expected) >= 4 and differences(expected, seen(algo)) == []


class Counting(Callback):
    """Counts events in the driver, in runners and in learners."""

    value = 0

    def on_train_result(self, **kwargs: Any) -> None:
        self.value += 1

    def on_sample_end(self, **kwargs: Any) -> None:
        self.value += 100

    def on_update_end(self, **kwargs: Any) -> None:
        self.value += 10_000

    def get_state(self) -> dict[str, int]:
        return {"value": self.value}

    def set_state(self, state: Mapping[str, int]) -> None:
        self.value = state["value"]


def test_callbacks_continue_in_every_place() -> None:
    config = make_config("PPO", callbacks_class=[Counting], num_env_runners=2, **LOCAL)
    state, _ = saved(config)
    with config.build() as algo:
        algo.set_state(state)
        found = [algo._callbacks, *algo.env_runner_group.foreach_env_runner(lambda runner: runner.callbacks)]
        assert [each.instances[0].value for each in found] == [2, 200, 200]
        [learner] = algo.get_state()["learners"]["by_learner"]
        assert learner["callbacks"] == {"num_errors": 0, "callbacks": {0: ["Counting", {"value": 20_000}]}}


# Tasks and settings of the envs.


class Sized(StatefulDrift):
    """Has a size, from `env_config`, and a task."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.size, self.task = config.get("size", 4), 0

    def get_task(self) -> Any:
        return self.task

    def set_task(self, task: Any) -> None:
        self.task = task

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "size": self.size}


def grow(env_runner: Any) -> None:
    env_runner.config.environment(env_config={"size": 8})
    env_runner.make_env()
    task = {"level": env_runner.worker_index}
    env_runner.foreach_env(lambda env: env.unwrapped.set_task(task))


def sizes_and_tasks(algo: Algorithm) -> list[Any]:
    return algo.env_runner_group.foreach_env(lambda env: (env.unwrapped.size, env.unwrapped.task))


def grown(config: AlgorithmConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state after the envs were changed, and what the same run did after that."""
    with config.build() as algo:
        algo.train()
        algo.env_runner_group.foreach_env_runner(grow)
        algo.train()
        return codec.decode(codec.encode(algo.get_state())), play(algo)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_changed_envs_and_their_tasks_continue(vectorization: Any) -> None:
    settings: dict[str, Any] = {"env": Sized, "env_config": {}, "num_envs_per_env_runner": 2}
    config = make_config("PPO", vectorization=vectorization, **settings)
    state, expected = grown(config)
    assert differences(expected, continued(config, state)) == []
    with config.build() as algo:
        algo.set_state(state)
        assert sizes_and_tasks(algo) == [[(8, {"level": 0})] * 2]
        assert algo.train()["restored"]["num_envs_continued"] == 2
        before = algo.get_state()
        first = algo.get_state()
        first["runners"]["runners"][0]["env"]["env_config"] = None  # from before the change
        algo.set_state(first)
        assert [size for size, _ in sizes_and_tasks(algo)[0]] == [4, 4]
        algo.set_state(before)
        assert differences(without_times(before), without_times(algo.get_state())) == []


@pytest.mark.slow_cases("async-StatefulDrift")
@pytest.mark.parametrize("env", [StatefulDrift, Drift, CountedDrift])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_reset_arguments_continue_to_be_counted(env: Any, vectorization: Any) -> None:
    def choose(env_index: int, episode_index: int) -> dict[str, int]:
        return {"seed": 1000 * env_index + episode_index}

    config = make_config("PPO", env=env, env_reset_fn=choose, vectorization=vectorization)
    with config.build() as algo:
        algo.train()
        assert algo.env_runner is not None
        counts = algo.env_runner.host.get_num_episodes()
        state = codec.decode(codec.encode(algo.get_state()))
        expected = play(algo)
    assert counts is not None and min(counts) > 1
    with config.build() as algo:
        algo.set_state(state)
        if env is not CountedDrift:
            assert differences(expected, play(algo)) == []
        else:  # each env restarts, with the episode that is next
            assert algo.env_runner is not None
            algo.env_runner.sample(num_timesteps=3)
            assert algo.env_runner.host.get_num_episodes() == [count + 1 for count in counts]


def test_runners_beyond_the_saved_ones_have_the_envs_of_the_others() -> None:
    config = make_config("PPO", env=Sized, env_config={}, num_env_runners=2, **LOCAL)
    state, _ = grown(config)
    with config.copy(num_env_runners=3, num_envs_per_env_runner=4).build() as algo:
        algo.set_state(state)
        assert sizes_and_tasks(algo) == [[(8, {"level": level})] * 4 for level in (1, 2, 1)]


def test_an_algorithm_stops_if_an_env_cannot_be_restored() -> None:
    class Refusing(Sized):
        def set_state(self, state: Any) -> None:
            if self.size == 8:
                raise OSError("no room")
            super().set_state(state)

    config = make_config("PPO", env=Refusing, env_config={})
    state, _ = grown(config)
    with config.build() as algo:
        algo.train()
        with pytest.raises(CheckpointError, match="no room"):
            algo.set_state(state)
        with pytest.raises(CorralError, match="build"):
            algo.train()


# Generators.


def test_generators_of_the_process_continue() -> None:
    def draws() -> list[Any]:
        return [random.random(), float(np.random.random()), torch.rand(1).item()]

    config = make_config("PPO")
    with config.build() as algo:
        algo.train()
        state = algo.get_state()
        expected = draws()
        draws()
        algo.set_state(codec.decode(codec.encode(state)))
        assert draws() == expected


@pytest.mark.slow
def test_generators_of_other_processes_continue() -> None:
    def draws(runner: Any) -> list[Any]:
        own = [random.random(), float(np.random.random()), torch.rand(1).item()]
        return [own, runner.host.foreach(lambda env: [random.random(), float(np.random.random())])]

    config = make_config(
        "PPO", num_env_runners=1, engine_name="process", vectorization="async", num_envs_per_env_runner=1
    )
    with config.build() as algo:
        algo.train()
        state = algo.get_state()
        expected = algo.env_runner_group.foreach_env_runner(draws)
        assert algo.env_runner_group.foreach_env_runner(draws) != expected
        algo.set_state(codec.decode(codec.encode(state)))
        assert algo.env_runner_group.foreach_env_runner(draws) == expected


# Other numbers of runners, and other engines.


def generators(state: dict[str, Any]) -> list[Any]:
    """What each runner draws from: its generator, and the seeds that it will give its envs."""
    return [[runner["actions"]["rng"], runner["env"]["seeds"]] for runner in state["runners"]["runners"]]


@pytest.mark.parametrize("num_runners", [0, 1, 2, 3])
def test_runners_take_the_states_that_there_are(num_runners: int) -> None:
    two = make_config("PPO", num_env_runners=2, **LOCAL)
    with two.build() as algo:
        fresh = generators(algo.get_state())
    state, _ = saved(two)
    config = make_config("PPO", num_env_runners=num_runners, **LOCAL)
    with config.build() as algo:
        began = generators(algo.get_state())
        algo.set_state(state)
        now = algo.get_state()
        used = max(1, num_runners)
        assert generators(now)[:2] == generators(state)
        assert len(generators(now)) == max(2, num_runners)
        if num_runners == 3:  # the third begins with seeds of its own
            assert generators(now)[2] == began[2] and began[2] not in [*fresh, *generators(state)]
        result = algo.train()
        assert result["restored"]["num_envs_continued"] == 3 * min(used, 2)
        again = algo.get_state()
    with two.build() as algo:  # who had no runner for a while continues where it was
        algo.set_state(again)
        assert generators(algo.get_state())[:2] == generators(again)[:2]
        if num_runners < 2:
            assert generators(again)[1] == generators(state)[1]


@pytest.mark.slow
def test_the_embedded_runner_continues_as_a_process() -> None:
    state, expected = saved(make_config("PPO"))
    one = continued(make_config("PPO", num_env_runners=1, engine_name="process"), state)
    metrics = [[result["learners"] for result in run["results"]] for run in (expected, one)]
    assert differences(*metrics) == []


def test_other_vector_envs_continue_the_same_sub_envs() -> None:
    state, expected = saved(make_config("PPO"))
    asynchronous = continued(make_config("PPO", vectorization="async"), state)
    assert differences(expected["results"], asynchronous["results"]) == []
    for settings in ({"autoreset_mode": "same_step"}, {"num_envs_per_env_runner": 4}):
        config = make_config("PPO", **settings)
        found = restored(config, state)
        assert (found["num_envs_continued"], found["num_envs_restarted"]) == (0, config.num_envs_per_env_runner)


def test_steps_of_a_fragment_that_is_under_way_are_lost(tmp_path: Path) -> None:
    from corral.runners.requests import SampleRequest

    request = SampleRequest(num_timesteps=30)
    config = make_config("PPO", num_env_runners=1, **LOCAL)
    with config.build() as algo:
        algo.train()
        algo.env_runner_group.sample_async(request)
        in_flight = algo.env_runner_group.fault_results()["num_env_steps_in_flight"]
        state = algo.get_state()
    assert in_flight >= 30
    with config.build() as algo:
        group = algo.env_runner_group
        group.sample_async(request)
        group.mail.receive_samples()  # which nobody has fetched, and which are of another run than the state
        algo.set_state(state)
        assert group.fetch_samples() == []
        assert algo.train()["fault_tolerance"]["num_env_steps_lost"] == in_flight


# The replay buffer.


def test_a_large_buffer_is_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def config(**settings: Any) -> AlgorithmConfig:
        return make_config("DQN", replay_buffer_config={"capacity": 10_000_000}, **settings)

    with config().build() as algo, caplog.at_level(logging.WARNING, "corral"):
        assert "replay_buffer" in algo.get_state()  # an empty one is small
        algo.train()
        for _ in range(2):
            assert "replay_buffer" not in algo.get_state()
    [record] = caplog.records
    assert "store_buffer_in_checkpoints=True" in record.message
    with config(store_buffer_in_checkpoints=True).build() as algo:
        algo.train()
        with algo.large_arrays("left_out"):
            assert "replay_buffer" not in algo.get_state()
        assert len(algo.get_state()["replay_buffer"]["columns"]["rewards"])


def test_a_state_in_memory_is_a_copy_also_of_the_buffer() -> None:
    with make_config("SAC").build() as algo:
        for _ in range(3):
            algo.train()
        state = algo.get_state()
        expected = play(algo)
        algo.set_state(state)
        assert differences(expected, play(algo)) == []
        assert differences(*(without_times(each) for each in (algo.get_state(), algo.get_state()))) == []


# Parts that cannot be had.


class UnsavedCallback(Callback):
    """A callback whose state cannot be had."""

    def get_state(self) -> dict[str, Any]:
        raise OSError("no state of a callback")

    def set_state(self, state: Any) -> None:
        raise AssertionError


class Unplain(EpsilonGreedy):
    """An exploration whose state no file can hold."""

    def get_state(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


def break_metrics(algo: Algorithm) -> None:
    algo.metrics.get_state = lambda: 1 / 0  # type: ignore[assignment]


def break_evaluation(algo: Algorithm) -> None:
    algo.evaluator.get_state = lambda: {}["runners"]  # type: ignore[method-assign]


def break_transforms(algo: Algorithm) -> None:
    algo.modules.get_transform_states = lambda: {"lock": threading.Lock()}  # type: ignore[assignment,method-assign]


def break_a_runner(algo: Algorithm) -> None:
    algo.env_runner.host.restarts.get_state = lambda: 1 / 0  # type: ignore[assignment,method-assign,union-attr]


def break_an_attribute(algo: Algorithm) -> None:
    algo.STATE = (*algo.STATE, "of_user")  # type: ignore[misc]
    algo.of_user = threading.Lock()  # type: ignore[attr-defined]


def weights_of(algo: Algorithm) -> dict[str, Any]:
    found = {name: value.numpy().copy() for name, value in algo.get_module().state_dict().items()}
    assert found
    return found


@pytest.mark.parametrize(
    ("damage", "settings", "words"),
    [
        (None, {"callbacks_class": [UnsavedCallback]}, "no state of callback UnsavedCallback: OSError: no state"),
        (None, {"exploration_config": {"type": Unplain}}, "no exploration, so that .*_thread.lock"),
        (None, {"exploration_config": {"type": Unplain}}, "no state of the exploration of runner 0"),
        (break_metrics, {}, "no metrics, so that .*ZeroDivisionError"),
        (break_evaluation, {}, "no evaluation, so that .*KeyError: 'runners'"),
        (break_transforms, {}, "no transforms, so that .*_thread.lock"),
        (break_a_runner, {}, "no state of runner 0, so that .*ZeroDivisionError"),
        (break_an_attribute, {}, "no attributes/of_user, so that .*_thread.lock"),
    ],
)
def test_what_cannot_be_had_costs_its_part_and_not_the_checkpoint(
    damage: Any, settings: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config("DQN", **settings)
    with config.build() as algo:
        algo.train()
        if damage is not None:
            damage(algo)
        algo.save_to_path(tmp_path / "saved")
        weights = weights_of(algo)
    record, *_ = [record for record in caplog.records if re.search(words, record.getMessage())]
    assert record.exc_info and record.levelname == "WARNING"
    with config.build() as algo:
        if damage is break_an_attribute:
            damage(algo)
        algo.restore_from_path(tmp_path / "saved")
        assert algo.training_iteration == 1 and differences(weights, weights_of(algo)) == []
        algo.train()
