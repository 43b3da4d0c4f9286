"""Each kind of failure of the command line has its own exit status, which docs/cli.md lists."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from corral import errors
from corral.tools.cli.exit_status import EXIT_STATUSES, status_of
from corral.tools.cli.main import main

ROOT = Path(__file__).parents[2]
TINY = {
    "training.train_batch_size_per_learner": 32,
    "training.minibatch_size": 16,
    "training.num_epochs": 1,
    "env_runners.num_envs_per_env_runner": 2,
    "rl_module.model_config.fcnet_hiddens": [4],
}
BROKEN = """
import os
from corral.callbacks import Callback
from corral.testing import CountingEnv

def nan_loss(module, batch, coefficients, default_loss):
    loss, reported, tensors = default_loss(module, batch, coefficients)
    return loss * float("nan"), reported

class Broken(Callback):
    def on_train_result(self, *, result, **kwargs):
        raise ZeroDivisionError("the callback divided by zero")

class Ends(CountingEnv):
    def step(self, action):
        if os.path.exists("made"):
            os._exit(3)
        return super().step(action)

def make_env(config):
    return Ends(config)
"""


def train(env: str, *more: str, **settings: object) -> int:
    given = [f"--set={name}={value}" for name, value in TINY.items()] + [f"--set={text}" for text in more]
    return main(["train", "--algo", "PPO", "--env", env, "--stop", "training_iteration=2", "--quiet", *given])


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"broken_{abs(hash(tmp_path))}"  # another module for each test, since Python keeps them
    (tmp_path / f"{name}.py").write_text(BROKEN, encoding="utf-8")
    return name


def test_the_page_lists_the_statuses() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \|$", text, flags=re.MULTILINE)
    assert {int(status): meaning for status, meaning in rows} == EXIT_STATUSES


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.CorralError("x"), 1),
        (errors.CallbackError("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.StopCriterionError("x"), 2),
        (errors.EnvTimeoutError("x"), 3),
        (errors.LossError("x"), 4),
        (errors.WorkerDiedError("x"), 5),
        (FileExistsError("x"), 6),
        (errors.RunDirectoryError("x"), 6),
        (errors.CheckpointError("x"), 7),
        (errors.MissingPackageError("x"), 8),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError(), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_has_the_status_of_its_nearest_class(error: BaseException, status: int) -> None:
    assert status_of(error) == status


def test_a_loss_that_is_nan(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("corral.testing:CountingEnv", f"training.loss={broken}:nan_loss") == 4
    assert "corral: " in capsys.readouterr().err


def test_a_callback_that_raises(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("corral.testing:CountingEnv", f"callbacks.callbacks_class=['{broken}:Broken']") == 1
    assert "the callback divided by zero" in capsys.readouterr().err


@pytest.mark.slow
def test_a_runner_that_ends_and_is_not_replaced(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    runners = ["env_runners.num_env_runners=1", "engine.engine_name=process"]
    Path("made").touch()
    once = ["fault_tolerance.restart_failed_env_runners=false", "environment.disable_env_checking=true"]
    assert train(f"{broken}:make_env", *runners, *once) == 5
    assert "ended by itself with exit code 3" in capsys.readouterr().err


def test_a_directory_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["evaluate"], ["play"], ["checkpoint", "info"]):
        assert main([*command, str(tmp_path)]) == 7
        assert "holds no complete checkpoint" in capsys.readouterr().err


def test_an_env_of_a_package_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_spec("highway_env") is None
    assert train("highway-fast-v0") == 8
    assert "pip install 'highway-env'" in capsys.readouterr().err
