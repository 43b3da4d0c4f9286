"""Algorithms by name: built-in ones, and those in files of users."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import corral
from corral import PPO, Algorithm, AlgorithmConfig, PPOConfig
from corral.algorithms import registry
from corral.algorithms.registry import algorithm_names, config_class, config_from_dict, name_of
from corral.errors import ConfigError, nearest
from corral.testing import IdentityEnv
from user_files import write_my_algo

BUILT_IN = list(registry.ALGORITHMS)


@pytest.fixture
def my_algo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of a user's file, importable as `my_algo`."""
    write_my_algo(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    yield __import__("my_algo")
    del sys.modules["my_algo"]


def test_an_import_path_names_a_users_algorithm(my_algo: Any) -> None:
    assert config_class("my_algo:MyConfig") is config_class("my_algo.MyConfig") is my_algo.MyConfig
    assert config_class(my_algo.MyConfig) is my_algo.MyConfig
    settings = {"algo": "my_algo:MyConfig", "training": {"bonus": "0.25", "lr": 0.1}}
    config = config_from_dict(settings)
    assert type(config) is my_algo.MyConfig and (config.bonus, config.lr) == (0.25, 0.1)
    with pytest.raises(ConfigError, match="bonus=-1 must be positive"):
        config.training(bonus=-1)


def test_a_config_names_its_class_where_no_short_name_does(my_algo: Any) -> None:
    config = my_algo.MyConfig().training(bonus=0.1)
    assert name_of(my_algo.MyConfig) == config.to_dict()["algo"] == "my_algo:MyConfig"
    assert config_from_dict(config.to_dict()) == config
    assert my_algo.MyConfig.from_dict(config.to_dict()) == config
    assert PPOConfig().to_dict()["algo"] == "PPO"
    with pytest.raises(ConfigError, match="the settings are for algo 'my_algo:MyConfig'"):
        PPOConfig.from_dict(config.to_dict())


def test_the_name_of_an_algorithm_matches_its_class(my_algo: Any) -> None:
    @dataclass(kw_only=True)
    class Careful(PPOConfig):
        lr: Any = 1e-5

    assert my_algo.MyConfig().algo_name == "MyPPO"
    assert (PPOConfig().algo_name, Careful().algo_name, Careful().algo_class) == ("PPO", "PPO", PPO)
    assert Careful().to_dict()["algo"].endswith("<locals>.Careful")  # its own defaults are in no other class


def test_a_short_name_may_be_registered(my_algo: Any) -> None:
    corral.register_algorithm("Mine", "my_algo:MyConfig")
    corral.register_algorithm("A2C", my_algo.MyConfig)
    assert config_class("mine") is config_class("A2C") is my_algo.MyConfig
    assert algorithm_names() == [*BUILT_IN, "Mine", "A2C"]
    # Another process may not know the name, so that files hold the import path.
    assert config_from_dict({"algo": "A2C"}).to_dict()["algo"] == "my_algo:MyConfig"
    corral.register_algorithm("a2c", PPOConfig)
    assert config_class("A2C") is PPOConfig


def test_an_installed_package_names_its_algorithms(my_algo: Any, tmp_path: Path) -> None:
    installed = tmp_path / "my_algo-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my_algo\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[corral.algorithms]\nMine = my_algo:MyConfig\nPPO = my_algo:MyConfig\nLost = no_such_module:Config\n"
    )
    assert config_class("mine") is my_algo.MyConfig
    assert config_class("PPO") is PPOConfig  # built-in names stay
    assert [*algorithm_names()][-2:] == ["Mine", "Lost"]
    assert config_from_dict({"algo": "Mine"}).to_dict()["algo"] == "my_algo:MyConfig"
    with pytest.raises(ConfigError, match="no_such_module"):
        config_class("lost")
    corral.register_algorithm("Mine", PPOConfig)
    assert config_class("mine") is PPOConfig


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ppo", PPOConfig, "'ppo' is a built-in algorithm"),
        ("my:A2C", PPOConfig, "'my:A2C' is not a short name"),
        ("", PPOConfig, "'' is not a short name"),
        (" ", PPOConfig, "' ' is not a short name"),
        (5, PPOConfig, "5 is not a short name"),
        ("A2C", PPO, r"PPO'> is not a subclass of corral.AlgorithmConfig. Name the config class"),
        ("A2C", PPOConfig(), r"is not a subclass of corral.AlgorithmConfig"),
    ],
)
def test_what_cannot_be_registered(name: str, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        corral.register_algorithm(name, config)
    assert algorithm_names() == BUILT_IN


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ("no_such_module:MyConfig", "cannot be imported: No module named 'no_such_module'.* working directory"),
        ("my_algo:MyConfg", "'my_algo' has no 'MyConfg'. Did you mean 'MyConfig'?"),
        ("my_algo:MyPPO", r"algo 'my_algo:MyPPO' is not a subclass of .*AlgorithmConfig. Name the config class"),
        ("my_algo:dataclass", "is not a subclass of corral.AlgorithmConfig"),
        ("__main__:MyConfig", "the script that Python was started with.* Move the class .* into a module of its own"),
        (f"{__name__}:test.<locals>.Config", "has no 'test'"),
    ],
)
def test_an_import_path_that_leads_to_no_config(my_algo: Any, algo: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_class(algo)


def test_only_a_really_close_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"unknown algorithm 'PPPO'. Did you mean 'PPO'?") as close:
        config_class("PPPO")
    with pytest.raises(
        ConfigError,
        match=rf"unknown algorithm 'A2C'. Known algorithms: {', '.join(sorted(BUILT_IN))}.",
    ) as far:
        config_class("A2C")
    assert "Did you mean" not in str(far.value)
    for error in (close, far):
        assert "import path of its config class, such as 'my_algo:MyConfig'" in str(error.value)


@pytest.mark.parametrize(
    ("name", "known", "suggested"),
    [
        ("A2C", ["SAC", "PPO"], None),
        ("TD3", ["SAC", "PPO", "DQN"], None),
        ("lrr", ["lr", "gamma"], "lr"),
        ("gmama", ["lambda_", "gamma"], "gamma"),  # two letters swapped
        ("Gamma", ["gamma"], "gamma"),
        ("train", ["training", "environment"], "training"),
        ("learning_rate", ["lr", "gamma"], None),
        ("num_env_workers", ["num_env_runners", "num_learners"], "num_env_runners"),
        ("episode_return_men", ["env_runners/episode_return_mean", "total_loss"], "env_runners/episode_return_mean"),
        ("lr", ["training.lr", "training.gamma"], "training.lr"),
        ("eval/runner/mean", ["runners/mean", "eval/runners/mean", "eval/runners/min"], "eval/runners/mean"),
        ("x", ["y"], None),
    ],
)
def test_nearest(name: str, known: list[str], suggested: str | None) -> None:
    found = f"Did you mean {suggested!r}?" if suggested else f"Known names: {', '.join(sorted(known))}."
    assert nearest(name, known) == found


def test_a_users_algorithm_runs_without_a_config_of_its_own() -> None:
    class Mine(PPO):
        pass

    @dataclass(kw_only=True)
    class MineConfig(PPOConfig):
        @property
        def algo_class(self) -> type[Algorithm]:
            return Mine

    config = MineConfig().environment(IdentityEnv).training(train_batch_size_per_learner=32, minibatch_size=None)
    with config.build() as algo:
        assert type(algo) is Mine and algo.train()["config"]["algo"].endswith("MineConfig")


def test_a_plain_config_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="AlgorithmConfig describes no algorithm: use PPOConfig"):
        AlgorithmConfig().algo_class  # noqa: B018
