"""The runner group: the same on every engine, late fragments kept, user code in the runners, and what it all costs."""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from at_least import all_of, at_least
from corral import DQNConfig, PPOConfig
from corral.algorithms.ppo import PPO
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.data.episodes.rollout import Rollout
from corral.engines.lazy import LazyEngine
from corral.errors import ConfigError, CorralError, EnvError, SampleError, SerializationError, WeightsError
from corral.runners.requests import SampleRequest
from corral.runners.runner_group import EnvRunnerGroup
from gated import GatedEnv

RAY_SLOW = pytest.param("ray", marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow])


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> str:
    """The engine's name, with a Ray runtime there if it is Ray."""
    if request.param == "ray":
        request.getfixturevalue("ray_runtime")
    name: str = request.param
    return name


def config(engine: str, gate: Path | None = None, **settings: Any) -> PPOConfig:
    slow = {"gate": str(gate), "slow": 1 if gate else None}
    made = PPOConfig().environment(GatedEnv, env_config=slow, disable_env_checking=True)  # which would take a step
    made.env_runners(num_env_runners=2, num_envs_per_env_runner=1).engine(engine).debugging(seed=0)
    return made.copy(**settings).freeze()


@contextmanager
def started(made_from: PPOConfig) -> Iterator[EnvRunnerGroup]:
    """Start a group on an engine of its own, and end both."""
    engine = LazyEngine(made_from.engine_name)
    group = EnvRunnerGroup(made_from, engine)
    try:
        yield group
    finally:
        group.stop()
        engine.stop()


@contextmanager
def opened_at_the_end(gate: Path) -> Iterator[None]:
    """Let a waiting runner go, whatever the test did, so that its group can end."""
    try:
        yield
    finally:
        gate.touch()


@pytest.fixture(scope="class")
def group(engine: str) -> Iterator[EnvRunnerGroup]:
    with started(config(engine)) as made:
        yield made


def by_runner(rollouts: list[Rollout]) -> dict[int, int]:
    return {int(rollout.obs[0, 0, 0]): rollout.num_env_steps for rollout in rollouts}


def comparable(result: dict[str, Any]) -> str:
    kept = {key: result[key] for key in ("learners", "fault_tolerance", "num_env_steps_sampled_lifetime")}
    kept["env_runners"] = {key: value for key, value in result["env_runners"].items() if "duration" not in key}
    return repr(kept)


def train_with(engine: str) -> list[str]:
    experiment = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=3)
        .env_runners(straggler_factor=None)  # a busy machine may take one of them for a straggler
        .training(train_batch_size_per_learner=600, minibatch_size=100, num_epochs=2)
        .engine(engine)
        .debugging(seed=3)
    )
    with experiment.build() as algo:
        return [comparable(algo.train()) for _ in range(3)]


@pytest.mark.slow_cases("process")
@pytest.mark.parametrize("engine", ["process", RAY_SLOW], indirect=True)
def test_the_same_seed_gives_the_same_results_as_in_this_process(engine: str) -> None:
    assert train_with(engine) == train_with("local")


def drawn_by_runners() -> list[list[float]]:
    def draw(_: Any) -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    with started(config("process")) as group:
        found: list[list[float]] = group.foreach_env_runner(draw)
    return found


@pytest.mark.slow
def test_global_generators_of_runners_have_seeds() -> None:
    first, again = drawn_by_runners(), drawn_by_runners()
    assert first == again
    assert first[0] != first[1]


