"""Clients that act themselves: what the policy file draws, and what the runner makes of their steps."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest
import simulators
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray
from simulators import Simulator, Stranger, address_of, end, runner_of, served, steps_of

from at_least import at_least
from corral import DQNConfig, PPOConfig, SACConfig, TD3Config
from corral.core.space_descriptions import describe_space
from corral.exploration.base import Random, StochasticSampling
from corral.exploration.epsilon import EpsilonGreedy
from corral.exploration.noise import GaussianNoise
from corral.runners.policy_file import PolicyFile
from corral.runners.policy_file import _noise as noise_of
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.runners.serving import client as client_module
from corral.runners.serving.client import ClientError, EpisodesLost, PolicyClient, ServerStopped, drive, pack_array

# One process exports the graphs of policies, each of them once.
pytestmark = pytest.mark.xdist_group("graphs")

BOX = spaces.Box(-2.0, 2.0, (2,), np.float32)
PARTS = spaces.Dict({"gear": spaces.Discrete(3), "wheel": BOX})
OBS = spaces.Dict({"action_mask": spaces.Box(0, 1, (3,), np.int8), "observations": spaces.Box(-1, 1, (4,), np.float32)})
NUM_DRAWS = 40_000


def config_of(config: Any, actions: spaces.Space[Any], obs: spaces.Space[Any] | None = None, **kwargs: Any) -> Any:
    """Return a config with a small net, whose graph is exported in less time."""
    obs = spaces.Box(-1, 1, (4,), np.float32) if obs is None else obs
    config.rl_module(model_config={"fcnet_hiddens": [8]})
    return served(config, observation_space=describe_space(obs), action_space=describe_space(actions), **kwargs)


def file_of(runner: EnvRunner) -> PolicyFile:
    return PolicyFile(runner.actors["default_policy"])


def feed(obs: Any, size: int, num_uniform: int, seed: int = 0) -> dict[str, Any]:
    rows = {"obs": obs} if isinstance(obs, np.ndarray) else {f"obs/{name}": leaf for name, leaf in obs.items()}
    return {
        **{name: np.repeat(row, size, 0) for name, row in rows.items()},
        "uniform": np.random.default_rng(seed).random((size, num_uniform), np.float32),
    }


class Drawn:
    """What a policy file draws for one observation, many times."""

    def __init__(self, file: PolicyFile, obs: Any, **kwargs: Any) -> None:
        noise = file.describe(**{"timestep": 0, "explore": True, "random_actions": False, **kwargs})
        session = onnxruntime.InferenceSession(file.write(*noise))
        names = [one.name for one in session.get_outputs()]
        found = dict(zip(names, session.run(None, feed(obs, NUM_DRAWS, file.num_uniform)), strict=True))
        self.outputs, self.draws = found.pop("outputs"), found.pop("draws")
        self.actions = found.pop("actions") if "actions" in found else found
        self.distribution = file._actor.distribution
        expected = file._actor.inference(obs)
        np.testing.assert_allclose(self.outputs, np.repeat(expected, NUM_DRAWS, 0), atol=1e-5)
        # What the server makes of the draws is what the client did.
        again = self.distribution.to_env(self.distribution.mode(self.draws))
        if isinstance(self.actions, dict):
            again = {f"actions/{name}": leaf for name, leaf in again.items()}
            for name, leaf in again.items():
                np.testing.assert_allclose(self.actions[name], leaf, atol=1e-5)
        else:
            np.testing.assert_allclose(self.actions, again, atol=1e-5)

    def shares(self, actions: Any = None) -> NDArray[np.float64]:
        """Return how often each Discrete action was drawn."""
        return np.bincount(self.actions if actions is None else actions, minlength=3) / NUM_DRAWS


X = np.array([[0.3, -0.2, 0.9, 0.1]], np.float32)


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    e = np.exp(logits - logits.max())
    return e / e.sum()


def close(found: Any, expected: Any) -> bool:
    """Say whether shares are within 5 standard deviations of the expected ones."""
    p = np.asarray(expected)
    return bool((np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / NUM_DRAWS) + 1e-6).all())


def test_discrete_actions_are_drawn_from_the_policy() -> None:
    with runner_of(config_of(PPOConfig(), spaces.Discrete(3, start=0))) as runner:
        file = file_of(runner)
        drawn = Drawn(file, X)
        assert close(drawn.shares(), softmax(drawn.outputs[0]))
        greedy = Drawn(file, X, explore=False)
        assert set(greedy.actions.tolist()) == {int(greedy.outputs[0].argmax())}
        assert close(Drawn(file, X, random_actions=True).shares(), [1 / 3] * 3)


@pytest.mark.slow
def test_gaussian_actions_are_drawn_from_the_policy() -> None:
    with runner_of(config_of(PPOConfig(), BOX)) as runner:
        file = file_of(runner)
        drawn = Drawn(file, X)
        mean, std = drawn.outputs[0, :2], np.exp(drawn.outputs[0, 2:])
        z = (drawn.draws[:, :2] - mean) / std
        assert np.abs(z.mean(0)).max() < 5 / math.sqrt(NUM_DRAWS)
        assert np.abs(z.std(0) - 1).max() < 5 / math.sqrt(2 * NUM_DRAWS)
        assert abs(np.corrcoef(z.T)[0, 1]) < 5 / math.sqrt(NUM_DRAWS)
        inside = np.mean(np.abs(z) < 1, 0)
        assert close(inside, [math.erf(1 / math.sqrt(2))] * 2)
        np.testing.assert_allclose(drawn.actions, np.clip(drawn.draws[:, :2] * 2, -2, 2), atol=1e-5)


@pytest.mark.slow
def test_squashed_gaussians_and_their_random_actions_stay_within_the_bounds() -> None:
    with runner_of(config_of(SACConfig(), BOX)) as runner:
        file = file_of(runner)
        drawn = Drawn(file, X)
        np.testing.assert_allclose(drawn.actions, 2 * np.tanh(drawn.draws[:, :2]), atol=1e-5)
        warm_up = Drawn(file, X, random_actions=True)
        assert close(np.mean(warm_up.actions < -1, 0), [0.25, 0.25])  # uniform in [-2, 2]
        assert np.abs(warm_up.actions).max() <= 2


@pytest.mark.slow
def test_noise_of_td3_has_its_scale_and_stays_within_the_bounds() -> None:
    config = config_of(TD3Config(), BOX)
    config.exploration(exploration_config={"type": "GaussianNoise", "stddev": 0.2, "random_timesteps": 100})
    with runner_of(config) as runner:
        file = file_of(runner)
        first, later = Drawn(file, X), Drawn(file, X, timestep=10**9)
        assert close(np.mean(first.actions < -1, 0), [0.25, 0.25])
        exploration: Any = runner.actors["default_policy"].exploration
        scale = 0.2 * exploration.scales(10**9, 1)
        assert abs((later.draws - later.outputs).std() / scale - 1) < 0.02
        greedy = Drawn(file, X, explore=False)
        np.testing.assert_allclose(greedy.draws, greedy.outputs)


def test_the_noise_of_td3_has_its_stddev_and_the_scale_of_the_timestep() -> None:
    alone: Any = {"policy_config": {}, "model": None}
    scales: Any = {"initial_scale": 1.0, "final_scale": 0.5, "scale_timesteps": 1000}
    exploration = GaussianNoise(BOX, stddev=0.25, random_timesteps=100, **scales, **alone)
    assert noise_of(exploration, 99) == (1.0, 0.0)
    assert noise_of(exploration, 100) == (0.0, pytest.approx(0.25 * exploration.scales(100, 1)))
    assert noise_of(exploration, 10**6) == (0.0, 0.125)
    assert noise_of(StochasticSampling(BOX, **alone), 10**6) == (0.0, 1.0)
    assert noise_of(Random(BOX, **alone), 10**6) == (1.0, 0.0)


def test_epsilon_greedy_has_the_epsilon_of_the_timestep() -> None:
    with runner_of(config_of(DQNConfig(), spaces.Discrete(3, start=2))) as runner:
        file, exploration = file_of(runner), cast(EpsilonGreedy, runner.actors["default_policy"].exploration)
        for timestep in (0, 5000, 20_000):
            drawn = Drawn(file, X, timestep=timestep)
            epsilon = exploration.epsilons(timestep, 1)
            expected = np.full(3, epsilon / 3)
            expected[drawn.outputs[0].argmax()] += 1 - epsilon
            assert close(drawn.shares(drawn.actions - 2), expected)


@pytest.mark.slow
def test_soft_q_has_its_temperature() -> None:
    config = config_of(DQNConfig(), spaces.Discrete(3))
    config.exploration(exploration_config={"type": "SoftQ", "temperature": 0.05})
    with runner_of(config) as runner:
        file = file_of(runner)
        drawn = Drawn(file, X)
        assert close(drawn.shares(), softmax(drawn.outputs[0] / 0.05))


def test_illegal_actions_are_never_drawn() -> None:
    obs = {"action_mask": np.array([[1, 0, 1]], np.int8), "observations": X}
    for config in (PPOConfig(), DQNConfig()):
        with runner_of(config_of(config, spaces.Discrete(3), OBS)) as runner:
            file = file_of(runner)
            for random_actions in (False, True):
                shares = Drawn(file, obs, random_actions=random_actions).shares()
                assert shares[1] == 0
                assert shares[[0, 2]].min() > 0.01
            assert close(shares, [0.5, 0, 0.5])


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["independent", "autoregressive"])
def test_nested_actions_are_drawn_part_by_part(parts: str) -> None:
    config = config_of(PPOConfig(), PARTS).rl_module(model_config={"action_parts": parts})
    with runner_of(config) as runner:
        file = file_of(runner)
        drawn = Drawn(file, X)
        assert close(drawn.shares(drawn.actions["actions/gear"]), softmax(drawn.outputs[0, :3]))
        for gear in range(3):
            chosen = drawn.actions["actions/gear"] == gear
            start = 3 + (4 * gear if parts == "autoregressive" else 0)
            mean, std = drawn.outputs[0, start : start + 2], np.exp(drawn.outputs[0, start + 2 : start + 4])
            z = (drawn.distribution.mode(drawn.draws)[chosen][:, 1:] - mean) / std
            assert np.abs(z.mean(0)).max() < 5 / math.sqrt(chosen.sum())
            assert np.abs(z.std(0) - 1).max() < 5 / math.sqrt(2 * chosen.sum())


@pytest.mark.slow
@pytest.mark.parametrize("actions", [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)])
def test_entries_of_an_action_are_independent(actions: spaces.Space[Any]) -> None:
    with runner_of(config_of(PPOConfig(), actions)) as runner:
        file = file_of(runner)
        drawn, at_random = Drawn(file, X), Drawn(file, X, random_actions=True)
        logits = drawn.outputs[0]
        binary = isinstance(actions, spaces.MultiBinary)
        first = 1 / (1 + np.exp(-logits[0])) if binary else softmax(logits[:2])[1]
        last = 1 / (1 + np.exp(-logits[2])) if binary else softmax(logits[2:])[1]
        column = 2 if binary else 1
        found = drawn.actions
        assert close(np.mean(found[:, 0] == 1), first)
        assert close(np.mean(found[:, column] == 1), last)
        assert close(np.mean((found[:, 0] == 1) & (found[:, column] == 1)), first * last)
        assert close(np.mean(at_random.actions[:, column] == 1), 1 / 2 if binary else 1 / 3)


@pytest.mark.slow
def test_the_file_has_the_weights_of_now() -> None:
    config = config_of(PPOConfig(), BOX).rl_module(model_config={"fcnet_hiddens": [8], "free_log_std": True})
    with runner_of(config) as runner:
        actor = runner.actors["default_policy"]
        file = PolicyFile(actor)
        before = file.write(0.0, 1.0)
        weights = {name: value.numpy().copy() for name, value in actor.module.state_dict().items()}
        rng = np.random.default_rng(1)
        changed = {name: (value + rng.normal(size=value.shape)).astype(np.float32) for name, value in weights.items()}
        runner.set_weights({"default_policy": changed}, 1)
        after = file.write(0.0, 1.0)
        outputs = []
        for data in (before, after):
            session = onnxruntime.InferenceSession(data)
            outputs.append(session.run(["outputs"], feed(X, 1, file.num_uniform))[0])
        np.testing.assert_allclose(outputs[1], actor.inference(X), atol=1e-5)
        assert np.abs(outputs[1] - outputs[0]).min() > 1e-4  # each output depends on weights, log_std too


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config: config.rl_module(model_config={"use_lstm": True}), "memory"),
        (lambda config: config.exploration(exploration_config={"type": "Curiosity"}), ""),
        (lambda config: config.env_runners(transforms=["NormalizeObservations"]), "transforms"),
    ],
)
def test_a_policy_that_only_the_runner_can_act_with_is_refused(change: Any, reason: str) -> None:
    with runner_of(change(config_of(PPOConfig(), spaces.Discrete(3)))) as runner:
        said: list[str] = []

        def ask() -> None:
            try:
                with PolicyClient(address_of(runner), acts_locally=True) as client:
                    client.begin(X)
                    while True:
                        client.step(X, [1.0])
            except ServerStopped:
                pass
            except ClientError as error:
                assert error.code == "policy"
                said.append(str(error))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        if reason:
            while thread.is_alive():
                runner.collect(SampleRequest(num_timesteps=50, time_limit_s=0.2))
            assert reason in said[0]
            assert "let the server choose the actions" in said[0]
        else:
            assert runner.sample(num_timesteps=50).num_env_steps >= 50
        runner.stop()
        thread.join(10)


def test_the_columns_hold_what_clients_did_and_what_their_policy_said() -> None:
    with runner_of(served(num_envs=8)) as runner:
        simulators = [
            Simulator(address_of(runner), 0, 4, acts_locally=True).start(),
            Simulator(address_of(runner), 1, 1, pause_s=0.003, acts_locally=True).start(),
            Simulator(address_of(runner), 2, 2).start(),  # which asks the server
        ]
        rollouts = [runner.sample(num_timesteps=n) for n in (300, 1, 257, 400)]
        inference = runner.actors["default_policy"].inference
        for rollout in rollouts:
            obs, outputs = rollout.obs[:-1][rollout.valid], rollout.dist_inputs[rollout.valid]
            np.testing.assert_allclose(outputs, [inference(row[None])[0] for row in obs], atol=1e-5)
            logp = outputs - np.log(np.exp(outputs).sum(1, keepdims=True))
            actions = rollout.actions[rollout.valid]
            np.testing.assert_allclose(rollout.logp[rollout.valid], logp[np.arange(len(logp)), actions], atol=1e-5)
        end(runner, *simulators)
    assert runner.num_env_steps_sampled_lifetime == sum(rollout.num_env_steps for rollout in rollouts)
    assert all(0 <= rollout.num_env_steps - n < 8 for rollout, n in zip(rollouts, (300, 1, 257, 400), strict=True))
    learned = [step for rollout in rollouts for _, step in steps_of(rollout)]
    played = {step.obs: step for simulator in simulators for steps in simulator.episodes.values() for step in steps}
    assert len({step.obs for step in learned}) == len(learned)
    assert all(played[step.obs] == step for step in learned)
    by_client = Counter(step.obs[0] for step in learned)
    assert min(by_client.values()) > 5
    missing = played.keys() - {step.obs for step in learned}
    for obs in missing:  # they were not sent yet
        client, env, episode, t = obs
        assert not [o for o in played if o[:2] == (client, env) and o[2:] > (episode, t) and o not in missing]


def test_clients_that_act_at_the_same_time_keep_their_own_actions() -> None:
    """Each of two clients takes one action all the time, in messages that the server reads together."""
    with runner_of(served(DQNConfig(), num_envs=2)) as runner:
        barrier = threading.Barrier(2)

        def play(action: int) -> None:
            with contextlib.suppress(ServerStopped), PolicyClient(address_of(runner)) as client:
                for t in itertools.count():
                    if t < 20:  # less than half of the sample, at whose end the server stops
                        barrier.wait(10)
                    obs = np.array([[action, t, 0, 0]], np.float32)
                    client.exchange([0], obs, begins=[not t], actions=np.array([action]))

        threads = [threading.Thread(target=play, args=(action,), daemon=True) for action in (0, 2)]
        for thread in threads:
            thread.start()
        rollout = runner.sample(num_timesteps=60)
        runner.stop()
        for thread in threads:
            thread.join(10)
    obs, actions = rollout.obs[:-1][rollout.valid], rollout.actions[rollout.valid]
    assert set(actions.tolist()) == {0, 2}
    np.testing.assert_array_equal(actions, obs[:, 0])


@pytest.mark.slow
def test_the_lag_is_measured_in_updates() -> None:
    """With messages of 4 steps, the first step of a sample may be of the message before, and has older weights."""
    with runner_of(served(num_envs=1, policy_interval_s=1e-9)) as runner:
        simulator = Simulator(address_of(runner), 0, 1, acts_locally=True, steps_per_message=4, every_env=True).start()
        lags = []
        for version in range(6):
            runner.set_weights({}, 10 * version)
            rollout = runner.sample(num_timesteps=7)
            metrics = runner.metrics.reduce()
            lags.append((rollout.num_env_steps, metrics["policy_lag_mean"], metrics["policy_lag_max"]))
        end(runner, simulator)
    # Each of the 7 actions has the weights of now or of one version before.
    assert lags[0] == (7, 0.0, 0.0)
    for num_steps, mean, most in lags:
        assert num_steps == 7
        assert mean * 7 == pytest.approx(10 * round(mean * 7 / 10))
        assert 0 <= mean * 7 <= 40
        assert most == (10.0 if mean else 0.0)
    assert sum(mean for _, mean, _ in lags) > 0


def test_a_connection_that_breaks_brings_the_policy_again() -> None:
    with runner_of(served(num_envs=2)) as runner:
        simulator = Simulator(address_of(runner), 0, 2, acts_locally=True, breaks_every=20).start()
        rollouts = [runner.sample(num_timesteps=200) for _ in range(3)]
        runner.set_weights({}, 5)
        last = runner.sample(num_timesteps=100)
        end(runner, simulator)
    assert simulator.num_breaks > 3
    learned = [step for rollout in (*rollouts, last) for _, step in steps_of(rollout)]
    played = {step.obs: step for steps in simulator.episodes.values() for step in steps}
    assert len({step.obs for step in learned}) == len(learned) >= 700
    assert all(played[step.obs] == step for step in learned)
    assert simulator.versions[-1] == 5


def test_a_client_that_comes_back_is_sent_the_policy_again() -> None:
    """The message may have been lost with the connection before."""
    found = answers_to({"begins": [True]}, {"rewards": [1.0]}, wants_policy=True)
    assert [message["type"] for message in found] == ["policy", "actions", "policy"]


@pytest.mark.parametrize(("max_delay_s", "sent"), [(1e9, [6, 6]), (0.0, [2] * 6)], ids=["enough", "long ago"])
def test_steps_are_sent_when_they_are_enough_and_when_they_take_too_long(
    max_delay_s: float, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_DELAY_S", max_delay_s)
    messages: list[int] = []
    client: Any = SimpleNamespace(num_envs=2, observation_space=simulators.OBS, action_space=simulators.ACTIONS)
    client.weights_version, client._send = 0, lambda envs, **kept: messages.append(len(envs))
    actor = client_module._LocalActor(client, 3, 0)
    zeros = np.zeros(2, np.int64), np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32)  # actions and their draws
    actor._session, actor._inputs, actor._num_uniform = SimpleNamespace(run=lambda *_: zeros), [("obs", np.float32)], 1
    for _ in range(6):
        actor.exchange([0, 1], np.zeros((2, 4)), None, None, dict.fromkeys(("terminated", "truncated", "counts")))
    assert messages == sent


def test_a_simulator_may_use_its_arrays_again() -> None:
    obs, reward, ends = np.zeros((1, 4), np.float32), np.zeros(1), np.zeros(1, np.bool_)

    def play(address: str) -> None:
        with contextlib.suppress(ServerStopped), PolicyClient(address, acts_locally=True) as client:
            client.begin(obs)
            for t in itertools.count(1):
                obs[:], reward[:], ends[:] = t, t, t % 10 == 9
                client.step(obs, reward, ends, next_obs=obs)

    with runner_of(served(num_envs=1)) as runner:
        thread = threading.Thread(target=play, args=(address_of(runner),), daemon=True)
        thread.start()
        found = steps_of(runner.collect(SampleRequest(num_timesteps=50, time_limit_s=120.0)))
        steps = at_least(50, (step for _, step in found))
        runner.stop()
        thread.join(10)
    assert [step.obs[0] for step in steps] == [*range(len(steps))]
    assert [(step.reward, step.terminated) for step in steps] == [(t, t % 10 == 9) for t in range(1, len(steps) + 1)]


@pytest.mark.slow
def test_another_server_is_never_told_what_the_policy_of_the_server_before_did() -> None:
    with runner_of(served(num_envs=1)) as first, runner_of(served(num_envs=1).debugging(seed=9)) as second:

        def play() -> None:
            with contextlib.suppress(ServerStopped), PolicyClient(address_of(first), acts_locally=True) as client:
                client.begin(X)
                while client.weights_version < 5:
                    client.step(X, [1.0])
                client.address = address_of(second)
                client._socket.shutdown(socket.SHUT_RDWR)
                with contextlib.suppress(EpisodesLost):
                    while True:
                        client.step(X, [1.0])
                client.begin(X)
                while True:
                    client.step(X, [1.0])

        thread = threading.Thread(target=play, daemon=True)
        first.set_weights({}, 5)
        thread.start()
        first.collect(SampleRequest(num_timesteps=50, time_limit_s=10.0))
        rollout = second.collect(SampleRequest(num_timesteps=100, time_limit_s=10.0))
        first.stop()
        second.stop()
        thread.join(10)
    outputs = rollout.dist_inputs[rollout.valid]
    expected = second.actors["default_policy"].inference(X)
    np.testing.assert_allclose(outputs, np.repeat(expected, len(outputs), 0), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"draws": [[0.0, 0.0, 1.0]]}, "steps.draws the policy that a client was sent acts by outputs, draws"),
        ({"outputs": [[0.0] * 3], "draws": [[0.0] * 3], "weights_version": 1}, "steps.weights_version must be 0 to 0"),
        ({"outputs": [[0.0] * 3], "draws": [[0.0] * 2], "weights_version": 0}, "steps.draws"),
        ({"outputs": [[0.0] * 3], "draws": [[float("nan")] * 3], "weights_version": 0}, "steps.draws"),
        ({"outputs": [[0.0, 0.0, 50.0]], "draws": [[1.0, 0.0, 0.0]], "weights_version": 0}, "never draws"),
    ],
)
def test_steps_that_no_policy_gave_are_refused(fields: dict[str, Any], said: str) -> None:
    found = answer_to(fields, wants_policy=True)
    assert (found["type"], found["code"]) == ("error", "protocol")
    assert said in found["message"]


def test_only_clients_that_were_sent_the_policy_act_by_it() -> None:
    found = answer_to({"outputs": [[0.0] * 3], "draws": [[0.0] * 3], "weights_version": 0}, wants_policy=False)
    assert "only clients that were sent the policy act by it" in found["message"]


def test_an_illegal_action_is_refused() -> None:
    config = config_of(PPOConfig(), spaces.Discrete(3), OBS, num_envs=1)
    obs = {"action_mask": pack_array(np.array([[1, 0, 1]], np.int8)), "observations": pack_array(X)}
    draws = {"outputs": [[0.0] * 3], "draws": [[0.0, 1.0, 0.0]], "weights_version": 0}
    found = answer_to({"obs": obs, **draws}, wants_policy=True, config=config)
    assert "illegal by the action mask" in found["message"]
    legal = {**draws, "draws": [[0.0, -1.0, 0.5]]}
    assert answer_to({"obs": obs, **legal}, wants_policy=True, config=config)["type"] == "actions"


def test_the_entry_of_an_action_that_no_policy_draws_is_named() -> None:
    config = config_of(PPOConfig(), spaces.Box(-1, 1, (1,), np.float32), num_envs=1)
    steps = {"envs": [0, 0], "obs": [[0.0] * 4] * 2, "begins": [True, False], "rewards": [0.0, 1.0]}
    far = {**steps, "outputs": [[0.0, -3.0]] * 2, "draws": [[0.0, 0.0], [50.0, 0.0]], "weights_version": 0}
    found = answer_to(far, wants_policy=True, config=config)
    assert "steps.draws[1]: stands for an action that a policy with these outputs never draws" in found["message"]


def answers_to(*steps: dict[str, Any], wants_policy: bool, config: Any = None) -> list[dict[str, Any]]:
    """Return what the server sends to a client after messages `steps` with these fields, each over a connection."""
    found: list[dict[str, Any]] = []
    with runner_of(config or served(num_envs=1)) as runner:

        def ask() -> None:
            session = ""
            for number, fields in enumerate(steps, 1):
                stranger = Stranger(address_of(runner))
                with stranger.socket:
                    stranger.say({"type": "hello", "protocol": 1, "wants_policy": wants_policy, "session": session})
                    session = stranger.read()["session"]
                    if wants_policy and number == 1:
                        found.append(stranger.read())
                    stranger.say({"type": "steps", "id": number, "envs": [0], "obs": [[0.0] * 4], **fields})
                    found.append(stranger.read())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        while thread.is_alive():
            runner.collect(SampleRequest(num_timesteps=50, time_limit_s=0.1))
        thread.join()
    return found


def answer_to(fields: dict[str, Any], *, wants_policy: bool, config: Any = None) -> dict[str, Any]:
    """Return what the server answers to a first message `steps` with these fields."""
    *before, answer = answers_to({"begins": [True], **fields}, wants_policy=wants_policy, config=config)
    assert [message["type"] for message in before] == ["policy"] * wants_policy
    return answer


def make_cartpole() -> Any:
    return TimeLimit(CartPoleEnv(), 500)


def train_cartpole(config: Any, num_steps: int, until: float) -> float:
    """Train with a client that acts itself, and return the largest mean return."""
    algo = served(config, num_envs=8, spaces_of="CartPole-v1", observation_space=None, action_space=None).build()
    errors: list[BaseException] = []

    def play() -> None:
        try:
            with PolicyClient(algo.env_runner.env.server.address, 8, acts_locally=True, seed=0) as client:
                drive(client, [make_cartpole() for _ in range(8)])
        except ServerStopped:
            pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    best = 0.0
    while algo.num_env_steps_sampled_lifetime < num_steps and best < until and not errors:
        best = max(best, algo.train()["env_runners"].get("episode_return_mean") or 0.0)
    algo.stop()
    thread.join(10)
    assert not errors
    return best


@pytest.mark.slow
def test_ppo_learns_from_a_client_that_acts_itself() -> None:
    assert train_cartpole(PPOConfig(), 60_000, 150) >= 150


@pytest.mark.slow
@pytest.mark.parametrize("config", [PPOConfig, DQNConfig])
def test_cartpole_is_solved_by_a_client_that_acts_itself(config: Any) -> None:
    assert train_cartpole(config(), 400_000, 450) >= 450
