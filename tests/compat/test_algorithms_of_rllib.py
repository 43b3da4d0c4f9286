from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import corral
from at_least import at_least
from corral.compat.rllib import checkpoints
from corral.compat.rllib.algorithm import (
    PPO,
    Algorithm,
    BCConfig,
    DQNConfig,
    IMPALAConfig,
    MARWILConfig,
    PPOConfig,
    SACConfig,
    TQCConfig,
)
from corral.compat.rllib.callbacks import DefaultCallbacks, RLlibCallback, make_multi_callbacks
from corral.compat.rllib.catalogs import PPOCatalog
from corral.compat.rllib.connectors import MeanStdFilter
from corral.compat.rllib.distributions import TorchCategorical
from corral.compat.rllib.learner import PPOTorchLearner
from corral.compat.rllib.modules import MultiRLModuleSpec, RLModule, RLModuleSpec, TorchRLModule, ValueFunctionAPI
from corral.compat.rllib.preprocessors import MultiAgentObservationPreprocessor, SingleAgentObservationPreprocessor
from corral.errors import CheckpointError, ConfigError


def small(**training: Any) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    return config.training(**{"train_batch_size": 128, "minibatch_size": 64, "num_epochs": 1, **training}).debugging(
        seed=0
    )


# Results.


def test_a_result_has_the_keys_of_both_stacks() -> None:
    with small().build() as algo:
        result = algo.train()
    runners = result["env_runners"]
    assert (
        result["episode_reward_mean"]
        == runners["episode_return_mean"]
        == result["sampler_results"]["episode_return_mean"]
    )
    assert result["timesteps_total"] == result["num_env_steps_sampled_lifetime"] >= 128
    assert result["learners"]["default_policy"]["mean_kl_loss"] == result["learners"]["default_policy"]["mean_kl"]
    assert result["info"]["learner"]["default_policy"]["learner_stats"]["vf_loss"] > 0
    assert result["config"]["lambda"] == 1.0 and result["iterations_since_restore"] == 1


# Callbacks.


class Counts(RLlibCallback):
    def __init__(self) -> None:
        super().__init__()
        self.returns: list[float] = []

    def on_episode_end(
        self, *, episode: Any, prev_episode_chunks: Any, metrics_logger: Any, env: Any, **kwargs: Any
    ) -> None:
        super().on_episode_end(episode=episode)
        whole = episode.get_return() + sum(chunk.get_return() for chunk in prev_episode_chunks)
        assert whole == len(episode) + sum(map(len, prev_episode_chunks))  # CartPole: 1 per step; a chunk counts alone
        assert len(env.envs) == env.num_envs == 2
        metrics_logger.log_value("mine", whole, reduce="max")

    def on_sample_end(self, *, env_runner: Any, samples: Any, **kwargs: Any) -> None:
        assert isinstance(samples, list) and sum(map(len, samples)) == sum(each.env_steps() for each in samples)
        assert samples[0].get_extra_model_outputs("action_logp").shape == (len(samples[0]),)

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        result["iteration"] = algorithm.iteration
        with pytest.raises(KeyError):
            algorithm.metrics.peek("nothing")


def test_callbacks_get_the_objects_of_rllib() -> None:
    with small(train_batch_size=300).callbacks(Counts).build() as algo:
        first, second = algo.train(), algo.train()
        assert (first["iteration"], second["iteration"]) == (1, 2)
        assert second["env_runners"]["mine"] >= second["env_runners"]["episode_return_mean"]
        assert isinstance(algo.callbacks[0], Counts)


class Old(DefaultCallbacks):
    def on_episode_start(
        self, *, worker: Any, base_env: Any, policies: Any, episode: Any, env_index: int, **kw: Any
    ) -> None:
        episode.user_data["steps"] = 0

    def on_episode_step(self, *, worker: Any, episode: Any, **kwargs: Any) -> None:
        episode.user_data["steps"] += 1

    def on_episode_end(self, *, worker: Any, base_env: Any, episode: Any, **kwargs: Any) -> None:
        assert episode.user_data["steps"] == episode.length == episode.total_reward
        assert len(base_env.get_sub_environments()) == 2
        episode.custom_metrics["evaluated" if worker.policy_config["in_evaluation"] else "steps"] = episode.length
        episode.hist_data["lengths"] = [episode.length]

    def on_postprocess_trajectory(
        self, *, worker: Any, postprocessed_batch: Any, original_batches: Any, **kw: Any
    ) -> None:
        postprocessed_batch["rewards"] *= 2.0


