"""What the Ray engine does beyond the contract; the contract is in test_contract.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from engine_workers import DEADLINE_S, Counter, is_running, until

import warm
from corral.engines import Resources, make_engine
from corral.errors import ConfigError

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture
def engine(ray_runtime: Any) -> Iterator[Any]:
    engine = make_engine("ray")
    yield engine
    engine.stop()


@pytest.fixture
def start(engine: Any) -> Iterator[Callable[..., Any]]:
    handles = []

    def start(factory: Callable[[], Any], resources: Resources | None = None) -> Any:
        handles.append(engine.start(factory, name="env runner 1", resources=resources or Resources(0.5)))
        return handles[-1]

    yield start
    for handle in handles:
        handle.kill()


# Resources.


def test_what_fits_is_let_through(engine: Any) -> None:
    engine.require([Resources(1.0)] * 4)
    engine.require([Resources(0.1)] * 40)
    engine.require([Resources(0, custom={})])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            [Resources(1.5)] * 3,
            r"\(3\) need 4\.5 CPU in all, and Ray's cluster has 4 CPU\..*num_cpus_per_env_runner=0\.5",
        ),
        ([Resources(1, num_gpus=64)], r"need 64 GPU .*has \d+ GPU"),
        ([Resources(1, custom={"licence": 1})], r"need 1 licence .*has 0 licence"),
    ],
)
def test_more_than_there_is_is_refused(engine: Any, asked: list[Resources], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine.require(asked)


def test_more_runners_than_cpus_are_refused_by_build(ray_runtime: Any) -> None:
    from corral import PPOConfig

    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=5).engine("ray")
    with pytest.raises(ConfigError, match=r"\(5\) need 5 CPU .*has 4 CPU"):
        config.build()
    assert ray_runtime.is_initialized()


def test_cpus_of_workers_are_not_available(engine: Any, start: Callable[..., Any]) -> None:
    until(lambda: "4 of 4 CPU" in engine.describe_available())
    start(Counter, Resources(3)).call("add").result(DEADLINE_S)
    until(lambda: "1 of 4 CPU" in engine.describe_available())
    waits = start(Counter, Resources(2)).call("add")
    with pytest.raises(TimeoutError):
        waits.result(0.5)


@pytest.mark.slow
def test_in_a_placement_group_its_bundles_count(ray_runtime: Any) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Trial:
        """Runs in a placement group, as a trial of Tune does; a local class, since actors do not find this module."""

        def require(self, asked: list[Resources]) -> str:
            engine = make_engine("ray")
            try:
                engine.require(asked)
            except ConfigError as error:
                return str(error)
            finally:
                engine.stop()
            return ""

        def start(self, resources: Resources, count: int) -> tuple[list[int], str]:
            engine = make_engine("ray")
            handles = [engine.start(lambda: ["here"], resources=resources) for _ in range(count)]
            counts = [handle.call("count", "here").result(60) for handle in handles]
            free = engine.describe_available()
            for handle in handles:
                handle.kill()
            engine.stop()
            return counts, free

    group = placement_group([{"CPU": 1}, {"CPU": 0.5}, {"CPU": 0.5}])
    place = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    trial = ray_runtime.remote(Trial).options(num_cpus=1, scheduling_strategy=place).remote()

    def require(*asked: Resources) -> str:
        return ray_runtime.get(trial.require.remote(list(asked)), timeout=DEADLINE_S)

    assert require(Resources(0.5), Resources(0.5)) == ""
    refusal = require(Resources(1), Resources(1))
    assert "need 2 CPU" in refusal and "placement group" in refusal and "has 1 CPU" in refusal
    assert "in one place" in require(Resources(0.25), Resources(0.75))
    counts, free = ray_runtime.get(trial.start.remote(Resources(0.5), 2), timeout=DEADLINE_S)
    assert counts == [1, 1]
    assert "0 of 2 CPU" in free
    remove_placement_group(group)


# Object references and actor handles.


def test_references_and_actor_handles_in_the_factory_stay_alive(ray_runtime: Any, start: Callable[..., Any]) -> None:
    """As in `env_config`: Ray has to see that the worker holds them."""

    class Count:
        count = 10

        def add(self) -> int:
            self.count += 1
            return self.count

    named = ray_runtime.remote(num_cpus=0)(Count).remote()
    data = ray_runtime.put(np.arange(1000))

    class Holder:
        def __init__(self, actor: Any, data: list[Any]) -> None:
            self.actor, self.data = actor, data

        def add(self) -> int:
            import ray

            return int(ray.get(self.actor.add.remote()) + ray.get(self.data[0]).sum())

    handle = start(partial(Holder, named, [data]))
    assert handle.call("add").result(DEADLINE_S) == 11 + 499500
    del named, data  # the driver's
    assert handle.call("add").result(DEADLINE_S) == 12 + 499500


# Ray's runtime.


def test_an_engine_leaves_a_runtime_that_it_did_not_start(ray_runtime: Any) -> None:
    first, second = make_engine("ray"), make_engine("ray")
    for engine in (first, second, second, first):
        engine.stop()
        assert ray_runtime.is_initialized()


RUNTIME = """
from corral.engines import make_engine
import ray

first, second = make_engine("ray"), make_engine("ray")
worker = second.start(lambda: [1, 2], name="worker")
print(worker.call("count", 2).result(60), worker.call(lambda w: __import__("os").getpid()).result(60))
pid = ray._private.worker.global_worker.node.all_processes
print(*[info.process.pid for infos in pid.values() for info in infos])
first.stop()
first.stop()
print(ray.is_initialized(), worker.call("pop").result(60))
worker.kill()
second.stop()
print(ray.is_initialized())
"""


@pytest.mark.slow
def test_the_last_engine_ends_the_runtime_that_the_first_started() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", RUNTIME], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    called, processes, *rest = done.stdout.splitlines()
    assert called.split()[0] == "1"
    assert rest == ["True 2", "False"]
    assert done.stderr == ""
    started = [*map(int, processes.split()), int(called.split()[1])]
    assert len(started) > 2
    until(lambda: not any(map(is_running, started)))


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from corral import PPOConfig
try:
    PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=1).engine("ray").build()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_ray_the_extra_is_named() -> None:
    done = warm.run([sys.executable, "-c", WITHOUT_RAY])
    assert done.stdout.startswith("MissingPackageError engine_name='ray' needs Ray")
    assert "pip install 'corral[ray]'" in done.stdout
