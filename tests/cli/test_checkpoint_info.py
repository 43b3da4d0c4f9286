"""`corral checkpoint info` says what a checkpoint holds, and imports nothing that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral import PPOConfig
from corral.runs.checkpoint import write_checkpoint
from corral.testing import CountingEnv
from corral.tools.cli.main import main

BOX = {"type": "Box", "shape": [4], "low": -1.0, "high": 1.0, "dtype": "float32"}
POLICY = {
    "module_class": "my_nets:MyModule",
    "observation_space": {"type": "Dict", "spaces": [["a", BOX], ["b", {"type": "Discrete", "n": 3, "start": 0}]]},
    "action_space": {"type": "MultiDiscrete", "nvec": [2, 3], "start": [0, 0]},
}


def write(path: Path | str, **metadata: Any) -> Path | str:
    return write_checkpoint(
        path,
        state={"large": np.zeros(250_000, np.float32)},
        weights={"default_policy": {"w": np.zeros(3, np.float32)}},
        config={"algo": "train.py:MyConfig", "environment": {"env": "my_envs:make_env"}},
        policies={"default_policy": POLICY},
        metadata={
            "corral_version": "1.2",
            "algo": "train.py:MyConfig",
            "algorithm_class": "train.py:MyPPO",
            "training_iteration": 120,
            "num_env_steps_sampled_lifetime": 491_520,
            "unnamed": {"callbacks.callbacks_class.0": "<Noting>"},
            **metadata,
        },
    )


def test_it_prints_what_is_in_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run" / "checkpoints" / "iteration-000120")
    assert main(["checkpoint", "info", str(tmp_path / "run")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        f"checkpoint {path}",
        "algorithm train.py:MyConfig (train.py:MyPPO)",
        "env my_envs:make_env",
        "iteration 120",
        "env steps 491,520",
        "module default_policy my_nets:MyModule",
        "observations Dict(a: Box([4], float32), b: Discrete(3))",
        "actions MultiDiscrete([2, 3])",
        "size 1.0 MB",
        "state.msgpack 1.0 MB",
        "give again callbacks.callbacks_class.0 <Noting>",
        "give again algo train.py:MyConfig",
        "from_checkpoint(path, callbacks_class=..., algo=...)",
    ):
        assert line in lines
    assert any(line.startswith("saved 20") and line.endswith("by Corral 1.2, format 1") for line in lines)


def test_it_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    write("memory://run/checkpoint")
    assert main(["checkpoint", "info", "memory://run/checkpoint", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["training_iteration"] == 120 and info["env"] == "my_envs:make_env"
    assert info["policies"]["default_policy"] == POLICY
    assert info["supply_again"].keys() == {"callbacks.callbacks_class.0", "algo"}
    assert info["num_bytes"] == sum(info["files"].values()) > 1_000_000


def test_it_shows_a_real_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PPOConfig().environment(CountingEnv).build() as algo:
        algo.save(tmp_path / "checkpoint")
    assert main(["checkpoint", "info", str(tmp_path / "checkpoint")]) == 0
    shown = capsys.readouterr().out
    assert "PPO (corral.algorithms.ppo:PPO)" in shown and "corral.testing:CountingEnv" in shown
    assert "give again" not in shown


def test_it_imports_neither_torch_nor_what_the_checkpoint_names(tmp_path: Path) -> None:
    for name in ("my_envs", "my_nets", "train"):
        (tmp_path / f"{name}.py").write_text("open('harm', 'w')", encoding="utf-8")
    write(tmp_path / "checkpoint")
    code = (
        "import sys; from corral.tools.cli.main import main; assert main(['checkpoint', 'info', 'checkpoint']) == 0;"
        "unwanted = {'torch', 'gymnasium', 'my_envs', 'my_nets', 'train'};"
        "print(*unwanted & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "\n"
    assert not (tmp_path / "harm").exists()


def test_what_a_file_says_does_not_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path / "checkpoint",
        algo="\x1b[2J\x07[bold]PPO[/bold]",
        algorithm_class="x" * 10_000,
        training_iteration="\r",
    )
    assert main(["checkpoint", "info", str(tmp_path / "checkpoint")]) == 0
    shown = capsys.readouterr().out
    assert r"\x1b[2J\x07[bold]PPO[/bold]" in shown
    assert all(char.isprintable() or char == "\n" for char in shown) and len(shown) < 5000


@pytest.mark.parametrize(
    ("metadata", "policies"),
    [({"unnamed": [1]}, {"p": 3}), ({"unnamed": 5}, {"p": {"observation_space": [], "action_space": {"spaces": [7]}}})],
)
def test_metadata_of_other_kinds_is_shown(
    metadata: dict[str, Any], policies: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(
        tmp_path / "checkpoint", state={}, weights={}, config={"environment": 3}, metadata=metadata, policies=policies
    )
    assert main(["checkpoint", "info", str(tmp_path / "checkpoint")]) == 0
    assert "module p" in capsys.readouterr().out


def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "checkpoint")
    next((tmp_path / "checkpoint").glob("data-*/state.msgpack")).write_bytes(b"")
    for path, message in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "checkpoint", "state.msgpack has 0 bytes"),
    ):
        assert main(["checkpoint", "info", str(path)]) == 7
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("corral: ") and message in line
