"""What a loss must return: anything else is an error that says what came and what to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from learner_cases import Net, make_learner, regression, update
from torch import Tensor

from corral.errors import ColumnError, LossError
from corral.learners.losses import Batch
from corral.modules.module import Module

SIZE = 9


def errors_of(module: Module, batch: Batch) -> Tensor:
    return (module.value(batch["obs"]) - batch["y"]).square()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda errors: errors.mean(), r"returned a tensor float32\[\]"),
        (lambda errors: None, "returned None"),
        (lambda errors: {"loss": errors.mean()}, r"returned a dict with the keys \['loss'\]"),
        (lambda errors: (errors.mean(), {}, {}), "returned a tuple of 3"),
        (lambda errors: (errors, {}), r"returned as the loss a tensor float32\[9\], not a scalar tensor such as err"),
        (lambda errors: (errors.mean().item(), {}), "returned as the loss a value of type float, not a scalar tensor"),
        (lambda errors: (errors.mean().detach().numpy(), {}), "returned as the loss a value of type ndarray"),
        (lambda errors: ({"default": errors}, {}), r"returned as the loss of 'default' a tensor float32\[9\]"),
        (lambda errors: (errors.mean(), errors), r"returned a tensor float32\[9\] as what to report"),
        (lambda errors: (errors.mean(), {"error": 0.5}), "reported 'error' as a value of type float, not as a tensor"),
        (lambda errors: (errors.mean(), {"error": errors[:4]}), r"reported 'error' as a tensor float32\[4\].*B=9"),
        (lambda errors: (errors.mean(), {"num_epochs": errors.mean()}), r"reported \['num_epochs'\].*other names"),
    ],
)
def test_other_results_are_refused_before_the_step(result: Any, message: str) -> None:
    def loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
        return result(errors_of(module, batch))

    module = Net()
    learner = make_learner(module, loss)
    before = {name: value.clone() for name, value in module.named_parameters()}
    with pytest.raises(LossError, match=rf"learners/m: the loss {message}.*must return \(loss, {{name: tensor}}\)"):
        update(learner, regression(SIZE), lr=0.1)
    assert all(torch.equal(value, before[name]) for name, value in module.named_parameters())


def test_a_column_that_the_batch_lacks_is_named_with_those_that_it_has() -> None:
    def loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
        return (errors_of(module, batch) * batch["certainty"]).mean(), {}

    with pytest.raises(
        ColumnError, match=r"learners/m: .*'certainty', .*columns \['obs', 'y'\].*coefficients \['beta'\]"
    ):
        update(make_learner(Net(), loss), regression(SIZE), lr=0.1, coefficients={"beta": 1.0})


def test_a_key_error_about_something_else_stays_as_it_is() -> None:
    def loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
        return errors_of(module, batch).mean() * {}[3], {}

    with pytest.raises(KeyError, match="3"):
        update(make_learner(Net(), loss), regression(SIZE), lr=0.1)
