"""Damaged checkpoints, recorded data and experiments: each is read or refused, nothing runs, hangs or crashes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fuzzing
import pytest

import warm

NUM_CASES = 50  # `make campaign` takes 10,000
SEED = 0
DEADLINE_S = 3600.0


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_every_damaged_file_is_read_or_refused(target: str, tmp_path: Path) -> None:
    number = int(os.environ.get("NUM_FUZZED_FILES", NUM_CASES))
    current = tmp_path / "case"
    command = [sys.executable, fuzzing.__file__, target, f"{SEED}", f"{number}", "--current", f"{current}"]
    done = warm.run(command, timeout=DEADLINE_S, cwd=tmp_path)
    assert done.returncode == 0, f"case {current.read_text()}: {done.stderr[-2000:]}"
    *wrong, last = map(json.loads, done.stdout.splitlines())
    assert wrong == []
    assert sum(last["counts"].values()) == number and last["counts"]["refused"] > number / 4
    assert [*tmp_path.iterdir()] == [current]


def test_the_watch_sees_code_that_runs(tmp_path: Path) -> None:
    program = "import fuzzing, os; done = []; fuzzing.watch_for_harm(done); os.system('true'); print(done)"
    paths = [str(Path(fuzzing.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = warm.run([sys.executable, "-c", program], env=environment)
    assert "os.system" in done.stdout
