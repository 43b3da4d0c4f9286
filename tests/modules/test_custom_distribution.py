"""Custom action distributions, by class and by import path."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch import distributions as td

from corral import Algorithm, DQNConfig, PPOConfig, load_policy
from corral.errors import CheckpointError, ConfigError
from corral.modules.distributions import ActionDistribution, Deterministic, DiagGaussian
from corral.modules.module import ActorCritic
from corral.runs.checkpoint.imports import check_imports
from corral.runs.policies.description import described_spec, policy_description
from corral.testing import IdentityEnv

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Laplace(DiagGaussian):
    """Noise with heavier tails than the Gaussian's."""

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return rng.laplace(size=(*shape, self.num_noise)).astype(np.float32)

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        mean, log_scale = self._split(dist_inputs)
        z = (actions.reshape(mean.shape) - mean).abs() * (-log_scale).exp()
        return -(z + log_scale + math.log(2)).sum(-1)

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        return (1 + math.log(2) + self._split(dist_inputs)[1]).sum(-1)

    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        (mean, log_scale), (other_mean, other) = self._split(dist_inputs), self._split(other_inputs)
        gap, scale = (mean - other_mean).abs(), log_scale.exp()
        return (other - log_scale + (scale * (-gap / scale).exp() + gap) * (-other).exp() - 1).sum(-1)


LAPLACE = f"{__name__}:Laplace"


def config_of(distribution: Any, **model_config: Any) -> PPOConfig:
    config = PPOConfig().environment(IdentityEnv, env_config={"space": "box"}).debugging(seed=0)
    config.rl_module(model_config={"action_distribution": distribution, "fcnet_hiddens": [16], **model_config})
    return config.training(train_batch_size_per_learner=512, minibatch_size=128, lr=3e-3)


def test_the_example_is_the_distribution_of_torch() -> None:
    distribution = Laplace(spaces.Box(-1, 1, (2,), np.float32))
    one, other = (torch.from_numpy(np.random.default_rng(i).normal(size=(9, 4)).astype(np.float32)) for i in range(2))
    first, second = (td.Laplace(x[:, :2], x[:, 2:].exp()) for x in (one, other))
    actions = first.sample()
    torch.testing.assert_close(distribution.logp(one, actions), first.log_prob(actions).sum(-1))
    torch.testing.assert_close(distribution.entropy(one), first.entropy().sum(-1))
    torch.testing.assert_close(distribution.kl(one, other), td.kl_divergence(first, second).sum(-1))


@pytest.mark.parametrize("distribution", [Laplace, LAPLACE], ids=["class", "path"])
def test_a_module_acts_and_learns_with_a_custom_distribution(distribution: Any) -> None:
    with config_of(distribution).build() as algo:
        assert type(algo.get_module().distribution) is Laplace
        returns = [algo.train()["env_runners"]["episode_return_mean"] for _ in range(8)]
        rollout = algo.env_runner.sample(num_timesteps=2000)  # type: ignore[union-attr]
    assert returns[-1] > returns[0] + 1
    z = (rollout.actions - rollout.dist_inputs[..., :2]) * np.exp(-rollout.dist_inputs[..., 2:])
    assert np.abs(z).mean() == pytest.approx(1, abs=0.05)  # a Gaussian has 0.8
    assert np.square(z).mean() == pytest.approx(2, abs=0.25)  # a Gaussian has 1


def test_checkpoints_hold_an_import_path_and_ask_for_a_class(tmp_path: Path) -> None:
    obs = np.random.default_rng(0).uniform(-1, 1, (5, 2)).astype(np.float32)
    with config_of(LAPLACE).build() as algo:
        path = algo.save(tmp_path / "named")
        expected = algo.compute_actions(obs, explore=False)
    policy = load_policy(path)
    assert type(policy.module.distribution) is Laplace
    np.testing.assert_array_equal(policy.batch(obs), expected)
    with Algorithm.from_checkpoint(path) as algo:
        assert type(algo.get_module().distribution) is Laplace

    class Local(Laplace):
        """A class that no file can name."""

    with config_of(Local).build() as algo:
        path = algo.save(tmp_path / "unnamed")
    with pytest.raises(CheckpointError, match="action_distribution"):
        load_policy(path)
    assert type(load_policy(path, model_config={"action_distribution": Local}).module.distribution) is Local


