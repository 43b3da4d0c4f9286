"""Envs in files of the working directory, in every command and in the processes of runners."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import corral
from console_script import corral_command
from corral.engines.own_commands import own_command

DEADLINE_S = 240.0
MY_ENVS = """
from corral.testing import CountingEnv

def make_env(config):
    return CountingEnv(config)
"""
BROKEN = {
    "corral": "Env = dict\n",
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
HARM = "raise RuntimeError('this file must not be imported')\n"
PYTHON = [sys.executable, "-m", "corral"]  # which is the same command


def run_corral(cwd: Path, *arguments: str, start: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*start, *arguments] if start else corral_command(*arguments)
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S)


# `python -m corral` runs a file corral.py, as Python does with every module.
@pytest.mark.parametrize(
    ("harmful", "start"),
    [(("corral", "random", "queue"), ()), (("argparse", "random", "queue"), PYTHON)],
    ids=["corral", "python"],
)
def test_files_may_have_the_names_of_commands_and_of_other_modules(
    harmful: tuple[str, ...], start: Sequence[str], tmp_path: Path
) -> None:
    for name in harmful:
        (tmp_path / f"{name}.py").write_text(HARM, encoding="utf-8")
    (tmp_path / "play.py").write_text("import sys\n\nraise RuntimeError(sys.path)\n", encoding="utf-8")
    (tmp_path / "train.py").write_text("import play\n", encoding="utf-8")
    done = run_corral(tmp_path, "train", "--algo", "PPO", "--env", "train:make_env", *TINY, start=start)
    assert done.returncode == 2 and "the module 'train' raised RuntimeError: [" in done.stderr
    places = ast.literal_eval(done.stderr[done.stderr.index("[") : done.stderr.index("]") + 1])
    library = Path(os.__file__).parent
    assert places[:3] == [str(library), str(library / "lib-dynload"), str(tmp_path)]
    assert str(Path(sys.executable).parent) not in places
    assert f"Rename {' and '.join(f'{name}.py' for name in sorted(harmful))}: " in done.stderr


def test_a_file_that_hides_a_module_of_a_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("", encoding="utf-8")
    done = run_corral(tmp_path, "list", "algorithms")
    assert done.returncode == 1
    assert done.stderr.endswith("'rich' is not a package\ncorral: Rename rich.py: another module has the same name.\n")


def test_processes_of_corral_do_not_import_files_with_its_name(tmp_path: Path) -> None:
    for name in ("corral", "typing", "os"):  # corral.errors imports typing
        (tmp_path / f"{name}.py").write_text(HARM, encoding="utf-8")
    command = own_command("corral.errors", "nearest('a', ['b'])")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "Known names: b.\n"  # Python prints a text that is given as the exit status
    source = Path(corral.__file__).parent
    starting = {file.name for file in source.rglob("*.py") if "[sys.executable" in file.read_text(encoding="utf-8")}
    assert starting == {"own_commands.py", "process_group_guard.py"}  # the guard is a file, and sees no folder


@pytest.mark.slow
def test_all_commands_find_the_env(tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text(MY_ENVS, encoding="utf-8")
    for name in ("corral", "random", "queue"):
        (tmp_path / f"{name}.py").write_text(HARM, encoding="utf-8")
    sub_envs = ["--set", "env_runners.vectorization=async"]
    train = ["train", "--algo", "PPO", "--env", "my_envs:make_env", *TINY, *RUNNERS, *sub_envs, "--run-dir", "run"]
    for command in (
        train,
        [*train[:-1], "runs", "--seeds", "0"],
        ["train", "--resume", "run", "--stop", "training_iteration=2", "--quiet"],
        ["evaluate", "run", "--episodes", "1"],
        ["evaluate", "run", "--episodes", "1", "--env", "my_envs:make_env"],
        ["checkpoint", "info", "run"],
    ):
        done = run_corral(tmp_path, *command)
        assert (done.returncode, done.stderr) == (0, ""), command


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("corral:Env", "module 'corral' has no env 'Env'. "),
        ("corral:Env.inner", "module 'corral' has no env 'Env.inner'. "),
        ("corral:Env", "Rename corral.py"),  # and my_envs.py, where another test has imported one
        ("corral.testing:CountinEnv", "has no env 'CountinEnv'. Did you mean 'CountingEnv'?"),
        ("corral:ExternlEnv", "has no env 'ExternlEnv'. Did you mean 'ExternalEnv'?"),
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
    from corral.tools.cli.main import main

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
