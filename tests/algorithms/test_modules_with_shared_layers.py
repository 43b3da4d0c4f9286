"""Algorithms whose modules share layers: in the learners, in the runners, in checkpoints."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several_agents import CONFIGS, Repeats, Signals, config_of, module_of, same, weights_of
from torch import Tensor, nn

from at_least import at_least
from corral import (
    Algorithm,
    AlgorithmConfig,
    APPOConfig,
    DQNConfig,
    IMPALAConfig,
    Module,
    PPOConfig,
    SACConfig,
    load_policy,
)
from corral.errors import CheckpointError, ConfigError
from corral.learners.build import _make_worker

PATHS = {
    **dict.fromkeys((PPOConfig, APPOConfig, IMPALAConfig), "policy_encoder"),
    **{DQNConfig: "q.encoder", SACConfig: "actor.encoder"},
}


def green_to_new(agent_id: str, episode: Any, **_: Any) -> str:
    return "new" if agent_id == "green" else module_of(agent_id, episode)


def all_to_new(agent_id: str, episode: Any, **_: Any) -> str:
    return "new"


def sharing_config(base: type[AlgorithmConfig], **multi_agent: Any) -> AlgorithmConfig:
    """Return a config whose modules `red` and `blue` share an encoder."""
    config = config_of(base, **{"shared_layers": {PATHS[base]: ["red", "blue"]}, **multi_agent})
    return config.rl_module(model_config={"fcnet_hiddens": [8, 8]})


def shared_part(base: type[AlgorithmConfig], weights: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: array for name, array in weights.items() if name.startswith(f"{PATHS[base]}.")}
    assert found
    return found


@pytest.mark.parametrize("base", CONFIGS)
def test_the_copies_stay_equal_everywhere(base: type[AlgorithmConfig], tmp_path: Path) -> None:
    with sharing_config(base).build() as algo:
        first = weights_of(algo)
        assert same(shared_part(base, first["red"]), shared_part(base, first["blue"]))
        results = [algo.train() for _ in range(2)]
        weights = weights_of(algo)
        for module_id in ("red", "blue"):
            assert results[-1]["learners"][module_id]["num_gradient_steps"] >= 1
            assert same(shared_part(base, weights["red"]), shared_part(base, weights[module_id]))
            assert not same(shared_part(base, first["red"]), shared_part(base, weights[module_id]))
            acting = algo.env_runner.actors[module_id].module.acting_weights()  # type: ignore[union-attr]
            assert all(
                np.array_equal(value.numpy(), weights[module_id][name]) for name, value in at_least(1, acting.items())
            )
        algo.save(tmp_path / "checkpoint")
        with Algorithm.from_checkpoint(tmp_path / "checkpoint") as other:
            assert other.config.shared_layers == {PATHS[base]: [["red", "blue"]]}
            again = [[each.train() for _ in range(2)] for each in (algo, other)]
            for one, two in zip(*again, strict=True):
                np.testing.assert_equal(two["learners"], one["learners"])
            assert all(same(part, weights_of(other)[name]) for name, part in at_least(1, weights_of(algo).items()))


@pytest.mark.parametrize("base", CONFIGS)
def test_a_module_that_does_not_learn_has_the_layers_of_the_one_that_does(
    base: type[AlgorithmConfig], tmp_path: Path
) -> None:
    with sharing_config(base, policies_to_train=["red"]).build() as algo:
        first = weights_of(algo)
        assert algo.train()["learners"].keys() == {"red", "__all_modules__"}
        algo.train()
        weights = weights_of(algo)
        changed = {name for name, array in first["blue"].items() if not np.array_equal(array, weights["blue"][name])}
        assert changed == set(shared_part(base, first["blue"]))
        [mine] = algo.env_runner_group.foreach_env_runner(lambda runner: runner.actors["blue"].module.state_dict())
        acting = algo.get_module("blue").acting_weights()
        assert all(np.array_equal(mine[name].numpy(), weights["blue"][name]) for name in acting)
        obs = np.eye(2, dtype=np.float32)
        expected = [algo.compute_single_action(row, module_id="blue", explore=False) for row in obs]
        algo.save(tmp_path / "checkpoint")
        policy = load_policy(tmp_path / "checkpoint", module_id="blue")
        assert np.array_equal([policy(row) for row in obs], expected)
        with sharing_config(base, policies_to_train=["red"]).build() as other:
            other.restore_from_path(tmp_path / "checkpoint")
            assert same(weights_of(other)["blue"], weights["blue"])
            [theirs] = other.env_runner_group.foreach_env_runner(
                lambda runner: runner.actors["blue"].module.state_dict()
            )
            assert all(np.array_equal(theirs[name].numpy(), weights["blue"][name]) for name in acting)


@pytest.mark.parametrize("base", [DQNConfig, SACConfig])
def test_updates_of_one_round_are_made_in_turn(base: type[AlgorithmConfig]) -> None:
    rounds: dict[int, list[str]] = {}

    def note(policy_id: str) -> None:
        rounds.setdefault(algo.num_env_steps_sampled_lifetime, []).append(policy_id)

    config = sharing_config(base).training(training_intensity=16.0).callbacks(on_update_end=note)
    with config.build() as algo:
        algo.train()
    longest = 0
    for order in rounds.values():
        num_in_turn = 2 * min(order.count("red"), order.count("blue"))
        longest = max(longest, num_in_turn)
        assert all(one != two for one, two in itertools.pairwise(order[:num_in_turn]))
    assert longest >= 4


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [1, 2])
def test_learners_in_other_processes_share_too(num_learners: int) -> None:
    config = sharing_config(PPOConfig).learners(num_learners=num_learners).engine("process")
    with config.training(train_batch_size_per_learner=64 // num_learners, minibatch_size=16).build() as algo:
        first = weights_of(algo)
        algo.train()
        algo.add_module(
            "new",
            copy_from="red",
            policy_mapping_fn=green_to_new,
            policies_to_train=["new"],
            shared_layers={"policy_encoder": ["red", "blue", "new"]},
        )
        before = weights_of(algo)
        algo.train()
        weights = weights_of(algo)
        shared = shared_part(PPOConfig, weights["new"])
        assert not same(shared, shared_part(PPOConfig, before["new"]))
        assert not same(shared_part(PPOConfig, before["red"]), shared_part(PPOConfig, first["red"]))
        assert same(shared, shared_part(PPOConfig, weights["red"]))
        assert same(shared, shared_part(PPOConfig, weights["blue"]))


def test_a_learner_of_another_process_builds_modules_that_share() -> None:
    with sharing_config(PPOConfig).build() as algo:
        specs, weights = algo.env_runner_group.module_specs, weights_of(algo)
        worker = _make_worker(algo.config, specs, {}, weights, dict.fromkeys(specs, ()), 0)
        assert worker.group_sharing(["red", "rest", "blue"]) == [["red", "blue"], ["rest"]]
        assert all(same(part, weights[name]) for name, part in worker.get_weights().items())


@pytest.mark.slow_cases("SACConfig")
@pytest.mark.parametrize("base", CONFIGS)
def test_modules_that_share_can_be_added_and_removed(base: type[AlgorithmConfig], tmp_path: Path) -> None:
    with sharing_config(base).build() as algo:
        algo.train()
        path, blue = PATHS[base], weights_of(algo)["blue"]
        algo.add_module("copy", copy_from="blue", policies_to_train=["red", "blue"])  # as in a league
        algo.add_module(
            "new",
            policy_mapping_fn=green_to_new,
            policies_to_train=["red", "new"],
            shared_layers={path: ["red", "blue", "new"]},
        )
        assert same(shared_part(base, weights_of(algo)["new"]), shared_part(base, blue))
        for _ in range(2):
            algo.train()
        weights = weights_of(algo)
        assert same(weights["copy"], blue)
        for module_id in ("blue", "new"):
            assert same(shared_part(base, weights[module_id]), shared_part(base, weights["red"]))
        assert not same(shared_part(base, weights["new"]), shared_part(base, blue))
        algo.remove_module("red", policy_mapping_fn=all_to_new)
        assert algo.config.shared_layers == {path: [["blue", "new"]]}
        algo.remove_module("blue")
        assert algo.config.shared_layers == {}
        algo.train()
        algo.save(tmp_path / "checkpoint")
        with Algorithm.from_checkpoint(tmp_path / "checkpoint") as other:
            assert same(weights_of(algo)["new"], weights_of(other)["new"])
            moments = [each.learner_group.get_state()["optimizers"]["new"] for each in (algo, other)]
            np.testing.assert_equal(moments[1], moments[0])
            other.train()


def test_loading_weights_into_one_module_says_which_others_they_reach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sharing_config(PPOConfig, shared_layers={}).debugging(seed=9).build() as apart:
        apart.save(tmp_path / "checkpoint")
        theirs = weights_of(apart)["red"]
    with sharing_config(PPOConfig).build() as algo:
        head = weights_of(algo)["blue"]["policy_head.weight"]
        with caplog.at_level(logging.WARNING, "corral"):
            algo.load_module_weights(tmp_path / "checkpoint", "red")
        assert "module 'red' shares 'policy_encoder' with ['blue']" in caplog.text
        weights = weights_of(algo)
        assert same(weights["red"], theirs)
        assert same(shared_part(PPOConfig, weights["blue"]), shared_part(PPOConfig, theirs))
        assert np.array_equal(weights["blue"]["policy_head.weight"], head)
        with pytest.raises(CheckpointError, match=r"policy_encoder.*shared_layers"):
            algo.restore_from_path(tmp_path / "checkpoint")


class TwoHeads(Module):
    """A module with layers of other names than the default ones."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.trunk = nn.Sequential(nn.Linear(2, model_config.get("width", 8)), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.LazyLinear(size) for name, size in (("policy", 2), ("value", 1))})
        self.policy_and_value(np_zeros())

    def policy(self, obs: Tensor) -> Tensor:
        output: Tensor = self.heads["policy"](self.trunk(obs))
        return output

    def value(self, obs: Tensor) -> Tensor:
        output: Tensor = self.heads["value"](self.trunk(obs)).squeeze(-1)
        return output


