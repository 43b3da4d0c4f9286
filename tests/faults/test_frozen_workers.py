"""Workers that hang or are stopped by a signal, without any limit inside their processes: the driver notices."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from failing import FaultyEnv, alive, pids, wait_until_gone

from corral import Algorithm, PPOConfig
from corral.errors import WorkerDiedError

RAY = pytest.param("ray", marks=pytest.mark.xdist_group("ray"))
SLOW_RAY = pytest.param("ray", marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow])
DEADLINE_S = 90.0
TIMEOUT_S = 3.0


def config(engine: str, record: Path, **settings: Any) -> PPOConfig:
    made = (
        PPOConfig()
        .environment(FaultyEnv, env_config={"record": str(record)})
        .env_runners(num_env_runners=2, num_envs_per_env_runner=1)
        .training(train_batch_size_per_learner=40, minibatch_size=40, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [4]})
        .fault_tolerance(worker_timeout_s=TIMEOUT_S)
        .engine(engine)
    )
    return made.copy(**settings)


def train_until_restarted(algo: Algorithm, num_restarts: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        health = algo.train()["fault_tolerance"]
        if health["num_remote_worker_restarts"] == num_restarts and len(algo.env_runner_group.healthy_worker_ids) == (
            algo.config.num_env_runners
        ):
            return dict(health)
        assert time.monotonic() < deadline_s, health


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("engine", ["process", RAY], indirect=True)
def test_a_frozen_runner_is_replaced_while_the_others_continue(
    engine: str, record: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with config(engine, record).build() as algo, caplog.at_level(logging.WARNING, "corral"):
        algo.train()
        [process] = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), remote_worker_ids=[1])
        os.kill(process, signal.SIGSTOP)
        health = train_until_restarted(algo, 1)
        assert health["num_env_runner_failures"] == 1 and health["num_env_steps_lost"] > 0
        assert "env runner 1 failed, and restarts" in caplog.text and "worker_timeout_s" in caplog.text
        assert wait_until_gone({process}) == set()
    assert wait_until_gone(pids(record)) == set()


@pytest.mark.slow
def test_a_runner_alone_that_hangs_without_a_step_timeout_does_not_hold_up_training(record: Path) -> None:
    with config("process", record, num_env_runners=1).build() as algo:
        (record / "hang-1").touch()
        began_s = time.monotonic()
        algo.train()
        assert time.monotonic() - began_s < DEADLINE_S
        assert algo.env_runner_group.num_remote_worker_restarts == 1
        # Nobody waits for long for the answer of a frozen runner: its replacement has the place in a saved state.
        [process] = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid())
        os.kill(process, signal.SIGSTOP)
        began_s = time.monotonic()
        [saved] = algo.get_state()["runners"]["runners"]
        assert saved["counts"]["num_restarts"] == 2 and time.monotonic() - began_s < DEADLINE_S
        train_until_restarted(algo, 2)
        assert wait_until_gone({process}) == set()
    assert wait_until_gone(pids(record)) == set()


@pytest.mark.slow
def test_a_runner_that_freezes_in_a_call_of_the_user_has_no_result_and_is_replaced(record: Path) -> None:
    def index_or_freeze(runner: Any) -> int:
        if runner.worker_index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return int(runner.worker_index)

    with config("process", record).build() as algo:
        assert algo.env_runner_group.foreach_env_runner(index_or_freeze) == [2]
        assert algo.env_runner_group.healthy_worker_ids == [2]
        train_until_restarted(algo, 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", SLOW_RAY], indirect=True)
def test_a_frozen_learner_ends_the_run_with_an_error(engine: str, record: Path) -> None:
    with config(engine, record, num_env_runners=0, num_learners=2).build() as algo:
        algo.train()
        workers = algo.learner_group.remote.workers
        processes = {worker.call(lambda learner: os.getpid()).result(DEADLINE_S) for worker in workers}
        os.kill(min(processes), signal.SIGSTOP)
        with pytest.raises(WorkerDiedError, match=r"learner \d: .* did not answer within 3 s.*worker_timeout_s"):
            algo.train()
        assert wait_until_gone(processes) == set()


@pytest.mark.slow
def test_a_late_fragment_is_reported_once_also_when_nobody_waits_for_it(
    record: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"sample_timeout_s": 0.3, "worker_timeout_s": 600.0}
    with config("process", record, **settings).build() as algo, caplog.at_level(logging.WARNING, "corral"):
        for _ in range(3):
            algo.train()  # the speeds are known, so that rounds do not wait for a straggler
        [process] = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), remote_worker_ids=[1])
        os.kill(process, signal.SIGSTOP)
        deadline_s = time.monotonic() + DEADLINE_S
        while "No fragment" not in caplog.text:
            algo.train()
            assert time.monotonic() < deadline_s
        for _ in range(3):
            algo.train()
        assert caplog.text.count("from env runner 1") == 1
        assert "replaced if it takes longer than 600 s (worker_timeout_s)" in caplog.text
        assert alive(process)
    assert wait_until_gone(pids(record)) == set()  # a frozen runner does not hold up the end
