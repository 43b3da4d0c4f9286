"""A parameter moves while it has `requires_grad`, whenever that changes, and no optimizer moves it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import (
    ALGORITHMS,
    OPTIMIZERS,
    OTHER_PAIRS,
    PPO_COEFFICIENTS,
    Net,
    algorithm_batch,
    algorithm_loss,
    freeze,
    make_learner,
    regression,
    squares,
    update,
)
from torch import Tensor, nn

from corral.errors import CheckpointError, LossError
from corral.learners.learner import Learner
from corral.modules.module import Module


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_moved(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Check that all trainable parameters moved since a copy was made, and that no bit of the others did."""
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


def names_of(module: Module) -> list[str]:
    return [name for name, _ in module.named_parameters() if not name.startswith("target_")]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_trainable_moves_and_what_is_frozen_does_not(algorithm: str, optimizer: str) -> None:
    module = ALGORITHMS[algorithm][0]()
    names = names_of(module)
    freeze(module, names[:2])
    learner = make_learner(module, algorithm_loss(algorithm), *OPTIMIZERS[optimizer])
    batch = algorithm_batch(algorithm)
    for frozen in (
        names[:2],
        names[1::2],
        names[::2],
        names[1:],
        [],
    ):  # the first are frozen before the learner is made
        freeze(module, frozen)
        before = copies(module)
        for _ in range(3):
            update(learner, batch, lr=0.01, coefficients=PPO_COEFFICIENTS)
        assert_moved(module, before)


class Reference:
    """The same module and optimizer by hand: no gradient, no step."""

    def __init__(self, optimizer: str) -> None:
        self.module = Net()
        optimizer_class, config = OPTIMIZERS[optimizer]
        self.optimizer = optimizer_class(self.module.parameters(), lr=0.01, **config)

    def step(self, batch: dict[str, Any], is_flat: bool) -> None:
        """Take a step; in a vector, a parameter that the loss does not use has a gradient of zero."""
        self.optimizer.zero_grad()
        loss, _ = squares(self.module, {name: torch.from_numpy(column) for name, column in batch.items()}, {})
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.module.parameters():
            if is_flat and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_match_torch_through_all_changes(optimizer: str) -> None:
    module, reference = Net(), Reference(optimizer)
    learner, batch = make_learner(module, squares, *OPTIMIZERS[optimizer]), regression(9)
    is_flat = learner.optimizer("m").is_flat
    for frozen in (["frozen", "layers.0.weight"], ["layers.2.bias", "scale"], [], ["frozen"]):
        for either in (module, reference.module):
            freeze(either, [*frozen, "unused"])
        for _ in range(3):
            update(learner, batch, lr=0.01)
            reference.step(batch, is_flat)
    for (name, parameter), other in zip(module.named_parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "radam"])
def test_a_state_holds_what_frozen_parameters_had_learned(optimizer: str) -> None:
    def make() -> tuple[Module, Learner]:
        module = Net()
        return module, make_learner(module, squares, *OPTIMIZERS[optimizer])

    def steps(module: Module, learner: Learner) -> Iterator[dict[str, Tensor]]:
        for frozen in (["scale", "layers.0.bias"], []):
            freeze(module, frozen)
            for _ in range(2):
                update(learner, regression(9), lr=0.01)
                yield copies(module)

    module, learner = make()
    for frozen in ([], ["scale", "layers.0.bias"]):
        freeze(module, frozen)
        for _ in range(3):
            update(learner, regression(9), lr=0.01)
    state = learner.get_state()
    expected = list(steps(module, learner))
    other, restored = make()
    freeze(other, ["layers.2.weight"])  # which parameters are frozen here is no part of a state
    update(restored, regression(5), lr=0.1)
    restored.set_state(state)
    for ours, theirs in zip(steps(other, restored), expected, strict=True):
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
    with pytest.raises(CheckpointError, match="the state was saved by"):
        make_learner(Net(), squares, torch.optim.Adagrad).set_state(state)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("by", ["global_norm", "norm", "value"])
def test_frozen_parameters_count_in_no_norm(optimizer: str, by: str) -> None:
    module = Net()
    learner = make_learner(module, squares, *OPTIMIZERS[optimizer])
    batch = regression(9)
    whole = update(learner, batch, lr=0.0)["gradients_default_optimizer_global_norm"]
    freeze(module, [name for name in names_of(module) if name != "layers.0.weight"])
    loss, _ = squares(module, {name: torch.from_numpy(column) for name, column in batch.items()}, {})
    [gradient] = torch.autograd.grad(loss, [module.layers[0].weight])
    norm = update(learner, batch, lr=0.0, grad_clip=0.1, grad_clip_by=by)["gradients_default_optimizer_global_norm"]
    assert norm == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert norm < 0.9 * whole


