"""Envs in files of the working directory, in every command and in the processes of runners."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 240.0
MY_ENVS = """
from corral.testing import CountingEnv

def make_env(config):
    return CountingEnv(config)
"""
BROKEN = {
    "needs_more": "import no_such_package\n",
    "raises": "import json\n\nraise RuntimeError('no data')\n",
    "is_a_script": "import sys\n\nsys.exit(4)\n",
    "is_cut": "def make_env(:\n",
}
TINY = [
    *("--set", "training.train_batch_size_per_learner=32", "--set", "training.minibatch_size=16"),
    *("--set", "training.num_epochs=1", "--set", "env_runners.num_envs_per_env_runner=2"),
    *("--stop", "training_iteration=1", "--quiet"),
]
RUNNERS = [f"--set={text}" for text in ("env_runners.num_env_runners=1", "engine.engine_name=process")]


def corral(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command, for which Python adds no directory."""
    code = "import sys; from corral.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.slow
def test_all_commands_find_the_env(tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text(MY_ENVS, encoding="utf-8")
    sub_envs = ["--set", "env_runners.vectorization=async"]
    train = ["train", "--algo", "PPO", "--env", "my_envs:make_env", *TINY, *RUNNERS, *sub_envs, "--run-dir", "run"]
    for command in (
        train,
        ["train", "--resume", "run", "--stop", "training_iteration=2", "--quiet"],
        ["evaluate", "run", "--episodes", "1"],
        ["evaluate", "run", "--episodes", "1", "--env", "my_envs:make_env"],
        ["checkpoint", "info", "run"],
    ):
        done = corral(tmp_path, *command)
        assert (done.returncode, done.stderr) == (0, ""), command


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("my_envs:make_evn", "module 'my_envs' has no env 'make_evn'. Did you mean 'make_env'?"),
        ("my_env:make_env", "No module named 'my_env'; the nearest one in the working directory is 'my_envs'."),
        ("my_envs.make_env", "If it is an import path, write a colon before the name: 'my_envs:make_env'."),
        ("needs_more:make_env", "the module 'needs_more' raised: No module named 'no_such_package'"),
        ("raises:make_env", "the module 'raises' raised RuntimeError: no data ("),
        ("raises:make_env", "raises.py, line 3)."),
        ("is_a_script:make_env", "the module 'is_a_script' raised SystemExit: 4 ("),
        ("is_cut:make_env", "the module 'is_cut' raised SyntaxError: "),
    ],
)
def test_what_cannot_be_imported_is_named(
    env: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from corral.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_envs", raising=False)
    (tmp_path / "my_envs.py").write_text(MY_ENVS, encoding="utf-8")
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    assert main(["train", "--algo", "PPO", "--env", env, *TINY]) == 2
    assert message in (error := capsys.readouterr().err)
    assert error.startswith("corral: environment: ") and "Traceback" not in error
    monkeypatch.delitem(sys.modules, "my_envs", raising=False)
