"""Lanes with clocks of their own in replay buffers, against a slow reference that walks each agent's own steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from streams import Stream
from taking_turns import TakingTurns

from at_least import all_of
from corral import DQNConfig
from corral.data.episodes.lane_rollout import LaneRollout
from corral.data.episodes.rollout import EpisodeCarry
from corral.data.replay import PrioritizedReplayBuffer, ReplayBuffer
from corral.errors import CheckpointError, ColumnError


class World:
    """Agents in sub-envs whose observations are numbers that never repeat; it gives rollouts of chosen steps.

    An observation is `serial number of its episode * 1000 + age`, the reward its age, so that what follows a step is
    known from its observation alone. `stacks` gives stacks of frames as `FrameStackObservation` does.
    """

    def __init__(self, num_envs: int, agents: list[str], *, seed: int = 0, stacks: int = 1, p_end: float = 0.1) -> None:
        self.seats = [(env, agent) for env in range(num_envs) for agent in agents]
        self.rng, self.stacks, self.p_end = np.random.default_rng(seed), stacks, p_end
        self.num_episodes = 0
        self.now = {seat: self._begin() for seat in self.seats}  # episode and age of what each seat sees
        self.ends: dict[int, tuple[int, bool]] = {}  # by episode: age at the end, and whether it terminated
        self.first = True
        self.taken: list[tuple[int, int]] = []  # episode and age of all steps so far, in the order of time

    def _begin(self) -> tuple[int, int]:
        self.num_episodes += 1
        return self.num_episodes, 0

    def obs(self, episode: int, age: int) -> Any:
        frames = [episode * 1000 + max(0, age - back) for back in range(self.stacks - 1, -1, -1)]
        return np.array(frames, np.float32) if self.stacks > 1 else np.float32(frames[-1])

    def rollout(self, num_rows: int, p_acts: float = 1.0, p_lane: float = 1.0) -> LaneRollout:
        """Return the steps of `num_rows` env steps, in which each agent acts with probability `p_acts`."""
        lanes: list[tuple[tuple[int, str], list[Any], Any]] = []
        for seat in self.seats:
            steps: list[Any] = []
            if self.rng.random() < p_lane:
                for _ in range(int(self.rng.binomial(num_rows, p_acts))):
                    steps += self._step(seat)
            if any(step[4] for step in steps):
                lanes.append((seat, steps, self.now[seat]))
        order = self.rng.permutation(len(lanes))
        lanes = [lanes[index] for index in order]
        length = max((len(steps) for _, steps, _ in lanes), default=0)
        shape = (length, len(lanes))
        entry = (self.stacks,) if self.stacks > 1 else (1,)
        columns: dict[str, Any] = {
            "obs": np.full((length + 1, len(lanes), *entry), -1, np.float32),
            "actions": np.zeros(shape, np.int64),
            "rewards": np.full(shape, 777.0),
            **{name: np.zeros(shape, np.bool_) for name in ("terminated", "truncated", "valid")},
            "mark": np.zeros(shape),
        }
        for lane, (_, steps, now) in enumerate(lanes):
            for row, (episode, age, terminated, truncated, valid) in enumerate(steps):
                columns["obs"][row, lane] = self.obs(episode, age)
                values = (episode * 10 + age % 7, age, terminated, truncated, valid, episode)
                names = ("actions", "rewards", "terminated", "truncated", "valid", "mark")
                for name, value in zip(names, values, strict=True):
                    columns[name][row, lane] = value
            columns["obs"][len(steps), lane] = self.obs(*now)
        rollout = LaneRollout(columns, num_rows=length)
        rollout.lane_envs = np.array([seat[0] for seat, _, _ in lanes], np.int64)
        rollout.lane_agents = [seat[1] for seat, _, _ in lanes]
        rollout.continues, self.first = not self.first, False
        rollout.num_env_steps = int(columns["valid"].sum())
        for row, lane in np.argwhere(columns["valid"]):
            episode, age, *_ = lanes[lane][1][row]
            self.taken.append((episode, age))
        return rollout

    def _step(self, seat: tuple[int, str]) -> Iterator[Any]:
        """Yield the step of a seat, and after the end of an episode the separator with the final observation."""
        episode, age = self.now[seat]
        ends, terminates = self.rng.random() < self.p_end, bool(self.rng.random() < 0.5)
        yield episode, age, ends and terminates, ends and not terminates, True
        self.now[seat] = episode, age + 1
        if ends:
            self.ends[episode] = age, terminates
            yield episode, age + 1, False, False, False
            self.now[seat] = self._begin()

    def expected(self, episode: int, age: int, n_step: int, gamma: float, known: set[tuple[int, int]]) -> Any:
        """Return the transition of a step, found by walking the steps of its episode one by one."""
        rewards, steps = 0.0, 0
        while steps < n_step and (episode, age + steps) in known:
            rewards += gamma**steps * (age + steps)
            steps += 1
            if self.ends.get(episode, (-1,))[0] == age + steps - 1:
                break
        last = age + steps - 1
        end, terminates = self.ends.get(episode, (-1, False))
        return rewards, steps, (last == end and terminates, last == end and not terminates), self.obs(episode, last + 1)


def check(
    buffer: ReplayBuffer, world: World, n_step: int, gamma: float = 0.9, size: int = 1500
) -> set[tuple[int, int]]:
    """Compare a sample with the reference; return the steps that were drawn."""
    batch = buffer.sample(size, n_step=n_step, gamma=gamma)
    known, drawn = set(world.taken), set()
    newest = batch["obs"][:, -1].astype(int)
    for row in range(size):
        episode, age = divmod(int(newest[row]), 1000)
        drawn.add((episode, age))
        rewards, steps, ends, next_obs = world.expected(episode, age, n_step, gamma, known)
        assert np.array_equal(batch["obs"][row], np.atleast_1d(world.obs(episode, age)))
        assert (batch["actions"][row], batch["mark"][row]) == (episode * 10 + age % 7, episode)
        assert batch["rewards"][row] == pytest.approx(rewards, rel=1e-5)
        assert batch["num_steps"][row] == steps, (episode, age)
        assert (batch["terminated"][row], batch["truncated"][row]) == ends
        assert np.array_equal(batch["next_obs"][row], np.atleast_1d(next_obs))
        assert batch["discounts"][row] == pytest.approx(gamma**steps)
    return drawn


@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
@pytest.mark.parametrize("stacks", [1, 3])
@pytest.mark.parametrize(("rows", "p_acts", "p_lane"), [(4, 1.0, 1.0), (1, 1.0, 1.0), (5, 0.5, 0.7), (9, 0.3, 0.9)])
def test_transitions_match_each_agents_own_steps(
    kind: type[ReplayBuffer], stacks: int, rows: int, p_acts: float, p_lane: float
) -> None:
    world = World(2, ["a", "b", "c"], stacks=stacks, seed=rows)
    buffer = kind(10_000, frame_stack=stacks, seed=0)
    for round_ in range(60 // rows + 3):
        if round_ % 7 == 3:  # lanes continue in a restored buffer too
            state, buffer = buffer.get_state(), kind(10_000, frame_stack=stacks, seed=0)
            buffer.set_state(state)
        buffer.add(world.rollout(rows, p_acts, p_lane))
    assert len(buffer) == len(world.taken) == buffer.num_env_steps_added
    for n_step in (1, 3):
        drawn = check(buffer, world, n_step, size=4000)
    assert drawn == set(world.taken)  # each of some hundred, among 4000


@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
@pytest.mark.parametrize("stacks", [1, 3])
@pytest.mark.parametrize("p_lane", [1.0, 0.6])
def test_the_newest_steps_are_kept_and_connected_while_the_ring_is_overwritten(
    kind: type[ReplayBuffer], stacks: int, p_lane: float
) -> None:
    world = World(2, ["a", "b"], stacks=stacks, seed=1, p_end=0.05)
    buffer = kind(100, frame_stack=stacks, seed=0)
    for round_ in range(100):
        buffer.add(world.rollout(3, 0.8, p_lane))
        if round_ % 20 == 19:
            known = set(world.taken)
            drawn = check(buffer, world, 4)
            assert drawn <= known  # of some hundred steps, all are among 1500 draws
            assert len(drawn) == len(buffer)


def test_capacity_counts_the_steps_of_all_lanes_however_uneven_they_are() -> None:
    world = World(1, ["often", "never", "once"], p_end=0.0)
    buffer = ReplayBuffer(60, seed=0)
    buffer.add(world.rollout(1))  # all three
    world.seats = world.seats[:1]
    for _ in range(50):
        buffer.add(world.rollout(4))
    assert 60 <= len(buffer) <= 66  # with a static share per lane it were 20
    assert check(buffer, world, 2) >= set(world.taken[-60:])


def test_a_rollout_larger_than_the_buffer_leaves_its_last_steps() -> None:
    world = World(1, ["a", "b"], p_end=0.0)
    buffer = ReplayBuffer(20, seed=0)
    buffer.add(world.rollout(50))
    ages = sorted(age for _, age in check(buffer, world, 2))
    assert ages == sorted([*range(40, 50), *range(40, 50)])
    buffer.add(world.rollout(3))
    check(buffer, world, 4)


@pytest.mark.parametrize("stacks", [1, 3])
@pytest.mark.parametrize("num_rollouts", range(1, 14))
def test_a_lane_that_comes_back_does_not_continue_what_is_overwritten(num_rollouts: int, stacks: int) -> None:
    world = World(1, ["often", "seldom"], p_end=0.0, stacks=stacks)
    buffer = ReplayBuffer(20, frame_stack=stacks, seed=0)
    buffer.add(world.rollout(2))
    seats, world.seats = world.seats, world.seats[:1]
    for _ in range(num_rollouts):
        buffer.add(world.rollout(2))
    world.seats = seats
    for _ in range(3):
        buffer.add(world.rollout(3))
        check(buffer, world, 3, size=300)


def test_no_transition_connects_a_lane_with_steps_that_were_not_added() -> None:
    world = World(1, ["a"], p_end=0.0)
    buffer = ReplayBuffer(100, seed=0)
    buffer.add(world.rollout(4))
    lost = world.rollout(4)
    assert lost.num_env_steps == 4
    world.taken = world.taken[:4]
    buffer.add(world.rollout(4))
    batch = buffer.sample(500, n_step=3)
    ages = batch["obs"][:, 0].astype(int) % 1000
    assert set(zip(ages.tolist(), batch["num_steps"].tolist(), strict=True)) == {
        *((0, 3), (1, 3), (2, 2), (3, 1), (8, 3), (9, 3), (10, 2), (11, 1))
    }
    assert np.array_equal(batch["next_obs"][:, 0], batch["obs"][:, 0] + batch["num_steps"])


def test_runners_have_lanes_of_their_own() -> None:
    worlds = [World(1, ["a"], p_end=0.0, seed=seed) for seed in range(2)]
    worlds[1].num_episodes, worlds[1].now = 100, {(0, "a"): (100, 0)}
    buffer = ReplayBuffer(100, num_runners=2, seed=0)
    for _ in range(3):
        for index, world in enumerate(worlds, 1):
            rollout = world.rollout(2)
            rollout.worker_index = index
            buffer.add(rollout)
    worlds[0].taken += worlds[1].taken
    assert check(buffer, worlds[0], 3) == set(worlds[0].taken)


def test_priorities_follow_the_steps() -> None:
    world = World(2, ["a", "b"], seed=3)
    buffer = PrioritizedReplayBuffer(50, alpha=1.0, seed=0)
    indices: list[int] = []
    for _ in range(40):
        buffer.add(world.rollout(2, 0.7))
        batch = buffer.sample(64)
        indices += batch["indices"].tolist()
        buffer.update_priorities(batch["indices"], np.where(batch["rewards"] == 3, 5.0, 0.0))
    buffer.update_priorities(batch["indices"], np.zeros(64))
    by_index: dict[int, set[float]] = {}
    for _ in range(20):
        batch = buffer.sample(64)
        for index, obs in zip(batch["indices"].tolist(), batch["obs"][:, 0].tolist(), strict=True):
            by_index.setdefault(index, set()).add(obs)
    assert all_of(len(obs) == 1 for obs in by_index.values())
    drawn = buffer.sample(2000, beta=1.0)
    powers, num_rows = buffer._tree.leaves, buffer._links.num_rows
    assert np.count_nonzero(powers) == len(buffer)
    share = np.bincount(drawn["indices"] % num_rows, minlength=num_rows) / 2000
    assert np.abs(share - powers / powers.sum()).max() < 0.01


def test_steps_of_agents_do_not_go_where_steps_of_sub_envs_are() -> None:
    world, stream = World(2, ["a"]), Stream()
    for first, second, held in (
        (world.rollout(3), stream.next(3), "several"),
        (stream.next(3), world.rollout(3), "one"),
    ):
        buffer = ReplayBuffer(100, seed=0)
        buffer.add(first)
        with pytest.raises(ColumnError, match=f"holds steps of {held} agent"):
            buffer.add(second)


def test_a_state_of_another_number_of_lanes_is_refused() -> None:
    one, other = ReplayBuffer(80, seed=0), ReplayBuffer(80, seed=0)
    one.add(World(2, ["a", "b"]).rollout(3))
    other.add(World(3, ["a", "b"]).rollout(3))
    with pytest.raises(CheckpointError, match=r"84 rows, and this one has 86"):
        other.set_state(one.get_state())


@pytest.mark.parametrize("fragment", [1, 4])
def test_what_a_runner_samples_is_connected_agent_by_agent(fragment: int) -> None:
    rng = np.random.default_rng(0)
    config = (
        DQNConfig()
        .environment(TakingTurns)
        .env_runners(num_envs_per_env_runner=3, rollout_fragment_length=fragment)
        .multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent_id, episode: "ab"[rng.integers(2)])
        .training(num_steps_sampled_before_learning_starts=10**6, replay_buffer_config={"capacity": 200})
        .reporting(min_sample_timesteps_per_iteration=100)
        .debugging(seed=1)
    )
    TakingTurns.ends.clear()
    num_cut = 0
    with config.build() as algo:
        for _ in range(4):
            algo.train()
            for buffer in algo.replay_buffers.values():  # type: ignore[attr-defined]
                batch = buffer.sample(2000, n_step=3, gamma=0.5)
                known = set(map(tuple, batch["obs"].astype(int).tolist()))
                for row in range(300):
                    episode, age = batch["obs"][row].astype(int).tolist()
                    steps = int(batch["num_steps"][row])
                    assert batch["next_obs"][row].tolist() == [episode, age + steps]
                    assert batch["rewards"][row] == sum(0.5**step * (age + step) for step in range(steps))
                    end, terminates = TakingTurns.ends.get(episode, (-1, False))
                    is_last = end == age + steps - 1
                    flags = (bool(batch["terminated"][row]), bool(batch["truncated"][row]))
                    assert flags == (is_last and terminates, is_last and not terminates)
                    if steps < 3 and not is_last:  # the next step is not there
                        assert (episode, age + steps) not in known
                        num_cut += 1
    assert num_cut < 0.1 * 4 * 2 * 300  # only steps before those that wait for their outcome


@pytest.mark.parametrize("breaks", [False, True])
def test_no_transition_crosses_the_failure_of_a_sub_env(breaks: bool) -> None:
    buffer = ReplayBuffer(100, seed=0)
    for number in range(2):
        rows = 3 if breaks and not number else 2
        shape = (rows, 1)
        flags = {name: np.zeros(shape, np.bool_) for name in ("terminated", "truncated")}
        valid = (np.arange(rows) < 2)[:, None]
        obs = np.zeros((rows + 1, 1, 1), np.float32)  # all alike, so that only the carry tells the episodes apart
        columns = {"obs": obs, "actions": np.zeros(shape, np.int64), "rewards": np.ones(shape), "valid": valid, **flags}
        rollout = LaneRollout(columns, num_rows=rows)
        rollout.lane_envs, rollout.lane_agents = np.zeros(1, np.int64), ["a"]
        rollout.continues, rollout.carry = bool(number), EpisodeCarry.fresh(1, 0.0)
        rollout.carry.lengths[:] = 2 * (bool(number) and not breaks)  # a failure ends the episode
        buffer.add(rollout)
    assert set(buffer.sample(200, n_step=9)["num_steps"].tolist()) == ({1, 2} if breaks else {1, 2, 3, 4})
