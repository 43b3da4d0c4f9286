"""Each env of the table, as a user does it: trained, killed, continued, evaluated, played, exported and loaded."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import corral
import warm
from console_script import corral_command
from corral.runs.checkpoint import find_checkpoint, read_checkpoint
from corral.tools.cli.main import main
from env_table import TABLE, USER_FILE, Row

DEADLINE_S = 300.0
ACTS = """
import json, sys, corral

policy = corral.load_policy(sys.argv[1], module_id=sys.argv[2])
policy.observation_space.seed(0)
print(json.dumps([policy(policy.observation_space.sample()).tolist() for _ in range(4)]))
"""

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="sends SIGKILL"),
    # What the packages of the envs warn of.
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}")
        for kind in ("UserWarning", "DeprecationWarning", "RuntimeWarning")
    ),
]


def of_table() -> Iterator[Any]:
    """Yield each row; those that `make test` leaves out are slow."""
    for name, row in TABLE.items():
        missing = [module for module in row.needs if importlib.util.find_spec(module) is None]
        marks = [pytest.mark.skip(reason=f"{missing[0]} is not installed")] if missing else []
        yield pytest.param(row, id=name, marks=marks if row.in_make_test else [*marks, pytest.mark.slow])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with only the user's own file, from which the commands are started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_envs.py").write_text(USER_FILE, encoding="utf-8")
    return tmp_path


def started(row: Row, *command: str) -> Any:
    """Start a command, in a process that has torch already if `make test` has the row."""
    if row.in_make_test:
        return warm.Popen(command)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(row: Row, *command: str, status: int = 0) -> str:
    """Run a command to its end, and return what it printed."""
    process = started(row, *command)
    output = "".join(process.communicate(timeout=DEADLINE_S))
    assert process.returncode == status, output
    return output


def training(row: Row, run_dir: Path, last: int) -> list[str]:
    """Return the command that begins or continues a run, and ends after an iteration."""
    often = ["--set", "checkpointing.checkpoint_every_iterations=1", "--seed", "0"]
    where = ["--resume-or-start", str(run_dir), "--stop", f"training_iteration={last}"]
    return corral_command(*row.train, *often, *where)


def train_and_kill(row: Row, run_dir: Path) -> int:
    """Train until there is a checkpoint, kill the process, and return the iteration of the last checkpoint."""
    process = started(row, *training(row, run_dir, 1_000_000))
    log = run_dir / "run.log"
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while not list(run_dir.glob("checkpoints/iteration-*/metadata.json")):
            output = "" if process.poll() is None else "".join(process.communicate())
            assert process.returncode is None and time.monotonic() < deadline_s, output or log.read_text("utf-8")
            assert not log.exists() or "cannot be written" not in log.read_text("utf-8"), log.read_text("utf-8")
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found: int = read_checkpoint(find_checkpoint(run_dir)).metadata["training_iteration"]
    return found


def train_on(row: Row, run_dir: Path, kept: int) -> None:
    """Give the same command again, and see that no iteration is missing or there twice, and how episodes continued."""
    last = kept + 2
    run(row, *training(row, run_dir, last))
    rows = [json.loads(line) for line in (run_dir / "result.jsonl").read_text("utf-8").splitlines()]
    assert [found["training_iteration"] for found in rows] == list(range(1, last + 1))
    assert read_checkpoint(find_checkpoint(run_dir)).metadata["training_iteration"] == last
    steps = [found["num_env_steps_sampled_lifetime"] for found in rows]
    assert steps == sorted(set(steps))
    restored = rows[-1]["restored"]
    assert restored["training_iteration"] == kept
    if row.restarts is None and restored["num_envs_restarted"]:
        assert "led to another observation when they were played again" in restored["restarted"]
    else:
        assert bool(restored["num_envs_restarted"]) == bool(row.restarts), restored["restarted"]


def check_files(row: Row, run_dir: Path, command: Callable[..., str]) -> None:
    """Evaluate, play into a video and export; `command` runs `corral` with arguments."""
    printed = command("evaluate", str(run_dir), "--episodes", "2", "--json")
    report = first_of_json(printed, "{")
    assert report["num_episodes"] == 2 and np.isfinite(report["episode_return_mean"])
    if row.pictures:
        assert row.pictures in command("play", str(run_dir), "--record", "videos", status=2)
    if not row.pictures or row.single:
        status = 0 if can_draw() or "mujoco" not in row.needs else 3
        printed = command("play", str(run_dir), "--record", "videos", "--episodes", "1", *row.single, status=status)
        if status:
            assert "set the environment variable MUJOCO_GL=egl" in printed
        else:
            assert num_frames(Path("videos/episode-000.mp4")) > 2
    for module in row.modules:
        which = [] if module == "default_policy" else ["--module", module]
        # ONNX takes seconds to write, and test_export_command.py writes it in `make test`.
        file = Path(f"{module}.safetensors" if row.in_make_test else f"{module}.onnx")
        command(
            "export", str(run_dir), "-o", str(file), *(["--episodes", "1"] if file.suffix == ".onnx" else []), *which
        )
        assert file.stat().st_size > 100


def first_of_json(printed: str, begin: str) -> Any:
    """Return the first object in what a command printed; packages of envs print lines around it."""
    found, _ = json.JSONDecoder().raw_decode(printed[printed.index(begin) :])
    return found


@functools.cache
def can_draw() -> bool:
    """Return whether MuJoCo finds something to draw on, in a process of its own: some machines have no display."""
    code = "import gymnasium; e = gymnasium.make('InvertedPendulum-v5', render_mode='rgb_array'); e.reset(); e.render()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=DEADLINE_S).returncode == 0


def num_frames(video: Path) -> int:
    import av

    with av.open(str(video)) as container:
        return sum(1 for _ in container.decode(video=0))


@pytest.mark.parametrize("row", list(of_table()))
def test_an_env_of_the_table(row: Row, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = folder / "run"
    kept = train_and_kill(row, run_dir)
    train_on(row, run_dir, kept)

    def here(*args: str, status: int = 0) -> str:
        capfd.readouterr()
        assert main([*args]) == status, capfd.readouterr()
        return "".join(capfd.readouterr())

    def as_users_do(*args: str, status: int = 0) -> str:
        return run(row, *corral_command(*args), status=status)

    check_files(row, run_dir, here if row.in_make_test else as_users_do)
    for module in row.modules:
        check_loading(row, run_dir, module)


def check_loading(row: Row, run_dir: Path, module: str) -> None:
    """Load the policy and the algorithm, and compare what they do."""
    policy = corral.load_policy(run_dir, module_id=module)
    space = policy.observation_space
    space.seed(0)
    seen = [space.sample() for _ in range(4)]
    actions = [policy(obs).tolist() for obs in seen]
    with corral.Algorithm.from_checkpoint(find_checkpoint(run_dir, prefer="best")) as algo:
        again = [algo.compute_single_action(obs, explore=False, module_id=module) for obs in seen]
    np.testing.assert_allclose(np.array(actions), np.array(again), atol=1e-6)
    if not row.in_make_test:
        printed = run(row, sys.executable, "-c", ACTS, str(run_dir), module)
        np.testing.assert_allclose(first_of_json(printed, "["), actions, atol=1e-6)
