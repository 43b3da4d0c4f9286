"""Curiosity: rewards for observations that a model of the env predicted badly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.core.tree import Tree
from corral.errors import ConfigError, nearest
from corral.exploration.base import not_negative
from corral.exploration.intrinsic import (
    FloatArray,
    IntrinsicReward,
    Share,
    Steps,
    at_least_1,
    encoder,
    net_config,
)
from corral.modules.distributions import ActionDistribution, DiagGaussian, module_action_space
from corral.modules.module import ModelConfig
from corral.modules.networks import ACTIVATIONS, Encoder, Flat, mlp, orthogonal


class Curiosity(IntrinsicReward):
    """Rewards the error of a forward model, in features that depend on the effects of the agent's actions.

    An inverse model predicts the action from the features of an observation and of the next observation. A forward
    model predicts the next features from the features and the action. The reward of a step is `eta / 2` times the
    squared error of the forward model, before the model learns from this step. The loss is `(1 - beta)` times the loss
    of the inverse model (cross-entropy, or half the squared error for continuous actions) plus `beta` times the loss of
    the forward model.

    Args:
        feature_dim: Width of the features.
        feature_net_config: Settings of the net of the features; see `NetworkConfig`.
        inverse_net_hiddens: Widths of the hidden layers of the inverse model.
        inverse_net_activation: Activation of the inverse model.
        forward_net_hiddens: Widths of the hidden layers of the forward model.
        forward_net_activation: Activation of the forward model.
        beta: Weight of the forward model's loss, in [0, 1].
        eta: Weight of the reward.
        lr: Learning rate.
    """

    paper = "Pathak et al. 2017, arXiv:1705.05363"

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        feature_dim: int = 288,
        feature_net_config: Mapping[str, Any] | None = None,
        inverse_net_hiddens: Sequence[int] = (256,),
        inverse_net_activation: str = "relu",
        forward_net_hiddens: Sequence[int] = (256,),
        forward_net_activation: str = "relu",
        beta: float = 0.2,
        eta: float = 1.0,
        lr: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(action_space, **kwargs)
        self.feature_dim = at_least_1(self, "feature_dim", feature_dim)
        self.features = net_config(self, "feature_net_config", feature_net_config)
        self.inverse_layers = layers(self, "inverse_net", inverse_net_hiddens, inverse_net_activation)
        self.forward_layers = layers(self, "forward_net", forward_net_hiddens, forward_net_activation)
        self.beta = not_negative(self, "beta", beta)
        if beta > 1:
            raise ConfigError(f"exploration_config of {type(self).__name__}: beta={beta} must be in [0, 1].")
        self.eta = not_negative(self, "eta", eta)
        self.lr = not_negative(self, "lr", lr)

    def make_net(self) -> nn.Module:
        """Return a net with features, inverse model and forward model."""
        return CuriosityNet(self.model, self.features, self.feature_dim, self.inverse_layers, self.forward_layers)

    def judge(self, steps: Steps, shares: Sequence[Share], timestep: int) -> tuple[FloatArray, dict[str, float]]:
        forward_errors, inverse_errors = self.train(steps, timestep).astype(np.float64)
        losses = {"forward_loss": float(forward_errors.mean()), "inverse_loss": float(inverse_errors.mean())}
        return self.eta * forward_errors, losses

    def errors(self, steps: Steps) -> tuple[Tensor, ...]:
        """Return the errors of the forward model and of the inverse model, `[B]` each."""
        errors: tuple[Tensor, Tensor] = self.net(*steps.columns)
        return errors

    def loss(self, *errors: Tensor) -> Tensor:
        """Return the weighted sum of the mean errors."""
        loss: Tensor = self.beta * errors[0].mean() + (1 - self.beta) * errors[1].mean()
        return loss


class CuriosityNet(nn.Module):
    """The nets of `Curiosity`."""

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        feature_dim: int,
        inverse: tuple[list[int], str],
        forward: tuple[list[int], str],
    ) -> None:
        """Build the nets for the spaces of the module that acts."""
        super().__init__()
        self.distribution: ActionDistribution = model.distribution
        self.features = encoder(model.features_space, config, feature_dim)
        space, width = module_action_space(model.action_space), self.distribution.num_inputs
        if isinstance(space, spaces.Box):
            width = self.distribution.num_noise
            self.action: nn.Module = Flat(width)
        else:
            self.action = Encoder(space, [], ModelConfig())
        num_actions = width if isinstance(space, spaces.Box) else cast(Encoder, self.action).num_outputs
        self.inverse_model = head(2 * feature_dim, *inverse, width)
        self.forward_model = head(feature_dim + num_actions, *forward, feature_dim)

    def forward(self, obs: Tree, actions: Tensor, next_obs: Tree) -> tuple[Tensor, Tensor]:
        """Return half the squared error of the forward model, and the error of the inverse model, `[B]` each."""
        features, next_features = self.features(obs), self.features(next_obs)
        guess = self.inverse_model(torch.cat([features, next_features], -1))
        if isinstance(self.distribution, DiagGaussian):
            actions = torch.from_numpy(self.distribution.to_unit(actions.numpy())).float()
            inverse_errors = 0.5 * (guess - self.action(actions)).square().sum(-1)
        else:
            inverse_errors = -self.distribution.logp(guess, actions)
        expected = self.forward_model(torch.cat([features, self.action(actions)], -1))
        return 0.5 * (expected - next_features).square().sum(-1), inverse_errors


def head(num_inputs: int, hiddens: list[int], activation: str, width: int) -> nn.Sequential:
    """Return an MLP with a linear output."""
    return nn.Sequential(
        mlp(num_inputs, hiddens, activation), orthogonal(nn.Linear([num_inputs, *hiddens][-1], width), 1.0)
    )


def layers(exploration: IntrinsicReward, name: str, hiddens: Sequence[int], activation: str) -> tuple[list[int], str]:
    """Return the widths of the hidden layers of a net, and their activation.

    Raises:
        ConfigError: A width is not a number above 0, or the activation is unknown.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"exploration_config of {type(exploration).__name__}: unknown {name}_activation {activation!r}. "
            f"{nearest(str(activation), ACTIVATIONS)}"
        )
    return [at_least_1(exploration, f"{name}_hiddens", width) for width in hiddens], activation
