"""Fitted Q evaluation finds the values that a linear solve finds, on small chains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral.data.offline.episode_rows import EpisodeRows, rows_of_steps
from corral.data.offline.fitted_values import FitSettings, FittedValues, fit_values
from corral.errors import ConfigError

GAMMA = 0.8
NUM_STATES = 4
FIT = FitSettings(num_gradient_steps=1000, batch_size=128, lr=5e-3, model_config={"fcnet_hiddens": [32]})
TARGET = np.array([0.25, 0.75])  # to the left, to the right


def step_of_chain(state: int, action: int) -> tuple[int, float, bool]:
    """The right end terminates with a reward of 5; the left end holds."""
    after = min(state + 1, NUM_STATES) if action else max(state - 1, 0)
    return after, 5.0 if after == NUM_STATES else -0.5 * state, after == NUM_STATES


def exact(policy: NDArray[Any]) -> NDArray[Any]:
    """Action values `[s, a]` of a chain without a time limit."""
    matrix, reward = np.eye(NUM_STATES), np.zeros(NUM_STATES)
    for state in range(NUM_STATES):
        for action in range(2):
            after, gain, over = step_of_chain(state, action)
            reward[state] += policy[action] * gain
            if not over:
                matrix[state, after] -= GAMMA * policy[action]
    values = np.append(np.linalg.solve(matrix, reward), 0.0)
    return np.array(
        [
            [gain + GAMMA * values[after] for after, gain, _ in (step_of_chain(s, a) for a in range(2))]
            for s in range(NUM_STATES)
        ]
    )


def recorded(limit: int = 6, num_episodes: int = 400) -> EpisodeRows:
    """Episodes of uniform actions from any state, truncated after a few steps."""
    rng = np.random.default_rng(0)
    steps: dict[str, list[Any]] = {
        name: [] for name in ("obs", "actions", "rewards", "terminated", "truncated", "next_obs")
    }
    for _ in range(num_episodes):
        state, over = int(rng.integers(NUM_STATES)), False
        for t in range(limit):
            action = int(rng.integers(2))
            after, reward, over = step_of_chain(state, action)
            entries = (state, action, reward, over, not over and t == limit - 1, min(after, NUM_STATES - 1))
            for name, entry in zip(steps, entries, strict=True):
                steps[name].append(entry)
            state = after
            if over:
                break
    return rows_of_steps(**{name: np.array(column) for name, column in steps.items()})


def fit(rows: EpisodeRows, policy: Any, **changes: Any) -> FittedValues:
    given = {
        "observation_space": spaces.Discrete(NUM_STATES),
        "action_space": spaces.Discrete(2),
        "obs": rows.obs,
        "actions": rows.actions,
        **changes,
    }
    return fit_values(
        *(given[name] for name in ("observation_space", "action_space", "obs", "actions")),
        *(rows.rewards, rows.terminated, rows.valid, policy, GAMMA),
        settings=given.get("settings", FIT),
    )


@pytest.mark.slow
def test_the_values_are_exact_and_truncated_steps_bootstrap() -> None:
    rows = recorded()
    assert (rows.truncated.sum(), rows.terminated.sum()) > (50, 50)
    found = fit(rows, np.tile(TARGET.astype(np.float32), (len(rows), 1)))
    q = exact(TARGET)
    steps = rows.valid
    assert found.q_values[steps] == pytest.approx(q[rows.obs[steps], rows.actions[steps]], abs=0.1)
    assert found.state_values[steps] == pytest.approx((q @ TARGET)[rows.obs[steps]], abs=0.1)
    # Without a bootstrap after truncated steps the values would be others.
    cut = rows.terminated | rows.truncated
    rows.terminated = cut
    other = fit(rows, np.tile(TARGET.astype(np.float32), (len(rows), 1)))
    assert np.abs(other.q_values - found.q_values)[steps].max() > 0.3


def test_a_greedy_policy_is_one_of_certain_actions() -> None:
    rows = recorded()
    right = np.tile(np.array([0.0, 1.0], np.float32), (len(rows), 1))
    found = fit(rows, right)
    assert found.state_values[rows.valid] == pytest.approx(
        exact(np.array([0.0, 1.0]))[rows.obs[rows.valid], 1], abs=0.1
    )


def test_box_actions_are_drawn_and_observations_may_be_dicts() -> None:
    """Reward -(action - place)^2; the policy draws from a uniform distribution of mean 0.5 around the place."""
    rng = np.random.default_rng(1)
    size = 4000
    place, actions = rng.uniform(-0.5, 0.5, (size, 1)), rng.uniform(-1, 1, (size, 1))
    obs = {"place": place.astype(np.float32), "kind": rng.integers(2, size=size)}
    rewards = -np.square(actions - place)[:, 0] + obs["kind"]
    rows = rows_of_steps(obs, actions.astype(np.float32), rewards, np.ones(size, bool), next_obs=obs)

    def draw(chosen: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        around = rows.obs["place"][chosen]
        return (around + rng.uniform(-0.4, 0.4, around.shape)).astype(np.float32)

    found = fit(
        rows,
        draw,
        observation_space=spaces.Dict({"place": spaces.Box(-1, 1, (1,)), "kind": spaces.Discrete(2)}),
        action_space=spaces.Box(-1, 1, (1,)),
    )
    steps = rows.valid
    # One step each: Q is the reward, and V its mean over the draws, minus the variance of the uniform distribution.
    assert np.abs(found.q_values - rows.rewards)[steps].mean() < 0.05
    exact_values = rows.obs["kind"] - 0.8**2 / 12
    assert np.abs(found.state_values - exact_values)[steps].mean() < 0.05
    assert found.td_error < 0.15


def test_one_seed_gives_one_fit_and_draws_from_no_global_generator() -> None:
    rows = recorded(num_episodes=20)
    policy = np.tile(TARGET.astype(np.float32), (len(rows), 1))
    short = FitSettings(num_gradient_steps=30, model_config={"fcnet_hiddens": [8]})
    before = torch.get_rng_state()
    one, same = (fit(rows, policy, settings=short) for _ in range(2))
    other = fit(rows, policy, settings=FitSettings(30, model_config={"fcnet_hiddens": [8]}, seed=1))
    assert one.q_values.tolist() == same.q_values.tolist() != other.q_values.tolist()
    assert torch.equal(before, torch.get_rng_state())


def test_large_rewards_are_learned_as_small_ones_are() -> None:
    rows = recorded()
    policy = np.tile(TARGET.astype(np.float32), (len(rows), 1))
    short = FitSettings(num_gradient_steps=50, model_config={"fcnet_hiddens": [8]})
    one = fit(rows, policy, settings=short)
    rows.rewards = rows.rewards * 1000
    assert fit(rows, policy, settings=short).q_values == pytest.approx(one.q_values * 1000, rel=0.01, abs=10)


@pytest.mark.parametrize("name", ["num_gradient_steps", "batch_size", "lr"])
def test_settings_have_bounds(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 must be above 0"):
        FitSettings(**{name: 0})


def test_other_actions_are_refused() -> None:
    rows = recorded(num_episodes=2)
    with pytest.raises(ConfigError, match=r"Discrete or Box actions, and these are MultiDiscrete"):
        fit(rows, np.zeros((len(rows), 2), np.float32), action_space=spaces.MultiDiscrete([2, 2]))


@pytest.mark.parametrize("setting", [{"architecture": "simba"}, {"share_features": True}, {"log_std_bounds": [-1, 1]}])
def test_settings_of_other_networks_are_refused(setting: dict[str, Any]) -> None:
    rows = recorded(num_episodes=2)
    with pytest.raises(ConfigError, match=f"fitted Q evaluation: model_config: {next(iter(setting))}=.* has no effect"):
        fit(rows, np.zeros((len(rows), 2), np.float32), settings=FitSettings(30, model_config=setting))


def test_values_of_far_rewards_arrive_in_the_gradient_steps_that_there_are() -> None:
    """Two states that never change, with rewards of 0 and 1, in episodes that are cut after three steps."""
    size, gamma = 300, 0.9
    cut = np.arange(1, size + 1) % 3 == 0
    states = (np.arange(size) // 3 % 2).astype(np.int64)
    steps = (states, np.zeros(size, np.int64), states.astype(float), np.zeros(size, bool), cut)
    rows = rows_of_steps(*steps, next_obs=states)
    found = fit_values(
        *(spaces.Discrete(2), spaces.Discrete(1), rows.obs, rows.actions, rows.rewards, rows.terminated, rows.valid),
        *(np.ones((len(rows), 1), np.float32), gamma),
        settings=FitSettings(500, 32, 1e-2, {"fcnet_hiddens": [8]}),
    )
    assert found.state_values == pytest.approx(rows.obs / (1 - gamma), abs=0.3)


def test_the_learning_rate_falls_to_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.Adam.step

    def watched(self: torch.optim.Adam, *args: Any, **kwargs: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    rows = recorded(num_episodes=20)
    policy = np.tile(TARGET.astype(np.float32), (len(rows), 1))
    fit(rows, policy, settings=FitSettings(num_gradient_steps=100, lr=3e-3, model_config={"fcnet_hiddens": [8]}))
    assert rates[0] == pytest.approx(3e-3) and rates[-1] == pytest.approx(3e-4, rel=0.2) and len(rates) == 100
    np.testing.assert_allclose(np.diff(rates), np.diff(rates)[0], rtol=1e-6)
