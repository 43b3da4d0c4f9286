"""Replay buffers: they store rollouts and draw batches of transitions.

A row is one time step of the columns, as in `corral.data.episodes`: an index of axis 0. A lane is an index of axis 1.
"""

from corral.data.replay.buffer import EmptyReplayBufferError, ReplayBuffer
from corral.data.replay.config import ReplayConfig, make_replay_buffer
from corral.data.replay.prioritized import PrioritizedReplayBuffer

__all__ = ["EmptyReplayBufferError", "PrioritizedReplayBuffer", "ReplayBuffer", "ReplayConfig", "make_replay_buffer"]
