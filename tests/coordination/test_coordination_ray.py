"""With Ray, named actors are Ray's own: made by either side, found by the other."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import gymnasium as gym
import pytest
from forms import in_processes, register_by_value

from corral import PPOConfig, coordination
from corral.errors import CoordinationError

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("by_value")]


@pytest.fixture
def by_value(ray_runtime: None) -> None:
    register_by_value(sys.modules[__name__])


class Counter:
    """The counter of the documents."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def inc(self, n: int) -> None:
        self.count += n

    def get(self) -> int:
        return self.count

    def pid(self) -> int:
        return os.getpid()


class Caller:
    """Uses an actor from inside another."""

    def count(self, name: str) -> int:
        coordination.get(name).call("inc", 1)
        coordination.create(f"{name}-2", Counter, 5)
        return int(coordination.get(f"{name}-2").call("get"))


@pytest.mark.slow_on_ray
def test_ray_finds_what_coordination_made(name: str) -> None:
    import ray

    coordination.create(name, Counter)
    gc.collect()
    counter = ray.get_actor(name)
    counter.inc.remote(1)
    counter.inc.remote(2)
    assert ray.get(counter.get.remote()) == 3
    assert ray.get(counter.pid.remote()) != os.getpid()
    assert coordination.get(name).call("get") == 3


@pytest.mark.slow_on_ray
def test_coordination_finds_what_ray_made(name: str) -> None:
    import ray

    counter = ray.remote(Counter).options(name=name, num_cpus=0).remote(4)
    coordination.get(name).call("inc", n=1)
    assert ray.get(counter.get.remote()) == 5
    with pytest.raises(CoordinationError, match="an actor with this name exists"):
        coordination.create(name, Counter)


@pytest.mark.slow_on_ray
def test_a_class_that_the_user_decorated_is_taken_as_it_is(name: str) -> None:
    import ray

    assert coordination.create(name, ray.remote(num_cpus=0)(Counter), 2).call("get") == 2


def test_actors_use_actors(name: str) -> None:
    coordination.create(name, Counter)
    caller = coordination.create(f"{name}-caller", Caller)
    try:
        assert caller.call("count", name) == 5
        assert coordination.get(f"{name}-2").call("get") == 5
        assert coordination.get(name).call("get") == 1
    finally:
        coordination.remove(f"{name}-caller")


@pytest.mark.slow_on_ray
def test_actors_take_no_cpu_from_the_runners(name: str) -> None:
    import ray

    names = [f"{name}-{index}" for index in range(5)]  # more than there are CPUs
    for each in names:
        coordination.create(each, Counter)
    try:
        assert ray.get(ray.remote(num_cpus=4)(lambda: 1).remote(), timeout=60) == 1
    finally:
        for each in names:
            coordination.remove(each)


@pytest.mark.slow_on_ray
def test_processes_reach_ray_s_actors_through_the_driver(name: str) -> None:
    import ray

    coordination.create(name, Counter)

    def use(name: str) -> Any:
        assert "ray" not in sys.modules
        coordination.get(name).call("inc", 3)
        coordination.create(f"{name}-2", Counter, 8)
        return coordination.get(f"{name}-2").call("get")

    assert in_processes(use, [(name,)]) == [8]
    assert ray.get(ray.get_actor(name).get.remote()) == 3
    assert ray.get(ray.get_actor(f"{name}-2").get.remote()) == 8


@pytest.mark.slow_on_ray
def test_what_a_ray_worker_starts_reaches_ray_s_actors_through_it(name: str) -> None:
    import ray

    coordination.create(name, Counter)

    @ray.remote(num_cpus=0)  # type: ignore[misc]
    def start_a_process() -> None:
        code = f"from corral import coordination; coordination.get({name!r}).call('inc', 7)"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **coordination.environment()}, check=True)

    ray.get(start_a_process.remote(), timeout=60)
    assert coordination.get(name).call("get") == 7


@pytest.mark.slow_on_ray
def test_actors_that_were_made_before_ray_stay_with_the_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    with monkeypatch.context() as patch:
        patch.setattr("ray.is_initialized", lambda: False)
        coordination.create(name, Counter, 1)
    assert coordination.get(name).call("pid") == os.getpid()
    with pytest.raises(CoordinationError, match="an actor with this name exists"):
        coordination.create(name, Counter)

    @ray.remote(num_cpus=0)  # type: ignore[misc]
    def problem() -> str:
        try:
            coordination.get(name)
        except CoordinationError as error:
            return str(error)
        return ""

    assert "created before ray.init()" in ray.get(problem.remote(), timeout=60)


@pytest.mark.slow_on_ray
def test_an_actor_that_died_is_an_error(name: str) -> None:
    class Fragile(Counter):
        def die(self) -> None:
            os._exit(1)

    fragile = coordination.create(name, Fragile)
    with pytest.raises(CoordinationError, match=f"{name!r} ended.*'die'"):
        fragile.call("die")


def counted_cart_pole(config: dict[str, Any]) -> gym.Env[Any, Any]:
    class CountedEnv(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            coordination.get(config["counter"]).call("inc", 1)
            return self.env.step(action)

    return CountedEnv(gym.make("CartPole-v1"))


@pytest.mark.slow_on_ray
def test_sub_envs_in_processes_of_a_ray_runner_reach_ray_s_actors(name: str) -> None:
    config = (
        PPOConfig()
        .environment(counted_cart_pole, env_config={"counter": name}, disable_env_checking=True)
        .env_runners(num_env_runners=1, num_envs_per_env_runner=2, vectorization="async")
        .training(train_batch_size_per_learner=32, minibatch_size=None, num_epochs=1)
        .engine("ray")
    )
    with config.build() as algo:
        counter = coordination.create(name, Counter)
        result = algo.train()
    assert counter.call("get") == result["num_env_steps_sampled_lifetime"] >= 32
