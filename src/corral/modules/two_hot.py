"""Numbers of any size as networks learn them (Hafner et al. 2023, arXiv:2301.04104): symlog, and logits over bins."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

LIMIT = 20.0
"""Largest number that the bins hold after symlog; it stands for about 5e8."""


def symlog(x: Tensor) -> Tensor:
    """Return `sign(x) * log(1 + |x|)`: close to x near 0, and a logarithm of large numbers of both signs."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """Return the inverse of `symlog`, `sign(x) * (exp(|x|) - 1)`."""
    return x.sign() * x.abs().expm1()


class TwoHotBins(nn.Module):
    """Bins at even distances after symlog, over which a network gives logits `[..., num_bins]`.

    A number is two-hot: the two bins next to it share a weight of 1, in proportion to how close they are.
    """

    bins: Tensor

    def __init__(self, num_bins: int = 255) -> None:
        """Make the bins, from -20 to 20."""
        super().__init__()
        self.step = 2 * LIMIT / (num_bins - 1)
        self.register_buffer("bins", torch.linspace(-LIMIT, LIMIT, num_bins), persistent=False)

    def mean(self, logits: Tensor) -> Tensor:
        """Return the numbers that logits `[..., num_bins]` stand for, `[...]`."""
        return symexp(logits.softmax(-1) @ self.bins)

    def cross_entropy(self, logits: Tensor, *numbers: Tensor) -> Tensor:
        """Return cross-entropies `[...]` of logits `[..., num_bins]` to two-hot numbers `[...]`, and sum them."""
        place = (symlog(torch.stack(numbers, -1)).clamp(-LIMIT, LIMIT) + LIMIT) / self.step
        lower = place.floor().clamp(max=len(self.bins) - 2)
        index = lower.long()
        low, high = logits.log_softmax(-1).gather(-1, torch.cat([index, index + 1], -1)).chunk(2, -1)
        return -torch.lerp(low, high, place - lower).sum(-1)


def mixed_logits(logits: Tensor, share: float = 0.01) -> Tensor:
    """Return log-probabilities of which `share` is uniform, `[..., n]`, so that no KL divergence is infinite."""
    return (logits.softmax(-1) * (1 - share) + share / logits.shape[-1]).log()


def one_hot(indices: Tensor, num_classes: int) -> Tensor:
    """Return one-hot vectors, float32 `[..., num_classes]`, of indices `[...]`."""
    return functional.one_hot(indices, num_classes).float()


def drawn(logp: Tensor, uniform: Tensor) -> Tensor:
    """Return indices `[...]` drawn from log-probabilities `[..., n]`, by uniform numbers `[...]` in [0, 1)."""
    below = logp.detach().exp().cumsum(-1) <= uniform.unsqueeze(-1)
    return below.sum(-1).clamp(max=logp.shape[-1] - 1)
