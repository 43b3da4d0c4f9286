"""A place that cannot be written: an error that says so, and the checkpoint that was there is still whole."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import forging
import pytest
from forging import data, number_of, write

from corral.runs.checkpoint import read_checkpoint

# How large a file can become, so that each of the files is the one that does not fit.
FULL = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from forging import write
sys.dont_write_bytecode = True  # Python would cut it
for limit in (0, 10, 40, 60, 100, 200, 400, 5000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write(Path("checkpoint"), 2, arrays={"obs": np.full(10_000, 2, np.int32)})
    except OSError as error:
        print(json.dumps([error.errno, error.__notes__]))
"""

READ_ONLY = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from forging import number_of, write
from corral.runs.checkpoint import find_checkpoint, read_checkpoint
if os.getuid() == 0:
    os.setuid(65534)  # root may write everywhere
try:
    write(Path("checkpoint"), 2)
except OSError as error:
    print(json.dumps([error.errno, error.__notes__]))
assert number_of(read_checkpoint(find_checkpoint(Path("checkpoint")))) == 1
"""


def run(code: str, directory: Path) -> list[Any]:
    """Run a program, and return the lines that it prints."""
    command = [sys.executable, "-c", code, str(Path(forging.__file__).parent)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write(path)
    before = sorted(path.iterdir())
    told = run(FULL, tmp_path)
    assert len(told) == 8
    for number, notes in told:
        assert number == 27 and notes == [  # EFBIG
            f"The checkpoint {path} was not written; a checkpoint that was there is unchanged."
        ]
    assert sorted(path.iterdir()) == before
    assert number_of(read_checkpoint(path)) == 1
    write(path, 3)  # there is room again
    assert number_of(read_checkpoint(path)) == 3 and data(path).is_dir()


def test_a_directory_that_cannot_be_written_is_read() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to other users
        directory = Path(name)
        directory.chmod(0o755)
        write(directory / "checkpoint")
        entries = [directory / "checkpoint", *(directory / "checkpoint").rglob("*")]
        for entry in entries:
            entry.chmod(0o555 if entry.is_dir() else 0o444)
        [(number, notes)] = run(READ_ONLY, directory)
        for entry in entries:
            entry.chmod(0o755 if entry.is_dir() else 0o644)
    assert number == 13 and len(notes) == 1  # EACCES


def test_a_place_that_does_not_exist_and_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:
        write(tmp_path / "file" / "checkpoint")
    assert f"{tmp_path / 'file' / 'checkpoint'} was not written" in caught.value.__notes__[0]
    with pytest.raises(OSError):
        write("/proc/checkpoint")
