"""When evaluation rounds are played, with which weights and settings, and what the result and callbacks say of them."""

from __future__ import annotations

import csv
import gc
import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from at_least import all_of
from corral import PPO, Callback, PPOConfig
from corral.core.metrics.result import flat_result
from corral.errors import CallbackError, ConfigError, CorralError
from corral.testing import CountingEnv
from small import small as small_run

ENGINES = [
    "local",
    pytest.param("process", marks=pytest.mark.slow),
    pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")]),
]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of each engine; Ray has a runtime then."""
    if request.param == "ray":
        request.getfixturevalue("ray_runtime")
    yield request.param


class Paced(CountingEnv):
    """Env with a duration: each episode of 3 steps takes `seconds`; it raises if its config says so."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._seconds = (config or {}).get("seconds", 0.0)
        self._fault = (config or {}).get("fault", False)

    def step(self, action: int) -> Any:
        if self._fault:
            raise RuntimeError("broken on purpose")
        time.sleep(self._seconds / self._length)
        return super().step(action)


def note_version(env_runner: Any, metrics_logger: Any) -> None:
    if env_runner.config.in_evaluation:
        metrics_logger.log_value("weights_version", env_runner.weights_version, reduce="max")


def small(env: Any = Paced, env_config: Any = None, **evaluation: Any) -> PPOConfig:
    """PPO with iterations of 16 steps."""
    settings = {"evaluation_duration": 4, "delay_between_env_runner_restarts_s": 0.0, "seed": 3, **evaluation}
    return small_run(env, env_config=env_config or {}, train_batch_size_per_learner=16, **settings)


def in_parallel(**evaluation: Any) -> PPOConfig:
    return small(evaluation_interval=1, evaluation_parallel_to_training=True, **evaluation)


def versions(config: PPOConfig, iterations: int) -> list[tuple[int, Any]]:
    """Return the versions after training and in evaluation runners, by iteration; `None` where no round was played."""
    found = []
    with config.callbacks(on_sample_end=note_version).build() as algo:
        for _ in range(iterations):
            evaluation = algo.train()["evaluation"]
            seen = evaluation["env_runners"]["weights_version"] if evaluation["fresh"] else None
            assert seen is None or seen == evaluation["weights_version"]
            assert not evaluation["fresh"] or evaluation["env_runners"]["num_episodes"] == 4
            found.append((algo.learner_group.weights_version, seen))
    return found


def test_in_turn_a_round_has_the_weights_after_training(engine: str) -> None:
    config = small(evaluation_interval=2, evaluation_num_env_runners=2 if engine != "local" else 0).engine(engine)
    assert versions(config, 4) == [(1, None), (2, 2), (3, None), (4, 4)]


@pytest.mark.parametrize("num_runners", [0, 2])
def test_in_parallel_a_round_has_the_weights_from_before_training(engine: str, num_runners: int) -> None:
    assert versions(in_parallel(evaluation_num_env_runners=num_runners).engine(engine), 3) == [(1, 0), (2, 1), (3, 2)]


@pytest.mark.slow
def test_in_parallel_without_runners_a_process_of_this_machine_plays() -> None:
    assert versions(in_parallel().engine("process"), 3) == [(1, 0), (2, 1), (3, 2)]


@pytest.mark.slow
def test_training_and_a_round_of_the_same_length_take_little_longer_than_one_of_them() -> None:
    """Sleeping envs take no processor time, so that other tests on this machine hardly matter."""
    overrides = {"env_config": {"seconds": 1.0}, "num_envs_per_env_runner": 1}
    config = in_parallel(evaluation_duration=2, evaluation_config=overrides).engine("process")
    config.environment(env_config={"seconds": 3 / 8})  # 8 steps of both sub-envs in turn, an eighth of a second each
    with config.build() as algo:
        results = [algo.train() for _ in range(2)]
    for result in results:
        assert result["evaluation"]["evaluation_s"] >= 2.0 and result["timers"]["env_step_s"] >= 2.0
    assert min(result["timers"]["iteration_s"] for result in results) <= 2.4
    assert min(result["timers"]["evaluating_s"] for result in results) < 0.4


@pytest.mark.parametrize("parallel", [False, True])
def test_the_timer_has_the_seconds_that_an_iteration_waits(parallel: bool) -> None:
    overrides = {"env_config": {"seconds": 0.3}, "num_envs_per_env_runner": 1}
    config = small(evaluation_interval=1, evaluation_duration=2, evaluation_config=overrides).engine("local")
    with config.evaluation(evaluation_parallel_to_training=parallel).build() as algo:
        results = [algo.train() for _ in range(2)]
    waits_s = [result["timers"]["evaluating_s"] for result in results]
    assert max(waits_s) > (0.3 if parallel else 0.6)  # training is short
    assert min(result["timers"]["env_step_s"] for result in results) < 0.3  # without the steps of evaluation


