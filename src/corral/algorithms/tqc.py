"""Truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269): SAC with another head of the critics.

The critics learn the distribution of the return as quantiles. The largest quantiles of all critics together are
dropped from the targets, which takes away as much overestimation as is wanted. The loss is `sac_loss`, with the targets
and the loss of critics of `corral.modules.critics.QuantileHead`. `docs/algorithms/tqc.md` lists the metrics and
the implementation details by number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import OffPolicyConfig
from corral.algorithms.sac import SAC, SACSettings
from corral.core.settings import Need, NonNegativeInt, PositiveInt, never
from corral.errors import ConfigError
from corral.modules.module import Module
from corral.modules.tqc_module import TQCModule

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import TQCTrainingArgs


@dataclass(kw_only=True)
class TQCConfig(SACSettings, OffPolicyConfig):
    """Settings of TQC; those below and in its bases belong to `.training(...)`.

    The default of `num_critics` is the one of Stable-Baselines3 and RLlib; the paper has 5.

    Attributes:
        num_critics: Number of critics.
        num_quantiles: Quantiles of each critic.
        num_dropped_quantiles: Quantiles that are dropped for each critic; the largest ones of all critics together are
            dropped.
    """

    LEARNS_SEQUENCES: ClassVar[bool] = False
    LEARNS_ATOMS: ClassVar[bool] = False

    twin_q: Annotated[bool, Need("SAC: TQC has num_critics", never)] = True
    td_error_loss_fn: Annotated[Literal["huber", "mse"], Need("SAC: TQC has the loss of its quantiles", never)] = "mse"
    num_critics: PositiveInt = 2
    num_quantiles: PositiveInt = 25
    num_dropped_quantiles: NonNegativeInt = 2

    def training(self, **settings: Unpack[TQCTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return self._set("training", settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`TQC`."""
        return TQC

    @property
    def default_module_class(self) -> type[Module]:
        """`TQCModule`."""
        return TQCModule

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the module in addition to its layers."""
        names = ("num_critics", "num_quantiles", "num_dropped_quantiles", "initial_alpha")
        return {name: getattr(self, name) for name in names}

    def check_settings(self) -> None:
        """Refuse contradictions of these settings; see `AlgorithmConfig.validate`."""
        if self.num_dropped_quantiles >= self.num_quantiles:
            raise ConfigError(
                f"num_dropped_quantiles={self.num_dropped_quantiles} leaves none of num_quantiles="
                f"{self.num_quantiles}: drop fewer."
            )


class TQC(SAC):
    """Truncated quantile critics."""

    FIXED_SETTINGS = SAC.FIXED_SETTINGS | {"num_critics", "num_quantiles", "num_dropped_quantiles"}

    LEARNS_TENSORS = True

    config: TQCConfig
