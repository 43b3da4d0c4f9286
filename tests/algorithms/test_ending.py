"""The end of an algorithm: nothing that it started outlives it, whatever interrupts `stop`, or if nobody calls it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from at_least import at_least
from corral import Algorithm, PPOConfig
from corral.testing import CountingEnv
from small import small

DEADLINE_S = 60.0


class SlowToClose(CountingEnv):
    """Says in a file that it is being closed, and takes longer than anybody waits; only in the process of a sub-env."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.closing, self.main = Path(config["closing"]), config["main"]

    def close(self) -> None:
        if os.getpid() != self.main:
            self.closing.touch()
            time.sleep(10 * DEADLINE_S)


def config(closing: Path | None = None, **settings: Any) -> PPOConfig:
    env = CountingEnv if closing is None else SlowToClose
    env_config = {} if closing is None else {"closing": str(closing), "main": os.getpid()}
    batch = {"train_batch_size_per_learner": 8, "minibatch_size": 8}
    return small(env, env_config=env_config, disable_env_checking=True, **batch, **settings)


def processes(algo: Algorithm) -> set[int]:
    """Return the processes that an algorithm has started."""
    handles: list[Any] = algo.engine.running()
    sub_envs = [] if algo.env_runner is None else getattr(algo.env_runner.env.unwrapped, "processes", [])
    return {handle.pid for handle in handles} | {process.pid for process in sub_envs}


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: set[int]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while left := {pid for pid in pids if runs(pid)}:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.02)


@contextmanager
def interrupt_when(file: Path) -> Iterator[None]:
    """Send SIGINT to this process, as Ctrl-C does, as soon as a file is there."""

    def watch() -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not file.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
WORKERS = {"num_env_runners": 1, "num_learners": 1, "engine_name": "process"}


@pytest.mark.parametrize(
    "settings", [pytest.param(WORKERS, marks=pytest.mark.slow), {"vectorization": "async"}], ids=["workers", "sub_envs"]
)
def test_an_interrupt_while_it_stops_leaves_no_process(settings: dict[str, Any], tmp_path: Path) -> None:
    algo = config(tmp_path / "closing", **settings).build()
    pids = processes(algo)
    assert len(pids) == 2
    start = time.monotonic()
    with interrupt_when(tmp_path / "closing"), pytest.raises(KeyboardInterrupt):
        algo.stop()
    assert time.monotonic() - start < DEADLINE_S
    assert_gone(pids)
    algo.stop()


@pytest.mark.slow
def test_a_second_stop_ends_what_the_first_one_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    algo = config(**WORKERS).callbacks(on_algorithm_stop=lambda: stopped.append("once")).build()
    pids = processes(algo)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for part in (algo.engine, algo.learner_group, algo.env_runner_group):
            patch.setattr(part, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            algo.stop()
    assert all(runs(pid) for pid in at_least(1, pids))
    algo.stop()
    assert_gone(pids)
    assert stopped == ["once"]


@pytest.mark.slow_cases("workers")
@pytest.mark.parametrize("settings", [WORKERS, {"vectorization": "async"}], ids=["workers", "sub_envs"])
def test_an_algorithm_that_is_dropped_takes_its_processes_along(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    algo = config(**settings).build()
    algo.train()
    pids = processes(algo)
    assert len(pids) == 2
    del algo
    gc.collect()
    assert_gone(pids)
    if settings is WORKERS:
        assert "deleted before stop() was called: its 2 worker(s) are ended" in caplog.text
