"""Every action distribution against torch.distributions, against its own samples, and against the space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch import distributions as td

from at_least import at_least
from corral.errors import ConfigError
from corral.modules.distributions import ActionDistribution, Deterministic, DiagGaussian, action_distribution

B = 40_000


def box(low: list[float], high: list[float], dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


# name -> (space, action_bounds)
CASES: dict[str, tuple[spaces.Space[Any], str]] = {
    "discrete": (spaces.Discrete(4), "clip"),
    "discrete_start": (spaces.Discrete(3, start=-2), "clip"),
    "multi_discrete": (spaces.MultiDiscrete([3, 2, 4]), "clip"),
    "multi_discrete_start": (spaces.MultiDiscrete([3, 2], start=[5, -1]), "clip"),
    "multi_discrete_2d": (spaces.MultiDiscrete(np.array([[2, 3], [4, 2]])), "clip"),
    "multi_binary": (spaces.MultiBinary(3), "clip"),
    "multi_binary_2d": (spaces.MultiBinary((2, 2)), "clip"),
    "box": (spaces.Box(-1, 1, (3,), np.float32), "clip"),
    "box_2d": (spaces.Box(-2, 1, (2, 2), np.float32), "clip"),
    "box_float64": (spaces.Box(-0.1, 0.3, (2,), np.float64), "clip"),
    "box_uneven": (box([0, -5], [10, 1]), "clip"),
    "box_half_bounded": (box([0, -np.inf], [np.inf, 3]), "clip"),
    "box_unbounded": (spaces.Box(-np.inf, np.inf, (2,), np.float32), "clip"),
    "squash": (spaces.Box(-1, 1, (2,), np.float32), "squash"),
    "squash_uneven": (box([0, -5], [10, 1]), "squash"),
}
BOXES = [name for name, (space, _) in CASES.items() if isinstance(space, spaces.Box)]
DISCRETE = [name for name in CASES if name not in BOXES]
every_case = pytest.mark.parametrize("name", CASES)


def make(name: str) -> tuple[ActionDistribution, spaces.Space[Any]]:
    space, bounds = CASES[name]
    return action_distribution(space, bounds), space


def inputs(distribution: ActionDistribution, batch_size: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.7, (batch_size, distribution.num_inputs)).astype(np.float32)


def sampled(distribution: ActionDistribution, dist_inputs: NDArray[np.float32], seed: int = 1) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    return distribution.sample(dist_inputs, distribution.noise(rng, (len(dist_inputs),)))


class Joint:
    """Independent categoricals side by side, from torch's own."""

    def __init__(self, logits: Tensor, space: spaces.MultiDiscrete) -> None:
        self.parts = [td.Categorical(logits=part) for part in logits.split(space.nvec.reshape(-1).tolist(), -1)]

    def log_prob(self, actions: Tensor) -> Tensor:
        columns = actions.reshape(len(actions), -1).unbind(1)
        return torch.stack([part.log_prob(a) for part, a in zip(self.parts, columns, strict=True)]).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: Joint) -> Tensor:
        pairs = zip(self.parts, other.parts, strict=True)
        return torch.stack([td.kl_divergence(p, q) for p, q in pairs]).sum(0)


def reference(space: spaces.Space[Any], dist_inputs: Tensor) -> Any:
    """Return torch's distribution; of a squashed Box, the one before the tanh."""
    if isinstance(space, spaces.Discrete):
        return td.Categorical(logits=dist_inputs)
    if isinstance(space, spaces.MultiDiscrete):
        return Joint(dist_inputs, space)
    if isinstance(space, spaces.MultiBinary):
        return td.Independent(td.Bernoulli(logits=dist_inputs), 1)
    mean, log_std = dist_inputs.chunk(2, -1)
    return td.Independent(td.Normal(mean, log_std.exp()), 1)


def flat(space: spaces.Space[Any], actions: Tensor) -> Tensor:
    return actions if isinstance(space, spaces.Discrete) else actions.reshape(len(actions), -1).float()


@every_case
def test_logp_entropy_and_kl_match_torch(name: str) -> None:
    distribution, space = make(name)
    one, other = inputs(distribution, 64, seed=0), inputs(distribution, 64, seed=1)
    actions = torch.from_numpy(sampled(distribution, one))
    p, q = reference(space, torch.from_numpy(one)), reference(space, torch.from_numpy(other))
    kl = p.kl(q) if isinstance(p, Joint) else td.kl_divergence(p, q)
    torch.testing.assert_close(
        distribution.kl(torch.from_numpy(one), torch.from_numpy(other)), kl, rtol=1e-4, atol=1e-5
    )
    if CASES[name][1] == "squash":
        # In double precision: torch inverts the tanh, which loses the tails in single precision.
        gaussian = reference(space, torch.from_numpy(one).double())
        squashed = td.TransformedDistribution(gaussian, [td.TanhTransform()]).log_prob(torch.tanh(actions.double()))
        logp = distribution.logp(torch.from_numpy(one), actions).double()
        torch.testing.assert_close(logp, squashed, rtol=1e-4, atol=1e-4)
        return
    logp = p.log_prob(actions if isinstance(p, Joint) else flat(space, actions))
    torch.testing.assert_close(distribution.logp(torch.from_numpy(one), actions), logp, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(distribution.entropy(torch.from_numpy(one)), p.entropy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.5, -1.0), (-1.5, 0.0), (0.0, 0.7), (2.0, -2.0)])
