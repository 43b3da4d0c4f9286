"""The examples in examples/algorithms/ and examples/building_blocks/ do what they say."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import example_files
import warm
from console_script import corral_command
from corral import Algorithm
from corral.algorithms import registry

FOLDER = example_files.EXAMPLES / "algorithms"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the files importable by their names, as files of a user's project are."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(registry, "_registered", {})
    yield
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_every_example_has_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert {path.stem for path in FOLDER.glob("*.py")} == set(re.findall(r'example\("(\w+)"\)', text))
    blocks = {path.stem for path in (example_files.EXAMPLES / "building_blocks").glob("*.py")}
    assert blocks == set(re.findall(r'load\("building_blocks/(\w+)\.py"\)', text))


def example(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.slow
def test_reinforce(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("reinforce").main(num_iterations=25) > 100  # a random policy has 22
    assert capsys.readouterr().out.startswith("mean return")


def test_the_gradient_of_reinforce_matches_its_paper() -> None:
    """The advantages of a batch are returns to go, scaled to mean 0 and deviation 1."""
    module = example("reinforce")
    config = module.ReinforceConfig().environment("CartPole-v1").training(gamma=0.9).debugging(seed=0)
    with config.build() as algo:
        rollouts = algo.sample(200)
        batch = module.make_batch(rollouts, 0.9)
        [rollout] = rollouts
        returns = np.zeros_like(rollout.rewards)
        for t in reversed(range(len(returns))):
            after = returns[t + 1] if t + 1 < len(returns) else 0.0
            ends = rollout.terminated[t] | rollout.truncated[t]
            returns[t] = rollout.rewards[t] + 0.9 * np.where(ends, 0.0, after)
        expected = rollout.valid_rows(returns)
    np.testing.assert_allclose(
        batch["advantages"], (expected - expected.mean()) / (expected.std() + 1e-8), rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_a2c(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("a2c").main(num_iterations=20) > 120
    assert capsys.readouterr().out.startswith("mean return")


@pytest.mark.slow
def test_a2c_with_two_learners() -> None:
    assert example("a2c").main(num_iterations=20, num_learners=2) > 100


@pytest.mark.slow
def test_double_q(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("double_q").main(num_env_steps=4_000) > 60
    assert capsys.readouterr().out.startswith("greedy mean return")


@pytest.mark.parametrize("name", ["ReinforceConfig", "A2CConfig", "DoubleQConfig"])
def test_runs_are_repeated_and_restored(name: str, tmp_path: Path) -> None:
    module = example({"ReinforceConfig": "reinforce", "A2CConfig": "a2c", "DoubleQConfig": "double_q"}[name])
    settings: dict[str, Any] = {"train_batch_size_per_learner": 64}
    if name == "DoubleQConfig":
        settings |= {"num_steps_sampled_before_learning_starts": 64}
    config = getattr(module, name)().environment("CartPole-v1").training(**settings).debugging(seed=3)
    config.reporting(min_sample_timesteps_per_iteration=100)

    def play(algo: Algorithm) -> list[Any]:
        return [algo.train()["learners"] for _ in range(2)]

    with config.build() as one, config.build() as other:
        assert play(one) == play(other)
        one.save(tmp_path / "saved")
        with Algorithm.from_checkpoint(tmp_path / "saved") as restored:
            obs = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
            np.testing.assert_array_equal(
                restored.compute_actions(obs, explore=False), one.compute_actions(obs, explore=False)
            )


def test_short_names_are_registered_and_the_command_line_trains(tmp_path: Path) -> None:
    config = example("a2c").A2CConfig
    assert registry.config_class("A2C") is config and registry.name_of(config) == "a2c:A2CConfig"
    command = corral_command("train", "--algo", "a2c:A2CConfig", "--env", "CartPole-v1")
    command += ["--stop", "training_iteration=1", "--set", "reporting.min_sample_timesteps_per_iteration=128"]
    done = warm.run([*command, "--run-dir", str(tmp_path / "run"), "--quiet"], cwd=FOLDER)
    assert done.returncode == 0, done.stderr
    assert "algo: a2c:A2CConfig" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("engine", "num_env_runners"),
    [
        ("local", 0),
        pytest.param("local", 2, marks=pytest.mark.slow),
        pytest.param("process", 2, marks=pytest.mark.slow),
        pytest.param("ray", 2, marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow_on_ray]),
    ],
)
def test_building_blocks(
    engine: str, num_env_runners: int, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if engine == "ray":
        request.getfixturevalue("ray_runtime")
    train = example_files.load("building_blocks/actor_critic.py").train
    assert train(engine, num_env_runners, num_iterations=50) > 80
    assert capsys.readouterr().out.startswith("iteration 0: entropy 0.69")
