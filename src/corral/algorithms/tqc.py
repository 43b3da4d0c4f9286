"""Truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269), on the parts of SAC.

The critics learn the distribution of the return as quantiles. The largest quantiles of all critics together are
dropped from the targets, which takes away as much overestimation as is wanted. `docs/algorithms/tqc.md` lists the
metrics and the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack

import torch
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import OffPolicyConfig
from corral.algorithms.sac import SAC, SACSettings, reported_values
from corral.core.settings import Need, NonNegativeInt, PositiveInt, never
from corral.errors import ConfigError
from corral.learners.losses import Batch
from corral.modules.module import Module
from corral.modules.tqc_module import TQCModule, quantile_huber_loss

if TYPE_CHECKING:
    from corral.config.setter_types import TQCTrainingArgs


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

    def make_loss(self, config: Any) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return the loss with a config's constants."""
        given = config.target_entropy
        return partial(tqc_loss, target_entropy=None if given == "auto" else given)


def tqc_loss(
    module: TQCModule,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    target_entropy: float | None,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    It is the sum of three losses, each of which has gradients in the parameters of its own group only. The equations
    refer to arXiv:2005.04269.

    - Critics, eqs. 9 to 11: quantile regression towards the discounted rewards and, where the episode did not
      terminate, each of the quantiles of the next observation that are kept, minus the temperature times the
      log-likelihood there.
    - Actor, eq. 13: the temperature times the log-likelihood of the policy's actions, minus the mean of all quantiles.
    - Temperature: as in `sac_loss`.

    Args:
        module: Module with a policy, quantiles and a temperature.
        batch: Columns `[B, ...]` of a replay buffer, and `noise` and `next_noise`, as tensors.
        coefficients: Not used.
        target_entropy: Target of the entropy in nats; `None` is the module's `auto_target_entropy`.
        outputs: Receives `quantiles`, `[C, B, M]`, and their means `q_taken`, `[C, B]`; `targets`, `[B, K]`; the
            policy's `actions`, `[B, d]`, and their `logp`, `[B]`; and `actor_loss`, `[]`.

    Returns:
        The scalar to minimise, and what to report: scalars, and the column `td_error`, float32 `[B]`, the absolute
        difference of the means of targets and quantiles, averaged over the critics.
    """
    alpha = module.log_alpha.detach().exp()
    with torch.no_grad():
        next_actions, next_logp = module.sample(batch["next_obs"], batch["next_noise"])
        next_quantiles = module.kept_quantiles(batch["next_obs"], next_actions, target=True)
        discounts = batch["discounts"] * (~batch["terminated"])
        targets = batch["rewards"][:, None] + discounts[:, None] * (next_quantiles - (alpha * next_logp)[:, None])
    taken = batch["actions"].reshape(len(targets), -1).tanh()
    quantiles = module.quantiles(batch["obs"], taken)
    critic_loss = (batch["weights"] * quantile_huber_loss(quantiles, targets).mean(0)).mean()

    actions, logp = module.sample(batch["obs"], batch["noise"])
    with module.frozen_critics():
        actor_loss = (alpha * logp - module.quantiles(batch["obs"], actions).mean((0, 2))).mean()
    aim = module.auto_target_entropy(batch["obs"]) if target_entropy is None else target_entropy
    alpha_loss = module.log_alpha * (-logp.detach().mean() - aim)

    q_taken = quantiles.mean(-1)
    if outputs is not None:
        outputs |= {"quantiles": quantiles, "q_taken": q_taken, "targets": targets}
        outputs |= {"actions": actions, "logp": logp, "actor_loss": actor_loss}
    q_taken = q_taken.detach()
    td_error = (targets.mean(-1) - q_taken).abs().mean(0)
    losses = {"critic_loss": critic_loss, "actor_loss": actor_loss, "alpha_loss": alpha_loss, "alpha": alpha}
    reported = {name: loss.detach() for name, loss in losses.items()}
    return critic_loss + actor_loss + alpha_loss, reported | reported_values(q_taken, td_error, logp.detach())
