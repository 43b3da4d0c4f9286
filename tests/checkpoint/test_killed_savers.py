"""Processes that save are killed at any moment, collide and are read from: a complete checkpoint is always there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import forging
import saving

from corral.runs.checkpoint import find_checkpoint, read_checkpoint

NUM_KILLS = 8  # `make campaign` takes 200
DEADLINE_S = 60.0


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the program, and return when it has imported everything."""
    command = [sys.executable, saving.__file__, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def kill(process: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Kill a process, and return the numbers that it had saved, and what it had complained about."""
    process.kill()
    out, errors = read_rest(process)
    return [int(line) for line in out.split("\n")[:-1]], errors


def read_rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a process that is killed has written since; `communicate` would lose lines that were read ahead."""
    assert process.stdout is not None and process.stderr is not None
    with process:
        return process.stdout.read(), process.stderr.read()


@contextmanager
def savers(*arguments: tuple[object, ...]) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [start("save", *one) for one in arguments]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def data_directories(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.name.startswith("data-")]


def test_whenever_a_saver_is_killed_the_newest_checkpoint_is_whole(tmp_path: Path) -> None:
    num_kills = int(os.environ.get("NUM_KILLS", NUM_KILLS))
    rng = random.Random(num_kills)
    path = tmp_path / "checkpoints" / "last"
    newest, num_told, num_left = 0, 0, 0
    for _ in range(num_kills):
        process = start("save", path, newest + 1, 1, 0.0)
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(rng.randint(0, 2))]
        timer = threading.Timer(rng.uniform(0.0, 0.03), process.kill)  # in the middle of a later save
        timer.start()
        out, errors = read_rest(process)
        assert errors == ""
        told += [int(line) for line in out.splitlines()]
        num_told += len(told)
        if not (path / "metadata.json").exists():
            assert told == [] and newest == 0
            continue
        found = forging.number_of(read_checkpoint(path))
        # The saver was killed after it had replaced the checkpoint and before it could say so, at most.
        assert max([newest, *told]) <= found <= max([newest, *told]) + 1
        newest = found
        assert find_checkpoint(tmp_path) == path
        assert 1 <= len(data_directories(path)) <= 2  # the one that is named, and the one that was being written
        num_left += len(data_directories(path)) - 1
    assert newest >= num_told > 0
    assert num_kills < 50 or num_left > 0  # some were killed in the middle
    forging.write(path, newest + 1)
    assert len(data_directories(path)) == 1 and len(list(path.iterdir())) == 3


def test_two_savers_and_a_reader_of_one_path_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    forging.write(path, 0)
    with savers((path, 1, 2, 0.05), (path, 2, 2, 0.05)) as processes:
        reader = start("read", path, 2.0)
        out, errors = reader.communicate(timeout=DEADLINE_S)
        assert errors == ""
        num_reads, num_seen = map(int, out.split())
        odd, even = map(kill, processes)
    assert num_reads > 10 and num_seen > 2
    assert odd[1] == even[1] == ""  # nothing failed
    assert len(odd[0]) > 2 and len(even[0]) > 2
    forging.number_of(read_checkpoint(path))
    forging.write(path, 0)
    assert len(data_directories(path)) == 1
