"""`corral train --seeds`: one run for each seed, and their returns next to each other."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml

from console_script import corral_command
from corral.core.comparisons import estimate_iqm
from corral.core.intervals import t_interval
from corral.errors import ConfigError, RunDirectoryError
from corral.runs.loggers.run import locked
from corral.runs.loggers.run_summary import EVALUATED, TRAINED, last_numbers, summarize_runs
from corral.tools.cli.experiment import overriding_arguments
from corral.tools.cli.main import main
from corral.tools.cli.parser import make_parser
from corral.tools.cli.pool import SeedRun, run_all
from corral.tools.cli.seed_display import SeedDisplay, describe_summary
from corral.tools.cli.seed_set import SeedSet, parse_seeds, read_set
from corral.tools.cli.seeds import status_of_set
from file_limits import largest_file

DEADLINE_S = 240.0
TINY = {
    "training.train_batch_size_per_learner": 32,
    "training.minibatch_size": 16,
    "training.num_epochs": 1,
    "env_runners.num_envs_per_env_runner": 2,
    "rl_module.model_config.fcnet_hiddens": "[4]",
}
# The first env that is made while the file `fault` exists fails.
MY_ENVS = """
import os
from corral.testing import CountingEnv

def make_env(config):
    if os.path.exists("fault"):
        os.remove("fault")
        raise OSError("the simulator has no licence")
    return CountingEnv(config)
