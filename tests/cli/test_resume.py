"""Runs of the command line that a signal ends, and that continue."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import warm
from console_script import corral_command
from corral.algorithms.fitting import read_config
from corral.runs.checkpoint import find_checkpoint, read_checkpoint
from corral.tools.cli.main import main

DEADLINE_S = 120.0
SETTINGS = {
    "training.train_batch_size_per_learner": 64,
    "training.minibatch_size": 64,
    "training.num_epochs": 1,
    "rl_module.model_config.fcnet_hiddens": [4],
    "env_runners.num_envs_per_env_runner": 2,
}
FOREVER = ["--stop", "training_iteration=1000000"]
PROCESSES = {
    "env_runners.num_env_runners": 1,
    "engine.engine_name": "process",
    "env_runners.vectorization": "async",
}

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def arguments(**settings: Any) -> list[str]:
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    return ["train", "--algo", "PPO", "--env", "corral.testing:CountingEnv", "--seed", "0", *given]


def rows(run_dir: Path) -> list[int]:
    with (run_dir / "progress.csv").open(newline="", encoding="utf-8") as file:
        return [int(row["training_iteration"]) for row in csv.DictReader(file)]


def processes() -> dict[int, int]:
    """Return the parent of each process that has not ended."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended just now
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    return parents


def family(pid: int) -> list[int]:
    """Return a process and those that it started, also indirectly."""
    parents = processes()
    members = [pid]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


