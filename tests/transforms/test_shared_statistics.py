"""One statistic over all runners and sub-envs: shared, frozen in evaluation, saved, and continued exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tests.exact_runs import make_config

from corral import Algorithm, ClipRewards, NormalizeObservations, NormalizeRewards, PPOConfig, Transform, load_policy
from corral.core.tree import leaves
from corral.errors import CheckpointError
from corral.modules.transforms.moments import mean_and_variance
from corral.runners.requests import SampleRequest

BOTH = [NormalizeObservations(), NormalizeRewards()]


def moments(algorithm: Algorithm) -> Any:
    return algorithm.modules.get_transform_states()["default_policy"]["NormalizeObservations"]


def collect(algorithm: Algorithm) -> list[Any]:
    """Keep all rollouts that an algorithm samples from now on."""
    kept, sample = list[Any](), algorithm.sample

    def keeping(num_timesteps: int) -> Any:
        kept.extend(found := sample(num_timesteps))
        return found

    algorithm.sample = keeping  # type: ignore[method-assign]
    return kept


@pytest.mark.parametrize("settings", [{}, {"num_env_runners": 2, "engine_name": "local"}])
@pytest.mark.parametrize("autoreset_mode", ["next_step", "same_step"])
def test_statistics_equal_the_statistics_of_all_steps(settings: dict[str, Any], autoreset_mode: str) -> None:
    config = make_config("PPO", transforms=BOTH, autoreset_mode=autoreset_mode, **settings)
    with config.build() as algorithm:
        rollouts = collect(algorithm)
        for _ in range(3):
            algorithm.train()
        steps = np.concatenate([part.valid_rows(part.obs[:-1]) for part in rollouts]).astype(np.float64)
        mean, variance = mean_and_variance(moments(algorithm), "")
        np.testing.assert_allclose(mean, steps.mean(0), rtol=1e-9)
        np.testing.assert_allclose(variance, steps.var(0), rtol=1e-9)
        assert float(moments(algorithm)["count"]) == len(steps) == algorithm.num_env_steps_sampled_lifetime


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_rollouts_that_are_asked_for_and_received_change_the_statistics_as_sampled_ones(num_env_runners: int) -> None:
    config = make_config("PPO", transforms=BOTH, num_env_runners=num_env_runners, engine_name="local")
    num_parts = max(1, num_env_runners)
    with config.build() as sampling, config.build() as receiving:
        group = receiving.env_runner_group
        for part in (60, 90):
            sampling.sample(part)
            request = SampleRequest(num_timesteps=part // num_parts, timestep=receiving.num_env_steps_sampled_lifetime)
            assert group.sample_async(request) == num_parts
            receiving.receive(group.fetch_samples())
        assert receiving.num_env_steps_sampled_lifetime == sampling.num_env_steps_sampled_lifetime
        for one, other in zip(leaves(moments(receiving)), leaves(moments(sampling)), strict=True):
            np.testing.assert_array_equal(one, other)


def test_learning_sees_exactly_what_the_module_saw() -> None:
    """Before the first gradient step all probability ratios are 1, whatever the statistics have become since."""
    config = make_config("PPO", transforms=BOTH, num_env_runners=2, engine_name="local")
    with config.build() as algorithm:
        for _ in range(2):
            algorithm.train()
        module = algorithm.get_module()
        for rollout in algorithm.sample(90):
            assert rollout.pipeline is not algorithm.get_pipeline()
            seen = rollout.valid_rows(rollout.module_obs[:-1])
            outputs = algorithm.learner_group.dist_inputs("default_policy", {"obs": seen})
            np.testing.assert_allclose(outputs, rollout.valid_rows(rollout.dist_inputs), atol=1e-6)
        assert module is algorithm.get_module()


def test_rewards_are_scaled_for_learning_and_not_in_the_metrics() -> None:
    def learned_and_reported(transforms: list[Any]) -> tuple[float, float]:
        with make_config("PPO", transforms=transforms).build() as algorithm:
            results = [algorithm.train() for _ in range(3)]
            rollout = algorithm.sample(90)[0]
            return float(np.abs(rollout.transformed().rewards).mean()), results[0]["env_runners"]["episode_return_mean"]

    plain, scaled = learned_and_reported([]), learned_and_reported([NormalizeRewards()])
    assert scaled[0] < plain[0] / 2 and scaled[1] == plain[1]
    assert learned_and_reported([ClipRewards(0.25)])[0] <= 0.25


def test_rewards_of_the_first_fragment_are_scaled_by_its_own_statistics() -> None:
    with make_config("PPO", transforms=[NormalizeRewards(clip=None)]).build() as algorithm:
        (rollout,) = algorithm.sample(90)
        state = algorithm.modules.get_transform_states()["default_policy"]["NormalizeRewards"]
        deviation = np.sqrt(state["m2/return"] / state["count"])
        assert deviation > 2 and float(state["count"]) == rollout.num_env_steps
        np.testing.assert_allclose(rollout.transformed().rewards, rollout.rewards / deviation, rtol=1e-6)


class Tenth(Transform):
    """Rewards in other units."""

    def transform_rewards(self, rewards: Any) -> Any:
        return rewards / 10


@pytest.mark.parametrize("before", [[Tenth()], [ClipRewards(0.25)], [NormalizeRewards(gamma=0.5, clip=None)]])
def test_rewards_are_scaled_by_the_deviation_of_what_the_transforms_before_made_of_them(before: list[Any]) -> None:
    """A loop over the steps of each sub-env, in which only the first of the transforms sees the env's rewards."""
    with make_config("PPO", transforms=[*before, NormalizeRewards(gamma=0.9)], gamma=0.8).build() as algorithm:
        rollouts, returns, running = collect(algorithm), [], np.zeros(algorithm.config.num_envs_per_env_runner)
        for _ in range(2):
            algorithm.train()
        for rollout in rollouts:  # episodes continue from one to the next
            rewards = rollout.pipeline.transforms[0].transform_rewards(rollout.rewards)
            for t, n in np.argwhere(rollout.valid):
                running[n] = 0.9 * running[n] + float(rewards[t, n])
                returns.append(running[n])
                running[n] *= not rollout.done[t, n]
        states = algorithm.modules.get_transform_states()["default_policy"]
        state = states["NormalizeRewards_2" if "NormalizeRewards_2" in states else "NormalizeRewards"]
        np.testing.assert_allclose(mean_and_variance(state, "return"), (np.mean(returns), np.var(returns)), rtol=1e-5)


