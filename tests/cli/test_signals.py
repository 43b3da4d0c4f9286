"""Signals that arrive while foreign code runs, which swallows every exception: none is lost, and a second one ends."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import warm
from corral.runs.checkpoint import find_checkpoint, read_checkpoint

DEADLINE_S = 120.0
FOREIGN = """
import sqlite3
import time
from pathlib import Path


def wait(name="sent"):
    '''Return when a file is there, whatever is raised meanwhile; it says that it has begun.'''
    Path("inside").touch()
    while not Path(name).exists():
        try:
            time.sleep(0.01)
        except BaseException:
            pass


def wait_in_callback():
    connection = sqlite3.connect(":memory:")
    connection.create_function("wait", 0, wait)  # SQLite makes an OperationalError of every exception
    connection.execute("select wait()").fetchall()
"""
SLOW_IMPORT = "import foreign\nforeign.wait()\n"
ENV = """
import foreign
from corral.testing import IdentityEnv
{at_import}

class Env(IdentityEnv):
    num_steps = 0

    def step(self, action):
        Env.num_steps += 1
        if Env.num_steps == 300:
            {at_step}
        return super().step(action)
"""


@contextmanager
def training(directory: Path, *, at_import: str = "", at_step: str = "pass", is_new: bool = False) -> Iterator[Any]:
    """Start `corral train`, and yield the process when it is inside the foreign code.

    Args:
        directory: Where it starts.
        at_import: What the module of the env does.
        at_step: What the env does in a step.
        is_new: Whether a new interpreter starts, as with users. Else it forks from a process that has torch: the signal
            comes long after the start.
    """
    for name, text in (
        ("foreign", FOREIGN),
        ("slow_import", SLOW_IMPORT),
        ("an_env", ENV.format(at_import=at_import, at_step=at_step)),
    ):
        (directory / f"{name}.py").write_text(text, encoding="utf-8")
    command = shutil.which("corral", path=str(Path(sys.executable).parent))
    assert command is not None
    arguments = ["--env", "an_env:Env", "--stop", "num_env_steps=1000000000", "--run-dir", "run", "--quiet"]
    arguments += ["--set", "training.train_batch_size_per_learner=100000000"]  # an iteration never ends
    line = [command, "train", "--algo", "PPO", *arguments]
    process: Any
    if is_new:
        process = subprocess.Popen(
            line,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where the tests run under nohup
        )
    else:
        process = warm.Popen(line, cwd=directory)
    try:
        wait_for(process, directory / "inside")
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: Any, file: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, f"{file.name} did not come"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "at_step"),
    [
        pytest.param(signal.SIGTERM, "foreign.wait_in_callback()", id="callback_of_C"),
        pytest.param(signal.SIGINT, "import slow_import", id="import", marks=pytest.mark.slow),
    ],
)
def test_a_signal_inside_an_env_ends_the_iteration_with_a_checkpoint(
    number: signal.Signals, at_step: str, tmp_path: Path
) -> None:
    with training(tmp_path, at_step=at_step) as process:
        process.send_signal(number)
        (tmp_path / "sent").touch()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (128 + number, "")
    assert "Run " in (log := (tmp_path / "run" / "run.log").read_text(encoding="utf-8").splitlines()[-1])
    assert log.endswith(("Run ended by SIGTERM.", "Run interrupted."))
    assert read_checkpoint(find_checkpoint(tmp_path / "run")).metadata["training_iteration"] == 0


def test_a_signal_during_an_import_ends_the_command_before_it_trains(tmp_path: Path) -> None:
    with training(tmp_path, at_import="import slow_import", is_new=True) as process:
        process.send_signal(signal.SIGHUP)
        (tmp_path / "sent").touch()
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (128 + signal.SIGHUP, "", "")
    assert not (tmp_path / "run").exists()


def test_a_second_signal_ends_a_run_whose_env_hangs(tmp_path: Path) -> None:
    """The first one says so, since nothing else shows that it has arrived."""
    with training(tmp_path, at_step="foreign.wait('never')") as process:
        process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + DEADLINE_S
        while not (err := process.printed()[1]).endswith("\n"):
            assert process.poll() is None and time.monotonic() < deadline_s, err
            time.sleep(0.01)
        assert err.startswith("corral: ending as soon as what runs now returns. A second signal")
        process.send_signal(signal.SIGTERM)
        process.communicate(DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM
