"""Loggers that a config names: in `fit`, in a plain loop of `train()`, and on the command line."""

from __future__ import annotations

import csv
import json
import pickle
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral import PPOConfig
from corral.algorithms.registry import config_from_dict
from corral.errors import ConfigError
from corral.runs.loggers import CSVLogger, JSONLinesLogger, Logger, run
from corral.runs.loggers.named import add_named, make_loggers
from corral.tools.cli.main import main
from small import small as small_run


class Notes(Logger):
    """Keeps everything that it is given."""

    def __init__(self, title: str = "") -> None:
        self.title, self.calls = title, list[tuple[Any, ...]]()

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        self.calls.append(("open", run_dir, config["training"]["lr"]))

    def log_result(self, result: dict[str, Any]) -> None:
        self.calls.append(("result", result["training_iteration"]))

    def close(self) -> None:
        self.calls.append(("close",))


class Unreachable(Notes):
    """A service that nobody reaches after the first result."""

    is_service = True

    def log_result(self, result: dict[str, Any]) -> None:
        super().log_result(result)
        if result["training_iteration"] > 1:
            raise ConnectionError("nobody answers")

    def close(self) -> None:
        raise ConnectionError("nobody answers")


class NeverReached(Unreachable):
    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        raise RuntimeError("no such host")


class OldForm(Notes):
    def open(self, run_dir: Path) -> None:  # type: ignore[override]
        raise AssertionError("opened")


def small(*loggers: Any) -> PPOConfig:
    return small_run(lr=0.25, loggers=list(loggers) or None)


def rows(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row["training_iteration"] for row in csv.DictReader(file)]


def test_loggers_are_made_from_names_classes_paths_dicts_and_instances(tmp_path: Path) -> None:
    mine = Notes()
    other = {"type": "corral.runs.loggers:CSVLogger", "file_name": "other.csv"}
    given = ["csv", JSONLinesLogger, other, {"type": Notes, "title": "x"}, mine]
    made = make_loggers(given)
    assert [type(logger) for logger in made] == [CSVLogger, JSONLinesLogger, CSVLogger, Notes, Notes]
    assert made[3].title == "x" and made[4] is mine  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("jsn", "unknown logger 'jsn'. Did you mean 'json'?"),
        ("corral.runs.loggers:NoLogger", "'corral.runs.loggers' has no 'NoLogger'"),
        ("corral.errors:ConfigError", "is no logger"),
        (3, "is no logger"),
        ({"file_name": "x.csv"}, "has no 'type'"),
        ({"type": "csv", "file": "x.csv"}, "CSVLogger takes file_name, and was given {'file': 'x.csv'}"),
    ],
)
def test_what_is_no_logger_is_refused_before_anything_is_built(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(given).validate()
    assert message in str(caught.value) and "loggers[0]" in str(caught.value)


@pytest.mark.parametrize(
    "given", [["csv", "csv"], ["csv", {"type": "json", "file_name": "progress.csv"}], ["json", JSONLinesLogger()]]
)
def test_two_loggers_of_one_file_are_refused(given: list[Any], tmp_path: Path) -> None:
    with small().build() as algo, pytest.raises(ConfigError, match="2 loggers write the file"):
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", loggers=given, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "sub/x.csv", "../x.csv"])
def test_the_name_of_a_file_is_no_path(name: str) -> None:
    for kind in (CSVLogger, JSONLinesLogger):
        with pytest.raises(ConfigError, match="must be the name of a file"):
            kind(file_name=name)


def test_loggers_are_a_list(tmp_path: Path) -> None:
    with small().build() as algo, pytest.raises(ConfigError, match=r"fit: loggers='csv' must be a list"):
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", loggers="csv", progress=False)


def test_an_instance_writes_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = small(CSVLogger(), "json")
    with config.build() as first, config.copy(seed=1).build() as second:
        first.train()
        with pytest.raises(ConfigError, match=r"CSVLogger already writes to .*"):
            second.train()
        first.train()
        assert rows(first.run_dir / "progress.csv") == ["1", "2"]
    with config.build() as third:  # after the end of the first one
        third.train()
        assert rows(third.run_dir / "progress.csv") == ["1"]


def test_a_logger_that_is_gone_blocks_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, logger = CSVLogger(), CSVLogger()
    # An algorithm was dropped without stop(), and Python gives the id of its logger to another one.
    monkeypatch.setitem(run._writes_to, id(logger), (weakref.ref(gone), tmp_path / "dropped"))
    del gone
    with small().build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", loggers=[logger], progress=False)
    assert rows(tmp_path / "run" / "progress.csv") == ["1"]


@pytest.mark.parametrize("name", ["result.jsonl", "progress.csv"])
def test_results_without_a_config_are_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine\n", encoding="utf-8")
    with small().build() as algo, pytest.raises(FileExistsError, match="already holds a run or its results"):
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path, progress=False)
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine\n"


def test_a_logger_of_the_old_form_is_told_what_to_write(tmp_path: Path) -> None:
    with small().build() as algo:
        with pytest.raises(ConfigError, match=r"write `def open\(self, run_dir, config\)`"):
            algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", loggers=[OldForm()], progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_plain_loop_writes_one_run_directory_until_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notes = Notes()
    with small("csv", notes).build() as algo:
        assert not Path("runs").exists()  # nothing before the first call
        for _ in range(3):
            algo.train()
        run_dir = algo.run_dir
        assert run_dir is not None and rows(run_dir / "progress.csv") == ["1", "2", "3"]  # at once
    assert notes.calls == [("open", run_dir, 0.25), *(("result", number) for number in (1, 2, 3)), ("close",)]
    assert [path.resolve() for path in Path("runs").iterdir()] == [run_dir.resolve()]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["debugging"]["seed"] == 0
    assert "Run finished." in (run_dir / "run.log").read_text()


