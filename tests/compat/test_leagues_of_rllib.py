"""Modules that scripts of RLlib add and remove while they train, as self-play does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import corral
from corral.compat.rllib.algorithm import PPO, PPOConfig
from corral.compat.rllib.modules import MultiRLModuleSpec, RLModuleSpec, TorchRLModule, ValueFunctionAPI
from corral.errors import CheckpointError, ConfigError


class Net(TorchRLModule, ValueFunctionAPI):
    def setup(self) -> None:
        self.layer = nn.Linear(4, self.model_config.get("size", 8))
        self.pi, self.vf = nn.Linear(self.layer.out_features, 2), nn.Linear(self.layer.out_features, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.pi(torch.tanh(self.layer(batch["obs"])))}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        return self.vf(torch.tanh(self.layer(batch["obs"]))).squeeze(-1)


def map_to_main(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    return "main"


def map_to_both(agent_id: int, episode: Any, **kwargs: Any) -> str:
    return ("main", "main_v1")[agent_id]


def league(spec: RLModuleSpec) -> PPOConfig:
    config = PPOConfig().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.env_runners(num_env_runners=0).debugging(seed=0)
    config.training(train_batch_size=128, minibatch_size=64, num_epochs=1)
    config.multi_agent(policies={"main"}, policy_mapping_fn=map_to_main, policies_to_train=["main"])
    return config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs={"main": spec}))


def weights_are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("spec", [RLModuleSpec(), RLModuleSpec(Net, model_config={"size": 16})], ids=["default", "own"])
def test_a_snapshot_plays_without_learning_until_it_is_removed(spec: RLModuleSpec, tmp_path: Path) -> None:
    with league(spec).build() as algo:
        main = algo.get_module("main")
        found = algo.add_module(
            module_id="main_v1",
            module_spec=RLModuleSpec.from_module(main),
            new_agent_to_module_mapping_fn=map_to_both,
        )
        assert found.rl_module_specs.keys() == {"main", "main_v1"} == set(algo.config.policies)
        assert algo.env_runner.config.policy_mapping_fn is map_to_both
        assert algo.get_module("main_v1").config.observation_space == main.observation_space
        assert not weights_are_equal(algo.get_module("main_v1").get_state(), main.get_state())  # a module of its own
        snapshot = main.get_state()
        algo.set_state({"learner_group": {"learner": {"rl_module": {"main_v1": snapshot}}}})
        assert weights_are_equal(algo.get_weights(["main_v1"])["main_v1"], snapshot)
        (in_runner,) = algo.env_runner_group.foreach_env_runner(lambda r: r.module["main_v1"].get_state())
        assert weights_are_equal(in_runner, snapshot)
        result = [algo.train() for _ in range(2)][-1]
        assert result["env_runners"]["module_episode_return_mean"].keys() == {"main", "main_v1"}
        assert result["learners"].keys() == {"main", "__all_modules__"}
        assert weights_are_equal(algo.get_module("main_v1").get_state(), snapshot)
        assert not weights_are_equal(algo.get_module("main").get_state(), snapshot)
        path = algo.save_to_path(tmp_path / "league")
        with PPO.from_checkpoint(path) as again:
            assert weights_are_equal(again.get_weights()["main_v1"], snapshot)
            again.train()
        algo.remove_module("main_v1", new_agent_to_module_mapping_fn=map_to_main)
        assert set(algo.config.policies) == {"main"} == set(algo.get_weights())
        algo.train()


def test_a_policy_is_added_by_the_names_of_the_older_stack() -> None:
    with league(RLModuleSpec()).build() as algo:
        main = algo.get_policy("main")
        added = algo.add_policy(
            "main_v1",
            policy_cls=type(main),
            config={"lr": 0.5},
            policy_state={"weights": main.get_weights()},
            policy_mapping_fn=map_to_both,
            policies_to_train=["main", "main_v1"],
        )
        assert weights_are_equal(added.get_weights(), main.get_weights())
        before = main.get_weights()["policy_head.bias"]
        assert algo.train()["learners"].keys() == {"main", "main_v1", "__all_modules__"}
        moved = {name: np.abs(each["policy_head.bias"] - before).max() for name, each in algo.get_weights().items()}
        assert moved["main_v1"] > 100 * moved["main"] > 0  # each has its learning rate
        algo.remove_policy("main_v1", policy_mapping_fn=map_to_main, policies_to_train=["main"])
        assert np.isnan(algo.train()["learners"]["main_v1"]["total_loss"])  # keys stay, without a number


def test_what_cannot_be_changed_is_refused() -> None:
    with league(RLModuleSpec()).build() as algo:
        before = algo.get_weights()["main"]
        with pytest.raises(ConfigError, match="'main' already"):
            algo.add_module("main")
        with pytest.raises(ConfigError, match="add_to_learners=False"):
            algo.add_module("other", add_to_learners=False)
        with pytest.raises(ConfigError, match="policy_mapping_fn: the config of a runner changes its env"):
            algo.env_runner_group.foreach_env_runner(lambda r: r.config.multi_agent(policy_mapping_fn=map_to_both))
        with pytest.raises(ConfigError, match="'other'"):
            algo.remove_module("other")
        with pytest.raises(ConfigError, match="no Policy classes"):
            algo.add_policy("other", dict)
        with pytest.raises(CheckpointError, match=r"set_state do not fit module 'main': .* missing there"):
            algo.set_state({"learner_group": {"learner": {"rl_module": {"main": {"x": np.zeros(1)}}}}})
        with pytest.raises(CheckpointError, match="no module 'other'"):
            algo.learner_group.set_weights({"other": before})
        assert weights_are_equal(algo.get_weights()["main"], before) and set(algo.config.policies) == {"main"}
