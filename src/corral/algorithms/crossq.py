"""CrossQ (Bhatt et al. 2024, arXiv:1902.05605): SAC without target networks, on the parts of SAC.

Observations and next observations go through the critics in one pass, whose layers are normalised by batches. Batch
renormalisation makes target networks needless, and learning per env step faster. `docs/algorithms/crossq.md` lists the
metrics and the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack

import torch
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import OffPolicyConfig
from corral.algorithms.sac import SAC, SACSettings, reported_values
from corral.core.settings import Need, NonNegativeSchedule, PositiveInt, never
from corral.learners.losses import Batch
from corral.modules.batch_renorm import evaluating
from corral.modules.crossq_module import CrossQModule
from corral.modules.distributions import SquashedGaussian
from corral.modules.module import Module

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import CrossQTrainingArgs

NO_TARGETS = Need("SAC: CrossQ has no target networks", never)


@dataclass(kw_only=True)
class CrossQConfig(SACSettings, OffPolicyConfig):
    """Settings of CrossQ; those below and in its bases belong to `.training(...)`.

    Attributes:
        num_critics: Number of critics; the lowest value is used.
        policy_delay: Number of updates of the critics for each update of the actor and of the temperature.
    """

    LEARNS_SEQUENCES: ClassVar[bool] = False
    LEARNS_ATOMS: ClassVar[bool] = False

    lr: NonNegativeSchedule = 1e-3
    optimizer_config: dict[str, Any] = field(default_factory=lambda: {"betas": (0.5, 0.999)})
    twin_q: Annotated[bool, Need("SAC: CrossQ has num_critics", never)] = True
    tau: Annotated[float | Literal["auto"], NO_TARGETS] = 5e-3
    target_network_update_freq: Annotated[int, NO_TARGETS] = 0
    num_critics: PositiveInt = 2
    policy_delay: PositiveInt = 3

    def training(self, **settings: Unpack[CrossQTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return self._set("training", settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`CrossQ`."""
        return CrossQ

    @property
    def default_module_class(self) -> type[Module]:
        """`CrossQModule`."""
        return CrossQModule

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the module in addition to its layers."""
        return {"num_critics": self.num_critics, "initial_alpha": self.initial_alpha}


class CrossQ(SAC):
    """SAC with batch renormalisation and without target networks."""

    STATE = (*SAC.STATE, "_num_updates")
    OF_MODULES = (*SAC.OF_MODULES, "_num_updates")
    FIXED_SETTINGS = SAC.FIXED_SETTINGS | {"num_critics"}
    VALIDATION_COEFFICIENTS: ClassVar[Mapping[str, float]] = {"actor_coeff": 1.0}

    LEARNS_TENSORS = True
    DELAYS_ACTOR = True

    config: CrossQConfig

    def make_loss(self, config: Any) -> Callable[..., tuple[Any, dict[str, Tensor]]]:
        """Return the loss with a config's constants."""
        target_entropy = None if config.target_entropy == "auto" else config.target_entropy
        return partial(crossq_loss, target_entropy=target_entropy, huber=config.td_error_loss_fn == "huber")

    def update_target_if_due(self, module_id: str) -> None:
        """Do nothing: there are no targets."""


def crossq_loss(
    module: CrossQModule,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    target_entropy: float | None,
    huber: bool = False,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses of a minibatch by group of parameters; it moves the running statistics of the module.

    - Critics: half the mean squared error of each critic, or its Huber loss, as in `sac_loss`. The values of the
      actions taken and of the next actions come from one pass; the latter have no gradient.
    - Actor and temperature: as in `sac_loss`, with critics that are normalised by their running statistics.

    Args:
        module: Module with a policy, values and a temperature.
        batch: Columns `[B, ...]` of a replay buffer, and `noise` and `next_noise`, as tensors.
        coefficients: `actor_coeff`; with 0 the losses of actor and temperature are not computed.
        target_entropy: Target of the entropy in nats; `None` is the module's `auto_target_entropy`.
        huber: Whether the loss of the critics is linear for errors above 1.
        outputs: Receives `q_taken`, `[C, B]`, and `targets`, `[B]`; and, if the loss of the actor is computed, the
            policy's `dist_inputs`, `[B, D]`, its `actions`, `[B, d]`, and their `logp`, `[B]`.

    Returns:
        The scalars to minimise by group, and what to report: scalars, and the column `td_error`, float32 `[B]`, the
        absolute errors averaged over the critics.
    """
    alpha, head = module.log_alpha.detach().exp(), module.head
    with torch.no_grad(), evaluating(module.actor):
        next_actions, next_logp = module.sample(batch["next_obs"], batch["next_noise"])
    taken = batch["actions"].reshape(len(next_logp), -1).tanh()
    q_taken, next_q = module.joint_q_values(batch["obs"], taken, batch["next_obs"], next_actions)
    targets = head.targets(batch, next_q.detach(), alpha * next_logp)
    critic_loss, _, td_error = head.learn(q_taken, targets, batch["weights"], huber=huber)
    losses = {"critic": critic_loss}
    outputs = {} if outputs is None else outputs
    outputs |= {"q_taken": q_taken, "targets": targets}
    if coefficients["actor_coeff"]:
        # The outputs hold `dist_inputs`, because another pass for them would move the running statistics.
        dist_inputs = module.policy(batch["obs"])
        assert isinstance(module.distribution, SquashedGaussian)
        actions, logp = module.distribution.squashed_sample(dist_inputs, batch["noise"])
        losses["actor"] = (alpha * logp - module.sought(batch["obs"], actions)).mean()
        aim = module.auto_target_entropy(batch["obs"]) if target_entropy is None else target_entropy
        losses["alpha"] = module.log_alpha * (-logp.detach().mean() - aim)
        outputs |= {"dist_inputs": dist_inputs, "actions": actions, "logp": logp}
    return losses, reported_values(losses, alpha, q_taken.detach(), td_error, next_logp)
