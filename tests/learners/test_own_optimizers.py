"""Optimizers of their own for groups of parameters, and schedulers of torch, against plain torch in a loop."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import DeterministicActorCritic, td3_batch, td3_loss
from torch.optim import lr_scheduler

from at_least import all_of
from corral import Algorithm, PPOConfig, SACConfig, TD3Config
from corral.algorithms.config.config import AlgorithmConfig
from corral.errors import ConfigError
from corral.learners.learner import Learner
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.testing import IdentityEnv

CLASSES = {"critic": torch.optim.RMSprop, "actor": torch.optim.SGD}
SETTINGS = {"actor": {"momentum": 0.9}}
RATES = {"critic": 0.01, "actor": 0.03}
DELAYED = (False, True, False, True, False, True)  # when the actor moves
SCHEDULERS: dict[str, Any] = {
    "step": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=7),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=20),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.8**step),
}


def make_learner(**spec: Any) -> Learner:
    given = {"optimizer_class": CLASSES, "optimizer_config": SETTINGS, **spec}
    return Learner({"m": DeterministicActorCritic()}, {"m": LearningSpec(td3_loss, **given)}, device="cpu")


def train(learner: Learner, numbers: range) -> list[dict[str, Any]]:
    """Take one update for each number, with a delayed actor."""
    results = []
    for number in numbers:
        groups = ("critic", "actor") if DELAYED[number % len(DELAYED)] else ("critic",)
        settings = UpdateSettings(lr=RATES, groups=groups)
        results.append(learner.update({"m": td3_batch(number)}, {"m": settings})["m"])
    return results


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.parameters()]


def reference(num_updates: int, schedule: Any = None) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """Return the weights after updates with plain torch, and the learning rates of each update."""
    module = DeterministicActorCritic()
    groups = module.parameter_groups()
    optimizers: Any = {
        name: CLASSES[name](groups[name], lr=RATES[name], **SETTINGS.get(name, {}))  # type: ignore[operator]
        for name in groups
    }
    schedulers = {} if schedule is None else {name: schedule(optimizer) for name, optimizer in optimizers.items()}
    rates = []
    for number in range(num_updates):
        rates.append({name: optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()})
        batch = {name: torch.from_numpy(column) for name, column in td3_batch(number).items()}  # type: ignore[arg-type]
        losses, _ = td3_loss(module, batch, {})  # type: ignore[arg-type]
        moving = [name for name in groups if name == "critic" or DELAYED[number]]
        gradients = {name: torch.autograd.grad(losses[name], groups[name], retain_graph=True) for name in moving}
        for name in moving:
            for parameter, gradient in zip(groups[name], gradients[name], strict=True):
                parameter.grad = gradient
            optimizers[name].step()
            if name in schedulers:
                schedulers[name].step()
    return weights(module), rates


def test_each_group_steps_with_its_optimizer() -> None:
    learner = make_learner()
    train(learner, range(6))
    for ours, theirs in zip(weights(learner.modules["m"]), reference(6)[0], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_step_after_the_updates_that_move_their_group(name: str) -> None:
    learner = make_learner(lr_scheduler=SCHEDULERS[name])
    results = train(learner, range(6))
    expected, rates = reference(6, SCHEDULERS[name])
    for ours, theirs in zip(weights(learner.modules["m"]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for group in CLASSES:
        found = [result[f"{group}_optimizer_learning_rate"] for result in results]
        assert found == pytest.approx([rate[group] for rate in rates])
        assert len({round(rate, 10) for rate in found}) > 1


@pytest.mark.parametrize(
    ("classes", "name"),
    [
        *((classes, name) for classes in (CLASSES, torch.optim.Adam) for name in SCHEDULERS),
        (torch.optim.Adadelta, "step"),
    ],
)
def test_a_state_continues_exactly(classes: Any, name: str) -> None:
    spec = {"optimizer_class": classes, "lr_scheduler": SCHEDULERS[name]}
    spec |= {} if classes is CLASSES else {"optimizer_config": {}}
    one, other = make_learner(**spec), make_learner(**spec)
    train(one, range(4))
    train(other, range(1))
    state = one.get_state()
    expected = train(one, range(4, 8))
    other.set_state(state)
    for ours, theirs in zip(train(other, range(4, 8)), expected, strict=True):
        assert ours == theirs
    for ours_, theirs_ in zip(weights(other.modules["m"]), weights(one.modules["m"]), strict=True):
        assert torch.equal(ours_, theirs_)


def sequence(first_gamma: float, second_gamma: float, milestone: int = 6) -> Any:
    def make(optimizer: Any) -> Any:
        parts = [lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (first_gamma, second_gamma)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[milestone])

    return make


def one_cycle(max_lr: float, total_steps: int) -> Any:
    settings: dict[str, Any] = {"anneal_strategy": "linear", "final_div_factor": 1e9}
    return partial(lr_scheduler.OneCycleLR, max_lr=max_lr, total_steps=total_steps, **settings)


def cycles(base_lr: float, max_lr: float, step_size_up: int) -> Any:
    sizes: dict[str, Any] = {"base_lr": base_lr, "max_lr": max_lr, "step_size_up": step_size_up}
    return partial(lr_scheduler.CyclicLR, **sizes, cycle_momentum=False)


@pytest.mark.parametrize(
    ("saved", "given", "factors"),
    [
        (partial(lr_scheduler.ExponentialLR, gamma=0.5), partial(lr_scheduler.ExponentialLR, gamma=0.9), [0.9] * 4),
        (partial(lr_scheduler.StepLR, step_size=2, gamma=0.5), SCHEDULERS["step"], [1, 0.5, 1, 0.5]),
        (SCHEDULERS["step"], partial(lr_scheduler.StepLR, step_size=3, gamma=0.1), [1, 0.1, 1, 1]),
        (sequence(0.5, 0.5), sequence(0.9, 0.1), [0.9, None, 0.1, 0.1]),
        (sequence(0.5, 0.1), sequence(0.5, 0.1, milestone=8), [0.5, 0.5, 0.5, None]),
        (one_cycle(1.0, 10), one_cycle(0.05, 20), [None, 13 / 14, 12 / 13, 11 / 12]),
        (cycles(0.4, 0.8, 3), cycles(0.1, 0.5, 10), [None, 34 / 30, 38 / 34, 42 / 38]),
    ],
    ids=["gamma", "the same", "step size", "sequence", "milestone", "one cycle", "cycles"],
)
def test_a_scheduler_goes_on_from_a_state_with_the_settings_that_it_is_given(
    saved: Any, given: Any, factors: list[float | None]
) -> None:
    """Each factor leads from the learning rate of an update to the next one, after four updates with other settings."""
    one, other = make_learner(lr_scheduler=saved), make_learner(lr_scheduler=given)
    rates = [train(one, range(4))[-1]["critic_optimizer_learning_rate"]]
    other.set_state(one.get_state())
    rates += [result["critic_optimizer_learning_rate"] for result in train(other, range(4, 9))]
    found = [later / earlier for earlier, later in itertools.pairwise(rates[1:])]
    for ratio, factor in zip(found, factors, strict=True):
        if factor is not None:  # at the first update, or where the second of a sequence begins with the first rate
            assert ratio == pytest.approx(factor)


def config(cls: type[AlgorithmConfig], **training: Any) -> AlgorithmConfig:
    made = cls().environment(IdentityEnv, env_config={"space": "box"}).rl_module(model_config={"fcnet_hiddens": [8]})
    sizes: dict[str, Any] = {"train_batch_size_per_learner": 32}
    sizes |= {"minibatch_size": 16, "num_epochs": 2} if cls is PPOConfig else {}
    sizes |= {} if cls is PPOConfig else {"num_steps_sampled_before_learning_starts": 16}
    made.reporting(min_sample_timesteps_per_iteration=64 if cls is PPOConfig else 20)
    return made.training(**sizes, **training).debugging(seed=0)


def rates_of(result: dict[str, Any]) -> dict[str, float]:
    metrics = result["learners"]["default_policy"]
    end = "_optimizer_learning_rate"
    return {name.removesuffix(end): value for name, value in metrics.items() if name.endswith(end)}


def test_a_run_with_a_scheduler_is_in_the_result_and_continues_exactly(tmp_path: Path) -> None:
    halving = partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)  # two updates per iteration
    made = config(PPOConfig, lr=0.01, lr_scheduler=halving)
    with made.build() as algo:
        rates = [rates_of(algo.train())["default"] for _ in range(3)]
        assert rates == pytest.approx([0.01, 0.005, 0.0025])
        algo.save(tmp_path / "saved")
        following = rates_of(algo.train())
    with made.build() as other:
        other.restore_from_path(tmp_path / "saved")
        assert rates_of(other.train()) == following == {"default": pytest.approx(0.00125)}


def test_a_learning_rate_that_a_scheduler_has_left_behind_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decay = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    with config(PPOConfig, lr=0.01, lr_scheduler=decay).build() as algo:
        algo.train()
        path = algo.save(tmp_path / "saved")
    slower = partial(lr_scheduler.ExponentialLR, gamma=0.9)
    with Algorithm.from_checkpoint(path, lr=0.5, lr_scheduler=slower) as other:
        assert "lr=0.5 has no effect" in caplog.text
        rates = [rates_of(other.train())["default"] for _ in range(2)]
    assert rates == pytest.approx([0.95 * 0.0025, 0.95 * 0.0025 * 0.9**2])  # means of two updates
    caplog.clear()
    with Algorithm.from_checkpoint(path, lr=0.5, lr_scheduler=None) as plain:
        assert rates_of(plain.train()) == {"default": 0.5}
    assert "no effect" not in caplog.text


def test_a_scheduler_that_comes_later_begins_at_the_given_learning_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with config(PPOConfig, lr=0.01).build() as algo:
        algo.train()
        path = algo.save(tmp_path / "saved")
    decay = partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)  # two updates per iteration
    with Algorithm.from_checkpoint(path, lr=0.5, lr_scheduler=decay) as other:
        assert [rates_of(other.train())["default"] for _ in range(2)] == pytest.approx([0.5, 0.25])
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("cls", [SACConfig, TD3Config])
def test_groups_of_an_algorithm_have_optimizers_of_their_own(cls: type[AlgorithmConfig], tmp_path: Path) -> None:
    optimizers: dict[str, Any] = {"actor": "adamw", "critic": torch.optim.SGD}
    optimizers |= {"alpha": "torch.optim:Adam"} if cls is SACConfig else {}
    made = config(cls, optimizer=optimizers, optimizer_config={"actor": {"weight_decay": 0.1}}, lr=1e-3)
    with made.build() as algo:
        before = weights(algo.get_module())
        for _ in range(2):
            result = algo.train()
        assert rates_of(result).keys() == optimizers.keys()
        moved = [not torch.equal(*pair) for pair in zip(before, weights(algo.get_module()), strict=True)]
        assert all_of(moved)
        algo.save(tmp_path / "saved")
        with Algorithm.from_checkpoint(tmp_path / "saved") as restored:
            assert rates_of(restored.train()).keys() == optimizers.keys()


@pytest.mark.slow
def test_two_learners_step_alike() -> None:
    halving = partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)
    made = config(TD3Config, optimizer={"actor": "sgd", "critic": "adam"}, lr_scheduler=halving)
    with made.learners(num_learners=2).engine("process").build() as algo:
        rates = [rates_of(algo.train())["critic"] for _ in range(2)]
    assert rates[1] < rates[0] or np.isnan(rates[0])


def test_frozen_parameters_stay_under_any_optimizer() -> None:
    learner = make_learner(optimizer_config={"actor": {"weight_decay": 0.5}})
    learner.modules["m"].get_submodule("actor").requires_grad_(False)
    before = weights(learner.modules["m"].get_submodule("actor"))
    train(learner, range(4))
    for old, new in zip(before, weights(learner.modules["m"].get_submodule("actor")), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": {"actor": "adam", "critic": "adm"}}, "optimizer='adm' is not an optimizer. Did you mean 'adam'"),
        ({"optimizer": "RAdam"}, r"optimizer='RAdam' is not an optimizer.*its class.*'torch\.optim:RAdam'"),
        (
            {"optimizer": {"actor": "adam", "critic": "sgd"}, "optimizer_config": {"momentum": 0.9}},
            r"one optimizer for each of the groups \['actor', 'critic'\].*\['momentum'\] do not fit",
        ),
        (
            {"optimizer": {"actor": "adam", "critic": "sgd"}, "optimizer_config": {"critic": {"momentun": 0.9}}},
            r"\{'momentun': 0.9\} does not suit optimizer=SGD",
        ),
        ({"lr_scheduler": 3}, "lr_scheduler=3 must return a scheduler of torch"),
        ({"lr_scheduler": lr_scheduler.StepLR}, "must return a scheduler of torch.*step_size"),
        ({"lr_scheduler": lr_scheduler.ReduceLROnPlateau}, "steps without arguments.*metrics"),
        (
            {"lr_scheduler": SCHEDULERS["step"], "critic_lr": [(0, 1e-3), (10, 0.0)]},
            "sets the learning rates, so critic_lr cannot be a schedule too",
        ),
    ],
)
def test_optimizers_that_cannot_work_are_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(TD3Config, **training).validate()


def test_groups_must_be_groups_of_the_module() -> None:
    with pytest.raises(ConfigError, match=r"groups of parameters \['actor', 'critics'\].*names \['actor', 'critic'\]"):
        config(TD3Config, optimizer={"actor": "adam", "critics": "adam"}).build()


def test_the_end_of_a_scheduler_is_named() -> None:
    learner = make_learner(lr_scheduler=partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=3))
    with pytest.raises(ConfigError, match="lr_scheduler: OneCycleLR cannot take the step after an update"):
        train(learner, range(6))


def test_a_scheduler_refuses_another_learning_rate() -> None:
    with config(PPOConfig, lr_scheduler=SCHEDULERS["step"]).build() as algo:
        with pytest.raises(ConfigError, match="reconfigure: lr can only be set before building"):
            algo.reconfigure(lr=0.1)
        algo.reconfigure(gamma=0.9)
    with config(PPOConfig).build() as algo:
        algo.reconfigure(lr=0.1)
    with config(TD3Config, lr_scheduler=SCHEDULERS["step"]).build() as algo:
        with pytest.raises(ConfigError, match="reconfigure: actor_lr can only be set before building"):
            algo.reconfigure(actor_lr=0.1)