# One process runs the tests of an engine, and starts its runners once.
@pytest.mark.parametrize(
    "engine", ["local", pytest.param("process", marks=pytest.mark.xdist_group("calls")), RAY_SLOW], indirect=True
)
class TestCalls:
    def test_functions_and_methods_run_where_the_runners_are(self, group: EnvRunnerGroup, engine: str) -> None:
        assert group.engine_name == engine
        assert group.healthy_worker_ids == [1, 2] and group.num_healthy_remote_workers == 2
        assert group.foreach_env_runner(lambda runner: runner.worker_index) == [1, 2]
        assert group.foreach_env_runner("ping") == [True, True]
        pids = group.foreach_env_runner(lambda runner: os.getpid())
        assert (os.getpid() in pids) == (engine == "local")
        assert group.foreach_env_runner(lambda runner, k: runner.worker_index * k, kwargs={"k": 3}) == [3, 6]
        assert group.foreach_env_runner(lambda runner: runner.worker_index, remote_worker_ids=[2]) == [2]
        with pytest.raises(ValueError, match=r"\[7\].*\[1, 2\]"):
            group.foreach_env_runner("ping", remote_worker_ids=[1, 7])

    def test_every_sub_env_is_reached_and_keeps_what_was_changed(self, group: EnvRunnerGroup) -> None:
        group.foreach_env(lambda env: env.set_task(4))
        assert group.foreach_env(lambda env: env.task) == [[4], [4]]
        group.foreach_env(lambda env: env.set_task(5), remote_worker_ids=[2])
        assert group.foreach_env(lambda env: env.task) == [[4], [5]]

    def test_what_a_function_raises_is_raised_here(self, group: EnvRunnerGroup) -> None:
        def fail(runner: Any) -> None:
            raise LookupError(f"no such thing in runner {runner.worker_index}")

        with pytest.raises(LookupError, match="no such thing in runner 1"):
            group.foreach_env_runner(fail)
        assert group.healthy_worker_ids == [1, 2]

    def test_without_waiting(self, group: EnvRunnerGroup) -> None:
        assert group.fetch_ready() == []
        assert group.foreach_env_runner_async(lambda runner: runner.worker_index * 10) == 2
        results: list[tuple[int, Any]] = []
        deadline_s = time.monotonic() + 30
        while len(results) < 2 and time.monotonic() < deadline_s:
            results += group.fetch_ready(timeout_seconds=5)
        assert sorted(results) == [(1, 10), (2, 20)]
        assert group.fetch_ready() == []

    def test_no_steps_are_no_fragments_at_once(self, group: EnvRunnerGroup) -> None:
        timers = Timers()
        assert group.sample(SampleRequest(num_timesteps=0), timers) == []
        assert timers.seconds["waiting"] < group._config.sample_timeout_s / 2  # it waits for nobody

    def test_samples_without_waiting(self, group: EnvRunnerGroup) -> None:
        assert group.sample_async(SampleRequest(num_timesteps=7)) == 2
        rollouts: list[Rollout] = []
        deadline_s = time.monotonic() + 30
        while len(rollouts) < 2 and time.monotonic() < deadline_s:
            rollouts += group.fetch_samples(timeout_seconds=5)
        assert by_runner(rollouts) == {1: 7, 2: 7}
        metrics = MetricsLogger()
        group.collect_metrics(metrics, Timers())
        assert metrics.peek()["env_runners"]["num_env_steps_sampled"] == 14

    def test_a_request_travels_whole(self, group: EnvRunnerGroup) -> None:
        """Every field of it changes what the runners do."""
        request = SampleRequest(num_episodes=3, explore=False, random_actions=True, timestep=500)
        rollouts = group.sample(request, Timers())
        ends = {int(r.obs[0, 0, 0]): int((r.done & r.valid).sum()) for r in rollouts}
        assert ends == {1: 2, 2: 1}
        assert not all((r.actions == r.dist_inputs.argmax(-1)).all() for r in at_least(1, rollouts))
        by_steps = SampleRequest(num_timesteps=8, explore=False)
        assert all((r.actions == r.dist_inputs.argmax(-1)).all() for r in group.sample(by_steps, Timers()))
        assert not any(r.continues for r in group.sample(replace(by_steps, force_reset=True), Timers()))
        assert all(r.continues for r in group.sample(by_steps, Timers()))


