"""Sequences drawn from replay buffers, against a slow reference that walks along the rollouts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from corral import PPOConfig
from corral.errors import ColumnError
from corral.replay import ReplayBuffer
from corral.runners.runner import EnvRunner
from memory_modules import CountsSteps
from random_agents import RandomAgents

INITIAL = {"count": np.zeros(1, np.float32)}
GAMMA = 0.9


def filled(make_runner: Any, num_rollouts: int, capacity: int = 400, **settings: Any) -> ReplayBuffer:
    env_config = {"episode_length": 6, "stagger": True, "ends": "alternate"}
    runner = make_runner(num_envs=3, env_config=env_config, module_class=CountsSteps, **settings)
    buffer = ReplayBuffer(capacity, seed=0)
    for _ in range(num_rollouts):
        buffer.add(runner.sample(num_timesteps=31))
    return buffer


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("n_step", [1, 3, (2, 3)])
@pytest.mark.parametrize("capacity", [400, 60])
def test_sequences_are_consecutive_steps_of_one_episode(
    make_runner: Any, mode: str, n_step: int | tuple[int, int], capacity: int
) -> None:
    buffer = filled(make_runner, 6, capacity, autoreset_mode=mode)
    batch = buffer.sample_sequences(64, INITIAL, seq_len=4, burn_in=2, n_step=n_step, gamma=GAMMA)
    obs, firsts = batch["obs"], [*np.flatnonzero(batch["sequence_starts"]), len(batch["obs"])]
    assert len(firsts) == 65
    burned, drawn = 0, set()
    smallest, largest = n_step if isinstance(n_step, tuple) else (n_step, n_step)
    for start, stop in itertools.pairwise(firsts):
        episode, times = obs[start:stop, 0], obs[start:stop, 1]
        assert (episode == episode[0]).all() and (np.diff(times) == 1).all()  # with the observation after the steps
        steps = slice(start, stop - 1)
        assert np.array_equal(batch["states"]["count"][steps, 0], times[:-1])
        num_burned = int(batch["burns_in"][steps].sum())
        assert num_burned == (0 if times[0] == 0 else min(2, stop - start - 2))
        burned += num_burned
        assert batch["learns"][steps].sum() == stop - 1 - start - num_burned <= 4
        assert not batch["learns"][stop - 1] and not batch["burns_in"][stop - 1]
        for row in range(start, stop - 1):
            taken, left = int(batch["num_steps"][row]), stop - 1 - row
            assert min(smallest, left) <= taken <= min(largest, left)
            drawn |= {taken} if left >= largest else set()
            expected = sum(GAMMA**k * (obs[row, 1] + k + 1) for k in range(taken))  # the reward is the step's number
            assert batch["rewards"][row] == pytest.approx(expected)
            assert batch["discounts"][row] == pytest.approx(GAMMA**taken)
        inner = slice(start, max(start, stop - 1 - largest))
        assert not batch["terminated"][inner].any() and not batch["truncated"][inner].any()
    assert burned
    assert drawn == set(range(smallest, largest + 1))
    ends = np.array(firsts[1:]) - 2
    over = batch["terminated"][ends] | batch["truncated"][ends]
    assert over.any() and (batch["terminated"][ends] <= (obs[ends, 0] % 2 == 0)).all()  # odd episodes are truncated


class CountsBesideZero(CountsSteps):
    """Its state begins with zeros, and one entry stays 0."""

    def initial_state(self) -> dict[str, torch.Tensor]:
        return {"count": torch.zeros(2)}

    def policy(self, obs: Any, state: Any) -> Any:  # type: ignore[override]
        outputs, after = super().policy(obs, state)
        return outputs, {"count": after["count"] * torch.tensor([1.0, 0.0])}


def test_a_state_is_the_initial_one_if_all_of_it_is(make_runner: Any) -> None:
    runner = make_runner(num_envs=2, env_config={"episode_length": 9}, module_class=CountsBesideZero)
    buffer = ReplayBuffer(200, seed=0)
    buffer.add(runner.sample(num_timesteps=100))
    batch = buffer.sample_sequences(40, {"count": np.zeros(2, np.float32)}, seq_len=2, burn_in=1)
    starts, time = batch["sequence_starts"], batch["states"]["count"][:, 0]
    assert not batch["burns_in"][starts & (time == 0)].any()
    assert batch["burns_in"][starts & (time > 0)].any()


def test_columns_that_user_code_added_are_drawn_too(make_runner: Any) -> None:
    runner = make_runner(num_envs=3, env_config={"episode_length": 6, "stagger": True}, module_class=CountsSteps)
    buffer = ReplayBuffer(400, seed=0)
    for _ in range(3):
        rollout = runner.sample(num_timesteps=31)
        rollout["tenfold"] = 10 * rollout.obs[:-1, :, 1]
        buffer.add(rollout)
    batch = buffer.sample_sequences(16, INITIAL, seq_len=4)
    steps = batch["learns"]
    assert np.array_equal(batch["tenfold"][steps], 10 * batch["obs"][steps, 1])
    for name in ("learns", "states.count"):
        rollout = runner.sample(num_timesteps=12)
        rollout[name] = np.zeros((rollout.num_rows, 3))
        with pytest.raises(ColumnError, match=f"'{name}' was added .* choose a name other"):
            buffer.add(rollout)


def test_rewards_are_changed_before_they_are_summed(make_runner: Any) -> None:
    buffer = filled(make_runner, 2)
    batch = buffer.sample_sequences(
        20, INITIAL, seq_len=4, n_step=2, gamma=GAMMA, reward_fn=lambda rewards: rewards.clip(0, 3)
    )
    rows = np.flatnonzero(batch["learns"])
    first, second = (np.minimum(batch["obs"][rows, 1] + k, 3) for k in (1, 2))  # the reward is the step's number
    expected = first + GAMMA * second * (batch["num_steps"][rows] == 2)
    assert np.allclose(batch["rewards"][rows], expected) and (batch["obs"][rows, 1] > 3).any()


def test_a_restored_buffer_draws_the_same_sequences(make_runner: Any) -> None:
    buffer, other = filled(make_runner, 3), ReplayBuffer(400, seed=5)
    other.set_state(buffer.get_state())
    drawn = [one.sample_sequences(8, INITIAL, seq_len=4, gamma=1.0) for one in (buffer, other)]
    assert np.array_equal(drawn[0]["obs"], drawn[1]["obs"])
    assert np.array_equal(drawn[0]["states"]["count"], drawn[1]["states"]["count"])


def test_sequences_follow_the_lanes_of_several_agents() -> None:
    config = PPOConfig().environment(RandomAgents, disable_env_checking=True).rl_module(module_class=CountsSteps)
    config.env_runners(num_envs_per_env_runner=2, vectorization="sync").multi_agent(policies=("shared",))
    runner, buffer = EnvRunner(config.freeze()), ReplayBuffer(500, seed=0)
    for _ in range(6):
        buffer.add(list(runner.sample(num_timesteps=20).by_module().values()))
    runner.stop()
    batch = buffer.sample_sequences(40, INITIAL, seq_len=5, gamma=1.0)
    counts, starts = batch["states"]["count"][:, 0], batch["sequence_starts"]
    steps = batch["learns"]
    inner = steps[1:] & steps[:-1] & ~starts[1:]
    assert inner.sum() > 40 and (np.diff(counts)[inner] == 1).all()
