"""`train()` moves every trainable weight and no frozen one, with every optimizer; hooks and `zero_grad` count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learner_cases import OPTIMIZERS, OTHER_PAIRS, freeze
from torch import Tensor

from corral import APPOConfig, DQNConfig, IMPALAConfig, PPOConfig, SACConfig, TD3Config
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.errors import ConfigError
from corral.modules.module import Module
from corral.testing import IdentityEnv


class WithoutDefaultLr(torch.optim.SGD):
    """An optimizer of a user whose learning rate has no default."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


ALL_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **OPTIMIZERS,
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
    "without default lr": (WithoutDefaultLr, {}),
}
if hasattr(torch.optim, "Adafactor"):
    ALL_OPTIMIZERS["adafactor"] = (torch.optim.Adafactor, {})

# Small nets; one update or a few per iteration. The forms of SAC have other losses; DQN's learns in NumPy.
REPLAY = {"train_batch_size_per_learner": 8, "num_steps_sampled_before_learning_starts": 8}
FORMS: dict[str, tuple[Callable[[], AlgorithmConfig], str]] = {
    "ppo": (lambda: PPOConfig().training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=2), "box"),
    "impala": (lambda: IMPALAConfig(num_env_runners=0).training(train_batch_size_per_learner=32), "box"),
    "appo": (lambda: APPOConfig(num_env_runners=0).training(train_batch_size_per_learner=32), "box"),
    "dqn": (lambda: DQNConfig().training(**REPLAY), "discrete"),
    "sac": (lambda: SACConfig().training(**REPLAY), "box"),
    "discrete sac": (lambda: SACConfig().training(**REPLAY), "discrete"),
    "td3": (lambda: TD3Config().training(**REPLAY), "box"),
}


def make_config(form: str, optimizer: str = "adam") -> AlgorithmConfig:
    make, space = FORMS[form]
    optimizer_class, settings = ALL_OPTIMIZERS[optimizer]
    config = make().environment(IdentityEnv, env_config={"space": space}).debugging(seed=0)
    config.rl_module(model_config={"fcnet_hiddens": [4, 4], "fcnet_activation": "tanh"})
    config.training(optimizer=optimizer_class, optimizer_config=settings, lr=0.01)
    return config.reporting(min_sample_timesteps_per_iteration=6)


def own_parameters(module: Module) -> dict[str, Tensor]:
    """Return copies of all parameters except the parameters of targets, which follow the others."""
    named = module.named_parameters()
    return {name: value.detach().clone() for name, value in named if not name.startswith("target_")}


def check_training(algo: Algorithm, frozen: list[str]) -> None:
    """Train, and check that exactly the frozen weights stay, in the learners and where actions are chosen."""
    before = own_parameters(algo.get_module())
    for _ in range(2):
        result = algo.train()
    after = own_parameters(algo.get_module())
    still = [name for name, value in after.items() if torch.equal(value, before[name])]
    assert still == frozen
    assert result["learners"]["default_policy"]["num_gradient_steps"] > 0
    assert algo.env_runner is not None
    acting = algo.env_runner.module.state_dict()
    for name in algo.get_module().acting_weights():
        assert torch.equal(acting[name], after[name]), name


def check_freezing(config: AlgorithmConfig) -> None:
    """Freeze before the build, freeze others after it, and unfreeze all."""
    frozen: list[str] = []

    def freeze_some(policy: Module) -> None:
        frozen.extend(list(own_parameters(policy))[1::3])
        freeze(policy, frozen)

    with config.callbacks(on_create_policy=freeze_some).build() as algo:
        check_training(algo, frozen)
        names = list(own_parameters(algo.get_module()))
        for then_frozen in (names[::2], []):
            algo.learner_group.foreach_module("default_policy", freeze, then_frozen)
            check_training(algo, then_frozen)


@pytest.mark.slow_cases(
    *("adadelta", "adagrad", "adamax", "adafactor", "asgd", "-rprop", "nadam", "radam"),
    *OTHER_PAIRS,
)
@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_all_that_is_trainable_moves_and_nothing_else(form: str, optimizer: str) -> None:
    check_freezing(make_config(form, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "optimizer"), [("dqn", "adagrad"), ("ppo", "nadam"), ("sac", "own"), ("dqn", "adam")])
def test_the_same_in_two_learners(form: str, optimizer: str) -> None:
    check_freezing(make_config(form, optimizer).learners(num_learners=2).engine("process"))


@pytest.mark.parametrize(
    ("optimizer", "settings", "message"),
    [
        (torch.optim.LBFGS, {}, r"LBFGS\.step\(closure\).*such as Adam"),
        (torch.optim.SparseAdam, {}, "SparseAdam.*does not support dense gradients.*another optimizer, such as Adam"),
        (torch.optim.SGD, {"momentum": -1.0}, "optimizer_config=.*SGD, .*momentum"),
        pytest.param(
            getattr(torch.optim, "Muon", None),
            {},
            r"Muon.*cannot train.*2D parameters.*another optimizer, such as Adam, or a module",
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
        ),
    ],
)
def test_optimizers_that_cannot_train_the_module_are_refused(optimizer: Any, settings: Any, message: str) -> None:
    config = make_config("ppo").training(optimizer=optimizer, optimizer_config=settings)
    with pytest.raises(ConfigError, match=message):
        config.build()


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("event", ["on_learn_on_batch", "on_gradients", "on_update_end"])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_zero_grad_in_a_callback_stops_no_learning(form: str, set_to_none: bool, event: str) -> None:
    """In `on_gradients` it takes the gradients of one step away; there only every other step does."""
    calls = []

    def zero(policy: Module) -> None:
        calls.append(event)
        if event != "on_gradients" or len(calls) % 2:
            policy.zero_grad(set_to_none=set_to_none)

    with make_config(form).training(optimizer=torch.optim.SGD).callbacks(**{event: zero}).build() as algo:
        check_training(algo, [])
    assert len(calls) > 1


OUTPUT_LAYERS = {
    **dict.fromkeys(("ppo", "impala", "appo"), "policy_head"),
    "dqn": "q.head",
    "sac": "actor.head.0",
    "discrete sac": "actor.head.0",
    "td3": "actor.head.0",
}


@pytest.mark.parametrize("form", FORMS)
def test_hooks_of_gradients_and_layers_count(form: str) -> None:
    """A parameter whose hook makes its gradient zero stays under SGD; all others move, and each layer's hooks fire."""
    fired = set()
    name = OUTPUT_LAYERS[form]

    def register(module: Module) -> None:
        layer = module.get_submodule(name)
        layer.get_parameter("weight").register_hook(torch.zeros_like)
        layer.register_forward_pre_hook(lambda *_: fired.add("forward_pre"))
        layer.register_forward_hook(lambda *_: fired.add("forward"))
        layer.register_full_backward_pre_hook(lambda *_: fired.add("full_backward_pre"))
        layer.register_full_backward_hook(lambda *_: fired.add("full_backward"))
        module.get_parameter(f"{name}.bias").register_post_accumulate_grad_hook(lambda _: fired.add("accumulated"))

    config = make_config(form).training(optimizer=torch.optim.SGD, optimizer_config={})
    with config.build() as algo:
        check_training(algo, [])
        algo.learner_group.foreach_module("default_policy", register)
        check_training(algo, [f"{name}.weight"])
    assert fired == {"forward_pre", "forward", "full_backward_pre", "full_backward", "accumulated"}