class Far(Transform):
    """Observations far from 0."""

    def transform_obs(self, obs: Any) -> Any:
        return obs + 1000


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("model_config", [{}, {"use_lstm": True, "max_seq_len": 4}])
def test_batches_of_a_replay_buffer_are_transformed_as_rollouts_are(n_step: int, model_config: dict[str, Any]) -> None:
    """Each reward is -1 after the transform, before the rewards of n steps are summed."""
    transforms = [Far(), ClipRewards("sign")]
    config = make_config("DQN", transforms=transforms, n_step=n_step, gamma=0.5, model_config=model_config)
    batches: list[Any] = []
    with config.build() as algorithm:
        update = algorithm.update_module
        algorithm.update_module = lambda *given: batches.append(given[1]) or update(*given)  # type: ignore[func-returns-value]
        while not batches:
            algorithm.train()
    batch = batches[0]
    learns = batch.get("learns", slice(None))
    expected = -(1 - 0.5 ** batch["num_steps"][learns]) / (1 - 0.5)
    np.testing.assert_allclose(batch["rewards"][learns], expected, rtol=1e-6)
    assert batch["num_steps"][learns].max() == n_step
    for name in {"obs", "next_obs"} & batch.keys():
        assert batch[name][learns].min() > 900


def test_evaluation_changes_no_statistics() -> None:
    config = make_config("PPO", transforms=BOTH, evaluation_interval=1, evaluation_duration=4)
    with config.build() as algorithm:
        algorithm.train()
        before = moments(algorithm)
        algorithm.evaluate()
        assert moments(algorithm) is before
        actor = algorithm.eval_env_runner_group.local_env_runner.actors["default_policy"]
        assert actor.transforms.pipeline.state["NormalizeObservations"] is not None
        np.testing.assert_array_equal(
            actor.transforms.pipeline.state["NormalizeObservations"]["mean/"], before["mean/"]
        )


@pytest.mark.slow
def test_runners_get_the_merged_statistics_in_other_processes() -> None:
    config = make_config("PPO", transforms=BOTH, num_env_runners=2, engine_name="process")
    with config.build() as algorithm:
        for _ in range(2):
            algorithm.train()
        found = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: runner.actors["default_policy"].transforms.pipeline.state
        )
        for state in found:
            for name, array in moments(algorithm).items():
                np.testing.assert_array_equal(state["NormalizeObservations"][name], array)


def test_a_loaded_policy_has_the_statistics(tmp_path: Path) -> None:
    with make_config("PPO", transforms=[NormalizeObservations(clip=2.0), NormalizeRewards()]).build() as algorithm:
        for _ in range(2):
            algorithm.train()
        obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
        expected = algorithm.compute_actions(obs, explore=False)
        policy = load_policy(algorithm.save(tmp_path / "saved"))
    np.testing.assert_array_equal(policy.batch(obs), expected)
    assert policy.observation_space.shape == (3,) and policy.pipeline is not None
    assert policy.pipeline.transforms == (NormalizeObservations(clip=2.0),)
    plain = policy.module.policy(torch.from_numpy(obs)).argmax(-1).numpy()
    assert (plain != policy.batch(obs)).any()  # the module alone sees other numbers


def test_a_state_with_other_transforms_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with make_config("PPO", transforms=BOTH).build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "saved")
    with make_config("PPO").build() as other, pytest.raises(CheckpointError, match="has no transforms here"):
        other.restore_from_path(path)
    with make_config("PPO", transforms=[NormalizeRewards()]).build() as other:
        before = other.modules.get_transform_states()
        with pytest.raises(CheckpointError, match="the statistics of"):
            other.restore_from_path(path)
        assert leaves(other.modules.get_transform_states())[0] == leaves(before)[0]


class Shifted(gym.ObservationWrapper[Any, Any, Any]):
    """Observations far from 0, in which a plain net sees nothing."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def observation(self, observation: Any) -> Any:
        return (observation * 0.01 + 100).astype(np.float32)


@pytest.mark.slow
def test_normalising_lets_ppo_learn_where_observations_are_far_from_0() -> None:
    def returns(transforms: list[Any]) -> float:
        config = (
            PPOConfig()
            .environment("CartPole-v1", wrappers=[Shifted])
            .env_runners(num_envs_per_env_runner=8, transforms=transforms)
            .training(train_batch_size_per_learner=1024, minibatch_size=128, num_epochs=6, lr=1e-3)
            .debugging(seed=1)
        )
        with config.build() as algorithm:
            for _ in range(12):
                result = algorithm.train()
        return float(result["env_runners"]["episode_return_mean"])

    assert returns([NormalizeObservations()]) > 2 * returns([])


def test_without_transforms_nothing_is_added() -> None:
    with make_config("PPO").build() as algorithm:
        assert algorithm.modules.get_transform_states() == {} and "transforms" not in algorithm.get_state()
        rollout = algorithm.sample(30)[0]
        assert rollout.pipeline is None and rollout.transformed() is rollout and rollout.module_obs is rollout.obs
