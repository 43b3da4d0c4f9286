"""The tanh of wide layers, which NumPy computes, is the tanh of torch wherever torch takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.modules.networks import MIN_NUMPY_TANH_ENTRIES, WideTanh, mlp

tanh = WideTanh()


@pytest.fixture
def x() -> Iterator[Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    values = torch.linspace(-12.0, 12.0, MIN_NUMPY_TANH_ENTRIES, dtype=torch.float32).view(256, -1)
    yield values.requires_grad_()
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the arrays that NumPy was given."""
    found: list[int] = []
    plain = np.tanh

    def count(array: NDArray[np.float32]) -> NDArray[np.float32]:
        found.append(array.size)
        return plain(array)

    monkeypatch.setattr(np, "tanh", count)
    return found


def test_values_and_derivatives_are_those_of_the_tanh(x: Tensor, calls: list[int]) -> None:
    exact = x.detach().double().requires_grad_()
    weights = torch.linspace(-1.0, 1.0, x.numel()).view(x.shape)
    (found,) = torch.autograd.grad((tanh(x) * weights).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(found.sum(), x)
    (expected,) = torch.autograd.grad((exact.tanh() * weights).sum(), exact, create_graph=True)
    (expected_second,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(tanh(x).double(), exact.tanh(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second.double(), expected_second, rtol=1e-5, atol=1e-6)
    assert calls == [x.numel()] * 2
    with torch.inference_mode():
        assert torch.equal(tanh(x), tanh(x.detach()))


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: torch.func.vmap(tanh)(x),
        lambda x: torch.func.grad(lambda part: tanh(part).sum())(x),
        lambda x: torch.func.jvp(tanh, (x,), (x,))[1],
        lambda x: torch.jit.trace(tanh, torch.ones(x.shape), check_trace=False)(x),  # type: ignore[no-untyped-call]
        lambda x: torch.export.export(tanh, (torch.ones(x.shape),)).module()(x),
        lambda x: tanh(x.double()),
        lambda x: tanh(x.to(torch.bfloat16)),
        lambda x: tanh(nn.Parameter(x)),
    ],
    ids=["vmap", "grad", "jvp", "trace", "export", "float64", "bfloat16", "parameter"],
)
def test_torch_computes_what_is_transformed(
    transform: Callable[[Tensor], Tensor], x: Tensor, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = x.detach()
    found = transform(values)
    monkeypatch.setattr(WideTanh, "forward", nn.Tanh.forward)
    assert torch.equal(found, transform(values))
    assert calls == []


def test_several_threads_compute_in_torch(x: Tensor, calls: list[int]) -> None:
    torch.set_num_threads(3)
    tanh(x)
    assert calls == []


def test_wide_layers_have_it() -> None:
    assert [type(layer) for layer in mlp(4, [64, 512], "tanh")][1::2] == [nn.Tanh, WideTanh]
    assert type(mlp(4, [512], "relu")[1]) is nn.ReLU
