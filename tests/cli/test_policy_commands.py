"""`corral evaluate` and `corral play` on runs and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from corral import PPOConfig, evaluate_policy, load_policy
from corral.checkpoint import read_checkpoint, write_checkpoint
from corral.cli.main import main
from corral.testing import CountingEnv


def halved(env: Any) -> Any:
    return gym.wrappers.TransformReward(env, lambda reward: reward / 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint of a `CountingEnv` with episodes of 4 steps and half the rewards."""
    run = tmp_path_factory.mktemp("runs") / "run"
    config = PPOConfig().environment(CountingEnv, env_config={"episode_length": 4}, wrappers=[halved])
    with config.build() as algorithm:
        algorithm.save(run / "checkpoints" / "iteration-000000")
    return run


def test_evaluate_prints_numbers_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--episodes", "5"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["episodes"] == "5"
    assert lines["shortest,"].endswith("4, 4 env steps")
    assert lines["95%"] == "interval        5.00 to 5.00 (bootstrap)"
    assert "iteration-000000 (iteration 0)" in lines["checkpoint"]


def test_evaluate_prints_json_with_each_episode(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--episodes", "5", "--json", "--env-config", "episode_length=2", "--env-config", "ends=truncated"]
    assert main(["evaluate", str(run), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["episode_returns"] == [1.5] * 5
    assert found["episode_lens"] == [2] * 5
    assert found["episode_return_interval_low"] == found["episode_return_interval_high"] == 1.5
    assert found["checkpoint"] == str(run / "checkpoints" / "iteration-000000")


def test_evaluate_gives_what_python_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PPOConfig().environment("CartPole-v1").debugging(seed=0).build() as algorithm:
        path = algorithm.save(tmp_path / "checkpoint")
    assert main(["evaluate", str(path), "--episodes", "6", "--seed", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = evaluate_policy(load_policy(path), "CartPole-v1", episodes=6, seed=3)
    assert found["episode_returns"] == list(expected.episode_returns)
    assert main(["evaluate", str(path), "--seeds", "3", "9", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == [3, 9, 4]
    expected = evaluate_policy(load_policy(path), "CartPole-v1", seeds=[3, 9, 4])
    assert found["episode_returns"] == list(expected.episode_returns)


def test_play_records_cartpole_without_a_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pygame")
    monkeypatch.delenv("DISPLAY", raising=False)
    with PPOConfig().environment("CartPole-v1").debugging(seed=0).build() as algorithm:
        path = algorithm.save(tmp_path / "checkpoint")
    videos = tmp_path / "videos"
    assert main(["play", str(path), "--episodes", "1", "--record", str(videos), "--format", "gif"]) == 0
    assert [file.name for file in videos.iterdir()] == ["episode-000.gif"]
    assert str(videos / "episode-000.gif") in capsys.readouterr().out


def test_an_env_that_no_file_can_name_must_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PPOConfig().environment(lambda config: CountingEnv(config), env_config={"episode_length": 2})
    with config.build() as algorithm:
        path = str(algorithm.save(tmp_path / "checkpoint"))
    assert main(["evaluate", path]) == 2
    assert "--env my_envs:MyEnv" in capsys.readouterr().err
    (tmp_path / "my_counting.py").write_text("from corral.testing import CountingEnv as Mine\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", path, "--env", "my_counting:Mine", "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episode_lens"] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["evaluate", "nowhere"], 1, "nowhere"),
        (["evaluate", "RUN", "--env", "corral.testing:IdentityEnv"], 2, "observations of"),
        (["evaluate", "RUN", "--episodes", "0"], 2, "episodes=0"),
        (["evaluate", "RUN", "--episodes", "3", "--seeds", "1", "2"], 2, "2 seeds for episodes=3"),
        (["evaluate", "RUN", "--env-config", "episode_length"], 2, "NAME=VALUE"),
        (["evaluate", "RUN", "--env-config", "episode_length=100", "--max-episode-steps", "9"], 1, "not ended"),
        (["play", "RUN", "--record", "videos"], 1, "render_mode='rgb_array'"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str],
    status: int,
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(run) if argument == "RUN" else argument for argument in arguments]) == status
    assert message in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"env": "os:system"}, "standard library"),
        ({"env": "CartPole-v1", "wrappers": ["builtins:exec"]}, "standard library"),
        ({"env": "CartPole-v1", "wrappers": 3}, "wrappers=3"),
        (["CartPole-v1"], "environment"),
    ],
)
def test_what_from_checkpoint_refuses_is_refused(
    environment: Any, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_checkpoint(run / "checkpoints" / "iteration-000000")
    write_checkpoint(
        tmp_path / "changed",
        state=found.state,
        weights=found.weights,
        config={**found.config, "environment": environment},
        metadata={"training_iteration": 0},
        policies=found.policies,
    )
    assert main(["evaluate", str(tmp_path / "changed")]) in (1, 2)
    assert message in capsys.readouterr().err
