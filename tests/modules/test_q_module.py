"""Q-networks: dueling streams, noisy layers, atoms and targets."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from corral.errors import ConfigError
from corral.modules.inference import Inference
from corral.modules.networks import ACTIVATIONS
from corral.modules.q_module import DuelingHead, NoisyLinear, QModule
from corral.modules.sac_module import SACModule
from corral.modules.td3_module import TD3Module

OBS = spaces.Box(-1, 1, (3,), np.float32)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dueling": {"dueling": True},
    "noisy": {"noisy": True},
    "noisy dueling": {"noisy": True, "dueling": True},
    "atoms": {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0},
    "all": {"noisy": True, "dueling": True, "num_atoms": 5},
    "no hidden layer": {"fcnet_hiddens": []},
    "normalised": {"use_layernorm": True},
    "normalised, noisy": {"use_layernorm": True, "noisy": True},
    "normalised, dueling": {"use_layernorm": True, "dueling": True},
    "normalised, dueling, one hidden layer": {"use_layernorm": True, "dueling": True, "fcnet_hiddens": [8]},
}
FOR_TORCH = {"atoms", "all", "normalised, dueling", "normalised, dueling, one hidden layer"}


def made(**settings: Any) -> QModule:
    torch.manual_seed(0)
    return QModule(OBS, spaces.Discrete(4), {"fcnet_hiddens": [8, 6], **settings})


@pytest.mark.parametrize("form", FORMS)
def test_acting_and_learning_see_the_same_values(form: str) -> None:
    module = made(**FORMS[form])
    obs = np.random.default_rng(0).standard_normal((5, 3), dtype=np.float32)
    inference = Inference(module)
    assert inference.backend == ("torch" if form in FOR_TORCH else "numpy")
    inference.begin_sample(True, np.random.default_rng(1))
    values = module.q_values(torch.from_numpy(obs))
    assert values.shape == (5, 4)
    np.testing.assert_allclose(inference(obs), values.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(module.value(torch.from_numpy(obs)).detach(), values.detach().amax(1))


@pytest.mark.parametrize("form", FORMS)
def test_the_target_starts_as_a_copy_and_moves_by_tau(form: str) -> None:
    module, obs = made(**FORMS[form]), torch.randn(5, 3)
    torch.testing.assert_close(module.q_values(obs), module.q_values(obs, target=True))
    old = {name: value.clone() for name, value in module.target_q.state_dict().items()}
    with torch.no_grad():
        for parameter in module.q.parameters():
            parameter += 1
        module.update_target(0.25)
    for name, value in module.target_q.state_dict().items():
        torch.testing.assert_close(value, old[name] + 0.25)
    with torch.no_grad():
        module.update_target(1.0)
    torch.testing.assert_close(module.q_values(obs), module.q_values(obs, target=True))
    assert not any(parameter.requires_grad for parameter in module.target_q.parameters())


@pytest.mark.parametrize("form", ["plain", "dueling", "noisy", "atoms"])
def test_the_activation_is_the_one_asked_for(form: str) -> None:
    module = made(fcnet_activation="silu", **FORMS[form])
    activations = [type(part) for part in module.q.modules() if type(part) in ACTIVATIONS.values()]
    assert activations == [nn.SiLU, nn.SiLU]


def replaced(base: type[Any]) -> Any:
    """Return a module whose networks a subclass has replaced by ones with running statistics."""

    class Normalized(base):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.q = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))])
            self.target_q = copy.deepcopy(self.q).requires_grad_(False)

    actions = spaces.Discrete(4) if base is QModule else spaces.Box(-1, 1, (2,))
    return Normalized(OBS, actions, {})


@pytest.mark.parametrize("base", [QModule, SACModule, TD3Module])
def test_the_target_follows_the_network_and_has_its_running_statistics(base: type[Any]) -> None:
    module = replaced(base)
    module.train().q[0](torch.randn(64, 3) + 5)
    with torch.no_grad():
        module.q[0][1].bias += 4.0
        module.update_target(0.25)
    own, target = dict(module.q.named_buffers()), dict(module.target_q.named_buffers())
    assert own["0.0.running_mean"].min() > 0.3
    for name, value in own.items():
        torch.testing.assert_close(target[name], value)
    torch.testing.assert_close(module.target_q[0][1].bias + 3.0, module.q[0][1].bias)


def test_only_the_network_travels() -> None:
    module = made(dueling=True, noisy=True)
    assert module.acting_weights().keys() == {f"q.{name}" for name, _ in module.q.named_parameters()}


def test_streams_are_told_apart_by_the_mean_advantage() -> None:
    module, obs = made(dueling=True), torch.randn(6, 3)
    head = module.q.head
    assert isinstance(head, DuelingHead)
    features = module.q.streams(module.q.encoder(obs))
    torch.testing.assert_close(module.q_values(obs).mean(1), head.value(features[:, :6]).squeeze(1))
    with torch.no_grad():
        before = module.q_values(obs)
        head.advantage.bias += 3.0  # the same for all actions: the mean takes it off again
        torch.testing.assert_close(module.q_values(obs), before)


class TestNoise:
    def test_it_is_factorised(self) -> None:
        torch.manual_seed(0)
        layer = NoisyLinear(4, 3, sigma0=0.5)
        layer.draw(np.random.default_rng(0))
        with torch.no_grad():
            noise = (layer.affine()[0] - layer.weight_mean) / layer.weight_sigma
            bias_noise = (layer.affine()[1] - layer.bias_mean) / layer.bias_sigma
        assert torch.linalg.matrix_rank(noise) == 1
        torch.testing.assert_close(noise[:, 0] / bias_noise, torch.full((3,), float(noise[0, 0] / bias_noise[0])))

    def test_its_size_at_first_matches_the_paper(self) -> None:
        layer = NoisyLinear(16, 3, sigma0=0.5)
        torch.testing.assert_close(layer.weight_sigma, torch.full((3, 16), 0.5 / 4))
        assert layer.weight_mean.abs().max() <= 1 / 4

    def test_entries_have_unit_mean_square_in_all(self) -> None:
        # f(x) = sign(x) sqrt|x| has E[f^2] = E|x| = sqrt(2 / pi), and a product of two has the square of that.
        layer, rng = NoisyLinear(8, 8, sigma0=0.5), np.random.default_rng(0)
        squares = []
        for _ in range(2000):
            layer.draw(rng)
            squares.append(torch.outer(layer.noise_out, layer.noise_in).square().mean().item())
        assert np.mean(squares) == pytest.approx(2 / np.pi, rel=0.05)

    def test_silence_is_the_mean(self) -> None:
        module, obs = made(noisy=True), torch.randn(2, 3)
        silent = module.q_values(obs).detach()
        module.draw_noise()
        assert not torch.allclose(module.q_values(obs), silent)
        module.silence_noise()
        torch.testing.assert_close(module.q_values(obs).detach(), silent)

    def test_acting_draws_it_for_each_sample_and_is_silent_without_exploration(self) -> None:
        inference, obs = Inference(made(noisy=True)), np.ones((2, 3), np.float32)
        rng = np.random.default_rng(0)
        outputs = []
        for explore in (True, True, False, False):
            inference.begin_sample(explore, rng)
            outputs.append(inference(obs))
        assert not np.allclose(outputs[0], outputs[1]) and not np.allclose(outputs[1], outputs[2])
        np.testing.assert_array_equal(outputs[2], outputs[3])


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 2])], ids=str)
def test_other_actions_are_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError, match="Q-values need Discrete actions"):
        QModule(OBS, space, {})


def test_dueling_needs_a_hidden_layer() -> None:
    with pytest.raises(ConfigError, match="fcnet_hiddens is empty"):
        made(dueling=True, fcnet_hiddens=[])


IMAGES = spaces.Box(0, 255, (36, 36, 3), np.uint8)


@pytest.mark.parametrize(
    ("space", "settings", "widths"),
    [
        (OBS, {}, [128, 128]),
        (OBS, {"fcnet_hiddens": [7]}, [7]),
        (OBS, {"fcnet_hiddens": [7], "use_layernorm": False}, []),
        (OBS, {"fcnet_hiddens": []}, []),
        (OBS, {"fcnet_hiddens": [], "head_hiddens": [5]}, [5]),
        (IMAGES, {}, []),
        (IMAGES, {"fcnet_hiddens": [7]}, [7]),
        (IMAGES, {"has_targets": False}, [128, 128]),
    ],
    ids=str,
)
def test_hidden_layers_are_normalised_where_the_settings_do_not_say(
    space: spaces.Box, settings: dict[str, Any], widths: list[int]
) -> None:
    module = QModule(space, spaces.Discrete(4), {"is_normalized": True, **settings})
    assert [part.normalized_shape[0] for part in module.q.modules() if isinstance(part, nn.LayerNorm)] == widths


def test_blocks_have_the_layers_of_their_architecture() -> None:
    settings = {"architecture": "simba", "fcnet_hiddens": [8]}
    module, plain = (QModule(OBS, spaces.Discrete(4), {**settings, **own}) for own in ({"is_normalized": True}, {}))
    assert module.state_dict().keys() == plain.state_dict().keys()
