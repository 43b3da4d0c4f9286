"""Learners of users: a subclass that chooses the optimizers, or takes the gradient steps in another way."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from corral import PPOConfig
from corral.errors import ConfigError
from corral.learners.learner import Learner
from corral.learners.ready_optimizers import ready_optimizers
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.module import Module

ID = "default_policy"


class Two(Module):
    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.one, self.other = nn.Linear(3, 1), nn.Linear(3, 1)


def loss(module: Any, batch: Any, coefficients: Any) -> Any:
    return (module.one(batch["obs"]) + module.other(batch["obs"])).square().mean(), {}


class OwnOptimizers(Learner):
    def make_optimizer(self, module_id: str, module: Any, spec: LearningSpec) -> Any:
        return ready_optimizers(
            {
                "one": torch.optim.Adam(module.one.parameters(), lr=0.1),
                "other": torch.optim.SGD(module.other.parameters(), lr=0.01),
            },
            spec.lr_scheduler,
        )


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def two() -> Two:
    return Two(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), {})


def rows(seed: int) -> dict[str, Any]:
    return {"obs": np.random.default_rng(seed).normal(size=(8, 3)).astype(np.float32)}


def test_ready_optimizers_step_as_torch_steps_them() -> None:
    module = two()
    expected = copy.deepcopy(module)
    adam = torch.optim.Adam(expected.one.parameters(), lr=0.1)
    sgd = torch.optim.SGD(expected.other.parameters(), lr=0.01)
    learner = OwnOptimizers({ID: module}, {ID: LearningSpec(loss, lr_scheduler=halved)}, device="cpu")
    for step in range(3):
        result = learner.update({ID: rows(step)}, {ID: UpdateSettings(lr=1.0)})[ID]
        total = loss(expected, {"obs": torch.from_numpy(rows(step)["obs"])}, {})[0]
        for optimizer in (adam, sgd):
            optimizer.zero_grad()
        total.backward()
        for optimizer in (adam, sgd):
            optimizer.step()
            optimizer.param_groups[0]["lr"] /= 2
        assert result["total_loss"] == pytest.approx(total.item(), rel=1e-5)
    for mine, its in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, its)
    assert result["one_optimizer_learning_rate"] == 0.1 / 4 and result["other_optimizer_learning_rate"] == 0.01 / 4


def test_the_state_of_ready_optimizers_is_restored() -> None:
    def made() -> Learner:
        torch.manual_seed(0)
        return OwnOptimizers({ID: two()}, {ID: LearningSpec(loss)}, device="cpu")

    first, second = made(), made()
    settings = {ID: UpdateSettings(lr=1.0)}
    first.update({ID: rows(0)}, settings)
    second.set_state(first.get_state())
    results = [learner.update({ID: rows(1)}, settings)[ID]["total_loss"] for learner in (first, second)]
    assert results[0] == results[1]
    for mine, its in zip(first.modules[ID].parameters(), second.modules[ID].parameters(), strict=True):
        torch.testing.assert_close(mine, its)  # with Adam's moments of the first step


def test_optimizers_with_a_parameter_in_common_are_refused() -> None:
    layer = nn.Linear(2, 2)
    optimizers = {name: torch.optim.SGD(layer.parameters(), lr=0.1) for name in "ab"}
    with pytest.raises(ConfigError, match="share parameters"):
        ready_optimizers(optimizers)


class Slow(Learner):
    """A learner whose optimizer takes no steps: its learning rate is 0."""

    def make_optimizer(self, module_id: str, module: Any, spec: LearningSpec) -> Any:
        return ready_optimizers({"all": torch.optim.SGD(module.parameters(), lr=0.0)})


@pytest.mark.parametrize("num_learners", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_learner_class_is_the_class_of_all_learners(num_learners: int) -> None:
    config = PPOConfig().environment("CartPole-v1").learners(learner_class=Slow, num_learners=num_learners)
    config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1).env_runners(
        num_envs_per_env_runner=2
    )
    with config.build() as algo:
        before = copy.deepcopy(algo.learner_group.get_weights())
        result = algo.train()["learners"][ID]
        after = algo.learner_group.get_weights()
        assert len(algo.learner_group.foreach_learner(kind_of)) == algo.learner_group.num_learners
        assert set(algo.learner_group.foreach_learner(kind_of)) == {"Slow"}
    assert result["num_gradient_steps"] == 2 and result["all_optimizer_learning_rate"] == 0.0
    for name, value in before[ID].items():
        np.testing.assert_array_equal(value, after[ID][name])


def kind_of(learner: Learner) -> str:
    return type(learner).__name__


def test_a_learner_class_must_be_callable() -> None:
    with pytest.raises(ConfigError, match=r"learner_class=3 must be a subclass"):
        PPOConfig().environment("CartPole-v1").learners(learner_class=3).validate()
