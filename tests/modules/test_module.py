"""The default module over all spaces, its settings, and modules of the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral import Module, PPOConfig
from corral.core.tree import leaves, map_tree
from corral.errors import ConfigError
from corral.modules.module import ActorCritic
from small import small

B = 5
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-1, 1, (3,), np.float32),
    "vector_float64": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "matrix": spaces.Box(-1, 1, (3, 4), np.float32),
    "thin_stack": spaces.Box(-1, 1, (20, 3, 20), np.float32),
    "bytes": spaces.Box(0, 255, (8,), np.uint8),
    "image_hwc": spaces.Box(0, 255, (20, 24, 3), np.uint8),
    "image_chw": spaces.Box(0, 255, (3, 20, 24), np.uint8),
    "image_atari": spaces.Box(0, 255, (84, 84, 4), np.uint8),
    "image_minatar": spaces.Box(0, 1, (10, 10, 4), np.float32),
    "image_medium": spaces.Box(0, 255, (16, 40, 3), np.uint8),
    "image_smallest": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete_start": spaces.Discrete(5, start=-3),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "multi_discrete_start": spaces.MultiDiscrete(np.array([[3, 4], [2, 2]]), start=np.array([[1, 2], [-5, 0]])),
    "multi_binary": spaces.MultiBinary((2, 3)),
    "dict": spaces.Dict(b=spaces.Box(-1, 1, (2,), np.float32), a=spaces.Discrete(3)),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2, 2), np.float32)]),
    "nested": spaces.Dict(
        camera=spaces.Box(0, 255, (16, 16, 1), np.uint8),
        body=spaces.Tuple([spaces.MultiBinary(2), spaces.Dict(x=spaces.Box(-1, 1, (1,), np.float32))]),
    ),
}
ACTIONS: dict[str, tuple[spaces.Space[Any], int]] = {
    "discrete": (spaces.Discrete(3, start=1), 3),
    "multi_discrete": (spaces.MultiDiscrete([3, 2]), 5),
    "multi_binary": (spaces.MultiBinary(4), 4),
    "box": (spaces.Box(-1, 1, (2, 2), np.float32), 8),
}
VECTOR, TWO = OBSERVATIONS["vector"], spaces.Discrete(2)


def batch(space: spaces.Space[Any], size: int = B, seed: int = 0) -> Any:
    """Draw observations and stack them leaf by leaf."""
    space.seed(seed)
    draws = [space.sample() for _ in range(size)]
    return map_tree(lambda *parts: torch.from_numpy(np.stack(parts)), *draws)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_outputs_of_every_pair_of_spaces(observation: str, action: str) -> None:
    space, (action_space, width) = OBSERVATIONS[observation], ACTIONS[action]
    module = ActorCritic(space, action_space, {})
    obs = batch(space)
    dist_inputs, values = module.policy_and_value(obs)
    assert dist_inputs.shape == (B, width)
    assert values.shape == (B,)
    assert dist_inputs.dtype == values.dtype == torch.float32
    torch.testing.assert_close(module.policy(obs), dist_inputs)
    torch.testing.assert_close(module.value(obs), values)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_every_leaf_of_an_observation_matters(observation: str) -> None:
    space = OBSERVATIONS[observation]
    module = ActorCritic(space, TWO, {})
    one, other = batch(space, 32, seed=0), batch(space, 32, seed=1)
    before = module.value(one)
    num_leaves = len(leaves(one))
    for changed in range(num_leaves):
        counter = iter(range(num_leaves))
        mixed = map_tree(
            lambda a, b, changed=changed, counter=counter: b if next(counter) == changed else a, one, other
        )
        assert not torch.equal(module.value(mixed), before)


def test_dict_observations_may_come_in_any_order_of_keys() -> None:
    module = ActorCritic(OBSERVATIONS["dict"], TWO, {})
    obs = batch(OBSERVATIONS["dict"])
    turned = {key: obs[key] for key in reversed(obs)}
    assert list(turned) != list(obs)
    torch.testing.assert_close(module.value(turned), module.value(obs))


def test_images_give_the_same_whichever_axis_holds_the_channels() -> None:
    torch.manual_seed(0)
    last = ActorCritic(OBSERVATIONS["image_hwc"], TWO, {})
    first = ActorCritic(OBSERVATIONS["image_chw"], TWO, {})
    first.load_state_dict(last.state_dict())
    obs = batch(OBSERVATIONS["image_hwc"])
    torch.testing.assert_close(first.value(obs.permute(0, 3, 1, 2).contiguous()), last.value(obs))


def test_byte_images_are_scaled_to_one() -> None:
    floats = spaces.Box(0, 1, (20, 24, 3), np.float32)
    torch.manual_seed(0)
    of_bytes, of_floats = (ActorCritic(space, TWO, {}) for space in (OBSERVATIONS["image_hwc"], floats))
    of_floats.load_state_dict(of_bytes.state_dict())
    obs = batch(OBSERVATIONS["image_hwc"])
    torch.testing.assert_close(of_floats.value(obs.float() / 255), of_bytes.value(obs))


def gradient_of_value_in_policy(module: ActorCritic, obs: Any) -> bool:
    module.value(obs).sum().backward()
    return any(parameter.grad is not None for parameter in module.policy_encoder.parameters())


@pytest.mark.parametrize(
    ("observation", "setting", "shared"),
    [
        ("vector", True, True),
        ("vector", False, False),
        ("vector", None, False),
        ("image_hwc", True, True),
        ("image_hwc", False, False),
        ("image_hwc", None, True),
    ],
)
def test_vf_share_layers(observation: str, setting: bool | None, shared: bool) -> None:
    module = ActorCritic(OBSERVATIONS[observation], TWO, {"vf_share_layers": setting})
    assert gradient_of_value_in_policy(module, batch(OBSERVATIONS[observation])) is shared


def test_free_log_std_does_not_depend_on_the_observation() -> None:
    module = ActorCritic(VECTOR, ACTIONS["box"][0], {"initial_log_std": -0.5})
    dist_inputs = module.policy(batch(VECTOR))
    torch.testing.assert_close(dist_inputs[:, 4:], torch.full((B, 4), -0.5))


def test_log_std_from_the_network_depends_on_the_observation() -> None:
    module = ActorCritic(VECTOR, ACTIONS["box"][0], {"free_log_std": False, "initial_log_std": -0.5})
    log_std = module.policy(batch(VECTOR))[:, 4:]
    assert log_std.std(0).min() > 0
    torch.testing.assert_close(log_std, torch.full((B, 4), -0.5), atol=0.1, rtol=0)


def test_the_first_policy_is_close_to_uniform() -> None:
    logp = ActorCritic(VECTOR, spaces.Discrete(4), {}).policy(batch(VECTOR)).log_softmax(-1)
    torch.testing.assert_close(logp.exp(), torch.full((B, 4), 0.25), atol=0.02, rtol=0)


def test_hiddens_and_activation_are_those_asked_for() -> None:
    module = ActorCritic(VECTOR, TWO, {"fcnet_hiddens": [7, 9], "fcnet_activation": "silu"})
    layers = list(module.policy_encoder.mlp)
    assert [layer.out_features for layer in layers if isinstance(layer, nn.Linear)] == [7, 9]
    assert sum(isinstance(layer, nn.SiLU) for layer in layers) == 2


def test_no_hidden_layers_is_a_linear_policy() -> None:
    module = ActorCritic(VECTOR, TWO, {"fcnet_hiddens": []})
    torch.testing.assert_close(module.policy(batch(VECTOR)), module.policy_head(batch(VECTOR)))


def test_conv_filters_are_those_asked_for() -> None:
    module = ActorCritic(OBSERVATIONS["image_hwc"], TWO, {"conv_filters": [[6, 5, 2]]})
    convs = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    assert [(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride) for conv in convs] == [
        (3, 6, (5, 5), (2, 2))
    ]


def test_conv_filters_that_shrink_the_image_to_nothing() -> None:
    with pytest.raises(ConfigError, match=r"conv_filters.*\(20, 24, 3\) to nothing"):
        ActorCritic(OBSERVATIONS["image_hwc"], TWO, {"conv_filters": [[8, 8, 4], [8, 8, 4]]})


def test_unsupported_observation_space_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Unsupported observation space Text.*rl_module"):
        ActorCritic(spaces.Dict(note=spaces.Text(3)), TWO, {})


@pytest.mark.parametrize(
    ("model_config", "message"),
    [
        ({"fcnet_hidden": [8]}, "'fcnet_hidden'. Did you mean 'fcnet_hiddens'"),
        ({"fcnet_activation": "rleu"}, "'rleu'. Did you mean 'relu'"),
        ({"fcnet_hiddens": "64"}, "fcnet_hiddens="),
        ({"fcnet_hiddens": 64}, "fcnet_hiddens="),
        ({"fcnet_hiddens": [64, 0]}, "fcnet_hiddens="),
        ({"conv_filters": [[8]]}, "conv_filters"),
        ({"initial_log_std": "x"}, "initial_log_std="),
        ({"action_bounds": "squish"}, "'clip', 'squash', 'clip_unscaled' or 'none'"),
    ],
)
def test_wrong_model_config_is_found_by_validate(model_config: dict[str, Any], message: str) -> None:
    config = PPOConfig().environment("CartPole-v1").rl_module(model_config=model_config)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[").replace(".", r"\.")):
        config.validate()


class Tiny(Module):
    """A user's module with a setting of its own."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.body = nn.Linear(observation_space.shape[0], model_config["width"])
        self.pi = nn.Linear(model_config["width"], self.distribution.num_inputs)
        self.vf = nn.Linear(model_config["width"], 1)

    def policy(self, obs: Tensor) -> Tensor:
        out: Tensor = self.pi(torch.relu(self.body(obs)))
        return out

    def value(self, obs: Tensor) -> Tensor:
        out: Tensor = self.vf(torch.relu(self.body(obs)))
        return out.squeeze(-1)


