"""Optimizers do what torch's own do, without what torch's own import."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import warm
from corral.config.validation import OPTIMIZERS, optimizer_class
from corral.learners.optimizers import ModuleOptimizer, optimizer_settings, without_compiler


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: Any, num_steps: int) -> None:
    inputs = torch.linspace(-1, 1, 15).reshape(5, 3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        module(inputs).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_steps_and_states_match_torch(name: str) -> None:
    chosen = optimizer_class(name)
    settings = {**optimizer_settings(chosen, {}), "lr": 0.01}
    ours, theirs = net(), net()
    our_optimizer, their_optimizer = (
        ModuleOptimizer({"default": ours.parameters()}, chosen, settings),
        chosen(theirs.parameters(), **settings),
    )
    inner = our_optimizer.torch_optimizer
    assert isinstance(inner, chosen) and type(inner).__name__ == chosen.__name__
    train(ours, our_optimizer, 3)
    train(theirs, their_optimizer, 3)
    again = ModuleOptimizer({"default": ours.parameters()}, chosen, settings)
    again.load_state_dict(our_optimizer.state_dict())
    train(ours, again, 3)
    train(theirs, their_optimizer, 3)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_hooks_of_a_step_are_called() -> None:
    module, seen = net(), []
    optimizer = ModuleOptimizer({"default": module.parameters()}, torch.optim.SGD, {"lr": 0.01})
    optimizer.torch_optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    train(module, optimizer, 2)
    assert seen == ["stepped", "stepped"]


def test_an_optimizer_of_the_users_is_left_alone() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert without_compiler(Mine) is Mine


def test_training_does_not_import_the_compiler_of_torch() -> None:
    script = """
import sys
from corral import PPOConfig
with PPOConfig().environment("CartPole-v1").training(num_epochs=1).build() as algo:
    algo.train()
print("torch" in sys.modules, "torch._dynamo" in sys.modules)
"""
    done = warm.run([sys.executable, "-c", script])
    assert done.stdout == "True False\n"
