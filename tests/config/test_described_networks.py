"""What `corral config` says of the default network of an algorithm is what is built."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from torch import nn

from corral.algorithms.config.description import describe_network
from corral.algorithms.registry import ALGORITHMS, config_class
from corral.modules.networks import ACTIVATIONS, LayerNorm

OBS = spaces.Box(-1, 1, (5,), np.float32)


@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name != "DreamerV3"])
def test_the_described_defaults_are_those_of_the_built_network(algo: str) -> None:
    described = {setting.name: setting for setting in describe_network(config_class(algo))}
    actions: Any = spaces.Discrete(3) if algo in ("DQN", "PQN") else spaces.Box(-1, 1, (2,), np.float32)
    module = config_class(algo)().module_spec(OBS, actions).build()
    layers = module.policy_layers()
    assert layers is not None
    matrices = [
        layer.weight if isinstance(layer, nn.Linear) else layer.affine()[0]  # CrossQ's are normalised
        for layer in layers[0]
        if isinstance(layer, nn.Linear) or callable(getattr(layer, "affine", None))
    ]
    widths = [len(matrix) for matrix in matrices[:-1]]
    [said] = re.findall(r"`None` is `\[(.*?)\]`, and none if", described["fcnet_hiddens"].meaning)
    assert widths == [int(width) for width in said.split(", ")]
    kinds = {type(layer) for layer in layers[0]}
    assert (LayerNorm in kinds) == described["use_layernorm"].default
    assert ACTIVATIONS[described["fcnet_activation"].default] in kinds


def test_only_the_settings_of_an_algorithm_are_described() -> None:
    found = {name: {setting.name for setting in describe_network(config_class(name))} for name in ALGORITHMS}
    assert "critic_hiddens" in found["SAC"] and "critic_hiddens" not in found["PPO"]
    assert "vf_share_layers" in found["PPO"] and "vf_share_layers" not in found["DQN"]
    assert {"use_lstm", "max_seq_len"} <= found["DQN"]
    assert found["DreamerV3"] == {"max_seq_len"}