def test_a_module_of_the_users_own_trains() -> None:
    with small().rl_module(Tiny, model_config={"width": 6}).build() as algo:
        module = algo.get_module()
        assert isinstance(module, Tiny)
        assert module.body.out_features == 6
        before = {name: value.clone() for name, value in module.state_dict().items()}
        result = algo.train()
        assert all(not torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert np.isfinite(result["learners"]["default_policy"]["total_loss"])


class Biased(ActorCritic):
    """The default module with a policy that always wants action 1."""

    def policy(self, obs: Any) -> Tensor:
        return super().policy(obs) + torch.tensor([-30.0, 30.0])


@pytest.mark.parametrize("share", [True, False])
def test_an_overridden_policy_of_the_default_module_both_acts_and_learns(share: bool) -> None:
    config = small().rl_module(Biased, model_config={"vf_share_layers": share})
    with config.build() as algo:
        obs = np.zeros((50, 2), np.float32)
        np.testing.assert_array_equal(algo.compute_actions(obs, explore=True), np.ones(50))
        module = algo.get_module()
        torch.testing.assert_close(
            module.policy_and_value(torch.from_numpy(obs))[0], module.policy(torch.from_numpy(obs))
        )


class NoValue(Module):
    def policy(self, obs: Any) -> Tensor:
        raise NotImplementedError


class NoPolicy(Module):
    def value(self, obs: Any) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("module_class", "message"),
    [
        (NoValue, r"NoValue must define value\(self, obs\)"),
        (NoPolicy, r"NoPolicy must define policy\(self, obs\)"),
        (nn.Linear, "must be a subclass of corral.Module"),
        ("Tiny", "module_class='Tiny': 'Tiny' is not an import path"),
    ],
)
def test_what_is_no_module_is_refused(module_class: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small().rl_module(module_class).validate()


def test_the_seed_alone_decides_the_weights() -> None:
    def weights(seed: int | None) -> Tensor:
        torch.rand(3)  # what was drawn before must not matter
        module = PPOConfig().debugging(seed=seed).module_spec(VECTOR, TWO).build()
        return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])

    torch.testing.assert_close(weights(3), weights(3), rtol=0, atol=0)
    assert not torch.equal(weights(3), weights(4))


def test_building_a_module_leaves_torchs_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    PPOConfig().debugging(seed=3).module_spec(VECTOR, TWO).build()
    assert torch.equal(torch.random.get_rng_state(), before)
