"""A restored run plays the episodes of envs without methods for their state again, in the env of its config."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import corral
from corral import Algorithm, AlgorithmConfig
from corral.algorithms.registry import config_class
from corral.runners import played_actions, stepping
from corral.runs.checkpoint import codec
from corral.tools.cli.main import main
from exact_runs import SMALL, Drift, differences, make_config, play, without_times

LOCAL: dict[str, Any] = {"engine_name": "local"}


def restored_from(config: AlgorithmConfig, state: dict[str, Any]) -> Algorithm:
    algo = config.build()
    algo.set_state(codec.decode(codec.encode(state)))
    return algo


def check_exact(config: AlgorithmConfig, num_envs: int, num_iterations: int = 2) -> None:
    """Assert that a run that is restored, saved at once and restored again continues as if nothing had happened."""
    with config.build() as algo:
        for _ in range(num_iterations):
            algo.train()
        state = algo.get_state()
        expected = play(algo)
    with restored_from(config, state) as algo:
        assert differences(without_times(state), without_times(algo.get_state())) == []
        again = algo.get_state()
    with restored_from(config, again) as algo:
        assert algo.report.restored["num_envs_continued"] == num_envs and not algo.report.restored["restarted"]
        assert differences(expected, play(algo)) == []


# Actions, over many rollouts.


class Mixed(gym.Env[Any, Any]):
    """Its next observation depends on every part of the action."""

    observation_space: Any = spaces.Dict({"place": spaces.Box(-np.inf, np.inf, (3,), np.float32)})

    def __init__(self, config: dict[str, Any]) -> None:
        kinds: dict[str, Any] = {
            "discrete": spaces.Discrete(3, start=5),
            "box": spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([3.0, np.inf], np.float32)),
            "multi": spaces.MultiDiscrete([2, 3]),
            "binary": spaces.MultiBinary(2),
            "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)]),
        }
        self.action_space = kinds[config["kind"]]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=3)
        return self._see(), {}

    def _see(self) -> Any:
        return {"place": self.place.astype(np.float32)}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        numbers = np.concatenate([np.ravel(part) for part in (action if isinstance(action, tuple) else (action,))])
        self.place = 0.9 * self.place + 0.1 * self.np_random.normal(size=3) + 0.01 * np.resize(numbers, 3)
        return self._see(), float(self.place.sum()), bool(self.np_random.random() < 0.01), False, {}


@pytest.mark.parametrize("kind", ["discrete", "box", "multi", "binary", "tuple"])
def test_actions_of_each_kind_are_kept_over_many_rollouts(kind: str) -> None:
    config = make_config("PPO", env=Mixed, env_config={"kind": kind}, wrappers=[], rollout_fragment_length=4)
    config.training(train_batch_size_per_learner=60, minibatch_size=30)
    check_exact(config, 3, num_iterations=4)


@pytest.mark.parametrize("algo", ["DQN", "SAC", "TD3"])
def test_off_policy_runs_with_rollouts_of_one_row_continue(algo: str) -> None:
    check_exact(make_config(algo, env=Drift), 3)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_sub_envs_that_failed_and_are_new_continue(mode: str) -> None:
    class Failing(Drift):
        def step(self, action: Any) -> Any:
            if self._place[0] > 1.3:
                raise OSError("gone")
            return super().step(action)

    settings: dict[str, Any] = {"autoreset_mode": mode, "restart_failed_sub_environments": True}
    config = make_config("PPO", env=Failing, env_config={"mean_length": 200}, wrappers=[], **settings)
    check_exact(config, 3, num_iterations=3)


def test_an_episode_may_have_as_many_steps_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played_actions, "MAX_STEPS", 4)
    played = played_actions.PlayedActions()
    for num_rows, found in ((4, [0, 1, 2, 3]), (5, None)):
        played.forget()
        columns = np.ones((num_rows, 1), bool), np.zeros((num_rows, 1), bool)
        played.parts.append((np.arange(num_rows)[:, None], *columns))
        [actions] = played.get(same_step=False, convert=lambda part, _: part)
        assert (None if actions is None else actions.tolist()) == found


@pytest.mark.parametrize("lengths", [(2, None, 3), (None, None)])
def test_actions_of_some_episodes_may_not_be_known(lengths: tuple[int | None, ...]) -> None:
    saved = [None if length is None else np.arange(length) for length in lengths]
    played = played_actions.PlayedActions()
    played.set(saved)
    for num_more in range(3):
        if num_more:
            columns = np.ones((1, len(lengths)), bool), np.zeros((1, len(lengths)), bool)
            played.parts.append((np.full((1, len(lengths)), 10 + num_more), *columns))
            played.num_rows += 1
        found = played.get(same_step=False, convert=lambda part, _: part)
        more = [10 + place for place in range(1, num_more + 1)]
        expected = [None if one is None else [*one, *more] for one in saved]
        assert [None if one is None else one.tolist() for one in found] == expected


def test_envs_with_a_state_continue_in_the_middle_of_a_long_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Drift):
        def get_state(self) -> Any:
            return {"place": self._place.copy(), "rng": self.np_random.bit_generator.state}

        def set_state(self, state: Any) -> None:
            self._place, self.np_random.bit_generator.state = state["place"].copy(), state["rng"]

    for module in (played_actions, stepping):
        monkeypatch.setattr(module, "MAX_STEPS", 4)
    settings: dict[str, Any] = {"env_config": {"mean_length": 10**6}, "wrappers": [], "vectorization": "async"}
    check_exact(make_config("PPO", env=Endless, rollout_fragment_length=5, **settings), 3)


def test_a_long_episode_begins_again_and_its_actions_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (played_actions, stepping):
        monkeypatch.setattr(module, "MAX_STEPS", 40)
    monkeypatch.setattr(stepping, "TOO_LONG", "too long for 40 steps")
    settings: dict[str, Any] = {"env_config": {"mean_length": 10**6}, "wrappers": [], "rollout_fragment_length": 5}
    with make_config("PPO", env=Drift, **settings).build() as algo:
        algo.train()
        state = algo.get_state()
        played = algo.env_runner.stepping.played  # type: ignore[union-attr]
        assert (
            30 <= played.num_rows <= 45
            and [len(one) for one in state["runners"]["runners"][0]["episodes"]["played"]] == [30] * 3
        )
        algo.train()
        assert 40 <= played.num_rows <= 45 and not played.is_whole
        state = algo.get_state()
    caplog.set_level(logging.WARNING)
    with restored_from(make_config("PPO", env=Drift, **settings), state) as algo:
        found = algo.train()["restored"]
    assert found["num_envs_restarted"] == 3 and found["restarted"] == "runner 0, sub-envs 0 to 2: too long for 40 steps"
    [text] = [record.getMessage() for record in caplog.records if "too long" in record.getMessage()]
    assert found["restarted"] in text


def test_a_callback_that_writes_into_actions_costs_nothing() -> None:
    def no_actions(samples: Any, **kwargs: Any) -> None:
        samples.actions[:] = 0

    check_exact(make_config("PPO", env=Drift).callbacks(on_sample_end=no_actions), 3)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_episode_that_has_just_ended_is_followed_by_the_next_one(vectorization: str) -> None:
    class Fixed(Drift):
        def step(self, action: Any) -> Any:
            obs, reward, _, truncated, info = super().step(action)
            return obs, reward, False, truncated, info

    def limited(env: Any) -> Any:
        return gym.wrappers.TimeLimit(env, 9)  # ten episodes are 90 steps, a batch

    config = make_config("PPO", env=Fixed, wrappers=[limited], num_envs_per_env_runner=1, vectorization=vectorization)
    with config.build() as algo:
        algo.train()
        assert algo.get_state()["runners"]["runners"][0]["episodes"]["resetting"].tolist() == [True]
    check_exact(config, 1)


def test_a_task_for_the_next_episode_stays_one() -> None:
    class Tasked(Drift):
        task = next_task = 1

        def get_task(self) -> int:
            return self.next_task

        def set_task(self, task: int) -> None:
            self.next_task = task

        def reset(self, **given: Any) -> Any:
            self.task = self.next_task
            return super().reset(**given)

        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return obs + np.float32(self.task), reward, *rest

    def run(algo: Algorithm) -> Any:
        algo.train()
        algo.env_runner_group.foreach_env(lambda env: env.unwrapped.set_task(env.unwrapped.get_task() + 1))
        return algo.get_state()

    config = make_config("PPO", env=Tasked)
    with config.build() as algo:
        state = run(algo)
        expected = play(algo)
    with restored_from(config, state) as algo:
        assert algo.report.restored["num_envs_continued"] == 3
        assert differences(expected, play(algo)) == []


# Several agents.


def of_agents(env: Any, **settings: Any) -> AlgorithmConfig:
    config: Any = config_class("PPO")().environment(env, env_config=settings.pop("env_config", {}))
    config.env_runners(num_envs_per_env_runner=2, **settings).debugging(seed=1).rl_module(model_config=SMALL)
    config.multi_agent(
        policies={"one", "other"},
        policy_mapping_fn=lambda agent, episode, **k: "one" if hash(episode.id_) % 2 else "other",
    )
    made: AlgorithmConfig = config.training(train_batch_size_per_learner=60, minibatch_size=30, num_epochs=1)
    return made


def of_pettingzoo(name: str, kind: str) -> Any:
    module = pytest.importorskip(f"pettingzoo.classic.{name}")

    def make(config: Any) -> Any:
        return getattr(module, kind)()

    return make


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (partial(corral.make_multi_agent, "CartPole-v1"), {"env_config": {"num_agents": 3}}),
        (
            partial(corral.make_multi_agent, "Pendulum-v1"),
            {"env_config": {"num_agents": 2}, "rollout_fragment_length": 5},
        ),
        (partial(of_pettingzoo, "rps_v2", "parallel_env"), {}),
        (partial(of_pettingzoo, "tictactoe_v3", "env"), {}),
        (partial(of_pettingzoo, "connect_four_v3", "env"), {"rollout_fragment_length": 3}),
        (partial(corral.make_multi_agent, Drift), {"env_config": {"num_agents": 2}, "vectorization": "async"}),
    ],
    ids=["copies", "continuous", "parallel", "in_turn", "short_rollouts", "async"],
)
def test_episodes_of_several_agents_are_played_again(make: Callable[[], Any], settings: dict[str, Any]) -> None:
    check_exact(of_agents(make(), **settings), 2, num_iterations=3)


@pytest.mark.parametrize("agents", [1, 2])
def test_only_the_actions_since_a_reset_of_all_envs_are_played_again(agents: int) -> None:
    config = make_config("PPO", env=Drift)
    if agents > 1:
        config = of_agents(corral.make_multi_agent(Drift), env_config={"num_agents": agents})
    with config.build() as algo:
        algo.train()
        assert algo.env_runner is not None
        algo.env_runner.sample(num_timesteps=6, force_reset=True)
        state = algo.get_state()
    with restored_from(config, state) as algo:
        assert algo.report.restored["num_envs_continued"] == config.num_envs_per_env_runner
        assert not algo.report.restored["restarted"]


def test_open_steps_of_agents_may_be_older_than_the_rollout() -> None:
    class InTurn(corral.MultiAgentEnv):  # each agent acts in every third step
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.agents = self.possible_agents = ["a", "b", "c"]
            self.observation_spaces = dict.fromkeys(self.agents, spaces.Box(-9, 9, (1,), np.float32))
            self.action_spaces = dict.fromkeys(self.agents, spaces.Box(-9, 9, (1,), np.float32))

        def _see(self) -> Any:
            return {self.agents[self.t % 3]: np.array([self.place], np.float32)}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.t, self.place = 0, 0.0
            return self._see(), {}

        def step(self, actions: Any) -> Any:
            [action] = actions.values()
            self.t, self.place = self.t + 1, 0.5 * self.place + float(np.clip(action[0], -1, 1))
            return self._see(), {}, {"__all__": False}, {"__all__": self.t == 50}, {}

    check_exact(of_agents(InTurn, rollout_fragment_length=1), 2)


# The env of the config of now.


class Line(gym.Env[Any, Any]):
    """Its episodes have a length, and its rewards a scale, from the config, as attributes."""

    observation_space: Any = spaces.Box(-99, 99, (1,))
    action_space: Any = spaces.Discrete(2)

    def __init__(self, config: dict[str, Any]) -> None:
        self.length, self.scale, self.render_mode = (
            config["length"],
            config.get("scale", 1.0),
            config.get("render_mode"),
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.array([self.t], np.float32), self.scale, self.t >= self.length, False, {}


class LongLine(Line):
    """Another class, with twice the length."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.length *= 2