def test_callbacks_of_the_older_stack_and_their_metrics() -> None:
    config = small(train_batch_size=300).callbacks(make_multi_callbacks([Old]))
    with config.evaluation(evaluation_interval=1, evaluation_duration=2).build() as algo:
        result = algo.train()
    found, runners = result["custom_metrics"], result["env_runners"]
    assert {f"steps_{kind}" for kind in ("mean", "min", "max")} <= found.keys()
    assert found["steps_mean"] == runners["episode_len_mean"] and found["steps_max"] == runners["episode_len_max"]
    assert (
        runners["hist_stats"]["lengths"] and "steps_mean" not in result["evaluation"]["env_runners"]["custom_metrics"]
    )
    assert result["evaluation"]["episode_reward_mean"] == result["evaluation"]["env_runners"]["episode_return_mean"]


@pytest.mark.parametrize("keeps_all", [False, True])
def test_custom_metrics_leave_episodes_without_a_number_out(keeps_all: bool) -> None:
    numbers = iter([3.0, float("nan"), 5.0, *[4.0] * 1000])
    noted: list[float] = []

    def note(*, episode: Any, **kwargs: Any) -> None:
        noted.append(next(numbers))
        episode.custom_metrics["x"] = noted[-1]

    config = small(train_batch_size=300).callbacks(on_episode_end=note)
    with config.reporting(keep_per_episode_custom_metrics=keeps_all).build() as algo:
        found = algo.train()["custom_metrics"]
    known = [number for number in noted if number == number]
    assert len(known) == len(noted) - 1 > 3
    if keeps_all:
        assert sorted(found["x"]) == sorted(known)
    else:
        assert found == {"x_mean": pytest.approx(np.mean(known)), "x_min": 3.0, "x_max": 5.0}


def test_a_later_call_of_callbacks_replaces_what_it_names() -> None:
    calls: list[str] = []
    config = small().callbacks(Counts, on_train_result=lambda result, **kw: calls.append("first"))
    config.callbacks(on_train_result=[lambda algorithm, **kw: calls.append("second")])
    with config.build() as algo:
        algo.train()
        assert calls == ["second"] and isinstance(algo.callbacks[0], Counts)


def test_the_return_of_several_agents_counts_a_chunk_alone() -> None:
    seen: list[tuple[float, float, int]] = []

    def note(episode: Any, prev_episode_chunks: Any, **kwargs: Any) -> None:
        whole = sum(chunk.get_return() for chunk in prev_episode_chunks) + episode.get_return()
        agent_steps = sum(chunk.agent_steps() for chunk in prev_episode_chunks) + episode.agent_steps()
        assert episode.get_return() == sum(episode.get_agent_returns().values()) == episode.agent_steps()
        seen.append((whole, agent_steps, len(prev_episode_chunks)))

    config = small(train_batch_size=30, minibatch_size=30).environment(
        corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2}
    )
    config.multi_agent(policies={"p0"}, policy_mapping_fn=lambda aid, episode, **kw: "p0")
    with config.callbacks(on_episode_end=note).build() as algo:
        for _ in range(6):
            algo.train()
    assert seen and all(whole == agent_steps for whole, agent_steps, _ in seen)  # 1 per step
    assert any(num_chunks for _, _, num_chunks in seen)


# Runners.


def test_functions_on_runners_get_views_in_their_process() -> None:
    config = small().env_runners(num_env_runners=1)
    with config.build() as algo:
        group = algo.env_runner_group
        found = group.foreach_env_runner(func=lambda w: (w.worker_index, w.config["num_workers"], len(w.env.envs)))
        assert found == [(1, 1, 2)] and group.healthy_worker_ids() == [1] and algo.env_runner.env is None
        lengths = group.foreach_env_runner(lambda w: [len(episode) for episode in w.sample(num_episodes=2)])
        assert len(lengths[0]) == 2
        assert algo.workers.foreach_worker("ping", local_worker=False) == [True]


def test_a_runner_makes_its_env_again_with_other_settings() -> None:
    with small().environment(env_config={"render_mode": None}).build() as algo:
        runner = algo.env_runner
        runner.config.environment(env_config={"render_mode": "rgb_array"})
        runner.make_env()
        assert runner.env.envs[0].render_mode == "rgb_array" and len(runner.sample(num_episodes=1)) == 1


