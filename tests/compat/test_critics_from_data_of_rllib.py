"""CQL and IQL by RLlib's names: their settings, their results, their learner classes, and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from rllib_scripts import Run

from corral.compat.rllib.algorithm import CQL, IQL, MARWIL, SAC, CQLConfig, IQLConfig, MARWILConfig, SACConfig
from corral.compat.rllib.default_connectors import AddNextObservationsFromEpisodesToTrainBatch, learner
from corral.compat.rllib.learner import CQLTorchLearner, IQLLearner, IQLTorchLearner, SACTorchLearner
from corral.compat.rllib.native import to_native
from corral.compat.rllib.settings import TRAINING
from corral.errors import ConfigError

DATA = Path(__file__).parent / "data_of_rllib"
ID = "default_policy"
BOTH = pytest.mark.parametrize("config_class", [CQLConfig, IQLConfig])


def from_data(config_class: Any, num_updates: int | None = 3, **training: Any) -> Any:
    """A config that learns from the recorded steps of Pendulum with small nets."""
    config = config_class().environment("Pendulum-v1").debugging(seed=0)
    config.offline_data(input_=str(DATA / "pendulum_table"), dataset_num_iters_per_learner=num_updates)
    config.reporting(min_time_s_per_iteration=0)
    training = {"train_batch_size_per_learner": 32, **training}
    return config.training(**training).rl_module(model_config={"fcnet_hiddens": [8]})


@pytest.fixture
def with_files() -> None:
    pytest.importorskip("pyarrow")


# Settings.


def test_cql_begins_with_the_defaults_of_rllib() -> None:
    config = CQLConfig().environment("Pendulum-v1")
    assert (config.lr, config.actor_lr, config.critic_lr, config.alpha_lr) == (3e-4, 1e-4, 1e-3, 1e-3)
    assert (config.bc_iters, config.min_q_weight, config.num_actions, config.temperature) == (20_000, 5.0, 10, 1.0)
    assert (config.min_train_timesteps_per_iteration, config.min_sample_timesteps_per_iteration) == (100, 0)
    assert config.replay_buffer_config["type"] == "MultiAgentPrioritizedReplayBuffer"
    native = to_native(config)
    expected = {
        "actor_lr": 1e-4,
        "critic_lr": 1e-3,
        "alpha_lr": 1e-3,
        "optimizer_config": {"eps": 1e-7},
        "tau": 0.005,
        "target_network_update_freq": 0,
        "train_batch_size_per_learner": 256,
        "num_imitation_updates": 20_000,
        "cql_weight": 2.5,
        "cql_temperature": 1.0,
        "num_sampled_actions": 10,
        "lagrangian": False,
        "deterministic_backup": True,
        "td_error_loss_fn": "mse",
        "num_offline_updates": None,
        "num_updates_per_iteration": None,
        "gamma": 0.99,
        "n_step": 1,
        "twin_q": True,
    }
    assert {name: getattr(native, name) for name in expected} == expected and not native.samples


def test_iql_begins_with_the_defaults_of_rllib() -> None:
    config = IQLConfig().environment("Pendulum-v1")
    assert (config.lr, config.beta, config.expectile, config.tau) == (None, 0.1, 0.8, 1.0)
    native = to_native(config)
    expected = {
        "actor_lr": 3e-4,
        "critic_lr": 3e-4,
        "value_lr": 3e-4,
        "optimizer_config": {"eps": 1e-7},
        "tau": 1.0,
        "target_network_update_freq": 0,
        "train_batch_size_per_learner": 2000,
        "beta": 0.1,
        "expectile": 0.8,
        "max_advantage_weight": 100.0,
        "num_offline_updates": None,
        "gamma": 0.99,
        "twin_q": True,
    }
    assert {name: getattr(native, name) for name in expected} == expected and not native.samples


def test_classes_derive_as_in_rllib() -> None:
    assert issubclass(CQLConfig, SACConfig) and issubclass(CQL, SAC)
    assert issubclass(IQLConfig, MARWILConfig) and issubclass(IQL, MARWIL)
    assert issubclass(CQLTorchLearner, SACTorchLearner) and issubclass(IQLTorchLearner, IQLLearner)
    assert (CQLConfig().algo_class, IQLConfig().algo_class) == (CQL, IQL)
    assert CQLConfig().get_default_learner_class() is CQLTorchLearner
    assert IQLConfig().get_default_learner_class() is IQLTorchLearner
    for config in (CQLConfig(), IQLConfig()):
        assert not config.is_online
        classes = [type(connector) for connector in learner(config)[1]]
        assert AddNextObservationsFromEpisodesToTrainBatch in classes


def test_settings_of_cql_are_translated() -> None:
    config = CQLConfig().environment("Pendulum-v1").offline_data(dataset_num_iters_per_learner=5)
    config.training(
        **{"bc_iters": 7, "temperature": 0.5, "num_actions": 4, "min_q_weight": 1.0, "deterministic_backup": False},
        **{"lagrangian": True, "lagrangian_thresh": 2.0, "twin_q": False, "initial_alpha": 0.3, "lr": None},
        **{"actor_lr": [[0, 1e-3], [1000, 1e-4]], "target_entropy": -3.0, "grad_clip": 4.0, "tau": 0.1},
    )
    native = to_native(config)
    assert (native.num_imitation_updates, native.cql_temperature, native.num_sampled_actions) == (7, 0.5, 4)
    assert (native.cql_weight, native.lagrangian, native.lagrangian_threshold) == (0.5, True, 2.0)
    assert (native.deterministic_backup, native.twin_q, native.initial_alpha) == (False, False, 0.3)
    assert [*native.actor_lr] == [(0, 1e-3), (5000, 1e-4)]  # RLlib counts one batch in each iteration
    assert (native.target_entropy, native.grad_clip, native.tau) == (-3.0, 4.0, 0.1)


def test_settings_without_effect_are_no_errors() -> None:
    config = CQLConfig().environment("Pendulum-v1").offline_data(input_="x", dataset_num_iters_per_learner=1)
    config.training(
        **{"n_step": 3, "training_intensity": 2.0, "num_steps_sampled_before_learning_starts": 5, "clip_actions": True},
        **{"replay_buffer_config": {"min_size_for_sampling": 0}, "store_buffer_in_checkpoints": True},
        lagrangian_thresh=9.0,  # counts with `lagrangian` only
    )
    native = to_native(config.env_runners(num_env_runners=2, rollout_fragment_length=1))
    native.validate()
    assert (native.n_step, native.num_env_runners, native.lagrangian_threshold) == (1, 0, 5.0)
    config = IQLConfig().environment("Pendulum-v1").offline_data(input_="x", dataset_num_iters_per_learner=1)
    native = to_native(config.training(lr=0.1, vf_coeff=3.0, lambda_=0.5, moving_average_sqd_adv_norm_start=1.0))
    native.validate()
    assert (native.actor_lr, native.lr) == (3e-4, type(native).__mro__[2].lr)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (CQLConfig, {"lr": 0.01}, "lr=0.01: CQL has actor_lr, critic_lr and alpha_lr: set these"),
        (CQLConfig, {"q_model_config": {"custom_model": "mine"}}, "q_model_config=.*is not in Corral"),
        (CQLConfig, {"_use_beta_distribution": True}, "_use_beta_distribution=True.*squashed normal"),
        (CQLConfig, {"target_network_update_freq": 500}, "target_network_update_freq=500: .*dataset_num_iters"),
        (CQLConfig, {"alpha_lr": [[0, 1e-3], [10, 1e-4]]}, "alpha_lr=.*dataset_num_iters_per_learner"),
        (IQLConfig, {"value_lr": [[0, 1e-3], [10, 1e-4]]}, "value_lr=.*dataset_num_iters_per_learner"),
        (IQLConfig, {"beta": 0.0}, "`beta`=0.0: .*above 0"),
        (IQLConfig, {"expectile": 1.0}, "expectile"),
        (IQLConfig, {"bc_logstd_coeff": 0.5}, "bc_logstd_coeff=0.5"),
        (CQLConfig, {"expectile": 0.5}, "unknown setting 'expectile'"),
        (IQLConfig, {"min_q_weight": 0.5}, "unknown setting 'min_q_weight'"),
    ],
)
def test_what_is_refused_is_named(config: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_native(config().environment("Pendulum-v1").training(**settings))


def test_every_setting_says_what_corral_does() -> None:
    for name in ("CQL", "IQL"):
        for setting in TRAINING[name].values():
            assert setting.kind == "same" or setting.note


@BOTH
def test_model_settings_that_have_no_place_are_refused(config_class: Any) -> None:
    config = from_data(config_class).rl_module(model_config={"use_lstm": True})
    with pytest.raises(ConfigError, match=r"use_lstm=True gives the module memory, and [CI]QL cannot"):
        to_native(config).validate()
    with pytest.raises(ConfigError, match=r"fusionnet_hiddens=.*the critic of [CI]QL is one network"):
        to_native(config.rl_module(model_config={"fusionnet_hiddens": [8]}))


# Learning.


def test_results_of_cql_have_the_names_of_rllib(with_files: None) -> None:
    with from_data(CQLConfig, bc_iters=2, min_q_weight=3.0).build() as algo:
        first, result = algo.train(), algo.train()
    numbers = result["learners"][ID]
    assert numbers["cql_loss"] == pytest.approx(3.0 * numbers["conservative_loss"])
    # The loss of each critic has the whole squared error, of which Corral's sum over two critics has half.
    assert numbers["qf_loss"] == pytest.approx(numbers["critic_loss"] + numbers["cql_loss"])
    assert numbers["qf_twin_loss"] == numbers["qf_loss"] and numbers["policy_loss"] == numbers["actor_loss"]
    assert numbers["alpha_value"] == pytest.approx(np.exp(numbers["log_alpha_value"]))
    assert numbers["logps"] == -numbers["entropy"] and numbers["td_error_mean"] > 0
    assert (numbers["policy_learning_rate"], numbers["qf_learning_rate"]) == (1e-4, 1e-3)
    assert {"qf_mean", "qf_min", "qf_max", "alpha_loss", "gradients_qf_global_norm", "total_loss"} <= numbers.keys()
    assert [each["num_env_steps_sampled_lifetime"] for each in (first, result)] == [32, 64]
    assert result["timesteps_total"] == 64 and numbers["num_module_steps_trained_lifetime"] == 6 * 32
    assert result["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"] == 6 * 32


@pytest.mark.parametrize("twin_q", [True, False])
def test_results_of_iql_have_the_names_of_rllib(with_files: None, twin_q: bool) -> None:
    with from_data(IQLConfig, twin_q=twin_q).build() as algo:
        result = algo.train()
    numbers = result["learners"][ID]
    # RLlib halves the squared error with two critics, and not with one.
    assert numbers["qf_loss"] == pytest.approx(numbers["critic_loss"] * (0.5 if twin_q else 2.0))
    assert ("qf_twin_loss" in numbers) == twin_q
    assert numbers["policy_loss"] == numbers["actor_loss"] and numbers["vf_loss"] == numbers["value_loss"]
    assert numbers["value_learning_rate"] == 3e-4 and numbers["td_error_mean"] > 0 and "cql_loss" not in numbers
    assert result["num_env_steps_sampled_lifetime"] == 32


def test_sac_reports_the_loss_of_one_critic() -> None:
    config = SACConfig().environment("Pendulum-v1").rl_module(model_config={"fcnet_hiddens": [8]})
    config.training(num_steps_sampled_before_learning_starts=10, train_batch_size_per_learner=8)
    with config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=20).build() as algo:
        numbers = algo.train()["learners"][ID]
    assert numbers["qf_loss"] == pytest.approx(numbers["critic_loss"] / 2) == numbers["qf_twin_loss"]
    assert numbers["policy_loss"] == numbers["actor_loss"] and numbers["alpha_value"] == numbers["alpha"]


@BOTH
def test_without_a_number_an_iteration_is_one_pass_over_the_data(with_files: None, config_class: Any) -> None:
    with from_data(config_class, None, train_batch_size_per_learner=50).build() as algo:
        num_steps = algo.native.recorded.modules[ID].num_steps
        results = [algo.train() for _ in range(2)]
    num_updates = -(-num_steps // 50)
    assert num_updates > 1
    assert results[1]["learners"][ID]["num_module_steps_trained_lifetime"] == 2 * num_updates * 50
    assert [result["num_env_steps_sampled_lifetime"] for result in results] == [50, 100]


@BOTH
def test_targets_move_once_in_an_iteration(with_files: None, config_class: Any) -> None:
    config = from_data(config_class, 4, critic_lr=0.0, tau=0.5, target_network_update_freq=3 * 32)
    with config.build() as algo:
        module = algo.native.learner_group.get_module(ID)
        with torch.no_grad():
            for parameter in module.target_q.parameters():
                parameter += 1.0
        distances = []
        for _ in range(6):
            algo.train()
            module = algo.native.learner_group.get_module(ID)
            pairs = zip(module.target_q.parameters(), module.q.parameters(), strict=True)
            distances.append(float(torch.cat([(target - own).flatten() for target, own in pairs]).detach().mean()))
    assert distances == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.5, 0.25], abs=1e-5)  # timesteps are one batch a round


@pytest.mark.parametrize(
    ("config_class", "base"), [(CQLConfig, CQLTorchLearner), (IQLConfig, IQLTorchLearner)], ids=["CQL", "IQL"]
)
def test_a_learner_class_changes_the_loss(with_files: None, config_class: Any, base: Any) -> None:
    class Doubled(base):  # type: ignore[misc]
        def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
            loss = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
            self.metrics.log_value((module_id, "own_loss"), loss.item(), window=1)
            self.metrics.log_value((module_id, "rows"), len(batch["new_obs"]), window=1)
            return 2 * loss

    class ByHand(base):  # type: ignore[misc]
        def compute_gradients(self, loss_per_module: Any, **settings: Any) -> Any:
            return super().compute_gradients(loss_per_module, **settings)

    with from_data(config_class, 1, learner_class=Doubled).build() as algo:
        numbers = algo.train()["learners"][ID]
    assert numbers["total_loss"] == pytest.approx(2 * numbers["own_loss"]) and numbers["rows"] == 32
    name = config_class.ALGORITHM
    with pytest.raises(ConfigError, match=f"ByHand changes the steps of {name}.*override compute_loss_for_module only"):
        to_native(from_data(config_class, learner_class=ByHand))


@BOTH
def test_checkpoints_continue_and_policies_act(with_files: None, config_class: Any, tmp_path: Path) -> None:
    config = from_data(config_class)
    config.evaluation(evaluation_interval=1, evaluation_duration=1, evaluation_config={"explore": False})
    with config.build() as algo:
        result = algo.train()
        assert result["evaluation"]["env_runners"]["episode_return_mean"] < 0
        path = algo.save_to_path(tmp_path / "checkpoint")
        again = type(algo).from_checkpoint(path)
        assert type(again) is config_class().algo_class
        expected, found = (each.train()["learners"][ID]["total_loss"] for each in (algo, again))
        assert found == pytest.approx(expected)
        assert algo.compute_single_action(np.zeros(3, np.float32), explore=False).shape == (1,)
        again.stop()


@BOTH
def test_spaces_take_the_place_of_an_env(with_files: None, config_class: Any) -> None:
    env = gym.make("Pendulum-v1")
    config = from_data(config_class)
    config.environment(observation_space=env.observation_space, action_space=env.action_space)
    config.env = None
    with config.build() as algo:
        assert np.isfinite(algo.train()["learners"][ID]["total_loss"])


# Scripts.

BEGIN = f"""
import os
from pathlib import Path
from ray.rllib.algorithms.cql.cql import CQL, CQLConfig
from ray.rllib.algorithms.iql.iql import IQL, IQLConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN, EVALUATION_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
)
from ray.rllib.utils.test_utils import add_rllib_example_script_args, run_rllib_example_script_experiment
from ray.tune.result import TRAINING_ITERATION