class Scaled(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any, by: float) -> None:
        super().__init__(env)
        self.by = by

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, self.by * float(reward), *rest


def lines(length: int, env: Any = Line, by: float = 1.0, **settings: Any) -> AlgorithmConfig:
    config: Any = make_config("PPO", env=env, env_config={"length": length}, wrappers=[partial(Scaled, by=by)])
    config.env_runners(num_envs_per_env_runner=2).reporting(metrics_num_episodes_for_smoothing=4)
    config.evaluation(
        evaluation_interval=1,
        evaluation_duration=20,
        evaluation_duration_unit="timesteps",
        evaluation_force_reset_envs_before_iteration=False,
    )
    made: AlgorithmConfig = config.copy(**settings)
    return made


def lengths_and_returns(algo: Algorithm) -> list[float]:
    """The shortest and the longest of the latest episodes and their returns, in training and in evaluation."""
    results = [algo.train() for _ in range(3)]
    parts = [results[-1]["env_runners"], results[-1]["evaluation"]["env_runners"]]
    return [part[f"episode_{name}"] for part in parts for name in ("len_min", "len_max", "return_min", "return_max")]


@pytest.mark.parametrize(
    ("changed", "length", "returned"),
    [
        ({"length": 8}, 8, 8.0),
        ({"length": 3}, 3, 3.0),
        ({"length": 5, "env": LongLine}, 10, 10.0),
        ({"length": 5, "by": 0.5}, 5, 2.5),
        ({"length": 8, "num_env_runners": 2, **LOCAL}, 8, 8.0),
        ({"length": 8, "vectorization": "async"}, 8, 8.0),
    ],
)
def test_new_episodes_have_the_env_of_the_config_of_now(changed: dict[str, Any], length: int, returned: float) -> None:
    with lines(5, num_env_runners=changed.get("num_env_runners", 0), **LOCAL).build() as algo:
        algo.train()
        state = algo.get_state()
    with restored_from(lines(**changed), state) as algo:
        assert lengths_and_returns(algo) == [length, length, returned, returned] * 2


