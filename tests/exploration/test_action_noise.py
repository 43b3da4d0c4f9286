"""Gaussian and Ornstein-Uhlenbeck noise, by closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from explorers import BOX, Explorer, SamplingConfig
from gymnasium import spaces

from corral import MultiAgentEnv, SACConfig
from corral.runners.runner import EnvRunner
from corral.testing import IdentityEnv

N = 10_000
KINDS = ["GaussianNoise", "OrnsteinUhlenbeckNoise"]


def inputs(mode: float, rows: int = N) -> Any:
    """Outputs of a Gaussian policy of two dimensions, which draws with deviation 1."""
    return np.tile([mode, mode, 0, 0], (rows, 1))


@pytest.mark.parametrize(("timestep", "scale"), [(1000, 1.0), (6000, 0.51), (11_000, 0.02), (50_000, 0.02)])
def test_gaussian_noise_has_the_scale_of_its_timestep(timestep: int, scale: float) -> None:
    explorer = Explorer("GaussianNoise", BOX)
    actions, logp = explorer.choose(inputs(0.2), timestep=timestep)
    assert logp is None
    assert explorer.exploration.get_metrics(timestep) == {"noise_scale": pytest.approx(scale)}
    assert actions.mean(0) == pytest.approx(0.2, abs=0.005)
    assert actions.std(0) == pytest.approx(0.1 * scale, rel=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_timesteps_are_random(kind: str) -> None:
    explorer = Explorer(kind, BOX, random_timesteps=10, initial_scale=0.0, num_envs=N)
    assert np.quantile(explorer.choose(inputs(0.2), timestep=9)[0], [0.25, 0.5, 0.75]) == pytest.approx(
        [-0.5, 0, 0.5], abs=0.03
    )
    assert np.all(explorer.choose(inputs(0.2), timestep=10)[0] == np.float32(0.2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"scale_schedule": 0.0}, {"initial_scale": 0.0, "final_scale": 0.0}])
def test_an_explicit_zero_is_no_noise(kind: str, settings: dict[str, Any]) -> None:
    explorer = Explorer(kind, BOX, random_timesteps=0, num_envs=N, **settings)
    assert np.all(explorer.choose(inputs(0.2))[0] == np.float32(0.2))
    assert explorer.exploration.get_metrics(0) == {"noise_scale": 0.0}


@pytest.mark.parametrize("kind", KINDS)
def test_no_exploration_is_the_mode(kind: str) -> None:
    explorer = Explorer(kind, BOX, num_envs=N)
    assert np.all(explorer.choose(inputs(0.2), explore=False)[0] == np.float32(0.2))


def test_noise_stays_within_the_bounds_and_keeps_env_units_where_there_are_none() -> None:
    mixed = spaces.Box(np.array([0, -np.inf], np.float32), np.array([10, np.inf], np.float32))
    explorer = Explorer("GaussianNoise", mixed, random_timesteps=0, stddev=2.0)
    actions, _ = explorer.choose(np.tile([0.9, 50, 0, 0], (N, 1)))
    assert (actions[:, 0].min(), actions[:, 0].max()) == (-1, 1)
    assert (actions[:, 1].mean(), actions[:, 1].std()) == pytest.approx((50, 2), abs=0.1)
    env_actions = explorer.module.distribution.to_env(actions)
    assert (env_actions[:, 0].min(), env_actions[:, 0].max()) == (0, 10)


def test_noise_of_squashed_actions_is_in_the_unit_of_the_env() -> None:
    explorer = Explorer("GaussianNoise", BOX, random_timesteps=0, model_config={"action_bounds": "squash"})
    actions, _ = explorer.choose(inputs(math.atanh(0.5)))
    env_actions = explorer.module.distribution.to_env(actions)
    assert (env_actions.mean(), env_actions.std()) == pytest.approx((0.5, 0.1), abs=0.005)
    assert np.isfinite(explorer.choose(inputs(20.0))[0]).all()


@pytest.mark.parametrize("kind", ["PerWorkerGaussianNoise", "PerWorkerOrnsteinUhlenbeckNoise"])
def test_each_actor_has_a_scale_of_its_own(kind: str) -> None:
    explorers = [Explorer(kind, BOX, num_workers=2, worker_index=i, num_envs=2) for i in (1, 2)]
    found = np.concatenate([explorer.exploration.scales(10**6, 2) for explorer in explorers])
    assert found == pytest.approx([0.4 ** (1 + 7 * i / 3) for i in range(4)])
    alone = Explorer(kind, BOX).exploration
    assert alone.get_metrics(6000) == {"noise_scale": pytest.approx(0.51)}


def test_actors_differ_in_their_noise() -> None:
    explorer = Explorer("PerWorkerGaussianNoise", BOX, num_workers=1, worker_index=1, num_envs=2)
    actions = np.array([explorer.choose(inputs(0.0, 2), timestep=1000)[0] for _ in range(4000)])
    assert actions.std((0, 2)) == pytest.approx([0.1 * 0.4, 0.1 * 0.4**8], rel=0.05)


def test_the_process_has_the_variance_of_its_settings() -> None:
    theta, sigma = 0.3, 0.2
    explorer = Explorer(
        "OrnsteinUhlenbeckNoise", BOX, num_envs=N, random_timesteps=0, scale_schedule=0.5,
        ou_theta=theta, ou_sigma=sigma, ou_base_scale=0.4,
    )  # fmt: skip
    for _ in range(40):
        actions, _ = explorer.choose(inputs(0.1))
    states = explorer.exploration.state
    assert states.var() == pytest.approx(sigma**2 / (1 - (1 - theta) ** 2), rel=0.05)
    before = states.copy()
    actions, _ = explorer.choose(inputs(0.1))
    after = explorer.exploration.state
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] == pytest.approx(1 - theta, abs=0.02)
    assert actions == pytest.approx(0.1 + 0.5 * 0.4 * 2 * after, abs=1e-6)  # the bounds are 2 apart


def test_the_process_reverts_to_zero_and_starts_there_with_each_episode() -> None:
    explorer = Explorer("OrnsteinUhlenbeckNoise", BOX, num_envs=2, random_timesteps=0, ou_theta=0.25, ou_sigma=0.0)
    explorer.exploration.set_state({"ou_state": np.ones((2, 2))})
    for count in range(1, 4):
        explorer.choose(inputs(0.0, 2))
        assert explorer.exploration.state == pytest.approx(np.full((2, 2), 0.75**count))
    explorer.exploration.begin_episodes(np.array([True, False]), timestep=0, explore=True)
    assert explorer.exploration.state == pytest.approx(np.array([[0, 0], [0.75**3] * 2]))


def test_a_runner_starts_the_process_with_each_episode() -> None:
    config = SamplingConfig().environment(IdentityEnv, env_config={"space": "box", "episode_length": 4})
    config.exploration(
        exploration_config={"type": "OrnsteinUhlenbeckNoise", "random_timesteps": 0, "ou_theta": 0.0, "ou_sigma": 0.0}
    )
    runner = EnvRunner(config.env_runners(num_envs_per_env_runner=2).debugging(seed=0).freeze())
    exploration: Any = runner.exploration
    runner.sample(num_timesteps=4)
    exploration.state[:] = 1.0
    runner.sample(num_timesteps=4)  # the episode ends with it
    assert np.all(exploration.state == 1.0)
    runner.sample(num_timesteps=2)  # the next begins
    assert np.all(exploration.state == 0.0)
    runner.stop()


def test_the_process_takes_batches_of_any_size_and_states_of_its_own_size_only() -> None:
    explorer = Explorer("OrnsteinUhlenbeckNoise", BOX, num_envs=3, random_timesteps=0)
    explorer.choose(inputs(0.0, 3))
    state = explorer.exploration.get_state()
    assert explorer.choose(inputs(0.0, 7))[0].shape == (7, 2)
    explorer.exploration.begin_episodes(np.ones(3, np.bool_), timestep=0, explore=True)
    other = Explorer("OrnsteinUhlenbeckNoise", BOX, num_envs=3).exploration
    other.set_state(state)
    assert np.array_equal(other.state, state["ou_state"])
    assert np.abs(other.state).min() > 0
    smaller, fresh = (Explorer("OrnsteinUhlenbeckNoise", BOX, num_envs=2, random_timesteps=0) for _ in range(2))
    smaller.exploration.set_state(state)
    assert np.array_equal(smaller.choose(inputs(0.0, 2))[0], fresh.choose(inputs(0.0, 2))[0])


class InTurn(MultiAgentEnv):
    """The first agent acts twice, then the second one once, and so on without an end."""

    possible_agents = ("first", "second")
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def observe(self) -> dict[str, Any]:
        return {self.possible_agents[self.time % 3 == 2]: np.zeros(1, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action_dict: Any) -> Any:
        self.time += 1
        return self.observe(), {}, {"__all__": False}, {"__all__": False}, {}


def test_the_process_of_an_agent_waits_while_the_agent_waits() -> None:
    noise = {"type": "OrnsteinUhlenbeckNoise", "ou_theta": 0.5, "ou_sigma": 0.0, "random_timesteps": 0}
    config = (
        SACConfig()
        .environment(InTurn)
        .env_runners(num_envs_per_env_runner=2)
        .multi_agent(policies={"both"})
        .rl_module(model_config={"fcnet_hiddens": []})
        .exploration(exploration_config=noise)
        .debugging(seed=0)
    )
    runner = EnvRunner(config.freeze())
    runner.sample(num_timesteps=6)  # 3 in each sub-env
    state = runner.actors["both"].exploration.state
    state[:] = 1.0
    runner.sample(num_timesteps=12)  # in each sub-env the agents act 4 times and 2 times
    assert runner.actors["both"].exploration.state.ravel() == pytest.approx([0.5**4, 0.5**2] * 2)
    runner.stop()
