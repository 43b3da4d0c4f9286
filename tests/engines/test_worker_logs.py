"""What workers log is logged in the process that started them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from engine_workers import Counter, announce, log_things, warn_of

from corral import PPOConfig, SampleRequest
from corral.engines import WorkerHandle, make_engine
from corral.engines.worker_logs import MAX_RECORDS
from corral.errors import EnvError
from corral.testing import FaultyEnv
from handmade import MakeRunner

log = logging.getLogger("corral")


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


def test_what_a_worker_prints_to_a_file_is_there_with_the_answer(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    engine = make_engine("process")
    engine.start(Counter, name="env runner 7").call(announce, "a new length:", 7).result()
    assert capfd.readouterr().out == "a new length: 7\n"
    engine.stop()


@pytest.mark.slow
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
    assert "ZeroDivisionError: the simulator divided by zero" in text and "corral/testing.py" in text
    assert f", {num_restarts} sub-env restarts" in capsys.readouterr().out.splitlines()[-1]


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


class Talking(gym.Env[Any, Any]):
    """Episodes of two steps; each reset and each step is logged. It fails in step `fails_in`, if there is one."""

    observation_space: Any = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)

    def __init__(self, fails_in: int = 0) -> None:
        self._fails_in, self._num_steps = fails_in, 0
        log.warning("talking is made")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        log.warning("talking is reset")
        return np.zeros(1, np.float32), {"known": 1}

    def step(self, action: Any) -> Any:
        self._num_steps += 1
        log.warning("talking took step %d", self._num_steps)
        if self._num_steps == self._fails_in:
            raise ValueError("the end")
        return np.zeros(1, np.float32), 1.0, self._num_steps % 2 == 0, False, {"known": self._num_steps}


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_sub_envs_in_processes_log_in_the_main_process(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    runner = make_runner(Talking, num_envs=2, vectorization="async", autoreset_mode=mode, disable_env_checking=True)
    caplog.clear()
    rollout = runner.collect(SampleRequest(num_timesteps=16, with_infos=True))
    said = [record.getMessage() for record in caplog.records]
    for i in (0, 1):
        own = [text.removeprefix(f"sub-env {i}: talking ") for text in said if text.startswith(f"sub-env {i}: ")]
        assert own[:5] == ["is made", "is reset", "took step 1", "took step 2", "is reset"]
    rows = [{**row.of_lanes, **row.final} for row in rollout.info_rows.values()]
    assert rows and all(info.keys() <= {"known", "final_obs", "final_info"} for row in rows for info in row.values())


def test_a_sub_env_in_a_process_that_fails_says_what_it_logged(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"num_envs": 1, "vectorization": "async", "disable_env_checking": True}
    with pytest.raises(EnvError, match="the end"):
        make_runner(lambda: Talking(fails_in=3), **settings).sample(num_timesteps=9)
    assert "talking took step 3" in capfd.readouterr().err
    runner = make_runner(lambda: Talking(fails_in=3), restart_failed_sub_environments=True, **settings)
    runner.sample(num_timesteps=3)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("sub-env 0: ")]
    assert said[-4:-1] == [f"sub-env 0: talking {what}" for what in ("took step 3", "is made", "is reset")]


def test_what_sub_envs_in_processes_log_is_in_run_log(tmp_path: Path) -> None:
    config = PPOConfig().environment(Talking).env_runners(num_envs_per_env_runner=2, vectorization="async")
    config.training(train_batch_size_per_learner=16, minibatch_size=16, num_epochs=1)
    with config.build() as algorithm:
        algorithm.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress=False)
    text = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert "WARNING corral: sub-env 1: talking took step 1" in text


def test_python_warnings_of_workers_are_logged(worker: WorkerHandle, caplog: pytest.LogCaptureFixture) -> None:
    worker.call(warn_of, "a sensor is noisy").result()
    (found,) = [record for record in caplog.records if "a sensor is noisy" in record.getMessage()]
    assert (found.name, found.levelno) == ("corral", logging.WARNING)
    assert found.getMessage().startswith("env runner 7: ") and "engine_workers.py" in found.getMessage()
