"""The comparison of experiments in a report: what each number is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.core.comparisons import estimate_improvement, estimate_iqm
from corral.tools.report.comparison import Comparison, compare_groups
from corral.tools.report.groups import group_runs
from corral.tools.report.runs import read_runs
from corral.tools.report.tables import summary_rows
from written_runs import config, evaluated, result, write_run


def compare(path: Path, threshold: float | None = None) -> tuple[Comparison, ...]:
    groups = group_runs(read_runs([path]))
    return compare_groups(groups, ["red", "blue", "green"][: len(groups)], threshold)


def write_experiments(path: Path) -> None:
    """Write runs of two learning rates, four each."""
    for seed in range(4):
        write_run(path / f"a{seed}", [10, 40 - seed, 30 + seed], settings=config(seed, lr=0.1, env="CartPole-v1"))
        write_run(path / f"b{seed}", [5, 20, 26 + 2 * seed], settings=config(seed, lr=0.2, env="CartPole-v1"))


def test_returns_and_the_times_of_a_threshold_are_of_all_runs(tmp_path: Path) -> None:
    write_experiments(tmp_path)
    (found,) = compare(tmp_path, threshold=30)
    assert found.title == "Comparison"
    assert found.columns == (
        *("runs", "last return", "best return", "env steps to 30", "seconds to 30"),
        "better than PPO CartPole-v1, lr=0.1",
    )
    (_, color, first), (_, _, second) = found.rows
    assert color == "red"
    # The last returns are 30 to 33 and 26 to 32, the largest ones 37 to 40; the middle two count.
    assert first[:3] == ("4", "31.5 [30, 33]", "38.5 [37, 40]")
    assert second[1].startswith("29 [26")
    assert first[3:] == ("200", "4", "-")
    assert second[3:5] == ("- (2 of 4)", "- (2 of 4)")
    chance = estimate_improvement([[26, 28, 30, 32]], [[30, 31, 32, 33]])
    assert second[5].startswith(f"{chance.value:.4g} [")
    assert "training, which explores" in found.note and "0.5 shows no difference" in found.note


def test_a_threshold_that_half_of_the_runs_miss_has_no_time(tmp_path: Path) -> None:
    write_experiments(tmp_path)
    (found,) = compare(tmp_path, threshold=31)
    assert found.rows[1][2][3] == "- (1 of 4)"


def test_without_a_threshold_gymnasiums_counts(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", [1, 2], settings=config(seed, env="CartPole-v1"))
        write_run(tmp_path / f"b{seed}", [1, 2], settings=config(seed, env="Pendulum-v1"))
    cartpole, pendulum = compare(tmp_path)
    assert cartpole.title == "Comparison, CartPole-v1" and pendulum.title == "Comparison, Pendulum-v1"
    assert cartpole.columns == ("runs", "last return", "best return", "env steps to 475", "seconds to 475")
    assert cartpole.rows[0][2][3:] == ("- (0 of 3)", "- (0 of 3)")
    assert pendulum.columns == ("runs", "last return", "best return")


def test_evaluation_counts_where_all_runs_have_it(tmp_path: Path) -> None:
    for seed in range(3):
        rows = [evaluated(result(i, 1.0), 100.0 * i + seed) for i in (1, 2)]
        write_run(tmp_path / f"a{seed}", settings=config(seed), results=rows)
    (found,) = compare(tmp_path, threshold=150)
    value = estimate_iqm([[200, 201, 202]]).value
    assert found.rows[0][2][1].startswith(f"{value:g} [200") and "the rounds of evaluation" in found.note
    write_run(tmp_path / "b", [7.0], settings=config(0, lr=0.5))
    (found,) = compare(tmp_path, threshold=150)
    assert found.rows[0][2][1] == "1 [1, 1]" and found.rows[1][2][1] == "7"


def test_runs_without_a_return_are_not_counted_among_those_that_have_one(tmp_path: Path) -> None:
    for seed, returns in enumerate(([2.0], [4.0], [None])):
        write_run(tmp_path / str(seed), returns, settings=config(seed))
    (found,) = compare(tmp_path, threshold=3)
    assert found.rows[0][2] == ("3", "3 (2 of 3)", "3 (2 of 3)", "- (1 of 3)", "- (1 of 3)")
    rows = summary_rows(group_runs(read_runs([tmp_path])), ["a"])
    assert rows[0].cells[4:6] == ("3 [-9.706, 15.71] (2 of 3)", "-")


def test_a_single_run_is_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1.0])
    assert compare(tmp_path) == ()


def test_the_page_holds_the_table(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from corral.tools.cli.main import main

    write_experiments(tmp_path / "runs")
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html"), "--threshold", "30"]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<table class="comparison">' in page and "<th>env steps to 30</th>" in page and "31.5 [30, 33]" in page
