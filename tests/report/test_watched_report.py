"""`corral report --watch`: a page on this machine that follows runs while they write."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from console_script import corral_command
from corral.errors import ReportError
from corral.tools.cli.main import main
from corral.tools.report import server as report_server
from corral.tools.report.live import live_row
from corral.tools.report.runs import RunsReader, read_runs
from corral.tools.report.server import LiveReport, served_report
from written_runs import config, evaluated, result, write_run

pytest.importorskip("plotly")
WARNING = "2026-01-01 00:00:05,000 WARNING corral: Env runner 2 died."


def write_live(path: Path, results: list[dict[str, Any]], settings: dict[str, Any] | None = None) -> Path:
    """Write a run that has not ended."""
    write_run(path, results=results, settings=settings or config(), log=WARNING)
    text = (path / "run.log").read_text(encoding="utf-8")
    (path / "run.log").write_text(text.replace("2026-01-01 00:00:09,000 INFO corral: Run finished.\n", ""))
    return path


def add_result(path: Path, row: dict[str, Any]) -> None:
    with (path / "result.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(row)}\n")


@contextmanager
def fetching(*runs: Path) -> Iterator[Any]:
    """Yield a function that returns the answer of the server for a path."""
    with served_report(runs, port=0) as server:
        yield (
            lambda path, **headers: (
                urllib.request.urlopen(
                    urllib.request.Request(f"http://127.0.0.1:{server.server_port}/{path}", headers=headers), timeout=30
                )
                .read()
                .decode()
            )
        )


def test_a_row_says_what_a_run_does_now(tmp_path: Path) -> None:
    """100 env steps in 2 s: to the limit of 1,000, there are 600 more, for which it takes 12 s."""
    rows = [evaluated(result(i, float(i)), 7.0) for i in range(1, 5)]
    rows[-1]["fault_tolerance"] = {"num_remote_worker_restarts": 2}
    rows[-1]["runner_group"] = {"lag_mean": 1.25}
    row = live_row(write_live(tmp_path / "run", rows, config() | {"stop": {"num_env_steps": 1000, "time_s": 3600}}))
    assert row == {
        "state": "runs",
        "iterations": "4",
        "env steps": "400",
        "steps/s": "50",
        "return": "4",
        "evaluation": "7.0 [2.0 .. 17.0]",
        "time left": "12 s to num_env_steps",
        "lag": "1.25",
        "bottleneck": "learning",
        "faults": "2 runner restarts",
        "latest warning": "2026-01-01 00:00:05 Env runner 2 died.",
    }


@pytest.mark.parametrize("stop", [{"episode_return_mean": 450}, {"solved": "the function f"}, "nonsense", None])
def test_no_time_is_left_where_none_can_be_known(stop: Any, tmp_path: Path) -> None:
    rows = [result(1, None), result(2, None)]
    assert live_row(write_live(tmp_path / "run", rows, config() | {"stop": stop}))["time left"] == "-"
    assert live_row(write_live(tmp_path / "new", rows[:1]))["time left"] == "-"  # one result has no speed


def test_a_run_without_files_and_one_that_ended_have_rows(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert set(live_row(tmp_path / "empty").values()) == {"-", "unknown: there is no run.log"}
    ended = live_row(write_run(tmp_path / "ended"))
    assert ended["state"] == "finished" and ended["time left"] == "-" and ended["iterations"] == "3"


def test_the_page_and_its_numbers_follow_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_server, "PAUSE", 0)
    path = write_live(tmp_path / "run", [result(1, 1.0)])
    with fetching(path) as fetch:
        first = json.loads(fetch("status"))
        assert first["version"] == 1 and first["rows"]["run"]["iterations"] == "1"
        assert json.loads(fetch("status")) == first  # nothing was written
        add_result(path, result(2, 12.5))
        second = json.loads(fetch("status"))
        assert second["version"] == 2 and second["rows"]["run"]["return"] == "12.5"
        assert re.search(r"version !== 2\b", page := fetch("")) and "12.5" in page
        with (path / "run.log").open("a", encoding="utf-8") as file:  # the run ends without another result
            file.write("2026-01-01 00:00:09,000 INFO corral: Run finished.\n")
        third = json.loads(fetch("status"))
        assert third["version"] == 3 and third["rows"]["run"]["state"] == "finished"


def test_runs_that_begin_later_are_followed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_server, "PAUSE", 0)
    write_live(tmp_path / "runs" / "one", [result(1, 1.0)])
    with fetching(tmp_path / "runs") as fetch:
        assert [*json.loads(fetch("status"))["rows"]] == ["one"]
        write_live(tmp_path / "runs" / "two", [result(1, 1.0)])
        assert [*json.loads(fetch("status"))["rows"]] == ["one", "two"]


def test_the_page_follows_a_search_whose_best_trials_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_server, "PAUSE", 0)
    write_live(tmp_path / "trials" / "0000" / "seed-0", [result(1, 1.0)])
    best = {"number": 0, "state": "complete", "value": 1.0, "values": {}}
    failed = {"number": 1, "state": "failed", "value": None, "values": {}}
    state = {"metric": "episode_return_mean", "mode": "max", "parameters": {}, "importances": {}}

    def write(*trials: dict[str, Any]) -> None:
        (tmp_path / "search.json").write_text(json.dumps({**state, "trials": trials}), encoding="utf-8")

    write(best)
    live = LiveReport([tmp_path])
    write(best, failed)
    assert "Trials: 1 complete, 1 failed." in live.page().decode()


def test_reading_takes_a_hundredth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes 2 s by a clock of the test, so that 200 s pass until runs are read again, after the first time."""
    now_s = 0.0
    monkeypatch.setattr(report_server.time, "monotonic", lambda: now_s)

    def take(*args: Any, **settings: Any) -> bytes:
        nonlocal now_s
        now_s += 2.0
        return b""

    monkeypatch.setattr(report_server, "make_page", take)
    path = write_live(tmp_path / "run", [result(1, 1.0)])
    live = LiveReport([path])
    versions = []
    for iteration in range(2, 500):
        now_s += 1.0
        add_result(path, result(iteration, 1.0))
        live.page()
        versions.append(live.version)
    assert live.version == 4 and versions.index(4) - versions.index(3) == 200


