"""The page of a report: what it holds, for whole, partial and strange runs."""

from __future__ import annotations

import json
import re
import stat
import sys
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral.core.intervals import t_interval
from corral.errors import ConfigError
from corral.tools.cli.main import main
from corral.tools.report import write_report
from corral.tools.report.groups import group_runs
from corral.tools.report.runs import read_runs
from corral.tools.report.sections import evaluation_section, learning_section, more_section
from corral.tools.report.tables import fault_rows, summary_rows
from corral.tools.report.time_figures import bottleneck_figure, part_seconds, shares_figure, totals_figure
from written_runs import config, evaluated, result, write_run

pytest.importorskip("plotly")


def text_of(page: Path) -> str:
    """Return what a reader reads: the page without scripts and tags."""
    html = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", " ", html))


def figures(page: Path) -> list[dict[str, Any]]:
    html = page.read_text(encoding="utf-8")
    return [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', html)]


def titles(page: Path) -> list[str]:
    return [figure["layout"]["title"]["text"] for figure in figures(page)]


def test_a_report_shows_everything_of_its_runs(tmp_path: Path) -> None:
    for lr in (0.001, 0.01):
        for seed in range(3):
            rows = [
                evaluated(result(i, i + seed + 1000 * lr), min(i, 3) if i > 1 else None, fresh=i == 3)
                for i in range(1, 5)
            ]
            log = "2026-01-01 00:00:01,000 WARNING corral: Runner <1> died." if seed == 1 else ""
            write_run(tmp_path / f"lr{lr}-{seed}", settings=config(seed, lr=lr), results=rows, log=log)
    (tmp_path / "lr0.001-2" / "videos").mkdir()
    (tmp_path / "lr0.001-2" / "videos" / "iteration-000003-episode-0.mp4").write_bytes(b"film")
    page = write_report(tmp_path, tmp_path / "out.html")
    text = text_of(page)
    assert "2 experiments" in text
    assert "PPO CartPole-v1, lr=0.001" in text
    # The last returns of the seeds are 5, 6 and 7: mean 6, t * 1 / sqrt(3) = 2.484.
    assert "6 [3.516, 8.484]" in text
    assert "3 [-2, 13]" in text  # the only fresh round
    assert "WARNING Runner <1> died." in text
    assert "training.lr" in text
    assert "seed: one of [0, 1, 2]" in text
    assert 'src="data:video/mp4;base64,ZmlsbQ=="' in page.read_text(encoding="utf-8")
    found = titles(page)
    assert found.count("Mean return in training") == found.count("Mean return in evaluation") == 2
    assert {"total_loss", "Share of each part in the time of the run", "Part that takes the most time"} <= {*found}
    assert "http" not in text


def test_curves_of_several_seeds_have_a_mean_with_an_interval(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), [1.0 + seed, 3.0 + seed], settings=config(seed))
    groups = group_runs(read_runs([tmp_path]))
    by_steps, by_time = learning_section(groups).blocks[0].figures
    low, high, mean, *runs = by_steps["data"]
    assert (mean["x"], mean["y"]) == ([100, 200], [1.5, 3.5])
    assert high["fill"] == "tonexty"
    assert [low["y"], high["y"]] == [pytest.approx([1.5 - 6.3531, 3.5 - 6.3531]), pytest.approx([7.8531, 9.8531])]
    assert [trace["y"] for trace in runs] == [[1, 3], [2, 4]]
    assert by_time["data"][2]["x"] == [2, 4]


def test_the_mean_of_a_part_of_the_runs_is_dotted_and_joins_the_whole_mean(tmp_path: Path) -> None:
    for seed, num_results in enumerate((2, 5, 5)):
        write_run(tmp_path / str(seed), [1.0 + seed] * num_results, settings=config(seed))
    by_steps, _ = learning_section(group_runs(read_runs([tmp_path]))).blocks[0].figures
    whole, partial = by_steps["data"][2:4]
    assert whole["y"] == [2, 2, 2, None, None]
    assert (partial["y"], partial["line"]["dash"]) == ([None, None, 2, 2.5, 2.5], "dot")
    assert [details[2] for details in whole["customdata"]] == [3, 3, 3, 2, 2]


