"""What is drawn is what was added: against a slow reference, and against envs of known content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Reference, Stream, assert_same

from corral import PPOConfig
from corral.data.replay import EmptyReplayBufferError, PrioritizedReplayBuffer, ReplayBuffer
from corral.errors import ColumnError, ConfigError, CorralError
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv

KINDS = [ReplayBuffer, PrioritizedReplayBuffer]


@given(
    kind=st.sampled_from(KINDS),
    capacity=st.integers(1, 60),
    num_envs=st.integers(1, 3),
    num_runners=st.integers(1, 3),
    same_step=st.booleans(),
    nested=st.booleans(),
    broken_rate=st.sampled_from([0.0, 0.2]),
    pieces=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
    n_step=st.sampled_from([1, 2, 3, 4, (1, 3), (2, 4), (3, 3)]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_draws_what_was_added(
    kind: type[ReplayBuffer],
    capacity: int,
    num_envs: int,
    num_runners: int,
    pieces: list[tuple[int, int, bool]],
    n_step: int | tuple[int, int],
    seed: int,
    **stream: Any,
) -> None:
    streams = [Stream(num_envs, worker_index=i, seed=seed, **stream) for i in range(num_runners)]
    buffer = kind(capacity, num_runners=num_runners, seed=seed)
    reference = Reference(capacity, num_runners=num_runners)
    for which, num_rows, reset in pieces:
        rollout = streams[which % num_runners].next(num_rows, reset=reset and num_rows > 0)
        buffer.add(rollout)
        if num_rows:
            reference.add(rollout)
            assert_same(buffer, reference, n_step)
    for index_of_first in range(1, 3):  # n-step sequences do not depend on the n of earlier draws
        assert_same(buffer, reference, index_of_first)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_for_which_there_was_no_room_count_too(kind: type[ReplayBuffer]) -> None:
    """Learning starts after a number of steps that were sampled, however few of them are kept."""
    buffer = kind(6, seed=0)
    buffer.add(Stream(2, end_rate=0.0).next(20))
    assert (len(buffer), buffer.num_env_steps_added) == (6, 40)


@pytest.fixture
def make_runner() -> Iterator[Any]:
    made: list[EnvRunner] = []

    def make(env: Any = CountingEnv, *, worker_index: int = 0, **given: Any) -> EnvRunner:
        config = PPOConfig().copy(env=env, seed=0, disable_env_checking=True, **given)
        made.append(EnvRunner(config.freeze(), worker_index))
        return made[-1]

    yield make
    for runner in made:
        runner.stop()


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("kind", KINDS)
def test_runners_fill_it(make_runner: Any, mode: str, kind: type[ReplayBuffer]) -> None:
    """Episodes of 3, 4 and 5 steps; observation [episode, t], reward t + 1."""
    env_config = {"ends": "alternate", "stagger": True}
    runners = [
        make_runner(
            worker_index=i, num_envs_per_env_runner=3, autoreset_mode=mode, env_config=env_config, vectorization="sync"
        )
        for i in (1, 2)
    ]
    buffer = kind(600, num_runners=2, seed=1)
    num_steps = 0
    for cut in (5, 7, 30, 3, 60, 1, 45):
        rollouts = [runner.sample(num_timesteps=cut) for runner in runners]
        num_steps += sum(rollout.num_env_steps for rollout in rollouts)
        buffer.add(rollouts)
    assert len(buffer) == num_steps
    batch = buffer.sample(4000, n_step=2, gamma=0.5)
    episode, t = batch["obs"].T
    assert (batch["next_obs"][:, 0] == episode).all()
    assert (batch["next_obs"][:, 1] == t + batch["num_steps"]).all()
    two = batch["num_steps"] == 2
    np.testing.assert_allclose(batch["rewards"], t + 1 + np.where(two, 0.5 * (t + 2), 0))
    ended = batch["terminated"] | batch["truncated"]
    assert (batch["truncated"][ended] == (episode[ended] % 2 == 1)).all()
    assert (batch["terminated"][ended] == (episode[ended] % 2 == 0)).all()
    assert set(batch["next_obs"][ended, 1]) == {3, 4, 5}
    assert (two | ended).mean() > 0.9  # all except the newest steps


def test_failed_sub_envs_are_cut_out(make_runner: Any) -> None:
    from corral.testing import FaultyEnv

    runner = make_runner(
        FaultyEnv,
        num_envs_per_env_runner=2,
        env_config={"at_step": 7, "episode_length": 4},
        vectorization="sync",
        restart_failed_sub_environments=True,
    )
    buffer, broken = ReplayBuffer(100, seed=0), 0
    for _ in range(4):
        rollout = runner.sample(num_timesteps=10)
        broken += len(rollout.broken)
        buffer.add(rollout)
    assert broken
    batch = buffer.sample(2000, n_step=3)
    assert (batch["next_obs"][:, 0] == batch["obs"][:, 0]).all()
    assert (batch["next_obs"][:, 1] == batch["obs"][:, 1] + batch["num_steps"]).all()


def test_a_rollout_left_out_is_not_bridged() -> None:
    stream, buffer, reference = Stream(end_rate=0.0), ReplayBuffer(100, seed=0), Reference(100)
    first, _, third = stream.next(4), stream.next(4), stream.next(4)
    assert third.continues
    buffer.add([first, third])
    reference.add(first)
    third.continues = False
    reference.add(third)
    assert_same(buffer, reference, 3)


def test_a_reset_is_not_bridged_even_where_all_observations_are_alike() -> None:
    stream, buffer = Stream(1, end_rate=0.0), ReplayBuffer(100, seed=0)
    for _ in range(5):
        rollout = stream.next(2, reset=True)
        rollout.obs[...] = 1.0
        buffer.add(rollout)
    assert set(buffer.sample(500, n_step=4)["num_steps"].tolist()) == {1, 2}


def test_final_observations_take_no_more_room_than_the_ring_has_rows() -> None:
    stream, buffer = Stream(2, same_step=True, end_rate=0.9), ReplayBuffer(40, seed=0)
    buffer.add([stream.next(10) for _ in range(10)])
    num_bytes = buffer.nbytes
    buffer.add([stream.next(10) for _ in range(50)])
    assert buffer.nbytes == num_bytes


def test_one_runner_too_many_takes_lanes_of_another() -> None:
    streams = [Stream(worker_index=i, end_rate=0.0) for i in (1, 2)]
    buffer = ReplayBuffer(100, seed=0)
    rollouts = [stream.next(3) for _ in range(3) for stream in streams]
    buffer.add(rollouts)
    assert len(buffer) == 36
    batch = buffer.sample(1000, n_step=5)
    assert (batch["next_obs"][:, 0] == batch["obs"][:, 0]).all()
    assert (batch["next_obs"][:, 2] == batch["obs"][:, 2] + batch["num_steps"]).all()


def test_draws_are_even_where_few_rows_are_valid() -> None:
    """With 2 of 3 runners silent, and most rows invalid, all draws but few would miss."""
    rollout = Stream(1, end_rate=0.0).next(90)
    rollout.valid[...] = False
    rollout.valid[::30] = True
    buffer = ReplayBuffer(300, num_runners=3, seed=0)
    buffer.add(rollout)
    _, counts = np.unique(buffer.sample(9000)["indices"], return_counts=True)
    assert len(buffer) == 3 and len(counts) == 3
    assert abs(counts - 3000).max() < 200  # 4.5 standard deviations


def test_draws_are_even() -> None:
    buffer = ReplayBuffer(40, seed=0)
    stream = Stream(2, end_rate=0.2)
    buffer.add([stream.next(5) for _ in range(9)])
    _, counts = np.unique(np.concatenate([buffer.sample(50)["indices"] for _ in range(1000)]), return_counts=True)
    mean = 50_000 / len(buffer)
    assert len(counts) == len(buffer)
    assert ((counts - mean) ** 2 / mean).sum() < len(buffer) + 5 * np.sqrt(2 * len(buffer))  # chi-square


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_decide_draws(kind: type[ReplayBuffer]) -> None:
    def drawn(seed: int) -> list[int]:
        buffer = kind(100, seed=seed)
        buffer.add(Stream().next(20))
        indices: list[int] = buffer.sample(16)["indices"].tolist()
        return indices

    assert drawn(3) == drawn(3) != drawn(4)


def test_dtypes_and_shapes_of_a_batch() -> None:
    buffer = ReplayBuffer(50)
    buffer.add(Stream(nested=True).next(6, bonus=np.ones((6, 2, 5), np.float16)))
    for n_step in (1, 3):
        batch = buffer.sample(7, n_step=n_step, gamma=0.9)
        described = {name: (str(column.dtype), column.shape) for name, column in batch.items() if "obs" not in name}
        assert described == {
            "actions": ("int64", (7,)),
            "rewards": ("float32", (7,)),
            "terminated": ("bool", (7,)),
            "truncated": ("bool", (7,)),
            "num_steps": ("int64", (7,)),
            "discounts": ("float32", (7,)),
            "indices": ("int64", (7,)),
            "weights": ("float32", (7,)),
            "bonus": ("float16", (7, 5)),
        }
        assert batch["obs"]["a"][1].dtype == np.uint8 and batch["next_obs"]["b"].shape == (7,)
        assert (batch["weights"] == 1).all()


def test_a_batch_is_the_callers() -> None:
    buffer = ReplayBuffer(50, seed=0)
    buffer.add(Stream().next(6))
    for column in (batch := buffer.sample(100)).values():
        column[...] = 0
    assert batch["rewards"].max() == 0 < buffer.sample(100)["rewards"].max()


def test_added_columns_come_and_go() -> None:
    stream, buffer = Stream(1, end_rate=0.0), ReplayBuffer(100, seed=0)
    buffer.add(stream.next(3))
    buffer.add(stream.next(3, bonus=np.full((3, 1), 2.0), mark=np.ones((3, 1), np.int64)))
    buffer.add(stream.next(3))
    batch = buffer.sample(300)
    marked = (batch["obs"][:, 2] > 3) & (batch["obs"][:, 2] <= 6)
    assert 0 < marked.sum() < 300
    assert (batch["bonus"][marked] == 2).all() and np.isnan(batch["bonus"][~marked]).all()
    assert (batch["mark"] == marked).all()


def test_columns_that_do_not_fit_are_refused() -> None:
    buffer = ReplayBuffer(100, seed=0)
    buffer.add(Stream().next(3, bonus=np.zeros((3, 2))))
    with pytest.raises(ColumnError, match=r"column 'obs' is float32\[5, 3, 3\].*needs float32\[5, 2, 3\]"):
        buffer.add(Stream(3).next(4))
    with pytest.raises(ColumnError, match=r"'bonus' was added as float64\[3, 2, 2\].*holds it as float64\[3, 2\]"):
        buffer.add(Stream().next(3, bonus=np.zeros((3, 2, 2))))
    with pytest.raises(ColumnError, match=r"'weights' was added .* choose a name other"):
        buffer.add(Stream().next(3, weights=np.zeros((3, 2))))
    with pytest.raises(
        ColumnError, match=r"holds observations with the leaves \['obs'\].*\['obs/a/0', 'obs/a/1', 'obs/b'\]"
    ):
        buffer.add(Stream(nested=True).next(3))
    floats = Stream().next(3)
    floats.columns["actions"] = floats.actions.astype(np.float32)
    with pytest.raises(ColumnError, match=r"'actions' is float32\[3, 2\].*needs int64\[3, 2\]"):
        buffer.add(floats)
    assert len(buffer) == Stream().next(3).valid.sum()
    nested = ReplayBuffer(100)
    nested.add(Stream(nested=True).next(3))
    with pytest.raises(ColumnError, match=r"cannot store \['obs'\]"):
        nested.add(Stream().next(3))


def test_a_first_rollout_that_is_refused_leaves_no_trace() -> None:
    buffer = ReplayBuffer(100, seed=0)
    with pytest.raises(ColumnError, match="'indices' was added"):
        buffer.add(Stream(3).next(3, indices=np.zeros((3, 3))))
    buffer.add(Stream(2).next(3))
    assert len(buffer)


def test_an_empty_buffer_and_bad_numbers_are_refused() -> None:
    buffer = ReplayBuffer(10)
    with pytest.raises(EmptyReplayBufferError, match="add rollouts first") as caught:
        buffer.sample(1)
    assert isinstance(caught.value, CorralError)
    rollout = Stream().next(3)
    rollout.valid[...] = False
    buffer.add(rollout)
    with pytest.raises(EmptyReplayBufferError):
        buffer.sample(1)
    with pytest.raises(ValueError, match="batch_size=0 and n_step=1"):
        buffer.sample(0)
    for name in ("capacity", "num_runners", "frame_stack"):
        with pytest.raises(ConfigError, match=rf"{name}=0 must be"):
            ReplayBuffer(**{"capacity": 1, name: 0})


def test_close_empties_it() -> None:
    buffer = ReplayBuffer(10, seed=0)
    buffer.add(Stream().next(3))
    assert buffer.nbytes > 0
    buffer.close()
    assert len(buffer) == buffer.nbytes == 0
    buffer.add(Stream(nested=True).next(3))
    assert len(buffer) > 0
