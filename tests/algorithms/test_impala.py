"""IMPALA: its loss and its updates against slow references, its queue, and learners that work meanwhile."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

from corral import APPOConfig, IMPALAConfig
from corral.algorithms.impala import IMPALA, WaitingBatch, action_ratios, impala_loss, policy_outputs
from corral.errors import WorkerDiedError
from corral.testing import CountingEnv
from random_agents import RandomAgents

BATCH = 40


def config_of(algo: str = "IMPALA", engine: str = "local", num_env_runners: int = 2, **training: Any) -> Any:
    config = {"IMPALA": IMPALAConfig, "APPO": APPOConfig}[algo]()
    return (
        config.environment(CountingEnv, env_config={"length": 7})
        .engine(engine_name=engine if num_env_runners else "auto")
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=2, rollout_fragment_length=10)
        .env_runners(vectorization="sync")
        .reporting(min_sample_timesteps_per_iteration=1)
        .training(**{"train_batch_size_per_learner": BATCH, **training})
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .debugging(seed=1)
    )


def weights_of(algo: Any) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in algo.get_module().state_dict().items()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


def trained(result: Any) -> float:
    return float(result["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"])


# The loss and the update.


def softmax(logits: Any) -> Any:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_the_loss_is_the_sum_of_its_three_parts() -> None:
    with config_of(num_env_runners=0).build() as algo:
        module = algo.get_module()
        [rollout] = algo.sample(1)
        batch = algo.make_batch("default_policy", [rollout])
        tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in batch.items()}
        loss, reported = impala_loss(module, tensors, {"entropy_coeff": 0.1}, vf_loss_coeff=0.3)
        with torch.no_grad():
            logits, values = (part.numpy() for part in module.policy_and_value(tensors["obs"]))
    probs = softmax(logits)
    logp = np.log(probs[np.arange(len(probs)), batch["actions"]])
    policy_loss = -np.mean(logp * batch["advantages"])
    vf_loss = np.mean((values - batch["value_targets"]) ** 2) / 2
    entropy = -np.mean((probs * np.log(probs)).sum(-1))
    assert reported["policy_loss"].item() == pytest.approx(policy_loss, rel=1e-4)
    assert reported["vf_loss"].item() == pytest.approx(vf_loss, rel=1e-4)
    assert reported["entropy"].item() == pytest.approx(entropy, rel=1e-4)
    assert loss.item() == pytest.approx(policy_loss + 0.3 * vf_loss - 0.1 * entropy, rel=1e-4)
    assert reported["mean_ratio"].item() == pytest.approx(1.0, rel=1e-4)  # nothing was learned since


def slow_targets(algo: Any, rollout: Any, rho: float, c: float) -> tuple[Any, Any]:
    """Return value targets and advantages of eq. 1 and section 4.2, step by step from the ends of the lanes."""
    module, gamma = algo.get_module(), algo.config.gamma
    with torch.no_grad():
        logits, values = (part.numpy() for part in map_obs(module, rollout.obs))
    targets, advantages = values[:-1].copy(), np.zeros_like(values[:-1])
    for n in range(rollout.num_envs):
        later = 0.0  # target of the next step, minus its value
        for t in reversed(range(rollout.num_rows)):
            if not rollout.valid[t, n]:
                later = 0.0
                continue
            ended = bool(rollout.terminated[t, n] or rollout.truncated[t, n])
            next_value = 0.0 if rollout.terminated[t, n] else values[t + 1, n]
            later = 0.0 if ended else later
            action = rollout.actions[t, n]
            ratio = softmax(logits[t, n])[action] / softmax(rollout.dist_inputs[t, n])[action]
            error = rollout.rewards[t, n] + gamma * next_value - values[t, n]
            advantages[t, n] = min(1.0, ratio) * (error + gamma * later)
            later = min(rho, ratio) * error + gamma * min(c, ratio) * later
            targets[t, n] = values[t, n] + later
    return targets, advantages


def map_obs(module: Any, obs: Any) -> Any:
    flat = torch.from_numpy(obs.reshape(-1, *obs.shape[2:]))
    logits, values = module.policy_and_value(flat)
    return logits.reshape(*obs.shape[:2], -1), values.reshape(obs.shape[:2])


@pytest.mark.parametrize(("rho", "c"), [(1.0, 1.0), (2.0, 0.7)])
def test_the_batch_has_the_targets_of_v_trace_by_the_weights_of_now(rho: float, c: float) -> None:
    config = config_of(num_env_runners=0, vtrace_clip_rho_threshold=rho, vtrace_clip_c_threshold=c)
    with config.build() as algo:
        [rollout] = algo.sample(1)
        with torch.no_grad():  # a policy that is far from the one that acted
            for parameter in algo.get_module().parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        batch = algo.make_batch("default_policy", [rollout])
        targets, advantages = slow_targets(algo, rollout, rho, c)
        outputs = policy_outputs(rollout, lambda rows: algo.learner_group.dist_inputs("default_policy", rows), 1)
        ratios = action_ratios(algo.get_module().distribution, outputs, rollout)
    assert ratios[rollout.valid].std() > 0.1
    np.testing.assert_allclose(batch["value_targets"], targets[rollout.valid], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batch["advantages"], advantages[rollout.valid], rtol=1e-4, atol=1e-4)


def test_an_update_is_one_gradient_step_on_the_whole_batch() -> None:
    with config_of(num_env_runners=0, optimizer="sgd", lr=0.1, grad_clip=None).build() as algo:
        before = weights_of(algo)
        algo.train()
        after = weights_of(algo)
    with config_of(num_env_runners=0, optimizer="sgd", lr=0.1, grad_clip=None).build() as other:
        assert_same(before, weights_of(other))
        module, rollouts = other.get_module(), other.sample(BATCH)
        batch = other.make_batch("default_policy", rollouts)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in batch.items()}
        loss, _ = impala_loss(module, tensors, {"entropy_coeff": 0.01}, vf_loss_coeff=0.5)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        for (name, value), gradient in zip(module.named_parameters(), gradients, strict=True):
            np.testing.assert_allclose(after[name], (value - 0.1 * gradient).detach().numpy(), rtol=1e-4, atol=1e-5)


# The queue and the circular buffer.


class Drawn(IMPALA):
    """Keeps the batches in the order in which it learned from them."""

    def setup(self) -> None:
        super().setup()
        self.drawn: list[int] = []

    def make_batch(self, module_id: str, rollouts: Any) -> Any:
        self.drawn.append(id(rollouts[0]))
        return super().make_batch(module_id, rollouts)


def test_a_full_circular_buffer_drops_the_oldest_batch_and_counts_it() -> None:
    training = {
        "use_circular_buffer": True,
        "circular_buffer_num_batches": 3,
        "circular_buffer_iterations_per_batch": 2,
    }
    with config_of(num_env_runners=0, **training).build() as algo:
        rollouts = [algo.sample(BATCH) for _ in range(5)]
        for part in rollouts:
            algo._add_batch(part)
        assert [waiting.received for waiting in algo._waiting] == rollouts[2:]
        drawn = [algo._draw_batch()["default_policy"] for _ in range(6)]
        assert all(drawn.count(part) == 2 for part in rollouts[2:])
        assert drawn != [part for part in rollouts[2:] for _ in range(2)]  # not in order
        assert algo._waiting == []
        num_steps = sum(rollout.num_env_steps for part in rollouts[:2] for rollout in part)
        assert algo.metrics.peek(("env_runners", "num_env_steps_dropped_lifetime")) == num_steps


def test_a_batch_that_was_learned_from_is_not_dropped() -> None:
    training = {"use_circular_buffer": True, "circular_buffer_num_batches": 1}
    with config_of(num_env_runners=0, **training).build() as algo:
        algo._add_batch(algo.sample(BATCH))
        algo._draw_batch()
        algo._add_batch(algo.sample(BATCH))
        assert [type(waiting) for waiting in algo._waiting] == [WaitingBatch]
        assert algo.metrics.peek(("env_runners", "num_env_steps_dropped_lifetime")) == 0


def test_fast_runners_fill_the_circular_buffer_once_before_an_update() -> None:
    """Runners that always have a batch there must not keep the algorithm from learning."""
    with config_of("APPO", num_env_runners=0, circular_buffer_num_batches=3).build() as algo:
        batches, sample = [], algo.sample_ahead

        def arrives_at_once(size: int, *, wait: bool = True) -> Any:
            assert len(batches) < 10
            batches.append(sample(size))
            return batches[-1]

        algo.sample_ahead = arrives_at_once
        algo.training_step()
        assert (len(batches), algo.learner_group.weights_version) == (3, 1)


def test_a_circular_buffer_that_became_smaller_drops_what_it_has_no_room_for() -> None:
    with config_of("APPO", num_env_runners=0, circular_buffer_num_batches=4).build() as algo:
        for _ in range(4):
            algo._add_batch(algo.sample(BATCH))
        algo.reconfigure(circular_buffer_num_batches=2)
        algo._add_batch(algo.sample(BATCH))
        assert len(algo._waiting) == 2
        assert algo.metrics.peek(("env_runners", "num_env_steps_dropped_lifetime")) == 3 * BATCH


@pytest.mark.slow_cases("process")
@pytest.mark.parametrize("algo_name", ["IMPALA", "APPO"])
@pytest.mark.parametrize("engine", ["local", "process"])
def test_a_module_can_be_removed_after_an_interrupt(algo_name: str, engine: str) -> None:
    """The interrupted iteration leaves a batch of the module and, with a learner in a process, an update."""
    config = config_of(algo_name, engine, 0).learners(num_learners=int(engine == "process"))
    config.environment(RandomAgents, env_config={"num_agents": 2})
    config.multi_agent(policies={"a", "b"})
    config.multi_agent(policy_mapping_fn=lambda agent, *args, **kwargs: "a" if agent == "a0" else "b")
    with config.build() as algo:
        algo._receive_batches()
        algo._add_batch(algo.sample(BATCH))
        algo._update_once()
        algo.remove_module("b", policy_mapping_fn=lambda agent, *args, **kwargs: "a")
        result = algo.train()
        assert set(result["learners"]) >= {"a"} and algo._waiting == [] and algo._pending is None


def test_batches_that_have_become_too_old_are_all_dropped_and_counted() -> None:
    config = config_of("IMPALA", "local", 2, learner_queue_size=2000).env_runners(max_lag=1)
    with config.build() as algo:
        received = algo.sample_ahead(BATCH)
        for _ in range(2000):  # more than Python's calls may be nested
            algo._add_batch(received)
        algo.learner_group.weights_version += 2
        assert (algo._draw_batch(), algo._waiting) == ({}, [])
        num_steps = 2000 * sum(rollout.num_env_steps for rollout in received)
        assert algo.metrics.peek(("env_runners", "num_env_steps_dropped_lifetime")) == num_steps


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_runners_pause_while_the_queue_is_full(size: int) -> None:
    """Each of two runners has a fragment of half a batch and the next one, so two more batches are ready."""
    with config_of("IMPALA", "process", 2, learner_queue_size=size).build() as algo:
        group, deadline_s = algo.env_runner_group, time.monotonic() + 60
        while len(algo._waiting) < size or not all(call.future.done() for call in group.mail.pending()):
            assert time.monotonic() < deadline_s
            algo._receive_batches()
        before = group.fault_results()["num_env_steps_in_flight"]
        algo._receive_batches()
        assert len(algo._waiting) == size
        assert group.fault_results()["num_env_steps_in_flight"] == before >= BATCH
        algo._update_once()
        assert len(algo._waiting) == size - 1


@pytest.mark.slow_cases("process-2-IMPALA")
@pytest.mark.parametrize(("algo_name", "num_updates"), [("IMPALA", 1), ("APPO", 2)])
@pytest.mark.parametrize(("engine", "num_env_runners"), [("local", 0), ("local", 2), ("process", 2)])
def test_an_iteration_ends_with_all_batches_learned(
    algo_name: str, num_updates: int, engine: str, num_env_runners: int
) -> None:
    with (
        config_of(algo_name, engine, num_env_runners)
        .reporting(min_sample_timesteps_per_iteration=3 * BATCH)
        .build() as algo
    ):
        for iteration in range(1, 4):
            result = algo.train()
            assert algo.num_env_steps_sampled_lifetime >= 3 * BATCH * iteration
            assert algo._waiting == [] and algo._pending is None
            dropped = result["env_runners"]["num_env_steps_dropped_lifetime"]
            assert trained(result) == num_updates * (algo.num_env_steps_sampled_lifetime - dropped)


def test_runners_get_the_weights_of_every_second_update_and_of_the_last() -> None:
    config = config_of("IMPALA", "local", 2, broadcast_interval=2, learner_queue_size=1)
    with config.reporting(min_sample_timesteps_per_iteration=3 * BATCH).build() as algo:
        sent, send = [], algo.sync_weights

        def record() -> None:
            send()
            sent.append(algo.learner_group.weights_version)

        algo.sync_weights = record
        for _ in range(2):
            algo.train()
    assert sent == [2, 3, 5, 6]


# Learners of an engine.


@pytest.mark.slow_cases("APPO")
@pytest.mark.parametrize("algo_name", ["IMPALA", "APPO"])
def test_a_learner_in_a_process_learns_from_every_batch(algo_name: str) -> None:
    config = config_of(algo_name, "process", 0).learners(num_learners=1)
    with config.reporting(min_sample_timesteps_per_iteration=3 * BATCH).build() as algo:
        for _ in range(2):
            before = weights_of(algo)
            result = algo.train()
            after = weights_of(algo)
            assert any((before[name] != after[name]).any() for name in before)
            assert trained(result) == algo.num_env_steps_sampled_lifetime * (2 if algo_name == "APPO" else 1)
            assert algo.learner_group.weights_version == trained(result) // BATCH


def test_the_update_that_is_under_way_counts_in_the_lag() -> None:
    config = config_of("IMPALA", "process", 0).learners(num_learners=1)
    with config.build() as algo:
        for _ in range(2):
            algo._add_batch(algo.sample_ahead(BATCH))
        algo._update_once()
        assert algo._pending is not None
        algo._draw_batch()
        costs = algo.sampler.ahead.take_costs()
        assert (costs["lag_mean"], costs["lag_max"]) == (0.5, 1)


@pytest.mark.slow
def test_a_state_in_the_middle_of_an_update_holds_the_update() -> None:
    with config_of("IMPALA", "process", 0).learners(num_learners=1).build() as algo:
        algo._receive_batches()
        algo._update_once()
        assert algo._pending is not None
        state = algo.get_state()
        assert (algo._pending, state["learners"]["weights_version"]) == (None, 1)
        for name, value in weights_of(algo).items():
            np.testing.assert_array_equal(state["learners"]["weights"]["default_policy"][name], value)


def test_a_learner_that_dies_ends_the_run_and_its_weights_are_kept() -> None:
    with config_of("IMPALA", "process", 0).learners(num_learners=1).build() as algo:
        algo.train()
        before = weights_of(algo)
        [pid] = algo.learner_group.foreach_learner(lambda learner: os.getpid())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            for _ in range(3):
                algo.train()
        state = algo.get_state()
        for name, value in before.items():
            np.testing.assert_array_equal(state["learners"]["weights"]["default_policy"][name], value)
