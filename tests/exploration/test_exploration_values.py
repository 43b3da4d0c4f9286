"""Random and greedy actions, by closed forms: epsilon, softmax, and evenly from each space."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from explorers import BOX, FOUR, Explorer
from gymnasium import spaces

from at_least import at_least
from corral import PPOConfig
from corral.algorithms.ppo import ppo_batch
from corral.runners.runner import EnvRunner
from corral.testing import IDENTITY_ACTION_SPACES, CountingEnv

NUM_ROWS = 20_000
BEST_IS_2 = np.tile([0.1, 0.2, 0.9, 0.3], (NUM_ROWS, 1))


def shares(actions: Any, num_actions: int = 4) -> Any:
    return np.bincount(actions, minlength=num_actions) / len(actions)


def near(shares: Any) -> Any:
    """Within five standard deviations of a share that `NUM_ROWS` draws give."""
    shares = np.asarray(shares)
    return pytest.approx(shares, abs=5 * math.sqrt(0.25 / NUM_ROWS))


@pytest.mark.parametrize("epsilon", [0.4, 1.0])
def test_epsilon_is_the_share_of_random_actions(epsilon: float) -> None:
    explorer = Explorer("EpsilonGreedy", epsilon_schedule=epsilon)
    actions, logp = explorer.choose(BEST_IS_2)
    assert logp is None
    assert shares(actions) == near(np.where(np.arange(4) == 2, 1 - epsilon, 0) + epsilon / 4)
    assert set(explorer.choose(BEST_IS_2, explore=False)[0]) == {2}


def test_an_explicit_epsilon_of_zero_is_greedy() -> None:
    for settings in ({"epsilon_schedule": 0.0}, {"initial_epsilon": 0.0, "final_epsilon": 0.0}):
        explorer = Explorer("EpsilonGreedy", **settings)
        assert set(explorer.choose(BEST_IS_2)[0]) == {2}
        assert explorer.exploration.get_metrics(0) == {"epsilon": 0.0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"final_epsilon": 0.0, "epsilon_timesteps": 1000}, {0: 1.0, 500: 0.5, 1000: 0.0, 9999: 0.0}),
        (
            {"initial_epsilon": 0.8, "final_epsilon": 0.2, "warmup_timesteps": 100, "epsilon_timesteps": 600},
            {0: 0.8, 100: 0.8, 400: 0.5, 700: 0.2, 701: 0.2},
        ),
        ({}, {0: 1.0, 10_000: 0.05}),
        ({"epsilon_schedule": [[0, 0.5], [10, 0.1]]}, {0: 0.5, 5: 0.3, 10: 0.1, 11: 0.1}),
        ({"initial_epsilon": 0.5, "final_epsilon": 0.1, "epsilon_timesteps": 0}, {0: 0.5, 1: 0.1}),
    ],
)
def test_epsilon_at_timesteps(settings: dict[str, Any], expected: dict[int, float]) -> None:
    exploration = Explorer("EpsilonGreedy", **settings).exploration
    found = {timestep: exploration.get_metrics(timestep)["epsilon"] for timestep in expected}
    assert found == pytest.approx(expected)


def test_each_actor_has_an_epsilon_of_its_own() -> None:
    explorers = [Explorer("PerWorkerEpsilonGreedy", num_workers=3, worker_index=i, num_envs=2) for i in (1, 2, 3)]
    found = np.concatenate([explorer.exploration.epsilons(10**9, 2) for explorer in explorers])
    assert found == pytest.approx([0.4 ** (1 + 7 * i / 5) for i in range(6)])
    inputs = BEST_IS_2[: NUM_ROWS // 2 * 2].reshape(-1, 2, 4)
    epsilons = found[:2]
    actions = np.array([explorers[0].choose(row)[0] for row in inputs[:4000]])
    assert np.mean(actions != 2, axis=0) == pytest.approx(0.75 * epsilons, abs=0.04)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("PerWorkerEpsilonGreedy", "epsilon"),
        ("PerWorkerGaussianNoise", "noise_scale"),
        ("PerWorkerOrnsteinUhlenbeckNoise", "noise_scale"),
    ],
)
def test_the_result_has_the_mean_over_the_actors_of_all_runners(kind: str, name: str) -> None:
    space = FOUR if name == "epsilon" else BOX
    for index in (1, 2, 3):  # the result has the number of one of them
        explorer = Explorer(kind, space, num_workers=3, worker_index=index, num_envs=2)
        mean = np.mean([0.4 ** (1 + 7 * i / 5) for i in range(6)])
        assert explorer.exploration.get_metrics(0) == {name: pytest.approx(mean)}


def test_a_single_actor_has_the_epsilon_of_the_schedule() -> None:
    for workers, index in ((0, 0), (1, 1)):
        explorer = Explorer("PerWorkerEpsilonGreedy", num_workers=workers, worker_index=index, epsilon_timesteps=100)
        assert explorer.exploration.get_metrics(50) == {"epsilon": pytest.approx(0.525)}


def test_a_batch_size_that_differs_from_the_runner() -> None:
    explorer = Explorer("PerWorkerEpsilonGreedy", num_workers=2, worker_index=1, num_envs=3)
    assert len(explorer.choose(BEST_IS_2[:5])[0]) == 5


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_soft_q_draws_from_the_softmax(temperature: float) -> None:
    explorer = Explorer("SoftQ", temperature=temperature)
    weights = np.exp(BEST_IS_2[0] / temperature)
    assert shares(explorer.choose(BEST_IS_2)[0]) == near(weights / weights.sum())
    assert set(explorer.choose(BEST_IS_2, explore=False)[0]) == {2}


def test_soft_q_follows_a_schedule() -> None:
    explorer = Explorer("SoftQ", temperature=[[0, 4.0], [100, 1e-3]])
    assert explorer.exploration.get_metrics(50) == {"temperature": pytest.approx(2.0005)}
    assert set(explorer.choose(BEST_IS_2, timestep=100)[0]) == {2}
    assert len(set(explorer.choose(BEST_IS_2, timestep=0)[0])) == 4


def test_stochastic_sampling_draws_from_the_policy() -> None:
    explorer = Explorer("StochasticSampling")
    logits = np.tile(np.log([0.1, 0.2, 0.3, 0.4]), (NUM_ROWS, 1))
    actions, logp = explorer.choose(logits)
    assert logp is None
    assert shares(actions) == near([0.1, 0.2, 0.3, 0.4])
    assert set(explorer.choose(logits, explore=False)[0]) == {3}


def test_random_timesteps_end_with_the_last_of_them() -> None:
    explorer = Explorer("StochasticSampling", random_timesteps=10)
    for timestep, random in ((0, True), (9, True), (10, False)):
        actions, logp = explorer.choose(100 * BEST_IS_2, timestep=timestep)
        assert (logp is not None) == random
        assert shares(actions) == near([0.25] * 4 if random else [0, 0, 1, 0])
    assert set(explorer.choose(100 * BEST_IS_2, explore=False)[0]) == {2}


@pytest.mark.parametrize("name", IDENTITY_ACTION_SPACES)
@pytest.mark.parametrize("bounds", ["clip", "squash"])
def test_random_actions_cover_the_space_evenly(name: str, bounds: str) -> None:
    space = IDENTITY_ACTION_SPACES[name]
    if bounds == "squash" and not (isinstance(space, spaces.Box) and space.is_bounded()):
        pytest.skip("squashing is for bounded Boxes")
    explorer = Explorer("Random", space, model_config={"action_bounds": bounds})
    distribution = explorer.module.distribution
    actions, logp = explorer.choose(np.zeros((NUM_ROWS, distribution.num_inputs)))
    env_actions = distribution.to_env(actions)
    assert all(space.contains(action) for action in at_least(1, env_actions[:100]))
    if isinstance(space, spaces.Box) and space.is_bounded():
        places = (env_actions - space.low) / (space.high - space.low)
        assert np.quantile(places, [0.25, 0.5, 0.75], axis=0) == pytest.approx(
            np.tile([[0.25], [0.5], [0.75]], (1, places.shape[1])), abs=0.02
        )
        expected = -places.shape[1] * math.log(2)  # density over [-1, 1] ** d
    elif isinstance(space, spaces.Box):
        assert (float(actions.mean()), float(actions.std())) == pytest.approx((0, 1), abs=0.05)
        expected = -0.5 * (actions[:, 0] ** 2 + math.log(2 * math.pi))
    else:
        kinds, counts = np.unique(env_actions.reshape(NUM_ROWS, -1), axis=0, return_counts=True)
        sizes = {"discrete": 4, "discrete_from_minus_2": 4, "multi_discrete": 6, "multi_discrete_2d": 36}
        assert len(kinds) == sizes.get(name, 8)
        assert counts / NUM_ROWS == near(np.full(len(kinds), 1 / len(kinds)))
        expected = -math.log(len(kinds))
    assert logp == pytest.approx(np.broadcast_to(expected, NUM_ROWS), rel=1e-5)


def test_random_actions_of_ppo_have_their_own_likelihood() -> None:
    """What PPO divides by is the likelihood under what drew the action: even at first, the policy's later."""
    config = PPOConfig().environment(CountingEnv).exploration(exploration_config={"random_timesteps": 8})
    runner = EnvRunner(config.env_runners(num_envs_per_env_runner=4).debugging(seed=0).freeze())
    weights = {name: value.numpy() for name, value in runner.module.state_dict().items()}
    weights["policy_head.bias"] = np.array([0.0, 3.0], np.float32)  # nearly sure of action 1
    runner.set_weights({"default_policy": weights}, 1)
    rollout = runner.sample(num_timesteps=40, timestep=0)
    runner.stop()
    first_sure_row = 2  # of four steps each
    assert rollout.logp[:first_sure_row] == pytest.approx(-math.log(2))
    logits = rollout.dist_inputs[first_sure_row:]
    normalized = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(normalized, rollout.actions[first_sure_row:, :, None], -1)[..., 0]
    assert rollout.logp[first_sure_row:] == pytest.approx(chosen, abs=1e-5)
    assert np.abs(chosen + math.log(2)).min() > 0.1
    batch = ppo_batch(
        [rollout],
        lambda obs: np.zeros(len(obs), np.float32),
        lambda rollout, values, next_values: (values, values),
        normalize_advantages=False,
    )
    assert batch["logp"][: 4 * first_sure_row] == pytest.approx(-math.log(2))


def test_random_takes_the_mode_without_exploring() -> None:
    assert set(Explorer("Random").choose(BEST_IS_2, explore=False)[0]) == {2}
    assert np.all(Explorer("Random", BOX).choose(np.full((5, 4), 0.3), explore=False)[0] == np.float32(0.3))


def test_epsilon_of_several_entries_replaces_whole_actions() -> None:
    space = spaces.MultiDiscrete([3, 2])
    explorer = Explorer("EpsilonGreedy", space, epsilon_schedule=0.5)
    inputs = np.tile([0, 0, 1, 1, 0], (NUM_ROWS, 1))
    actions, _ = explorer.choose(inputs)
    best = (actions == [2, 0]).all(-1).mean()
    assert best == near(0.5 + 0.5 / 6)
