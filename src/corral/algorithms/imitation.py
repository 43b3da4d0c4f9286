"""Imitation of recorded actions, next to what an algorithm with a replay buffer learns otherwise.

`imitation_coeff` in `OffPolicyConfig` asks for it. Without it nothing here is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from corral.learners.losses import Batch, Loss
from corral.modules.distributions import ActionDistribution, Deterministic, SquashedGaussian
from corral.modules.module import Module


def with_imitation(loss: Callable[..., Any], *, in_values: bool) -> Loss:
    """Return a loss plus the loss of imitation, times the coefficient `imitation_coeff`.

    The batch has the column `recorded`, float32 `[B]`: 0 in rows that are not imitated, and in all others the number of
    rows of the whole batch per recorded row. So the mean over all rows is the mean over the recorded ones, also where
    each of several learners has a part of the batch. The loss also reports `imitation_loss`, this mean without
    coefficient. Where the coefficient is 0 nothing is computed.

    Args:
        loss: A loss that gives `q_taken` in its `outputs`, if `in_values`, and may give the policy's `dist_inputs`.
        in_values: Whether to report `mean_abs_q`, the mean absolute value of the batch.
    """
    return partial(_loss_with_imitation, base_loss=loss, in_values=in_values)


def _loss_with_imitation(
    module: Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    base_loss: Callable[..., Any],
    in_values: bool,
    outputs: dict[str, Tensor] | None = None,
    **settings: Any,
) -> tuple[Any, dict[str, Tensor]]:
    outputs = {} if outputs is None else outputs
    total, reported = base_loss(module, batch, coefficients, outputs=outputs, **settings)
    if in_values:
        reported = {**reported, "mean_abs_q": outputs["q_taken"].detach().abs().mean()}
    coefficient = coefficients["imitation_coeff"]
    if not coefficient or (isinstance(total, Mapping) and "actor" not in total):  # an update of the critics alone
        return total, reported
    actions: Any = batch["actions"]
    dist_inputs = outputs.get("dist_inputs")  # of the policy, where another pass would move running statistics
    if dist_inputs is None:
        dist_inputs = module.policy_for_learning(batch["obs"])
    shares: Any = batch["recorded"]
    imitation = (imitation_losses(module.distribution, dist_inputs, actions) * shares).mean()
    reported = {**reported, "imitation_loss": imitation.detach()}
    weighted = coefficient * imitation
    return ({**total, "actor": total["actor"] + weighted} if isinstance(total, Mapping) else total + weighted), reported


def imitation_losses(distribution: ActionDistribution, dist_inputs: Tensor, actions: Tensor) -> Tensor:
    """Return how far the policy is from recorded actions, float32 `[B]`.

    For Discrete actions it is the negative log-likelihood; action values count as logits. For Box actions it is the
    squared distance of the most likely action in [-1, 1], averaged over the entries: the likelihood of recorded actions
    at the bounds would grow without end.

    Args:
        distribution: Distribution of the policy.
        dist_inputs: Its inputs, `[B, D]`.
        actions: Recorded module actions, `[B, ...]`.
    """
    if isinstance(distribution, SquashedGaussian):
        modes = dist_inputs.chunk(2, -1)[0].tanh()
        return (modes - actions.reshape(modes.shape).tanh()).square().mean(-1)
    if isinstance(distribution, Deterministic):
        return (dist_inputs - actions.reshape(dist_inputs.shape)).square().mean(-1)
    return -distribution.logp(dist_inputs, actions)
