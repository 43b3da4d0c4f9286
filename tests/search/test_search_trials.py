"""`corral search`: real trials in processes of their own, read back from SQLite by Optuna itself."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
import yaml

from console_script import corral_command
from corral import PPOConfig
from corral.engines.own_commands import own_command
from corral.errors import RunDirectoryError
from corral.runs.loggers.run import locked
from corral.runs.loggers.run_summary import last_numbers
from corral.tools.cli import search_loop
from corral.tools.cli.main import main
from corral.tools.cli.search_loop import Messages, SearchLoop
from corral.tools.cli.search_trial import PRUNE
from corral.tools.search.settings import Search, make_search
from corral.tools.search.study import ask, open_study, requeue_running

DEADLINE_S = 240.0
# The return is 4 times the level, whatever the policy does. Levels 13 and 14 fail, level 9 kills the process, and
# episodes wait while the file exists.
MY_ENVS = """
import os, time
import gymnasium as gym, numpy as np

class Level(gym.Env):
    num_steps = 0  # of this process; the first ones check the env before there is a run
    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config):
        self.level = config["level"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self.level in (13, 14):
            raise OSError("the simulator has no licence")
        if self.level == 9:
            os.kill(os.getpid(), 9)
        Level.num_steps += 1
        if Level.num_steps > 60 and os.path.exists("wait"):  # the episode does not end before the file is removed
            with open("waiting", "a") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(0.05)
            return np.zeros(1, np.float32), 0.0, False, False, {}
        self.t += 1
        return np.zeros(1, np.float32), float(self.level), False, self.t == 4, {}
"""
TINY = {"train_batch_size_per_learner": 32, "minibatch_size": 32, "num_epochs": 1}


def experiment(env: str = "CartPole-v1", **search: Any) -> dict[str, Any]:
    """An experiment of few steps, with three rounds."""
    return {
        "algo": "PPO",
        "environment": {"env": env},
        "training": TINY,
        "rl_module": {"model_config": {"fcnet_hiddens": [4]}},
        "evaluation": {"evaluation_interval": 1, "evaluation_duration": 2},
        "stop": {"training_iteration": 3},
        "search": {"num_startup_trials": 1, "num_warmup_rounds": 0, **search},
    }


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes an experiment and returns the command that searches it, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "levels_to_search.py").write_text(MY_ENVS, encoding="utf-8")

    def write(settings: dict[str, Any], home: str = "found", parallel: int = 1) -> list[str]:
        (tmp_path / "search.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        return ["search", "--config", "search.yaml", "--run-dir", home, "--parallel", str(parallel)]

    return write


def stored(home: Path) -> list[Any]:
    """The trials as Optuna reads them."""
    return list(optuna.load_study(study_name="search", storage=f"sqlite:///{home}/search.db").trials)


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


class Told:
    """What a trial says in place of a process: the messages that `says` has for its number."""

    says: Callable[[int], list[dict[str, Any]]]

    def __init__(self, trial: Any, home: Path, search: Search, environment: Any, to: Messages) -> None:
        self.trial, self.outcome, self.process, self.answers = trial, dict[str, Any](), self, list[str]()
        for message in type(self).says(trial.number):
            to.put((self, message))  # type: ignore[arg-type]
        self.heard.append(self)

    heard: ClassVar[list[Told]] = []

    def answer(self, text: str) -> None:
        self.answers.append(text)

    status = 0

    def wait_for_messages(self) -> None:
        pass

    def reason(self) -> str:
        return "told to fail"


def told_search(
    says: Callable[[int], list[dict[str, Any]]], home: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[list[Any], list[list[str]]]:
    """Run the loop of a search whose trials say what they are told to; return the trials of the study, and the answers.

    One trial was interrupted before.
    """
    group = {"space": {"gamma": {"choice": [0.9, 0.99]}}, "num_startup_trials": 1, **settings}
    search = make_search(
        PPOConfig().environment("CartPole-v1").evaluation(evaluation_interval=1), {"training_iteration": 4}, group
    )
    monkeypatch.setattr(Told, "says", staticmethod(says), raising=False)
    monkeypatch.setattr(Told, "heard", [])
    monkeypatch.setattr(search_loop, "TrialProcess", Told)
    with open_study(home, search) as study:
        ask(study, search)
        assert requeue_running(study) == 1
        assert SearchLoop(search, study, home, 1, lambda number, trials: None).run(lambda: None) is None
        return list(study.get_trials()), [one.answers for one in Told.heard]


def test_a_trial_has_the_mean_of_its_seeds_and_one_that_was_interrupted_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, _ = told_search(
        lambda number: [{"values": [1.0 * number, 3.0 * number]}], tmp_path, monkeypatch, num_trials=3, num_seeds=2
    )
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert [trial.value for trial in trials[1:]] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("num_warmup_rounds", [0, 2])
def test_the_median_ends_a_trial_after_its_rounds_of_warmup(
    num_warmup_rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(number: int) -> list[dict[str, Any]]:
        return [{"round": index, "value": 10.0 / number} for index in (1, 2, 3, 4)] + [{"values": [10.0 / number]}]

    settings = {"num_trials": 2, "num_startup_trials": 1, "num_warmup_rounds": num_warmup_rounds}
    _, answers = told_search(says, tmp_path, monkeypatch, **settings)
    assert answers[0] == ["continue"] * 4
    assert answers[1] == ["continue"] * num_warmup_rounds + [PRUNE] * (4 - num_warmup_rounds)


def test_the_process_of_a_trial_finds_the_files_of_the_working_directory(begin: Any, tmp_path: Path) -> None:
    begin({})
    settings = experiment("levels_to_search:Lvel")
    del settings["search"]
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [
        *own_command("corral.tools.cli.search_trial"),
        str(tmp_path),
        "evaluation/env_runners/episode_return_mean",
        "0",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert "has no env 'Lvel'. Did you mean 'Level'?" in json.loads(process.stdout.read())["failed"]


@pytest.mark.slow
def test_trials_are_completed_pruned_and_failed(begin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = {"env_config.level": {"choice": [3, 1, 13, 5]}}
    command = begin(experiment("levels_to_search:Level", space=space, sampler="grid", num_seeds=2))
    assert main(command) == 0
    printed, errors = capsys.readouterr()
    home = tmp_path / "found"

    trials = stored(home)
    assert [trial.params for trial in trials] == [{"environment.env_config.level": level} for level in (3, 1, 13, 5)]
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE"]
    assert (trials[0].value, trials[0].user_attrs) == (12.0, {"seed_values": [12.0, 12.0]})
    assert trials[0].intermediate_values == {1: 12.0, 2: 12.0, 3: 12.0}
    assert trials[1].intermediate_values == {1: 4.0}  # it ended with the first round of its first seed
    assert last_numbers(home / "trials" / "0001" / "seed-0").training_iteration == 1
    assert not (home / "trials" / "0001" / "seed-1").exists()

    assert "trial 0: 12 (12, 12), " in printed and "trial 1: pruned after round 1 at 4, " in printed
    assert "corral: trial 2 failed: " in errors and "OSError: the simulator has no licence" in errors
    assert "2 complete, 1 pruned, 1 failed; the best is trial 3, 20: level=5." in printed
    rows = [*csv.DictReader((home / "trials.csv").read_text(encoding="utf-8").splitlines())]
    assert [(row["state"], row["value"], row["seed-1"]) for row in rows[:2]] == [
        ("complete", "12.0", "12.0"),
        ("pruned", "4.0", ""),
    ]
    assert "no licence" in rows[2]["reason"]

    best = read_yaml(home / "best.yaml")
    assert (best["environment"]["env_config"], best["stop"]) == ({"level": 5}, {"training_iteration": 3.0})
    assert main(["train", "--config", "found/best.yaml", "--run-dir", "trained", "--quiet"]) == 0
    assert last_numbers(tmp_path / "trained").evaluated_return == 20.0

    # A search that is over has no more trials when it continues.
    assert main(["search", "--resume", "found", "--quiet"]) == 0
    assert len(stored(home)) == 4


@pytest.mark.slow
def test_options_override_the_file_and_a_search_continues_with_its_trials(
    begin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"lr": {"log": [1e-4, 1e-2]}, "num_epochs": {"int": [1, 3]}, "lambda_": {"choice": [0.9, 0.99]}}
    settings = experiment("levels_to_search:Level", space=space, pruner="none", num_trials=9)
    settings["environment"]["env_config"] = {"level": 13}
    options = ["--env", "CartPole-v1", "--set", "environment.env_config={}", "--set", "training.gamma=0.5"]
    options += ["--stop", "training_iteration=1", "--seeds-per-trial", "2", "--trials", "1"]
    command = [*begin(settings), *options, "--quiet"]
    assert main(command) == 0
    assert capsys.readouterr().out.count("\n") == 1
    home = tmp_path / "found"
    for seed in (0, 1):
        run = read_yaml(home / "trials" / "0000" / f"seed-{seed}" / "config.yaml")
        assert (run["environment"]["env"], run["training"]["gamma"]) == ("CartPole-v1", 0.5)
        assert (run["debugging"]["seed"], run["stop"]) == (seed, {"training_iteration": 1.0})

    assert main(command) == 6
    assert "found already holds a search: continue it with corral search --resume found" in capsys.readouterr().err
    [first] = stored(home)
    assert main(["search", "--resume", "found", "--trials", "2", "--parallel", "1"]) == 0
    trials = stored(home)
    assert trials[0] == first and [trial.state.name for trial in trials] == ["COMPLETE"] * 2
    assert trials[0].params["training.lr"] != trials[1].params["training.lr"]  # no draw is made twice
    assert read_yaml(home / "experiment.yaml")["search"]["num_trials"] == 2
    best = max(trials, key=lambda trial: trial.value)
    found = read_yaml(home / "best.yaml")["training"]
    assert {f"training.{name}": found[name] for name in ("lr", "num_epochs", "lambda_")} == best.params
    state = json.loads((home / "search.json").read_text(encoding="utf-8"))
    assert (state["best"], state["mode"]) == (best.number, "max")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trials(begin: Any, tmp_path: Path) -> None:
    """A search that was continued is the same as well: the seventh trial draws the same wherever it begins."""
    space = {"lr": {"log": [1e-4, 1e-2]}, "gamma": {"uniform": [0.9, 1.0]}}
    settings = experiment(space=space, num_trials=6, num_startup_trials=3, num_seeds=2)
    assert main(begin(settings, "one")) == 0
    settings["search"]["num_trials"] = 4
    assert main(begin(settings, "other")) == 0
    assert main(["search", "--resume", "other", "--trials", "6", "--parallel", "1"]) == 0
    one, other = (
        [(trial.params, trial.state, trial.value, trial.intermediate_values) for trial in stored(tmp_path / name)]
        for name in ("one", "other")
    )
    assert one == other
    settings["search"] |= {"num_trials": 1, "seed": 1}
    assert main(begin(settings, "third")) == 0
    assert stored(tmp_path / "third")[0].params != one[0][0]
    assert json.loads((tmp_path / "one" / "search.json").read_text(encoding="utf-8"))["importances"].keys() == {
        "training.lr",
        "training.gamma",
    }


@pytest.mark.slow
def test_the_median_ends_no_trial_before_its_rounds_of_warmup_are_over(begin: Any, tmp_path: Path) -> None:
    space = {"env_config.level": {"choice": [3, 1]}}
    assert main(begin(experiment("levels_to_search:Level", space=space, sampler="grid", num_warmup_rounds=1))) == 0
    assert stored(tmp_path / "found")[1].intermediate_values == {1: 4.0, 2: 4.0}


@pytest.mark.slow
@pytest.mark.parametrize("pruner", ["hyperband", "successive_halving"])
def test_other_pruners_and_the_smallest_value(pruner: str, begin: Any, tmp_path: Path) -> None:
    space = {"env_config.level": {"choice": [1, 2, 3, 4]}}
    settings = experiment("levels_to_search:Level", space=space, sampler="grid", pruner=pruner, mode="min")
    assert main(begin(settings, parallel=2)) == 0
    trials = stored(tmp_path / "found")
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "PRUNED"}
    assert trials[0].state.name == "COMPLETE" or pruner == "successive_halving"


@pytest.mark.slow
def test_a_search_of_which_the_first_trials_fail_ends(
    begin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"env_config.level": {"choice": [13, 9, 14, 1]}}
    settings = experiment("levels_to_search:Level", space=space, sampler="grid")
    assert main(begin(settings)) == 1
    printed, errors = capsys.readouterr()
    assert "3 failed. The search is stored in found" in printed and errors.count("no licence") >= 2
    assert "corral: trial 1 failed: its process ended by SIGKILL" in errors
    assert "all of the first trials failed: the search ends" in errors
    assert printed.rstrip().endswith("Continue the search: corral search --resume found")
    assert not (tmp_path / "found" / "best.yaml").exists()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not (stat.exists() and stat.read_text(encoding="utf-8").rpartition(") ")[2].startswith("Z"))
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_for(condition: Any, process: subprocess.Popen[Any] | None = None) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s and (process is None or process.poll() is None)
        time.sleep(0.05)


def is_free(home: Path) -> bool:
    try:
        with locked(home):
            return True
    except RunDirectoryError:
        return False


@pytest.mark.slow_cases("9")
@pytest.mark.skipif(os.name != "posix", reason="kill -9 is of POSIX")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGINT, signal.SIGTERM))]
)
def test_a_search_that_is_killed_leaves_no_process_and_continues(
    number: signal.Signals, begin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = experiment("levels_to_search:Level", space={"env_config.level": {"uniform": [1, 2]}}, num_trials=1)
    (tmp_path / "wait").touch()
    process = subprocess.Popen(corral_command(*begin(settings)), stdout=subprocess.PIPE, text=True)
    home, waiting = tmp_path / "found", tmp_path / "waiting"
    try:
        wait_for(lambda: waiting.exists() and waiting.read_text(encoding="utf-8").endswith("\n"), process)
        pid = int(waiting.read_text(encoding="utf-8").splitlines()[0])
        process.send_signal(number)
        printed, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not is_running(pid))
    wait_for(lambda: is_free(home))
    if number != signal.SIGKILL:
        assert "no trial ended. The search is stored in found" in printed
        assert printed.rstrip().endswith("Continue the search: corral search --resume found")
    log = (home / "trials" / "0000" / "seed-0" / "run.log").read_text(encoding="utf-8")
    assert log.rstrip().endswith(("Run ended by SIGTERM.", "Run interrupted."))

    (tmp_path / "wait").unlink()
    assert main(["search", "--resume", "found"]) == 0
    interrupted, again = stored(home)
    assert (interrupted.state.name, again.state.name) == ("FAIL", "COMPLETE")
    assert interrupted.params == again.params and again.value == pytest.approx(
        4 * again.params["environment.env_config.level"]
    )
    found = json.loads((home / "search.json").read_text(encoding="utf-8"))
    assert [trial["state"] for trial in found["trials"]] == ["interrupted", "complete"]
    if number == signal.SIGKILL:
        assert "1 that were interrupted begin again" in capsys.readouterr().out


def test_a_damaged_study_is_named(begin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(experiment(space={"lr": {"log": [1e-4, 1e-2]}}))
    home = tmp_path / "found"
    home.mkdir()
    for name, text in (("search.json", "{}"), ("search.db", "no database " * 99)):
        (home / name).write_text(text, encoding="utf-8")
    (tmp_path / "search.yaml").rename(home / "experiment.yaml")
    assert main(["search", "--resume", "found"]) == 6
    assert "search.db is damaged or cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_number_that_is_never_measured_is_named(
    begin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"lr": {"log": [1e-4, 1e-2]}}
    assert main(begin(experiment(space=space, metric="episode_retrun_mean", num_trials=1))) == 1
    assert "search: metric 'episode_retrun_mean' does not appear in the result. Did you mean" in capsys.readouterr().err
    rare = experiment(space=space, num_trials=1)
    rare["evaluation"]["evaluation_interval"] = 9
    assert main(begin(rare, "rare")) == 1
    assert "is nan at the end of the run with seed 0: train longer, or evaluate more often" in capsys.readouterr().err


def test_training_imports_nothing_of_the_search() -> None:
    code = "import sys, corral.tools.cli.train; from corral.tools.cli.parser import make_parser; make_parser()\n"
    code += "rooms = ('corral.tools.search', 'corral.tools.cli.search', 'optuna')\n"
    code += "print([name for name in sys.modules if name.startswith(rooms)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
