"""Settings of the default networks: layer normalisation, hidden layers of heads, bounds of deviations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral import DQNConfig, PPOConfig, SACConfig
from corral.errors import ConfigError
from corral.modules.inference import Inference
from corral.modules.module import ActorCritic, Module
from corral.modules.networks import LogStdBounds
from corral.modules.q_module import QModule
from corral.modules.sac_module import SACModule
from corral.testing import CountingEnv

FLAT, FOUR, BOX = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)
OBS = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)


def before_activations(network: nn.Module, obs: Tensor) -> list[Tensor]:
    """Return the inputs of all activations."""
    found: list[Tensor] = []
    for part in network.modules():
        if isinstance(part, (nn.Tanh, nn.ReLU)):
            part.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].detach()))
    network(obs)
    return found


@pytest.mark.parametrize(
    ("cls", "network", "settings", "groups"),
    [
        (ActorCritic, "policy_encoder", {"head_hiddens": [6]}, 1),
        (QModule, "q", {}, 1),
        (QModule, "q", {"dueling": True}, 2),
        (SACModule, "actor", {}, 1),
        (SACModule, "q.0", {}, 1),
    ],
)
def test_each_hidden_layer_is_normalised_before_its_activation(
    cls: type[Module], network: str, settings: dict[str, Any], groups: int
) -> None:
    module = cls(FLAT, FOUR, {"fcnet_hiddens": [16, 8], "use_layernorm": True, **settings})
    inputs = before_activations(module.get_submodule(network), torch.from_numpy(OBS))
    assert len(inputs) == 2
    for index, features in enumerate(inputs):
        parts = features.chunk(groups, -1) if index == 1 else [features]
        for part in parts:
            torch.testing.assert_close(part.mean(-1), torch.zeros(50), atol=1e-5, rtol=0)
            assert (part.var(-1, correction=0) - 1).abs().median() < 0.05
    with torch.no_grad():
        np.testing.assert_allclose(Inference(module)(OBS), module.policy(torch.from_numpy(OBS)), atol=1e-6)
    plain = cls(FLAT, FOUR, {"fcnet_hiddens": [16, 8], **settings})
    assert not any(isinstance(part, (nn.LayerNorm, nn.GroupNorm)) for part in plain.modules())


def is_norm(name: str) -> bool:
    return "mlp.1" in name or name.startswith("q.streams.1")


@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig, SACConfig])
def test_algorithms_train_with_layer_normalisation(kind: Any) -> None:
    config = kind().environment(CountingEnv).rl_module(model_config={"fcnet_hiddens": [8], "use_layernorm": True})
    config.reporting(min_sample_timesteps_per_iteration=40).training(train_batch_size_per_learner=16)
    config.training(
        **({"minibatch_size": 8} if kind is PPOConfig else {"num_steps_sampled_before_learning_starts": 20})
    )
    with config.build() as algo:
        before = {name: value.clone() for name, value in algo.get_module().named_parameters() if is_norm(name)}
        algo.train()
        after = dict(algo.get_module().named_parameters())
        assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_heads_on_a_shared_encoder_have_hidden_layers_of_their_own() -> None:
    settings = {"fcnet_hiddens": [16], "head_hiddens": [8, 4], "vf_share_layers": True}
    module = ActorCritic(FLAT, FOUR, settings)
    assert module.policy_encoder is module.value_encoder
    assert [part.out_features for part in module.policy_hiddens if isinstance(part, nn.Linear)] == [8, 4]
    assert module.policy_hiddens[0].weight is not module.value_hiddens[0].weight
    assert (module.policy_head.in_features, module.value_head.in_features) == (4, 4)
    calls: list[int] = []
    module.policy_encoder.register_forward_hook(lambda *_: calls.append(1))
    obs = torch.from_numpy(OBS)
    both = module.policy_and_value(obs)
    assert len(calls) == 1
    torch.testing.assert_close(both, (module.policy(obs), module.value(obs)))
    inference = Inference(module)
    assert inference.backend == "numpy"
    np.testing.assert_allclose(inference(OBS), both[0].detach(), atol=1e-6)
    both[1].sum().backward()
    assert module.policy_hiddens[0].weight.grad is None
    assert module.policy_encoder.mlp[0].weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("free", [True, False])
def test_deviations_start_at_the_initial_one_and_stay_between_their_bounds(free: bool) -> None:
    settings = {"free_log_std": free, "log_std_bounds": [-3.0, 1.0], "initial_log_std": -0.5, "fcnet_hiddens": [8]}
    module = ActorCritic(FLAT, BOX, settings)
    obs = torch.from_numpy(OBS)
    log_std = module.policy(obs)[:, 2:]
    torch.testing.assert_close(log_std, torch.full((50, 2), -0.5), atol=0.05, rtol=0)
    source = module.log_std if free else module.policy_head.bias
    assert source is not None
    for extreme, bound in ((20.0, 1.0), (-20.0, -3.0)):
        with torch.no_grad():
            source[-2:] = extreme
        log_std = module.policy(obs)[:, 2:]
        assert log_std.min() >= -3
        assert log_std.max() <= 1
        torch.testing.assert_close(log_std, torch.full((50, 2), bound), atol=1e-4, rtol=0)
    with torch.no_grad():
        source[-2:] = 6.0  # near a bound there is a gradient back
    source.grad = None
    module.policy(obs)[:, 2:].sum().backward()
    assert source.grad is not None
    assert (source.grad[-2:] > 0).all()
    np.testing.assert_allclose(Inference(module)(OBS), module.policy(obs).detach(), atol=1e-6)


def test_bounds_of_deviations_invert() -> None:
    bounds = LogStdBounds(-5.0, 2.0)
    for log_std in (-4.9, -1.0, 0.0, 1.9):
        outputs = bounds(torch.tensor([[0.3, bounds.inverse(log_std)]]))
        torch.testing.assert_close(outputs, torch.tensor([[0.3, log_std]]))


def test_deviations_of_sac_have_the_bounds_of_the_paper_or_given_ones() -> None:
    obs = torch.from_numpy(OBS)
    for bounds, lowest, highest in ((None, -20, 2), ([-4, 0], -4, 0)):
        module = SACModule(FLAT, BOX, {"fcnet_hiddens": [8], "log_std_bounds": bounds})
        for sign in (-1, 1):
            with torch.no_grad():
                module.actor.head[0].bias[2:] = sign * 100.0  # type: ignore[index]
            log_std = module.policy(obs)[:, 2:]
            torch.testing.assert_close(log_std, torch.full_like(log_std, lowest if sign < 0 else highest))


@pytest.mark.parametrize(
    ("settings", "space", "problem"),
    [
        ({"log_std_bounds": [1.0, -1.0]}, BOX, "log_std_bounds.*first bound must be below the second"),
        ({"log_std_bounds": [-3.0, -1.0]}, BOX, r"initial_log_std=0.0 must be between log_std_bounds=\(-3.0, -1.0\)"),
        ({"log_std_bounds": [-3.0, 1.0]}, FOUR, "log_std_bounds=.* is for Box actions"),
        ({"head_hiddens": [0]}, FOUR, "head_hiddens"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], space: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ActorCritic(FLAT, space, settings)
