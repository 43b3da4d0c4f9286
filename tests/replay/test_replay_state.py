"""The state of a buffer survives file formats, and a buffer that restores it continues as the first one would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import ormsgpack
import pytest
from streams import Stream

from corral.core.tree import leaves
from corral.data.replay import PrioritizedReplayBuffer, ReplayBuffer
from corral.errors import CheckpointError
from corral.runs.checkpoint import codec

KINDS = [ReplayBuffer, PrioritizedReplayBuffer]
PACKERS: dict[str, Callable[[Any], Any]] = {
    "codec": lambda state: codec.decode(codec.encode(state)),
    "ormsgpack": lambda state: ormsgpack.unpackb(ormsgpack.packb(state, option=ormsgpack.OPT_SERIALIZE_NUMPY)),
}


def used(kind: type[ReplayBuffer], num_pieces: int = 7, *, nested: bool = True) -> tuple[ReplayBuffer, list[Stream]]:
    """Return a buffer that has wrapped around if there are many pieces, and the streams that fill it."""
    buffer = kind(80, num_runners=2, seed=5)
    streams = [Stream(2, worker_index=i, same_step=True, nested=nested) for i in (2, 1)]
    for piece in range(num_pieces):
        for num_rows, stream in zip((4, 5), streams, strict=True):  # one runner is slower than the other
            buffer.add(stream.next(num_rows, bonus=np.full((num_rows, 2), piece / 3)))
        play(buffer)
    return buffer, streams


def play(buffer: ReplayBuffer) -> list[Any]:
    """Draw, update priorities, and draw again."""
    batches = [buffer.sample(16, beta=0.5)]
    if isinstance(buffer, PrioritizedReplayBuffer):
        buffer.update_priorities(batches[0]["indices"], abs(batches[0]["rewards"]))
    return [*batches, *(buffer.sample(16, n_step=n_step, beta=0.5) for n_step in (3, (1, 4)))]


def assert_equal(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for left, right in zip(leaves(mine), leaves(other), strict=True):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_pieces", [1, 7])
@pytest.mark.parametrize("nested", [False, True])
def test_continues_as_the_original(packer: str, kind: type[ReplayBuffer], num_pieces: int, nested: bool) -> None:
    buffer, streams = used(kind, num_pieces, nested=nested)
    other = kind(80, num_runners=2, seed=99)
    other.set_state(PACKERS[packer](buffer.get_state()))
    assert len(other) == len(buffer)
    for _ in range(6):
        assert_equal(play(other), play(buffer))
        for rollout in [stream.next(4) for stream in streams]:  # added columns continue too, without values
            buffer.add(rollout)
            other.add(rollout)
        assert len(other) == len(buffer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_replaces_whatever_there_was(kind: type[ReplayBuffer]) -> None:
    buffer, _ = used(kind, 1)
    other, streams = used(kind, 9)
    other.add(streams[0].next(5, mark=np.ones((5, 2))))
    other.set_state(buffer.get_state())
    assert len(other) == len(buffer)
    assert_equal(play(other), play(buffer))
    rollout = Stream(2, worker_index=2, nested=True).next(9, reset=True)  # of one runner: the other has fewer rows
    for each in (buffer, other):
        each.add(rollout)
    assert_equal(play(other), play(buffer))
    other.set_state(kind(80, num_runners=2, seed=5).get_state())
    assert len(other) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_few_valid_rows_replaces_one_of_others(kind: type[ReplayBuffer]) -> None:
    def lone(n: int) -> ReplayBuffer:
        buffer = kind(160, seed=n)
        rollout = Stream(8, seed=n).next(20)
        rollout.valid[:] = np.arange(8) == n
        buffer.add(rollout)
        buffer.sample(4)
        return buffer

    buffer, other = lone(2), lone(5)
    other.set_state(buffer.get_state())
    assert set(other.sample(64)["obs"][:, 1]) == {2}


def test_a_state_is_a_snapshot_of_the_rows_in_use() -> None:
    buffer, streams = used(ReplayBuffer, 1)
    state = buffer.get_state()
    packed = codec.encode(state)
    assert len(state["columns"]["rewards"]) == 6  # five of the faster runner, and the gap's
    for stream in streams:
        buffer.add(stream.next(60))
    play(buffer)
    assert codec.encode(state) == packed


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (ReplayBuffer(81, num_runners=2), "capacity=80, and this buffer has capacity=81"),
        (ReplayBuffer(80, num_runners=1), "num_runners=2"),
        (ReplayBuffer(80, num_runners=2, frame_stack=2), "frame_stack=1"),
        (PrioritizedReplayBuffer(80, num_runners=2), "type='uniform', and this buffer has type='prioritized'"),
    ],
)
def test_states_of_other_buffers_are_refused(other: ReplayBuffer, named: str) -> None:
    buffer, _ = used(ReplayBuffer)
    with pytest.raises(CheckpointError, match=named):
        other.set_state(buffer.get_state())


def damaged(state: dict[str, Any], damage: str) -> dict[str, Any]:
    if damage == "column":
        del state["columns"]["rewards"]
    elif damage == "shape":
        state["columns"]["rewards"] = state["columns"]["rewards"][:-1]
    elif damage == "obs":
        state["obs"]["columns"].pop()
    elif damage == "priorities":
        state["priorities"] = [0.5]
    else:
        del state[damage]
    return state


@pytest.mark.parametrize("damage", ["column", "shape", "obs", "priorities", "rng", "written", "version", "layout"])
@pytest.mark.parametrize("fresh", [False, True])
def test_damaged_states_are_refused_and_change_nothing(damage: str, fresh: bool) -> None:
    state = damaged(used(PrioritizedReplayBuffer)[0].get_state(), damage)
    buffer = PrioritizedReplayBuffer(80, num_runners=2, seed=1) if fresh else used(PrioritizedReplayBuffer, 3)[0]
    before = codec.encode(buffer.get_state())
    with pytest.raises(CheckpointError):
        buffer.set_state(state)
    assert codec.encode(buffer.get_state()) == before


def test_states_of_other_columns_are_refused() -> None:
    buffer, _ = used(ReplayBuffer)
    other, _ = used(ReplayBuffer, nested=False)
    before = codec.encode(other.get_state())
    with pytest.raises(CheckpointError, match=r"other columns.*Use the environment"):
        other.set_state(buffer.get_state())
    assert codec.encode(other.get_state()) == before