def test_a_round_played_by_hand_needs_no_interval() -> None:
    events: list[str] = []

    def start(algorithm: Any, metrics_logger: Any) -> None:
        assert metrics_logger is algorithm.metrics
        events.append("start")

    def end(algorithm: Any, evaluation_metrics: dict[str, Any]) -> None:
        events.append("end")
        evaluation_metrics["doubled"] = 2 * evaluation_metrics["env_runners"]["episode_return_mean"]

    with small().callbacks(on_evaluate_start=start, on_evaluate_end=end).build() as algo:
        assert algo.eval_env_runner_group is None and events == []
        metrics = algo.evaluate()
        assert events == ["start", "end"]
        episodes = metrics["env_runners"]
        assert episodes["episode_returns"] == [6.0] * 4 and episodes["episode_lens"] == [3] * 4
        assert episodes["episode_return_mean"] == episodes["episode_return_median"] == 6.0
        assert 0 < episodes["episode_duration_sec_mean"] < metrics["evaluation_s"]
        assert metrics["doubled"] == 12.0 and metrics["fresh"] and not metrics["truncated"]
        assert "evaluation" not in algo.train()


def test_before_the_first_round_all_numbers_are_there_and_nan(tmp_path: Path) -> None:
    with small(evaluation_interval=2).build() as algo:
        algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path / "run", progress=False)
    with (tmp_path / "run" / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["evaluation/fresh"] for row in rows] == ["False", "True", "False"]
    assert [float(row["evaluation/env_runners/episode_return_mean"]) for row in rows[1:]] == [6.0, 6.0]
    before = {name: value for name, value in rows[0].items() if name.startswith("evaluation/")}
    assert before["evaluation/env_runners/episode_return_mean"] == "nan"
    assert before.keys() == {name for name in rows[1] if name.startswith("evaluation/")}
    assert "" not in before.values()  # a column that came later would have no value in the first row
    assert not any(name.endswith(("episode_returns", "episode_lens")) for name in rows[0])


def test_without_evaluation_files_have_no_columns_for_it(tmp_path: Path) -> None:
    with small().build() as algo:
        result = algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress=False)
    header = (tmp_path / "run" / "progress.csv").read_text().splitlines()[0]
    assert "evaluation" not in header and "evaluation" not in result


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a result that no clock decides."""
    timed = ("timers", "bottleneck", "runner_group", "time_total_s", "evaluation", "config", "restored")
    flat = flat_result({key: value for key, value in result.items() if key not in timed})
    return {key: value for key, value in flat.items() if "duration" not in key}


class DrawsGlobally(CountingEnv):
    """Env whose rewards come from NumPy's global generator."""

    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return (obs, float(np.random.random()), *rest)


@pytest.mark.parametrize(
    ("env", "parallel", "num_runners"),
    [("CartPole-v1", False, 0), ("CartPole-v1", True, 0), (DrawsGlobally, False, 0), (DrawsGlobally, False, 2)],
)
def test_evaluation_changes_nothing_in_training(env: Any, parallel: bool, num_runners: int) -> None:
    found = []
    for interval in (None, 1):
        config = small(env, evaluation_interval=interval, evaluation_parallel_to_training=parallel)
        config.evaluation(evaluation_num_env_runners=num_runners)
        with config.engine("local").build() as algo:
            results = [algo.train() for _ in range(3)]
            found.append([numbers(result) for result in results])
    for without, with_rounds in zip(*found, strict=True):
        np.testing.assert_equal(with_rounds, without)


def test_evaluation_runners_draw_other_numbers_than_training_runners() -> None:
    with small("CartPole-v1", evaluation_interval=1, evaluation_duration=6).build() as algo:
        group = algo.eval_env_runner_group
        assert group is not None and group.local_env_runner is not None and algo.env_runner is not None
        # The first samples, because later ones differ anyway.
        first, other = (runner.sample(num_timesteps=20) for runner in (algo.env_runner, group.local_env_runner))
        assert not np.array_equal(first.obs[0], other.obs[0])
        assert not np.array_equal(first.actions, other.actions)
        played = [algo.train()["evaluation"]["env_runners"]["episode_returns"] for _ in range(3)]
        assert len({tuple(returns) for returns in played}) == 3


