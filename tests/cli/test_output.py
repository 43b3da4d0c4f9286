"""Output that cannot be written ends no run: a terminal without Unicode, a closed pipe, closed streams."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from console_script import corral_command
from corral.tools.cli.main import main

DEADLINE_S = 120.0
SCRIPT = """
import sys
import corral.runs.loggers.progress
from corral.tools.cli.main import main
corral.runs.loggers.progress.LINE_INTERVAL_S = 0.0  # a line for each iteration
sys.exit(main(["train", "--algo", "PPO", "--env", "corral.testing:CountingEnv", "--stop", "training_iteration=5",
    "--run-dir", "l\u00e4uft", "--set", "training.train_batch_size_per_learner=32",
    "--set", "training.minibatch_size=16", "--set", "env_runners.num_envs_per_env_runner=2"]))
"""


def finished(tmp_path: Path) -> bool:
    lines = (tmp_path / "l\u00e4uft" / "result.jsonl").read_text(encoding="utf-8").splitlines()
    return len(lines) == 5 and "Run finished." in (tmp_path / "l\u00e4uft" / "run.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("redirection", "shown"),
    [
        pytest.param("", 8, id="ascii", marks=pytest.mark.slow),
        pytest.param("| head -n 1", 1, id="closed_pipe"),
        pytest.param(">&- 2>&-", 0, id="closed_streams", marks=pytest.mark.slow),
        pytest.param("> /dev/full", 0, id="full_disk", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_output_cannot_be_written_ends_well(redirection: str, shown: int, tmp_path: Path) -> None:
    if "/dev/full" in redirection and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    command = f"({shlex.quote(sys.executable)} -c {shlex.quote(SCRIPT)}; echo $? > status) {redirection}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (tmp_path / "status").read_text(encoding="utf-8") == "0\n", done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == shown
    assert finished(tmp_path)
    if not redirection:
        assert "The run is stored in l?uft\n" in done.stdout


@pytest.mark.slow_cases("completion", "config", "list envs")
@pytest.mark.parametrize("command", ["list envs --all", "config PPO", "config PPO --json", "completion bash", "events"])
def test_a_command_whose_reader_closes_the_pipe_ends_well(command: str, tmp_path: Path) -> None:
    # The pipe is closed before the command starts, so that nothing of its output can be written.
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        corral_command(*command.split()),
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
    )
    os.close(writing)
    said = [line for line in done.stderr.splitlines() if "gymnasium-robotics" not in line]  # it prints when imported
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize("command", ["config PPO", "config PPO --json", "events"])
def test_a_command_in_this_process_whose_reader_closes_the_pipe_ends_well(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as closed, contextlib.redirect_stdout(closed):
        assert main(command.split()) == 0


@pytest.mark.slow
def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    shown = b""
    environment: dict[str, Any] = {**os.environ, "PYTHONIOENCODING": "ascii", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, stdout=theirs, stderr=subprocess.PIPE
    ) as run:
        os.close(theirs)
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
        assert run.stderr is not None
        err = run.stderr.read()
    os.close(ours)
    assert (run.returncode, err) == (0, b"")
    assert b"PPO on corral.testing:CountingEnv" in shown and b"Done after 5 iterations" in shown
    assert finished(tmp_path)