parser = add_rllib_example_script_args()
args = parser.parse_args()
data_path = Path({str(DATA)!r}) / "pendulum_table"
RETURN = f"{{EVALUATION_RESULTS}}/{{ENV_RUNNER_RESULTS}}/{{EPISODE_RETURN_MEAN}}"
"""
PROCESS = ("--no-tune", "--num-learners=0")

CQL_SCRIPT = (
    BEGIN
    + """
config = (
    CQLConfig()
    .environment("Pendulum-v1")
    .offline_data(
        input_=[data_path.as_posix()],
        map_batches_kwargs={"concurrency": 2, "num_cpus": 1},
        iter_batches_kwargs={"prefetch_batches": 1},
        dataset_num_iters_per_learner=5,
        actions_in_input_normalized=True,
    )
    .training(
        bc_iters=7,
        tau=9.5e-3,
        min_q_weight=5.0,
        train_batch_size_per_learner=128,
        twin_q=True,
        actor_lr=1.7e-3 * (args.num_learners or 1) ** 0.5,
        critic_lr=2.5e-3 * (args.num_learners or 1) ** 0.5,
        alpha_lr=1e-3 * (args.num_learners or 1) ** 0.5,
        lr=None,
    )
    .reporting(min_time_s_per_iteration=0, metrics_num_episodes_for_smoothing=5)
    .evaluation(
        evaluation_interval=2,
        evaluation_num_env_runners=NUM_RUNNERS,
        evaluation_duration=2,
        evaluation_config={"explore": False},
    )
)
stop = {RETURN: 0.0, NUM_ENV_STEPS_SAMPLED_LIFETIME: 4 * 128}
"""
)

IQL_SCRIPT = (
    BEGIN
    + """
