"""Algorithms with several modules: each learns with settings of its own, from the steps of its own agents."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from several_agents import CONFIGS, Repeats, Signals, all_to_red, config_of, same, weights_of

from at_least import at_least
from corral import (
    APPO,
    Algorithm,
    AlgorithmConfig,
    APPOConfig,
    ClipObservations,
    DQNConfig,
    HeuristicModule,
    IMPALAConfig,
    PPOConfig,
    RandomModule,
    SACConfig,
    load_policy,
)
from corral.core.metrics.result import flat_result
from corral.core.returns import gae
from corral.core.seeding import get_global_rngs
from corral.errors import CheckpointError, ConfigError, ExportError
from corral.modules.q_module import QModule


def two_to_red(agent_id: str, episode: Any, **_: Any) -> str:
    return "blue" if agent_id == "blue" else "red"


@pytest.mark.parametrize("base", CONFIGS)
def test_only_the_modules_that_train_change_and_report(base: type[AlgorithmConfig]) -> None:
    with config_of(base, policies_to_train=["red"]).build() as algo:
        before = weights_of(algo)
        first, result = algo.train(), algo.train()
        after = weights_of(algo)
        assert not same(before["red"], after["red"])
        assert same(before["blue"], after["blue"])
        assert before["rest"] == {}
        assert not same(before["red"], before["blue"])  # each begins with weights of its own
        assert first["learners"].keys() == result["learners"].keys() == {"red", "__all_modules__"}
        assert first["learners"]["red"].keys() == result["learners"]["red"].keys() >= set(type(algo).METRICS)


@pytest.mark.parametrize("base", CONFIGS)
def test_settings_of_a_module_are_used_for_it_alone(base: type[AlgorithmConfig]) -> None:
    overrides = {"blue": {"lr": 0.5, "optimizer": "sgd", "gamma": 0.0, "model_config": {"fcnet_hiddens": [4, 4]}}}
    config = config_of(base, algorithm_config_overrides_per_module=overrides).training(lr=0.125)
    with config.build() as algo:
        learned = algo.train()["learners"]
        group = "critic" if base is SACConfig else "default"
        name = f"{group}_optimizer_learning_rate"
        assert (learned["red"][name], learned["blue"][name]) == (0.125, 0.5)
        optimizers = algo.learner_group.get_state()["optimizers"]
        assert [optimizers[module_id]["made_for"][0] for module_id in ("red", "blue")] == ["Adam", "SGD"]
        assert [algo.module_config(module_id).gamma for module_id in ("red", "blue")] == [0.99, 0.0]
        shapes = [{array.shape for array in part.values()} for part in weights_of(algo).values()]
        assert (8,) in shapes[0]
        assert (8,) not in shapes[1]


def test_ppo_estimates_advantages_with_the_settings_of_the_module() -> None:
    seen: dict[str, Any] = {}

    def keep(policy_id: str, train_batch: Any) -> None:
        seen[policy_id] = {name: np.array(train_batch[name]) for name in ("rewards", "value_targets", "advantages")}

    config = config_of(PPOConfig, algorithm_config_overrides_per_module={"blue": {"gamma": 0.0, "lambda_": 1.0}})
    config.callbacks(on_learn_on_batch=keep).training(normalize_advantages=False)
    with config.build() as algo:
        algo.train()
    assert np.allclose(seen["blue"]["value_targets"], seen["blue"]["rewards"], atol=1e-5)
    assert not np.allclose(seen["red"]["value_targets"], seen["red"]["rewards"], atol=1e-2)


def test_ppo_advantages_match_each_agents_own_steps() -> None:
    config = config_of(PPOConfig)
    with config.build() as algo:
        rollouts = algo.sample(100)
        for module_id, parts in algo.group_trained(rollouts).items():
            for rollout in parts:
                values, next_values = rollout.compute_values(lambda obs, m=module_id: algo.learner_group.values(m, obs))
                done, valid = rollout.terminated, rollout.valid
                flags = (rollout.terminated, rollout.truncated, valid)
                found, _ = gae(rollout.rewards, values, next_values, *flags, gamma=0.9, lambda_=0.8)
                for lane in range(rollout.num_lanes):
                    steps = np.flatnonzero(valid[:, lane]).tolist()
                    for at, row in enumerate(steps):
                        expected, weight = 0.0, 1.0
                        for later in steps[at:]:
                            follow = 0.0 if done[later, lane] else 0.9 * next_values[later, lane]
                            expected += weight * (rollout.rewards[later, lane] + follow - values[later, lane])
                            weight *= 0.72
                            if done[later, lane] or later + 1 not in steps:
                                break
                        assert found[row, lane] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("base", CONFIGS)
def test_training_counts_the_steps_of_gradient_steps(base: type[AlgorithmConfig]) -> None:
    rows: list[int] = []
    config = config_of(base).callbacks(on_update_end=lambda result: rows.append(_rows_of(result)))
    with config.build() as algo:
        algo.train()
        first = sum(rows)
        counts = algo.train()["learners"]["__all_modules__"]
        assert counts == {
            "num_module_steps_trained": sum(rows) - first,
            "num_module_steps_trained_lifetime": sum(rows),
        }
    single = config_of(base, policies={}, policy_mapping_fn=None)
    with single.environment("Pendulum-v1" if base is SACConfig else "CartPole-v1", env_config={}).build() as algo:
        counts = algo.train()["learners"]["__all_modules__"]
        assert counts["num_env_steps_trained"] == counts["num_module_steps_trained_lifetime"] > 0


def _rows_of(result: dict[str, Any]) -> int:
    return round(result["module_train_batch_size_mean"] * result["num_gradient_steps"])


@pytest.mark.parametrize("unit", ["env_steps", "agent_steps"])
def test_the_batch_is_counted_in_the_chosen_unit(unit: str) -> None:
    with config_of(PPOConfig, count_steps_by=unit).build() as algo:
        rollouts = algo.sample(64)
        env_steps = sum(rollout.num_env_steps for rollout in rollouts)
        agent_steps = sum(part.num_env_steps for rollout in rollouts for part in rollout.by_module().values())
        assert env_steps < agent_steps
        counted = env_steps if unit == "env_steps" else agent_steps
        assert 64 <= counted < 64 + 2 * 3  # at most one row of two sub-envs too many


@pytest.mark.parametrize("base", [DQNConfig, SACConfig])
def test_each_module_has_a_buffer_and_updates_of_its_own(base: type[AlgorithmConfig]) -> None:
    overrides = {"blue": {"training_intensity": 4.0, "replay_buffer_config": {"capacity": 32}}}
    updates: list[str] = []
    config = config_of(base, algorithm_config_overrides_per_module=overrides).training(training_intensity=8.0)
    config.callbacks(on_update_end=lambda policy_id: updates.append(policy_id))
    with config.build() as algo:
        for _ in range(4):
            algo.train()
        red, blue = algo.replay_buffers["red"], algo.replay_buffers["blue"]  # type: ignore[attr-defined]
        assert "rest" not in algo.replay_buffers  # type: ignore[attr-defined]
        agent_steps = {"red": red.num_env_steps_added, "blue": blue.num_env_steps_added}
        assert len(red) == agent_steps["red"]
        assert 32 * 5 // 6 - 2 <= len(blue) <= 36  # of six rows at least five are steps, and one is a last observation
        for module_id, intensity in (("red", 8), ("blue", 4)):
            due = (agent_steps[module_id] - 20) * intensity / 16
            assert abs(updates.count(module_id) - due) <= 4
        with pytest.raises(ConfigError, match="several modules"):
            algo.local_replay_buffer  # type: ignore[attr-defined]  # noqa: B018


def test_transitions_have_the_n_steps_and_the_discount_of_the_module() -> None:
    config = config_of(DQNConfig, algorithm_config_overrides_per_module={"blue": {"n_step": 2, "gamma": 0.5}})
    seen: dict[str, tuple[int, float]] = {}

    def note(policy_id: str, train_batch: Any) -> None:
        seen[policy_id] = int(train_batch["num_steps"].max()), float(train_batch["discounts"].min())

    with config.training(n_step=3, gamma=0.9).callbacks(on_learn_on_batch=note).build() as algo:
        algo.train()
    assert seen == {"red": (3, pytest.approx(0.729)), "blue": (2, pytest.approx(0.25))}


def test_a_target_network_is_updated_by_the_steps_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    update_target = QModule.update_target
    monkeypatch.setattr(QModule, "update_target", lambda self, tau: (moved.append(self), update_target(self, tau))[1])
    config = config_of(DQNConfig, policies={"red": {}, "blue": {}}, policy_mapping_fn=two_to_red)
    with config.training(target_network_update_freq=60, num_steps_sampled_before_learning_starts=0).build() as algo:
        moved.clear()
        for _ in range(5):
            algo.train()
        for module_id, buffer in algo.replay_buffers.items():  # type: ignore[attr-defined]
            of_module = sum(module is algo.get_module(module_id) for module in moved)
            steps = buffer.num_env_steps_added
            assert steps / 90 < of_module <= steps / 60, module_id  # a round of sampling has at most 24 steps


@pytest.mark.parametrize("base", CONFIGS)
def test_a_restored_run_continues_exactly(base: type[AlgorithmConfig], tmp_path: Path) -> None:
    config = config_of(base)
    if base is PPOConfig:
        config.training(kl_coeff=0.2, kl_target=0.01)
    with config.build() as one:
        one.train()
        one.save(tmp_path / "checkpoint")
        with Algorithm.from_checkpoint(tmp_path / "checkpoint") as other:
            assert one.get_state()["attributes"].keys() == other.get_state()["attributes"].keys()
            results = [[algo.train() for _ in range(2)] for algo in (one, other)]
            assert results[1][0]["restored"]["num_envs_continued"] == 2
            mine, theirs = weights_of(one), weights_of(other)
            assert all(same(mine[module_id], theirs[module_id]) for module_id in at_least(1, mine))
            for result, again in zip(*results, strict=True):
                np.testing.assert_equal(again["learners"], result["learners"])


@pytest.mark.parametrize("base", CONFIGS)
def test_a_policy_is_loaded_by_its_module(base: type[AlgorithmConfig], tmp_path: Path) -> None:
    policies = {"red": {}, "blue": {}, "rest": {"module_class": Repeats}}
    if base is SACConfig:
        policies["rest"] = {"module_class": RandomModule}
    obs = np.eye(2, dtype=np.float32)
    with config_of(base, policies=policies).build() as algo:
        algo.train()
        algo.save(tmp_path / "checkpoint")
        for module_id in ("red", "blue"):
            policy = load_policy(tmp_path / "checkpoint", module_id=module_id)
            expected = algo.compute_actions(obs, explore=False, module_id=module_id)
            assert np.array_equal(policy.batch(obs), expected)
            assert np.array_equal(
                policy(obs[0]), algo.compute_single_action(obs[0], policy_id=module_id, explore=False)
            )
        rules = load_policy(tmp_path / "checkpoint", module_id="rest")
        if base is not SACConfig:
            assert rules.batch(obs).tolist() == algo.compute_actions(obs, module_id="rest").tolist() == [0, 1]
        assert (tmp_path / "checkpoint").is_dir()
        names = {path.name for path in (tmp_path / "checkpoint").rglob("*.safetensors")}
        assert names == {"red.safetensors", "blue.safetensors", "rest.safetensors"}
        with pytest.raises(CheckpointError, match=r"\['blue', 'red', 'rest'\]: give module_id"):
            load_policy(tmp_path / "checkpoint")
        for wrong in ("reed", ""):
            with pytest.raises(CheckpointError, match=rf"no policy '{wrong}'.*red"):
                load_policy(tmp_path / "checkpoint", module_id=wrong)
        for ask in (algo.get_module, lambda: algo.compute_actions(obs)):
            with pytest.raises(ConfigError, match=r"several modules, \['red', 'blue', 'rest'\]"):
                ask()
        with pytest.raises(ConfigError, match=r"no module 'reed'.*'red'"):
            algo.compute_single_action(obs[0], policy_id="reed")


def test_one_of_several_modules_is_exported(tmp_path: Path) -> None:
    policies = {"red": {}, "blue": {"model_config": {"fcnet_hiddens": [5]}}, "rest": {"module_class": Repeats}}
    with config_of(PPOConfig, policies=policies).build() as algo:
        for module_id in ("red", "blue"):
            algo.learner_group.foreach_module(module_id, spread_weights)
        algo.save(tmp_path / "checkpoint")
        obs = np.linspace(-3, 3, 20, dtype=np.float32).reshape(10, 2)
        expected = {name: algo.compute_actions(obs, explore=False, module_id=name) for name in ("red", "blue")}
    assert expected["red"].tolist() != expected["blue"].tolist()
    for module_id, actions in expected.items():
        policy = load_policy(tmp_path / "checkpoint", module_id=module_id)
        program = torch.export.load(policy.export(tmp_path / f"{module_id}.pt2"))
        assert np.array_equal(program.module()(torch.from_numpy(obs)).numpy(), actions)
    for suffix in (".onnx", ".pt2"):
        with pytest.raises(ExportError, match=r"Repeats chooses actions by rules in Python: only a module with a net"):
            load_policy(tmp_path / "checkpoint", module_id="rest").export(tmp_path / f"rest{suffix}")


def spread_weights(module: Any) -> None:
    """Move the weights far from the initial ones, so that actions depend on the observations."""
    torch.manual_seed(sum(parameter.numel() for parameter in module.parameters()))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("base", [PPOConfig, APPOConfig, DQNConfig])
def test_weights_of_one_module_come_from_another_run(base: type[AlgorithmConfig], tmp_path: Path) -> None:
    with config_of(base).debugging(seed=5).build() as source:
        source.train()
        source.save(tmp_path / "checkpoint")
        given = weights_of(source)
    with config_of(base).build() as algo:
        before = weights_of(algo)
        algo.load_module_weights(tmp_path / "checkpoint", "blue", from_module_id="red")
        after = weights_of(algo)
        assert same(after["blue"], given["red"])
        assert same(after["red"], before["red"])
        if isinstance(algo, APPO):
            assert same(algo.target_weights["blue"], given["red"]) and same(algo.target_weights["red"], before["red"])
        acting = algo.env_runner.actors["blue"].module.acting_weights()  # type: ignore[union-attr]
        assert acting
        assert all(np.array_equal(value.numpy(), given["red"][name]) for name, value in acting.items())
        algo.load_module_weights(tmp_path / "checkpoint", "red")
        assert same(weights_of(algo)["red"], given["red"])
        with pytest.raises(CheckpointError, match=r"no module 'green', only \['blue', 'red', 'rest'\]"):
            algo.load_module_weights(tmp_path / "checkpoint", "red", from_module_id="green")
    other = {"red": {"model_config": {"fcnet_hiddens": [3]}}}
    with (
        config_of(base, policies=other, policy_mapping_fn=all_to_red).build() as algo,
        pytest.raises(CheckpointError, match=r"module 'blue' of .* do not fit module 'red': .*\[8, 2\] there"),
    ):
        algo.load_module_weights(tmp_path / "checkpoint", "red", from_module_id="blue")


@pytest.mark.parametrize("base", CONFIGS)
def test_settings_change_for_all_modules_without_their_own(base: type[AlgorithmConfig]) -> None:
    with config_of(base, algorithm_config_overrides_per_module={"blue": {"lr": 0.25}}).build() as algo:
        algo.reconfigure(lr=0.125)
        learned = algo.train()["learners"]
        name = f"{'actor' if base is SACConfig else 'default'}_optimizer_learning_rate"
        assert (learned["red"][name], learned["blue"][name]) == (0.125, 0.25)


def test_a_function_may_change_which_modules_train() -> None:
    chosen = {"red"}
    config = config_of(DQNConfig, policies_to_train=lambda module_id: module_id in chosen)
    with config.build() as algo:
        algo.train()
        before = weights_of(algo)
        chosen.add("blue")
        chosen.remove("red")
        for _ in range(2):
            algo.train()
        after = weights_of(algo)
        assert same(before["red"], after["red"])
        assert not same(before["blue"], after["blue"])


def test_on_create_policy_is_fired_for_each_module() -> None:
    seen = {}
    config = config_of(PPOConfig).callbacks(on_create_policy=lambda policy_id, policy: seen.update({policy_id: policy}))
    with config.build() as algo:
        assert list(seen) == ["red", "blue", "rest"]
        assert all(algo.get_module(module_id) is policy for module_id, policy in seen.items())
        assert isinstance(seen["rest"], RandomModule)


@pytest.mark.slow
def test_several_learners_train_several_modules() -> None:
    config = config_of(PPOConfig, policies_to_train=["red", "blue"]).training(train_batch_size_per_learner=32)
    config.learners(num_learners=2).engine("process")
    with config.build() as algo:
        before = weights_of(algo)
        result = algo.train()["learners"]
        after = weights_of(algo)
        assert not same(before["red"], after["red"])
        assert not same(before["blue"], after["blue"])
        assert result["red"]["num_gradient_steps"] > 0


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        (DQNConfig, "num_offline_updates", 5),
        (IMPALAConfig, "broadcast_interval", 2),
        (IMPALAConfig, "learner_queue_size", 5),
        (APPOConfig, "use_circular_buffer", False),
        (APPOConfig, "circular_buffer_num_batches", 2),
        (APPOConfig, "circular_buffer_iterations_per_batch", 3),
    ],
)
def test_settings_that_all_modules_have_in_common_are_refused_for_one(base: Any, name: str, value: Any) -> None:
    config = config_of(base, algorithm_config_overrides_per_module={"blue": {name: value}})
    with pytest.raises(ConfigError, match=f"module 'blue': .*{name}={value} is the same for all modules"):
        config.validate()


class Ruleless(HeuristicModule):
    """A heuristic module that chooses nothing."""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies_to_train": ["reed"]}, r"there is no module 'reed'.*'red'"),
        ({"policies_to_train": ["rest"]}, r"module 'rest': RandomModule chooses actions by rules.*policies_to_train"),
        ({"algorithm_config_overrides_per_module": {"blu": {}}}, r"there is no module 'blu'.*'blue'"),
        (
            {"algorithm_config_overrides_per_module": {"blue": {"num_env_runners": 3}}},
            r"module 'blue': .*num_env_runners=3 is the same for all modules: .*env_runners\(num_env_runners=",
        ),
        (
            {"algorithm_config_overrides_per_module": {"blue": {"train_batch_size_per_learner": 3}}},
            r"module 'blue': .*train_batch_size_per_learner=3 is the same for all modules: .*\.training\(",
        ),
        ({"algorithm_config_overrides_per_module": {"blue": {"lrr": 3}}}, r"module 'blue': .*lrr.*'lr'"),
        (
            {"policies": {"red": {}, "blue": {}, "rest": {"module_class": Ruleless}}},
            r"module 'rest': rl_module: Ruleless must define choose_actions\(self, obs, rng\)",
        ),
        (
            {"algorithm_config_overrides_per_module": {"blue": {"kl_target": 0.01}}},
            r"module 'blue': kl_target=0\.01 adapts a coefficient that starts at kl_coeff=0",
        ),
        (
            {"algorithm_config_overrides_per_module": {"blue": {"kl_target": 0.1}}},
            r"module 'blue': kl_target=0.1 adapts a coefficient",
        ),
        (
            {"algorithm_config_overrides_per_module": {"blue": {"optimizer": "adamm"}}},
            r"module 'blue': optimizer='adamm'",
        ),
        (
            {"policies": {"red": {}, "blue": {"module_class": int}, "rest": {}}},
            r"module 'blue': rl_module: module_class must be a subclass of corral.Module",
        ),
        ({"policies": {}, "policies_to_train": ["red"]}, r"needs policies="),
        (
            {"policies": {}, "policy_mapping_fn": None, "count_steps_by": "agent_steps"},
            r"count_steps_by=.* needs policies=",
        ),
        ({"policies": {}, "policy_mapping_fn": None}, r"env 'Signals' has several agents: .*\.multi_agent\(policies="),
        (
            {"algorithm_config_overrides_per_module": {"rest": {"lr": 0.1}}},
            r"module 'rest': RandomModule chooses actions by rules, so .*lr=0.1 has no effect: leave it out",
        ),
        ({"policies": 3}, r"policies=3: give a set or a list of module ids, or a dict"),
        ({"policies": {"red", 3}}, r"3 is no module id"),
        ({"policies_to_train": {"red", 3}}, r"there is no module 3"),
        ({"policies": {"red": (None, {})}}, r"policy 'red' must have a dict with any of module_class"),
        ({"policy_mapping_fn": {"a": "red"}}, r"policy_mapping_fn must be a function .*\(agent_id, episode\)"),
        ({"policies_to_train": 3}, r"policies_to_train=3: give a list of module ids"),
    ],
)
def test_contradictions_name_the_module_the_setting_and_the_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(PPOConfig, **settings).build()


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("policy_mapping_fn", lambda agent_id: "red", r"called as policy_mapping_fn\(agent_id, episode\).*too many"),
        ("policies_to_train", lambda module_id, batch: True, r"called as policies_to_train\(module_id\).*'batch'"),
        ("policies_to_train", lambda module_id: 1 // 0, r"policies_to_train\('red'\) raised ZeroDivisionError"),
    ],
    ids=["one argument", "two arguments", "an exception"],
)
def test_functions_of_agents_and_modules_are_called_as_documented(name: str, function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(PPOConfig, **{name: function}).build()


def test_modules_of_several_agents_need_an_env_of_several_agents() -> None:
    with pytest.raises(ConfigError, match=r"policies names .*'red'.*env 'CartPole-v1' has one agent: leave policies"):
        config_of(PPOConfig).environment("CartPole-v1", env_config={}).build()


def test_rules_cannot_be_the_module_of_a_single_agent() -> None:
    with pytest.raises(ConfigError, match=r"RandomModule chooses actions by rules and cannot learn"):
        PPOConfig().environment("CartPole-v1").rl_module(RandomModule).validate()


def random_rest(agent_id: Any, episode: Any) -> str:
    return "red" if agent_id == "red" else "rest"


def test_evaluation_may_map_agents_to_other_modules() -> None:
    evaluation = {"evaluation_interval": 1, "evaluation_duration": 2}
    config = config_of(PPOConfig).evaluation(**evaluation, evaluation_config={"policy_mapping_fn": random_rest})
    with config.build() as algo:
        for change in (lambda: None, lambda: algo.add_module("later", copy_from="red")):
            change()
            result = algo.train()
            assert result["env_runners"]["num_module_steps_sampled"]["blue"] > 0
            evaluated = result["evaluation"]["env_runners"]
            of_round = evaluated["episode_return_mean"]  # of this round alone, as the returns of modules and agents
            for kind in ("module", "agent"):
                returns = evaluated[f"{kind}_episode_return_mean"].values()
                assert np.nansum([*returns]) == pytest.approx(of_round)
            steps = evaluated["num_module_steps_sampled"]
            assert steps["red"] == 2 * 5 and steps["blue"] == 0 and steps["rest"] == 2 * (7 + 9)
        with pytest.raises(ConfigError, match=r"evaluation_config: .*policy_mapping_fn returned 'rest'"):
            algo.remove_module("rest", policy_mapping_fn=lambda agent_id, episode: "red")
        assert algo.module_ids == ["red", "blue", "rest", "later"]
        algo.train()


@pytest.mark.slow_cases("PPOConfig-1", "APPOConfig-1", "SACConfig-1", "DQNConfig-3")
@pytest.mark.parametrize("num_modules", [1, 3])
@pytest.mark.parametrize("base", CONFIGS)
def test_results_have_the_same_keys_before_and_after_the_first_evaluation(
    base: type[AlgorithmConfig], num_modules: int
) -> None:
    config = config_of(base)
    if num_modules == 1:  # a single agent
        env = "Pendulum-v1" if base is SACConfig else "CartPole-v1"
        config.environment(env, env_config={}).multi_agent(policies={}, policy_mapping_fn=None)
    with config.evaluation(evaluation_interval=2, evaluation_duration=1).build() as algo:
        first, second = flat_result(algo.train()), flat_result(algo.train())
    assert first.keys() == second.keys()
    before = {name: value for name, value in first.items() if name.startswith("evaluation/env_runners/")}
    assert len(before) > 10 and all(value == [] or np.isnan(value) for value in before.values())
    if num_modules == 3:
        assert np.isfinite(second["evaluation/env_runners/module_episode_return_mean/blue"])
    assert not any(name.endswith("_lifetime") for name in before)


def test_a_mapping_of_evaluation_leads_to_modules() -> None:
    wrong = {"evaluation_interval": 1, "evaluation_config": {"policy_mapping_fn": lambda agent_id, episode: "reed"}}
    with pytest.raises(ConfigError, match=r"policy_mapping_fn returned 'reed' for agent 'red'.*Did you mean 'red'"):
        config_of(PPOConfig).evaluation(**wrong).build()
    with pytest.raises(ConfigError, match=r"evaluation_config: multi_agent: policy_mapping_fn=.* needs policies="):
        PPOConfig().environment("CartPole-v1").evaluation(**wrong).build()


class Looks(HeuristicModule):
    """Acts as `model_config` says, and notes what it sees."""

    seen: ClassVar[list[Any]] = []

    def choose_actions(self, obs: Any, rng: Any) -> Any:
        self.seen.append(obs.copy())
        return self.returned(len(obs))

    def returned(self, num_rows: int) -> Any:
        return np.zeros(num_rows, np.int64)


def test_rules_may_see_other_observations_than_the_modules_that_learn() -> None:
    config = config_of(PPOConfig, policies={"red": {}, "blue": {}, "rest": {"module_class": Looks}})
    config = config.env_runners(transforms=[ClipObservations(low=0.4, high=0.6)])
    with config.multi_agent(algorithm_config_overrides_per_module={"rest": {"transforms": []}}).build() as algo:
        Looks.seen.clear()  # without the check of the new module
        algo.train()
    assert Looks.seen and all(((seen == 0) | (seen == 1)).all() for seen in Looks.seen)


class Fractions(Looks):
    def returned(self, num_rows: int) -> Any:
        return np.full(num_rows, 0.7)


class Alone(Looks):
    def returned(self, num_rows: int) -> Any:
        return 1


class TooLarge(Looks):
    def returned(self, num_rows: int) -> Any:
        return np.full(num_rows, 2)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Fractions, r"Fractions.choose_actions must return int64 actions of shape \(2,\), got float64 .*\(2,\)"),
        (Alone, r"Alone.choose_actions must return int64 actions of shape \(2,\), got int64 .*\(\)"),
        (TooLarge, r"TooLarge.choose_actions returned the action 2, which is outside Discrete\(2\)"),
    ],
)
def test_rules_choose_actions_of_the_space(rules: type[Looks], message: str) -> None:
    policies = {"red": {}, "blue": {}, "rest": {"module_class": rules}}
    with pytest.raises(ConfigError, match=message), config_of(PPOConfig, policies=policies).build() as algo:
        algo.train()


def test_rules_see_only_the_agents_that_act() -> None:
    policies = {"blue": {}, "rest": {"module_class": Looks}}
    mapping = {"red": "rest", "blue": "blue", "green": "rest"}
    config = config_of(PPOConfig, policies=policies, policy_mapping_fn=lambda agent_id, episode: mapping[agent_id])
    with config.build() as algo:
        Looks.seen.clear()  # without the check of the new module
        algo.train()
    # In both sub-envs red leaves after 5 steps and green after 9; the next step only resets.
    assert [len(obs) for obs in Looks.seen[:10]] == [4] * 5 + [2] * 4 + [4]


def test_minibatches_count_the_steps_of_the_module() -> None:
    config = config_of(PPOConfig, policy_mapping_fn=all_to_red)
    with config.training(train_batch_size_per_learner=40, minibatch_size=50, num_epochs=1).build() as algo:
        result = algo.train()
        sampled = result["env_runners"]["num_module_steps_sampled"]["red"]
        assert sampled >= 80  # of 40 env steps with up to three agents
        assert result["learners"]["red"]["num_gradient_steps"] == round(sampled / 50) > 1


class Mixed(Signals):
    """The third agent has actions of another kind than the others."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        other: Any = spaces.Discrete(2) if self.box else spaces.Box(-1, 1, (1,), np.float32)
        self.action_spaces = {**self.action_spaces, self.agent_ids[-1]: other}