def test_only_new_lines_are_read_and_the_result_is_the_same_as_of_reading_all(tmp_path: Path) -> None:
    path = write_live(tmp_path / "run", [result(1, 1.0), result(2, 2.0)])
    reader, file = RunsReader([path]), path / "result.jsonl"

    def is_as_new() -> bool:
        [followed], [new] = reader.read(), read_runs([path])
        same = [np.array_equal(new.numbers[key], column, equal_nan=True) for key, column in followed.numbers.items()]
        texts = followed.texts == new.texts and followed.problems == new.problems
        return all(same) and texts and followed.numbers.keys() == new.numbers.keys() and new.num_results > 0

    assert is_as_new()
    add_result(path, {**result(3, 3.0), "note": "new"})
    assert is_as_new()
    whole = json.dumps(result(4, 4.0))
    for part in (whole[:40], whole[40:], "\n", "damaged\n"):
        with file.open("a", encoding="utf-8") as opened:
            opened.write(part)
        assert is_as_new()
    add_result(path, result(2, 7.0))  # the run went back to a checkpoint
    assert is_as_new()
    before = file.read_text(encoding="utf-8").splitlines()
    file.write_text(f"{before[0]}\n", encoding="utf-8")  # another run began there
    assert is_as_new()
    add_result(path, result(2, 2.0))
    assert is_as_new()
    rows = [result(1, 1.0), {**result(2, 20.0), "note": "longer than before"}, result(3, 30.0)]
    rewritten = file.with_name("result.jsonl.new")  # as a run that continues from a checkpoint rewrites it
    rewritten.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    rewritten.replace(file)
    assert is_as_new()


def test_other_paths_and_other_names_of_this_machine_get_nothing(tmp_path: Path) -> None:
    path = write_live(tmp_path / "run", [result(1, 1.0)])
    with fetching(path) as fetch:
        for wrong in ("run.log", "../run/config.yaml", "status?x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetch(wrong)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetch("status", Host="attacker.example:8642")
        assert fetch("status", Host="localhost:8642")


def test_a_directory_that_is_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_server, "PAUSE", 0)
    path = write_live(tmp_path / "run", [result(1, 1.0)])
    with fetching(path) as fetch:
        path.rename(tmp_path / "moved")
        with pytest.raises(urllib.error.HTTPError, match="500") as found:
            fetch("status")
        assert "does not exist" in found.value.read().decode()
        (tmp_path / "moved").rename(path)
        assert json.loads(fetch("status"))["rows"]["run"]["iterations"] == "1"


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    path = write_live(tmp_path / "run", [result(1, 1.0)])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ReportError, match=rf"127\.0\.0\.1:{port}: .*choose another --port"),
            served_report([path], port=port),
        ):
            pass
    with pytest.raises(ReportError, match="99999999"), served_report([path], port=99999999):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "host"), [(signal.SIGINT, "127.0.0.1"), (signal.SIGTERM, "localhost")])
def test_the_command_serves_until_it_is_interrupted(ending: signal.Signals, host: str, tmp_path: Path) -> None:
    path = write_live(tmp_path / "run", [result(1, 1.0)])
    command = corral_command("report", str(path), "--watch", "--port", "0", "--host", host)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())
        assert url is not None and host in url[0]
        assert b"Corral" in urllib.request.urlopen(url[0], timeout=30).read()
        process.send_signal(ending)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and (out, errors) == ("", "")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "8000"], "need --watch"),
        (["--host", "0.0.0.0"], "need --watch"),
        (["--watch", "-o", "x.html"], "--output cannot be used with --watch"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(write_run(tmp_path / "run")), *options]) != 0
    assert message in capsys.readouterr().err
