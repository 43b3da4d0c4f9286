"""Logits of `-inf` exclude actions: entropy, divergence and gradients count the other actions alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch import distributions as td

from corral import Module, PPOConfig, SACConfig
from corral.modules.distributions import ActionDistribution, action_distribution
from corral.modules.sac_module import SACModule
from corral.testing import CountingEnv

INF = math.inf
SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(3),
}
LOGITS = {  # two rows of each: the first is masked, and so is the second, except that MultiBinary's has no mask
    "discrete": [[0.3, -INF, 1.0, -INF], [-INF, -INF, 2.0, -INF]],
    "multi_discrete": [[-INF, 0.5, 1.0, -INF, -0.3], [0.1, 0.2, -INF, -INF, 3.0]],
    "multi_binary": [[-INF, 0.4, INF], [0.1, 0.2, -0.5]],
}
every_space = pytest.mark.parametrize("name", SPACES)


def probabilities(name: str, logits: Tensor) -> list[Tensor]:
    """Return the probabilities of the independent parts, in float64."""
    exact = logits.detach().double()
    if name == "multi_binary":
        return [torch.stack([p, 1 - p], -1) for p in exact.sigmoid().unbind(-1)]
    return [part.softmax(-1) for part in (exact.split([2, 3], -1) if name == "multi_discrete" else [exact])]


def made(name: str) -> tuple[ActionDistribution, Tensor]:
    return action_distribution(SPACES[name]), torch.tensor(LOGITS[name], requires_grad=True)


@every_space
def test_the_entropy_is_the_entropy_of_what_is_left(name: str) -> None:
    distribution, logits = made(name)
    parts = probabilities(name, logits)
    expected = torch.stack([-(p * p.clamp(min=1e-300).log()).sum(-1) for p in parts]).sum(0)
    torch.testing.assert_close(distribution.entropy(logits), expected.float())


@every_space
def test_the_divergence_is_the_divergence_of_what_is_left(name: str) -> None:
    distribution, logits = made(name)
    other = torch.where(logits.isinf(), logits, logits * 0.5 + 0.1).detach()
    free = torch.where(logits.isinf(), 0.7, logits).detach()
    for against in (other, free):  # with the same mask, and without one
        pairs = zip(probabilities(name, logits), probabilities(name, against), strict=True)
        expected = torch.stack([(p * (p.clamp(min=1e-300) / q.clamp(min=1e-300)).log()).sum(-1) for p, q in pairs]).sum(
            0
        )
        torch.testing.assert_close(distribution.kl(logits, against), expected.float())
    assert distribution.kl(free, logits.detach())[0] == INF  # it excludes what the first one does


@every_space
def test_no_gradient_is_nan_and_none_reaches_what_is_excluded(name: str) -> None:
    distribution, logits = made(name)
    actions = torch.from_numpy(distribution.mode(logits.detach().numpy()))
    other = logits.detach().clone().requires_grad_()
    for value in (
        distribution.logp(logits, actions),
        distribution.entropy(logits),
        distribution.kl(logits, other),
    ):
        for gradient in torch.autograd.grad(value.sum(), [logits, other], allow_unused=True):
            if gradient is not None:
                assert gradient.isfinite().all()
                assert not gradient[logits.isinf()].any()
    assert distribution.logp(logits, actions).isfinite().all()


@every_space
def test_excluded_actions_are_never_sampled(name: str) -> None:
    distribution, logits = made(name)
    dist_inputs = logits.detach().numpy().repeat(2000, 0)
    noise = distribution.noise(np.random.default_rng(0), (len(dist_inputs),))
    actions = torch.from_numpy(distribution.sample(dist_inputs, noise))
    assert distribution.logp(torch.from_numpy(dist_inputs), actions).isfinite().all()
    if name == "discrete":
        picked = np.bincount(actions[:2000], minlength=4) / 2000
        np.testing.assert_allclose(picked, probabilities(name, logits)[0][0], atol=0.04)


@every_space
def test_finite_logits_give_what_torch_gives(name: str) -> None:
    distribution, _ = made(name)
    one, other = torch.randn(2, 7, distribution.num_inputs).unbind()

    def parts(logits: Tensor) -> list[td.Distribution]:
        if name == "multi_binary":
            return [td.Bernoulli(logits=part) for part in logits.unbind(-1)]
        return [
            td.Categorical(logits=part) for part in (logits.split([2, 3], -1) if name == "multi_discrete" else [logits])
        ]

    entropies = torch.stack([part.entropy() for part in parts(one)]).sum(0)
    torch.testing.assert_close(distribution.entropy(one), entropies)
    kls = torch.stack([td.kl_divergence(p, q) for p, q in zip(parts(one), parts(other), strict=True)]).sum(0)
    torch.testing.assert_close(distribution.kl(one, other), kls)


class Masked(Module):
    """Excludes action 1 at all times."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.policy_head, self.value_head = nn.Linear(2, 2), nn.Linear(2, 1)

    def policy(self, obs: Any) -> Tensor:
        return self.policy_head(obs).masked_fill(torch.tensor([False, True]), -INF)  # type: ignore[no-any-return]

    def value(self, obs: Any) -> Tensor:
        return self.value_head(obs).squeeze(-1)  # type: ignore[no-any-return]


class MaskedSAC(SACModule):
    """Excludes action 1 at all times."""

    def policy(self, obs: Any) -> Tensor:
        return self.actor(obs).masked_fill(torch.tensor([False, True]), -INF)  # type: ignore[no-any-return]


def test_ppo_learns_under_a_mask_with_an_entropy_bonus_and_a_kl_penalty() -> None:
    config = PPOConfig().environment(CountingEnv).rl_module(Masked)
    config.training(train_batch_size_per_learner=64, minibatch_size=32, entropy_coeff=0.01, kl_coeff=0.2)
    with config.build() as algo:
        learned = algo.train()["learners"]["default_policy"]
        assert algo.env_runner is not None
        assert not algo.env_runner.sample(num_timesteps=50).actions.any()
    assert learned["entropy"] == learned["mean_kl"] == 0


def test_sac_learns_under_a_mask() -> None:
    config = SACConfig().environment(CountingEnv).rl_module(MaskedSAC, model_config={"fcnet_hiddens": [4]})
    config.training(num_steps_sampled_before_learning_starts=20).reporting(min_sample_timesteps_per_iteration=40)
    with config.build() as algo:
        learned = algo.train()["learners"]["default_policy"]
    assert learned["entropy"] == 0 and np.isfinite(learned["actor_loss"])
