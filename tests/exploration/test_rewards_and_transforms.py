"""Intrinsic rewards next to transforms of rewards: the bonus is added after the transforms, however it is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import ClipRewards, DQNConfig, NormalizeRewards, PPOConfig, make_multi_agent
from corral.exploration.base import StochasticSampling

KINDS = ["Curiosity", "RND", "RE3"]


class Four(gym.Env[Any, Any]):
    """Every reward is 4; an episode has 20 steps."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.reward = (config or {}).get("reward", 4.0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.draw(), {}

    def draw(self) -> Any:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.draw(), self.reward, self.t >= 20, False, {}


class Quarter(StochasticSampling):
    """Adds a quarter to each reward, in the array itself or in a new one."""

    def __init__(self, action_space: Any, *, in_place: bool = False, **kwargs: Any) -> None:
        super().__init__(action_space, **kwargs)
        self.in_place = in_place

    def learn(self, rollouts: Any, *, timestep: int) -> dict[str, float]:
        for rollout in rollouts:
            if self.in_place:
                rollout.rewards[:] += 0.25
            else:
                rollout.rewards = rollout.rewards + 0.25
        return {}


def batches_of(config: Any) -> list[Any]:
    """Return the rewards of all batches in two iterations."""
    found: list[Any] = []
    config.callbacks(on_learn_on_batch=lambda train_batch: found.append(np.array(train_batch["rewards"])))
    with config.debugging(seed=0).build() as algo:
        for _ in range(2):
            result = algo.train()
        assert result["env_runners"]["episode_return_mean"] == 20 * algo.config.env_config.get("reward", 4.0)
    assert found
    return found


def ppo(transforms: list[Any], **exploration: Any) -> PPOConfig:
    config = PPOConfig().environment(Four).env_runners(num_envs_per_env_runner=4, transforms=transforms)
    config.training(train_batch_size_per_learner=128, minibatch_size=None, num_epochs=1)
    return config.exploration(exploration_config=exploration)


def dqn(transforms: list[Any], **exploration: Any) -> DQNConfig:
    config = DQNConfig().environment(Four).env_runners(num_envs_per_env_runner=4, transforms=transforms)
    config.training(num_steps_sampled_before_learning_starts=60, n_step=1).reporting(
        min_sample_timesteps_per_iteration=120
    )
    return config.exploration(exploration_config=exploration)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", [ClipRewards("sign"), ClipRewards(1.0), NormalizeRewards()])
def test_transforms_leave_the_bonus_as_it_is(kind: str, transform: Any) -> None:
    """The env gives no rewards, so all that is learned from is the bonus."""
    plain, transformed = (
        batches_of(ppo(transforms, type=kind).environment(env_config={"reward": 0.0}))
        for transforms in ([], [transform])
    )
    for without, with_transform in zip(plain, transformed, strict=True):
        assert with_transform == pytest.approx(without)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_bonus_comes_on_top_of_clipped_rewards(in_place: bool) -> None:
    for batch in batches_of(ppo([ClipRewards()], type=Quarter, in_place=in_place)):
        assert np.unique(batch).tolist() == [1.25]
    for batch in batches_of(ppo([], type=Quarter, in_place=in_place)):
        assert np.unique(batch).tolist() == [4.25]


def test_the_deviation_of_returns_is_of_the_env_rewards() -> None:
    configs = [ppo([NormalizeRewards(gamma=1.0)], **settings) for settings in ({"type": "RND"}, {})]
    states = []
    for config in configs:
        with config.debugging(seed=0).build() as algo:
            algo.train()
            pipeline = algo.get_pipeline()
            assert pipeline
            states.append(pipeline.state["NormalizeRewards"])
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert value == pytest.approx(states[1][name])


@pytest.mark.parametrize("n_step", [1, 3])
def test_replayed_steps_get_the_bonus_after_the_transforms(n_step: int) -> None:
    config = dqn([ClipRewards()], type=Quarter).training(n_step=n_step, gamma=0.5)
    sums = {round(float(reward), 4) for batch in batches_of(config) for reward in batch}
    all_sums = np.cumsum(1.25 * 0.5 ** np.arange(n_step))
    assert max(sums) == pytest.approx(all_sums[-1])
    assert sums <= {round(float(total), 4) for total in all_sums}  # fewer steps where an episode ends


def test_replayed_sequences_get_the_bonus_after_the_transforms() -> None:
    config = dqn([ClipRewards()], type=Quarter).rl_module(model_config={"use_lstm": True, "max_seq_len": 5})
    config.training(train_batch_size_per_learner=40)
    found: list[Any] = []

    def note(train_batch: Any) -> None:
        found.append(train_batch["rewards"][np.asarray(train_batch["learns"])])
        assert "rewards.intrinsic" not in train_batch

    with config.callbacks(on_learn_on_batch=note).debugging(seed=0).build() as algo:
        algo.train()
    assert {float(reward) for batch in found for reward in batch} == {1.25}


def test_modules_have_a_bonus_of_their_own() -> None:
    found: list[Any] = []
    config = dqn([ClipRewards()], type=Quarter).environment(make_multi_agent(Four), env_config={"num_agents": 2})
    config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent_id, episode: "ab"[int(str(agent_id)[-1])])
    config.callbacks(on_learn_on_batch=lambda train_batch: found.append(np.array(train_batch["rewards"])))
    with config.debugging(seed=0).build() as algo:
        algo.train()
    assert {float(reward) for batch in found for reward in batch} == {1.25}


def test_a_restored_buffer_keeps_the_bonus(tmp_path: Any) -> None:
    config = dqn([ClipRewards()], type=Quarter).debugging(seed=0)
    with config.build() as algo, config.copy().build() as other:
        algo.train()
        algo.save(tmp_path / "saved")
        other.restore_from_path(tmp_path / "saved")
        one, two = (each._draw("default_policy") for each in (algo, other))
    assert one["rewards"].tolist() == two["rewards"].tolist() == [1.25] * len(one["rewards"])
    assert not any("intrinsic" in name for name in one)


def test_rollouts_without_a_bonus_may_follow_others() -> None:
    """A buffer of a run that continues with another exploration has rows of both kinds."""
    config = dqn([ClipRewards()], type=Quarter).debugging(seed=0)
    with config.build() as algo:
        algo.train()
        (buffer,) = algo.replay_buffers.values()
        rollout = algo.env_runner.sample(num_timesteps=400)
        assert rollout.intrinsic_rewards is None
        buffer.add([rollout.for_replay()])
        rewards = buffer.sample(500, reward_fn=lambda rewards: rewards.clip(-1, 1))["rewards"]
    assert set(np.unique(rewards).tolist()) == {1.0, 1.25}
