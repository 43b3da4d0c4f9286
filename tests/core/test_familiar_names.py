"""Names of other libraries: every hint names something that exists, and says where the meaning differs."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import corral
from corral import (
    PPO,
    Algorithm,
    AlgorithmConfig,
    APPOConfig,
    BCConfig,
    DQNConfig,
    IMPALAConfig,
    MARWILConfig,
    PPOConfig,
    SACConfig,
    TD3Config,
)
from corral.algorithms.config.settings import GROUPS
from corral.algorithms.stopping import StopCriteria
from corral.callbacks import EVENTS
from corral.compat.familiar_names import ALGORITHM_METHODS, CONFIG_METHODS, EVENT_ARGUMENTS, RESULTS, SETTINGS
from corral.compat.familiar_names import EVENTS as FAMILIAR_EVENTS
from corral.compat.tune.param_space import configured
from corral.core import familiar_names
from corral.core.familiar_names import meaning_of
from corral.core.metrics.result import flat_result
from corral.data.replay.config import ReplayConfig
from corral.errors import ConfigError, CorralError, StopCriterionError
from corral.exploration.build import exploration_class, settings_of
from corral.modules.module import ModelConfig
from corral.testing import CountingEnv
from corral.tools.cli.experiment import load_experiment
from corral.tools.cli.main import make_parser
from small import small

CONFIGS = (PPOConfig, IMPALAConfig, APPOConfig, DQNConfig, SACConfig, TD3Config)
PATHS_OF = [
    {f"{group}.{name}" for group, names in config.group_fields().items() for name in names} for config in CONFIGS
]
PATHS = {path for paths in PATHS_OF for path in paths}


def keys_of(setting: str) -> set[str]:
    """Return the keys of a setting that is a dict."""
    if setting == "training.optimizer_config":
        return {"eps"}  # of Adam
    if setting == "exploration.exploration_config":
        return {"type", *settings_of(exploration_class("EpsilonGreedy"))}
    owner = {"rl_module.model_config": ModelConfig, "training.replay_buffer_config": ReplayConfig}[setting]
    return {field.name for field in dataclasses.fields(owner)}


class TestTables:
    def test_every_setting_exists(self) -> None:
        wrong = []
        for name, meanings in SETTINGS.items():
            # One algorithm may have a setting whose name another one explains, such as `use_kl_loss`.
            having = [
                paths for paths in PATHS_OF if any(".".join(path.split(".")[:2]) in paths for path, _ in meanings)
            ]
            if all(name in {path.partition(".")[2] for path in paths} for paths in having or [PATHS]):
                wrong.append(f"{name}: Corral has a setting of this name")
            for path, note in meanings:
                group, setting, key = [*path.split("."), "", ""][:3]
                if not (path or note):
                    wrong.append(f"{name}: neither a setting nor a note")
                if path and f"{group}.{setting}" not in PATHS:
                    wrong.append(f"{name}: there is no {path}")
                elif key and key not in keys_of(f"{group}.{setting}"):
                    wrong.append(f"{name}: {group}.{setting} has no key {key}")
        assert not wrong, "\n".join(wrong)

    def test_every_method_event_and_argument_exists(self) -> None:
        def targets(table: Any) -> set[str]:
            return {meant for meanings in table.values() for meant, _ in meanings} - {""}

        with small().evaluation(evaluation_interval=1).build() as algo:
            assert all(hasattr(algo, name) for name in targets(ALGORITHM_METHODS))
            assert not any(hasattr(algo, name) for name in ALGORITHM_METHODS)
            flat = flat_result(algo.train())
        assert targets(RESULTS) <= flat.keys() and not RESULTS.keys() & flat.keys()
        assert all(hasattr(PPOConfig, name) for name in targets(CONFIG_METHODS))
        assert not any(hasattr(PPOConfig(), name) for name in CONFIG_METHODS)
        assert targets(FAMILIAR_EVENTS) <= EVENTS.keys() and not FAMILIAR_EVENTS.keys() & EVENTS.keys()
        arguments = {argument for event in EVENTS.values() for argument in event.arguments}
        assert targets(EVENT_ARGUMENTS) <= arguments

    def test_a_hint_says_how_the_meaning_differs(self) -> None:
        words_by_name = [
            ("n_steps", "all sub-envs together"),
            ("num_steps", "all sub-envs together"),
            ("train_batch_size", "divided by the number of learners"),
            ("num_minibatches", "not the number of minibatches"),
            ("batch_size", "for DQN, SAC and TD3"),
            ("learning_rate", "[[env step, value], ...]"),
            ("vf_coef", "CleanRL multiplies half"),
            ("normalize_advantage", "not over each minibatch"),
            ("exploration_fraction", "in env steps"),
            ("gradient_steps", "per env step sampled"),
            ("target_update_freq", "not in gradient steps"),
            ("num_envs", "of each runner"),
            ("min_train_timesteps_per_iteration", "not steps trained on"),
        ]
        hints = [(name, words, str(PPOConfig.meaning_of(name))) for name, words in words_by_name]
        assert [(name, hint) for name, words, hint in hints if words not in hint] == []

    def test_settings_that_are_easily_confused_are_told_apart(self) -> None:
        meant = {
            ("clip_range", "clip_param"),
            ("clip_coef", "clip_param"),
            ("clip_range_vf", "vf_clip_param"),
            ("vf_coef", "vf_loss_coeff"),
            ("ent_coef", "entropy_coeff"),
            ("policy_lr", "actor_lr"),
            ("q_lr", "critic_lr"),
            ("exploration_initial_eps", "initial_epsilon"),
            ("start_e", "initial_epsilon"),
            ("exploration_final_eps", "final_epsilon"),
            ("end_e", "final_epsilon"),
            ("prioritized_replay_alpha", "alpha"),
            ("prioritized_replay_beta", "beta"),
            ("num_cpus_per_worker", "num_cpus_per_env_runner"),
            ("num_gpus_per_worker", "num_gpus_per_env_runner"),
        }
        assert {(name, SETTINGS[name][0][0].rpartition(".")[2]) for name, _ in meant} == meant

    @pytest.mark.parametrize("library", ["RLlib", "Stable-Baselines3"])
    def test_the_names_that_scripts_use_most_are_known(self, library: str) -> None:
        names = {
            "RLlib": "train_batch_size num_sgd_iter sgd_minibatch_size model rl_module_spec num_gpus num_workers "
            "num_rollout_workers num_envs_per_worker num_learner_workers use_kl_loss epsilon observation_filter "
            "remote_worker_envs clip_rewards entropy_coeff_schedule lr_schedule framework",
            "Stable-Baselines3": "n_steps batch_size n_epochs learning_rate gae_lambda clip_range clip_range_vf "
            "ent_coef vf_coef max_grad_norm policy_kwargs buffer_size learning_starts train_freq gradient_steps "
            "target_update_interval exploration_fraction exploration_initial_eps exploration_final_eps verbose "
            "tensorboard_log total_timesteps n_envs use_sde normalize_advantage stats_window_size action_noise",
        }[library]
        assert set(names.split()) <= SETTINGS.keys()


def of_training(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        PPOConfig().training(**{name: 1})
    return str(caught.value)


class TestPlaces:
    """Wherever the name of a setting is looked up, the table is asked before the spelling."""

    def test_setters(self) -> None:
        assert of_training("gradient_steps").startswith("training: unknown setting 'gradient_steps'. In Corral: .tr")
        assert "In Corral: .training(num_epochs=...)." in of_training("num_sgd_iter")
        assert DQNConfig.meaning_of("buffer_size") == "In Corral: .training(replay_buffer_config={'capacity': ...})."
        assert ".rl_module(model_config={'fcnet_hiddens': ...})" in of_training("net_arch")
        with pytest.raises(ConfigError, match=r"env_runners: .* \.env_runners\(num_env_runners=\.\.\.\) \(0 embeds"):
            PPOConfig().env_runners(num_rollout_workers=2)

    def test_a_setting_of_another_algorithm_is_no_setting_here(self) -> None:
        assert "which PPOConfig does not have" in of_training("buffer_size")
        both, one = DQNConfig.meaning_of("n_steps"), PPOConfig.meaning_of("n_steps")
        assert "n_step=" in str(both) and "n_step=" not in str(one)

    def test_attributes_copies_overrides_and_constructors(self) -> None:
        config, hint = PPOConfig(), r"In Corral: \.training\(lr=\.\.\.\) \(a schedule"
        with pytest.raises(AttributeError, match=hint) as caught:
            config.learning_rate = 1e-3  # type: ignore[attr-defined]
        assert isinstance(caught.value, CorralError)
        for call in (config.copy, config.overrides, PPOConfig):
            with pytest.raises(ConfigError, match=hint):
                call(learning_rate=1e-3)

    def test_dicts_files_the_command_line_and_tune(self, tmp_path: Path) -> None:
        hint = r"In Corral: \.training\(num_epochs=\.\.\.\)"
        with pytest.raises(ConfigError, match=hint):
            PPOConfig.from_dict({"training": {"n_epochs": 3}})
        with pytest.raises(ConfigError, match=hint):
            PPOConfig.from_dict({"n_epochs": 3})
        with pytest.raises(ConfigError, match=r"unknown group 'rollouts'. In Corral: env_runners"):
            PPOConfig.from_dict({"rollouts": {"num_rollout_workers": 3}})
        file = tmp_path / "experiment.yaml"
        file.write_text("algo: PPO\ntraining: {n_epochs: 3}\n", encoding="utf-8")
        for arguments in (
            ["--config", str(file)],
            ["--algo", "PPO", "--set", "n_epochs=3"],
            ["--algo", "PPO", "--set", "training.n_epochs=3"],
            ["--algo", "PPO", "--set", "ppo.n_epochs=3"],
        ):
            with pytest.raises(ConfigError, match=hint):
                load_experiment(make_parser().parse_args(["train", *arguments]))
        with pytest.raises(ConfigError, match=hint):
            configured(PPOConfig(), {"n_epochs": 3})

    def test_keys_of_dicts_of_settings(self) -> None:
        with pytest.raises(ConfigError, match=r"model_config: unknown setting 'net_arch'. In Corral: fcnet_hiddens"):
            PPOConfig().environment(CountingEnv).rl_module(model_config={"net_arch": [8]}).validate()
        with pytest.raises(ConfigError, match=r"unknown setting 'buffer_size'. In Corral: capacity\."):
            DQNConfig().environment(CountingEnv).training(replay_buffer_config={"buffer_size": 8}).validate()

    def test_methods_of_a_config(self) -> None:
        with pytest.raises(
            AttributeError, match=r"PPOConfig has no attribute 'rollouts'. In Corral: env_runners \(num_"
        ):
            PPOConfig().rollouts  # noqa: B018
        with pytest.raises(AttributeError, match=r"'framework'. In Corral: torch is always used: leave"):
            PPOConfig().framework  # noqa: B018
        with pytest.raises(AttributeError, match=r"'learnerz'. Did you mean 'learners'\?"):
            PPOConfig().learnerz  # noqa: B018

    def test_methods_of_an_algorithm_and_its_class(self) -> None:
        with small().build() as algo:
            with pytest.raises(
                AttributeError, match=r"PPO has no attribute 'predict'. In Corral: compute_single_action"
            ):
                algo.predict(np.zeros(1))
            with pytest.raises(AttributeError, match=r"'learn'. In Corral: fit \(as in fit\(stop="):
                algo.learn(total_timesteps=10)
            with pytest.raises(AttributeError, match=r"'saves'. Did you mean 'save'\?"):
                algo.saves()
        with pytest.raises(AttributeError, match=r"'load'. In Corral: from_checkpoint"):
            PPO.load("model.zip")
        with pytest.raises(AttributeError, match=r"call the config class, such as PPOConfig\(\)"):
            Algorithm.get_default_config()

    @pytest.mark.parametrize("make", [PPOConfig, IMPALAConfig, BCConfig, MARWILConfig])
    def test_an_algorithm_without_a_replay_buffer_says_so(self, make: Any) -> None:
        config = make().environment("CartPole-v1").env_runners(num_env_runners=0)
        data = {"obs": np.zeros((4, 4)), "actions": np.zeros(4), "rewards": np.ones(4), "terminated": [0, 0, 0, 1]}
        with config.offline_data(input_=data if make in (BCConfig, MARWILConfig) else None).build() as algo:
            for name in ("local_replay_buffer", "replay_buffers"):
                assert not hasattr(algo, name)
                with pytest.raises(AttributeError, match=rf"{name}'. In Corral: .* and this one has none\."):
                    getattr(algo, name)

    @pytest.mark.parametrize("arguments", [("MlpPolicy", "CartPole-v1"), ("CartPole-v1",), ({"lr": 1e-3},)])
    def test_an_algorithm_is_made_from_a_config(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(ConfigError, match=r"PPO is made from a config: call build\(\) of its config class"):
            PPO(*arguments)

    def test_stop_criteria(self) -> None:
        result = {"env_runners": {"episode_return_mean": 1.0}, "training_iteration": 1}
        with pytest.raises(StopCriterionError, match=r"In Corral: env_runners/episode_return_mean\."):
            StopCriteria({"episode_reward_mean": 450}).met(result)

    def test_events_and_their_arguments(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown event 'on_workers_recreated'. In Corral: on_env_runners_recr"):
            PPOConfig().callbacks(on_workers_recreated=lambda: None)
        with pytest.raises(
            ConfigError, match=r"takes 'worker', which the event does not have. In Corral: env_runner\."
        ):
            PPOConfig().callbacks(on_episode_end=lambda worker: None)

    def test_names_of_the_package(self) -> None:
        with pytest.raises(
            AttributeError, match=r"module 'corral' has no attribute 'PPOConfg'. Did you mean 'PPOConfig'"
        ):
            corral.PPOConfg  # noqa: B018


def test_a_property_that_raises_is_not_hidden_by_a_hint() -> None:
    class Broken(PPOConfig):
        @property
        def algo_class(self) -> Any:
            return self.nothing_of_this_name

    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_this_name'"):
        Broken().algo_class  # noqa: B018


def test_the_nearest_name_is_looked_for_when_the_message_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    nearest_name = familiar_names.nearest_name
    monkeypatch.setattr(
        familiar_names, "nearest_name", lambda name, known: asked.append(name) or nearest_name(name, known)
    )
    config = PPOConfig()
    assert not hasattr(config, "lrr") and getattr(config, "env_runner", None) is None and not asked
    with pytest.raises(AttributeError) as error:
        config.env_runner  # noqa: B018
    assert "Did you mean 'env_runners'?" in str(error.value) and asked == ["env_runner"]
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert "Did you mean 'env_runners'?" in repr(error.value) and asked == ["env_runner"]


def test_the_groups_of_the_table_are_groups() -> None:
    assert {path.partition(".")[0] for meanings in SETTINGS.values() for path, _ in meanings} <= {*GROUPS, ""}
    assert meaning_of(3, "SETTINGS", []) is None and AlgorithmConfig.meaning_of("lr") is None
