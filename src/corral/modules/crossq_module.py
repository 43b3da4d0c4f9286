"""The module of CrossQ: SAC's without target critics, with batch renormalisation before each linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from corral.core.settings import Need, NonNegativeInt, PositiveInt, never
from corral.core.tree import Tree, map_tree
from corral.modules.batch_renorm import BatchRenorm, RenormLinear, evaluating
from corral.modules.networks import linear
from corral.modules.sac_module import SACModule, SACNetworkConfig


@dataclass
class CrossQNetworkConfig(SACNetworkConfig):
    """Settings of the default module of CrossQ, in addition to `SACNetworkConfig`.

    Attributes:
        critic_hiddens: Widths of the hidden layers of the critics; the paper has `(2048, 2048)`. `None` is
            `fcnet_hiddens`.
        renorm_momentum: Fraction by which a batch moves the running statistics of the normalisation.
        renorm_warmup_updates: Updates of a network in which its batches are normalised by their own statistics alone.
    """

    architecture: Annotated[
        Literal["simba", "simba_v2"] | None, Need("SAC or another algorithm: CrossQ has its own layers", never)
    ] = None
    critic_hiddens: tuple[PositiveInt, ...] | None = (1024, 1024)
    renorm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.01
    renorm_warmup_updates: NonNegativeInt = 100_000

    def make_linear(self, num_inputs: int, num_outputs: int, gain: float, part: str) -> Any:
        """Return a linear layer of a part, after a normalisation of its inputs."""
        norm = BatchRenorm(num_inputs, self.renorm_momentum, self.renorm_warmup_updates)
        return RenormLinear(norm, linear(num_inputs, num_outputs, gain, config=self, part=part))


class CrossQModule(SACModule):
    """SAC's module for Box actions, without target critics."""

    CONFIG = CrossQNetworkConfig
    BOX_ONLY = ("CrossQ takes", "use SAC or DQN")
    has_targets = False

    def make_targets(self) -> nn.ModuleList:
        """Return no networks."""
        return nn.ModuleList()

    def sought(self, obs: Tree, actions: Tensor) -> Tensor:
        """Return the value that the actor seeks, by critics that use running statistics and do not move them."""
        with evaluating(self.q):
            return self.head.sought(self.q_values(obs, actions))

    def joint_q_values(self, obs: Tree, actions: Tensor, next_obs: Tree, next_actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of all critics for two sets of Box actions in [-1, 1], both `[C, B]`.

        One pass computes both, so that a layer that normalises by batches sees one distribution.
        """
        both = map_tree(lambda now, then: torch.cat([now, then]), obs, next_obs)
        values = self.q_values(both, torch.cat([actions, next_actions]))
        now, then = values.chunk(2, 1)
        return now, then

    def update_target(self, tau: float) -> None:
        """Do nothing."""