config = (
    IQLConfig()
    .environment(env="Pendulum-v1")
    .evaluation(
        evaluation_interval=2,
        evaluation_num_env_runners=NUM_RUNNERS,
        evaluation_duration=2,
        evaluation_parallel_to_training=NUM_RUNNERS > 0,
    )
    .offline_data(
        input_=[("local://" / data_path).as_posix()],
        map_batches_kwargs={"concurrency": 2, "num_cpus": 2},
        iter_batches_kwargs={"prefetch_batches": 1},
        dataset_num_iters_per_learner=5,
    )
    .training(
        actor_lr=2.59e-4 * (args.num_learners or 1) ** 0.5,
        critic_lr=2.14e-4 * (args.num_learners or 1) ** 0.5,
        value_lr=3.7e-5 * (args.num_learners or 1) ** 0.5,
        tau=6e-4,
        target_network_update_freq=1,
        train_batch_size_per_learner=128,
    )
    .rl_module(model_config=DefaultModelConfig(fcnet_activation="relu"))
)
stop = {RETURN: 0.0, TRAINING_ITERATION: 4}
"""
)

END = """
result = run_rllib_example_script_experiment(config, args, stop=stop, keep_config=True)
assert result[TRAINING_ITERATION] == 4 and result[NUM_ENV_STEPS_SAMPLED_LIFETIME] == 4 * 128
assert -2000 < result[EVALUATION_RESULTS][ENV_RUNNER_RESULTS][EPISODE_RETURN_MEAN] < 0
numbers = result["learners"]["default_policy"]
assert numbers["num_module_steps_trained_lifetime"] == 4 * 5 * 128
print("alpha_value" in numbers, numbers["qf_loss"] > 0)
"""


@pytest.mark.slow_cases("IQL")
@pytest.mark.parametrize("script", [pytest.param(CQL_SCRIPT, marks=pytest.mark.slow), IQL_SCRIPT], ids=["CQL", "IQL"])
def test_pendulum_is_learned_from_recorded_steps(with_files: None, run: Run, script: str) -> None:
    done = run((script + END).replace("NUM_RUNNERS", "0"), *PROCESS)
    assert done.stdout.splitlines()[-1] == f"{script is CQL_SCRIPT} True"


@pytest.mark.slow
@pytest.mark.parametrize("script", [CQL_SCRIPT, IQL_SCRIPT], ids=["CQL", "IQL"])
def test_evaluation_runs_in_a_second_process(with_files: None, run: Run, script: str) -> None:
    run((script + END).replace("NUM_RUNNERS", "1"), *PROCESS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CQL", "IQL"])
def test_both_run_in_tune_by_their_names(with_files: None, run: Run, name: str) -> None:
    pytest.importorskip("ray")
    run(
        BEGIN
        + f"""
from ray import tune

config = (
    {name}Config()
    .environment("Pendulum-v1")
    .training(actor_lr=tune.grid_search([0.001, 0.0001]), train_batch_size_per_learner=64, lr=None)
    .reporting(min_time_s_per_iteration=0)
    .offline_data(input_=[data_path.as_posix()], dataset_num_iters_per_learner=1)
)
for space in (config, config.to_dict()):
    found = tune.Tuner({name!r}, param_space=space, run_config=tune.RunConfig(stop={{"training_iteration": 2}})).fit()
    assert len(found) == 2 and not found.errors
    assert all(each.metrics["num_env_steps_sampled_lifetime"] == 128 for each in found)
"""
    )
