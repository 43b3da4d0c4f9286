"""The space of a search and its settings: what is read, and every refusal names the place and the remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from corral import DQNConfig, PPOConfig
from corral.errors import ConfigError
from corral.runs.loggers.run_summary import EVALUATED, TRAINED
from corral.tools.cli.main import main
from corral.tools.search.settings import make_search
from corral.tools.search.space import read_space, with_values

STOP = {"num_env_steps": 1000.0}


def config() -> Any:
    return PPOConfig().environment("CartPole-v1")


def test_settings_are_named_as_on_the_command_line() -> None:
    space = {
        "lr": {"log": [1e-5, 1e-2]},
        "training.gamma": {"uniform": [0.9, 1]},
        "num_epochs": {"int": [1, 10]},
        "minibatch_size": {"log_int": [16, 1024]},
        "model_config.fcnet_hiddens": {"choice": [[64], [64, 64]]},
        "environment.env_config.length": {"choice": [1, 2]},
    }
    parameters = read_space(config(), space)
    assert [(parameter.path, parameter.distribution()) for parameter in parameters] == [
        ("training.lr", FloatDistribution(1e-5, 1e-2, log=True)),
        ("training.gamma", FloatDistribution(0.9, 1.0)),
        ("training.num_epochs", IntDistribution(1, 10)),
        ("training.minibatch_size", IntDistribution(16, 1024, log=True)),
        ("rl_module.model_config.fcnet_hiddens", CategoricalDistribution(["[64]", "[64, 64]"])),
        ("environment.env_config.length", CategoricalDistribution([1, 2])),
    ]
    assert parameters[4].value_of("[64, 64]") == [64, 64]
    changed = with_values(config(), {"training.lr": 0.5, "rl_module.model_config.fcnet_hiddens": [7]})
    assert (changed.lr, changed.model_config["fcnet_hiddens"]) == (0.5, [7])


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "there is no setting to search"),
        ({"lrr": {"log": [1e-5, 1e-2]}}, "unknown setting 'lrr'. Did you mean 'training.lr'?"),
        ({"training.lrr": {"log": [1e-5, 1e-2]}}, "Did you mean 'lr'?"),
        ({"lr": 0.1}, r"search: space: lr: expected \{log: \[1e-5, 1e-2\]\}, "),
        ({"lr": {"log": [1, 2], "int": [1, 2]}}, "lr: expected"),
        ({"lr": {"logg": [1e-5, 1e-2]}}, "lr: unknown kind 'logg'. Did you mean 'log'?"),
        ({"lr": {"log": 1e-5}}, "lr: log takes a list, got 1e-05"),
        ({"lr": {"log": [1e-5]}}, "lr: log takes two numbers, the lower and the upper end"),
        ({"lr": {"log": [1e-5, "x"]}}, "lr: 'x' is not a finite number"),
        ({"lr": {"uniform": [0, float("inf")]}}, "lr: inf is not a finite number"),
        ({"lr": {"log": [0, 1e-2]}}, "lr: a logarithm needs positive numbers, and the range begins at 0"),
        ({"lr": {"log": [1e-2, 1e-5]}}, "lr: the range is empty: 0.01 is not below 1e-05"),
        ({"lr": {"uniform": [0.1, 0.1]}}, "the range is empty"),
        ({"num_epochs": {"int": [1.5, 3]}}, "num_epochs: 1.5 is not a whole number: use 'uniform'"),
        ({"num_epochs": {"log_int": [1.5, 3]}}, "num_epochs: 1.5 is not a whole number: use 'log'"),
        ({"num_epochs": {"uniform": [1, 9]}}, "training.num_epochs: 4.0552 is refused: .* whole numbers use 'int'"),
        ({"num_epochs": {"log": [1, 9]}}, "is refused: .* whole numbers use 'log_int'"),
        ({"gamma": {"uniform": [0.9, 1.2]}}, "training.gamma: 1.2 is refused: gamma=1.2 must be in"),
        ({"gamma": {"choice": [0.9, "high"]}}, "training.gamma: 'high' is refused: "),
        ({"lr": {"log": [1e-5, 1e-2]}, "gamma": {"choice": [2, 3]}}, "training.gamma: 2 is refused: gamma=2"),
        ({"lr": {"log": [1e-5, 1e-2]}, "lrr": {"choice": [1, 2]}}, "space: lrr: 1 is refused: .*unknown setting 'lrr'"),
        ({"gamma": {"choice": [0.9]}}, "a choice needs at least two values"),
        ({"gamma": {"choice": [0.9, 0.9]}}, "0.9 is among the values twice"),
        ({"gamma": {"choice": [True, 1]}}, "is among the values twice"),
        ({"gamma": {"choice": {0.9: 1}}}, "gamma: choice takes a list"),
        ({"lr": {"log": [1e-5, 1e-2]}, "training.lr": {"log": [1e-5, 1e-2]}}, "name the same setting"),
        ({"model_config": {"choice": [{}, {"a": 1}]}, "model_config.a": {"choice": [1, 2]}}, "name the same setting"),
        ({"seed": {"int": [0, 9]}}, "num_seeds sets the number of seeds"),
        ({"training": {"choice": [1, 2]}}, "'training' is a group of settings"),
    ],
)
def test_a_wrong_space_is_refused(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_space(config(), space)


def test_a_value_may_need_the_right_value_of_another_setting() -> None:
    """A minibatch must not be larger than the batch: large ones are refused only if no searched batch is as large."""
    base = config().training(train_batch_size_per_learner=128)
    minibatch = {"minibatch_size": {"choice": [64, 256]}}
    with pytest.raises(ConfigError, match=r"training.minibatch_size: 256 is refused: .*minibatch_size"):
        read_space(base, minibatch)
    assert len(read_space(base, minibatch | {"train_batch_size_per_learner": {"log_int": [128, 512]}})) == 2


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([], "search: expected settings by name"),
        ({"trials": 3}, "search: unknown setting 'trials'. .*num_trials"),
        ({"num_trials": 0}, "num_trials=0"),
        ({"num_seeds": 0}, "num_seeds=0"),
        ({"mode": "maximum"}, "mode='maximum': unknown name 'maximum'. Known names: max, min"),
        ({"sampler": "tpee"}, "unknown name 'tpee'. Did you mean 'tpe'?"),
        ({"pruner": "medium"}, "unknown name 'medium'. Did you mean 'median'?"),
        ({"seed": 2**63 - 1, "num_seeds": 2}, "a seed must be at most 9223372036854775807"),
        ({"metric": EVALUATED}, "because no evaluation round is played"),
        ({"sampler": "grid"}, "sampler 'grid' tries all values, and training.lr is a range"),
        ({"sampler": "grid", "space": {"num_epochs": {"int": [1, 1001]}}}, "the grid has 1,001 combinations"),
    ],
)
def test_wrong_settings_are_refused(group: Any, message: str) -> None:
    group = {"space": {"lr": {"log": [1e-5, 1e-2]}}, **group} if isinstance(group, dict) else group
    with pytest.raises(ConfigError, match=message):
        make_search(config(), STOP, group)


def test_the_metric_is_the_return_of_evaluation_if_there_is_evaluation() -> None:
    space = {"lr": {"log": [1e-5, 1e-2]}}
    assert make_search(config(), STOP, {"space": space}).metric == TRAINED
    evaluated = config().evaluation(evaluation_interval=2)
    assert make_search(evaluated, STOP, {"space": space}).metric == EVALUATED


def test_a_grid_has_all_combinations_and_no_more_trials() -> None:
    space = {"num_epochs": {"int": [2, 3]}, "model_config.fcnet_hiddens": {"choice": [[4], [8]]}}
    search = make_search(config(), STOP, {"space": space, "sampler": "grid"})
    assert search.settings.num_trials == 4
    found = [search.values_of(stored) for stored in search.combinations()]
    assert [[*values.values()] for values in found] == [[2, [4]], [2, [8]], [3, [4]], [3, [8]]]


def test_an_experiment_holds_what_differs_from_the_defaults_and_what_was_found() -> None:
    base = DQNConfig().environment("CartPole-v1").training(n_step=2)
    search = make_search(base, STOP, {"space": {"gamma": {"uniform": [0.9, 1.0]}}, "num_seeds": 2, "seed": 5})
    assert search.experiment({"training.gamma": 0.99}) == {
        "algo": "DQN",
        "environment": {"env": "CartPole-v1"},
        "training": {"gamma": 0.99, "n_step": 2},
        "stop": STOP,
    }
    assert search.seeds == [5, 6]
    again = yaml.safe_load(yaml.safe_dump(search.whole()))
    seeded = make_search(base.copy(seed=7), STOP, {"space": {"gamma": {"uniform": [0.9, 1.0]}}, "num_seeds": 2})
    assert seeded.seeds == [7, 8]  # of the experiment, unless the search has a seed of its own
    assert seeded.experiment({})["debugging"] == {"seed": 7}
    other = make_search(base.copy(seed=7), STOP, {"space": {"gamma": {"uniform": [0.9, 1.0]}}, "seed": 3})
    assert (other.seeds, other.experiment({})["debugging"]) == ([3], {"seed": 3})
    assert make_search(base, STOP, again["search"]).whole() == search.whole()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["search"], 2, "give --config FILE to begin a search, or --resume DIR"),
        (["search", "--config", "plain.yaml"], 2, "plain.yaml has no group 'search': name there what to search"),
        (
            ["train", "--config", "search.yaml"],
            2,
            "has a group 'search': `corral search --config search.yaml` reads it",
        ),
        (["search", "--config", "endless.yaml"], 2, "no stop criterion"),
        (["search", "--config", "search.yaml", "--trials", "0"], 2, "num_trials=0"),
        (["search", "--config", "search.yaml", "--parallel", "-1"], 2, "--parallel -1: it must be a number of trials"),
        (["search", "--config", "search.yaml", "--set", "training.lrr=1"], 2, "Did you mean 'lr'?"),
        (["search", "--config", "search.yaml", "--stop", "num_env_steps=0"], 2, "num_env_steps"),
        (["search", "--config", "search.yaml", "--run-dir", "held"], 6, "held already holds a search: continue it"),
        (["train", "--algo", "PPO", "--env", "CartPole-v1", "--stop", "time_s=1", "--run-dir", "held"], 6, "a search"),
        (["search", "--resume", "nowhere"], 6, "nowhere is not the directory of a search: it does not exist"),
        (["search", "--resume", "held", "--set", "training.lr=1"], 2, "--set cannot be used with --resume"),
        (["search", "--resume", "held", "--seeds-per-trial", "2"], 2, "--seeds-per-trial cannot be used with --resume"),
    ],
)
def test_wrong_usage_starts_nothing(
    arguments: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "search.json").write_text("{}", encoding="utf-8")
    experiment = {"algo": "PPO", "environment": {"env": "CartPole-v1"}}
    search = {"search": {"space": {"lr": {"log": [1e-5, 1e-2]}}}}
    files = {"plain": experiment | {"stop": STOP}, "endless": experiment | search}
    files["search"] = files["plain"] | search
    for name, settings in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == status
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_without_optuna_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.chdir(tmp_path)
    assert main(["search", "--config", "search.yaml"]) == 8
    assert "pip install 'corral[search]'" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
