"""RLlib's APPO and IMPALA: defaults, settings, results, learners, and algorithm classes of scripts."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from at_least import at_least
from corral.compat.rllib import table
from corral.compat.rllib.algorithm import APPO, IMPALA, APPOConfig, IMPALAConfig, PPOConfig
from corral.compat.rllib.config import AlgorithmConfig
from corral.compat.rllib.connectors import ConnectorV2, FlattenObservations
from corral.compat.rllib.default_modules import DefaultAPPOTorchRLModule, DefaultPPOTorchRLModule
from corral.compat.rllib.learner import APPOTorchLearner, IMPALATorchLearner
from corral.compat.rllib.model_config import DefaultModelConfig
from corral.compat.rllib.modules import RLModuleSpec, TorchRLModule, ValueFunctionAPI
from corral.compat.rllib.native import to_native
from corral.compat.rllib.settings import TRAINING
from corral.envs.agent_copies import make_multi_agent
from corral.errors import ConfigError

ID = "default_policy"
BOTH = pytest.mark.parametrize("config_class", [APPOConfig, IMPALAConfig])


def small(config_class: type[AlgorithmConfig], env: Any = "CartPole-v1", **training: Any) -> AlgorithmConfig:
    """Return a config that is quick in this process: a batch is 4 fragments of 20 steps."""
    config = config_class().environment(env).learners(num_learners=0).reporting(min_time_s_per_iteration=0)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=2, rollout_fragment_length=20).debugging(seed=0)
    return config.training(train_batch_size=80, **training).rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[16], vf_share_layers=True)
    )


def native_of(config: AlgorithmConfig) -> Any:
    return to_native(config.environment("CartPole-v1"))


def differing(config: AlgorithmConfig, other: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings of Corral in which a config differs from another one."""
    one, two = native_of(config), native_of(other)
    names = [name for name in vars(one) if name != "origin" and not name.startswith("_")]
    return {
        name: getattr(one, name)
        for name in names
        if not np.array_equal(repr(getattr(one, name)), repr(vars(two)[name]))
    }


# Settings.


@BOTH
def test_both_begin_with_the_defaults_of_rllib(config_class: type[AlgorithmConfig]) -> None:
    native = native_of(config_class())
    expected = {
        "num_env_runners": 2,
        "num_envs_per_env_runner": 1,
        "num_learners": 1,
        "rollout_fragment_length": 50,
        "sample_async": True,
        "min_time_s_per_iteration": 10,
        "min_sample_timesteps_per_iteration": 0,
        "train_batch_size_per_learner": 500,
        "minibatch_size": None,
        "num_epochs": 1,
        "lr": 5e-4,
        "grad_clip": 40.0,
        "optimizer": "adam",
        "vf_loss_coeff": 0.5,
        "entropy_coeff": 0.01,
        "lambda_": 1.0,
        "vtrace_clip_rho_threshold": 1.0,
        "vtrace_clip_pg_rho_threshold": 1.0,
        "broadcast_interval": 1,
        "use_circular_buffer": config_class is APPOConfig,
    }
    assert {name: getattr(native, name) for name in expected} == expected
    assert native.model_config["vf_share_layers"] is (config_class is IMPALAConfig)
    assert native.model_config["fcnet_hiddens"] == [256, 256]


def test_appo_and_impala_have_their_own_defaults_too() -> None:
    native = native_of(APPOConfig())
    expected = {
        "circular_buffer_num_batches": 8,
        "circular_buffer_iterations_per_batch": 2,
        "clip_param": 0.4,
        "use_kl_loss": False,
        "kl_coeff": 1.0,
        "kl_target": 0.01,
        "target_worker_clipping": 2.0,
        "target_network_update_freq": 2,
        "tau": 1.0,
    }
    assert {name: getattr(native, name) for name in expected} == expected
    assert native_of(IMPALAConfig()).learner_queue_size == 3


