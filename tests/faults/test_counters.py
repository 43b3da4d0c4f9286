"""Steps that the envs took are sampled, lost or in flight, wherever an exception or a signal ends an iteration."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from counting import CountedEnv, steps_taken

from corral import Algorithm, APPOConfig, DQNConfig, PPOConfig
from corral.algorithms.config.config import AlgorithmConfig
from corral.errors import CorralError

STEPS = 12
DEADLINE_S = 60.0


def config(record: Path, algo: type[AlgorithmConfig] = PPOConfig, *, num_envs: int = 3, **settings: Any) -> Any:
    env_config = {"record": str(record), "episode_length": 4, "stagger": True, **settings.pop("env_config", {})}
    made = (
        algo()
        .environment(CountedEnv, env_config=env_config, disable_env_checking=True)
        .env_runners(num_envs_per_env_runner=num_envs, vectorization="sync")
        .training(train_batch_size_per_learner=STEPS)
        .rl_module(model_config={"fcnet_hiddens": [4]})
        .debugging(seed=0)
    )
    if algo is PPOConfig:
        made.training(minibatch_size=STEPS, num_epochs=1)
    return made.copy(**settings)


def train_on(algo: Algorithm, iterations: int) -> tuple[dict[str, Any], int]:
    """Train, whatever is raised; return the last result, and how many calls raised."""
    raised, result = 0, {}
    for _ in range(iterations):
        try:
            result = algo.train()
        except (KeyboardInterrupt, SystemExit, CorralError, OSError):
            raised += 1
    return result, raised


def assert_all_counted(algo: Algorithm, result: dict[str, Any], record: Path) -> None:
    """Check the invariant, and that all counters of sampled steps agree."""
    health = result["fault_tolerance"]
    sampled = result["num_env_steps_sampled_lifetime"]
    assert sampled == result["env_runners"]["num_env_steps_sampled_lifetime"]
    assert steps_taken(record) == sampled + health["num_env_steps_lost"] + health["num_env_steps_in_flight"]


def check(record: Path, made: AlgorithmConfig, iterations: int = 3, *, num_raised: int = 1) -> dict[str, Any]:
    with made.build() as algo:
        result, raised = train_on(algo, iterations)
        assert raised == num_raised
        assert_all_counted(algo, result, record)
    return result


def each(tmp_path: Path, steps: range) -> Any:
    for step in steps:
        (tmp_path / str(step)).mkdir()
        yield step, tmp_path / str(step)


@pytest.mark.parametrize("how", ["KeyboardInterrupt", "SystemExit", "OSError", "SIGINT"])
@pytest.mark.parametrize("mode", ["next_step", pytest.param("same_step", marks=pytest.mark.slow)])
def test_an_exception_in_any_step_of_a_sub_env(how: str, mode: str, tmp_path: Path) -> None:
    for step, record in each(tmp_path, range(1, 12)):
        fault = {"at": step, "how": how, "vector_index": step % 3}
        result = check(record, config(record, env_config=fault, autoreset_mode=mode), 4)
        if mode == "same_step":  # each row is a step of all sub-envs
            whole_rows = (step - 1) % 4
            assert result["fault_tolerance"]["num_env_steps_lost"] == 3 * whole_rows + step % 3


@pytest.mark.parametrize("how", ["KeyboardInterrupt", "OSError"])
def test_an_exception_while_whole_episodes_are_sampled(how: str, tmp_path: Path) -> None:
    for step, record in each(tmp_path, range(1, 9)):
        made = config(record, env_config={"at": step, "how": how}, batch_mode="complete_episodes")
        with made.build() as algo:
            result, raised = train_on(algo, 3)
            assert raised == 1
            assert algo.env_runner is not None
            algo.env_runner.sample(num_episodes=3)
            rollouts = result["num_env_steps_sampled_lifetime"]
            assert rollouts + result["fault_tolerance"]["num_env_steps_lost"] <= steps_taken(record)
            runner = algo.env_runner
            assert runner.num_env_steps_sampled_lifetime + runner.num_env_steps_lost == steps_taken(record)


def test_an_algorithm_that_samples_a_few_steps_at_a_time(tmp_path: Path) -> None:
    for step, record in each(tmp_path, range(1, 6)):
        made = config(record, DQNConfig, env_config={"at": step}, min_sample_timesteps_per_iteration=STEPS)
        check(record, made.training(num_steps_sampled_before_learning_starts=10**6))


def test_several_rounds_in_an_iteration(tmp_path: Path) -> None:
    for step, record in each(tmp_path, range(1, 8)):
        check(record, config(record, env_config={"at": step}, rollout_fragment_length=2))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, LookupError])
@pytest.mark.parametrize(
    "event",
    [
        "on_episode_created",
        "on_episode_start",
        "on_episode_step",
        "on_episode_end",
        "on_postprocess_trajectory",
        "on_sample_end",
        "on_learn_on_batch",
        "on_train_result",
    ],
)
def test_an_exception_in_a_callback(event: str, error: type[BaseException], tmp_path: Path) -> None:
    calls = []

    def fail_once() -> None:
        calls.append(event)
        if len(calls) == 2:
            raise error("once")

    result = check(tmp_path, config(tmp_path).callbacks(**{event: fail_once}), 4)
    episodes = result["env_runners"]["num_episodes_lifetime"]
    assert episodes <= result["num_env_steps_sampled_lifetime"] / 4 + 3


def test_a_rollout_that_a_callback_lost_is_not_in_the_metrics(tmp_path: Path) -> None:
    def fail() -> None:
        raise LookupError

    with config(tmp_path).callbacks(on_sample_end=fail).build() as algo:
        _, raised = train_on(algo, 2)
        runner = algo.env_runner
        assert raised == 2 and runner is not None
        assert runner.metrics.peek("num_env_steps_sampled_lifetime") == 0
        assert runner.metrics.peek("num_episodes_lifetime") == 0
        assert runner.num_env_steps_lost == 2 * STEPS == steps_taken(tmp_path)


@pytest.mark.parametrize("how", ["KeyboardInterrupt", "OSError"])
def test_the_local_engine(how: str, tmp_path: Path) -> None:
    for step, record in each(tmp_path, range(1, 6)):
        made = config(record, env_config={"at": step, "how": how}, num_env_runners=2, engine_name="local", num_envs=2)
        check(record, made, 4, num_raised=int(how == "KeyboardInterrupt"))


@pytest.mark.parametrize("how", ["SystemExit", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_the_process_engine(how: str, tmp_path: Path) -> None:
    """What ends a sample in a runner's process costs this sample; the runner restarts in its process."""
    made = config(tmp_path, env_config={"at": 5, "how": how}, num_env_runners=2, engine_name="process", num_envs=2)
    with made.copy(straggler_factor=None).build() as algo:
        deadline_s = time.monotonic() + DEADLINE_S
        result = algo.train()
        while result["fault_tolerance"]["num_healthy_workers"] < 2 or result["training_iteration"] < 4:
            assert time.monotonic() < deadline_s
            result = algo.train()
        assert result["fault_tolerance"]["num_env_runner_failures"] == 1
        assert_all_counted(algo, result, tmp_path)


