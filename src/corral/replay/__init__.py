"""Replay buffers: rollouts in, batches of transitions out."""

from corral.replay.buffer import EmptyReplayBufferError, ReplayBuffer
from corral.replay.config import ReplayConfig, make_replay_buffer
from corral.replay.prioritized import PrioritizedReplayBuffer

__all__ = ["EmptyReplayBufferError", "PrioritizedReplayBuffer", "ReplayBuffer", "ReplayConfig", "make_replay_buffer"]
