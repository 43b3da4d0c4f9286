"""`corral config`, `corral list`, `corral completion`, and what `--set` takes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from at_least import at_least
from console_script import corral_command
from corral import PPOConfig
from corral.algorithms.config.settings import GROUPS
from corral.algorithms.registry import ALGORITHMS, config_class
from corral.envs.listing import newest_versions
from corral.errors import ConfigError
from corral.exploration import BUILT_IN
from corral.runs.loggers.run import plain
from corral.tools.cli.experiment import parse_pair
from corral.tools.cli.main import main
from corral.tools.cli.parser import make_parser
from user_files import write_my_algo

DEADLINE_S = 240.0


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_python_runs_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "corral", "--version"], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.startswith("corral 0.")


def test_config_prints_every_setting_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    lines = printed(["config", "PPO"], capsys).splitlines()
    first_words = [line.partition("  ")[0] for line in lines]  # one space follows the headings
    paths = [f"{group}.{name}" for group, names in PPOConfig.group_fields().items() for name in names]
    assert {path: first_words.count(path) for path in paths} == dict.fromkeys(paths, 1)
    assert "rl_module.model_config.fcnet_hiddens" in first_words
    assert max(map(len, lines)) <= 70


@pytest.mark.parametrize("name", ["lr", "training.lr"])
def test_config_prints_one_setting(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(["config", "PPO", name], capsys).splitlines()
    assert lines[0] == "training.lr  Schedule, default 0.0003, at least 0"
    assert lines[1].strip() == "Learning rate, or a schedule over env steps."
    assert lines[-1] == "corral train --algo PPO --set training.lr=VALUE"


def test_config_as_json_has_the_defaults_of_the_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    for algo in ("PPO", "SAC"):
        found = json.loads(printed(["config", algo, "training", "--json"], capsys))
        by_name = {setting["name"]: setting for setting in found["settings"]}
        assert all(setting["group"] == "training" and setting["meaning"] for setting in at_least(1, found["settings"]))
        assert by_name["gamma"]["bounds"] == ["in [0, 1]"]
        assert ("clip_param" in by_name) == (algo == "PPO")


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_config_has_the_defaults_of_a_new_config(algo: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(["config", algo, "--json"], capsys))["settings"]
    shown = {setting["path"]: setting["default"] for setting in found if setting["group"] in GROUPS}
    config = config_class(algo)()
    real = {
        f"{group}.{name}": getattr(config, name) for group, names in config.group_fields().items() for name in names
    }
    assert shown == json.loads(json.dumps(plain(real)))


def test_config_knows_the_algorithm_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_my_algo(tmp_path)
    assert "training.bonus  float, default 0.5, positive" in printed(["config", "my_algo:MyConfig", "bonus"], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "PPA"], "Did you mean 'PPO'?"),
        (["config", "PPO", "lrr"], "there is no setting or group 'lrr'. Did you mean 'lr'?"),
        (["config", "PPO", "train.lr"], "Did you mean 'training.lr'?"),
        (["config", "PPO", "n_steps"], "In Corral: .training(train_batch_size_per_learner=...)"),
        (["config", "SAC", "training.buffer_size"], "In Corral: .training(replay_buffer_config={'capacity': ...})"),
        (["config", "PPO", "xyzzyx"], "Groups: environment, env_runners, training,"),
        (["list", "algorithms", "xyz"], "list algorithms: no name contains 'xyz'"),
        (["list", "envs", "xyzzyx"], "list envs: no name contains 'xyzzyx'"),
    ],
)
def test_typos_are_answered(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert message in streams.err and streams.out == ""


def test_lists_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    algorithms = printed(["list", "algorithms"], capsys).splitlines()
    assert [line for line in algorithms if not line.startswith(" ")][: len(ALGORITHMS)] == [*ALGORITHMS]
    explorations = printed(["list", "explorations"], capsys)
    assert [name for name in BUILT_IN if name not in explorations] == []
    assert "EpsilonGreedy" in printed(["list", "explorations", "epsilon"], capsys)
    assert "Curiosity" not in printed(["list", "explorations", "epsilon"], capsys)


@pytest.mark.slow
def test_the_list_of_envs_has_ids_that_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    ids = printed(["list", "envs", "hopper"], capsys).splitlines()
    assert "Hopper-v5" in ids and not {"Hopper-v3", "Hopper-v4"} & {*ids}
    assert "Hopper-v4" in printed(["list", "envs", "hopper", "--all"], capsys).splitlines()
    assert "envpool:Pong-v5" in printed(["list", "envs", "pong-v5"], capsys).splitlines()
    assert "classic/rps-v2" in printed(["list", "envs", "RPS"], capsys).splitlines()
    assert all(gym.spec(env_id) for env_id in ids if ":" not in env_id)


def test_an_old_version_that_is_named_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"gymnasium": ["CartPole-v0", "CartPole-v1", "Hopper-v3", "Hopper-v4"]}
    monkeypatch.setattr("corral.envs.listing.env_ids", lambda: ids)
    assert printed(["list", "envs", "cartpole"], capsys).split() == ["CartPole-v1"]
    assert printed(["list", "envs", "hopper-v3"], capsys).split() == ["Hopper-v3"]
    assert main(["list", "envs", "pong"]) == 2


def test_newest_versions() -> None:
    ids = ["A-v1", "A-v10", "A-v2", "B", "B-v0", "my/C-v3"]
    assert newest_versions(ids) == ["A-v10", "B-v0", "my/C-v3"]


COMPLETIONS = [
    ("corral tr", "train"),
    ("corral checkpoint i", "info"),
    ("corral train --alg", "--algo"),
    ("corral train --algo P", "PPO"),
    ("corral train --env CartP", "CartPole-v1"),
    ("corral train --set training.clip_p", "training.clip_param="),
    ("corral list expl", "explorations"),
    ("corral play x --format g", "gif"),
    ("corral train --tuned Pend", "Pendulum-v1"),
    ("corral config PPO training.clip_p", "training.clip_param"),
    ("corral train --resume my", "my-run"),
    ("corral evaluate my", "my-run"),
    ("corral report my", "my-run"),
    ("corral plot my", "my-run"),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The completion script of each shell."""
    found = {}
    for shell in ("bash", "zsh"):
        done = subprocess.run(corral_command("completion", shell), capture_output=True, text=True, timeout=DEADLINE_S)
        assert (done.returncode, done.stderr) == (0, "")
        found[shell] = tmp_path_factory.mktemp("completion") / shell
        found[shell].write_text(done.stdout, encoding="utf-8")
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "my-run").mkdir()
    for line, expected in COMPLETIONS:
        words = shlex.split(line)
        code = (
            f"source {shlex.quote(str(scripts['bash']))}\nCOMP_WORDS=({shlex.join(words)}); "
            f'COMP_CWORD={len(words) - 1}\n_corral_complete\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
        assert expected in done.stdout.splitlines(), (line, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_reads_its_script(scripts: dict[str, Path]) -> None:
    done = subprocess.run(["zsh", "-n", str(scripts["zsh"])], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "training.clip_param=" in scripts["zsh"].read_text(encoding="utf-8")


def test_every_command_names_a_function() -> None:
    from importlib import import_module

    for line in (
        "train",
        "checkpoint info x",
        "evaluate x",
        "play x",
        "config PPO",
        "list envs",
        "events",
        "completion bash",
    ):
        module, _, function = make_parser().parse_args(line.split()).run.partition(":")
        assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1e-3", 1e-3),
        ("a.b=-2E5", -2e5),
        ("a.b=1.5e3", 1500.0),
        ("a.b=3", 3),
        ("a.b='1e-3'", "1e-3"),
        ("a.b=x=y", "x=y"),
        ("a.b={c: {d: [1, 2e-1]}, e: 'a b'}", {"c": {"d": [1, 0.2]}, "e": "a b"}),
        ("a.b=[[0, 1e-3], [100, 1e-4]]", [[0, 1e-3], [100, 1e-4]]),
        ("a.b=null", None),
        ("a.b=", None),
        (" a.b = 3", 3),
    ],
)
def test_values_are_yaml(text: str, value: Any) -> None:
    found = parse_pair(text, "--set")
    assert found == ("a.b", value) and type(found[1]) is type(value)


def test_settings_in_dicts_in_dicts() -> None:
    config = PPOConfig()
    for text in (
        "environment.env_config.a.b.c=1e-3",
        "environment.env_config.a.b.d={e: [1]}",
        "environment.env_config.a.b.d.f='x y'",
    ):
        config.set_path(*parse_pair(text, "--set"))
    assert config.env_config == {"a": {"b": {"c": 1e-3, "d": {"e": [1], "f": "x y"}}}}


@pytest.mark.parametrize(
    "path", ["training..lr", ".training.lr", "environment.env_config.", "environment.env_config..a"]
)
def test_dots_without_names_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="has a dot without a name next to it"):
        PPOConfig().set_path(path, 1)


def test_values_that_are_not_yaml_are_answered_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"the value is not valid YAML: .*\. Lists are as in") as caught:
        parse_pair("training.lr={a: 1", "--set")
    assert "\n" not in str(caught.value)
