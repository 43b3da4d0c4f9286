"""Modules that share layers, against alternating steps written with plain torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace as replace_fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from learner_cases import (
    ALGORITHMS,
    OBS,
    ON_POLICY,
    OPTIMIZERS,
    OTHER_PAIRS,
    PPO_COEFFICIENTS,
    SMALL,
    Net,
    algorithm_batch,
    algorithm_loss,
    squares,
)
from torch import Tensor, nn

from corral import PPOConfig
from corral.callbacks.dispatch import Dispatcher
from corral.engines.process import ProcessEngine
from corral.errors import CheckpointError, ConfigError
from corral.learners.build import start_learners
from corral.learners.distributed import Peers
from corral.learners.learner import Learner
from corral.learners.learner_group import LearnerGroup
from corral.learners.remote_learners import RemoteLearners
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.layers import share_layers
from corral.modules.module import ActorCritic, Module
from corral.modules.spec import ModuleSpec

PATHS = {**dict.fromkeys(ON_POLICY, ("policy_encoder",)), "dqn": ("q.encoder",), "sac": ("actor.encoder", "q.0.mlp")}


def make_pair(name: str) -> dict[str, Module]:
    """Return two modules of an algorithm that share layers and have different heads."""
    left, right = ALGORITHMS[name][0](), ALGORITHMS[name][0]()
    with torch.no_grad():
        for parameter in right.parameters():
            parameter.mul_(0.9)
    share_layers("right", right, {"left": left}, {path: [["left", "right"]] for path in PATHS[name]})
    return {"left": left, "right": right}


def steps_of_reference(
    name: str, module: Module, batch: Mapping[str, Any], minibatch_size: int, lr: float, kind: str
) -> Iterator[None]:
    """Step one module with an optimizer of torch, and yield after each step."""
    optimizer_class, config = OPTIMIZERS[kind]
    groups = {group: [p for p in parts if p.requires_grad] for group, parts in module.parameter_groups().items()}
    optimizer = optimizer_class([{"params": group} for group in groups.values()], lr=lr, **config)  # type: ignore[call-arg]
    loss_fn, size = algorithm_loss(name), len(next(iter(batch.values())))
    coefficients = PPO_COEFFICIENTS if name in ON_POLICY else {}
    while True:
        for start, stop in itertools.pairwise(np.linspace(0, size, round(size / minibatch_size) + 1).astype(int)):
            rows = {key: torch.from_numpy(column[start:stop]) for key, column in batch.items()}
            loss = loss_fn(module, rows, coefficients)[0]
            scalars = loss if isinstance(loss, Mapping) else dict.fromkeys(groups, loss)
            gradients = {
                group: torch.autograd.grad(scalars[group], group_parameters, retain_graph=True)
                for group, group_parameters in groups.items()
            }
            for group, parameters in groups.items():
                for parameter, gradient in zip(parameters, gradients[group], strict=True):
                    parameter.grad = gradient
            optimizer.step()
            yield


@pytest.mark.slow_cases(*OTHER_PAIRS)
@pytest.mark.parametrize("kind", ["adam", "sgd", "nadam", "own"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_modules_take_their_steps_in_turn(name: str, kind: str) -> None:
    modules = make_pair(name)
    references: dict[str, Module] = copy.deepcopy(modules)  # in one copy, so that they share too
    batches = {"left": algorithm_batch(name, 12), "right": algorithm_batch(name, 9)}
    spec = LearningSpec(algorithm_loss(name), *OPTIMIZERS[kind])
    learner = Learner(modules, dict.fromkeys(modules, spec), device="cpu")
    sizes, lrs = {"left": 4, "right": 5}, {"left": 0.01, "right": 0.003}
    coefficients = PPO_COEFFICIENTS if name in ON_POLICY else {}
    how = {
        key: UpdateSettings(lr=lrs[key], num_epochs=2, minibatch_size=size, shuffle=False, coefficients=coefficients)
        for key, size in sizes.items()
    }
    turns = {
        key: steps_of_reference(name, module, batches[key], sizes[key], lrs[key], kind)
        for key, module in references.items()
    }
    for _ in range(2):
        learner.update(batches, how)
        for key in ["left", "right"] * 4 + ["left"] * 2:  # 12 rows are 3 minibatches, 9 rows are 2
            next(turns[key])
    for key, reference in references.items():
        for weight, value in reference.state_dict().items():
            np.testing.assert_allclose(learner.get_weights()[key][weight], value.numpy(), atol=2e-6, err_msg=weight)
    assert_shared(learner.get_weights(), PATHS[name])


def assert_shared(weights: Mapping[str, Mapping[str, Any]], paths: tuple[str, ...]) -> None:
    shared = [weight for weight in weights["left"] if weight.startswith(tuple(f"{path}." for path in paths))]
    assert shared
    for weight in shared:
        assert np.array_equal(weights["left"][weight], weights["right"][weight]), weight
    assert any(not np.array_equal(array, weights["right"][weight]) for weight, array in weights["left"].items())


@pytest.mark.parametrize("kind", ["adam", "nadam"])
def test_a_state_continues_exactly(kind: str) -> None:
    def make() -> Learner:
        spec = LearningSpec(algorithm_loss("ppo"), *OPTIMIZERS[kind])
        return Learner(make_pair("ppo"), {"left": spec, "right": spec}, device="cpu")

    batches = {"left": algorithm_batch("ppo", 12), "right": algorithm_batch("ppo", 9)}
    how = dict.fromkeys(batches, UpdateSettings(lr=0.01, minibatch_size=3, coefficients=PPO_COEFFICIENTS))
    one, other = make(), make()
    one.update(batches, how)
    other.set_state(one.get_state())
    other.set_own_state(one.get_own_state())
    assert_equal(one.update(batches, how), other.update(batches, how))
    assert_equal(one.get_weights(), other.get_weights())


def assert_equal(one: Any, other: Any) -> None:
    np.testing.assert_equal(other, one)


def test_a_state_without_sharing_is_refused() -> None:
    spec = LearningSpec(algorithm_loss("ppo"))
    modules = {"left": ALGORITHMS["ppo"][0](), "right": ALGORITHMS["ppo"][0]()}
    with torch.no_grad():
        modules["right"].get_parameter("policy_encoder.mlp.0.weight").add_(1)
    apart = Learner(modules, dict.fromkeys(modules, spec), device="cpu")
    learner = Learner(make_pair("ppo"), dict.fromkeys(modules, spec), device="cpu")
    with pytest.raises(CheckpointError, match=r"learners/right: policy_encoder.* of module 'left'.*shared_layers"):
        learner.set_state(apart.get_state())
    apart.set_state(learner.get_state())


@pytest.mark.parametrize("kind", ["adam", "nadam"])
def test_optimizers_keep_their_state_when_sharing_begins_and_ends(kind: str) -> None:
    spec = LearningSpec(algorithm_loss("ppo"), *OPTIMIZERS[kind])
    modules = make_pair("ppo")
    alone = copy.deepcopy(modules["left"])
    learner = Learner({"left": modules["left"]}, {"left": spec}, device="cpu")
    reference = Learner({"left": alone}, {"left": spec}, device="cpu")
    batch = {"left": algorithm_batch("ppo", 12)}
    how = {"left": UpdateSettings(lr=0.01, coefficients=PPO_COEFFICIENTS)}
    for change in (lambda: None, lambda: learner.add_module("right", modules["right"], spec), None):
        if change is None:
            learner.remove_module("right")
        else:
            change()
        for each in (learner, reference):
            each.update(batch, how)
        for weight, array in reference.get_weights()["left"].items():
            np.testing.assert_allclose(learner.get_weights()["left"][weight], array, rtol=1e-6, atol=1e-7)


def test_a_callback_may_freeze_shared_layers_between_the_steps() -> None:
    modules = make_pair("ppo")
    encoder = modules["left"].policy_encoder
    assert isinstance(encoder, nn.Module)
    seen: list[str] = []

    def freeze(policy_id: str, gradients: dict[str, Tensor]) -> None:
        seen.append(policy_id)
        if seen == ["left", "right"]:
            encoder.requires_grad_(False)

    spec = LearningSpec(algorithm_loss("ppo"))
    learner = Learner(
        modules, dict.fromkeys(modules, spec), device="cpu", callbacks=Dispatcher([], {"on_gradients": [freeze]})
    )
    batches = dict.fromkeys(modules, algorithm_batch("ppo", 12))
    frozen: list[Any] = []

    def note(module: Module, groups: Any) -> None:
        frozen.append({name: value.clone() for name, value in module.state_dict().items() if "policy_encoder" in name})

    how = UpdateSettings(lr=0.01, minibatch_size=4, coefficients=PPO_COEFFICIENTS, after_step=note)
    learner.update(batches, dict.fromkeys(modules, how))
    assert seen == ["left", "right"] * 3
    for later in frozen[1:]:
        for name, value in later.items():
            assert torch.equal(frozen[0][name], value)


def test_tensors_of_another_module_may_be_replaced_between_the_steps() -> None:
    found = []
    for replaces in (False, True):
        modules, num_steps = make_pair("ppo"), itertools.count(1)

        def replace(module: Module, groups: Any, right: Module = modules["right"], counts: Any = num_steps) -> None:
            if next(counts) == 1:  # after the first step of the left module, before the first one of the right
                for parameter in right.parameters():
                    parameter.data = parameter.data.clone()

        spec = LearningSpec(algorithm_loss("ppo"))
        learner = Learner(modules, dict.fromkeys(modules, spec), device="cpu")
        how = UpdateSettings(lr=0.01, minibatch_size=6, shuffle=False, coefficients=PPO_COEFFICIENTS)
        how = replace_fields(how, after_step=replace) if replaces else how
        learner.update(dict.fromkeys(modules, algorithm_batch("ppo", 12)), dict.fromkeys(modules, how))
        assert next(num_steps) == 1 + 4 * replaces
        found.append(learner.get_weights())
    for key, weights in found[0].items():
        for weight, array in weights.items():
            np.testing.assert_allclose(found[1][key][weight], array, rtol=1e-6, atol=1e-7, err_msg=weight)


class WithMemory(Module):
    """A recurrent layer, batch statistics, and a weight that is tied to another place in the module."""

    def __init__(self, width: int = 3, *, activation: type[nn.Module] = nn.Tanh) -> None:
        net = Net()
        super().__init__(net.observation_space, net.action_space, {})
        self.encoder = nn.ModuleDict(
            {"rnn": nn.LSTM(width, 4), "norm": nn.BatchNorm1d(4), "act": activation(), "last": nn.Linear(4, 3)}
        )
        self.back = nn.Linear(4, 3)
        self.back.weight = self.encoder["last"].weight  # type: ignore[assignment]
        self.head = nn.Linear(3, 1)

    def value(self, obs: Tensor) -> Tensor:
        features = self.encoder["norm"](self.encoder["rnn"](obs.unsqueeze(1))[0].squeeze(1))
        encoded = self.encoder["last"](self.encoder["act"](features)) + self.back(features)
        values: Tensor = self.head(encoded).squeeze(-1)
        return values

    policy = value


def test_recurrent_layers_statistics_and_tied_weights_are_shared() -> None:
    left, right = WithMemory(), WithMemory()
    share_layers("right", right, {"left": left}, {"encoder": [["left", "right"]]})
    spec = LearningSpec(squares, torch.optim.SGD)
    learner = Learner({"left": left, "right": right}, {"left": spec, "right": spec}, device="cpu")
    rng = np.random.default_rng(0)
    batch = {"obs": rng.normal(size=(8, 3)).astype(np.float32), "y": rng.normal(size=8).astype(np.float32)}
    before = {name: array.copy() for name, array in learner.get_weights()["right"].items()}
    learner.update({"left": batch}, {"left": UpdateSettings(lr=0.1)})
    weights = learner.get_weights()
    changed = {name for name, array in before.items() if not np.array_equal(array, weights["right"][name])}
    assert changed == {name for name in before if name.startswith("encoder.")} | {"back.weight"}
    assert right.encoder["norm"].training is right.training  # the mode is each module's own
    left.eval()
    assert right.encoder["norm"].training
    right.eval()
    with torch.no_grad():
        right.head.load_state_dict(left.head.state_dict())
        right.back.bias.copy_(left.back.bias)
        obs = torch.from_numpy(batch["obs"])
        assert torch.equal(left.value(obs), right.value(obs))


def test_layers_that_differ_are_refused() -> None:
    left = WithMemory()
    shared = {"encoder": [["left", "right"]]}
    for right, message in [
        (
            WithMemory(5),
            r"'right' and 'left' cannot share 'encoder': encoder\.rnn\.weight_ih_l0 is \[16, 5\] float32 in",
        ),
        (WithMemory(activation=nn.ReLU), r"encoder\.act is ReLU in 'right' and Tanh in 'left'"),
        (WithMemory().double(), r"float64 in 'right' and \[16, 3\] float32 in 'left'"),
        (Net(), r"module 'right' \(Net\) has no layers 'encoder'.*layers"),
    ]:
        with pytest.raises(ConfigError, match=message):
            share_layers("right", right, {"left": left}, shared)
    with pytest.raises(ConfigError, match=r"module 'left' .* has no layers 'enc'.*encoder"):
        share_layers("left", left, {}, {"enc": [["left", "right"]]})
    with pytest.raises(ConfigError, match=r"'encoder\.act' of module 'left' .* no parameters"):
        share_layers("left", left, {}, {"encoder.act": [["left", "right"]]})


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_targets_begin_as_copies_of_the_shared_layers(name: str) -> None:
    right: Any = make_pair(name)["right"]
    for target, value in zip(right.target_q.parameters(), right.q.parameters(), strict=True):
        assert target is not value
        assert torch.equal(target, value)


def make_learner(rank: int | None = None) -> Learner:
    """Make one of two learners of the pair; `None` is a learner for itself."""
    spec = LearningSpec(algorithm_loss("ppo"), torch.optim.SGD, {"momentum": 0.9})
    learner = Learner(make_pair("ppo"), {"left": spec, "right": spec}, device="cpu")
    if rank is not None:
        learner.set_peers(Peers(rank, 2, learner.device))
    return learner


@pytest.mark.slow
@pytest.mark.xdist_group("learners")
def test_several_learners_take_the_same_turns_as_one() -> None:
    workers = start_learners(ProcessEngine(), PPOConfig(), [partial(make_learner, rank) for rank in range(2)])
    try:
        group, single = LearnerGroup(make_learner(), RemoteLearners(workers, host="127.0.0.1")), make_learner()
        spec = ModuleSpec(ActorCritic, OBS, spaces.Box(-1, 1, (2,), np.float32), SMALL, seed=5)
        shared = {"policy_encoder": [["left", "right", "new"]]}
        learning = LearningSpec(algorithm_loss("ppo"), torch.optim.SGD)
        news = spec.build(), spec.build()
        share_layers("new", news[0], {"left": group.get_module("left")}, shared)
        group.add_module("new", spec, news[0], learning, shared)
        share_layers("new", news[1], single.modules, shared)
        single.add_module("new", news[1], learning)
        batches = {"left": algorithm_batch("ppo", 12), "new": algorithm_batch("ppo", 10)}
        how = UpdateSettings(lr=0.05, num_epochs=3, coefficients=PPO_COEFFICIENTS)
        for to in (group, single):
            to.update(batches, dict.fromkeys(batches, how))
        weights = group.get_weights()
        for module_id, part in single.get_weights().items():
            for name, array in part.items():
                np.testing.assert_allclose(weights[module_id][name], array, atol=1e-6, err_msg=name)
        assert_shared(weights, PATHS["ppo"])
        group.stop()
    finally:
        for worker in workers:
            worker.kill()
