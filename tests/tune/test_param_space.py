"""From the dict of a trial to a config, and from a config to what a trial needs."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("ray")

import corral.compat.tune
from corral import Callback, DQNConfig, PPOConfig
from corral.errors import ConfigError
from corral.testing import IdentityEnv


class First(Callback):
    pass


class Second(Callback):
    pass


@pytest.mark.parametrize(
    "settings",
    [
        {"env": IdentityEnv, "lr": 0.1, "fcnet": None},
        {"environment": IdentityEnv, "training": {"lr": 0.1}},
        {"environment": {"env": IdentityEnv}, "training.lr": 0.1},
        {"environment.env": IdentityEnv, "training": {"lr": 5.0}, "lr": 0.1},
        {"algo": "PPO", **PPOConfig().environment(IdentityEnv).training(lr=0.1).to_dict()},
    ],
)
def test_names_paths_and_groups(settings: dict[str, Any]) -> None:
    settings.pop("fcnet", None)
    base = PPOConfig().training(gamma=0.5)
    config = corral.compat.tune.configured(base, settings)
    assert config.env is IdentityEnv and config.lr == 0.1
    assert isinstance(config, PPOConfig) and config is not base and base.env is None
    assert config.gamma == (0.5 if "algo" not in settings else 0.99)


def test_keys_of_dicts_and_several_forms_at_once() -> None:
    settings = {"rl_module.model_config.fcnet_hiddens": [8], "engine": "process", "num_env_runners": 2}
    config = corral.compat.tune.configured(PPOConfig(), {"seed": 3, **settings})
    assert (config.model_config, config.engine_name, config.num_env_runners) == ({"fcnet_hiddens": [8]}, "process", 2)
    assert config.seed == 3


def test_callbacks_in_all_their_forms() -> None:
    def note(result: Any) -> None:
        pass

    base = PPOConfig().callbacks(First)
    assert corral.compat.tune.configured(base, {"callbacks": Second}).callbacks_class == [Second]
    assert corral.compat.tune.configured(base, {"callbacks": [Second, First]}).callbacks_class == [Second, First]
    config = corral.compat.tune.configured(base, {"callbacks": {"on_train_result": note, "on_error": "log"}})
    assert (config.callbacks_class, config.on_error) == ([First], "log")
    assert config.callback_functions == {"on_train_result": [note]}
    whole = PPOConfig().callbacks(Second, on_train_result=note).to_dict()
    config = corral.compat.tune.configured(PPOConfig(), whole)
    assert (config.callbacks_class, config.callback_functions) == ([Second], {"on_train_result": [note]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lrr": 1}, "unknown setting 'lrr'. Did you mean 'lr'?"),
        ({"xtraining": {}}, "unknown setting 'xtraining'. Did you mean 'training'?"),
        ({"training": {"lrr": 1}}, "training: unknown setting 'lrr'. Did you mean 'lr'?"),
        ({"training.lrr": 1}, "training: unknown setting 'lrr'. Did you mean 'lr'?"),
        ({"xtraining.lr": 1}, "unknown setting 'xtraining.lr'. Did you mean 'training.lr'?"),
        ({"training": {"env": 1}}, "unknown setting 'env'. It belongs to .environment"),
        ({"training": 3}, "group 'training' must be a dict of settings by name, got 3"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"callbacks": {"on_train_resul": len}}, "unknown event 'on_train_resul'. Did you mean 'on_train_result'?"),
        ({"algo": "SAC"}, "algo='SAC', but the trainable runs PPO"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        corral.compat.tune.configured(PPOConfig(), settings)


def test_trainables_of_names_classes_and_configs() -> None:
    for algorithm in ("PPO", "ppo", PPOConfig, PPOConfig().training(lr=0.1)):
        made = corral.compat.tune.trainable(algorithm)
        assert made.__name__ == "PPO" and isinstance(made.base_config, PPOConfig)
    assert corral.compat.tune.trainable(PPOConfig().training(lr=0.1)).base_config.lr == 0.1
    assert isinstance(corral.compat.tune.trainable("corral.algorithms.dqn:DQNConfig").base_config, DQNConfig)
    with pytest.raises(ConfigError, match=r"unknown algorithm 'PPOO'. Did you mean 'PPO'?"):
        corral.compat.tune.trainable("PPOO")


RUNNER, LEARNER = {"num_cpus_per_env_runner": 0.5, "num_env_runners": 2}, {"num_learners": 1, "num_gpus_per_learner": 1}


@pytest.mark.parametrize(
    ("settings", "bundles"),
    [
        ({}, [{"CPU": 1}]),
        ({"num_gpus_per_learner": 0.5}, [{"CPU": 1, "GPU": 0.5}]),
        (RUNNER, [{"CPU": 1}, {"CPU": 0.5}, {"CPU": 0.5}]),
        ({**LEARNER, "num_env_runners": 1}, [{"CPU": 1}, {"CPU": 1}, {"CPU": 1, "GPU": 1}]),
        ({**RUNNER, **LEARNER, "engine_name": "ray"}, [{"CPU": 1}, {"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 1, "GPU": 1}]),
        ({**RUNNER, **LEARNER, "engine_name": "process"}, [{"CPU": 3, "GPU": 1}]),
        ({**RUNNER, **LEARNER, "engine_name": "local"}, [{"CPU": 1, "GPU": 1}]),
        (
            {"num_env_runners": 1, "custom_resources_per_env_runner": {"simulator": 2}},
            [{"CPU": 1}, {"CPU": 1, "simulator": 2}],
        ),
        ({"num_env_runners": 1, "num_cpus_per_env_runner": 0}, [{"CPU": 1}]),
        ({"evaluation_num_env_runners": 2}, [{"CPU": 1}]),
        (
            {
                "evaluation_interval": 3,
                "evaluation_num_env_runners": 2,
                "evaluation_config": {"num_cpus_per_env_runner": 2},
            },
            [{"CPU": 1}, {"CPU": 2}, {"CPU": 2}],
        ),
        ({"evaluation_interval": 3}, [{"CPU": 1}]),
        ({"evaluation_interval": 3, "evaluation_parallel_to_training": True}, [{"CPU": 2}]),
    ],
)
def test_resources_come_from_the_config(settings: dict[str, Any], bundles: list[dict[str, float]]) -> None:
    assert corral.compat.tune.resources(PPOConfig().copy(**settings)).bundles == bundles
    assert corral.compat.tune.trainable(PPOConfig).default_resource_request(settings).bundles == bundles


def test_what_tune_is_told() -> None:
    config = PPOConfig().environment(IdentityEnv).env_runners(num_envs_per_env_runner=4)
    config.training(train_batch_size_per_learner=64, minibatch_size=None, num_epochs=1)

    def log(metrics_logger: Any, result: dict[str, Any]) -> None:
        metrics_logger.log_value("done", 1.0, reduce="sum")  # would end the trial
        metrics_logger.log_value(("mine", "series"), 2, reduce="item_series")
        result["mine_too"] = {"array": IdentityEnv().reset()[0], "texts": ["a", "b"]}
        import numpy as np

        result["image"] = np.zeros((4, 4, 3), np.uint8)
        result["scalar"] = np.float32(0.5)

    with config.callbacks(on_train_result=log).build() as algo:
        result = algo.train()
    told = corral.compat.tune.reportable(result)
    assert "done" in result and "image" in result
    assert not told.keys() & {"config", "training_iteration", "time_total_s", "done", "image"}
    assert told["timesteps_total"] == result["num_env_steps_sampled_lifetime"]
    assert told["mine"] == {"series": [2]} and told["mine_too"]["texts"] == ["a", "b"]
    assert told["scalar"] == 0.5 and type(told["scalar"]) is float
    assert told["env_runners"] == result["env_runners"]


def test_tune_is_told_no_early_means() -> None:
    result = {
        "num_env_steps_sampled_lifetime": 8,
        "env_runners": {"episode_return_mean": 5.0, "num_episodes": 1},
        "mine": 2.0,
        "early_means": ["env_runners/episode_return_mean", "mine"],
    }
    told = corral.compat.tune.reportable(result)
    assert math.isnan(told["env_runners"]["episode_return_mean"]) and math.isnan(told["mine"])
    assert told["env_runners"]["num_episodes"] == 1 and "early_means" not in told
    assert result["mine"] == 2.0
