"""The parts of the world model of DreamerV3, each against a slow reference or a closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from corral.errors import ConfigError
from corral.modules.dreamerv3_module import DreamerV3Module
from corral.modules.two_hot import TwoHotBins, drawn, mixed_logits, symexp, symlog
from corral.modules.world_model import SIZES, Cell, WorldModel

NUMBERS = [-3e5, -20.0, -1.0, -0.3, 0.0, 1e-3, 0.5, 1.0, 12.25, 4e7]
PICTURES = spaces.Box(0, 255, (32, 48, 3), np.uint8)
NESTED = spaces.Dict({"camera": PICTURES, "place": spaces.Discrete(5, start=2), "speed": spaces.Box(-9, 9, (2,))})
Wide = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def test_symlog_is_the_logarithm_of_large_numbers_of_both_signs_and_symexp_its_inverse() -> None:
    expected = [math.copysign(math.log(1 + abs(x)), x) for x in NUMBERS]
    found = symlog(torch.tensor(NUMBERS, dtype=torch.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(symexp(found), NUMBERS, rtol=1e-9, atol=1e-12)


def slow_two_hot(number: float, bins: list[float]) -> list[float]:
    """Return the weights of all bins: the two next to the number share 1."""
    place = min(max(math.copysign(math.log(1 + abs(number)), number), bins[0]), bins[-1])
    weights = [0.0] * len(bins)
    upper = next(k for k, each in enumerate(bins) if each >= place and k)
    share = (place - bins[upper - 1]) / (bins[upper] - bins[upper - 1])
    weights[upper], weights[upper - 1] = share, 1 - share
    return weights


def test_cross_entropies_are_those_to_the_weights_of_a_slow_loop() -> None:
    head, given = TwoHotBins(41), [*NUMBERS, 1e12, -1e12]
    logits = torch.randn(len(given), 41, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([slow_two_hot(number, head.bins.tolist()) for number in given])
    expected = -(weights * logits.log_softmax(-1)).sum(-1)
    numbers = torch.tensor(given)
    np.testing.assert_allclose(head.cross_entropy(logits, numbers), expected, rtol=1e-3, atol=1e-4)
    both = head.cross_entropy(logits, numbers, torch.zeros(len(given)))
    np.testing.assert_allclose(both - expected, head.cross_entropy(logits, torch.zeros(len(given))), atol=1e-3)


def test_the_mean_of_two_hot_numbers_between_bins_is_close_to_them() -> None:
    head = TwoHotBins()
    weights = torch.tensor([slow_two_hot(number, head.bins.tolist()) for number in NUMBERS])
    assert head.mean(weights.clamp(min=1e-30).log()).tolist() == pytest.approx(NUMBERS, rel=2e-3, abs=2e-3)
    assert head.mean(torch.zeros(2, 255)).tolist() == pytest.approx([0, 0], abs=1e-3)  # a head that starts at 0


def test_mixed_probabilities_are_the_softmax_and_one_percent_of_the_uniform_one() -> None:
    logits = torch.tensor([[0.0, 50.0, -50.0], [1.0, 2.0, 3.0]])
    probs = mixed_logits(logits).exp()
    np.testing.assert_allclose(probs, 0.99 * logits.softmax(-1) + 0.01 / 3, rtol=1e-5)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)


def test_classes_are_drawn_as_often_as_they_are_likely() -> None:
    logp = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().expand(10_000, 4)
    found = drawn(logp, torch.arange(10_000) / 10_000)
    assert torch.bincount(found, minlength=4).tolist() == pytest.approx([5000, 0, 3000, 2000], abs=2)
    assert drawn(torch.tensor([0.5, 0.5]).log(), torch.tensor(1 - 1e-8)).item() == 1  # rounding leaves no class out


def test_the_cell_is_a_gru_with_normalised_sums_and_a_gate_that_starts_nearly_closed() -> None:
    cell = Cell(3, 5)
    inputs, h = torch.randn(2, 4, 3)[0], torch.randn(4, 5)
    sums = torch.cat([h, inputs], -1) @ cell.linear.weight.T
    mean, var = sums.mean(-1, keepdim=True), sums.var(-1, unbiased=False, keepdim=True)
    reset, candidate, update = ((sums - mean) / (var + 1e-5).sqrt()).split(5, -1)
    update = 1 / (1 + (1 - update).exp())
    expected = update * torch.tanh(candidate / (1 + (-reset).exp())) + (1 - update) * h
    torch.testing.assert_close(cell(inputs, h), expected)


def one_step(model: WorldModel, h: Tensor, z: Tensor, action: Tensor, seen: Tensor, uniform: Tensor) -> Any:
    """Return the next state, and the probabilities that it was drawn from, for one row and in plain numbers."""
    h = model.cell(model.cell_inputs(torch.cat([z, action])[None]), h[None])[0]
    logits = model.posterior_head(torch.cat([h, seen])[None])[0].reshape(model.size.variables, model.size.classes)
    probs = 0.99 * logits.softmax(-1) + 0.01 / model.size.classes
    z = torch.zeros_like(probs)
    for variable, noise in enumerate(uniform.tolist()):
        total = 0.0
        for number, share in enumerate(probs[variable].tolist()):
            total += share
            if noise < total:
                z[variable, number] = 1.0
                break
    return h, z.flatten(), probs


def test_states_of_sequences_are_those_of_a_slow_loop() -> None:
    torch.manual_seed(0)
    model = WorldModel(Wide, 2, SIZES["nano"])
    num, length = 3, 4
    actions, uniform = torch.randn(num, length, 2), torch.rand(num, length, 4)
    embedded = model.encode(torch.randn(num * length, 3)).reshape(num, length, -1)
    h, z = torch.randn(num, 16), torch.rand(num, 16)
    with torch.no_grad():
        found_h, found_z, logps = model.observe(h, z, actions, embedded, uniform)
        for row in range(num):
            state = h[row], z[row]
            for t in range(length):
                *state, probs = one_step(model, *state, actions[row, t], embedded[row, t], uniform[row, t])
                torch.testing.assert_close(found_h[row, t], state[0])
                torch.testing.assert_close(found_z[row, t], state[1])
                torch.testing.assert_close(logps[row, t].exp(), probs)


def test_gradients_go_through_the_drawn_classes_as_through_their_probabilities() -> None:
    model = WorldModel(Wide, 2, SIZES["nano"])
    logits = torch.randn(1, 1, model.size.units, requires_grad=True)
    _, z, logp = model.observe(
        torch.zeros(1, 16), torch.zeros(1, 16), torch.zeros(1, 1, 2), logits, torch.rand(1, 1, 4)
    )
    weights = torch.randn(16)
    (through,) = torch.autograd.grad((z * weights).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logp.exp().flatten() * weights).sum(), logits)
    torch.testing.assert_close(through, expected)


def test_an_episode_begins_with_the_learned_state_whatever_was_before() -> None:
    model = WorldModel(Wide, 2, SIZES["nano"])
    torch.nn.init.normal_(model.first_h)
    h, z = torch.randn(2, 16), torch.rand(2, 16)
    found_h, found_z = model.begin(h, z, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(found_h, torch.stack([model.first_h.tanh(), h[1]]))
    likely = model.prior(model.first_h.tanh()).argmax(-1)
    torch.testing.assert_close(found_z, torch.stack([model.vectors(likely), z[1]]))


def test_observation_losses_are_squared_errors_of_symlog_numbers_one_hot_classes_and_pixels() -> None:
    torch.manual_seed(0)
    model = WorldModel(NESTED, 2, SIZES["nano"])
    obs = {
        "speed": torch.tensor([[8.0, -3.0], [0.0, 1.0]]),  # the keys of a dict may come in any order
        "place": torch.tensor([2, 6]),
        "camera": torch.randint(0, 256, (2, 32, 48, 3), dtype=torch.uint8),
    }
    features = torch.randn(2, model.num_features)
    camera: Any = model.parts[0]
    numbers = torch.tensor([[1, 0, 0, 0, 0, math.log(9), -math.log(4)], [0, 0, 0, 0, 1, 0, math.log(2)]])
    pixels = obs["camera"].permute(0, 3, 1, 2) / 255
    expected = (model.decoder(features) - numbers).square().sum(1)
    expected = expected + (camera.decode(features) - pixels).square().sum((1, 2, 3))
    torch.testing.assert_close(model.observation_loss(features, obs), expected)
    assert model.encode(obs).shape == (2, 16 * 2 * 3 + 16)  # 16 channels of 2 x 3 pixels, and 16 units


def make_module(space: Any = Wide, action_space: Any = None, size: str = "nano") -> DreamerV3Module:
    return DreamerV3Module(space, action_space or spaces.Discrete(3), {"model_size": size})


def test_a_state_holds_all_that_the_next_step_needs() -> None:
    module = make_module(action_space=spaces.Box(-2, 2, (2,)))
    obs = torch.randn(1, 3)
    state = {name: part[None] for name, part in module.initial_state().items()}
    _, after = module.policy(obs, state)
    assert after["started"].item() == 1 and not state["started"].item()
    for name, part in (("action", torch.ones(1, 2)), ("h", torch.ones(1, 16)), ("z", (after["z"] + 1) % 4)):
        assert not torch.equal(module.policy(obs, {**after, name: part})[0], module.policy(obs, after)[0]), name
        # Before an episode begins none of them is looked at.
        assert torch.equal(module.policy(obs, {**state, name: part})[0], module.policy(obs, state)[0]), name


def test_while_acting_a_state_is_the_most_likely_one_with_the_observation() -> None:
    torch.manual_seed(0)
    module, obs = make_module(), 5 * torch.randn(8, 3)
    state = {name: part.expand(8, *part.shape) for name, part in module.initial_state().items()}
    with torch.no_grad():
        outputs, after = module.policy(obs, state)
        model = module.world_model
        likely = model.posterior(after["h"], model.encode(obs)).argmax(-1)
        features = torch.cat([after["h"], model.vectors(likely)], -1)
        assert torch.equal(after["z"], likely) and not torch.equal(likely, model.prior(after["h"]).argmax(-1))
        torch.testing.assert_close(outputs, module.policy_of(features))
        torch.testing.assert_close(module.value(obs, state), model.bins.mean(module.critic(features)))


@pytest.mark.parametrize("size", ["nano", "micro", "mini", "XXS", "XS"])
def test_sizes_have_the_widths_that_their_names_say(size: str) -> None:
    module, widths = make_module(size=size), SIZES[size]
    assert module.world_model.cell.linear.weight.shape == (3 * widths.cell, widths.cell + widths.units)
    assert module.initial_state()["z"].shape == (widths.variables,)
    assert module.actor[0].weight.shape == (widths.units, widths.cell + widths.variables * widths.classes)


def test_policies_are_mixed_with_the_uniform_one_or_have_bounded_means_and_deviations() -> None:
    with torch.no_grad():
        module = make_module()
        module.actor[-1].weight.mul_(1000)
        probs = module.policy_of(torch.randn(100, module.world_model.num_features)).exp()
        assert probs.min() >= 0.01 / 3 - 1e-6 and probs.sum(-1).allclose(torch.ones(100))
        module = make_module(action_space=spaces.Box(-2, 2, (2,)))
        module.actor[-1].weight.mul_(1000)
        mean, log_std = module.policy_of(torch.randn(100, module.world_model.num_features)).chunk(2, -1)
    assert mean.abs().max() <= 1 and mean.abs().max() > 0.99
    assert log_std.exp().min() >= 0.0999 and log_std.exp().max() <= 1.0001


@pytest.mark.parametrize(
    ("space", "action_space", "message"),
    [
        (spaces.Box(0, 255, (84, 80, 3), np.uint8), None, r"84 x 80 pixels.*multiples of 16.*\(80, 80\)"),
        (spaces.Box(0, 255, (10, 10, 1), np.uint8), None, r"10 x 10 pixels.*\(16, 16\)"),
        (spaces.Box(0, np.inf, (32, 32, 3)), None, r"pictures without bounds.*transforms=\[NormalizeObs"),
        (Wide, spaces.MultiDiscrete([2, 3]), "takes Discrete actions, or a Box.*MultiDiscrete"),
        (Wide, spaces.Box(-np.inf, 1, (2,)), "bounds are all finite.*wrapper"),
        (
            spaces.Dict({"observations": Wide, "action_mask": spaces.Box(0, 1, (3,), np.int8)}),
            None,
            r"mask of legal actions.*action_masks=False",
        ),
    ],
)
def test_what_it_cannot_take_is_refused_with_the_remedy(space: Any, action_space: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_module(space, action_space)
