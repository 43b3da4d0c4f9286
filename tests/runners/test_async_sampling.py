"""Asynchronous sampling: runners work ahead, batches are of what arrives first, and `max_lag` bounds the age."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import DQNConfig, NormalizeObservations, PPOConfig, SampleRequest
from corral.algorithms.ppo import PPO
from corral.core.tree import map_tree
from corral.envs.multi_agent_env import MultiAgentEnv
from corral.errors import SampleError
from corral.testing import CountingEnv, IdentityEnv
from gated import GatedEnv
from random_agents import RandomAgents

BATCH = 40


def config_of(engine: str, num_env_runners: int, **env_runners: Any) -> Any:
    config = (
        PPOConfig()
        .environment(CountingEnv, env_config={"length": 7})
        .engine(engine_name=engine if num_env_runners else "auto")
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=2, vectorization="sync")
        .env_runners(**{"sample_async": True, **env_runners})
        .training(train_batch_size_per_learner=BATCH, minibatch_size=None, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .debugging(seed=1)
    )
    return config


def weights_of(algo: Any) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in algo.get_module().state_dict().items()}


def trained(result: Any) -> float:
    return float(result["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"])


def test_runners_are_one_batch_behind_and_a_run_in_turn_repeats() -> None:
    found = []
    for _ in range(2):
        with config_of("local", 2).build() as algo:
            results = [algo.train() for _ in range(5)]
            assert [result["runner_group"]["lag_mean"] for result in results] == [0, 1, 1, 1, 1]
            assert [result["runner_group"]["lag_max"] for result in results] == [0, 1, 1, 1, 1]
            assert results[-1]["env_runners"]["num_env_steps_dropped_lifetime"] == 0
            assert trained(results[-1]) == algo.num_env_steps_sampled_lifetime >= 5 * BATCH
            assert results[-1]["fault_tolerance"]["num_env_steps_in_flight"] >= BATCH
            found.append(weights_of(algo))
    for name, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][name])


def test_one_runner_in_this_process_learns_what_it_learns_without_it() -> None:
    found = []
    for sample_async in (False, True):
        with config_of("local", 0, sample_async=sample_async).build() as algo:
            for _ in range(3):
                result = algo.train()
            found.append((weights_of(algo), algo.num_env_steps_sampled_lifetime))
    assert result["runner_group"]["lag_max"] == 0
    assert found[0][1] == found[1][1]
    for name, value in found[0][0].items():
        np.testing.assert_array_equal(value, found[1][0][name])


class Recorded(PPO):
    """Keeps the weights of each version, and what was received."""

    def setup(self) -> None:
        super().setup()
        self.sent: dict[int, dict[str, Any]] = {}
        self.received: list[tuple[int, Any]] = []

    def sync_weights(self) -> None:
        super().sync_weights()
        self.sent[self.learner_group.weights_version] = weights_of(self)

    def receive(self, rollouts: Any) -> None:
        super().receive(rollouts)
        self.received += [(self.learner_group.weights_version, rollout) for rollout in rollouts]


class RecordedConfig(PPOConfig):
    @property
    def algo_class(self) -> type[Recorded]:
        return Recorded


@pytest.mark.parametrize("engine", ["local", "process"])
def test_rollouts_were_sampled_with_the_weights_of_their_version(engine: str) -> None:
    config = RecordedConfig()
    config.__dict__.update(config_of(engine, 2).__dict__)
    with config.build() as algo:
        results = [algo.train() for _ in range(5)]
        assert len(algo.received) >= 10
        check_weights(algo)
        lags = [(now - rollout.weights_version, rollout.num_env_steps) for now, rollout in algo.received]
        assert max(result["runner_group"]["lag_max"] for result in results) == max(lag for lag, _ in lags)
        sizes = [sum(r.num_env_steps for now, r in algo.received if now == step) for step in range(5)]
        means = [result["runner_group"]["lag_mean"] for result in results]
        assert np.dot(sizes, means) == pytest.approx(sum(lag * steps for lag, steps in lags))


# Runners that are late.


@contextmanager
def gated(tmp_path: Path, **env_runners: Any) -> Iterator[tuple[Any, Path]]:
    """Build PPO on two processes, of which the first waits in its first step until the file `gate` is there."""
    gate = tmp_path / "gate"
    config = config_of("process", 2, num_envs_per_env_runner=1, **env_runners)
    config.environment(GatedEnv, env_config={"gate": str(gate), "slow": 1}, disable_env_checking=True)
    try:
        with config.build() as algo:
            yield algo, gate
    finally:
        gate.touch()


@pytest.mark.slow
def test_a_runner_that_is_stuck_stops_nothing(tmp_path: Path) -> None:
    with gated(tmp_path) as (algo, gate):
        for iteration in range(1, 6):
            result = algo.train()
            assert result["runner_group"]["by_runner"]["1"]["num_env_steps_sampled"] == 0
            assert BATCH * iteration <= algo.num_env_steps_sampled_lifetime == trained(result)
        gate.touch()
        lags = []
        while not result["runner_group"]["by_runner"]["1"]["num_env_steps_sampled"]:
            result = algo.train()
            lags.append(result["runner_group"]["lag_max"])
        assert max(lags) >= 5
        assert algo.num_env_steps_sampled_lifetime == trained(result)
        assert result["fault_tolerance"]["num_remote_worker_restarts"] == 0


@pytest.mark.slow
def test_a_fragment_that_is_too_old_is_dropped_and_counted(tmp_path: Path) -> None:
    with gated(tmp_path, max_lag=3) as (algo, gate):
        for _ in range(5):
            algo.train()
        gate.touch()
        result = algo.train()
        while not result["env_runners"]["num_env_steps_dropped_lifetime"]:
            assert result["runner_group"]["lag_max"] <= 3
            result = algo.train()
        assert result["env_runners"]["num_env_steps_dropped"] == result["env_runners"]["num_env_steps_dropped_lifetime"]
        for _ in range(3):
            result = algo.train()
        dropped = result["env_runners"]["num_env_steps_dropped_lifetime"]
        assert BATCH // 2 <= dropped <= BATCH
        assert algo.num_env_steps_sampled_lifetime == trained(result) + dropped
        assert result["env_runners"]["num_env_steps_sampled_lifetime"] == algo.num_env_steps_sampled_lifetime


class ThreeUpdates(PPO):
    """Makes three updates from each batch."""

    def update_modules(self, batches: Any, settings: Any) -> Any:
        for _ in range(2):
            super().update_modules(batches, settings)
        return super().update_modules(batches, settings)


class ThreeUpdatesConfig(PPOConfig):
    @property
    def algo_class(self) -> type[ThreeUpdates]:
        return ThreeUpdates


@pytest.mark.slow_cases("process-0")
@pytest.mark.parametrize(("engine", "max_lag"), [("local", 3), ("local", 1), ("process", 3), ("process", 0)])
def test_the_driver_waits_so_that_nothing_is_too_old(engine: str, max_lag: int) -> None:
    config = ThreeUpdatesConfig()
    config.__dict__.update(config_of(engine, 2, max_lag=max_lag, on_lag="wait").__dict__)
    with config.build() as algo:
        for iteration in range(1, 7):
            result = algo.train()
            assert result["runner_group"]["lag_max"] <= max_lag
            if iteration > 2:  # before, nobody knows how many updates there are from a batch
                assert result["env_runners"]["num_env_steps_dropped"] == 0
            dropped = result["env_runners"]["num_env_steps_dropped_lifetime"]
            assert algo.num_env_steps_sampled_lifetime == trained(result) + dropped


@pytest.mark.slow
def test_no_lag_at_all_asks_for_one_batch_at_a_time() -> None:
    with config_of("process", 2, max_lag=0).build() as algo:
        for _ in range(4):
            result = algo.train()
            assert (result["runner_group"]["lag_max"], result["env_runners"]["num_env_steps_dropped"]) == (0, 0)
            assert result["fault_tolerance"]["num_env_steps_in_flight"] == 0


def test_a_batch_is_not_larger_where_all_that_is_sampled_ahead_would_be_too_old() -> None:
    """Three updates follow each batch, so that `max_lag=1` leaves nothing that runners could sample ahead."""
    config = ThreeUpdatesConfig()
    config.__dict__.update(config_of("local", 2, max_lag=1, on_lag="wait").__dict__)
    with config.build() as algo:
        for _ in range(3):
            algo.train()
        before = algo.num_env_steps_sampled_lifetime
        algo.train()
        assert algo.num_env_steps_sampled_lifetime - before == BATCH


@pytest.mark.slow
def test_without_waiting_no_steps_are_awaited_in_place_of_dropped_ones(tmp_path: Path) -> None:
    with gated(tmp_path, max_lag=0) as (algo, _):
        algo.env_runner_group.sample_async(SampleRequest(num_timesteps=BATCH))
        assert algo.env_runner_group.fetch_samples(60.0)  # of the second runner, which is asked again
        algo.env_runner_group.sample_async(SampleRequest(num_timesteps=BATCH))
        while not algo.env_runner_group.mail.receive_samples():
            algo.env_runner_group.mail.wait_for_sample(60.0)
        algo.learner_group.weights_version += 1  # an update whose weights were not sent yet
        start_s = algo.timers.seconds["waiting"]
        assert algo.sample_ahead(BATCH, wait=False) == []
        assert algo.timers.seconds["waiting"] == start_s
        assert algo.metrics.peek(("env_runners", "num_env_steps_dropped_lifetime")) == 0  # until a batch is there


class TwoAgents(MultiAgentEnv):
    """Both agents act in all ten steps of an episode, which take some time in runner 2."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.agents = self.possible_agents = ["one", "two"]
        self.observation_spaces = dict.fromkeys(self.agents, spaces.Box(0, 10, (1,), np.float32))
        self.action_spaces = dict.fromkeys(self.agents, spaces.Discrete(2))
        self.step_s = 0.005 * (config.worker_index == 2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {}

    def step(self, actions: Any) -> Any:
        time.sleep(self.step_s)
        self.t += 1
        ends = {"__all__": self.t == 10}
        obs = {agent: np.full(1, self.t, np.float32) for agent in self.agents}
        return obs, dict.fromkeys(self.agents, 1.0), ends, {"__all__": False}, {}


@pytest.mark.slow_cases("process")
@pytest.mark.parametrize(("engine", "env"), [("local", RandomAgents), ("process", TwoAgents)])
def test_agent_steps_do_not_let_runners_sample_ahead_without_lag(engine: str, env: Any) -> None:
    """The env steps that runners are asked for hold more agent steps, so that no runner is asked twice."""
    config = config_of(engine, 2, max_lag=0).environment(env)
    with config.multi_agent(policies={"one"}, count_steps_by="agent_steps").build() as algo:
        for _ in range(6):
            result = algo.train()
            assert result["env_runners"]["num_env_steps_dropped_lifetime"] == 0
            assert result["fault_tolerance"]["num_env_steps_in_flight"] == 0


@pytest.mark.parametrize("on_lag", ["drop", "wait"])
def test_a_round_that_is_larger_than_a_batch_is_learned_from_without_lag(on_lag: str) -> None:
    """One fragment is a batch, and the fragment of the other runner would be too old for the next one."""
    with config_of("local", 2, max_lag=0, on_lag=on_lag, rollout_fragment_length=BATCH // 2).build() as algo:
        for iteration in range(1, 4):
            result = algo.train()
            assert trained(result) == algo.num_env_steps_sampled_lifetime == 2 * BATCH * iteration


# Faults, states, and other algorithms.


@pytest.mark.parametrize("on_lag", ["drop", "wait"])
def test_fragments_that_had_arrived_before_an_interrupt_are_learned_from(on_lag: str) -> None:
    with config_of("local", 2, max_lag=1, on_lag=on_lag).build() as algo:
        algo.train()
        group, calls = algo.env_runner_group, []
        next_sample = group.mail.next_sample

        def interrupted_at_the_second() -> Any:
            calls.append(None)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return next_sample()

        group.mail.next_sample = interrupted_at_the_second
        with pytest.raises(KeyboardInterrupt):
            algo.train()
        assert group.mail.num_env_steps_returned == algo.num_env_steps_sampled_lifetime
        in_flight = group.fault_results()["num_env_steps_in_flight"]
        assert in_flight == 2 * BATCH
        for _ in range(2):
            result = algo.train()
        assert algo.num_env_steps_sampled_lifetime == trained(result) == 3 * BATCH
        total = result["env_runners"]["num_env_steps_sampled_lifetime"]
        assert total == trained(result)  # what waits in flight is in neither


def check_weights(algo: Any) -> None:
    """Compare the outputs of all rollouts that were received with the weights that were sent as their version."""
    module = algo.get_module()
    for _, rollout in algo.received:
        module.load_state_dict(map_tree(torch.from_numpy, algo.sent[rollout.weights_version]))
        with torch.no_grad():
            outputs = module.policy(torch.from_numpy(rollout.obs[:-1].reshape(-1, *rollout.obs.shape[2:])))
        np.testing.assert_allclose(
            rollout.dist_inputs[rollout.valid],
            outputs.numpy().reshape(rollout.dist_inputs.shape)[rollout.valid],
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.slow
def test_a_runner_that_is_restarted_has_the_weights_of_its_version() -> None:
    config = RecordedConfig()
    config.__dict__.update(config_of("process", 2).__dict__)
    with config.build() as algo:
        for _ in range(2):
            algo.train()
        [pid, _] = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid())
        os.kill(pid, signal.SIGKILL)
        result, first = algo.train(), len(algo.received)
        while not any(rollout.worker_index == 1 for _, rollout in algo.received[first:]):
            first = len(algo.received) if result["fault_tolerance"]["num_healthy_workers"] < 2 else first
            result = algo.train()
        assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1
        check_weights(algo)


def test_a_runner_that_dies_costs_its_own_work() -> None:
    with config_of("process", 2).build() as algo:
        algo.train()
        [pid, _] = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid())
        os.kill(pid, signal.SIGKILL)
        result = algo.train()
        while result["fault_tolerance"]["num_healthy_workers"] < 2:
            result = algo.train()
        before = result["runner_group"]["by_runner"]["1"]["num_env_steps_sampled"]
        while not result["runner_group"]["by_runner"]["1"]["num_env_steps_sampled"] > before:
            before, result = 0, algo.train()
        assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1
        assert trained(result) == algo.num_env_steps_sampled_lifetime


def test_a_state_leaves_out_what_is_under_way() -> None:
    with config_of("local", 2).build() as algo, config_of("local", 2).build() as other:
        for _ in range(3):
            result = algo.train()
        in_flight = result["fault_tolerance"]["num_env_steps_in_flight"]
        assert in_flight > 0
        other.set_state(algo.get_state())
        result = other.train()
        assert result["runner_group"]["lag_max"] == 0
        assert result["fault_tolerance"]["num_env_steps_lost"] == in_flight
        assert other.num_env_steps_sampled_lifetime == trained(result)
        other.train()


def test_statistics_of_transforms_count_each_step_that_was_received_once() -> None:
    config = config_of("local", 2, transforms=[NormalizeObservations()])
    with config.build() as algo:
        for _ in range(4):
            algo.train()
        [state] = [part for part in algo.modules.get_transform_states()["default_policy"].values() if "count" in part]
        resets = 2 * 2 * (1 + algo.num_env_steps_sampled_lifetime // 4 // 7)  # the first observations of episodes
        num_steps = algo.num_env_steps_sampled_lifetime
        assert num_steps <= state["count"] <= num_steps + resets


def test_episodes_cannot_be_asked_for() -> None:
    with config_of("local", 2).build() as algo:
        with pytest.raises(SampleError, match="sample_async"):
            algo.sample(num_episodes=2)
        assert sum(rollout.num_env_steps for rollout in algo.sample(10)) >= 10
        assert algo.env_runner_group.fault_results()["num_env_steps_in_flight"] > 0


def test_who_samples_in_turn_cannot_sample_ahead() -> None:
    with (
        config_of("local", 2, sample_async=False).build() as algo,
        pytest.raises(SampleError, match=r"env_runners\(sample_async=True\)"),
    ):
        algo.sample_ahead(10)


def test_requests_of_users_count_as_held() -> None:
    with config_of("local", 2).build() as algo:
        group = algo.env_runner_group
        assert group.sample_async(SampleRequest(num_timesteps=4), max_requests=2) == 4
        assert len(group.mail.receive_samples()) == 4
        assert group.sample_async(SampleRequest(num_timesteps=4), max_requests=2) == 0
        assert group.mail.next_sample() is not None
        assert group.sample_async(SampleRequest(num_timesteps=4), max_requests=2) == 1


@pytest.mark.slow_cases("process")
@pytest.mark.parametrize("engine", ["local", "process"])
def test_an_off_policy_algorithm_samples_while_it_learns(engine: str) -> None:
    config = (
        DQNConfig()
        .environment(IdentityEnv, env_config={"space": "discrete"})
        .engine(engine_name=engine)
        .env_runners(num_env_runners=2, sample_async=True, rollout_fragment_length=4)
        .training(train_batch_size_per_learner=16, num_steps_sampled_before_learning_starts=20)
        .reporting(min_sample_timesteps_per_iteration=100)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .debugging(seed=1)
    )
    with config.build() as algo:
        for iteration in range(1, 4):
            result = algo.train()
            assert 100 * iteration <= algo.num_env_steps_sampled_lifetime
        assert result["runner_group"]["lag_max"] >= 1
        assert algo.replay_buffers["default_policy"].num_env_steps_added == algo.num_env_steps_sampled_lifetime