@pytest.mark.slow
def test_an_interrupt_while_runners_are_waited_for_loses_nothing(tmp_path: Path) -> None:
    made = config(tmp_path, num_env_runners=2, engine_name="process", num_envs=2, straggler_factor=None)
    with made.build() as algo:
        group = algo.env_runner_group
        algo.train()
        take = group.mail.take_arrived

        def interrupted() -> None:
            group.mail.take_arrived = take  # type: ignore[method-assign]
            take()
            os.kill(os.getpid(), signal.SIGINT)

        for _ in range(3):
            group.mail.take_arrived = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                algo.train()
        result = algo.train()
        assert_all_counted(algo, result, tmp_path)
        assert result["fault_tolerance"]["num_env_steps_lost"] == 0


def test_an_interrupt_while_metrics_are_collected_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with config(tmp_path).build() as algo:
        runner = algo.env_runner
        assert runner is not None
        log_samples = runner.log_samples

        def interrupted() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            log_samples()

        monkeypatch.setattr(runner, "log_samples", interrupted)
        with pytest.raises(KeyboardInterrupt):
            algo.train()
        monkeypatch.undo()
        assert_all_counted(algo, algo.train(), tmp_path)


@pytest.mark.parametrize("how", ["KeyboardInterrupt", "OSError", "SystemExit"])
def test_sub_envs_in_processes_of_their_own(how: str, tmp_path: Path) -> None:
    made = config(tmp_path, env_config={"at": 6, "how": how, "vector_index": 1}, vectorization="async", num_envs=2)
    check(tmp_path, made, 3)


