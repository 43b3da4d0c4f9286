"""Modules that start with weights of other runs, and parts of modules that do not learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from several_agents import config_of

from at_least import all_of
from corral import Algorithm, DQNConfig, PPOConfig, RandomModule
from corral.errors import CheckpointError, ConfigError
from corral.testing import CountingEnv

Weights = dict[str, torch.Tensor]


def small(kind: Any = PPOConfig, *, seed: int = 0, **model_config: Any) -> Any:
    config = kind().environment(CountingEnv).debugging(seed=seed)
    config.rl_module(model_config={"fcnet_hiddens": [8], **model_config}).env_runners(num_envs_per_env_runner=2)
    if kind is PPOConfig:
        return config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=2)
    config.training(num_steps_sampled_before_learning_starts=16, train_batch_size_per_learner=8)
    return config.reporting(min_sample_timesteps_per_iteration=40)


def weights_of(algo: Algorithm, module_id: str | None = None) -> Weights:
    return {name: value.clone() for name, value in algo.get_module(module_id).state_dict().items()}


def trained(path: Path, kind: Any = PPOConfig, **settings: Any) -> Weights:
    """Train a little with another seed, save a checkpoint, and return the weights."""
    with small(kind, seed=1, **settings).build() as algo:
        algo.train()
        algo.save(path)
        return weights_of(algo)


def equal(one: Weights, other: Weights, *beginnings: str) -> bool:
    names = [name for name in one if name.startswith(beginnings or "")]
    assert names
    return all(torch.equal(one[name], other[name]) for name in names)


@pytest.mark.parametrize("form", ["checkpoint", "weights.safetensors", "weights.pt"])
def test_a_module_starts_with_the_weights_of_a_checkpoint_or_a_file(form: str, tmp_path: Path) -> None:
    before, path = trained(tmp_path / "checkpoint"), tmp_path / form
    if form.endswith("safetensors"):
        save_file(before, path)
    elif form.endswith(".pt"):
        torch.save(before, path)
    with small().rl_module(load_from=path).build() as algo:
        assert equal(weights_of(algo), before)
        runner = algo.env_runner.module.state_dict()  # type: ignore[union-attr]
        assert equal(dict(runner), before)
        algo.train()
        assert not equal(weights_of(algo), before, "policy_head")


def test_parts_are_loaded_by_pattern_and_the_frozen_ones_stay(tmp_path: Path) -> None:
    before = trained(tmp_path / "checkpoint")
    config = small().rl_module(load_from=tmp_path / "checkpoint", load_parts=["policy_encoder.*"])
    config.rl_module(freeze=["policy_encoder.*", "value_head.bias"])
    with config.build() as algo:
        start = weights_of(algo)
        assert equal(start, before, "policy_encoder.")
        assert not equal(start, before, "policy_head.")
        algo.train()
        after = weights_of(algo)
        assert equal(after, start, "policy_encoder.", "value_head.bias")
        moved = [name for name in after if not torch.equal(after[name], start[name])]
        assert {name.split(".")[0] for name in moved} == {"policy_head", "value_encoder", "value_head"}
        saved = algo.save(tmp_path / "next")
    (tmp_path / "checkpoint").rename(tmp_path / "gone")  # a run that continues needs it no longer
    with Algorithm.from_checkpoint(saved) as algo:
        assert equal(weights_of(algo), after)
        algo.train()
        assert equal(weights_of(algo), start, "policy_encoder.", "value_head.bias")
        assert not equal(weights_of(algo), after, "policy_head.")
    with pytest.raises(ConfigError, match="load_from has no effect"):
        Algorithm.from_checkpoint(saved, load_from="other")


def test_a_shared_part_is_frozen_by_each_of_its_names() -> None:
    with small(vf_share_layers=True).rl_module(freeze=["value_encoder.*"]).build() as algo:
        start = weights_of(algo)
        algo.train()
        assert equal(weights_of(algo), start, "policy_encoder.")
        assert not equal(weights_of(algo), start, "policy_head.")


def test_targets_start_as_copies_of_loaded_parts(tmp_path: Path) -> None:
    before = trained(tmp_path / "checkpoint", DQNConfig)
    config = small(DQNConfig).rl_module(load_from=tmp_path / "checkpoint", load_parts=["q.streams.*"])
    with config.rl_module(freeze=["q.streams.*"]).build() as algo:
        start = weights_of(algo)
        assert equal(start, before, "q.streams.")
        assert all_of(torch.equal(start[f"target_{name}"], start[name]) for name in start if name.startswith("q."))
        algo.train()
        assert equal(weights_of(algo), start, "q.streams.")
        assert not equal(weights_of(algo), start, "q.head.")


@pytest.mark.slow
def test_learners_of_an_engine_load_and_freeze_too(tmp_path: Path) -> None:
    before = trained(tmp_path / "checkpoint")
    config = small().rl_module(load_from=tmp_path / "checkpoint", freeze=["policy_*"]).learners(num_learners=1)
    with config.build() as algo:
        assert equal(weights_of(algo), before)
        algo.train()
        assert equal(weights_of(algo), before, "policy_")
        assert not equal(weights_of(algo), before, "value_")


def test_a_module_that_cannot_learn_warns(caplog: pytest.LogCaptureFixture) -> None:
    small().rl_module(freeze=["policy_*"]).build().stop()
    assert not caplog.records
    small().rl_module(freeze=["*"]).build().stop()
    assert "freeze_parts=['*'] freezes every weight of module 'default_policy'" in caplog.text


def test_each_of_several_modules_has_settings_of_its_own(tmp_path: Path) -> None:
    config, ids = config_of(PPOConfig), ["red", "blue"]
    with config.build() as algo:
        algo.save(tmp_path / "checkpoint")
        before = {module_id: weights_of(algo, module_id) for module_id in ids}
    first, second = ids[:2]
    policies: dict[str, Any] = dict(config.policies)
    policies[first] = {**policies[first], "load_from": tmp_path / "checkpoint", "freeze": ["policy_*"]}
    with config.copy().multi_agent(policies=policies).debugging(seed=2).build() as algo:
        assert equal(weights_of(algo, first), before[first])
        assert not equal(weights_of(algo, second), before[second])
        assert not algo.get_module(first).policy_head.weight.requires_grad  # type: ignore[union-attr]
        assert algo.get_module(second).policy_head.weight.requires_grad  # type: ignore[union-attr]
    policies[first] = {"module_class": RandomModule, "freeze": ["policy_*"]}
    with pytest.raises(ConfigError, match=f"RandomModule has no weights, so freeze_parts of module '{first}' has no"):
        config.copy().multi_agent(policies=policies, policies_to_train=[second]).validate()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    trained(path, fcnet_hiddens=[6])
    with pytest.raises(CheckpointError, match=r"policy_encoder.mlp.0.weight is float32\[6, 2\] there and float32\[8"):
        small().rl_module(load_from=path).build()
    small().rl_module(load_from=path, load_parts=["value_head.bias"]).build().stop()
    torch.save({"value_head.weight": torch.zeros(1, 8)}, tmp_path / "part.pt")
    small().rl_module(load_from=tmp_path / "part.pt", load_parts=["value_head.weight"]).build().stop()
    with pytest.raises(CheckpointError, match=r"part.pt do not fit .*: policy_encoder.mlp.0.weight is missing there"):
        small().rl_module(load_from=tmp_path / "part.pt").build()
    for settings in ({"load_from": path, "load_parts": ["policy_encodr.*"]}, {"freeze": ["policy_encodr.*"]}):
        with pytest.raises(ConfigError, match=r"parts='policy_encodr.\*' matches no weight of module 'default_policy'"):
            small().rl_module(**settings).build()
    with pytest.raises(ConfigError, match=r"load_parts=.* has no effect without load_from"):
        small().rl_module(load_parts=["value_head.*"]).build()
    with pytest.raises(CheckpointError, match="nowhere"):
        small().rl_module(load_from=tmp_path / "nowhere").build()
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(CheckpointError, match=r"text.pt cannot be read as weights"):
        small().rl_module(load_from=tmp_path / "text.pt").build()