def test_squashed_entropy_matches_its_samples(mean: float, log_std: float) -> None:
    distribution = action_distribution(spaces.Box(-1, 1, (1,), np.float32), "squash")
    dist_inputs = np.tile(np.array([mean, log_std], np.float32), (400_000, 1))
    actions = torch.from_numpy(sampled(distribution, dist_inputs))
    estimate = -distribution.logp(torch.from_numpy(dist_inputs), actions).mean()
    # The mean of 400,000 draws is off by less than 0.01; 16 quadrature nodes by less than another 0.01.
    assert distribution.entropy(torch.from_numpy(dist_inputs[:1])).item() == pytest.approx(estimate.item(), abs=0.02)


@pytest.mark.parametrize("name", DISCRETE)
def test_extreme_logits_stay_finite(name: str) -> None:
    distribution, _ = make(name)
    one = torch.full((2, distribution.num_inputs), -80.0)
    one[:, 0] = 80.0
    actions = torch.from_numpy(distribution.mode(one.numpy()))
    assert torch.isfinite(distribution.logp(one, actions)).all()
    torch.testing.assert_close(distribution.kl(one, one), torch.zeros(2))
    assert torch.isfinite(distribution.entropy(one)).all()


def marginals(space: spaces.Space[Any], dist_inputs: NDArray[np.float32]) -> list[NDArray[Any]]:
    """Return the probabilities of each entry's values, for one row of inputs."""
    if isinstance(space, spaces.MultiBinary):
        on = 1 / (1 + np.exp(-dist_inputs[0]))
        return [np.array([1 - p, p]) for p in on]
    sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.reshape(-1).tolist()  # type: ignore[attr-defined]
    parts = np.split(np.exp(dist_inputs[0]), np.cumsum(sizes)[:-1])
    return [part / part.sum() for part in parts]


@pytest.mark.parametrize("name", DISCRETE)
def test_samples_come_as_often_as_their_probability(name: str) -> None:
    distribution, space = make(name)
    dist_inputs = np.repeat(inputs(distribution, 1), B, axis=0)
    actions = sampled(distribution, dist_inputs).reshape(B, -1)
    for entry, probabilities in enumerate(marginals(space, dist_inputs)):
        share = np.bincount(actions[:, entry].astype(int), minlength=len(probabilities)) / B
        # Five standard errors of a share out of 40,000 draws.
        np.testing.assert_allclose(share, probabilities, atol=5 * 0.5 / np.sqrt(B))


@pytest.mark.parametrize("name", BOXES)
def test_samples_have_the_mean_and_deviation_of_the_inputs(name: str) -> None:
    distribution, _ = make(name)
    dist_inputs = np.repeat(inputs(distribution, 1), B, axis=0)
    mean, log_std = np.split(dist_inputs[0], 2)
    actions = sampled(distribution, dist_inputs).reshape(B, -1)
    std = np.exp(log_std)
    np.testing.assert_array_less(np.abs(actions.mean(0) - mean), 5 * std / np.sqrt(B))
    np.testing.assert_allclose(actions.std(0), std, rtol=0.03)


@every_case
def test_mode_is_the_most_likely_action(name: str) -> None:
    distribution, space = make(name)
    dist_inputs = inputs(distribution, 200)
    at_mode = torch.from_numpy(distribution.mode(dist_inputs))
    assert at_mode.shape == (200, *distribution.action_shape)
    # Of a squashed Gaussian the deterministic action is the squashed mean: the mode before the tanh.
    p = reference(space, torch.from_numpy(dist_inputs))
    best = p.log_prob(at_mode if isinstance(p, Joint) else flat(space, at_mode))
    for seed in range(5):
        actions = torch.from_numpy(sampled(distribution, dist_inputs, seed))
        assert (best >= p.log_prob(actions if isinstance(p, Joint) else flat(space, actions)) - 1e-6).all()


@every_case
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_to_env_gives_actions_of_the_space(name: str, scale: float) -> None:
    distribution, space = make(name)
    dist_inputs = inputs(distribution, 300) * np.float32(scale if name in DISCRETE else 1)
    if name in BOXES:
        dist_inputs[:, : distribution.num_noise] *= scale
    for actions in (sampled(distribution, dist_inputs), distribution.mode(dist_inputs)):
        for action in distribution.to_env(actions):
            assert space.contains(action), f"{action!r} is not in {space}"