def np_zeros() -> Tensor:
    return Tensor(np.zeros((1, 2), np.float32))


def test_layers_of_a_custom_class_are_shared() -> None:
    config = sharing_config(PPOConfig, shared_layers={"trunk.0": ["red", "blue"]}).rl_module(TwoHeads, model_config={})
    with config.build() as algo:
        algo.train()
        weights = weights_of(algo)
        for name, array in weights["red"].items():
            assert np.array_equal(array, weights["blue"][name]) is name.startswith("trunk."), name


ENCODER = "policy_encoder"


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ({ENCODER: ["red", "bleu"]}, r"no module 'bleu'.*'blue'"),
        ({ENCODER: ["red"]}, r"'policy_encoder' has the modules \['red'\]: name at least two"),
        ({ENCODER: ["red", "red"]}, r"name at least two"),
        ({ENCODER: ["red", "blue"], f"{ENCODER}.mlp": ["blue", "red"]}, r"overlap"),
        ({ENCODER: [["red", "blue"], ["blue", "red"]]}, r"'blue' shares 'policy_encoder' and 'policy_encoder', which"),
        (
            {"policy_encodr": ["red", "blue"]},
            r"module 'red' \(ActorCritic\) has no layers 'policy_encodr'.*'policy_enco",
        ),
        ({ENCODER: ["red", "rest"]}, r"module 'rest' \(Repeats\) has no layers 'policy_encoder'"),
        (
            {ENCODER: ["red", "wide"]},
            r"'wide' and 'red' cannot share 'policy_encoder': policy_encoder\.mlp\.0\.weight is",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(shared: Any, message: str) -> None:
    policies = {
        **{"red": {}, "blue": {}, "rest": {"module_class": Repeats}},
        "wide": {"model_config": {"fcnet_hiddens": [9]}},
    }
    with pytest.raises(ConfigError, match=message):
        sharing_config(PPOConfig, policies=policies, shared_layers=shared).build().stop()


@pytest.mark.parametrize("shared", ["encoder", ["red", "blue"], {"encoder": "red"}, {"": ["red", "blue"]}])
def test_values_of_other_types_are_refused_at_the_setter(shared: Any) -> None:
    with pytest.raises(ConfigError, match="shared_layers"):
        PPOConfig().multi_agent(shared_layers=shared)


def test_a_single_agent_shares_no_layers() -> None:
    config = PPOConfig().environment("CartPole-v1").multi_agent(shared_layers={"encoder": ["a", "b"]})
    with pytest.raises(ConfigError, match=r"shared_layers=.* needs policies"):
        config.validate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shared_layers": {ENCODER: ["red", "new"]}}, r"in more than the new module 'new'"),
        ({"shared_layers": {}}, r"in more than the new module 'new'"),
        ({"shared_layers": {ENCODER: ["red", "blue", "new"], "value_encoder": ["red", "blue"]}}, r"in more than"),
        ({"shared_layers": {ENCODER: ["red", "blue", "new"]}, "copy_from": "other"}, r"copy_from='other'.*'new' would"),
        ({"shared_layers": {ENCODER: ["red", "blue", "new"]}, "model_config": {"fcnet_hiddens": [3]}}, r"cannot share"),
    ],
)
def test_an_added_module_changes_no_sharing_of_others(arguments: Any, message: str) -> None:
    policies: dict[str, Any] = {"red": {}, "blue": {}, "other": {}, "rest": {"module_class": Repeats}}
    with sharing_config(PPOConfig, policies=policies).build() as algo:
        before = weights_of(algo)
        with pytest.raises(ConfigError, match=message):
            algo.add_module("new", **arguments)
        assert algo.module_ids == ["red", "blue", "other", "rest"]
        assert algo.config.shared_layers == {ENCODER: [["red", "blue"]]}
        assert all(same(part, before[name]) for name, part in at_least(1, weights_of(algo).items()))


def test_two_groups_share_layers_of_one_path() -> None:
    pairs = [["red", "blue"], ["up", "down"]]
    agents = ("red", "blue", "up", "down")
    config = sharing_config(
        PPOConfig, policies=set(agents), policy_mapping_fn=None, shared_layers={ENCODER: pairs}
    ).environment(Signals, env_config={"agents": agents})
    with config.build() as algo:
        algo.train()
        parts = {name: shared_part(PPOConfig, part) for name, part in weights_of(algo).items()}
        assert same(parts["red"], parts["blue"])
        assert same(parts["up"], parts["down"])
        assert not same(parts["up"], parts["red"])
