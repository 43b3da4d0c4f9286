"""Tuned settings: each one makes a config whose env can be sampled, and the command line finds them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import yaml

from corral.algorithms.registry import config_from_dict
from corral.algorithms.tuned_settings import TUNED_ALGORITHMS, tuned_algorithms, tuned_settings
from corral.errors import ConfigError
from corral.tools.cli.main import main

CELLS = [(algo, env) for env, algos in tuned_algorithms().items() for algo in algos]
FROM_DATA = {"BC", "MARWIL", "IQL", "CQL"}


@pytest.mark.parametrize(("algo", "env"), CELLS, ids=[f"{algo}-{env}" for algo, env in CELLS])
def test_tuned_settings_make_a_config_for_the_actions_of_the_env(algo: str, env: str) -> None:
    settings = tuned_settings(env, algo)
    stop = settings.pop("stop")
    config = config_from_dict(settings)
    if algo in FROM_DATA:
        assert 3 <= stop["training_iteration"] <= 20
        config.offline_data(input_="recorded")
    else:
        assert stop["num_env_steps"] >= 20_000
    config.validate()
    assert (config.algo_name, config.env) == (algo, env)
    assert env in gym.registry
    is_discrete = env in ("CartPole-v1", "MountainCar-v0", "Acrobot-v1", "LunarLander-v3")
    assert algo not in ({"SAC", "TD3", "CQL"} if is_discrete else {"DQN", "PQN", "IMPALA"})
    minibatch, batch = getattr(config, "minibatch_size", None), config.train_batch_size_per_learner
    assert minibatch is None or batch % minibatch == 0


@pytest.mark.parametrize(
    ("algo", "env"), [("PPO", "MountainCar-v0"), ("DQN", "CartPole-v1"), ("SAC", "MountainCarContinuous-v0")]
)
def test_tuned_settings_train(algo: str, env: str) -> None:
    settings = tuned_settings(env, algo)
    del settings["stop"]
    config = config_from_dict(settings).reporting(min_sample_timesteps_per_iteration=300)
    config.set_path("debugging.seed", 0)
    if algo != "PPO":
        config.set_path("training.num_steps_sampled_before_learning_starts", 260)
    with config.build() as algorithm:
        result = algorithm.train()
    assert np.isfinite(result["learners"]["default_policy"]["total_loss"])


def test_every_env_of_the_classic_box2d_and_mujoco_families_has_settings() -> None:
    newest: dict[str, int] = {}
    for spec in gym.registry.values():
        entry = str(spec.entry_point)
        if entry.startswith(("gymnasium.envs.classic_control", "gymnasium.envs.box2d", "gymnasium.envs.mujoco")):
            newest[spec.name] = max(spec.version or 0, newest.get(spec.name, 0))
    # CarRacing has images; its settings were not tried.
    assert {f"{name}-v{version}" for name, version in newest.items()} - {"CarRacing-v3"} == {*tuned_algorithms()}


def test_a_name_without_settings_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no tuned settings for env 'CartPole-v0'\. Did you mean 'CartPole-v1'"):
        tuned_settings("CartPole-v0")
    with pytest.raises(
        ConfigError,
        match="settings of DQN for env 'Pendulum-v1', only of PPO, SAC, TD3, APPO, BC, MARWIL, IQL",
    ):
        tuned_settings("Pendulum-v1", "DQN")
    with pytest.raises(ConfigError, match=r"no tuned settings of 'PPA'\. Did you mean 'PPO'"):
        tuned_settings("Pendulum-v1", "PPA")


def test_the_first_algorithm_with_settings_is_taken_and_a_caller_may_change_them() -> None:
    for env, algos in tuned_algorithms().items():
        assert algos == [algo for algo in TUNED_ALGORITHMS if algo in algos]
        assert tuned_settings(env)["algo"] == algos[0]
        assert tuned_settings(env, algos[-1].lower()) == tuned_settings(env, algos[-1])
    tuned_settings("CartPole-v1")["training"]["gamma"] = 0.0
    assert tuned_settings("CartPole-v1")["training"]["gamma"] == 0.98


def test_the_command_line_trains_with_them(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--stop", "num_env_steps=512", "--set", "training.gamma=0.9", "--quiet", "--run-dir", "run"]
    assert main(["train", "--tuned", "CartPole-v1", *more]) == 0
    config = (tmp_path / "run" / "config.yaml").read_text()
    for line in ("algo: PPO", "env: CartPole-v1", "gamma: 0.9\n", "lambda_: 0.8", "num_epochs: 20"):
        assert line in config
    assert yaml.safe_load(config)["stop"] == {"num_env_steps": 512}
    more = ["--stop", "training_iteration=1", "--quiet", "--run-dir", "other"]
    assert main(["train", "--tuned", "CartPole-v1", *more]) == 0  # the schedule of lr ends at the tuned number of steps
    assert yaml.safe_load((tmp_path / "other" / "config.yaml").read_text())["stop"] == {
        "num_env_steps": 100_000,
        "training_iteration": 1,
    }
    assert main(["train", "--tuned", "CartPol-v1"]) == 2
    assert "--tuned: there are no tuned settings for env 'CartPol-v1'" in (error := capsys.readouterr().err)
    assert "`corral list tuned` shows all" in error
    assert main(["train", "--tuned", "CartPole-v1", "--config", "run/config.yaml"]) == 2
    assert "--tuned and --config both name settings" in capsys.readouterr().err
    assert main(["train", "--tuned", "CartPole-v1", "--resume", "run"]) == 2
    assert "--tuned cannot be used with --resume" in capsys.readouterr().err


def test_the_list_shows_envs_and_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "tuned", "pendulum"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["Pendulum-v1", "PPO", "SAC", "TD3", "APPO", "BC", "MARWIL", "IQL"] in lines
    assert all("pendulum" in line[0].lower() for line in lines)