def test_the_overrides_reach_only_the_evaluation_runners(engine: str) -> None:
    seen = "evaluation" if engine == "local" else None

    def describe(env_runner: Any) -> tuple[bool, bool, int]:
        config = env_runner.config
        return config.in_evaluation, config.explore, config.env_config.get("episode_length", 3)

    overrides = PPOConfig.overrides(explore=False, env_config={"episode_length": 5})
    config = small(evaluation_interval=1, evaluation_config=overrides, evaluation_num_env_runners=1).engine(engine)
    with config.env_runners(num_env_runners=1).build() as algo:
        result = algo.train()
        assert result["evaluation"]["env_runners"]["episode_lens"] == [5] * 4
        assert result["env_runners"]["episode_len_max"] == 3
        assert algo.env_runner_group.foreach_env_runner(describe) == [(False, True, 3)]
        assert algo.eval_env_runner_group is not None
        assert algo.eval_env_runner_group.foreach_env_runner(describe) == [(True, False, 5)]
        assert seen is None or len(algo.engine.running()) == 2


def test_exploration_schedules_stand_still_during_a_round() -> None:
    timesteps = []

    class Noting:
        def __call__(self, env_runner: Any) -> None:
            timesteps.append((env_runner.config.in_evaluation, env_runner._timestep))

    with small(evaluation_interval=1).callbacks(on_sample_end=Noting()).build() as algo:
        algo.train()
        algo.train()
    assert timesteps == [(False, 16), (True, 16), (False, 32), (True, 32)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation_config": {"num_env_runners": 2}}, "num_env_runners=2 .*evaluation_num_env_runners"),
        ({"evaluation_config": {"lr": 0.5}}, "lr=0.5 has no effect"),
        ({"evaluation_config": {"evaluation_duration": 3}}, r"set it with \.evaluation"),
        ({"evaluation_config": {"model_config": {"fcnet_hiddens": [3]}}}, "module that is trained"),
        ({"evaluation_config": {"engine_name": "local"}}, "engine of the algorithm"),
        ({"evaluation_config": {"sample_timeout_s": 3}}, "evaluation_sample_timeout_s"),
        ({"evaluation_config": {"rollout_fragment_length": 3}}, "no effect"),
        ({"evaluation_config": {"exploration_config": {"type": "EpsilonGreedy"}}}, "evaluation_config: "),
        ({"evaluation_config": {"env": "NoSuchEnv-v0"}}, "evaluation_config: .*NoSuchEnv"),
        ({"evaluation_config": {"env_task_fn": lambda a, b, c: 1}}, "env_task_fn=.* no effect.*set evaluation.*tasks"),
        ({"evaluation_duration": "auto"}, "evaluation_parallel_to_training=True"),
        ({"custom_evaluation_function": lambda algorithm: {}}, r"function\(algorithm, env_runner_group\)"),
        ({"custom_evaluation_function": 3}, "must be a function"),
        ({"custom_evaluation_function": lambda a, b: {}, "evaluation_seeds": [1]}, "evaluation_seeds=.* no effect"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_anything_starts(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**settings).build()


def test_the_setting_that_marks_evaluation_runners_is_not_the_users() -> None:
    with pytest.raises(ConfigError, match="in_evaluation=True"):
        small(in_evaluation=True).validate()


def test_an_override_that_changes_nothing_is_accepted() -> None:
    whole = small().training(lr=3e-4).env_runners(explore=False)
    small(evaluation_config={"lr": small().lr, "engine_name": "auto"}).validate()
    small(evaluation_config=whole).validate()


def test_a_thread_cannot_limit_the_steps_of_an_env() -> None:
    config = small(evaluation_interval=1, evaluation_parallel_to_training=True).engine("local")
    with pytest.raises(ConfigError, match="env_step_timeout_s"):
        config.fault_tolerance(env_step_timeout_s=1.0).build()


@pytest.mark.parametrize("num_runners", [0, 1])
def test_an_evaluation_env_with_other_spaces_is_refused_at_build(num_runners: int) -> None:
    config = small(
        evaluation_config={"env": "CartPole-v1"}, evaluation_interval=1, evaluation_num_env_runners=num_runners
    ).engine("local")
    with pytest.raises(ConfigError, match=r"'CartPole-v1' has observations of Box\(.*4.*2.*evaluation_config"):
        config.build()


def test_a_checkpoint_holds_the_settings_of_evaluation(tmp_path: Path) -> None:
    overrides = {"env": CountingEnv, "env_config": {"episode_length": 2}, "callbacks_class": [NotesVersion]}
    config = small(CountingEnv, evaluation_interval=1, evaluation_config=overrides, evaluation_duration=3)
    config.environment(env_reset_fn=choose_no_reset)
    with config.build() as algo:
        algo.train()
        path = algo.save(tmp_path / "saved")
    with PPO.from_checkpoint(path) as restored:
        assert restored.train()["evaluation"]["env_runners"]["episode_lens"] == [2] * 3
        assert restored.latest_numbers["evaluation"]["env_runners"]["weights_version"] == 2


class Drawing(DrawsGlobally):
    """Env whose rewards also tell the actions."""

    def step(self, action: int) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, reward + action, *rest


def count_samples(env_runner: Any, metrics_logger: Any) -> None:
    if env_runner.config.in_evaluation:
        metrics_logger.log_value("num_samples", 1, reduce="lifetime_sum")


def evaluations(algo: Any) -> list[dict[str, Any]]:
    """Return what the next two iterations report of evaluation, without times."""
    found = [flat_result(algo.train()["evaluation"]) for _ in range(2)]
    timed = ("env_runners/episode_duration_sec_mean", "evaluation_s")
    return [{name: value for name, value in part.items() if name not in timed} for part in found]


@pytest.mark.parametrize("num_runners", [0, 2])
def test_a_restored_run_continues_its_evaluation(num_runners: int) -> None:
    """The checkpoint comes after the first round, which the next iteration repeats."""
    config = small(Drawing, evaluation_interval=2, evaluation_num_env_runners=num_runners).engine("local")
    config.callbacks(on_sample_end=count_samples)
    with config.build() as algo, config.copy(seed=8).build() as other:
        evaluations(algo)
        state = algo.get_state()
        expected = evaluations(algo)
        other.set_state(state)
        np.testing.assert_equal(evaluations(other), expected)
        algo.set_state(state)
        np.testing.assert_equal(evaluations(algo), expected)
    repeated, fresh = expected
    assert not repeated["fresh"] and fresh["fresh"]
    assert fresh["num_env_steps_sampled_lifetime"] == 24 == 2 * repeated["num_env_steps_sampled_lifetime"]
    assert fresh["env_runners/num_samples"] == 2 * max(1, num_runners)


def test_recording_between_two_rounds_changes_nothing_in_the_second(tmp_path: Path) -> None:
    """Also not the numbers that envs of this process draw from global generators."""
    found = []
    for records in (False, True):
        with small(Drawing).build() as algo:
            algo.evaluate()
            if records:
                algo.record(str(tmp_path / "data"), num_episodes=2, seed=4)
            found.append(algo.evaluate()["env_runners"]["episode_returns"])
    assert len(found[0]) > 1 and found[0] == found[1]


def choose_no_reset(episode_index: int) -> None:
    return None


def test_a_restored_run_continues_rounds_played_by_hand() -> None:
    config = small(Drawing)
    with config.build() as algo, config.copy(seed=8).build() as other:
        algo.evaluate()
        state = algo.get_state()
        expected = algo.evaluate()["env_runners"]["episode_returns"]
        other.set_state(state)  # its evaluation runners are made later
        assert other.evaluate()["env_runners"]["episode_returns"] == expected


class CountsIterations(Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_train_result(self, **kwargs: Any) -> None:
        self.count += 1

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_restored_evaluation_runners_that_are_made_later_do_not_reset_an_instance_that_training_shares() -> None:
    counts = CountsIterations()
    with small().callbacks(counts).build() as algo, small().callbacks(CountsIterations()).build() as saved:
        saved.train()
        saved.evaluate()
        algo.set_state(saved.get_state())
        algo.train()
        algo.evaluate()
    assert counts.count == 2


class NotesVersion(Callback):
    def on_sample_end(self, *, env_runner: Any, metrics_logger: Any, **kwargs: Any) -> None:
        note_version(env_runner, metrics_logger)


# Custom functions.


def play_and_count(algorithm: Any, env_runner_group: Any) -> Any:
    rollouts = env_runner_group.foreach_env_runner(lambda runner: runner.sample(num_episodes=3))
    steps = sum(rollout.num_env_steps for rollout in rollouts)
    return {"foo": 1, "env_runners": {"episode_return_mean": 7.5}}, steps, steps


def test_a_custom_function_takes_the_place_of_a_round(engine: str) -> None:
    config = small(
        evaluation_interval=1, custom_evaluation_function=play_and_count, evaluation_num_env_runners=2
    ).engine(engine)
    with config.callbacks(on_sample_end=note_version).build() as algo:
        for k in (1, 2):
            evaluation = algo.train()["evaluation"]
            assert evaluation["foo"] == 1 and evaluation["fresh"]
            assert evaluation["env_runners"]["episode_return_mean"] == 7.5
            assert evaluation["env_runners"]["weights_version"] == k  # from a callback in the runners
            assert evaluation["env_runners"]["num_env_steps_sampled"] == 18
            assert evaluation["num_env_steps_sampled_lifetime"] == 18 * k


def test_a_custom_function_may_return_metrics_alone() -> None:
    with small(evaluation_interval=1, custom_evaluation_function=lambda algorithm, group: {"foo": 2}).build() as algo:
        assert algo.train()["evaluation"]["foo"] == 2


@pytest.mark.parametrize("returned", [None, 3, ({}, 1), [({}, 1, 1)], ({}, "many", None)])
def test_a_custom_function_that_returns_something_else_is_refused(returned: Any) -> None:
    with small(custom_evaluation_function=lambda algorithm, group: returned).build() as algo:
        with pytest.raises(CorralError, match="must return a dict of metrics"):
            algo.evaluate()


def test_a_custom_function_can_ask_whether_training_is_done() -> None:
    asked: list[bool] = []
    trained = threading.Event()

    def wait_for_training(algorithm: Any, env_runner_group: Any) -> dict[str, Any]:
        asked.append(algorithm.training_done())
        trained.set()
        deadline_s = time.monotonic() + 60
        while not algorithm.training_done() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        asked.append(algorithm.training_done())
        return {"thread": threading.current_thread() is not threading.main_thread()}

    def hold(samples: Any) -> None:
        assert trained.wait(60)

    config = small(
        evaluation_interval=1, evaluation_parallel_to_training=True, custom_evaluation_function=wait_for_training
    )
    with config.callbacks(on_sample_end=hold).engine("local").build() as algo:
        assert algo.training_done()
        assert algo.train()["evaluation"]["thread"]
        assert asked == [False, True]
        algo.evaluate()
        assert asked[2:] == [True, True]


def test_training_does_not_wait_for_a_custom_function_beyond_the_limit() -> None:
    release = threading.Event()

    def never_returns(algorithm: Any, env_runner_group: Any) -> dict[str, Any]:
        release.wait(60)
        return {"late": True}

    config = small(
        evaluation_interval=1,
        evaluation_parallel_to_training=True,
        evaluation_sample_timeout_s=0.2,
        custom_evaluation_function=never_returns,
    )
    with config.engine("local").build() as algo:
        start = time.perf_counter()
        evaluation = algo.train()["evaluation"]
        assert time.perf_counter() - start < 5
        assert evaluation["skipped"] and math.isnan(evaluation["env_runners"]["episode_return_mean"])
        assert 0.2 < evaluation["evaluation_s"] < 5
        start = time.perf_counter()
        assert algo.train()["evaluation"]["skipped"]  # the function still has the runners
        assert time.perf_counter() - start < 2
        release.set()
        deadline_s = time.monotonic() + 10
        while not algo.train()["evaluation"].get("late"):
            assert time.monotonic() < deadline_s


def test_an_exception_of_a_custom_function_ends_the_run() -> None:
    def broken(algorithm: Any, env_runner_group: Any) -> dict[str, Any]:
        raise KeyError("no such thing")

    for parallel in (False, True):
        config = small(
            evaluation_interval=1, evaluation_parallel_to_training=parallel, custom_evaluation_function=broken
        )
        with config.engine("local").build() as algo, pytest.raises(KeyError, match="no such thing"):
            algo.train()


def test_a_round_can_be_played_after_a_function_failed_in_parallel() -> None:
    failures = [KeyError("once")]

    def fails_once(algorithm: Any, env_runner_group: Any) -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return {"foo": 3}

    with in_parallel(custom_evaluation_function=fails_once).engine("local").build() as algo:
        with pytest.raises(KeyError):
            algo.train()
        assert algo.get_state()["evaluation"] is not None
        assert algo.evaluate()["foo"] == 3


# Faults.


def broken_evaluation(**evaluation: Any) -> PPOConfig:
    overrides = {"env_config": {"fault": True}, "disable_env_checking": True}
    return small(evaluation_interval=1, evaluation_config=overrides, **evaluation)


@pytest.mark.parametrize("num_runners", [0, 1])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_round_that_nobody_can_play_is_skipped_and_training_continues(num_runners: int, parallel: bool) -> None:
    config = broken_evaluation(
        evaluation_num_env_runners=num_runners,
        evaluation_parallel_to_training=parallel,
        evaluation_sample_timeout_s=20.0,
    ).engine("local")
    with config.build() as algo:
        for k in (1, 2):
            result = algo.train()
            evaluation = result["evaluation"]
            assert result["training_iteration"] == k
            assert evaluation["skipped"] and not evaluation["truncated"]
            assert evaluation["num_episodes_missing"] == 4 and evaluation["env_runners"]["num_episodes"] == 0
            assert sum(evaluation["missing_by_runner"].values()) == 4
            assert math.isnan(evaluation["env_runners"]["episode_return_mean"])


def test_a_setting_lets_a_round_that_nobody_can_play_end_the_run() -> None:
    with broken_evaluation(on_evaluation_failure="raise").build() as algo:
        with pytest.raises(CorralError, match="broken on purpose"):
            algo.train()
        assert algo.training_iteration == 1  # training was over


@pytest.mark.slow
def test_a_killed_evaluation_runner_is_replaced_and_announced_in_the_main_thread() -> None:
    seen: list[tuple[Any, list[int], bool, bool]] = []

    def note(algorithm: Any, env_runner_group: Any, env_runner_indices: list[int], is_evaluation: bool) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        seen.append((env_runner_group is algorithm.eval_env_runner_group, env_runner_indices, is_evaluation, in_main))

    config = small(evaluation_interval=1, evaluation_num_env_runners=2, evaluation_parallel_to_training=True).engine(
        "process"
    )
    with config.callbacks(on_env_runners_recreated=note).build() as algo:
        algo.train()
        group = algo.eval_env_runner_group
        assert group is not None
        group._runners[1].handle.kill()
        deadline_s = time.monotonic() + 60
        while not seen:
            assert time.monotonic() < deadline_s
            evaluation = algo.train()["evaluation"]
            assert evaluation["env_runners"]["num_episodes"] == 4  # the other one plays all of them
        assert seen == [(True, [1], True, True)]
        assert evaluation["num_remote_worker_restarts"] == 1
        assert algo.train()["evaluation"]["num_healthy_workers"] == 2
        assert algo.train()["fault_tolerance"]["num_remote_worker_restarts"] == 0


class FailsOnce(CountingEnv):
    """Env that raises in its second step, if no env of evaluation did so before."""

    faults: ClassVar[list[str]] = []

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._fails, self._steps = config.get("fails", False), 0

    def step(self, action: int) -> Any:
        self._steps += 1
        if self._fails and self._steps == 2 and not self.faults:
            self.faults.append("step")
            raise OSError("the simulator is gone")
        return super().step(action)


def test_a_failure_of_the_embedded_runner_that_a_round_survives_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    FailsOnce.faults.clear()
    config = small(env=FailsOnce, evaluation_interval=1, evaluation_config={"env_config": {"fails": True}})
    with config.build() as algo, caplog.at_level(logging.WARNING, "corral"):
        evaluation = algo.train()["evaluation"]
        assert (evaluation["truncated"], evaluation["skipped"]) == (False, False)
        assert evaluation["num_env_runner_failures"] == 1
        [text] = [record.getMessage() for record in caplog.records if "evaluation runner failed" in record.getMessage()]
        assert "the simulator is gone" in text
        assert algo.train()["evaluation"]["num_env_runner_failures"] == 1
        assert algo.train()["fault_tolerance"]["num_env_runner_failures"] == 0


class Stalling(CountingEnv):
    """Env that sleeps for ten minutes in the first evaluation runner."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._stalls = config.get("stalls", False) and config.worker_index == 1

    def step(self, action: int) -> Any:
        if self._stalls:
            time.sleep(600)
        return super().step(action)


@pytest.mark.parametrize("restores", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_training_never_waits_longer_than_the_limit_for_an_env_that_stalls(restores: bool) -> None:
    overrides = {"env_config": {"stalls": True}, "disable_env_checking": True}
    config = small(
        Stalling,
        evaluation_interval=1,
        evaluation_num_env_runners=2,
        evaluation_config=overrides,
        evaluation_sample_timeout_s=3.0,
    ).engine("process")
    with config.build() as algo:
        evaluation = algo.train()["evaluation"]
        assert evaluation["evaluation_s"] < 3.5
        assert not evaluation["truncated"] and evaluation["env_runners"]["num_episodes"] == 4
        assert evaluation["num_episodes_taken_over"] == 2  # at half of the limit
        evaluation = algo.train()["evaluation"]
        assert evaluation["evaluation_s"] < 1.5  # the runner that stalls is given nothing
        assert evaluation["env_runners"]["num_episodes"] == 4 and not evaluation["truncated"]
        start = time.perf_counter()
        state = algo.get_state()
        assert time.perf_counter() - start < 1.5
        if restores:
            algo.set_state(state)  # which starts new runners
            assert algo.train()["evaluation"]["evaluation_s"] < 3.5


@pytest.mark.slow
def test_an_exception_in_training_ends_the_round_and_loses_nothing() -> None:
    errors: list[type[BaseException]] = [KeyboardInterrupt, ValueError]

    def fail(env_runner: Any) -> None:
        if errors:
            raise errors.pop()

    overrides = {"env_config": {"seconds": 1.0}, "callback_functions": {}}
    config = in_parallel(evaluation_config=overrides, evaluation_duration=20)
    with config.callbacks(on_sample_end=fail).engine("process").build() as algo:
        for error in (CallbackError, KeyboardInterrupt):
            start = time.perf_counter()
            with pytest.raises(error):
                algo.train()
            assert time.perf_counter() - start < 4  # of the round's 10 seconds
            assert not any(thread.name == "corral evaluation" for thread in threading.enumerate())
            assert algo.training_iteration == 0 and algo.training_done()
        start = time.perf_counter()
        assert algo.get_state()["evaluation"]["latest"] is None
        assert time.perf_counter() - start < 4  # nor does saving wait for a runner that plays on


def test_an_interrupted_round_in_turn_does_not_undo_the_iteration() -> None:
    def interrupt(algorithm: Any) -> None:
        raise KeyboardInterrupt

    with small(evaluation_interval=1).callbacks(on_evaluate_start=interrupt).build() as algo:
        with pytest.raises(KeyboardInterrupt):
            algo.train()
        assert algo.training_iteration == 1
        assert algo.latest_numbers["evaluation"]["fresh"] is False


@pytest.mark.slow
def test_an_algorithm_that_is_dropped_ends_the_process_that_evaluates() -> None:
    algo = in_parallel().engine("process").build()
    assert algo.eval_env_runner_group is not None
    handle: Any = algo.eval_env_runner_group._runners[1].handle
    assert handle.alive()
    del algo
    gc.collect()
    assert not handle.alive()


def test_two_rounds_at_once_are_refused() -> None:
    def evaluate(env_runner: Any) -> None:
        algos[0].evaluate()

    algos: list[Any] = []
    config = in_parallel(evaluation_config={"callback_functions": {}}).engine("local")
    with config.callbacks(on_sample_end=evaluate).build() as algo:
        algos.append(algo)
        with pytest.raises(CorralError, match="an evaluation round is being played"):
            algo.train()


@pytest.mark.parametrize("event", ["on_evaluate_start", "on_evaluate_end", "on_sample_end"])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_round_within_a_round_is_refused(event: str, parallel: bool) -> None:
    def evaluate(**kwargs: Any) -> None:
        algos[0].evaluate()

    algos: list[Any] = []
    overrides = {"callback_functions": {"on_sample_end": [evaluate] if event == "on_sample_end" else []}}
    config = small(evaluation_interval=1, evaluation_parallel_to_training=parallel, evaluation_config=overrides)
    if event != "on_sample_end":
        config.callbacks(**{event: evaluate})
    with config.engine("local").build() as algo:
        algos.append(algo)
        with pytest.raises(CorralError, match="an evaluation round is being played"):
            algo.train()


def test_the_metrics_that_evaluate_returns_are_the_callers() -> None:
    with small(evaluation_interval=2).build() as algo:
        algo.evaluate()["env_runners"].clear()
        assert algo.train()["evaluation"]["env_runners"]["num_episodes"] == 4


def test_an_algorithm_that_was_stopped_refuses_to_evaluate() -> None:
    algo = small(evaluation_interval=1).build()
    algo.stop()
    with pytest.raises(CorralError, match="was stopped"):
        algo.evaluate()


def test_a_callback_cannot_take_a_name_of_the_result() -> None:
    def log(metrics_logger: Any) -> None:
        metrics_logger.log_value("episode_return_iqm", 1.0)

    with small().callbacks(on_sample_end=log).build() as algo, pytest.raises(CorralError, match="episode_return_iqm"):
        algo.evaluate()


def test_all_durations_play_what_they_say() -> None:
    def played(**evaluation: Any) -> dict[str, Any]:
        with small(evaluation_interval=1, **evaluation).engine("local").build() as algo:
            found: dict[str, Any] = algo.train()["evaluation"]["env_runners"]
            return found

    assert played(evaluation_duration=10, evaluation_num_env_runners=7)["num_episodes"] == 10
    steps = played(evaluation_duration=13, evaluation_duration_unit="timesteps", evaluation_num_env_runners=3)
    assert steps["num_env_steps_sampled"] == 18  # 3 runners of 2 sub-envs take 3 steps each
    auto = played(evaluation_duration="auto", evaluation_parallel_to_training=True)
    assert auto["num_episodes"] >= 2


def test_rounds_of_env_steps_may_continue_episodes() -> None:
    config = small(evaluation_duration=10, evaluation_duration_unit="timesteps", env_config={"episode_length": 7})
    for resets, lens in ((True, []), (False, [7, 7])):
        with config.evaluation(evaluation_force_reset_envs_before_iteration=resets).build() as algo:
            algo.evaluate()
            assert algo.evaluate()["env_runners"]["episode_lens"] == lens


@pytest.mark.parametrize(("in_pieces", "num_samples"), [(False, 1), (True, 4)])
def test_a_setting_hands_out_episodes_in_pieces(in_pieces: bool, num_samples: int) -> None:
    config = small(evaluation_duration=8, enable_async_evaluation=in_pieces).callbacks(on_sample_end=count_samples)
    with config.build() as algo:  # two sub-envs
        assert algo.evaluate()["env_runners"]["num_samples"] == num_samples


@pytest.mark.parametrize("num_runners", [0, 2])
def test_env_steps_are_counted_whatever_the_batches_of_training_are(num_runners: int) -> None:
    config = small(evaluation_duration=12, evaluation_duration_unit="timesteps").engine("local")
    config.environment(env_config={"episode_length": 7}).env_runners(batch_mode="complete_episodes")
    with config.evaluation(evaluation_num_env_runners=num_runners).build() as algo:
        evaluation = algo.evaluate()
    assert evaluation["env_runners"]["num_env_steps_sampled"] == 12
    assert evaluation["num_unfinished_episodes"] == 2 * max(1, num_runners)


@pytest.mark.slow
def test_an_open_round_is_as_long_as_training_whatever_the_time_limit() -> None:
    overrides = {"env_config": {"seconds": 0.1}}
    config = in_parallel(evaluation_duration="auto", evaluation_sample_timeout_s=0.8, evaluation_config=overrides)
    config.environment(env_config={"seconds": 3 / 8})  # 2 seconds for 16 steps
    with config.engine("process").build() as algo:
        result = algo.train()
    evaluation = result["evaluation"]
    assert evaluation["evaluation_s"] >= result["timers"]["env_step_s"] >= 2.0
    assert not evaluation["truncated"] and evaluation["env_runners"]["num_episodes"] >= 4
    assert result["timers"]["evaluating_s"] < 0.8 + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["episodes", pytest.param("timesteps", marks=pytest.mark.slow)])
def test_training_does_not_wait_for_a_runner_that_stalls_nor_for_an_endless_episode(unit: str) -> None:
    """The first runner sleeps in its first step; the other one plays, and its episodes are long."""
    overrides = {"env_config": {"stalls": True, "episode_length": 10**6}, "disable_env_checking": True}
    config = small(
        Stalling,
        evaluation_interval=1,
        evaluation_parallel_to_training=True,
        evaluation_duration="auto",
        evaluation_duration_unit=unit,
        evaluation_num_env_runners=2,
        evaluation_config=overrides,
        evaluation_sample_timeout_s=60.0,
    ).engine("process")
    with config.build() as algo:
        results = [algo.train() for _ in range(2)]
    for result in results:
        assert result["timers"]["evaluating_s"] < 2.0
        assert result["evaluation"]["num_unfinished_episodes"] == 2
        assert not result["evaluation"]["truncated"]
    assert results[0]["evaluation"]["missing_by_runner"]["1"] == 2  # its first piece


def test_what_callbacks_of_a_round_log_is_in_the_result_of_its_iteration() -> None:
    def log_number(algorithm: Any, metrics_logger: Any) -> None:
        metrics_logger.log_value("number", algorithm.training_iteration, reduce="sum")

    with small(evaluation_interval=1).callbacks(on_evaluate_end=log_number).build() as algo:
        results = [algo.train() for _ in range(3)]
    assert [result.get("number") for result in results] == [1, 2, 3]


def test_runners_get_the_weights_of_a_restored_state_without_evaluation() -> None:
    """Both algorithms have the same version of other weights."""
    with small_run(seed=0).build() as algo, small_run(seed=1).build() as other:
        algo.evaluate()
        algo.set_state(other.get_state())
        algo.evaluate()
        assert algo.eval_env_runner_group is not None
        runner = algo.eval_env_runner_group.local_env_runner
        assert runner is not None
        acting, learned = runner.module.state_dict(), other.get_module().state_dict()
    assert all_of(bool((acting[name] == weights).all()) for name, weights in learned.items())
