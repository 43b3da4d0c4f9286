"""Settings of the default networks: layer normalisation, hidden layers of heads, bounds of deviations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral import Algorithm, DQNConfig, PPOConfig, SACConfig
from corral.errors import ConfigError
from corral.modules.inference import Inference
from corral.modules.module import ActorCritic, Module
from corral.modules.networks import LogStdBounds, example_obs
from corral.modules.q_module import NoisyLinear, QModule, QNetwork
from corral.modules.recurrent import RecurrentActorCritic
from corral.modules.recurrent_q_module import RecurrentQModule
from corral.modules.sac_module import SACModule
from corral.modules.td3_module import TD3Module
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


ACTIVATED: dict[str, Any] = {
    "linear": lambda x: x,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
}


@pytest.mark.parametrize("name", ACTIVATED)
def test_activations_match_their_names(name: str) -> None:
    module = ActorCritic(FLAT, FOUR, {"fcnet_hiddens": [6, 5], "fcnet_activation": name})
    obs = x = torch.from_numpy(OBS)
    for layer in [part for part in module.policy_encoder.modules() if isinstance(part, nn.Linear)]:
        x = ACTIVATED[name](x @ layer.weight.T + layer.bias)
    torch.testing.assert_close(module.policy(obs), module.policy_head(x))
    inference = Inference(module)
    assert inference.backend == ("numpy" if name == "linear" else "torch")
    np.testing.assert_allclose(inference(OBS), module.policy(obs).detach(), atol=1e-6)


def linears(network: Any) -> list[nn.Linear]:
    return [part for part in network.modules() if isinstance(part, nn.Linear)]


@pytest.mark.parametrize("heads", [[], [7], [7, 6]])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("num_atoms", [1, 3])
def test_heads_of_q_networks_read_all_features_of_the_encoder(heads: list[int], dueling: bool, num_atoms: int) -> None:
    settings = {"fcnet_hiddens": [9, 8], "head_hiddens": heads, "head_activation": "tanh"}
    module = QModule(FLAT, FOUR, {**settings, "dueling": dueling, "num_atoms": num_atoms})
    assert isinstance(module.q, QNetwork)
    obs = torch.from_numpy(OBS)
    features = obs
    for layer in linears(module.q.encoder):
        features = layer(features).relu()
    assert features.shape == (50, 8)

    def stream(layers: list[nn.Linear]) -> Tensor:
        x = features
        for layer in layers[:-1]:
            x = layer(x).tanh()
        return layers[-1](x)

    layers = [*linears(module.q.streams), *linears(module.q.head)]
    if dueling:
        value, advantage = (stream(layers[: len(layers) // 2]), stream(layers[len(layers) // 2 :]))
        parts = advantage.reshape(50, 4, num_atoms)
        expected = value.reshape(50, 1, num_atoms) + parts - parts.mean(1, keepdim=True)
    else:
        expected = stream(layers)
    torch.testing.assert_close(module.q(obs), expected.reshape(50, -1))
    inference = Inference(module)
    assert inference.backend == ("torch" if num_atoms > 1 or (dueling and heads) else "numpy")
    np.testing.assert_allclose(inference(OBS), module.policy(obs).detach(), atol=1e-5)


def test_noisy_heads_are_noisy_in_all_layers() -> None:
    module = QModule(FLAT, FOUR, {"fcnet_hiddens": [9], "head_hiddens": [7], "dueling": True, "noisy": True})
    assert isinstance(module.q, QNetwork)
    assert [type(part) for part in module.q.head.modules() if hasattr(part, "weight_sigma")] == [NoisyLinear] * 4
    assert len(linears(module.q)) == 1


@pytest.mark.parametrize("cls", [SACModule, TD3Module])
def test_actors_and_critics_have_hidden_layers_in_their_heads(cls: type[Module]) -> None:
    settings = {"fcnet_hiddens": [9, 8], "head_hiddens": [7], "head_activation": "tanh", "twin_q": False}
    module = cls(FLAT, BOX, settings)
    for network in (module.actor, module.q):
        assert [layer.out_features for layer in linears(network)][:-1] == [9, 8, 7]
        assert [type(part) for part in network.modules() if isinstance(part, (nn.ReLU, nn.Tanh))] == [
            nn.ReLU,
            nn.ReLU,
            nn.Tanh,
        ]
    inference = Inference(module)
    assert inference.backend == "numpy"
    np.testing.assert_allclose(inference(OBS), module.policy(torch.from_numpy(OBS)).detach(), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "encoder", "head"),
    [
        ({"use_layernorm": True}, 1, 1),
        ({"use_layernorm": True, "head_use_layernorm": False}, 1, 0),
        ({"head_use_layernorm": True}, 0, 1),
    ],
)
def test_heads_may_be_normalised_or_not(settings: dict[str, Any], encoder: int, head: int) -> None:
    module = ActorCritic(FLAT, FOUR, {"fcnet_hiddens": [8], "head_hiddens": [6], **settings})
    for part, expected in ((module.policy_encoder, encoder), (module.policy_hiddens, head)):
        assert sum(isinstance(layer, nn.LayerNorm) for layer in part.modules()) == expected


IMAGE_AND_FLAT = spaces.Dict({"image": spaces.Box(0, 255, (10, 10, 3), np.uint8), "flat": FLAT})
PARTS = {"fcnet": 1.0, "conv": 2.0, "head": 3.0, "rnn": 4.0}


def part_of(name: str) -> str | None:
    """Return the part that a parameter of a default module belongs to, by its name."""
    if "rnn" in name:
        return "rnn"
    if "parts" in name:
        return "conv"
    if any(word in name for word in ("head", "hiddens", "streams")) and "mlp" not in name:
        return "head"
    return "fcnet" if "mlp" in name else None


@pytest.mark.parametrize(
    ("cls", "space", "settings"),
    [
        (ActorCritic, FOUR, {"head_hiddens": [6]}),
        (ActorCritic, BOX, {"free_log_std": False}),
        (QModule, FOUR, {"head_hiddens": [6]}),
        (QModule, FOUR, {"head_hiddens": [], "dueling": True}),
        (SACModule, BOX, {}),
        (RecurrentActorCritic, FOUR, {"use_lstm": True}),
        (RecurrentQModule, FOUR, {"use_gru": True, "head_hiddens": [6]}),
    ],
)
def test_each_part_starts_as_its_initializers_say(
    cls: type[Module], space: spaces.Space[Any], settings: dict[str, Any]
) -> None:
    given = {
        f"{part}_{kind}_initializer{end}": {"val": value + (0.5 if kind == "bias" else 0.0)} if end else "constant_"
        for part, value in PARTS.items()
        for kind in ("kernel", "bias")
        for end in ("", "_kwargs")
        if part != "rnn" or "use_lstm" in settings or "use_gru" in settings
    }
    module = cls(IMAGE_AND_FLAT, space, {"fcnet_hiddens": [8, 8], "conv_features": 4, **settings, **given})
    found = set()
    for name, parameter in module.named_parameters():
        part = part_of(name)
        if part is not None:
            expected = PARTS[part] + (0.5 if "bias" in name else 0.0)
            assert parameter.unique().tolist() == [expected], name
            found.add(part)
    assert found == {"fcnet", "conv", "head"} | ({"rnn"} if "rnn_kernel_initializer" in given else set())


def fill_with_sevens(weights: Tensor) -> None:
    weights.fill_(7)


@pytest.mark.parametrize("form", [fill_with_sevens, f"{__name__}:fill_with_sevens"])
def test_an_initializer_may_be_a_function_or_its_path(form: Any) -> None:
    module = ActorCritic(FLAT, FOUR, {"fcnet_hiddens": [8], "fcnet_kernel_initializer": form})
    assert module.policy_encoder.mlp[0].weight.unique().tolist() == [7]
    assert module.policy_encoder.mlp[0].bias.unique().tolist() == [0]


def test_layers_may_start_as_torch_makes_them() -> None:
    """`torch.nn.Linear` draws weights and biases evenly from -1 / sqrt(in) to 1 / sqrt(in)."""
    settings = {f"{part}_{kind}_initializer": "torch" for part in ("fcnet", "head") for kind in ("kernel", "bias")}
    module = ActorCritic(FLAT, FOUR, {"fcnet_hiddens": [400, 100], **settings})
    for layer in linears(module):
        bound = layer.in_features**-0.5
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
        for weights in (layer.weight, layer.bias):
            assert 0 < weights.abs().max() <= bound
    plain = ActorCritic(FLAT, FOUR, {"fcnet_hiddens": [400, 100]})
    weight = plain.policy_encoder.mlp[0].weight.detach()
    torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(3), atol=1e-4, rtol=0)
    assert not plain.policy_encoder.mlp[0].bias.any()


def test_the_initial_deviation_is_added_to_the_bias_of_the_head() -> None:
    settings = {"free_log_std": False, "initial_log_std": -1.0, "fcnet_hiddens": [8], "head_bias_initializer": "ones"}
    assert ActorCritic(FLAT, BOX, settings).policy_head.bias.tolist() == [1, 1, 0, 0]


def same_convolution(image: Any, conv: nn.Conv2d) -> Any:
    """Return a convolution with zeros around the image, pixel by pixel."""
    weight, bias = conv.weight.detach().numpy(), conv.bias.detach().numpy()  # type: ignore[union-attr]
    (stride_y, stride_x), (height, width) = conv.stride, image.shape[1:]
    rows, columns = -(-height // stride_y), -(-width // stride_x)
    above = max(0, (rows - 1) * stride_y + weight.shape[2] - height) // 2
    left = max(0, (columns - 1) * stride_x + weight.shape[3] - width) // 2
    out = np.zeros((len(bias), rows, columns))
    for channel, row, column in np.ndindex(*out.shape):
        total = bias[channel]
        for source, y, x in np.ndindex(*weight.shape[1:]):
            at = row * stride_y - above + y, column * stride_x - left + x
            if 0 <= at[0] < height and 0 <= at[1] < width:
                total += weight[channel, source, y, x] * image[source, at[0], at[1]]
        out[channel, row, column] = total
    return out


@pytest.mark.parametrize(
    "filters",
    [[[2, 4, 2, "same"]], [[2, [3, 5], [2, 1], "same"], [3, 2, 2, "same"]], [[2, 1, 3, "same"]], [[2, 11, 4, "same"]]],
)
def test_images_are_padded_so_that_only_the_stride_makes_them_smaller(filters: Any) -> None:
    space = spaces.Box(-1, 1, (9, 8, 3), np.float32)
    settings = {"conv_filters": filters, "conv_features": None, "fcnet_hiddens": [], "conv_bias_initializer": "normal"}
    module = ActorCritic(space, FOUR, settings)
    obs = np.random.default_rng(0).normal(size=(1, 9, 8, 3)).astype(np.float32)
    x = np.moveaxis(obs[0], -1, 0)
    for conv in [part for part in module.policy_encoder.modules() if isinstance(part, nn.Conv2d)]:
        x = same_convolution(x, conv).clip(min=0)
    features = module.policy_encoder(torch.from_numpy(obs))
    np.testing.assert_allclose(features[0].detach(), x.reshape(-1), atol=1e-5)
    assert module.policy_head.in_features == x.size


def test_filters_without_padding_or_with_a_pair_for_each_axis() -> None:
    space = spaces.Box(-1, 1, (12, 9, 3), np.float32)
    module = ActorCritic(space, FOUR, {"conv_filters": [[5, [4, 3], [2, 1], "valid"]], "conv_features": None})
    assert module.policy_head.in_features == 5 * 5 * 7
    assert linears(module.policy_encoder) == []


@pytest.mark.parametrize("free", [True, False])
def test_a_clamp_of_deviations_keeps_them_within_its_limit(free: bool) -> None:
    module = ActorCritic(FLAT, BOX, {"free_log_std": free, "log_std_clip": 1.5, "fcnet_hiddens": [8]})
    obs = torch.from_numpy(OBS)
    source = module.log_std if free else module.policy_head.bias
    assert source is not None
    for given, expected in ((0.7, 0.7), (9.0, 1.5), (-9.0, -1.5)):
        with torch.no_grad():
            source[-2:] = given
        torch.testing.assert_close(module.policy(obs)[:, 2:], torch.full((50, 2), expected), atol=0.05, rtol=0)
        np.testing.assert_allclose(Inference(module)(OBS), module.policy(obs).detach(), atol=1e-6)


SETTINGS: dict[str, Any] = {
    "fcnet_hiddens": [8],
    "fcnet_activation": "silu",
    "fcnet_kernel_initializer": "xavier_uniform_",
    "fcnet_kernel_initializer_kwargs": {"gain": 0.8},
    "head_hiddens": [6],
    "head_activation": "linear",
    "head_bias_initializer": "torch",
}


@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig, SACConfig])
def test_algorithms_train_save_and_restore_such_networks(kind: Any, tmp_path: Path) -> None:
    config = kind().environment(CountingEnv).rl_module(model_config=SETTINGS)
    config.reporting(min_sample_timesteps_per_iteration=40).training(train_batch_size_per_learner=16)
    if kind is PPOConfig:
        config.training(minibatch_size=8)
    else:
        config.training(num_steps_sampled_before_learning_starts=20)
    if kind is DQNConfig:
        config.training(dueling=True)
    with config.build() as algo:
        algo.train()
        path = algo.save(tmp_path / "saved")
        obs = example_obs(algo.get_module().observation_space)
        expected = algo.get_module().policy(obs)
    with Algorithm.from_checkpoint(path) as restored:
        torch.testing.assert_close(restored.get_module().policy(obs), expected)


@pytest.mark.parametrize(
    ("cls", "settings", "problem"),
    [
        (
            ActorCritic,
            {"fcnet_kernel_initializer": "xavier_unifrom"},
            "xavier_unifrom_'.*Did you mean 'xavier_uniform_'",
        ),
        (ActorCritic, {"head_bias_initializer": 3}, "head_bias_initializer=3.*name of a function of torch.nn.init"),
        (
            ActorCritic,
            {"fcnet_bias_initializer": "constant_"},
            r"fcnet_bias_initializer raised TypeError.*_kwargs=\{\}",
        ),
        (ActorCritic, {"head_activation": "reluu"}, "head_activation.*Did you mean 'relu'"),
        (ActorCritic, {"log_std_clip": 2.0}, "log_std_clip=2.0 is for Box actions"),
        (ActorCritic, {"log_std_clip": 2.0, "log_std_bounds": [-1, 1]}, "both limit the deviation"),
    ],
)
def test_networks_that_cannot_be_are_refused(cls: type[Module], settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        cls(FLAT, FOUR, {"fcnet_hiddens": [8], **settings})
