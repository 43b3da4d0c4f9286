"""The learner's gradient steps, minibatches, clipping and errors; its schedules and threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import Recorder, make_learner, update
from torch import Tensor, nn

from at_least import all_of
from corral import PPOConfig
from corral.core.schedules import schedule_value, validate_schedule
from corral.errors import ConfigError, LossError
from corral.learners.learner import EVALUATION_CHUNK, Learner
from corral.learners.losses import Batch, clip_gradients
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.module import Module
from corral.modules.threads import num_threads_for, torch_threads

LossResult = tuple[Tensor, dict[str, Tensor]]


class Linear(Module):
    """values = x . w + b."""

    def __init__(self) -> None:
        super().__init__(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2), {})
        self.layer = nn.Linear(2, 1)

    def value(self, obs: Tensor) -> Tensor:
        values: Tensor = self.layer(obs)
        return values.squeeze(-1)


def squares(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
    errors = (module.value(batch["obs"]) - batch["y"]).square()
    return errors.mean(), {"largest": errors.max().detach()}


def rows(size: int) -> Batch:
    return {"obs": np.ones((size, 2), np.float32), "row": np.arange(size)}


def regression(size: int = 64) -> Batch:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(size, 2)).astype(np.float32)
    return {"obs": obs, "y": (obs @ [2.0, -1.0] + 0.5 + 0.1 * rng.normal(size=size)).astype(np.float32)}


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 0.1), (torch.optim.Adam, 0.05)])
def test_a_least_squares_loss_reaches_its_closed_form_optimum(
    optimizer: type[torch.optim.Optimizer], lr: float
) -> None:
    batch, module = regression(), Linear()
    learner = make_learner(module, squares, optimizer)
    update(learner, batch, lr=lr, num_epochs=500)
    design = np.column_stack([batch["obs"], np.ones(len(batch["y"]))])
    optimum = np.linalg.lstsq(design, batch["y"], rcond=None)[0]
    np.testing.assert_allclose(weights_of(module), optimum, atol=1e-3)


def test_one_step_of_gradient_descent_is_the_one_on_paper() -> None:
    module = Linear()
    with torch.no_grad():
        module.layer.weight.zero_()
        module.layer.bias.zero_()
    batch = {"obs": np.array([[1, 2]], np.float32), "y": np.array([3], np.float32)}
    learner = make_learner(module, squares, torch.optim.SGD)
    results = update(learner, batch, lr=0.1)
    # The gradient of (x.w + b - 3)^2 at 0 is -6 (1, 2, 1).
    np.testing.assert_allclose(weights_of(module), [0.6, 1.2, 0.6], rtol=1e-6)
    assert results["total_loss"] == results["largest"] == 9
    assert results["gradients_default_optimizer_global_norm"] == pytest.approx(6 * math.sqrt(6))
    assert results["default_optimizer_learning_rate"] == 0.1
    assert results["module_train_batch_size_mean"] == 1


def test_reported_scalars_are_means_over_the_steps() -> None:
    def loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        return 0 * module.value(batch["obs"]).mean(), {"row": batch["row"].double().mean().float()}

    learner = make_learner(Linear(), loss)
    results = update(learner, rows(10), lr=0.1, minibatch_size=5, num_epochs=3, shuffle=False)
    assert results["row"] == pytest.approx(4.5)
    assert results["num_gradient_steps"] == 6


def test_each_module_learns_with_its_own_loss_optimizer_and_settings() -> None:
    def scaled(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        return coefficients["c"] * module.value(batch["obs"]).mean(), {}

    def negated(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        return -module.value(batch["obs"]).mean(), {}

    modules = {name: Linear() for name in ("a", "b", "opponent", "idle")}
    before = {name: weights_of(module) for name, module in modules.items()}
    momentum = LearningSpec(negated, torch.optim.SGD, {"momentum": 0.5})
    specs = {"a": LearningSpec(scaled, torch.optim.SGD), "b": momentum, "idle": momentum}
    learner = Learner(modules, specs, device="cpu")
    settings = {
        "a": UpdateSettings(lr=0.5, coefficients={"c": 3.0}, grad_clip=1.5, grad_clip_by="value"),
        "b": UpdateSettings(lr=0.1, num_epochs=2, minibatch_size=2),
        "idle": UpdateSettings(lr=0.1),
    }
    results = learner.update({"a": rows(4), "b": rows(4), "opponent": rows(4)}, settings)
    assert set(results) == {"a", "b"}
    assert [results[name]["num_gradient_steps"] for name in ("a", "b")] == [1, 4]
    torch.testing.assert_close(weights_of(modules["a"]), before["a"] - 0.5 * 1.5)
    torch.testing.assert_close(weights_of(modules["b"]), before["b"] + 0.1 * (1 + 1.5 + 1.75 + 1.875))
    for name in ("opponent", "idle"):  # a module without settings does not learn, nor one without a batch
        assert torch.equal(weights_of(modules[name]), before[name])
    with pytest.raises(ConfigError, match=r"module 'opponent' has no loss and optimizer.*\['a', 'b', 'idle'\]"):
        learner.update({"opponent": rows(4)}, {"opponent": UpdateSettings(lr=0.1)})
    with pytest.raises(ConfigError, match=r"specs for modules \['c'\]"):
        Learner({"a": Linear()}, {"c": LearningSpec(scaled)})


@given(size=st.integers(1, 60), minibatch_size=st.none() | st.integers(1, 80), shuffle=st.booleans())
@settings(max_examples=30, deadline=None)
def test_every_row_is_seen_once_an_epoch_in_minibatches_of_one_size(
    size: int, minibatch_size: int | None, shuffle: bool
) -> None:
    loss = Recorder()
    learner = make_learner(Linear(), loss)
    update(learner, rows(size), lr=0.0, num_epochs=2, minibatch_size=minibatch_size, shuffle=shuffle)
    sizes = [len(minibatch) for minibatch in loss.minibatches]
    assert max(sizes) - min(sizes) <= 1
    steps = len(sizes) // 2
    for epoch in (loss.minibatches[:steps], loss.minibatches[steps:]):
        assert sorted(itertools.chain(*epoch)) == list(range(size))
    if minibatch_size and size % minibatch_size == 0:
        assert set(sizes) == {minibatch_size}
    if not shuffle:
        assert list(itertools.chain(*loss.minibatches[:steps])) == list(range(size))


def test_rows_of_a_unit_stay_together() -> None:
    loss = Recorder()
    batch = {**rows(24), "unit_starts": np.arange(24) % 4 == 0}
    update(make_learner(Linear(), loss), batch, lr=0.0, num_epochs=2, minibatch_size=12)
    units = [minibatch[at : at + 4] for minibatch in loss.minibatches for at in range(0, len(minibatch), 4)]
    assert [len(minibatch) for minibatch in loss.minibatches] == [12] * 4
    assert all_of(unit == list(range(unit[0], unit[0] + 4)) for unit in units)
    starts = [unit[0] for unit in units]
    assert sorted(starts[:6]) == sorted(starts[6:]) == list(range(0, 24, 4)) != starts[:6]


def test_shuffling_follows_the_seed_and_differs_between_epochs() -> None:
    def order(seed: int) -> list[list[int]]:
        loss = Recorder()
        update(make_learner(Linear(), loss, seed=seed), rows(20), lr=0.0, num_epochs=2, minibatch_size=10)
        return loss.minibatches

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:2] != order(1)[2:]


def test_columns_are_shuffled_together_also_nested_ones() -> None:
    def loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        assert torch.equal(batch["obs"]["a"][:, 0], batch["row"].float())
        assert torch.equal(batch["obs"]["b"][0], batch["row"])
        return 0 * next(iter(module.parameters())).sum(), {}

    row = np.arange(12)
    batch = {"obs": {"a": np.column_stack([row, row]).astype(np.float32), "b": (row,)}, "row": row}
    results = update(make_learner(Linear(), loss), batch, lr=0.1, minibatch_size=4)
    assert results["num_gradient_steps"] == 3


class Two(nn.Module):
    """Two parameters with gradients (3, 4) and (12,): norms 5, 12 and, together, 13."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.zeros(1))
        self.one.grad, self.other.grad = torch.tensor([3.0, -4.0]), torch.tensor([12.0])