"""


def arguments(env: str = "corral.testing:CountingEnv") -> list[str]:
    return ["train", "--algo", "PPO", "--env", env, *(f"--set={name}={value}" for name, value in TINY.items())]


def write_run(run_dir: Path, **numbers: Any) -> Path:
    """Write the last result of a run, after an earlier one, and before one that is not whole."""
    run_dir.mkdir(parents=True)
    result = {
        "training_iteration": 7,
        "num_env_steps_sampled_lifetime": 700,
        "time_total_s": 1.5,
        "env_runners": {"episode_return_mean": numbers["trained"]},
        "evaluation": {"env_runners": {"episode_return_mean": numbers.get("evaluated")}},
    }
    first = {"training_iteration": 1, "env_runners": {"episode_return_mean": -1.0}}
    text = f"{json.dumps(first)}\n{json.dumps(result)}\n{{'training_iteration': 8, 'env"
    (run_dir / "result.jsonl").write_text(text, encoding="utf-8")
    return run_dir


def test_the_summary_has_mean_deviation_and_interval(tmp_path: Path) -> None:
    returns = [10.0, 20.0, 30.0, 40.0, 60.0]
    found = summarize_runs([write_run(tmp_path / str(value), trained=value) for value in returns])
    assert (found.metric, found.returns, found.mean) == (TRAINED, returns, 32.0)
    assert found.std == pytest.approx(math.sqrt(sum((value - 32) ** 2 for value in returns) / 4))
    assert (found.interval_low, found.interval_high) == t_interval(returns)
    assert found.interval_low < 32 < found.interval_high
    assert found.iqm == 30.0  # of 20, 30 and 40
    assert (found.iqm, found.iqm_low, found.iqm_high) == estimate_iqm([returns])
    said = f"interquartile mean 30.0, {found.iqm_low:.1f} .. {found.iqm_high:.1f}"
    assert describe_summary(found).endswith(f" .. {found.interval_high:.1f}; {said}")


def test_evaluated_returns_count_where_all_runs_have_them(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", trained=1.0, evaluated=10.0)
    other = write_run(tmp_path / "other", trained=3.0, evaluated=20.0)
    without = write_run(tmp_path / "without", trained=5.0)
    assert summarize_runs([one, other]).metric == EVALUATED
    assert summarize_runs([one, other]).mean == 15.0
    assert summarize_runs([one, other, without]).mean == 3.0
    assert math.isnan(summarize_runs([one]).interval_low)  # one return has no interval


def test_the_table_leaves_room_for_what_the_terminal_writes_at_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "60"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    runs = SeedSet(tmp_path, [0])
    write_run(runs.run_dir(0), trained=1_234_567.0)
    display = SeedDisplay(runs, [SeedRun(0, runs.run_dir(0), [])], "PPO on CartPole-v1", quiet=False)
    with display:
        display.update()
        table = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    rows = [len(line) for line in table.replace("\r", "\n").splitlines() if "│" in line]
    assert rows and max(rows) <= 58


def test_a_run_without_results_has_no_numbers(tmp_path: Path) -> None:
    assert math.isnan(last_numbers(tmp_path / "nowhere").trained_return)
    assert math.isnan(summarize_runs([]).mean)
    assert last_numbers(write_run(tmp_path / "run", trained=1.0)).training_iteration == 7


def test_the_last_result_may_be_a_long_line(tmp_path: Path) -> None:
    results = [{"training_iteration": number, "image": [0] * 200_000} for number in (1, 2)]
    lines = "".join(f"{json.dumps(result)}\n" for result in results)
    (tmp_path / "result.jsonl").write_text(f'{lines}{{"training_iteration": 3', encoding="utf-8")
    assert last_numbers(tmp_path).training_iteration == 2


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0-4", [0, 1, 2, 3, 4]), ("0,3,7", [0, 3, 7]), ("2, 5-6 ,0", [2, 5, 6, 0]), ("3", [3]), ("3-3", [3])],
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected numbers and ranges, such as 0-4 or 0,3,7-9"),
        ("1,,2", "expected numbers and ranges"),
        ("-1", "expected numbers and ranges"),
        ("0..4", "expected numbers and ranges"),
        ("4-0", "the range 4-0 ends before it begins"),
        ("0-4,2", "seed 2 is named twice"),
        ("0-999999999999", "more than 1000 seeds"),
        ("0-1000", "more than 1000 seeds"),
        (str(2**63), "a seed must be at most 9223372036854775807"),
    ],
)
def test_wrong_seeds(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_seeds(text)


def test_a_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_run(tmp_path / "seed-3", trained=5.0)
    written = SeedSet(tmp_path, [3, 1], {3: 0})
    written.write()
    assert read_set(tmp_path) == written
    found = json.loads((tmp_path / "seeds.json").read_text(encoding="utf-8"))
    assert [(run["seed"], run["run"], run["exit_status"]) for run in found["runs"]] == [
        (3, "seed-3", 0),
        (1, "seed-1", None),
    ]
    assert found["runs"][1]["trained_return"] is None
    assert found["summary"]["returns"] == [5.0] and found["summary"]["std"] is None


def test_only_runs_that_finished_count(tmp_path: Path) -> None:
    found = SeedSet(tmp_path, [0, 1, 2, 3], {0: 0, 1: 3, 2: 0})
    for seed, value in enumerate((4.0, 100.0, 6.0, 100.0)):
        write_run(found.run_dir(seed), trained=value)
    assert found.finished == [0, 2]
    assert (found.summary().returns, found.summary().mean) == ([4.0, 6.0], 5.0)
    assert describe_summary(found.summary()).startswith(": mean return 5.0, standard deviation 1.4, 95% interval -7.7 ")


@pytest.mark.parametrize(
    ("statuses", "expected"), [({0: 0, 1: 0}, 0), ({0: 0, 1: 3}, 3), ({0: 3, 1: 3}, 3), ({0: 3, 1: 7}, 1)]
)
def test_the_exit_status_of_a_set(statuses: dict[int, int], expected: int, tmp_path: Path) -> None:
    assert status_of_set(SeedSet(tmp_path, [0, 1], statuses)) == expected


class Alone(SeedRun):
    """A process that runs some code, and notes how many others run when it starts."""

    runs: ClassVar[list[Alone]] = []
    code = "pass"
    num_running = 0

    def start(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.num_running = sum(run.process is not None and run.process.poll() is None for run in self.runs)
        self.process = subprocess.Popen([sys.executable, "-c", self.code], stdin=subprocess.PIPE)


def test_runs_share_the_cores_and_no_more_than_asked_for_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(Alone, "runs", [Alone(seed, tmp_path, []) for seed in range(4)])
    monkeypatch.setattr(Alone, "code", "import sys; sys.stdin.read()")  # until the test closes its input

    def look() -> None:
        running = [run for run in Alone.runs if run.process is not None and run.process.poll() is None]
        if running and (len(running) >= 2 or Alone.runs[-1].process is not None):
            running[0].process.stdin.close()

    assert run_all(Alone.runs, 2, look, lambda: None) is None
    assert [run.num_running for run in Alone.runs] == [0, 1, 1, 1]
    assert Alone.runs[0].environment["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run_all([last := Alone(9, tmp_path, [])], 1, lambda: last.process.stdin.close(), lambda: None) is None
    assert last.environment["OMP_NUM_THREADS"] == "7"


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is of POSIX")
def test_a_run_that_is_killed_has_the_status_of_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alone, "code", "import os; os.kill(os.getpid(), 9)")
    run = Alone(0, tmp_path, [])
    assert run.status is None
    assert run_all([run], 1, lambda: None, lambda: None) is None
    assert run.status == 137


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is of POSIX")
def test_the_error_of_a_run_is_not_the_error_of_an_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = {
        "import sys; sys.exit('corral: the simulator has no licence')": "the simulator has no licence",
        "import os; os.kill(os.getpid(), 9)": "",
    }
    for code, message in attempts.items():
        run = SeedRun(0, tmp_path, [])
        monkeypatch.setattr(run, "_command", [sys.executable, "-S", "-c", code])
        run_all([run], 1, lambda: None, lambda: None)
        assert run.error_line() == message


@pytest.mark.parametrize("text", ["", "[]", '{"runs": [{}]}'])
def test_a_damaged_set_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "seeds.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunDirectoryError, match=r"seeds.json is damaged"):
        read_set(tmp_path)


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (["--seeds", "0-1", "--seed", "3"], 2, "--seed cannot be used with --seeds"),
        (["--seeds", "0-x"], 2, "expected numbers and ranges"),
        (["--seeds", "0-1", "--parallel", "-1"], 2, "--parallel -1: it must be a number of runs"),
        (["--parallel", "2"], 2, "--parallel needs --seeds"),
        (["--seeds", "0-1", "--set", "training.lrr=1"], 2, "Did you mean 'lr'?"),
        (["--seeds", "0-1", "--run-dir", "held"], 6, "already holds runs with --seeds: continue them with --resume"),
        (["--run-dir", "held"], 6, "already holds runs with --seeds: continue them with --resume held, or choose"),
        (["--seeds", "0-1", "--resume", "nowhere"], 6, "nowhere is not the directory of a run with --seeds"),
    ],
)
def test_wrong_usage_starts_nothing(
    more: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    SeedSet(tmp_path / "held", [0]).home.mkdir()
    SeedSet(tmp_path / "held", [0]).write()
    assert main([*arguments(), "--stop", "training_iteration=1", *more]) == status
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["held"]


@pytest.mark.slow
def test_a_seed_that_fails_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_envs.py").write_text(MY_ENVS, encoding="utf-8")
    (tmp_path / "fault").touch()
    home, stop = tmp_path / "set", ["--stop", "training_iteration=2"]
    assert main([*arguments("my_envs:make_env"), *stop, "--seeds", "4,2", "--run-dir", "set"]) == 3
    printed, errors = capsys.readouterr()
    assert "seed 4: failed (3)" in printed
    assert errors.startswith("corral: seed 4 failed: ") and "OSError: the simulator has no licence" in errors
    assert "1 of 2 seeds finished: mean return " in printed
    assert printed.rstrip().endswith("Continue the runs: corral train --resume set")
    assert read_set(home).statuses == {4: 3, 2: 0}
    assert "the simulator has no licence" in (home / "seed-4" / "output.txt").read_text(encoding="utf-8")
    assert last_numbers(home / "seed-2").training_iteration == 2
    settings = yaml.safe_load((home / "seed-2" / "config.yaml").read_text(encoding="utf-8"))
    assert (settings["debugging"]["seed"], settings["environment"]["env"]) == (2, "my_envs:make_env")


@pytest.mark.slow
def test_a_set_continues_with_the_seeds_that_have_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_envs.py").write_text(MY_ENVS, encoding="utf-8")
    (tmp_path / "fault").touch()
    home, stop = tmp_path / "set", ["--stop", "training_iteration=2"]
    evaluation = ["--set", "evaluation.evaluation_interval=1", "--set", "evaluation.evaluation_duration=2"]
    begin = [*arguments("my_envs:make_env"), *stop, *evaluation]
    assert main([*begin, "--seeds", "0-1", "--parallel", "2", "--run-dir", "set"]) == 3
    [finished] = read_set(home).finished
    output = (home / f"seed-{finished}" / "output.txt").read_bytes()

    # The seed that failed before it had a run begins, another one is added, and the finished one is left alone.
    assert main(["train", "--resume", "set", "--seeds", "0-2", "--quiet"]) == 0
    assert read_set(home).statuses == {0: 0, 1: 0, 2: 0}
    assert (home / f"seed-{finished}" / "output.txt").read_bytes() == output
    [line] = capsys.readouterr().out.splitlines()[-1:]
    assert line.startswith("3 seeds finished: evaluated return ") and "95% interval" in line

    # Another stop criterion continues all of them, exactly as one longer run of the seed.
    assert main(["train", "--resume", "set", "--stop", "training_iteration=3", "--quiet"]) == 0
    assert [last_numbers(home / f"seed-{seed}").training_iteration for seed in range(3)] == [3, 3, 3]
    alone = [*begin[: begin.index("--stop")], *evaluation, "--stop", "training_iteration=3"]
    assert main([*alone, "--seed", "1", "--run-dir", "alone", "--quiet"]) == 0
    found, expected = last_numbers(home / "seed-1"), last_numbers(tmp_path / "alone")
    assert (found.trained_return, found.evaluated_return) == (expected.trained_return, expected.evaluated_return)
    summary = json.loads((home / "seeds.json").read_text(encoding="utf-8"))["summary"]
    assert summary["metric"] == EVALUATED and summary["num_finished"] == 3
    assert summary["mean"] == pytest.approx(np.mean(summary["returns"]))


@pytest.mark.slow
def test_a_logger_is_added_when_a_set_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments(), "--stop", "training_iteration=1", "--seeds", "3", "--run-dir", "set"]) == 0
    more = ["--logger", "corral.runs.loggers:ImageLogger", "--tensorboard", "--stop", "training_iteration=2"]
    assert main(["train", "--resume", "set", *more, "--quiet"]) == 0
    run_dir = tmp_path / "set" / "seed-3"
    settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    assert settings["reporting"]["loggers"] == ["csv", "json", "corral.runs.loggers:ImageLogger", "tensorboard"]
    assert list(run_dir.glob("events.out.tfevents.*"))
    assert main(["train", "--resume", "set", "--tuned", "CartPole-v1"]) == 2
    assert "--tuned cannot be used with --resume" in capsys.readouterr().err
    assert main(["evaluate", "set"]) == 7
    assert "holds the runs of several seeds: name one of them, such as " in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is of POSIX")
def test_runs_end_with_a_checkpoint_when_the_command_is_killed(tmp_path: Path) -> None:
    command = corral_command(*arguments(), "--stop", "training_iteration=1000000")
    process = subprocess.Popen([*command, "--seeds", "5", "--run-dir", "set"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    run_dir = tmp_path / "set" / "seed-5"
    deadline_s = time.monotonic() + DEADLINE_S
    while math.isnan(last_numbers(run_dir).training_iteration):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    process.kill()
    process.wait()
    while not (run_dir / "run.log").read_text(encoding="utf-8").rstrip().endswith("Run ended by SIGTERM."):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert list((run_dir / "checkpoints").glob("iteration-*/metadata.json"))
    with contextlib.ExitStack() as stack:  # the process of the run gives its lock back
        while True:
            assert time.monotonic() < deadline_s
            with contextlib.suppress(RunDirectoryError):
                stack.enter_context(locked(run_dir))
                break
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_runs_with_their_checkpoints(number: signal.Signals, tmp_path: Path) -> None:
    command = corral_command(*arguments(), "--stop", "training_iteration=1000000")
    command += ["--seeds", "0-2", "--parallel", "2", "--run-dir", "set"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    home = tmp_path / "set"
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while any(math.isnan(last_numbers(home / f"seed-{seed}").training_iteration) for seed in (0, 1)):
            assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.terminate()
        process.communicate()
    assert (process.returncode, err) == (128 + number, "")
    assert "0 of 3 seeds finished. The runs are stored in set" in out
    assert read_set(home).statuses == {0: 128 + number, 1: 128 + number}
    for seed in (0, 1):
        assert list((home / f"seed-{seed}" / "checkpoints").glob("iteration-*/metadata.json"))
        log = (home / f"seed-{seed}" / "run.log").read_text(encoding="utf-8")
        assert log.rstrip().endswith(("Run interrupted.", "Run ended by SIGTERM."))
    assert not (home / "seed-2").exists()


def test_every_option_that_overrides_reaches_the_runs_of_a_set() -> None:
    """The other options are for the set, or are refused with `--resume`; a new one must be in one of the lists."""
    own = {"config", "tuned", "algo", "seed", "seeds", "parallel", "run_dir", "resume", "resume_or_start", "quiet"}
    of_runs = {
        "--env": "CartPole-v1",
        "--stop": "training_iteration=7",
        "--set": "training.lr=0.5",
        "--checkpoint-every": "9",
        "--logger": "csv",
        "--data": "recorded",
        "--record": "kept",
    }
    given = [part for option in of_runs.items() for part in option]
    options = make_parser().parse_args(["train", "--resume", "set", *given, "--tensorboard"])
    names = {*vars(options)} - own - {"command", "run", "end_with_input"}
    assert names == {"env", "stop", "settings", "checkpoint_every", "loggers", "tensorboard", "data", "record"}
    expected = {f"{name}={value}" for name, value in of_runs.items()} | {"--logger=tensorboard"}
    assert {*overriding_arguments(options)} == expected


def test_runs_that_wait_for_new_settings_get_them_when_the_set_is_continued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, started = tmp_path / "set", list[SeedRun]()
    run_dir = home / "seed-3"
    assert main([*arguments(), "--stop=training_iteration=1", "--seed=3", f"--run-dir={run_dir}", "--quiet"]) == 0
    (home / "experiment.yaml").write_text((run_dir / "config.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    SeedSet(home, [3], {3: 0}).write()

    def interrupted(runs: Any, *rest: Any) -> int:
        started[:] = runs
        return 130

    monkeypatch.setattr("corral.tools.cli.seeds.run_all", interrupted)
    for changes in (["--stop=training_iteration=2", "--set=training.lr=0.5"], []):
        assert main(["train", "--resume", str(home), *changes, "--quiet"]) == 130
    [run] = started
    command = run._command[run._command.index("--end-with-input") + 1 :]
    assert main(["train", *command, "--quiet"]) == 0
    settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    assert last_numbers(run_dir).training_iteration == 2
    assert (settings["training"]["lr"], settings["debugging"]["seed"]) == (0.5, 3)


def test_the_settings_of_a_set_stay_whole_when_there_is_no_room_for_new_ones(tmp_path: Path) -> None:
    settings = {"algo": "PPO", "environment": {"env": "corral.testing:CountingEnv"}, "stop": {"training_iteration": 1}}
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(settings), encoding="utf-8")
    SeedSet(tmp_path, [0, 1], {0: 0, 1: 0}).write()
    with largest_file(100):
        assert main(["train", "--resume", str(tmp_path), "--quiet"]) == 6
    assert yaml.safe_load(experiment.read_text(encoding="utf-8")) == settings


def test_a_run_whose_parent_was_killed_ends_though_its_env_does_not_return() -> None:
    code = """
        import time
        from corral.core.interrupts import ending_signals_raised
        from corral.tools.cli import pool

        pool.ORPHAN_PATIENCE_S = 1.0
        with ending_signals_raised():
            pool.end_with_input()
            print("ready", flush=True)
            while True:  # as an env in a step
                time.sleep(0.01)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdin.close()
        try:
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
