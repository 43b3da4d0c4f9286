"""Values in units of the deviation of their targets, in PPO."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from several_agents import config_of

import exact_runs
from corral import Module, PPOConfig
from corral.algorithms.ppo import ppo_loss
from corral.errors import ConfigError
from corral.modules.module import ActorCritic
from corral.modules.value_scale import DECAY, MIN_VARIANCE, update_value_scale
from small import small

OBS_SPACE = gym.spaces.Box(-1, 1, (3,), np.float32)
COEFFICIENTS = {"kl_coeff": 0.0, "entropy_coeff": 0.0, "clip_param": 0.2}


def make_module(**settings: Any) -> Any:
    torch.manual_seed(0)
    return ActorCritic(OBS_SPACE, gym.spaces.Discrete(2), {"fcnet_hiddens": [8], **settings})


def test_another_scale_leaves_all_values_as_they_are() -> None:
    module, obs = make_module(normalize_values=True), torch.rand(50, 3)
    before = module.value(obs).detach()
    moments = [(-250.0, 70_000.0), (3.0, 10.0), (40.0, 1600.0)]  # the last one has no variance
    total = np.zeros(3)
    with torch.no_grad():
        for mean, square in moments:
            update_value_scale(module, mean, square)
            total = DECAY * total + (1 - DECAY) * np.array([mean, square, 1.0])
            np.testing.assert_allclose(module.value(obs), before, rtol=1e-3, atol=1e-2)
            np.testing.assert_allclose(float(module.value_scale.mean), total[0] / total[2], rtol=1e-5)
            variance = total[1] / total[2] - (total[0] / total[2]) ** 2
            np.testing.assert_allclose(float(module.value_scale.variance), variance, rtol=1e-4)
        constant = make_module(normalize_values=True)
        update_value_scale(constant, 40.0, 1600.0)
    assert float(constant.value_scale.variance) == pytest.approx(MIN_VARIANCE)


def test_the_deviation_of_targets_far_from_zero_is_found() -> None:
    module, rng = make_module(normalize_values=True), np.random.default_rng(0)
    with torch.no_grad():
        for _ in range(5):
            targets = 10_000 + 3 * rng.standard_normal(2048)
            update_value_scale(module, float(targets.mean()), float((targets * targets).mean()))
    assert float(module.value_scale.variance) == pytest.approx(9.0, rel=0.1)


@pytest.mark.parametrize("layers", ["value_head", "value_scale"])
def test_modules_cannot_share_a_head_whose_scales_differ(layers: str) -> None:
    config = config_of(PPOConfig, shared_layers={layers: ["red", "blue"]}).training(normalize_values=True)
    with pytest.raises(ConfigError, match=f"'{layers}' out of shared_layers"):
        config.build()


@pytest.mark.parametrize("limits", [{}, {"vf_clip_param": 0.2}, {"vf_clip_param": 0.2, "vf_loss_clip": 0.5}])
def test_the_value_loss_and_its_limits_are_those_of_scaled_values(limits: Any) -> None:
    plain, module = make_module(), make_module(normalize_values=True)
    with torch.no_grad():
        update_value_scale(module, -20.0, 425.0)  # deviation 5
    plain.load_state_dict({name: value for name, value in module.state_dict().items() if "value_scale" not in name})
    obs, targets = torch.rand(40, 3), 5 * torch.randn(40) - 20
    old = module.value(obs).detach() + 2 * torch.randn(40)
    batch = {
        **{"obs": obs, "actions": torch.zeros(40, dtype=torch.long), "logp": torch.zeros(40), "value_targets": targets},
        **{"advantages": torch.zeros(40), "values": old, "dist_inputs": torch.zeros(40, 2)},
    }
    scaled = {**batch, "value_targets": (targets + 20) / 5, "values": (old + 20) / 5}
    settings = {"vf_clip_param": None, "vf_loss_coeff": 1.0, **limits}
    loss, scalars = ppo_loss(module, batch, COEFFICIENTS, **settings)
    expected, expected_scalars = ppo_loss(plain, scaled, COEFFICIENTS, **settings)
    if not limits:
        errors = plain.value(obs) - scaled["value_targets"]
        torch.testing.assert_close(scalars["vf_loss"], errors.square().mean().detach(), rtol=1e-4, atol=1e-6)
    for name in scalars:
        torch.testing.assert_close(scalars[name], expected_scalars[name], rtol=1e-4, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(module.value_head.weight.grad, plain.value_head.weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("central", [None, "all"])
def test_a_run_with_normalized_values_continues_exactly(central: Any, tmp_path: Path) -> None:
    with config_of(PPOConfig, critic_sees=central).training(normalize_values=True).build() as algo:
        algo.train()
        scale = copy.deepcopy(algo.learner_group.get_module("red").value_scale)  # type: ignore[operator]
        assert float(scale.mean) != 0 and float(scale.weight) > 0
        exact_runs.check_continuation(algo, tmp_path / "saved")


@pytest.mark.slow
def test_learners_in_processes_have_the_same_scale() -> None:
    config = config_of(PPOConfig).training(normalize_values=True, train_batch_size_per_learner=32).engine("process")
    with config.learners(num_learners=2).build() as algo:
        algo.train()
        here = algo.learner_group.get_module("red").value_scale.mean  # type: ignore[union-attr]
        theirs = algo.learner_group.foreach_learner(lambda learner: float(learner.modules["red"].value_scale.mean))
    assert float(here) != 0 and theirs == [float(here)] * 2


class Plain(Module):
    """A module of a user."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layer = torch.nn.Linear(1, 3)

    def policy(self, obs: Any) -> Any:
        return self.layer(obs)[:, : self.distribution.num_inputs]

    def value(self, obs: Any) -> Any:
        return self.layer(obs)[:, 2]


@pytest.mark.parametrize(
    "settings", [{"module_class": Plain, "model_config": {}}, {"model_config": {"architecture": "simba_v2"}}]
)
def test_other_modules_are_refused(settings: Any) -> None:
    with pytest.raises(
        ConfigError, match="normalize_values=True is for the default module, and module 'default_policy'"
    ):
        small(normalize_values=True, **settings).build()
