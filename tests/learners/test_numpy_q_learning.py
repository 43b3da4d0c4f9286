"""Q-learning in NumPy equals autograd, is used where everything is plain, and leaves all other updates to autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from corral.algorithms.dqn import dqn_loss
from corral.callbacks.dispatch import Dispatcher
from corral.learners import numpy_q_learning
from corral.learners.learner import Learner
from corral.learners.losses import Batch
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.module import Module
from corral.modules.q_module import QModule

OBS, ACTIONS = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)
Change = Callable[[QModule], Any]


@pytest.fixture
def numpy_steps(monkeypatch: pytest.MonkeyPatch) -> list[Module]:
    """Return a list that gets one entry for each gradient computed in NumPy."""
    steps: list[Module] = []
    compute = numpy_q_learning.dqn_loss_in_numpy

    def counted(networks: Any, module: Module, *args: Any, **kwargs: Any) -> Any:
        steps.append(module)
        return compute(networks, module, *args, **kwargs)

    monkeypatch.setattr(numpy_q_learning, "dqn_loss_in_numpy", counted)
    return steps


def make_module(cls: type[QModule] = QModule, obs: spaces.Space[Any] = OBS, **settings: Any) -> QModule:
    torch.manual_seed(0)
    module = cls(obs, ACTIONS, {"fcnet_hiddens": [16, 8], **settings})
    with torch.no_grad():  # a target that differs from the network
        for parameter in module.target_q.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def make_batch(space: spaces.Space[Any] = OBS, size: int = 16, **columns: Any) -> Batch:
    rng = np.random.default_rng(0)
    space.seed(0)
    return {
        "obs": np.stack([space.sample() for _ in range(size)]),
        "next_obs": np.stack([space.sample() for _ in range(size)]),
        "actions": rng.integers(0, 4, size),
        "rewards": rng.standard_normal(size, dtype=np.float32) * 3,
        "terminated": rng.random(size) < 0.3,
        "discounts": np.full(size, 0.9, np.float32),
        "weights": rng.random(size, dtype=np.float32),
        **columns,
    }


def dqn(double_q: bool = True, huber: bool = True) -> Any:
    return partial(dqn_loss, double_q=double_q, huber=huber)


def autograd_only(module: Any, batch: Batch, coefficients: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
    return dqn_loss(module, batch, coefficients, double_q=True, huber=True)


def make_learner(
    module: QModule, loss: Any, optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam, **settings: Any
) -> Learner:
    return Learner({"p": module}, {"p": LearningSpec(loss, optimizer_class)}, device="cpu", **settings)


def update(learner: Learner, batch: Batch, **settings: Any) -> dict[str, Any]:
    return learner.update({"p": batch}, {"p": UpdateSettings(**settings)})["p"]


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def train_both(change: Change, batch: Batch | None = None, lr: float = 0.01, **settings: Any) -> tuple[QModule, Tensor]:
    """Update a learner that may use NumPy and one that may not, change their modules on the way, and compare them.

    Returns:
        The module of the first learner, and its weights at the change.
    """
    batch = batch or make_batch()
    learners = [make_learner(make_module(), loss, **settings) for loss in (dqn(), autograd_only)]
    modules = [learner.modules["p"] for learner in learners]
    for learner in learners:
        for _ in range(3):
            update(learner, make_batch(), lr=lr)
    for module in modules:
        torch.manual_seed(1)
        assert isinstance(module, QModule)
        change(module)
    at_change = weights_of(modules[0])
    for learner in learners:
        for _ in range(3):
            update(learner, batch, lr=lr)
    assert_equal_weights(*modules)
    module = modules[0]
    assert isinstance(module, QModule)
    return module, at_change


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


class TestTheForm:
    @pytest.mark.parametrize("double_q", [False, True])
    @pytest.mark.parametrize("huber", [False, True])
    @pytest.mark.parametrize(
        "network",
        [
            {},
            {"fcnet_activation": "tanh"},
            {"fcnet_activation": "linear"},
            {"head_hiddens": [6], "head_activation": "tanh"},
            {"fcnet_hiddens": []},
            {"fcnet_hiddens": [8]},
            {"fcnet_hiddens": [512, 7, 512]},
            {"use_layernorm": True},
            {"use_layernorm": True, "fcnet_activation": "tanh"},
            {"use_layernorm": True, "head_hiddens": [6], "head_use_layernorm": False},
        ],
        ids=str,
    )
    def test_steps_are_the_steps_of_autograd(
        self, double_q: bool, huber: bool, network: dict[str, Any], numpy_steps: list[Module]
    ) -> None:
        def plain(module: Any, batch: Batch, coefficients: Mapping[str, float]) -> Any:
            return dqn_loss(module, batch, coefficients, double_q=double_q, huber=huber)

        modules = [make_module(**network) for _ in range(2)]
        results = []
        for module, loss in zip(modules, (dqn(double_q, huber), plain), strict=True):
            learner = make_learner(module, loss)
            results.append([update(learner, make_batch(), lr=0.01, grad_clip=1.0) for _ in range(3)])
        assert numpy_steps == [modules[0]] * 3
        for ours, theirs in zip(*results, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                np.testing.assert_allclose(value, theirs[name], rtol=1e-4, atol=1e-5, err_msg=name)
        assert_equal_weights(*modules)

    def test_with_a_discount_of_each_transition(self, numpy_steps: list[Module]) -> None:
        discounts = np.linspace(0, 1, 16, dtype=np.float32)
        module, _ = train_both(lambda module: None, make_batch(discounts=discounts))
        assert numpy_steps == [module] * 6

    @pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD", "RMSprop"])
    def test_with_every_optimizer_that_steps_vectors(self, optimizer: str, numpy_steps: list[Module]) -> None:
        module, _ = train_both(lambda module: None, optimizer_class=getattr(torch.optim, optimizer))
        assert numpy_steps == [module] * 6

    @pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "?", "u1", "i4", "i8"])
    def test_observations_of_any_number(self, dtype: str, numpy_steps: list[Module]) -> None:
        rng = np.random.default_rng(0)
        columns = {name: (3 * rng.standard_normal((16, 3))).astype(dtype) for name in ("obs", "next_obs")}
        module, _ = train_both(lambda module: None, make_batch(**columns))
        assert numpy_steps == [module] * 6

    def test_observations_of_higher_rank(self, numpy_steps: list[Module]) -> None:
        space = spaces.Box(-1, 1, (2, 3), np.float64)
        modules = [make_module(obs=space) for _ in range(2)]
        for module, loss in zip(modules, (dqn(), autograd_only), strict=True):
            update(make_learner(module, loss), make_batch(space), lr=0.01)
        assert numpy_steps == [modules[0]]
        assert_equal_weights(*modules)

    def test_weights_that_somebody_wrote_in_place_count(self, numpy_steps: list[Module]) -> None:
        def change(module: QModule) -> None:
            module.load_state_dict({name: value + 0.1 for name, value in module.state_dict().items()})

        module, _ = train_both(change)
        assert numpy_steps == [module] * 6

    def test_two_modules_do_not_share_their_arrays(self) -> None:
        ours, theirs = make_module(), make_module()
        learners = [
            Learner(
                {"a": ours, "b": make_module(fcnet_hiddens=[8])}, dict.fromkeys("ab", LearningSpec(dqn())), device="cpu"
            ),
            Learner({"a": theirs}, {"a": LearningSpec(autograd_only)}, device="cpu"),
        ]
        for _ in range(3):
            for learner in learners:
                settings = dict.fromkeys(learner.modules, UpdateSettings(lr=0.01))
                learner.update({key: make_batch() for key in learner.modules}, settings)
        assert_equal_weights(ours, theirs)


def _parts(module: QModule) -> dict[str, nn.Module]:
    network: Any = module.q
    return {
        "first layer": network.encoder.mlp[0],
        "activation": network.streams[1],
        "head": network.head,
        "observation": network.encoder.parts[0],
        "mlp": network.encoder.mlp,
        "encoder": network.encoder,
        "streams": network.streams,
        "network": network,
        "target": module.target_q,
        "target's layer": module.target_q.encoder.mlp[0],  # type: ignore[union-attr,index]
    }


PARTS = tuple(_parts(make_module()))


class TestHooks:
    """Each hook is registered between two updates, fires in the updates after it, and counts in them."""

    @pytest.mark.parametrize("part", PARTS)
    @pytest.mark.parametrize("kind", ["forward", "forward_pre"])
    def test_hooks_of_passes(self, part: str, kind: str, numpy_steps: list[Module]) -> None:
        fired = []

        def hook(part: nn.Module, inputs: Any, *outputs: Any) -> Any:
            fired.append(part)
            return 0.5 * outputs[0] if outputs else (0.5 * inputs[0],)

        module, at_change = train_both(lambda module: getattr(_parts(module)[part], f"register_{kind}_hook")(hook))
        assert numpy_steps == [module] * 3  # those before the change
        assert _parts(module)[part] in fired
        assert not torch.equal(weights_of(module), at_change)

    @pytest.mark.parametrize("part", [part for part in PARTS if "target" not in part and part != "observation"])
    @pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
    @pytest.mark.filterwarnings("ignore:Full backward hook is firing")
    def test_hooks_of_backward_passes(self, part: str, kind: str, numpy_steps: list[Module]) -> None:
        fired = []

        def change(module: QModule) -> None:
            getattr(_parts(module)[part], f"register_{kind}_hook")(lambda part, *_: fired.append(part))

        module, _ = train_both(change)
        assert numpy_steps == [module] * 3
        assert _parts(module)[part] in fired

    def test_hooks_of_parameters(self, numpy_steps: list[Module]) -> None:
        module, at_change = train_both(
            lambda module: module.q.get_parameter("head.bias").register_hook(torch.zeros_like),
            optimizer_class=torch.optim.SGD,
        )
        assert numpy_steps == [module] * 3
        end = weights_of(module)
        bias = torch.cat(
            [torch.full((p.numel(),), p is module.q.get_parameter("head.bias")) for p in module.parameters()]
        )
        torch.testing.assert_close(end[bias], at_change[bias], rtol=0, atol=0)
        assert not torch.equal(end, at_change)

    def test_hooks_of_gradients_that_have_been_accumulated(self, numpy_steps: list[Module]) -> None:
        fired = []

        def change(module: QModule) -> None:
            parameter = module.q.get_parameter("streams.0.weight")
            parameter.register_post_accumulate_grad_hook(lambda parameter: fired.append(id(parameter)))

        module, _ = train_both(change)
        assert numpy_steps == [module] * 3
        assert fired.count(id(module.q.get_parameter("streams.0.weight"))) == 3

    def test_hooks_of_all_modules(self, numpy_steps: list[Module]) -> None:
        fired = []
        learner = make_learner(make_module(), dqn())
        update(learner, make_batch(), lr=0.01)
        handle = nn.modules.module.register_module_forward_hook(lambda part, *_: fired.append(part))
        try:
            update(learner, make_batch(), lr=0.01)
        finally:
            handle.remove()
        assert len(numpy_steps) == 1 and learner.modules["p"].q in fired
        update(learner, make_batch(), lr=0.01)
        assert len(numpy_steps) == 2

    def test_numpy_is_used_again_without_the_hook(self, numpy_steps: list[Module]) -> None:
        learner = make_learner(make_module(), dqn())
        handle = learner.modules["p"].q.head.register_forward_hook(lambda *_: None)
        update(learner, make_batch(), lr=0.01)
        assert not numpy_steps
        handle.remove()
        update(learner, make_batch(), lr=0.01)
        assert len(numpy_steps) == 1


class TestParameters:
    @pytest.mark.parametrize("name", ["encoder.mlp.0.weight", "streams.0.bias", "head.weight"])
    def test_a_frozen_parameter_does_not_move(self, name: str, numpy_steps: list[Module]) -> None:
        frozen: list[Tensor] = []

        def change(module: QModule) -> None:
            frozen.append(module.q.get_parameter(name).requires_grad_(False).detach().clone())

        module, at_change = train_both(change, optimizer_class=torch.optim.SGD)
        assert numpy_steps == [module] * 3
        torch.testing.assert_close(module.q.get_parameter(name).detach(), frozen[0], rtol=0, atol=0)
        assert not torch.equal(weights_of(module), at_change)

    def test_a_parameter_that_is_trained_again_moves(self, numpy_steps: list[Module]) -> None:
        learner = make_learner(make_module(), dqn(), optimizer_class=torch.optim.SGD)
        parameter = learner.modules["p"].q.head.bias
        for trained in (True, False, True):
            before = parameter.detach().clone()
            parameter.requires_grad_(trained)
            update(learner, make_batch(), lr=0.01)
            assert torch.equal(parameter, before) is not trained
        assert len(numpy_steps) == 2

    @pytest.mark.parametrize(
        "change",
        [
            lambda module: module.zero_grad(),
            lambda module: setattr(module.q.get_parameter("head.bias"), "grad", None),
            lambda module: setattr(module.q.head.bias, "grad", torch.ones(4)),
            lambda module: module.zero_grad(set_to_none=False),
        ],
        ids=["zero_grad", "one gradient", "another gradient", "in place"],
    )
    @pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
    def test_gradients_that_were_taken_away_come_back(
        self, change: Change, optimizer: type[torch.optim.Optimizer], numpy_steps: list[Module]
    ) -> None:
        module, at_change = train_both(change, optimizer_class=optimizer)
        assert numpy_steps.count(module) >= 5  # at most one update restores them
        moved = weights_of(module) != at_change
        num_trained = sum(parameter.numel() for parameter in module.q.parameters())
        assert moved[:num_trained].float().mean() > 0.5 and not moved[num_trained:].any()

    def test_zero_grad_in_a_callback_does_not_stop_learning(self) -> None:
        class Callbacks:
            def fire(self, policy: Module) -> None:
                policy.zero_grad()

        errors = []
        for functions in ({}, {"on_update_end": [Callbacks().fire]}):
            learner = make_learner(make_module(), dqn(), callbacks=Dispatcher([], functions))
            for _ in range(100):
                result = update(learner, make_batch(terminated=np.ones(16, np.bool_)), lr=0.01)
            errors.append(result["total_loss"])
        assert errors[1] == pytest.approx(errors[0], rel=1e-2, abs=1e-4) and errors[1] < 0.1

    def test_data_that_was_replaced_is_trained(self, numpy_steps: list[Module]) -> None:
        def change(module: QModule) -> None:
            for network in (module.q, module.target_q):
                for parameter in network.parameters():
                    parameter.data = parameter.data.clone() * 0.5

        module, at_change = train_both(change)
        assert numpy_steps.count(module) >= 5
        assert (weights_of(module.q) != at_change[: len(weights_of(module.q))]).float().mean() > 0.5

    def test_a_transposed_layer_is_left_to_autograd(self, numpy_steps: list[Module]) -> None:
        learner = make_learner(make_module(fcnet_hiddens=[8, 8]), dqn())
        other = make_learner(make_module(fcnet_hiddens=[8, 8]), autograd_only)
        for one in (learner, other):
            update(one, make_batch(), lr=0.01)
            weight = one.modules["p"].target_q.streams[0].weight
            weight.data = weight.data.t()
            update(one, make_batch(), lr=0.01)
        assert len(numpy_steps) == 1
        assert_equal_weights(learner.modules["p"], other.modules["p"])

    def test_layers_that_share_weights_are_left_to_autograd(self, numpy_steps: list[Module]) -> None:
        modules = [make_module(fcnet_hiddens=[8, 8, 8]) for _ in range(2)]
        for module, loss in zip(modules, (dqn(), autograd_only), strict=True):
            module.q.encoder.mlp[2] = module.q.streams[0]
            update(make_learner(module, loss), make_batch(), lr=0.01)
        assert not numpy_steps
        assert_equal_weights(*modules)

    def test_other_trainable_parameters_are_left_to_autograd(self, numpy_steps: list[Module]) -> None:
        """Their gradients are cleared in each update; here a callback adds weight decay to all gradients."""

        def decay(gradients: dict[str, Tensor], policy: Module) -> None:
            for name, parameter in policy.named_parameters():
                if name in gradients:
                    gradients[name].add_(0.1 * parameter.detach())

        callbacks = Dispatcher([], {"on_gradients": [decay]})
        module, _ = train_both(
            lambda module: module.target_q.requires_grad_(True),
            lr=0.1,
            optimizer_class=torch.optim.SGD,
            callbacks=callbacks,
        )
        assert numpy_steps == [module] * 3

    def test_a_layer_that_registers_its_bias_first(self, numpy_steps: list[Module]) -> None:
        modules = [make_module() for _ in range(2)]
        for module, loss in zip(modules, (dqn(), autograd_only), strict=True):
            layer = module.q.encoder.mlp[0]
            weight = layer.weight.detach().clone()
            del layer.weight
            layer.weight = nn.Parameter(weight)
            update(make_learner(module, loss), make_batch(), lr=0.01)
        assert numpy_steps == [modules[0]]
        assert_equal_weights(*modules)


class Doubled(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return 2 * super().forward(features)


class Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


def _set_forward(module: QModule) -> None:
    forward = module.q.head.forward
    module.q.head.forward = lambda features: 2 * forward(features)  # type: ignore[method-assign]


def _set_class(module: QModule) -> None:
    module.q.head.__class__ = Doubled


def _set_q_values(module: QModule) -> None:
    q_values = module.q_values
    module.q_values = lambda obs, target=False: q_values(obs, target=target) + 1  # type: ignore[method-assign]


CHANGES: dict[str, Change] = {
    "forward of a layer": _set_forward,
    "class of a layer": _set_class,
    "q_values of the module": _set_q_values,
}
OTHER_LAYERS: dict[str, Change] = {
    "parametrized layer": lambda module: parametrize.register_parametrization(module.q.head, "weight", Scale()),
    "parametrized target": lambda module: parametrize.register_parametrization(module.target_q.head, "weight", Scale()),
    "weight norm": lambda module: parametrizations.weight_norm(module.q.head),
    "old weight norm": lambda module: nn.utils.weight_norm(module.q.head),
    "another activation": lambda module: setattr(module.q, "streams", nn.Sequential(module.q.streams[0], nn.GELU())),
    "an activation before the layers": lambda module: module.q.encoder.mlp.insert(0, nn.Tanh()),
    "dropout": lambda module: module.q.encoder.mlp.append(nn.Dropout(0.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_modules_that_are_no_longer_plain_are_left_to_autograd(name: str, numpy_steps: list[Module]) -> None:
    module, at_change = train_both(CHANGES[name])
    assert numpy_steps == [module] * 3
    assert not torch.equal(weights_of(module), at_change)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_layers_that_are_not_plain_are_left_to_autograd(name: str, numpy_steps: list[Module]) -> None:
    modules = [make_module(), make_module()]
    for module, loss in zip(modules, (dqn(), autograd_only), strict=True):
        torch.manual_seed(1)
        OTHER_LAYERS[name](module)
        at_first, learner = weights_of(module), make_learner(module, loss)
        for _ in range(3):
            update(learner, make_batch(), lr=0.01)
        assert not torch.equal(weights_of(module), at_first)
    assert not numpy_steps
    assert_equal_weights(*modules)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_atoms": 5},
        {"noisy": True},
        {"dueling": True},
        {"fcnet_activation": "gelu"},
        {"fcnet_hiddens": [600]},
        {"obs": spaces.Discrete(3)},
        {"cls": type("Custom", (QModule,), {})},
    ],
    ids=str,
)
def test_other_modules_are_left_to_autograd(settings: dict[str, Any], numpy_steps: list[Module]) -> None:
    learner = make_learner(make_module(**settings), dqn())
    update(learner, make_batch(settings.get("obs", OBS)), lr=0.01)
    assert not numpy_steps


@pytest.mark.parametrize("optimizer", ["Adagrad", "Adamax", "NAdam", "Adadelta"])
def test_optimizers_that_step_single_parameters(optimizer: str, numpy_steps: list[Module]) -> None:
    module, at_change = train_both(lambda module: None, optimizer_class=getattr(torch.optim, optimizer))
    assert not numpy_steps
    num_trained = len(weights_of(module.q))
    assert (weights_of(module) != at_change)[:num_trained].float().mean() > 0.5


def test_an_optimizer_of_the_users(numpy_steps: list[Module]) -> None:
    class Halved(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
            return super().step(closure)

    module, at_change = train_both(lambda module: None, optimizer_class=Halved)
    assert not numpy_steps and not torch.equal(weights_of(module), at_change)


class TestColumns:
    @pytest.mark.parametrize(
        "columns",
        [
            {"obs": np.ones((16, 3, 1), np.float32), "next_obs": np.zeros((16, 1, 3), np.float32)},
            {"obs": np.ones((16, 3), np.uint16)},
            {"obs": np.asfortranarray(np.ones((16, 3), ">f4").astype("<f4")), "weights": np.ones(16)},
            {"rewards": np.ones(16, np.float64)},
            {"discounts": np.full((16,), 0.5, np.float64)},
        ],
        ids=["rank", "uint16", "weights in float64", "rewards in float64", "discounts in float64"],
    )
    def test_unusual_columns_are_left_to_autograd(self, columns: dict[str, Any], numpy_steps: list[Module]) -> None:
        module, _ = train_both(lambda module: None, make_batch(**columns))
        assert numpy_steps == [module] * 3

    @pytest.mark.parametrize("settings", [{"minibatch_size": 8}, {"num_epochs": 2}])
    def test_updates_of_several_steps_are_left_to_autograd(
        self, settings: dict[str, Any], numpy_steps: list[Module]
    ) -> None:
        learner = make_learner(make_module(), dqn())
        assert update(learner, make_batch(), lr=0.01, **settings)["num_gradient_steps"] == 2
        assert not numpy_steps

    def test_columns_that_a_callback_changed_count(self) -> None:
        def change(train_batch: Any) -> None:
            train_batch["rewards"] = train_batch["rewards"] + 5

        callbacks = {"on_learn_on_batch": [change]}
        module, _ = train_both(lambda module: None, callbacks=Dispatcher([], callbacks))
        assert weights_of(module).ne(weights_of(train_both(lambda module: None)[0])).any()

    def test_mixed_precision_is_left_to_autograd(self, numpy_steps: list[Module]) -> None:
        learner = make_learner(make_module(), dqn())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            update(learner, make_batch(), lr=0.01)
        assert not numpy_steps
        update(learner, make_batch(), lr=0.01)
        assert len(numpy_steps) == 1


def test_other_losses_are_left_to_autograd(numpy_steps: list[Module]) -> None:
    calls = []

    @functools.wraps(dqn_loss)
    def logged(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return dqn_loss(*args, **kwargs)

    for loss in (partial(logged, double_q=True, huber=True), partial(autograd_only)):
        update(make_learner(make_module(), loss), make_batch(), lr=0.01)
    assert len(calls) == 1 and not numpy_steps
