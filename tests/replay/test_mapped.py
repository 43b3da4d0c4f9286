"""Columns in mapped files: the same draws, and nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import Reference, Stream, assert_same

import warm
from corral.data.replay import PrioritizedReplayBuffer, ReplayBuffer
from corral.errors import ConfigError


def mapped_bytes(directory: Path) -> int:
    """Return how much of this process's memory is files of a directory, deleted or not."""
    total = 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if str(directory) in line:
            start, _, stop = line.split()[0].partition("-")
            total += int(stop, 16) - int(start, 16)
    return total


@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
def test_a_mapped_buffer_is_like_one_in_memory(tmp_path: Path, kind: type[ReplayBuffer]) -> None:
    stream, reference = Stream(nested=True, same_step=True), Reference(40)
    mapped, in_memory = kind(40, directory=tmp_path, seed=3), kind(40, seed=3)
    for num_rows in (3, 9, 9, 9, 30):
        rollout = stream.next(num_rows, bonus=np.ones((num_rows, 2)))
        reference.add(rollout)
        for buffer in (mapped, in_memory):
            buffer.add(rollout)
        assert_same(mapped, reference, 2)
        assert_same(in_memory, reference, 2)
        np.testing.assert_array_equal(mapped.sample(9)["indices"], in_memory.sample(9)["indices"])
    assert mapped.nbytes == in_memory.nbytes


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_columns_lie_in_files_without_names(tmp_path: Path) -> None:
    buffer = ReplayBuffer(100_000, directory=tmp_path, seed=0)
    assert mapped_bytes(tmp_path) == 0
    buffer.add(Stream().next(5))
    assert mapped_bytes(tmp_path) >= buffer.nbytes > 100_000 * (3 * 4 + 8 + 4 + 3)
    assert list(tmp_path.iterdir()) == []
    buffer.close()
    assert mapped_bytes(tmp_path) == 0


def test_nothing_is_left_behind_by_a_process_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from streams import Stream
from corral.data.replay import ReplayBuffer
buffer = ReplayBuffer(1000, directory={str(tmp_path)!r})
buffer.add(Stream().next(5))
assert len(buffer)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = warm.run([sys.executable, "-c", code])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_unlinked_go_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any) -> None:
        raise PermissionError(f"{path} is in use")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        buffer = ReplayBuffer(100, directory=tmp_path, seed=0)
        buffer.add(Stream().next(5))
    assert len(list(tmp_path.iterdir())) > 3
    buffer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere' is not a directory: make it first"):
        ReplayBuffer(100, directory=tmp_path / "nowhere")


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    buffer = ReplayBuffer(10**14, directory=tmp_path)
    with pytest.raises(ConfigError, match=r"need [\d,.]+ MiB, but the disk of directory=.* has [\d,.]+ MiB left"):
        buffer.add(Stream().next(5))
    assert list(tmp_path.iterdir()) == [] and buffer.nbytes == 0