class TestTimestepsOfFragmentsThatNobodyWaitsFor:
    """A schedule goes by the env steps of all runners, and continues from one fragment to the next."""

    @pytest.mark.parametrize("engine", ["local", pytest.param("process", marks=pytest.mark.slow)])
    def test_a_schedule_continues(self, engine: str) -> None:
        made = DQNConfig().environment(GatedEnv, disable_env_checking=True).engine(engine).debugging(seed=0)
        made.env_runners(num_env_runners=2, num_envs_per_env_runner=1)
        made.exploration(exploration_config={"initial_epsilon": 1.0, "final_epsilon": 0.0, "epsilon_timesteps": 100})
        with started(made.freeze()) as group:
            found = []
            for _ in range(3):
                assert group.sample_async(SampleRequest(num_timesteps=10)) == 2
                fetched = 0
                while fetched < 2:
                    fetched += len(group.fetch_samples(timeout_seconds=5))
                metrics = MetricsLogger()
                group.collect_metrics(metrics, Timers())
                found.append(metrics.peek()["env_runners"]["epsilon"])
        # Two runners of 10 steps each: epsilon falls by 0.2 in a round.
        assert found == pytest.approx([0.8, 0.6, 0.4])

    @pytest.mark.slow
    def test_steps_that_are_under_way_elsewhere_count(self, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        with started(config("process", gate)) as group, opened_at_the_end(gate):
            group.sample_async(SampleRequest(num_timesteps=10))
            timesteps = []
            for _ in range(3):
                assert by_runner(group.fetch_samples(timeout_seconds=30)) == {2: 10}  # the other one waits for the gate
                group.sample_async(SampleRequest(num_timesteps=10))
                assert group._runners[2].sampling is not None
                timesteps.append(group._runners[2].sampling.request.timestep)
            assert timesteps == [20, 30, 40]  # 10 of runner 1, and what runner 2 has sampled

    def test_a_timestep_of_the_request_counts(self, tmp_path: Path) -> None:
        with started(config("local")) as group:
            group.sample_async(SampleRequest(num_timesteps=10, timestep=1000))
            group.fetch_samples()
            group.sample_async(SampleRequest(num_timesteps=10))
            assert [runner.sampling.request.timestep for runner in group._runners.values() if runner.sampling] == [
                1020,
                1020,
            ]


@pytest.mark.parametrize("engine", ["process", RAY_SLOW], indirect=True)
class TestLateRunners:
    @pytest.fixture
    def gate(self, tmp_path: Path) -> Path:
        return tmp_path / "gate"

    @pytest.mark.slow_cases("process")
    def test_a_timeout_keeps_what_has_arrived_and_counts_the_rest_later(
        self, engine: str, gate: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            started(config(engine, gate, sample_timeout_s=0.2, straggler_factor=None)) as group,
            opened_at_the_end(gate),
        ):
            with caplog.at_level(logging.WARNING, "corral"):
                first = group.sample(SampleRequest(num_timesteps=20), Timers())
            assert by_runner(first) == {2: 10}
            assert "sample_timeout_s=0.2 from env runner 1" in caplog.text
            gate.touch()
            seen, rounds = list(first), 0
            while 1 not in by_runner(seen) and rounds < 200:
                seen += group.sample(SampleRequest(num_timesteps=4), Timers())
                rounds += 1
            assert by_runner([r for r in seen if r.obs[0, 0, 0] == 1]) == {1: 10}  # the one that it was asked for first
            numbers = np.concatenate([rollout.obs[1:][rollout.valid] for rollout in seen])
            assert len(np.unique(numbers, axis=0)) == len(numbers)  # no step twice
            metrics = MetricsLogger()
            group.collect_metrics(metrics, Timers())
            assert metrics.peek()["env_runners"]["num_env_steps_sampled"] == len(numbers)
            assert group.counts.num_env_steps_lost == 0

    @pytest.mark.slow
    def test_a_runner_that_stands_still_stops_holding_up_the_others(self, engine: str, gate: Path) -> None:
        gate.touch()
        with started(config(engine, gate)) as group, opened_at_the_end(gate):
            assert by_runner(group.sample(SampleRequest(num_timesteps=40), Timers())) == {1: 20, 2: 20}
            gate.unlink()
            for _ in range(5):  # it would be waited for a minute
                assert by_runner(group.sample(SampleRequest(num_timesteps=10), Timers())).keys() == {2}
            gate.touch()
            deadline_s = time.monotonic() + 60
            while not (
                late := [r for r in group.sample(SampleRequest(num_timesteps=2), Timers()) if r.obs[0, 0, 0] == 1]
            ):
                assert time.monotonic() < deadline_s
            assert by_runner(late) == {1: 5}

    @pytest.mark.slow
    def test_a_late_fragment_is_as_stale_as_the_result_says(self, engine: str, gate: Path) -> None:
        with (
            started(config(engine, gate, sample_timeout_s=0.2, straggler_factor=None)) as group,
            opened_at_the_end(gate),
        ):
            assert by_runner(group.sample(SampleRequest(num_timesteps=20), Timers())) == {2: 10}
            weights = group.foreach_env_runner(
                lambda runner: {"default_policy": {k: v.numpy() for k, v in runner.module.state_dict().items()}},
                remote_worker_ids=[2],
            )[0]
            for version in (0, 1, 2):
                group.sync_weights({"modules": weights}, version)
            assert by_runner(group.sample(SampleRequest(num_timesteps=6), Timers())) == {2: 6}
            gate.touch()
            deadline_s = time.monotonic() + 60
            while group._runners[1].sampling is not None and not group._runners[1].sampling.future.done():
                assert time.monotonic() < deadline_s
            group.take_costs()
            assert by_runner(group.sample(SampleRequest(num_timesteps=10), Timers())) == {1: 10}
            costs = group.take_costs()
            lag = costs["by_runner"]["1"]["weights_version_lag_mean"]
            assert lag == costs["weights_version_lag_mean"] == 2 and costs["weights_version"] == 2
            assert math.isnan(costs["by_runner"]["2"]["weights_version_lag_mean"])

    @pytest.mark.slow
    def test_a_call_with_a_limit_leaves_out_busy_runners(self, engine: str, gate: Path) -> None:
        with started(config(engine, gate)) as group, opened_at_the_end(gate):
            group.sample_async(SampleRequest(num_timesteps=3))
            assert group.foreach_env_runner(lambda runner: runner.worker_index, timeout_seconds=1.0) == [2]


@pytest.mark.parametrize("engine", ["process", RAY_SLOW], indirect=True)
def test_weights_travel_once_to_each_runner_and_only_when_they_changed(engine: str) -> None:
    experiment = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=2, num_envs_per_env_runner=2)
    experiment.training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1).engine(engine)
    with experiment.build() as algo:
        num_bytes = sum(array.nbytes for array in algo.learner_group.get_weights()["default_policy"].values())
        costs = algo.train()["runner_group"]
        assert costs["weights_sync_bytes"] == 2 * 2 * num_bytes  # of version 0 and version 1
        assert costs["weights_sync_ms_mean"] > 0  # of those that have arrived: the first for certain
        costs = algo.train()["runner_group"]
        assert costs["weights_sync_bytes"] == 2 * num_bytes and costs["weights_version"] == 2
        assert costs["weights_version_lag_mean"] == 0
        algo.sync_weights()
        later = [algo.env_runner_group.take_costs()]
        assert later[0]["weights_sync_bytes"] == 0
        ours = algo.learner_group.get_weights()["default_policy"]
        theirs = algo.env_runner_group.foreach_env_runner(
            lambda runner: {k: v.numpy() for k, v in runner.module.state_dict().items()}
        )
        assert all_of(np.array_equal(ours[name], weights[name]) for weights in theirs for name in ours)
        # By now the weights of version 2 have arrived at both runners, whose times count once each.
        later.append(algo.env_runner_group.take_costs())
        for index in ("1", "2"):
            assert sum(part["by_runner"][index]["weights_sync_ms_mean"] > 0 for part in later) <= 1
        assert not any(runner.syncs for runner in algo.env_runner_group._runners.values())
        assert math.isnan(algo.env_runner_group.take_costs()["weights_sync_ms_mean"])