def interrupt_soon(is_over: threading.Event, delay_s: float) -> None:
    if not is_over.wait(delay_s):
        os.kill(os.getpid(), signal.SIGINT)


# An interrupt in the middle of a fork, when async sub-envs are made, is reported there by Python, and not raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_real_interrupts_at_any_time(vectorization: str, tmp_path: Path) -> None:
    """The signal comes from another thread, at moments spread over the iteration."""
    num_signals = 20 if vectorization == "sync" else 6
    made = config(tmp_path, vectorization=vectorization, num_envs=2, train_batch_size_per_learner=120)
    with made.build() as algo:
        start = time.perf_counter()
        algo.train()
        iteration_s, raised = time.perf_counter() - start, 0
        for count in range(num_signals):
            is_over = threading.Event()
            delay_s = iteration_s * (count + 0.5) / num_signals
            thread = threading.Thread(target=interrupt_soon, args=[is_over, delay_s])
            try:
                thread.start()
                algo.train()
                is_over.set()
                thread.join()
            except KeyboardInterrupt:
                raised += 1
                thread.join()
        assert raised
        assert_all_counted(algo, algo.train(), tmp_path)


@pytest.mark.slow
def test_a_fragment_that_waits_when_a_run_is_saved_counts_in_none_of_its_counters(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.mkdir()
    made = config(record, APPOConfig, num_envs=1, env_config={"at": 14, "how": "OSError"})
    made.env_runners(num_env_runners=0, rollout_fragment_length=5)
    with made.build() as algo:
        _, raised = train_on(algo, 1)  # a batch is three fragments, and the third one fails
        assert raised == 1 and algo.env_runner_group.fault_results()["num_env_steps_in_flight"] == 10
        algo.save(tmp_path / "saved")
        algo.save(tmp_path / "again")  # saving changes nothing
        assert_all_counted(algo, algo.train(), record)
    for name in ("saved", "again"):
        with made.build() as algo:
            algo.restore_from_path(tmp_path / name)
            result = algo.train()
        sampled = result["num_env_steps_sampled_lifetime"]
        assert sampled == result["env_runners"]["num_env_steps_sampled_lifetime"]
        assert sampled == result["env_runners"]["num_env_steps_sampled"] >= STEPS
        assert result["fault_tolerance"]["num_env_steps_lost"] == 13


@pytest.mark.slow
def test_what_an_interrupted_iteration_received_from_processes_is_in_all_counters_when_it_is_saved(
    tmp_path: Path,
) -> None:
    record = tmp_path / "record"
    record.mkdir()
    made = config(record, num_envs=1).env_runners(num_env_runners=1).engine("process")
    with made.build() as algo, pytest.MonkeyPatch.context() as patch:
        algo.train()
        algo.train()
        patch.setattr(algo, "update_modules", interrupt)
        with pytest.raises(KeyboardInterrupt):
            algo.train()
        algo.save(tmp_path / "saved")
    with made.build() as algo:
        algo.restore_from_path(tmp_path / "saved")
        result = algo.train()
    assert result["num_env_steps_sampled_lifetime"] == 4 * STEPS
    assert result["env_runners"]["num_env_steps_sampled_lifetime"] == 4 * STEPS
    assert result["env_runners"]["num_env_steps_sampled"] == 2 * STEPS  # of the interrupted iteration, too


def interrupt(*args: Any, **settings: Any) -> Any:
    raise KeyboardInterrupt
