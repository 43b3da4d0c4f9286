"""Runners that hold a second request: they work on while nobody receives, and a fault costs one request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from counting import CountedEnv, steps_taken

from corral import PPOConfig
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.data.episodes.rollout import Rollout
from corral.engines.lazy import LazyEngine
from corral.runners.requests import SampleRequest
from corral.runners.runner_group import EnvRunnerGroup

DEADLINE_S = 60.0
STEPS = 12
REQUEST = SampleRequest(num_timesteps=STEPS)


@contextmanager
def started(record: Path, engine_name: str, num_env_runners: int = 2, **env_config: Any) -> Iterator[EnvRunnerGroup]:
    config = (
        PPOConfig()
        .environment(CountedEnv, env_config={"record": str(record), **env_config}, disable_env_checking=True)
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=1, vectorization="sync")
        .rl_module(model_config={"fcnet_hiddens": [4]})
        .fault_tolerance(delay_between_env_runner_restarts_s=0.0)
        .debugging(seed=0)
        .freeze()
    )
    engine = LazyEngine(engine_name)
    group = EnvRunnerGroup(config, engine)
    try:
        yield group
    finally:
        group.stop()
        engine.stop()


def poll(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def fetch(group: EnvRunnerGroup, num_fragments: int) -> list[Rollout]:
    fetched: list[Rollout] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(fetched) < num_fragments:
        assert time.monotonic() < deadline_s
        fetched += group.fetch_samples(timeout_seconds=5)
    return fetched


def send_weights(group: EnvRunnerGroup, version: int) -> None:
    weights = {name: spec.build().state_dict() for name, spec in group.module_specs.items()}
    arrays = {name: {key: value.numpy() for key, value in part.items()} for name, part in weights.items()}
    group.sync_weights({"modules": arrays}, version)


@pytest.mark.slow
def test_a_runner_with_two_requests_works_on_while_nobody_receives(tmp_path: Path) -> None:
    with started(tmp_path, "process") as group:
        send_weights(group, 1)
        assert group.sample_async(REQUEST, max_requests=2) == 4
        assert group.sample_async(REQUEST, max_requests=2) == 0
        poll(lambda: steps_taken(tmp_path) == 4 * STEPS)  # this process learns in the meantime, and receives nothing
        send_weights(group, 2)
        fragments = fetch(group, 1)
        num_new = group.sample_async(REQUEST, max_requests=2)
        fragments += fetch(group, 4 + num_new - len(fragments))
        assert [r.weights_version for r in fragments].count(1) == 4
        assert [r.weights_version for r in fragments].count(2) == num_new > 0
        assert steps_taken(tmp_path) == sum(rollout.num_env_steps for rollout in fragments) == (4 + num_new) * STEPS
        for index in (1, 2):
            of_runner = [rollout for rollout in fragments if rollout.worker_index == index]
            assert [rollout.continues for rollout in of_runner] == [False, *[True] * (len(of_runner) - 1)]


@pytest.mark.parametrize(("engine", "num_env_runners"), [("local", 0), ("local", 2)])
def test_runners_of_this_process_sample_when_they_are_asked(engine: str, num_env_runners: int, tmp_path: Path) -> None:
    num_fragments = 2 * max(1, num_env_runners)
    with started(tmp_path, engine, num_env_runners) as group:
        send_weights(group, 1)
        assert group.sample_async(REQUEST, max_requests=2) == num_fragments
        assert steps_taken(tmp_path) == num_fragments * STEPS
        assert group.fault_results()["num_env_steps_in_flight"] == num_fragments * STEPS
        assert group.sample_async(REQUEST, max_requests=2) == 0
        send_weights(group, 2)
        assert [rollout.weights_version for rollout in group.fetch_samples()] == [1] * num_fragments
        assert group.fetch_samples() == []
        assert group.sample_async(REQUEST) == num_fragments // 2
        assert [rollout.weights_version for rollout in group.fetch_samples()] == [2] * (num_fragments // 2)
        metrics = MetricsLogger()
        group.collect_metrics(metrics, Timers())
        assert metrics.peek()["env_runners"]["num_env_steps_sampled"] == steps_taken(tmp_path)


def test_the_embedded_runner_gives_what_synchronous_sampling_gives(tmp_path: Path) -> None:
    found = []
    for name in ("in_turn", "at_once"):
        (tmp_path / name).mkdir()
        with started(tmp_path / name, "local", 0) as group:
            if name == "at_once":
                group.sample_async(REQUEST, max_requests=2)
                found.append(group.fetch_samples())
            else:
                found.append([group.sample(REQUEST)[0] for _ in range(2)])
    for one, other in zip(*found, strict=True):
        assert one.actions.tolist() == other.actions.tolist() and one.obs.tolist() == other.obs.tolist()


@pytest.mark.parametrize("engine", ["local", "process"])
def test_an_exception_costs_its_request_and_the_other_one_arrives(engine: str, tmp_path: Path) -> None:
    with started(tmp_path, engine, 1, at=3, how="OSError") as group:
        group.sample_async(REQUEST, max_requests=2)
        [second] = fetch(group, 1)
        assert (second.num_env_steps, second.continues) == (STEPS, False)
        poll(lambda: group.sample_async(REQUEST) == 1)  # ready again
        [third] = fetch(group, 1)
        health = group.fault_results()
        assert (health["num_env_runner_failures"], health["num_remote_worker_restarts"]) == (1, 1)
        assert health["num_env_steps_lost"] == 2
        assert steps_taken(tmp_path) == second.num_env_steps + third.num_env_steps + 2


@pytest.mark.slow
def test_a_worker_that_dies_costs_what_it_was_at(tmp_path: Path) -> None:
    with started(tmp_path, "process", 1) as group:
        group.foreach_env_runner(lambda runner: runner.foreach_env(slow_down))
        [pid] = group.foreach_env_runner(lambda runner: os.getpid())
        group.sample_async(REQUEST, max_requests=2)
        poll(lambda: steps_taken(tmp_path) > 0)
        os.kill(pid, signal.SIGKILL)
        poll(lambda: group.fetch_samples() == [] and group.num_failures)
        assert group.fault_results()["num_env_steps_in_flight"] == 0
        poll(lambda: group.sample_async(REQUEST, max_requests=2) == 2)
        assert [rollout.num_env_steps for rollout in fetch(group, 2)] == [STEPS, STEPS]
        health = group.fault_results()
        assert (health["num_env_runner_failures"], health["num_remote_worker_restarts"]) == (1, 1)
        assert health["num_env_steps_lost"] == STEPS  # the request that it was at; the other one had not begun


def slow_down(env: Any) -> None:
    """Let each step take so long that a test can end the process in the middle of a fragment."""
    step = env.unwrapped.step
    env.unwrapped.step = lambda action: (time.sleep(0.2), step(action))[1]