@pytest.mark.parametrize("engine", ["local", pytest.param("process", marks=pytest.mark.slow)])
class TestPartsOfTheWeights:
    def test_a_part_goes_from_its_provider_to_its_receivers(self, engine: str) -> None:
        def receive(env_runner: Any) -> None:
            env_runner.weight_receivers["filter"] = lambda arrays: setattr(env_runner, "scale", arrays["scale"])

        made = config(engine).copy(train_batch_size_per_learner=16, minibatch_size=16, num_epochs=1)
        with made.callbacks(on_environment_created=receive).build() as algo:
            algo.weight_providers["filter"] = lambda: {"scale": np.full(3, algo.training_iteration)}
            for iteration in range(2):
                algo.train()
                found = algo.env_runner_group.foreach_env_runner(lambda runner: runner.scale.tolist())
                assert found == [[iteration] * 3] * 2
            algo.env_runner_group._runners[1].handle.kill()
            algo.train()  # without runner 1
            deadline_s = time.monotonic() + 60
            while algo.env_runner_group.num_healthy_remote_workers < 2:
                assert time.monotonic() < deadline_s
                algo.train()
            assert all_of(algo.env_runner_group.foreach_env_runner(lambda runner: hasattr(runner, "scale")))

    def test_a_part_that_setup_adds_is_there_before_the_first_sample(self, engine: str) -> None:
        class Filtering(PPO):
            def setup(self) -> None:
                self.weight_providers["filter"] = lambda: {"scale": np.ones(3)}

        def receive(env_runner: Any) -> None:
            env_runner.weight_receivers["filter"] = lambda arrays: setattr(env_runner, "scale", arrays["scale"])

        with Filtering(config(engine).copy().callbacks(on_environment_created=receive)) as algo:
            found = algo.env_runner_group.foreach_env_runner(lambda runner: runner.scale.tolist())
            assert found == [[1, 1, 1]] * 2

    def test_a_new_part_is_sent_though_the_version_stays(self, engine: str) -> None:
        def receive(env_runner: Any) -> None:
            env_runner.weight_receivers["filter"] = lambda arrays: setattr(env_runner, "scale", arrays["scale"])

        with config(engine).copy().callbacks(on_environment_created=receive).build() as algo:
            version = algo.env_runner_group.take_costs()["weights_version"]
            algo.weight_providers["filter"] = lambda: {"scale": np.ones(3)}
            algo.sync_weights()
            found = algo.env_runner_group.foreach_env_runner(lambda runner: runner.scale.tolist())
            assert found == [[1, 1, 1]] * 2
            assert algo.env_runner_group.take_costs()["weights_version"] == version

    def test_a_runner_that_cannot_receive_a_part_is_restarted_with_it(self, engine: str, tmp_path: Path) -> None:
        def receive(env_runner: Any) -> None:
            def take(arrays: Any) -> None:
                if env_runner.worker_index == 1 and not (tmp_path / "failed").exists():
                    (tmp_path / "failed").touch()
                    raise OSError("no room for the arrays")
                env_runner.scale = arrays["scale"]

            env_runner.weight_receivers["filter"] = take

        made = config(engine).copy().callbacks(on_environment_created=receive).freeze()
        with started(made) as group:
            group.sync_weights({"filter": {"scale": np.ones(3)}}, 1)
            group.sample(SampleRequest(num_timesteps=4), Timers())
            assert group.num_failures == 1
            deadline_s, rollouts = time.monotonic() + 60, list[Rollout]()
            while len(by_runner(rollouts)) < 2:
                assert time.monotonic() < deadline_s
                rollouts = group.sample(SampleRequest(num_timesteps=4), Timers())
            assert {rollout.weights_version for rollout in rollouts} == {1}
            assert all_of(group.foreach_env_runner(lambda runner: hasattr(runner, "scale")))
            assert (group.num_failures, group.num_remote_worker_restarts) == (1, 1)

    def test_a_part_that_a_runner_does_not_know_is_named(self, engine: str) -> None:
        with started(config(engine)) as group:
            group.sync_weights({"module": {}}, 1)
            with pytest.raises(WeightsError, match=r"no receiver for the part 'module'. Did you mean 'modules'\?"):
                group.sample(SampleRequest(num_timesteps=4), Timers())


