"""Each option of each command changes what the command does; a new option needs a case here."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow.parquet
import pytest
import yaml
from gymnasium import spaces

from corral import BCConfig, PPOConfig
from corral.tools.cli.main import main
from corral.tools.cli.parser import make_parser
from written_runs import write_run

HERE = Path(__file__).parent


class Dim(gym.Env[Any, Any]):
    """Episodes of a few steps in grey; the reward is the number of a draw plus the action."""

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 25}  # noqa: RUF012
    observation_space: Any = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, num_steps: int = 5, render_mode: str | None = None) -> None:
        self.num_steps, self.render_mode = num_steps, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.level = 0, float(self.np_random.integers(1000))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(1, np.float32), self.level + float(action), False, self.t == self.num_steps, {"t": self.t}

    def render(self) -> Any:
        return None if self.render_mode == "human" else np.full((16, 16, 3), self.t, np.uint8)


class Dimmer(Dim):
    """The same with longer episodes."""

    def __init__(self, num_steps: int = 9, render_mode: str | None = None) -> None:
        super().__init__(num_steps, render_mode)


DIM, DIMMER = "test_every_option:Dim", "test_every_option:Dimmer"
TINY = {"train_batch_size_per_learner": 32, "minibatch_size": 32, "num_epochs": 1}
TRAIN = ["train", "--algo", "PPO", "--env", DIM, "--run-dir", "run", "--seed", "0", "--quiet"]
TRAIN += ["--stop", "training_iteration=1", "--set", "rl_module.model_config.fcnet_hiddens=[4]"]
for _name, _value in TINY.items():
    TRAIN += ["--set", f"training.{_name}={_value}"]
CONTINUE = ["--stop", "training_iteration=2", "--quiet"]
POLICY = {
    "--env": ["--env", DIMMER],
    "--env-config": ["--env-config", "num_steps=3"],
    "--seed": ["--seed", "7"],
    "--explore": ["--explore"],
    "--max-episode-steps": ["--max-episode-steps", "2"],
    "--episodes": ["--episodes", "3"],
}


ESTIMATE = ["evaluate", "saved", "--data", "recorded", "--explore", "--json"]


def without(arguments: list[str], option: str) -> list[str]:
    """Arguments without an option and its value."""
    place = arguments.index(option)
    return arguments[:place] + arguments[place + 2 :]


# By command and option, the command line without the option, and the same with it.
CASES: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    **{("evaluate", name): (["evaluate", "saved", "--episodes", "2"], more) for name, more in POLICY.items()},
    ("evaluate", "--seeds"): (["evaluate", "saved", "--episodes", "2"], ["--seeds", "5", "6"]),
    ("evaluate", "--json"): (["evaluate", "saved", "--episodes", "2"], ["--json"]),
    ("evaluate", "--data"): (["evaluate", "saved", "--explore"], ["--data", "recorded", "--method", "is"]),
    **{
        ("evaluate --data", name): ([*ESTIMATE, *given], [name, value])
        for name, value, given in [
            ("--method", "wis", ["--gradient-steps", "5"]),
            ("--gamma", "0.5", ["--method", "is"]),
            ("--max-ratio", "0.9", ["--method", "is"]),
            ("--gradient-steps", "7", ["--method", "fqe", "--gradient-steps", "5"]),
            ("--batch-size", "8", ["--method", "fqe", "--gradient-steps", "5"]),
            ("--lr", "0.05", ["--method", "fqe", "--gradient-steps", "5"]),
        ]
    },
    **{
        ("play", name): (["play", "saved", "--episodes", "2", "--record", "videos", "--format", "gif"], more)
        for name, more in POLICY.items()
    },
    ("play", "--record"): (["play", "saved", "--episodes", "1", "--format", "gif"], ["--record", "videos"]),
    ("play", "--format"): (
        ["play", "saved", "--episodes", "1", "--record", "videos", "--format", "gif"],
        ["--format", "mp4"],
    ),
    ("checkpoint info", "--json"): (["checkpoint", "info", "saved"], ["--json"]),
    ("config", "--json"): (["config", "PPO", "lr"], ["--json"]),
    ("list", "--all"): (["list", "envs", "CartPole"], ["--all"]),
    ("report", "--output"): (["report", "written"], ["--output", "other.html"]),
    ("plot", "--output"): (["plot", "written"], ["--output", "other.svg"]),
    ("plot", "--x"): (["plot", "written", "--output", "a.svg"], ["--x", "time"]),
    ("plot", "--y"): (["plot", "written", "--output", "a.svg"], ["--y", "learners/default_policy/total_loss"]),
    ("train", "--config"): (TRAIN, ["--config", "experiment.yaml"]),
    ("train", "--tuned"): (
        [*without(without(TRAIN, "--env"), "--algo"), "--algo", "PPO", "--env", "CartPole-v1"],
        ["--tuned", "CartPole-v1"],
    ),
    ("train", "--algo"): (TRAIN, ["--algo", "test_every_option:Named"]),
    ("train", "--env"): (TRAIN, ["--env", DIMMER]),
    ("train", "--stop"): (TRAIN, ["--stop", "num_env_steps<9", "--stop", "num_env_steps=1"]),
    ("train", "--seed"): (TRAIN, ["--seed", "8"]),
    ("train", "--set"): (TRAIN, ["--set", "training.gamma=0.5"]),
    ("train", "--run-dir"): (TRAIN, ["--run-dir", "elsewhere"]),
    ("train", "--resume"): (["train", *CONTINUE], ["--resume", "begun"]),
    ("train", "--resume-or-start"): (without(TRAIN, "--run-dir"), ["--resume-or-start", "run"]),
    **{
        ("train --resume", name): (["train", "--resume", "begun", *CONTINUE], [name, value])
        for name, value in {
            "--env": DIMMER,
            "--stop": "num_env_steps=1",
            "--set": "training.gamma=0.5",
            "--checkpoint-every": "9",
            "--logger": "test_every_option:Noting",
        }.items()
    },
    ("train", "--checkpoint-every"): (TRAIN, ["--checkpoint-every", "9"]),
    ("train", "--logger"): (TRAIN, ["--logger", "test_every_option:Noting"]),
    ("train", "--data"): (
        [*without(without(TRAIN, "--algo"), "--run-dir"), "--run-dir", "run", "--algo", "test_every_option:Cloning"],
        ["--data", "recorded"],
    ),
    ("train", "--record"): (TRAIN, ["--record", "new"]),
    ("record", "--output"): (["record", "saved", "--episodes", "2", "--output", "new"], ["--output", "other"]),
    **{
        ("record", name): (["record", "saved", "--episodes", "2", "--output", "new"], more)
        for name, more in {
            "--env": ["--env", DIMMER],
            "--seed": ["--seed", "7"],
            "--explore": ["--explore"],
            "--episodes": ["--episodes", "3"],
            "--infos": ["--infos"],
        }.items()
    },
    **{
        ("export", name): (["export", "saved", "--output", "p.pt2", "--episodes", "1"], more)
        for name, more in {
            "--output": ["--output", "p.safetensors"],
            "--episodes": ["--episodes", "2"],
            "--env": ["--env", DIMMER],
            "--env-config": ["--env-config", "num_steps=3"],
        }.items()
    },
    ("export", "--data"): (["export", "saved", "--output", "p.pt2"], ["--data", "other-recorded"]),
    ("train", "--quiet"): ([part for part in TRAIN if part != "--quiet"], ["--quiet"]),
}
"""Command lines that differ in one option, and in what they do."""
ELSEWHERE = {
    **{
        ("serve", f"--{name}"): "serving/test_serve_command.py::test_serve_takes_the_options_of_train"
        for name in (
            *(
                "config",
                "tuned",
                "algo",
                "env",
                "data",
                "record",
                "stop",
                "seed",
                "seeds",
                "parallel",
                "set",
                "run-dir",
            ),
            *("resume", "resume-or-start", "checkpoint-every", "logger", "tensorboard", "quiet", "end-with-input"),
        )
    },
    **{
        ("serve", f"--{name}"): "serving/test_serve_command.py::test_own_options_are_settings_of_the_env"
        for name in ("host", "port", "unix", "num-envs", "token-file", "certificate", "key")
    },
    ("evaluate", "--module"): "offline/test_estimate_return.py::test_one_of_several_modules_is_chosen",
    ("export", "--module"): "cli/test_export_command.py::test_the_policy_of_one_of_several_agents",
    ("report", "--threshold"): "report/test_comparison.py::test_the_page_holds_the_table",
    ("report", "--open"): "report/test_report_page.py::test_the_command",
    ("report", "--watch"): "report/test_watched_report.py::test_the_command_serves_until_it_is_interrupted",
    ("report", "--port"): "report/test_watched_report.py::test_the_command_serves_until_it_is_interrupted",
    ("report", "--host"): "report/test_watched_report.py::test_the_command_serves_until_it_is_interrupted",
    ("train", "--seeds"): "cli/test_seeds.py::test_a_seed_that_fails_ends_no_other",
    ("train", "--parallel"): "cli/test_seeds.py::test_runs_share_the_cores_and_no_more_than_asked_for_run",
    ("train", "--tensorboard"): "cli/test_cli.py::test_tensorboard_writes_event_files_too",
    ("train", "--end-with-input"): "cli/test_seeds.py::test_runs_end_with_a_checkpoint_when_the_command_is_killed",
    ("search", "--config"): "search/test_search_trials.py::test_trials_are_completed_pruned_and_failed",
    ("search", "--run-dir"): "search/test_search_trials.py::test_trials_are_completed_pruned_and_failed",
    ("search", "--parallel"): "search/test_search_trials.py::test_trials_are_completed_pruned_and_failed",
    ("search", "--quiet"): "search/test_search_trials.py::test_trials_are_completed_pruned_and_failed",
    (
        "search",
        "--resume",
    ): "search/test_search_trials.py::test_options_override_the_file_and_a_search_continues_with_its_trials",
    (
        "search",
        "--trials",
    ): "search/test_search_trials.py::test_options_override_the_file_and_a_search_continues_with_its_trials",
    (
        "search",
        "--env",
    ): "search/test_search_trials.py::test_options_override_the_file_and_a_search_continues_with_its_trials",
    (
        "search",
        "--set",
    ): "search/test_search_trials.py::test_options_override_the_file_and_a_search_continues_with_its_trials",
    (
        "search",
        "--stop",
    ): "search/test_search_trials.py::test_options_override_the_file_and_a_search_continues_with_its_trials",
    (
        "search",
        "--seeds-per-trial",
    ): "search/test_search_trials.py::test_options_override_the_file_and_a_search_continues_with_its_trials",
}
"""Tests of options that start processes, browsers or packages."""


class Named(PPOConfig):
    """PPO under another name."""


@dataclass(kw_only=True)
class Cloning(BCConfig):
    """Behaviour cloning of recorded episodes, by default of other ones."""

    input_: Any = "other-recorded"
    num_updates_per_iteration: int = 2
    train_batch_size_per_learner: int = 32


class Noting:
    """A logger that writes a file of its own."""

    def open(self, run_dir: Path, config: Any) -> None:
        (run_dir / "noted").write_text("noted", encoding="utf-8")

    def log_result(self, result: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def options_of(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, str]]:
    """Each option of each command, by its longest name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, part in action.choices.items():
                yield from options_of(part, f"{command} {name}".strip())
        elif action.option_strings and action.dest not in ("help", "version"):
            yield command, max(action.option_strings, key=len)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint, runs and an experiment file."""
    directory = tmp_path_factory.mktemp("options")
    config = PPOConfig().environment(Dim).rl_module(model_config={"fcnet_hiddens": [4]}).debugging(seed=1)
    with config.training(**TINY).build() as algo:
        algo.save(directory / "saved")
        algo.record(directory / "recorded", num_episodes=3)
        algo.record(directory / "other-recorded", num_episodes=4)
    write_run(directory / "written")
    experiment = {"algo": "PPO", "environment": {"env": DIM}, "training": {"lr": 0.25}}
    (directory / "experiment.yaml").write_text(yaml.safe_dump(experiment), encoding="utf-8")
    assert main([*without(TRAIN, "--run-dir"), "--run-dir", str(directory / "begun")]) == 0
    return directory


def outcome(arguments: list[str], directory: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command prints and writes, without times and folders."""
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    status = main(arguments)
    shown = capsys.readouterr().out.replace(str(directory), "").splitlines()
    written: dict[str, Any] = {}
    for path in sorted(path for path in directory.rglob("*") if before.get(path) != path.stat().st_mtime_ns):
        name = re.sub(r"\d{8}-\d{6}", "TIME", str(path.relative_to(directory)))
        name = re.sub(r"(episodes-\d+)-\w+", r"\1", name)  # of the writer
        if path.is_file() and "checkpoints" not in path.parts:
            written[name] = None
        if path.name == "config.yaml":
            written[name] = yaml.safe_load(path.read_text(encoding="utf-8"))
        elif path.name == "result.jsonl":
            results = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            written[name] = [result["env_runners"]["episode_return_mean"] for result in results]
        elif path.suffix == ".parquet":
            table = pyarrow.parquet.read_table(path)
            written[name] = [table.column_names, table["rewards"].to_pylist()]
        elif path.suffix == ".svg":
            written[name] = re.sub(r"<dc:date>.*|id=.*|#.*", "", path.read_text(encoding="utf-8"))
    return status, len(shown) if arguments[0] == "train" else shown, written


