"""A runner that is killed, raises or hangs: what the run does about it, under each setting, on each engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import FaultyEnv, alive, faults, pids, wait_until_gone

from at_least import at_least
from corral import Algorithm, PPOConfig
from corral.errors import CallbackError, EnvError, WorkerDiedError

RAY = pytest.param("ray", marks=pytest.mark.xdist_group("ray"))
DEADLINE_S = 90.0


def config(engine: str, record: Path, **settings: Any) -> PPOConfig:
    made = (
        PPOConfig()
        .environment(FaultyEnv, env_config={"record": str(record)})
        .env_runners(num_env_runners=2, num_envs_per_env_runner=1, straggler_factor=None)
        .training(train_batch_size_per_learner=40, minibatch_size=40, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [4]})
        .fault_tolerance(env_step_timeout_s=2.0, delay_between_env_runner_restarts_s=0.1)
        .engine(engine)
        .debugging(seed=0)
    )
    return made.copy(**settings)


def order(record: Path, kind: str, runner: int = 1) -> None:
    (record / f"{kind}-{runner}").touch()


def train_until_restarted(algo: Algorithm, num_restarts: int = 1) -> dict[str, Any]:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        result = algo.train()
        health = result["fault_tolerance"]
        if health["num_remote_worker_restarts"] >= num_restarts and health["num_healthy_workers"] == 2:
            return result
        assert time.monotonic() < deadline_s, health


@pytest.mark.parametrize(
    ("engine", "kinds"),
    [
        ("local", ["raise", "hang"]),
        ("process", ["kill", "raise", "hang"]),
        pytest.param("ray", ["kill", "hang"], marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow]),
    ],
    indirect=["engine"],
)
def test_a_runner_that_fails_is_replaced_and_continues_where_the_others_are(
    engine: str, kinds: list[str], record: Path
) -> None:
    events: list[tuple[list[int], bool]] = []
    versions: list[int] = []

    def note(algorithm: Any, env_runner_group: Any, env_runner_indices: list[int], is_evaluation: bool) -> None:
        events.append((env_runner_indices, is_evaluation))
        versions.extend(
            env_runner_group.foreach_env_runner(
                lambda runner: runner.weights_version, local_env_runner=False, remote_worker_ids=env_runner_indices
            )
        )

    with config(engine, record).callbacks(on_env_runners_recreated=note).build() as algo:
        first = algo.train()
        assert set(first["fault_tolerance"]) >= {
            "num_healthy_workers",
            "num_remote_worker_restarts",
            "num_env_runner_failures",
            "num_sub_environment_restarts",
            "num_env_steps_lost",
        }
        for count, kind in enumerate(kinds, 1):
            algo.env_runner_group.foreach_env(lambda env, task=count: env.set_task(task))
            order(record, kind)
            result = train_until_restarted(algo, count)
            health = result["fault_tolerance"]
            assert (health["num_remote_worker_restarts"], health["num_env_runner_failures"]) == (count, count)
            assert health["num_env_steps_lost"] <= 20 * count
            assert algo.env_runner_group.foreach_env(lambda env: env.task) == [[count], [count]]
            assert weights_are_current(algo)
            assert algo.train()["runner_group"]["by_runner"]["1"]["num_env_steps_sampled"] == 20
        assert faults(record) == kinds
        assert events == [([1], False)] * len(kinds)
        assert all(version > 0 for version in at_least(1, versions))  # it had trained weights when the event fired
    assert wait_until_gone(pids(record)) == set()


def weights_are_current(algo: Algorithm) -> bool:
    ours = algo.learner_group.get_weights()["default_policy"]
    return all(
        np.array_equal(ours[name], theirs[name])
        for theirs in algo.env_runner_group.foreach_env_runner(
            lambda runner: {name: value.numpy() for name, value in runner.module.state_dict().items()}
        )
        for name in ours
    )


@pytest.mark.slow_cases("process")
@pytest.mark.slow_on_ray
@pytest.mark.parametrize("engine", ["local", "process", RAY], indirect=True)
def test_without_fault_tolerance_the_original_error_ends_the_run(engine: str, record: Path) -> None:
    with config(engine, record, restart_failed_env_runners=False).build() as algo:
        algo.train()
        order(record, "raise", runner=2)
        with pytest.raises(EnvError, match=r"'FaultyEnv', sub-env 0, step \d+: raised in step\(\)") as caught:
            algo.train()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    if engine != "local":  # where the traceback itself has not come along
        notes = "\n".join(caught.value.__notes__)
        assert "env runner 2" in notes and "failing.py" in notes and "the simulator of runner 2 diverged" in notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("kill", WorkerDiedError, r"env runner 2: process \d+ was killed by SIGKILL"),
        # The report of a hang says which env hung, and where.
        (
            "hang",
            EnvError,
            r"'FaultyEnv', sub-env 0, step \d+: step\(\) .*env_step_timeout_s=2;.*in fail .*failing\.py",
        ),
    ],
)
def test_without_fault_tolerance_other_faults_end_the_run_too(
    kind: str, error: type[Exception], message: str, record: Path
) -> None:
    with config("process", record, restart_failed_env_runners=False).build() as algo:
        order(record, kind, runner=2)
        with pytest.raises(error, match=message):
            algo.train()


def test_failures_can_be_ignored_until_no_runner_is_left(record: Path) -> None:
    settings = {"restart_failed_env_runners": False, "ignore_env_runner_failures": True}
    with config("local", record, **settings).build() as algo:
        algo.train()
        order(record, "raise", runner=1)
        health = algo.train()["fault_tolerance"]
        assert (health["num_healthy_workers"], health["num_remote_worker_restarts"]) == (1, 0)
        assert algo.env_runner_group.healthy_worker_ids == [2]
        assert algo.train()["runner_group"]["by_runner"]["2"]["num_env_steps_sampled"] == 40
        order(record, "raise", runner=2)
        with pytest.raises(EnvError) as caught:
            algo.train()
        assert "the last runner" in caught.value.__notes__[-1]


def test_restarts_are_limited(record: Path) -> None:
    with config("local", record, max_num_env_runner_restarts=2).build() as algo:
        for num_restarts in (1, 2):
            order(record, "raise")
            train_until_restarted(algo, num_restarts)
        order(record, "raise")
        with pytest.raises(EnvError) as caught:
            algo.train()
        assert "max_num_env_runner_restarts=2 is reached" in caught.value.__notes__[-1]


def test_a_runner_that_fails_again_and_again_ends_the_run(record: Path) -> None:
    rates = {"record": str(record), "rates": {"raise": 1.0}}
    settings = {"env_config": rates, "num_consecutive_env_runner_failures_tolerance": 3, "disable_env_checking": True}
    delay = {"delay_between_env_runner_restarts_s": 0.01}
    with config("local", record, num_env_runners=1, **settings, **delay).build() as algo:
        with pytest.raises(EnvError, match="diverged") as caught:
            algo.train()
        assert "failed 4 times in a row" in caught.value.__notes__[-1]
        assert len(faults(record)) == 4


def test_an_exception_in_a_callback_is_no_fault(record: Path) -> None:
    def fail(episode: Any) -> None:
        raise LookupError("my own mistake")

    with config("local", record).callbacks(on_episode_end=fail).build() as algo:
        with pytest.raises(CallbackError, match="my own mistake"):
            algo.train()
        assert algo.env_runner_group.num_remote_worker_restarts == 0


@pytest.mark.slow
def test_a_sub_env_that_fails_is_replaced_and_its_runner_stays(record: Path) -> None:
    with config("process", record, restart_failed_sub_environments=True, num_envs_per_env_runner=2).build() as algo:
        algo.train()
        processes = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid())
        for count, kind in enumerate(["raise", "hang"], 1):
            order(record, kind)
            health = algo.train()["fault_tolerance"]
            assert (health["num_sub_environment_restarts"], health["num_env_runner_failures"]) == (count, 0)
        assert faults(record) == ["raise", "hang"]
        assert algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid()) == processes


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from failing import FaultyEnv
from corral import PPOConfig

config = PPOConfig().environment(FaultyEnv, env_config={{"record": {record!r}}})
config.env_runners(num_envs_per_env_runner=2, vectorization={vectorization!r}).engine("process")
config.env_runners(num_env_runners={num_env_runners})
config.training(train_batch_size_per_learner=200, minibatch_size=100)
with config.build() as algo:
    while True:
        algo.train()
        print("trained", flush=True)
"""


