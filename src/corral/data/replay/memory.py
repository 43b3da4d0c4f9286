"""Comparison of the size of replay buffers with the memory of the machine, before anything is sampled."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from corral.core.spaces import space_tree
from corral.core.tree import leaves
from corral.errors import ConfigError

log = logging.getLogger("corral")

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files in which a container has its limit of memory, in bytes, with version 2 and 1 of control groups."""


def bytes_per_step(obs_space: spaces.Space[Any], action_space: spaces.Space[Any], frame_stack: int) -> int:
    """Return the bytes of memory that a replay buffer takes per env step, without columns that user code adds.

    Args:
        obs_space: Space of the observations that are stored.
        action_space: Space of the actions.
        frame_stack: Number of frames in an observation, of which one is stored.
    """
    reward_and_flags = 4 + 3
    return _num_bytes(obs_space) // frame_stack + _num_bytes(action_space) + reward_and_flags


def _num_bytes(space: spaces.Space[Any]) -> int:
    parts = leaves(space_tree(space))
    return sum(int(np.prod(part.shape)) * np.dtype(part.dtype).itemsize for part in parts)


def check_memory(buffers: Mapping[str, tuple[int, int]]) -> None:
    """Compare the replay buffers that are in memory with the memory of the machine, or of its container.

    Warns if they take more than is free now.

    Args:
        buffers: Capacity in env steps and bytes per step, by module id.

    Raises:
        ConfigError: The machine has less memory than they take when they are full.
    """
    num_bytes = sum(capacity * step for capacity, step in buffers.values())
    total, free = _memory_bytes()
    if num_bytes <= free:
        return
    capacity = max(capacity for capacity, _ in buffers.values())
    which = "the replay buffer takes" if len(buffers) == 1 else f"the replay buffers of {len(buffers)} modules take"
    text = (
        f"replay_buffer_config: with capacity={capacity:,}, {which} {_gib(num_bytes)} when full, and "
        f"%s: lower capacity; set directory, on a disk with as much space; or if observations are stacks of frames, "
        "set frame_stack or use transforms=[FrameStack(...)], with which each frame is stored once."
    )
    if num_bytes > total:
        raise ConfigError(text % f"this machine has {_gib(total)} of memory")
    log.warning(text % f"{_gib(free)} of memory are free")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def _memory_bytes() -> tuple[int, int]:
    """Return the memory of this machine, and what is free of it, in bytes; a container has less than its machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no file; or "max", which is no limit
            total = min(total, int(Path(path).read_text(encoding="ascii")))
    free = total
    with contextlib.suppress(OSError):  # only on Linux
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                free = min(total, int(value.split()[0]) * 1024)
    return total, free
