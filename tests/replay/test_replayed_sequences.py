"""Sequences drawn from replay buffers, against a slow reference that walks along the rollouts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from corral import PPOConfig
from corral.data.replay import ReplayBuffer
from corral.errors import ColumnError
from corral.runners.runner import EnvRunner
from memory_modules import CountsSteps
from random_agents import RandomAgents

INITIAL = {"count": np.zeros(1, np.float32)}
GAMMA = 0.9


def filled(make_runner: Any, num_rollouts: int, capacity: int = 400, **settings: Any) -> ReplayBuffer:
    env_config = {"episode_length": 6, "stagger": True, "ends": "alternate"}
    runner = make_runner(num_envs=3, env_config=env_config, module_class=CountsSteps, **settings)
    buffer = ReplayBuffer(capacity, seed=0)
    rows = itertools.count()
    for _ in range(num_rollouts):
        rollout = runner.sample(num_timesteps=31)
        rollout["row"] = np.array([[next(rows)] * 3 for _ in range(rollout.num_rows)])
        rollout["lane"] = np.tile(np.arange(3), (rollout.num_rows, 1))
        buffer.add(rollout)
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
    held = buffer.sample(2000)["row"]
    assert (held.min() > 0) == (capacity == 60)  # the ring has lost rows
    burned, drawn = set(), set()
    smallest, largest = n_step if isinstance(n_step, tuple) else (n_step, n_step)
    for start, stop in itertools.pairwise(firsts):
        episode, times = obs[start:stop, 0], obs[start:stop, 1]
        assert (episode == episode[0]).all() and (np.diff(times) == 1).all()  # with the observation after the steps
        steps = slice(start, stop - 1)
        assert np.array_equal(batch["states"]["count"][steps, 0], times[:-1])
        num_burned = int(batch["burns_in"][steps].sum())
        first, last = start + num_burned, stop - 2  # of the steps that are learned from
        from_begin, from_oldest = int(obs[first, 1]), int(batch["row"][first] - held.min())
        assert num_burned == min(2, from_begin, from_oldest)
        burned.add((num_burned, from_oldest < min(2, from_begin)))
        assert batch["burns_in"][start:first].all() and batch["learns"][first : last + 1].all()
        over = batch["terminated"][last] or batch["truncated"][last] or batch["row"][last] == held.max()
        assert last + 1 - first == 4 or (last + 1 - first < 4 and over)
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
    assert {(number, False) for number in range(3)} <= burned
    assert {(number, True) for number in range(2)} <= burned or capacity == 400
    assert drawn == set(range(smallest, largest + 1))
    ends = np.array(firsts[1:]) - 2
    over = batch["terminated"][ends] | batch["truncated"][ends]
    assert over.any() and (batch["terminated"][ends] <= (obs[ends, 0] % 2 == 0)).all()  # odd episodes are truncated


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("capacity", [400, 60])
def test_sequences_across_episodes_have_all_steps_equally_often(make_runner: Any, mode: str, capacity: int) -> None:
    length, held = 10, {}
    buffer = filled(make_runner, 6, capacity, autoreset_mode=mode)
    steps = buffer.sample(3000)
    for row, lane, obs in zip(steps["row"], steps["lane"], steps["obs"], strict=True):
        held[int(lane), int(row)] = int(obs[1])
    batch = buffer.sample_sequences(3000, INITIAL, seq_len=length, across_episodes=True)
    counts = dict.fromkeys(held, 0)
    bounds = [*np.flatnonzero(batch["sequence_starts"]), len(batch["obs"])]
    left, place, newest, num_parts = 0, (0, 0), max(row for _, row in held), 0
    for start, stop in itertools.pairwise(bounds):
        episode, times = batch["obs"][start:stop, 0], batch["obs"][start:stop, 1]
        assert (episode == episode[0]).all() and (np.diff(times) == 1).all()
        assert batch["states"]["count"][start, 0] == times[0] and batch["learns"][start:stop].tolist()[-1] is False
        lane, row = int(batch["lane"][start]), int(batch["row"][start])
        if left:  # the episode before it ended, and its sub-env was reset, in a row of its own or in the same one
            assert times[0] == 0 and place == (lane, row - (2 if mode == "next_step" else 1))
            num_parts += 1
        left = left or length
        for step in range(start, stop - 1):
            counts[lane, int(batch["row"][step])] += 1
        place = lane, int(batch["row"][stop - 2])
        over = batch["terminated"][stop - 2] or batch["truncated"][stop - 2]
        taken = int(batch["row"][stop - 2]) - row + 1 + bool(over and mode == "next_step")
        left = left - taken if over and place[1] + 2 <= newest else 0
        left = max(left, 0)
    assert num_parts > 1000
    # Steps near the ends of the ring are in fewer windows; in between, the first one of an episode is drawn as often.
    oldest = min(row for _, row in held)
    inner = {key: count for key, count in counts.items() if oldest + length <= key[1]}
    if capacity == 400:
        means = [np.mean([count for key, count in inner.items() if held[key] == time]) for time in range(6)]
        assert max(means) < 1.2 * min(means), means


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


@pytest.mark.parametrize("capacity", [500, 60])
def test_sequences_follow_the_lanes_of_several_agents(capacity: int) -> None:
    config = PPOConfig().environment(RandomAgents, disable_env_checking=True).rl_module(module_class=CountsSteps)
    config.env_runners(num_envs_per_env_runner=2, vectorization="sync").multi_agent(policies=("shared",))
    runner, buffer = EnvRunner(config.freeze()), ReplayBuffer(capacity, seed=0)
    before: dict[int, int | None] = {}  # by the number of a step, the number of the step before it in its episode
    latest: dict[Any, int | None] = {}
    for _ in range(6):
        for rollout in runner.sample(num_timesteps=20).by_module().values():
            rollout["number"] = len(before) + np.arange(rollout.valid.size).reshape(rollout.valid.shape)
            done = rollout.terminated | rollout.truncated
            for time, lane in np.ndindex(rollout.valid.shape):
                number, key = int(rollout["number"][time, lane]), (rollout.lane_envs[lane], rollout.lane_agents[lane])
                before[number] = latest.get(key)
                if rollout.valid[time, lane]:
                    latest[key] = None if done[time, lane] else number
            buffer.add(rollout)
    runner.stop()
    held = set(buffer.sample(5000)["number"].tolist())
    assert len(held) == len(buffer)

    def steps_before(number: int, known: Any) -> list[int]:
        found: list[int] = []
        while (earlier := before[number]) is not None and earlier in known:
            found.append(number := earlier)
        return found[::-1]

    batch = buffer.sample_sequences(200, INITIAL, seq_len=5, burn_in=3, gamma=1.0)
    steps, cut_off = batch["burns_in"] | batch["learns"], 0
    for part in np.split(np.arange(len(steps)), np.flatnonzero(batch["sequence_starts"])[1:]):
        numbers = batch["number"][part[:-1]].tolist()
        drawn = numbers[int(batch["burns_in"][part].sum())]
        assert numbers[: numbers.index(drawn)] == steps_before(drawn, held)[-3:]
        assert all(before[later] == number for number, later in itertools.pairwise(numbers))
        cut_off += len(steps_before(drawn, held)) < min(3, len(steps_before(drawn, before)))
    assert cut_off or capacity == 500  # the ring has lost steps before some of those that were drawn
    counts = [len(steps_before(number, before)) for number in batch["number"][steps].tolist()]
    assert np.array_equal(batch["states"]["count"][steps, 0], counts)
