"""The command line, end to end: what it writes, what it says, and how it ends."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import warm
from console_script import corral_command
from corral.callbacks import EVENTS
from corral.tools.cli.main import main
from user_files import SMALL, write_my_algo

CARTPOLE = ["train", "--algo", "PPO", "--env", "CartPole-v1", "--seed", "0"]
SHORT = ["--stop", "num_env_steps=4000"]
RUN_FILES = {"config.yaml", "progress.csv", "result.jsonl", "run.log", "checkpoints", ".lock"}
DEADLINE_S = 120.0


def corral(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm.run(corral_command(*arguments), cwd=cwd, timeout=DEADLINE_S)


def only_run(cwd: Path) -> Path:
    (run_dir,) = (cwd / "runs").iterdir()
    return run_dir


def read_run(
    run_dir: Path, may_lack: frozenset[str] = frozenset()
) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """Return the rows of progress.csv and the objects of result.jsonl, after checking that all files are there."""
    assert {path.name for path in run_dir.iterdir()} | may_lack == RUN_FILES
    with (run_dir / "progress.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = (run_dir / "result.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    assert [row["training_iteration"] for row in rows] == [str(result["training_iteration"]) for result in results]
    return rows, results


def test_train_writes_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = corral([*CARTPOLE, *SHORT, "--set", "training.lr=3e-3"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    run_dir = only_run(tmp_path)
    assert run_dir.name.startswith("PPO-CartPole-v1-")
    *_, last, watch, measure = done.stdout.splitlines()
    assert last.startswith("Done after 2 iterations, ")
    assert last.endswith(f"The run is stored in runs/{run_dir.name}")
    assert watch.endswith(f" corral play runs/{run_dir.name}") and measure.endswith(
        f" corral evaluate runs/{run_dir.name}"
    )

    rows, results = read_run(run_dir)
    assert [result["training_iteration"] for result in results] == [1, 2]
    assert results[-1]["num_env_steps_sampled_lifetime"] >= 4000
    assert float(rows[-1]["env_runners/episode_return_mean"]) == results[-1]["env_runners"]["episode_return_mean"]
    settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    assert settings["training"]["lr"] == 3e-3
    assert settings["debugging"]["seed"] == 0
    text = (run_dir / "run.log").read_text(encoding="utf-8")
    assert "Stopped: num_env_steps=" in text
    assert text.rstrip().endswith("Run finished.")

    # The resolved config of a run is an experiment file itself, and gives the same run.
    again = corral(
        ["train", "--config", str(run_dir / "config.yaml"), *SHORT, "--run-dir", "again", "--quiet"], tmp_path
    )
    assert (again.returncode, again.stderr) == (0, "")
    assert len(again.stdout.splitlines()) == 1
    _, repeated = read_run(tmp_path / "again")
    assert [r["env_runners"]["episode_return_mean"] for r in repeated] == [
        r["env_runners"]["episode_return_mean"] for r in results
    ]


@pytest.mark.parametrize("kept", [0, 1])
def test_only_a_run_with_a_checkpoint_names_the_commands_that_need_one(
    kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["training.train_batch_size_per_learner=16", "training.minibatch_size=null"]
    settings += [f"checkpointing.num_checkpoints_kept={kept}", "checkpointing.best_checkpoint_metric=null"]
    command = ["train", "--algo", "PPO", "--env", "corral.testing:CountingEnv", "--run-dir", str(tmp_path / "run")]
    command += ["--stop", "training_iteration=1", "--set", "env_runners.num_envs_per_env_runner=2"]
    assert main([*command, *(part for setting in settings for part in ("--set", setting))]) == 0
    assert capsys.readouterr().out.count(f"{tmp_path / 'run'}\n") == 1 + 2 * kept  # `play` and `evaluate`


def test_a_file_and_what_overrides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = {
        "algo": "PPO",
        "environment": {"env": "CartPole-v1"},
        "training": {"lr": [[0, 1e-3], [10_000, 0]], "train_batch_size_per_learner": 512, "minibatch_size": 128},
        "rl_module": {"model_config": {"fcnet_hiddens": [8, 8]}},
        "stop": {"training_iteration": 1000, "num_env_steps": 1},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment), encoding="utf-8")
    options = ["--seed", "7", "--stop", "training_iteration=2", "--run-dir", "here"]
    settings = ["--set", "training.minibatch_size=64", "--set", "rl_module.model_config.fcnet_activation=relu"]
    assert main(["train", "--config", "experiment.yaml", *options, *settings]) == 0
    _, results = read_run(tmp_path / "here")
    assert len(results) == 2
    written = yaml.safe_load((tmp_path / "here" / "config.yaml").read_text(encoding="utf-8"))
    assert written["training"]["lr"] == [[0, 1e-3], [10_000, 0]]
    assert written["training"]["minibatch_size"] == 64
    assert written["training"]["train_batch_size_per_learner"] == 512
    assert written["rl_module"]["model_config"] == {"fcnet_hiddens": [8, 8], "fcnet_activation": "relu"}
    assert written["debugging"]["seed"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algo", "PPA"], "unknown algorithm 'PPA'. Did you mean 'PPO'?"),
        (
            ["--algo", "A2C"],
            "unknown algorithm 'A2C'. Known algorithms: APPO, BC, CQL, CrossQ, DDPG, DQN, DreamerV3, IMPALA, IQL, "
            "MARWIL, PPO, PQN, SAC, TD3, TQC.",
        ),
        (["--algo", "no_such_module_xyz:Config"], "algo 'no_such_module_xyz:Config' cannot be imported: No module"),
        (["--env", "CartPol-v1"], "unknown env id 'CartPol-v1'. Did you mean 'CartPole-v1'?"),
        (
            ["--env", "corral.testing:CountinEnv"],
            "'corral.testing' has no env 'CountinEnv'. Did you mean 'CountingEnv'?",
        ),
        (["--env", "pettingzoo:utils"], "pettingzoo.utils is a module: name what makes the env in it, such as "),
        (["--env", "no_such_module_xyz:Env"], "cannot be imported: No module named 'no_such_module_xyz'"),
        (["--set", "training.lrr=1"], "training: unknown setting 'lrr'. Did you mean 'lr'?"),
        (["--set", "train.lr=1"], "unknown setting 'train.lr'. Did you mean 'training.lr'?"),
        (["--set", "training.seed=1"], "It belongs to .debugging(...)."),
        (["--set", "training.lr=fast"], "lr='fast'"),
        (["--set", "training.lr"], "--set 'training.lr': expected NAME=VALUE."),
        (["--set", "training=3"], "'training' is a group of settings: name one of them, such as training.lr."),
        (["--set", "environment.env_config={a: 1, a: 2}"], "'a' is there twice"),
        (["--seed", str(2**63)], "seed=9223372036854775808 must be at most 9223372036854775807."),
        (["--set", "training.lr=[1"], "the value is not valid YAML"),
        (["--set", "training.minibatch_size=100000"], "minibatch_size=100000 is larger than train_batch_size"),
        (["--set", "rl_module.model_config.fcnet_hidden=[8]"], "Did you mean 'fcnet_hiddens'?"),
        (["--set", "training.lr.key=1"], "'training.lr.key': lr=0.0003 is not a dict"),
        (["--set", "training.lrr.key=1"], "training: unknown setting 'lrr'."),
        (["--seed", "x"], "seed='x'"),
        (["--seed", "-1"], "seed='-1' must be at least 0"),
        (["--stop", "num_env_steps=soon"], "stop: num_env_steps must be a number, got 'soon'."),
        (["--stop", "entropy<soon"], "stop: entropy must be a number, got 'soon'."),
        (["--stop", "entropy"], "--stop 'entropy': expected NAME=NUMBER"),
        (["--stop", "entropy>1"], "--stop 'entropy>1': expected NAME=NUMBER, which is reached from below, or 'NAME<"),
        (["--stop", "entropy<=1"], "--stop 'entropy<=1': expected NAME=NUMBER"),
        (["--config", "missing.yaml"], "--config missing.yaml"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # An option given twice counts as given last; of --stop and --set, all count.
    assert main([*CARTPOLE, *SHORT, *arguments]) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert streams.err.startswith("corral: ")
    assert "Traceback" not in streams.err
    assert streams.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (CARTPOLE, "no stop criterion: give --stop episode_return_mean=450"),
        (["train", "--env", "CartPole-v1", *SHORT], "no algorithm: give --algo PPO"),
        (["train", "--algo", "PPO", *SHORT], "no env was given: call .environment('CartPole-v1'), or give --env"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--algo", "PPO", "--evn", "CartPole-v1"],
            "corral train: unknown option '--evn'. Did you mean '--env'?",
        ),
        (["train", "--stpo=num_env_steps=3"], "unknown option '--stpo=num_env_steps=3'. Did you mean '--stop'?"),
        (
            ["train", "PPO"],
            "corral train: unknown argument without an option: 'PPO'. Known names: --algo, --checkpoint-",
        ),
        (["train", "my.yaml"], "unknown argument without an option: 'my.yaml'. Did you mean --config my.yaml?"),
        (
            ["checkpoint", "info", "run", "--jsno"],
            "corral checkpoint info: unknown option '--jsno'. Did you mean '--json'?",
        ),
        (["report"], "corral report: the following arguments are required: RUN"),
    ],
)
def test_unknown_options_are_named_by_their_command(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(message.partition("unknown")[0]) and message in error
    assert error.endswith(" --help` shows what it takes.\n")


@pytest.mark.parametrize(
    "text",
    [
        "callbacks: {callback_functions: {on_train_result: ['mine:print_it']}}",
        "- a list",
        "algo: PPO\nstop: 450",
        "algo: PPO\ntrainig: {}",
        "a: b: c",
        "training: 3",
        "training: {lr: 1}\ntraining: {gamma: 0.5}",
        "training: {lr: 1, lr: 2}",
    ],
)
def test_wrong_files(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.yaml").write_text(text, encoding="utf-8")
    assert main([*CARTPOLE, "--config", "experiment.yaml", *SHORT]) == 2
    assert capsys.readouterr().err.startswith("corral: ")


def test_tensorboard_writes_event_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*CARTPOLE, "--stop", "training_iteration=1", "--run-dir", "here", "--tensorboard"]) == 0
    capsys.readouterr()
    (events,) = (tmp_path / "here").glob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert [event.value for event in accumulator.Scalars("training_iteration")] == [1.0]
    assert {path.name for path in (tmp_path / "here").iterdir()} == {*RUN_FILES, events.name}


def test_a_missing_tensorboard_has_an_exit_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "tensorboard."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # what Python does with a module that must not be imported
    assert main([*CARTPOLE, *SHORT, "--tensorboard"]) == 8
    streams = capsys.readouterr()
    assert "pip install 'corral[tensorboard]'" in streams.err
    assert (streams.out, list(tmp_path.iterdir())) == ("", [])


def test_usage_errors_print_no_traceback(tmp_path: Path) -> None:
    done = corral([*CARTPOLE, *SHORT, "--set", "training.lrr=1"], tmp_path)
    assert done.returncode == 2
    assert done.stderr == "corral: training: unknown setting 'lrr'. Did you mean 'lr'?\n"


def test_a_stop_criterion_that_is_not_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*CARTPOLE, "--stop", "episode_retrun_mean=450"]) == 2
    streams = capsys.readouterr()
    assert "stop criterion 'episode_retrun_mean' does not appear in the result" in streams.err
    assert "Did you mean 'env_runners/episode_return_mean'?" in streams.err
    assert (streams.out, list(tmp_path.iterdir())) == ("", [])  # nothing was sampled or written


def test_an_env_that_raises(tmp_path: Path) -> None:
    fault = ["fault=raise_step", "at_step=200", "vector_index=3"]
    settings = [part for name in fault for part in ("--set", f"environment.env_config.{name}")]
    done = corral(["train", "--algo", "PPO", "--env", "corral.testing:FaultyEnv", *SHORT, *settings], tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("corral: env 'corral.testing:FaultyEnv', sub-env 3, step ")
    assert "raised in step(): ZeroDivisionError: the simulator divided by zero" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    run_dir = only_run(tmp_path)
    assert f"The run is stored in runs/{run_dir.name}\n" in done.stdout
    _, results = read_run(run_dir)
    assert len(results) == 1
    text = (run_dir / "run.log").read_text(encoding="utf-8")
    assert "Run failed." in text
    assert "Traceback (most recent call last):" in text
    assert 'raise ZeroDivisionError("the simulator divided by zero")' in text


@pytest.mark.slow
def test_an_env_that_raises_at_the_start_in_a_runner_shows_its_line_and_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["environment.env_config.fault=raise_step", "environment.env_config.at_step=1"]
    settings += ["environment.env_config.vector_index=0", "env_runners.num_env_runners=1"]
    given = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", "--algo", "PPO", "--env", "corral.testing:FaultyEnv", *SHORT, *given]) == 3
    error = capsys.readouterr().err
    assert "In env runner 1 (process " in error and 'corral/testing.py", line ' in error
    assert error.splitlines()[-1].startswith("corral: env 'corral.testing:FaultyEnv' raised in its first step()")


@pytest.mark.parametrize("vectorization", ["auto", "sync"])
def test_an_env_that_cannot_be_made_leaves_no_run(
    vectorization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["environment.env_config.map_name=3x3", f"env_runners.vectorization={vectorization}"]
    command = ["train", "--algo", "PPO", "--env", "FrozenLake-v1", *SHORT]
    assert main([*command, *(part for setting in settings for part in ("--set", setting))]) == 3
    message = capsys.readouterr().err.splitlines()[-1]  # after the traceback, which no run.log holds
    assert message.startswith("corral: env 'FrozenLake-v1' raised when ")
    assert "was made with env_config {'map_name': '3x3'}: KeyError: " in message
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_the_env_does_not_have_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*CARTPOLE, *SHORT, "--set", "environment.env_config.gravity=1"]) == 2
    [message] = capsys.readouterr().err.splitlines()  # and no traceback
    assert message.startswith("corral: env_config['gravity'] does not apply to env 'CartPole-v1': its parameters are ")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_a_run_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    held = tmp_path / "held"
    held.mkdir()
    (held / "config.yaml").write_text("algo: PPO\n", encoding="utf-8")
    assert main([*CARTPOLE, *SHORT, "--run-dir", "held"]) == 6
    assert capsys.readouterr().err.startswith("corral: held already holds a run")
    assert {path.name for path in held.iterdir()} == {"config.yaml"}
    assert (held / "config.yaml").read_text(encoding="utf-8") == "algo: PPO\n"


def session_members(leader: int) -> list[int]:
    """Return the processes of a session that have not ended; sub-envs have a process group of their own in it."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended just now
            continue
        if fields[0] != "Z" and int(fields[3]) == leader:
            members.append(int(stat.parent.name))
    return members