def test_numbers_that_are_not_drawn_are_named(tmp_path: Path) -> None:
    rows = [result(i, 1.0) | {"mine": {f"n{k:02}": i * k for k in range(1, 63)}} for i in (1, 2)]
    section = more_section(group_runs(read_runs([write_run(tmp_path / "run", results=rows)])))
    shown = [figure["layout"]["title"]["text"] for figure in section.blocks[0].figures]
    assert shown == [f"mine/n{k:02}" for k in range(1, 61)]
    assert "Not drawn: mine/n61, mine/n62; corral plot --y draws any of them." in section.note


def test_each_env_has_its_own_learning_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [500.0, 500.0], settings=config(0))
    write_run(tmp_path / "b", [-900.0, -300.0], settings=config(0, env="my_envs:Pendulum"))
    write_run(tmp_path / "c", [-800.0, -200.0], settings=config(0, env="my_envs:Pendulum", algo="SAC"))
    figures = learning_section(group_runs(read_runs([tmp_path]))).blocks[0].figures
    shown = [(figure["layout"]["title"]["text"], [trace["y"] for trace in figure["data"]]) for figure in figures]
    cart_pole = ("Mean return in training, CartPole-v1", [[500, 500]])
    pendulum = ("Mean return in training, Pendulum", [[-900, -300], [-800, -200]])
    assert shown == [cart_pole, cart_pole, pendulum, pendulum]
    colors = [[trace["line"]["color"] for trace in figure["data"]] for figure in figures]
    assert len({*colors[0], *colors[2]}) == 3


def test_a_round_of_evaluation_has_the_interval_of_its_result(tmp_path: Path) -> None:
    rows = [evaluated(result(1, 1.0), 50.0), evaluated(result(2, 1.0), 50.0, fresh=False)]
    groups = group_runs(read_runs([write_run(tmp_path / "run", results=rows)]))
    (trace,) = evaluation_section(groups).blocks[1].figures[0]["data"]
    assert (trace["x"], trace["y"]) == ([100], [50])
    assert (trace["error_y"]["arrayminus"], trace["error_y"]["array"]) == ([5], [10])


def test_the_time_is_divided_among_its_parts(tmp_path: Path) -> None:
    rows = [result(i, 1.0, seconds=4.0) for i in (1, 2, 3)]
    rows[2] |= {"bottleneck": {"part": "env_step"}}
    rows[2]["timers"] = {"iteration_s": 12.0, "env_step_share": 0.75, "learning_share": 0.25}
    runs = read_runs([write_run(tmp_path / "run", results=rows)])
    assert part_seconds(runs[0]) == {"env_step": 11, "learning": 9}
    totals, bottleneck = totals_figure(runs), bottleneck_figure(runs, "steps")
    assert totals is not None
    assert bottleneck is not None
    assert {trace["name"]: trace["x"] for trace in totals["data"]} == {"env_step": [55], "learning": [45]}
    (parts,) = bottleneck["data"][0]["text"]
    where = dict(zip(bottleneck["data"][0]["x"], parts, strict=True))
    assert (min(where), max(where)) == (0, 300)
    assert {part for x, part in where.items() if x < 200} == {"learning"}
    assert {part for x, part in where.items() if x > 201} == {"env_step"}


def test_the_shares_of_a_single_iteration_have_an_area(tmp_path: Path) -> None:
    (group,) = group_runs(read_runs([write_run(tmp_path / "run", [1.0])]))
    shares = shares_figure(group, "steps")
    assert shares is not None
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in shares["data"]} == {
        "env_step": ([0, 100], [25, 25]),
        "learning": ([0, 100], [75, 75]),
    }


@pytest.mark.parametrize(
    "results",
    [
        [],
        [result(1, None)],
        [result(i, None) for i in (1, 2, 3)],
        [{"training_iteration": 1}],
        [{"mine": 3, "training_iteration": "three"}, {"mine": [1], "timers": 3}],
        [{**result(1, 1.0), "timers": {"learning_share": 1.0}}, {**result(2, 1.0), "bottleneck": {"part": "mine"}}],
        [evaluated(result(1, 1.0), None, fresh=False)],
    ],
    ids=["none", "one", "nan", "bare", "strange", "timers", "no-round"],
)
def test_a_partial_run_gives_a_page(results: list[dict[str, Any]], tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "whole", settings=config(lr=0.5))
    write_run(tmp_path / "runs" / "partial", results=results)
    page = write_report(tmp_path / "runs" / "partial", tmp_path / "out.html")
    assert "PPO CartPole-v1" in text_of(page)
    both = write_report(tmp_path / "runs", tmp_path / "both.html")
    assert titles(both).count("Mean return in training") == 2