@pytest.mark.slow_cases("IMPALA")
@BOTH
def test_settings_of_training_reach_corral(config_class: type[AlgorithmConfig]) -> None:
    def changed(**settings: Any) -> dict[str, Any]:
        return differing(config_class().training(**settings), config_class())

    schedule = [(0, 1e-3), (1000, 0.0)]
    assert changed(lr_schedule=schedule) == changed(lr=schedule) == {"lr": schedule}
    assert changed(entropy_coeff_schedule=schedule) == changed(entropy_coeff=schedule) == {"entropy_coeff": schedule}
    assert changed(vtrace_clip_rho_threshold=None) == {"vtrace_clip_rho_threshold": 1e9}
    assert changed(vtrace_clip_pg_rho_threshold=3.0) == {"vtrace_clip_pg_rho_threshold": 3.0}
    assert changed(broadcast_interval=4, vf_loss_coeff=0.1) == {"broadcast_interval": 4, "vf_loss_coeff": 0.1}
    assert changed(opt_type="rmsprop", decay=0.9, momentum=0.5, epsilon=0.2) == {
        "optimizer": "rmsprop",
        "optimizer_config": {"alpha": 0.9, "momentum": 0.5, "eps": 0.2},
    }
    assert changed(epsilon=0.2, decay=0.5, momentum=0.1) == {}  # settings of RMSProp
    two = native_of(config_class().training(train_batch_size=500).learners(num_learners=2))
    assert (two.train_batch_size_per_learner, two.total_train_batch_size) == (250, 500)
    assert native_of(config_class().training(train_batch_size_per_learner=512)).train_batch_size_per_learner == 512


def test_queues_and_targets_of_appo_without_a_circular_buffer() -> None:
    assert native_of(APPOConfig().training(target_network_update_freq=0.5)).num_updates_per_target == 8
    plain = native_of(APPOConfig().training(use_circular_buffer=False, simple_queue_size=5))
    assert plain.learner_queue_size == 5
    assert plain.num_updates_per_target == native_of(APPOConfig()).num_updates_per_target == 2 * 8 * 2
    assert plain.num_updates_per_batch == 1