@every_case
def test_tensors_give_what_arrays_give(name: str) -> None:
    distribution, _ = make(name)
    dist_inputs, rng = inputs(distribution, 20) * np.float32(2), np.random.default_rng(3)
    noise = distribution.noise(rng, (20,))
    tensors = torch.from_numpy(dist_inputs)
    actions = distribution.sample(dist_inputs, noise)
    pairs = [(actions, distribution.sample(tensors, torch.from_numpy(noise)))]
    pairs += [(distribution.mode(dist_inputs), distribution.mode(tensors))]
    steps = [distribution.to_env]
    if isinstance(distribution, DiagGaussian):
        steps += [distribution.to_unit, distribution.from_unit]
    pairs += [(step(actions), step(torch.from_numpy(actions))) for step in steps]
    pairs += [(distribution.to_env(distribution.mode(dist_inputs)), distribution.env_mode(tensors))]
    for array, tensor in pairs:
        assert isinstance(tensor, Tensor)
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-5, atol=1e-6)
        assert tensor.numpy().dtype == array.dtype and tensor.data_ptr() != torch.from_numpy(actions).data_ptr()


@every_case
def test_a_generator_of_torch_draws_noise_like_the_one_of_numpy(name: str) -> None:
    distribution, _ = make(name)
    drawn = distribution.noise(torch.Generator().manual_seed(0), (B,))
    expected = distribution.noise(np.random.default_rng(0), (B,))
    assert drawn.shape == expected.shape and drawn.dtype == torch.float32
    np.testing.assert_allclose(drawn.numpy().mean(0), expected.mean(0), atol=0.08)
    np.testing.assert_allclose(drawn.numpy().std(0), expected.std(0), atol=0.08)


@every_case
def test_random_actions_fill_the_space(name: str) -> None:
    distribution, space = make(name)
    actions = distribution.random(np.random.default_rng(0), 2000)
    assert actions.shape == (2000, *distribution.action_shape)
    assert actions.dtype == distribution.action_dtype
    in_env = distribution.to_env(actions)
    assert all(space.contains(action) for action in at_least(1, in_env))
    if isinstance(space, spaces.Box):
        if space.is_bounded():
            width = space.high - space.low
            np.testing.assert_allclose(in_env.mean(0), (space.low + space.high) / 2, atol=0.03 * width.max())
            np.testing.assert_allclose(in_env.std(0), width / np.sqrt(12), rtol=0.05)
    else:
        entries = actions.reshape(2000, -1)
        for entry, probabilities in enumerate(marginals(space, np.zeros((1, distribution.num_inputs), np.float32))):
            share = np.bincount(entries[:, entry].astype(int), minlength=len(probabilities)) / 2000
            np.testing.assert_allclose(share, probabilities, atol=0.06)


def test_bounded_box_actions_cover_the_range() -> None:
    clip, squash = (action_distribution(CASES["box_uneven"][0], bounds) for bounds in ("clip", "squash"))
    ends = np.array([[-1, -1], [0, 0], [1, 1], [9, -9]], np.float32)
    np.testing.assert_allclose(clip.to_env(ends), [[0, -5], [5, -2], [10, 1], [10, -5]])
    np.testing.assert_allclose(squash.to_env(ends * 20), [[0, -5], [5, -2], [10, 1], [10, -5]], atol=1e-5)


def test_unbounded_directions_keep_the_units_of_the_env() -> None:
    distribution, _ = make("box_half_bounded")
    np.testing.assert_allclose(distribution.to_env(np.array([[7, -50], [-1, 4]], np.float32)), [[7, -50], [0, 3]])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (2,), np.uint8),
        spaces.Dict(a=spaces.Discrete(2)),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Text(3),
    ],
    ids=["integer_box", "dict", "tuple", "text"],
)
def test_unsupported_spaces_are_named(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError) as error:
        action_distribution(space)
    assert str(space) in str(error.value)


@pytest.mark.parametrize("name", ["box_half_bounded", "box_unbounded"])
def test_squash_needs_finite_bounds(name: str) -> None:
    with pytest.raises(ConfigError, match="finite bounds"):
        action_distribution(CASES[name][0], "squash")


def test_a_deterministic_action_is_the_output_with_probability_1() -> None:
    space = box([0, -5], [10, 1])
    distribution = Deterministic(space)
    assert distribution.num_inputs == 2
    outputs = inputs(distribution, 50)
    actions = sampled(distribution, outputs)
    np.testing.assert_array_equal(actions, outputs)
    np.testing.assert_array_equal(distribution.mode(outputs), outputs)
    expected = np.clip(outputs * [5, 3] + [5, -2], [0, -5], [10, 1])
    np.testing.assert_allclose(distribution.to_env(actions), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(distribution.env_mode(torch.from_numpy(outputs)), expected, rtol=1e-5, atol=1e-5)
    same, other = torch.from_numpy(outputs), torch.from_numpy(outputs + 0.1)
    assert distribution.logp(same, same).tolist() == [0.0] * 50
    assert distribution.logp(same, other).tolist() == [-np.inf] * 50
    assert distribution.entropy(same).tolist() == [0.0] * 50
    assert distribution.kl(same, same).tolist() == [0.0] * 50
    assert distribution.kl(same, other).tolist() == [np.inf] * 50
