"""What failed while a run continued is where people look: in the last line, the panel, and the lines of `--seeds`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from corral.core.metrics.result import describe_faults
from corral.errors import CheckpointError
from corral.runs.loggers.progress import Progress
from corral.testing import FaultyEnv
from corral.tools.cli.main import main
from file_limits import largest_file
from small import small


def test_faults_are_described() -> None:
    none = {"num_remote_worker_restarts": 0, "num_sub_environment_restarts": 0}
    assert describe_faults({"fault_tolerance": none | {"num_callback_errors": 0}}) == ""
    found: dict[str, Any] = {"fault_tolerance": none | {"num_sub_environment_restarts": 1}, "evaluation": none}
    assert describe_faults(found) == "1 sub-env restart"
    waiting = {"fault_tolerance": none | {"num_env_runner_failures": 3, "num_remote_worker_restarts": 2}}
    assert describe_faults(waiting) == "1 runner failure, 2 runner restarts"
    embedded = {"fault_tolerance": none, "evaluation": none | {"num_env_runner_failures": 2}}
    assert describe_faults(embedded) == "2 runner failures"
    found["evaluation"] = none | {"num_remote_worker_restarts": 2, "skipped": True, "truncated": False}
    found["fault_tolerance"]["num_callback_errors"] = 1234
    assert describe_faults(found) == (
        "2 runner restarts, 1 sub-env restart, 1,234 callback errors, the latest evaluation was skipped"
    )
    assert describe_faults({"fault_tolerance": none | {"num_callback_errors": float("nan")}}) == ""


def test_callback_errors_are_in_the_last_line_and_the_panel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(episode: Any) -> None:
        raise ValueError("a callback broke")

    with small().callbacks(on_episode_end=fail, on_error="log").build() as algo:
        result = algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run")
        progress = Progress(algo.config, {"training_iteration": 1}, "panel")
    count = result["fault_tolerance"]["num_callback_errors"]
    assert count > 1 and f", {count} callback errors:" in capsys.readouterr().out.splitlines()[-1]
    progress.update(result)
    with progress._console.capture() as shown:
        progress._console.print(progress._panel())
    assert f"{count} callback errors; run.log says why" in shown.get()


def test_the_last_state_without_a_checkpoint_ends_the_run_with_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small().checkpointing(checkpoint_every_iterations=1)
    with config.build() as algo:
        save = algo.save

        def full_at_the_end(path: Any) -> Any:
            if algo.training_iteration < 3:
                return save(path)
            with largest_file(100):
                return save(path)

        monkeypatch.setattr("corral.algorithms.run_checkpoints.WRITE_PAUSE", 0)
        monkeypatch.setattr(algo, "save", full_at_the_end)
        with pytest.raises(CheckpointError) as caught:
            algo.fit(stop={"training_iteration": 4}, run_dir=tmp_path, progress=False)
        assert algo.latest_numbers["training_iteration"] == 4  # what was learned is still there to save
        algo.save = save  # type: ignore[method-assign]
        algo.save(tmp_path / "elsewhere")
    assert str(caught.value) == (
        "No checkpoint holds the last state of the run, of iteration 4: the latest one is of iteration 2 in "
        f"{tmp_path / 'checkpoints'}. [Errno 27] File too large"
    )
    first, second = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "iteration-000003 cannot be written" in first and second == "Run failed."
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"iteration-000001", "iteration-000002", "best"}  # no empty directories of those that failed


@pytest.mark.slow
def test_faults_of_runs_with_seeds_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        **{"environment.env_config": {"fault": "raise_step"}, "env_runners.num_envs_per_env_runner": 2},
        **{"training.train_batch_size_per_learner": 32, "training.minibatch_size": 16},
        "fault_tolerance.restart_failed_sub_environments": True,
    }
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    arguments = ["--algo", "PPO", "--env", f"corral.testing:{FaultyEnv.__name__}", "--stop", "training_iteration=1"]
    assert main(["train", *arguments, *options, "--seeds", "0", "--run-dir", str(tmp_path / "set")]) == 0
    log = tmp_path / "set" / "seed-0" / "run.log"
    num_restarts = log.read_text(encoding="utf-8").count("It was restarted.")
    assert num_restarts > 1
    assert f"corral: seed 0: {num_restarts} sub-env restarts; {log} says why" in capsys.readouterr().err
