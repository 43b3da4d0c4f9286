"""Layers and parameters that are replaced after the build would train in no optimizer and reach no runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learner_cases import ALGORITHMS, ON_POLICY, PPO_COEFFICIENTS, algorithm_batch, algorithm_loss, make_learner, update
from torch import nn

from corral import DQNConfig, PPOConfig, SACConfig
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.errors import ConfigError
from corral.modules.module import Module
from corral.testing import IdentityEnv

ENCODERS = {**dict.fromkeys(ON_POLICY, "policy_encoder"), "dqn": "q.encoder", "sac": "actor.encoder"}


def replace_layer(module: Module, encoder: str) -> None:
    module.get_submodule(encoder).mlp[0] = nn.Linear(3, 4)  # type: ignore[operator]


def replace_parameter(module: Module, encoder: str) -> None:
    layer = module.get_submodule(encoder).mlp[0]  # type: ignore[index]
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))


def replace_activation(module: Module, encoder: str) -> None:
    module.get_submodule(encoder).mlp[1] = nn.ReLU()  # type: ignore[operator]


def add_layer(module: Module, encoder: str) -> None:
    module.extra = nn.Linear(2, 2)


def remove_layer(module: Module, encoder: str) -> None:
    del module.get_submodule(encoder).mlp[1]  # type: ignore[operator]


CHANGES: dict[str, tuple[Any, str]] = {
    "layer": (replace_layer, r"mlp\.0\.weight"),
    "parameter": (replace_parameter, r"mlp\.0\.weight"),
    "activation": (replace_activation, r"mlp\.1"),
    "added": (add_layer, r"extra\.weight"),
    "removed": (remove_layer, r"mlp\.[12]"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_next_update_and_the_next_sync_refuse_other_layers(
    algorithm: str, optimizer: type[torch.optim.Optimizer], change: str
) -> None:
    module = ALGORITHMS[algorithm][0]()
    learner = make_learner(module, algorithm_loss(algorithm), optimizer)
    update(learner, algorithm_batch(algorithm), lr=0.01, coefficients=PPO_COEFFICIENTS)
    do_change, name = CHANGES[change]
    do_change(module, ENCODERS[algorithm])
    match = rf"'m': .*{name}.* of {type(module).__name__} .*module_class.*copy_"
    with pytest.raises(ConfigError, match=match):
        update(learner, algorithm_batch(algorithm), lr=0.01, coefficients=PPO_COEFFICIENTS)
    with pytest.raises(ConfigError, match=match):
        learner.get_acting_weights()


def test_what_replaces_no_layer_is_allowed() -> None:
    module = ALGORITHMS["ppo"][0]()
    learner = make_learner(module, algorithm_loss("ppo"))
    with torch.no_grad():
        module.policy_head.weight.copy_(torch.ones(2, 4))
    module.policy_head.weight.data = torch.ones(2, 4)
    module.policy_head.register_forward_hook(lambda *_: None)
    module.register_buffer("count", torch.zeros(()))
    module.load_state_dict(module.state_dict())
    update(learner, algorithm_batch("ppo"), lr=0.01, coefficients=PPO_COEFFICIENTS)
    learner.get_acting_weights()


CONFIGS: dict[str, AlgorithmConfig] = {
    "ppo": PPOConfig().training(train_batch_size_per_learner=32, minibatch_size=32, num_epochs=1),
    **{
        name: ALGORITHMS[name][1].copy(num_env_runners=0, train_batch_size_per_learner=32)
        for name in ("impala", "appo")
    },
    "dqn": DQNConfig().training(train_batch_size_per_learner=8, num_steps_sampled_before_learning_starts=8),
    "sac": SACConfig().training(train_batch_size_per_learner=8, num_steps_sampled_before_learning_starts=8),
}


def build(algorithm: str, **callbacks: Any) -> Algorithm:
    config = CONFIGS[algorithm].copy().environment(IdentityEnv).callbacks(**callbacks)
    config.rl_module(model_config={"fcnet_hiddens": [4, 4]}).reporting(min_sample_timesteps_per_iteration=8)
    return config.build()


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_a_layer_replaced_between_iterations_is_refused(algorithm: str) -> None:
    with build(algorithm) as algo:
        algo.train()
        algo.learner_group.foreach_module("default_policy", replace_parameter, ENCODERS[algorithm])
        with pytest.raises(ConfigError, match=r"default_policy.*mlp\.0\.weight"):
            algo.train()


def test_on_create_policy_may_replace_a_layer_by_one_like_it() -> None:
    made = nn.Linear(4, 4)

    def replace(policy: Any) -> None:
        policy.policy_encoder.mlp[0] = made

    with build("ppo", on_create_policy=replace) as algo:
        assert algo.env_runner is not None
        for _ in range(2):
            acting = algo.env_runner.module.get_parameter("policy_encoder.mlp.0.weight")
            assert torch.equal(acting, made.weight)
            before = made.weight.clone()
            algo.train()
            assert not torch.equal(made.weight, before)


class Other(nn.Linear):
    """A layer of another class, with weights of the same shapes."""


def resized(layer: nn.Linear) -> nn.Linear:
    layer.weight.data = torch.zeros(5, 4)
    return layer


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Linear(4, 5), r"policy_encoder\.mlp\.0\.weight"),
        (lambda: Other(4, 4), r"policy_encoder\.mlp\.0"),
        (lambda: resized(nn.Linear(4, 4)), r"policy_encoder\.mlp\.0\.weight"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), r"policy_encoder\.mlp\.0"),
    ],
)
def test_on_create_policy_may_not_build_what_runners_do_not_have(make: Any, name: str) -> None:
    def replace(policy: Any) -> None:
        policy.policy_encoder.mlp[0] = make()

    with pytest.raises(ConfigError, match=rf"on_create_policy.*{name}.*module_class"):
        build("ppo", on_create_policy=replace)