def test_an_unknown_part_changes_nothing_in_the_embedded_runner() -> None:
    with PPOConfig().environment("CartPole-v1").build() as algo:
        runner = algo.env_runner
        assert runner is not None
        version, weights = runner.weights_version, runner.module.state_dict()["policy_head.weight"].clone()
        zeros = {
            name: np.zeros_like(array) for name, array in algo.learner_group.get_weights()["default_policy"].items()
        }
        with pytest.raises(WeightsError, match="'filter'"):
            algo.env_runner_group.sync_weights({"modules": {"default_policy": zeros}, "filter": {}}, 99)
        assert runner.weights_version == version
        assert (runner.module.state_dict()["policy_head.weight"] == weights).all()


@pytest.mark.parametrize("engine", ["local", pytest.param("process", marks=pytest.mark.slow)])
def test_an_earlier_call_that_is_fetched_late_does_not_bring_back_an_older_state(engine: str) -> None:
    def num_steps() -> list[int]:
        return [runner.state["num_env_steps_sampled_lifetime"] for runner in group._runners.values()]

    with started(config(engine)) as group:
        assert group.foreach_env_runner_async("ping") == 2
        group.sample(SampleRequest(num_timesteps=8), Timers())
        assert num_steps() == [4, 4]
        results: list[tuple[int, Any]] = []
        while len(results) < 2:
            results += group.fetch_ready(timeout_seconds=30)
        assert num_steps() == [4, 4]


