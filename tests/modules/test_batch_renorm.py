"""Batch renormalisation against the formulas of the paper and torch's batch normalisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corral.modules.batch_renorm import BatchRenorm, RenormLinear, evaluating


def batches(number: int, size: int = 32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(size, 4, generator=generator) + torch.arange(4.0) for _ in range(number)]


def with_parameters(layer: BatchRenorm) -> BatchRenorm:
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 0.5, -1.0]))
        layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.3]))
    return layer


def renormalise(x: np.ndarray, mean: np.ndarray, var: np.ndarray, layer: BatchRenorm) -> np.ndarray:
    """The layer's output by algorithm 1 of the paper, with running statistics from before the batch."""
    deviation, running = np.sqrt(x.var(0) + layer.eps), np.sqrt(var + layer.eps)
    r = np.clip(deviation / running, 1 / 3, 3)
    d = np.clip((x.mean(0) - mean) / running, -5, 5)
    normal = (x - x.mean(0)) / deviation * r + d
    return normal * layer.weight.detach().numpy() + layer.bias.detach().numpy()


def test_in_the_warm_up_it_is_batch_normalisation() -> None:
    layer, torchs = with_parameters(BatchRenorm(4, 0.1, 5)), torch.nn.BatchNorm1d(4, eps=1e-3, momentum=0.1)
    torchs.load_state_dict({"weight": layer.weight, "bias": layer.bias}, strict=False)
    for batch in batches(5):
        torch.testing.assert_close(layer(batch), torchs(batch))
    torch.testing.assert_close(layer.mean, torchs.running_mean)
    torch.testing.assert_close(layer.var - 0.9**5, (torchs.running_var - 0.9**5) * 31 / 32)  # torch's is unbiased
    assert int(layer.num_batches) == 5


def test_after_the_warm_up_it_is_the_formula_of_the_paper() -> None:
    layer = with_parameters(BatchRenorm(4, 0.05, 2))
    *before, batch = batches(6)
    for each in before:
        layer(each)
    # Statistics so far off that three features reach the limits of the corrections.
    layer.mean[:2], layer.var[1:3] = torch.tensor([100.0, -100.0]), torch.tensor([0.01, 1000.0])
    mean, var = layer.mean.numpy().copy(), layer.var.numpy().copy()
    found = layer(batch)
    np.testing.assert_allclose(found.detach(), renormalise(batch.numpy(), mean, var, layer), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layer.mean, mean + 0.05 * (batch.numpy().mean(0) - mean), rtol=1e-5)
    np.testing.assert_allclose(layer.var, var + 0.05 * (batch.numpy().var(0) - var), rtol=1e-5)


def test_gradients_flow_through_the_batch_and_not_through_the_corrections() -> None:
    layer = with_parameters(BatchRenorm(4, 0.05, 0))
    layer.mean += 1.0
    [x] = batches(1, size=6)
    x = x.double().requires_grad_()
    layer = layer.double()
    with torch.no_grad():
        running = (layer.var + layer.eps).sqrt()
        r = ((x.var(0, correction=0) + layer.eps).sqrt() / running).clamp(1 / 3, 3)
        d = ((x.mean(0) - layer.mean) / running).clamp(-5, 5)
    goal = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
    (layer(x) * goal).sum().backward()
    found, x.grad = x.grad, None
    normal = (x - x.mean(0)) / (x.var(0, correction=0) + layer.eps).sqrt()
    ((normal * r + d) * layer.weight.detach() * goal).sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_after_the_warm_up_both_modes_agree_on_batches_like_those_before() -> None:
    layer = with_parameters(BatchRenorm(4, 0.01, 0))
    for batch in batches(1000):
        layer(batch)
    [batch] = batches(1, size=10, seed=5)
    trained = layer(batch)
    with evaluating(layer):
        count = int(layer.num_batches)
        evaluated = layer(batch)
        assert int(layer.num_batches) == count
    assert layer.training
    # A batch of 10 is far from the distribution, which batch normalisation would show.
    torch.testing.assert_close(trained, evaluated, rtol=0, atol=0.1)
    plain = torch.nn.functional.batch_norm(batch, None, None, layer.weight, layer.bias, True)
    assert (plain - evaluated).abs().max() > 0.5


def test_the_layer_and_the_next_one_are_one_linear_function() -> None:
    torch.manual_seed(0)
    layer = RenormLinear(with_parameters(BatchRenorm(4, 0.1, 0)), torch.nn.Linear(4, 3))
    for batch in batches(5):
        layer(batch)
    [batch] = batches(1)
    weight, bias = layer.affine()
    with evaluating(layer):
        torch.testing.assert_close(torch.nn.functional.linear(batch, weight, bias), layer(batch))


@pytest.mark.parametrize("fails", [False, True])
def test_a_network_is_in_its_mode_again_after_the_block(fails: bool) -> None:
    network = torch.nn.Sequential(BatchRenorm(4, 0.1, 0), torch.nn.Dropout(0.5))
    try:
        with evaluating(network):
            assert not network[0].training and not network[1].training
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert network.training and network[0].training and network[1].training
