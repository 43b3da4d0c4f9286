"""Further losses of a module, each with its own optimizer, against plain torch in a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import Net, regression, squares, update
from torch import Tensor

from at_least import all_of
from corral.errors import ConfigError
from corral.learners.learner import Learner
from corral.learners.settings import LearningSpec, UpdateSettings


def shrink(module: Any, batch: Any, coefficients: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squares of the parameters, whose gradient is the parameters."""
    return sum((0.5 * p.square().sum() for p in module.parameters()), torch.zeros(())), {}


def make(parameters: Any = None) -> Learner:
    other = LearningSpec(shrink, torch.optim.SGD, {"momentum": 0.5}, parameters=parameters)
    torch.manual_seed(0)
    return Learner({"m": Net()}, {"m": LearningSpec(squares, others={"shrink": other})}, device="cpu")


def take(learner: Learner, loss: str, lr: float) -> dict[str, Any]:
    return learner.update({"m": regression(8)}, {"m": UpdateSettings(lr=lr, loss=loss)})["m"]


def weights(learner: Learner) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in learner.modules["m"].parameters()]


def test_each_loss_moves_the_same_parameters_with_its_own_optimizer() -> None:
    learner, reference = make(), Net()
    reference.load_state_dict(learner.modules["m"].state_dict())
    own = {
        "main": (squares, torch.optim.Adam(reference.parameters(), lr=0.1)),
        "shrink": (shrink, torch.optim.SGD(reference.parameters(), lr=0.2, momentum=0.5)),
    }
    batch = {name: torch.from_numpy(column) for name, column in regression(8).items()}
    for name in ("main", "shrink", "main", "shrink", "shrink"):
        loss, optimizer = own[name]
        optimizer.zero_grad()
        loss(reference, batch, {})[0].backward()
        optimizer.step()
        take(learner, name, {"main": 0.1, "shrink": 0.2}[name])
    for mine, parameter in zip(weights(learner), reference.parameters(), strict=True):
        np.testing.assert_allclose(mine, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_loss_moves_only_the_parameters_that_it_names() -> None:
    learner = make(lambda module: list(module.parameters())[:1])
    before = weights(learner)
    result = take(learner, "shrink", 0.25)
    after = weights(learner)
    np.testing.assert_allclose(after[0], 0.75 * before[0], rtol=1e-6)
    assert all_of(np.array_equal(one, other) for one, other in zip(before[1:], after[1:], strict=True))
    assert result["shrink_optimizer_learning_rate"] == 0.25 and "gradients_shrink_optimizer_global_norm" in result


def test_the_state_of_every_optimizer_continues() -> None:
    learner, other = make(), make()
    for name in ("main", "shrink"):
        take(learner, name, 0.1)
    state = learner.get_state()
    assert sorted(state["optimizers"]) == ["m", "m/shrink"]
    other.set_state(state)
    for name in ("shrink", "main"):
        take(learner, name, 0.1)
        take(other, name, 0.1)
    for mine, theirs in zip(weights(learner), weights(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_loss_that_nobody_named_is_refused() -> None:
    learner = make()
    with pytest.raises(ConfigError, match=r"module 'm' has no loss 'auxiliary'; it has \['main', 'shrink'\]"):
        take(learner, "auxiliary", 0.1)
    assert update(learner, regression(8), lr=0.1)["num_gradient_steps"] == 1
