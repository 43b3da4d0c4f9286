"""Networks for images: which layers they have, how they start, and which observations count as images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.errors import ConfigError
from corral.modules.module import ActorCritic, Module
from corral.modules.networks import is_image
from corral.modules.q_module import QModule
from corral.modules.recurrent_sac_module import RecurrentSACModule
from corral.modules.sac_module import SACModule

ATARI, TWO = spaces.Box(0, 255, (84, 84, 4), np.uint8), spaces.Discrete(2)
MODULES: dict[str, type[Module]] = {"ppo": ActorCritic, "dqn": QModule, "sac": SACModule}


def network_of(module: Module) -> nn.Module:
    """Return the network that the policy comes from."""
    names = {"ActorCritic": "policy_encoder", "QModule": "q", "SACModule": "actor"}
    return module.get_submodule(names[type(module).__name__])


def kinds(network: nn.Module) -> list[str]:
    containers = (nn.Sequential, nn.ModuleList)
    return [
        type(layer).__name__
        for layer in network.modules()
        if not isinstance(layer, containers) and not list(layer.children())
    ]


@pytest.mark.parametrize("name", MODULES)
def test_the_layers_match_mnih_et_al_2015(name: str) -> None:
    module = MODULES[name](ATARI, TWO, {})
    network = network_of(module)
    hidden = ["Conv2d", "ReLU"] * 3 + ["Flatten", "Linear", "ReLU"]
    assert kinds(network) == (hidden if name == "ppo" else [*hidden, "Linear"])
    shapes = [tuple(p.shape) for p in network.parameters() if p.ndim > 1]
    assert shapes[:4] == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 64 * 7 * 7)]
    heads = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and layer.out_features <= 2]
    assert {head.in_features for head in heads} == {512}  # no narrow layer between the features and the heads


def test_the_layers_start_orthogonal_with_the_gain_of_relu() -> None:
    torch.manual_seed(0)
    for layer in ActorCritic(ATARI, TWO, {}).policy_encoder.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            rows = layer.weight.detach().flatten(1)
            torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows)), atol=1e-4, rtol=0)
            assert not layer.bias.any()


def test_activations_of_convolutions_and_of_hidden_layers_have_settings_of_their_own() -> None:
    settings = {"conv_activation": "elu", "fcnet_activation": "silu", "conv_features": 9, "fcnet_hiddens": [7]}
    module = ActorCritic(ATARI, TWO, settings)
    assert kinds(module.policy_encoder) == [*["Conv2d", "ELU"] * 3, "Flatten", "Linear", "ELU", "Linear", "SiLU"]
    assert [p.shape[0] for p in module.policy_encoder.parameters() if p.ndim == 2] == [9, 7]
    with pytest.raises(ConfigError, match="conv_activation"):
        ActorCritic(ATARI, TWO, {"conv_activation": "rleu"})


def test_images_next_to_numbers_are_followed_by_the_hidden_layers() -> None:
    space = spaces.Dict(camera=ATARI, speed=spaces.Box(-1, 1, (3,), np.float32))
    widths = [p.shape for p in ActorCritic(space, TWO, {}).policy_encoder.mlp.parameters() if p.ndim == 2]
    assert [tuple(width) for width in widths] == [(64, 512 + 3), (64, 64)]


LAYOUTS = {  # the axes of frames, height, width and colours
    (4, 84, 84, 3): "fhwc",
    (4, 3, 84, 84): "fchw",
    (84, 80, 3, 4): "hwcf",
    (2, 20, 24, 1): "fhwc",
    (84, 84): "hw",
}


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_stacked_frames_are_channels(name: str, shape: tuple[int, ...]) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    axes = [LAYOUTS[shape].index(axis) for axis in LAYOUTS[shape].replace("hw", "") + "hw"]
    *stacked, height, width = (shape[axis] for axis in axes)
    num_channels = math.prod(stacked)
    folded = spaces.Box(0, 255, (num_channels, height, width), np.uint8)
    module, of_folded = MODULES[name](space, TWO, {}), MODULES[name](folded, TWO, {})
    of_folded.load_state_dict(module.state_dict())
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(3)]))
    channels = obs.permute(0, *(axis + 1 for axis in axes)).reshape(3, num_channels, height, width)
    torch.testing.assert_close(module.policy(obs), of_folded.policy(channels))
    assert sum(p.numel() for p in network_of(module).parameters()) < 2_500_000


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 8, 3), True), ((3, 8, 8), True), ((2, 7, 9, 3), False), ((9, 9), False), ((2, 2, 9, 9, 3), False)],
)
def test_which_shapes_are_images(shape: tuple[int, ...], expected: bool) -> None:
    assert is_image(spaces.Box(0, 1, shape, np.float32)) is expected


@pytest.mark.parametrize(
    ("high", "dtype", "shape", "expected"),
    [
        (255, np.uint8, (84, 80), True),
        (255, np.uint8, (84, 4), False),
        (12, np.uint8, (84, 84), False),
        (255, np.float32, (84, 84), False),
    ],
)
def test_grey_images_need_no_axis_of_channels(high: int, dtype: Any, shape: tuple[int, ...], expected: bool) -> None:
    assert is_image(spaces.Box(0, high, shape, dtype)) is expected


@pytest.mark.parametrize("name", MODULES)
def test_filters_make_images_of_small_boards_and_need_an_image(name: str) -> None:
    filters = {"conv_filters": [[16, 2, 1], [32, 2, 1]]}
    for shape in ((7, 7, 3), (3, 7, 7)):  # as MiniGrid's boards
        board = spaces.Box(0, 255, shape, np.uint8)
        assert kinds(network_of(MODULES[name](board, TWO, filters)))[0] == "Conv2d"
        assert "Conv2d" not in kinds(network_of(MODULES[name](board, TWO, {})))
    both = spaces.Dict(camera=ATARI, table=spaces.Box(0, 1, (2, 3, 2), np.float32))
    network = network_of(MODULES[name](both, TWO, {"conv_filters": [[32, 8, 4]]}))
    assert [type(part).__name__ for part in network.get_submodule("encoder" if name != "ppo" else "").parts] == [
        "ImageEncoder",
        "Flat",
    ]
    for shape in ((4,), (84, 84)):
        with pytest.raises(ConfigError, match=r"conv_filters=.* no part of the observations .* is an image"):
            MODULES[name](spaces.Box(0, 1, shape, np.float32), TWO, filters)


def test_the_module_of_sac_with_memory_has_the_filters_in_its_encoder() -> None:
    settings = {"use_lstm": True, "conv_filters": [[6, 5, 2]], "conv_features": 8, "fcnet_hiddens": [8]}
    module = RecurrentSACModule(ATARI, spaces.Box(-1, 1, (2,), np.float32), settings)
    assert [part.out_channels for part in module.encoder.modules() if isinstance(part, nn.Conv2d)] == [6]
    assert not any(isinstance(part, nn.Conv2d) for part in [*module.actor.modules(), *module.q.modules()])


@pytest.mark.parametrize("filters", [[[0, 4, 2]], [[16, 0, 2]], [[16, 4, 0]], []])
def test_filters_without_channels_pixels_or_steps_are_refused(filters: Any) -> None:
    with pytest.raises(ConfigError, match=r"model_config: conv_filters=.* at least 1"):
        ActorCritic(ATARI, TWO, {"conv_filters": filters})


def test_the_streams_of_a_dueling_network_share_the_features_of_the_image() -> None:
    module = QModule(ATARI, TWO, {"dueling": True})
    obs = torch.randint(0, 256, (3, 84, 84, 4), dtype=torch.uint8)
    features: Tensor = module.q.encoder(obs)  # type: ignore[operator,union-attr]
    head: Any = module.q.head
    value, advantage = head.value(features[:, :256]), head.advantage(features[:, 256:])
    torch.testing.assert_close(module.q_values(obs), value + advantage - advantage.mean(1, keepdim=True))
    with pytest.raises(ConfigError, match="an even number of features: conv_features for one image"):
        QModule(ATARI, TWO, {"dueling": True, "conv_features": 9})
