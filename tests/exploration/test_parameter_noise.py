"""Noise in the weights: whose, how long, how much, and never without exploring."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from explorers import FOUR, STATE, Explorer, SamplingConfig, rollout_of
from gymnasium import spaces

from corral.exploration.parameter_noise import ParameterNoise
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv, PoorHabit

ONE_HOT = spaces.Discrete(3)  # what NumPy does not compute
MakeRunner = Callable[..., EnvRunner]
LINEAR = {"fcnet_hiddens": []}


class Habit(PoorHabit):
    """The same, with an observation that only torch takes, if `torch` is set."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._discrete = bool(config.get("torch"))
        if self._discrete:
            self.observation_space = ONE_HOT

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return (np.int64(1) if self._discrete else obs), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return (np.int64(1) if self._discrete else obs), *rest


@pytest.fixture(params=["numpy", "torch"])
def make_runner(request: pytest.FixtureRequest) -> Iterator[MakeRunner]:
    """Make runners of episodes of three steps whose observation never changes, on both paths of inference."""
    made: list[EnvRunner] = []

    def make(num_envs: int = 4, model_config: dict[str, Any] | None = None, **settings: Any) -> EnvRunner:
        config = SamplingConfig().environment(
            Habit, env_config={"episode_length": 3, "torch": request.param == "torch"}
        )
        config.env_runners(num_envs_per_env_runner=num_envs).rl_module(model_config=model_config or {})
        config.exploration(exploration_config={"type": "ParameterNoise", "random_timesteps": 0, **settings})
        runner = EnvRunner(config.debugging(seed=0).freeze())
        assert runner.inference.backend == request.param
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.stop()


def plain_outputs(runner: EnvRunner, num_rows: int = 1) -> Any:
    obs = np.ones((num_rows, *runner.env.single_observation_space.shape), runner.env.single_observation_space.dtype)
    with torch.no_grad():
        return runner.module.policy(torch.from_numpy(obs)).numpy()


def test_each_sub_env_keeps_its_own_noise_for_an_episode(make_runner: MakeRunner) -> None:
    runner = make_runner(initial_stddev=0.5)
    outputs = runner.sample(num_timesteps=12).dist_inputs  # three rows; the deviation changes only after them
    assert np.ptp(outputs, axis=0) == pytest.approx(0, abs=1e-6)
    assert np.abs(outputs[0][:, None] - outputs[0][None])[~np.eye(4, dtype=bool)].min() > 1e-3
    assert np.abs(outputs[0] - plain_outputs(runner)).max(-1).min() > 1e-2
    later = runner.sample(num_timesteps=16).dist_inputs[-1]  # the row of a reset, and an episode
    assert np.abs(later - outputs[0]).max(-1).min() > 1e-2


def test_without_exploring_the_plain_weights_act(make_runner: MakeRunner) -> None:
    runner = make_runner(initial_stddev=0.5)
    plain = plain_outputs(runner, 4)
    explored = runner.sample(num_timesteps=8)
    still = runner.sample(num_timesteps=8, explore=False)
    assert still.dist_inputs == pytest.approx(np.broadcast_to(plain, still.dist_inputs.shape), abs=1e-6)
    assert np.all(still.actions == plain.argmax(-1))
    again = runner.sample(num_timesteps=8)
    for rollout in (explored, again):
        assert np.abs(rollout.dist_inputs - plain).max(-1).min() > 1e-2


def test_a_runner_that_first_acts_plainly_perturbs_in_the_midst_of_an_episode(make_runner: MakeRunner) -> None:
    runner = make_runner(initial_stddev=0.5)
    runner.sample(num_timesteps=4, explore=False)
    assert np.abs(runner.sample(num_timesteps=4).dist_inputs - plain_outputs(runner)).max(-1).min() > 1e-2


def test_the_same_noise_rests_on_new_weights(make_runner: MakeRunner) -> None:
    runner = make_runner(initial_stddev=0.5, model_config=LINEAR)
    before = runner.sample(num_timesteps=4).dist_inputs[-1] - plain_outputs(runner)
    exploration: Any = runner.exploration
    grown = exploration.stddev / 0.5  # which acts at once
    weights = {name: value.numpy() + 2.0 for name, value in runner.module.state_dict().items()}
    runner.set_weights({"default_policy": weights}, 1)
    after = runner.sample(num_timesteps=4).dist_inputs[-1] - plain_outputs(runner)
    assert after == pytest.approx(grown * before, abs=1e-5)
    assert grown in (pytest.approx(1.01), pytest.approx(1 / 1.01))