def test_thirty_runs_of_different_algorithms_give_a_page(tmp_path: Path) -> None:
    for index in range(30):
        row = result(1, float(index)) | {"learners": {"default_policy": {f"loss_{index}": 1.0}}}
        write_run(tmp_path / f"run-{index}", results=[row], settings=config(algo=f"Algo{index}", lr=index))
    page = write_report(tmp_path, tmp_path / "out.html")
    assert "30 experiments" in text_of(page)
    assert len(figures(page)[0]["data"]) == 30
    assert {f"loss_{index}" for index in range(30)} <= {*titles(page)}


def test_names_and_messages_are_no_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    settings = config(env=evil) | {"training": {"lr": "</pre><b>"}}
    log = f"2026-01-01 00:00:01,000 ERROR corral: {evil}"
    row = result(1, 1.0) | {"learners": {evil: {"</script>": 1.0}}}
    run = write_run(tmp_path / "a&b\udce4", results=[row], settings=settings, log=log)
    html = write_report(run, tmp_path / "out.html").read_text(encoding="utf-8")
    assert evil not in html
    assert "</pre><b>" not in html
    assert not any("<" in title for title in titles(tmp_path / "out.html"))


def test_the_row_of_an_experiment_has_the_mean_of_its_last_returns(tmp_path: Path) -> None:
    for seed, last in enumerate((10.0, 20.0, 60.0)):
        write_run(tmp_path / str(seed), [1.0, last], settings=config(seed))
    page = write_report(tmp_path, tmp_path / "out.html").read_text(encoding="utf-8")
    row = re.findall(r"<tr><td>.*?</tr>", page)[0]
    low, high = t_interval([10.0, 20.0, 60.0])
    cells = re.findall(r"<td>(.*?)</td>", row)
    numbers = [float(number) for number in re.findall(r"-?[0-9.]+", cells[5])]
    np.testing.assert_allclose(numbers, [30.0, low, high], rtol=1e-2)


def test_equal_seeds_are_named(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        write_run(tmp_path / name, settings=config(seed))
    assert "several runs have seed 0. Runs with the same seed are not independent" in text_of(
        write_report(tmp_path, tmp_path / "out.html")
    )


def test_media_beyond_the_limits_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.tools.report.media.MAX_BYTES", 100)
    run = write_run(tmp_path / "run")
    for index in range(10):
        (run / f"picture-{index:02}.png").write_bytes(bytes(5))
    (run / "picture-99.png").write_bytes(bytes(101))
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "no.png").write_bytes(b"")
    page = write_report(run, tmp_path / "out.html")
    shown = re.findall(r"<figcaption>(.*?)</figcaption>", page.read_text(encoding="utf-8"))
    assert shown == [f"picture-{index:02}.png" for index in range(9, 1, -1)]
    assert "3 more in the directory of the run" in text_of(page)


def test_the_latest_file_of_each_folder_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for folder, num_files in (("images/a", 2), ("images/b", 20), ("videos", 1)):
        (run / folder).mkdir(parents=True)
        for index in range(num_files):
            (run / folder / f"{index:02}.png").write_bytes(bytes(5))
    page = write_report(run, tmp_path / "out.html").read_text(encoding="utf-8")
    shown = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert sorted(shown[:3]) == ["images/a/01.png", "images/b/19.png", "videos/00.png"]
    assert sorted(shown[3:5]) == ["images/a/00.png", "images/b/18.png"]
    assert shown[5:] == ["images/b/17.png", "images/b/16.png", "images/b/15.png"]


def test_figures_are_those_that_plotly_knows(tmp_path: Path) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for seed in range(2):
        rows = [evaluated(result(i, 1.0 * seed), 3.0) for i in (1, 2, 3)]
        write_run(tmp_path / str(seed), results=rows, settings=config(seed))
    for figure in figures(write_report(tmp_path, tmp_path / "out.html")):
        graph_objects.Figure(figure)  # an unknown name or value raises


