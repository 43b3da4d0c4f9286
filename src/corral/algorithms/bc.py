"""Behaviour cloning (Pomerleau 1989, https://proceedings.neurips.cc/paper/1988/hash/812b4ba287f5ee0bc9d43bbf5bbe87fb-Abstract.html).

The policy learns by maximum likelihood to act as the recorded policy did. `docs/algorithms/bc.md` lists the metrics and
the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Unpack

from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.offline import OfflineAlgorithm, OfflineConfig
from corral.core.schedules import Schedule, schedule_value
from corral.core.settings import Need, NonNegativeInt, NonNegativeSchedule, never
from corral.learners.losses import Batch, Loss, learner_metrics
from corral.modules.memory import module_inputs
from corral.modules.module import Module

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import BCTrainingArgs


@dataclass(kw_only=True)
class BCConfig(OfflineConfig):
    """Settings of behaviour cloning; the settings below and in `OfflineConfig` belong to `.training(...)`.

    Attributes:
        entropy_coeff: Weight of the entropy bonus, or a schedule over env steps.
        burn_in_len: For a module with memory, the number of steps before each sequence, in its episode, that only bring
            the state up to date.
    """

    LEARNS_SEQUENCES: ClassVar[bool] = True

    lr: Schedule = 1e-3
    gamma: Annotated[float, Need("an algorithm that learns from rewards, such as MARWIL", never)] = 0.99
    entropy_coeff: NonNegativeSchedule = 0.0
    burn_in_len: NonNegativeInt = 0

    def training(self, **settings: Unpack[BCTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`BC`."""
        return BC


class BC(OfflineAlgorithm):
    """Behaviour cloning."""

    METRICS: ClassVar[tuple[str, ...]] = ("policy_loss", "entropy", *learner_metrics("default"))

    config: BCConfig

    def make_loss(self, config: BCConfig) -> Loss:
        """Return the loss."""
        return bc_loss

    def coefficients(self, module_id: str) -> dict[str, float]:
        """Return the weight of the entropy bonus."""
        return {
            "entropy_coeff": schedule_value(
                self.modules[module_id].config.entropy_coeff, self.num_env_steps_sampled_lifetime
            )
        }


def bc_loss(
    module: Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch: the negative log-likelihood of the recorded actions, minus the entropy bonus.

    Args:
        module: Module with a policy.
        batch: Columns `[B, ...]`: `obs` and `actions`; of a module with memory sequences, and `learns`, bool `[B]`,
            False in the steps of the burn-in.
        coefficients: `entropy_coeff`.
        outputs: Receives `dist_inputs`, `[B, D]`, and `logp`, `[B]`, without the steps of the burn-in.

    Returns:
        The scalar to minimise, and scalars to report.
    """
    actions: Any = batch["actions"]
    dist_inputs = module.policy_for_learning(*module_inputs(batch))
    if "sequence_starts" in batch:
        dist_inputs, actions = dist_inputs[batch["learns"]], actions[batch["learns"]]
    logp = module.distribution.logp(dist_inputs, module.distribution.inside_bounds(actions))
    if outputs is not None:
        outputs |= {"dist_inputs": dist_inputs, "logp": logp}
    policy_loss = -logp.mean()
    entropy_coeff = coefficients["entropy_coeff"]
    entropy = module.distribution.entropy(dist_inputs if entropy_coeff else dist_inputs.detach()).mean()
    loss = policy_loss - entropy_coeff * entropy if entropy_coeff else policy_loss
    return loss, {"policy_loss": policy_loss.detach(), "entropy": entropy.detach()}
