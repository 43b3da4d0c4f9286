"""The README's commands, run as they stand."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from pages import README, blocks, commands

from console_script import corral_command

EXAMPLE = (
    "corral train --algo PPO --env CartPole-v1 --stop episode_return_mean=450 --stop num_env_steps=500000 --seed 0 "
    "--set training.minibatch_size=256"
)


@pytest.mark.slow_cases("experiment")
@pytest.mark.parametrize(
    "line", [pytest.param(EXAMPLE, marks=pytest.mark.slow), "corral train --config experiment.yaml"]
)
def test_shell_examples_train_to_450(line: str, tmp_path: Path) -> None:
    assert line in commands(README, "corral")
    experiment = next(block.text for block in blocks(README) if block.language == "yaml")
    (tmp_path / "experiment.yaml").write_text(experiment, encoding="utf-8")
    command = corral_command(*shlex.split(line)[1:])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"The run is stored in runs/{run_dir.name}\n" in done.stdout
    files = {"config.yaml", "progress.csv", "result.jsonl", "run.log", "checkpoints", ".lock"}
    assert {path.name for path in run_dir.iterdir()} == files
    assert "Stopped: episode_return_mean=" in (run_dir / "run.log").read_text(encoding="utf-8")