BASES: dict[tuple[str, ...], list[tuple[str, str]]] = {}
for _case, (_base, _) in CASES.items():
    BASES.setdefault(tuple(_base), []).append(_case)


@pytest.mark.parametrize(
    "cases", BASES.values(), ids=lambda cases: " ".join((cases[0][0], *(name for _, name in cases)))
)
def test_each_option_has_an_effect(
    cases: list[tuple[str, str]],
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, base = cases[0][0], CASES[cases[0]][0]
    if command == "plot":
        pytest.importorskip("matplotlib")
    if command == "play":
        pytest.importorskip("imageio")

    def found(name: str, *more: str) -> Any:
        directory = tmp_path / name
        shutil.copytree(prepared, directory)
        monkeypatch.chdir(directory)
        capsys.readouterr()
        return outcome([*base, *more], directory, capsys)

    without_it = found("without")
    assert found("again") == without_it
    assert [case for case in cases if found(case[1], *CASES[case][1]) == without_it] == []


def test_each_option_is_tested() -> None:
    options = {*options_of(make_parser())}
    tested = {(command.removesuffix(" --resume").removesuffix(" --data"), option) for command, option in CASES}
    assert options == tested | ELSEWHERE.keys() and not CASES.keys() & ELSEWHERE.keys()
    for (_, option), test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        text = (HERE.parent / file).read_text(encoding="utf-8")
        assert f"def {name}" in text and (option in text or option.strip("-").replace("-", "_") in text), test