def wait_for_text(process: warm.Popen, cwd: Path, name: str) -> None:
    """Wait until a file of the run has anything in it."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if any(path.stat().st_size for path in cwd.glob(f"runs/*/{name}")):
            return
        time.sleep(0.02)
    pytest.fail(f"{name} stayed empty")


def start(arguments: list[str], cwd: Path) -> warm.Popen:
    """Start a run as the leader of a process group of its own."""
    return warm.Popen(corral_command(*arguments), cwd=cwd, start_new_session=True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "whole_group",
    [
        pytest.param(True, id="as_a_terminal_does"),
        pytest.param(False, id="this_process_only", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("vectorization", [pytest.param("auto", marks=pytest.mark.slow), "async"])
def test_an_interrupt_keeps_the_run(vectorization: str, whole_group: bool, tmp_path: Path) -> None:
    settings = ["env_runners.num_envs_per_env_runner=2", f"env_runners.vectorization={vectorization}"]
    settings += ["training.train_batch_size_per_learner=256", "training.num_epochs=1"]
    arguments = [*CARTPOLE, "--stop", "num_env_steps=1000000000"]
    arguments += [part for setting in settings for part in ("--set", setting)]
    process = start(arguments, tmp_path)
    try:
        wait_for_text(process, tmp_path, "result.jsonl")
        assert len(session_members(process.pid)) >= (3 if vectorization == "async" else 1)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert session_members(process.pid) == []
    finally:
        if session_members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert (process.returncode, err) == (130, "")
    run_dir = only_run(tmp_path)
    *_, last, advice = out.splitlines()
    assert last.startswith("Interrupted after ")
    assert last.endswith(f"The run is stored in runs/{run_dir.name}")
    assert advice.endswith(f" corral train --resume runs/{run_dir.name}")
    _, results = read_run(run_dir)
    assert results
    assert (run_dir / "run.log").read_text(encoding="utf-8").rstrip().endswith("Run interrupted.")


@pytest.mark.slow
def test_an_interrupt_in_the_first_iteration_says_where_the_run_lies(tmp_path: Path) -> None:
    process = start([*CARTPOLE, *SHORT, "--set", "reporting.min_time_s_per_iteration=1000"], tmp_path)
    try:
        wait_for_text(process, tmp_path, "run.log")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")
    run_dir = only_run(tmp_path)
    assert out.startswith(f"Interrupted after no iteration. The run is stored in runs/{run_dir.name}\n")
    # An interrupt before the training begins leaves no checkpoint.
    assert read_run(run_dir, may_lack=frozenset({"checkpoints"})) == ([], [])


@pytest.mark.slow
def test_an_interrupt_of_an_import_that_executes_text_has_the_same_status(tmp_path: Path) -> None:
    """Python ends itself by SIGINT at its exit if a plain `KeyboardInterrupt` has passed through `exec` of a text."""
    raised = "import signal; signal.raise_signal(signal.SIGINT)"
    (tmp_path / "interrupted_env.py").write_text(f"exec({raised!r})\n", encoding="utf-8")
    process = start(["train", "--algo", "PPO", "--env", "interrupted_env:Env", "--stop", "num_env_steps=1"], tmp_path)
    assert process.communicate(timeout=DEADLINE_S)[1] == ""
    assert process.returncode == 130


@pytest.mark.slow
def test_a_users_algorithm_runs_from_the_directory_that_it_is_in(tmp_path: Path) -> None:
    write_my_algo(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return corral(["train", *arguments], tmp_path)

    def learner(result: dict[str, Any]) -> tuple[float, float]:
        metrics = result["learners"]["default_policy"]
        return metrics["bonus"], metrics["num_bonuses"]

    settings = [part for name, value in SMALL.items() for part in ("--set", f"training.{name}={value}")]
    settings += ["--env", "corral.testing:IdentityEnv", "--set", "training.bonus=0.25"]
    done = run("--algo", "my_algo:MyConfig", "--stop", "training_iteration=2", *settings)
    assert (done.returncode, done.stderr) == (0, "")
    run_dir = only_run(tmp_path)
    assert run_dir.name.startswith("MyPPO-")
    _, results = read_run(run_dir)
    assert [learner(result) for result in results] == [(0.25, 1.0), (0.25, 2.0)]

    # Its config is a file for --config, and runners in other processes find the module too.
    written = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    assert (written["algo"], written["training"]["bonus"]) == ("my_algo:MyConfig", 0.25)
    config = str(run_dir / "config.yaml")
    engine = ["--set", "engine.engine_name=process", "--set", "env_runners.num_env_runners=1", "--run-dir", "again"]
    done = run("--config", config, "--stop", "training_iteration=1", "--set", "training.bonus=0.125", *engine)
    assert (done.returncode, done.stderr) == (0, "")
    _, results = read_run(tmp_path / "again")
    assert [learner(result) for result in results] == [(0.125, 1.0)]

    done = run("--config", config, "--stop", "training_iteration=1", "--set", "training.bonus=0")
    assert (done.returncode, done.stderr) == (2, "corral: bonus=0 must be positive.\n")
    done = run("--algo", "my_algo:MyConfg", "--stop", "training_iteration=1", *settings)
    assert done.returncode == 2 and "Did you mean 'MyConfig'?" in done.stderr


def test_events_lists_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in EVENTS if name not in printed] == []


def test_an_env_that_ends_the_process_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def close_window(options: object) -> int:
        sys.exit()

    monkeypatch.setattr("corral.tools.cli.train.run", close_window)
    assert main([*CARTPOLE, *SHORT]) == 1
    error = capsys.readouterr().err
    assert "in close_window" in error and "ended the process, as sys.exit() does" in error


@pytest.mark.parametrize("option", ["--run-dir", "--resume"])
def test_an_empty_path_is_not_the_working_directory(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*CARTPOLE, *SHORT, option, ""])
    assert ended.value.code == 2
    assert f"argument {option}: the path is empty" in capsys.readouterr().err