@pytest.mark.slow
def test_a_call_of_a_worker_that_was_replaced_is_no_failure_of_the_new_one() -> None:
    with started(config("process", delay_between_env_runner_restarts_s=0.0)) as group:
        group.foreach_env_runner_async(lambda runner: time.sleep(600), remote_worker_ids=[1])
        group._runners[1].handle.kill()
        deadline_s = time.monotonic() + 60
        while group.num_remote_worker_restarts < 1 or group.num_healthy_remote_workers < 2:
            assert time.monotonic() < deadline_s
            group.sample(SampleRequest(num_timesteps=2), Timers())
        assert group.fetch_ready(timeout_seconds=30) == []
        assert (group.num_failures, group.num_healthy_remote_workers) == (1, 2)


@pytest.mark.parametrize(
    ("engine", "num_env_runners"), [("local", 0), ("local", 2), pytest.param("process", 2, marks=pytest.mark.slow)]
)
def test_a_stopped_group_starts_nothing(engine: str, num_env_runners: int) -> None:
    with config(engine).copy(num_env_runners=num_env_runners).build() as algo:
        group = algo.env_runner_group
    request = SampleRequest(num_timesteps=4)
    for use in (
        lambda: group.sample(request, Timers()),
        lambda: group.sample_async(request),
        group.restore_runners,
        lambda: algo.sample(4),
    ):
        with pytest.raises(CorralError, match=r"were stopped, and their envs are closed: build\(\) another algorithm"):
            use()
    assert group.num_remote_worker_restarts == 0 and not algo.engine.is_made


class TestEmbeddedRunner:
    """It answers at once, and logs into the metrics of the algorithm itself."""

    def test_a_fragment_counts_when_it_is_fetched(self) -> None:
        with config("local", num_env_runners=0).build() as algo:
            group, request = algo.env_runner_group, SampleRequest(num_timesteps=8)
            for fetched in (0, 8, 16):
                assert [group.sample_async(request) for _ in range(2)] == [1, 0]
                group.collect_metrics(algo.metrics, algo.timers)
                assert algo.metrics.peek(("env_runners", "num_env_steps_sampled")) == fetched
                assert group.fault_results()["num_env_steps_in_flight"] == 8
                assert group.get_state()["runners"][0]["numbers"]["num_env_steps_lost"] == 8
                [rollout] = group.fetch_samples()
                assert rollout.num_env_steps == 8 and group.fetch_samples() == []
            group.collect_metrics(algo.metrics, algo.timers)
            assert algo.metrics.peek(("env_runners", "num_env_steps_sampled")) == 24
            assert not group.mail._logged  # or every fragment would leave something behind

    def test_what_it_raises_ends_the_call_that_fetches_and_nothing_restarts(self) -> None:
        class FailsOnce(GatedEnv):
            has_failed = False

            def step(self, action: Any) -> Any:
                if not FailsOnce.has_failed:
                    FailsOnce.has_failed = True
                    raise RuntimeError("a wheel came off")
                return super().step(action)

        made = config("local", num_env_runners=0, env=FailsOnce, restart_failed_env_runners=True)
        with made.build() as algo:
            group, request = algo.env_runner_group, SampleRequest(num_timesteps=4)
            assert group.sample_async(request) == 1
            with pytest.raises(EnvError, match="a wheel came off"):
                group.fetch_samples()
            assert (group.num_failures, group.num_remote_worker_restarts) == (0, 0)
            assert [rollout.continues for rollout in group.sample(request)] == [False]


