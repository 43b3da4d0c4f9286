"""The default modules are plain torch: gradients of gradients and the transforms of `torch.func` work on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.modules.module import ActorCritic, Module
from corral.modules.q_module import QModule
from corral.modules.sac_module import SACModule

OBS, BOX, DISCRETE = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(4)
SETTINGS = {"fcnet_hiddens": [8, 8], "fcnet_activation": "tanh"}


class Outputs(nn.Module):
    """A module whose `forward` returns everything that a module computes from observations, `[B, K]`."""

    def __init__(self, module: Module, compute: Callable[[Any, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.module, self.compute = module, compute

    def forward(self, obs: Tensor) -> Tensor:
        return torch.cat([output.reshape(len(obs), -1) for output in self.compute(self.module, obs)], -1)


def actor_critic(module: ActorCritic, obs: Tensor) -> list[Tensor]:
    return [*module.policy_and_value(obs), module.policy(obs)]


def q_network(module: QModule, obs: Tensor) -> list[Tensor]:
    return [module.q_values(obs), module.value(obs)]


def soft(module: SACModule, obs: Tensor) -> list[Tensor]:
    dist_inputs = module.policy(obs)
    if module.is_discrete:
        return [dist_inputs, *module.q_values(obs)]
    return [dist_inputs, *module.q_values(obs, dist_inputs[:, :2].tanh())]


MODULES: dict[str, Callable[[], Outputs]] = {
    "ActorCritic, Box": lambda: Outputs(ActorCritic(OBS, BOX, SETTINGS), actor_critic),
    "ActorCritic, Discrete": lambda: Outputs(ActorCritic(OBS, DISCRETE, SETTINGS), actor_critic),
    "ActorCritic, shared layers": lambda: Outputs(
        ActorCritic(OBS, DISCRETE, {**SETTINGS, "vf_share_layers": True}), actor_critic
    ),
    "QModule": lambda: Outputs(QModule(OBS, DISCRETE, SETTINGS), q_network),
    "QModule, dueling and noisy": lambda: Outputs(
        QModule(OBS, DISCRETE, {**SETTINGS, "dueling": True, "noisy": True}), q_network
    ),
    "SACModule, Box": lambda: Outputs(SACModule(OBS, BOX, SETTINGS), soft),
    "SACModule, Discrete": lambda: Outputs(SACModule(OBS, DISCRETE, SETTINGS), soft),
}


@pytest.fixture(params=MODULES)
def outputs(request: pytest.FixtureRequest) -> Outputs:
    torch.manual_seed(0)
    made: Outputs = MODULES[request.param]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def gradient(module: Outputs, obs: Tensor, *, create_graph: bool = False) -> Tensor:
    loss = module(obs).square().mean()
    found = torch.autograd.grad(
        loss, list(trained(module).values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return torch.cat([part.reshape(-1) for part in found])


def test_gradients_of_gradients_are_slopes_of_gradients(outputs: Outputs) -> None:
    obs, parameters = torch.randn(6, 3), list(trained(outputs).values())
    direction = torch.randn_like(gradient(outputs, obs))
    product = torch.autograd.grad(
        gradient(outputs, obs, create_graph=True) @ direction, parameters, allow_unused=True, materialize_grads=True
    )
    step, slopes = 1e-2, []
    for sign in (1, -1):
        with torch.no_grad():
            parts = direction.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter += sign * step * part.view_as(parameter)
        slopes.append(gradient(outputs, obs))
        with torch.no_grad():
            for parameter, part in zip(parameters, parts, strict=True):
                parameter -= sign * step * part.view_as(parameter)
    expected = (slopes[0] - slopes[1]) / (2 * step)
    found = torch.cat([part.reshape(-1) for part in product])
    assert expected.norm() > 0.1
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_gradients_of_the_observations_can_be_penalised(outputs: Outputs) -> None:
    obs = torch.randn(6, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(outputs(obs).sum(), obs, create_graph=True)
    slope.square().sum().backward()
    assert obs.grad is not None and obs.grad.abs().sum() > 0  # tanh bends


def test_torch_func(outputs: Outputs) -> None:
    obs, weights = torch.randn(6, 3), trained(outputs)
    called = copy.deepcopy(outputs)  # torch does not put back the parameters of layers that two names lead to

    def loss(weights: dict[str, Tensor], obs: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(called, weights, (obs,))
        return result.square().mean()

    found = torch.func.grad(loss)(weights, obs)
    torch.testing.assert_close(torch.cat([part.reshape(-1) for part in found.values()]), gradient(outputs, obs))
    by_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, obs.unsqueeze(1))
    for name, part in found.items():
        assert by_row[name].shape == (6, *part.shape)
        torch.testing.assert_close(by_row[name].mean(0), part, rtol=1e-4, atol=1e-6)
    _, tangent = torch.func.jvp(outputs, (obs,), (torch.ones_like(obs),))
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: outputs(row.unsqueeze(0))[0]))(obs)
    torch.testing.assert_close(tangent, jacobian.sum(-1), rtol=1e-4, atol=1e-5)
