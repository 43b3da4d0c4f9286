"""Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169), on off_policy.py.

The critics learn from recorded transitions without asking for the value of an action that was not recorded: a network
of state values learns an upper expectile of the values of the recorded actions. The policy imitates the recorded
actions, the better ones more. With `num_offline_updates` the run continues in the env. `docs/algorithms/iql.md` lists
the metrics and the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Unpack

import torch
from pydantic import Field
from torch import Tensor

from corral.algorithms.actor_critic_settings import ActorCriticSettings
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig, off_policy_metrics
from corral.core.schedules import Schedule
from corral.core.settings import Need, NonNegativeFloat, NonNegativeInt, NonNegativeSchedule, PositiveFloat, never
from corral.learners.losses import Batch, Loss
from corral.modules.iql_module import IQLModule
from corral.modules.module import Module

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import IQLTrainingArgs


@dataclass(kw_only=True)
class IQLConfig(ActorCriticSettings, OffPolicyConfig):
    """Settings of IQL; those below and in its bases belong to `.training(...)`.

    By default nothing is sampled; with `num_offline_updates` the run continues in the env, with actions sampled from
    the policy.

    Attributes:
        expectile: Expectile of the values of the recorded actions that state values learn: 0.5 is their mean, and 1
            their maximum.
        beta: Weight of the advantages in the exponent: how much more good actions are imitated than bad ones (the
            inverse temperature of the paper).
        max_advantage_weight: Largest weight of an action.
        value_lr: Learning rate of the network of state values, or a schedule over env steps; `None` is `lr`.
    """

    LR_GROUPS: ClassVar[tuple[str, ...]] = ("actor", "critic", "value")

    lr: Schedule = 3e-4
    num_offline_updates: NonNegativeInt | None = None
    imitation_coeff: Annotated[Schedule, Need("an algorithm whose policy seeks values, such as SAC", never)] = 0.0
    expectile: Annotated[float, Field(gt=0, lt=1)] = 0.7
    beta: NonNegativeFloat = 3.0
    max_advantage_weight: PositiveFloat = 100.0
    value_lr: NonNegativeSchedule | None = None

    def training(self, **settings: Unpack[IQLTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`IQL`."""
        return IQL

    @property
    def default_module_class(self) -> type[Module]:
        """`IQLModule`."""
        return IQLModule

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the module in addition to its layers."""
        return {**super().module_settings, "twin_q": self.twin_q}

    @property
    def default_exploration(self) -> dict[str, Any]:
        """Actions sampled from the policy."""
        return {"type": "StochasticSampling"}


class IQL(OffPolicyAlgorithm):
    """Implicit Q-learning."""

    FIXED_SETTINGS = OffPolicyAlgorithm.FIXED_SETTINGS | {"twin_q"}
    METRICS = (
        *("critic_loss", "value_loss", "actor_loss", "entropy", "mean_advantage_weight"),
        *("qf_mean", "vf_mean", "advantage_mean"),
        *off_policy_metrics("actor", "critic", "value"),
    )

    config: IQLConfig

    def make_loss(self, config: IQLConfig) -> Loss:
        """Return the loss with a config's constants."""
        return partial(iql_loss, expectile=config.expectile, beta=config.beta, max_weight=config.max_advantage_weight)


def iql_loss(
    module: IQLModule,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    expectile: float,
    beta: float,
    max_weight: float,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    The loss is the sum of three losses. Each has gradients in the parameters of its own group only, so one backward
    pass computes all of them, with the values of before the update. The equations refer to arXiv:2110.06169.

    - State values, eq. 5: the expectile loss of the target critics' value of the recorded action, minus the state
      value. An error u costs u squared times the expectile if it is positive, and times one minus it otherwise.
    - Critics, eq. 6: half the mean squared error of each critic. The target is the discounted sum of the rewards and,
      where the episode did not terminate, the discounted state value of the next observation.
    - Actor, eq. 7: the negative log-likelihood of the recorded actions, each weighted by exp(beta * advantage).

    Args:
        module: Module with a policy, critics and state values.
        batch: Columns `[B, ...]` of a replay buffer, as tensors.
        coefficients: Not used.
        expectile: The expectile.
        beta: Weight of the advantages.
        max_weight: Largest weight of an action.
        outputs: Receives `q_taken`, `[C, B]`, and `targets`, `values`, `advantages`, `advantage_weights` and `logp`,
            `[B]`.

    Returns:
        The scalar to minimise, and what to report: scalars, and the column `td_error`, float32 `[B]`, the absolute
        errors averaged over the critics.
    """
    obs, actions, weights = batch["obs"], batch["actions"], batch["weights"]
    with torch.no_grad():
        target_q = module.q_taken(obs, actions, target=True).amin(0)
        next_values = module.value(batch["next_obs"])
        targets = batch["rewards"] + batch["discounts"] * (~batch["terminated"]) * next_values
    values = module.value(obs)
    errors = target_q - values
    sides = torch.where(errors.detach() > 0, expectile, 1 - expectile)
    value_loss = (weights * sides * errors.square()).mean()
    q_taken = module.q_taken(obs, actions)
    q_errors = q_taken - targets
    critic_loss = 0.5 * (weights * q_errors.square()).mean(-1).sum()
    dist_inputs = module.policy(obs)
    logp = module.distribution.logp(dist_inputs, actions)
    advantages = errors.detach()
    advantage_weights = (beta * advantages).exp().clamp(max=max_weight)
    actor_loss = -(weights * advantage_weights * logp).mean()
    if outputs is not None:
        outputs |= {"q_taken": q_taken, "targets": targets, "values": values, "advantages": advantages}
        outputs |= {"advantage_weights": advantage_weights, "logp": logp}
    return critic_loss + value_loss + actor_loss, {
        "critic_loss": critic_loss.detach(),
        "value_loss": value_loss.detach(),
        "actor_loss": actor_loss.detach(),
        "entropy": module.distribution.entropy(dist_inputs.detach()).mean(),
        "mean_advantage_weight": advantage_weights.mean(),
        "qf_mean": q_taken.detach().mean(),
        "vf_mean": values.detach().mean(),
        "advantage_mean": advantages.mean(),
        "td_error": q_errors.detach().abs().mean(0),
    }