def test_a_checkpoint_with_another_env_config_says_what_begins_again(tmp_path: Path) -> None:
    """With the length 8 the first steps are the same, so that the episodes continue, and are longer."""
    with lines(5).build() as algo:
        algo.train()
        algo.save_to_path(tmp_path / "saved")
    for length, words in ((8, ""), (1, "its episode ended earlier when")):
        given = {"env": Line, "env_config": {"length": length}, "wrappers": [partial(Scaled, by=1.0)]}
        with Algorithm.from_checkpoint(tmp_path / "saved", **given) as algo:
            found = algo.report.restored
            assert words in found["restarted"] and found["num_envs_restarted"] == (2 if words else 0)
            assert lengths_and_returns(algo)[:2] == [length] * 2


def test_an_env_config_of_now_replaces_the_one_of_a_curriculum(caplog: pytest.LogCaptureFixture) -> None:
    def grow(env_runner: Any) -> None:
        env_runner.config.environment(env_config={"length": 7})
        env_runner.make_env()

    with lines(5).build() as algo:
        algo.train()
        algo.env_runner_group.foreach_env_runner(grow)
        algo.train()
        state = algo.get_state()
    with restored_from(lines(5), state) as algo:  # as it was: the curriculum continues
        assert algo.report.restored["num_envs_continued"] == 2  # with the actions since the new envs were reset
        assert lengths_and_returns(algo)[:2] == [7, 7]
    with restored_from(lines(3), state) as algo:
        assert "env_config={'length': 3} replaces the value {'length': 7}" in caplog.text
        assert lengths_and_returns(algo)[:2] == [3, 3]


