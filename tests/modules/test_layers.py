"""Layers that run in one node of the graph, and in NumPy, do what torch's do one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corral.learners.optimizers import flat_parameters
from corral.modules.array_network import ArrayNetwork
from corral.modules.layers import run_layers

ROWS: dict[str, Callable[[], list[nn.Module]]] = {
    "one layer": lambda: [nn.Linear(3, 2)],
    "relu": lambda: [nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)],
    "tanh": lambda: [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)],
    "ends in an activation": lambda: [nn.Linear(3, 4), nn.ReLU()],
    "two linear ones": lambda: [nn.Linear(3, 4), nn.Linear(4, 2)],
}


def made(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*ROWS[name]())


def gradients(layers: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_gives_what_its_layers_give(name: str) -> None:
    row, plain = made(name), made(name)
    x, other = torch.randn(7, 3, requires_grad=True), None
    other = x.detach().clone().requires_grad_()
    outputs, expected = run_layers([*row], x), plain(other)
    torch.testing.assert_close(outputs, expected)
    weights = torch.randn_like(outputs)
    (outputs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert len(gradients(row)) == len([*row.parameters()])
    for one, same in zip([x.grad, *gradients(row)], [other.grad, *gradients(plain)], strict=True):
        torch.testing.assert_close(one, same)
    with torch.no_grad():
        torch.testing.assert_close(run_layers([*row], x), expected)


def test_the_input_stays_as_it_is() -> None:
    x = torch.randn(4, 3) - 1
    before = x.clone()
    run_layers([*made("relu")], x)
    assert torch.equal(x, before)


def test_frozen_layers_get_no_gradient() -> None:
    row = made("relu")
    row[0].requires_grad_(False)
    run_layers([*row], torch.randn(4, 3)).sum().backward()
    assert row[0].weight.grad is None and row[2].weight.grad is not None


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)],
        [nn.Linear(3, 4, bias=False), nn.ReLU()],
        [nn.ReLU(), nn.Linear(3, 2)],
        [nn.Sequential(nn.Linear(3, 2))],
    ],
    ids=["another activation", "no bias", "begins with an activation", "nested"],
)
def test_other_layers_are_called(layers: list[nn.Module]) -> None:
    x = torch.randn(4, 3)
    torch.testing.assert_close(run_layers(layers, x), nn.Sequential(*layers)(x))


def test_hooks_are_called() -> None:
    row, seen = made("relu"), []
    row[1].register_forward_hook(lambda *_: seen.append("relu"))
    run_layers([*row], torch.randn(4, 3))
    assert seen == ["relu"]


class TestArrays:
    @pytest.mark.parametrize("name", ROWS)
    def test_forward_and_backward_are_those_of_torch(self, name: str) -> None:
        ours, plain = made(name), made(name)
        flat_parameters([*ours.parameters()])
        network = ArrayNetwork.of([*ours])
        assert network is not None
        x = torch.randn(7, 3)
        outputs = network.forward(x.numpy())
        expected = plain(x)
        np.testing.assert_allclose(outputs[-1], expected.detach(), rtol=1e-5, atol=1e-6)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        for _ in range(2):  # gradients of the second time take the place of the first's
            network.backward(network.forward(x.numpy()), weights.numpy().copy())
        for one, same in zip(gradients(ours), gradients(plain), strict=True):
            torch.testing.assert_close(one, same, rtol=1e-5, atol=1e-6)

    def test_it_notices_that_parameters_moved(self) -> None:
        layers = made("relu")
        network = ArrayNetwork.of([*layers])
        assert network is not None and network.is_current
        flat_parameters([*layers.parameters()])
        assert not network.is_current

    def test_a_step_of_the_weights_counts(self) -> None:
        layers = made("relu")
        network = ArrayNetwork.of([*layers])
        assert network is not None
        x = np.ones((1, 3), np.float32)
        before = network.forward(x)[-1]
        with torch.no_grad():
            layers[2].bias += 1
        np.testing.assert_allclose(network.forward(x)[-1], before + 1, rtol=1e-5)

    def test_what_is_none(self) -> None:
        hooked = made("relu")
        hooked[0].register_forward_hook(lambda *_: None)
        wide = [nn.Linear(3, 600), nn.ReLU()]
        for layers in ([*hooked], [nn.Linear(3, 2), nn.GELU()], wide):
            assert ArrayNetwork.of(layers) is None

    def test_a_copy_is_another_network(self) -> None:
        layers = made("relu")
        network = ArrayNetwork.of([*copy.deepcopy(layers)])
        assert network is not None
        with torch.no_grad():
            layers[0].weight.zero_()
        assert network.forward(np.ones((1, 3), np.float32))[1].any()