def test_the_noise_has_the_deviation_that_it_says(make_runner: MakeRunner) -> None:
    runner = make_runner(num_envs=2000, initial_stddev=0.5, model_config=LINEAR)
    noise = runner.sample(num_timesteps=2000).dist_inputs[0] - plain_outputs(runner)
    assert noise.std() == pytest.approx(0.5 * math.sqrt(2), rel=0.05)  # of one weight and one bias
    assert noise.mean() == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("space", [STATE, ONE_HOT], ids=["numpy", "torch"])
def test_noise_changes_only_where_and_as_it_is_told(space: spaces.Space[Any]) -> None:
    explorer = Explorer("ParameterNoise", FOUR, observation_space=space, model_config=LINEAR)
    inference, rng = explorer.inference, np.random.default_rng(0)
    obs = np.ones((5, *space.shape), space.dtype)  # type: ignore[misc]
    rows = np.zeros(5, np.bool_)

    def noise() -> Any:
        return inference(obs) - inference(obs, perturbed=False)

    inference.perturb(0.5, ~rows, rng)
    first = noise()
    assert np.abs(first).max(-1).min() > 1e-2
    inference.perturb(1.0, rows, rng)  # another deviation alone
    assert noise() == pytest.approx(2 * first, abs=1e-5)
    inference.load_weights({name: value.numpy() + 3 for name, value in explorer.module.state_dict().items()})
    assert noise() == pytest.approx(2 * first, abs=1e-5)  # and other weights alone
    rows[[1, 3]] = True
    inference.perturb(1.0, rows, rng)  # another draw alone, of some
    changed = np.abs(noise() - 2 * first).max(-1)
    assert changed[~rows] == pytest.approx(0, abs=1e-5)
    assert changed[rows].min() > 1e-2
    assert np.array_equal(inference(obs[:3]), inference(obs[:3], perturbed=False))  # a batch of another size


@pytest.mark.parametrize("axes", ["HWC", "CHW"])
def test_networks_of_images_have_noise_too(axes: str) -> None:
    """Here policy and values share the convolutions, which keep their weights."""
    shape = (12, 12, 3) if axes == "HWC" else (3, 12, 12)
    space = spaces.Box(0, 255, shape, np.uint8)
    explorer = Explorer("ParameterNoise", FOUR, observation_space=space, model_config={"conv_filters": [[4, 3, 2]]})
    inference = explorer.inference
    obs = np.repeat(np.random.default_rng(1).integers(0, 256, (1, *shape), np.uint8), 3, 0)
    before = inference(obs)
    inference.perturb(0.5, np.ones(3, np.bool_), np.random.default_rng(0))
    perturbed, plain = inference(obs), inference(obs, perturbed=False)
    np.testing.assert_array_equal(plain, before)
    assert min(np.abs(one - other).max() for one, other in itertools.combinations([*perturbed, plain[0]], 2)) > 1e-2
    np.testing.assert_array_equal(inference(obs), perturbed)


@pytest.mark.parametrize(("initial", "factor"), [(1e-4, 1.01), (50.0, 1 / 1.01), (0.0, 1.01)])
def test_the_deviation_adapts_once_a_rollout(make_runner: MakeRunner, initial: float, factor: float) -> None:
    runner = make_runner(initial_stddev=initial)
    for count in range(1, 4):
        runner.sample(num_timesteps=8)
        assert runner.exploration.get_metrics(0) == {"parameter_noise_stddev": pytest.approx(initial * factor**count)}
    runner.sample(num_timesteps=8, explore=False)
    assert runner.exploration.get_state()["stddev"] == pytest.approx(initial * factor**3)


def test_a_restored_deviation_counts_from_the_next_step_on(make_runner: MakeRunner) -> None:
    runner = make_runner(initial_stddev=0.5)
    runner.sample(num_timesteps=4)  # one step of each episode, of three
    runner.exploration.set_state({"stddev": 0.0, "due": np.ones(4, np.bool_)})
    outputs = runner.sample(num_timesteps=4).dist_inputs[0]
    assert outputs == pytest.approx(np.repeat(plain_outputs(runner), 4, 0), abs=1e-6)


