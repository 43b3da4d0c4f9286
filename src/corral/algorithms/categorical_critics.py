"""Losses of SAC and TD3 with critics that learn the distribution of the return over atoms.

The critics are trained as C51's (Bellemare et al. 2017, arXiv:1707.06887), by the cross-entropy to the projected
target; Lee et al. 2025 (arXiv:2502.15280) add them to SAC.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from corral.algorithms.dqn import projected
from corral.learners.losses import Batch
from corral.modules.categorical_critics import CategoricalSACModule, CategoricalTD3Module


def categorical_sac_loss(
    module: CategoricalSACModule,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    target_entropy: float | None,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    It is `corral.algorithms.sac.sac_loss` with another loss of the critics: the cross-entropy of each critic's
    distribution to the target, summed over the critics. The target has the distribution of the critic with the lowest
    mean at the next observation, its atoms minus the temperature times the log-likelihood there.

    Args:
        module: Module with a policy, distributions and a temperature.
        batch: Columns `[B, ...]` of a replay buffer, and `noise` and `next_noise`, as tensors.
        coefficients: Not used.
        target_entropy: Target of the entropy in nats; `None` is the module's `auto_target_entropy`.
        outputs: Receives `logits`, `[C, B, K]`, their means `q_taken`, `[C, B]`, the probabilities `targets`, `[B, K]`;
            the policy's `actions`, `[B, d]`, and their `logp`, `[B]`; and `actor_loss`, `[]`.

    Returns:
        The scalar to minimise, and what to report: scalars, and the column `td_error`, float32 `[B]`, the absolute
        difference of the means of targets and distributions, averaged over the critics.
    """
    alpha = module.log_alpha.detach().exp()
    with torch.no_grad():
        next_actions, next_logp = module.sample(batch["next_obs"], batch["next_noise"])
        next_logits = module.logits(batch["next_obs"], next_actions, target=True)
        targets = target_probs(batch, next_logits, module.atoms, alpha * next_logp)
    logits = module.logits(batch["obs"], batch["actions"].reshape(len(targets), -1).tanh())
    critic_loss = cross_entropy(batch, logits, targets)

    actions, logp = module.sample(batch["obs"], batch["noise"])
    with module.frozen_critics():
        actor_loss = (alpha * logp - module.q_values(batch["obs"], actions).amin(0)).mean()
    aim = module.auto_target_entropy(batch["obs"]) if target_entropy is None else target_entropy
    alpha_loss = module.log_alpha * (-logp.detach().mean() - aim)

    q_taken = logits.detach().softmax(-1) @ module.atoms
    if outputs is not None:
        outputs |= {"logits": logits, "q_taken": q_taken, "targets": targets}
        outputs |= {"actions": actions, "logp": logp, "actor_loss": actor_loss}
    losses = {"critic_loss": critic_loss, "actor_loss": actor_loss, "alpha_loss": alpha_loss, "alpha": alpha}
    reported = {name: loss.detach() for name, loss in losses.items()} | {"entropy": -logp.detach().mean()}
    return critic_loss + actor_loss + alpha_loss, reported | _reported_values(q_taken, targets @ module.atoms)


def categorical_td3_loss(
    module: CategoricalTD3Module,
    batch: Batch,
    coefficients: Mapping[str, float],
    *,
    target_noise: float,
    target_noise_clip: float,
    outputs: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses of a minibatch by group of parameters; a pure function of weights and columns.

    It is `corral.algorithms.td3.td3_loss` with the loss of the critics of `categorical_sac_loss`, without entropy.

    Args:
        module: Module with a policy, distributions, and targets of both.
        batch: Columns `[B, ...]` of a replay buffer, and `next_noise`, as tensors.
        coefficients: `actor_coeff`; with 0 the loss of the actor is not computed.
        target_noise: Standard deviation of the noise on the target actor's actions.
        target_noise_clip: Largest absolute value of this noise.
        outputs: Receives `logits`, `[C, B, K]`, their means `q_taken`, `[C, B]`, the probabilities `targets`, `[B, K]`,
            and the actor's `actions`, `[B, d]`, if its loss is computed.

    Returns:
        The scalars to minimise by group, `critic` and, if it is computed, `actor`; and what to report; see `td3_loss`.
    """
    with torch.no_grad():
        noise = (target_noise * batch["next_noise"]).clamp(-target_noise_clip, target_noise_clip)
        next_actions = (module.target_policy(batch["next_obs"]) + noise).clamp(-1, 1)
        next_logits = module.logits(batch["next_obs"], next_actions, target=True)
        targets = target_probs(batch, next_logits, module.atoms)
    logits = module.logits(batch["obs"], batch["actions"].reshape(len(targets), -1))
    losses = {"critic": cross_entropy(batch, logits, targets)}
    q_taken = logits.detach().softmax(-1) @ module.atoms
    outputs = {} if outputs is None else outputs
    outputs |= {"logits": logits, "q_taken": q_taken, "targets": targets}
    if coefficients["actor_coeff"]:
        outputs["actions"] = module.policy(batch["obs"])
        losses["actor"] = -(module.q[0](batch["obs"], outputs["actions"]).softmax(-1) @ module.atoms).mean()
    reported = {f"{name}_loss": loss.detach() for name, loss in losses.items()}
    return losses, reported | _reported_values(q_taken, targets @ module.atoms)


def target_probs(batch: Batch, next_logits: Tensor, atoms: Tensor, next_cost: Tensor | float = 0.0) -> Tensor:
    """Return the distribution of the target over the atoms, `[B, K]`.

    Args:
        batch: Columns with `rewards`, `discounts` and `terminated`, `[B]`.
        next_logits: Logits of each critic at the next observation, `[C, B, K]`; the critic with the lowest mean counts.
        atoms: Atoms, `[K]`.
        next_cost: What is subtracted from the returns at the next observation, `[B]`.
    """
    probs = next_logits.softmax(-1)
    lowest = (probs @ atoms).argmin(0)
    rows = torch.arange(probs.shape[1], device=probs.device)
    discounts = batch["discounts"] * (~batch["terminated"])
    constant = batch["rewards"] - discounts * next_cost
    return projected(constant[:, None] + discounts[:, None] * atoms, probs[lowest, rows], atoms)


def cross_entropy(batch: Batch, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the weighted mean of the cross-entropies of logits `[C, B, K]` to `[B, K]`, summed over the critics."""
    losses = -(targets * logits.log_softmax(-1)).sum(-1)
    loss: Tensor = (batch["weights"] * losses).mean(-1).sum()
    return loss


def _reported_values(q_taken: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return what to report of the values of the actions taken, `[C, B]`, and of their targets, `[B]`."""
    smallest, largest = q_taken.aminmax()
    td_error = (targets - q_taken).abs().mean(0)
    return {"qf_mean": q_taken.mean(), "qf_min": smallest, "qf_max": largest, "td_error": td_error}