class Training:
    """A run in a process of its own."""

    def __init__(self, run_dir: Path, *more: str, **settings: Any) -> None:
        self.run_dir = run_dir
        self.process = warm.Popen(
            corral_command(*arguments(**SETTINGS, **settings), *more, *FOREVER, "--run-dir", str(run_dir))
        )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_for(self, condition: Any) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def wait_for_iterations(self, count: int) -> None:
        self.wait_for(lambda: (self.run_dir / "progress.csv").exists() and len(rows(self.run_dir)) >= count)

    def end(self, number: signal.Signals, *, everywhere: bool = False) -> tuple[int, str, str]:
        """Send a signal to the run, or to all its processes too, as Slurm does; return status and output."""
        for pid in family(self.process.pid) if everywhere else [self.process.pid]:
            os.kill(pid, number)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@pytest.mark.parametrize(
    ("number", "settings"),
    [pytest.param(signal.SIGHUP, {}, marks=pytest.mark.slow), (signal.SIGTERM, PROCESSES)],
    ids=["SIGHUP", "SIGTERM_to_all_processes"],
)
def test_a_signal_ends_a_run_with_a_checkpoint(
    number: signal.Signals, settings: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with Training(run_dir, **settings) as training:
        training.wait_for_iterations(3)
        members = family(training.process.pid)
        assert len(members) == (4 if settings else 1)
        status, out, err = training.end(number, everywhere=bool(settings))
        deadline_s = time.monotonic() + DEADLINE_S
        while set(members) & processes().keys():
            assert time.monotonic() < deadline_s, "a worker outlived the run"
            time.sleep(0.02)
    assert (status, err) == (128 + number, "")
    assert f"Ended by {number.name} after " in out and f"corral train --resume {run_dir}" in out
    log = (run_dir / "run.log").read_text(encoding="utf-8")
    warnings = [line.partition(": ")[2] for line in log.splitlines() if " WARNING " in line or " ERROR " in line]
    assert warnings == [f"Run ended by {number.name}."]  # and no worker died before its state was saved
    done = rows(run_dir)
    saved = read_checkpoint(find_checkpoint(run_dir))
    if settings:
        assert [runner["counts"]["num_restarts"] for runner in saved.state["runners"]["runners"]] == [0]
    last = saved.metadata["training_iteration"]
    assert last in (done[-1], done[-1] + 1)  # the signal may arrive between an iteration and its row
    here = ["--set", "env_runners.num_env_runners=0", "--set", "env_runners.vectorization=sync", "--quiet"]
    assert main(["train", "--resume", str(run_dir), "--stop", f"training_iteration={last + 2}", *here]) == 0
    assert rows(run_dir) == [iteration for iteration in range(1, last + 3) if iteration in done or iteration > last]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_signal_ends_a_run_on_ray_with_the_same_status(tmp_path: Path) -> None:
    """Ray has a handler of its own, which would end the process at once, with another status."""
    on_ray = {"engine.engine_name": "ray", "env_runners.num_env_runners": 1}
    with Training(tmp_path / "run", **on_ray) as training:
        training.wait_for_iterations(2)
        status, out, _ = training.end(signal.SIGTERM)
    assert status == 128 + signal.SIGTERM and "Ended by SIGTERM after " in out


def test_a_killed_run_continues_from_its_last_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    with Training(run_dir, "--tensorboard", "--checkpoint-every", "0.2") as training:
        training.wait_for(lambda: list(run_dir.glob("checkpoints/iteration-*/metadata.json")))
        training.wait_for_iterations(rows(run_dir)[-1] + 5)
        # A second process may not continue it meanwhile.
        assert main(["train", "--resume", str(run_dir)]) == 6
        assert "belongs to a run that has not ended" in capsys.readouterr().err
        training.end(signal.SIGKILL)
    kept = read_checkpoint(find_checkpoint(run_dir)).metadata["training_iteration"]
    with (run_dir / "progress.csv").open(newline="", encoding="utf-8") as file:
        times_s = [float(row["time_total_s"]) for row in csv.DictReader(file)]
    assert times_s[-1] - times_s[kept - 1] < 10  # the interval, and what a busy machine adds

    stop = f"training_iteration={kept + 2}"
    assert main(["train", "--resume", str(run_dir), "--stop", stop, "--set", "training.lr=0.5"]) == 0
    assert rows(run_dir) == list(range(1, kept + 3))
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 2
    settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    assert settings["stop"] == {"training_iteration": kept + 2} and settings["training"]["lr"] == 0.5
    assert settings["checkpointing"]["checkpoint_every_s"] == 0.2
    capsys.readouterr()

    # Its own criteria are met already, so that it says so and ends.
    assert main(["train", "--resume", str(run_dir)]) == 0
    assert f"training_iteration={kept + 2} reached {kept + 2}." in capsys.readouterr().out
    assert rows(run_dir) == list(range(1, kept + 3))


SEVERAL_AGENTS = {
    "multi_agent.policies": "{red: {}, blue: {}, rest: {module_class: 'several_agents:Repeats'}}",
    "multi_agent.policy_mapping_fn": "several_agents:module_of",
}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", pytest.param("process", marks=pytest.mark.slow)])
def test_a_killed_run_of_several_agents_continues_exactly(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(Path(__file__).parents[1] / "algorithms")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    settings = {**SEVERAL_AGENTS, **({"env_runners.num_env_runners": 1} if where == "process" else {})}
    settings["env_runners.straggler_factor"] = "null"
    more = ["--env", "several_agents:Signals", "--checkpoint-every", "0.2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with Training(killed, *more, **settings) as training:
        training.wait_for(lambda: list(killed.glob("checkpoints/iteration-*/metadata.json")))
        training.wait_for_iterations(rows(killed)[-1] + 3)
        training.end(signal.SIGKILL)
    last = rows(killed)[-1] + 5
    stop = ["--stop", f"training_iteration={last}", "--quiet"]
    assert main(["train", "--resume", str(killed), *stop]) == 0
    assert main([*arguments(**SETTINGS, **settings), *more, *stop, "--run-dir", str(whole)]) == 0
    found = []
    for run_dir in (killed, whole):
        with (run_dir / "progress.csv").open(newline="", encoding="utf-8") as file:
            learned = [
                {name: row[name] for name in row if name.startswith("learners/")} for row in csv.DictReader(file)
            ]
        assert len(learned) == last and learned[0]["learners/blue/total_loss"]
        found.append(learned)
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["option", "file"])
def test_a_number_below_a_limit_ends_a_run(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = ["--stop", "learners/default_policy/entropy<100"]
    if how == "file":
        (tmp_path / "stop.yaml").write_text("stop: {learners/default_policy/entropy: {below: 100}}", encoding="utf-8")
        stop = ["--config", str(tmp_path / "stop.yaml")]
    assert main([*arguments(**SETTINGS), *stop, "--run-dir", str(tmp_path / "run"), "--quiet"]) == 0
    assert "Done after 1 iteration, " in capsys.readouterr().out
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert settings["stop"] == {"learners/default_policy/entropy": {"below": 100.0}}
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0  # and is met already
    assert "is below 100. The run is stored in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--config", "x.yaml"], "--config cannot be used with --resume"),
        (["--algo", "DQN"], "--algo cannot be used with --resume"),
        (["--run-dir", "other"], "--run-dir cannot be used with --resume"),
        (["--set", "training.lrr=1"], "Did you mean 'lr'?"),
        (["--checkpoint-every", "0"], "checkpoint_every_s='0' must be positive"),
    ],
)
def test_wrong_usage_of_resume(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    small = arguments(**SETTINGS)
    assert main([*small, "--stop", "training_iteration=1", "--run-dir", str(run_dir), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", str(run_dir), *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--seed", "7"], ["--set", "debugging.seed=7"]])
