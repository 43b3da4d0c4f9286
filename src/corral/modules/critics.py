"""What critics have: a head, which says what their outputs stand for, and target networks that follow them slowly.

The outputs stand for the mean return, its quantiles, or its distribution over atoms. A head gives the values that they
mean, the targets of the critics, and their loss. `C` is the number of critics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = Mapping[str, Any]
Learned = tuple[Tensor, Tensor, Tensor]


class ScalarHead(nn.Module):
    """The mean return: outputs `[C, B]`, targets `[B]`.

    Args:
        scale: Factor of the squared error: 0.5 for SAC, 1 for TD3.

    Attributes:
        shape: Shape of what a critic gives for one observation and a Box action.
    """

    METHOD: ClassVar[str] = "q_values"
    """Method of the module that gives the outputs of all critics."""

    shape: tuple[int, ...] = ()

    def __init__(self, scale: float) -> None:
        """Keep the factor."""
        super().__init__()
        self.scale = scale

    def means(self, outputs: Tensor) -> Tensor:
        """Return the mean returns that outputs stand for, without the axis of the head."""
        return outputs

    def lowest(self, outputs: Tensor) -> Tensor:
        """Return a value `[B]` that does not overestimate: of all critics the lowest."""
        return outputs.amin(0)

    def sought(self, outputs: Tensor) -> Tensor:
        """Return the value `[B]` that the actor of SAC seeks."""
        return outputs.amin(0)

    def targets(self, batch: Batch, next_outputs: Tensor, next_cost: Tensor | None = None) -> Tensor:
        """Return the targets of the critics; a terminated step has no next value.

        Args:
            batch: Columns `rewards`, `discounts` and `terminated`, `[B]`.
            next_outputs: Outputs of the critics at the next observation.
            next_cost: What is subtracted from the value there, `[B]`: the temperature times the log-likelihood.
        """
        value = next_outputs.amin(0)
        value = value if next_cost is None else value - next_cost
        targets: Tensor = batch["rewards"] + batch["discounts"] * (~batch["terminated"]) * value
        return targets

    def learn(self, outputs: Tensor, targets: Tensor, weights: Tensor, *, huber: bool = False) -> Learned:
        """Return the mean squared error, times `scale`, or Huber's loss, summed over the critics; and what it is about.

        Args:
            outputs: Outputs of the critics for the actions taken.
            targets: Their targets.
            weights: Weights of the rows, `[B]`.
            huber: Whether the loss is linear for errors above 1, where the head has a choice.

        Returns:
            The loss; the mean returns of the actions taken, `[C, B]`; and the absolute errors, `[B]`, averaged over
            the critics.
        """
        errors = outputs - targets
        if huber:
            losses = functional.huber_loss(outputs, targets.expand_as(outputs), reduction="none")
        else:
            losses = self.scale * errors.square()
        return (weights * losses).mean(-1).sum(), outputs, errors.detach().abs().mean(0)


class QuantileHead(ScalarHead):
    """M quantiles of the return: outputs `[C, B, M]`, and targets `[B, K]`, which are quantiles of all critics.

    The largest quantiles of all critics together are dropped from the targets. The equations refer to Kuznetsov et al.
    2020, arXiv:2005.04269.

    Args:
        num_quantiles: Quantiles of each critic, M.
        num_dropped: Quantiles dropped for each critic; K is C times the number of quantiles that are left.
    """

    METHOD = "quantiles"

    def __init__(self, num_quantiles: int, num_dropped: int) -> None:
        """Keep the numbers."""
        super().__init__(1.0)
        self.shape, self.num_dropped = (num_quantiles,), num_dropped

    def kept(self, outputs: Tensor) -> Tensor:
        """Return the quantiles of all critics together without the largest ones, `[B, K]`, from the lowest on."""
        num_kept = len(outputs) * (self.shape[0] - self.num_dropped)
        return outputs.transpose(0, 1).flatten(1).sort(-1).values[:, :num_kept]

    def means(self, outputs: Tensor) -> Tensor:
        return outputs.mean(-1)

    def lowest(self, outputs: Tensor) -> Tensor:
        """Return the mean of the quantiles that are kept, `[B]`."""
        return self.kept(outputs).mean(-1)

    def sought(self, outputs: Tensor) -> Tensor:
        """Return the mean of all quantiles, `[B]` (eq. 13)."""
        return outputs.mean((0, 2))

    def targets(self, batch: Batch, next_outputs: Tensor, next_cost: Tensor | None = None) -> Tensor:
        """Return the rewards plus each discounted quantile that is kept (eqs. 9 and 10); see `ScalarHead.targets`."""
        kept, discounts = self.kept(next_outputs), batch["discounts"] * (~batch["terminated"])
        kept = kept if next_cost is None else kept - next_cost[:, None]
        targets: Tensor = batch["rewards"][:, None] + discounts[:, None] * kept
        return targets

    def learn(self, outputs: Tensor, targets: Tensor, weights: Tensor, *, huber: bool = False) -> Learned:
        """Return the loss of quantile regression, averaged over the critics (eq. 11); see `ScalarHead.learn`."""
        loss, means = (weights * quantile_huber_loss(outputs, targets).mean(0)).mean(), self.means(outputs)
        return loss, means, (targets.mean(-1) - means.detach()).abs().mean(0)


class AtomHead(ScalarHead):
    """The distribution of the return over atoms: outputs are logits `[C, B, K]`, targets are probabilities `[B, K]`.

    The critics are trained as C51's (Bellemare et al. 2017, arXiv:1707.06887), by the cross-entropy to the projected
    target; Lee et al. 2025 (arXiv:2502.15280) add them to SAC.

    Args:
        num_atoms: Number of atoms, K.
        v_min: Smallest atom.
        v_max: Largest atom.

    Attributes:
        atoms: Returns that the atoms represent, float32 `[K]`.
    """

    METHOD = "logits"
    atoms: Tensor

    def __init__(self, num_atoms: int, v_min: float, v_max: float) -> None:
        """Make the atoms."""
        super().__init__(1.0)
        self.shape = (num_atoms,)
        self.register_buffer("atoms", torch.linspace(v_min, v_max, num_atoms), persistent=False)

    def means(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1) @ self.atoms

    def lowest(self, outputs: Tensor) -> Tensor:
        return self.means(outputs).amin(0)

    sought = lowest

    def targets(self, batch: Batch, next_outputs: Tensor, next_cost: Tensor | None = None) -> Tensor:
        """Return the projected distribution of the critic with the lowest mean; see `ScalarHead.targets`."""
        probs = next_outputs.softmax(-1)
        lowest = (probs @ self.atoms).argmin(0)
        rows = torch.arange(probs.shape[1], device=probs.device)
        discounts = batch["discounts"] * (~batch["terminated"])
        constant = batch["rewards"] if next_cost is None else batch["rewards"] - discounts * next_cost
        return projected(constant[:, None] + discounts[:, None] * self.atoms, probs[lowest, rows], self.atoms)

    def learn(self, outputs: Tensor, targets: Tensor, weights: Tensor, *, huber: bool = False) -> Learned:
        """Return the cross-entropies to the targets, summed over the critics; see `ScalarHead.learn`."""
        losses, means = -(targets * outputs.log_softmax(-1)).sum(-1), self.means(outputs.detach())
        return (weights * losses).mean(-1).sum(), means, (targets @ self.atoms - means).abs().mean(0)


def quantile_huber_loss(quantiles: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of quantile regression with Huber's loss, `[C, B]`.

    It is eq. 10 of Dabney et al. 2018 (arXiv:1710.10044) with kappa 1. Quantile m of M stands for the
    fraction (m + 1/2) / M. The loss is the mean over the quantiles and over the targets.

    Args:
        quantiles: Quantiles of each critic, `[C, B, M]`.
        targets: Samples of the distribution that they approximate, `[B, K]`.
    """
    num_quantiles = quantiles.shape[-1]
    fractions = (torch.arange(num_quantiles, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / num_quantiles
    errors = targets[:, None, :] - quantiles[..., None]
    sizes = errors.abs()
    losses = torch.where(sizes > 1, sizes - 0.5, 0.5 * errors.square())
    weights = (fractions[:, None] - (errors.detach() < 0).to(errors.dtype)).abs()
    loss: Tensor = (weights * losses).mean((-2, -1))
    return loss


def projected(returns: Tensor, probs: Tensor, atoms: Tensor) -> Tensor:
    """Project a distribution over returns onto evenly spaced atoms, each return onto its two nearest atoms.

    Args:
        returns: Returns, float32 `[B, K]`; returns beyond the atoms count as the nearest atom.
        probs: Probabilities of the returns, float32 `[B, K]`.
        atoms: Increasing atoms, float32 `[K]`.

    Returns:
        Probabilities of the atoms, float32 `[B, K]`.
    """
    position = (returns.clamp(atoms[0], atoms[-1]) - atoms[0]) / (atoms[1] - atoms[0])
    position = position.clamp(0, len(atoms) - 1)  # rounding may exceed the ends
    lower = position.floor()
    above = position - lower
    upper = (lower + 1).clamp(max=len(atoms) - 1)
    moved = torch.zeros_like(probs)
    moved.scatter_add_(1, lower.long(), probs * (1 - above))
    moved.scatter_add_(1, upper.long(), probs * above)
    return moved


class Following:
    """Mixed into a `Module` with target networks: moves them towards the networks that they are copies of.

    Attributes:
        auto_tau: How far each gradient step moves them with `tau="auto"`.
    """

    auto_tau = 0.01
    _followed: tuple[list[Any], list[Any], list[tuple[nn.Module, nn.Module]]] | None = None

    def followed(self) -> dict[nn.Module, nn.Module]:
        """Return the network of each target network; a subclass with more of them adds its own."""
        raise NotImplementedError

    @torch.no_grad()
    def update_target(self, tau: float) -> None:
        """Move all targets by a fraction `tau` of the way, and copy all buffers; 1 copies the networks."""
        if self._followed is None:  # to find the parameters takes longer than to move them
            pairs = self.followed().items()
            parts = (part for pair in pairs for part in zip(*map(nn.Module.modules, pair), strict=True))
            self._followed = (
                [parameter for target, _ in pairs for parameter in target.parameters()],
                [parameter for _, network in pairs for parameter in network.parameters()],
                [(target, part) for target, part in parts if part._buffers],
            )
        targets, networks, with_buffers = self._followed
        torch._foreach_lerp_(targets, networks, tau)
        for target, part in with_buffers:  # a forward pass may have assigned new tensors to the buffers
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    target.get_buffer(name).copy_(buffer)
