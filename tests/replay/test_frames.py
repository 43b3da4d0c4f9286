"""Stacks of frames: stored once, and rebuilt as Gymnasium's `FrameStackObservation` gave them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation, TransformObservation
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from streams import Reference, assert_same

from corral.data.episodes.rollout import Rollout
from corral.data.replay import PrioritizedReplayBuffer, ReplayBuffer
from corral.envs.sync_vector import SyncVectorEnv
from corral.errors import ColumnError, ConfigError

SHAPE = (7, 6)


class Camera(gym.Env[NDArray[np.uint8], int]):
    """Random images; episodes of 1 to 6 steps, ended either way."""

    observation_space: Any = spaces.Box(0, 255, SHAPE, np.uint8)
    action_space: Any = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(1, 7))
        return self._image(), {}

    def _image(self) -> NDArray[np.uint8]:
        return self.np_random.integers(0, 256, SHAPE, np.uint8)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        ends = bool(self.np_random.integers(2))
        return self._image(), float(self._left), self._left == 0 and ends, self._left == 0 and not ends, {}


class Stacks:
    """The rollouts of a vector env of `Camera`s with stacked frames."""

    def __init__(self, k: int, *, padding: str = "reset", axis: int = 0, same_step: bool = False, n: int = 2) -> None:
        def make() -> gym.Env[Any, Any]:
            env: gym.Env[Any, Any] = FrameStackObservation(Camera(), k, padding_type=padding)
            if axis:
                space = spaces.Box(0, 255, (*SHAPE, k), np.uint8)
                env = TransformObservation(env, lambda obs: np.moveaxis(obs, 0, -1), space)
            return env

        self.mode = AutoresetMode.SAME_STEP if same_step else AutoresetMode.NEXT_STEP
        self._env = SyncVectorEnv([make] * n, autoreset_mode=self.mode)
        self._n, self._last, self._pending = n, None, np.zeros(n, np.bool_)
        self._seed = 1

    def next(self, num_rows: int, *, reset: bool = False) -> Rollout:
        goes_on = self._last is not None and not reset
        if not goes_on:
            self._last, _ = self._env.reset(seed=self._seed)
            self._pending, self._seed = np.zeros(self._n, np.bool_), self._seed + 100
        obs, rows, valid, final = [self._last], [], [], {}
        for t in range(num_rows):
            row, rewards, terminated, truncated, infos = self._env.step(np.zeros(self._n, int))
            valid.append(~self._pending)
            done = terminated | truncated
            if self.mode == AutoresetMode.SAME_STEP:
                final |= {(t, int(i)): infos[i]["final_obs"] for i in np.flatnonzero(done)}
            else:
                self._pending = done
            obs.append(row)
            rows.append((rewards, terminated, truncated))
        self._last = obs[-1]
        rewards, terminated, truncated = (np.stack(column) for column in zip(*rows, strict=True))
        shape = rewards.shape
        columns = {
            "obs": np.stack(obs),
            "actions": np.arange(rewards.size).reshape(shape),
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "valid": np.stack(valid),
            "dist_inputs": np.zeros((*shape, 2), np.float32),
            "row_times_s": np.zeros(num_rows),
        }
        rollout = Rollout(columns, num_rows=num_rows)
        for at, leaf in final.items():
            rollout.add_final_obs(*at, leaf)
        rollout.continues = goes_on
        return rollout


@given(
    k=st.integers(2, 5),
    padding=st.sampled_from(["reset", "zero"]),
    axis=st.sampled_from([0, -1]),
    same_step=st.booleans(),
    kind=st.sampled_from([ReplayBuffer, PrioritizedReplayBuffer]),
    capacity=st.integers(1, 40),
    pieces=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=8),
    n_step=st.integers(1, 3),
)
@settings(max_examples=30, deadline=None)
def test_rebuilds_what_the_env_gave(
    k: int,
    padding: str,
    axis: int,
    same_step: bool,
    kind: type[ReplayBuffer],
    capacity: int,
    pieces: list[tuple[int, int]],
    n_step: int,
) -> None:
    stacks = Stacks(k, padding=padding, axis=axis, same_step=same_step)
    buffer, reference = kind(capacity, frame_stack=k, seed=0), Reference(capacity, frame_stack=k)
    for num_rows, reset in pieces:
        rollout = stacks.next(num_rows, reset=reset == 0)
        buffer.add(rollout)
        reference.add(rollout)
        assert_same(buffer, reference, n_step)


def test_a_step_takes_the_memory_of_one_frame() -> None:
    stacks = Stacks(4)
    buffers = [ReplayBuffer(10_000, frame_stack=k, seed=0) for k in (1, 4)]
    rollout = stacks.next(20)
    for buffer in buffers:
        buffer.add(rollout)
    whole, newest = (buffer.nbytes / 10_000 for buffer in buffers)
    frame, others = np.prod(SHAPE), 8 + 4 + 3  # action, reward and flags
    assert whole == pytest.approx(4 * frame + others, rel=0.01)
    assert newest == pytest.approx(frame + others + 1, rel=0.01)  # and an age


def test_draws_have_the_axes_of_the_env() -> None:
    for axis, shape in ((0, (3, 5, *SHAPE)), (-1, (3, *SHAPE, 5))):
        buffer = ReplayBuffer(100, frame_stack=5, seed=0)
        buffer.add(Stacks(5, axis=axis).next(10))
        batch = buffer.sample(3)
        assert batch["obs"].shape == batch["next_obs"].shape == shape
        assert batch["obs"].dtype == np.uint8 and batch["obs"].flags.c_contiguous


def test_a_rollout_left_out_is_not_bridged() -> None:
    stacks, reference = Stacks(3), Reference(100, frame_stack=3)
    first, _, third = (stacks.next(9) for _ in range(3))
    buffer = ReplayBuffer(100, frame_stack=3, seed=0)
    buffer.add([first, third])
    reference.add(first)
    third.continues = False
    reference.add(third)
    assert_same(buffer, reference, 2)


def test_observations_that_are_no_stacks_are_refused() -> None:
    rollout = Stacks(3).next(9)
    with pytest.raises(ConfigError, match=r"frame_stack=4, but .* 'obs', of shape \[3, 7, 6\], are not of length 4"):
        ReplayBuffer(100, frame_stack=4).add(rollout)
    buffer = ReplayBuffer(100, frame_stack=6)
    with pytest.raises(ColumnError, match=r"not stacks of the last 6 frames: the observation of row 1 and sub-env 0"):
        buffer.add(rollout)  # the last axis has length 6 by chance
    assert len(buffer) == buffer.nbytes == 0
    noise = Stacks(3).next(9)
    noise.obs[4, 1, 0] += 1
    buffer = ReplayBuffer(100, frame_stack=3, seed=0)
    with pytest.raises(ColumnError, match="row 4 and sub-env 1"):
        buffer.add(noise)


def test_another_padding_is_refused() -> None:
    buffer = ReplayBuffer(100, frame_stack=3, seed=0)
    buffer.add(Stacks(3, padding="reset").next(30))
    num_transitions = len(buffer)
    with pytest.raises(ColumnError, match="always pads with the first frame or always with zeros"):
        buffer.add(Stacks(3, padding="zero").next(30))
    assert len(buffer) == num_transitions


def test_final_observations_that_do_not_continue_are_refused() -> None:
    rollout = Stacks(3, same_step=True).next(30)
    at = next(iter(rollout.final_obs))
    rollout.final_obs[at] = rollout.final_obs[at] + np.uint8(1)
    with pytest.raises(ColumnError, match="a final observation"):
        ReplayBuffer(100, frame_stack=3).add(rollout)


def test_dicts_of_stacks() -> None:
    rollout = Stacks(3).next(20)
    plain = Rollout(dict(rollout.columns), num_rows=20)
    plain.columns["obs"] = {"left": rollout.obs, "right": rollout.obs[..., :2] // 2}
    buffer, reference = ReplayBuffer(100, frame_stack=3, seed=0), Reference(100, frame_stack=3)
    buffer.add(plain)
    reference.add(plain)
    assert_same(buffer, reference, 2)


@pytest.mark.parametrize("same_step", [False, True])
def test_a_late_priority_does_not_bring_back_what_lost_its_older_frames(same_step: bool) -> None:
    stacks = Stacks(4, same_step=same_step)
    buffer = PrioritizedReplayBuffer(20, frame_stack=4, alpha=1.0, seed=0)
    buffer.add(stacks.next(10))
    seen: set[int] = set()
    for _ in range(20):
        seen |= set(buffer.sample(300)["indices"].tolist())
        buffer.add(stacks.next(1))
        held = set(buffer.sample(300)["indices"].tolist())
        late = np.array(sorted(seen - held), np.int64)  # errors of a batch that was drawn before
        buffer.update_priorities(late, np.full(len(late), 1e6))
        assert set(buffer.sample(300)["indices"].tolist()) == held