def test_a_group_without_runners_has_modules_and_samples_nothing() -> None:
    made, engine = config("process", num_env_runners=0), LazyEngine("process")
    specs = made.module_specs(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    group = EnvRunnerGroup(made, engine, specs, MetricsLogger(), samples=False)
    assert (group.engine_name, group.worker_indices, group.module_specs) == ("none", [], specs)
    for use in (
        lambda: group.sample(SampleRequest(num_timesteps=4)),
        lambda: group.sample_async(SampleRequest(num_timesteps=4)),
    ):
        with pytest.raises(SampleError, match="learns from recorded data"):
            use()
    group.sync_weights({"modules": {}}, 1)
    assert group.get_state()["runners"] == [] and not engine.is_made
    group.stop()


def test_the_keys_of_the_costs_are_there_with_the_embedded_runner_too() -> None:
    with PPOConfig().environment("CartPole-v1").build() as algo:
        costs = algo.train()["runner_group"]
    assert costs["weights_sync_bytes"] == 0 and costs["by_runner"] == {}


class TestBadInput:
    def test_an_env_that_cannot_be_pickled_names_the_attribute(self) -> None:
        class Holding(GatedEnv):
            guard = threading.Lock()

        with pytest.raises(SerializationError, match=r"env runner 1\.config\.env\.guard \(_thread\.lock\)"):
            config("process", env=Holding).copy().build()

    def test_a_callback_that_cannot_be_pickled_names_the_attribute(self) -> None:
        generator = (i for i in range(3))
        experiment = config("process").copy().callbacks(on_episode_end=lambda: next(generator))
        with pytest.raises(SerializationError, match=r"config\.callback_functions\['on_episode_end'\]\[0\].*generator"):
            experiment.build()

    def test_a_runner_that_never_starts_is_not_waited_for(self) -> None:
        def never(env_config: Any) -> GatedEnv:
            time.sleep(1000)
            return GatedEnv(env_config)

        with pytest.raises(Exception, match=r"env runner 1 did not start within start_timeout_s=4\.0.*CPUs"):
            config("process", env=never, start_timeout_s=4.0).copy().build()

    def test_a_wrong_env_name_is_refused_before_a_process_starts(self) -> None:
        with pytest.raises(ConfigError, match="CartPole-v1"):
            PPOConfig().environment("CartPol-v1").env_runners(num_env_runners=2).engine("process").build()


@pytest.mark.slow
def test_a_restarted_runner_of_a_group_draws_other_numbers() -> None:
    request, chosen = SampleRequest(num_timesteps=64), []
    for killed in (False, False, True):
        with started(config("process", num_env_runners=1)) as group:
            if killed:
                group.sample(request, Timers())
                group._runners[1].handle.kill()
            rollouts: list[Rollout] = []
            while not rollouts:
                rollouts = group.sample(request, Timers())
            assert group.num_remote_worker_restarts == killed
            chosen.append(rollouts[0].actions.tobytes())
    first, again, restarted = chosen
    assert first == again != restarted


def test_a_runner_that_restarts_is_not_lost() -> None:
    """The failure of the only other runner does not end a run that continues without runners that failed."""
    settings = {"restart_failed_env_runners": False, "ignore_env_runner_failures": True}
    with started(config("local").copy(**settings).freeze()) as group:
        first, second = group._runners.values()
        first.failure, first.starting = EnvError("first"), Future()
        second.handle.kill()
        group.restore_runners()
        assert second.failure is not None and group.recovery.lost_because() is None
        first.starting.set_exception(EnvError("again"))
        with pytest.raises(EnvError) as caught:
            group.restore_runners()
        assert caught.value.__notes__[-1] == "It was the last runner."
        assert group.recovery.lost_because() is not None
