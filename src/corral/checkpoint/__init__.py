"""Checkpoints: directories of JSON, YAML, msgpack and safetensors files, which are read without running code."""

from __future__ import annotations

from corral.checkpoint.algorithm import algorithm_state, load_algorithm, save_algorithm
from corral.checkpoint.directory import FORMAT_VERSION, Checkpoint, read_checkpoint, write_checkpoint
from corral.checkpoint.settings import settings_of, unnamed

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "algorithm_state",
    "load_algorithm",
    "read_checkpoint",
    "save_algorithm",
    "settings_of",
    "unnamed",
    "write_checkpoint",
]
