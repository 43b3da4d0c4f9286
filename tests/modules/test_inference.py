"""The sampling path gives what the module gives, whichever backend computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.core.tree import map_tree
from corral.modules.inference import Inference
from corral.modules.module import ActorCritic

VECTOR = spaces.Box(-1, 1, (6,), np.float32)
BOX = spaces.Box(-1, 1, (2,), np.float32)


def observations(space: spaces.Space[Any], size: int = 17) -> Any:
    space.seed(0)
    return map_tree(lambda *leaves: np.stack(leaves), *(space.sample() for _ in range(size)))


def trained(module: ActorCritic) -> ActorCritic:
    """Move all weights away from their special initial values (zero biases, a small head)."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def assert_same(inference: Inference, obs: Any) -> None:
    with torch.no_grad():
        expected = inference.module.policy(map_tree(torch.from_numpy, obs)).numpy()
    outputs = inference(obs)
    assert outputs.dtype == np.float32
    np.testing.assert_allclose(outputs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("action_space", [spaces.Discrete(4), BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hiddens", [[], [8], [64, 64], [16, 32, 8]], ids=str)
@pytest.mark.parametrize("free_log_std", [True, False])
def test_numpy_computes_what_torch_computes(
    action_space: spaces.Space[Any], activation: str, hiddens: list[int], free_log_std: bool
) -> None:
    torch.manual_seed(0)
    settings = {"fcnet_hiddens": hiddens, "fcnet_activation": activation, "free_log_std": free_log_std}
    inference = Inference(trained(ActorCritic(VECTOR, action_space, settings)))
    inference.refresh()
    assert inference.backend == "numpy"
    assert_same(inference, observations(VECTOR))


@pytest.mark.parametrize(
    "normalised", [{"use_layernorm": True}, {"head_hiddens": [6], "head_use_layernorm": True}], ids=str
)
@pytest.mark.parametrize("activation", ["tanh", "relu", "linear"])
@pytest.mark.parametrize("action_space", [spaces.Discrete(4), BOX], ids=["discrete", "box"])
def test_numpy_computes_layer_normalisations(
    action_space: spaces.Space[Any], activation: str, normalised: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    settings = {"fcnet_hiddens": [16, 8], "fcnet_activation": activation, **normalised}
    module = trained(ActorCritic(VECTOR, action_space, settings))
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, torch.nn.LayerNorm):
                part.weight.uniform_(0.5, 2.0)
                part.bias.normal_()
    inference = Inference(module)
    assert inference.backend == "numpy"
    assert_same(inference, observations(VECTOR))


@pytest.mark.parametrize(
    "space",
    [spaces.Box(-1, 1, (2, 3), np.float64), spaces.Box(0, 255, (5,), np.uint8), spaces.Box(-1, 1, (), np.float32)],
    ids=["matrix_float64", "bytes", "scalar"],
)
def test_numpy_takes_boxes_of_other_shapes_and_dtypes(space: spaces.Box) -> None:
    inference = Inference(ActorCritic(space, BOX, {}))
    assert inference.backend == "numpy"
    obs = observations(space)
    before = np.array(obs)
    assert_same(inference, obs)
    np.testing.assert_array_equal(obs, before)  # computing in place must not reach the observations


@pytest.mark.parametrize(
    ("space", "settings"),
    [
        (VECTOR, {"fcnet_hiddens": [1024]}),
        (VECTOR, {"fcnet_activation": "gelu"}),
        (VECTOR, {"fcnet_activation": "elu"}),
        (spaces.Box(0, 255, (20, 20, 3), np.uint8), {}),
        (spaces.Discrete(4, start=1), {}),
        (spaces.Dict(a=VECTOR, b=spaces.MultiBinary(2)), {}),
    ],
    ids=["wide", "gelu", "elu", "image", "discrete", "dict"],
)
def test_torch_computes_everything_else(space: spaces.Space[Any], settings: dict[str, Any]) -> None:
    inference = Inference(trained(ActorCritic(space, BOX, settings)))
    assert inference.backend == "torch"
    assert_same(inference, observations(space))


@pytest.mark.parametrize("activation", ["tanh", "gelu"], ids=["numpy", "torch"])
def test_new_weights_act_after_loading(activation: str) -> None:
    settings = {"fcnet_activation": activation}
    inference = Inference(ActorCritic(VECTOR, BOX, settings))
    source = trained(ActorCritic(VECTOR, BOX, settings))
    inference.load_weights({name: value.numpy() for name, value in source.state_dict().items()})
    obs = observations(VECTOR)
    with torch.no_grad():
        expected = source.policy(torch.from_numpy(obs)).numpy()
    np.testing.assert_allclose(inference(obs), expected, atol=1e-5, rtol=1e-5)