# Modules.


class Net(TorchRLModule, ValueFunctionAPI):
    def setup(self) -> None:
        size = self.model_config["size"]
        self.body = nn.Sequential(nn.Linear(self.observation_space.shape[0], size), nn.Tanh())
        self.pi, self.vf = nn.Linear(size, self.action_space.n), nn.Linear(size, 1)

    def _forward(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.pi(self.body(batch["obs"]))}

    def _forward_train(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        embeddings = self.body(batch["obs"])
        return {"action_dist_inputs": self.pi(embeddings), "embeddings": embeddings}

    def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
        return self.vf(self.body(batch["obs"]) if embeddings is None else embeddings).squeeze(-1)


class NetWithHead(Net):
    def setup(self) -> None:
        super().setup()
        self.head = nn.Linear(self.model_config["size"], 3)

    def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
        embeddings = self.body(batch["obs"]) if embeddings is None else embeddings
        return super().compute_values(batch, embeddings) + self.head(embeddings).mean(-1)


class Remembers(TorchRLModule, ValueFunctionAPI):
    def setup(self) -> None:
        self.lstm, self.pi, self.vf = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2), nn.Linear(8, 1)

    def get_initial_state(self) -> Any:
        return {"h": np.zeros(8, np.float32), "c": np.zeros(8, np.float32)}

    def _run(self, batch: Any) -> Any:
        assert batch["obs"].ndim == 3  # rows, time, features
        state = tuple(batch["state_in"][name].unsqueeze(0) for name in "hc")
        outputs, (h, c) = self.lstm(batch["obs"], state)
        return outputs, {"h": h.squeeze(0), "c": c.squeeze(0)}

    def _forward(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        outputs, state = self._run(batch)
        return {"action_dist_inputs": self.pi(outputs), "state_out": state, "embeddings": outputs}

    def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
        return self.vf(self._run(batch)[0] if embeddings is None else embeddings).squeeze(-1)


class RemembersAndChooses(Remembers):
    def _forward_exploration(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        return {**self._forward(batch), "actions": torch.zeros(batch["obs"].shape[:2], dtype=torch.int64)}


def test_actions_that_a_module_with_memory_chooses_itself_are_refused() -> None:
    spec = RLModuleSpec(RemembersAndChooses, model_config={"max_seq_len": 8})
    with pytest.raises(ConfigError, match=r"RemembersAndChooses: a forward pass returned 'actions'"):
        small().rl_module(rl_module_spec=spec).build()


class RemembersAndInfers(Remembers):
    def _forward_inference(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        found = self._forward(batch)
        return {**found, "action_dist_inputs": -found["action_dist_inputs"]}


def test_a_module_with_memory_that_infers_otherwise_than_it_explores_is_refused() -> None:
    spec = RLModuleSpec(RemembersAndInfers, model_config={"max_seq_len": 8})
    with pytest.raises(ConfigError, match=r"RemembersAndInfers: forward_inference and forward_exploration return diff"):
        small().rl_module(rl_module_spec=spec).build()


class RemembersAndNames(Remembers):
    def get_inference_action_dist_cls(self) -> Any:
        return type("Own", (TorchCategorical,), {})


def test_a_distribution_that_a_module_with_memory_names_is_refused() -> None:
    spec = RLModuleSpec(RemembersAndNames, model_config={"max_seq_len": 8})
    with pytest.raises(ConfigError, match=r"RemembersAndNames: action_dist_cls, or a method that names another class"):
        small().rl_module(rl_module_spec=spec).build()


class Left(RLModule):
    def _forward(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        return {"actions": np.zeros(len(batch["obs"]), np.int64)}


@pytest.mark.parametrize(("cls", "settings"), [(Net, {"size": 16}), (Remembers, {"max_seq_len": 8})])
def test_modules_of_users_act_and_learn(cls: type, settings: dict[str, Any]) -> None:
    config = small(lr=3e-3, num_epochs=4).rl_module(rl_module_spec=RLModuleSpec(cls, model_config=settings))
    with config.build() as algo:
        before = algo.get_module().get_state()
        algo.train()
        after = algo.get_module().get_state()
        assert type(algo.get_module()) is type(algo.env_runner.module) is cls
        assert all((before[name] != after[name]).any() for name in at_least(1, before))
        for name, value in algo.env_runner.module.get_state().items():
            assert np.array_equal(value, after[name])


def test_a_module_learns_to_balance_the_pole() -> None:
    config = small(lr=2e-3, train_batch_size=1024, minibatch_size=128, num_epochs=8, kl_coeff=0.0, lambda_=0.95)
    config.env_runners(num_envs_per_env_runner=8).rl_module(rl_module_spec=RLModuleSpec(Net, model_config={"size": 64}))
    with config.build() as algo:
        returns = [algo.train()["env_runners"]["episode_return_mean"] for _ in range(20)]
    assert returns[0] < 40 and max(returns) > 80


def test_several_modules_some_of_rules() -> None:
    config = small().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.multi_agent(
        policies={"p0", "p1"}, policy_mapping_fn=lambda aid, episode, **kw: f"p{aid}", policies_to_train=["p0"]
    )
    specs = {"p0": RLModuleSpec(Net, model_config={"size": 8}), "p1": RLModuleSpec(Left)}
    with config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs)).build() as algo:
        result = algo.train()
        assert result["learners"].keys() == {"p0", "__all_modules__"}
        assert result["env_runners"]["module_episode_return_mean"]["p1"] < 15  # always left falls within 11 steps
        assert isinstance(algo.get_module("p1"), Left) and set(algo.env_runner.module.keys()) == {"p0", "p1"}


@pytest.mark.parametrize("chosen", [lambda module_id, batch: module_id == "p1", lambda module_id: module_id == "p1"])
def test_a_function_may_say_which_modules_learn(chosen: Any) -> None:
    config = small().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.multi_agent(
        policies={"p0", "p1"}, policy_mapping_fn=lambda aid, *args, **kw: f"p{aid}", policies_to_train=chosen
    )
    with config.build() as algo:
        assert algo.train()["learners"].keys() == {"p1", "__all_modules__"}


def test_a_default_module_has_the_methods_of_rllib() -> None:
    with small().build() as algo:
        module, obs = algo.get_module(), torch.zeros(3, 4)
        outputs = module.forward_inference({"obs": obs})["action_dist_inputs"]
        assert outputs.shape == (3, 2) and module.compute_values({"obs": obs}).shape == (3,)
        assert np.array_equal(algo.get_weights()["default_policy"].keys(), module.get_state().keys())


# Preprocessors of observations.


class Doubles(SingleAgentObservationPreprocessor):
    """Appends the doubled observation."""

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        assert input_action_space.n == 2
        return spaces.Box(-np.inf, np.inf, (2 * input_observation_space.shape[0],), np.float32)

    def preprocess(self, observation: Any, episode: Any) -> Any:
        return np.append(observation, 2 * observation)


class SeesOthers(MultiAgentObservationPreprocessor):
    """Appends the number of agents that are observed."""

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        assert set(input_action_space.spaces) == set(input_observation_space.spaces)
        own = {agent: spaces.Box(-np.inf, np.inf, (5,), np.float32) for agent in input_observation_space.spaces}
        return spaces.Dict(own)

    def preprocess(self, observations: Any, episode: Any) -> Any:
        return {agent: np.append(obs, np.float32(len(observations))) for agent, obs in observations.items()}


def test_a_preprocessor_changes_what_episodes_and_modules_see() -> None:
    config = small().env_runners(env_to_module_connector=lambda env: [Doubles(), MeanStdFilter()])
    with config.build() as algo:
        (episode, *_) = algo.env_runner.sample(num_episodes=1)
        obs = episode.get_observations()
        assert obs.shape == (len(episode) + 1, 8) and np.array_equal(2 * obs[:, :4], obs[:, 4:])
        algo.train()


def test_a_preprocessor_sees_all_agents() -> None:
    config = small().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.multi_agent(policies={"p0"}, policy_mapping_fn=lambda aid, episode, **kw: "p0")
    with config.env_runners(env_to_module_connector=lambda env, spaces, device: SeesOthers()).build() as algo:
        (episode, *_) = algo.env_runner.sample(num_episodes=1)
        counts = np.concatenate([obs[:, 4] for obs in episode.get_observations().values()])
        assert counts[0] == 2 and set(counts) <= {1, 2}
        algo.train()


# Learners.


class Regularized(PPOTorchLearner):
    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        loss = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        weights = torch.stack([part.square().mean() for part in self.get_parameters(self.module[module_id])]).mean()
        self.metrics.log_value(key=(module_id, "mean_square"), value=weights, window=1)
        assert fwd_out["action_dist_inputs"].requires_grad and batch["action_logp"].shape == batch["advantages"].shape
        return loss + config.learner_config_dict["coeff"] * weights


@pytest.mark.parametrize("cls", [None, Net])
def test_the_loss_of_a_learner_class_is_added_to_the_loss_of_the_algorithm(cls: Any) -> None:
    def trained(coeff: float | None) -> dict[str, Any]:
        own = {} if coeff is None else {"learner_class": Regularized, "learner_config_dict": {"coeff": coeff}}
        config = small(minibatch_size=128, **own)  # one gradient step
        if cls is not None:
            config.rl_module(rl_module_spec=RLModuleSpec(cls, model_config={"size": 8}))
        with config.build() as algo:
            return dict(algo.train()["learners"]["default_policy"])

    plain, zero, half = trained(None), trained(0.0), trained(0.5)
    assert plain["total_loss"] == zero["total_loss"] and plain["vf_loss"] == half["vf_loss"]
    assert half["total_loss"] == pytest.approx(plain["total_loss"] + 0.5 * half["mean_square"], rel=1e-6)


@pytest.mark.parametrize("name", ["update", "get_state", "should_module_be_updated", "_update_module_kl_coeff"])
def test_methods_of_learners_that_corral_does_not_call_are_refused(name: str) -> None:
    own = type("Own", (PPOTorchLearner,), {name: lambda self, *args, **settings: None})
    with pytest.raises(ConfigError, match=rf"does not call Own.{name}: override compute_loss_for_module"):
        small(learner_class=own).build()


# Checkpoints.


def test_a_checkpoint_continues_and_its_modules_can_be_loaded_alone(tmp_path: Path) -> None:
    config = small().rl_module(rl_module_spec=RLModuleSpec(Net, model_config={"size": 8}))
    with config.build() as algo:
        algo.train()
        saved = algo.save(tmp_path / "saved")
        weights, second = algo.get_module().get_state(), algo.train()
    checkpoints._known.clear()  # as another process finds it
    with Algorithm.from_checkpoint(saved.checkpoint.path) as again:
        found = again.get_module().get_state()
        assert again.iteration == 1 and all(np.array_equal(found[name], weights[name]) for name in weights)
        assert again.train()["num_env_steps_sampled_lifetime"] == second["num_env_steps_sampled_lifetime"]
    module = RLModule.from_checkpoint(Path(saved.checkpoint.path) / "learner_group/learner/rl_module/default_policy")
    assert isinstance(module, Net) and all(np.array_equal(module.get_state()[name], weights[name]) for name in weights)


def test_the_directory_of_all_modules_stands_for_the_only_one(tmp_path: Path) -> None:
    """As `train_w_bc_finetune_w_ppo.py` of RLlib loads what it has cloned."""
    tree = "learner_group/learner/rl_module"
    with small().rl_module(rl_module_spec=RLModuleSpec(Net, model_config={"size": 8})).build() as algo:
        path = Path(algo.save_to_path(tmp_path / "one")) / tree
        weights = algo.get_module().get_state()
    spec = RLModuleSpec(Net, model_config={"size": 8}, load_state_path=path)
    with small().rl_module(rl_module_spec=spec).build() as loaded:
        found = loaded.get_module().get_state()
        assert all(np.array_equal(found[name], weights[name]) for name in weights)
        loaded.restore_from_path(path, component=tree)
    wider = RLModuleSpec(NetWithHead, model_config={"size": 8}, load_state_path=path)
    with small().rl_module(rl_module_spec=wider).build() as loaded:
        loaded.train()
        head = loaded.get_module().get_state()["head.weight"]
        loaded.restore_from_path(path, component=tree)
        found = loaded.get_module().get_state()
        assert all(np.array_equal(found[name], weights[name]) for name in weights)
        assert np.array_equal(found["head.weight"], head)  # what the file has not stays as it is
    (path / "other").mkdir()
    shutil.copy(path / "default_policy" / "module_state.safetensors", path / "other")
    with pytest.raises(CheckpointError, match="several modules: add the id of one of them, default_policy, other"):
        small().rl_module(rl_module_spec=spec).build()


def test_weights_of_one_module_are_loaded_into_another_algorithm(tmp_path: Path) -> None:
    with small().build() as algo:
        path = algo.save_to_path(tmp_path / "one")
        weights = algo.get_module().get_state()
    tree = "learner_group/learner/rl_module"
    config = small().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda aid, episode, **kw: f"p{aid}")
    with config.build() as several:
        several.restore_from_path(Path(path) / tree / "default_policy", component=f"{tree}/p1")
        found, other = several.get_module("p1").get_state(), several.get_module("p0").get_state()
        assert all(np.array_equal(found[name], weights[name]) for name in weights)
        assert not all(np.array_equal(other[name], weights[name]) for name in weights)
        with pytest.raises(CheckpointError, match=r"component='env_runner/x': Corral restores the whole"):
            several.restore_from_path(path, component="env_runner/x")


# Own algorithms.


class Times(PPO):
    def training_step(self) -> None:
        super().training_step()
        self.metrics.log_value("steps_of_mine", 1, reduce="sum")


def test_an_algorithm_may_have_a_training_step_of_its_own() -> None:
    with Times(config=small()) as algo, small().build() as plain:
        result, expected = algo.train(), plain.train()
    assert result["steps_of_mine"] == 1
    assert result["learners"]["default_policy"]["vf_loss"] == expected["learners"]["default_policy"]["vf_loss"]


def test_catalogs_and_other_unsupported_parts_of_modules_are_refused() -> None:
    class OwnCatalog(PPOCatalog): ...

    with pytest.raises(ConfigError, match=r"catalogs of your own are not served"):
        small().rl_module(rl_module_spec=RLModuleSpec(catalog_class=OwnCatalog)).build()
    small().rl_module(rl_module_spec=RLModuleSpec(catalog_class=PPOCatalog)).validate()


def test_a_window_without_end_is_a_mean() -> None:
    with small().build() as algo:
        for value in (1.0, 2.0, 6.0):
            algo.metrics.log_value("mine", value, window=float("inf"))
        assert algo.metrics.peek("mine") == 3.0


# Other algorithms.


@pytest.mark.parametrize(
    ("cls", "env"), [(DQNConfig, "CartPole-v1"), (SACConfig, "Pendulum-v1"), (TQCConfig, "Pendulum-v1")]
)
def test_algorithms_with_a_replay_buffer_learn_and_act(cls: Any, env: str) -> None:
    config = cls().environment(env).training(num_steps_sampled_before_learning_starts=64, n_step=(2, 5))
    config.reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
    with config.debugging(seed=0).build_algo() as algo:
        result = algo.train()
        assert result["learners"]["default_policy"]["num_gradient_steps"] > 0
        action = algo.compute_single_action(algo.env_runner.env.single_observation_space.sample(), explore=False)
        assert algo.env_runner.env.single_action_space.contains(action)
        assert algo.local_replay_buffer.get_state()


@pytest.mark.parametrize("make", [PPOConfig, IMPALAConfig, BCConfig, MARWILConfig])
def test_an_algorithm_without_a_replay_buffer_says_so(make: Any) -> None:
    config = make().environment("CartPole-v1").env_runners(num_env_runners=0)
    if make in (BCConfig, MARWILConfig):
        arrays = {"obs": np.zeros((4, 4)), "actions": np.zeros(4), "rewards": np.ones(4), "terminated": [0, 0, 0, 1]}
        config.offline_data(input_=lambda: iter([arrays]))
    with config.build_algo() as algo:
        assert getattr(algo, "local_replay_buffer", None) is None  # as scripts ask for it
        with pytest.raises(AttributeError, match=r"'local_replay_buffer'. In Corral: .* and this one has none\."):
            algo.local_replay_buffer  # noqa: B018


def test_the_replay_buffer_of_a_module_that_does_not_learn_is_missed_by_name() -> None:
    config = DQNConfig().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.multi_agent(policies={"only"}, policies_to_train=[])
    with config.multi_agent(policy_mapping_fn=lambda *given, **others: "only").build_algo() as algo:
        for each in (algo, algo.native):
            with pytest.raises(AttributeError, match="'only' has no replay buffer, because it does not learn here"):
                each.local_replay_buffer  # noqa: B018


def test_an_algorithm_is_made_from_a_dict_of_the_older_names() -> None:
    settings = {"num_workers": 0, "train_batch_size": 100, "sgd_minibatch_size": 50, "num_sgd_iter": 1, "lambda": 0.9}
    with PPO(config=settings, env="CartPole-v1") as algo:
        assert algo.train()["num_env_steps_sampled_lifetime"] == 100
        assert algo.compute_actions({"a": np.zeros(4, np.float32)}, explore=False).keys() == {"a"}
