"""Where paths lead: `~`, URLs, URLs that became a `Path`, and who refuses them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import corral
from corral import PPOConfig
from corral.core.paths import resolve_location, resolve_path
from corral.errors import ConfigError, CorralError
from corral.tools.report import write_plot, write_report


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def algorithm() -> Any:
    config = PPOConfig().environment("CartPole-v1").training(train_batch_size_per_learner=64, num_epochs=1)
    with config.build() as built:
        yield built


@pytest.mark.parametrize(
    ("given", "location"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("simplecache::s3://bucket/run", "simplecache::s3://bucket/run"),
        ("file:///tmp/run", Path("/tmp/run")),
        (Path("file:///tmp/run"), Path("/tmp/run")),
        ("file://run", Path("run")),
        ("a/s3:/run", Path("a/s3:/run")),
        ("C:/run", Path("C:/run")),
        ("runs/~", Path("runs/~")),
    ],
)
def test_a_path_stays_and_a_url_is_a_url_again(given: Any, location: Any) -> None:
    assert resolve_location(given) == location


def test_the_home_directory_is_found(home: Path) -> None:
    assert resolve_location("~/run") == resolve_location(Path("~/run")) == home / "run"
    with pytest.raises(ConfigError, match="no_such_user"):
        resolve_location("~no_such_user/run")


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="the report must be a path, got 3"):
        resolve_path(3, "the report")


def places(algorithm: Any, home: Path) -> dict[str, Callable[[Any], Any]]:
    """Return all functions that write to a path of the user."""
    algorithm.save(home / "checkpoint")
    return {
        "save": algorithm.save,
        "fit": lambda path: algorithm.fit(stop={"training_iteration": 1}, run_dir=path, progress=False),
        "resume": lambda path: algorithm.fit(resume=path, progress=False),
        "export": lambda path: corral.load_policy(home / "checkpoint").export(Path(path) / "policy.pt2"),
        "replay": lambda path: (
            corral.DQNConfig()
            .environment("CartPole-v1")
            .training(replay_buffer_config={"directory": path, "capacity": 2000})
            .build()
            .stop()
        ),
        "report": lambda path: write_report(home, path),
        "plot": lambda path: write_plot(home, path),
    }


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run"])
def test_nothing_is_written_into_a_folder_that_is_named_as_a_url(algorithm: Any, home: Path, url: str) -> None:
    for name, write in places(algorithm, home).items():
        with pytest.raises(CorralError, match=f"{url[:2]}://bucket/run"):
            write(Path(url))
        assert os.listdir(".") == [], name


def test_the_tilde_is_the_home_directory_everywhere(algorithm: Any, home: Path) -> None:
    (home / "buffer").mkdir()
    write = places(algorithm, home)
    assert write["save"]("~/saved") == home / "saved" and (home / "saved").is_dir()
    write["fit"]("~/run")
    assert algorithm.run_dir == home / "run"
    write["resume"](Path("~/run"))
    write["replay"]("~/buffer")
    assert corral.load_policy("~/run").export("~/policy.pt2") == home / "policy.pt2"
    assert write_report("~/run", "~/report.html") == home / "report.html"
    assert os.listdir(".") == []


def test_the_command_line_takes_the_tilde_and_refuses_a_url(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    from corral.tools.cli.parser import make_parser

    parser = make_parser()
    assert parser.parse_args(["train", "--run-dir", "~/run"]).run_dir == home / "run"
    with pytest.raises(SystemExit):
        parser.parse_args(["train", "--run-dir", "s3://bucket/run"])
    assert "s3://bucket/run" in capsys.readouterr().err
