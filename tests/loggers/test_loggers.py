"""What a run leaves on disk: rows, lines, the config and the log, however it ends."""

from __future__ import annotations

import csv
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from at_least import all_of
from corral import PPOConfig
from corral.algorithms.registry import config_from_dict
from corral.core.text import printable
from corral.engines.worker_logs import log_records
from corral.errors import EnvError
from corral.runs.loggers import CSVLogger, JSONLinesLogger, Logger, Run, default_loggers
from corral.testing import FaultyEnv
from small import small


def result(iteration: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "env_runners": {"episode_return_mean": 1.5 * iteration},
        "training_iteration": iteration,
        "num_env_steps_sampled_lifetime": 10 * iteration,
        "config": {"training": {"lr": 1}},
        **changes,
    }


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_csv_has_a_row_for_each_result_and_a_column_for_each_number(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.open(tmp_path, {})
    for iteration in (1, 2):
        logger.log_result(result(iteration))
        assert len(read_csv(tmp_path / "progress.csv")) == iteration  # each row is kept at once
    logger.close()
    assert read_csv(tmp_path / "progress.csv") == [
        {
            "env_runners/episode_return_mean": str(1.5 * iteration),
            "training_iteration": str(iteration),
            "num_env_steps_sampled_lifetime": str(10 * iteration),
        }
        for iteration in (1, 2)
    ]


def test_csv_takes_a_key_that_comes_late_and_one_that_goes_away(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.open(tmp_path, {})
    logger.log_result(result(1))
    logger.log_result(result(2, mine={"late, with comma": "a\nb"}))
    logger.log_result(result(3))
    logger.close()
    rows = read_csv(tmp_path / "progress.csv")
    assert [row["training_iteration"] for row in rows] == ["1", "2", "3"]
    assert [row["mine/late, with comma"] for row in rows] == ["", "a\nb", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["progress.csv"]


def test_csv_keeps_rows_with_line_breaks_of_any_kind_in_a_run_that_continues(tmp_path: Path) -> None:
    texts = ["a\nb", "a\rb", "a\r\nb", "a"]
    logger = CSVLogger()
    logger.open(tmp_path, {})
    for iteration, text in enumerate(texts, 1):
        logger.log_result(result(iteration, text=text))
    logger.close()
    logger.resume(tmp_path, {}, 4, 4)
    logger.close()
    assert [row["text"] for row in read_csv(tmp_path / "progress.csv")] == texts


def test_json_lines_read_back_as_they_were(tmp_path: Path) -> None:
    logger = JSONLinesLogger()
    logger.open(tmp_path, {})
    logger.log_result(result(1, nested={"a": {"b": float("nan")}}, text="ü"))
    logger.log_result(result(2, f=np.float32(0.5), i=np.int64(3), array=np.arange(2), path=Path("x")))
    logger.close()
    first, second = read_lines(tmp_path / "result.jsonl")
    assert first["nested"]["a"]["b"] is None  # JSON has no NaN
    assert (first["text"], first["env_runners"]) == ("ü", {"episode_return_mean": 1.5})
    assert (second["f"], second["i"], second["array"], second["path"]) == (0.5, 3, [0, 1], "x")
    assert "config" not in first


MEDIA = {
    "image": np.zeros((84, 84, 3), np.uint8),
    "video": np.zeros((2, 84, 84, 3), np.uint8),
    "small": np.array([[1.0, math.nan], [2.0, 3.0]], np.float32),
    "large": np.zeros((11, 100), np.float32),
    "series": [1.0, math.inf, np.float32(0.5)],
    "views": [np.zeros((2, 2, 3), np.uint8)],
    "arrays": [np.arange(2), np.arange(3)],
}


def test_csv_has_columns_for_numbers_bools_and_short_texts_only(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.open(tmp_path, {})
    numbers = {"bool": True, "f": np.float32(0.5), "none": None, "short": "x" * 200, "late": "x" * 201}
    logger.log_result({**MEDIA, **numbers, "deep": MEDIA, "path": Path("x"), "list": [1, "a"]})
    logger.log_result({"late": "short now"})
    logger.log_result({"late": "x" * 201})
    logger.close()
    first, second, third = read_csv(tmp_path / "progress.csv")
    assert first == {"bool": "True", "f": "0.5", "none": "", "short": "x" * 200, "late": ""}
    assert (second["late"], third["late"]) == ("short now", "")


def test_json_lines_hold_small_arrays_and_describe_the_rest(tmp_path: Path) -> None:
    logger = JSONLinesLogger()
    logger.open(tmp_path, {})
    logger.log_result({"deep": MEDIA, "mixed": [1, {"a": MEDIA["image"]}], "complex": np.ones(1, np.complex64)})
    logger.close()
    (line,) = read_lines(tmp_path / "result.jsonl")
    assert line["deep"] == {
        "image": "uint8[84, 84, 3]",
        "video": "uint8[2, 84, 84, 3]",
        "small": [[1.0, None], [2.0, 3.0]],
        "large": "float32[11, 100]",
        "series": [1.0, None, 0.5],
        "views": ["uint8[2, 2, 3]"],
        "arrays": [[0, 1], [0, 1, 2]],
    }
    assert line["mixed"] == [1, {"a": "uint8[84, 84, 3]"}]
    assert line["complex"] == ["(1+0j)"]


def test_a_json_line_stays_short_up_to_the_entries_that_one_asks_for(tmp_path: Path) -> None:
    arrays = [np.zeros(400), np.zeros((2, 300)), np.zeros(1)]
    names = [f"env_runners/{number}" for number in range(1001)]  # whole, as reports and summaries read them
    values = {
        "early_means": names,
        "full": list(range(1000)),
        "long": list(range(1001)),
        "array": np.zeros(1000),
        "arrays": arrays,
    }
    for entries, name in ((1000, "default.jsonl"), (2000, "more.jsonl")):
        logger = JSONLinesLogger(name) if entries == 1000 else JSONLinesLogger(name, max_entries=entries)
        logger.open(tmp_path, {})
        logger.log_result(values)
        logger.close()
    (short,), (long,) = read_lines(tmp_path / "default.jsonl"), read_lines(tmp_path / "more.jsonl")
    assert short["early_means"] == long["early_means"] == names
    assert (short["full"], short["array"]) == (list(range(1000)), [0.0] * 1000)
    assert (short["long"], short["arrays"]) == ("int[1001]", ["float64[400]", "float64[2, 300]", "float64[1]"])
    assert (long["long"], long["arrays"]) == (list(range(1001)), [[0.0] * 400, [[0.0] * 300] * 2, [0.0]])


class Rounded(CSVLogger):
    """A subclass: fewer columns, and one of its own."""

    def row(self, result: dict[str, Any]) -> dict[str, Any]:
        mean = super().row(result)["env_runners/episode_return_mean"]
        return {"rounded": round(mean), "iteration": result["training_iteration"]}


class Short(JSONLinesLogger):
    """A subclass that keeps one group."""

    def line(self, result: dict[str, Any]) -> dict[str, Any]:
        return {"episodes": super().line(result)["env_runners"]}


def test_subclasses_change_what_a_row_and_a_line_hold(tmp_path: Path) -> None:
    with Run(small(), tmp_path, [Rounded("rounded.csv"), Short("short.jsonl")]) as run:
        run.log_result(result(2))
    assert read_csv(tmp_path / "rounded.csv") == [{"rounded": "3", "iteration": "2"}]
    assert read_lines(tmp_path / "short.jsonl") == [{"episodes": {"episode_return_mean": 3.0}}]


def test_a_finished_run_leaves_config_log_and_results(tmp_path: Path) -> None:
    run_dir = tmp_path / "deep" / "run"
    with small().build() as algo:
        last = algo.fit(stop={"training_iteration": 3}, run_dir=run_dir)
    files = {"config.yaml", "run.log", "progress.csv", "result.jsonl", "checkpoints", ".lock"}
    assert {path.name for path in run_dir.iterdir()} == files
    assert [row["training_iteration"] for row in read_csv(run_dir / "progress.csv")] == ["1", "2", "3"]
    lines = read_lines(run_dir / "result.jsonl")
    assert lines[-1]["num_env_steps_sampled_lifetime"] == last["num_env_steps_sampled_lifetime"]
    log = (run_dir / "run.log").read_text(encoding="utf-8")
    assert "Stopped: training_iteration=3 reached 3." in log
    assert log.count("Iteration ") == 3
    assert log.rstrip().endswith("Run finished.")


def test_a_failed_run_keeps_its_results_and_logs_the_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handlers, level = list(logging.getLogger("corral").handlers), logging.WARNING
    caplog.set_level(level, "corral")  # a run sets another one
    config = small(FaultyEnv, env_config={"fault": "raise_step", "at_step": 50})
    with config.build() as algo, pytest.raises(EnvError):
        algo.fit(stop={"training_iteration": 100}, run_dir=tmp_path)
    iterations = len(read_csv(tmp_path / "progress.csv"))
    assert 0 < iterations < 100
    assert len(read_lines(tmp_path / "result.jsonl")) == iterations
    log = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert "Run failed." in log and "Run finished." not in log
    assert "Traceback" in log and "ZeroDivisionError: the simulator divided by zero" in log
    assert logging.getLogger("corral").handlers == handlers
    assert logging.getLogger("corral").level == level


def test_an_interrupted_run_says_so_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Run(small(), tmp_path, default_loggers()) as run:
        run.log_result(result())
        raise KeyboardInterrupt
    log = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert "Run interrupted." in log and "Traceback" not in log
    assert len(read_csv(tmp_path / "progress.csv")) == 1


def test_no_text_of_others_begins_a_line_of_the_log_or_controls_a_terminal(tmp_path: Path) -> None:
    forged = "x\n2026-01-01 00:00:00,000 ERROR corral: forged\r2026 \x1b[2J\x9b31m\u2028"
    with pytest.raises(ValueError, match="forged"), Run(small(), tmp_path, []):
        log = logging.getLogger("corral")
        log.warning("client %s left.", forged)
        log_records([("corral", logging.WARNING, 0.0, f"{forged}\nTraceback\nmore")], "runner 1")  # of a worker
        raise ValueError(forged)  # of an env
    lines = (tmp_path / "run.log").read_text(encoding="utf-8").split("\n")
    assert len([line for line in lines if "forged" in line]) >= 3
    begun = [line for line in lines if line and not line.startswith("    ")]
    assert [line.partition(" corral: ")[2].split()[0] for line in begun] == ["Run", "client", "runner", "Run"]
    assert all_of(line.isprintable() for line in lines)
    assert printable("a\ud800\n") == "a\\ud800\\n"  # half of a character, which pytest could not report from a log


class Book(Logger):
    """A logger that writes down what happens to it, and may fail."""

    def __init__(self, fail: str = "") -> None:
        self.fail, self.events = fail, list[str]()

    def _note(self, event: str) -> None:
        self.events.append(event)
        if event == self.fail:
            raise OSError(f"no {event}")

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        self._note("open")

    def log_result(self, result: dict[str, Any]) -> None:
        self._note("log_result")

    def close(self) -> None:
        self._note("close")


@pytest.mark.parametrize("fail", ["open", "log_result"])
def test_a_logger_that_fails_ends_the_run_and_all_that_were_opened_are_closed(tmp_path: Path, fail: str) -> None:
    good, bad = Book(), Book(fail)
    with pytest.raises(OSError, match=f"no {fail}"), Run(small(), tmp_path, [good, bad]) as run:
        run.log_result(result())
    assert good.events[-1] == "close"
    assert bad.events == (["open"] if fail == "open" else ["open", "log_result", "close"])
    assert f"OSError: no {fail}" in (tmp_path / "run.log").read_text(encoding="utf-8")


def test_a_logger_that_cannot_be_closed_does_not_keep_the_others_open(tmp_path: Path) -> None:
    good, bad = Book(), Book("close")
    with Run(small(), tmp_path, [bad, good]):
        pass
    assert good.events == ["open", "close"]
    assert "could not be closed" in (tmp_path / "run.log").read_text(encoding="utf-8")


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with small().build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(FileExistsError, match=r"already holds a run"):
            algo.fit(stop={"training_iteration": 2}, run_dir=tmp_path)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert algo.training_iteration == 1


def test_config_yaml_gives_the_config_back(tmp_path: Path) -> None:
    config = PPOConfig().environment("CartPole-v1", env_config={"render_mode": None})
    config.training(lr=[[0, 3e-4], [1_000_000, 0]], minibatch_size=64, vf_clip_param=10.0, optimizer="sgd")
    config.rl_module(model_config={"fcnet_hiddens": [32, 32], "fcnet_activation": "relu"}).debugging(seed=7)
    with Run(config, tmp_path, []):
        pass
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert config_from_dict(settings) == config


def test_config_yaml_of_a_class_holds_an_import_path_that_trains(tmp_path: Path) -> None:
    with Run(small(env_config={"episode_length": 4}), tmp_path, []):
        pass
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert settings["environment"]["env"] == "corral.testing:CountingEnv"
    with config_from_dict(settings).build() as algo:
        assert algo.train()["env_runners"]["episode_len_mean"] == 4


def test_default_directories_name_algorithm_and_env_and_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = PPOConfig().environment("ALE/Pong-v5")
    seen = set()
    for _ in range(3):
        with Run(config, None, []) as run:
            assert run.path.parent == Path("runs") and run.path.name.startswith("PPO-ALE-Pong-v5-")
            seen.add(run.path)
    assert len(seen) == 3
