"""The engine of an algorithm: made when something runs on it, one for all groups, ended with the algorithm."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import corral.engines.lazy
from corral.engines import make_engine
from corral.engines.base import Resources
from corral.engines.lazy import LazyEngine
from corral.errors import ConfigError
from small import small


class Counted:
    """Counts the engines that are made, what they are asked for, and the workers that they start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.log: list[tuple[str, Any]] = []
        monkeypatch.setattr(corral.engines.lazy, "make_engine", self.make)

    def make(self, name: str) -> Any:
        engine, log = make_engine(name), self.log
        require, start, stop = engine.require, engine.start, engine.stop

        def noted_require(resources: Any) -> None:
            log.append(("require", len(resources)))
            require(resources)

        def noted_start(factory: Any, **given: Any) -> Any:
            log.append(("start", given["name"]))
            return start(factory, **given)

        def noted_stop() -> None:
            log.append(("stop", None))
            stop()

        engine.require, engine.start, engine.stop = noted_require, noted_start, noted_stop  # type: ignore[method-assign]
        self.made.append(engine)
        return engine


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_an_embedded_algorithm_makes_no_engine(counted: Counted) -> None:
    with small().build() as algorithm:
        algorithm.train()
        assert not algorithm.engine.is_made
    assert counted.made == []


@pytest.mark.slow
def test_an_embedded_algorithm_never_looks_for_the_cluster_of_ray_address() -> None:
    code = (
        "import sys\nfrom corral import PPOConfig\n"
        "config = PPOConfig().environment('CartPole-v1').training(train_batch_size_per_learner=64, minibatch_size=64)\n"
        "with config.build() as algorithm:\n"
        "    print(algorithm.engine.traits.name, algorithm.train()['engine'])\n"
        "print('ray' in sys.modules)\n"
    )
    environment = {**os.environ, "RAY_ADDRESS": "203.0.113.7:1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stdout.split() == ["ray", "embedded", "False"], done.stderr


@pytest.mark.slow
def test_runners_and_learners_share_one_engine_that_was_asked_for_all_of_them_first(counted: Counted) -> None:
    config = small().env_runners(num_env_runners=1).learners(num_learners=1).engine("process")
    with config.build() as algorithm:
        assert len(counted.made) == 1 and algorithm.engine.is_made
        assert counted.log == [("require", 2), ("start", "env runner 1"), ("start", "learner 1")]
    assert counted.log[3:] == [("stop", None)] and not algorithm.engine.is_made


def test_what_can_never_run_together_is_refused_before_anything_starts(counted: Counted) -> None:
    # The runners alone would fit, and so would the learners.
    import torch

    num_gpus = torch.cuda.device_count()
    config = small().env_runners(num_env_runners=1, num_gpus_per_env_runner=num_gpus)
    config.learners(num_learners=1, num_gpus_per_learner=max(num_gpus, 1)).engine("process")
    with pytest.raises(ConfigError, match=r"The workers asked for \(2\)"):
        config.build()
    assert [what for what, _ in counted.log] == ["require", "stop"]


def test_the_traits_are_known_without_an_engine(counted: Counted) -> None:
    for name in ("local", "process", "ray"):
        engine = LazyEngine(name)
        assert engine.traits.name == name
        engine.require([])
        engine.stop()
    assert counted.made == []


def test_a_stopped_engine_stops_once(counted: Counted) -> None:
    engine = LazyEngine("local")
    engine.require([Resources()])
    engine.stop()
    engine.stop()
    assert [what for what, _ in counted.log] == ["require", "stop"]


# A module that a worker imports for the env's class, and that builds an algorithm at its top level.
EXPERIMENT = """
import os
from corral import PPOConfig
from corral.testing import IdentityEnv

with open({record!r}, "a") as file:
    print(os.getpid(), file=file)

class Env(IdentityEnv):
    pass

config = PPOConfig().environment({env}, disable_env_checking=True).engine({engine!r})
config.env_runners(num_env_runners=2, num_envs_per_env_runner=1, num_cpus_per_env_runner=0.1)
if os.getpid() != {driver}:  # the test builds it in the driver
    config.build()
"""


@pytest.mark.slow_cases("process")
@pytest.mark.parametrize(
    ("engine", "env"),
    [
        ("process", "Env"),
        # The factory imports this one; unpickling it imports nothing.
        pytest.param("process", "'unguarded:Env'", marks=pytest.mark.slow),
        pytest.param("ray", "Env", marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow]),
    ],
)
def test_a_module_that_builds_when_workers_import_it_is_refused(
    engine: str, env: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if engine == "ray":
        request.getfixturevalue("ray_runtime")
    record = tmp_path / "imports"
    source = EXPERIMENT.format(record=str(record), env=env, engine=engine, driver=os.getpid())
    (tmp_path / "unguarded.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unguarded", raising=False)
    made = importlib.import_module("unguarded").config
    with pytest.raises(ConfigError, match="imports the module 'unguarded', whose top level builds") as caught:
        made.build()
    assert 'under `if __name__ == "__main__":`' in str(caught.value)
    assert f"unguarded.py:{len(source.splitlines())}" in str(caught.value)
    processes = record.read_text().split()
    assert len(set(processes)) == len(processes) <= 3  # this one and two workers, which started none


def test_two_threads_may_start_workers_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation runners restart in a thread of their own while training runners restart in the main thread."""
    made = []

    def make_slowly(name: str) -> Any:
        time.sleep(0.05)
        made.append(name)
        return make_engine(name)

    monkeypatch.setattr(corral.engines.lazy, "make_engine", make_slowly)
    engine = LazyEngine("local")
    threads = [threading.Thread(target=lambda: [engine.start(dict) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["local"]
    assert len(engine.running()) == 800
    engine.stop()
