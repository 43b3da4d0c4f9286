"""What workers log is logged in the process that started them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from engine_workers import Counter, log_things

from corral import PPOConfig
from corral.engines import WorkerHandle, make_engine
from corral.engines.worker_logs import MAX_RECORDS
from corral.loggers.progress import describe_restarts
from corral.testing import FaultyEnv
from handmade import MakeRunner


@pytest.fixture(params=["process", pytest.param("ray", marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow])])
def worker(request: pytest.FixtureRequest) -> Iterator[WorkerHandle]:
    if request.param == "ray":
        request.getfixturevalue("ray_runtime")
    engine = make_engine(request.param)
    handle = engine.start(Counter, name="env runner 7")
    yield handle
    handle.kill()
    engine.stop()


def test_records_come_with_the_answer_of_the_call(worker: WorkerHandle, caplog: pytest.LogCaptureFixture) -> None:
    worker.call(log_things, "no pressure").result()
    first, second = [record for record in caplog.records if "env runner 7" in record.getMessage()]
    assert (first.name, first.levelno) == ("corral", logging.WARNING)
    assert first.getMessage().startswith("env runner 7: in a worker: no pressure\nTraceback")
    assert "engine_workers.py" in first.getMessage() and "ZeroDivisionError: no pressure" in first.getMessage()
    assert (second.name, second.getMessage()) == ("some.library", "env runner 7: an error of a library")
    caplog.clear()
    worker.call(log_things, "much", MAX_RECORDS + 5).result()
    assert len(caplog.records) == MAX_RECORDS + 1
    assert caplog.records[-1].getMessage() == "env runner 7: 6 more records were dropped, of one call."


def test_restarts_in_runners_of_their_own_processes_are_in_run_log_and_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PPOConfig().environment(FaultyEnv, env_config={"fault": "raise_step"}).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=2, num_env_runners=1)
    config.fault_tolerance(restart_failed_sub_environments=True)
    config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1)
    with config.build() as algorithm:
        result = algorithm.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run")
    num_restarts = result["fault_tolerance"]["num_sub_environment_restarts"]
    text = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert num_restarts > 1 and text.count("It was restarted.") == num_restarts
    assert "WARNING corral: env runner 1: env 'FaultyEnv', sub-env 1, step " in text
    assert "ZeroDivisionError: the simulator divided by zero" in text and "testing/envs.py" in text
    assert f", {num_restarts} sub-env restarts" in capsys.readouterr().out.splitlines()[-1]


def test_restarts_are_described() -> None:
    none = {"num_remote_worker_restarts": 0, "num_sub_environment_restarts": 0}
    assert describe_restarts({"fault_tolerance": none}) == ""
    found = {"fault_tolerance": none | {"num_sub_environment_restarts": 1}, "evaluation": none}
    assert describe_restarts(found) == "1 sub-env restart"
    found["evaluation"] = none | {"num_remote_worker_restarts": 2}
    assert describe_restarts(found) == "2 runner restarts, 1 sub-env restart"


class ResetsOnce(gym.Env[Any, Any]):
    """Episodes of one step; only the first reset works."""

    observation_space: Any = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)
    is_used = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.is_used:
            raise OSError("the simulator is gone")
        self.is_used = True
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, True, False, {}


def test_failures_with_a_step_in_between_are_not_in_a_row(make_runner: MakeRunner) -> None:
    runner = make_runner(
        ResetsOnce, vectorization="sync", autoreset_mode="same_step", restart_failed_sub_environments=True
    )
    assert runner.sample(num_timesteps=8).rewards.sum() == 8
    assert runner.num_sub_env_restarts >= 7