def test_the_command_writes_a_page_and_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {tmp_path}/opened\n", encoding="utf-8")
    browser.chmod(stat.S_IRWXU)
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser._tryorder", None)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    assert main(["report", "run", "--open"]) == 0
    assert capsys.readouterr().out == "The report is stored in report.html\n"
    assert (tmp_path / "opened").read_text(encoding="utf-8") == f"file://{tmp_path}/report.html\n"
    assert main(["report", "run", "-o", "absent/report.html"]) == 1
    assert "absent/report.html cannot be written: No such file" in capsys.readouterr().err
    assert main(["report", "run", "-o", "."]) == 1
    assert ". cannot be written: it is a directory" in capsys.readouterr().err
    assert main(["report", "run", "nothing"]) == 6
    assert "nothing is not the directory of a run: it does not exist" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"pip install 'corral\[report\]'"):
        write_report(write_run(tmp_path / "run"), tmp_path / "out.html")


def test_long_names_and_titles_are_in_lines_that_fit_a_narrow_page(tmp_path: Path) -> None:
    for lr, env in ((0.1, "A" * 60 + "<i>-v1"), (0.2, "A" * 60 + "<i>-v1"), (0.1, "short-v1")):
        settings = config(lr=lr, env=env) | {"training": {"lr": lr, "replay_buffer_config": {"type": f"type of {lr}"}}}
        write_run(tmp_path / "runs" / f"{lr}-{len(env)}", settings=settings)
    found = figures(write_report(tmp_path / "runs", tmp_path / "report.html"))
    texts = [trace["name"] for figure in found for trace in figure["data"] if "name" in trace]
    texts += [figure["layout"]["title"]["text"] for figure in found]
    assert max(len(unescape(line)) for text in texts for line in text.split("<br>")) <= 42
    label = next(text for text in texts if text.startswith("PPO A") and "lr=0.1" in text.replace("<br>", " "))
    assert label.replace("<br>", "").replace(" ", "").startswith(f"PPO{'A' * 60}&lt;i&gt;-v1,")
    heights = {figure["layout"]["title"]["text"].count("<br>"): figure["layout"]["height"] for figure in found}
    assert len(heights) > 1 and heights[max(heights)] > heights[min(heights)]


def test_episodes_that_were_missing_in_an_earlier_round_are_a_fault(tmp_path: Path) -> None:
    rows = [evaluated(result(i, 1.0), 1.0, fresh=i != 3) for i in range(1, 5)]
    for row, missing in zip(rows, (0, 3, 3, 0), strict=True):
        row["evaluation"]["num_episodes_missing"] = missing
    write_run(tmp_path / "run", results=rows)
    [row] = fault_rows(read_runs([tmp_path]))
    assert row.counters == "evaluation/num_episodes_missing: 3"
    page = write_report(tmp_path, tmp_path / "report.html")
    assert "num_episodes_missing" in titles(page)


def test_numbers_of_learners_that_are_no_losses_are_among_the_other_numbers(tmp_path: Path) -> None:
    rows = [result(i, 1.0) for i in (1, 2)]
    for row in rows:
        row["learners"]["default_policy"]["num_epochs"] = row["training_iteration"]
    write_run(tmp_path / "run", results=rows)
    section = more_section(group_runs(read_runs([tmp_path])))
    [figure] = section.blocks[0].figures
    assert figure["layout"]["title"]["text"] == "learners/default_policy/num_epochs"


def test_a_run_that_began_at_a_checkpoint_has_its_number_of_iterations(tmp_path: Path) -> None:
    write_run(tmp_path / "1", results=[result(i, 1.0) for i in range(51, 54)])
    write_run(tmp_path / "2", settings=config(lr=0.01))
    rows = summary_rows(group_runs(read_runs([tmp_path])), ["a", "b"])
    assert [row.cells[1] for row in rows] == ["53", "3"]
    assert [row.label for row in rows] == ["PPO CartPole-v1, lr=0.001 (1)", "PPO CartPole-v1, lr=0.01 (2)"]