class Watched(ParameterNoise):
    """Notes the outputs that it compares."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compared: list[tuple[Any, Any]] = []

    def distance(self, plain: Any, perturbed: Any) -> tuple[float, float]:
        self.compared.append((plain, perturbed))
        return super().distance(plain, perturbed)


def test_the_distance_is_between_outputs_for_the_same_observations() -> None:
    config = SamplingConfig().environment(CountingEnv, env_config={"episode_length": 5})
    config.env_runners(num_envs_per_env_runner=2)
    config.exploration(exploration_config={"type": Watched, "random_timesteps": 0, "initial_stddev": 0.0})
    runner = EnvRunner(config.debugging(seed=0).freeze())
    exploration: Any = runner.exploration
    for _ in range(3):
        rollout = runner.sample(num_timesteps=4)
        obs: Any = rollout.obs
        assert not np.array_equal(obs[-1], obs[-2])
    for plain, perturbed in exploration.compared:  # without noise they are equal
        assert plain == pytest.approx(perturbed, abs=1e-6)
    assert len(exploration.compared) == 3
    runner.stop()


def test_the_distance_settles_at_its_target(make_runner: MakeRunner) -> None:
    runner = make_runner(num_envs=64, initial_stddev=0.3, model_config=LINEAR, target_epsilon=0.4)
    exploration: Any = runner.exploration
    distances = []
    for _ in range(100):
        rollout = runner.sample(num_timesteps=64)
        plain = np.repeat(plain_outputs(runner), 64, 0)
        distances.append(exploration.distance(plain, rollout.dist_inputs[-1])[0])
    assert np.mean(distances[-40:]) == pytest.approx(-math.log(1 - 0.4 + 0.1), rel=0.2)


def test_compute_actions_goes_by_the_plain_weights() -> None:
    config = SamplingConfig().environment(Habit, env_config={}).training(train_batch_size_per_learner=64)
    config.exploration(exploration_config={"type": "ParameterNoise", "random_timesteps": 0, "initial_stddev": 5.0})
    with config.debugging(seed=0).build() as algo:
        algo.train()
        obs = np.ones((16, 1), np.float32)  # as many as the runner has sub-envs
        with torch.no_grad():
            best = algo.get_module().policy(torch.from_numpy(obs)).argmax(-1).numpy()
        assert np.array_equal(algo.compute_actions(obs, explore=False), best)
        runner = algo.env_runner
        assert runner is not None
        assert np.all(runner.sample(num_timesteps=64, explore=False).actions == best)
        assert np.any(runner.sample(num_timesteps=64).actions != best[0])


def test_the_target_of_discrete_actions_matches_epsilon_greedy() -> None:
    explorer = Explorer("ParameterNoise", FOUR, target_epsilon=0.2)
    plain = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32))
    even = np.zeros((1, 4), np.float32)
    kl = sum(p * math.log(p / 0.25) for p in (0.1, 0.2, 0.3, 0.4))
    assert explorer.exploration.distance(plain, even) == pytest.approx((kl, -math.log(0.8 + 0.05)), rel=1e-5)
    pair = Explorer("ParameterNoise", spaces.MultiDiscrete([3, 2]), target_epsilon=0.2)
    assert pair.exploration.distance(np.zeros((2, 5), np.float32), np.zeros((2, 5), np.float32)) == pytest.approx(
        (0, -math.log(0.8 + 0.2 / 6)), abs=1e-6
    )


def test_the_distance_of_continuous_actions_is_in_their_unit() -> None:
    explorer = Explorer("ParameterNoise", spaces.Box(-5, 5, (2,), np.float32), target_distance=0.3)
    plain, other = np.zeros((2, 4), np.float32), np.array([[0.5, 0, 0, 0], [3, 0, 0, 0]], np.float32)
    assert explorer.exploration.distance(plain, other) == pytest.approx((math.sqrt((0.25 + 1) / 4), 0.3))


def test_actions_are_random_at_first_and_then_the_best() -> None:
    explorer = Explorer("ParameterNoise", FOUR, random_timesteps=10)
    values = np.tile([0.0, 0.1, 0.3, 0.2], (200, 1))
    assert len(set(explorer.choose(values, timestep=9)[0])) == 4
    assert set(explorer.choose(values, timestep=10)[0]) == {2}
    assert set(explorer.choose(values, timestep=0, explore=False)[0]) == {2}


def test_a_sub_exploration_chooses_from_the_perturbed_outputs() -> None:
    sub = {"type": "EpsilonGreedy", "epsilon_schedule": 0.5}
    explorer = Explorer("ParameterNoise", FOUR, random_timesteps=0, sub_exploration=sub)
    actions, _ = explorer.choose(np.tile([0.0, 0.1, 0.3, 0.2], (4000, 1)))
    assert np.mean(actions == 2) == pytest.approx(0.5 + 0.125, abs=0.04)
    assert explorer.exploration.get_metrics(0) == {"epsilon": 0.5, "parameter_noise_stddev": 1.0}


def test_the_deviation_is_the_state() -> None:
    explorer = Explorer("ParameterNoise", FOUR)
    explorer.exploration.set_state({**explorer.exploration.get_state(), "stddev": 0.25})
    assert explorer.exploration.get_state()["stddev"] == 0.25
    empty = rollout_of(np.zeros((1, 2, 3)), np.zeros((0, 2), np.int64))
    explorer.exploration.end_sample(empty, timestep=0, explore=True)
    assert explorer.exploration.stddev == 0.25
