"""Imitation of recorded actions, next to what an algorithm with a replay buffer learns otherwise.

`imitation_coeff` in `OffPolicyConfig` asks for it. Without it nothing here is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.learners.losses import Batch, Loss
from corral.learners.update import to_tensors
from corral.modules.distributions import ActionDistribution, Deterministic, SquashedGaussian
from corral.modules.module import Module


def with_imitation(loss: Callable[..., Any], *, in_values: bool) -> Loss:
    """Return a loss plus the loss of imitation, times the coefficient `imitation_coeff`.

    The batch has the column `recorded`, float32 `[B]`, from `recorded_weights`: only recorded rows are imitated. The
    loss also reports `imitation_loss`, the mean over them, without coefficient. Where the coefficient is 0 nothing is
    computed. Everything is a mean over rows, so that parts of a batch give the gradient of the whole.

    Args:
        loss: A loss that gives `q_taken` in its `outputs`, if `in_values`, and may give the policy's `dist_inputs`.
        in_values: Whether the policy seeks values, so that imitation is multiplied by the coefficient
            `imitation_unit`, the mean absolute value in the update before. A coefficient of 0.4 is then TD3+BC with its
            alpha of 2.5 (Fujimoto and Gu 2021, arXiv:2106.06860, eqs. 3 and 5). The loss then reports
            `imitation_unit`, for the next update. If actions are chosen by their values themselves, nothing multiplies
            it.
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
    coefficient = coefficients["imitation_coeff"]
    if coefficient and in_values:
        reported = {**reported, "imitation_unit": outputs["q_taken"].detach().abs().mean()}
    if not coefficient or (isinstance(total, Mapping) and "actor" not in total):  # an update of the critics alone
        return total, reported
    actions: Any = batch["actions"]
    dist_inputs = outputs.get("dist_inputs")  # of the policy, where another pass would move running statistics
    if dist_inputs is None:
        dist_inputs = module.policy_for_learning(batch["obs"])
    losses = imitation_losses(module.distribution, dist_inputs, actions)
    imitation = (losses * batch["recorded"]).mean()
    reported = {**reported, "imitation_loss": imitation.detach()}
    weighted = coefficient * coefficients.get("imitation_unit", 1.0) * imitation
    return ({**total, "actor": total["actor"] + weighted} if isinstance(total, Mapping) else total + weighted), reported


def recorded_weights(is_recorded: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the column `recorded`, float32 `[B]`, with which a mean over all rows is a mean over recorded rows.

    Args:
        is_recorded: Which rows are recorded, bool `[B]`.
    """
    return is_recorded.astype(np.float32) * np.float32(len(is_recorded) / max(1, np.count_nonzero(is_recorded)))


def mean_value(
    loss: Callable[..., Any], module: Module, batch: Batch, coefficients: Mapping[str, float]
) -> float:
    """Return the mean absolute value of the actions in a batch, before a first update has reported it.

    Args:
        loss: What `with_imitation` returned.
        module: The module, which does not change.
        batch: Columns `[B, ...]` as the loss expects them, arrays or tensors.
        coefficients: Coefficients of the loss.
    """
    outputs: dict[str, Tensor] = {}
    was_training, device = module.training, next(module.parameters()).device
    with torch.no_grad():
        module.eval()  # running statistics stay as they are
        loss(module, to_tensors(batch, device), {**coefficients, "imitation_coeff": 0.0}, outputs=outputs)
        module.train(was_training)
    return float(outputs["q_taken"].abs().mean())


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