@pytest.mark.parametrize(
    ("stop_signal", "num_env_runners", "vectorization", "fault"),
    [
        pytest.param(signal.SIGINT, 2, "sync", None, marks=pytest.mark.slow),
        (signal.SIGKILL, 2, "async", None),
        pytest.param(signal.SIGKILL, 1, "sync", "hold", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 0, "async", "hold", marks=pytest.mark.slow),
    ],
)
def test_no_process_outlives_the_run(
    stop_signal: int, num_env_runners: int, vectorization: str, fault: str | None, record: Path
) -> None:
    script = SCRIPT.format(
        tests=str(Path(__file__).parent),
        record=str(record),
        num_env_runners=num_env_runners,
        vectorization=vectorization,
    )
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        if run.stdout.readline() != "trained\n":  # it ended, and says why
            pytest.fail(run.stderr.read())
        workers = pids(record) - {run.pid}
        assert len([pid for pid in workers if alive(pid)]) >= (1 if fault and num_env_runners else 2)
        if fault is not None:
            order(record, fault, runner=num_env_runners)
            deadline_s = time.monotonic() + DEADLINE_S
            while not faults(record):
                assert time.monotonic() < deadline_s
        run.send_signal(stop_signal)
        run.wait(30)
        assert wait_until_gone(workers) == set()
    assert run.returncode == (-signal.SIGKILL if stop_signal == signal.SIGKILL else run.returncode) != 0
