"""The kill matrix of `make campaign`: a few of its trials, and bugs that its verdict must see."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kill_matrix import verdict
from kill_matrix.cells import Cell, cells

BENCHMARKS = Path(verdict.__file__).parents[1]
DEADLINE_S = 300.0
CELLS = (
    "local:PPO:single:sync:driver:checkpoint:kill",
    "local:DQN:single:sync:driver:sample:kill",
    "local:PPO:several:sync:driver:resume:kill",
    "local:PPO:single:sync:driver:log:disk",
    "local:APPO:single:async:driver:update:end",
    "process:PPO:single:sync:runner:sample:raise:env",
    "process:PPO:single:sync:runner:weights:kill",
    "process:PPO:single:sync:driver:sample:kill",
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def campaign(home: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Run the campaign, and return its results and what it wrote to standard error."""
    command = [
        sys.executable,
        str(BENCHMARKS / "campaign.py"),
        "--home",
        str(home),
        "--output",
        str(home / "out.jsonl"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (home / "out.jsonl").exists(), done.stderr
    return [json.loads(line) for line in (home / "out.jsonl").read_text("utf-8").splitlines()], done.stderr


@pytest.mark.slow_cases("more")
@pytest.mark.parametrize("names", [CELLS[1:2], CELLS], ids=["one", "more"])
def test_nothing_is_lost_left_or_silent_in_one_trial_of_each_of_some_cells(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    lines, errors = campaign(tmp_path, "--cells", ",".join(names), "--num-trials", str(len(names)))
    assert {line["cell"] for line in lines} == set(names)
    assert [line["problems"] for line in lines] == [[]] * len(names), errors
    assert all(line["happened"] for line in lines)


def cell(name: str) -> Cell:
    [found] = [cell for cell in cells() if cell.name == name]
    return found


def attempt(**changes: Any) -> verdict.Attempt:
    found = {
        "status": 0,
        "errors": "",
        "left": [],
        "is_late": False,
        "seconds": 1.0,
        "happened": "kill",
        "checkpoint": 2,
    }
    return verdict.Attempt(**(found | changes))


def row(iteration: int, failures: int = 0) -> dict[str, Any]:
    return {
        "training_iteration": iteration,
        "num_env_steps_sampled_lifetime": 64 * iteration,
        "env_runners": {"num_env_steps_sampled": 64, "num_env_steps_sampled_lifetime": 64 * iteration},
        "fault_tolerance": {
            "num_env_runner_failures": failures,
            "num_remote_worker_restarts": failures,
            "num_env_steps_lost": 0,
            "num_env_steps_in_flight": 0,
        },
    }


def test_the_verdict_sees_a_result_that_is_missing_doubled_or_cut_off() -> None:
    rows: list[Any] = [row(i) for i in range(1, 6)]
    assert verdict.results_are_unbroken(rows) == []
    assert verdict.results_are_unbroken([*rows[:2], *rows[3:]])
    assert verdict.results_are_unbroken([*rows, rows[-1]])
    assert verdict.results_are_unbroken([*rows, '{"training_iter'])
    assert verdict.results_are_unbroken([])
    forgotten = copy.deepcopy(rows)
    forgotten[3]["env_runners"]["num_env_steps_sampled"] -= 1
    assert verdict.results_are_unbroken(forgotten)
    assert verdict.results_are_unbroken([*rows[:2], *rows[3:]], may_lack=True) == []


def test_the_verdict_sees_a_fault_that_nothing_shows() -> None:
    runner = cell("process:PPO:single:sync:runner:sample:kill:env")
    log = "2026-01-01 00:00:00,000 WARNING corral: env runner 1 failed"
    assert verdict.is_not_silent(runner, [row(1), row(2, failures=1)], log) == []
    assert verdict.is_not_silent(runner, [row(1), row(2)], log)
    assert verdict.is_not_silent(runner, [row(1), row(2, failures=1)], log.replace("WARNING", "INFO"))
    ends = cell("process:PPO:single:sync:runner:start:raise:env")
    told = attempt(status=3, checkpoint=-1, errors="corral: env 'Walk', sub-env 0: ArithmeticError in the constructor")
    assert verdict.after_attempt(ends, Path("nowhere"), told, is_disturbed=True) == []
    for change in ({"errors": ""}, {"errors": "corral: failed"}, {"status": 9}):
        assert verdict.after_attempt(ends, Path("nowhere"), replace(told, **change), is_disturbed=True)
    assert verdict.after_attempt(ends, Path("nowhere"), told, is_disturbed=False)


LEAVES_A_CHILD = """
import json, os, sys, time
from pathlib import Path
from kill_matrix import processes_of_trial as processes
processes.become_subreaper()
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.close(1)
        os.close(2)
        time.sleep(60)
    os._exit(0)
found = processes.wait_until_gone(Path(sys.argv[1]), set(), 0.5)
processes.kill_all(set(found))
print(json.dumps([list(found), list(processes.wait_until_gone(Path(sys.argv[1]), set(), 20.0))]))
"""


def test_the_verdict_sees_a_process_that_is_left_in_another_session(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LEAVES_A_CHILD, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    left, later = json.loads(done.stdout)
    assert len(left) == 1 and later == []
    kills = cell("local:PPO:single:sync:driver:sample:kill")
    dead = attempt(status=-signal.SIGKILL, checkpoint=-1)
    assert verdict.after_attempt(kills, tmp_path, dead, is_disturbed=True) == []
    dead.left = [f"{left[0]}: sleep"]
    assert verdict.after_attempt(kills, tmp_path, dead, is_disturbed=True)


@pytest.mark.slow
def test_the_verdict_sees_other_weights_and_lost_files(tmp_path: Path) -> None:
    name = "local:PPO:single:sync:driver:checkpoint:kill"
    [line], errors = campaign(tmp_path, "--cells", name, "--num-trials", "1", "--keep")
    assert line["problems"] == [], errors
    home = tmp_path / "trial-0"
    weights = verdict.digest_of_weights(home / "run")
    attempts = [attempt(status=-signal.SIGKILL), attempt(checkpoint=verdict.state_of_checkpoint(home / "run"))]

    def problems(weights: str) -> list[str]:
        return verdict.at_the_end(cell(name), home / "run", home / "record", attempts, {"weights": weights})

    assert problems(weights) == []
    assert problems("0" * 64) == ["the weights are not the weights of an undisturbed run"]
    lines = (home / "run" / "result.jsonl").read_text("utf-8").splitlines(keepends=True)
    (home / "run" / "result.jsonl").write_text("".join(lines[:4] + lines[5:]), "utf-8")
    assert any("the iterations are" in problem for problem in problems(weights))
    (home / "run" / "result.jsonl").write_text("".join(lines), "utf-8")
    newest = home / "run" / "checkpoints" / f"iteration-{len(lines):06d}"
    next(newest.glob("data-*/state.msgpack")).write_bytes(b"")
    old = attempt(status=-signal.SIGKILL, checkpoint=verdict.state_of_checkpoint(home / "run"))
    assert old.checkpoint == len(lines) - 1  # the one before is whole
    next((home / "run" / "checkpoints" / f"iteration-{len(lines) - 1:06d}").glob("data-*/state.msgpack")).unlink()
    for best in (home / "run" / "checkpoints").glob("best/data-*/state.msgpack"):
        best.unlink()
    damaged = attempt(status=-signal.SIGKILL, checkpoint=verdict.state_of_checkpoint(home / "run"))
    assert verdict.after_attempt(cell(name), home / "run", damaged, is_disturbed=True)


def test_each_cell_has_a_name_of_its_own_and_each_fault_each_phase_each_engine_is_there() -> None:
    found = cells()
    assert len({cell.name for cell in found}) == len(found) > 150
    assert {cell.phase for cell in found} >= {
        *("start", "sample", "update", "weights", "evaluation", "checkpoint", "export", "resume")
    }
    assert {cell.engine for cell in found} == {"local", "process", "ray", "two nodes"}
    assert {cell.agents for cell in found} == {"single", "several"} and {cell.mode for cell in found} == {
        "sync",
        "async",
    }