@BOTH
@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"vtrace": False}, "use `PPOConfig`"),
        ({"replay_proportion": 1.0}, "circular buffer of `APPOConfig`"),
        ({"minibatch_buffer_size": 4}, "circular buffer of `APPOConfig`"),
        ({"_separate_vf_optimizer": True}, "`configure_optimizers_for_module` of a learner class"),
        ({"after_train_step": print}, "use `on_train_result`"),
        ({"opt_type": "sgd"}, "use 'adam' or 'rmsprop'"),
    ],
)
def test_what_corral_lacks_is_refused_by_name(
    config_class: type[AlgorithmConfig], settings: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        native_of(config_class().training(**settings))
    assert remedy in str(caught.value) and next(iter(settings)) in str(caught.value)


def test_only_impala_has_no_settings_of_appo() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'clip_param'"):
        IMPALAConfig().training(clip_param=0.3)
    for settings in ({"use_critic": False}, {"target_update_frequency": 3}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            native_of(APPOConfig().training(**settings))
    with pytest.raises(ConfigError, match="_skip_learners=True"):
        native_of(IMPALAConfig().debugging(_skip_learners=True))


@BOTH
def test_ignored_settings_change_nothing(config_class: type[AlgorithmConfig]) -> None:
    known = TRAINING[config_class.ALGORITHM]
    given = {name: 7 for name, setting in known.items() if setting.kind == "ignored"}
    assert {
        "num_gpu_loader_threads",
        "timeout_s_sampler_manager",
        "_lr_vf",
        "num_multi_gpu_tower_stacks",
    } <= given.keys()
    changed = config_class().training(**given)
    changed.learners(num_aggregator_actors_per_learner=2, max_requests_in_flight_per_learner=5)
    changed.learners(max_requests_in_flight_per_aggregator_actor=5)
    changed.env_runners(max_requests_in_flight_per_env_runner=4, use_env_runner_state_server=False)
    assert differing(changed, config_class()) == {}


def test_one_module_may_differ() -> None:
    config = small(APPOConfig, make_multi_agent("CartPole-v1"), use_kl_loss=True)
    config.environment(env_config={"num_agents": 2}).multi_agent(
        policies={"a", "b"},
        policy_mapping_fn=lambda agent_id, episode, **kw: "ab"[agent_id],
        algorithm_config_overrides_per_module={
            "b": APPOConfig.overrides(
                lr=1e-5, kl_coeff=0.1, clip_param=0.2, entropy_coeff_schedule=[[0, 0.5], [9e9, 0.4]]
            )
        },
    )
    with config.build() as algo:
        native = {name: algo.native.module_config(name) for name in "ab"}
        result = algo.train()
    assert (native["a"].lr, native["a"].kl_coeff, native["a"].clip_param) == (5e-4, 1.0, 0.4)
    assert (native["b"].lr, native["b"].kl_coeff, native["b"].clip_param) == (1e-5, 0.1, 0.2)
    learners = result["learners"]
    assert learners["b"]["curr_entropy_coeff"] == pytest.approx(0.5, abs=1e-3)
    assert learners["a"]["curr_entropy_coeff"] == pytest.approx(0.01)
    assert learners["a"]["default_optimizer_learning_rate"] == pytest.approx(5e-4)
    assert learners["b"]["default_optimizer_learning_rate"] == pytest.approx(1e-5)


# Names.


def test_classes_and_names_are_the_same_at_all_paths() -> None:
    for module in ("algorithms", "algorithms.appo", "algorithms.appo.appo"):
        found = table.entries(module)
        assert found["APPO"] == ("algorithm", "APPO") and found["APPOConfig"] == ("algorithm", "APPOConfig")
    for module in ("algorithms", "algorithms.impala", "algorithms.impala.impala"):
        found = table.entries(module)
        assert found["IMPALA"] == found["Impala"] == ("algorithm", "IMPALA")
        assert found["IMPALAConfig"] == found["ImpalaConfig"] == ("algorithm", "IMPALAConfig")
    assert issubclass(APPOConfig, IMPALAConfig) and issubclass(APPO, IMPALA)
    assert issubclass(APPOTorchLearner, IMPALATorchLearner)
    assert APPOConfig().get_default_learner_class() is APPOTorchLearner
    assert APPOConfig().get_default_rl_module_spec().module_class is DefaultAPPOTorchRLModule
    assert IMPALAConfig().get_default_rl_module_spec().module_class is DefaultPPOTorchRLModule


# Results.


def test_the_results_of_impala_have_the_names_of_rllib() -> None:
    with small(IMPALAConfig).build() as algo:
        result = algo.train()
        numbers = result["learners"][ID]
        size = numbers["module_train_batch_size_mean"]
        assert size >= 80
        assert numbers["pi_loss"] == pytest.approx(numbers["mean_pi_loss"] * size)
        assert numbers["vf_loss"] == pytest.approx(numbers["mean_vf_loss"] * size)
        assert numbers["mean_pi_loss"] == numbers["policy_loss"]
        assert {"entropy", "curr_entropy_coeff", "total_loss", "vf_explained_var"} <= numbers.keys()
        assert numbers["diff_num_grad_updates_vs_sampler_policy"] == result["runner_group"]["lag_mean"]
        assert result["info"]["learner"][ID]["learner_stats"]["curr_entropy_coeff"] == pytest.approx(0.01)
        assert result["num_env_steps_sampled_lifetime"] == numbers["num_module_steps_trained_lifetime"] >= 80


def test_results_are_named_once_although_a_callback_saw_them() -> None:
    seen: list[float] = []

    def note(*, result: dict[str, Any], **kwargs: Any) -> None:
        seen.append(result["learners"][ID]["vf_loss"])

    with small(IMPALAConfig).callbacks(on_train_result=note).build() as algo:
        assert algo.train()["learners"][ID]["vf_loss"] == seen[0]


@pytest.mark.parametrize("use_kl_loss", [False, True])
def test_the_results_of_appo_have_the_names_of_rllib(use_kl_loss: bool) -> None:
    config = small(APPOConfig, use_kl_loss=use_kl_loss, kl_coeff=0.4, kl_target=1e9)
    with config.build() as algo:
        first, second = (algo.train()["learners"][ID] for _ in range(2))
    assert {"policy_loss", "vf_loss", "entropy", "mean_kl_loss", "curr_kl_coeff", "mean_IS"} <= first.keys()
    assert first["mean_IS"] == first["mean_ratio"] > 0
    if use_kl_loss:  # far below the target: halved after each update, of which there are two per batch
        assert first["curr_kl_coeff"] == pytest.approx((0.4 + 0.2) / 2)
        assert second["curr_kl_coeff"] == pytest.approx((0.1 + 0.05) / 2)
        assert second["mean_kl_loss"] > 0
    else:
        assert first["mean_kl_loss"] == second["mean_kl_loss"] == 0.0


# Learner classes, modules and connectors of scripts.


class Regularized(APPOTorchLearner):
    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        base = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        weights = torch.cat([each.view(-1) for each in self.get_parameters(self.module[module_id])])
        norm = weights.abs().mean()
        self.metrics.log_dict({(module_id, "norm"): norm}, window=1)
        self.metrics.log_value((module_id, "steps"), float(len(batch["rewards"])), window=1)
        assert float(self.curr_kl_coeffs_per_module[module_id]) in (1.0, 0.5)  # the first update begins at the target
        return base + 100.0 * norm


class OfImpala(IMPALATorchLearner):
    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        loss = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        self.metrics.log_value((module_id, "steps"), float(len(batch["rewards"])), window=1)
        self.metrics.log_value((module_id, "norm"), float(fwd_out["action_dist_inputs"].detach().abs().mean()))
        assert float(self.entropy_coeff_schedulers_per_module[module_id].get_current_value()) == pytest.approx(0.01)
        return loss


def test_a_learner_class_changes_the_loss() -> None:
    with small(APPOConfig, learner_class=Regularized, use_kl_loss=True, kl_target=1e-9).build() as algo:
        before = algo.train()["learners"][ID]
    with small(IMPALAConfig, learner_class=OfImpala).build() as algo:
        of_impala = algo.train()["learners"][ID]
    assert before["norm"] > 0 and before["steps"] >= 80
    assert before["total_loss"] > 99 * before["norm"]
    assert of_impala["norm"] >= 0 and of_impala["steps"] >= 80


class TwoOptimizers(IMPALATorchLearner):
    """Learns the values with an optimizer of their own, in place of `_separate_vf_optimizer`."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        module = self.module[module_id]
        parts = {
            "policy": [module.encoder.actor_encoder, module.pi],
            "values": [module.encoder.critic_encoder, module.vf],
        }
        for name, layers in parts.items():
            params = [each for layer in layers for each in layer.parameters()]
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=torch.optim.Adam(params),
                params=params,
                lr_or_lr_schedule={"policy": 1e-3, "values": 0.0}[name],
            )


def test_a_learner_class_has_optimizers_of_its_own() -> None:
    config = small(IMPALAConfig, learner_class=TwoOptimizers)
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[16], vf_share_layers=False))
    with config.build() as algo:
        before = algo.get_weights()[ID]
        result = algo.train()["learners"][ID]
        after = algo.get_weights()[ID]
    assert (result["policy_learning_rate"], result["values_learning_rate"]) == (pytest.approx(1e-3), 0.0)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("policy")}


class Own(TorchRLModule, ValueFunctionAPI):
    """A net of the script, with target networks as RLlib's APPO asks for them; Corral's has its own."""

    def setup(self) -> None:
        self.body = nn.Linear(4, 16)
        self.pi, self.vf = nn.Linear(16, 2), nn.Linear(16, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features = torch.tanh(self.body(batch["obs"]))
        return {"action_dist_inputs": self.pi(features), "embeddings": features}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        features = torch.tanh(self.body(batch["obs"])) if embeddings is None else embeddings
        return self.vf(features).squeeze(-1)


class OwnDefault(DefaultAPPOTorchRLModule):
    def setup(self) -> None:
        super().setup()
        self.make_target_networks()

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        assert self.forward_target(batch)["target_network_action_dist_inputs"].shape[-1] == 2
        assert [len(pair) for pair in self.get_target_network_pairs()] == [2, 2]
        return super().compute_values(batch, embeddings)


@BOTH
@pytest.mark.parametrize("module_class", [Own, OwnDefault])
def test_modules_of_scripts_learn(config_class: type[AlgorithmConfig], module_class: type) -> None:
    config = small(config_class).rl_module(rl_module_spec=RLModuleSpec(module_class=module_class))
    with config.build() as algo:
        before = algo.get_module().get_state()
        result = algo.train()
        after = algo.get_module().get_state()
        assert isinstance(algo.get_module(), module_class)
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    assert math.isfinite(result["learners"][ID]["total_loss"])


class Doubles(ConnectorV2):
    """Doubles the rewards that learners see, and counts its calls."""

    calls: int = 0

    def __call__(self, *, episodes: Any, batch: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        for episode in self.single_agent_episode_iterator(episodes):
            rewards = [2.0 * each for each in episode.get_rewards()]
            self.add_n_batch_items(
                batch=batch,
                column="rewards",
                items_to_add=rewards,
                num_items=len(rewards),
                single_agent_episode=episode,
            )
        return batch


@BOTH
def test_connectors_of_learners_are_called_once_for_each_batch(config_class: type[AlgorithmConfig]) -> None:
    seen: list[float] = []

    def look(*, train_batch: Any, **kwargs: Any) -> None:
        seen.append(float(np.asarray(train_batch["rewards"]).max()))

    Doubles.calls = 0
    config = small(config_class).callbacks(on_learn_on_batch=look)
    config.training(learner_connector=lambda obs_space, action_space: Doubles())
    with config.build() as algo:
        algo.train()
        calls, batches = Doubles.calls, len(seen) // (2 if config_class is APPOConfig else 1)
    assert seen and set(seen) == {2.0}
    assert calls == batches == 1


class Gives(ConnectorV2):
    """Writes rewards that it was given through the learners."""

    reward: float

    def __call__(self, *, episodes: Any, batch: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes):
            num_steps = len(episode)
            self.add_n_batch_items(
                batch=batch,
                column="rewards",
                items_to_add=[self.reward] * num_steps,
                num_items=num_steps,
                single_agent_episode=episode,
            )
        return batch


def give(actor: Any) -> None:
    """Give connectors a reward, as RLlib's example of an actor that all parts share does it."""
    actor.given = True
    if hasattr(actor, "_learner_connector") and actor._learner_connector:
        for connector in actor._learner_connector:
            connector.reward = 7.0
    assert actor.module  # which only learners have


@pytest.mark.parametrize("num_learners", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_connectors_are_reached_through_the_learners(num_learners: int) -> None:
    seen: list[float] = []

    def look(*, train_batch: Any, **kwargs: Any) -> None:
        seen.extend(np.unique(train_batch["rewards"]).tolist())

    class Shares(APPO):
        def setup(self, config: Any) -> None:
            super().setup(config)
            assert len(self.learner_group.foreach_learner(func=give)) == 1

    config = small(APPOConfig).callbacks(on_learn_on_batch=look).learners(num_learners=num_learners)
    config.training(learner_connector=lambda obs_space, action_space: Gives())
    with Shares(config) as algo:
        algo.train()
        assert all(connector.reward == 7.0 for connector in at_least(1, algo.native.learner_connectors.pipeline))
    assert num_learners or set(seen) == {7.0}


# Algorithm classes of scripts.


class Extended(APPO):
    """Has a part of its own, which checkpoints keep."""

    def setup(self, config: Any) -> None:
        super().setup(config)
        self.part = {"calls": 0}
        assert self.env_runner_group.num_remote_workers() == 0
        assert self._aggregator_actor_manager is None and self.learner_group.is_local

    def training_step(self) -> None:
        super().training_step()
        self.part["calls"] += 1
        self.metrics.log_value(("own", "calls"), self.part["calls"], reduce="max")

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().get_state(*args, **kwargs), "part": dict(self.part)}

    def set_state(self, state: Any, *args: Any, **kwargs: Any) -> None:
        super().set_state(state, *args, **kwargs)
        self.part = dict(state["part"])


class ExtendedConfig(APPOConfig):
    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or Extended)
        self.circular_buffer_num_batches = 3


def test_an_algorithm_class_has_parts_and_a_state_of_its_own(tmp_path: Path) -> None:
    with small(ExtendedConfig).build() as algo:
        assert isinstance(algo, Extended) and algo.native.config.circular_buffer_num_batches == 3
        result = algo.train()
        assert result["own"]["calls"] == algo.part["calls"] == 1
        algo.save_to_path(tmp_path / "saved")
        weights = algo.get_weights()[ID]
    with small(ExtendedConfig).build() as again:
        again.restore_from_path(tmp_path / "saved")
        assert again.part == {"calls": 1} and again.iteration == 1
        assert all(np.array_equal(weights[name], value) for name, value in again.get_weights()[ID].items())
        assert again.get_state()["part"] == {"calls": 1}
        assert again.train()["own"]["calls"] == 2


class WithoutBase(APPO):
    def setup(self, config: Any) -> None:
        """Forget the base class."""


class Broken(APPO):
    def setup(self, config: Any) -> None:
        super().setup(config)
        self.built = self.native
        raise RuntimeError("own setup")


def test_a_setup_that_fails_leaves_nothing_running() -> None:
    with pytest.raises(ConfigError, match=r"WithoutBase\.setup: call super\(\)\.setup\(config\)"):
        WithoutBase(small(APPOConfig))
    with pytest.raises(RuntimeError, match="own setup"):
        Broken(small(APPOConfig))


class Restores(PPOConfig().algo_class):  # type: ignore[misc]
    found: list[list[int]]

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        restored: list[int] = super().restore_env_runners(env_runner_group)
        self.found = [*getattr(self, "found", []), restored]
        return restored


class EndsProcess(gym.Env[Any, Any]):
    """Ends the first process that steps it often."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.file, self.num_steps = Path(config["file"]), 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        if self.num_steps > 50 and not self.file.exists():
            self.file.write_text("ended")
            os._exit(1)
        return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.mark.slow
def test_an_override_learns_which_runners_were_replaced(tmp_path: Path) -> None:
    config = PPOConfig(algo_class=Restores).environment(EndsProcess, env_config={"file": str(tmp_path / "ended")})
    config.env_runners(num_env_runners=1).training(train_batch_size=40, minibatch_size=40, num_epochs=1)
    with config.fault_tolerance(restart_failed_env_runners=True, delay_between_env_runner_restarts_s=0).build() as algo:
        for _ in range(3):
            algo.train()
        assert len(algo.found) == 3 and [found for found in algo.found if found] == [[1]]


@BOTH
def test_checkpoints_of_asynchronous_algorithms_continue(config_class: type[AlgorithmConfig], tmp_path: Path) -> None:
    with small(config_class).build() as algo:
        algo.train()
        saved = algo.save_to_path(tmp_path / "saved")
        weights = algo.get_weights()[ID]
        expected = algo.train()["learners"][ID]["total_loss"]
    again = config_class().algo_class.from_checkpoint(saved)
    try:
        assert type(again).ALGORITHM == config_class.ALGORITHM and again.iteration == 1
        assert all(np.array_equal(weights[name], value) for name, value in again.get_weights()[ID].items())
        assert again.train()["learners"][ID]["total_loss"] == pytest.approx(expected, rel=1e-5)
    finally:
        again.stop()


class DictCartPole(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole with a Dict observation."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(gym.make("CartPole-v1"))
        box = gym.spaces.Box(-10, 10, (2,))
        self.observation_space = gym.spaces.Dict({"x": box, "angle": gym.spaces.Tuple((box, gym.spaces.Discrete(3)))})

    def observation(self, observation: Any) -> Any:
        return {"x": observation[:2], "angle": (observation[2:], 1)}


@BOTH
def test_nested_observations_are_flattened(config_class: type[AlgorithmConfig]) -> None:
    config = small(config_class, DictCartPole)
    config.env_runners(env_to_module_connector=lambda env, spaces=None, device=None: FlattenObservations())
    with config.build() as algo:
        assert algo.get_module().observation_space.shape == (7,)
        assert math.isfinite(algo.train()["learners"][ID]["total_loss"])


def test_an_algorithm_is_found_by_name() -> None:
    registry = importlib.import_module("corral.compat.rllib.ray_registry")
    cls, config = registry.ALGORITHMS["APPO"]()
    assert cls is APPO and type(config) is APPOConfig
