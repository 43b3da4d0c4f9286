"""A run whose files cannot be written: it is refused before anything is built, or continues with a warning."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from corral.errors import RunDirectoryError
from corral.runs.loggers import CSVLogger, JSONLinesLogger
from corral.testing import CountingEnv
from corral.tools.cli.main import main
from file_limits import largest_file
from small import small

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, on which every write fails")
DEADLINE_S = 120.0


class NeverMade(CountingEnv):
    def __init__(self, config: Any = None) -> None:
        raise AssertionError("the env was made")


@pytest.mark.parametrize("where", ["/proc/nowhere/run", "a_file/run"])
def test_an_unwritable_run_directory_is_found_before_anything_is_made(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    env = f"{__name__}:NeverMade"
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    arguments = ["train", "--algo", "PPO", "--env", env, "--stop", "training_iteration=1", "--run-dir", where]
    assert main(arguments) == 6
    streams = capsys.readouterr()
    [line] = streams.err.splitlines()
    assert line.startswith(f"corral: the run directory {where} cannot be written: ")
    assert streams.out == ""
    with small().build() as algo, pytest.raises(RunDirectoryError, match="cannot be written"):
        algo.fit(stop={"training_iteration": 1}, run_dir=where)
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


@needs_full
@pytest.mark.parametrize("name", ["result.jsonl", "run.log"])
def test_a_file_on_a_full_disk_costs_its_own_content(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).symlink_to(FULL)
    with small().build() as algo:
        result = algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path, loggers=[CSVLogger(), JSONLinesLogger()])
    assert result["training_iteration"] == 3
    others = {"progress.csv": 4, "result.jsonl": 3}
    for other in others.keys() - {name}:
        assert len((tmp_path / other).read_text(encoding="utf-8").splitlines()) == others[other]
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    if name == "run.log":
        assert warnings == []
    else:
        [warning] = warnings
        assert "cannot write its results" in warning and "No space left" in warning
    assert "Traceback" not in capfd.readouterr().err


def test_a_csv_file_that_has_no_room_for_more_columns_keeps_its_rows(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.open(tmp_path, {})
    logger.log_result({"a": 1})
    (tmp_path / "progress.csv.new").symlink_to(FULL if FULL.exists() else tmp_path / "no" / "where")
    with pytest.raises(OSError):
        logger.log_result({"a": 2, "b": 2})
    logger.log_result({"a": 3, "b": 3})  # there is room again: the link is gone
    logger.close()
    assert (tmp_path / "progress.csv").read_text(encoding="utf-8").splitlines() == ["a,b", "1,", "3,3"]


SCRIPT = """
import resource, sys
from corral.tools.cli.main import main
sys.dont_write_bytecode = True  # Python would cut it
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))  # a file cannot become larger
sys.exit(main(["train", "--algo", "PPO", "--env", "corral.testing:CountingEnv", "--stop", "training_iteration=12",
    "--run-dir", "run", "--tensorboard", "--set", "training.train_batch_size_per_learner=32",
    "--set", "training.minibatch_size=16", "--set", "env_runners.num_envs_per_env_runner=2"]))
"""


def test_a_run_without_room_trains_to_its_end_and_fails_since_it_kept_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    done = warm.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, timeout=DEADLINE_S)
    assert done.returncode == 7, done.stderr
    assert "Logging error" not in done.stderr  # what logging prints for each line that it cannot write
    assert "\nFailed after 12 iterations" in f"\n{done.stdout}" and "corral play" not in done.stdout
    assert "reached 12" not in done.stdout  # a criterion is no reason for a failure
    assert "No checkpoint holds the last state of the run, of iteration 12: there is none in " in done.stderr
    assert (tmp_path / "run" / "result.jsonl").stat().st_size > 8192
    lines = (tmp_path / "run" / "result.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    assert [json.loads(line)["training_iteration"] for line in lines] == [*range(1, len(lines) + 1)]  # no half line
    assert lines[-1].endswith("\n")
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"none-yet"}
    assert done.stderr.count("cannot be written: [Errno 27] File too large") == 1  # the checkpoints
    for name in ("JSONLinesLogger", "TensorBoardLogger"):
        assert done.stderr.count(f"{name} cannot write its results in run: File too large") == 1


def test_a_checkpoint_that_cannot_be_written_is_an_error_that_keeps_the_old_one(tmp_path: Path) -> None:
    with small().build() as algo:
        algo.save(tmp_path / "kept")
        with largest_file(100), pytest.raises(OSError, match="File too large") as caught:
            algo.save(tmp_path / "kept")
        assert f"{tmp_path / 'kept'} was not written" in caught.value.__notes__[0]
        algo.restore_from_path(tmp_path / "kept")
        assert algo.train()["training_iteration"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_run_for_whose_config_there_was_no_room_can_begin_there_later(tmp_path: Path) -> None:
    with small().build() as algo:
        with largest_file(100), pytest.raises(RunDirectoryError, match="File too large"):
            algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path, progress=False)
        assert not (tmp_path / "config.yaml").exists()
        assert algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path, progress=False)["training_iteration"] == 1
