"""Batches of every kind of buffer, as digests: a change of the code that changes one bit of them shows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from streams import Stream
from test_device_buffer import make_rollouts
from test_frames import Stacks
from test_hindsight import make_buffer, make_runner
from test_lane_replay import World

from corral.data.replay import PrioritizedReplayBuffer, ReplayBuffer
from corral.data.replay.device_buffer import DeviceReplayBuffer
from corral.runs.checkpoint import codec

STATE = {"h": np.zeros(3, np.float32)}


def rollouts_of_streams(**settings: Any) -> Iterator[list[Any]]:
    """Two runners of different speed; some rollouts are left out, follow a reset, are blank or larger than the ring."""
    streams = [Stream(2, worker_index=index, broken_rate=0.1, **settings) for index in (2, 1)]
    for turn in range(40):
        parts = [
            stream.next(rows, reset=turn % 11 == 7) for rows, stream in zip((1 + turn % 5, 3), streams, strict=True)
        ]
        if turn == 25:
            parts[0] = streams[0].next(70)
        for part in parts:
            if turn % 9 != 4:
                part["bonus"] = np.arange(part.valid.size, dtype=np.float32).reshape(part.valid.shape)
        yield parts[1:] if turn % 8 == 3 else parts


def rollouts_with_states() -> Iterator[list[Any]]:
    for turn, parts in enumerate(rollouts_of_streams()):
        for part in parts:
            shape = (part.num_rows + 1, part.num_envs, 3)
            part.columns["states"] = {"h": np.full(shape, turn, np.float32) + np.arange(shape[0])[:, None, None]}
            part.intrinsic_rewards = np.full(part.valid.shape, 0.1 * turn)
        yield parts


def rollouts_of_stacks(**settings: Any) -> Iterator[list[Any]]:
    stacks = Stacks(3, **settings)
    for turn in range(30):
        rollout = stacks.next(1 + turn % 6, reset=turn % 9 == 5)
        yield [] if turn % 7 == 6 else [rollout]
    yield [stacks.next(40)]


def rollouts_of_lanes(stacks: int = 1) -> Iterator[list[Any]]:
    world = World(2, ["a", "b", "c"], stacks=stacks, seed=3)
    for turn in range(60):
        rollout = world.rollout(1 + turn % 4, 0.7, 0.8)
        yield [] if turn % 7 == 6 else [rollout]
    yield [world.rollout(80)]
    yield [world.rollout(2)]


def rollouts_of_goals(**settings: Any) -> Iterator[list[Any]]:
    runner = make_runner(**settings)
    for turn in range(40):
        rollout = runner.sample(num_timesteps=3 * (50 if turn % 20 == 19 else 1 + turn % 4))
        yield [] if turn % 7 == 6 else [rollout]
    runner.stop()


def rollouts_of_tensors() -> Iterator[list[Any]]:
    rng, last = np.random.default_rng(0), None
    for turn in range(40):
        tensors, arrays = make_rollouts(rng, 1 + turn % 5, continues=last is not None and turn % 6 > 0, first=last)
        last = arrays.obs[-1]
        yield [tensors]


def transitions(buffer: Any) -> Iterator[Any]:
    for n_step in (1, 3, (1, 4)):
        yield buffer.sample(16, n_step=n_step, gamma=0.9, beta=0.5)
    yield buffer.sample(16, n_step=2, gamma=0.9, reward_fn=lambda rewards: rewards.clip(-0.5, 2))


def with_priorities(buffer: Any) -> Iterator[Any]:
    for batch in transitions(buffer):
        buffer.update_priorities(batch["indices"], abs(batch["rewards"]))
        yield batch


def steps(buffer: Any) -> Iterator[Any]:
    yield buffer.sample_steps(8)
    yield buffer.get_steps()


def sequences(buffer: Any) -> Iterator[Any]:
    for n_step in (1, (1, 3)):
        form = {"n_step": n_step, "gamma": 0.9, "reward_fn": lambda rewards: rewards.clip(-1, 1)}
        yield buffer.sample_sequences(6, STATE, seq_len=4, burn_in=3, **form)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Iterator[list[Any]]], Callable[[Any], Iterator[Any]], str]] = {
    "uniform": (lambda: ReplayBuffer(80, num_runners=2, seed=5), rollouts_of_streams, transitions, "264cc2411ea430d2"),
    "finals": (
        lambda: ReplayBuffer(80, num_runners=2, seed=5),
        lambda: rollouts_of_streams(same_step=True, nested=True),
        transitions,
        "4e08984243da39a8",
    ),
    "steps": (lambda: ReplayBuffer(80, num_runners=2, seed=5), rollouts_of_streams, steps, "ca921f1b7db2a7eb"),
    "prioritized": (
        lambda: PrioritizedReplayBuffer(80, num_runners=2, seed=5),
        lambda: rollouts_of_streams(same_step=True),
        with_priorities,
        "6693bbf09bf5fb70",
    ),
    "sequences": (lambda: ReplayBuffer(80, num_runners=2, seed=5), rollouts_with_states, sequences, "62eb147e4e78675c"),
    "frames": (lambda: ReplayBuffer(60, frame_stack=3, seed=5), rollouts_of_stacks, transitions, "e834600cb18369ba"),
    "frames_and_finals": (
        lambda: PrioritizedReplayBuffer(60, frame_stack=3, seed=5),
        lambda: rollouts_of_stacks(padding="zero", axis=-1, same_step=True),
        with_priorities,
        "149106dc3fae1ac5",
    ),
    "lanes": (lambda: PrioritizedReplayBuffer(90, seed=5), rollouts_of_lanes, with_priorities, "e22fb95af495f260"),
    "frames_of_lanes": (
        lambda: PrioritizedReplayBuffer(90, frame_stack=3, seed=5),
        lambda: rollouts_of_lanes(3),
        with_priorities,
        "7fbb51425b8fe8d0",
    ),
    "steps_of_lanes": (lambda: ReplayBuffer(90, seed=5), rollouts_of_lanes, steps, "0929388c964102c3"),
    "sequences_of_lanes": (lambda: ReplayBuffer(90, seed=5), rollouts_of_lanes, sequences, "e3fbe9ff75cb6dab"),
    "hindsight_future": (lambda: make_buffer(90, seed=5), rollouts_of_goals, transitions, "77a81c4d06ceb754"),
    "hindsight_final": (
        lambda: make_buffer(90, seed=5, strategy="final"),
        lambda: rollouts_of_goals(autoreset_mode="same_step"),
        transitions,
        "fcf097ffd93b122a",
    ),
    "hindsight_episode": (
        lambda: make_buffer(90, seed=5, strategy="episode"),
        rollouts_of_goals,
        transitions,
        "a38c7b1eafc47128",
    ),
    "device": (
        lambda: DeviceReplayBuffer(60, torch.device("cpu"), seed=5),
        rollouts_of_tensors,
        transitions,
        "dcb00ab82d0b5c32",
    ),
}


def note(digest: Any, value: Any, name: str = "") -> None:
    """Add a batch, in whatever order its columns are."""
    if isinstance(value, (dict, list, tuple)):
        for key, part in sorted(value.items()) if isinstance(value, dict) else enumerate(value):
            note(digest, part, f"{name}/{key}")
    elif isinstance(value, (np.ndarray, torch.Tensor)):
        array = np.ascontiguousarray(value)
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    else:
        digest.update(f"{name} {value!r}".encode())


@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_same_to_the_bit(case: str) -> None:
    make, rollouts, draw, expected = CASES[case]
    buffer, digest = make(), hashlib.sha256()
    for turn, parts in enumerate(rollouts()):
        buffer.add(parts)
        for batch in draw(buffer) if len(buffer) else ():
            note(digest, batch)
        if turn == 20:  # the rest is of a buffer that continues from the state
            state = codec.decode(codec.encode(buffer.get_state()))
            buffer = make()
            buffer.set_state(state)
    assert digest.hexdigest()[:16] == expected