def test_another_seed_is_warned_of(given: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir, message = tmp_path / "run", "seed=7 has no effect: it only sets how a run begins"
    assert main([*arguments(**SETTINGS), "--stop", "training_iteration=1", "--run-dir", str(run_dir), "--quiet"]) == 0
    for iteration, seed in ((2, []), (3, ["--set", "debugging.seed=0"]), (4, given)):
        stop = ["--stop", f"training_iteration={iteration}", "--quiet"]
        assert main(["train", "--resume", str(run_dir), *stop, *seed]) == 0
        assert any(message in text for text in caplog.messages) == (seed == given)


@pytest.mark.parametrize("more", [[], ["--set", "evaluation.evaluation_interval=1"]])
def test_settings_of_rounds_that_nothing_plays_are_warned_of(
    more: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = "evaluation_duration=1 has no effect without evaluation_interval: no round is played."
    given = ["--set", "evaluation.evaluation_duration=1", *more, "--stop", "training_iteration=1", "--quiet"]
    assert main([*arguments(**SETTINGS), *given, "--run-dir", str(tmp_path / "run")]) == 0
    assert (message in caplog.messages) == (not more)


def test_a_directory_that_cannot_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(tmp_path)]) == 6
    assert "is not the directory of a run: it has no config.yaml" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("algo: PPO\n", encoding="utf-8")
    assert main(["train", "--resume", str(tmp_path)]) == 7
    assert "holds no complete checkpoint" in capsys.readouterr().err


def test_settings_that_no_file_can_name_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from corral import PPOConfig
    from corral.testing import CountingEnv

    config = PPOConfig().environment(lambda config: CountingEnv(config)).rl_module(model_config={"fcnet_hiddens": [4]})
    config.training(train_batch_size_per_learner=32, minibatch_size=32, num_epochs=1)
    with config.build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress=False)
    resume = ["train", "--resume", str(tmp_path / "run"), "--stop", "training_iteration=2", "--quiet"]
    assert main(resume) == 2
    message = capsys.readouterr().err
    assert "settings that no file can name (environment.env: <function" in message and "fit(resume=...)" in message
    assert main([*resume, "--env", "corral.testing:CountingEnv"]) == 0
    assert rows(tmp_path / "run") == [1, 2]


KILLED = """
import os, signal
from pathlib import Path
from corral.testing import CountingEnv

class Killed(CountingEnv):
    "Ends its process in the given step, as a crash of the machine would, unless it has done so before."

    def __init__(self, config):
        super().__init__({})
        self.at_step, self.mark, self.num_steps = config["at_step"], config["mark"], 0

    def step(self, action):
        self.num_steps += 1
        if self.num_steps == self.at_step and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
"""