def test_a_plain_loop_that_goes_back_writes_each_of_its_results_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notes = Notes()
    with small_run(loggers=[notes]).build() as algo:
        algo.train()
        state = algo.get_state()
        for _ in range(2):
            algo.train()
            algo.set_state(state)
    assert [number for kind, number in notes.calls[1:-1]] == [1, 2, 2]


def test_a_plain_loop_without_loggers_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with small().build() as algo:
        algo.train()
    assert list(tmp_path.iterdir()) == []


def test_a_plain_loop_that_fails_says_so_and_keeps_its_last_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(result: dict[str, Any]) -> None:
        if result["training_iteration"] == 2:
            raise ValueError("on purpose")

    notes = Notes()
    with pytest.raises(Exception, match="on purpose"), small(notes).callbacks(on_train_result=fail).build() as algo:
        for _ in range(3):
            algo.train()
    assert notes.calls[1:] == [("result", 1), ("result", 2), ("close",)]
    assert algo.run_dir is not None and "Run failed." in (algo.run_dir / "run.log").read_text()


def test_fit_uses_the_loggers_of_the_config_and_an_argument_replaces_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notes = Notes()
    with small(notes).build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "a", progress=False)
        algo.fit(stop={"training_iteration": 2}, run_dir=tmp_path / "b", loggers=["json"], progress=False)
        algo.train()  # a plain loop after it has a run directory of its own
    assert notes.calls[:3] == [("open", tmp_path / "a", 0.25), ("result", 1), ("close",)]
    assert notes.calls[3:] == [("open", algo.run_dir, 0.25), ("result", 3), ("close",)]
    assert not (tmp_path / "a" / "progress.csv").exists() and (tmp_path / "b" / "result.jsonl").exists()


@pytest.mark.parametrize("kind", [Unreachable, NeverReached])
def test_a_service_that_fails_costs_a_warning_and_not_the_run(
    kind: type[Notes], tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    service = kind()
    with small().build() as algo:
        loggers = [service, CSVLogger()]
        result = algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path, loggers=loggers, progress=False)
    assert result["training_iteration"] == 3 and rows(tmp_path / "progress.csv") == ["1", "2", "3"]
    [warning] = [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert f"{kind.__name__} cannot write its results" in warning and "results may be missing" in warning
    if kind is NeverReached:
        assert service.calls == []  # what was never opened is given nothing


class SlowFailure(Notes):
    """A service that fails after a second."""

    is_service = True

    def log_result(self, result: dict[str, Any]) -> None:
        super().log_result(result)
        time.sleep(1.0)
        raise OSError("no network")


def test_a_service_that_failed_is_left_alone_for_a_while(tmp_path: Path) -> None:
    service = SlowFailure()
    with small().build() as algo:  # three iterations take far less than the 50 s of rest after a failure of 1 s
        algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path, loggers=[service], progress=False)
    assert [call for call in service.calls if call[0] == "result"] == [("result", 1)]


def test_a_config_with_loggers_is_read_back_from_a_file_and_travels(tmp_path: Path) -> None:
    config = small("csv", {"type": CSVLogger, "file_name": "second.csv"})
    with config.build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress=False)
        algo.save(tmp_path / "checkpoint")
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    settings.pop("stop")
    again = config_from_dict(settings)
    with again.build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "again", progress=False)
    assert rows(tmp_path / "again" / "second.csv") == ["1"]
    with type(algo).from_checkpoint(tmp_path / "checkpoint") as restored:
        assert restored.config.loggers[1]["file_name"] == "second.csv"
    pickle.loads(pickle.dumps(again))


def test_workers_get_no_loggers() -> None:
    config = small(open(__file__, encoding="utf-8"), "csv")  # a file, which cannot be sent to another process
    config.loggers[0].close()
    assert config.for_workers().loggers is None and config.for_evaluation().loggers is None
    assert small().for_workers().loggers is None


def test_names_are_added_to_what_is_there() -> None:
    assert add_named(["csv", "json"], ["tensorboard", "csv"]) == ["csv", "json", "tensorboard"]
    mine = {"type": "csv", "file_name": "x.csv"}
    assert add_named([mine], ["csv"]) == [mine]


def test_the_command_line_takes_names_and_import_paths_and_resumes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_loggers.py").write_text(
        "from corral.runs.loggers import CSVLogger\n\nclass Mine(CSVLogger):\n"
        "    def __init__(self):\n        super().__init__('mine.csv')\n"
    )
    arguments = ["train", "--algo", "PPO", "--env", "corral.testing:CountingEnv", "--run-dir", "run", "--quiet"]
    arguments += ["--set", "training.train_batch_size_per_learner=32", "--set", "training.minibatch_size=16"]
    assert main([*arguments, "--stop", "training_iteration=1", "--logger", "my_loggers:Mine", "--logger", "csv"]) == 0
    assert main(["train", "--resume", "run", "--stop", "training_iteration=2", "--quiet"]) == 0
    assert rows(Path("run/mine.csv")) == rows(Path("run/progress.csv")) == ["1", "2"]
    assert len([json.loads(line) for line in Path("run/result.jsonl").read_text().splitlines()]) == 2
    capsys.readouterr()
    assert main([*arguments[:-2], "--stop", "training_iteration=1", "--logger", "wand"]) == 2
    assert "--logger: unknown logger 'wand'. Did you mean 'wandb'?" in capsys.readouterr().err
