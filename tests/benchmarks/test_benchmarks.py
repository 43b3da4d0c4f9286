"""The machinery of `benchmarks/`: ratios, verdicts, and processes that are ended."""

import sys
import time
from pathlib import Path

import pytest

import report
import run
from cases import CASES, select
from processes import run_script
from report import Run
from statistics_of_pairs import bootstrap_interval, ratio_of_pairs, times_faster


def case(name: str):  # type: ignore[no-untyped-def]  # benchmarks/ is no package that mypy knows
    return next(case for case in CASES if case.name == name)


def one(pair: int, system: str, value: float | None, *, capped: bool = False) -> Run:
    return Run(pair, system, value, capped, {}, None if value is not None else "boom")


def test_ratios_say_how_many_times_faster() -> None:
    assert times_faster(20, 10, True) == 2  # a rate
    assert times_faster(10, 20, False) == 2  # a duration
    low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert 1 <= low <= 3 <= high <= 5
    assert ratio_of_pairs([]) is None
    assert ratio_of_pairs([1.0, 2.0, 9.0]).median == 2


def test_misses_and_failures_are_reported_as_such() -> None:
    corral = [one(pair, "corral", 10.0) for pair in range(5)]
    rllib = [one(pair, "rllib", 30.0) for pair in range(5)]  # 3 times, of 4 wanted
    capped = [one(pair, "sb3", 300.0, capped=True) for pair in range(5)]
    _, of_rllib, of_sb3 = report.rows(case("time_to_450"), corral + rllib + capped)
    assert of_rllib.verdict == "missed"
    assert (of_sb3.verdict, of_sb3.ratio[:8]) == ("met", "at least")
    failed = [one(0, "corral", None), *corral[1:]]
    assert report.rows(case("time_to_450"), failed + capped)[-1].verdict == "failed"


def test_results_survive_the_file() -> None:
    result = report.CaseResult("date", "command", False, {}, [one(0, "corral", 1.0), one(0, "sb3", None)])
    assert report.from_json(report.to_json({"ppo": result}))["ppo"].runs == result.runs


def test_selection_and_rotation() -> None:
    assert [case.name for case in select("sampling,ppo")] == ["sampling_1", "sampling_8", "sampling_64", "ppo"]
    with pytest.raises(ValueError, match="nope"):
        select("nope")
    assert run.rotated(("a", "b", "c"), 4) == ("b", "c", "a")


def is_alive(pid: int) -> bool:
    """Say whether a process still runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_script_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, time; "
        f"child = subprocess.Popen(['sleep', '600'], process_group=0); open({str(tmp_path / 'pid')!r}, 'w')"
        ".write(str(child.pid)); time.sleep(600)"
    )
    outcome = run_script([sys.executable, "-c", code], 2.0, tmp_path)
    assert outcome.line is None
    assert "killed after 2" in outcome.error
    child, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline:  # a kill is delivered in its own time
        time.sleep(0.01)
    assert not is_alive(child)


def test_a_script_that_fails_says_how(tmp_path: Path) -> None:
    outcome = run_script([sys.executable, "-c", "raise SystemExit('out of luck')"], 20.0, tmp_path)
    assert outcome.line is None
    assert "out of luck" in outcome.error
