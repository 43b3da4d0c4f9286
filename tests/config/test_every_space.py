"""Every key of every `model_config` changes the module, for every kind of spaces, or is refused.

The keys come from the declarations. What they change is found in the module itself: its layers and weights, what its
methods return for two observations, its distribution, and its transforms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.algorithms.config.without_effect import (
    network_settings,
    refuse_settings_without_effect,
    refuse_settings_without_use,
)
from corral.algorithms.registry import config_class
from corral.errors import ConfigError
from corral.modules.distributions import SquashedGaussian
from corral.modules.networks import example_obs
from corral.modules.spec import ModuleSpec

FLAT, IMAGE = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 255, (8, 8, 8), np.uint8)
MASKED = spaces.Dict({"obs": FLAT, "action_mask": spaces.MultiBinary(3)})
DISCRETE, BOX = spaces.Discrete(3), spaces.Box(-2, 2, (2,), np.float32)
PARTS = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,), np.float32)})
SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "flat-Discrete": (FLAT, DISCRETE),
    "flat-Box": (FLAT, BOX),
    "flat-Dict": (FLAT, PARTS),
    "flat-MultiDiscrete": (FLAT, spaces.MultiDiscrete([2, 3])),
    "flat-MultiBinary": (FLAT, spaces.MultiBinary(2)),
    "image-Discrete": (IMAGE, DISCRETE),
    "image-Box": (IMAGE, BOX),
    "Discrete-Box": (spaces.Discrete(3), BOX),
    "masked-Discrete": (MASKED, DISCRETE),
}


class Features(torch.nn.Module):
    """Some features of flat observations, and of images."""

    def __init__(self, observation_space: Any, width: int = 3) -> None:
        super().__init__()
        self.layer = torch.nn.LazyLinear(width)
        self.layer(torch.zeros(1, int(np.prod(observation_space.shape or (1,)))))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(obs.flatten(1).float()))


INITIALIZERS = [
    f"{part}_{kind}_initializer" for part in ("fcnet", "conv", "head", "rnn") for kind in ("kernel", "bias")
]
VALUES: dict[str, Any] = {
    **{"architecture": "simba", "fcnet_hiddens": [6], "head_hiddens": [5], "critic_hiddens": [7]},
    **{f"{part}_activation": "elu" for part in ("fcnet", "conv", "head")},
    **{"use_layernorm": True, "head_use_layernorm": True, "conv_filters": [[3, 2, 2]], "conv_features": 5},
    **{"channel_axis": "first", "image_scale": 0.5},
    **{"features_extractor": Features, "features_extractor_config": {"width": 5}, "share_features": True},
    **dict.fromkeys(INITIALIZERS, "normal"),
    **{f"{name}_kwargs": {"std": 0.3} for name in INITIALIZERS},
    **{"action_masks": False, "action_bounds": "squash", "action_parts": "autoregressive"},
    **{"use_lstm": True, "use_gru": True, "lstm_cell_size": 5, "gru_cell_size": 5, "max_seq_len": 7},
    **{"free_log_std": False, "initial_log_std": -1.0, "log_std_bounds": (-3.0, 0.5), "log_std_clip": 1.0},
    **{"action_distribution": SquashedGaussian, "renorm_momentum": 0.5, "renorm_warmup_updates": 5},
}
# What a key may wait for; each of them is tried with the spaces below, in which all keys are varied again.
PARTS_ON: dict[str, dict[str, Any]] = {
    "lstm": {"use_lstm": True, "rnn_kernel_initializer": "normal", "rnn_bias_initializer": "normal"},
    "gru": {"use_gru": True},
    "heads": {"head_hiddens": [4]},
    "extractor": {"features_extractor": Features},
    "blocks": {"architecture": "simba", "fcnet_hiddens": [8]},
    "no layers": {"fcnet_hiddens": []},
    "functions": dict.fromkeys((*INITIALIZERS[:2], *INITIALIZERS[4:6]), "normal"),
    "functions of convolutions": {
        **dict.fromkeys(INITIALIZERS[2:4], "normal"),
        **{f"{name}_kwargs": {"std": 0.1} for name in INITIALIZERS[2:4]},
    },
    "distribution": {"action_distribution": SquashedGaussian},
}
WITH_PARTS = ("flat-Discrete", "flat-Box", "image-Discrete", "image-Box")
# Whether a module shares layers by default depends on the observations.
SHARES = {"vf_share_layers": lambda observation_space: observation_space is not IMAGE}
# Keys that the algorithm refuses in every form, because its modules lack the part.
UNSEEN = {**{name: {"action_masks"} for name in ("TD3", "TQC")}, "CrossQ": {"action_masks", "architecture"}}
# Defaults of one algorithm that are the values here, or large.
SMALL = {"fcnet_hiddens": [4], "critic_hiddens": [4], "conv_features": 4}


def spec_of(algo: str, model_config: Mapping[str, Any], where: str) -> ModuleSpec:
    """Return the spec of a module that building the algorithm would not refuse."""
    config: Any = config_class(algo)().copy(model_config=dict(model_config), seed=1)
    refuse_settings_without_effect(config)
    spec: ModuleSpec = config.module_spec(*SPACES[where])
    refuse_settings_without_use(config, {"default_policy": spec})
    return spec


def describe(value: Any) -> Any:
    """Return what two modules may differ in, of a tensor, a distribution or a setting of a layer."""
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, (tuple, list)):
        return [describe(part) for part in value]
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def signature(spec: ModuleSpec) -> Any:
    """Return everything of a module that a setting may change."""
    module = spec.build().eval()
    outputs, calls = [], module.outputs(example_obs(module.observation_space))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        outputs = [(call, describe(output)) for call, output, _ in calls]
    layers = [
        (name, {key: describe(value) for key, value in vars(layer).items() if key[0] != "_"})
        for name, layer in module.named_modules()
        if name
    ]
    distribution = {name: describe(value) for name, value in vars(module.distribution).items()}
    weights = [(name, describe(value)) for name, value in module.state_dict().items()]
    transforms = None if spec.pipeline is None else [type(each) for each in spec.pipeline.transforms]
    how = type(module), type(module.distribution), module.max_seq_len, transforms
    return how, [type(layer) for layer in module.modules()], layers, distribution, weights, outputs


def cases(keys: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for where in SPACES:
        yield where, {}
        for part, given in PARTS_ON.items() if where in WITH_PARTS else ():
            if given.keys() <= keys and ("image" in where) == (part == "functions of convolutions"):
                yield where, given


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("TQC", "CrossQ", "CQL", "IQL")]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("algo", ["PPO", "DQN", "SAC", "TD3", *SLOW])
def test_every_key_of_a_model_config_changes_the_module_or_is_refused(algo: str, half: int) -> None:
    network = network_settings(config_class(algo)())
    assert network is not None
    keys = {field.name for field in dataclasses.fields(network)}
    assert keys <= VALUES.keys() | SHARES.keys()
    varied = {*sorted(keys)[half::2]}
    num_changed, silent = dict.fromkeys(varied, 0), []
    for where, given in cases(keys):
        base = {**{name: value for name, value in SMALL.items() if name in keys}, "use_layernorm": False, **given}
        if "architecture" in base or SPACES[where][0] is not IMAGE:
            base = {name: value for name, value in base.items() if name not in ("conv_features",)}
        try:
            plain = signature(spec_of(algo, base, where))
        except ConfigError:
            continue  # the algorithm lacks the spaces or the part
        for name in varied - {name for name in given if name in VALUES and VALUES[name] == given[name]}:
            value = SHARES[name](SPACES[where][0]) if name in SHARES else VALUES[name]
            try:
                changed = signature(spec_of(algo, {**base, name: value}, where)) != plain
            except ConfigError:
                continue
            num_changed[name] += changed
            if not changed:
                silent.append((where, given, name))
    assert not silent
    assert {name for name, count in num_changed.items() if not count} == UNSEEN.get(algo, set()) & varied