@pytest.mark.parametrize("base", CONFIGS)
def test_rules_need_no_exploration_that_fits_their_actions(base: type[AlgorithmConfig], tmp_path: Path) -> None:
    config = config_of(base).environment(Mixed)
    if base is SACConfig:
        config.exploration(exploration_config={"type": "GaussianNoise"})  # for Box actions only
    with config.build() as algo:
        result = algo.train()
        assert result["env_runners"]["num_module_steps_sampled"]["rest"] > 0
        algo.save(tmp_path / "checkpoint")
        with Algorithm.from_checkpoint(tmp_path / "checkpoint") as other:
            for each in (algo, other):
                each.train()
            assert same(weights_of(algo)["red"], weights_of(other)["red"])


def draws_globally(agent_id: str, episode: Any, **_: Any) -> str:
    """Draw from every global generator."""
    number = random.random() + np.random.random() + float(torch.rand(()))
    return "red" if number > 1.5 else "blue"


def test_trials_of_the_mapping_leave_the_global_generators_as_they_were() -> None:
    states = []
    for mapping in (all_to_red, draws_globally):
        with config_of(PPOConfig, policy_mapping_fn=mapping).build() as algo:
            algo.add_module("new")
            states.append(get_global_rngs())
    np.testing.assert_equal(states[1], states[0])