@pytest.mark.slow_cases("rmsprop", "nadam", "radam", "adagrad", *OTHER_PAIRS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "disturb",
    [
        lambda module: module.zero_grad(),
        lambda module: [setattr(p, "grad", torch.full_like(p, 1e3)) for p in module.parameters() if p.requires_grad],
        lambda module: [setattr(p, "data", p.data.clone()) for p in module.parameters()],
        lambda module: [setattr(p.grad, "data", 9 * p.grad.data) for p in module.parameters() if p.requires_grad],
    ],
    ids=["zero_grad", "other gradients", "other data", "other data of gradients"],
)
def test_changes_between_updates_do_not_stop_learning(disturb: Any, algorithm: str, optimizer: str) -> None:
    results = []
    for is_disturbed in (False, True):
        module = ALGORITHMS[algorithm][0]()
        learner = make_learner(module, algorithm_loss(algorithm), *OPTIMIZERS[optimizer])
        for _ in range(3):
            update(learner, algorithm_batch(algorithm), lr=0.01, coefficients=PPO_COEFFICIENTS)
            if is_disturbed:
                disturb(module)
        results.append(copies(module))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, msg=name)


@pytest.mark.parametrize("optimizer", ["adam", "own"])
def test_a_callback_may_freeze_and_take_gradients_away(optimizer: str) -> None:
    from corral.callbacks.dispatch import Dispatcher

    module = Net()

    def take(gradients: dict[str, Tensor]) -> None:
        module.layers[2].weight.requires_grad_(False)
        module.layers[0].zero_grad()

    callbacks = Dispatcher([], {"on_gradients": [take]}, "raise")
    learner = make_learner(module, squares, torch.optim.SGD, callbacks=callbacks)
    before = copies(module)
    update(learner, regression(9), lr=0.1)
    moved = {name for name, value in module.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {"layers.2.bias", "scale", "rare"}


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
@pytest.mark.parametrize(
    "disturb",
    [
        lambda module: module.zero_grad(),
        lambda module: [setattr(p, "data", p.data.clone()) for p in module.parameters()],
        lambda module: module.layers[0].weight.requires_grad_(False),
    ],
    ids=["zero_grad", "other data", "frozen"],
)
def test_what_happens_between_two_steps_of_an_update_counts_from_the_next_step(disturb: Any, optimizer: str) -> None:
    """Two steps of one update are the steps of two updates, whatever was done to the parameters between them."""
    batch, results = regression(8), []
    for in_one_update in (True, False):
        module = Net()
        learner = make_learner(module, squares, *OPTIMIZERS[optimizer])
        if in_one_update:
            after_step = lambda module, groups: disturb(module)  # noqa: E731
            update(learner, batch, lr=0.01, minibatch_size=4, shuffle=False, after_step=after_step)
        else:
            for rows in (slice(4), slice(4, 8)):
                update(learner, {name: column[rows] for name, column in batch.items()}, lr=0.01)
                disturb(module)
        results.append(copies(module))
    for name, value in results[1].items():
        assert torch.equal(results[0][name], value), name


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_callback_may_replace_the_data_of_gradients(optimizer: str) -> None:
    from corral.callbacks.dispatch import Dispatcher

    def remove(gradients: dict[str, Tensor]) -> None:
        for gradient in gradients.values():
            gradient.data = torch.zeros_like(gradient)

    module = Net()
    callbacks = Dispatcher([], {"on_gradients": [remove]}, "raise")
    learner = make_learner(module, squares, OPTIMIZERS[optimizer][0], callbacks=callbacks)
    before = copies(module)
    update(learner, regression(9), lr=0.1)
    for name, value in module.named_parameters():
        assert torch.equal(value, before[name]), name


def test_a_state_that_is_loaded_right_after_unfreezing_keeps_what_was_learned() -> None:
    module = Net()
    learner = make_learner(module, squares)
    for frozen in ([], ["scale"]):
        freeze(module, frozen)
        update(learner, regression(9), lr=0.01)
    state = learner.get_state()
    freeze(module, [])
    learner.set_state(state)
    update(learner, regression(9), lr=0.01)
    assert learner.get_state()["optimizers"]["m"]["state"]["state"][0]["step"] == 2  # `scale` is the first parameter


def test_a_module_that_is_frozen_as_a_whole_reports_and_stays() -> None:
    module = Net()
    learner = make_learner(module, squares)
    for frozen in (names_of(module), []):
        freeze(module, frozen)
        before = copies(module)
        results = update(learner, regression(9), lr=0.01)
        assert np.isfinite(results["total_loss"])
        assert (results["gradients_default_optimizer_global_norm"] > 0) is not bool(frozen)
        assert torch.equal(module.scale, before["scale"]) is bool(frozen)


def test_a_loss_of_nothing_trainable_is_refused() -> None:
    module = Net()
    learner = make_learner(module, squares)
    freeze(module, [name for name in names_of(module) if name != "unused"])
    with pytest.raises(LossError, match="learners/m: the loss does not depend on any trainable parameter"):
        update(learner, regression(9), lr=0.01)