def test_a_path_from_a_checkpoint_may_not_lead_anywhere() -> None:
    model_config = {"action_distribution": "os:system"}
    problem = "action_distribution='os:system' is not taken from a checkpoint"
    with pytest.raises(CheckpointError, match=problem):
        check_imports({"rl_module": {"model_config": model_config}}, "checkpoint")
    with pytest.raises(CheckpointError, match=problem):
        check_imports({"multi_agent": {"policies": {"a": {"model_config": model_config}}}}, "checkpoint")
    spec = config_of(LAPLACE).module_spec(BOX, BOX)
    described = policy_description(spec)
    assert described_spec(described).build().distribution.num_inputs == 4
    with pytest.raises(CheckpointError, match=problem):
        described_spec({**described, "model_config": model_config})


def test_a_deterministic_policy_has_one_output_per_dimension() -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    module = ActorCritic(space, space, {"action_distribution": Deterministic, "fcnet_hiddens": [8]})
    assert module.log_std is None
    assert module.policy(torch.zeros(3, 2)).shape == (3, 2)


@pytest.mark.parametrize("distribution", [Laplace, Deterministic, LAPLACE])
@pytest.mark.parametrize("clip_actions", [False, True])
def test_actions_have_the_units_of_the_env_where_they_are_not_normalised(distribution: Any, clip_actions: bool) -> None:
    config = config_of(distribution).environment(normalize_actions=False, clip_actions=clip_actions)
    wide = spaces.Box(-3.0, 5.0, (2,), np.float32)
    module = config.module_spec(BOX, wide).build()
    actions = np.array([[-1.0, 7.0]], np.float32)
    expected = np.clip(actions, -3, 5) if clip_actions else actions
    np.testing.assert_allclose(module.distribution.to_env(actions), expected)
    inputs = torch.from_numpy(np.resize(actions, (1, module.distribution.num_inputs)))
    np.testing.assert_allclose(module.distribution.env_mode(inputs), expected)


class Plain(Laplace):
    """Takes the space alone."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)


def test_settings_that_a_distribution_of_your_own_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="normalize_actions=False has no effect on action_distribution Plain"):
        config_of(Plain).environment(normalize_actions=False).build()
    with pytest.raises(ConfigError, match="action_bounds='squash' has no effect on action_distribution Laplace"):
        config_of(Laplace, action_bounds="squash").build()
    with pytest.raises(ConfigError, match="action_parts='autoregressive' has no effect on a custom"):
        config_of(Laplace, action_parts="autoregressive").build()
    nested = spaces.Dict(a=spaces.Discrete(2), b=BOX)
    with pytest.raises(ConfigError, match="action_distribution Laplace raised TypeError for the action space Dict"):
        config_of(Laplace).module_spec(BOX, nested).build()


class Half(ActionDistribution):
    """Defines nothing."""


class Empty(Laplace):
    """Does not say its widths."""

    def __init__(self, space: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("distribution", "problem"),
    [
        (dict, "must be a subclass of corral.modules.distributions.ActionDistribution"),
        ("no_such_module:Laplace", "action_distribution.*no_such_module"),
        (Half, "action_distribution Half must define entropy, kl, logp"),
        (Empty, r"Empty.__init__\(space\) must set num_inputs, num_noise"),
    ],
)
def test_what_is_no_distribution_is_refused(distribution: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config_of(distribution).build()


def test_algorithms_with_a_distribution_of_their_own_take_no_other() -> None:
    config = DQNConfig().environment("CartPole-v1").rl_module(model_config={"action_distribution": Laplace})
    with pytest.raises(ConfigError, match="action_distribution"):
        config.build()
