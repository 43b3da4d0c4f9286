"""The module of truncated quantile critics: SAC's, with critics that give quantiles of the return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.sac_module import SACModule


class TQCModule(SACModule):
    """SAC's module whose critics map observations and Box actions to quantiles `[B, M]`.

    Attributes:
        num_quantiles: Quantiles of each critic, M.
        num_kept: Quantiles of all critics together that are left when the largest ones are dropped, K.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the networks.

        Args:
            observation_space: Space of one observation.
            action_space: Space of one action.
            model_config: The algorithm's settings `num_critics`, `num_quantiles`, `num_dropped_quantiles` and
                `initial_alpha`, and the settings of the networks.

        Raises:
            ConfigError: The actions are no floats with finite bounds.
        """
        if isinstance(action_space, spaces.Discrete):
            raise ConfigError(f"TQC takes a Box of floats, and the env's actions are {action_space}: use SAC or DQN.")
        given = dict(model_config)
        self.num_quantiles = int(given.pop("num_quantiles", 25))
        num_dropped = int(given.pop("num_dropped_quantiles", 2))
        super().__init__(observation_space, action_space, given)
        self.num_kept = len(self.q) * (self.num_quantiles - num_dropped)

    @property
    def critic_shape(self) -> tuple[int, ...]:
        """Shape of what a critic gives for one observation."""
        return (self.num_quantiles,)

    def quantiles(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the quantiles of all critics for Box actions in [-1, 1], `[C, B, M]`."""
        return super().q_values(obs, actions, target=target)

    def kept_quantiles(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the quantiles of all critics together without the largest ones, `[B, K]`, from the lowest on."""
        pooled = self.quantiles(obs, actions, target=target).transpose(0, 1).flatten(1)
        return pooled.sort(-1).values[:, : self.num_kept]

    def q_values(self, obs: Tree, actions: Tensor | None = None, *, target: bool = False) -> Tensor:
        """Return the mean of each critic's quantiles, `[C, B]`."""
        assert actions is not None
        return self.quantiles(obs, actions, target=target).mean(-1)

    def value(self, obs: Tree) -> Tensor:
        """Return the mean of the quantiles that are kept of the most likely action, float32 `[B]`."""
        outputs = self.actor_outputs(obs)
        return self.kept_quantiles(obs, outputs[:, : outputs.shape[1] // 2].tanh()).mean(-1)


def quantile_huber_loss(quantiles: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of quantile regression with Huber's loss, `[C, B]`.

    It is eq. 10 of Dabney et al. 2018 (arXiv:1710.10044) with kappa 1. Quantile m of M stands for the
    fraction (m + 1/2) / M. The loss is the mean over the quantiles and over the targets.

    Args:
        quantiles: Quantiles of each critic, `[C, B, M]`.
        targets: Samples of the distribution that they approximate, `[B, K]`.
    """
    num_quantiles = quantiles.shape[-1]
    fractions = (torch.arange(num_quantiles, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / num_quantiles
    errors = targets[:, None, :] - quantiles[..., None]
    sizes = errors.abs()
    losses = torch.where(sizes > 1, sizes - 0.5, 0.5 * errors.square())
    weights = (fractions[:, None] - (errors.detach() < 0).to(errors.dtype)).abs()
    loss: Tensor = (weights * losses).mean((-2, -1))
    return loss
