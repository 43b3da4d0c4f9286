"""Checkpoints: directories of JSON, msgpack, safetensors and npy files, which are read without running code.

The functions that build algorithms are in `corral.algorithms.checkpoint`: what is here needs neither torch nor an env.
"""

from __future__ import annotations

from corral.runs.checkpoint.directory import FORMAT_VERSION, Checkpoint, read_checkpoint, write_checkpoint
from corral.runs.checkpoint.finding import find_checkpoint

__all__ = ["FORMAT_VERSION", "Checkpoint", "find_checkpoint", "read_checkpoint", "write_checkpoint"]