class Centered(Linear):
    """Subtracts a running mean of the observations, which every training step assigns as a new tensor."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def value(self, obs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * obs.mean(0)
        return super().value(obs - self.mean)


class Rounded(Linear):
    """Sends copies of its weights to the runners."""

    def acting_weights(self) -> dict[str, Tensor]:
        return {name: value.half().float() for name, value in self.state_dict().items()}


@pytest.mark.parametrize("make", [Linear, Centered, Rounded])
def test_runners_get_the_weights_and_buffers_after_each_update(make: type[Linear]) -> None:
    module = make()
    learner = make_learner(module, squares)
    seen = []
    for _ in range(3):
        weights = learner.get_acting_weights()["m"]
        seen.append(np.concatenate([value.copy().ravel() for value in weights.values()]))
        for name, value in module.acting_weights().items():
            np.testing.assert_array_equal(weights[name], value)
        update(learner, regression(8), lr=0.1)
    assert not np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[1], seen[2])


def test_an_update_trains_in_training_mode_after_values_were_computed() -> None:
    module = Centered()
    learner = make_learner(module, squares)
    for _ in range(2):
        learner.values("m", regression(8)["obs"])
        before = module.mean
        update(learner, regression(8), lr=0.1)
        assert not torch.equal(module.mean, before)


def test_the_settings_of_an_update_come_from_the_config() -> None:
    config = PPOConfig().training(num_epochs=3, minibatch_size=7, shuffle_batch_per_epoch=False)
    config.training(grad_clip=0.3, grad_clip_by="value")
    expected = UpdateSettings(
        lr=0.1, num_epochs=3, minibatch_size=7, shuffle=False, grad_clip=0.3, grad_clip_by="value", groups=("a",)
    )
    assert UpdateSettings.from_config(config, lr=0.1, groups=("a",)) == expected


@pytest.mark.parametrize(
    ("limit", "by", "one", "other"),
    [
        (None, "global_norm", [3, -4], [12]),
        (6.5, "global_norm", [1.5, -2], [6]),
        (20.0, "global_norm", [3, -4], [12]),
        (2.5, "norm", [1.5, -2], [2.5]),
        (6.0, "norm", [3, -4], [6]),
        (3.5, "value", [3, -3.5], [3.5]),
    ],
)
def test_clipping(limit: float | None, by: str, one: list[float], other: list[float]) -> None:
    module = Two()
    norm = clip_gradients({"all": list(module.parameters())}, ["all"], limit, by)["all"]
    assert norm == pytest.approx(13)  # before clipping
    assert module.one.grad is not None and module.other.grad is not None
    np.testing.assert_allclose(module.one.grad, one, rtol=1e-5)
    np.testing.assert_allclose(module.other.grad, other, rtol=1e-5)
    assert module.unused.grad is None


def test_the_norm_of_one_gradient_that_is_not_contiguous() -> None:
    parameter = nn.Parameter(torch.ones(2, 3).t())
    parameter.grad = torch.full((2, 3), 2.0).t()
    assert clip_gradients({"all": [parameter]}, ["all"], 1.0, "global_norm")["all"] == pytest.approx(math.sqrt(24))
    np.testing.assert_allclose(parameter.grad, np.full((3, 2), 2 / math.sqrt(24)), rtol=1e-6)


class OwnSGD(torch.optim.SGD):
    """An optimizer that the library does not know, so that it gets the parameters one by one."""


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, OwnSGD])
@pytest.mark.parametrize(
    ("by", "weight", "bias"),
    [
        ("global_norm", 0.5 / math.sqrt(3), 0.5 / math.sqrt(3)),
        ("norm", 0.5 / math.sqrt(2), 0.5),  # the weight has two entries, and the bias one
        ("value", 0.5, 0.5),
    ],
)
def test_the_learner_clips_before_it_steps(
    by: str, weight: float, bias: float, optimizer: type[torch.optim.Optimizer]
) -> None:
    module = Linear()
    before = weights_of(module)
    learner = make_learner(module, Recorder(), optimizer)
    results = update(learner, rows(1), lr=1.0, grad_clip=0.5, grad_clip_by=by)
    assert results["gradients_default_optimizer_global_norm"] == pytest.approx(math.sqrt(3))  # before clipping
    moved = (weights_of(module) - before).abs()
    np.testing.assert_allclose(moved, [weight, weight, bias], rtol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_named_and_leaves_the_weights(bad: float) -> None:
    module, seen = Linear(), []

    def loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        seen.append(weights_of(module))
        culprit = torch.tensor(bad if 13 in batch["row"] and len(seen) > 4 else 0.0)
        value = module.value(batch["obs"]).mean()
        return value + culprit, {"fine_term": value.detach(), "bad_term": culprit}

    learner = Learner({"blue": module}, {"blue": LearningSpec(loss)}, device="cpu")
    settings = UpdateSettings(lr=0.1, num_epochs=3, minibatch_size=4, shuffle=False)
    with pytest.raises(LossError) as error:
        learner.update({"blue": rows(16)}, {"blue": settings})
    message = str(error.value)
    assert "learners/blue/total_loss" in message
    assert "epoch 1, minibatch 3" in message
    assert f"bad_term={bad}" in message
    assert "fine_term" not in message
    assert torch.equal(weights_of(module), seen[-1])
    assert not torch.equal(weights_of(module), seen[0])


def test_values_of_more_rows_than_one_piece() -> None:
    module = Linear()
    obs = np.random.default_rng(0).normal(size=(EVALUATION_CHUNK + 3, 2)).astype(np.float32)
    values = make_learner(module, squares).values("m", obs)
    with torch.no_grad():
        np.testing.assert_allclose(values, module.value(torch.from_numpy(obs)), atol=1e-6)
    assert make_learner(module, squares).values("m", obs[:0]).shape == (0,)


def test_weights_come_by_module_and_parameter_name() -> None:
    module = Linear()
    weights = make_learner(module, squares).get_weights()["m"]
    assert set(weights) == {"layer.weight", "layer.bias"}
    np.testing.assert_array_equal(weights["layer.weight"], module.layer.weight.detach())


@pytest.mark.parametrize(("step", "value"), [(0, 1.0), (50, 0.75), (100, 0.5), (150, 0.35), (200, 0.2), (10_000, 0.2)])
def test_schedules_are_straight_between_points_and_constant_after_them(step: int, value: float) -> None:
    assert schedule_value([(0, 1.0), (100, 0.5), (200, 0.2)], step) == pytest.approx(value)
    assert schedule_value(0.3, step) == 0.3


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], "at least one"),
        ([(10, 1.0)], "first step of a schedule must be 0"),
        ([(0, 1.0), (5, 0.5), (5, 0.2)], "must rise"),
        ([(0, 1.0), (5, -0.5)], "at least 0"),
        ([(0, float("inf"))], "finite"),
        (float("nan"), "finite"),
        (-1.0, "at least 0"),
    ],
)
def test_wrong_schedules_are_refused_by_name(schedule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"entropy_coeff.*{message}"):
        validate_schedule("entropy_coeff", schedule)


def test_threads_are_set_in_the_block_and_restored_also_after_an_error() -> None:
    before = torch.get_num_threads()
    other = 2 if before == 1 else 1
    with torch_threads(other):
        assert torch.get_num_threads() == other
        with torch_threads(None):
            assert torch.get_num_threads() == other
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError), torch_threads(other):
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("module", "setting", "threads"),
    [
        (nn.Linear(8, 8), "auto", 1),
        (nn.Linear(2000, 2000), "auto", None),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), "auto", None),
        (nn.Linear(2000, 2000), 3, 3),
        (nn.Sequential(nn.Linear(64, 256), nn.LSTM(256, 400)), "auto", 1),
        (nn.GRUCell(256, 512), "auto", 1),
        (nn.LSTM(1000, 1000), "auto", None),
    ],
    ids=["small", "large", "conv", "given", "recurrent", "cells", "large and recurrent"],
)
def test_one_thread_for_small_nets(module: nn.Module, setting: int | str, threads: int | None) -> None:
    assert num_threads_for(module, setting) == threads


def test_a_gradient_that_is_not_finite_is_refused_though_the_loss_is_fine() -> None:
    module = Linear()

    def loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        # The root's slope at 0 is infinite, and 0 times it is NaN.
        return ((module.value(batch["obs"]) * 0).abs() ** 0.5).sum(), {}

    before = weights_of(module)
    with pytest.raises(LossError, match="gradient norm=nan"):
        update(make_learner(module, loss), rows(4), lr=0.1)
    assert torch.equal(weights_of(module), before)


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_columns_that_a_loss_reports_come_back_in_the_order_of_the_batch(num_epochs: int) -> None:
    def reporting(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        return squares(module, batch, coefficients)[0], {"column": batch["row"] * 10.0}

    learner = make_learner(Linear(), reporting, torch.optim.SGD)
    batch = {**regression(50), "row": np.arange(50, dtype=np.float32)}
    result = update(learner, batch, lr=0.1, minibatch_size=10, num_epochs=num_epochs, shuffle=True)
    np.testing.assert_array_equal(result["column"], np.arange(50) * 10.0)


@pytest.mark.parametrize("num_parameters", [1, 3])
def test_the_norm_of_several_gradients_is_the_norm_of_all_their_entries(num_parameters: int) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(num_parameters)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), 2.0)
    norms = clip_gradients({"all": parameters}, ["all"], None, "global_norm")
    assert norms == pytest.approx({"all": 2 * math.sqrt(num_parameters)})
