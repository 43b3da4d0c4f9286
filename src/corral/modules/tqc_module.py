"""The module of truncated quantile critics: SAC's, with critics that give quantiles of the return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from corral.core.tree import Tree
from corral.modules.critic_heads import QuantileHead, quantile_huber_loss
from corral.modules.sac_module import SACModule

__all__ = ["TQCModule", "quantile_huber_loss"]


class TQCModule(SACModule):
    """SAC's module whose critics map observations and Box actions to quantiles `[B, M]`.

    Attributes:
        num_quantiles: Quantiles of each critic, M.
    """

    BOX_ONLY = ("TQC takes", "use SAC or DQN")
    head: QuantileHead

    def read_settings(self, settings: dict[str, Any]) -> QuantileHead:
        """Read `num_quantiles` and `num_dropped_quantiles`, and return the head of the critics."""
        super().read_settings(settings)
        self.num_quantiles = int(settings.pop("num_quantiles", 25))
        return QuantileHead(self.num_quantiles, int(settings.pop("num_dropped_quantiles", 2)))

    @property
    def num_kept(self) -> int:
        """Quantiles of all critics together that are left when the largest ones are dropped, K."""
        return len(self.q) * (self.num_quantiles - self.head.num_dropped)

    def quantiles(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the quantiles of all critics for Box actions in [-1, 1], `[C, B, M]`."""
        return super().q_values(obs, actions, target=target)

    def kept_quantiles(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the quantiles of all critics together without the largest ones, `[B, K]`, from the lowest on."""
        return self.head.kept(self.quantiles(obs, actions, target=target))

    def q_values(self, obs: Tree, actions: Tensor | None = None, *, target: bool = False) -> Tensor:
        """Return the mean of each critic's quantiles, `[C, B]`."""
        assert actions is not None
        return self.head.means(self.quantiles(obs, actions, target=target))
