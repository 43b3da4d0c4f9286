"""The report of a search: all trials in figures, and the runs of the best ones."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from corral.tools.report import write_report
from corral.tools.report.runs import read_runs
from corral.tools.report.search_figures import search_section
from corral.tools.report.searches import MAX_TRIALS, find_searches, read_search
from written_runs import config, write_run

pytest.importorskip("plotly")


def write_search(path: Path, num_trials: int = 12, *, mode: str = "max", with_runs: bool = True) -> Path:
    """Write a search: trial 3 failed, trial 5 was pruned, and the others have their numbers as values."""
    trials: list[dict[str, Any]] = []
    for number in range(num_trials):
        state = {3: "failed", 5: "pruned"}.get(number, "complete")
        values = {"training.lr": 10.0 ** (-4 + number / 6), "model_config.fcnet_hiddens": [[4], [8, 8]][number % 2]}
        value = None if state == "failed" else float(number)
        trials.append({"number": number, "state": state, "value": value, "values": values})
        if with_runs:
            run_dir = path / "trials" / f"{number:04d}" / "seed-0"
            write_run(run_dir, [float(number)], settings=config(lr=values["training.lr"]))
    found = {
        "metric": "evaluation/env_runners/episode_return_mean",
        "mode": mode,
        "parameters": {
            "training.lr": {"log": [1e-4, 1e-2]},
            "model_config.fcnet_hiddens": {"choice": [[4], [8, 8]]},
        },
        "importances": {"training.lr": 0.9, "model_config.fcnet_hiddens": 0.1} if num_trials > 4 else {},
        "trials": trials,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "search.json").write_text(json.dumps(found), encoding="utf-8")
    return path


def test_all_trials_are_points_and_the_best_runs_are_curves(tmp_path: Path) -> None:
    home = write_search(tmp_path / "found")
    runs = read_runs([home])
    assert len(runs) == MAX_TRIALS
    assert {run.path.parent.name for run in runs} == {f"{number:04d}" for number in (11, 10, 9, 8, 7, 6, 4, 2)}
    html = write_report(home, tmp_path / "report.html").read_text(encoding="utf-8")
    text = unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<script\b.*?</script>", "", html, flags=re.DOTALL)))
    assert "Search in found" in text and "Trials: 10 complete, 1 failed, 1 pruned." in text
    assert "The best is trial 11 with evaluation/env_runners/episode_return_mean 11: training.lr 0.00681" in text
    assert "The runs below belong to the 8 best trials." in text


@pytest.mark.parametrize(("mode", "best"), [("max", [0, 1, 2, 4, 6]), ("min", [0, 0, 0, 0, 0])])
def test_the_figures_of_a_search(mode: str, best: list[float], tmp_path: Path) -> None:
    record = read_search(write_search(tmp_path / "found", 7, mode=mode, with_runs=False))
    assert record is not None
    section = search_section(record)
    (history, shares), (by_lr, by_layers) = (block.figures for block in section.blocks)
    complete, pruned, line = history["data"]
    assert (complete["x"], complete["y"]) == ([0, 1, 2, 4, 6], [0, 1, 2, 4, 6])
    assert (pruned["x"], pruned["y"]) == ([5], [5])
    assert line["y"] == best
    assert shares["data"][0]["x"] == [90, 10]
    assert by_lr["layout"]["xaxis"]["type"] == "log" and by_lr["data"][0]["x"][0] == 1e-4
    assert by_layers["layout"]["xaxis"]["type"] == "category" and by_layers["data"][0]["x"][:2] == ["[4]", "[8, 8]"]


def test_searches_are_found_in_a_directory_of_several_and_damaged_ones_are_directories_of_runs(tmp_path: Path) -> None:
    write_search(tmp_path / "one", 2)
    damaged = write_search(tmp_path / "two", 10)
    (damaged / "search.json").write_text('{"trials": [{"number": 1}]}', encoding="utf-8")
    assert [record.path.name for record in find_searches([tmp_path])] == ["one"]
    assert len(read_runs([tmp_path / "one", damaged])) == 2 + 10


def test_a_search_without_a_complete_trial_says_so(tmp_path: Path) -> None:
    record = read_search(write_search(tmp_path / "found", 0))
    assert record is not None
    section = search_section(record)
    assert (section.note, section.blocks) == ("Trials: none yet. No trial is complete.", ())