def test_the_command_line_continues_a_run_with_another_env_config(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    small: dict[str, Any] = {
        "training.train_batch_size_per_learner": 64,
        "training.minibatch_size": 64,
        "training.num_epochs": 1,
    }
    small["env_runners.num_envs_per_env_runner"] = 1
    given = [part for name, value in small.items() for part in ("--set", f"{name}={value}")]
    begin = ["train", "--algo", "PPO", "--env", "Pendulum-v1", "--seed", "0", "--run-dir", str(run_dir), *given]
    stop = ["--stop", "training_iteration=1"]
    assert main([*begin, "--set", "environment.env_config={max_episode_steps: 20}", *stop]) == 0
    more = ["--set", "environment.env_config={max_episode_steps: 30}", "--stop", "training_iteration=6"]
    assert main(["train", "--resume", str(run_dir), *more]) == 0
    with Algorithm.from_checkpoint(run_dir) as algo:
        [limits] = algo.env_runner_group.foreach_env(lambda env: env.get_wrapper_attr("_max_episode_steps"))
        assert limits and set(limits) == {30}
        result = algo.train()
        assert result["restored"]["num_envs_continued"] == 1 and result["env_runners"]["episode_len_max"] == 30


def test_rllibs_names_continue_a_run_with_another_env_config(tmp_path: Path) -> None:
    from corral.compat.rllib.algorithm import PPOConfig

    def config(length: int) -> Any:
        made = PPOConfig().environment(Line, env_config={"length": length})
        return made.training(train_batch_size_per_learner=60, minibatch_size=30, num_epochs=1).debugging(seed=0)

    algo = config(5).build_algo()
    algo.train()
    saved = algo.save_to_path(str(tmp_path / "saved"))
    algo.stop()
    algo = config(8).build_algo()
    algo.restore_from_path(saved)
    for _ in range(4):
        result = algo.train()
    algo.stop()
    assert result["env_runners"]["episode_len_max"] == 8