class Killed:
    """Commands that train on an env which ends their process once, in a working directory of their own."""

    def __init__(self, directory: Path, at_step: int) -> None:
        self.directory = directory
        (directory / "killed.py").write_text(KILLED, encoding="utf-8")
        settings = SETTINGS | {"environment.env_config": f"{{at_step: {at_step}, mark: {directory / 'mark'}}}"}
        given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        self.command = ["--algo", "PPO", "--env", "killed:Killed", *given, "--stop", "training_iteration=3", "--quiet"]

    def train(self, *more: str) -> subprocess.CompletedProcess[str]:
        arguments = corral_command("train", *more)
        return warm.run(arguments, cwd=self.directory, timeout=5 * DEADLINE_S)


# With two sub-envs, an iteration of 64 env steps has 32 steps of each, and the first step of an env is in its check.
@pytest.mark.slow_cases("40")
@pytest.mark.parametrize("at_step", [pytest.param(10, marks=pytest.mark.slow), 40])
def test_a_run_that_is_killed_at_once_continues(at_step: int, tmp_path: Path) -> None:
    killed = Killed(tmp_path, at_step)
    assert killed.train(*killed.command, "--seed", "3", "--run-dir", "run").returncode == -signal.SIGKILL
    found = killed.train("--resume", "run", "--quiet")
    assert found.returncode == 0, found.stderr
    assert killed.train(*killed.command, "--seed", "3", "--run-dir", "whole").returncode == 0
    last, whole = (read_checkpoint(find_checkpoint(tmp_path / name)) for name in ("run", "whole"))
    assert {name: part.tobytes() for name, part in flat(last.weights)} == {
        name: part.tobytes() for name, part in flat(whole.weights)
    }
    assert rows(tmp_path / "run") == [1, 2, 3]


def flat(value: Any, place: str = "") -> Any:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{place}/{key}")
    else:
        yield place, value


def test_one_command_begins_and_continues_a_run(tmp_path: Path) -> None:
    killed = Killed(tmp_path, 50)
    command = [*killed.command, "--resume-or-start", "run"]
    assert killed.train(*command).returncode == -signal.SIGKILL
    assert killed.train(*command).returncode == 0 and rows(tmp_path / "run") == [1, 2, 3]
    assert killed.train(*command).returncode == 0 and rows(tmp_path / "run") == [1, 2, 3]  # it has finished
    assert killed.train("--resume-or-start", "run", "--stop", "training_iteration=4", "--quiet").returncode == 0
    assert rows(tmp_path / "run") == [1, 2, 3, 4]
    log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert [
        line.rpartition(" continues from ")[2].split(",")[0] for line in log.splitlines() if " continues from" in line
    ] == [*("iteration 1", "iteration 3", "iteration 3")]


def test_the_same_command_keeps_the_seed_that_was_drawn(tmp_path: Path) -> None:
    home = tmp_path / "run"
    command = [*arguments(**SETTINGS), "--resume-or-start", str(home), "--quiet"]
    command = [part for part in command if part not in ("--seed", "0")] + ["--stop"]
    assert main([*command, "training_iteration=1"]) == 0
    seed = read_config(home)["debugging"]["seed"]
    assert main([*command, "training_iteration=2"]) == 0
    assert read_config(home)["debugging"]["seed"] == seed and rows(home) == [1, 2]
    assert "Settings that differ" not in (home / "run.log").read_text(encoding="utf-8")


def test_one_command_continues_the_runs_of_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from corral.tools.cli.seed_set import SeedSet

    settings = {"algo": "PPO", "environment": {"env": "corral.testing:CountingEnv"}, "stop": {"training_iteration": 1}}
    for name in ("settings.yaml", "experiment.yaml"):
        (tmp_path / name).write_text(yaml.safe_dump(settings), encoding="utf-8")
    SeedSet(tmp_path, [0, 1], {0: 0, 1: 0}).write()
    command = ["train", "--config", str(tmp_path / "settings.yaml"), "--seeds", "0,1", "--resume-or-start"]
    assert main([*command, str(tmp_path), "--quiet"]) == 0  # all have finished


@pytest.mark.parametrize("option", ["--resume", "--run-dir"])
def test_two_directories_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(), "--resume-or-start", "a", option, "b", *FOREVER]) == 2
    assert f"{option} cannot be used with --resume-or-start" in capsys.readouterr().err
